"""A member's place among holders: who is root, what it decides and when, and what a registry that is gone changes:
nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flowcheck.checkpoint.coding.holders import Site
from flowcheck.node.protect.placement import Decided, Member
from flowcheck.node.protect.registry import HAVE, PLACEMENT
from flowcheck.node.protect.registry_member import PATIENCE, Seat

from ..hand_node import until
from .registry_scene import etcd_server
from .seat_scene import GRACE, LEAVES, Cluster, apart, in_place_of, settled


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_a_root_decides_when_all_are_there(cluster: Cluster) -> None:
    cluster.come("a", "b")
    cluster.turns(GRACE - 2)
    cluster.come("c", "d")  # before it was decided: everybody is waited for anew
    cluster.turns(GRACE - 1)
    assert cluster.placed().epoch == 0 and cluster.sources == {name: {} for name in "abcd"}
    cluster.turns(3)
    placed = cluster.placed()
    assert placed.epoch == 1 and apart(placed) and cluster.root() == "a"
    assert {name: len(keep) for name, keep in placed.holders.items()} == dict.fromkeys("abcd", 1)
    for name, sources in cluster.sources.items():
        assert sources == {one: f"{one}.example:7071" for one, keep in placed.holders.items() if name in keep}
        (event,) = cluster.events(name, "placed")
        assert (event["epoch"], event["members"], event["copies"]) == (1, 4, sorted(sources))
        assert event["alone"] == [] and event["together"] == []
        assert [fields["root"] for fields in cluster.events(name, "registered")] == ["a"]
    cluster.turns(100)
    assert cluster.placed().epoch == 1  # nothing has changed


def test_a_replacement_takes_the_old_place(cluster: Cluster) -> None:
    before = settled(cluster, "a", "b", "c", "d")
    cluster.go("c")
    cluster.turns(GRACE)
    assert cluster.placed() == before  # one grace: it may come back
    cluster.come("e")
    cluster.turns(GRACE + 6)
    after = cluster.placed()
    assert after.epoch == 4 and apart(after) and after.holders == in_place_of(before.holders, {"c": "e"})


def test_the_place_where_it_shares_a_leaf_with_nobody(cluster: Cluster) -> None:
    """Pairs of l1 and l2; one of each leaf is gone, and one of l1 comes: it takes the place of the one of l1."""
    before = settled(cluster, "a", "b", "c", "d")
    (lost_with_a,) = before.holders["a"]
    other = next(name for name in "cd" if name != lost_with_a)
    cluster.go("a", other)
    cluster.come("f")
    cluster.turns(2 * GRACE)
    after = cluster.placed()
    assert after.holders["f"] == before.holders["a"] and other in after.holders and apart(after)


def test_who_comes_back_in_time_has_changed_nothing(cluster: Cluster) -> None:
    before = settled(cluster, "a", "b", "c", "d")
    cluster.go("a")  # the root
    cluster.turns(GRACE - 2)
    assert cluster.root() != "a"
    cluster.come("a")
    cluster.turns(6 * GRACE)
    assert cluster.placed() == before and cluster.root() != "a"
    cluster.go("b")
    cluster.turns(4)
    cluster.come("b", port=9)  # at another address: the same place, at once
    cluster.turns(3)
    after = cluster.placed()
    assert after.epoch == 2 and after.holders == before.holders and after.members["b"].address == "b.example:9"


def test_what_nobody_replaces_is_placed_anew(cluster: Cluster) -> None:
    settled(cluster, "a", "b", "c", "d")
    cluster.go("d")
    cluster.turns((1 + PATIENCE) * GRACE)
    assert cluster.placed().epoch == 2 and cluster.placed().recovery is not None  # frozen, and waited for
    cluster.turns(10)
    after = cluster.placed()
    assert after.epoch == 4 and sorted(after.holders) == ["a", "b", "c"] and all(after.holders.values())
    cluster.go("b", "c")
    cluster.turns((1 + PATIENCE) * GRACE + 10)
    assert cluster.placed().holders == {"a": ()}
    assert cluster.events("a", "placed")[-1]["alone"] == ["a"]


def test_more_that_come_are_placed(cluster: Cluster) -> None:
    settled(cluster, "a", "b")
    assert cluster.events("a", "placed")[-1]["together"] == [["a", "b"]]
    cluster.come("c", "d")
    cluster.turns(GRACE + 3)
    assert cluster.placed().epoch == 2 and apart(cluster.placed()) and len(cluster.placed().holders) == 4


def test_a_registry_that_is_gone_changes_nothing_and_is_said_once(cluster: Cluster) -> None:
    before = settled(cluster, "a", "b", "c", "d")
    sources = {name: dict(one) for name, one in cluster.sources.items()}
    cluster.gone = True
    cluster.turns(20 * GRACE)
    assert cluster.sources == sources and cluster.placed() == before
    for name in "abcd":
        (event,) = cluster.events(name, "unregistered")
        assert event["why"].startswith("registry: etcd does not answer (")
        assert (event["epoch"], event["copies"]) == (1, sorted(sources[name]))
    cluster.come("c")  # started again meanwhile: it knows from its file
    cluster.turns(3)
    assert cluster.sources == sources
    cluster.gone = False
    cluster.turns(6 * GRACE)
    assert cluster.placed() == before and all(len(cluster.events(name, "registered")) == 2 for name in "abd")


def test_a_registry_that_comes_back_empty_gets_what_holds(cluster: Cluster) -> None:
    before = settled(cluster, "a", "b", "c", "d")
    cluster.shared.keys.clear()
    cluster.turns(3)
    found = cluster.shared.session().read()
    assert Decided.of(found[PLACEMENT].value) == before == cluster.placed()


def test_a_new_root_never_goes_back_behind_what_others_know(cluster: Cluster, tmp_path: Path) -> None:
    settled(cluster, "a", "b", "c", "d")
    cluster.shared.keys.clear()
    older = {name: cluster.seats.pop(name) for name in "abcd"}
    cluster.come("e")
    cluster.turns(1)  # the newcomer is root
    cluster.seats |= older
    cluster.turns(GRACE + 3)
    assert cluster.root() == "e" and cluster.placed().epoch == 2 and sorted(cluster.placed().holders) == list("abcde")


def test_what_a_member_has_is_there_for_all(cluster: Cluster) -> None:
    cluster.come("a")
    cluster.at += 1.0
    cluster.seats["a"].turn([{"shard": "dp0", "steps": [4, 6]}])
    said = json.loads(cluster.shared.session().read()[HAVE + "a"].value)
    assert said == {"epoch": 0, "copies": [{"shard": "dp0", "steps": [4, 6]}], "own": [], "parity": []}


@pytest.mark.parametrize("text", [
    "", "[]", "3", '{"epoch": 1}', '{"epoch": "1", "members": {}, "holders": {}}',
    '{"epoch": 1, "members": {"a": {"address": "x"}}, "holders": {"a": []}}',
    '{"epoch": 1, "members": {}, "holders": {"a": ["b"]}}', '{"epoch": 1, "members": {}, "holders": {}, "recovery": 1}',
    '{"epoch": 1, "members": {"a": {"address": "h:1", "standby": 1}}, "holders": {"a": []}}',
    '{"epoch": 9, "members": {"a": {"address": "h:1"}}, "holders": {"a": ["nobody"]}}',
    '{"epoch": 9, "members": {"a": {"address": "h:1"}}, "holders": {"a": []}, "parity": {"data": ["a"], '
    '"holders": ["nobody"]}}',
    '{"epoch": 9, "members": {"a": {"address": "h:1"}}, "holders": {"a": []}, "parity": {"data": ["a"], '
    '"holders": ["a"]}}',
    '{"epoch": 9, "members": {"a": {"address": "h:1"}}, "holders": {"a": []}, "parity": {"data": [], "holders": [""]}}',
    '{"epoch": 9, "members": {}, "holders": {}, "parity": 3}',
    '{"epoch": -9, "members": {}, "holders": {}}', f'{{"epoch": {"9" * 4299}, "members": {{}}, "holders": {{}}}}',
    '{"epoch": 9, "members": {}, "holders": {}, "recovery": {"number": Infinity, "lost": [], "asked": [], '
    '"shards": [], "void": [], "steps": []}}',
], ids=lambda text: text[:60])
def test_what_is_no_decision_is_none(text: str, cluster: Cluster) -> None:
    """In the registry, and in the file."""
    assert Decided.of(text) == Decided()
    before = settled(cluster, "a", "b")
    session = cluster.shared.session()
    with cluster.shared.lock:
        cluster.shared.put(PLACEMENT, text, None)
    cluster.turns(3)
    assert cluster.placed() == before and Decided.of(session.read()[PLACEMENT].value) == before
    (cluster.folder / "c.json").write_text(text)
    cluster.come("c")
    assert cluster.seats["c"].decided == Decided()


@pytest.mark.parametrize("epoch", ["Infinity", "1e999", "-1", "9" * 4299, str(1 << 53), "{}"],
                         ids=lambda text: text[:9])
def test_what_a_member_cannot_have_is_as_if_it_had_nothing(epoch: str, cluster: Cluster) -> None:
    """Who is root takes the epoch of what others follow for the last one; a lie about it neither ends nor moves it."""
    before = settled(cluster, "a", "b")
    with cluster.shared.lock:
        cluster.shared.put("members/x", Member(Site("x", leaf="l3"), "x:1").text(), None)
        cluster.shared.put("have/x", f'{{"epoch": {epoch}, "copies": []}}', None)
    cluster.turns(GRACE + 3)
    assert cluster.placed().epoch == before.epoch + 1 and sorted(cluster.placed().members) == ["a", "b", "x"]


def test_two_roots_end_in_one_placement(cluster: Cluster) -> None:
    """A registry that says yes to all: two members decide the same epoch. What lies there holds for both."""
    before = settled(cluster, "a", "b", "c", "d")
    other = replace(before, epoch=before.epoch + 1, holders={**before.holders, "a": before.holders["b"],
                                                             "b": before.holders["a"]})
    mine = replace(before, epoch=before.epoch + 1)
    for name, decided in (("a", mine), ("b", mine), ("c", other), ("d", other)):
        cluster.seats[name]._adopt(decided)
    with cluster.shared.lock:
        cluster.shared.put(PLACEMENT, other.text(), None)
    cluster.turns(2)
    assert cluster.placed() == other


def test_a_member_that_is_none_is_left_out(cluster: Cluster) -> None:
    before = settled(cluster, "a", "b")
    with cluster.shared.lock:
        cluster.shared.put("members/x", "{}", None)
    cluster.turns(2 * GRACE)
    assert cluster.placed() == before


# -- etcd ----------------------------------------------------------------------------------------------------------


AWAY = 10.0  # seconds: longer than a lease, and several graces


@pytest.mark.slow
def test_etcd_is_killed_paused_and_split(tmp_path: Path) -> None:
    """Three nodes of etcd. Whatever happens to them, the placement stays, and seats say so once."""
    from flowcheck.node.protect.registry_etcd import Etcd

    with etcd_server(tmp_path / "etcd", 3) as server:
        said: dict[str, list[tuple[str, dict[str, Any]]]] = {name: [] for name in "abcd"}
        seats = {
            name: Seat(Etcd(server.endpoints, "x", seconds=0.5), Member(Site(name, leaf=LEAVES[name]), f"{name}:1"), 2,
                       2.0, lambda event, name=name, **fields: said[name].append((event, fields)),
                       tmp_path / f"{name}.json")
            for name in "abcd"
        }

        def turn() -> Mapping[str, dict[str, str]]:
            return {name: seat.turn() for name, seat in seats.items()}

        def until_turned(true: Callable[[], bool]) -> None:
            def tried() -> bool:
                turn()
                return true()

            until(tried)

        def in_turn() -> bool:
            """Whether each was said once, however often a busy machine was too slow for it."""
            said_of = [[event for event, _ in one if event.endswith("registered")] for one in said.values()]
            return all(one != other for events in said_of for one, other in pairwise(events))

        until_turned(lambda: all(seat.decided.epoch == 1 for seat in seats.values()))
        before, placed = turn(), seats["a"].decided
        assert apart(placed) and all(before.values())

        def unharmed(again: Callable[[], None]) -> None:
            until_turned(lambda: all(seat._said != "" for seat in seats.values()))
            end = time.monotonic() + AWAY
            while time.monotonic() < end:
                assert turn() == before
            assert all(seat._said != "" for seat in seats.values()) and in_turn()
            again()
            until_turned(lambda: all(seat._said == "" for seat in seats.values()))
            for _ in range(5):
                assert turn() == before
            assert in_turn()

        server.kill(0)  # one of three: nobody notices, or one lease at most
        until_turned(lambda: seats["a"]._said == "")
        server.kill(1)  # the smaller side of a split: it answers, and neither reads nor writes
        unharmed(lambda: (server.start(0), server.start(1)))
        for number in range(3):
            server.pause(number)
        unharmed(lambda: [server.resume(number) for number in range(3)])
        assert seats["a"].decided.holders == placed.holders and _epochs(seats) == {placed.epoch}


def _epochs(seats: Mapping[str, Seat]) -> set[int]:
    return {seat.decided.epoch for seat in seats.values()}


