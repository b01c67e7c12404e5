"""Which connections of strangers may stay, and who goes for whom: any sequence of coming, answering and going."""

from __future__ import annotations

import resource
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.node.doors.files import LEAST, OTHERS, most_descriptors, raise_limit, strangers_within
from flowcheck.node.doors.waiting_room import FAIR, SHRUNK_SECONDS, SPARE, WaitingRoom, network_of


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("host", "network"), [
    ("10.0.0.7", "10.0.0.7"), ("::1", "::/64"),
    ("fd00:1:2:3:4:5:6:7", "fd00:1:2:3::/64"), ("fe80::1%eth0", "fe80::/64"),
    ("::ffff:10.0.0.7", "10.0.0.7"), ("somebody", "somebody"),
])
def test_what_counts_as_one_address(host: str, network: str) -> None:
    assert network_of(host) == network


def test_the_oldest_of_an_address_goes_then_the_oldest_of_all() -> None:
    room: WaitingRoom[str] = WaitingRoom(4, 2)
    assert [room.enter(one, one[0]) for one in ("a1", "a2", "a3", "b1", "c1", "d1")] == [
        None, None, "a1", None, None, "a2"]
    assert room.enter("e1", "e") == "a3"


def test_a_crowd_pays_before_single_ones_do() -> None:
    room: WaitingRoom[tuple[str, int]] = WaitingRoom(FAIR + 2, 100)
    room.enter(("one", 0), "one")
    for number in range(FAIR + 1):
        room.enter(("crowd", number), "crowd")
    assert room.enter(("two", 0), "two") == ("crowd", 0)
    assert room.enter(("three", 0), "three") == ("one", 0)  # nobody has more than the ranks of a host have


def test_where_descriptors_run_out_there_are_fewer_for_a_while() -> None:
    clock = Clock()
    room: WaitingRoom[int] = WaitingRoom(100, 100, clock)
    for one in range(50):
        room.enter(one, "a")
    assert room.shrink() == list(range(SPARE)) and len(room) == 50 - SPARE
    assert room.enter(50, "a") == SPARE
    clock.now += SHRUNK_SECONDS
    assert room.enter(51, "a") is None
    assert WaitingRoom[int](9, 9).shrink() == []


@given(st.integers(1, 8), st.integers(1, 4), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3), st.sampled_from(
    ["enter", "leave", "shrink"]))))
def test_never_more_than_there_may_be_and_every_newcomer_has_a_place(
    most: int, per_address: int, steps: list[tuple[int, int, str]]
) -> None:
    clock = Clock()
    room: WaitingRoom[int] = WaitingRoom(most, per_address, clock)
    here: dict[int, str] = {}
    for one, host, what in steps:
        clock.now += 1.0
        if what == "enter" and one not in here:
            gone = room.enter(one, f"10.0.0.{host}")
            here[one] = f"10.0.0.{host}"
            if gone is not None:
                assert gone != one
                del here[gone]
        elif what == "leave":
            assert room.leave(one) == (here.pop(one, None) is not None)
        elif what == "shrink":
            for gone in room.shrink():
                del here[gone]
        assert len(room) == len(here) <= most and all(one in room for one in here)
        assert all(count <= per_address for count in Counter(here.values()).values())
        assert set(room.late(-1.0)) == set(here) and (room.oldest() is None) == (not here)


@pytest.mark.parametrize(("limit", "strangers"), [(1 << 16, 1024), (1024, 1024 - OTHERS - 512), (256, LEAST)])
def test_strangers_leave_descriptors_for_all_else(limit: int, strangers: int) -> None:
    assert strangers_within(limit, 1024, 256) == strangers


def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(300, before[0]), before[1]))
        assert raise_limit() == most_descriptors() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
