"""A live session begins without a state: from which record on, what is asked of whom, when a version is complete
(holes_scene.py: a version is 0.5 less than the one before it, the one after iteration 1 is 1.0)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.job.model import Job, ModelEntry
from flowcheck.rebuild.version.events import Begun, Held, Patched
from updater.reader import Reader

from .holes_scene import HOLE, Scene
from .live_scene import NAMES, alike, small_job

EVERYTHING = 60  # elements of the job's model
BUFFER, CONSTANT = ModelEntry("mean", [3], kind="buffer"), ModelEntry("fixed", [5], "int64", kind="constant")
MEAN = {"mean": torch.tensor([1.0, 2.0, 3.0])}


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    return lambda **options: Scene(monkeypatch, **{"empty": True, **options})


def job_with(*entries: ModelEntry, **options: Any) -> Job:
    job = small_job(**options)
    job.model += entries
    return job


def after(iteration: int) -> float:
    return 1.0 - 0.5 * (iteration - 1)


@pytest.mark.parametrize("threads", [0, 2])
def test_the_first_record_begins_and_the_first_version_is_one_that_was_patched(
    scene: Callable[..., Scene], tmp_path: Path, threads: int
) -> None:
    at = scene(threads=threads, folder=tmp_path)
    assert at.said == [] and at.session.next is None and at.session.serves == -1
    at.go(2)
    assert at.said == [Begun(2, EVERYTHING)] and at.last == (2, False, 0, EVERYTHING) and at.lost == []
    assert at.closed[-1].why[0][0] == "covered" and at.session.serves == -1 and list(tmp_path.iterdir()) == []
    assert at.ask() == EVERYTHING and at.partial.asked == 4 * EVERYTHING
    at.answer(4, after(4))
    at.go(3)
    assert at.last == (3, False, 0, EVERYTHING) and list(tmp_path.iterdir()) == []
    at.go(4)
    assert at.last == (4, True, EVERYTHING, 0) and at.values() == alike(after(4)) and at.session.serves == 4
    assert at.said[1:] == [Patched(4, 2, EVERYTHING, 4 * EVERYTHING)]
    assert Reader(tmp_path / "1.replica").steps == [5] and at.closed[-1].status == "unverified"
    at.go(5, checksums=at.sums(after(5)))
    assert at.last == (5, True, 0, 0) and at.closed[-1].status == "verified" and at.partial.asked == 4 * EVERYTHING


def test_it_comes_in_slices_each_at_its_own_step_and_never_twice(scene: Callable[..., Scene]) -> None:
    """Elements 10 to 16 are lost once more when they have come already."""
    at = scene(holes={5: HOLE})
    at.go(2)
    left, step = EVERYTHING, 3
    while left:
        found = at.ask(4 * 20)
        assert found == min(left, 20)
        at.answer(step, after(step))
        at.go(step)
        left += (6 if step == 5 else 0) - found
        assert at.last == (step, not left, found, left)
        step += 1
    assert step == 7 and at.values() == alike(after(6)) and at.partial.asked == 4 * (EVERYTHING + 6)


def test_it_begins_at_the_oldest_record_without_a_gap_behind_it(scene: Callable[..., Scene]) -> None:
    at = scene(empty=False)
    for t in (2, 3, 5, 6):
        at.record(t)
    at.take(at.joining.ranges.give_up("nothing is stale, so this ends nothing"))
    assert at.lost == []
    other = scene()
    other.record(7)
    assert other.said == [Begun(7, EVERYTHING)]
    records = other.follower.records
    assert records.since(0) == 7 and records.since(8) is None
    for t, first in ((9, 9), (8, 7), (4, 7), (5, 7), (6, 4)):
        other.record(t)
        assert records.since(0) == first
    assert records.since(6) == 6


def test_the_record_of_an_iteration_that_has_closed_begins_with_the_next_one(scene: Callable[..., Scene]) -> None:
    """Gradients are here before the record is. While nothing waits for records, an iteration closes as soon as it is
    whole."""
    at = scene()
    at.poll()
    assert at.closed[-1].iteration == 15 and at.lost == []
    at.record(15)
    assert at.said == [Begun(16, EVERYTHING)]
    at.traffic(16)
    at.poll()
    assert at.closed[-1].iteration == 15, "it waits for its own"
    at.record(16)
    at.poll()
    assert at.last == (16, False, 0, EVERYTHING)


def test_constants_are_asked_of_rank_0_and_buffers_of_nobody(scene: Callable[..., Scene], tmp_path: Path) -> None:
    at = scene(job=job_with(CONSTANT, BUFFER), folder=tmp_path)
    at.record(2, 1)
    assert at.said == [], "DDP's buffers are those of rank 0, and so are the records that count"
    at.record(2, 0, MEAN)
    assert at.said == [Begun(2, EVERYTHING + 5 + 3)]
    at.poll()
    assert at.last == (2, False, 0, EVERYTHING + 5), "the record has brought the buffer"
    assert at.ask(ranks=(1,)) == EVERYTHING
    at.answer(3, after(3))
    at.record(3, 1)
    at.record(3, 0, MEAN)
    at.poll()
    assert at.last == (3, False, EVERYTHING, 5) and list(tmp_path.iterdir()) == []
    assert at.ask(ranks=(0, 1)) == 5 and at.asked[0][0] == 0 and at.asked[0][2] == [("fixed", 0, 5)]
    at.answer(4, 3)
    at.record(4, 0, MEAN)
    at.poll()
    assert at.last == (4, True, 5, 0) and at.partial.asked == 4 * EVERYTHING + 8 * 5
    with Reader(tmp_path / "1.replica").pinned() as version:
        assert version.parameters["fixed"].tolist() == [3] * 5 and version.parameters["mean"].tolist() == [1, 2, 3]
        assert {name: set(version.parameters[name].flatten().tolist()) for name in NAMES} == alike(after(4))


def test_a_record_without_the_buffers_makes_no_version_complete(scene: Callable[..., Scene]) -> None:
    at = scene(job=job_with(BUFFER))
    at.record(2, 0)
    at.poll()
    assert at.ask() == EVERYTHING
    at.answer(3, after(3))
    at.record(3, 1)
    at.record(3, 0, checksums=at.sums(after(3)) | {"mean": "0" * 16})
    at.poll()
    assert at.last == (3, False, EVERYTHING, 3) and at.lost == [], "a sum of what is not here proves nothing"
    at.record(4, 0, MEAN)
    at.poll()
    assert at.last == (4, True, 0, 0)


def test_constants_outlast_a_leap(scene: Callable[..., Scene]) -> None:
    """They are as they were; all else is stale again."""
    at = scene(job=job_with(CONSTANT))
    at.go(2)
    at.ask()
    at.answer(3, 7)
    at.go(3)
    assert at.last[:2] == (3, True)
    other = scene(job=job_with(CONSTANT))
    other.go(2)
    other.ask(budget=8 * 5)
    other.answer(3, 7)
    other.go(3)
    assert other.last == (3, False, 5, EVERYTHING)
    other.ask(budget=4 * 10)
    other.answer(4, after(4))
    other.go(4)
    assert other.last == (4, False, 10, EVERYTHING - 10)
    other.now += 11
    other.poll()
    assert other.said[-1] == Held(5, EVERYTHING, True, other.said[-1].why), "not the constants"


@pytest.mark.parametrize("lacks", ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", ""])
def test_all_that_the_optimizer_keeps_has_to_come(scene: Callable[..., Scene], lacks: str) -> None:
    at = scene(job=small_job(optimizer="adam", options={"lr": 0.5, "amsgrad": True}))
    at.go(2)
    at.ask()
    whole = {"step": 3.0, "exp_avg": 0.25, "exp_avg_sq": 4.0, "max_exp_avg_sq": 4.0}
    at.answer(3, 0.0, {key: value for key, value in whole.items() if key != lacks})
    at.go(3)
    if lacks:
        assert at.last[:2] == (3, False) and f"without its {lacks}" in at.partial.refused
        return
    assert at.last == (3, True, EVERYTHING, 0) and at.session.replica is not None
    with at.session.replica.pinned() as version:
        for state in version.optimizer_state.values():
            assert {key: set(tensor.flatten().tolist()) for key, tensor in state.items()} == {
                key: {value} for key, value in whole.items()
            }
    at.go(4)
    with at.session.replica.pinned() as version:
        assert {float(state["step"]) for state in version.optimizer_state.values()} == {4.0}


def test_a_momentum_has_to_come(scene: Callable[..., Scene]) -> None:
    at = scene(job=small_job(options={"lr": 0.5, "momentum": 0.5}))
    at.go(2)
    at.ask()
    at.answer(3, 0.0)
    at.go(3)
    assert "without its momentum_buffer" in at.partial.refused


def test_an_iteration_lost_whole_begins_it_anew(scene: Callable[..., Scene]) -> None:
    at = scene()
    at.go(2)
    at.ask(budget=4 * 17)
    at.answer(3, after(3))
    at.go(3)
    assert at.last == (3, False, 17, EVERYTHING - 17)
    at.now += 11
    at.poll()  # no record of iteration 4
    assert at.ended[-1] == (4, False, ["step_record"]) and at.lost == [] and at.session.serves == -1
    assert at.ask() == EVERYTHING
    at.answer(5, after(5))
    at.go(5)
    assert at.last == (5, True, EVERYTHING, 0) and at.values() == alike(after(5))


def test_who_cannot_be_asked_is_followed_by_a_state(scene: Callable[..., Scene], tmp_path: Path) -> None:
    at = scene(folder=tmp_path)
    at.go(2)
    at.take(at.joining.ranges.give_up("the trainer cannot"))
    assert at.lost == ["the trainer cannot"] and at.withdrawn == [False] and list(tmp_path.iterdir()) == []
    assert at.session.replica is None and at.session.next is None and at.joining.ranges.given_up
    at.state(3, after(2))
    at.go(3)
    assert at.closed[-1].published and at.values() == alike(after(3))


@pytest.mark.parametrize("served", [False, True])
def test_what_differs_is_withdrawn_and_begun_again(scene: Callable[..., Scene], tmp_path: Path, served: bool) -> None:
    at = scene(folder=tmp_path, wire=range(2, 6 if served else 5))
    at.go(2)
    at.ask(budget=4 * 40)  # the first entries
    at.answer(3, after(3))
    at.go(3)
    if served:
        at.ask()
        at.answer(4, after(4))
        at.go(4)
        assert at.closed[-1].published
    last = at.closed[-1].iteration + 1
    at.go(last, checksums=at.sums(17.0))
    assert at.lost[0].startswith("tensor ") and at.withdrawn == [served]
    assert at.session.replica is None and at.session.serves == -1 and at.closed[-1].status == "diverged"
    at.begin()
    assert at.session.next is None, "there is no record to begin with"
    at.traffic(last + 1, last + 2)
    at.go(last + 1)
    assert at.said[-1] == Begun(last + 1, EVERYTHING) and at.ask() == EVERYTHING
    at.answer(last + 2, after(last + 2))
    at.go(last + 2, checksums=at.sums(after(last + 2)))
    assert at.last[:2] == (last + 2, True) and at.closed[-1].status == "verified"
    assert Reader(tmp_path / "2.replica").steps == [last + 3]


def test_records_that_are_here_already_begin_at_once(scene: Callable[..., Scene]) -> None:
    at = scene(wire=(2, 3))
    at.go(2, checksums=at.sums(0.0))  # of stale entries: compared with nothing
    assert at.lost == []
    at.ask(budget=4 * 40)
    at.answer(3, after(3))
    for t in (4, 5):
        at.record(t)
    at.go(3, checksums=at.sums(17.0))
    assert len(at.lost) == 1
    at.begin()
    assert at.said[-1] == Begun(4, EVERYTHING)
    at.traffic(4)
    at.poll()
    assert at.last == (4, False, 0, EVERYTHING)


def test_what_is_served_stays_while_it_is_begun_again(scene: Callable[..., Scene], tmp_path: Path) -> None:
    """Something else than a sum has ended the chain: no other replica is needed."""
    at = scene(folder=tmp_path, wire=(2, 3, 4))
    at.go(2)
    at.ask()
    at.answer(3, after(3))
    at.go(3)
    at.engine.disagree(4, "extra message")
    at.go(4)
    assert len(at.lost) == 1 and at.session.serves == 3 and at.withdrawn == [False]
    at.engine.log.clear()
    at.begin()
    at.traffic(5, 6)
    at.go(5)
    assert at.said[-1] == Begun(5, EVERYTHING) and at.files == 1 and at.session.serves == 3
    assert at.values() == alike(after(3))
    at.ask()
    at.answer(6, after(6))
    at.go(6)
    assert at.last[:2] == (6, True) and at.values() == alike(after(6))


def test_trainers_that_were_away_are_not_waited_for(scene: Callable[..., Scene]) -> None:
    """Records come in order: none of iteration 4 comes after one of iteration 5."""
    at = scene(empty=False)
    at.go(2)
    at.go(3)
    at.record(5, 0)
    at.poll()
    assert at.closed[-1].iteration == 3, "rank 1 may still send one"
    at.record(5, 1)
    at.poll()
    [held] = at.said
    assert [one.iteration for one in at.closed[-2:]] == [4, 5]
    assert isinstance(held, Held) and (held.iteration, held.stale, held.all) == (4, EVERYTHING, True)
    at.ask()
    at.answer(6, after(6))
    at.go(6)
    assert at.last == (6, True, EVERYTHING, 0)


def test_a_mirror_that_was_down_longer_than_records_are_kept(scene: Callable[..., Scene]) -> None:
    at = scene(empty=False, wire=[2, *range(400, 410)])
    for t in range(2, 403):
        at.record(t, 0)
        at.record(t, 1)
        at.poll()
    assert at.lost == [] and at.closed[-1].iteration >= 400, "no record of these was kept, and nobody waits for one"
    step = at.closed[-1].iteration + 1
    at.go(step)
    assert at.ask() == EVERYTHING
    at.answer(step + 1, 5.0)
    at.go(step + 1)
    assert at.last[:2] == (step + 1, True) and at.values() == alike(5.0)
