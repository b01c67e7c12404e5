"""What is known about one iteration when it closes: coverage, placed ranges, every missing byte by cause.

Pure reading of the engine; the verdict (verdict.py) decides, nobody else. A bucket that is complete costs a look at its
bits, one for 8 bytes, by words; what is missing is known as runs (intervals.py), never by elements.

Causes of missing elements, the first that applies:

    disagreed      two copies of them came that differ, both with a right ICRC, or a peer's differs from what is here:
                   nobody knows which is the trainer's
    overload       their iteration was given up, because the node had no room for it (version/overload.py)
    not_mirrored   no connection seen in the captures carries them reduced
    icrc           their packet came with a wrong ICRC
    unanchored     their packet came, but no anchors before and after it agreed, or its connection lost its place
                   in an outage and nothing said it again
    disagreement   the connections that carry them are LOST after a disagreement
    lost           their packet never came (lost by the mirror, truncated, or after the capture's end)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from parser.lane import messages
from parser.machine import Engine

from flowcheck.rebuild.iteration.given import NOTHING, Given
from flowcheck.rebuild.iteration.intervals import both, intervals, total, without
from flowcheck.rebuild.plan import BucketPlace, JobPlan
from parser.chunk_layout import Protocol
from parser.engine_config import EdgeSpec, FlowSpec, Phase, Target
from parser.wire import Lane, edge_lane

__all__ = [
    "BucketCoverage", "Carried", "bucket_coverage", "data_flows", "edges_with", "element_range", "elements_of",
    "not_mirrored", "packets_by_outcome", "parameter_bytes",
]

UNIONS = 256  # of connections and buckets, that are kept


@dataclass(frozen=True)
class BucketCoverage:
    """One bucket or parameter group of a closed iteration.

    data: its bytes in the arena (a copy if there are gaps between its blocks), meaningful only inside placed.
    placed: [start, end) element ranges that are there. missing: elements by cause, only causes that occur.
    """

    place: BucketPlace
    data: np.ndarray
    covered: int
    placed: tuple[tuple[int, int], ...]
    missing: dict[str, int]

    @property
    def complete(self) -> bool:
        return self.covered == self.place.elements

    def tensor(self) -> torch.Tensor:
        """`data` as elements: (place.elements,) of place.dtype, over the same memory."""
        return _tensor(self.data, self.place)


def elements_of(region: np.ndarray, place: BucketPlace) -> torch.Tensor:
    """A place's elements in an iteration's region, as `BucketCoverage.tensor`; meaningful where they are there."""
    return _tensor(_bytes(region, place), place)


def _tensor(data: np.ndarray, place: BucketPlace) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, place.dtype)
    return torch.frombuffer(data, dtype=dtype) if data.size else torch.zeros(0, dtype=dtype)


def data_flows(plan: JobPlan, flows: np.ndarray) -> Iterator[tuple[FlowSpec, np.void]]:
    """(flow, its row) of every flow that carries data, once for each capture. flows: Engine.flows()."""
    for rows in flows:
        for spec, row in zip(plan.engine.flows, rows, strict=True):
            if spec.data:
                yield spec, row


def edges_with(plan: JobPlan, engine: Engine, counter: str) -> list[int]:
    """Connections of which a flow has this counter in some capture: "seen", "packets" (that found a place in the job's
    traffic) or "adrift" (it lost that in an outage)."""
    streams = [engine.flow_counters(stream) for stream in range(plan.engine.streams)]
    return sorted({
        spec.edge for counters in streams for spec, found in zip(plan.engine.flows, counters, strict=True)
        if spec.data and found[counter]
    })


def packets_by_outcome(plan: JobPlan, engine: Engine) -> dict[str, int]:
    """What became of the packets of all streams so far."""
    total: dict[str, int] = {}
    for stream in range(plan.engine.streams):
        for outcome, (packets, _) in engine.outcomes(stream).items():
            total[outcome] = total.get(outcome, 0) + packets
    return total


def bucket_coverage(
    plan: JobPlan, engine: Engine, iteration: int, flows: np.ndarray | None = None, carried: Carried | None = None,
    given: Given = NOTHING,
) -> list[BucketCoverage]:
    """Coverage of every bucket and parameter group of an iteration that is about to close.

    flows: Engine.flows() as of now, if they are known. carried: of this plan, from whoever closes many iterations.
    given: by peers."""
    region = engine.region(iteration)
    losses: list[dict] | None = None  # read once, if at all, and so are the rows of flows with data
    rows: list[tuple[FlowSpec, np.void]] | None = None
    causes: dict[str, int]
    out = []
    for place in plan.iteration_places(iteration):
        gaps = given.missing(engine.missing(iteration, place.cells.start, place.cells.stop), place)
        placed, causes = intervals([(0, place.elements)]), {}
        if len(gaps):
            missing = intervals(_elements(gaps - place.cells.start, place))
            placed = without(placed, missing)
            if iteration in engine.given_up:
                causes = {"overload": total(missing)} if len(missing) else {}
            else:
                losses = engine.losses() if losses is None else losses
                if rows is None:
                    rows = list(data_flows(plan, engine.flows() if flows is None else flows))
                carried = carried or Carried(plan)
                void = np.concatenate((
                    engine.void_cells(iteration, place.cells.start, place.cells.stop), both(given.void, gaps)
                ))
                differ = intervals(_elements(void - place.cells.start, place))
                causes = _causes(iteration, place, missing, differ, rows, carried, losses)
        out.append(BucketCoverage(
            place, _bytes(region, place), total(placed), tuple((int(a), int(b)) for a, b in placed), causes
        ))
    return out


def _elements(cells: np.ndarray, place: BucketPlace) -> np.ndarray:
    """The place's elements before each of its cells: a cell is 8 bytes, and blocks begin on one."""
    if not place.elements:
        return cells
    each = place.elements // place.blocks
    per_block = place.stride // 8 if place.blocks > 1 else place.cells.stop - place.cells.start
    per_cell = 8 * place.elements // place.nbytes
    return cells // per_block * each + np.minimum(cells % per_block * per_cell, each)


def _bytes(region: np.ndarray, place: BucketPlace) -> np.ndarray:
    """The place's bytes without the gaps behind its blocks; a view where there are none."""
    block = place.nbytes // place.blocks
    if place.blocks == 1 or place.stride == block:
        return region[place.offset : place.offset + place.nbytes]
    gapped = region[place.offset : place.offset + place.blocks * place.stride]
    return gapped.reshape(place.blocks, place.stride)[:, :block].reshape(-1)


def _causes(
    iteration: int, place: BucketPlace, missing: np.ndarray, differ: np.ndarray,
    flows: Sequence[tuple[FlowSpec, np.void]], carried: Carried, losses: Sequence[dict],
) -> dict[str, int]:
    """Missing elements by cause. differ: those of which two copies differ."""
    seen: dict[int, set[int]] = {}  # edge -> its QPs that are in the captures
    lost_flows, adrift = set(), set()
    for spec, row in flows:
        if row["packets"]:
            seen.setdefault(spec.edge, set()).add(spec.qp)
            if row["ignored_from"] <= iteration < row["ignored_until"]:
                lost_flows.add(spec.edge)
            if row["adrift"]:
                adrift.add(spec.edge)
    said: dict[str, list[tuple[int, int]]] = {"icrc": [], "unanchored": []}
    for loss in losses:
        if loss["target"] == Target.GRADIENT and loss["iteration"] == iteration and loss["cause"] in said:
            said[loss["cause"]].append(element_range(place, loss["offset"] - place.offset, loss["bytes"]))

    def of(edges: Iterable[int]) -> np.ndarray:
        return carried.together({edge: seen[edge] for edge in edges}, iteration, place)

    by_cause = {  # the first that applies
        "disagreed": differ,
        "not_mirrored": without(missing, of(seen)),
        "icrc": both(missing, intervals(said["icrc"])),
        "unanchored": both(missing, intervals([*said["unanchored"], *of(adrift)])),
        "disagreement": without(missing, of(seen.keys() - lost_flows)),
        "lost": missing,
    }
    left, out = missing, {}
    for cause, runs in by_cause.items():
        found = both(left, runs)
        if len(found):
            out[cause] = total(found)
            left = without(left, found)
    return out


def not_mirrored(
    plan: JobPlan, engine: Engine, iteration: int, place: BucketPlace, missing: np.ndarray
) -> np.ndarray:
    """Those of the missing elements (runs) that no connection seen so far carries reduced, as runs."""
    seen: dict[int, set[int]] = {}
    for spec, row in data_flows(plan, engine.flows()):
        if row["packets"]:
            seen.setdefault(spec.edge, set()).add(spec.qp)
    return without(missing, Carried(plan).together(seen, iteration, place))


def element_range(place: BucketPlace, offset: int, nbytes: int) -> tuple[int, int]:
    """[start, end) of the place's elements at its region bytes from `offset` on; they are of one block."""
    if not 0 <= offset < place.end - place.offset:
        return 0, 0  # of another place
    size, each = place.nbytes // place.elements, place.elements // place.blocks
    block, within = divmod(offset, place.stride) if place.blocks > 1 else (0, offset)
    return block * each + within // size, block * each + min((within + nbytes) // size, each)


class Carried:
    """Which elements of a bucket a connection carries final, as runs. A walk over the connection's messages: done once
    for iteration 0 and once for all steady ones, and only of a bucket of which something is missing."""

    def __init__(self, plan: JobPlan) -> None:
        self._plan = plan
        self._known: dict[tuple[int, int, BucketPlace], np.ndarray] = {}
        self._unions: dict[tuple[frozenset[int], int, BucketPlace], np.ndarray] = {}

    def by(self, edge: int, queues: set[int], iteration: int, place: BucketPlace) -> np.ndarray:
        """queues: the QPs of the connection that were seen."""
        if len(queues) < self._plan.engine.edges[edge].qps:  # who carries what goes on from iteration to iteration
            return intervals(_final_ranges(self._plan, iteration, place, edge, queues))
        key = (edge, min(iteration, 1), place)
        if key not in self._known:
            self._known[key] = intervals(_final_ranges(self._plan, iteration, place, edge, queues))
        return self._known[key]

    def together(self, seen: Mapping[int, set[int]], iteration: int, place: BucketPlace) -> np.ndarray:
        """By any of these connections. seen: of each the QPs that were. Kept, as that of each is: there are as
        many runs to be put together as the connections have messages, and one is left of them as a rule."""
        whole = all(len(queues) == self._plan.engine.edges[edge].qps for edge, queues in seen.items())
        key = (frozenset(seen), min(iteration, 1), place)
        if whole and key in self._unions:
            return self._unions[key]
        parts = (self.by(edge, queues, iteration, place) for edge, queues in seen.items())
        found = intervals(np.concatenate([np.empty((0, 2), np.int64), *parts]))
        if whole:
            while len(self._unions) >= UNIONS:
                del self._unions[next(iter(self._unions))]
            self._unions[key] = found
        return found


def _final_ranges(
    plan: JobPlan, iteration: int, place: BucketPlace, edge: int, queues: set[int]
) -> Iterator[tuple[int, int]]:
    """Element ranges of a bucket that some of an edge's QPs carry final in an iteration."""
    phase_of_it = Phase.ITERATION_0 if iteration == 0 else Phase.STEADY  # between the two no call brings gradients
    spec = plan.engine.edges[edge]
    for i, ((phase, _, call_plan, base), call) in enumerate(zip(plan.calls, spec.calls, strict=True)):
        if phase != phase_of_it or call.target != Target.GRADIENT or base != place.offset:
            continue
        lane = edge_lane(call_plan, spec.channel, spec.src, spec.dst)
        if lane is None:
            continue
        step = place.nbytes // place.elements // lane.elem_bytes  # an AllGather's lane counts bytes
        whole = len(queues) == spec.qps
        number = 0 if whole else _messages_before(spec, i, iteration)
        for k, (first, count, wire, final, _) in enumerate(messages(lane)):
            if final and count and whole:
                yield first // step, (first + count) // step
            elif final and count:
                for start, end in _pieces(spec, lane, number + k, wire, count * lane.elem_bytes, queues):
                    yield (first + start // lane.elem_bytes) // step, (first + end // lane.elem_bytes) // step


def _messages_before(spec: EdgeSpec, index: int, iteration: int) -> int:
    """Messages of an edge before its call number `index` in an iteration, since the connection was made."""
    counts = [call.lane.messages if call.lane else 0 for call in spec.calls]
    once = [n for n, call in zip(counts, spec.calls, strict=True) if call.phase != Phase.STEADY]
    if spec.calls[index].phase != Phase.STEADY:
        return sum(counts[:index])
    return sum(once) + (iteration - 1) * (sum(counts) - sum(once)) + sum(counts[len(once) : index])


def _pieces(
    spec: EdgeSpec, lane: Lane, number: int, wire: int, nbytes: int, queues: set[int]
) -> Iterator[tuple[int, int]]:
    """Byte ranges of a message's data that some of the edge's QPs carry (5.3)."""
    piece = (wire + 128 * spec.used - 1) // (128 * spec.used) * 128
    for i in range(spec.used):
        if (number * spec.used + i) % spec.qps not in queues:
            continue
        start, end = min(i * piece, wire), min((i + 1) * piece, wire)
        if lane.protocol == Protocol.LL128:
            for at in range(start, end, 128):  # one line: 120 or 112 bytes that lie together, perhaps 8 more
                half, line = at // 1024 * 960, at // 128 % 8
                parts = [(128 * line, 120)] if line < 4 else [(64 + 112 * line, 112), (128 * line - 392, 8)]
                for offset, length in parts:
                    yield min(half + offset, nbytes), min(half + offset + length, nbytes)
        else:
            scale = 2 if lane.protocol == Protocol.LL else 1
            yield min(start // scale, nbytes), min(end // scale, nbytes)


def parameter_bytes(plan: JobPlan, engine: Engine) -> dict[str, tuple[np.ndarray, bool]]:
    """{model entry: (its bytes in the parameter region, is every cell there)}."""
    region = engine.region(None)
    out = {}
    for place in plan.parameters:
        first, end = place.offset // 8, -(-(place.offset + place.nbytes) // 8)
        out[place.name] = (
            region[place.offset : place.offset + place.nbytes], not len(engine.missing(None, first, end))
        )
    return out
