"""PyTorch DDP as it announces itself: every size of the job is read from the wire, then checked against it.

    announced(walk, hints, read, failure) -> programs that explain everything observed

DDP's own order (nccl-wire.md 9.1; torch/csrc/distributed/c10d/reducer.cpp, torch/nn/parallel/distributed.py):

    AllGather of one int64    number of parameters
    Broadcast of int64        sizes then strides of every parameter, no dimensions in between
    Broadcast                 the parameters, in groups; whoever compares shapes broadcasts these too (`init_sync`
                              governs both), so a reading without them is not one
    AllReduce                 gradients of iteration 0
    Broadcast of int32        parameter indices in bucket order, then the number of buckets
    Broadcast of int32        number of parameters in each bucket
    AllReduce                 gradients of all later iterations

What the broadcasts say and how DDP packs buckets is in ddp_rules.py; here it is held against every message.
Nothing here guesses: where two readings fit, both are returned and the caller refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from math import prod

import numpy as np

from flowcheck.job.model import Bucket, Buckets, BucketSlice, Collective, Collectives, ModelEntry, dtype_size
from flowcheck.learning.hints import Hints
from flowcheck.learning.messages import packets
from flowcheck.learning.search.ddp_rules import (
    MAX_DIMENSIONS,
    broadcast_groups,
    initial_buckets,
    parse_buckets,
    parse_shapes,
)
from flowcheck.learning.search.position import Mismatch
from flowcheck.learning.search.programs import PADDING, Failure, Program, Provenance, Stage, data_bytes, repeat
from flowcheck.learning.search.walk import Observed, Reader, Walk
from parser.chunk_layout import Protocol

__all__ = ["announced", "begins"]

MESSAGES_MAX = 64  # of a broadcast of shapes: 2 MiB in LL
PARAMETERS_MAX = (1 << 24) - 1
GIVEN = "list the job's calls in a manifest and give that to replay with --job (docs/reference/manifest.md)"
CAPTURED = f"capture the job's start again, without a snap length and without loss at the mirror; or {GIVEN}"
OTHER = f"the job does not begin as PyTorch's DDP does, and what its calls mean is not on the wire: {GIVEN}"
FLOAT_DTYPES = ("float32", "float16", "bfloat16", "float64")


def _decode(protocol: Protocol, wire: bytes, nbytes: int) -> bytes:
    """Data bytes of one message (4.1-4.3)."""
    if protocol == Protocol.SIMPLE:
        return wire[:nbytes]
    if protocol == Protocol.LL:
        words = np.frombuffer(wire, "<u4", len(wire) // 16 * 4).reshape(-1, 4)
        return words[:, [0, 2]].tobytes()[:nbytes]
    halves = np.frombuffer(wire, np.uint8).reshape(-1, 8, 128)
    data = np.empty((len(halves), 960), np.uint8)
    for i in range(4):
        data[:, 128 * i : 128 * i + 120] = halves[:, i, :120]
        data[:, 128 * i + 120 : 128 * i + 128] = halves[:, 4 + i, 112:120]
        data[:, 512 + 112 * i : 512 + 112 * i + 112] = halves[:, 4 + i, :112]
    return data.tobytes()[:nbytes]


def _content(seen: list[Observed], read: Reader, nbytes: int) -> bytes | None:
    """The bytes of a call whose messages are final on these wires; None if some are missing."""
    out, have = bytearray(nbytes), np.zeros(nbytes, bool)
    whole = [s for s in seen if s.count and s.whole]
    far = [
        (flow, m.psn, m.psn + packets(m.size, max(s.on.connection.mtus, default=4096)))
        for s in whole for flow, m in s.parts if m.size > len(m.head)
    ]
    fetched = iter(read(far))
    for s in whole:
        parts = [m.head[: m.size] if m.size <= len(m.head) else (next(fetched) or b"")[: m.size] for _, m in s.parts]
        if any(len(part) < m.size for part, (_, m) in zip(parts, s.parts, strict=True)):
            continue
        data, place = _decode(s.protocol, b"".join(parts), s.count), slice(s.first, s.first + s.count)
        if have[place].all() and out[place] != data:
            return None  # two copies of one broadcast differ: believe neither
        out[place] = data
        have[place] = True
    return bytes(out) if have.all() else None


def _broadcast_sizes(walk: Walk, step: int, possible: range) -> Iterator[int]:
    """Bytes that a Broadcast at this place could have, multiples of `step`, likeliest first."""
    protocol = walk.protocol()
    slack = PADDING[protocol]
    full = walk.topology.slot_bytes[protocol]
    edges: dict[tuple[int, int], list[list[int]]] = {}  # by channel, of one pair of ranks: sums of the next messages
    for on, ahead in walk.ahead(MESSAGES_MAX):
        run: list[int] = []
        for message in ahead:
            run.append((run[-1] if run else 0) + data_bytes(protocol, message.size))
            if message.size < full or run[-1] > possible.stop + slack:
                break  # a call ends with its first message that is not full
        edges.setdefault((on.src, on.dst), []).append(run)
    tried: set[int] = set()
    for runs in edges.values():
        for used in range(1, len(runs) + 1):
            for depth in range(1, 1 + max(map(len, runs[:used]))):
                total = sum(run[min(depth, len(run)) - 1] for run in runs[:used] if run)
                if total > possible.stop + slack * used:
                    break
                for nbytes in range(total // step * step, max(0, total - slack * used - 1), -step):
                    if nbytes in possible and nbytes not in tried:
                        tried.add(nbytes)
                        yield nbytes


def begins(walk: Walk, failure: Failure) -> bool:
    """Do the first messages have the sizes of DDP's first call, with something larger after it? Moves `walk`."""
    failure.stage = Stage.NOTHING
    try:
        walk.take(Collective("AllGather", 1, "int64"))
    except Mismatch as error:
        failure.note(f"no start-up of DDP: {error}", error.progress)
        return False
    following = [m.size for _, ahead in walk.ahead(1) for m in ahead]
    block = {Protocol.LL: 16, Protocol.LL128: 0, Protocol.SIMPLE: 8}[walk.protocol()]
    if following and max(following) <= block:
        failure.note("no start-up of DDP: an AllGather of 8 bytes from more ranks")
        return False
    return True


def announced(walk: Walk, hints: Hints, read: Reader, failure: Failure) -> Iterator[Program]:
    """Programs of DDP that explain everything observed. What fails is noted with how far DDP's order was followed."""
    failure.stage = Stage.NOTHING
    start = walk.fork()
    count_call = Collective("AllGather", 1, "int64")
    try:
        seen = start.take(count_call)
    except Mismatch as error:
        failure.note(error)
        return
    counts = set()
    for s in (s for s in seen if s.count == 8):
        data = _content([Observed(s.on, s.parts, 0, 8, s.protocol, s.wire_bytes)], read, 8)
        if data is not None:
            counts.add(int.from_bytes(data, "little", signed=True))
    if len(counts) != 1 or not 0 < next(iter(counts)) <= PARAMETERS_MAX:
        failure.stage = Stage.GATHERED
        found = ", ".join(f"{count:,}" for count in sorted(counts)[:4]) if counts else "none that was captured whole"
        failure.note(
            "the AllGather of 8 bytes, in which each rank of DDP says how many parameters there are, has to have one"
            f" number from 1 to {PARAMETERS_MAX:,}; found: {found}", start.explained, OTHER if counts else CAPTURED,
        )
        return
    parameters = counts.pop()
    for nbytes in _broadcast_sizes(start, 16, range(16 * parameters, 16 * MAX_DIMENSIONS * parameters + 1)):
        after = start.fork()
        shapes_call = Collective("Broadcast", nbytes // 8, "int64")
        failure.stage = Stage.NOTHING
        try:
            seen = after.take(shapes_call)
        except Mismatch as error:
            failure.note(error)
            continue
        failure.stage = Stage.GATHERED
        data = _content(seen, read, nbytes)
        if data is None:
            failure.note(
                f"of the Broadcast of {nbytes:,} bytes, where DDP says sizes and strides of {parameters:,} parameters, "
                "not all bytes are in the capture", after.explained, CAPTURED,
            )
            continue
        values = np.frombuffer(data, "<i8").tolist()
        try:
            readings = parse_shapes(values, parameters)
        except Mismatch as error:
            few = ", ".join(f"{value:,}" for value in values[:4]) + ", ..." * (len(values) > 4)
            failure.note(
                f"in the Broadcast of {nbytes:,} bytes, where DDP says sizes and strides of {parameters:,} parameters: "
                f"{error}; the first are {few}", after.explained, GIVEN,
            )
            continue
        failure.stage = Stage.SHAPES
        for shapes in readings:
            yield from _training(after, [count_call, shapes_call], shapes, hints, read, failure)


def _training(
    walk: Walk, startup: list[Collective], shapes: list[tuple[int, ...]], hints: Hints, read: Reader, failure: Failure
) -> Iterator[Program]:
    """Behind the shapes: parameters broadcast or not, then iterations, for every element type that fits."""
    names = hints.names(shapes)
    for dtype in [hints.dtype] if hints.dtype else FLOAT_DTYPES:
        size = dtype_size(dtype)
        elements = [prod(shape) for shape in shapes]
        model = [ModelEntry(name, list(shape), dtype) for name, shape in zip(names, shapes, strict=True)]
        here, calls = walk.fork(), list(startup)
        said: list[Provenance] = [
            (f"{len(shapes)} parameters", "their shapes: DDP's AllGather of the number and broadcast of sizes and "
             "strides, read from the wire"),
        ]
        try:
            for group in broadcast_groups([n * size for n in elements]):
                call = Collective(
                    "Broadcast", sum(elements[i] for i in group), dtype, carries="parameters",
                    tensors=[names[i] for i in group],
                )
                if not here.take(call) and here.done:
                    raise Mismatch("the capture ends before the parameters are broadcast", here.explained)
                calls.append(call)
            said.append((f"{sum(elements)} {dtype}", "initial parameters: broadcast by rank 0, all bytes explained"))
        except Mismatch as error:
            failure.note(f"with parameters of {dtype}: {error}", error.progress)
            continue
        for layout in initial_buckets([n * size for n in elements]):
            yield from _iterations(here.fork(), calls, model, layout, said, read, failure)


def _iterations(
    walk: Walk, startup: list[Collective], model: list[ModelEntry], layout: list[list[int]], said: list[Provenance],
    read: Reader, failure: Failure,
) -> Iterator[Program]:
    failure.stage = Stage.SHAPES
    dtype = model[0].dtype
    first = _calls(model, layout)
    before = walk.fork()
    try:
        seen = [walk.take(call) for call in first]
        if not any(seen):
            failure.note("the capture ends before the first gradients are reduced", walk.explained)
            return
    except Mismatch as error:
        failure.note(error)
        _suspect_hook(before, model, layout, failure)
        return
    said = [*said, (
        f"iteration 0: {_counted(layout)}", "as DDP makes them before its rebuild; every size on the wire agrees"
    )]
    program = Program(Collectives(startup, first), dtype, Buckets(steady=_layout(model, layout)), model, 1, said)
    if walk.done:
        program.said.append(("steady: none", "no later iteration is in the capture: its buckets are not known"))
        program.signature = tuple(walk.signature)
        yield program
        return
    found = _rebuilt(walk, len(model), read, failure)
    if found is None:
        return  # there may have been a new layout: without it the later calls have no meaning
    # without a rebuild (find_unused_parameters, static graph off): iteration 0 for ever
    yield from _steady(walk.fork(), program, [], layout, failure, "no new layout was broadcast")
    for rebuilt, calls, after in found:
        said_by = "DDP's broadcast of the rebuilt bucket layout, read from the wire"
        yield from _steady(after, program, calls, rebuilt, failure, said_by)


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
    )


def _rebuilt(
    walk: Walk, parameters: int, read: Reader, failure: Failure
) -> list[tuple[list[list[int]], list[Collective], Walk]] | None:
    """(bucket layout, the calls that say it, a walk past them) if one was broadcast here; None if one may have been and
    cannot be read."""
    after, order = walk.fork(), Collective("Broadcast", parameters + 1, "int32")
    try:
        data = _content(after.take(order), read, order.count * 4)
        if data is None and parameters > 1:
            failure.note("DDP's broadcast of the rebuilt bucket layout is not complete in the capture", after.explained)
            return None
        indices = [0, 1] if data is None else np.frombuffer(data, "<i4").tolist()  # one parameter has one layout
        if not 0 < indices[-1] <= parameters:
            failure.note(f"a bucket layout of {indices[-1]} buckets was broadcast", walk.explained)
            return []
        sizes_call = Collective("Broadcast", indices[-1], "int32")
        data = _content(after.take(sizes_call), read, sizes_call.count * 4)
        if data is None and indices[-1] > 1:
            failure.note("DDP's broadcast of the rebuilt bucket sizes is not complete in the capture", after.explained)
            return None
    except Mismatch as error:
        failure.note(error)
        return []
    sizes = [parameters] if data is None or indices[-1] == 1 else np.frombuffer(data, "<i4").tolist()
    try:
        return [(parse_buckets(indices, sizes, parameters), [order, sizes_call], after)]
    except Mismatch as error:
        failure.note(f"DDP's broadcast of the bucket layout: {error}", after.explained)
        return []


def _steady(
    walk: Walk, program: Program, rebuild: list[Collective], layout: list[list[int]], failure: Failure, said: str
) -> Iterator[Program]:
    calls = _calls(program.model, layout)
    iterations = program.iterations
    try:
        iterations += repeat(walk, calls)
    except Mismatch as error:
        failure.note(error)
        return
    buckets = Buckets(steady=_layout(program.model, layout))
    if buckets.steady != program.buckets.steady:
        buckets.iteration_0 = program.buckets.steady
    first = program.collectives
    yield Program(
        Collectives(first.startup, first.iteration_0, rebuild, calls), program.dtype, buckets, program.model,
        iterations, [*program.said, (f"steady: {_counted(layout)}", said)],
        tuple(walk.signature),
    )


def _counted(layout: list[list[int]]) -> str:
    return f"{len(layout)} bucket{'s' * (len(layout) > 1)}"


def _calls(model: list[ModelEntry], layout: list[list[int]]) -> list[Collective]:
    return [Collective("AllReduce", sum(model[i].elements for i in bucket), model[0].dtype) for bucket in layout]


def _layout(model: list[ModelEntry], layout: list[list[int]]) -> list[Bucket]:
    out = []
    for bucket in layout:
        entries = [model[i] for i in bucket]
        starts = accumulate((entry.elements for entry in entries), initial=0)
        out.append(Bucket([BucketSlice(e.name, at, e.elements) for at, e in zip(starts, entries, strict=False)]))
    return out
