"""Versions in a store as a node offers them: what is half, damaged or listed falsely is not offered, what lies is not
loaded, and a store that hangs holds nothing up."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from flowcheck.checkpoint.directory import Meta, load_step, write_step
from flowcheck.checkpoint.fetch import fetch
from flowcheck.checkpoint.objects import Objects, StoreError, open_store
from flowcheck.checkpoint.store import Entry, Lane
from flowcheck.control.user_state import UserState, pack
from flowcheck.control.version import MODEL, OPTIMIZER
from flowcheck.errors import EnvironmentProblem
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.store import shelf as module
from flowcheck.node.store.shelf import StoreShelf
from flowcheck.node.versions.held import Gone
from flowcheck.trainer.recover.recovery import recover

from ..hand_api import TOKEN

SECONDS = 240.0
OPTIMIZER_OF = {"name": "sgd", "groups": [{"params": ["w"], "options": {"lr": 1.0}}]}
META = Meta("run", 1, "verified", (), OPTIMIZER_OF, "torch-cpu", "dp0")


def write(root: Path, step: int, meta: Meta = META, value: float = 1.0, node: str = "n") -> Entry:
    users = {0: pack({"at": step}, step=step, rank=0, ranks=1)}
    momentum = {"state.w.momentum_buffer": torch.full((300,), step + 0.5)}
    lane = Lane(open_store(str(root), {}), f"{node}/{meta.shard or '-'}/{meta.run_id}")
    return lane.write(step, {MODEL: {"w": torch.full((300,), value)}, OPTIMIZER: momentum}, meta, lambda: users)


class Gated:
    """A store that answers while it may."""

    def __init__(self, root: Path) -> None:
        self._objects = open_store(str(root), {})
        self.url, self.gate, self.asked = "s3://gated", threading.Event(), 0
        self.error: Exception | None = None
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._objects, name)

        def call(*given: Any) -> Any:
            self.asked += 1
            assert self.gate.wait(SECONDS)
            if self.error is not None:
                raise self.error
            return real(*given)

        return call


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[StoreShelf]:
    with contextlib.closing(StoreShelf(str(tmp_path), lambda: open_store(str(tmp_path), {}))) as made:
        yield made


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gated]:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(module, "READ_SECONDS", 0.2)
    store = Gated(tmp_path)
    yield store
    store.gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("flowcheck store"):
            thread.join(SECONDS)


def steps(shelf: StoreShelf) -> list[tuple[int, int]]:
    return [(one.offer.epoch, one.offer.step) for one in shelf.look()]


def test_what_is_there_is_offered(shelf: StoreShelf, tmp_path: Path) -> None:
    assert shelf.look() == []
    for step in (10, 30, 20):
        write(tmp_path, step)
    write(tmp_path, 5, Meta("run", 2, "unverified", (), {}, "torch-cpu"), node="other")
    assert steps(shelf) == [(2, 5), (1, 30), (1, 20), (1, 10)]
    offer = shelf.look()[1].offer
    assert (offer.tier, offer.run_id, offer.shard, offer.nbytes) == ("store", "run", "dp0", 2400)
    assert offer.status == "verified"
    assert offer.user == ((0, 0),) and offer.id.startswith("s") and len({one.offer.id for one in shelf.look()}) == 4


def test_it_is_read_as_it_was_written(shelf: StoreShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = write(tmp_path, 10, value=7.0)
    monkeypatch.setattr(module, "BLOCK", 100)
    held = shelf.hold(shelf.look()[0].offer.id)
    assert held.manifest() == (tmp_path / entry.folder / "manifest.json").read_bytes()
    for file in (MODEL, OPTIMIZER):
        data = b""
        while len(data) < held.size(file):
            data += held.read(file, len(data), 37)
        assert data == (tmp_path / entry.folder / file).read_bytes()
    assert load(held.read(MODEL, 0, 1 << 20))["w"].tolist() == [7.0] * 300
    assert held.read(MODEL, held.size(MODEL) - 3, 9) == (tmp_path / entry.folder / MODEL).read_bytes()[-3:]
    assert UserState.of(held.user(0), "x").state == {"at": 10}
    with pytest.raises(Gone):
        held.user(1)


def test_a_block_is_read_once(gated: Gated, tmp_path: Path) -> None:
    write(tmp_path, 10)
    shelf = StoreShelf("x", lambda: gated)  # type: ignore[arg-type,return-value]
    held = shelf.hold(shelf.look()[0].offer.id)
    asked = gated.asked
    for first in range(0, 900, 100):
        held.read(MODEL, first, 100)
    assert gated.asked == asked + 1


def damaged(folder: Path, how: str) -> None:
    path = folder / MODEL
    match how:
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "manifest changed":
            text = (folder / "manifest.json").read_text()
            (folder / "manifest.json").write_text(text.replace('"step": 20', '"step": 21'))
        case "no model":
            path.unlink()
        case "truncated":
            path.write_bytes(path.read_bytes()[:-1])
        case "half a manifest":
            (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes()[:99])


@pytest.mark.parametrize("how", ["no manifest", "manifest changed", "no model", "truncated", "half a manifest"])
def test_what_is_not_whole_is_not_offered(shelf: StoreShelf, tmp_path: Path, how: str) -> None:
    write(tmp_path, 10)
    damaged(tmp_path / write(tmp_path, 20).folder, how)
    write(tmp_path, 30)
    assert steps(shelf) == [(1, 30), (1, 10)]  # and hides nothing, older or newer


def test_a_list_that_lies(gated: Gated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names what is not there, and not what is: the pointer is believed to name a folder, and no more than that."""
    write(tmp_path, 10)
    last = write(tmp_path, 20)
    real = open_store(str(tmp_path), {})

    def children(name: str) -> list[str]:
        if not name.endswith("epoch-1"):
            return real.children(name)
        shown = [one for one in real.children(name) if one != last.folder.rpartition("/")[2]]
        return [*shown, "step-000099.00000000", "nonsense"]

    monkeypatch.setattr(gated, "children", children, raising=False)
    shelf = StoreShelf("x", lambda: gated)  # type: ignore[arg-type,return-value]
    assert steps(shelf) == [(1, 20), (1, 10)]


def test_what_was_removed_is_offered_no_more(shelf: StoreShelf, tmp_path: Path) -> None:
    one = write(tmp_path, 10)
    write(tmp_path, 20)
    held = shelf.hold(shelf.look()[1].offer.id)
    open_store(str(tmp_path), {}).remove_all(one.folder)
    assert steps(shelf) == [(1, 20)]
    with pytest.raises(StoreError, match="No such file"):
        held.read(MODEL, 0, 10)


def test_a_store_that_hangs_is_waited_for_a_little(gated: Gated, tmp_path: Path) -> None:
    write(tmp_path, 10)
    shelf = StoreShelf("x", lambda: gated)  # type: ignore[arg-type,return-value]
    gated.gate.clear()
    for _ in range(3):
        with pytest.raises(StoreError, match=r"no answer within 0\.2 s"):
            shelf.look()
    assert gated.asked == 1 and threading.active_count() < 20  # one thread waits, however often it is asked
    gated.gate.set()
    end = time.monotonic() + SECONDS
    while True:
        assert time.monotonic() < end
        with contextlib.suppress(StoreError):
            if steps(shelf) == [(1, 10)]:
                break
    held = shelf.hold(shelf.known()[0].offer.id)
    gated.gate.clear()
    for _ in range(module.MOST_STUCK):
        with pytest.raises(StoreError, match="no answer within"):
            held.read(MODEL, 0, 10)
    asked = gated.asked
    with pytest.raises(StoreError, match="does not answer"):
        held.read(MODEL, 0, 10)
    assert gated.asked == asked
    gated.gate.set()
    while True:
        assert time.monotonic() < end
        with contextlib.suppress(StoreError):
            assert len(held.read(MODEL, 0, 10)) == 10
            break


def test_a_store_that_refuses(gated: Gated, tmp_path: Path) -> None:
    write(tmp_path, 10)
    shelf = StoreShelf("x", lambda: gated)  # type: ignore[arg-type,return-value]
    for error in (StoreError("denied", where="y"), RuntimeError("denied")):
        gated.error = error
        with pytest.raises(StoreError, match="denied"):
            shelf.look()
    gated.error = None
    held = shelf.hold(shelf.look()[0].offer.id)
    gated.error = RuntimeError("denied again")
    with pytest.raises(StoreError, match="RuntimeError: denied again"):
        held.read(MODEL, 0, 10)


def test_a_version_that_cannot_be_read_hides_no_other_of_its_run(shelf: StoreShelf, tmp_path: Path) -> None:
    for step in (10, 20):
        entry = write(tmp_path, step)
    manifest = tmp_path / entry.folder / "manifest.json"
    manifest.unlink()
    manifest.symlink_to(manifest.name)  # "too many levels", as a disk says "input/output error"
    assert steps(shelf) == [(1, 10)]


def test_but_a_run_is_not_taken_for_one_without_versions(shelf: StoreShelf, tmp_path: Path) -> None:
    """Or it would start fresh."""
    write(tmp_path, 10)
    entry = write(tmp_path, 20, Meta("another", 2, "unverified", (), {}, "torch-cpu"))
    manifest = tmp_path / entry.folder / "manifest.json"
    manifest.unlink()
    manifest.symlink_to(manifest.name)
    with pytest.raises(StoreError, match="Too many levels of symbolic links"):
        shelf.look()


def test_a_store_that_cannot_be_opened_is_opened_again(tmp_path: Path) -> None:
    write(tmp_path, 10)
    answers: list[Callable[[], Objects]] = [
        lambda: open_store("ftp://127.0.0.1:1/x", {}), lambda: open_store(str(tmp_path), {})
    ]
    shelf = StoreShelf("x", lambda: answers.pop(0)())
    with pytest.raises(StoreError, match="cannot be opened"):
        shelf.look()
    assert steps(shelf) == [(1, 10)]


# -- the whole way ---------------------------------------------------------------------------------------------------


@pytest.fixture
def node(shm: Path, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """node(url) -> the address of its API; a disk and a store, and nothing in memory."""
    with contextlib.ExitStack() as stack:

        def started(url: str, **store: Any) -> str:
            config = NodeConfig.model_validate({
                "name": "n", "control": {"listen": "127.0.0.1:0", "token_file": "t"}, "capture": {"device": "x"},
                "api": {"listen": "127.0.0.1:0"}, "replica": {"directory": str(shm), "slots": 4},
                "output": {"directory": str(tmp_path / "disk")}, "store": {"url": url, "every": 1} | store,
            })
            serving = Serving(config, TOKEN.encode(), lambda *_, **__: None)
            return stack.enter_context(contextlib.closing(serving)).address

        yield started


def test_the_store_comes_after_the_disk_and_a_flipped_bit_is_never_loaded(
    node: Callable[..., str], tmp_path: Path
) -> None:
    """A bit of the disk's is flipped: the store's is taken. One of the store's, too: the step before."""
    state = {"w": {"momentum_buffer": torch.full((300,), 20.5)}}
    user = pack({"at": 20}, step=20, rank=0, ranks=1)
    disk = write_step(
        tmp_path / "disk/dp0/run/epoch-1", 20, {"w": torch.full((300,), 1.0)}, state, META, lambda: {0: user}
    )
    write(tmp_path / "store", 10)
    newer = write(tmp_path / "store", 20)
    address = node(str(tmp_path / "store"))

    def took() -> Any:
        return recover(address, token=TOKEN, seconds=SECONDS)

    got = took()
    assert (got.step, got.source, got.passed) == (20, f"{address}, disk", ())

    flip(disk / MODEL)
    got = took()
    assert (got.step, got.source) == (20, f"{address}, store")
    assert got.model["w"].tolist() == [1.0] * 300

    flip(tmp_path / "store" / newer.folder / MODEL)
    got = took()
    assert (got.step, got.source) == (10, f"{address}, store")
    assert any("store" in why and "SHA-256" in why for why in got.passed)
    assert any("disk" in why and "SHA-256" in why for why in got.passed)

    taken = fetch(address, tmp_path / "out", token=TOKEN, step=10)
    assert load_step(taken.path).parameters["w"].tolist() == [1.0] * 300 and taken.source == f"{address}, store"
    assert json.loads((taken.path / "manifest.json").read_text())["user"].keys() == {"0"}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_no_fresh_start_where_the_store_does_not_say_what_it_has(node: Callable[..., str]) -> None:
    address = node("ftp://127.0.0.1:1/x")
    with pytest.raises(EnvironmentProblem, match="store: did not say"):
        recover(address, token=TOKEN, seconds=SECONDS)
    assert not recover(address, token=TOKEN, seconds=SECONDS, fresh=True)
