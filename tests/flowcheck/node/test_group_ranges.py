"""A group whose job's state comes by ranges: what trainers hear, what is begun again and when, which file stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from flowcheck.control.protocol import Flows, Joined, Manifest, Wanted
from flowcheck.job.model import Job
from flowcheck.node.groups import state_requests as uploads
from flowcheck.rebuild.version.events import Begun, CaughtUp, Closed, Lost, Resumed
from flowcheck.rebuild.version.replica import NoRoomForReplica
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

from .group_scene import FakeSession, Scene, scenes, small_job

PUBLISHED = Closed(6, True, "unverified", 1, 1, {}, 0, 0, 0)


@pytest.fixture
def scene(tmp_path) -> Iterator[Callable[..., Scene]]:
    with scenes(tmp_path, resync="ranges") as make:
        yield make


def job() -> Job:
    made = small_job()
    made.step_values = ["lr"]
    return made


def refuse(at: Scene) -> None:
    """A trainer has refused to give ranges."""
    at.session.options["resync"].how = "state: exp_avg is not all on this rank"


def test_a_job_is_begun_as_soon_as_it_is_known(scene) -> None:
    at = scene(name="a")
    other = at.join(1)
    peer = at.follow(job(), first=5)
    assert at.session.calls == [("begin",)] and at.session.options["patched"] is True
    assert at.events("attached")[0]["resync"] == "ranges"
    assert peer.told[1:] == other.told[1:] == [Wanted([], ""), Joined(5)]
    assert at.join(2, ("synth-0", 0, 2)).told == [Wanted([], "")], "who comes later is asked for nothing"
    at.happens(Begun(1, 60))
    assert at.events("begun")[0] == {
        "name": "a", "iteration": 6, "elements": 60, "kernels": "avx2, and so on", "why": at.events("begun")[0]["why"]
    }


def test_a_job_that_does_not_qualify_is_asked_for_a_state(scene) -> None:
    at = scene()
    peer = at.follow()
    assert at.session.calls == [] and peer.told[-1].what == ["state"]
    assert at.events("attached")[0]["resync"].startswith("state: the manifest declares no values of a step")


def test_a_rank_that_comes_back_hears_that_it_is_followed(scene) -> None:
    """Its records are all that is wanted of it."""
    at = scene()
    at.join(1, instance="of rank 1")
    first = at.follow(job(), instance="a")
    at.intake.ranks.leave(first.member)
    again = at.join(0, instance="a")
    at.session.next = 4
    at.give(again, Flows([]))
    assert again.told == [Wanted([], ""), Joined(4)]
    at.give(again, Manifest(job().to_dict(), 0))
    assert again.told[2:] == [Joined(4)] and len(at.sessions) == 1 and at.session.calls.count(("begin",)) == 1


def test_what_has_ended_is_begun_again_and_not_at_once_each_time(scene) -> None:
    at = scene()
    peer = at.follow(job())
    at.happens(Lost("tensor 'w' differs", withdrawn=True))
    assert at.session.calls == [("begin",)], "the session is not through with what has ended it"
    assert at.events("lost")[0]["why"] == "tensor 'w' differs"
    at.turn()
    assert at.session.calls == [("begin",), ("begin",)] and peer.told[-2:] == [Wanted([], ""), Joined(0)]
    at.turn()
    assert len(at.session.calls) == 2
    at.happens(Lost("and again"))
    at.turn()
    assert len(at.session.calls) == 2 and at.events("deferred")[0]["seconds"] == uploads.OWN
    assert at.events("deferred")[0]["why"].startswith("versions ended soon after they were begun")
    at.now += uploads.OWN
    at.turn()
    assert len(at.session.calls) == 3
    assert all(message.what == [] for message in peer.told[1:] if isinstance(message, Wanted)), "no state, ever"


def test_a_trainer_that_refuses_is_asked_for_a_state(scene) -> None:
    at = scene()
    peer = at.follow(job())
    refuse(at)
    at.happens(Lost("the state of single elements cannot be had"))
    at.turn()
    assert at.session.calls == [("begin",)] and peer.told[-1].what == ["state"]
    at.give(peer, Flows([{"src": 0}]))
    assert len(at.sessions) == 1, "the manifest has its flows"
    assert peer.told[-1] == Wanted(["state"], "the trainer has come back")


def test_a_file_stands_with_its_first_version(scene, tmp_path) -> None:
    at = scene()
    old = tmp_path / "flowcheck-node--3.replica"
    old.touch()
    at.follow(job())
    assert at.session.path == tmp_path / "flowcheck-node--1.replica" and old.exists()
    at.happens(replace(PUBLISHED, published=False))
    assert old.exists()
    at.session.path.touch()
    at.happens(PUBLISHED)
    assert not old.exists() and at.session.path.exists()
    newer = tmp_path / "flowcheck-node--7.replica"
    newer.touch()
    at.happens(replace(PUBLISHED, iteration=7))
    assert newer.exists(), "once"


@pytest.mark.parametrize("withdrawn", [False, True])
def test_what_was_served_goes_only_if_it_was_wrong(scene, withdrawn: bool) -> None:
    at = scene()
    at.follow(job())
    at.session.path.touch()
    at.happens(PUBLISHED, Lost("it has ended", withdrawn))
    assert at.session.path.exists() != withdrawn


def test_a_replica_that_goes_on_needs_no_other_file(scene) -> None:
    at = scene()
    at.follow(job())
    path = at.session.path
    path.touch()
    at.happens(PUBLISHED, Lost("no slot was free"))
    at.turn()
    at.happens(replace(PUBLISHED, iteration=9))
    assert at.session.path == path and path.exists() and len(at.session.calls) == 2


def test_a_version_of_a_peer_is_a_first_one_and_has_a_line(scene, tmp_path) -> None:
    at = scene()
    at.follow(job(), first=100)
    earlier = tmp_path / "flowcheck-node--0.replica"
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 0.5})])
    Replica({"w": torch.ones(3)}, spec, path=earlier, run_id="synth-0", step=3).close()
    at.session.path.touch()
    at.session.replica.step = 109
    at.happens(CaughtUp(9, 109, "b:7071", 360, 0.5))
    assert at.events("caught_up") == [
        {"name": "", "iteration": 109, "step": 109, "source": "b:7071", "bytes": 360, "seconds": 0.5}]
    assert [said[:2] for said in at.written.hashes] == [(108, "")] and not earlier.exists(), "of this run, and older"


def test_no_room_for_a_replica_is_said_to_the_rank_that_brought_the_job(scene, monkeypatch) -> None:
    def no_room(self: Any, path: Any, left: Any) -> Any:
        raise NoRoomForReplica("12 MiB cannot be reserved: No space left on device")

    at = scene()
    peer = at.join(0)
    monkeypatch.setattr(FakeSession, "begin", no_room)
    at.give(peer, Manifest(job().to_dict(), 0))
    assert "cannot be reserved" in peer.ended[0] and at.session.calls == [("close",)] and at.intake.plan is None


def test_no_room_for_another_replica_sends_the_ranks_away(scene) -> None:
    at = scene()
    peer = at.follow(job())
    at.happens(Lost("tensor 'w' differs", withdrawn=True))
    at.session.begin_error = NoRoomForReplica("12 MiB cannot be reserved: No space left on device")
    at.turn()
    assert "cannot be reserved" in peer.ended[0] and at.session.calls[-1] == ("close",) and at.intake.plan is None
    assert "cannot be reserved" in at.events("problem")[0]["why"]


def test_an_ended_session_is_not_begun_again(scene) -> None:
    at = scene()
    peer = at.follow(job(), instance="a")
    at.happens(Lost("it has ended"))
    at.intake.ranks.leave(peer.member)
    at.join(0, instance="b")
    at.turn()
    assert [call[0] for call in at.session.calls] == ["begin", "close"]


def test_what_an_earlier_process_left_of_the_same_start_is_taken_up(scene, tmp_path) -> None:
    """Of a job that does not say what its run is called that name goes on, too. Another start takes nothing up, nor do
    trainers that do not say who they are."""
    made = job()
    made.run_id = ""
    run = ("", 0, 2)
    at = scene()
    at.follow(made, run=run, instance="a")
    start, name = at.session.options["job_start"], at.session.plan.job.run_id
    assert len(start) == 64 and at.session.left is None
    left, spec = tmp_path / "flowcheck-node--3.replica", OptimizerSpec.check("sgd", [(["w"], {"lr": 0.5})])
    Replica({"w": torch.ones(3)}, spec, path=left, run_id=name, step=7, start=start).close()

    again = scene()
    again.follow(made, run=run, instance="a")
    assert again.session.left == left and again.session.plan.job.run_id == name
    again.happens(Resumed(left, (6, 7)))
    assert again.events("resumed") == [{"name": "", "run_id": name, "epoch": 0, "step": 7, "path": str(left)}]
    assert again.intake.versions.files.named == left
    again.group.stop()
    for instance in ("b", ""):
        other = scene()
        other.follow(made, run=run, instance=instance)
        assert other.session.left is None and other.session.plan.job.run_id != name
