"""What is asked of a store, how often, and what is offered of it: a directory whose calls are noted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowcheck.checkpoint.directory import Meta
from flowcheck.checkpoint.objects import StoreError, open_store
from flowcheck.checkpoint.store import Lane
from flowcheck.control.user_state import pack
from flowcheck.control.version import MODEL, OPTIMIZER
from flowcheck.node.store import shelf as module
from flowcheck.node.store.shelf import StoreShelf
from flowcheck.node.versions.held import Gone

OPTIMIZER_OF = {"name": "sgd", "groups": [{"params": ["w"], "options": {"lr": 1.0}}]}


class Noting:
    """reads: (end of the name, first byte, bytes) of each. fails: what a call raises, by the end of a name."""

    url = "s3://noting"

    def __init__(self, root: Path) -> None:
        self._objects = open_store(str(root), {})
        self.reads: list[tuple[str, int, int]] = []
        self.fails: dict[str, Exception] = {}

    def read(self, name: str, first: int, count: int) -> bytes:
        self.reads.append((name.rpartition("/")[2], first, count))
        for end, error in self.fails.items():
            if name.endswith(end):
                raise error
        return self._objects.read(name, first, count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)


class Scene:
    def __init__(self, root: Path) -> None:
        self.root, self.store, self.opened, self.now = root, Noting(root), 0, 1000.0
        self.shelf = StoreShelf("s3://noting", self._open, lambda: self.now, 0)

    def _open(self) -> Any:
        self.opened += 1
        return self.store

    def write(self, step: int, epoch: int = 1, node: str = "n", shard: str = "dp0", **more: Any) -> Any:
        meta = Meta("run", epoch, "verified", (), OPTIMIZER_OF, "torch-cpu", shard, **more)
        lane = Lane(open_store(str(self.root), {}), f"{node}/{shard}/run")
        momentum = {"state.w.momentum_buffer": torch.full((300,), step + 0.5)}
        users = {0: pack({"at": step}, step=step, rank=0, ranks=1)}
        return lane.write(step, {MODEL: {"w": torch.full((300,), 1.0)}, OPTIMIZER: momentum}, meta, lambda: users)

    def hold(self) -> Any:
        held = self.shelf.hold(self.shelf.look()[0].offer.id)
        self.store.reads.clear()
        return held


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    with contextlib.closing(made.shelf):
        yield made


# -- what is offered -----------------------------------------------------------------------------------------------


def test_what_an_offer_says(scene: Scene) -> None:
    scene.write(10, matches=4)
    [holding] = scene.shelf.look()
    one = holding.offer
    assert (one.tier, one.run_id, one.epoch, one.step, one.shard, one.status) == ("store", "run", 1, 10, "dp0",
                                                                                  "verified")
    assert (one.nbytes, one.user, one.matches, one.start) == (2400, ((0, 0),), 4, "")
    assert holding.path.parts[:3] == ("n", "dp0", "run")


def test_the_newest_comes_first_and_then_by_place(scene: Scene) -> None:
    for step, epoch, node in ((5, 2, "b"), (7, 1, "a"), (9, 1, "b"), (7, 1, "b"), (5, 2, "a")):
        scene.write(step, epoch, node)
    found = [(one.offer.epoch, one.offer.step, one.path.parts[0]) for one in scene.shelf.look()]
    assert found == [(2, 5, "a"), (2, 5, "b"), (1, 9, "b"), (1, 7, "a"), (1, 7, "b")]
    assert len({one.offer.id for one in scene.shelf.look()}) == 5 and scene.opened == 1


def test_two_stores_have_versions_of_two_names(scene: Scene) -> None:
    scene.write(10)
    other = StoreShelf("s3://other", lambda: scene.store)  # type: ignore[arg-type,return-value]
    assert other.look()[0].offer.id != scene.shelf.look()[0].offer.id


def test_a_manifest_is_read_once(scene: Scene) -> None:
    scene.write(10)
    for _ in range(3):
        scene.shelf.look()
    assert [name for name, _, _ in scene.store.reads].count("manifest.json") == 1


def test_what_is_known_is_not_looked_for_again(scene: Scene) -> None:
    assert scene.shelf.known() == []
    scene.write(10)
    [one] = scene.shelf.known()
    scene.write(20)
    assert scene.shelf.known() == [one] and len(scene.shelf.look()) == 2 == len(scene.shelf.known())


def test_one_that_fails_for_a_while_is_said_until_it_does_not(scene: Scene) -> None:
    scene.write(10)
    scene.write(20)
    scene.store.fails["manifest.json"] = StoreError("denied\nby somebody", where="y")
    for _ in range(2):
        with pytest.raises(StoreError) as refused:
            scene.shelf.look()
        assert (refused.value.what, refused.value.where) == ("y: denied", "s3://noting")
    del scene.store.fails["manifest.json"]
    assert len(scene.shelf.look()) == 2


def test_what_was_listed_and_is_gone_cannot_be_held(scene: Scene) -> None:
    scene.write(10)
    [holding] = scene.shelf.look()
    scene.shelf._entries.clear()
    with pytest.raises(Gone, match="is there no more"):
        scene.shelf._pin(holding)
    fresh = StoreShelf("s3://noting", scene._open)
    with pytest.raises(Gone, match="is there no more"):
        fresh._pin(holding)


@pytest.mark.parametrize("call", ["list", "read"])
def test_threads_that_may_hang_do_not_keep_the_process(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    made: list[Any] = []
    real = threading.Thread

    def thread(**given: Any) -> threading.Thread:
        made.append((given["name"], given["daemon"]))
        return real(**given)

    monkeypatch.setattr(module, "threading", SimpleNamespace(Thread=thread))
    scene.write(10)
    if call == "list":
        scene.shelf.look()
    else:
        scene.hold().read(MODEL, 0, 10)
    assert made[-1] == (f"flowcheck store {call}", True)


# -- what is read --------------------------------------------------------------------------------------------------


def test_a_file_is_read_in_blocks(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 100)
    entry = scene.write(10)
    held, size = scene.hold(), (scene.root / entry.folder / MODEL).stat().st_size
    data = (scene.root / entry.folder / MODEL).read_bytes()

    def read(first: int, count: int) -> list[tuple[int, int]]:
        before = len(scene.store.reads)
        assert held.read(MODEL, first, count) == data[first : first + count]
        return [asked[1:] for asked in scene.store.reads[before:]]

    assert read(0, 40) == [(0, 100)] and read(40, 60) == [] and read(0, 100) == []
    assert read(99, 2) == [(99, 100)], "it ends behind the block"
    assert read(98, 1) == [(98, 100)], "it begins before it"
    assert read(98, 100) == [] and read(197, 1) == [] and read(198, 1) == [(198, 100)]
    assert read(300, 250) == [(300, 250)], "more than a block at once"
    assert read(size - 30, 10) == [(size - 30, 30)] and read(size - 5, 100) == [], "no more than there is"
    assert read(size, 10) == []
    held.read(OPTIMIZER, 0, 1)
    assert scene.store.reads[-1] == (OPTIMIZER, 0, 100)
    assert read(0, 1) == [(0, 100)], "of the other file it has nothing"


def test_what_is_let_go_holds_no_block(scene: Scene) -> None:
    scene.write(10)
    held = scene.hold()
    held.read(MODEL, 0, 1)
    assert len(held._block[2]) > 1
    held.close()
    assert held._block == ("", 0, b"") and held.is_gone() is False
    held.read(MODEL, 0, 1)
    assert len(scene.store.reads) == 2


def test_the_state_of_a_rank_is_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.write(10)
    held = scene.hold()
    whole = held.user(0)
    assert scene.store.reads == [(scene.store.reads[0][0], 0, len(whole))]
    monkeypatch.setattr(module, "USER_BYTES", 7)
    assert held.user(0) == whole[:7] and scene.store.reads[-1][1:] == (0, 7)
    with pytest.raises(Gone, match="has no such state of a rank"):
        held.user(1)


def test_how_long_it_is_held_counts_from_now(scene: Scene) -> None:
    scene.write(10)
    held = scene.hold()
    assert not held.is_due(1000.0) and held.is_due(1_000_000.0)


@pytest.mark.parametrize(("error", "what"), [
    (StoreError("denied", where="y"), "denied"), (RuntimeError("broken"), "RuntimeError: broken"),
])
def test_what_a_read_fails_with_is_said(scene: Scene, error: Exception, what: str) -> None:
    scene.write(10)
    held = scene.hold()
    scene.store.fails[MODEL] = error
    with pytest.raises(StoreError) as refused:
        held.read(MODEL, 0, 1)
    assert refused.value.what == what and refused.value.where == ("y" if what == "denied" else "s3://noting")


def test_what_answers_again_is_not_counted_as_stuck(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wait: the time that is given is over at once."""
    monkeypatch.setattr(module, "READ_SECONDS", 0.0)
    gates: dict[threading.Thread, threading.Event] = {}
    over = threading.Event()

    def hangs() -> bytes:
        gate = gates.setdefault(threading.current_thread(), threading.Event())
        while not over.is_set() and not gate.wait(0.01):
            pass
        return b"late"

    def call(work: Callable[[], bytes]) -> str:
        with pytest.raises(StoreError) as refused:
            scene.shelf._patiently(work)
        assert refused.value.where == "s3://noting"
        return refused.value.what

    try:
        for _ in range(module.MOST_STUCK):
            assert call(hangs) == "no answer within 0 s"
        assert call(hangs) == "does not answer" and len(scene.shelf._stuck) == module.MOST_STUCK
        first = scene.shelf._stuck[0]
        gates.setdefault(first, threading.Event()).set()
        first.join(60)
        assert call(hangs) == "no answer within 0 s"
    finally:
        over.set()
        for one in scene.shelf._stuck:
            one.join(60)
