"""The process that writes to a store, started, watched and ended by the node: a directory, a real S3-compatible server,
one that stops answering, a full disk, a process that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.checkpoint.directory import load_step
from flowcheck.checkpoint.users import load_user
from flowcheck.control.user_state import pack
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.job.model import BucketSlice
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.process import child
from flowcheck.node.process.child import ChildProcess
from flowcheck.node.store import supervisor
from flowcheck.node.store.supervisor import check_store
from flowcheck.node.versions.user_states import rank_file, user_folder
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

from .store_scene import Cable, asked, s3_options, s3_server, until_said

Said = list[tuple[str, dict[str, Any]]]
SIZE = 3000


@pytest.fixture
def config(shm: Path, tmp_path: Path) -> Callable[..., NodeConfig]:
    def made(**store: Any) -> NodeConfig:
        return NodeConfig.model_validate({
            "name": "n", "control": {"listen": "127.0.0.1:0", "token_file": "t"}, "capture": {"device": "x"},
            "replica": {"directory": str(shm)}, "store": {"url": str(tmp_path / "store"), "every": 2} | store,
        })

    return made


@pytest.fixture
def replica(shm: Path) -> Iterator[Replica]:
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0, "momentum": 0.5})])
    path = shm / "flowcheck-n-dp0-1.replica"
    made = Replica({"w": torch.zeros(SIZE)}, spec, path=path, run_id="a run", epoch=1, slots=4)
    with contextlib.closing(made):
        yield made


def advance(replica: Replica, steps: int = 1) -> None:
    for _ in range(steps):
        slot = replica.build(replica.current.step + 1, Layout([[BucketSlice("w", 0, SIZE)]], {"w": (SIZE,)}, [SIZE]))
        slot.apply(0, torch.full((SIZE,), 1.0))
        replica.publish(slot)


@contextlib.contextmanager
def running(config: NodeConfig) -> Iterator[tuple[ChildProcess, Said]]:
    said: Said = []
    begun = supervisor.storing(config, lambda event, **fields: said.append((event, fields)))
    with contextlib.closing(begun) as storing:
        yield storing, said


def test_versions_come_into_a_directory(
    config: Callable[..., NodeConfig], replica: Replica, shm: Path, tmp_path: Path
) -> None:
    with running(config(keep=1)) as (storing, said):
        folder = user_folder(shm / "flowcheck-n-dp0-1.replica", 2)
        folder.mkdir(parents=True)
        rank_file(folder, 0).write_bytes(pack({"at": 7}, step=2, rank=0, ranks=1))
        advance(replica, 2)
        told = until_said(storing, said, "stored")
        assert told["name"] == "dp0" and told["step"] == 2 and told["bytes"] == 8 * SIZE and told["seconds"] > 0
        loaded = load_step(told["path"])
        assert torch.equal(loaded.parameters["w"], replica.current.parameters["w"])
        assert load_user(Path(told["path"]), loaded.manifest, 0).state == {"at": 7}
        assert Path(told["path"]).parent == tmp_path / "store/n/dp0/a%20run/epoch-1"
        advance(replica, 2)
        gone = until_said(storing, said, "expired")
        assert gone["path"] == told["path"].removeprefix(f"{tmp_path}/store/") and gone["versions"] == 1
        assert not Path(told["path"]).exists() and [event for event, _ in said] == ["stored", "stored", "expired"]
    storing.close()


@pytest.mark.slow
def test_a_process_that_died_is_started_anew_and_writes_nothing_twice(
    config: Callable[..., NodeConfig], replica: Replica, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(child, "FIRST_PAUSE", 0.1)
    with running(config()) as (storing, said):
        advance(replica, 2)
        until_said(storing, said, "stored")
        assert storing.process is not None
        os.kill(storing.process.pid, signal.SIGKILL)
        assert "status -9; it is started anew in 0.1 s" in until_said(storing, said, "problem")["why"]
        advance(replica, 2)
        assert until_said(storing, said, "stored", 2)["step"] == 4
    assert len(list((tmp_path / "store/n/dp0/a%20run/epoch-1").iterdir())) == 2


def test_a_place_that_refuses_is_said_and_tried_again(
    config: Callable[..., NodeConfig], replica: Replica, tmp_path: Path
) -> None:
    (tmp_path / "store").write_text("a file")
    with running(config()) as (storing, said):
        advance(replica, 2)
        told = until_said(storing, said, "unstored")
        assert (told["name"], told["step"], told["again"]) == ("dp0", 2, 5.0) and "cannot be written" in told["why"]
        advance(replica, 2)  # the replica goes on, and so does the process
        assert "the store failed a moment ago" in until_said(storing, said, "skipped")["why"]
        assert storing.process is not None and storing.process.poll() is None


@pytest.mark.slow
@pytest.mark.root
def test_a_full_disk(config: Callable[..., NodeConfig], replica: Replica, tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip()}")
    try:
        with running(config(url=str(place))) as (storing, said):
            advance(replica, 2)
            first = until_said(storing, said, "stored")
            advance(replica, 2)
            told = until_said(storing, said, "unstored")
            assert "No space left" in told["why"] and "store.keep" in told["why"] and told["step"] == 4
            assert load_step(first["path"]).step == 2
            said_of = json.loads((place / "n/dp0/a%20run/latest.json").read_text())
            assert said_of["step"] == 2
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_an_s3_server_that_stops_for_a_while(
    config: Callable[..., NodeConfig], replica: Replica, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of it against a real server: objects, retention; nothing moves any more, versions go on, the process is
    ended and started anew, and goes on where the server does."""
    pytest.importorskip("obstore")
    monkeypatch.setattr(child, "FIRST_PAUSE", 0.1)
    with s3_server(tmp_path / "s3") as port, contextlib.closing(Cable(("127.0.0.1", port))) as cable:
        settings = config(url="s3://bucket/ckpt", options=s3_options(cable.port), keep=1, seconds=2.0)
        check_store(settings)
        assert asked(port, "names") == []
        with running(settings) as (storing, said):
            advance(replica, 2)
            told = until_said(storing, said, "stored")
            objects = asked(port, "all")
            folder = told["path"].removeprefix("s3://bucket/")
            assert sorted(objects) == [
                *(f"{folder}/{file}" for file in ("manifest.json", "model.safetensors", "optimizer.safetensors")),
                "ckpt/n/dp0/a%20run/latest.json",
            ]
            local = tmp_path / "step-000002"
            local.mkdir()
            for name in objects:
                if name.startswith(folder):
                    (local / name.rpartition("/")[2]).write_bytes(objects[name])
            assert torch.equal(load_step(local).parameters["w"], replica.current.parameters["w"])

            cable.hold()
            process = storing.process
            advance(replica, 2)
            while not any(event == "problem" for event, _ in said):
                advance(replica)  # versions go on, whatever the store does
                storing.look()
                time.sleep(0.02)
            why = until_said(storing, said, "unstored")
            assert "no byte has moved for 2 s" in why["why"] and why["name"] == "dp0"
            assert "status 75" in until_said(storing, said, "problem")["why"]
            assert process is not None and process.poll() == 75
            assert replica.current.step > 6
            assert json.loads(objects["ckpt/n/dp0/a%20run/latest.json"])["step"] == 2

            cable.let_go()
            count = sum(event == "stored" for event, _ in said)
            advance(replica, 2 + replica.current.step % 2)
            last = until_said(storing, said, "stored", count + 1)
            until_said(storing, said, "expired")
            names = asked(port, "names")
            folders = {name.rpartition("/")[0] for name in names if name.endswith("manifest.json")}
            assert folders == {last["path"].removeprefix("s3://bucket/")}

            cable.hold()
            advance(replica, 2 + replica.current.step % 2)
            began = time.monotonic()
        assert time.monotonic() - began < 60.0  # a few seconds, on a machine with nothing else to do


@pytest.mark.parametrize(
    ("store", "error", "what"),
    [
        ({"url": "nothing-of-that-name://x"}, UserError, "no protocol that fsspec knows"),
        pytest.param({"url": "ftp://127.0.0.1:1/x"}, EnvironmentProblem, "ConnectionRefusedError",
                     marks=pytest.mark.slow),
        ({"url": "/proc/nothing/here"}, EnvironmentProblem, "cannot be written"),
    ],
)
def test_a_place_that_is_of_no_use_is_said_before(
    config: Callable[..., NodeConfig], store: dict[str, Any], error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=what):
        check_store(config(**store))


@pytest.mark.slow
def test_a_place_of_use_is_as_it_was(config: Callable[..., NodeConfig], tmp_path: Path) -> None:
    check_store(config())
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


@pytest.mark.slow
def test_a_place_that_hangs_is_not_waited_for(
    config: Callable[..., NodeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=r"no answer within 1 s") as caught:
            check_store(config(url=f"ftp://127.0.0.1:{port}/x", seconds=1.0))
        assert caught.value.where.startswith("store.url")
