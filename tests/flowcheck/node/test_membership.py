"""Who is let into a group, and what is said to those who are: connections that write down what they are told."""

from __future__ import annotations

import re

import pytest

from flowcheck.control.protocol import Joined, Manifest, Notice, Wanted
from flowcheck.node.groups import membership as module
from flowcheck.node.groups.membership import ABSENT_SECONDS, LOOK_SECONDS, Membership

from .group_scene import Peer

RUN = ("night", 3, 2)
ANOTHER = ("night", 4, 2)
NOTHING = Wanted(["manifest", "flows"], "")


def joined(at: Membership, rank: int, run: tuple[str, int, int] = RUN, instance: str = "") -> Peer:
    peer = Peer(rank)
    assert at.join(run, peer.member, instance) == ""
    return peer


def test_a_rank_hears_what_is_wanted_and_later_ranks_what_is_wanted_then() -> None:
    at = Membership()
    first = joined(at, 0)
    assert first.told == [NOTHING] and at.run == RUN
    state = Wanted(["state"], "a hole")
    at.tell(state)
    assert first.told == [NOTHING, state] and joined(at, 1).told == [state]


def test_a_notice_is_heard_by_all_and_by_those_that_come_later() -> None:
    at = Membership()
    first = joined(at, 0)
    notice = Notice("the mirror is silent")
    at.tell(notice)
    assert first.told == [NOTHING, notice] and joined(at, 1).told == [NOTHING, notice]
    at.tell(Notice(""))
    assert first.told[-1] == Notice("") and joined(at, 2).told == [NOTHING], "there is nothing to say any more"


def test_other_words_are_not_repeated_to_those_that_come_later() -> None:
    at = Membership()
    first = joined(at, 0)
    at.tell(Joined(7))
    assert first.told == [NOTHING, Joined(7)] and joined(at, 1).told == [NOTHING]


def test_a_rank_is_there_once() -> None:
    at = Membership()
    joined(at, 0)
    again = Peer(0)
    assert at.join(RUN, again.member) == "rank 0 is attached already" and again.told == []


def test_another_run_waits_until_all_have_left() -> None:
    at = Membership()
    peers = [joined(at, 0), joined(at, 1)]
    at.leave(peers[0].member)
    other = Peer(0)
    why = at.join(ANOTHER, other.member)
    assert "'night', epoch 3, 2 ranks" in why and repr(ANOTHER[0]) in why and "remedy: " in why
    at.leave(peers[1].member)
    assert at.join(ANOTHER, other.member) == "" and at.run == ANOTHER and list(at.members) == [0]


@pytest.mark.parametrize("instances", [("", ""), ("one", "one")])
def test_a_rank_that_comes_back_belongs_to_the_same_start(instances: tuple[str, str]) -> None:
    at = Membership()
    first, other = joined(at, 0, instance=instances[0]), joined(at, 1, instance="another")
    at.manifest = Manifest({})
    at.leave(first.member)
    back = joined(at, 0, instance=instances[1])
    assert back.member.start == first.member.start == other.member.start and at.manifest is not None
    assert other.ended == []


def test_who_names_no_instance_has_none() -> None:
    at = Membership()
    first, back = Peer(0), Peer(0)
    assert at.join(RUN, first.member) == ""
    at.leave(first.member)
    assert at.join(RUN, back.member, "") == "" and back.member.start == first.member.start


def test_another_instance_of_a_rank_is_a_job_that_was_started_again() -> None:
    """All that is known of the one before goes, and so do its connections."""
    at = Membership()
    first, other = joined(at, 0, instance="one"), joined(at, 1, instance="two")
    own = at.own_id
    at.manifest = Manifest({})
    at.tell(Wanted(["state"], "a hole"))
    at.leave(first.member)
    back = joined(at, 0, instance="three")
    assert other.ended == ["the job was started again"] and list(at.members) == [0] and back.ended == []
    assert back.member.start == first.member.start + 1 and at.manifest is None and back.told == [NOTHING]
    assert at.own_id != own
    assert joined(at, 1, instance="four").ended == [], "the other rank of the new start has an instance of its own"


def test_a_start_has_an_id_of_its_own_for_a_job_that_says_none() -> None:
    at = Membership()
    first = joined(at, 0)
    assert first.member.start == 1 and re.fullmatch(r"\S{8,}", at.own_id)


def test_who_has_left_is_let_go_by_the_group() -> None:
    """Also one that was replaced meanwhile: its successor stays."""
    at = Membership()
    first = joined(at, 0, instance="one")
    at.leave(first.member)
    second = joined(at, 0, instance="one")
    at.leave(first.member)
    assert at.members == {0: second.member} and at.gone == [first.member, first.member]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_ranks_that_do_not_come_are_named_once_in_each_start(clock: Clock) -> None:
    at = Membership()
    assert at.absent() == [], "nobody has come: there is no job"
    first = joined(at, 1, ("night", 3, 4), instance="one")
    clock.now += ABSENT_SECONDS - 0.25
    assert at.absent() == []
    joined(at, 2, ("night", 3, 4))
    clock.now += LOOK_SECONDS
    assert at.absent() == [0, 3], "counted from the first one"
    clock.now += LOOK_SECONDS
    assert at.absent() == []
    at.leave(first.member)
    joined(at, 1, ("night", 3, 4), instance="two")
    clock.now += ABSENT_SECONDS
    assert at.absent() == [0, 2, 3]


def test_ranks_are_counted_no_more_often_than_once_in_a_second(clock: Clock) -> None:
    at = Membership()
    joined(at, 0)
    clock.now += ABSENT_SECONDS - 0.25
    assert at.absent() == []
    clock.now += LOOK_SECONDS - 0.25
    assert at.absent() == [], "they would be absent, and it is not looked"
    clock.now += 0.25
    assert at.absent() == [1]


def test_a_job_that_all_have_left_lacks_nobody_and_is_counted_anew(clock: Clock) -> None:
    at = Membership()
    first = joined(at, 0)
    at.leave(first.member)
    clock.now += ABSENT_SECONDS
    assert at.absent() == []
    joined(at, 0)
    clock.now += LOOK_SECONDS
    assert at.absent() == [], "the first of those that are here has just come"
    joined(at, 1)
    clock.now += ABSENT_SECONDS
    assert at.absent() == [] and at._named == 0, "all are here: who goes later may yet be named"
    at.leave(at.members[1])
    clock.now += LOOK_SECONDS
    assert at.absent() == [1]
