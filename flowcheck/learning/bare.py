"""AllReduce calls alone: all ways to cut what was observed into calls and iterations.

    bare(walk, hints, read, failure) -> programs that explain everything observed

Sizes alone rarely decide: LL pads to 8 bytes, full loops may end a call or not, equal calls may be one iteration or
many, the capture may end in the middle of a call or of an iteration. Everything that fits is returned, and more than
one is a refusal; hints decide. With sizes given every call may be ring or tree; else all of them are either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flowcheck.errors import UserError
from flowcheck.job.model import Collective, Collectives, dtype_size
from flowcheck.learning.hints import Hints
from flowcheck.learning.program import Failure, Program, Stage, repeat
from flowcheck.learning.walk import Mismatch, Reader, Walk
from parser.wire import Protocol

__all__ = ["bare"]

PROGRAMS_MAX = 8  # ways of cutting that are followed: two are enough to refuse
NODES_MAX = 500
LOOPS_MAX = 64
LONGER = (2, 3, 4, 8)  # a call of that many times the elements begins with the same messages, if all its loops are full


def bare(walk: Walk, hints: Hints, read: Reader, failure: Failure) -> Iterator[Program]:
    """Without --buckets the sizes must be the only ones possible. `read` is not needed: no content is looked at."""
    failure.stage = Stage.NOTHING
    dtypes = [hints.dtype] if hints.dtype else ["float32", "float16", "float64"]
    if hints.buckets:
        for dtype in dtypes:
            # iteration 0 may have one bucket of everything, as DDP makes it before its rebuild
            for first in {hints.buckets: None, (sum(hints.buckets),): None}:
                yield from _given_buckets(walk.fork(), dtype, first, hints.buckets, failure)
        return
    if walk.protocol() == Protocol.LL128:
        failure.note(
            "LL128 messages are padded to 1920 bytes, so they do not tell the size of a call; say --buckets",
            walk.total,
        )
        return
    if len(walk.algorithms) > 1:  # its alternative has a hypothesis of its own
        walk = replace(walk, algorithms=walk.algorithms[:1])
    found = 0
    for dtype in dtypes:
        for calls, end in _cuts(walk, dtype, failure):
            longer = _longer(walk, calls)
            for first_calls, steady, times in _periods(calls):
                yield _bare_program(first_calls, steady, times, end, "the only sizes that the messages admit")
                found += 1
            if longer is not None:
                yield _bare_program([*calls[:-1], longer], [], 1, end, "the only sizes that the messages admit", True)
                found += 1
            if found >= PROGRAMS_MAX:
                return


def _given_buckets(
    walk: Walk, dtype: str, first: tuple[int, ...], buckets: tuple[int, ...], failure: Failure
) -> Iterator[Program]:
    calls = [Collective("AllReduce", count, dtype) for count in first]
    steady = [Collective("AllReduce", count, dtype) for count in buckets]
    try:
        for call in calls:
            walk.take(call)
        times = 1 + (0 if walk.done else repeat(walk, steady))
    except Mismatch as error:
        failure.note(error)
        return
    if times == 1 and first != buckets:
        return  # then the buckets that were given are not what was seen
    yield _bare_program(calls, steady if times > 1 else [], times, walk, "given")


def _periods(calls: list[Collective]) -> Iterator[tuple[list[Collective], list[Collective], int]]:
    """(iteration 0, steady, iterations): every way to see iterations in a row of calls. All iterations reduce the
    same number of elements, because the parameters are the same; the capture may end inside the last one."""
    counts = [c.count for c in calls]
    for first in range(1, len(counts) + 1):
        rest = counts[first:]
        if not rest:
            yield calls, [], 1
        for period in range(1, len(rest) + 1):
            times = -(-len(rest) // period)
            if rest != (rest[:period] * times)[: len(rest)]:
                continue
            if sum(counts[:first]) == sum(rest[:period]):
                yield calls[:first], calls[first : first + period], 1 + times


def _bare_program(
    calls: Sequence[Collective], steady: Sequence[Collective], times: int, walk: Walk, why: str, cut: bool = False
) -> Program:
    counts = ", ".join(str(c.count) for c in (steady or calls)[:8])
    # how the calls make iterations is part of what is known: two programs of the same messages are two programs
    key = tuple(tuple((c.count, c.dtype) for c in part) for part in (calls, steady))
    return Program(
        Collectives(iteration_0=list(calls), steady=list(steady)), calls[0].dtype, iterations=times,
        said=[(f"buckets {counts} {calls[0].dtype}", why)], signature=(times, key, *walk.signature), cut=cut,
    )


def _longer(walk: Walk, calls: list[Collective]) -> Collective | None:
    """A longer last call of which the capture shows the beginning; None if the last call is whole for sure."""
    last = calls[-1]
    for times in LONGER:
        here, call = walk.fork(), replace(last, count=last.count * times)
        try:
            for earlier in calls[:-1]:
                here.take(earlier)
            here.take(call)
        except Mismatch:
            continue
        if here.done:
            return call
    return None


def _cuts(walk: Walk, dtype: str, failure: Failure) -> Iterator[tuple[list[Collective], Walk]]:
    """Ways to cut everything observed into AllReduce calls."""
    stack: list[tuple[list[Collective], Walk]] = [([], walk.fork())]
    nodes = found = 0
    while stack and nodes < NODES_MAX and found < PROGRAMS_MAX:
        calls, here = stack.pop()
        if here.done:
            found += bool(calls)
            if calls:
                yield calls, here
            continue
        for count in _allreduce_counts(here, dtype_size(dtype)):
            nodes += 1
            after, call = here.fork(), Collective("AllReduce", count, dtype)
            try:
                if after.take(call):
                    stack.append(([*calls, call], after))
            except Mismatch as error:
                failure.note(error)
    if stack and nodes >= NODES_MAX and found < 2:
        raise UserError(
            "there are too many ways to cut the messages into AllReduce calls to try them all",
            remedy="say the sizes with --buckets and the type with --dtype, or give a manifest with --job",
        )


def _allreduce_counts(walk: Walk, size: int) -> list[int]:
    """Elements that an AllReduce at this place could have. Ring: the first n sends of a loop are all its chunks, and a
    call ends with its first loop that is not full. Tree: each send is a chunk, and all but the last are equal."""
    protocol, ranks = walk.protocol(), walk.topology.ranks
    tree = walk.algorithms[0] == "tree"
    data_of = {Protocol.LL: (1, 2), Protocol.LL128: (15, 16), Protocol.SIMPLE: (1, 1)}[protocol]
    slack = {Protocol.LL: 7, Protocol.LL128: 1919, Protocol.SIMPLE: 0}[protocol]
    slices = 2 if protocol == Protocol.SIMPLE else 1
    per_loop, covering = (1, 1) if tree else (2 * (ranks - 1) * slices, ranks * slices)
    full = ranks * walk.topology.slot_bytes[protocol] * (4 if protocol == Protocol.SIMPLE else 1)
    full = full * data_of[0] // data_of[1]
    loops: dict[int, list[int]] = {}
    for wire, ahead in walk.ahead(LOOPS_MAX * per_loop):
        if wire.channel in loops:
            continue
        sums = loops.setdefault(wire.channel, [])
        for at in range(0, len(ahead) - covering + 1, per_loop):
            sums.append(sum(m.size * data_of[0] // data_of[1] for m in ahead[at : at + covering]))
            if sums[-1] < (sums[0] if tree else full):
                break
    out: dict[int, None] = {}
    for used in range(1, len(loops) + 1):
        chosen = [loops[c] for c in sorted(loops)[:used]]
        for depth in range(1, max(map(len, chosen), default=0) + 1):
            total = sum(sum(sums[:depth]) for sums in chosen)
            spare = slack * (1 if protocol == Protocol.LL else used * ranks)
            for nbytes in range(total // size * size, max(0, total - spare - 1), -size):
                out[nbytes // size] = None
            if len(out) > NODES_MAX:
                return list(out)
    return list(out)
