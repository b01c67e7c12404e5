"""A small fabric for tests: one network namespace per rank, joined by a bridge in a namespace of its own.

    with Fabric(ranks=2) as fabric:
        fabric.run(program, settings, ...)      `program` in every rank's namespace, at once

Names are unique per process; leaving removes what was made. Needs root.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["Fabric"]

ROOT = Path(__file__).resolve().parents[4]
MTU = 4200


def ip(*words: str, namespace: str = "") -> None:
    where = ["-n", namespace] if namespace else []
    subprocess.run(["ip", *where, *words], check=True, capture_output=True)


class Fabric:
    """Rank r is 10.77.0.(10+r) on fab0 of its namespace."""

    def __init__(self, ranks: int, mtu: int = MTU) -> None:
        self.ranks, self.mtu = ranks, mtu
        mark = f"flowcheck-t{os.getpid()}-{secrets.token_hex(2)}"
        self.leaf = f"{mark}-leaf"
        self.namespaces = [f"{mark}-r{rank}" for rank in range(ranks)]
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Fabric:
        try:
            ip("netns", "add", self.leaf)
            ip("link", "add", "br0", "mtu", str(self.mtu), "type", "bridge", namespace=self.leaf)
            ip("link", "set", "br0", "up", namespace=self.leaf)
            for rank, name in enumerate(self.namespaces):
                ip("netns", "add", name)
                port = f"p{rank}"
                ip("link", "add", port, "mtu", str(self.mtu), "type", "veth", "peer", "name", "fab0", "mtu",
                   str(self.mtu), "netns", name, namespace=self.leaf)  # fmt: skip
                ip("link", "set", port, "master", "br0", "up", namespace=self.leaf)
                ip("addr", "add", f"10.77.0.{10 + rank}/24", "dev", "fab0", namespace=name)
                ip("link", "set", "lo", "up", namespace=name)
                ip("link", "set", "fab0", "up", namespace=name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for name in (*self.namespaces, self.leaf):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def start(self, program: Path, rank: int, settings: dict[str, Any], *arguments: str) -> subprocess.Popen[str]:
        """`program RANK RANKS *arguments` in the rank's namespace; rank 0's address carries the c10d store."""
        own = {"interface": "fab0", "address": f"10.77.0.{10 + rank}", **settings}
        environment = {
            **os.environ, "FLOWCHECK_SOFTROCE": json.dumps(own), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1", "MASTER_ADDR": "10.77.0.10", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "fab0",
        }  # fmt: skip
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespaces[rank], sys.executable, "-P", str(program), str(rank),
             str(self.ranks), *arguments],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def run(self, program: Path, settings: dict[str, Any], *arguments: str, timeout: float = 120) -> list[str]:
        """`program` in every rank; their outputs. Fails with an output of a rank that failed."""
        started = [self.start(program, rank, settings, *arguments) for rank in range(self.ranks)]
        end = time.monotonic() + timeout
        outputs = [process.communicate(timeout=max(1.0, end - time.monotonic()))[0] for process in started]
        for rank, (process, output) in enumerate(zip(started, outputs, strict=True)):
            assert process.returncode == 0, f"rank {rank} ended with {process.returncode}:\n{output[-4000:]}"
        return outputs
