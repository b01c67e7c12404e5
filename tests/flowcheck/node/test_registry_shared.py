"""The registry of one process: leases, own keys, one root, decisions of a root that still is one; by a clock."""

from __future__ import annotations

import time

import pytest

from flowcheck.node.protect.registry import LEASE_SECONDS, PLACEMENT, ROOT, Entry, RegistryError, Shared


class Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shared(clock: Clock) -> Shared:
    return Shared(clock)


def values(shared: Shared) -> dict[str, str]:
    return {key: entry.value for key, entry in shared.session().read().items()}


def test_keys_are_there_as_long_as_their_lease(shared: Shared, clock: Clock) -> None:
    one, two = shared.session(), shared.session()
    one.renew({"members/a": "1", "have/a": "x"})
    clock.at = 1.0
    two.renew({"members/b": "2"})
    clock.at = LEASE_SECONDS - 0.5
    assert values(shared) == {"members/a": "1", "have/a": "x", "members/b": "2"}
    clock.at = LEASE_SECONDS
    assert values(shared) == {"members/b": "2"}
    one.renew({"members/a": "3"})  # it is back: with what it says now
    assert values(shared) == {"members/a": "3", "members/b": "2"}
    two.renew({"members/b": "2"})
    clock.at += LEASE_SECONDS - 0.5
    assert len(values(shared)) == 2


def test_each_key_knows_the_change_that_made_it(shared: Shared, clock: Clock) -> None:
    """No other key's is the same; a new value leaves it, and a key that was gone is another one."""
    one, two = shared.session(), shared.session()
    one.renew({"members/a": "1", "have/a": "x"})
    two.renew({"members/b": "2"})
    before = {key: entry.created for key, entry in one.read().items()}
    assert len(set(before.values())) == 3 and before["members/a"] < before["have/a"] < before["members/b"]
    one.renew({"members/a": "1", "have/a": "y"})
    assert {key: entry.created for key, entry in one.read().items()} == before
    clock.at = LEASE_SECONDS
    one.renew({"members/a": "1"})
    assert one.read()["members/a"].created > max(before.values())


def test_a_name_is_one_members(shared: Shared, clock: Clock) -> None:
    """Nothing of what another one says under it is taken."""
    one, two = shared.session(), shared.session()
    one.renew({"members/a": "1"})
    with pytest.raises(RegistryError, match="members/a is somebody else's") as caught:
        two.renew({"have/b": "x", "members/a": "3"})
    assert caught.value.where == "registry" and values(shared) == {"members/a": "1"}
    clock.at = LEASE_SECONDS
    two.renew({"have/b": "x", "members/a": "3"})
    assert values(shared) == {"have/b": "x", "members/a": "3"}


def test_one_root_with_a_lease(shared: Shared, clock: Clock) -> None:
    one, two = shared.session(), shared.session()
    assert not one.elect("a") and values(shared) == {}
    one.renew({})
    two.renew({})
    assert one.elect("a") and not two.elect("b") and not one.elect("a")
    assert values(shared) == {ROOT: "a"}
    clock.at = LEASE_SECONDS - 0.5
    two.renew({})
    clock.at = LEASE_SECONDS
    assert not one.elect("a")  # its lease is over
    assert two.elect("b") and values(shared) == {ROOT: "b"}


def test_who_is_root_decides(shared: Shared, clock: Clock) -> None:
    one, two = shared.session(), shared.session()
    one.renew({})
    two.renew({})
    nobody = Entry("a", 1)
    assert not one.decide(PLACEMENT, "of nobody", nobody)
    assert one.elect("a")
    root = one.read()[ROOT]
    assert not two.decide(PLACEMENT, "of another member", root)
    assert not one.decide(PLACEMENT, "of an earlier election", Entry("a", root.created + 1))
    assert values(shared) == {ROOT: "a"}
    assert one.decide(PLACEMENT, "first", root) and two.read()[PLACEMENT].value == "first"
    clock.at = LEASE_SECONDS
    assert values(shared) == {PLACEMENT: "first"}  # it is nobody's, and stays
    assert not one.decide(PLACEMENT, "of one that was root", root)
    two.renew({})
    assert two.elect("a") and not two.decide(PLACEMENT, "of one that was root", root)
    assert two.decide(PLACEMENT, "second", two.read()[ROOT]) and values(shared)[PLACEMENT] == "second"


def test_who_leaves_is_gone_at_once(shared: Shared) -> None:
    one, two = shared.session(), shared.session()
    one.renew({"members/a": "1"})
    two.renew({"members/b": "2"})
    assert one.elect("a")
    one.close()
    assert values(shared) == {"members/b": "2"} and two.elect("b")


def test_without_a_clock_of_the_test_it_has_the_machines() -> None:
    shared = Shared()
    one = shared.session()
    before = time.monotonic()
    one.renew({"members/a": "1"})
    assert before + LEASE_SECONDS <= one.ends <= time.monotonic() + LEASE_SECONDS
