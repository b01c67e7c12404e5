"""A real etcd, started for a test: one node, or three, that can be killed, paused and started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ..hand_api import NODE_KEY

SECONDS = 120.0
#: Short elections: a test waits for one where a leader is lost.
TIMES = ["--heartbeat-interval", "50", "--election-timeout", "500"]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in held]


class EtcdServer:
    """Nodes of a cluster on the loopback, or at these hosts, of which each is reached where its prefix leads.
    endpoints: for clients."""

    def __init__(self, folder: Path, count: int = 1, hosts: Sequence[str] = (), prefixes: Sequence[list[str]] = ()
                 ) -> None:
        ports = [2379] * count + [2380] * count if hosts else free_ports(2 * count)
        at = list(hosts) or ["127.0.0.1"] * count
        self.folder, self._prefixes = folder, list(prefixes) or [[]] * count
        self._peers = [f"http://{host}:{port}" for host, port in zip(at, ports[count:], strict=True)]
        self.endpoints = [f"http://{host}:{port}" for host, port in zip(at, ports[:count], strict=True)]
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * count
        for number in range(count):
            self.start(number)

    def start(self, number: int = 0) -> None:
        cluster = ",".join(f"e{at}={peer}" for at, peer in enumerate(self._peers))
        with (self.folder / f"log{number}").open("ab") as log:
            self.processes[number] = subprocess.Popen([
                *self._prefixes[number],
                "etcd", "--name", f"e{number}", "--data-dir", str(self.folder / f"data{number}"),
                "--listen-client-urls", self.endpoints[number], "--advertise-client-urls", self.endpoints[number],
                "--listen-peer-urls", self._peers[number], "--initial-advertise-peer-urls", self._peers[number],
                "--initial-cluster", cluster, *TIMES,
            ], stdout=log, stderr=log)

    def kill(self, number: int = 0) -> None:
        process = self.processes[number]
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(SECONDS)
        self.processes[number] = None

    def pause(self, number: int = 0) -> None:
        process = self.processes[number]
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # until then its threads may answer

    def resume(self, number: int = 0) -> None:
        process = self.processes[number]
        assert process is not None
        process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        for number in range(len(self.processes)):
            self.kill(number)


def signed(endpoints: Sequence[str], cluster: str) -> Any:
    """The registry of a member that knows the tests' token."""
    from flowcheck.node.protect.registry_etcd import Etcd
    from flowcheck.node.protect.signing import Signed

    return Signed(Etcd(endpoints, cluster, seconds=30.0), cluster, lambda: [bytes.fromhex(NODE_KEY)],
                  lambda *_, **__: None)


@contextlib.contextmanager
def etcd_server(
    folder: Path, count: int = 1, hosts: Sequence[str] = (), prefixes: Sequence[list[str]] = (),
    there: Callable[[Callable[[], None]], None] = lambda ask: ask(),
) -> Iterator[EtcdServer]:
    """Skips where there is none. there(ask): calls it where the nodes can be reached."""
    if shutil.which("etcd") is None:
        pytest.skip("no etcd here: apt-get install etcd-server")
    pytest.importorskip("etcd3gw", reason="the extra `registry` is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(EtcdServer(folder, count, hosts, prefixes)) as server:
        from flowcheck.node.protect.registry import RegistryError
        from flowcheck.node.protect.registry_etcd import Etcd

        end = time.monotonic() + SECONDS
        while True:
            try:
                there(lambda: Etcd(server.endpoints, "probe").read() and None)
                break
            except RegistryError:
                assert time.monotonic() < end, (folder / "log0").read_text()[-2000:]
                time.sleep(0.05)
        yield server
