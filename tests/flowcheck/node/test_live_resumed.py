"""A live session that goes on with the replica that an earlier process left (holes_scene.py: a version is 0.5 less than
the one before it, the one after iteration 1 is 1.0)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowcheck.rebuild.version.events import Begun, Held, Patched, Resumed
from updater.reader import Reader

from .holes_scene import HOLE, Scene
from .live_scene import NAMES, alike, small_job
from .test_live_begin import BUFFER, CONSTANT, EVERYTHING, MEAN, after, job_with

START = "0" * 64
STEPS = 4, 5  # of versions that the process before has published; a third slot was what it built in


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Scene]:
    """Sessions of one start of a job, one after the other, as processes of a node are."""
    return lambda **options: Scene(monkeypatch, **{"empty": True, "folder": tmp_path, "job_start": START, **options})


def killed_after(scene: Callable[..., Scene], iteration: int, **options: Any) -> Path:
    """The file of a session that ended behind the version that this iteration made; it began with iteration 2."""
    at = scene(**options)
    at.go(2)
    at.ask()
    at.answer(3, after(3))
    for t in range(3, iteration + 1):
        at.go(t)
    assert at.session.serves == iteration
    return left_by(at)


def left_by(at: Scene) -> Path:
    at.session.close()
    assert at.folder is not None
    [path] = at.folder.glob("*.replica")
    return path.rename(at.folder / "left.replica")


def test_the_very_next_iteration_needs_nothing_of_the_trainers(scene: Callable[..., Scene]) -> None:
    """Its gradients are all here, and the version before it, too."""
    left = killed_after(scene, 4)
    at = scene(left=left, wire=range(5, 12))
    assert at.said == [Resumed(left, STEPS), Begun(5, 0)] and at.session.serves == 4, "and meanwhile it is served"
    at.poll()
    assert at.closed == [], "its traffic is here, and its record may still come"
    at.go(5)
    assert at.last == (5, True, 0, 0) and at.values() == alike(after(5)) and len(at.said) == 2
    at.go(6, checksums=at.sums(after(6)))
    assert at.last == (6, True, 0, 0) and at.closed[-1].status == "verified"
    assert at.partial.asked == 0 and at.lost == [] and at.files == 0
    assert Reader(left).steps[-2:] == [6, 7]


def test_of_that_iteration_only_what_was_lost_is_asked_for(scene: Callable[..., Scene]) -> None:
    left = killed_after(scene, 4)
    at = scene(left=left, holes={5: HOLE}, wire=range(5, 12))
    at.go(5)
    assert at.said[1:] == [Begun(5, 0), Held(5, 6, False, "gradients were lost")] and not at.closed[-1].published
    assert at.ask() == 6
    at.answer(6, after(6))
    at.go(6, checksums=at.sums(after(6)))
    assert at.last == (6, True, 6, 0) and at.values() == alike(after(6)) and at.closed[-1].status == "verified"


@pytest.mark.parametrize("first", [6, 9])
def test_after_a_gap_everything_is_stale_and_the_old_version_is_served(
    scene: Callable[..., Scene], tmp_path: Path, first: int
) -> None:
    left = killed_after(scene, 4)
    at = scene(left=left, wire=range(first, 16))
    at.go(first)
    missed = f"iteration{'s 5 to' if first > 6 else ''} {first - 1} passed while no packet came"
    assert at.said[2:] == [Held(first - 1, EVERYTHING, True, missed)] and not at.closed[-1].published
    assert at.session.serves == 4 and at.values() == alike(after(4)) and Reader(left).steps[-1] == 5
    assert at.ask() == EVERYTHING
    at.answer(first + 2, after(first + 2))
    at.go(first + 1)
    assert at.session.serves == 4 and Reader(left).steps[-1] == 5
    at.go(first + 2)
    assert at.last == (first + 2, True, EVERYTHING, 0) and at.values() == alike(after(first + 2))
    assert at.said[-1] == Patched(first + 2, 5, EVERYTHING, 4 * EVERYTHING)
    assert list(tmp_path.iterdir()) == [left] and Reader(left).steps[-1] == first + 3


def test_a_late_record_of_an_iteration_that_it_has_is_passed_over(scene: Callable[..., Scene]) -> None:
    """Rank 1 had not sent it when the process before was killed."""
    left = killed_after(scene, 4)
    at = scene(left=left, wire=range(5, 12))
    assert at.record(4, 1) == "" and at.closed == []
    at.go(5)
    assert at.last == (5, True, 0, 0) and at.said[1:] == [Begun(5, 0)] and at.values() == alike(after(5))


def test_an_iteration_whose_record_nobody_sent_is_lost_whole(scene: Callable[..., Scene]) -> None:
    """Its traffic came all the same: the trainers had not come back yet. Who has is past it, and is not waited for."""
    left = killed_after(scene, 4)
    at = scene(left=left, wire=range(5, 12))
    at.go(6)
    assert [one.iteration for one in at.closed] == [5, 6] and at.waiting == []
    assert isinstance(at.said[2], Held) and at.said[2].all and at.session.serves == 4
    assert at.ask() == EVERYTHING
    at.answer(7, after(7))
    at.go(7)
    assert at.last == (7, True, EVERYTHING, 0) and at.values() == alike(after(7))


def test_constants_are_there_and_buffers_come(scene: Callable[..., Scene]) -> None:
    """A constant is asked for once in a job, and of rank 0 alone."""
    job = job_with(BUFFER, CONSTANT, buffers=False)
    at = scene(job=job)
    at.go(2, buffers=MEAN)
    at.ask()
    at.answer(3, 1.0)
    at.go(3, buffers=MEAN)
    assert at.last[1] and at.session.serves == 3
    left = left_by(at)
    at = scene(job=job, left=left, wire=range(8, 15))
    at.go(8, buffers=MEAN)
    assert isinstance(at.said[-1], Held) and at.said[-1].stale == EVERYTHING
    assert {name for _, _, ranges in at.partial.ask(1 << 20, (0, 1)) for name, _, _ in ranges} <= set(NAMES)


@pytest.mark.parametrize("change", [
    {"job_start": "1" * 64}, {"slots": 4}, {"job": small_job(count=[40, 21])},
    {"job": small_job(options={"lr": 0.5, "momentum": 0.5})},
], ids=["start", "slots", "layout", "optimizer"])
def test_another_start_or_layout_begins_with_a_file_of_its_own(
    scene: Callable[..., Scene], tmp_path: Path, change: dict[str, Any]
) -> None:
    left = killed_after(scene, 4)
    before = left.read_bytes()
    at = scene(left=left, wire=range(5, 12), **change)
    assert at.said == [] and at.session.serves == -1 and at.files == 1
    at.go(5)
    assert isinstance(at.said[0], Begun) and at.said[0].elements >= EVERYTHING
    assert left.read_bytes() == before and Reader(left).steps[-1] == 5


def test_a_file_that_another_process_writes_is_left_alone(scene: Callable[..., Scene]) -> None:
    left = killed_after(scene, 4)
    one = scene(left=left, wire=range(5, 12))
    other = scene(left=left, wire=range(5, 12))
    assert one.said[0] == Resumed(left, STEPS) and other.said == [] and other.files == 1


def test_what_rests_on_a_peer_is_not_built_upon(scene: Callable[..., Scene]) -> None:
    """Its mark would be lost with the process, so all of it is asked for, with the next iteration."""
    left = killed_after(scene, 4)
    at = scene(left=left, wire=range(5, 12))
    replica = at.session.replica
    assert replica is not None and replica._replica is not None
    replica._replica._store.set_remarks(replica._replica.current.index, b'["unverified", ["3 cells came from a peer"]]')
    at.session.close()
    at = scene(left=left, wire=range(5, 12))
    at.record(5)
    assert at.said == [Resumed(left, STEPS)], "the version cannot be left, nor gone on from"
    at.record(6)
    assert at.said[1:] == [Begun(6, EVERYTHING)]


def test_how_far_the_trainers_are_is_said_in_the_file(scene: Callable[..., Scene]) -> None:
    left = killed_after(scene, 4)
    with_times = Reader(left)
    assert with_times.heard == 5 and with_times.times[5] is not None
    at = scene(left=left, wire=())
    at.record(40)
    assert Reader(left).heard == 41 and Reader(left).steps[-1] == 5
    at.record(41, 1)
    at.record(12, 1)
    assert Reader(left).heard == 42
