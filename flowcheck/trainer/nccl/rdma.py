"""Queue pairs of this process as the kernel knows them, and the addresses of its ports.

    queue_pairs(pid)            asks the kernel (netlink) through the tool `rdma` of iproute2
    parse_rdma(text)            what `rdma -j resource show qp` or `rdma resource show qp` prints (rdma/res-qp.c)
    addresses()                 GIDs of RoCE v2 ports, from /sys/class/infiniband

A queue pair's number is its own and its peer's; the peer's address is not said, so two hosts' lists are joined by both
numbers, and that may fit more than once: what belongs together is decided on the wire. Other processes' queue pairs are
listed without their peer's number or not at all, by who asks. torch is not needed; the standard library only.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any, NoReturn

from flowcheck.errors import EnvironmentProblem, UserError

__all__ = ["Gid", "KernelQueuePair", "addresses", "parse_rdma", "queue_pairs"]

COMMAND = ("rdma", "-j", "resource", "show", "qp")
SECONDS = 10.0
TEXT_MAX = 64 << 20
SYSFS = Path("/sys/class/infiniband")
STATES = ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")
_WORDS = {"lqpn", "rqpn", "type", "subtype", "state", "rq-psn", "sq-psn", "path-mig-state", "pdn", "pid", "comm"}
_NUMBERS = ("lqpn", "rqpn", "pid")


@dataclass(frozen=True)
class KernelQueuePair:
    """device, port: the kernel's name and number. number, peer: its own and its peer's, peer 0 if not said. kind: "RC"
    and others. state: "RTS" where it can send. process: pid, 0 of the kernel's own. sends_from: PSN of what it sends
    next, -1 if not said."""

    device: str
    port: int
    number: int
    peer: int
    kind: str
    state: str
    process: int

    @property
    def connected(self) -> bool:
        return self.kind == "RC" and self.state == "RTS" and self.peer > 0


@dataclass(frozen=True)
class Gid:
    """One entry of a port's table: address as RoCE v2 packets carry it."""

    device: str
    port: int
    index: int
    address: str


def queue_pairs(pid: int, command: Sequence[str] = COMMAND) -> list[KernelQueuePair]:
    """The connected RC queue pairs of a process. Raises EnvironmentProblem if the tool is missing or fails, UserError
    for an answer that cannot be."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentProblem(f"cannot ask for queue pairs: {error}", where=" ".join(command),
                                 remedy="apt install iproute2") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()[:200] or f"status {done.returncode}"
        raise EnvironmentProblem(said, where=" ".join(command), remedy="a kernel with RDMA, and its devices in here")
    return [one for one in parse_rdma(done.stdout) if one.process == pid and one.connected]


def parse_rdma(text: str | bytes) -> list[KernelQueuePair]:
    """Every queue pair of the tool's output, in JSON or as words. Raises UserError, naming the entry, for what cannot
    be: a field that is missing or no number, one queue pair twice."""
    if len(text) > TEXT_MAX:
        _refuse(f"has {len(text)} bytes, more than {TEXT_MAX}")
    words = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    if "\0" in words:
        _refuse("has a zero byte")
    entries = _of_json(words) if words.lstrip().startswith("[") else _of_words(words)
    found: dict[tuple[str, int], KernelQueuePair] = {}
    for number, entry in enumerate(entries):
        one = _entry(number, entry)
        if one.kind == "RC" and found.setdefault((one.device, one.number), one) != one:
            _refuse(f"entry {number} has queue pair {one.number} of {one.device} once more, and otherwise")
        found.setdefault((one.device, one.number), one)  # numbers 0 and 1 are there once for each port
    return list(found.values())


def _refuse(what: str) -> NoReturn:
    raise UserError(what, where="rdma resource show qp", remedy="the whole output of `rdma -j resource show qp`")


def _of_json(text: str) -> list[Any]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(f"is not JSON: {str(error)[:120]}")
    if not isinstance(entries, list):
        _refuse("is not a list")
    return entries


def _of_words(text: str) -> list[Any]:
    """link mlx5_0/1 lqpn 1289 rqpn 1290 type RC state RTS rq-psn 0 sq-psn 5 pid 4711 comm python3"""
    entries = []
    for number, line in enumerate(text.splitlines()):
        words = line.split()
        if not words:
            continue
        device, slash, port = words[1].partition("/") if words[0] == "link" and len(words) > 1 else ("", "", "")
        if not slash:
            _refuse(f"line {number} is {line[:60]!r}, which names no link")
        entry: dict[str, Any] = {"ifname": device, "port": port}
        rest = iter(words[2:])
        for word in rest:
            if word not in _WORDS:
                break  # what drivers add, and names of programs with spaces
            entry[word] = next(rest, "")
        entries.append(entry)
    return entries


def _entry(number: int, entry: object) -> KernelQueuePair:
    if not isinstance(entry, Mapping):
        _refuse(f"entry {number} is not an object")
    values = {}
    for key, otherwise in (("port", "0"), ("lqpn", None), ("rqpn", 0), ("pid", 0)):
        value = entry.get(key, otherwise)
        if key == "port" and value in ("-", "0"):
            value = 0
        if isinstance(value, str) and re.fullmatch(r"\d{1,10}", value, re.ASCII):
            value = int(value)
        if type(value) is not int or not 0 <= value < (1 << 24 if key.endswith("qpn") else 1 << 31):
            _refuse(f"entry {number} has {key} as {repr(value)[:40]}")
        values[key] = value
    device, kind, state = (entry.get(key) for key in ("ifname", "type", "state"))
    if not isinstance(device, str) or not re.fullmatch(r"[\w.+-]{1,64}", device, re.ASCII):
        _refuse(f"entry {number} has ifname as {repr(device)[:40]}")
    if not isinstance(kind, str) or state not in (*STATES, "UNKNOWN"):
        _refuse(f"entry {number} has type {repr(kind)[:40]} and state {repr(state)[:40]}")
    assert isinstance(state, str)
    return KernelQueuePair(device, values["port"], values["lqpn"], values["rqpn"], kind, state, values["pid"])


def addresses(root: Path = SYSFS) -> list[Gid]:
    """RoCE v2 entries of the GID tables of all ports; [] without an RDMA device. Entries that are not set, or
    cannot be read, are left out."""
    found = []
    for entry in sorted(root.glob("*/ports/*/gids/*")):
        port = entry.parents[1]
        try:
            kind = (port / "gid_attrs" / "types" / entry.name).read_text().strip()
            address = IPv6Address(entry.read_text().strip())
        except (OSError, ValueError):
            continue
        if kind == "RoCE v2" and int(address):
            found.append(Gid(port.parents[1].name, int(port.name), int(entry.name),
                             str(address.ipv4_mapped or address)))
    return found
