"""NCCL_DEBUG=INFO logs: rings, trees, channels, versions, QP numbers, settings, and what must be refused.

    parse_log(text) -> LogFacts           merge(facts, ...) for the logs of several ranks

Pure over any text: lines that are not understood are skipped, numbers are bounded, nothing raises. Line forms:
nccl-wire.md 6.3. A log does not tie a channel to a QP number, so it completes the traffic, it does not replace it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["LogFacts", "merge", "parse_log"]

LINES_MAX = 1 << 20
LINE_MAX = 4096
RANKS_MAX = 65536
CHANNELS_MAX = 64

_PREFIX = re.compile(r"(?P<who>[^\s:]+:\d+:\d+)\s+\[(?P<gpu>-?\d+)\]\s+NCCL\s+(?:INFO|WARN|TRACE)\s+(?P<text>.*)")
_VERSION = re.compile(r"NCCL version (\d{1,2}\.\d{1,2}\.\d{1,3})\b")
_RANK = re.compile(r"\brank (\d{1,6}) n[rR]anks (\d{1,6})\b")
_RANK_SHORT = re.compile(r"comm 0x[0-9a-f]+ rank (\d{1,6}) nranks (\d{1,6})")
_CHANNEL_RING = re.compile(r"^Channel (\d{1,3})/(\d{1,3}) ?:((?:\s+\d{1,6})+)\s*(\.\.\.)?\s*$")
_RING = re.compile(r"^Ring (\d{1,3}) : (\d{1,6}) -> (\d{1,6}) -> (\d{1,6})")
_TREE = re.compile(r"^Tree (\d{1,3}) : (-?\d{1,6}) -> (\d{1,6}) -> (-?\d{1,6})/(-?\d{1,6})/(-?\d{1,6})")
_TREES = re.compile(r"\[(\d{1,3})\] (-?\d{1,6})/(-?\d{1,6})/(-?\d{1,6})->(\d{1,6})->(-?\d{1,6})")
_QPN = re.compile(r"NET/IB ?:.*?\bqpn (\d{1,8})\b(?:.*?\bmtu (\d{1,2})\b)?")
_QP_CREATED = re.compile(r"QP created:.*?qp_num=(\d{1,8})")
_COLL = re.compile(
    r"(\d{1,3}) coll channels, (\d{1,3}) (?:collnet|nvls|fixed nvls) channels(?:, (\d{1,3}) nvls channels)?"
)
_ENV = re.compile(r"\b(NCCL_[A-Z0-9_]+) set by environment to ([^\s]+?)\.?$")
_ALGO = re.compile(r"(?:(\w+): )?(\d{1,18}) Bytes -> Algo (\w+) proto (\w+)")
_CALL = re.compile(
    r"^(\w+): opCount ([0-9a-f]{1,16}) sendbuff .*? count (\d{1,18}) datatype (\d{1,2}) op (\d) root (\d{1,6})"
)
ALGORITHMS = {"0": "tree", "1": "ring", "2": "collnet direct", "3": "collnet chain", "4": "NVLS", "5": "NVLS tree",
              "6": "PAT"}
PROTOCOLS = {"0": "ll", "1": "ll128", "2": "simple"}
_WORDS = {"TREE": "tree", "RING": "ring", "COLLNET_DIRECT": "collnet direct", "COLLNET_CHAIN": "collnet chain",
          "NVLS": "NVLS", "NVLS_TREE": "NVLS tree", "PAT": "PAT", "LL": "ll", "LL128": "ll128",
          "SIMPLE": "simple"}

_SWITCH_OFF = {
    "NVLS": "run the job with NCCL_NVLS_ENABLE=0", "NVLS tree": "run the job with NCCL_NVLS_ENABLE=0",
    "collnet direct": "run the job with NCCL_COLLNET_ENABLE=0",
    "collnet chain": "run the job with NCCL_COLLNET_ENABLE=0", "PAT": "run the job with NCCL_PAT_ENABLE=0",
}


@dataclass
class LogFacts:
    """rings: per channel, in ring order. refused: (reason, remedy). choices: (function or "", bytes, algorithm,
    protocol) as NCCL chose. qpns: rank -> QP numbers it named. trees: (channel, rank) -> (up, down ...)."""

    version: str = ""
    ranks: int = 0
    channels: int = 0
    rings: list[list[int]] = field(default_factory=list)
    edges: dict[int, dict[int, int]] = field(default_factory=dict)
    trees: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    qpns: dict[int, set[int]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    choices: list[tuple[str, int, str, str]] = field(default_factory=list)
    calls: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    refused: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def ranks_of_addresses(self, ends: Iterable[tuple[str, int | None]]) -> dict[str, int]:
        """Address -> rank, where the QP numbers seen at an address are all in one rank's log and in no other's."""
        at: dict[str, set[int]] = {}
        for address, qpn in ends:
            if qpn is not None:
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


def parse_log(text: str) -> LogFacts:
    """Facts of one log, of one rank or of many. Only the first communicator of each process counts as its rank."""
    facts = LogFacts()
    ranks: dict[str, int] = {}
    pending: list[tuple[str, int]] = []
    for line in text.splitlines()[:LINES_MAX]:
        match = _PREFIX.search(line[:LINE_MAX])
        if match is None:
            version = _VERSION.search(line[:LINE_MAX])
            if version:
                _version(facts, version[1])
            continue
        who, said = match["who"], match["text"].strip()
        process = who.rsplit(":", 1)[0]
        version = _VERSION.search(said)
        if version:
            _version(facts, version[1])
        rank = _RANK.search(said) or _RANK_SHORT.search(said)
        if rank and int(rank[1]) < int(rank[2]) <= RANKS_MAX:
            ranks.setdefault(process, int(rank[1]))
            facts.ranks = max(facts.ranks, int(rank[2]))
        qpn = _QPN.search(said) or _QP_CREATED.search(said)
        if qpn and len(pending) < LINES_MAX:
            pending.append((process, int(qpn[1])))
        _topology(facts, said)
        _settings(facts, said)
        _choice(facts, said)
    for process, number in pending:
        if process in ranks and 0 < number < 1 << 24:
            facts.qpns.setdefault(ranks[process], set()).add(number)
    _close(facts)
    return facts


def merge(parts: Iterable[LogFacts]) -> LogFacts:
    """The logs of several ranks as one."""
    out = LogFacts()
    for part in parts:
        if part.version:
            _version(out, part.version)
        out.ranks = max(out.ranks, part.ranks)
        out.channels = max(out.channels, part.channels)
        out.rings = out.rings or part.rings
        for channel, edges in part.edges.items():
            out.edges.setdefault(channel, {}).update(edges)
        out.trees.update(part.trees)
        for rank, numbers in part.qpns.items():
            out.qpns.setdefault(rank, set()).update(numbers)
        out.environment.update(part.environment)
        out.choices += part.choices
        out.calls += part.calls
        out.notes += part.notes
        for reason, remedy in part.refused:
            out.refuse(reason, remedy)
    _close(out)
    return out


def _version(facts: LogFacts, text: str) -> None:
    if facts.version and facts.version != text:
        facts.refuse(
            f"the logs name two NCCL versions, {facts.version} and {text}", "give the logs of one job only"
        )
    facts.version = facts.version or text


def _topology(facts: LogFacts, said: str) -> None:
    whole = _CHANNEL_RING.match(said)
    if whole and int(whole[1]) < CHANNELS_MAX and not whole[4]:
        ring = [int(word) for word in whole[3].split()]
        if len(ring) > 1 and sorted(ring) == list(range(len(ring))):
            channel = int(whole[1])
            edges = facts.edges.setdefault(channel, {})
            edges.update(zip(ring, ring[1:] + ring[:1], strict=True))
            facts.channels = max(facts.channels, min(int(whole[2]), CHANNELS_MAX))
        return
    edge = _RING.match(said)
    if edge and int(edge[1]) < CHANNELS_MAX:
        before, me, after = int(edge[2]), int(edge[3]), int(edge[4])
        channel_edges = facts.edges.setdefault(int(edge[1]), {})
        channel_edges[before], channel_edges[me] = me, after
        return
    tree = _TREE.match(said)
    if tree:
        facts.trees[int(tree[1]), int(tree[3])] = (int(tree[2]), int(tree[4]), int(tree[5]), int(tree[6]))
    if said.startswith("Trees "):
        for c, d0, d1, d2, me, up in _TREES.findall(said):
            facts.trees[int(c), int(me)] = (int(up), int(d0), int(d1), int(d2))
    counted = _COLL.search(said)
    if counted:
        facts.channels = max(facts.channels, min(int(counted[1]), CHANNELS_MAX))
        nvls = int(counted[3] or 0) if "collnet channels" in said else int(counted[2])
        if "collnet channels" in said and int(counted[2]):
            facts.notes.append(f"{counted[2]} CollNet channels are set up; they are refused where they are used")
        if nvls:
            facts.notes.append(f"{nvls} NVLS channels are set up; they are refused where they are used")


def _settings(facts: LogFacts, said: str) -> None:
    env = _ENV.search(said)
    if env and len(facts.environment) < 1024:
        facts.environment[env[1]] = env[2]
    lowered = said.lower()
    if "collnet" in lowered and "plugin" in lowered and "assigned to comm" in lowered:
        facts.notes.append("a collnet plugin is loaded")
    if "registered" in lowered and "buffer" in lowered and ("net" in lowered or "ub" in lowered.split()):
        facts.refuse(
            "NCCL registers user buffers for the network: writes then go into tensors, not into the slots that are "
            "followed here", "run the job with NCCL_LOCAL_REGISTER=0 and NCCL_GRAPH_REGISTER=0",
        )
    if "using network " in lowered:
        name = said.split("etwork", 1)[1].split()[:1]
        if name and name[0].strip(".") not in ("IB", "IBext", "IBext_v7", "IBext_v8", "IBext_v9", "IBext_v10"):
            facts.refuse(
                f"the job's network is {name[0][:40]!r}, not RDMA over IB verbs: its wire format is another one",
                "run the job with NCCL_NET=IB",
            )


def _choice(facts: LogFacts, said: str) -> None:
    chosen = _ALGO.search(said)
    if chosen and len(facts.choices) < LINES_MAX:
        algorithm = ALGORITHMS.get(chosen[3], _WORDS.get(chosen[3].upper(), chosen[3][:20]))
        protocol = PROTOCOLS.get(chosen[4], _WORDS.get(chosen[4].upper(), chosen[4][:20]))
        facts.choices.append((chosen[1] or "", int(chosen[2]), algorithm, protocol))
        if algorithm in _SWITCH_OFF:
            facts.refuse(
                f"NCCL chose {algorithm} for {chosen[1] or 'a call'} of {chosen[2]} bytes, which puts no ring or tree "
                "of this wire model on the network", _SWITCH_OFF[algorithm],
            )
    call = _CALL.match(said)
    if call and len(facts.calls) < 4096:
        facts.calls[call[1], int(call[3]), int(call[4])] += 1


def _close(facts: LogFacts) -> None:
    """Rings from edges, if every channel's edges close."""
    if facts.rings or not facts.edges:
        return
    rings = []
    for channel in sorted(facts.edges):
        following = facts.edges[channel]
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
