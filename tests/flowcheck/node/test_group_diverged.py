"""What a group does when a checksum did not match: once it goes on from a new state, the second time it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowcheck.control.divergence import Divergence
from flowcheck.control.protocol import Manifest, Progress, Wanted
from flowcheck.rebuild.version.events import Closed, Lost

from .group_scene import FakeReplica, Scene, scenes, small_job

RUN = ("synth-0", 0, 2)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    with scenes(tmp_path) as make:
        yield make


def closed(at: Scene, iteration: int, status: str) -> None:
    at.session.replica = FakeReplica(iteration + 1)
    at.happens(Closed(iteration, True, status, 0, 0, {}, 0, 0, 0))


def diverge(at: Scene, step: int, *, withdrawn: bool = False) -> None:
    at.happens(Lost("tensor 'w' differs", withdrawn, step))
    at.turn()


def test_the_first_time_what_may_be_wrong_is_withdrawn_and_a_state_asked_for(scene, tmp_path: Path) -> None:
    at = scene(name="dp0")
    peer = at.follow()
    for iteration, status in ((3, "unverified"), (4, "verified"), (5, "follows 5"), (6, "follows 5")):
        closed(at, iteration, status)
    diverge(at, 8)
    wrong = Divergence("synth-0", 0, "dp0", 5, 7)
    assert at.written.withdrawn == [("dp0", tmp_path / "out" / "dp0" / "synth-0" / "epoch-0", wrong)]
    assert [json.loads(one.read_text())[0]["last"] for one in tmp_path.glob("*.diverged")] == [7]
    assert [(one["step"], one["verified"], one["times"]) for one in at.events("diverged")] == [(8, 5, 1)]
    assert peer.told[-2:] == [Progress(7, "diverged"), Wanted(["state"], "checkpoint wanted: tensor 'w' differs")]
    assert peer.ended == peer.refused == [] and at.events("job_refused") == []


def test_the_second_time_the_job_is_refused(scene) -> None:
    at = scene()
    peer = at.follow()
    diverge(at, 4)
    session = at.session
    closed(at, 6, "unverified")
    told = len(peer.told)
    diverge(at, 9)
    assert session.closed.is_set() and at.intake.plan is None and len(at.sessions) == 1
    [said] = at.events("job_refused")
    assert (said["run_id"], said["epoch"], peer.refused) == ("synth-0", 0, [said["why"]]) and peer.ended == []
    assert "tensor 'w' differs" in said["why"]
    assert [type(one) for one in peer.told[told:]] == [Progress], "it is asked for nothing more"
    assert at.intake.refused(RUN) == said["why"] and at.intake.refused(("synth-0", 1, 2)) == ""


@pytest.mark.parametrize("how", ["the same attachment", "another one", "a node that was told nothing at the door"])
def test_whoever_comes_with_that_run_is_refused(scene, how: str) -> None:
    at = scene()
    at.follow(instance="a")
    diverge(at, 4)
    if how == "another one":
        at.intake.ranks.leave(at.intake.ranks.members[0])
        at.follow(instance="b")
    diverge(at, 9)
    for member in list(at.intake.ranks.members.values()):
        at.intake.ranks.leave(member)
    again = at.join(instance="a" if how == "the same attachment" else "c")
    sessions = len(at.sessions)
    at.give(again, Manifest(small_job().to_dict()))
    assert again.refused and len(at.sessions) == sessions
    at.intake.ranks.leave(again.member)
    job = small_job()
    job.epoch = 1
    assert at.follow(job, run=("synth-0", 1, 2)).refused == [] and len(at.sessions) == sessions + 1, "another epoch"


def test_what_is_lost_without_a_mismatch_refuses_nothing(scene) -> None:
    at = scene()
    peer = at.follow()
    for _ in range(4):
        at.happens(Lost("gradients were lost"))
        at.turn()
    assert at.events("diverged") == at.events("job_refused") == [] and peer.ended == peer.refused == []
