"""A loss, gone through by its root: frozen, replaced, whole again. The root is killed at every point of that."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import DISK, MEMORY, STORE
from flowcheck.checkpoint.coding.holders import Site
from flowcheck.node.protect.losses import whole
from flowcheck.node.protect.placement import Decided, Member, Recovery
from flowcheck.node.protect.registry_loop import Persistent
from flowcheck.node.protect.registry_member import PATIENCE, Seat
from flowcheck.node.protect.replacement import Operator

from ..hand_api import KEY, HandApi, HandVersion
from ..hand_node import until
from .registry_scene import etcd_server
from .seat_scene import RUN, Cluster, apart, in_place_of, settled

SHARDS = dict(zip("abcd", ("s0", "s1", "s2", "s3"), strict=True))
LEASE = 4  # turns, until everybody has seen that one is over


class Scene:
    """Four nodes, each of which follows a shard and has a partner, copies of some seconds; and two standbys."""

    def __init__(self, folder: Path, grace: float = 2.0, **more: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.cluster = cluster = Cluster(folder, grace, keep=6)
        cluster.follow(SHARDS)
        cluster.come("a", **more)
        self.before = settled(cluster, "b", "c", "d")
        assert cluster.root() == "a" and apart(self.before)
        (self.partner,) = self.before.holders["a"]
        self.lost = next(name for name in "cd" if name != self.partner)
        cluster.turns(cluster.keep)

    def follows(self) -> None:
        """Who has a place has its mirror port, and what is mirrored there."""
        for seat in self.cluster.seats.values():
            for old, name in zip(self.before.holders, seat.decided.holders, strict=False):
                self.cluster.shards.setdefault(name, SHARDS[old])

    def until_restored(self) -> None:
        epochs = dict.fromkeys(self.cluster.seats, 0)
        for _ in range(80):
            self.cluster.turns(1, self.follows)
            assert self.cluster.in_common(), "no step is left that copies of all shards have"
            for name, seat in self.cluster.seats.items():
                assert seat.decided.epoch >= epochs.get(name, 0)
                epochs[name] = seat.decided.epoch
            there = {name for seat in self.cluster.seats.values() for name in seat.decided.holders}
            over = all(seat.decided.recovery is None for seat in self.cluster.seats.values())
            if over and there <= self.cluster.seats.keys() and there != self.before.holders.keys():
                return
        raise AssertionError("it was not restored")


def test_each_step_and_nothing_else_moves(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    cluster, lost = scene.cluster, scene.lost
    cluster.come("e", standby=True)
    cluster.turns(20)
    assert cluster.placed() == scene.before  # a standby has no place
    cluster.go(lost)
    gone_at = int(cluster.at)
    cluster.turns(LEASE, scene.follows)
    assert cluster.placed() == scene.before and all(seat.steps == {RUN: gone_at} for seat in cluster.seats.values())
    scene.until_restored()
    after = cluster.placed()
    assert after.epoch == scene.before.epoch + 3  # frozen, replaced, whole
    assert after.holders == in_place_of(scene.before.holders, {lost: "e"}) and whole(after, cluster.haves())
    for name in cluster.seats.keys() - {"e"}:
        first, second = cluster.events(name, "recovering")
        assert (first["lost"], first["steps"], first["void"]) == ([lost], [{"run_id": "run", "step": gone_at}], [])
        assert (second["lost"], second["steps"]) == ([], first["steps"])
        (over,) = cluster.events(name, "restored")
        assert over == {"epoch": after.epoch, "since": after.epoch - 2}
    cluster.turns(2)
    assert all(gone_at not in steps for name in cluster.seats for (_, shard), steps in cluster.copies[name].items()
               if shard != SHARDS[lost]) and all(seat.steps == {} for seat in cluster.seats.values())


def test_a_root_killed_at_any_point(tmp_path: Path) -> None:
    """Before and after each call of the registry. The next one goes on, and the old root is replaced as well."""
    killed_while = set()
    for point in itertools.count():
        scene = Scene(tmp_path / str(point))
        cluster = scene.cluster
        cluster.come("e", "g", standby=True)
        cluster.turns(1)
        cluster.go(scene.lost)
        cluster.kill_in = point
        cluster.turns(LEASE, scene.follows)
        scene.until_restored()
        after = cluster.placed()
        if not cluster.killed:
            break
        cluster.kill_in = None
        for _ in range(40):  # it may have died after all was whole: that is a loss of its own
            if "a" not in cluster.placed().holders and cluster.placed().recovery is None:
                break
            cluster.turns(1, scene.follows)
        after = cluster.placed()
        assert cluster.killed == ["a"] and sorted(after.holders) == sorted({*"abcdeg"} - {"a", scene.lost})
        new = dict(zip(scene.before.holders, after.holders, strict=True))
        assert after.holders == in_place_of(scene.before.holders, new) and whole(after, cluster.haves())
        killed_while.add(next((fields["epoch"] for event, fields in reversed(cluster.said["a"])
                               if event == "recovering"), 0) - scene.before.epoch)
    assert point > 20 and {-scene.before.epoch, 1, 2} <= killed_while  # before any step, and between all of them


def test_a_leaf_that_is_lost_takes_no_shard_with_it(tmp_path: Path) -> None:
    """Both of its nodes at once: what needs each other lies in different leaves. Two standbys take both places."""
    scene = Scene(tmp_path)
    cluster = scene.cluster
    cluster.come("e", "g", standby=True)
    cluster.turns(1)
    cluster.go("c", "d")
    gone_at = int(cluster.at)
    cluster.turns(cluster.grace + LEASE, scene.follows)
    first = cluster.events("a", "recovering")[0]
    assert (first["lost"], first["void"], first["steps"]) == (["c", "d"], [], [{"run_id": "run", "step": gone_at}])
    scene.until_restored()
    after = cluster.placed()
    new = dict(zip(scene.before.holders, after.holders, strict=True))
    assert {new["c"], new["d"]} == {"e", "g"} and after.holders == in_place_of(scene.before.holders, new)
    assert whole(after, cluster.haves()) and cluster.void == []


def test_a_group_that_is_lost_is_said_with_what_is_left(tmp_path: Path) -> None:
    """A node and the one that kept its copies: those two shards are nowhere in memory."""
    scene = Scene(tmp_path)
    cluster = scene.cluster
    pair = [scene.lost, *scene.before.holders[scene.lost]]
    cluster.go(*pair)
    cluster.turns(cluster.grace + LEASE)
    recovery = cluster.placed().recovery
    assert recovery is not None and recovery.lost == tuple(sorted(pair)) and recovery.steps == {}
    wanted = sorted((*RUN, SHARDS[name]) for name in pair)
    assert list(recovery.void) == wanted and [one.recovery for one in cluster.void] == [recovery]
    assert cluster.events("a", "recovering")[-1]["void"] == [shard for _, _, shard in wanted]


def test_what_a_new_root_did_not_see_it_does_not_forget(tmp_path: Path) -> None:
    """It knows from the decision what is void, and says it, too: the one before may not have come to it."""
    scene = Scene(tmp_path)
    cluster = scene.cluster
    cluster.go(scene.lost, *scene.before.holders[scene.lost])
    cluster.turns(cluster.grace + LEASE)
    cluster.go("a")
    cluster.turns(LEASE + 2)
    assert cluster.root() == scene.partner and len(cluster.void) == 2


def test_who_comes_back_ends_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    cluster = scene.cluster
    cluster.go(scene.lost)
    cluster.turns(cluster.grace + LEASE)
    assert cluster.placed().recovery is not None
    cluster.come(scene.lost)
    cluster.turns(3)
    assert cluster.placed().recovery is None and cluster.placed().holders == scene.before.holders


def test_another_loss_meanwhile(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    cluster = scene.cluster
    cluster.go(scene.lost)
    cluster.turns(cluster.grace + LEASE)
    first = cluster.placed().recovery
    assert first is not None
    cluster.go(scene.partner)
    cluster.turns(cluster.grace + LEASE)
    second = cluster.placed().recovery
    assert second is not None and second.lost == tuple(sorted([scene.lost, scene.partner]))
    assert second.number == first.number and second.steps == first.steps and second.void == ()
    cluster.come("e", "g", standby=True)
    scene.until_restored()


# -- the operator's command ----------------------------------------------------------------------------------------


def script(tmp_path: Path, *lines: str) -> list[str]:
    return [sys.executable, "-S", "-c", "; ".join(["import os", *lines]), str(tmp_path / "asked")]


WRITES = "open(__import__('sys').argv[1], 'a').write(' '.join(os.environ['FLOWCHECK_' + k] for k in " \
         "('LOST', 'ADDRESS', 'LEAF', 'CLUSTER', 'FOLLOWS', 'RECOVERY')) + chr(10))"


def test_the_command_is_asked_once_and_its_machine_takes_the_place(tmp_path: Path) -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    operator = Operator(script(tmp_path, WRITES), "mine", lambda event, **fields: said.append((event, fields)))
    scene = Scene(tmp_path / "seats", operator=operator)
    cluster, lost = scene.cluster, scene.lost
    cluster.go(lost)
    cluster.turns(cluster.grace + LEASE)
    number = scene.before.epoch + 1

    until(lambda: all(one.process is not None and one.process.poll() == 0 for one in operator._tries.values()))
    cluster.turns(2)
    asked = cluster.placed().recovery
    assert asked is not None and asked.asked == (lost,)
    cluster.turns(5 * PATIENCE * cluster.grace)  # a machine takes its time, and the place is kept for it
    recovery = cluster.placed().recovery
    assert recovery is not None and recovery.lost == (lost,)
    assert (tmp_path / "asked").read_text() == f"{lost} {lost}.example:7071 l2 mine 1 {number}\n"
    assert said == [("replacing", {"lost": lost, "recovery": number})]
    cluster.come("e")
    scene.until_restored()
    assert cluster.placed().holders == in_place_of(scene.before.holders, {lost: "e"})
    assert cluster.events("a", "recovering")[1]["asked"] == [lost]


# -- what is left where no copy is -----------------------------------------------------------------------------------


def test_the_newest_persistent_version_of_all_shards(tmp_path: Path) -> None:
    """Asked of those that are there; one that is gone holds up nobody."""
    said: list[tuple[str, dict[str, Any]]] = []
    with HandApi(HandVersion(9, shard="s0", tier=MEMORY), HandVersion(8, shard="s0", tier=DISK),
                 HandVersion(4, shard="s0", tier=DISK)) as one, \
            HandApi(HandVersion(4, shard="s1", tier=STORE), HandVersion(6, shard="s1", tier=STORE)) as two:
        shard = ("run", 0, "s1")
        members = {name: Member(Site(name), address) for name, address in (
            ("a", one.name), ("b", two.name), ("c", "127.0.0.1:9"), ("d", "127.0.0.1:8"))}
        lost = Recovery(2, ("d",), shards=(shard,), void=(shard,))
        decided = Decided(2, members, dict.fromkeys(members, ()), lost)
        look = Persistent(lambda address: NodeClient(address, KEY, seconds=60.0),
                          lambda event, **fields: said.append((event, fields)))
        look(decided)
        until(lambda: said)
        two.versions[:] = []
        look.look(decided)
    (event, first), (_, second) = said
    assert event == "fallback" and (first["run_id"], first["shards"], first["step"]) == ("run", ["s1"], 4)
    assert "would go back to step 4" in first["why"] and "all 2 shards" in first["why"]
    assert second["step"] is None and "none is persistent" in second["why"]


# -- etcd ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_root_killed_between_its_steps_in_etcd(tmp_path: Path, after: int) -> None:
    """It stops after so many decisions of the recovery; its lease runs out, and another goes on."""
    from flowcheck.node.protect.registry_etcd import Etcd

    with etcd_server(tmp_path / "etcd") as server:
        seats: dict[str, Seat] = {}

        def come(name: str, leaf: str, standby: bool = False) -> None:
            seats[name] = Seat(Etcd(server.endpoints, "x", seconds=30.0),
                               Member(Site(name, leaf=leaf), f"{name}:1", standby=standby), 2, 1.0,
                               lambda event, **fields: None, tmp_path / f"{name}.json")

        def turned(true: Callable[[Mapping[str, Seat]], bool]) -> None:
            def once() -> bool:
                for seat in list(seats.values()):
                    seat.turn([], followed.get(seat.me.site.name, ()))
                return true(seats)

            until(once)

        followed: dict[str, list[dict[str, Any]]] = {}
        for name, leaf in (("a", "l1"), ("b", "l1"), ("c", "l2"), ("d", "l2")):
            come(name, leaf)
        turned(lambda seats: all(seat.decided.epoch == 1 for seat in seats.values()))
        before = seats["a"].decided
        lost = next(name for name in "cd" if name not in before.holders["a"])
        come("e", "l3", standby=True)
        come("g", "l4", standby=True)
        seats.pop(lost)  # no word from it any more
        end = time.monotonic() + 120.0
        while seats["a"].decided.epoch < 1 + after:  # only the root decides
            assert time.monotonic() < end
            for name in list(seats):
                seats[name].turn()
                if seats["a"].decided.epoch == 1 + after:
                    break
        seats.pop("a")
        turned(lambda seats: all(seat.decided.recovery is None and sorted(seat.decided.holders) == sorted(seats)
                                 for seat in seats.values()))
        assert apart_of(seats["b"].decided) and seats["b"].decided.epoch >= before.epoch + 3
        for seat in seats.values():
            seat.close()


def apart_of(decided: Decided) -> bool:
    leaf = {name: one.site.leaf for name, one in decided.members.items()}
    return all(leaf[name] != leaf[one] for name, keep in decided.holders.items() for one in keep)
