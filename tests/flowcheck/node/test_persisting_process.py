"""The process that writes to a store, without a process: how it begins, what it says, with which status it ends."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowcheck.checkpoint.objects import StoreError, open_store
from flowcheck.errors import FlowcheckError
from flowcheck.job.model import BucketSlice
from flowcheck.node.process.child import Lines
from flowcheck.node.store import worker as persisting
from flowcheck.node.store.border import StoreSettings
from flowcheck.node.store.worker import END_SECONDS, HUNG, Persister, main, probe
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

SECONDS = 120.0


class Exit(BaseException):
    pass


class SaysOnly(Lines):
    """say: in place of standard output; and no signs of life."""

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say

    def live(self) -> None:
        pass

    def __call__(self, event: str, **fields: Any) -> None:
        self._say(event, **fields)


class Scene:
    """settings: that it is given. said: by it. stop(): the node ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shm: Path, root: Path) -> None:
        self.stop = threading.Event()
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.root = root
        self.settings: StoreSettings | None = StoreSettings.model_validate_json(json.dumps({
            "node": "n", "replicas": str(shm), "probe": False, "token_file": None, "readable_by": "owner",
            "cores": [], "store": {"url": str(root), "every": 1, "seconds": SECONDS}}))
        monkeypatch.setattr(persisting, "begun", lambda model: self.settings)
        monkeypatch.setattr(persisting, "Lines", lambda events: SaysOnly(self.say))
        monkeypatch.setattr(persisting.os, "_exit", self.exit)
        self.threads: list[threading.Thread] = []
        self.kind = threading.Thread
        monkeypatch.setattr(persisting, "threading", SimpleNamespace(
            Event=threading.Event, Lock=threading.Lock, Thread=self._thread))
        reads = [b"x", b"y"]  # an order that this process has no use for
        monkeypatch.setattr(persisting.sys, "stdin", SimpleNamespace(buffer=SimpleNamespace(
            read=lambda size: reads.pop(0) if reads else self.stop.wait(SECONDS) and b"")))

    def _thread(self, **given: Any) -> threading.Thread:
        self.threads.append(self.kind(**given))
        return self.threads[-1]

    def say(self, event: str, **fields: Any) -> None:
        self.said.append((event, fields))
        if event == "stored":
            self.stop.set()

    @staticmethod
    def exit(status: int) -> None:
        raise Exit(status)

    def change(self, probe: bool, **store: Any) -> None:
        assert self.settings is not None
        changed = self.settings.store.model_copy(update=store)
        self.settings = self.settings.model_copy(update={"probe": probe, "store": changed})

    def status(self) -> int:
        with pytest.raises(Exit) as ended:
            main()
        assert self.threads and all(thread.daemon for thread in self.threads), "none of them keeps the process"
        return int(ended.value.args[0])


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, shm: Path, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(monkeypatch, shm, tmp_path / "store")
    yield made
    made.stop.set()


@pytest.fixture
def replica(shm: Path) -> Iterator[Replica]:
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0})])
    made = Replica({"w": torch.zeros(3)}, spec, path=shm / "flowcheck-n-dp0-1.replica", run_id="run", slots=3)
    with contextlib.closing(made):
        slot = made.build(1, Layout([[BucketSlice("w", 0, 3)]], {"w": (3,)}, [3]))
        slot.apply(0, torch.ones(3))
        made.publish(slot)
        yield made


def test_a_node_that_ended_at_once_needs_nothing(scene: Scene) -> None:
    scene.settings = None
    assert main() == 0 and scene.said == []


def test_it_writes_until_the_node_ends(scene: Scene, replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[float] = []
    monkeypatch.setattr(Persister, "join", lambda persister, seconds: joined.append(seconds))
    assert scene.status() == 0 and joined == [END_SECONDS]
    assert [(event, fields["name"], fields["step"]) for event, fields in scene.said] == [("stored", "dp0", 1)]
    assert (scene.root / "n" / "dp0" / "run").is_dir()


def test_one_that_hangs_ends_with_a_status_of_its_own(
    scene: Scene, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[str] = []
    monkeypatch.setattr(Persister, "look", lambda persister: turns.append("look"))
    monkeypatch.setattr(Persister, "hung", lambda persister: turns.append("hung") or len(turns) > 5)
    assert scene.status() == HUNG == 75 and turns == ["look", "hung"] * 3


def test_a_check_leaves_the_place_as_it_was(scene: Scene, replica: Replica) -> None:
    scene.change(True)
    assert scene.status() == 0 and scene.said == []
    assert [path for path in scene.root.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("check", [False, True])
def test_a_place_of_no_use_is_said(scene: Scene, monkeypatch: pytest.MonkeyPatch, check: bool) -> None:
    def refuse(url: str, options: Any) -> None:
        assert (url, options) == (str(scene.root), {"a": "b"})
        raise StoreError("denied", where="there", remedy="r")

    scene.change(check, options={"a": "b"})
    monkeypatch.setattr(persisting, "open_store", refuse)
    assert scene.status() == HUNG
    assert scene.said == [("unstored", {"name": "", "step": None, "again": None, "why": "there: denied\n  remedy: r"})]


def test_a_check_that_fails_is_no_place_of_use(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(objects: Any, node: str) -> None:
        assert node == "n"
        raise RuntimeError("of a library")

    scene.change(True)
    monkeypatch.setattr(persisting, "probe", refuse)
    assert scene.status() == HUNG
    assert scene.said == [("unstored", {"name": "", "step": None, "again": None, "why": "RuntimeError: of a library"})]


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("opens", [False, True])
def test_a_place_that_hangs_is_not_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, check: bool, opens: bool
) -> None:
    """It hangs when it is opened, or when a check has written to it and it says no more."""
    gate, came = threading.Event(), threading.Event()

    def opening(settings: Any, opened: list[Any], say: Callable[..., None]) -> None:
        if opens:
            opened.append(None)
        came.set()
        assert gate.wait(SECONDS)

    class Began(threading.Thread):
        """However busy the machine is, it has begun."""

        def start(self) -> None:
            super().start()
            assert self.daemon and (len(scene.threads) == 1 or came.wait(SECONDS))

    scene.kind = Began
    scene.change(check, seconds=0.02)
    monkeypatch.setattr(persisting, "_open", opening)
    monkeypatch.setattr(persisting, "MemoryShelf", lambda *_, **__: (_ for _ in ()).throw(Exit("goes on")))
    try:
        if opens and not check:
            with pytest.raises(Exit, match="goes on"):
                main()
            return
        assert scene.status() == HUNG
        assert scene.said == [("unstored", {"name": "", "step": None, "again": None,
                                            "why": f"{scene.root}: no answer within 0.02 s"})]
    finally:
        gate.set()


# -- the check -----------------------------------------------------------------------------------------------------


class Store:
    """A directory that notes names; lies: what it gives in place of what was written."""

    url = "s3://x"

    def __init__(self, root: Path, lies: bytes | None = None) -> None:
        self._objects, self.lies = open_store(str(root), {}), lies
        self.did: list[tuple[str, str]] = []

    def put(self, name: str, pieces: Iterable[bytes]) -> None:
        self.did.append(("put", name))
        self._objects.put(name, pieces)

    def read(self, name: str, first: int, count: int) -> bytes:
        self.did.append(("read", name))
        found = self._objects.read(name, first, count)
        assert found == b"flowcheck"
        return found if self.lies is None else self.lies

    def remove(self, name: str) -> None:
        self.did.append(("remove", name))
        self._objects.remove(name)


def test_what_a_check_does(tmp_path: Path) -> None:
    store = Store(tmp_path)
    probe(store, "n")  # type: ignore[arg-type]
    probe(store, "n")  # type: ignore[arg-type]
    assert [what for what, _ in store.did] == ["put", "read", "remove"] * 2
    first, second = store.did[0][1], store.did[3][1]
    assert first != second, "two nodes of one name may check at once"
    assert all(name == first for _, name in store.did[:3]) and first.startswith("n/-/probe/")
    assert len(first) == len("n/-/probe/") + 8


def test_a_place_that_gives_other_bytes_is_none(tmp_path: Path) -> None:
    store = Store(tmp_path, b"flowchecK")
    with pytest.raises(FlowcheckError, match="gives other bytes than were written") as refused:
        probe(store, "n")  # type: ignore[arg-type]
    assert refused.value.where == "s3://x" and store.did[-1][0] == "remove"
