"""What a journal begins with where there is no copy: which round is the oldest, which version is taken of what a holder
offers, and what of it goes again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowcheck.ask.client import NodeClient
from flowcheck.checkpoint.directory import read_step_manifest
from flowcheck.errors import FlowcheckError
from flowcheck.node.protect.parity_base import ParityBase

from ..hand_api import KEY, HandApi, HandVersion


class Base:
    """A holder's API, made by hand, and what room was asked for."""

    def __init__(self, api: HandApi, directory: Path) -> None:
        self.api, self.rooms, self.directory = api, list[int](), directory
        self.nodes: list[NodeClient] = []
        self.base = ParityBase(directory / "parity", self._node, self._room)

    def _node(self) -> NodeClient:
        self.nodes.append(NodeClient(self.api.address, KEY, 60.0))
        return self.nodes[-1]

    def _room(self, nbytes: int) -> None:
        self.rooms.append(nbytes)

    def take(self, after: int, shard: str = "stage0", epoch: int = 1) -> Path | None:
        return self.base.take(shard, "run", epoch, self.directory / "out", after)

    def rounds(self, *names: str, run: str = "run", epoch: int = 1) -> None:
        for name in names:
            (self.directory / "parity" / run / f"epoch-{epoch}" / name).mkdir(parents=True)


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Base]:
    with HandApi() as api:
        yield Base(api, tmp_path)


def offered(step: int, *, tier: str = "parity", shard: str = "stage0", epoch: int = 1, run_id: str = "run",
            count: int = 4) -> HandVersion:
    return HandVersion(step, {"w": [float(step)] * count}, {}, tier=tier, shard=shard, epoch=epoch, run_id=run_id)


def test_the_newest_that_can_be_made_is_taken(base: Base, tmp_path: Path) -> None:
    """Of that shard, run and epoch, and of parity: a copy, or what is in memory, is no base of a journal's."""
    base.api.versions[:] = [
        offered(6), offered(20, count=7), offered(9), offered(30, tier="copy"), offered(30, shard="stage1"),
        offered(30, epoch=2), offered(30, run_id="another"),
    ]
    path = base.take(6)
    assert path == tmp_path / "out" / "step-000020" and base.rooms == [28]
    manifest = read_step_manifest(path)
    assert (manifest["step"], manifest["shard"], manifest["epoch"]) == (20, "stage0", 1)
    assert not base.nodes[0].connection.is_open  # let go


def test_a_step_that_is_there_already_is_not_made_again(base: Base, tmp_path: Path) -> None:
    base.api.versions[:] = [offered(20)]
    assert base.take(20) is None and base.take(21) is None and base.rooms == []
    assert base.take(19, shard="stage1") is None and base.take(19, epoch=0) is None
    assert not (tmp_path / "out").exists() and base.take(19) is not None


def test_without_room_nothing_is_fetched(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(nbytes: int) -> None:
        raise FlowcheckError(f"no room for {nbytes}", where="protect.memory_mb", remedy="more")

    monkeypatch.setattr(base.base, "_room", full)
    base.api.versions[:] = [offered(20)]
    with pytest.raises(FlowcheckError, match="no room for 16"):
        base.take(0)
    assert not (tmp_path / "out").exists() and not base.api.asked_for("manifest.json")


def test_the_oldest_round(base: Base) -> None:
    """By its number, in that run and epoch; what has another name is none."""
    assert base.base.oldest("run", 1) is None
    base.rounds("step-000100.parity", "step-000020.parity", "step-1000000.parity", "step-x.parity", "step-.parity",
                ".step-000003.parity.partial-7", "step-000004", "4.parity")
    base.rounds("step-000001.parity", epoch=0)
    base.rounds("step-000002.parity", run="another")
    assert base.base.oldest("run", 1) == 20


def test_what_was_made_of_parity_goes_with_it(base: Base, tmp_path: Path) -> None:
    """Once there is no round of so old a step any more, or the run has gone on in another epoch, or another has begun.
    What is no step of ours stays."""
    lane = tmp_path / "lane"
    kept = ["run/epoch-1/step-000060", "run/epoch-1/step-000063", "run/epoch-1/step-x", "run/epoch-1/journal"]
    gone = ["run/epoch-0/step-000070", "run/epoch-1/step-000059", "run/epoch-1/step-000020", "job/epoch-1/step-000070",
            "run/epoch-2/step-000061"]
    for name in (*kept, *gone):
        (lane / name).mkdir(parents=True)

    def left() -> list[str]:
        return sorted(os.path.relpath(path, lane) for path in lane.glob("*/*/*"))

    base.base.tidy(lane, "run", 1)
    assert left() == sorted([*kept, *gone])  # no parity: nothing is known
    base.rounds("step-000060.parity", "step-000080.parity")
    base.base.tidy(lane, "run", 1)
    assert left() == sorted(kept)
