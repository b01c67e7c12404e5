"""A store on a file system over a network: each call takes long, the server is away for a while in the middle of an
upload, an answer is lost. slow_files.c stands between the process that writes and the real file system."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.checkpoint.directory import load_step
from flowcheck.job.model import BucketSlice
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.process import child
from flowcheck.node.process.child import ChildProcess
from flowcheck.node.store.supervisor import storing
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

from .store_scene import until_said

pytestmark = pytest.mark.slow

SIZE = 3000
LONGEST = 120.0


class Scene:
    """A replica, the process that writes its versions to `store`, and the network between: hold, lies."""

    def __init__(self, folder: Path, shm: Path) -> None:
        self.store, self.hold, self.lies = folder / "store", folder / "hold", folder / "lies"
        self.store.mkdir()
        spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0, "momentum": 0.5})])
        self.replica = Replica(
            {"w": torch.zeros(SIZE)}, spec, path=shm / "flowcheck-n-dp0-1.replica", run_id="run", slots=4)
        self.config = NodeConfig.model_validate({
            "name": "n", "control": {"listen": "127.0.0.1:0", "token_file": "t"}, "capture": {"device": "x"},
            "replica": {"directory": str(shm)},
            "store": {"url": str(self.store), "every": 2, "seconds": 2.0, "keep": 2},
        })
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.storing: ChildProcess | None = None
        self.values: dict[int, torch.Tensor] = {0: torch.zeros(SIZE)}

    @property
    def lane(self) -> Path:
        return self.store / "n/dp0/run"

    def start(self) -> ChildProcess:
        self.storing = storing(self.config, lambda event, **fields: self.said.append((event, fields)))
        return self.storing

    def advance(self, steps: int = 1) -> int:
        for _ in range(steps):
            slot = self.replica.build(self.replica.current.step + 1,
                                      Layout([[BucketSlice("w", 0, SIZE)]], {"w": (SIZE,)}, [SIZE]))
            slot.apply(0, torch.full((SIZE,), 1.0))
            self.replica.publish(slot)
            self.values[slot.step] = slot.parameters["w"].clone()
        return self.replica.current.step

    def next(self) -> int:
        """To the next version that is due."""
        return self.advance(2 - self.replica.current.step % 2)

    def until(self, event: str, count: int = 1) -> dict[str, Any]:
        assert self.storing is not None
        return until_said(self.storing, self.said, event, count)

    def whole(self) -> list[int]:
        """Steps that the store offers: each of them is right, and the pointer names one of them."""
        found = []
        for manifest in sorted(self.lane.glob("epoch-0/step-*/manifest.json")):
            loaded = load_step(manifest.parent)
            assert torch.equal(loaded.parameters["w"], self.values[loaded.step])
            found.append(loaded.step)
        pointer = self.lane / "latest.json"
        if pointer.exists():
            assert json.loads(pointer.read_text())["step"] in found
        return found

    def close(self) -> None:
        for path in (self.hold, self.lies):
            path.unlink(missing_ok=True)
        if self.storing is not None:
            self.storing.close()
        self.replica.close()


@pytest.fixture
def scene(
    slow_files: Path, tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Scene]]:
    """scene(ms): each call takes so long."""
    made: list[Scene] = []

    def make(ms: int) -> Scene:
        one = Scene(tmp_path, shm)
        made.append(one)
        for name, value in {"LD_PRELOAD": slow_files, "SLOW_UNDER": one.store, "SLOW_MS": ms, "SLOW_HOLD": one.hold,
                            "SLOW_LIES": one.lies}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(child, "FIRST_PAUSE", 0.1)
        one.start()
        return one

    yield make
    for one in made:
        one.close()


def test_each_call_takes_long(scene: Callable[..., Scene]) -> None:
    """Versions come there whole, later; meanwhile newer ones are published, and those that are due are left out."""
    at = scene(20)
    first = at.next()
    assert at.storing is not None
    end = time.monotonic() + LONGEST
    while not any(event == "stored" for event, _ in at.said):
        at.advance()
        at.storing.look()
        time.sleep(0.01)
        assert time.monotonic() < end
    told = at.until("stored")
    assert told["step"] >= first and told["seconds"] > 10 * 0.02, "tens of calls"
    assert told["step"] in at.whole() and at.replica.current.step > told["step"] + 4
    assert at.until("skipped") and not any(event == "unstored" for event, _ in at.said)


@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json"])
def test_the_server_is_away_in_the_middle_of_an_upload(scene: Callable[..., Scene], file: str) -> None:
    """The process is ended, with its pin, and the next one goes on when the server is back. What was whole is whole all
    the time, and nothing else is offered."""
    at = scene(10)
    assert at.storing is not None
    first = at.next()
    at.until("stored")
    folder = next(at.lane.glob("epoch-0/step-*"))
    process = at.storing.process
    end = time.monotonic() + LONGEST
    due = 0.0
    while not [path for path in at.lane.glob(f"epoch-0/step-*/{file}") if path.parent != folder]:
        if time.monotonic() > due:  # a slow store is given fewer of them
            at.next()
            due = time.monotonic() + 1.0
        at.storing.look()
        assert time.monotonic() < end, at.said
        time.sleep(0.001)
    at.hold.touch()
    at.until("problem")
    assert process is not None and process.poll() == 75 and first in at.whole()
    at.advance(20)
    at.hold.unlink()
    count = sum(event == "stored" for event, _ in at.said)
    end = time.monotonic() + LONGEST
    while sum(event == "stored" for event, _ in at.said) == count:
        at.next()
        for _ in range(50):
            at.storing.look()
            time.sleep(0.01)
        assert time.monotonic() < end, at.said
    assert at.until("stored", count + 1)["step"] in at.whole()


def test_answers_to_renames_are_lost(scene: Callable[..., Scene]) -> None:
    """The pointer is there, and whoever wrote it was told that it is not: it says so, and writes the next one."""
    at = scene(0)
    first = at.next()
    at.until("stored")
    at.lies.touch()
    at.next()
    told = at.until("unstored")
    assert "Input/output error" in told["why"] and first in at.whole()
    at.lies.unlink()
    end = time.monotonic() + LONGEST
    assert at.storing is not None
    while sum(event == "stored" for event, _ in at.said) < 2:  # it is tried again after five seconds
        at.next()
        at.storing.look()
        time.sleep(0.2)
        assert time.monotonic() < end
    assert at.until("stored", 2)["step"] in at.whole()


def test_the_end_of_a_node_does_not_wait_for_a_server_that_is_away(scene: Callable[..., Scene]) -> None:
    at = scene(0)
    at.next()
    at.until("stored")
    at.hold.touch()
    at.next()
    began = time.monotonic()
    with contextlib.closing(at.start() if at.storing is None else at.storing):
        pass
    assert time.monotonic() - began < 60.0, "some seconds, on a machine with nothing else to do"
    at.hold.unlink()
    at.storing = None
    assert at.whole()
