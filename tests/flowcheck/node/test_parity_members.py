"""A group with parity of real processes: two nodes with data and two holders. Members are killed with all that they
hold, in every set of up to three, and others take their places; or the registry's root finds those who do."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.errors import EnvironmentProblem
from flowcheck.trainer.recover.recovery import recover

from ..hand_node import until
from .conftest import LONGEST, TOKEN
from .parity_scene import STEP, Holder, Node, free_addresses, weights
from .registry_scene import etcd_server

DATA, MEMBERS = 2, 4


@pytest.fixture
def members(shm: Path) -> Iterator[dict[int, Node | Holder]]:
    made: dict[int, Node | Holder] = {}
    yield made
    for one in made.values():
        one.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)  # fifteen times processes begin anew, which a busy machine does slowly
def test_every_set_of_members_is_lost_and_replaced(members: dict[int, Node | Holder], shm: Path) -> None:
    group, events = free_addresses(MEMBERS), list[dict[str, Any]]()

    def begin(number: int) -> None:
        of = {"group": group}
        members[number] = (Node(number, shm, group[number], of, events) if number < DATA else
                           Holder(number, shm, group[number], of))

    for number in range(MEMBERS):
        begin(number)
    for lost in [some for count in range(MEMBERS) for some in itertools.combinations(range(MEMBERS), count)]:
        until(lambda: all(one.whole() for one in members.values()))
        for number in lost:
            members.pop(number).lose()
        began = time.monotonic()
        for shard in range(DATA):
            if shard not in lost or MEMBERS - len(lost) >= DATA:
                found = recover(group, token=TOKEN.decode(), shard=f"stage{shard}", together=False, seconds=LONGEST)
                assert (found.step, found.source.rpartition(", ")[2]) == (STEP, "parity" if shard in lost else "memory")
                assert torch.equal(found.model["w"], weights(shard)), lost
            else:
                with pytest.raises(EnvironmentProblem, match="did not answer"):
                    recover(group, token=TOKEN.decode(), shard=f"stage{shard}", together=False, seconds=LONGEST)
        back = time.monotonic() - began
        for number in lost:
            begin(number)
        until(lambda: all(one.whole() for one in members.values()))
        print(f"lost {lost}: {back:.2f} s until both shards were asked for, {time.monotonic() - began:.2f} s until all"
              " members had their pieces again")
    assert not [said for said in events if said["event"] == "problem" and "ended with status" not in said["why"]]


@pytest.mark.slow
def test_the_registry_replaces_a_holder_and_both_nodes_are_lost(
    members: dict[int, Node | Holder], shm: Path, tmp_path: Path
) -> None:
    """Nobody names a group: root does. A holder is killed, a standby takes its place and encodes the newest step; then
    both nodes are lost with all that they held, and etcd: both shards are made of parity alone."""
    addresses, events = free_addresses(MEMBERS + 1), list[dict[str, Any]]()
    with etcd_server(tmp_path / "etcd") as server:
        def begin(number: int, leaf: str, **more: Any) -> None:
            of = {"registry": server.endpoints, "grace": 5.0, "leaf": leaf, **more}
            members[number] = (Node(number, shm, addresses[number], of, events) if number < DATA else
                               Holder(number, shm, addresses[number], of))

        for number, leaf in enumerate(("l1", "l2", "l1", "l2")):
            begin(number, leaf)
        until(lambda: all(one.whole() for one in members.values()))
        begin(4, "l1", standby=True)
        other, standby = members[3], members[4]
        assert isinstance(other, Holder) and isinstance(standby, Holder)
        placed = other.process.said("placed")[-1]
        assert placed["parity"] == {"data": ["n0", "n1"], "holders": ["h2", "h3"]} and placed["copies"] == []
        standby.process.wait("placed")

        members.pop(2).lose()
        kept = standby.process.wait("protected")
        assert (kept["step"], kept["stream"], kept["shards"]) == (STEP, 2, ["stage0", "stage1"])
        restored = standby.process.wait("restored")
        assert standby.process.said("placed")[-1]["parity"]["holders"] == ["h4", "h3"]
        assert restored["epoch"] == restored["since"] + 2  # frozen, replaced, whole
        assert [one["stream"] for one in other.process.said("protected")] == [3]

        for number in range(DATA):
            members.pop(number).lose()
        until(lambda: other.process.said("recovering")[-1]["lost"] == ["n0", "n1"])
        recovering = other.process.said("recovering")[-1]
        assert recovering["steps"] == [{"run_id": "run", "step": STEP}] and recovering["void"] == []
        server.kill()
        for shard in range(DATA):
            found = recover(addresses, token=TOKEN.decode(), shard=f"stage{shard}", together=False, seconds=LONGEST)
            assert (found.step, found.source.rpartition(", ")[2]) == (STEP, "parity")
            assert torch.equal(found.model["w"], weights(shard))
