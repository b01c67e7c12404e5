"""Labs for tests: names of their own per process and test, so that several runs do not meet; skips say why."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.network import netns
from lab.network.fabric import Fabric, clear, leftovers
from lab.shape import FabricConfig
from tests.namespaces import need_namespaces

_numbers = itertools.count()


def clear_killed_runs() -> None:
    """Remove the labs of test runs that were killed."""
    for lab in leftovers():
        match = re.fullmatch(r"[ts]([0-9a-f]+)(n\d+b?)?", lab.name)  # s: softroce's tests
        if match and lab.owner is None and not os.path.exists(f"/proc/{int(match[1], 16)}"):
            clear(lab.name)


@pytest.fixture(scope="session", autouse=True)
def cleared() -> None:
    clear_killed_runs()


@contextmanager
def named() -> Iterator[str]:
    """A name that nobody else has. Whatever of it is left at the end is removed."""
    need_namespaces()
    name = f"t{os.getpid():x}n{next(_numbers)}"
    try:
        yield name
    finally:
        clear(name)


@pytest.fixture
def lab_name() -> Iterator[str]:
    with named() as name:
        yield name


@contextmanager
def lab_of(**config: Any) -> Iterator[Fabric]:
    """A fabric for longer than one test."""
    with named() as name, Fabric(FabricConfig(name=name, **config)) as fabric:
        yield fabric


@pytest.fixture
def fabric(lab_name: str) -> Iterator[Callable[..., Fabric]]:
    """fabric(**config) -> a Fabric that is up; taken down after the test."""
    made: list[Fabric] = []

    def build(**config: object) -> Fabric:
        made.append(Fabric(FabricConfig(name=lab_name, **config)))  # type: ignore[arg-type]
        made[-1].up()
        return made[-1]

    yield build
    for one in made:
        one.down()


@pytest.fixture
def ip_that(tmp_path: Path) -> Callable[[str, str], str]:
    """ip_that("netns add *-r0", "kill -TERM $PPID") -> PATH with an `ip` that first runs a line of shell when its
    arguments are like this pattern. $PPID is who has called it."""

    def make(pattern: str, line: str) -> str:
        folder = tmp_path / "ip that"
        folder.mkdir()
        script = folder / "ip"
        like = pattern.replace(" ", "\\ ")
        script.write_text(f'#!/bin/sh\ncase "$*" in {like}) {line};; esac\nexec {shutil.which("ip")} "$@"\n')
        script.chmod(0o755)
        return f"{folder}:{os.environ['PATH']}"

    return make


class Tap:
    """A packet socket on an interface of a namespace: sends frames and hears what arrives."""

    def __init__(self, namespace: str, interface: str) -> None:
        def work() -> socket.socket:
            opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # nothing before it is bound
            opened.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
            opened.bind((interface, 3))
            return opened

        self._socket = netns.inside(namespace, work)

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, frame: bytes) -> None:
        self._socket.send(frame)

    def roce(self, count: int, quiet: float = 0.5) -> list[bytes]:
        """RoCE frames that arrived: all until `count` are there and no more comes, or none has come for `quiet` s."""
        frames: list[bytes] = []
        end = time.monotonic() + quiet
        while time.monotonic() < end:
            try:
                frame, (_, _, kind, *_) = self._socket.recvfrom(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                time.sleep(0.002)
                continue
            if kind != socket.PACKET_OUTGOING and frame[36:38] == b"\x12\xb7":
                frames.append(frame)
                end = time.monotonic() + (quiet if len(frames) < count else 0.05)
        return frames


def roce_frame(source: int, target: int, psn: int, size: int = 4158) -> bytes:
    """A RoCEv2 frame from rank to rank, opcode RDMA WRITE MIDDLE, QP 17; a leaf looks neither at the ICRC nor
    at the IP header's checksum."""
    body = struct.pack(">BBHII", 7, 0, 0xFFFF, 17, psn) + bytes(size - 54)
    udp = struct.pack(">HHHH", 49152, 4791, 8 + len(body), 0) + body
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0, bytes([10, 77, 0, 10 + source]),
                     bytes([10, 77, 0, 10 + target]))
    mac = bytes([2, 0xFC, 0, 0, 0])
    return mac + bytes([10 + target]) + mac + bytes([10 + source]) + b"\x08\x00" + ip + udp


def psn_of(frame: bytes) -> int:
    return int.from_bytes(frame[51:54], "big")
