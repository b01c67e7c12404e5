"""Impaired cables: what is asked for, the process that does it (impairer.pyx), and its log for tests to compare with.

    Impairment("r0", drop=0.01)                      1 % of what passes rank 0's cable, each way
    Impairment("mirror0", drop=0.001, trace=True)    only the copies; every packet that passed is in the log too
    impairer.set_down("mirror0", True)               nothing passes any more, until set False
    impairer.events() -> [Event(...)]                after `stop`, or while it runs as far as it is written

Decisions come from a seed, packet by packet in the order of arrival. Only RoCEv2 is touched.
This module is also the process: python -P -m lab.network.impair SETTINGS.json (started by Fabric in the leaf's
namespace; prints one line when it carries, and one with its counters when it ends).
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowcheck.errors import EnvironmentProblem, InternalError, UserError

__all__ = ["Impairer", "Event", "Impairment", "Wire", "read_log"]

WHAT = ("passed", "dropped", "doubled", "moved", "damaged", "down")
RECORD = struct.Struct("<QIIIIHHBBBB")
STOP_SECONDS = 10.0
START_SECONDS = 30.0


@dataclass(frozen=True)
class Impairment:
    """One cable. port: "r2" or "mirror0". way: to the switch, from it, or both. Rates from 0 to 1 per packet.

    distance: packets that overtake a moved one. trace: packets that pass untouched are logged as well.
    """

    port: str
    way: Literal["to", "from", "both"] = "both"
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    distance: int = 3
    seed: int = 1
    trace: bool = False

    def __post_init__(self) -> None:
        for name in ("drop", "duplicate", "reorder", "corrupt"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{getattr(self, name)} is not a probability", where=f"impairment {self.port}, {name}",
                                remedy="a number from 0 to 1")
        if not 1 <= self.distance <= 1000:
            raise UserError(f"{self.distance} packets", where=f"impairment {self.port}, distance",
                            remedy="from 1 to 1000")


@dataclass(frozen=True)
class Wire:
    """The loose ends of a cut cable: `far` towards the rank or node, `near` towards the switch."""

    port: str
    far: str
    near: str


@dataclass(frozen=True)
class Event:
    """What happened to one packet. at, bit: what was damaged in the frame; at: by how many a moved one is overtaken."""

    ns: int
    port: str
    way: str
    what: str
    src: str
    dst: str
    qpn: int
    psn: int
    opcode: int
    length: int
    at: int
    bit: int


class Impairer:
    """The process in the leaf's namespace, one for all cut cables."""

    def __init__(
        self, wires: Sequence[Wire], impairments: Sequence[Impairment], directory: Path,
        spawn: Callable[..., subprocess.Popen[str]],
    ) -> None:
        self.directory, self._spawn = directory, spawn
        self.log = directory / "impairer.log"
        self._switches = directory / "impairer.down"
        self._process: subprocess.Popen[str] | None = None
        self._records = b""
        self.counters: list[dict[str, Any]] = []
        self.ways = [way for wire in wires for way in _ways(wire, impairments)]

    def start(self) -> None:
        settings = self.directory / "impairer.json"
        self._switches.write_bytes(bytes(len(self.ways)))
        settings.write_text(json.dumps({"ways": self.ways, "log": str(self.log), "down": str(self._switches)}))
        command = [sys.executable, "-P", "-m", "lab.network.impair", str(settings)]
        self._process = self._spawn("leaf", command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        if json.loads(self._process.stdout.readline() or "{}").get("event") != "ready":
            raise InternalError("the impairer did not start", where="lab.network.impair",
                                remedy="its message is above")

    def set_down(self, port: str, down: bool) -> None:
        """Cut or restore both ways of a cable at once; takes effect with the next packet."""
        indices = [index for index, way in enumerate(self.ways) if way["port"] == port]
        if not indices:
            raise UserError(f"the cable of {port} is not impaired", remedy="configure an Impairment for it")
        with self._switches.open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
            for index in indices:
                shared[index] = int(down)

    def check(self) -> None:
        """Raises EnvironmentProblem if it has died: nothing passes its cables then."""
        if self._process is not None and (status := self._process.poll()) is not None:
            raise EnvironmentProblem(f"the impairer has ended with status {status}; its cables are cut",
                                     where="flowcheck lab", remedy="run again")

    def stop(self) -> None:
        """End it and keep its log in memory: the directory goes with the lab."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            said, _ = process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        for line in said.splitlines():
            self.counters = json.loads(line).get("counters", self.counters)
        self._records = self.log.read_bytes() if self.log.exists() else b""

    def events(self) -> list[Event]:
        """The log so far. After `stop` it is whole."""
        raw = self._records or (self.log.read_bytes() if self.log.exists() else b"")
        return read_log(raw, self.ways)


def _ways(wire: Wire, impairments: Sequence[Impairment]) -> list[dict[str, Any]]:
    out = []
    for way, source, target in (("to", wire.far, wire.near), ("from", wire.near, wire.far)):
        mine = [one for one in impairments if one.port == wire.port and one.way in (way, "both")]
        if len(mine) > 1:
            raise UserError(f"two impairments for one way of {wire.port}", remedy="put the rates into one")
        rates = dataclasses.asdict(mine[0] if mine else Impairment(wire.port))
        seed = rates["seed"] * 2 + (way == "from")
        out.append({**rates, "way": way, "source": source, "target": target, "seed": seed})
    return out


def read_log(raw: bytes, ways: Sequence[dict[str, Any]]) -> list[Event]:
    """Records of include/impairer.h; a half-written one at the end is left out."""
    out = []
    for record in RECORD.iter_unpack(raw[: len(raw) // RECORD.size * RECORD.size]):
        ns, src, dst, qpn, psn, length, at, opcode, what, way, bit = record
        out.append(Event(ns, ways[way]["port"], ways[way]["way"], WHAT[what], _address(src), _address(dst), qpn, psn,
                         opcode, length, at, bit))
    return out


def _address(number: int) -> str:
    return socket.inet_ntoa(number.to_bytes(4, "big"))


def main(settings_path: str) -> int:
    """The process. Ends on SIGTERM."""
    try:
        from lab.network.impairer import carry
    except ImportError as error:
        raise EnvironmentProblem(f"the lab's C code is not built: {error}", remedy="make build") from None
    settings = json.loads(Path(settings_path).read_text())
    log = os.open(settings["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    with open(settings["down"], "r+b") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as down:
        with memoryview(down) as switches:
            counters = carry(settings["ways"], log, switches, lambda: print('{"event": "ready"}', flush=True))
    named = [{"port": way["port"], "way": way["way"], **counts}
             for way, counts in zip(settings["ways"], counters, strict=True)]
    print(json.dumps({"event": "end", "counters": named}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
