"""What the process that writes to a store is given, what becomes of what it says, and what a check makes of it: pipes
in place of the process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.process import child
from flowcheck.node.process.child import ChildProcess
from flowcheck.node.store import supervisor
from flowcheck.node.store.border import PROGRAM, StoreSettings
from flowcheck.node.store.supervisor import START_SECONDS, check_store, storing

from .pipes import Pipes

STORED = {"name": "dp0", "step": 2, "bytes": 240, "seconds": 0.5, "path": "s3://x/y"}


def config(tmp_path: Path, **store: Any) -> NodeConfig:
    usable = sorted(os.sched_getaffinity(0))
    return NodeConfig.model_validate({
        "name": "n", "control": {"listen": "127.0.0.1:0", "token_file": "t"},
        "capture": {"device": "x", "cores": usable[:1] if len(usable) > 1 else []},
        "replica": {"directory": str(tmp_path)}, "store": {"url": "/somewhere", "every": 2} | store,
    })


class Scene:
    def __init__(self, tmp_path: Path) -> None:
        self.pipes = Pipes()
        self.given: list[Any] = []
        self.said: list[Any] = []
        self.config = config(tmp_path)

    def start(self, module: str, settings: StoreSettings, files: Any) -> Pipes:
        self.given.append((module, settings))
        return self.pipes

    def begin(self) -> ChildProcess:
        return storing(self.config, lambda event, **fields: self.said.append((event, fields)))


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(tmp_path)
    monkeypatch.setattr(child, "start", made.start)
    with contextlib.closing(made.pipes):
        yield made


def test_what_it_is_given(scene: Scene, tmp_path: Path) -> None:
    scene.begin()
    [(module, settings)] = scene.given
    usable = sorted(os.sched_getaffinity(0))
    assert module == PROGRAM.module == "flowcheck.node.store.worker"
    settings = json.loads(settings.encoded())
    assert settings.pop("store") == scene.config.store.model_dump()  # type: ignore[union-attr]
    assert settings == {"node": "n", "replicas": str(tmp_path), "probe": False,
                        "cores": usable[1:] if len(usable) > 1 else usable, "token_file": "t", "readable_by": "owner",
                        "journals": None}


def test_a_url_that_is_none_is_refused_before_it_is_started(scene: Scene, tmp_path: Path) -> None:
    scene.config = config(tmp_path, url="nothing-of-that-name://x")
    for call in (scene.begin, lambda: check_store(scene.config)):
        with pytest.raises(UserError, match="no protocol"):
            call()
    assert scene.given == []


@pytest.mark.parametrize(("event", "fields"), [
    ("stored", STORED), ("unstored", {"name": "dp0", "step": 2, "why": "full", "again": 5.0}),
    ("expired", {"name": "dp0", "versions": 3, "path": "n/dp0"}),
    ("delta", {"name": "dp0", "first": 3, "last": 5, "bytes": 9, "seconds": 0.5, "path": "n/dp0"}),
    ("delta_gap", {"name": "dp0", "first": 3, "last": 5, "why": "overwritten"}),
    ("marked", {"name": "dp0", "steps": 2, "newest": 4, "path": "n/dp0"}),
    ("skipped", {"name": "dp0", "step": 2, "why": "slow"}), ("problem", {"name": "dp0", "why": "older versions stay"}),
])
def test_what_it_says_is_said(scene: Scene, event: str, fields: dict[str, Any]) -> None:
    at = scene.begin()
    scene.pipes.says(event, **fields, more="of another release")
    scene.pipes.says("another", name="x")
    at.look()
    assert scene.said == [(event, fields)]


# -- the check -----------------------------------------------------------------------------------------------------


class Process:
    """communicate: what it says, or that it hangs."""

    def __init__(self, out: bytes, status: int | None) -> None:
        self.out, self.returncode, self.killed, self.waited = out, status, 0, list[float]()

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        self.waited.append(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("x", timeout, output=b'{"event": "unstored", "why": "half"}\n')
        return self.out, b""

    def kill(self) -> None:
        self.killed += 1


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Process]:
    def made(out: bytes, status: int | None) -> Process:
        process = Process(out, status)

        def start(module: str, settings: StoreSettings, blocking: bool = False) -> Process:
            assert module == PROGRAM.module and settings.probe is True and blocking is True
            return process

        monkeypatch.setattr(supervisor, "start", start)
        try:
            check_store(config(tmp_path, seconds=9.0))
        finally:
            assert process.waited == [9.0 + START_SECONDS] and process.killed == (status is None)
        return process

    return made


@pytest.mark.parametrize(("out", "status", "why"), [
    (b"", 75, "no answer within 9 s"), (b"", 1, "no answer within 9 s"), (b"", None, "no answer within 9 s"),
    (b'x\n{"event": "unstored", "name": "", "step": null, "why": "denied", "again": null}\nTraceback\n', 75, "denied"),
    (b'{"event": "unstored", "name": "", "step": null, "why": "denied", "again": null}\n', 0, "denied"),
])
def test_a_place_of_no_use_is_one(check: Callable[..., Process], out: bytes, status: int | None, why: str) -> None:
    assert check(b"a library prints\n", 0).killed == 0
    with pytest.raises(EnvironmentProblem) as refused:
        check(out, status)
    assert (refused.value.what, refused.value.where) == (why, "store.url") and "store.options" in refused.value.remedy


def test_a_machine_that_starts_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(supervisor, "start", start)
    with pytest.raises(EnvironmentProblem) as refused:
        check_store(config(tmp_path))
    assert refused.value.what.endswith("cannot be started: Resource temporarily unavailable")
    assert refused.value.where == "store"
