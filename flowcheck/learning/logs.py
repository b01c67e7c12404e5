"""NCCL_DEBUG=INFO logs: rings, channels, versions, QP numbers, NCCL's choices, and what must be refused.

    parse_log(text) -> LogFacts           merge(facts, ...) for the logs of several ranks

Lines are read by flowcheck/job/nccl_lines.py, which has their forms. Pure over any text: lines that are not understood
are skipped, numbers are bounded, nothing raises. A log does not tie a channel to a QP number, so it completes the
traffic, it does not replace it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flowcheck.job.nccl_lines import (
    CHANNELS_MAX,
    LINE_MAX,
    LINES_MAX,
    RANKS_MAX,
    channels_in,
    choice_in,
    comm_in,
    edge_in,
    line_of,
    network_in,
    order_in,
    queue_pair_in,
    registers_buffers,
    version_in,
)

__all__ = ["LogFacts", "merge", "parse_log"]

NETWORKS = ("IB", "IBext", "IBext_v7", "IBext_v8", "IBext_v9", "IBext_v10")
# NCCL names its choices by number or by word.
ALGORITHMS = {
    "0": "tree", "1": "ring", "2": "collnet direct", "3": "collnet chain", "4": "NVLS", "5": "NVLS tree", "6": "PAT",
    "TREE": "tree", "RING": "ring", "COLLNET_DIRECT": "collnet direct", "COLLNET_CHAIN": "collnet chain",
    "NVLS": "NVLS", "NVLS_TREE": "NVLS tree", "PAT": "PAT",
}
PROTOCOLS = {"0": "ll", "1": "ll128", "2": "simple", "LL": "ll", "LL128": "ll128", "SIMPLE": "simple"}
SWITCHES = {
    "NVLS": "NVLS", "NVLS tree": "NVLS", "collnet direct": "COLLNET", "collnet chain": "COLLNET", "PAT": "PAT",
}


@dataclass
class LogFacts:
    """rings: per channel, in ring order; edges: of those not closed yet, rank -> the next. choices: (function or "",
    bytes, algorithm, protocol) as NCCL chose. qpns: rank -> QP numbers it named. refused: (reason, remedy)."""

    version: str = ""
    ranks: int = 0
    channels: int = 0
    rings: list[list[int]] = field(default_factory=list)
    edges: dict[int, dict[int, int]] = field(default_factory=dict)
    qpns: dict[int, set[int]] = field(default_factory=dict)
    choices: list[tuple[str, int, str, str]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)

    def ranks_of_addresses(self, ends: Iterable[tuple[str, int]]) -> dict[str, int]:
        """Address -> rank, where the QP numbers seen at an address are all in one rank's log and in no other's."""
        at: dict[str, set[int]] = {}
        for address, qpn in ends:
            at.setdefault(address, set()).add(qpn)
        out: dict[str, int] = {}
        for address, numbers in at.items():
            fitting = [rank for rank, known in self.qpns.items() if numbers <= known]
            if len(fitting) == 1:
                out[address] = fitting[0]
        return out if len(set(out.values())) == len(out) else {}

    def refuse(self, reason: str, remedy: str) -> None:
        if (reason, remedy) not in self.refused:
            self.refused.append((reason, remedy))

    def saw_version(self, text: str) -> None:
        if self.version and self.version != text:
            self.refuse(
                f"the logs name two NCCL versions, {self.version} and {text}", "give the logs of one job only"
            )
        self.version = self.version or text


def parse_log(text: str) -> LogFacts:
    """Facts of one log, of one rank or of many. Only the first communicator of each process counts as its rank."""
    facts = LogFacts()
    ranks: dict[str, int] = {}
    named: list[tuple[str, int]] = []
    for text_of_line in text.splitlines()[:LINES_MAX]:
        version = version_in(text_of_line[:LINE_MAX])
        if version is not None:
            facts.saw_version(version)
        line = line_of(text_of_line[:LINE_MAX])
        if line is None:
            continue
        comm = comm_in(line.said)
        if comm is not None and comm.rank < comm.ranks <= RANKS_MAX:
            ranks.setdefault(line.process, comm.rank)
            facts.ranks = max(facts.ranks, comm.ranks)
        made = queue_pair_in(line.said)
        if made is not None:
            named.append((line.process, made.number))
        _ring(facts, line.said)
        _settings(facts, line.said)
        _choice(facts, line.said)
    for process, number in named:
        if process in ranks and 0 < number < 1 << 24:
            facts.qpns.setdefault(ranks[process], set()).add(number)
    _close(facts)
    return facts


def merge(parts: Iterable[LogFacts]) -> LogFacts:
    """The logs of several ranks as one."""
    out = LogFacts()
    for part in parts:
        if part.version:
            out.saw_version(part.version)
        out.ranks = max(out.ranks, part.ranks)
        out.channels = max(out.channels, part.channels)
        out.rings = out.rings or part.rings
        for channel, edges in part.edges.items():
            out.edges.setdefault(channel, {}).update(edges)
        for rank, numbers in part.qpns.items():
            out.qpns.setdefault(rank, set()).update(numbers)
        out.choices += part.choices
        for reason, remedy in part.refused:
            out.refuse(reason, remedy)
    _close(out)
    return out


def _ring(facts: LogFacts, said: str) -> None:
    order, edge, count = order_in(said), edge_in(said), channels_in(said)
    if order is not None:
        ring = order.ring
        if order.whole and order.channel < CHANNELS_MAX and len(ring) > 1 and sorted(ring) == list(range(len(ring))):
            facts.edges.setdefault(order.channel, {}).update(zip(ring, ring[1:] + ring[:1], strict=True))
            facts.channels = max(facts.channels, min(order.channels, CHANNELS_MAX))
    elif edge is not None and edge.channel < CHANNELS_MAX:
        facts.edges.setdefault(edge.channel, {}).update({edge.before: edge.me, edge.me: edge.after})
    elif count is not None:
        facts.channels = max(facts.channels, min(count, CHANNELS_MAX))


def _settings(facts: LogFacts, said: str) -> None:
    if registers_buffers(said):
        facts.refuse(
            "NCCL registers user buffers for the network: writes then go into tensors, not into the slots that are "
            "followed here", "run the job with NCCL_LOCAL_REGISTER=0 and NCCL_GRAPH_REGISTER=0",
        )
    name = (network_in(said) or "").split()[:1]
    if name and name[0].strip(".") not in NETWORKS:
        facts.refuse(
            f"the job's network is {name[0][:40]!r}, not RDMA over IB verbs: its wire format is another one",
            "run the job with NCCL_NET=IB",
        )


def _choice(facts: LogFacts, said: str) -> None:
    chosen = choice_in(said)
    if chosen is None:
        return
    algorithm = ALGORITHMS.get(chosen.algorithm.upper(), chosen.algorithm[:20])
    protocol = PROTOCOLS.get(chosen.protocol.upper(), chosen.protocol[:20])
    facts.choices.append((chosen.function, chosen.nbytes, algorithm, protocol))
    if algorithm in SWITCHES:
        facts.refuse(
            f"NCCL chose {algorithm} for {chosen.function or 'a call'} of {chosen.nbytes} bytes, which puts no ring or "
            "tree of this wire model on the network", f"run the job with NCCL_{SWITCHES[algorithm]}_ENABLE=0",
        )


def _close(facts: LogFacts) -> None:
    """Rings from edges, if every channel's edges close."""
    if facts.rings or not facts.edges:
        return
    rings = []
    for following in (facts.edges[channel] for channel in sorted(facts.edges)):
        ring, at = [0], following.get(0)
        while at is not None and at != 0 and len(ring) <= len(following):
            ring.append(at)
            at = following.get(at)
        if at != 0 or sorted(ring) != list(range(len(ring))) or (facts.ranks and len(ring) != facts.ranks):
            return
        rings.append(ring)
    if sorted(facts.edges) == list(range(len(rings))):
        facts.rings = rings
        facts.channels = max(facts.channels, len(rings))
