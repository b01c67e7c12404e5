"""Sequences of calls that may explain a capture, what searching for one leaves behind, and AllReduce calls alone.

    Program                                  calls, model and buckets, with the provenance of each part
    allreduce_alone(walk, ...) -> programs   all ways to cut what was observed into AllReduce calls and iterations

Two kinds of program are looked for, and only these (docs/use/learn.md): AllReduce calls alone, whose sizes are those
that the messages admit, or given by hints, and DDP's own (ddp.py), whose sizes are read. A chain of unrelated
broadcasts could imitate either; that is not considered.

Sizes alone rarely decide: LL pads to 8 bytes, full loops may end a call or not, equal calls may be one iteration or
many, the capture may end in the middle of a call or of an iteration. Everything that fits is returned, and more than
one is a refusal; hints decide. With sizes given every call may be ring or tree; otherwise all of them are either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from flowcheck.errors import UserError
from flowcheck.job.model import Buckets, Collective, Collectives, ModelEntry, dtype_size
from flowcheck.learning.hints import Hints
from flowcheck.learning.search.position import Mismatch
from flowcheck.learning.search.walk import Reader, Walk
from parser.chunk_layout import Protocol

__all__ = [
    "PADDING", "Failure", "Program", "ProgramKind", "Provenance", "Stage", "allreduce_alone", "data_bytes", "repeat",
    "replayed",
]

Provenance = tuple[str, str]  # (what was learnt, where it was learnt)

PROGRAMS_MAX = 8  # ways of cutting that are followed: two are enough to refuse
NODES_MAX = 500
LOOPS_MAX = 64
LONGER = (2, 3, 4, 8)  # a call of that many times the elements begins with the same messages, if all its loops are full
#: By how many bytes padding may hide a smaller size.
PADDING = {Protocol.LL: 7, Protocol.LL128: 1919, Protocol.SIMPLE: 0}


def data_bytes(protocol: Protocol, wire_bytes: int) -> int:
    """Of wire bytes, those that are data and padding, not flags (4.1 to 4.3)."""
    return wire_bytes * {Protocol.LL: 8, Protocol.LL128: 15, Protocol.SIMPLE: 16}[protocol] // 16


class Stage(IntEnum):
    """How far DDP's announcements were followed: they rule out other readings before any count of messages does."""

    NOTHING = 0
    GATHERED = 1  # the first calls have the sizes of DDP's, their contents are not
    SHAPES = 2  # number and shapes of the parameters were read


@dataclass
class Failure:
    """The attempt that came furthest, for the message when none explains all. where, stage: of the attempt under
    way; reached: stage and messages explained of the best one; text, remedy: what stopped it, and what to do about just
    that ("" for what helps in general)."""

    where: str = ""
    stage: Stage = Stage.NOTHING
    reached: tuple[Stage, int] = (Stage.NOTHING, -1)
    text: str = ""
    remedy: str = ""

    def note(self, error: Mismatch | str, progress: int = 0, remedy: str = "") -> None:
        reached = self.stage, error.progress if isinstance(error, Mismatch) else progress
        if reached > self.reached:
            self.reached, self.text = reached, f"{self.where}: {error}" if self.where else str(error)
            self.remedy = remedy


@dataclass
class Program:
    """A learnt sequence of calls. said: what each part is and where it was learnt. iterations: how many begin in the
    capture. cut: the capture ends inside the last call, so its size is a lower bound."""

    collectives: Collectives
    dtype: str
    buckets: Buckets = field(default_factory=Buckets)
    model: list[ModelEntry] = field(default_factory=list)
    iterations: int = 0
    said: list[Provenance] = field(default_factory=list)
    signature: tuple = ()
    cut: bool = False

    @property
    def calls(self) -> list[Collective]:
        return [c for part in vars(self.collectives).values() for c in part]

    @property
    def algorithms(self) -> set[str]:
        """Of the AllReduce calls of which messages were seen."""
        return {c.algorithm for c in self.calls if c.op == "AllReduce" and c.algorithm}

    def called(self) -> str:
        """In one line, for a refusal that names two."""
        calls = self.collectives
        parts = []
        for name in ("startup", "iteration_0", "rebuild", "steady"):
            listed = getattr(calls, name)
            if listed:
                inside = ", ".join(f"{_named(c)} {c.count} {c.dtype}" for c in listed[:6])
                parts.append(f"{name} [{inside}{', ...' if len(listed) > 6 else ''}]")
        shapes = ", ".join("x".join(map(str, e.shape)) for e in self.model[:6])
        model = f"; parameters {shapes}{', ...' if len(self.model) > 6 else ''}" if self.model else ""
        times = f"{self.iterations} iteration{'s' * (self.iterations != 1)}"
        cut = ", whose last call the capture's end cuts" if self.cut else ""
        return f"{times}: {'; '.join(parts)}{model}{cut}"


def _named(call: Collective) -> str:
    return "tree AllReduce" if call.algorithm == "tree" else call.op


#: What looks for one kind of program and gives those that explain everything observed.
ProgramKind = Callable[[Walk, Hints, Reader, Failure], Iterator[Program]]


def replayed(walk: Walk, program: Program) -> bool:
    """Does this program explain everything on other connections or rings too? Moves `walk`."""
    calls = program.collectives
    try:
        for call in [*calls.startup, *calls.iteration_0]:
            walk.take(call)
        if not walk.done:
            for call in calls.rebuild:
                walk.take(call)
            repeat(walk, calls.steady)
    except Mismatch:
        return False
    return True


def repeat(walk: Walk, calls: list[Collective]) -> int:
    """Take `calls` again and again until everything is explained; how often."""
    times = 0
    while not walk.done:
        if not calls:
            raise Mismatch("messages after the last call", walk.explained)
        for call in calls:
            walk.take(call)
        times += 1
        if times > walk.total + 1:  # a gap may hide iterations, not more than there are messages
            raise Mismatch("messages that no call explains", walk.explained)
    return times


# -- AllReduce calls alone -------------------------------------------------------------------------------


def allreduce_alone(walk: Walk, hints: Hints, read: Reader, failure: Failure) -> Iterator[Program]:
    """Programs of AllReduce calls alone. Without --buckets the sizes must be the only ones possible. `read` is not
    needed: no content is looked at."""
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
                yield _program(first_calls, steady, times, end, "the only sizes that the messages admit")
                found += 1
            if longer is not None:
                yield _program([*calls[:-1], longer], [], 1, end, "the only sizes that the messages admit", True)
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
    yield _program(calls, steady if times > 1 else [], times, walk, "given")


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


def _program(
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
    slices = 2 if protocol == Protocol.SIMPLE else 1
    per_loop, covering = (1, 1) if tree else (2 * (ranks - 1) * slices, ranks * slices)
    full = ranks * walk.topology.slot_bytes[protocol] * (4 if protocol == Protocol.SIMPLE else 1)
    full = data_bytes(protocol, full)
    loops: dict[int, list[int]] = {}
    for on, ahead in walk.ahead(LOOPS_MAX * per_loop):
        if on.channel in loops:
            continue
        sums = loops.setdefault(on.channel, [])
        for at in range(0, len(ahead) - covering + 1, per_loop):
            sums.append(sum(data_bytes(protocol, m.size) for m in ahead[at : at + covering]))
            if sums[-1] < (sums[0] if tree else full):
                break
    out: dict[int, None] = {}
    for used in range(1, len(loops) + 1):
        chosen = [loops[c] for c in sorted(loops)[:used]]
        for depth in range(1, max(map(len, chosen), default=0) + 1):
            total = sum(sum(sums[:depth]) for sums in chosen)
            spare = PADDING[protocol] * (1 if protocol == Protocol.LL else used * ranks)
            for nbytes in range(total // size * size, max(0, total - spare - 1), -size):
                out[nbytes // size] = None
            if len(out) > NODES_MAX:
                return list(out)
    return list(out)
