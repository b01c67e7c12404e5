"""Which calls a job makes: every way to explain all observed messages, under one hypothesis of the topology.

    explain(walk, hints, read) -> list of Program        empty: nothing explains it; more than one: ambiguous

Two kinds of program are looked for, and only these (docs/learn.md):

    announced    PyTorch DDP: shapes, parameters, iteration 0, bucket layout, steady iterations; sizes are read
    bare         AllReduce calls alone; sizes are those that the messages admit, or given by hints

A chain of unrelated broadcasts could imitate any of them; that is not considered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from flowcheck.learn import ddp
from flowcheck.learn.hints import Hints
from flowcheck.learn.walk import Mismatch, Reader, Seen, Walk, decode
from flowcheck.manifest import Bucket, Buckets, BucketSlice, Collective, Collectives, ModelEntry, dtype_size
from parser.wire import Protocol

__all__ = ["Failure", "Program", "explain"]

PROGRAMS_MAX = 8  # ways of cutting that are followed: two are enough to refuse
NODES_MAX = 4000
FLOATS = {4: ("float32",), 2: ("float16", "bfloat16"), 8: ("float64",)}
FLOAT_DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass
class Failure:
    """The attempt that explained most, for the message when none explains all."""

    progress: int = -1
    text: str = ""

    def note(self, error: Mismatch | str, progress: int = 0) -> None:
        reached = error.progress if isinstance(error, Mismatch) else progress
        if reached > self.progress:
            self.progress, self.text = reached, str(error)


@dataclass
class Program:
    """A learnt sequence of calls. said: where each part was learnt, one sentence each. iterations: how many begin
    in the capture."""

    collectives: Collectives
    dtype: str
    buckets: Buckets = field(default_factory=Buckets)
    model: list[ModelEntry] = field(default_factory=list)
    iterations: int = 0
    said: list[str] = field(default_factory=list)
    signature: tuple = ()

    def called(self) -> str:
        """In one line, for a refusal that names two."""
        calls = self.collectives
        parts = []
        for name in ("startup", "iteration_0", "rebuild", "steady"):
            listed = getattr(calls, name)
            if listed:
                inside = ", ".join(f"{c.op} {c.count} {c.dtype}" for c in listed[:6])
                parts.append(f"{name} [{inside}{', ...' if len(listed) > 6 else ''}]")
        shapes = ", ".join("x".join(map(str, e.shape)) for e in self.model[:6])
        model = f"; parameters {shapes}{', ...' if len(self.model) > 6 else ''}" if self.model else ""
        return f"{self.iterations} iterations: {'; '.join(parts)}{model}"


def explain(walk: Walk, hints: Hints, read: Reader, failure: Failure) -> list[Program]:
    """All programs that explain everything `walk` has observed. Fills `failure` with the best failed attempt."""
    found = [*_announced(walk, hints, read, failure)]
    if not found:
        found = [*_bare(walk, hints, failure)]
    return found


# -- announced: PyTorch DDP ------------------------------------------------------------------------------


def _content(seen: list[Seen], read: Reader, nbytes: int) -> bytes | None:
    """The bytes of a call whose messages are final on these wires; None if some are missing."""
    out, have = bytearray(nbytes), np.zeros(nbytes, bool)
    far = [s for s in seen if s.message.size > len(s.message.head) and s.count]
    fetched = iter(read([(s.wire.connection, s.message.psn, s.message.psn + _span(s)) for s in far]))
    for s in seen:
        if not s.count:
            continue
        wire = s.message.head if s.message.size <= len(s.message.head) else next(fetched)
        if wire is None or len(wire) < s.wire_bytes:
            continue
        data = decode(s.protocol, wire[: s.wire_bytes], s.count)
        known = have[s.first : s.first + s.count]
        before = bytes(out[s.first : s.first + s.count])
        if known.all() and before != data:
            return None  # two copies of one broadcast differ: believe neither
        out[s.first : s.first + s.count] = data
        have[s.first : s.first + s.count] = True
    return bytes(out) if have.all() else None


def _span(s: Seen) -> int:
    mtu = s.wire.connection.mtu or 4096
    return max(1, -(-s.wire_bytes // mtu))


def _broadcast_sizes(walk: Walk, step: int) -> Iterator[int]:
    """Bytes that a Broadcast at this place could have, multiples of `step`, likeliest first."""
    protocol = walk.protocol()
    data_of = {Protocol.LL: (1, 2), Protocol.LL128: (15, 16), Protocol.SIMPLE: (1, 1)}[protocol]
    slack = {Protocol.LL: 7, Protocol.LL128: 1919, Protocol.SIMPLE: 0}[protocol]
    by_channel: dict[int, list[int]] = {}
    for wire in walk.wires:
        ahead = [m.size * data_of[0] // data_of[1] for m in walk.next_messages(wire)[:64]]
        # every edge of a channel that carries the broadcast carries all of it: the longest run will do
        if len(ahead) > len(by_channel.get(wire.channel, [])):
            by_channel[wire.channel] = ahead
    tried: set[int] = set()
    for used in range(1, len(by_channel) + 1):
        sums = 0
        for depth in range(64):
            channels = sorted(by_channel)[:used]
            sizes = [by_channel[c][depth] if depth < len(by_channel[c]) else 0 for c in channels]
            if not any(sizes):
                break
            sums += sum(sizes)
            for total in range(sums // step * step, max(0, sums - slack * used - 1), -step):
                if total and total not in tried:
                    tried.add(total)
                    yield total


def _announced(walk: Walk, hints: Hints, read: Reader, failure: Failure) -> Iterator[Program]:
    start = walk.fork()
    count_call = Collective("AllGather", 1, "int64")
    try:
        seen = start.take(count_call)
    except Mismatch as error:
        failure.note(error)
        return
    counts = set()
    for s in (s for s in seen if s.count == 8):
        data = _content([Seen(s.wire, s.message, 0, 8, s.protocol, s.wire_bytes)], read, 8)
        if data is not None:
            counts.add(int.from_bytes(data, "little", signed=True))
    if len(counts) != 1 or not 0 < (parameters := counts.pop()) < 1 << 24:
        failure.note("the first call is no AllGather of DDP's number of parameters", start.explained)
        return
    for nbytes in _broadcast_sizes(start, 16):
        if nbytes < 16 * parameters:
            continue
        after = start.fork()
        shapes_call = Collective("Broadcast", nbytes // 8, "int64")
        try:
            seen = after.take(shapes_call)
        except Mismatch as error:
            failure.note(error)
            continue
        data = _content([s for s in seen], read, nbytes)
        if data is None:
            failure.note("DDP's broadcast of shapes is not complete in the capture", after.explained)
            continue
        try:
            readings = ddp.parse_shapes(np.frombuffer(data, "<i8").tolist(), parameters)
        except ddp.BadAnnouncement as error:
            failure.note(f"DDP's broadcast of shapes: {error}", after.explained)
            continue
        for shapes in readings:
            yield from _training(after, [count_call, shapes_call], shapes, hints, read, failure)


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for extent in shape:
        n *= extent
    return n


def _training(
    walk: Walk, startup: list[Collective], shapes: list[tuple[int, ...]], hints: Hints, read: Reader, failure: Failure
) -> Iterator[Program]:
    """Behind the shapes: parameters broadcast or not, then iterations, for every element type that fits."""
    names = [hints.names[i] if hints.names and len(hints.names) == len(shapes) else f"parameter.{i}"
             for i in range(len(shapes))]  # fmt: skip
    for dtype in [hints.dtype] if hints.dtype else FLOAT_DTYPES:
        size = dtype_size(dtype)
        elements = [_numel(shape) for shape in shapes]
        model = [ModelEntry(name, list(shape), dtype) for name, shape in zip(names, shapes, strict=True)]
        for broadcast in (True, False):
            here, calls = walk.fork(), list(startup)
            said = [
                f"{len(shapes)} parameters with their shapes: DDP's AllGather of the number and broadcast of sizes and "
                "strides, read from the wire",
            ]
            try:
                if broadcast:
                    for group in ddp.broadcast_groups([n * size for n in elements]):
                        call = Collective(
                            "Broadcast", sum(elements[i] for i in group), dtype, carries="parameters",
                            tensors=[names[i] for i in group],
                        )  # fmt: skip
                        if not here.take(call) and here.done:
                            raise Mismatch("the capture ends before the parameters are broadcast", here.explained)
                        calls.append(call)
                    said.append(f"initial parameters: broadcast by rank 0 as {dtype}, all bytes accounted for")
            except Mismatch as error:
                failure.note(error)
                continue
            for layout in ddp.initial_buckets([n * size for n in elements]):
                yield from _iterations(here.fork(), calls, model, layout, said, read, failure)


def _iterations(
    walk: Walk, startup: list[Collective], model: list[ModelEntry], layout: list[list[int]], said: list[str],
    read: Reader, failure: Failure,
) -> Iterator[Program]:  # fmt: skip
    dtype = model[0].dtype
    first = _calls(model, layout)
    before = walk.fork()
    try:
        if not any([walk.take(call) for call in first]):
            failure.note("the capture ends before the first gradients are reduced", walk.explained)
            return
    except Mismatch as error:
        failure.note(error)
        _suspect_hook(before, model, layout, failure)
        return
    said = [*said, f"iteration 0: {len(layout)} bucket{'s' * (len(layout) > 1)} as DDP makes them before its rebuild"]
    program = Program(
        Collectives(startup, first), dtype, Buckets(steady=_layout(model, layout)), model, 1, said,
    )  # fmt: skip
    if walk.done:
        program.said.append("no later iteration is in the capture: rebuild and steady are not known")
        program.signature = tuple(walk.signature)
        yield program
        return
    # without a rebuild (find_unused_parameters, static graph off): iteration 0 for ever
    yield from _steady(walk.fork(), program, [], layout, failure, "no new layout was broadcast: as in iteration 0")
    order = Collective("Broadcast", len(model) + 1, "int32")
    for rebuilt, sizes_call, after in _rebuilt(walk, order, len(model), read, failure):
        yield from _steady(
            after, program, [order, sizes_call], rebuilt, failure,
            f"{len(rebuilt)} steady buckets: DDP's broadcast of the rebuilt bucket layout, read from the wire",
        )  # fmt: skip


def _suspect_hook(walk: Walk, model: list[ModelEntry], layout: list[list[int]], failure: Failure) -> None:
    """Gradients in fewer bytes than the parameters: name the cause instead of a size that does not fit."""
    if dtype_size(model[0].dtype) <= 2:
        return
    try:
        for call in _calls(model, layout):
            walk.take(Collective("AllReduce", call.count, "float16"))
    except Mismatch:
        return
    failure.note(
        f"gradients of {model[0].dtype} parameters are reduced in 2-byte elements: a compressing communication hook "
        "(fp16 or bf16). What the optimizer sees is decompressed outside NCCL; remove the hook", walk.explained + 1,
    )  # fmt: skip


def _rebuilt(
    walk: Walk, order: Collective, parameters: int, read: Reader, failure: Failure
) -> Iterator[tuple[list[list[int]], Collective, Walk]]:
    after = walk.fork()
    try:
        data = _content(after.take(order), read, order.count * 4)
        if data is None and parameters == 1:
            indices = [0, 1]  # one parameter has one layout
        elif data is None:
            failure.note("DDP's broadcast of the rebuilt bucket layout is not complete in the capture", after.explained)
            return
        else:
            indices = np.frombuffer(data, "<i4").tolist()
        if not 0 < indices[-1] <= parameters:
            failure.note(f"a bucket layout of {indices[-1]} buckets was broadcast", walk.explained)
            return
        sizes_call = Collective("Broadcast", indices[-1], "int32")
        data = _content(after.take(sizes_call), read, sizes_call.count * 4)
        sizes = [parameters] if indices[-1] == 1 else None if data is None else np.frombuffer(data, "<i4").tolist()
        if sizes is None:
            failure.note("DDP's broadcast of the rebuilt bucket sizes is not complete in the capture", after.explained)
            return
        yield ddp.parse_buckets(indices, sizes, parameters), sizes_call, after
    except Mismatch as error:
        failure.note(error)
    except ddp.BadAnnouncement as error:
        failure.note(f"DDP's broadcast of the bucket layout: {error}", after.explained)


def _steady(
    walk: Walk, program: Program, rebuild: list[Collective], layout: list[list[int]], failure: Failure, said: str
) -> Iterator[Program]:
    calls = _calls(program.model, layout)
    iterations = program.iterations
    try:
        iterations += _repeat(walk, calls)
    except Mismatch as error:
        failure.note(error)
        return
    buckets = Buckets(steady=_layout(program.model, layout))
    if buckets.steady != program.buckets.steady:
        buckets.iteration_0 = program.buckets.steady
    first = program.collectives
    yield Program(
        Collectives(first.startup, first.iteration_0, rebuild, calls), program.dtype, buckets, program.model,
        iterations, [*program.said, said], tuple(walk.signature),
    )  # fmt: skip


def _repeat(walk: Walk, calls: list[Collective]) -> int:
    """Take `calls` again and again until everything is explained; how often."""
    times = 0
    while not walk.done:
        for call in calls:
            walk.take(call)
        times += 1
        if times > walk.total + 1:  # a gap may hide iterations, not more than there are messages
            raise Mismatch("messages that no call explains", walk.explained)
    return times


def _calls(model: list[ModelEntry], layout: list[list[int]]) -> list[Collective]:
    return [Collective("AllReduce", sum(model[i].elements for i in bucket), model[0].dtype) for bucket in layout]


def _layout(model: list[ModelEntry], layout: list[list[int]]) -> list[Bucket]:
    out = []
    for bucket in layout:
        offset, slices = 0, []
        for i in bucket:
            slices.append(BucketSlice(model[i].name, offset, model[i].elements))
            offset += model[i].elements
        out.append(Bucket(slices))
    return out


# -- bare: AllReduce calls alone -------------------------------------------------------------------------


def _bare(walk: Walk, hints: Hints, failure: Failure) -> Iterator[Program]:
    dtypes = [hints.dtype] if hints.dtype else ["float32", "float16", "float64"]
    if hints.buckets:
        for dtype in dtypes:
            calls = [Collective("AllReduce", count, dtype) for count in hints.buckets]
            here = walk.fork()
            try:
                times = _repeat(here, calls)
            except Mismatch as error:
                failure.note(error)
                continue
            yield _bare_program(calls, times, dtype, here, "bucket sizes: given")
        return
    found = 0
    for dtype in dtypes:
        for sizes, end in _cuts(walk, dtype, failure):
            for period in range(1, len(sizes) + 1):
                if len(sizes) % period or sizes != sizes[:period] * (len(sizes) // period):
                    continue
                calls = [Collective("AllReduce", count, dtype) for count in sizes[:period]]
                yield _bare_program(
                    calls, len(sizes) // period, dtype, end, "bucket sizes: the only ones that the messages admit"
                )
                found += 1
                if found >= PROGRAMS_MAX:
                    return


def _bare_program(calls: list[Collective], times: int, dtype: str, walk: Walk, said: str) -> Program:
    steady = calls if times > 1 else []
    described = f"{sum(c.count for c in calls)} {dtype} in {len(calls)} AllReduce calls an iteration"
    # the cut is part of what is known: two programs of the same messages are two programs
    signature = (times, tuple((c.count, c.dtype) for c in calls), *walk.signature)
    return Program(
        Collectives(iteration_0=calls, steady=steady), dtype, iterations=times,
        said=[f"{said} ({described})"], signature=signature,
    )  # fmt: skip


def _cuts(walk: Walk, dtype: str, failure: Failure) -> Iterator[tuple[list[int], Walk]]:
    """Ways to cut everything observed into AllReduce calls."""
    stack: list[tuple[list[int], Walk]] = [([], walk.fork())]
    nodes = found = 0
    while stack and nodes < NODES_MAX and found < PROGRAMS_MAX:
        sizes, here = stack.pop()
        if here.done:
            found += bool(sizes)
            if sizes:
                yield sizes, here
            continue
        for count in _allreduce_counts(here, dtype_size(dtype)):
            nodes += 1
            after = here.fork()
            try:
                if after.take(Collective("AllReduce", count, dtype)):
                    stack.append(([*sizes, count], after))
            except Mismatch as error:
                failure.note(error)


def _allreduce_counts(walk: Walk, size: int) -> list[int]:
    """Elements that an AllReduce at this place could have: the first n sends of a loop are all its chunks."""
    protocol, ranks = walk.protocol(), walk.topology.ranks
    data_of = {Protocol.LL: (1, 2), Protocol.LL128: (15, 16), Protocol.SIMPLE: (1, 1)}[protocol]
    slack = {Protocol.LL: 7, Protocol.LL128: 1919, Protocol.SIMPLE: 0}[protocol]
    slices = 2 if protocol == Protocol.SIMPLE else 1
    per_loop, covering = 2 * (ranks - 1) * slices, ranks * slices
    loops: dict[int, list[int]] = {}
    for wire in walk.wires:
        if wire.channel in loops:
            continue
        ahead = [m.size * data_of[0] // data_of[1] for m in walk.next_messages(wire)[: 64 * per_loop]]
        loops[wire.channel] = [
            sum(ahead[at : at + covering]) for at in range(0, len(ahead) - covering + 1, per_loop)
        ]  # fmt: skip
    out: dict[int, None] = {}
    for used in range(1, len(loops) + 1):
        chosen = [loops[c] for c in sorted(loops)[:used]]
        for depth in range(1, max(map(len, chosen), default=0) + 1):
            total = sum(sum(sums[:depth]) for sums in chosen)
            spare = slack * (1 if protocol == Protocol.LL else used * ranks)
            for nbytes in range(total // size * size, max(0, total - spare - 1), -size):
                out[nbytes // size] = None
    return list(out)
