"""What a group hands to its session and to whom it tells what becomes of it; its thread, from start to stop."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flowcheck.node.groups.group
import flowcheck.node.groups.intake
import flowcheck.node.groups.planning
from flowcheck.control.protocol import Bye, Joined, Manifest, Notice, Progress, Record, State, Steps, User, Wanted
from flowcheck.errors import UserError
from flowcheck.node.groups.members import Inbound
from flowcheck.node.groups.move_detector import Moved
from flowcheck.node.ports.silence import Silent
from flowcheck.node.versions.user_states import ranks_in, user_folder
from flowcheck.rebuild.version.events import Closed, Lost, Waiting
from flowcheck.rebuild.version.follower import StateTooLate
from flowcheck.rebuild.version.replica import NoRoomForReplica

from ..hand_node import until
from .group_scene import FakeReplica, Scene, left_behind, scenes, small_job

MODEL = {"model.layer0.weight": torch.zeros(2), "optimizer.layer0.weight.exp_avg": torch.ones(2),
         "optimizer.layer0.weight.step": torch.ones(()), "optimizer.layer0.bias.step": torch.ones(()),
         "model.layer0.bias": torch.zeros(1)}
SECONDS = 120.0  # until a thread must have done something


@pytest.fixture
def scene(tmp_path) -> Iterator[Callable[..., Scene]]:
    with scenes(tmp_path) as make:
        yield make


def test_a_file_by_its_name_that_is_not_this_users_is_said(scene, tmp_path) -> None:
    foreign = tmp_path / "flowcheck-node-a-3.replica"
    foreign.touch()
    foreign.chmod(0o666)
    assert [said["why"] for said in scene(name="a").events("problem")] == [
        f"{foreign}: may be written to by others (mode 666); it is left alone. Remove it, or run the node as that user"]


# -- a mirror that moves -----------------------------------------------------------------------------------------


def test_while_a_job_is_joined_anew_what_trainers_send_still_has_a_form(scene) -> None:
    """What they were asked for before is on its way. Without a plan no payload is read, and a rank is sent away."""
    at = scene()
    peer = at.follow()
    before, plans = at.session, []

    def noting(call: Any) -> Any:
        return lambda *args, **options: (plans.append(at.intake.plan), call(*args, **options))[1]

    with pytest.MonkeyPatch.context() as patch:  # undone before the scene's own
        groups = flowcheck.node.groups
        for where, name in ((groups.intake, "LiveSession"), (groups.planning, "plan_job"), (before, "close")):
            patch.setattr(where, name, noting(getattr(where, name)))
        at.happens(Moved("nothing comes"))
        at.turn()
    (said,) = at.events("moved")
    assert said["why"].startswith("nothing comes: was the mirror configured anew?")
    assert at.session is not before and before.closed.is_set()
    assert len(plans) == 3 and None not in plans and at.intake.plan is at.session.plan
    at.intake.ranks.leave(peer.member)
    at.join(0, ("another", 0, 2))
    at.turn()
    assert at.intake.plan is None, "another start may be another job"


# -- states ------------------------------------------------------------------------------------------------------


def test_a_state_is_announced_and_taken(scene, tmp_path) -> None:
    at = scene(name="a")
    peer, other = at.follow(first=5), at.join(1)
    at.intake.announce(peer.member, 7)
    at.turn()
    assert at.session.calls == [("announce", 2)] and at.events("state") == []
    old, path = tmp_path / "flowcheck-node-a-8.replica", tmp_path / "flowcheck-node-a-1.replica"
    old.touch()
    path.touch()
    at.give(peer, State(7, [{"lr": 0.25}]), MODEL)
    (_, call) = at.session.calls
    assert call[:2] == ("state", 2) and call[4] == [{"lr": 0.25}]
    assert list(call[2]) == ["layer0.weight", "layer0.bias"]
    assert call[2]["layer0.weight"] is MODEL["model.layer0.weight"]
    assert {name: list(keys) for name, keys in call[3].items()} == {
        "layer0.weight": ["exp_avg", "step"], "layer0.bias": ["step"]
    }
    assert call[3]["layer0.weight"]["exp_avg"] is MODEL["optimizer.layer0.weight.exp_avg"]
    assert at.events("state") == [{"name": "a", "iteration": 7, "kernels": "avx2, and so on"}]
    assert peer.told[-1] == other.told[-1] == Joined(7)
    assert path.exists() and not old.exists()  # its successor holds a version
    assert at.join(2, ("synth-0", 0, 2)).told == [Wanted([], "")]  # nothing is wanted any more


def test_the_state_before_the_manifests_first_iteration_is_the_earliest(scene) -> None:
    at = scene()
    peer = at.follow(first=5)
    at.give(peer, State(5), MODEL)
    assert at.session.calls[0][:2] == ("state", 0) and peer.told[-1] == Joined(5)
    at.give(peer, State(4), MODEL)
    assert peer.ended == ["state: a state before iteration 4; the manifest begins at 5"]
    assert len(at.session.calls) == 1


@pytest.mark.parametrize("tensors", [{}, MODEL], ids=["announced", "whole"])
def test_a_state_comes_from_rank_0(scene, tensors: dict[str, Any]) -> None:
    at = scene()
    at.follow()
    other = at.join(1)
    at.give(other, State(2), tensors)
    assert other.ended == ["rank 1: a state comes from rank 0, and after its manifest"]
    assert at.session.calls == [] and at.events("refused")[0]["rank"] == 1


@pytest.mark.parametrize("tensors", [{}, MODEL], ids=["announced", "whole"])
def test_a_state_comes_after_the_manifest(scene, tensors: dict[str, Any]) -> None:
    at = scene()
    peer = at.join(0)
    at.give(peer, State(2), tensors)
    assert peer.ended == ["rank 0: a state comes from rank 0, and after its manifest"]


def test_a_state_that_is_too_late_is_asked_for_again(scene) -> None:
    at = scene()
    peer, other = at.follow(), at.join(1)
    at.session.state_error = StateTooLate("the state before iteration 3 is here, and 4 has passed")
    at.give(peer, State(3), MODEL)
    wanted = Wanted(["state"], "the state before iteration 3 is here, and 4 has passed")
    assert peer.told[-1] == other.told[-1] == wanted and peer.ended == []
    assert at.events("state") == [] and Joined(3) not in peer.told
    at.session.state_error = None
    at.give(peer, State(5), MODEL)
    assert peer.told[-1] == Joined(5)


def test_a_state_that_does_not_fit_is_refused(scene) -> None:
    at = scene()
    peer = at.follow()
    at.session.state_error = UserError("tensor 'layer0.bias' is missing")
    at.give(peer, State(3), MODEL)
    assert peer.ended == ["tensor 'layer0.bias' is missing"] and not isinstance(peer.told[-1], Joined)
    assert at.events("state") == []


# -- records, and the end of training ------------------------------------------------------------------------------


def test_records_are_counted_from_the_manifests_first_iteration(scene) -> None:
    at = scene()
    at.follow(first=5)
    other = at.join(1)
    at.give(other, Record(7), {"mean": torch.zeros(1)})
    ((_, iteration, buffers, rank),) = at.session.calls
    assert (iteration, list(buffers), rank) == (2, ["mean"], 1) and other.ended == []


def test_a_record_that_the_session_refuses_ends_the_connection(scene) -> None:
    at = scene()
    at.follow()
    other = at.join(1)
    at.session.record_answer = "a checksum of nothing"
    at.give(other, Record(7))
    assert other.ended == ["rank 1: a checksum of nothing"]
    assert at.events("refused") == [{"name": "", "rank": 1, "why": "rank 1: a checksum of nothing"}]


@pytest.mark.parametrize("message", [Record(2), Bye()])
def test_without_a_session_records_and_the_end_mean_nothing(scene, message: Any) -> None:
    at = scene()
    peer = at.join(0)
    at.give(peer, message)
    assert peer.ended == [] and at.said == []


@pytest.mark.parametrize(("moves", "polls"), [(0, 1), (3, 4), (10_000, 10_001)])
def test_at_the_end_of_training_what_is_there_is_judged(scene, moves: int, polls: int) -> None:
    at = scene(name="a")
    peer = at.follow()
    at.session.moves, at.session.serves = moves, 8
    at.give(peer, Bye())
    assert at.session.calls == [("poll",)] * polls + [("finish",)]
    assert at.events("end") == [{"name": "a", "run_id": "synth-0", "serves": 8}]


def test_an_end_comes_though_packets_go_on_coming(scene, monkeypatch) -> None:
    at = scene(name="a")
    peer = at.follow()
    at.session.moves = 10**12
    monkeypatch.setattr(flowcheck.node.groups.session, "LAST_SECONDS", 0.05)
    at.give(peer, Bye())
    assert at.session.calls[-1] == ("finish",) and len(at.events("end")) == 1


def test_the_end_is_said_by_rank_0(scene) -> None:
    at = scene()
    at.follow()
    at.give(at.join(1), Bye())
    assert at.session.calls == [] and at.events("end") == []


# -- what the session says -----------------------------------------------------------------------------------------

LINE = Closed(2, True, "verified", 100, 60, {"lost": 4}, 3, 5, 7, [], "early", 1, unproven=["a peer"])
SAID = {"status": "verified", "packets": 100, "placed": 60, "missing": {"lost": 4}, "healed": 3, "duplicates": 5,
        "dropped": {}, "lag": 7, "updates": "early", "rebuilt": 1, "patched": 0, "stale": 0,
        "final": "", "filled": {}, "unproven": ["a peer"], "matches": 0, "sampled": 0}


def test_a_published_iteration_is_told_to_everybody(scene, tmp_path) -> None:
    at = scene(name="a", every=3)
    peer, other = at.follow(first=5), at.join(1)
    session = at.session
    session.replica = replica = FakeReplica(8)
    at.happens(LINE)
    fields = {"name": "a", "iteration": 7, "published": True, "failed": [], "why": [], **SAID}
    assert at.said[-1] == ("iteration", fields)
    assert peer.told[-1] == other.told[-1] == Progress(7, "verified")
    assert at.written.hashes == [(7, "a", replica)] and at.written.checkpoints == []
    replica.step = 9
    at.happens(LINE)
    ((*said, _, unproven, users, matches),) = at.written.checkpoints
    assert said == ["a", replica, tmp_path / "out" / "a" / "synth-0" / "epoch-0", "verified"]
    assert unproven == ["a peer"] and users is None and matches == 0
    assert len(at.written.hashes) == 2


def test_hashes_that_cannot_be_written_are_said_and_end_nothing(scene) -> None:
    at = scene(name="a")
    at.follow()
    at.session.replica = FakeReplica(8)

    def add(*_: Any) -> None:
        raise UserError("no space", where="hashes")

    at.written.add = add
    at.happens(LINE)
    assert at.events("problem") == [{"name": "a", "why": "hashes: no space"}]
    assert at.said[-1][0] == "iteration"


def test_what_ranks_give_of_themselves_lies_beside_their_versions_and_goes_with_them(scene, tmp_path) -> None:
    at = scene(name="a", every=1)
    peer, other = at.follow(first=5), at.join(1)
    at.intake.put(Inbound(other.member, User(6, 1), data=b"no replica has a name yet"))
    at.give(peer, State(7), MODEL)
    replica = tmp_path / "flowcheck-node-a-1.replica"
    replica.touch()
    for rank, one in enumerate((peer, other)):
        at.intake.put(Inbound(one.member, User(7, rank), data=b"of %d" % rank))
    at.turn()
    until(lambda: ranks_in(user_folder(replica, 8)) == [0, 1])
    at.session.replica.step = 8
    at.session.replica.steps = [7, 8]
    at.happens(LINE)
    assert at.written.checkpoints[-1][-2]() == {0: b"of 0", 1: b"of 1"}
    assert not user_folder(replica, 7).exists()
    at.happens(Lost("tensor differs", True))
    assert not replica.with_suffix(".user").exists()


def test_what_ranks_give_after_a_new_start_goes_to_no_version_of_the_one_before(scene, tmp_path) -> None:
    """The trainers of the new start are ahead of its state, and make a step that the one before has as a version."""
    at = scene(name="a")
    peer = at.follow(first=5, instance="one")
    at.give(peer, State(7), MODEL)
    at.intake.ranks.leave(peer.member)
    old = tmp_path / "flowcheck-node-a-1.replica"
    old.touch()
    peer = at.follow(first=5, instance="two")
    at.intake.put(Inbound(peer.member, User(7, 0), data=b"of the new start"))
    at.give(peer, State(6), MODEL)
    at.intake.put(Inbound(peer.member, User(7, 0), data=b"of the new start"))
    at.turn()
    until(lambda: ranks_in(user_folder(tmp_path / "flowcheck-node-a-2.replica", 8)) == [0])
    assert ranks_in(user_folder(old, 8)) == []


def test_a_replica_that_had_no_version_leaves_no_states_behind(scene, tmp_path) -> None:
    at = scene(name="a")
    orphan, other = tmp_path / "flowcheck-node-a-1.user", tmp_path / "flowcheck-node-b-1.user"
    for folder in (orphan, other):
        folder.mkdir()
    left, mine = (at.intake.versions.files.path().with_suffix(".user") for _ in range(2))
    at.intake.versions.files.stands("synth-0", 0, 7)
    assert not orphan.exists() and not left.exists() and mine.exists() and other.exists()


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4])])
def test_each_kth_version_is_written(scene, tmp_path, every: int, steps: list[int]) -> None:
    at = scene(every=every, hashes=False)
    at.follow()
    found = []
    for step in (1, 2, 3, 4):
        at.session.replica = FakeReplica(step)
        at.happens(LINE)
        found += [step] * len(at.written.checkpoints)
        assert all(out == tmp_path / "out" / "synth-0" / "epoch-0" for _, _, out, *_ in at.written.checkpoints)
        at.written.checkpoints.clear()
    assert found == steps and at.written.hashes == []


def test_an_iteration_that_is_not_published_is_said_and_nothing_more(scene) -> None:
    at = scene(every=1)
    peer = at.follow()
    at.session.replica, at.session.next = FakeReplica(3), 2
    why = [("covered", "bucket 0"), ("previous", "nothing to build on")]
    line = Closed(2, False, "verified", 100, 60, {"lost": 4}, 3, 5, 7, why, "early", 1, unproven=["a peer"])
    at.happens(line)
    fields = {"name": "", "iteration": 2, "published": False, "failed": ["covered", "previous"], **SAID}
    assert at.said[-1] == ("iteration", fields | {"why": why})
    at.session.next = None  # while nothing is built the first reason is enough
    at.happens(line)
    assert at.said[-1] == ("iteration", fields | {"why": why[:1]})
    assert at.written.hashes == at.written.checkpoints == []
    assert not any(isinstance(message, Progress) for message in peer.told)


def test_a_version_without_a_replica_is_not_progress(scene) -> None:
    at = scene(every=1)
    peer = at.follow()
    at.happens(LINE)
    assert not any(isinstance(message, Progress) for message in peer.told) and at.written.hashes == []


def test_when_the_chain_ends_a_state_is_asked_for(scene, tmp_path) -> None:
    at = scene(name="a")
    peer, other = at.follow(), at.join(1)
    path = at.intake.versions.files.path()
    path.touch()
    at.intake.versions.files.stands("synth-0", 0, 3)
    at.session.replica, at.session.serves = FakeReplica(3), 2
    at.happens(Lost("iteration 3 is not published"))
    wanted = Wanted(["state"], "checkpoint wanted: iteration 3 is not published")
    assert at.events("lost") == [{"name": "a", "why": "iteration 3 is not published", "serves": 2, "dropped": {}}]
    assert peer.told[-1] == other.told[-1] == wanted and path.exists()
    at.session.replica, at.session.serves = None, -1  # it diverged
    at.happens(Lost("tensor differs", withdrawn=True))
    assert not path.exists() and at.events("lost")[1]["serves"] == -1
    at.intake.ranks.leave(peer.member)
    assert at.join(0).told == [Wanted(["state"], "checkpoint wanted: tensor differs")]


def test_waiting_is_said_in_the_trainers_numbers(scene) -> None:
    at = scene()
    at.follow(first=5)
    at.happens(Waiting(2, "its step record is not here"))
    assert at.events("waiting") == [{"name": "", "iteration": 7, "why": "its step record is not here"}]


def test_a_node_too_slow_for_its_traffic_names_its_own_drops_and_makes_no_storm_of_uploads(scene) -> None:
    """Each chain is lost to a full ring as soon as its state is here; what rank 0 is asked for stays bounded."""
    at = scene(name="a")
    peer, end = at.follow(), 600.0
    states = 0
    while at.now < end:
        if peer.told[-1] == Wanted(["state"], peer.told[-1].why if isinstance(peer.told[-1], Wanted) else ""):
            at.intake.announce(peer.member, states)
            at.give(peer, State(states), MODEL)
            states += 1
            at.port.dropped["ring_full"] = at.port.dropped.get("ring_full", 0) + 9
            at.happens(LINE)
            assert at.said[-1][1]["dropped"] == {"ring_full": 9}
            at.happens(Lost("iteration 2 is not published: covered"))
            why = at.events("lost")[-1]["why"]
            assert "the node itself has dropped ring_full 9: raise capture.ring_size (now 16384" in why
            assert peer.told[-2] == Wanted([], "") and why in peer.told[-1].why and isinstance(peer.told[-1], Notice)
            assert at.join(1).told == peer.told[-2:]
            at.intake.ranks.leave(at.intake.ranks.members[1])
        at.now += 0.5
        at.turn()
    assert 2 <= states <= 7
    assert [line["seconds"] for line in at.events("deferred")][:3] == [10.0, 20.0, 40.0]


def test_a_state_that_comes_too_late_again_and_again_makes_no_storm(scene) -> None:
    at = scene()
    peer = at.follow()
    at.session.state_error = StateTooLate("the state before iteration 3 is here, and 4 has passed")
    for _ in range(3):
        at.intake.announce(peer.member, 3)
        at.turn()
        at.now += 2  # seconds that the upload takes
        at.give(peer, State(3), MODEL)
    assert [line["seconds"] for line in at.events("deferred")] == [40.0, 40.0, 40.0]
    (notice,) = (message for message in peer.told if isinstance(message, Notice) and message.why)
    assert "4 has passed; a state is asked for later" in notice.why and at.join(1).told[-1] == notice


def test_a_silent_mirror_is_told_to_every_rank_also_those_that_come_later(scene) -> None:
    at = scene(name="a")
    peer, other = at.follow(first=5), at.join(1)
    at.happens(Silent("no packet has come"))
    assert at.events("silent") == [{"name": "a", "why": "no packet has come"}]
    assert peer.told[-1] == other.told[-1] == Notice("no packet has come")
    at.intake.ranks.leave(other.member)
    assert at.join(1).told[-1] == Notice("no packet has come")
    at.happens(Silent(""))
    assert at.events("mirror_back") == [{"name": "a", "why": "the mirror brings the job's packets again"}]
    assert peer.told[-1] == Notice("")
    assert not any(isinstance(message, Notice) for message in at.join(2, ("synth-0", 0, 2)).told)


def test_progress_leaves_what_is_wanted_as_it_is(scene) -> None:
    at = scene()
    peer = at.follow()
    at.session.replica = FakeReplica(3)
    at.happens(LINE)
    at.intake.ranks.leave(peer.member)
    assert at.join(0).told == [Wanted(["state"], "the job is known; a state to begin with is not here")]


# -- runs that follow each other -------------------------------------------------------------------------------------


def test_a_run_that_starts_from_step_0_keeps_the_replica_of_the_one_before(scene, tmp_path) -> None:
    """Until its own is verified; and it says what it removes."""
    before = left_behind(tmp_path / "flowcheck-node--4.replica", "before", 400)
    at = scene(hashes=False)
    at.give(at.follow(), State(3), MODEL)
    at.session.replica = FakeReplica(4)
    at.happens(Closed(3, True, "unverified", 1, 1, {}, 0, 0, 0, []))
    assert before.exists() and at.events("removed") == []
    at.happens(LINE)
    assert not before.exists()
    (said,) = at.events("removed")
    assert (said["run_id"], said["step"], said["path"]) == ("before", 400, str(before)) and "synth-0" in said["why"]


def test_and_until_that_is_on_disk_where_the_settings_ask_for_it(scene, tmp_path) -> None:
    before = left_behind(tmp_path / "flowcheck-node--4.replica", "before", 400)
    at = scene(hashes=False, every=5)
    at.give(at.follow(), State(3), MODEL)
    at.session.replica = FakeReplica(4)
    at.happens(LINE)
    at.session.replica.step = 5
    at.happens(Closed(2, True, "unverified", 1, 1, {}, 0, 0, 0, []))
    assert at.written.checkpoints[0][4] is None  # an unverified one is on disk: not what is waited for
    at.session.replica.step = 10
    at.happens(LINE)
    assert before.exists()  # it is being written
    at.written.checkpoints[1][4]()
    at.session.replica.step = 11
    at.happens(LINE)
    assert not before.exists()


def test_the_same_run_from_step_0_again_keeps_its_own_replica_too(scene, tmp_path) -> None:
    """Somebody gives a run id and starts from the beginning: step 400 is not superseded by step 3, which is of an epoch
    of its own."""
    before = left_behind(tmp_path / "flowcheck-node--4.replica", "synth-0", 400)
    at = scene()
    at.give(at.follow(), State(3), MODEL)  # a FakeReplica has step 0
    assert before.exists() and at.events("removed") == []
    assert [said["epoch"] for event in ("numbered", "attached") for said in at.events(event)] == [1, 1]


def test_a_version_that_diverged_takes_no_other_runs_replica_with_it(scene, tmp_path) -> None:
    before = left_behind(tmp_path / "flowcheck-node--4.replica", "before", 400)
    at = scene()
    peer = at.follow()
    own = tmp_path / "flowcheck-node--5.replica"
    own.touch()
    at.give(peer, State(3), MODEL)
    assert own.exists() and at.session.path == own
    at.session.replica = None
    at.happens(Lost("tensor differs", withdrawn=True))
    assert before.exists() and not own.exists()


def test_a_run_without_an_id_gets_one_that_nobody_else_has(scene) -> None:
    ids = []
    for instance in ("first", "second"):
        at = scene()
        job = small_job()
        job.run_id = ""
        at.give(at.follow(job, run=("", 0, 2), instance=instance), Bye())
        ids.append(at.session.plan.job.run_id)
        assert at.events("attached")[0]["run_id"] == ids[-1]
    assert all(ids) and ids[0] != ids[1]


def test_a_replica_without_room_names_those_that_are_kept(scene, tmp_path) -> None:
    before = left_behind(tmp_path / "flowcheck-node--4.replica", "before", 400)
    at = scene()
    peer = at.follow()
    at.session.state_error = NoRoomForReplica("/dev/shm/x: 512 MiB cannot be reserved: No space left on device")
    at.give(peer, State(3), MODEL)
    assert str(before) in peer.ended[0] and "run before, step 400" in peer.ended[0] and before.exists()


# -- a real session --------------------------------------------------------------------------------------------------


def test_a_group_follows_a_job_with_real_packets(tmp_path, truth) -> None:
    """Manifest, state, traffic and record, all through the inbox; the version is torch's."""
    from flowcheck.rebuild.plan import plan_job

    job = small_job(optimizer="adamw", options={"lr": 0.5})
    job.step_values = ["lr"]
    run, at = truth(job), Scene(tmp_path)
    for t in range(2):
        run.advance(run.traffic(t))
    peer = at.follow(job)
    assert at.intake.plan == plan_job(job, arenas=4)
    tensors = {f"model.{name}": tensor for name, tensor in run.tensors().items()}
    tensors |= {f"optimizer.{n}.{k}": t for n, states in run.state().items() for k, t in states.items()}
    at.give(peer, State(2), tensors)
    assert peer.told[-1] == Joined(2)
    made = run.traffic(2)
    at.rings[0].put(made.packets)
    run.advance(made)
    at.give(peer, Record(2, checksums=run.sums()))
    with at.placers:
        at.give(peer, Bye())
    assert at.events("iteration")[0]["published"] and peer.told[-1] == Progress(2, "verified")
    assert at.events("end") == [{"name": "", "run_id": "synth-0", "serves": 2}]
    assert [p.name for p in tmp_path.glob("*.replica")] == ["flowcheck-node--1.replica"]
    at.group.stop()
    at.group.drop()


# -- the thread --------------------------------------------------------------------------------------------------------


class Heard:
    """What a running group says; `wait` takes the next one."""

    def __init__(self) -> None:
        self._said: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()

    def __call__(self, event: str, **fields: Any) -> None:
        self._said.put((event, fields))

    def wait(self) -> tuple[str, dict[str, Any]]:
        return self._said.get(timeout=SECONDS)


@pytest.mark.parametrize("job", [False, True])
def test_the_thread_sleeps_when_nothing_moves_and_not_before(scene, monkeypatch, job: bool) -> None:
    at, left = scene(rings=2), []
    if job:
        peer = at.follow()
        for t in range(3):
            at.post(peer, Record(t))
        at.session.moves = 5

    def sleep(seconds: float) -> None:
        assert seconds == 0.0005
        left.append((at.intake.inbox._queue.qsize(), at.session.moves if job else -1))
        at.group._stop.set()

    monkeypatch.setattr(flowcheck.node.groups.group, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
    at.group._main()
    assert left == [(0, -1)] and at.group.failure is None


def test_a_group_that_was_never_started_can_be_stopped(scene) -> None:
    scene().group.stop()


def test_a_running_group_follows_a_job_and_judges_what_is_there_at_the_end(scene, tmp_path) -> None:
    heard = Heard()
    at = scene(heard)
    path = tmp_path / "flowcheck-node--1.replica"
    at.group.start()
    peer = at.join(0)
    at.post(peer, Manifest(small_job().to_dict()))
    assert heard.wait()[0] == "attached"
    path.touch()
    at.post(peer, Record(1))
    at.group.stop()
    calls = at.session.calls
    assert ("record", 1, {}, 0) in calls
    assert [call for call in calls if call != ("poll",)] == [("record", 1, {}, 0), ("finish",), ("close",)]
    assert calls[-3:] == [("poll",), ("finish",), ("close",)]
    assert at.group.failure is None and at.intake.plan is None and path.exists()


@pytest.mark.parametrize(("moves", "polls"), [(0, 1), (5, 6), (10_000, 10_001)])
def test_the_last_packets_are_judged_at_a_stop(scene, moves: int, polls: int) -> None:
    """What is in the inbox then is handled too. The loop itself runs no more: this is its last part alone."""
    at = scene()
    peer = at.follow()
    at.session.moves = moves
    at.post(peer, Record(1))
    at.post(peer, Record(2))
    at.group._stop.set()
    at.group._main()
    records = [("record", 1, {}, 0), ("record", 2, {}, 0)]
    assert at.session.calls == records + [("poll",)] * polls + [("finish",), ("close",)]


def test_what_the_placing_threads_have_not_taken_is_waited_for(scene, monkeypatch) -> None:
    at, naps = scene(), []
    peer = at.follow()
    at.session.behind = 3
    clock = SimpleNamespace(sleep=naps.append, monotonic=lambda: 0.0)
    monkeypatch.setattr(flowcheck.node.groups.session, "time", clock)
    at.give(peer, Bye())
    assert at.session.calls == [("poll",)] * 4 + [("finish",)] and naps == [0.0005] * 3
    assert at.session.placers is at.placers  # somebody may come back


def test_a_new_start_ends_the_session_before_anything_of_it_is_here(scene) -> None:
    heard = Heard()
    at = scene(heard)
    at.group.start()
    old = at.join(0, instance="a")
    at.post(old, Manifest(small_job().to_dict()))
    assert heard.wait()[0] == "attached"
    at.intake.ranks.leave(old.member)
    new = at.join(0, instance="b")
    assert at.session.closed.wait(SECONDS) and new.ended == []
    at.group.stop()
    assert at.session.calls[-1] == ("close",) and ("finish",) not in at.session.calls


@pytest.mark.parametrize("keep", [True, False])
def test_replica_files_stay_at_an_orderly_end_if_they_shall(scene, tmp_path, keep: bool) -> None:
    """This run's own. Those that other runs have left stay."""
    at = scene(keep=keep)
    other = left_behind(tmp_path / "flowcheck-node--3.replica", "before", 12)
    peer = at.follow()
    own = tmp_path / "flowcheck-node--1.replica"
    own.touch()
    at.give(peer, State(2), MODEL)
    at.group.start()
    at.group.stop()
    assert own.exists() == keep and other.exists()


def test_what_other_groups_have_decides_which_slots_are_reused_last(scene) -> None:
    """Of the run and epoch that the session follows; asked at every turn of the loop, said when it is something new."""
    at = scene(name="s0")
    at.follow()
    at.session.replica = FakeReplica()
    at.session.replica.steps = [5, 6, 7]

    def hear(*steps: int, epoch: int = 0) -> None:
        at.common.hear(Steps("0b" * 16, "b", [["synth-0", epoch, "s1", list(steps)]]), "b:1")

    def turn() -> list[tuple[int, ...]]:
        at.group.tick()
        return at.session.replica.kept

    assert turn() == [()] and turn() == [()]
    hear(4, 5, epoch=1)
    assert turn() == [(), ()]
    hear(4, 5)
    assert turn()[2:] == [(5, 6, 7)] and turn()[2:] == [(5, 6, 7)]
    at.session.replica.steps = [5, 7, 8]
    assert turn()[3:] == [(5, 7, 8)]
    assert at.common.steps_now().have == [("synth-0", 0, "s0", [5, 7, 8])]
    at.group.drop()
    assert at.common.steps_now().have == [], "nobody keeps anything for a group that has no versions"


def test_a_session_without_a_replica_has_nothing(scene) -> None:
    at = scene(name="s0")
    at.follow()
    at.group.tick()
    assert at.common.steps_now().have == []


def test_the_loop_of_a_group_says_what_it_has(scene) -> None:
    heard = Heard()
    at = scene(heard, name="s0")
    at.group.start()
    at.post(at.join(0), Manifest(small_job().to_dict()))
    assert heard.wait()[0] == "attached"
    at.session.replica = FakeReplica(9)
    seen = -1
    while not at.common.steps_now().have:
        seen = at.common.wait(seen, SECONDS)
    assert at.common.steps_now().have == [("synth-0", 0, "s0", [9])]
    at.group.stop()


def test_a_fault_of_ours_ends_the_thread_and_is_kept(scene) -> None:
    heard = Heard()
    at = scene(heard)
    at.group.start()
    peer = at.join(0)
    error = RuntimeError("a bug")
    at.post(peer, Manifest(small_job().to_dict()))
    assert heard.wait()[0] == "attached"
    at.session.poll_error = error
    at.group._thread.join(SECONDS)
    assert at.group.failure is error and at.session.calls[-1] == ("close",)
    at.group.stop()


def test_what_an_earlier_process_left_is_said_at_the_start(scene, tmp_path: Path) -> None:
    path = left_behind(tmp_path / "flowcheck-node-a-4.replica", "before", 12)
    at = scene(name="a")
    at.group.start()
    at.group.stop()
    assert at.said == [("kept", {"name": "a", "run_id": "before", "step": 12, "path": str(path),
                                 "needs": "manifest, flows and state of a run"})]
