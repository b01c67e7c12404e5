"""From the job manifest to the plain structs that parser and updater take.

    plan_job(job, streams=...) -> JobPlan     pure; raises UserError for what the wire model does not cover

Where things lie: each gradient bucket begins on a 64-byte boundary of the iteration's region, buckets in
order, behind them the parameter groups that the iteration gathers; each parameter broadcast likewise in the
parameter region. Every rank's block of a gathered group begins on a cell of its own, because a cell that two
blocks share could not say which of them is there.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flowcheck.errors import UserError
from flowcheck.job.clock import Clock
from flowcheck.job.model import FEED, Collective, Job, carries, dtype_size
from parser.chunk_layout import Protocol, Topology
from parser.engine_config import CallSpec, EdgeSpec, EngineConfig, FlowSpec, Phase, Target
from parser.nccl import Nccl, WireError, of
from parser.wire import CallPlan, Lane, edge_lane, plan_call

__all__ = ["BucketPlace", "JobPlan", "ParameterPlace", "digest_of", "plan_job"]

ALIGN = 64
FASTEST_PORT = 800e9  # bits per second: how soon 2^23 packets could have passed unseen


@dataclass(frozen=True)
class BucketPlace:
    """One gradient bucket of an iteration, or one gathered parameter group, in the iteration's region.

    nbytes: of its elements, without the gaps between blocks. blocks: 1, or the ranks of an AllGather, each
    with nbytes / blocks bytes; the next begins `stride` bytes later.
    """

    index: int
    elements: int
    offset: int
    nbytes: int
    dtype: str = "float32"
    carries: str = "gradient"
    blocks: int = 1
    stride: int = 0

    @property
    def end(self) -> int:
        """Region byte behind the last one that is used."""
        return self.offset + (self.blocks - 1) * self.stride + self.nbytes // self.blocks

    @property
    def cells(self) -> slice:
        """Its cells of 8 bytes: all of them there means all of its elements are."""
        return slice(self.offset // 8, -(-self.end // 8))


@dataclass(frozen=True)
class ParameterPlace:
    """One model entry inside the parameter region (filled by a broadcast)."""

    name: str
    offset: int
    elements: int
    nbytes: int


@dataclass(frozen=True)
class JobPlan:
    """buckets, groups: for iteration 0 and for all later ones. calls: every call with its phase, in issue order,
    as (phase, call, its plan, byte offset in its region)."""

    job: Job
    engine: EngineConfig
    buckets_0: tuple[BucketPlace, ...]
    buckets: tuple[BucketPlace, ...]
    groups_0: tuple[BucketPlace, ...]
    groups: tuple[BucketPlace, ...]
    parameters: tuple[ParameterPlace, ...]
    calls: tuple[tuple[Phase, Collective, CallPlan, int], ...]

    def iteration_buckets(self, iteration: int) -> tuple[BucketPlace, ...]:
        """Gradient buckets of an iteration."""
        return self.buckets_0 if iteration == 0 else self.buckets

    def iteration_places(self, iteration: int) -> tuple[BucketPlace, ...]:
        """All that an iteration must bring: gradient buckets, then gathered parameter groups."""
        return self.iteration_buckets(iteration) + (self.groups_0 if iteration == 0 else self.groups)

    @property
    def cells(self) -> tuple[int, int]:
        """How many cells of 8 bytes iteration 0 brings, and every later one."""
        first, later = (
            sum(place.cells.stop - place.cells.start for place in self.iteration_places(i)) for i in (0, 1)
        )
        return first, later


def topology_of(job: Job) -> Topology:
    """The communicator as the wire model wants it."""
    c = job.communicator
    by_protocol = [p.name.lower() for p in Protocol]
    return Topology(
        version=c.nccl_version,
        ranks=c.ranks,
        channels=c.channels,
        rings=tuple(tuple(c.ring(i)) for i in range(c.channels)),
        slot_bytes=tuple(c.buffer_bytes[p] // 8 for p in by_protocol),  # type: ignore[arg-type]
        max_threads=tuple(c.max_threads[p] for p in by_protocol),  # type: ignore[arg-type]
    )


def nccl_of(job: Job) -> Nccl:
    """What the job's NCCL does on the wire. Raises WireError for a version that was never read."""
    return of(job.communicator.nccl_version)


def plan_job(
    job: Job, *, streams: int = 1, threads: int = 1, arenas: int = 4, check_icrc: bool = True, patience: int = 0
) -> JobPlan:
    """Plan the whole job for `streams` captures, `threads` that place and `arenas` iterations alive at once. patience:
    see EngineConfig."""
    c = job.communicator
    if job.source == FEED:
        return _plan_fed(job, arenas)
    try:
        nccl = nccl_of(job)
        if c.devices > nccl.devices:
            raise WireError(f"NCCL {c.nccl_version} merges at most {nccl.devices} devices, not {c.devices}")
        topology = topology_of(job)
        places, places_0 = _bucket_places(job, 1), _bucket_places(job, 0)
        groups, groups_0 = _group_places(job, 1, _end(places)), _group_places(job, 0, _end(places_0))
        parameter_calls, parameters, parameter_bytes = _parameter_places(job)
        calls = list(_calls(job, topology, places_0 + groups_0, places + groups, parameter_calls))
        both = places_0 + groups_0, places + groups
        edges = tuple(_edge(job, calls, both, flow.channel, flow.src, flow.dst) for flow in job.flows)
    except WireError as error:
        raise UserError(
            str(error),
            where="communicator",
            remedy="docs/understand/wire.md lists what is supported; correct nccl_version, algorithm or protocol",
        ) from None
    engine = EngineConfig(
        mtu=c.mtu,
        edges=edges,
        flows=tuple(_flows(job)),
        streams=streams,
        threads=threads,
        arenas=arenas,
        check_icrc=check_icrc,
        patience=patience,
        gradient_bytes=max(_end(places + groups), _end(places_0 + groups_0)),
        parameter_bytes=parameter_bytes,
        outage_ns=int(2**23 * c.mtu * 8 / FASTEST_PORT * 1e9),
        cts=nccl.cts,
    )
    return JobPlan(job, engine, places_0, places, groups_0, groups, parameters, tuple(calls))


def _plan_fed(job: Job, arenas: int) -> JobPlan:
    """Of a job that no packets are read of."""
    places, places_0 = _bucket_places(job, 1), _bucket_places(job, 0)
    engine = EngineConfig(mtu=job.communicator.mtu, edges=(), flows=(), arenas=arenas,
                          gradient_bytes=max(_end(places), _end(places_0)))
    return JobPlan(job, engine, places_0, places, (), (), (), ())


def _up(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _end(places: tuple[BucketPlace, ...]) -> int:
    return _up(places[-1].end) if places else 0


def _bucket_places(job: Job, iteration: int) -> tuple[BucketPlace, ...]:
    out, offset = [], 0
    for index, call in sorted(job.gradient_calls(iteration), key=lambda pair: pair[0]):
        nbytes = call.count * dtype_size(call.dtype)
        out.append(BucketPlace(index, call.count, offset, nbytes, call.dtype))
        offset = _up(offset + nbytes)
    return tuple(out)


def _group_places(job: Job, iteration: int, offset: int) -> tuple[BucketPlace, ...]:
    """Gathered parameter groups behind the buckets; the calls of one group share its place."""
    out: list[BucketPlace] = []
    ranks = job.communicator.ranks
    for index, call in sorted(dict(job.parameter_calls(iteration)).items()):
        block = call.count * dtype_size(call.dtype)
        stride = -(-block // 8) * 8
        place = BucketPlace(
            index, call.count * ranks, offset, block * ranks, call.dtype, "parameters", ranks, stride
        )
        out.append(place)
        offset = _up(place.end)
    return tuple(out)


def _parameter_places(job: Job) -> tuple[dict[int, int], tuple[ParameterPlace, ...], int]:
    """(id of call -> region offset, entries, region bytes). Entries lie packed in their broadcast."""
    entries = {entry.name: entry for entry in job.model}
    offsets: dict[int, int] = {}
    places: list[ParameterPlace] = []
    offset = 0
    for call in job.collectives.startup:
        if carries(call) != "parameters":
            continue
        offsets[id(call)] = offset
        size = dtype_size(call.dtype)
        names = call.tensors or [e.name for e in job.model if e.dtype == call.dtype and not e.tied]
        at = 0
        for name in names:
            if name not in entries or entries[name].dtype != call.dtype:
                raise UserError(
                    f"the broadcast of parameters names {name!r}, which is no {call.dtype} entry of the model",
                    where="collectives.startup",
                    remedy="list model entries of the broadcast's dtype in tensors",
                )
            places.append(
                ParameterPlace(name, offset + at * size, entries[name].elements, entries[name].elements * size)
            )
            at += entries[name].elements
        if names and at != call.count:
            raise UserError(
                f"the broadcast of parameters has {call.count} elements, its tensors have {at}",
                where="collectives.startup",
                remedy="correct count, or list the broadcast entries in tensors",
            )
        offset = _up(offset + call.count * size)
    return offsets, tuple(places), offset


def _calls(
    job: Job,
    topology: Topology,
    places_0: tuple[BucketPlace, ...],
    places: tuple[BucketPlace, ...],
    parameter_offsets: dict[int, int],
) -> list[tuple[Phase, Collective, CallPlan, int]]:
    out = []
    c = job.communicator
    parts = (
        (Phase.STARTUP, job.collectives.startup, places_0),
        (Phase.ITERATION_0, job.collectives.iteration_0, places_0),
        (Phase.REBUILD, job.collectives.rebuild, places),
        (Phase.STEADY, job.collectives.steady, places),
    )
    carried = {}  # which bucket or group a call carries: numbered within an iteration, not within a list
    for iteration in (0, 1):
        for index, call in job.gradient_calls(iteration) + job.parameter_calls(iteration):
            carried[(iteration, id(call))] = index
    for phase, calls, buckets in parts:
        for call in calls:
            plan = plan_call(
                topology,
                call.op,
                Protocol[(call.protocol or c.protocol).upper()],
                call.count,
                dtype_size(call.dtype),
                algorithm=(call.algorithm or c.algorithm) if call.op == "AllReduce" else "ring",
                root=call.root,
                channels=call.channels,
            )
            what, base = carries(call), 0
            if what == "parameters" and phase == Phase.STARTUP:
                base = parameter_offsets[id(call)]
            elif _target(phase, call) == Target.GRADIENT:
                index = carried[(0 if phase == Phase.ITERATION_0 else 1, id(call))]
                base = next(p.offset for p in buckets if (p.carries, p.index) == (what, index))
            out.append((phase, call, plan, base))
    return out


def _target(phase: Phase, call: Collective) -> Target:
    """GRADIENT is the region that each iteration has for itself, for gathered parameters too."""
    what = carries(call)
    if phase != Phase.STARTUP and (what == "gradient" or (what == "parameters" and call.op == "AllGather")):
        return Target.GRADIENT
    return Target.PARAMETERS if what == "parameters" and phase == Phase.STARTUP else Target.NOTHING


def _edge(
    job: Job, calls: list[tuple[Phase, Collective, CallPlan, int]], places: tuple[tuple[BucketPlace, ...], ...],
    channel: int, src: int, dst: int,
) -> EdgeSpec:
    """places: of iteration 0, and of later ones."""
    c = job.communicator
    numbers = [{place.offset: i for i, place in enumerate(part) if place.elements} for part in places]
    nccl = nccl_of(job)
    return EdgeSpec(
        channel=channel,
        src=src,
        dst=dst,
        calls=tuple(
            CallSpec(
                _lane(plan, call, channel, src, dst), phase, _target(phase, call), base,
                numbers[phase != Phase.ITERATION_0].get(base, 0) if _target(phase, call) == Target.GRADIENT else 0,
            )
            for phase, call, plan, base in calls
        ),
        qps=c.queue_pairs,
        used=c.queue_pairs_used,
        ar_above=c.ar_threshold if c.adaptive_routing or nccl.always_pairs else None,
        imm_big_endian=nccl.big_endian,
    )


def _lane(plan: CallPlan, call: Collective, channel: int, src: int, dst: int) -> Lane | None:
    """edge_lane, with the blocks of gathered parameters as far apart as _group_places puts them."""
    lane = edge_lane(plan, channel, src, dst)
    if lane is None or call.op != "AllGather" or carries(call) != "parameters":
        return lane
    return replace(lane, block=-(-plan.count // 8) * 8)  # an AllGather's plan counts bytes


def _flows(job: Job) -> list[FlowSpec]:
    packed: Callable[[str], bytes] = lambda text: ipaddress.ip_address(text).packed  # noqa: E731
    out = []
    for edge, flow in enumerate(job.flows):
        ends = [(packed(src), packed(dst)) for src, dst in map(flow.addresses, range(len(flow.qpns)))]
        out += [FlowSpec(*ends[q], qpn, edge, q, True) for q, qpn in enumerate(flow.qpns)]
        out += [FlowSpec(*ends[q][::-1], qpn, edge, q, False) for q, qpn in enumerate(flow.cts_qpns)]
    return out


def digest_of(body: Mapping[str, Any], plan: JobPlan, run: tuple[str, int, int], clock: Clock) -> str:
    """64 hexadecimal digits: the same at two nodes if, and only if, they follow the same job in the same way."""
    places = [[vars(place) for place in plan.iteration_places(iteration)] for iteration in (0, 1)]
    said = [list(run), clock.first, dict(body), places, plan.engine.gradient_bytes]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
