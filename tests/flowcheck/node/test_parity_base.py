"""A journal between two rounds of parity: the node that is lost had no copy of its version anywhere, and comes back at
a step after the last round, made of parity, of the other node's piece, and of the journal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowcheck.ask.client import NodeClient, reader_key
from flowcheck.ask.offer import COPY
from flowcheck.checkpoint.coding.code import Code
from flowcheck.checkpoint.directory import read_step_manifest
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.protect import journal_loop as module
from flowcheck.node.protect.journal import Journal
from flowcheck.node.protect.journal_loop import Journaling, bases_of, lane_of
from flowcheck.node.protect.parity_base import ParityBase
from flowcheck.node.protect.parity_rounds import Rounds, kept_in
from flowcheck.trainer.recover.recovery import recover

from ..hand_api import TOKEN, HandApi, HandVersion
from ..hand_node import until
from .journal_scene import Source
from .test_parity_members import free_addresses
from .test_peering import Door

LONGEST = 60.0


def node(address: str) -> NodeClient:
    host, _, port = address.rpartition(":")
    return NodeClient((host, int(port)), reader_key(TOKEN.encode()), seconds=LONGEST)


class Scene:
    """A source with a replica and the process of its API, another node that has the other shard, and a holder's API."""

    def __init__(self, stack: contextlib.ExitStack, tmp_path: Path, shm: Path) -> None:
        self.replica = shm / "flowcheck-s--1.replica"
        self.source = stack.enter_context(contextlib.closing(Source(tmp_path, path=self.replica)))
        self.door = Door(self.source.shelf)
        stack.callback(self.door.close)
        self.other = stack.enter_context(HandApi())
        (tmp_path / "token").write_text(TOKEN)
        self.group = [*free_addresses(1), self.other.name, *free_addresses(1)]
        self.said = list[tuple[str, dict[str, Any]]]()
        config = {"api": {"listen": self.group[0]}, "output": {"directory": str(shm / "out")},
                  "capture": {"device": "x"}, "control": {"listen": "127.0.0.1:0", "token_file": "t"},
                  "replica": {"directory": str(shm)}}
        self.serving = Serving(NodeConfig.model_validate({"name": "s", **config}), TOKEN.encode(), self.say)
        stack.callback(self.serving.close)
        held = NodeConfig.model_validate({
            "name": "h", "tokens": {"reader": str(tmp_path / "token"), "peer": str(tmp_path / "token")},
            "api": {"listen": self.group[2]}, "protect": {
                "parity": "2+1", "group": self.group, "directory": str(tmp_path), "journal": {
                    self.group[0]: self.door.address}}})
        assert held.copies is not None and held.parity is not None
        held.copies.mkdir()
        self.copies, self.parity = held.copies, held.parity
        stack.enter_context(contextlib.closing(Serving(held, TOKEN.encode(), self.say)))
        self.rounds = Rounds(self.parity, Code(2, 1), 2, 1, self.say)
        self.lane = lane_of(self.copies, self.group[0], "") / "run" / "epoch-0"
        self.journal = Journal(self.lane / "journal")

    def say(self, event: str, **fields: Any) -> None:
        self.said.append((event, fields))

    def heard(self, event: str) -> list[dict[str, Any]]:
        return [fields for one, fields in self.said if one == event]

    def round(self) -> int:
        """Of the source's newest step."""
        step = self.source.version().step
        self.other.versions[:] = [HandVersion(step, shard="stage1")]
        assert self.rounds.turn([node(self.group[0]), node(self.other.name)]) is not None
        return step

    def step(self) -> None:
        number = self.source.step()
        until(lambda: number in self.journal.entries and number + 1 in self.journal.steps)

    def start(self) -> Journaling:
        host, _, port = self.door.address.rpartition(":")
        parity = ParityBase(self.parity, lambda: node(self.group[2]), lambda nbytes: None)
        made = Journaling(self.copies, self.group[0], lambda: node(self.group[0]), (host, int(port)), TOKEN.encode,
                          None, lambda nbytes: None, self.say, 0.01, parity)
        made.start()
        return made

    def lose(self) -> None:
        self.serving.close()
        self.replica.unlink()


@pytest.fixture
def scene(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(module, "GONE_SECONDS", 0.1)
    with contextlib.ExitStack() as stack:
        yield Scene(stack, tmp_path, shm)


@pytest.fixture
def journaling(scene: Scene) -> Iterator[Journaling]:
    scene.source.step()
    one = scene.start()
    until(lambda: scene.journal.job is not None)
    yield one
    one.close(LONGEST)


@pytest.mark.slow
@pytest.mark.usefixtures("journaling")
def test_a_lost_shard_comes_back_at_a_step_between_two_rounds(scene: Scene) -> None:
    for _ in range(2):
        scene.step()
    first = scene.round()
    scene.step()
    second = scene.round()
    for _ in range(3):
        scene.step()
    assert scene.journal.entries == list(range(first, second + 3))  # since the oldest round, and no longer
    wanted = scene.source.version()
    scene.lose()
    until(lambda: scene.heard("redone"))
    (fields,) = scene.heard("redone")
    assert (fields["base"], fields["step"], fields["why"]) == (second, second + 3, "")
    manifest = read_step_manifest(Path(fields["path"]))
    assert {file: entry["tensors"] for file, entry in manifest["files"].items()} == \
        {file: entry["tensors"] for file, entry in wanted.document()["files"].items()}
    until(lambda: bases_of(scene.lane) == [second + 3])  # of the round itself there is parity
    found = recover(scene.group, token=TOKEN, shard="", together=False, seconds=LONGEST)
    assert (found.step, found.source.rpartition(", ")[2]) == (second + 3, COPY)


@pytest.mark.usefixtures("journaling")
def test_too_few_that_are_left_make_nothing_and_the_parity_stays(scene: Scene) -> None:
    """The other node is gone, too: one piece of two. When it is back, the step is made."""
    scene.step()
    scene.round()
    scene.step()
    kept = kept_in(scene.parity)
    versions, scene.other.versions[:] = list(scene.other.versions), []
    scene.lose()
    until(lambda: scene.other.asked_for("/v1/pieces"))
    assert not scene.heard("redone") and bases_of(scene.lane) == [] and kept_in(scene.parity) == kept
    scene.other.versions[:] = versions
    until(lambda: scene.heard("redone"))


@pytest.mark.parametrize(("listen", "journal", "why"), [
    ("h:3", "h:4", "no node with data of protect.group"), ("h:3", "h:9", "no node with data of protect.group"),
    ("h:1", "h:2", "this node keeps no parity"),
])
def test_whose_journal_has_nothing_to_begin_with_is_refused(listen: str, journal: str, why: str) -> None:
    """A holder of parity may keep those of nodes with data, and nobody else."""
    with pytest.raises(ValueError, match=why):
        NodeConfig.model_validate({
            "tokens": {"trainer": "t", "reader": "t", "peer": "t"}, "capture": {"device": "x"},
            "control": {"listen": "h:7070", "insecure": True}, "api": {"listen": listen, "insecure": True},
            "output": {"directory": "out"}, "protect": {
                "parity": "2+2", "group": [f"h:{number}" for number in range(1, 5)], "journal": {journal: "h:9"}}})
