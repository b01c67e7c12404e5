"""Jobs that a rehearsal follows: a node's own placing threads, on rings in memory, and what is kept of each job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("dataplane.pydpdk._dpdk", reason="the dataplane is not built: libdpdk was not found")

from flowcheck.errors import EnvironmentProblem
from flowcheck.job.model import Job
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.ports.captures import plan_captures
from flowcheck.node.ports.port import Port
from flowcheck.node.rehearse import jobs as rehearsal_jobs
from flowcheck.node.rehearse.jobs import MOST_REASONS, Followed, follow
from flowcheck.rebuild.iteration.deadline import Times
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.events import GivenUp, Timed
from lab.synth import example_job, generate

from .conftest import LONGEST
from .test_port import Opened
from .test_rehearsal_report import closed


@pytest.fixture
def followed() -> Followed:
    return Followed(plan_job(example_job(ranks=3, count=[64])))


def timed(iteration: int, rings: tuple[int, int] = (1, 8), arenas: tuple[int, int] = (1, 4), **at: Any) -> Timed:
    return Timed(Times(iteration, **at), rings, arenas)


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_the_fullest_ring_is_the_one_with_the_largest_part_of_it(followed: Followed) -> None:
    for rings, fullest in (((0, 4), (0, 1)), ((2, 8), (2, 8)), ((3, 16), (2, 8)), ((5, 16), (5, 16)),
                           ((10, 32), (5, 16)), ((1, 1), (1, 1))):
        followed.take(timed(1, rings))
        assert followed.ring == fullest
    for arenas, most in (((2, 4), (2, 4)), ((1, 4), (2, 4)), ((3, 4), (3, 4))):
        followed.take(timed(1, arenas=arenas))
        assert followed.arenas == most


def test_times_of_which_an_end_is_not_known_are_left_out(followed: Followed) -> None:
    followed.take(timed(4, first=0, covered=3, next=10))  # before an iteration has closed none was joined
    followed.take(closed(5))
    for one in (timed(5, first=0, covered=1, next=9), timed(6, first=10, covered=30), timed(7, covered=2, next=9),
                timed(8, first=20, next=45), timed(9, first=50, covered=70, next=90)):
        followed.take(one)
    assert (followed.periods, followed.left) == ([10, 25, 40], [7, 20])
    followed.take(GivenUp(8, (7, 8), False))
    followed.take(GivenUp(9, (7, 8), False))
    assert followed.given_up == 2


def test_of_each_iteration_the_first_reason_counts_and_reasons_are_bounded(followed: Followed) -> None:
    followed.take(closed(0))
    both = closed(1, "covered")
    both.why.append(("anchored", "anchored of 1"))
    followed.take(both)
    assert followed.why == {"covered of 1": 1} and followed.complete == [False]
    for iteration in range(2, 2 * MOST_REASONS):
        followed.take(closed(iteration, "covered", {"lost": 1}))
    assert len(followed.why) == MOST_REASONS and "covered of 64" in followed.why and "covered of 65" not in followed.why
    followed.take(closed(1, "covered"))
    followed.take(closed(200, "covered"))
    assert followed.why["covered of 1"] == 2 and len(followed.why) == MOST_REASONS
    assert followed.missing == {"lost": 2 * MOST_REASONS - 2} and len(followed.complete) == 2 * MOST_REASONS + 1


# -- following ---------------------------------------------------------------------------------------------------------


class Scene:
    """Two jobs on one ring. Time passes for `follow` when the test says so: `looks` are its calls of look."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, **capture: Any) -> None:
        self.config = NodeConfig.model_validate({
            "control": {"listen": "localhost:1", "token_file": "t"}, "capture": {"device": "ring", **capture},
            "replica": {"directory": str(root)}})
        self.planned = plan_captures(self.config, root)
        self.opened, self.packets, self.newest = Opened(1), list[tuple[int, bytes]](), time.time_ns()
        self.now, self.looks, self.end = 50.0, 0, time.monotonic() + LONGEST
        self.slept: list[float] = []
        patch.setattr(rehearsal_jobs, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        time.sleep(seconds)

    def follow(self, followed: list[Followed], done: Callable[[], bool]) -> None:
        """Until it is done, and a second of its time."""
        def look() -> None:
            assert time.monotonic() < self.end
            self.looks += 1
            self.opened._rings[0].put(self.packets)  # what came before anybody followed is nobody's
            self.packets = []
            if done():
                self.now += 0.5

        sources: list[Any] = [self.opened]
        follow(self.config, self.planned, sources, followed, 1.0, look)

    def put(self, job: Job, *iterations: int, loss: float = 0.0) -> None:
        for iteration in iterations:
            made = list(generate(job, iterations=1, first_iteration=iteration, seed=1, loss=loss).packets)
            begin = self.newest + 1_000_000 - made[0][0]
            self.packets += [(begin + at, frame) for at, frame in made]
            self.newest = begin + made[-1][0]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    yield Scene(tmp_path, monkeypatch)


def followed_of(seed: int, ranks: int) -> Followed:
    job = example_job(ranks=ranks, count=[600, 300], seed=seed)
    job.run_id = f"job {seed}"
    return Followed(plan_job(job, streams=1, threads=1))


def test_jobs_are_followed_side_by_side(scene: Scene) -> None:
    first, second = followed_of(1, 2), followed_of(2, 3)
    scene.put(first.plan.job, 4, 5, 6, 7)
    scene.follow([first, second], lambda: len(first.complete) == 3)
    assert first.complete == [True] * 3 and first.missing == {} and first.given_up == 0
    assert first.seen == first.placed == list(range(len(first.plan.job.flows)))
    assert len(first.periods) == 2 and min(first.periods) > 0 and first.arenas[1] == 4
    assert (second.complete, second.seen, second.placed) == ([], [], [])
    assert scene.looks >= 2 and scene.now == 51.0 and set(scene.slept) <= {rehearsal_jobs.IDLE_SECONDS}


def test_what_is_lost_of_a_job_is_kept_with_its_cause(scene: Scene) -> None:
    one = followed_of(2, 3)
    job = one.plan.job
    scene.put(job, 4)
    scene.put(job, 5, loss=0.8)
    scene.put(job, 6, 7, 8)
    scene.follow([one], lambda: len(one.complete) == 4)
    assert one.complete[0] is False and one.complete[1:] == [True] * 3 and sum(one.missing.values()) > 0
    assert sum(one.why.values()) == 1


def test_it_rests_only_where_no_job_had_anything_to_do(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a session is told: no state comes, so it makes no replica."""
    turns, told = [(True, False), (False, True), (False, False), (True, True)], list[dict[str, Any]]()

    class Session:
        def __init__(self, plan: Any, sources: Any, **more: Any) -> None:
            self.number, self.engine = len(told), None
            told.append({"plan": plan, "sources": sources} | more)

        @property
        def moved(self) -> bool:
            return turns[scene.looks][self.number]

        def poll(self) -> list[Any]:
            return []

        place_in_threads = leave_threads = close = lambda *_: None

    monkeypatch.setattr(rehearsal_jobs, "LiveSession", Session)
    monkeypatch.setattr(rehearsal_jobs, "edges_with", lambda plan, engine, what: [what])
    first, second = followed_of(1, 2), followed_of(2, 3)
    slept: list[int] = []
    monkeypatch.setattr(rehearsal_jobs.time, "sleep", lambda seconds: slept.append(scene.looks))
    scene.follow([first, second], lambda: scene.looks > 2)
    assert slept == [3] and scene.looks == 4
    assert [one["plan"] for one in told] == [first.plan, second.plan] and first.seen == ["seen"]
    assert all(one["record_seconds"] == scene.config.record_seconds for one in told)
    assert all(isinstance(one["port"], Port) and one["sources"] == one["port"].queues for one in told)


def test_cores_that_may_not_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = Scene(tmp_path, monkeypatch, place_cores=[1000])
    with pytest.raises(EnvironmentProblem) as refused:
        at.follow([followed_of(1, 2)], lambda: True)
    assert refused.value.what == "a placing thread cannot be pinned: Invalid argument"
    assert (refused.value.where, at.looks) == ("capture.place_cores", 0) and refused.value.remedy
