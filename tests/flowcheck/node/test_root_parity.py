"""A root that names a group with parity, and takes it through losses: of who keeps parity, and of who has the data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from flowcheck.node.protect.losses import whole
from flowcheck.node.protect.placement import Parity
from flowcheck.node.protect.registry_member import PATIENCE

from .seat_scene import RUN, Cluster

LEASE = 4
GROUP = Parity(("a", "c"), ("b", "d"))  # leaves l1 and l2 of each


class Scene:
    """Nodes a and c, each of which follows a stage; b and d without a port, and whoever comes besides."""

    def __init__(self, folder: Path, grace: float = 3.0, replicas: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.cluster = cluster = Cluster(folder, grace, keep=8, code=(2, 2), replicas=replicas)
        cluster.come("a", "c")
        cluster.come("b", "d", follows=False)
        cluster.turns(grace + 3)
        assert cluster.placed().parity is None and cluster.events("a", "unprotected") == []  # no job yet
        cluster.follow({"a": "s0", "c": "s1"})
        cluster.turns(grace + 3)
        assert cluster.placed().parity == GROUP and cluster.placed().epoch == 2
        cluster.turns(cluster.keep)

    def until(self, true: Callable[[], bool], seconds: int = 60) -> None:
        for _ in range(seconds):
            if true():
                return
            self.cluster.turns(1)
        raise AssertionError("it did not come to that")

    def restored(self) -> bool:
        """All know it, and no place is of anybody who is gone."""
        decided = [seat.decided for seat in self.cluster.seats.values()]
        return all(one.recovery is None and set(one.members) <= self.cluster.seats.keys() for one in decided)

    def pieces(self) -> dict[int, int]:
        """Of each step, how many pieces of the group are left, data and parity."""
        found: dict[int, set[tuple[str, object]]] = {}
        for name in self.cluster.seats:
            for (_, shard), steps in self.cluster.copies[name].items():
                for step in steps:
                    found.setdefault(step, set()).add(("data", shard))
            for step, number in self.cluster.streams[name]:
                found.setdefault(step, set()).add(("parity", number))
        return {step: len(pieces) for step, pieces in found.items()}


def test_a_group_is_placed_once_its_job_is_followed(tmp_path: Path) -> None:
    cluster = Scene(tmp_path).cluster
    for name in "abcd":
        event = cluster.events(name, "placed")[-1]
        assert event["parity"] == {"data": ["a", "c"], "holders": ["b", "d"]}
        assert event["copies"] == ([name] if name in "ac" else []) and event["alone"] == event["together"] == []
    assert {number for _, number in cluster.streams["b"]} == {2} and {n for _, n in cluster.streams["d"]} == {3}
    cluster.turns(100)
    assert cluster.placed().epoch == 2  # nothing has changed


def test_copies_besides_where_they_are_asked_for(tmp_path: Path) -> None:
    cluster = Scene(tmp_path, replicas=2).cluster
    assert all(len(keep) == 1 for keep in cluster.placed().holders.values())


def test_what_cannot_be_a_group_is_said_once_and_placed_once_it_can(tmp_path: Path) -> None:
    """By the root, after a grace: nodes come to a job one by one."""
    cluster = Cluster(tmp_path, 3.0, code=(2, 2), replicas=1)
    cluster.come("a", "c")
    cluster.come("b", follows=False)
    cluster.turns(6)
    cluster.follow({"a": "s0"})
    cluster.turns(2)
    assert cluster.events("a", "unprotected") == []
    cluster.turns(20)
    (one,) = cluster.events("a", "unprotected")
    assert "protect.parity: 1 shards ('s0') for 2 streams of data" in one["why"]
    cluster.follow({"c": "s1"})
    cluster.turns(20)
    _, two = cluster.events("a", "unprotected")
    assert "1 members beside the 2 that follow its shards may keep parity" in two["why"]
    assert cluster.placed().parity is None and cluster.events("c", "unprotected") == []
    cluster.come("f", follows=False)  # all but one of l1
    cluster.turns(20)
    assert "leaf l1 would be lost with more than 2 members" in cluster.events("a", "unprotected")[-1]["why"]
    cluster.come("d", follows=False)
    cluster.turns(20)
    assert cluster.placed().parity == GROUP and len(cluster.events("a", "unprotected")) == 3


def test_a_holder_is_replaced_by_a_standby(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    cluster, before = scene.cluster, scene.cluster.placed()
    cluster.come("g", standby=True, follows=False)
    cluster.turns(20)
    assert cluster.placed() == before
    cluster.go("b")
    scene.until(scene.restored)
    after = cluster.placed()
    assert after.parity == Parity(("a", "c"), ("g", "d")) and after.epoch == before.epoch + 3
    assert {number for _, number in cluster.streams["g"]} == {2} and whole(after, cluster.haves())
    first = cluster.events("d", "recovering")[0]
    assert (first["lost"], first["void"]) == (["b"], []) and len(cluster.events("d", "restored")) == 1


def test_a_holder_is_replaced_by_a_member_that_has_no_part_yet(tmp_path: Path) -> None:
    """Without a standby: at once, once the loss is believed. The place of the one that is lost is given up later."""
    scene = Scene(tmp_path)
    cluster = scene.cluster
    cluster.come("e", follows=False)
    cluster.turns(10)
    assert cluster.placed().parity == GROUP and "e" in cluster.placed().members
    cluster.go("d")
    scene.until(lambda: cluster.placed().parity == Parity(("a", "c"), ("b", "e")), int(cluster.grace) + LEASE + 2)
    assert cluster.placed().recovery is not None and "d" in cluster.placed().members
    scene.until(scene.restored, int((2 + PATIENCE) * cluster.grace) + LEASE)
    assert sorted(cluster.placed().members) == ["a", "b", "c", "e"]
    assert {number for _, number in cluster.streams["e"]} == {3}


def test_a_place_that_nobody_takes_is_given_up_and_taken_by_who_comes(tmp_path: Path) -> None:
    """The other holder goes on meanwhile."""
    scene = Scene(tmp_path)
    cluster = scene.cluster
    cluster.go("d")
    scene.until(scene.restored, int((2 + PATIENCE) * cluster.grace) + LEASE)
    assert cluster.placed().parity == Parity(("a", "c"), ("b", ""))
    before = max(step for step, _ in cluster.streams["b"])
    cluster.turns(5)
    assert max(step for step, _ in cluster.streams["b"]) == before + 5
    cluster.come("e", follows=False)
    cluster.turns(10)
    assert cluster.placed().parity == Parity(("a", "c"), ("b", "e"))


def test_a_nodes_place_is_for_who_has_a_port(tmp_path: Path) -> None:
    """Two standbys: the one without a port comes first by name, and gets the holder's place."""
    scene = Scene(tmp_path)
    cluster = scene.cluster
    cluster.come("e", standby=True, follows=False)
    cluster.turns(1)
    cluster.go("c")
    cluster.turns(int(PATIENCE * cluster.grace))
    decided = cluster.placed()
    assert decided.parity == GROUP and decided.recovery is not None and decided.recovery.lost == ("c",)
    cluster.go("b")
    cluster.come("g", standby=True)
    cluster.turns(3 * cluster.grace)
    assert cluster.placed().parity == Parity(("a", "g"), ("e", "d"))


def test_who_has_a_port_is_kept_for_a_node(tmp_path: Path) -> None:
    """Two standbys, and a node and a holder that are lost: the one that could take either place takes the node's."""
    scene = Scene(tmp_path)
    cluster = scene.cluster
    cluster.come("e", standby=True)
    cluster.come("g", standby=True, follows=False)
    cluster.turns(1)
    cluster.go("b", "c")
    cluster.turns(int(cluster.grace) + LEASE + 2)
    assert cluster.placed().parity == Parity(("a", "e"), ("g", "d"))


@pytest.mark.parametrize("lost", [*itertools.combinations("abcd", 1), *itertools.combinations("abcd", 2)], ids="".join)
def test_whoever_is_lost_a_step_stays_of_which_all_shards_can_be_made(tmp_path: Path, lost: tuple[str, ...]) -> None:
    """Up to as many as there are streams of parity. Others take the places, and all is whole again."""
    scene = Scene(tmp_path)
    cluster = scene.cluster
    cluster.come("e", "g", standby=True)
    cluster.come("f", standby=True)
    cluster.turns(1)
    cluster.go(*lost)
    cluster.turns(int(cluster.grace) + LEASE)
    recovery = next(iter(cluster.seats.values())).decided.recovery
    assert recovery is not None and recovery.void == () and recovery.steps.keys() == {RUN}
    step = recovery.steps[RUN]
    data = {name: shard for name, shard in (("a", "s0"), ("c", "s1")) if name in lost}

    def taken() -> bool:
        assert scene.pieces()[step] >= 2, "the step can be made no more"
        parity = next(iter(cluster.seats.values())).decided.parity
        assert parity is not None
        return set(parity.names) <= cluster.seats.keys()

    scene.until(taken)
    for _ in range(3 * cluster.keep):  # as long as trainers have not come back, that step is what there is
        cluster.turns(1)
        assert not data or scene.pieces()[step] >= 2
    parity = cluster.placed().parity
    assert parity is not None
    theirs = dict(zip(parity.data, ("s0", "s1"), strict=True))
    cluster.follow({name: shard for name, shard in theirs.items() if shard in data.values()})
    scene.until(scene.restored)
    assert whole(cluster.placed(), cluster.haves())
    cluster.turns(cluster.keep + 3)
    assert all(seat.steps == {} for seat in cluster.seats.values()) and max(scene.pieces().values()) == 4


def test_one_more_is_said_as_what_it_is(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    cluster = scene.cluster
    cluster.go("a", "c", "d")
    cluster.turns(int(cluster.grace) + LEASE)
    recovery = cluster.placed().recovery
    assert recovery is not None and list(recovery.void) == [(*RUN, "s0"), (*RUN, "s1")] and recovery.steps == {}
    assert [one.recovery for one in cluster.void] == [recovery]


def test_a_registry_that_is_gone_changes_no_group(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    cluster, before = scene.cluster, scene.cluster.placed()
    cluster.gone = True
    at = int(cluster.at)
    cluster.turns(20 * cluster.grace)
    assert cluster.placed() == before and max(step for step, _ in cluster.streams["b"]) > at + 50
    cluster.come("b", follows=False)  # started again meanwhile: it knows from its file
    part = cluster.seats["b"].part
    assert part is not None and part.number == 2
    cluster.go("d")
    cluster.gone = False
    cluster.come("e", follows=False)
    scene.until(scene.restored)
    assert cluster.placed().parity == Parity(("a", "c"), ("b", "e"))


def test_a_root_killed_at_any_point(tmp_path: Path) -> None:
    """While it replaces a holder, before and after each call of the registry."""
    for point in itertools.count():
        scene = Scene(tmp_path / str(point), grace=2.0)
        cluster = scene.cluster
        cluster.come("e", standby=True, follows=False)
        cluster.come("g", standby=True)
        cluster.turns(1)
        cluster.go("d")
        cluster.kill_in = point
        cluster.turns(LEASE)

        def follows(cluster: Cluster = cluster) -> None:
            for seat in cluster.seats.values():
                if seat.decided.parity is not None:
                    cluster.shards |= {one: f"s{at}" for at, one in enumerate(seat.decided.parity.data)}

        for _ in range(120):
            if scene.restored() and (not cluster.killed or "a" not in cluster.placed().members):
                break
            cluster.turns(1, follows)
        after = cluster.placed()
        assert after.parity == Parity(("g" if cluster.killed else "a", "c"), ("b", "e")), point
        assert whole(after, cluster.haves())
        if not cluster.killed:
            break
    assert point > 20
