"""NCCL_DEBUG=INFO logs: rings, channels, versions, QP numbers, NCCL's choices, and what must be refused.

    parse_log(text) -> LogFacts           merge(facts, ...) for the logs of several ranks

Pure over any text: lines that are not understood are skipped, numbers are bounded, nothing raises. Line forms:
nccl-wire.md 6.3. A log does not tie a channel to a QP number, so it completes the traffic, it does not replace it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["LogFacts", "merge", "parse_log"]

LINES_MAX = 1 << 20
LINE_MAX = 4096
RANKS_MAX = 65536
CHANNELS_MAX = 64

_PREFIX = re.compile(r"(?P<who>[^\s:]+:\d+):\d+\s+\[-?\d+\]\s+NCCL\s+(?:INFO|WARN|TRACE)\s+(?P<text>.*)")
_VERSION = re.compile(r"NCCL version (\d{1,2}\.\d{1,2}\.\d{1,3})\b")
_RANK = re.compile(r"\brank (\d{1,6}) n[rR]anks (\d{1,6})\b")
_CHANNEL_RING = re.compile(r"^Channel (\d{1,3})/(\d{1,3}) ?:((?:\s+\d{1,6})+)\s*(\.\.\.)?\s*$")
_RING = re.compile(r"^Ring (\d{1,3}) : (\d{1,6}) -> (\d{1,6}) -> (\d{1,6})")
_QPN = re.compile(r"NET/IB ?:.*?\bqpn (\d{1,8})\b|QP created:.*?qp_num=(\d{1,8})")
_COLL = re.compile(r"(\d{1,3}) coll channels, \d{1,3} (?:collnet|nvls|fixed nvls) channels")
_CHOICE = re.compile(r"(?:(\w+): )?(\d{1,18}) Bytes -> Algo (\w+) proto (\w+)")
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
    for line in text.splitlines()[:LINES_MAX]:
        version = _VERSION.search(line[:LINE_MAX])
        if version:
            facts.saw_version(version[1])
        match = _PREFIX.search(line[:LINE_MAX])
        if match is None:
            continue
        process, said = match["who"], match["text"].strip()
        rank = _RANK.search(said)
        if rank and int(rank[1]) < int(rank[2]) <= RANKS_MAX:
            ranks.setdefault(process, int(rank[1]))
            facts.ranks = max(facts.ranks, int(rank[2]))
        qpn = _QPN.search(said)
        if qpn and "set_ece=" not in said:  # 2.20 to 2.26 print the peer's number there
            named.append((process, int(qpn[1] or qpn[2])))
        _ring(facts, said)
        _settings(facts, said)
        _choice(facts, said)
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
    whole, edge, counted = _CHANNEL_RING.match(said), _RING.match(said), _COLL.search(said)
    if whole and int(whole[1]) < CHANNELS_MAX and not whole[4]:
        ring = [int(word) for word in whole[3].split()]
        if len(ring) > 1 and sorted(ring) == list(range(len(ring))):
            facts.edges.setdefault(int(whole[1]), {}).update(zip(ring, ring[1:] + ring[:1], strict=True))
            facts.channels = max(facts.channels, min(int(whole[2]), CHANNELS_MAX))
    elif edge and int(edge[1]) < CHANNELS_MAX:
        before, me, after = int(edge[2]), int(edge[3]), int(edge[4])
        facts.edges.setdefault(int(edge[1]), {}).update({before: me, me: after})
    elif counted:
        facts.channels = max(facts.channels, min(int(counted[1]), CHANNELS_MAX))


def _settings(facts: LogFacts, said: str) -> None:
    lowered = said.lower()
    if "registered" in lowered and "buffer" in lowered and ("net" in lowered or "ub" in lowered.split()):
        facts.refuse(
            "NCCL registers user buffers for the network: writes then go into tensors, not into the slots that are "
            "followed here", "run the job with NCCL_LOCAL_REGISTER=0 and NCCL_GRAPH_REGISTER=0",
        )
    if "using network " in lowered:
        name = said.split("etwork", 1)[1].split()[:1]
        if name and name[0].strip(".") not in NETWORKS:
            facts.refuse(
                f"the job's network is {name[0][:40]!r}, not RDMA over IB verbs: its wire format is another one",
                "run the job with NCCL_NET=IB",
            )


def _choice(facts: LogFacts, said: str) -> None:
    chosen = _CHOICE.search(said)
    if chosen is None:
        return
    algorithm = ALGORITHMS.get(chosen[3].upper(), chosen[3][:20])
    protocol = PROTOCOLS.get(chosen[4].upper(), chosen[4][:20])
    facts.choices.append((chosen[1] or "", int(chosen[2]), algorithm, protocol))
    if algorithm in SWITCHES:
        facts.refuse(
            f"NCCL chose {algorithm} for {chosen[1] or 'a call'} of {chosen[2]} bytes, which puts no ring or tree "
            "of this wire model on the network", f"run the job with NCCL_{SWITCHES[algorithm]}_ENABLE=0",
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
