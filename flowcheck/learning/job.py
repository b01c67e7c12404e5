"""Learning a job: captures, logs and hints in, a manifest with the reasons for every part of it out.

    learn(captures, ...) -> Learnt        through DPDK; raises UserError, EnvironmentProblem
    learn_from(Facts) -> Learnt           the same from traced packets: pure but for fetching payloads

Every possible topology (topology.py) of every possible NCCL family is held against every observed message (walk.py,
announced.py, bare.py). One explanation is a result, none or several are a refusal that names them (explain.py): a
gradient placed on a guess would look like any other. What no capture can tell stays as a doubt (doubts.py).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowcheck.errors import UserError
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import Collective, Communicator, Flow, Gradients, Job, dtype_size
from flowcheck.learning.announced import announced, begins
from flowcheck.learning.bare import bare
from flowcheck.learning.bootstrap import Bootstrap, BootstrapFlow
from flowcheck.learning.check import check_plan
from flowcheck.learning.connections import Connection
from flowcheck.learning.doubts import doubts_of
from flowcheck.learning.explain import Found, key_of, only, only_communicator, only_ring, unexplained
from flowcheck.learning.hints import Hints, optimizer_of
from flowcheck.learning.layout import Layout
from flowcheck.learning.logs import LogFacts
from flowcheck.learning.program import Failure, Program, Stage, replayed
from flowcheck.learning.ranks import RANKS_TRIED, parents_of
from flowcheck.learning.reasons import DEFAULT_SLOTS, Item, items_of, missing_of
from flowcheck.learning.refusals import (
    check_connections,
    refuse_modified,
    refuse_unread,
    refuse_unseen_ring,
    refuse_unsupported,
)
from flowcheck.learning.topology import layouts
from flowcheck.learning.traffic import head_flags
from flowcheck.learning.versions import versions_of
from flowcheck.learning.walk import Budget, Reader, Spent, Walk, Wire, tree_number
from flowcheck.rebuild.plan import JobPlan, plan_job
from parser.wire import Protocol, Topology, WireError, plan_call

__all__ = ["Facts", "Item", "Learnt", "Progress", "learn_from"]

Search = Callable[[Walk, Hints, Reader, Failure], Iterator[Program]]
Progress = Callable[[int, int], None]
RANKS_BARE = 16  # tried where nothing says how many ranks there are, and no announcement rules most of them out
BUDGET = 200_000  # calls held against the traffic: about a minute
EXPLANATIONS_MAX = 16  # more need not be found to refuse


@dataclass(frozen=True)
class Facts:
    """What was read of captures and logs. read: fetches payloads. encrypted: MACsec or ESP frames. packets: WRITEs
    that could be read. unread: packets that could not, by cause, as in a report's `drops`."""

    connections: list[Connection]
    bootstrap: Bootstrap
    log: LogFacts
    read: Reader
    encrypted: int = 0
    packets: int = 0
    unread: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Learnt:
    """doubts: what was learnt and could still be otherwise, one sentence each. missing: what was not learnt."""

    job: Job
    items: list[Item]
    missing: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    @property
    def marks(self) -> list[str]:
        """What a result rests on that was learnt, for its `unproven` list."""
        return ["the job: learnt from the traffic, no manifest confirms it (docs/use/learn.md)", *self.doubts]

    def to_dict(self) -> dict[str, Any]:
        return {
            "items": [vars(item) for item in self.items], "missing": list(self.missing), "doubts": list(self.doubts),
        }


@dataclass(frozen=True)
class _Hypothesis:
    layout: Layout
    topology: Topology
    algorithms: tuple[str, ...]
    version_reason: str
    mtu: int

    def walk(self, budget: Budget) -> Walk:
        wires = list(self.layout.wires)
        return Walk(
            self.topology, wires, self.mtu, any(w.connection.pairs for w in wires),
            all_channels=not self.layout.channels or self.layout.tree, algorithms=self.algorithms, budget=budget,
        )


def learn_from(facts: Facts, hints: Hints, progress: Progress | None = None) -> Learnt:
    """Raises UserError: what cannot be supported, what cannot be explained, what has two explanations."""
    refuse_unsupported(facts.bootstrap, facts.log)
    refuse_unread(len(facts.connections), facts.encrypted, facts.unread, facts.packets)
    groups = [g for g in layouts(facts.connections, facts.bootstrap, facts.log, hints) if g]
    for group in groups:
        check_connections(group[0])
    failure, budget = Failure(), Budget(BUDGET)
    hypotheses = list(_hypotheses(groups, facts, hints))
    found = _search(announced, hypotheses, facts, hints, failure, budget, progress)
    if not found:
        refuse_modified(groups)
        # AllReduce calls alone explain less than DDP's announcements, and are looked for only where there are none
        if failure.reached[0] == Stage.NOTHING or (failure.reached[0] == Stage.GATHERED and hints.buckets):
            found = _bare(hypotheses, facts, hints, failure, budget, progress)
    if not found:
        raise unexplained(failure, hypotheses[0].layout.several, RANKS_TRIED if failure.reached[0] else RANKS_BARE)
    plain = [f for f in found if not f.layout.split]
    chosen = only(plain or found)
    split = [f for f in found if f.layout.split] if plain else []
    other = next((f for f in split if f.layout.ranks != chosen.layout.ranks), None)
    if other is not None:
        only([chosen, other])  # raises
    refuse_unseen_ring(chosen.layout, chosen.program.algorithms, bool(facts.log.rings))
    only_ring(chosen, next(group for group in groups if chosen.layout in group))
    only_communicator(chosen, facts.read, hints, budget)
    _check_buckets(chosen, hints)
    job = _job(chosen, facts, hints)
    check_plan(_plan(job), [*chosen.layout.wires])
    doubts = doubts_of(chosen, split)
    return Learnt(
        job, items_of(chosen, job, facts.log, hints, doubts), missing_of(chosen, job), [d.text for d in doubts]
    )


def _plan(job: Job) -> JobPlan:
    try:
        return plan_job(job)
    except UserError as error:
        raise UserError(
            f"what was learnt cannot be followed: {error.what}", where=error.where, remedy=error.remedy
        ) from None


def _check_buckets(chosen: Found, hints: Hints) -> None:
    """--buckets beside DDP's own announcement can only say the same."""
    calls = chosen.program.collectives
    announced_sizes = [tuple(c.count for c in part) for part in (calls.steady, calls.iteration_0) if part]
    if hints.buckets and chosen.program.model and hints.buckets not in announced_sizes:
        raise UserError(
            f"--buckets says {', '.join(map(str, hints.buckets))}, DDP announces "
            f"{', '.join(map(str, announced_sizes[0]))}", where="--buckets",
            remedy="leave it out: DDP announces its buckets on the wire",
        )


# -- hypotheses ------------------------------------------------------------------------------------------


def _hypotheses(
    groups: list[list[Layout]], facts: Facts, hints: Hints
) -> Iterator[_Hypothesis]:
    shared: dict[int, tuple[tuple[str, ...], str, int, tuple[int, int, int]]] = {}
    for number, layout in ((i, layout) for i, group in enumerate(groups) for layout in group):
        if number not in shared:  # a group is of the same connections
            shared[number] = (*versions_of(layout, hints, facts.log), _mtu(layout.wires), _slots(layout.wires))
        versions, why, mtu, slots = shared[number]
        used = 1 + max(w.channel for w in layout.wires)
        known = layout.channels or facts.log.channels
        for version in versions:
            for channels in [max(known, used)] if known else range(used, 2 * used + 1):
                rings = layout.rings * channels if len(layout.rings) == 1 else layout.rings
                topology = Topology(version, layout.ranks, channels, rings, slots)
                for algorithms in _algorithms(layout, facts.log, hints):
                    yield _Hypothesis(layout, topology, algorithms, why, mtu)


def _bare(
    hypotheses: Sequence[_Hypothesis], facts: Facts, hints: Hints, failure: Failure, budget: Budget,
    progress: Progress | None,
) -> list[Found]:
    """Explanations by AllReduce calls alone: with the ranks that are said first, then with others."""
    few = [h for h in hypotheses if not h.layout.several or h.topology.ranks <= RANKS_BARE]
    split = [h for h in few if h.layout.split]
    found = _search(bare, [h for h in few if not h.layout.split], facts, hints, failure, budget, progress)
    if not split:
        return found
    if found:
        only(found)  # raises: then the others need not be looked at
    if not found or found[0].layout.several:
        return found + _search(bare, split, facts, hints, failure, budget, progress)
    for h in split:  # the same calls, with rank 0 at another place
        if h.topology.version == found[0].topology.version and h.topology.channels == found[0].topology.channels:
            if replayed(h.walk(budget), found[0].program):
                found.append(Found(h.layout, h.topology, found[0].program, h.version_reason, h.mtu, h.algorithms))
    return found


def _algorithms(layout: Layout, log: LogFacts, hints: Hints) -> list[tuple[str, ...]]:
    """Ways that AllReduce may go, the preferred one first: with two ranks ring and tree use the same connections, so
    each has to be looked for. A tree of more ranks has connections of its own."""
    if hints.algorithm:
        return [(hints.algorithm,)]
    chosen = {algorithm for function, _, algorithm, _ in log.choices if function in ("AllReduce", "")}
    if len(chosen) == 1 and chosen <= {"ring", "tree"}:
        return [(chosen.pop(),)]
    if hints.given is not None and hints.given.communicator.algorithm == "tree":
        return [("tree", "ring"), ("ring", "tree")]
    return [("ring", "tree"), ("tree", "ring")] if layout.ranks == 2 or layout.tree else [("ring",)]


def _search(
    search: Search, hypotheses: Sequence[_Hypothesis], facts: Facts, hints: Hints, failure: Failure, budget: Budget,
    progress: Progress | None,
) -> list[Found]:
    """Every explanation by this kind of program. Raises UserError where the budget ends first."""
    found: list[Found] = []
    distinct: set[tuple] = set()  # many versions may give one explanation: only different ones are a refusal
    gathers: dict[tuple[int, str, int], bool] = {}  # sizes of DDP's first call do not depend on places in the ring
    for number, h in enumerate(hypotheses):
        if progress is not None and number % 16 == 0:
            progress(number, len(hypotheses))
        tree = f", {h.algorithms[0]} first" if len(h.algorithms) > 1 else f", {h.algorithms[0]}"
        about = h.layout.about or f"{h.layout.ranks} ranks"
        failure.where = f"{about}, NCCL {h.topology.version}, {h.topology.channels} channels{tree}"
        try:
            if search is announced:
                key = h.topology.ranks, h.topology.version, h.topology.channels
                if key not in gathers:
                    gathers[key] = begins(h.walk(budget), failure)
                if not gathers[key] or _same_plans(h, found):
                    continue
            for program in search(h.walk(budget), hints, facts.read, failure):
                found.append(Found(h.layout, h.topology, program, h.version_reason, h.mtu, h.algorithms))
                if search is bare:
                    distinct.add(key_of(found[-1]))
                    if len(found) >= EXPLANATIONS_MAX and len(distinct) > 1:
                        return found
        except WireError as error:
            failure.note(str(error))
        except Spent:
            raise UserError(
                f"the search was stopped after {number} of {len(hypotheses)} combinations of ranks, places in the "
                f"ring, channels and NCCL version, with {len(found)} explanations; the others were not tried",
                remedy="narrow it down: --nccl-log or --nccl-version, --rank, --dtype, --buckets, mirror a second "
                "rank, or give a manifest with --job",
            ) from None
    return found


def _mtu(wires: Sequence[Wire]) -> int:
    found = {mtu for w in wires for mtu in w.connection.mtus}
    if len(found) > 1:
        raise UserError(f"the connections have different path MTUs: {sorted(found)}", remedy="name flows with --job")
    if found:
        return found.pop()
    largest = max(queue.largest for w in wires for queue in w.connection.queues)
    if largest > 4096:
        raise UserError(f"a packet carries {largest} bytes, more than any path MTU", where=wires[0].connection.name())
    return 4096


def _slots(wires: Sequence[Wire]) -> tuple[int, int, int]:
    """Wire bytes of a step by protocol: defaults, unless one protocol alone is used and announces another size."""
    kinds = {head_flags(m.head, m.size)[0] for w in wires for m in w.connection.first(256) if m.size}
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


def _same_plans(h: _Hypothesis, found: Sequence[Found]) -> bool:
    """Does this hypothesis lay out every call of what the same connections were explained with just as that one did?
    Then it explains the same, and the messages need not be compared again."""
    known = [f for f in found if f.layout is h.layout and f.preference == h.algorithms]
    return bool(known) and all(
        _segments(h.topology, call) == _segments(f.topology, call) for f in known for call in f.program.calls
    )


def _segments(topology: Topology, call: Collective) -> tuple:
    plan = plan_call(
        topology, call.op, Protocol[(call.protocol or "ll").upper()], call.count, dtype_size(call.dtype),
        root=call.root, algorithm=call.algorithm or "ring",
    )
    trees = tuple(tree_number(topology.channels, c) for c in range(plan.channels)) if call.algorithm == "tree" else ()
    return tuple(part for part in plan.segments if part), trees


# -- the manifest ----------------------------------------------------------------------------------------


def _job(found: Found, facts: Facts, hints: Hints) -> Job:
    program, layout, topology = found.program, found.layout, found.topology
    calls = program.calls
    default = _most([c.protocol for c in calls if c.protocol], "ll")
    algorithm = _most([c.algorithm for c in calls if c.algorithm], "ring")
    for call in calls:
        call.protocol = None if call.protocol in (None, default) else call.protocol
        call.algorithm = None if call.algorithm in (None, algorithm) else call.algorithm
    pairs = any(w.connection.pairs for w in layout.wires)
    first = layout.wires[0].connection
    names = ("ll", "ll128", "simple")
    rings = [list(r) for r in topology.rings]
    if all(r == rings[0] for r in rings):
        rings = [] if rings[0] == list(range(layout.ranks)) else rings[:1]
    given = hints.given.communicator if hints.given is not None else None
    communicator = Communicator(
        ranks=layout.ranks, nccl_version=topology.version, protocol=default, algorithm=algorithm,
        channels=topology.channels, rings=rings, mtu=found.mtu, adaptive_routing=pairs,
        qps_per_connection=len(first.queues) // first.devices, split_data_on_qps=first.used > first.devices,
        devices=first.devices,
        parent_ranks=list(given.parent_ranks) if given else parents_of(layout.ranks, layout.wires),
        buffer_bytes={n: 8 * s for n, s in zip(names, topology.slot_bytes, strict=True)},
    )
    model = program.model
    job = Job(
        communicator=communicator, flows=_flows(found, facts), collectives=program.collectives,
        buckets=program.buckets, model=model, gradients=Gradients(program.dtype),
        optimizer=optimizer_of(hints, [entry.name for entry in model]), run_id="learnt",
    )
    if hints.optimizer is not None and not model:
        raise UserError(
            "--optimizer given, but the parameters were not announced in the captures", where="--optimizer",
            remedy="capture from the job's start (DDP broadcasts shapes and parameters), or give a manifest with --job",
        )
    return job_from_dict(job.to_dict(), where="the learnt job")


def _most(named: list[str], otherwise: str) -> str:
    return max(sorted(set(named)), key=named.count) if named else otherwise


def _flows(found: Found, facts: Facts) -> list[Flow]:
    out = []
    seen = set()
    for w in found.layout.wires:
        c = w.connection
        seen.add((w.channel, w.src, w.dst))
        qps = found.layout.qps.get((w.channel, w.src, w.dst))
        cts = list(qps[1]) if qps else [*c.cts_qpns]
        each = [[q.src for q in c.queues], [q.dst for q in c.queues]] if c.devices > 1 else []
        out.append(Flow(w.src, w.dst, w.channel, c.src, c.dst, [q.qpn for q in c.queues], cts, *each))
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
