"""A run that is started again and again, often from an older step and under the same epoch: which epoch nodes give each
start, and that nobody is given a version of a line that was left. With replica files, checkpoints and what nodes tell
each other; trainers are a text."""

from __future__ import annotations

import itertools
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowcheck.ask.offer import Offer
from flowcheck.ask.sources import choose
from flowcheck.checkpoint.directory import Meta, write_step
from flowcheck.control.protocol import Epoch, Joined, Manifest, State
from flowcheck.control.start import Start, order, start_text
from flowcheck.node.config.capture import Capture
from flowcheck.node.config.control import Control
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.config.replica import ReplicaSettings
from flowcheck.node.config.store import Output
from flowcheck.node.peers.common_step import Common
from flowcheck.node.versions.holdings import DiskShelf, MemoryShelf
from flowcheck.node.versions.replica_files import ReplicaFiles
from flowcheck.node.versions.runs import run_folder
from flowcheck.node.versions.starts import Coming, Seen, Starts, epoch_for, versions_here
from updater.replica import Replica

from .group_scene import Peer, Scene, scenes, small_job
from .holdings_scene import GROUPS, OptimizerSpec, advance


def start(number: int, first: int = 0, began: int | None = None) -> Start:
    return Start(number if began is None else began, f"{number:016x}", 0, first)


# -- the number, by itself ---------------------------------------------------------------------------------------------

A, B, C = (start(number).line for number in (1, 2, 3))
NUMBERS: dict[str, tuple[int, int, list[Seen], int]] = {
    "nothing is here": (0, 4, [], 0), "an older epoch is": (2, 4, [Seen(1, 9, A)], 2),
    "it makes steps anew": (0, 4, [Seen(0, 7, A)], 1), "at a step that is here": (0, 4, [Seen(0, 4, A)], 1),
    "after all that is here": (0, 4, [Seen(0, 3, A)], 0), "with fresh weights": (0, 0, [Seen(0, 0, A)], 1),
    "a newer epoch is here": (0, 9, [Seen(2, 3, A)], 3), "what it has made itself": (0, 4, [Seen(0, 7, B)], 0),
    "it was numbered before": (0, 4, [Seen(0, 7, A), Seen(1, 5, B)], 1),
    "a later one came meanwhile": (0, 4, [Seen(1, 5, B), Seen(2, 5, C)], 1),
    "files of an older release": (0, 4, [Seen(0, 7, "")], 1), "of the same group's start": (0, 4, [Seen(3, 7, "x")], 3),
    "a clock that was wrong": (0, 9, [Seen(0, 3, C)], 1),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_the_epoch_of_a_start(case: str) -> None:
    said, first, seen, epoch = NUMBERS[case]
    assert epoch_for(Coming("run", said, first, B, "x"), seen) == epoch


def test_nodes_tell_each_other_and_keep_to_the_newest() -> None:
    one, other = Starts(), Starts()
    coming = Coming("a run", 0, 4, B)
    assert (one.decide(coming, [Seen(0, 7, A)]), other.decide(coming, [])) == (1, 0)
    other.hear("one", one.said())
    assert other.epoch("a run", B) == 1 and other.epoch("a run", C) == -1
    assert other.there("one", ("a run", 0)) == ("a run", 1) and other.there("who", ("a run", 0)) == ("a run", 0)
    assert other.decide(coming, []) == 1, "and what comes of it later"
    one.hear("other", [("no line", 5, "", []), (f"{B} a run", 5, "dp0", [3]), (f"{B}x a run", 5, "", [])])
    assert one.epoch("a run", B) == 1


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scene(tmp_path: Path) -> Any:
    with scenes(tmp_path) as make:
        yield make


def follow(at: Scene, one: Start, first: int) -> Peer:
    return at.follow(first=first, instance=str(one))


def numbered(peer: Peer) -> list[int]:
    return [message.epoch for message in peer.told if isinstance(message, Epoch)]


def test_trainers_hear_the_epoch_that_a_node_gives_them(scene: Any, tmp_path: Path) -> None:
    _file(tmp_path, "flowcheck-node--4.replica", 7, 0, start(1), "synth-0")
    at = scene()
    peer = follow(at, start(2, 4), 6)
    (said,), (attached,) = at.events("numbered"), at.events("attached")
    assert (said["epoch"], said["said"], said["first"], attached["epoch"]) == (1, 0, 4, 1) and said["why"]
    assert at.session.plan.job.epoch == 1 and numbered(peer) == [1]
    late = at.join(1, instance=str(start(2, 4)))
    assert numbered(late) == [1]
    at.intake.ranks.leave(peer.member)
    old = at.join(0, run=("synth-0", 0, 2), instance="an older release")
    at.turn()
    at.give(old, Manifest(small_job().to_dict(), 6))
    assert at.session.plan.job.epoch == 1 and numbered(old) == [], "it would not know the message"


@pytest.mark.parametrize("said", [1, 5])
def test_who_says_a_newer_epoch_keeps_it(scene: Any, tmp_path: Path, said: int) -> None:
    _file(tmp_path, "flowcheck-node--4.replica", 7, 0, start(1), "synth-0")
    at = scene()
    peer = at.join(0, run=("synth-0", said, 2), instance=str(start(2, 4)))
    job = small_job()
    job.epoch = said
    at.give(peer, Manifest(job.to_dict(), 6))
    assert at.session.plan.job.epoch == said and at.events("numbered") == [] and numbered(peer) == []


def test_all_groups_of_a_start_have_one_epoch(tmp_path: Path) -> None:
    """Group b's file shows that the step is here; group a has none, and has the same common."""
    _file(tmp_path, "flowcheck-node-b-4.replica", 7, 0, start(1), "synth-0")
    with scenes(tmp_path) as make:
        a = make(name="a")
        b = make(name="b", common=a.common)
        for at in (a, b):
            follow(at, start(2, 4), 6)
            (tmp_path / "flowcheck-node-b-4.replica").unlink(missing_ok=True)
        assert [at.events("attached")[0]["epoch"] for at in (a, b)] == [1, 1]


def test_a_node_without_a_version_takes_the_newer_number_of_another(scene: Any, tmp_path: Path) -> None:
    at = scene()
    peer = follow(at, start(2, 4), 6)
    assert at.session.plan.job.epoch == 0
    there = Common("there", 60.0, 3, lambda *args, **more: None)
    there.number(Coming("synth-0", 0, 4, start(2).line), [Seen(0, 7, A)])
    at.common.hear(there.steps_now(), "there")
    at.turn()
    assert at.session.plan.job.epoch == 1 and numbered(peer) == [1]
    at.give(peer, State(6), {"model.w": torch.zeros(1)})
    assert [message for message in peer.told if isinstance(message, Joined)]
    there.starts.decide(Coming("synth-0", 3, 4, start(2).line), [])
    at.common.hear(there.steps_now(), "there")
    at.turn()
    assert at.session.plan.job.epoch == 1, "what has a version keeps its number"


def test_what_another_node_follows_counts_as_here(scene: Any) -> None:
    at = scene()
    there = Common("there", 60.0, 3, lambda *args, **more: None)
    there.order("", ("synth-0", 0), (6, 7))
    at.common.hear(there.steps_now(), "there")
    follow(at, start(2, 4), 6)
    assert at.session.plan.job.epoch == 1


# -- a story of starts, with files -------------------------------------------------------------------------------------


def _file(folder: Path, name: str, step: int, epoch: int, one: Start, run_id: str = "run") -> Path:
    _made(folder / name, step, epoch, one, run_id).close()
    return folder / name


def _made(path: Path, step: int, epoch: int, one: Start, run_id: str = "run") -> Replica:
    tensors = {"w": torch.zeros(3), "k": torch.tensor([4, 5])}
    return Replica(tensors, OptimizerSpec.check("sgd", GROUPS), path=path, run_id=run_id, epoch=epoch, step=step,
                   start=start_text("f" * 64, str(one)), slots=4)


class Node:
    """Files of one node, and what its process knows."""

    def __init__(self, folder: Path, name: str) -> None:
        self.config = NodeConfig(
            name=name, control=Control(listen="127.0.0.1:0", token_file=folder / "token"),
            capture=Capture(device="none"),
            replica=ReplicaSettings(directory=folder), output=Output(directory=folder / f"out-{name}", every=1))
        self.restart()

    def restart(self) -> None:
        self.common = Common(self.config.name, 60.0, 4, lambda *args, **more: None)
        self.files = ReplicaFiles(self.config.replica.directory, self.config.name, "")

    def follow(self, one: Start, said: int, steps: int, disk: bool) -> int:
        """The start comes, and its versions. Returns its epoch."""
        epoch = self.common.number(Coming("run", said, one.first, one.line), versions_here(self.config, "run"))
        self.common.gone("")
        self.files.restarted()
        if steps:
            path, step = self.files.path(), one.first + 1
            with closing(_made(path, step, epoch, one)) as replica:
                self.files.stands("run", epoch, step)
                advance(replica, steps - 1)
                self.common.order("", ("run", epoch), tuple(replica.steps))
            if disk:
                meta = Meta("run", epoch, "verified", (), {"name": "sgd", "groups": []}, "torch-cpu",
                            start=start_text("f" * 64, str(one)))
                out = self.config.output.directory / run_folder("run", epoch)
                write_step(out, one.first + steps, {"w": torch.ones(3)}, {"w": {"step": 1.0}}, meta)
        return epoch

    def offers(self) -> list[Offer]:
        with closing(MemoryShelf(self.config.replica.directory, self.config.name)) as memory, closing(
                DiskShelf(self.config.output.directory)) as disk:
            return [one.offer for shelf in (memory, disk) for one in shelf.look()]


STARTS = st.lists(st.tuples(
    st.integers(0, 9), st.integers(0, 4), st.sampled_from(["a", "b", "ab"]), st.booleans(), st.booleans(),
    st.sampled_from(["", "a", "b", "ab"])), min_size=1, max_size=6)


@settings(max_examples=30, deadline=None)
@given(STARTS, st.booleans())
@example([(0, 4, "a", False, False, ""), (3, 3, "a", False, False, ""), (3, 1, "b", False, False, "")], False)
def test_never_a_version_of_a_line_that_was_left(
    starts: list[tuple[int, int, str, bool, bool, str]], hear: bool
) -> None:
    """Each start: how far it goes back, steps that it makes, at which nodes, is its epoch the one that recover gives,
    does it write to disk, and which nodes are started anew before it. hear: nodes hear each other; if not, nobody gives
    an epoch."""
    with tempfile.TemporaryDirectory() as folder:
        nodes = {name: Node(Path(folder), name) for name in "ab"}
        lives: list[tuple[Start, int]] = []
        for number, (back, steps, at, given_epoch, disk, again) in enumerate(starts, 1):
            for name in again:
                nodes[name].restart()
            if hear:
                for one, other in itertools.permutations(nodes.values()):
                    one.common.hear(other.common.steps_now(), "")
            newest = max((offer.step for node in nodes.values() for offer in node.offers()), default=0)
            epochs = [offer.epoch for node in nodes.values() for offer in node.offers()]
            said = 1 + max(epochs, default=-1) if given_epoch and hear else 0
            one = start(number, max(0, newest - back))
            numbers = {name: nodes[name].follow(one, said, steps, disk) for name in at}
            assert all(epoch >= said for epoch in numbers.values())
            if steps:
                lives.append((one, one.first + steps))
            held = {offer.key: offer.status for node in nodes.values() for offer in node.offers()}
            for prefer in (0, 9):
                chosen = choose([held], prefer_verified=prefer)
                if not lives:
                    assert chosen is None
                    continue
                assert chosen is not None and order(chosen)[1] == lives[-1][0].line, (chosen, held)
                assert chosen[1] == lives[-1][1] or prefer


def test_an_abandoned_step_7_and_step_4_of_the_line_that_lives(tmp_path: Path) -> None:
    """As it was seen: at one node, and at two that know nothing of each other."""
    for names in ("aa", "ab"):
        folder = tmp_path / names
        folder.mkdir()
        nodes = {name: Node(folder, name) for name in set(names)}
        nodes[names[0]].follow(start(1), 0, 7, True)
        epoch = nodes[names[1]].follow(start(2, 2), 0, 2, False)
        assert epoch == (1 if names == "aa" else 0)
        for node in nodes.values():
            node.restart()
        chosen = choose([{offer.key: offer.status for node in nodes.values() for offer in node.offers()}],
                        prefer_verified=10)
        assert chosen == (epoch, 4, start(2).line)
        if names == "aa":
            assert nodes["a"].follow(start(2, 2), 0, 0, False) == 1, "the node came back, and so did they"
