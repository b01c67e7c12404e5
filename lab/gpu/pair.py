"""A mirrored port and the node on it: where ranks' copies go, and what makes versions of them.

    with cable() as place, Node(place, out, python) as node: ...

In a network namespace of its own, where root may make one: a pair of interfaces, one end for the copies, the other one
the node's. Otherwise the machine's loopback, on which a packet socket sees every frame twice: NET_RAW is enough for it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from flowcheck.errors import EnvironmentProblem
from lab.network import netns

__all__ = ["Node", "Place", "cable"]

ROOT = Path(__file__).resolve().parents[2]
READY_SECONDS, END_SECONDS = 60.0, 20.0


@dataclass(frozen=True)
class Place:
    """prefix: before a command that runs there. send, capture: interfaces. why: no namespace, in words, or ""."""

    prefix: tuple[str, ...]
    send: str
    capture: str
    why: str = ""


@contextlib.contextmanager
def cable(name: str) -> Iterator[Place]:
    """Raises EnvironmentProblem where not even a packet socket is allowed."""
    try:
        netns.require()
    except EnvironmentProblem as problem:
        try:
            socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
        except OSError as error:
            raise EnvironmentProblem(
                f"{problem.what}; nor a packet socket: {error.strerror}", where="gpu-demo",
                remedy="run it as root; a container needs CAP_NET_RAW at least (docker run --cap-add NET_RAW)",
            ) from None
        yield Place((), "lo", "lo", problem.what)
        return
    space = f"flowcheck-gpu-{name}"
    if netns.exists(space):
        netns.delete(space)
    netns.add(space)
    try:
        netns.quiet(space)
        netns.batch(space, ["link add cable0 mtu 9000 type veth peer name mir0 mtu 9000", "link set cable0 up",
                            "link set mir0 up"])
        netns.plain(space, ["cable0", "mir0"])
        yield Place(tuple(netns.prefix(space)), "cable0", "mir0")
    finally:
        netns.delete(space)


class Node:
    """`flowcheck-node` on that port. hashes: a line for each version. address, token: for trainers. journal: it keeps
    one. api: for who recovers from it."""

    def __init__(self, place: Place, out: Path, journal: bool = False) -> None:
        self._place, self._out = place, out
        self.hashes, self.events, self.token = out / "node.jsonl", out / "events.jsonl", out / "token"
        self.address = f"127.0.0.1:{_free_port(place, 7070)}"
        self.api = f"127.0.0.1:{_free_port(place, 7071)}"
        self._more = (f'[api]\nlisten = "{self.api}"\n[journal]\ndirectory = "{out / "journal"}"\nmegabytes = 256\n'
                      if journal else "")

    def __enter__(self) -> Self:
        memory = self._out / "replica"
        memory.mkdir()
        self.token.write_text(secrets.token_hex(16) + "\n")
        self.token.chmod(0o600)
        toml = self._out / "node.toml"
        toml.write_text(
            f'name = "gpu"\n[control]\nlisten = "{self.address}"\ntoken_file = "{self.token}"\n'
            f'[capture]\ndevice = "af_packet:{self._place.capture}"\npath_mtu = 4096\nhuge = false\n'
            f'[replica]\ndirectory = "{memory}"\nkeep = false\nslots = 4\n'
            f'[output]\nkeep_hashes = "{self.hashes}"\n{self._more}'
        )
        with self.events.open("w") as said, (self._out / "node.log").open("w") as log:
            self._process = subprocess.Popen(
                [*self._place.prefix, sys.executable, "-P", "-m", "flowcheck.node", "--config", str(toml), "--json"],
                stdout=said, stderr=log, cwd=ROOT, env=dict(os.environ),
            )
        end = time.monotonic() + READY_SECONDS
        while '"listening"' not in self.events.read_text():
            if self._process.poll() is not None or time.monotonic() > end:
                self.__exit__(None, None, None)
                said_last = (self._out / "node.log").read_text().strip()[-600:]
                raise EnvironmentProblem(f"the node does not start: {said_last}", where="gpu-demo",
                                         remedy="flowcheck doctor says what the machine lacks")
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _free_port(place: Place, port: int) -> int:
    if place.prefix:
        return port  # nobody else is there
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
