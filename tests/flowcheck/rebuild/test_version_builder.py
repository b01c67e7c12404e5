"""What the builder of versions asks of a replica, in which order, and when: the engine and the replica are made up.

Later iterations have two buckets, of 20 and 10 cells; FIRST and SECOND are theirs. The first one has a single bucket.
What a real replica makes of it is in tests/flowcheck/node/test_live_building.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from flowcheck.job.clock import Clock
from flowcheck.rebuild.iteration.evidence import BucketCoverage, elements_of
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.building import Built, VersionBuilder
from flowcheck.rebuild.version.records import StepRecord, StepRecords
from lab.synth import example_job
from updater.errors import NoFreeSlot, ReplicaError
from updater.step import StepValues

from ..fake_engine import FakeEngine

FIRST, SECOND = (0, 20), (24, 34)
HALF, QUARTER = StepRecord([{"lr": 0.5}]), StepRecord([{"lr": 0.25}])
USELESS = StepRecord([{"lr": 0.5}], scale=0.0)  # no optimizer can undo this loss scale


class Engine(FakeEngine):
    """looks: buckets whose bits were read. more: cells that placing threads have counted twice, by place."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.looks = []
        self.more = np.zeros(2, int)

    def covered_places(self, iteration: int) -> np.ndarray:
        found = super().covered_places(iteration)
        return found + self.more[: len(found)]

    def missing(self, iteration: int | None, first: int, end: int) -> np.ndarray:
        self.looks.append(first)
        return super().missing(iteration, first, end)


class Compared:
    """A comparison that a test ends. waited: the seconds that it was asked for."""

    whole = True  # the trainer's sums are of all tensors

    def __init__(self) -> None:
        self.found: str | None = None
        self.waited: list[float] = []

    def differing(self, seconds: float) -> str | None:
        self.waited.append(seconds)
        return self.found


class Replica:
    """said: what was asked, in order. refuses: calls that raise UpdaterError. full: is no slot free? done: have workers
    written all?"""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.refuses: set[str] = set()
        self.full = False
        self.done = True
        self.building = False
        self.waited: list[float] = []
        self.comparison = Compared()

    def _hear(self, what: str, *values: Any) -> None:
        assert self.building == (what != "begin"), "one version at a time"
        if what in self.refuses:
            raise ReplicaError(f"{what} is refused")
        self.said.append((what, *values))
        self.building = what != "discard"

    def begin(self, iteration: int, values: StepValues) -> None:
        if self.full:
            raise NoFreeSlot("the update waits")
        self._hear("begin", iteration, values.groups[0]["lr"] if values.groups else None)

    def apply(self, bucket: int, elements: torch.Tensor) -> None:
        self._hear("apply", bucket, sorted(set(elements.tolist())), len(elements))

    def finish(self, buffers: Mapping[str, torch.Tensor]) -> None:
        self._hear("finish", *buffers)

    def discard(self) -> None:
        self._hear("discard")

    def compare(self, sums: Mapping[str, int]) -> Compared:
        self._hear("compare", dict(sums))
        return self.comparison

    def written(self, seconds: float) -> bool:
        assert self.building
        self.waited.append(seconds)
        return self.done

    def published(self) -> None:
        self.building = False


class Scene:
    """A builder between an engine and a replica. Gradients of iteration t are t in the first bucket, -t in the second.

    declared: does the job declare values of a step?"""

    def __init__(self, *, declared: bool = False) -> None:
        job = example_job(count=[40, 20], startup=False, rebuild=False, options={"lr": 0.5})
        job.step_values = ["lr"] if declared else []
        self.plan = plan_job(job)
        self.engine = Engine(self.plan.engine)
        self.records = StepRecords(job, Clock())
        self.replica = Replica()
        self.builder = VersionBuilder(self.plan, self.engine, self.records)  # type: ignore[arg-type]

    def come(self, iteration: int, *cells: tuple[int, int]) -> None:
        """These cells of an iteration are there."""
        for place, sign in zip(self.plan.iteration_buckets(iteration), (1, -1), strict=False):
            elements_of(self.engine.region(iteration), place)[:] = sign * iteration
        for first, end in cells:
            self.engine.cells(iteration)[first:end] = True

    def look(self, iteration: int, *cells: tuple[int, int]) -> list[Any]:
        """What the replica was asked at a look, after these cells have come."""
        self.come(iteration, *cells)
        return self._asked(lambda: self.builder.look(self.replica, iteration))  # type: ignore[arg-type]

    def keep(self, iteration: int, record: StepRecord) -> None:
        self.records.keep(iteration, record, 0, 0)

    def reserve(self, iteration: int) -> tuple[bool, list[Any]]:
        """Is there a slot, and what was the replica asked?"""
        self.come(iteration, FIRST, SECOND)
        before = len(self.replica.said)
        return self.builder.reserve(self.replica, iteration), self.replica.said[before:]  # type: ignore[arg-type]

    def conclude(self, iteration: int, record: StepRecord | None = None) -> list[Any]:
        """What the replica was asked when the verdict stood."""
        self.come(iteration, FIRST, SECOND)
        buckets = []
        for place in self.plan.iteration_buckets(iteration):
            data = self.engine.region(iteration)[place.offset : place.offset + place.nbytes]
            buckets.append(BucketCoverage(place, data, place.elements, ((0, place.elements),), {}))
        return self._asked(
            lambda: self.builder.conclude(self.replica, iteration, buckets, record)  # type: ignore[arg-type]
        )

    def _asked(self, act: Any) -> list[Any]:
        before = len(self.replica.said)
        act()
        return self.replica.said[before:]

    def publish(self) -> Built | None:
        built = self.builder.built(0)
        if built is not None:
            self.replica.published()
        return built

    def step(self, iteration: int, record: StepRecord | None = None) -> Built | None:
        """A whole iteration, and its version."""
        self.look(iteration, FIRST, SECOND)
        self.conclude(iteration, record)
        return self.publish()


def begun(iteration: int, lr: float | None = None) -> tuple[str, int, float | None]:
    return "begin", iteration, lr


def first(iteration: int) -> tuple[Any, ...]:
    return "apply", 0, [iteration], 40


def second(iteration: int) -> tuple[Any, ...]:
    return "apply", 1, [-iteration], 20


# -- looks ---------------------------------------------------------------------------------------------------


def test_a_bucket_is_handed_over_when_its_last_cell_has_come() -> None:
    at = Scene()
    assert at.look(3, (0, 19)) == []
    assert at.look(3, (19, 20)) == [begun(3), first(3)]
    assert at.look(3, (24, 33)) == []
    assert at.look(3, (33, 34)) == [second(3)]
    assert at.conclude(3) == [("finish",)], "nothing is left to hand over"
    assert at.publish() == Built("early")


def test_two_buckets_that_come_together_are_one_version() -> None:
    assert Scene().look(2, FIRST, SECOND) == [begun(2), first(2), second(2)]


def test_what_no_look_has_seen_is_handed_over_with_the_verdict() -> None:
    at = Scene()
    assert at.look(2, SECOND) == [begun(2), second(2)]
    assert at.conclude(2) == [first(2), ("finish",)]
    assert at.publish() == Built("early")


def test_a_version_that_never_waited_for_its_record_is_early() -> None:
    """Its iteration closed before a look at it."""
    at = Scene()
    assert at.conclude(2) == [begun(2), first(2), second(2), ("finish",)]
    assert at.publish() == Built("early")


def test_the_first_iteration_has_its_own_buckets() -> None:
    at = Scene()
    assert at.look(0, (0, 29)) == []
    assert at.look(0, (29, 30)) == [begun(0), ("apply", 0, [0.0], 60)]


def test_the_bits_have_the_last_word() -> None:
    """Two placing threads counted the same cell: a bucket with a hole would be applied."""
    at = Scene()
    at.engine.more[0] = 1
    assert at.look(2, (0, 19)) == []
    assert at.engine.looks == [0]
    assert at.look(2, (19, 20)) == [begun(2), first(2)], "21 of 20 cells are counted"


def test_a_look_at_nothing_new_costs_no_look_at_bits() -> None:
    at = Scene()
    at.engine.more[0] = 1
    at.look(2, (0, 19))
    at.look(2)
    assert at.engine.looks == [0], "a bucket that seems complete, once"
    at.look(2, (24, 25))
    assert at.engine.looks == [0, 0]
    at.look(3, (0, 19), (24, 25))
    assert at.engine.looks == [0, 0, 0], "of another iteration the same numbers say something new"


def test_the_bits_of_what_was_handed_over_are_not_read_again() -> None:
    at = Scene()
    at.look(2, FIRST)
    at.look(2, SECOND)
    assert at.engine.looks == [0, 24]


def test_an_iteration_without_a_cell_asks_for_nothing() -> None:
    at = Scene()
    assert at.look(2) == [] and at.engine.looks == []


# -- values --------------------------------------------------------------------------------------------------


def test_nothing_is_begun_without_a_record_before_values_may_be_assumed() -> None:
    at = Scene(declared=True)
    assert at.look(2, FIRST, SECOND) == []
    assert at.conclude(2, HALF) == [begun(2, 0.5), first(2), second(2), ("finish",)]
    assert at.publish() == Built("at_record")


def test_a_record_that_is_here_first_needs_no_assumption() -> None:
    at = Scene(declared=True)
    at.keep(2, HALF)
    assert at.look(2, FIRST) == [begun(2, 0.5), first(2)]
    assert at.conclude(2, HALF) == [second(2), ("finish",)]
    assert at.publish() == Built("early")


def agreed() -> Scene:
    """Three records have agreed: a rate of 0.5 is assumed for iteration 5."""
    at = Scene(declared=True)
    assert [at.step(t, HALF) for t in (2, 3, 4)] == [Built("at_record")] * 3
    return at


def test_values_that_are_assumed_and_right() -> None:
    at = agreed()
    assert at.look(5, FIRST) == [begun(5, 0.5), first(5)]
    at.keep(5, HALF)
    assert at.look(5, SECOND) == [second(5)]
    assert at.conclude(5, HALF) == [("finish",)] and at.publish() == Built("early")
    assert at.conclude(6, HALF)[0] == begun(6, 0.5)
    assert at.publish() == Built("early"), "the record was not waited for"


def test_a_record_between_two_looks_says_otherwise() -> None:
    """All that was handed over is handed over again, with what the record says."""
    at = agreed()
    at.look(5, FIRST)
    at.keep(5, QUARTER)
    assert at.look(5, SECOND) == [("discard",), begun(5, 0.25), first(5), second(5)]
    assert at.conclude(5, QUARTER) == [("finish",)]
    assert at.publish() == Built("early", rebuilt=1)
    assert at.step(6, QUARTER) == Built("at_record"), "and the next one was not begun in vain"


def test_a_record_that_says_otherwise_when_the_verdict_stands() -> None:
    at = agreed()
    at.look(5, FIRST, SECOND)
    assert at.conclude(5, QUARTER) == [("discard",), begun(5, 0.25), first(5), second(5), ("finish",)]
    assert at.publish() == Built("at_record", rebuilt=1)


def test_a_record_that_differs_before_anything_was_begun_costs_nothing() -> None:
    at = agreed()
    assert at.conclude(5, QUARTER) == [begun(5, 0.25), first(5), second(5), ("finish",)]
    assert at.publish() == Built("at_record")


def test_buffers_of_the_record_are_taken_at_the_end() -> None:
    at = Scene(declared=True)
    record = StepRecord([{"lr": 0.5}], buffers={"mean": torch.ones(3)})
    assert at.conclude(2, record)[-1] == ("finish", "mean")


# -- what is refused -----------------------------------------------------------------------------------------


def test_no_free_slot_at_a_look_is_tried_again_when_more_has_come() -> None:
    at = Scene()
    at.replica.full = True
    assert at.look(2, FIRST) == []
    at.replica.full = False
    assert at.look(2) == [], "nothing has come"
    assert at.look(2, (24, 25)) == [begun(2), first(2)]


def test_a_bucket_that_is_refused_at_a_look_ends_the_version() -> None:
    at = Scene()
    at.look(2, FIRST)
    at.replica.refuses = {"apply"}
    assert at.look(2, SECOND) == [("discard",)]
    at.replica.refuses = set()
    assert at.look(2) == [], "nothing has come"
    assert at.conclude(2) == [begun(2), first(2), second(2), ("finish",)]
    assert at.publish() == Built("early"), "and is not counted as a record that said otherwise"


def test_a_record_of_no_use_ends_what_was_begun() -> None:
    at = agreed()
    at.look(5, FIRST)
    at.keep(5, USELESS)
    assert at.look(5, SECOND) == [("discard",)]
    with pytest.raises(ReplicaError, match="loss scale"):
        at.conclude(5, USELESS)
    assert at.replica.said[-1] == ("discard",)


@pytest.mark.parametrize(("call", "asked"), [
    ("begin", []), ("apply", [begun(2), ("discard",)]), ("finish", [begun(2), first(2), second(2), ("discard",)]),
])
def test_what_is_refused_when_the_verdict_stands_is_said(call: str, asked: list[Any]) -> None:
    """And nothing is being built: the next version is begun as if this one had never been."""
    at = Scene()
    at.replica.refuses = {call}
    with pytest.raises(ReplicaError, match=f"{call} is refused"):
        at.conclude(2)
    assert at.replica.said == asked and not at.builder.reads
    at.replica.refuses = set()
    assert at.look(3, FIRST) == [begun(3), first(3)]
    assert at.conclude(3) == [second(3), ("finish",)]


def test_what_was_begun_in_vain_is_not_counted_for_the_next_version() -> None:
    at = agreed()
    at.look(5, FIRST)
    at.replica.refuses = {"finish"}
    with pytest.raises(ReplicaError):
        at.conclude(5, QUARTER)
    at.replica.refuses = set()
    at.conclude(6, QUARTER)
    assert at.publish() == Built("at_record")


# -- a slot for an iteration that is complete ---------------------------------------------------------------


def test_a_slot_is_begun_once() -> None:
    at = Scene()
    assert at.reserve(2) == (True, [begun(2)])
    assert at.reserve(2) == (True, [])
    assert at.conclude(2) == [first(2), second(2), ("finish",)] and at.publish() == Built("early")


def test_a_slot_that_is_not_free_is_asked_for_again_and_again() -> None:
    at = Scene()
    at.replica.full = True
    assert at.reserve(2) == at.reserve(2) == (False, [])
    at.replica.full = False
    assert at.reserve(2) == (True, [begun(2)])


def test_a_slot_is_begun_with_what_the_record_says() -> None:
    at = agreed()
    at.look(5, FIRST)
    at.keep(5, QUARTER)
    assert at.reserve(5) == (True, [("discard",), begun(5, 0.25)])
    assert at.conclude(5, QUARTER) == [first(5), second(5), ("finish",)]
    assert at.publish() == Built("at_record", rebuilt=1)


def test_what_was_begun_with_other_values_is_dropped_though_no_slot_is_free() -> None:
    at = agreed()
    at.look(5, FIRST)
    at.keep(5, QUARTER)
    at.replica.full = True
    assert at.reserve(5) == (False, [("discard",)])
    at.replica.full = False
    assert at.reserve(5) == (True, [begun(5, 0.25)])


def test_a_slot_alone_does_not_make_a_version_early() -> None:
    """Its buckets waited for the record."""
    at = Scene(declared=True)
    at.keep(2, HALF)
    assert at.reserve(2) == (True, [begun(2, 0.5)])
    at.conclude(2, HALF)
    assert at.publish() == Built("at_record")


def test_what_else_is_wrong_is_no_reason_to_wait() -> None:
    """It is said when the verdict stands."""
    at = agreed()
    at.look(5, FIRST)
    at.keep(5, USELESS)
    assert at.reserve(5) == (True, [("discard",)])
    with pytest.raises(ReplicaError, match="loss scale"):
        at.conclude(5, USELESS)
    at.replica.refuses = {"begin"}
    assert at.reserve(6) == (True, [])


# -- the end -------------------------------------------------------------------------------------------------


def test_a_version_is_built_when_workers_have_written_it() -> None:
    at = Scene()
    at.conclude(2)
    at.replica.done = False
    assert at.builder.built(0.25) is None and at.builder.reads
    at.replica.done = True
    assert at.builder.built(-1) == Built("early", differs=None) and not at.builder.reads
    assert at.replica.waited == [0.25, -1]


@pytest.mark.parametrize("differs", ["", "layer0.bias"])
def test_a_version_is_built_when_it_was_compared(differs: str) -> None:
    """The arena may be taken again as soon as all is written."""
    at, record = Scene(), StepRecord(checksums={"layer0.weight": "00000000000000ff"})
    assert not at.builder.reads
    at.conclude(2, record)
    at.replica.done = False
    assert at.builder.built(0.5) is None and at.builder.reads and at.replica.said[-1] == ("finish",)
    at.replica.done = True
    assert at.builder.built(0.5) is None and not at.builder.reads
    assert at.replica.said[-1] == ("compare", {"layer0.weight": 255}) and at.replica.comparison.waited == []
    assert at.builder.built(0.75) is None
    at.replica.comparison.found = differs
    assert at.builder.built(-1) == Built("early", differs=differs)
    assert at.replica.comparison.waited == [0.75, -1] and at.replica.waited == [0.5, 0.5]


def test_checksums_of_one_version_are_not_those_of_the_next() -> None:
    at = Scene()
    at.conclude(2, StepRecord(checksums={"layer0.weight": "00000000000000ff"}))
    at.replica.comparison.found = ""
    assert at.publish() is None and at.publish() == Built("early", differs="")
    at.conclude(3)
    assert at.publish() == Built("early", differs=None)


def test_every_version_begins_with_none_of_its_buckets() -> None:
    at = Scene()
    assert at.step(2) == at.step(3) == Built("early")
    assert at.replica.said == [
        begun(2), first(2), second(2), ("finish",), begun(3), first(3), second(3), ("finish",),
    ]


def test_a_verdict_that_does_not_stand_drops_what_was_begun() -> None:
    at = Scene()
    at.look(2, FIRST)
    at.builder.drop()
    assert at.replica.said[-1] == ("discard",)
    at.builder.drop()
    assert at.replica.said.count(("discard",)) == 1
    assert at.look(2) == [begun(2), first(2)], "what is there may be begun again"


def test_what_was_begun_in_vain_before_a_drop_is_forgotten() -> None:
    at = agreed()
    at.look(5, FIRST)
    at.keep(5, QUARTER)
    at.look(5, SECOND)
    at.builder.drop()
    at.conclude(6, HALF)
    assert at.publish() == Built("early")


def test_what_was_concluded_is_not_dropped() -> None:
    """Workers are at it; the caller publishes or discards it."""
    at = Scene()
    at.conclude(2)
    at.builder.drop()
    assert at.replica.said[-1] == ("finish",) and at.publish() == Built("early")


def test_a_drop_of_nothing_asks_for_nothing() -> None:
    at = Scene()
    at.builder.drop()
    assert at.replica.said == []
