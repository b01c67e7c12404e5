"""Who belongs to a group, whose messages count, and what job a group agrees to follow."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from flowcheck.control.protocol import Bye, Flows, Holes, Manifest, Members, Notice, Patch, Record, State, Wanted
from flowcheck.errors import UserError
from flowcheck.job.clock import Clock
from flowcheck.job.model import Job
from flowcheck.node.groups import membership
from flowcheck.node.groups.ranges import Resync
from flowcheck.rebuild.plan import digest_of

from .group_scene import Peer, Scene, scenes, small_job

NOTHING_KNOWN = Wanted(["manifest", "flows"], "")
STATE_WANTED = Wanted(["state"], "the job is known; a state to begin with is not here")
COME_BACK = Wanted(["state"], "the trainer has come back")
RUN = ("synth-0", 0, 2)


@pytest.fixture
def scene(tmp_path) -> Iterator[Callable[..., Scene]]:
    with scenes(tmp_path) as make:
        yield make


def body(**changes: Any) -> dict[str, Any]:
    return small_job().to_dict() | changes


# -- joining and leaving ---------------------------------------------------------------------------------------


def test_who_comes_first_is_asked_for_the_job(scene) -> None:
    at = scene()
    assert at.intake.ranks.run is None and at.intake.plan is None
    peer = at.join(1)
    assert peer.told == [NOTHING_KNOWN] and peer.ended == []
    assert at.intake.ranks.run == RUN and at.intake.ranks.members == {1: peer.member}


@pytest.mark.parametrize("other", [("another", 0, 2), ("synth-0", 1, 2), ("synth-0", 0, 3)])
def test_another_run_waits_until_the_last_rank_has_left(scene, other: tuple[str, int, int]) -> None:
    at = scene()
    held, late = at.join(1), Peer(0)
    assert at.intake.ranks.join(other, late.member).startswith("run 'synth-0', epoch 0, 2 ranks, is attached here")
    assert late.told == [] and at.intake.ranks.run == RUN and at.intake.ranks.members == {1: held.member}
    at.intake.ranks.leave(held.member)
    assert at.intake.ranks.join(other, late.member) == ""
    assert late.told == [NOTHING_KNOWN] and at.intake.ranks.run == other and at.intake.ranks.members == {0: late.member}
    assert late.member.start == held.member.start + 1


def test_a_rank_is_attached_once(scene) -> None:
    at = scene()
    first, second = at.join(1), Peer(1)
    assert at.intake.ranks.join(RUN, second.member) == "rank 1 is attached already"
    assert second.told == [] and first.ended == [] and at.intake.ranks.members == {1: first.member}


def test_a_rank_that_comes_back_is_told_what_is_wanted_now(scene) -> None:
    at = scene()
    at.join(1, instance="of rank 1")
    first = at.follow(instance="a")
    assert first.told == [NOTHING_KNOWN, STATE_WANTED]
    at.intake.ranks.leave(first.member)
    again = at.join(0, instance="a")
    assert again.told == [STATE_WANTED] and again.member.start == first.member.start
    at.give(again, Manifest(body()))
    assert again.told == [STATE_WANTED, COME_BACK]
    assert len(at.sessions) == 1 and ("close",) not in at.session.calls
    at.give(again, Record(3))
    assert ("record", 3, {}, 0) in at.session.calls


def test_a_rank_that_comes_back_as_another_instance_is_a_new_start(scene) -> None:
    at = scene()
    other = at.join(1, instance="of rank 1")
    first = at.follow(instance="a")
    at.intake.ranks.leave(first.member)
    again = at.join(0, instance="b")
    assert other.ended == ["the job was started again"] and first.ended == []
    assert again.told == [NOTHING_KNOWN] and again.ended == []
    assert at.intake.ranks.members == {0: again.member} and again.member.start == first.member.start + 1
    at.turn()
    assert at.session.calls[-1] == ("close",) and at.intake.plan is None
    at.give(again, Flows([]))
    assert len(at.sessions) == 1 and again.ended == []  # the manifest of the start before is forgotten
    third = at.join(1, instance="of rank 1, again")  # the instances of the start before are forgotten
    assert third.member.start == again.member.start and at.intake.ranks.members == {0: again.member, 1: third.member}


def test_ranks_of_one_start_may_be_different_instances(scene) -> None:
    at = scene()
    first, second = at.join(0, instance="a"), at.join(1, instance="b")
    assert first.ended == [] and at.intake.ranks.members == {0: first.member, 1: second.member}


def test_the_end_of_a_replaced_connection_takes_nothing_from_its_successor(scene) -> None:
    at = scene()
    first = at.join(0)
    at.intake.ranks.leave(first.member)
    second = at.join(0)
    at.intake.ranks.leave(first.member)
    assert at.intake.ranks.members == {0: second.member}


@pytest.mark.parametrize(("rank", "withdrawn"), [(0, True), (1, False)])
def test_a_state_that_was_announced_goes_with_rank_0_alone(scene, rank: int, withdrawn: bool) -> None:
    at = scene()
    peers = {0: at.follow(), 1: at.join(1)}
    at.intake.announce(peers[0].member, 4)
    at.turn()
    at.intake.ranks.leave(peers[rank].member)
    at.turn()
    assert at.session.calls == [("announce", 4), ("withdraw",)][: 1 + withdrawn]


def test_a_member_may_leave_before_there_is_a_session(scene) -> None:
    at = scene()
    at.intake.ranks.leave(at.join(0).member)
    at.turn()
    assert at.said == []


def test_the_inbox_is_bounded(scene) -> None:
    at = scene()
    peer = at.join()
    for _ in range(4096):
        at.post(peer, Bye())
    with pytest.raises(queue.Full):
        at.post(peer, Bye())


# -- letters of an earlier start -------------------------------------------------------------------------------

MESSAGES = [Record(3), Bye(), State(3), Flows([{"src": 0}]), Manifest({}), Patch(1, 3, [["w", 0, 1]])]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("tensors", [{}, {"model.layer0.weight": torch.zeros(1)}], ids=["bare", "payload"])
@pytest.mark.parametrize("late", [False, True])
def test_letters_of_an_earlier_start_are_nobodys(scene, message: Any, tensors: Any, late: bool) -> None:
    """The job was started again while they were in the inbox, or before their reader had put them there."""
    at = scene()
    old = at.follow(instance="a")
    before = at.session
    if not late:
        at.post(old, message, tensors)
    at.intake.ranks.leave(old.member)
    new = at.join(0, instance="b")
    at.post(new, Manifest(body()))
    if late:
        at.post(old, message, tensors)
    at.turn()
    assert before.calls == [("close",)]
    assert len(at.sessions) == 2 and at.session.calls == [("withdraw",)]
    assert [what for what, _ in at.said] == ["attached", "attached"]
    assert old.ended == new.ended == [] and new.told == [NOTHING_KNOWN, STATE_WANTED]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_of_what_a_lost_connection_sent_records_answers_and_the_end_count(scene, message: Any) -> None:
    at = scene()
    at.follow()
    rank = at.join(1)
    rank.member.rank = 0  # whoever sent it, it is its place among the members that counts
    at.post(rank, message)
    at.intake.ranks.leave(rank.member)
    at.turn()
    asked = [call[0] for call in at.session.calls if call[0] != "withdraw"]
    counts = {"Record": ["record"], "Patch": ["patch"], "Bye": ["poll", "finish"]}
    assert asked == counts.get(type(message).__name__, [])
    assert rank.ended == [] and at.events("refused") == [] and len(at.sessions) == 1


def test_a_letter_of_a_new_start_ends_what_the_one_before_held(scene) -> None:
    at = scene()
    old = at.follow(instance="a")
    at.intake.ranks.leave(old.member)
    new = at.join(0, instance="b")
    at.post(new, Record(1))
    at.turn()
    assert at.session.calls == [("close",)] and new.ended == []


# -- manifests ---------------------------------------------------------------------------------------------------


def refused(at: Scene, peer: Peer, why: str) -> None:
    """The one who sent it is told why and out, and nothing was begun."""
    assert peer.ended == [why] and at.sessions == []
    assert at.events("refused") == [{"name": "", "rank": peer.member.rank, "why": why}]
    assert at.events("attached") == []


def test_a_manifest_comes_from_rank_0(scene) -> None:
    at = scene()
    peer = at.join(1)
    at.give(peer, Manifest(body()))
    refused(at, peer, "rank 1: a manifest comes from rank 0")


@pytest.mark.parametrize(("run", "said"), [
    (("another", 0, 2), "this is 'another', 0, 2"),
    (("synth-0", 1, 2), "this is 'synth-0', 1, 2"),
    (("synth-0", 0, 3), "this is 'synth-0', 0, 3"),
])
def test_a_manifest_is_of_the_run_that_said_hello(scene, run: tuple[str, int, int], said: str) -> None:
    at = scene()
    peer = at.join(0, run)
    at.give(peer, Manifest(body()))
    refused(at, peer, f"manifest: the manifest is of run 'synth-0', epoch 0, 2 ranks; {said}")


@pytest.mark.parametrize(("changes", "why"), [
    ({"optimizer": None}, "manifest: the manifest names no optimizer: there is nothing to keep versions of"),
    ({"epoch": "x"}, "manifest: epoch: "),
    ({"schema": "flowcheck/job/0"}, "manifest: schema: "),
])
def test_a_manifest_that_cannot_be_followed(scene, changes: dict[str, Any], why: str) -> None:
    at = scene()
    peer = at.join()
    at.give(peer, Manifest(body(**changes)))
    assert peer.ended[0].startswith(why)
    refused(at, peer, peer.ended[0])


def test_a_whole_manifest_begins_a_session(scene, tmp_path) -> None:
    at = scene(name="a", rings=2, slots=4, threads=2, arenas=5, patience_packets=900)
    peer, other = at.join(0), at.join(1)
    at.give(peer, Manifest(body(), 5))
    (session,) = at.sessions
    assert session.plan.job.run_id == "synth-0" and at.intake.plan is session.plan
    assert (session.plan.engine.streams, session.plan.engine.threads, session.plan.engine.arenas) == (2, 2, 5)
    assert session.plan.engine.patience == 900
    assert session.placers is at.placers
    assert session.sources == at.rings and session.clock.first == 5
    assert isinstance(session.options.pop("resync"), Resync) and session.options.pop("patched") is False
    assert session.options.pop("peers") is None and session.options.pop("catching") is None
    assert session.options.pop("telemetry") is None
    assert session.options == {"slots": 4, "threads": 2, "record_seconds": 7.5, "port": at.port, "job_start": "",
                                   "matches": 0}
    assert at.said == [
        ("attached", {"name": "a", "run_id": "synth-0", "epoch": 0, "ranks": 2, "flows": 2, "resync": "state"})
    ]
    assert peer.told == other.told == [NOTHING_KNOWN, STATE_WANTED]


def test_peers_are_those_of_the_settings_and_their_iterations_take_arenas(scene, tmp_path) -> None:
    (tmp_path / "token").write_text("a token that only tests have\n")
    at = scene(name="a", arenas=5, peer_iterations=3, peers=("127.0.0.1:1",))
    at.give(at.join(0), Manifest(body(), 5))
    peers, plan = at.session.options["peers"], at.session.plan
    assert plan.engine.arenas == 8
    digest = digest_of(body(), plan, ("synth-0", 0, 2), Clock(5))
    peers.show(2, np.zeros(8, np.uint8), np.array([(0, 1)]), lambda: True)
    assert at.intake.peering.shelf.read(Holes(1, 7, digest, [(0, 8)], 0.1))[0].ranges == [(0, 8)]
    peers.close()


def test_a_manifest_that_is_said_again_changes_nothing(scene) -> None:
    at = scene()
    peer = at.follow()
    at.give(peer, Manifest(body()))
    assert len(at.sessions) == 1 and at.session.calls == [] and peer.told == [NOTHING_KNOWN, STATE_WANTED]


@pytest.mark.parametrize("again", [Manifest(body(step_values=["lr"])), Manifest(body(), 5)], ids=["job", "first"])
def test_another_manifest_of_the_run_is_followed_anew(scene, again: Manifest) -> None:
    at = scene()
    peer = at.follow()
    at.give(peer, again)
    first, second = at.sessions
    assert first.calls == [("close",)] and second.calls == []
    assert second.plan.job.step_values == again.job["step_values"] and second.clock.first == again.first
    at.give(peer, Record(9))
    assert second.calls == [("record", 9 - again.first, {}, 0)]
    assert peer.told == [NOTHING_KNOWN, STATE_WANTED, STATE_WANTED]


def test_a_manifest_that_was_refused_is_not_held_against_others(scene) -> None:
    at = scene()
    zero, one = at.join(0), at.join(1)
    at.give(zero, Manifest(body(epoch=1)))
    at.give(one, Flows([]))
    assert one.ended == []
    refused(at, zero, "manifest: the manifest is of run 'synth-0', epoch 1, 2 ranks; this is 'synth-0', 0, 2")
    at.intake.ranks.leave(zero.member)
    at.follow()


def test_a_manifest_that_was_refused_takes_nothing_from_the_one_before(scene) -> None:
    at = scene()
    zero, one = at.follow(), at.join(1)
    at.give(zero, Manifest(body(optimizer=None)))
    assert len(zero.ended) == 1
    at.give(one, Record(3))
    at.give(one, Flows([]))
    assert at.session.calls == [("record", 3, {}, 1)] and one.ended == [] and len(at.sessions) == 1


# -- connections ---------------------------------------------------------------------------------------------------


def flow(src: int, dst: int, **changes: Any) -> dict[str, Any]:
    return {
        "src": src, "dst": dst, "channel": 0, "src_addr": f"10.0.0.{src + 1}", "dst_addr": f"10.0.0.{dst + 1}",
        "qpns": [100 + dst], "cts_qpns": [200 + src], "src_addrs": [], "dst_addrs": [], **changes,
    }


FLOWS = [flow(0, 1), flow(1, 0)]


def test_a_manifest_without_connections_waits_for_those_of_every_rank(scene) -> None:
    at = scene()
    zero, one = at.join(0), at.join(1)
    at.give(zero, Manifest(body(flows=[])))
    assert zero.told[-1] == Wanted(["flows"], "connections of rank 0, 1 are not here")
    at.give(zero, Flows(FLOWS))
    assert one.told[-1] == Wanted(["flows"], "connections of rank 1 are not here") and at.sessions == []
    at.give(one, Flows(FLOWS[:1]))
    assert one.told[-1] == STATE_WANTED
    found = at.session.plan.job.flows
    assert [(f.src, f.dst, f.qpns, f.cts_qpns) for f in found] == [(0, 1, [101], [200]), (1, 0, [100], [201])]
    at.give(one, Flows(FLOWS[:1]))  # again
    assert len(at.sessions) == 1 and one.told[-1] == STATE_WANTED and one.told[-2] != STATE_WANTED
    at.give(one, Flows([]))  # other ones, and together they are as before
    assert len(at.sessions) == 1 and one.told[-1] == COME_BACK
    at.give(one, Flows([flow(0, 1), flow(0, 1, channel=1)]))
    assert one.ended[0].startswith("manifest: ")  # the job has one channel


def test_ranks_that_do_not_come_are_said_once_a_start(scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall before one host: nothing else would say why the job is not followed."""
    monkeypatch.setattr(membership, "LOOK_SECONDS", 0.0)
    at = scene()
    first = at.join(0, instance="one")
    at.turn()
    assert at.events("incomplete") == [], "it may come later"
    monkeypatch.setattr(membership, "ABSENT_SECONDS", 0.0)
    for _ in range(2):
        at.turn()
    (said,) = at.events("incomplete")
    assert (said["run_id"], said["ranks"], said["absent"]) == ("synth-0", 2, [1])
    assert said["why"].startswith("1 of 2 ranks have not come")
    at.intake.ranks.leave(first.member)
    second = at.join(0, instance="another")  # the job is started again
    at.turn()
    assert len(at.events("incomplete")) == 2
    at.intake.ranks.leave(second.member)
    at.join(0, instance="yet another")
    at.join(1, instance="of rank 1")
    at.turn()
    assert len(at.events("incomplete")) == 2, "all are here"


def test_connections_that_changed_are_another_job(scene) -> None:
    at = scene()
    zero, one = at.join(0), at.join(1)
    at.give(zero, Flows([]))
    at.give(one, Flows(FLOWS))
    assert zero.told == one.told == [NOTHING_KNOWN] and at.said == []
    at.give(zero, Manifest(body(flows=[])))
    at.give(one, Flows([flow(0, 1), flow(1, 0, qpns=[7])]))
    first, second = at.sessions
    assert first.calls == [("close",)] and [f.qpns for f in second.plan.job.flows] == [[101], [7]]


def test_no_more_than_eight_missing_ranks_are_named(scene) -> None:
    at = scene()
    peer = at.join(0, ("synth-0", 0, 12))
    at.give(peer, Flows([]))
    at.give(peer, Manifest(body(flows=[])))
    assert peer.told[-1] == Wanted(["flows"], "connections of rank 1, 2, 3, 4, 5, 6, 7, 8 are not here")


def test_connections_of_ranks_that_left_are_asked_for_again(scene) -> None:
    at = scene()
    zero, one = at.join(0), at.join(1)
    at.give(one, Flows(FLOWS))
    at.intake.ranks.leave(one.member)
    at.give(zero, Flows(FLOWS))
    at.give(zero, Manifest(body(flows=[])))
    assert zero.told[-1] == Wanted(["flows"], "connections of rank 1 are not here") and at.sessions == []


def test_a_manifest_with_connections_is_taken_at_its_word(scene) -> None:
    at = scene()
    one = at.join(1)
    at.give(one, Flows([flow(0, 1, qpns=[1, 2, 3])]))
    at.follow()
    assert one.ended == [] and [f.qpns for f in at.session.plan.job.flows] == [f.qpns for f in small_job().flows]


OTHER = {
    "src_addr": "10.0.0.9", "dst_addr": "10.0.0.9", "qpns": [102], "cts_qpns": [202], "src_addrs": ["10.0.0.1"],
    "dst_addrs": ["10.0.0.2"],
}


@pytest.mark.parametrize("what", ["src_addr", "dst_addr", "qpns", "cts_qpns", "src_addrs", "dst_addrs"])
def test_both_ends_of_a_connection_say_the_same(scene, what: str) -> None:
    """Queue pairs and addresses that contradict each other: neither end is believed, the newer one as little."""
    at = scene()
    zero, one = at.join(0), at.join(1)
    at.give(zero, Manifest(body(flows=[])))
    held = {what: ["10.0.0.7"]} if what.endswith("s") and what.startswith(("src", "dst")) else {}
    at.give(zero, Flows([flow(0, 1, **held), flow(1, 0)]))
    at.give(one, Flows([flow(0, 1, **{what: OTHER[what]}), flow(1, 0)]))
    assert zero.ended == [] and at.events("attached") == []
    refused(at, one, f"flows: the ends of connection 0, 0, 1 say different {what}")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("what", ["cts_qpns", "src_addrs"])
def test_what_one_end_does_not_know_the_other_says(scene, what: str, turned: bool) -> None:
    at = scene()
    ends = [[flow(0, 1, **{what: []}), flow(1, 0)], [flow(0, 1, **{what: OTHER[what]}), flow(1, 0)]]
    zero, one = at.join(0), at.join(1)
    at.give(zero, Flows(ends[turned]))
    at.give(one, Flows(ends[not turned]))
    at.give(zero, Manifest(body(flows=[])))
    assert zero.ended == one.ended == []
    assert getattr(at.session.plan.job.flows[0], what) == OTHER[what]


def test_connections_are_told_apart_by_channel_and_both_ranks(scene) -> None:
    job = small_job(channels=2, ranks=3)
    assert len(job.flows) == 6
    flows = job.to_dict()["flows"]
    at = scene()
    peers = [at.join(rank, ("synth-0", 0, 3)) for rank in range(3)]
    for rank, peer in enumerate(peers):
        at.give(peer, Flows([f for f in flows if rank in (f["src"], f["dst"])]))
    at.give(peers[0], Manifest(job.to_dict() | {"flows": []}))
    found = at.session.plan.job.to_dict()["flows"]
    assert found == sorted(flows, key=lambda f: (f["channel"], f["src"], f["dst"]))


# -- memory ----------------------------------------------------------------------------------------------------------


def _job(count: int, dtype: str = "float32") -> Job:
    return small_job(count=[count], dtype=dtype)


@pytest.mark.parametrize(("job", "settings"), [
    (_job(37101), {"slots": 3, "arenas": 4}),  # SGD: 3 slots of 4 bytes an element, 4 arenas of 4 and a bit for 8 bytes
    (_job(65005), {"slots": 2, "arenas": 2}),
    (_job(40100, "bfloat16"), {"slots": 3, "arenas": 4}),  # fp32 masters: 3 slots of 6, 4 arenas of 2
])
def test_a_job_that_fits_into_the_memory_is_followed(scene, job: Job, settings: dict[str, int]) -> None:
    at = scene(memory_mb=1, **settings)
    at.follow(job)
    assert len(at.sessions) == 1


@pytest.mark.parametrize(("job", "settings", "said"), [
    (_job(37102), {"slots": 3, "arenas": 4}, ("2", "3", "4")),  # one element more
    (_job(65006), {"slots": 2, "arenas": 2}, ("2", "2", "2")),
    (_job(40101, "bfloat16"), {"slots": 3, "arenas": 4}, ("2", "3", "4")),
    (_job(110000), {"slots": 3, "arenas": 2}, ("3", "3", "2")),
])
def test_a_job_that_does_not_fit_is_refused(scene, job: Job, settings: dict[str, int], said: tuple[str, ...]) -> None:
    at = scene(memory_mb=1, **settings)
    peer = at.join()
    at.give(peer, Manifest(job.to_dict()))
    refused(at, peer, (
        "replica.memory_mb: the job takes {} MiB ({} slots of parameters and optimizer state, {} iterations of"
        " gradients)\n  remedy: set it to {} or more (it is 1), or use fewer slots or arenas"
    ).format(*said, said[0]))


def test_a_job_that_does_not_fit_takes_nothing_from_the_one_that_is_followed(scene) -> None:
    at = scene(memory_mb=1)
    peer = at.follow()
    at.give(peer, Manifest(_job(80000).to_dict()))
    assert len(peer.ended) == 1 and "memory_mb" in peer.ended[0]
    assert len(at.sessions) == 1 and ("close",) not in at.session.calls


def test_a_manifest_that_is_refused_while_the_job_starts_again_leaves_none(scene, monkeypatch) -> None:
    """The one before it was of the earlier start, too."""
    at = scene()
    peer = at.follow(instance="a")
    again: list[Peer] = []

    def refuse(*args: Any, **options: Any) -> None:
        at.intake.ranks.leave(peer.member)
        again.append(at.join(0, instance="b"))
        raise UserError("of the earlier start")

    with monkeypatch.context() as patch:
        patch.setattr("flowcheck.node.groups.planning.plan_job", refuse)
        at.give(peer, Manifest(_job(90).to_dict()))
    at.give(again[0], Flows([]))
    assert len(at.sessions) == 1 and again[0].told == [NOTHING_KNOWN] and again[0].ended == []


# -- failures of the job -----------------------------------------------------------------------------------------


def failures(at: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(event, fields) for event, fields in at.said if event in ("left", "job_recovered")]


def test_a_job_that_is_started_again_says_what_the_failure_cost(scene) -> None:
    at = scene()
    first, other = at.follow(instance="a"), at.join(1, instance="x")
    for number in (3, 4):
        at.give(first, Record(number))
    at.intake.ranks.leave(other.member)
    at.turn()
    assert failures(at) == [("left", {"name": "", "rank": 1, "iteration": 4})]
    at.intake.ranks.leave(first.member)
    at.turn()
    again = at.join(0, instance="b")
    at.give(again, Manifest(body(), 4))
    at.give(again, Record(4))
    (_, _, (event, fields)) = failures(at)
    assert event == "job_recovered" and fields["repeated"] == 1 and fields["iteration"] == 4
    assert fields["detected"] <= fields["restored"] <= fields["resumed"]


def test_a_connection_that_comes_back_is_no_failure(scene) -> None:
    at = scene()
    first = at.follow(instance="a")
    at.give(first, Record(3))
    at.intake.ranks.leave(first.member)
    at.turn()
    again = at.join(0, instance="a")
    at.give(again, Manifest(body()))
    at.give(again, Record(4))
    assert [event for event, _ in failures(at)] == ["left"]


def test_a_connection_that_was_replaced_before_its_end_was_seen_has_not_left(scene) -> None:
    at = scene()
    first = at.follow(instance="a")
    at.give(first, Record(3))
    at.intake.ranks.leave(first.member)
    at.join(0, instance="a")
    at.turn()
    assert failures(at) == []


def test_a_job_that_said_goodbye_and_is_started_again_has_not_failed(scene) -> None:
    at = scene()
    first = at.follow(instance="a")
    at.give(first, Record(3))
    at.give(first, Bye())
    at.intake.ranks.leave(first.member)
    at.turn()
    again = at.join(0, instance="b")
    at.give(again, Manifest(body(), 4))
    at.give(again, Record(4))
    assert failures(at) == []


# -- why it is not followed ------------------------------------------------------------------------------------------


def test_all_ranks_hear_why_their_job_is_refused(scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever came last; and the node blames no firewall for it."""
    monkeypatch.setattr(membership, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(membership, "ABSENT_SECONDS", 0.0)
    at = scene(name="shard0", memory_mb=1)
    zero, one = at.join(0), at.join(1)
    at.give(zero, Members([1, 3]))
    at.give(zero, Manifest(small_job(count=[1 << 20]).to_dict() | {"flows": []}))
    at.give(zero, Flows(FLOWS))
    assert zero.told[-1].why == "connections of rank 1 of group 'shard0' (3 of the job) are not here"
    at.give(one, Flows(FLOWS[:1]))
    (why,) = one.ended
    assert "replica.memory_mb" in why and "remedy" in why
    assert "replica.memory_mb" in zero.told[-1].why and "remedy" in zero.told[-1].why
    at.intake.ranks.leave(one.member)
    at.turn()
    assert at.events("incomplete") == []
    at.give(zero, Flows(FLOWS[:1]))  # while the other one is away
    assert "replica.memory_mb" in zero.told[-1].why
    again = at.join(1)
    assert "replica.memory_mb" in again.told[-1].why


def test_who_does_not_know_its_job_says_why(scene) -> None:
    at = scene()
    zero, one = at.join(0), at.join(1)
    for peer in (zero, one, zero):
        at.give(peer, Notice("an iteration reduced [] elements"))
    (said,) = at.events("watching")
    assert "rank 0" in said["why"] and "an iteration reduced [] elements" in said["why"]
    at.give(one, Notice("another reason"))
    assert len(at.events("watching")) == 2 and zero.ended == one.ended == []
