"""Learning a job: captures, logs and hints in, a manifest with the reasons for every part of it out.

    learn(captures, ...) -> Learnt        through DPDK; raises UserError, EnvironmentProblem
    learn_from(Facts) -> Learnt           the same from traced packets: pure but for fetching payloads

Every possible topology (topology.py) of every possible NCCL family is held against every observed message (walk.py,
announced.py, bare.py). One explanation is a result, none or several are a refusal that names them: a gradient placed
on a guess would look like any other.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flowcheck.errors import UserError
from flowcheck.jobplan import plan_job
from flowcheck.learn.announced import announced
from flowcheck.learn.bare import bare
from flowcheck.learn.bootstrap import Bootstrap, BootstrapFlow
from flowcheck.learn.check import check_plan, modified_nccl
from flowcheck.learn.hints import Hints, optimizer_of
from flowcheck.learn.logs import LogFacts
from flowcheck.learn.program import Failure, Program, replayed
from flowcheck.learn.reasons import DEFAULT_SLOTS, Found, Item, items_of, missing_of
from flowcheck.learn.topology import Layout, layouts, versions_of
from flowcheck.learn.traffic import Connection, head_flags
from flowcheck.learn.walk import Reader, Walk, Wire
from flowcheck.manifest import Collective, Communicator, Flow, Gradients, Job
from parser.wire import Topology, WireError

__all__ = ["Facts", "Item", "Learnt", "learn_from"]

Search = Callable[[Walk, Hints, Reader, Failure], Iterator[Program]]
REGIONS_MAX = 24  # 8 slots in each protocol's buffer


@dataclass(frozen=True)
class Facts:
    """What was read of captures and logs. read: fetches payloads. encrypted: MACsec or ESP frames."""

    connections: list[Connection]
    bootstrap: Bootstrap
    log: LogFacts
    read: Reader
    encrypted: int = 0


@dataclass
class Learnt:
    job: Job
    items: list[Item]
    missing: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"items": [vars(item) for item in self.items], "missing": list(self.missing)}


def learn_from(facts: Facts, hints: Hints) -> Learnt:
    """Raises UserError: what cannot be supported, what cannot be explained, what has two explanations."""
    _refuse(facts)
    failure = Failure()
    found: list[Found] = []
    groups = layouts(facts.connections, facts.bootstrap, facts.log, hints)
    for group in groups:
        if not group:
            continue
        _check_group(group[0])
        _refuse_modified(group)
    # AllReduce calls alone explain less than DDP's announcements, and are looked for only where there are none
    for search in (announced, bare):
        found = found or [f for g in groups for layout in g for f in _explained(layout, facts, hints, failure, search)]
    if not found:
        raise _unexplained(failure)
    chosen = _only(found)
    _only_ring(chosen, next(group for group in groups if chosen.layout in group))
    job = _job(chosen, facts, hints)
    check_plan(plan_job(job), [*chosen.layout.wires])
    return Learnt(job, items_of(chosen, job, facts.log, hints), missing_of(chosen, job))


# -- refusals --------------------------------------------------------------------------------------------


def _refuse(facts: Facts) -> None:
    for reason, remedy in facts.log.refused:
        raise UserError(reason, where="NCCL's log", remedy=remedy)
    for _, graph, src, dst in facts.bootstrap.connected:
        if graph.startswith(("collnet", "NVLS")):
            raise UserError(
                f"rank {src} -> {dst}: connections of the {graph} graph, whose data is reduced in the network",
                where="NCCL's bootstrap", remedy="run the job with NCCL_COLLNET_ENABLE=0 and NCCL_NVLS_ENABLE=0",
            )  # fmt: skip
    if facts.encrypted and not facts.connections:
        raise UserError(
            f"the traffic is encrypted: {facts.encrypted} MACsec or IPsec frames and no RoCEv2 write",
            remedy="mirror behind the decryption, or switch it off for the mirrored ports",
        )


def _check_group(layout: Layout) -> None:
    for wire in layout.wires:
        c = wire.connection
        if c.whole == 0:
            raise UserError(
                "the capture begins in mid-stream: the calls before it are not known, so neither is the position",
                where=c.name(),
                remedy="capture from the job's start, or give the manifest of this job with --job",
            )
        if c.split:
            raise UserError(
                "messages are split over several QPs of a connection, which learning does not follow", where=c.name(),
                remedy="give a manifest with --job, or run the job with NCCL_IB_QPS_PER_CONNECTION=1",
            )  # fmt: skip
        places = {(m.rkey, m.va) for m in c.messages if m.size}
        if len(places) > REGIONS_MAX:
            raise UserError(
                f"its writes go to {len(places)} addresses, more than the slots of NCCL's buffers: registered user "
                "buffers", where=c.name(),
                remedy="run the job with NCCL_LOCAL_REGISTER=0 and NCCL_GRAPH_REGISTER=0",
            )  # fmt: skip


def _refuse_modified(group: list[Layout]) -> None:
    for layout in group:
        modified = modified_nccl(layout)
        if modified:
            raise UserError(
                f"{modified}: a modified NCCL (2n-1 sends per loop instead of 2n-2)",
                where=layout.wires[0].connection.name(), remedy="run the job with NCCL as released",
            )  # fmt: skip


def _unexplained(failure: Failure) -> UserError:
    return UserError(
        "no program of calls explains all messages; the best one stops here: " + (failure.text or "nothing fits"),
        remedy="give a manifest with --job (docs/manifest.md), or hints: --dtype, --buckets, --rank, --nccl-log",
    )


def _only(found: list[Found]) -> Found:
    """The explanation, if all are the same in everything that places a byte."""
    first = found[0]
    for other in found[1:]:
        if _key(other) == _key(first):
            continue
        differ = [f for f in found if _key(f) != _key(first)]
        names = [first, *differ]
        texts = list(dict.fromkeys(_described(f) for f in names))
        if len(texts) == 1:  # same calls, other layout
            texts = list(dict.fromkeys(f"{_described(f)} as NCCL {f.topology.version} lays them out" for f in names))
        raise UserError(
            f"{len(texts)} explanations fit every message, and nothing decides between them: (1) {texts[0]} "
            f"(2) {texts[-1]}",
            remedy="say which with --dtype, --buckets, --rank or --nccl-version, give NCCL's log with --nccl-log, "
            "capture the TCP bootstrap too, or give a manifest with --job",
        )  # fmt: skip
    return first


def _only_ring(chosen: Found, siblings: list[Layout]) -> None:
    """Each channel may have its own ring order: would another one explain a single channel as well?"""
    layout, topology = chosen.layout, chosen.topology
    if len({w.channel for w in layout.wires}) < 2 or len(siblings) < 2:
        return
    base = _walk(chosen, list(layout.wires), topology)
    replayed(base, chosen.program)
    for other in siblings:
        rings = other.rings * topology.channels if len(other.rings) == 1 else other.rings
        if other.ranks != layout.ranks or rings == topology.rings:
            continue
        for channel in sorted({w.channel for w in layout.wires}):
            wires = [w for w in layout.wires if w.channel != channel]
            wires += [w for w in other.wires if w.channel == channel]
            mixed = [*topology.rings]
            mixed[channel] = rings[channel]
            wires.sort(key=lambda w: (w.channel, w.connection.name()))
            walk = _walk(chosen, wires, replace(topology, rings=tuple(mixed)))
            if replayed(walk, chosen.program) and _placed(walk) != _placed(base):
                raise UserError(
                    f"two ring orders explain every message of channel {channel}: (1) {list(topology.rings[channel])} "
                    f"(2) {list(rings[channel])}",
                    remedy="give NCCL's log with --nccl-log, or the rings in a manifest with --job",
                )


def _walk(chosen: Found, wires: list[Wire], topology: Topology) -> Walk:
    return Walk(topology, wires, chosen.mtu, any(w.connection.pairs for w in wires))


def _placed(walk: Walk) -> list[tuple[str, int, int, int, bool]]:
    """What a walk places where, connection by connection, whoever the ranks are."""
    return sorted(walk.signature)


def _key(f: Found) -> tuple:
    calls = json.dumps([vars(c) for part in vars(f.program.collectives).values() for c in part], sort_keys=True)
    # a QP number is unique at its host only: without addresses two swapped ranks would look the same
    ends = tuple((w.channel, w.src, w.dst, w.connection.name()) for w in f.layout.wires)
    return f.program.signature, calls, json.dumps([vars(e) for e in f.program.model]), f.layout.ranks, ends


def _described(f: Found) -> str:
    about = f"{f.layout.about}: " if f.layout.about else ""
    return f"{about}{f.program.called()};"


# -- hypotheses ------------------------------------------------------------------------------------------


def _explained(
    layout: Layout, facts: Facts, hints: Hints, failure: Failure, search: Search
) -> Iterator[Found]:
    wires = list(layout.wires)
    versions, why = versions_of(layout, wires, hints, facts.log)
    used = 1 + max(w.channel for w in wires)
    known = layout.channels or facts.log.channels
    mtu = _mtu(wires)
    slots = _slots(wires)
    for version in versions:
        for channels in [max(known, used)] if known else range(used, 2 * used + 1):
            rings = layout.rings * channels if len(layout.rings) == 1 else layout.rings
            try:
                topology = Topology(version, layout.ranks, channels, rings, slots)
                topology.family  # noqa: B018  raises for a version that was never read
                pairs = any(w.connection.pairs for w in wires)
                walk = Walk(topology, wires, mtu, pairs, all_channels=not layout.channels)
                for program in search(walk, hints, facts.read, failure):
                    yield Found(layout, topology, program, why, mtu)
            except WireError as error:
                failure.note(str(error))


def _mtu(wires: Sequence[Wire]) -> int:
    found = {w.connection.mtu for w in wires if w.connection.mtu}
    if len(found) > 1:
        raise UserError(f"the connections have different path MTUs: {sorted(found)}", remedy="name flows with --job")
    if found:
        return found.pop()
    largest = max(w.connection.largest for w in wires)
    if largest > 4096:
        raise UserError(f"a packet carries {largest} bytes, more than any path MTU", where=wires[0].connection.name())
    return 4096


def _slots(wires: Sequence[Wire]) -> tuple[int, int, int]:
    """Wire bytes of a step by protocol: defaults, unless one protocol alone is used and announces another size."""
    kinds = {head_flags(m.head, m.size)[0] for w in wires for m in w.connection.messages[:256] if m.size}
    sizes = {s for w in wires for s in w.connection.cts_sizes}
    ll, ll128, simple = DEFAULT_SLOTS
    if sizes and len(kinds) == 1:
        kind, largest = kinds.pop(), max(sizes)
        if kind == "ll" and largest != ll:
            ll = largest
        elif kind == "ll128" and largest != ll128:
            ll128 = largest
        elif kind == "" and largest not in (simple, 2 * simple):
            simple = largest // 2
    return ll, ll128, simple


# -- the manifest ----------------------------------------------------------------------------------------


def _job(found: Found, facts: Facts, hints: Hints) -> Job:
    program, layout, topology = found.program, found.layout, found.topology
    calls = [c for part in vars(program.collectives).values() for c in part]
    default = _default_protocol(calls)
    for call in calls:
        call.protocol = None if call.protocol in (None, default) else call.protocol
    pairs = any(w.connection.pairs for w in layout.wires)
    names = ("ll", "ll128", "simple")
    rings = [list(r) for r in topology.rings]
    if all(r == rings[0] for r in rings):
        rings = [] if rings[0] == list(range(layout.ranks)) else rings[:1]
    communicator = Communicator(
        ranks=layout.ranks, nccl_version=topology.version, protocol=default, channels=topology.channels, rings=rings,
        mtu=found.mtu, adaptive_routing=pairs,
        buffer_bytes={n: 8 * s for n, s in zip(names, topology.slot_bytes, strict=True)},
    )  # fmt: skip
    model = program.model
    job = Job(
        communicator=communicator, flows=_flows(found, facts), collectives=program.collectives,
        buckets=program.buckets, model=model, gradients=Gradients(program.dtype),
        optimizer=optimizer_of(hints, [entry.name for entry in model]), run_id="learnt",
    )  # fmt: skip
    if hints.optimizer is not None and not model:
        raise UserError(
            "--optimizer given, but the parameters were not announced in the captures", where="--optimizer",
            remedy="capture from the job's start (DDP broadcasts shapes and parameters), or give a manifest with --job",
        )
    return Job.from_dict(job.to_dict(), where="the learnt job")


def _default_protocol(calls: list[Collective]) -> str:
    named = [c.protocol for c in calls if c.protocol]
    return max(set(named), key=named.count) if named else "ll"


def _flows(found: Found, facts: Facts) -> list[Flow]:
    out = []
    seen = set()
    for w in found.layout.wires:
        c = w.connection
        seen.add((w.channel, w.src, w.dst))
        qps = found.layout.qps.get((w.channel, w.src, w.dst))
        cts = list(qps[1]) if qps else [c.cts_qpn] if c.cts_qpn is not None else []
        out.append(Flow(w.src, w.dst, w.channel, c.src, c.dst, [c.qpn], cts))
    for f in facts.bootstrap.flows:
        if (f.channel, f.src, f.dst) in found.layout.qps and (f.channel, f.src, f.dst) not in seen:
            if _same(f, found.layout):
                out.append(
                    Flow(f.src, f.dst, f.channel, f.sender.gid, f.receiver.gid, list(f.qpns), list(f.cts_qpns))
                )
    return sorted(out, key=lambda f: (f.channel, f.src, f.dst))


def _same(flow: BootstrapFlow, layout: Layout) -> bool:
    key = (flow.channel, flow.src, flow.dst)
    usable = all(_address(g) for g in (flow.sender.gid, flow.receiver.gid))
    return usable and flow.graph == "ring" and layout.qps[key] == (flow.qpns, flow.cts_qpns)


def _address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
