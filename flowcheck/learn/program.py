"""A sequence of calls that explains a capture, and what searching for one leaves behind.

Two kinds are looked for, and only these (docs/learn.md):

    announced.py    PyTorch DDP: shapes, parameters, iteration 0, bucket layout, steady iterations; sizes are read
    bare.py         AllReduce calls alone; sizes are those that the messages admit, or given by hints

A chain of unrelated broadcasts could imitate any of them; that is not considered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowcheck.learn.walk import Mismatch, Walk
from flowcheck.manifest import Buckets, Collective, Collectives, ModelEntry

__all__ = ["Failure", "Program", "repeat", "replayed"]


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


def replayed(walk: Walk, program: Program) -> bool:
    """Does this program explain everything on other wires or rings too? Moves `walk`."""
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
            raise Mismatch("messages behind the last call", walk.explained)
        for call in calls:
            walk.take(call)
        times += 1
        if times > walk.total + 1:  # a gap may hide iterations, not more than there are messages
            raise Mismatch("messages that no call explains", walk.explained)
    return times
