"""The process that answers the HTTP API: started, asked, killed, and ended with the node."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.checkpoint.directory import Meta, write_step
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.process import child
from flowcheck.node.status.board import Board
from flowcheck.trainer.recover.recovery import recover
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

from ..hand_api import KEY, TOKEN
from ..hand_node import until
from .told_scene import attached, document, iteration

LONGEST = 240.0
STATE = {"exp_avg": torch.tensor([0.1, 0.2, 0.3]), "exp_avg_sq": torch.tensor([0.4, 0.5, 0.6]), "step": 2.0}


@pytest.fixture
def config(shm: Path, tmp_path: Path) -> Callable[..., NodeConfig]:
    """config(listen) -> settings of a node with an [api]."""

    def made(listen: str = "127.0.0.1:0", **tables: Any) -> NodeConfig:
        return NodeConfig.model_validate({
            "name": "n", "control": {"listen": "127.0.0.1:0", "token_file": "t"}, "capture": {"device": "x"},
            "api": {"listen": listen}, "replica": {"directory": str(shm)}, "output": {"directory": str(tmp_path)},
        } | tables)

    return made


@pytest.fixture
def replica(shm: Path) -> Iterator[Replica]:
    spec = OptimizerSpec.check("adam", [(["w"], {"lr": 0.5})])
    made = Replica({"w": torch.tensor([1.0, 2.0, 3.0])}, spec, path=shm / "flowcheck-n--1.replica", run_id="run",
                   step=7, optimizer_state={"w": STATE}, slots=3)
    with contextlib.closing(made):
        yield made


def said(into: list[Any]) -> Callable[..., None]:
    return lambda event, **fields: into.append((event, fields))


def ask(address: str, path: str, key: str = KEY) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=LONGEST)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
        with contextlib.closing(connection.getresponse()) as answer:
            return answer.status, answer.read()


def test_versions_of_memory_and_disk_come_back_whole(
    config: Callable[..., NodeConfig], replica: Replica, tmp_path: Path
) -> None:
    """The whole way over a socket: both tiers, hashes, torch's numbering; a flipped bit in memory and on disk."""
    meta = Meta("run", 0, "unverified", (), replica.current.optimizer, "torch-cpu")
    for step in (6, 7):
        write_step(tmp_path / "run" / "epoch-0", step, {"w": torch.full((3,), step + 0.5)}, {"w": STATE}, meta)
    with contextlib.closing(Serving(config(), TOKEN.encode(), said([]))) as node:
        got = recover(node.address, token=TOKEN, seconds=LONGEST)
        assert (got.step, got.epoch, got.source) == (7, 1, f"{node.address}, memory") and got.passed == ()
        assert got.model["w"].tolist() == [1.0, 2.0, 3.0]
        weights = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.Adam([weights])
        optimizer.load_state_dict(got.optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert all(torch.equal(optimizer.state[weights][name], torch.as_tensor(one)) for name, one in STATE.items())

        replica.current.parameters["w"][1] = 2.0000002  # the lowest bit, after its hash was kept
        got = recover(node.address, token=TOKEN, seconds=LONGEST)
        assert (got.step, got.source) == (7, f"{node.address}, disk") and got.model["w"].tolist() == [7.5] * 3
        assert got.passed == (f"{node.address}, memory: model.safetensors: tensor 'w' has other bytes than its manifest"
                              " says (SHA-256 differs)",)

        data = tmp_path / "run/epoch-0/step-000007/optimizer.safetensors"
        whole = data.read_bytes()
        data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        got = recover(node.address, token=TOKEN, seconds=LONGEST)
        assert (got.step, got.source) == (6, f"{node.address}, disk") and got.model["w"].tolist() == [6.5] * 3
        assert got.passed[0].count("SHA-256 differs") == 2 and "disk: optimizer.safetensors: tensor" in got.passed[0]

        assert ask(node.address, "/healthz", "")[0] == 200
        assert ask(node.address, "/v1/versions", "x")[0] == ask(node.address, "/v1/versions", TOKEN)[0] == 401
        assert json.loads(ask(node.address, "/v1/status")[1])["newest"][0]["step"] == 7


def test_a_process_that_died_is_replaced_and_nobody_is_refused(
    config: Callable[..., NodeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    with contextlib.closing(Serving(config(), TOKEN.encode(), said(events))) as node:
        assert ask(node.address, "/healthz")[0] == 200
        first = node.child.process.pid
        node.child.process.kill()
        until(lambda: node.child.process.poll() is not None)
        monkeypatch.setattr(child, "AGAIN_SECONDS", 1e9)
        node.look()
        assert node.child.process is None  # not at once: it might die again and again
        node.child._due = 0.0
        node.look()
        assert node.child.process.pid != first and node.child.process.poll() is None
        why = "the process that answers api.listen ended with status -9; it is started anew"
        assert events == [("problem", {"process": "api", "cause": "ended", "why": why})]
        assert ask(node.address, "/healthz")[0] == 200  # the socket listened all the while
        until(lambda: (node.look(), len(events) > 1)[1])
        assert events[1:] == [("solved", {"about": "api"})]


def test_it_ends_with_the_node(config: Callable[..., NodeConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "END_SECONDS", LONGEST)  # it ends by itself, however slow the machine is
    node = Serving(config(), TOKEN.encode(), said([]))
    assert ask(node.address, "/healthz")[0] == 200
    process = node.child.process
    node.close()
    assert process.returncode == 0
    host, _, port = node.address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
    node.close()


@pytest.mark.parametrize("listen", ["[::1]:0", "localhost:0"])
def test_other_names_of_the_loopback(config: Callable[..., NodeConfig], listen: str) -> None:
    with contextlib.closing(Serving(config(listen), TOKEN.encode(), said([]))) as node:
        assert node.address.startswith("[::1]:" if "::1" in listen else "127.0.0.1:")
        assert ask(node.address, "/healthz")[0] == 200


def test_what_the_process_is_given(config: Callable[..., NodeConfig], shm: Path, tmp_path: Path) -> None:
    """The key stands in neither arguments nor environment; cores that a capture is pinned to are not its."""
    usable = sorted(os.sched_getaffinity(0))
    pinned = usable[:1] if len(usable) > 1 else []
    settings = config(capture={"device": "x", "cores": pinned})
    with contextlib.closing(Serving(settings, TOKEN.encode(), said([]))) as node:
        assert ask(node.address, "/healthz")[0] == 200
        process = Path("/proc", str(node.child.process.pid))
        shown = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        assert KEY.encode() not in shown and TOKEN.encode() not in shown
        assert os.sched_getaffinity(node.child.process.pid) == set(usable) - set(pinned)
        assert os.getpriority(os.PRIO_PROCESS, node.child.process.pid) == min(19, os.nice(0) + 5)
        assert os.getsid(node.child.process.pid) == node.child.process.pid  # Ctrl-C is for the node


def test_a_process_whose_node_ended_at_once() -> None:
    done = subprocess.run([sys.executable, "-P", "-m", "flowcheck.node.api.worker"], input=b"", timeout=LONGEST)
    assert done.returncode == 0


# -- what the node tells of itself -----------------------------------------------------------------------------


def test_metrics_page_and_stream_over_a_socket(
    config: Callable[..., NodeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the process was killed: what the node has counted is the node's. A viewer holds up no end."""
    monkeypatch.setattr(child, "END_SECONDS", LONGEST)
    with contextlib.closing(Board()) as board, contextlib.closing(
        Serving(config(), TOKEN.encode(), said([]), board.fd)
    ) as node:
        assert ask(node.address, "/metrics")[0] == 503
        board.write(json.dumps(document(attached(), iteration(5))).encode())
        status, text = ask(node.address, "/metrics")
        assert status == 200 and b'flowcheck_last_complete_step{group="dp0"} 6.0' in text
        for path in ("/", "/metrics", "/v1/node"):
            assert ask(node.address, path, "x")[0] == 401
        assert ask(node.address, "/")[1].startswith(b"<!doctype html>")

        node.child.process.kill()
        until(lambda: node.child.process.poll() is not None)
        node.child._began = -1e9
        node.look()
        process = node.child.process
        assert b'flowcheck_last_complete_step{group="dp0"} 6.0' in ask(node.address, "/metrics")[1]
        with contextlib.closing(http.client.HTTPConnection(node.address, timeout=LONGEST)) as viewer:
            password = base64.b64encode(f"me:{KEY}".encode()).decode()
            viewer.request("GET", "/v1/node", headers={
                "Accept": "text/event-stream", "Authorization": f"Basic {password}"})
            answer = viewer.getresponse()
            assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
            for step in (6, 7, 8):
                told = document(attached(), iteration(step))
                board.write(json.dumps(told).encode())
                while json.loads((line := answer.readline())[6:] or b"0") != told:
                    assert line.startswith(b"data: ") or line in (b":\n", b"\n")
            node.close()
        assert process.returncode == 0
