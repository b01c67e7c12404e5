"""Network namespaces and what is done inside them: a thin layer over iproute2 and three ioctls.

Every function takes the namespace's name. Nothing is ever created in the caller's own network namespace, so a lab
cannot disturb the machine, and deleting its namespaces deletes everything that was in them.

`inside()` runs a function in a thread of its own that has entered the namespace: the caller's threads stay where
they are. Processes are started with `prefix()`: they die with the thread that started them (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from flowcheck.errors import EnvironmentProblem
from flowcheck.interrupts import deferred

__all__ = [
    "add", "announce", "batch", "delete", "enter", "exists", "inside", "names", "only_switch", "plain", "prefix",
    "processes", "quiet", "require", "run",
]

RUN = Path("/run/netns")
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "setpriv": "util-linux",
            "taskset": "util-linux"}
SECONDS = 30.0
T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_SIOCETHTOOL = 0x8946
# ETHTOOL_S...: transmit checksum, TSO, GSO, GRO. A super-frame or an open checksum is nothing that a cable carries.
_OFFLOADS = (0x17, 0x1F, 0x24, 0x2C)


def require() -> None:
    """Raises EnvironmentProblem unless this process may make namespaces, in words that say what to do."""
    if os.geteuid() != 0:
        raise EnvironmentProblem(
            "the lab makes network namespaces and interfaces, and that needs root", where="flowcheck lab",
            remedy="run the same command as root, for example with sudo; everything it makes is removed again",
        )
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            raise EnvironmentProblem(f"{program} is not installed", remedy=f"apt-get install {package}")
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        raise EnvironmentProblem(
            f"this machine allows no network namespaces: {probe.stderr.strip()}", where="flowcheck lab",
            remedy="containers need CAP_SYS_ADMIN and CAP_NET_ADMIN (docker run --privileged)",
        )


def run(*words: str, text: str | None = None) -> str:
    """Output of a command. Raises EnvironmentProblem with what it said. An interrupt is heard when the command has
    ended: one that went on alone would create something after the clean-up had looked."""
    try:
        with deferred():
            done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=SECONDS, check=False)
    except FileNotFoundError:
        package = PROGRAMS.get(words[0], words[0])
        raise EnvironmentProblem(f"{words[0]} is not installed", remedy=f"apt-get install {package}") from None
    except subprocess.TimeoutExpired:
        raise EnvironmentProblem(f"no answer within {SECONDS:g} s", where=" ".join(words)) from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise EnvironmentProblem(said, where=" ".join(words), remedy="is this kernel built with veth and bridge?")
    return done.stdout


def names() -> list[str]:
    """All named namespaces of the machine."""
    try:
        return sorted(entry.name for entry in RUN.iterdir())
    except FileNotFoundError:
        return []


def exists(name: str) -> bool:
    return (RUN / name).exists()


def add(name: str) -> None:
    run("ip", "netns", "add", name)


def delete(name: str) -> None:
    """End what still runs inside, then remove the name. Returns when its processes are gone."""
    _end(processes(name))
    try:
        run("ip", "netns", "del", name)
    except EnvironmentProblem:
        if exists(name):  # a kill between creating the file and mounting leaves a plain file
            (RUN / name).unlink(missing_ok=True)


def kill(name: str) -> None:
    """kill -9, all that runs inside. Returns when it is gone."""
    _end(processes(name), ((9, 10.0),))


def processes(name: str) -> list[int]:
    """Processes whose main thread is in the namespace."""
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=SECONDS, check=False)
    return [int(word) for word in done.stdout.split()]


def _end(pids: Iterable[int], kills: Sequence[tuple[int, float]] = ((15, 2.0), (9, 10.0))) -> None:
    handles = []
    for pid in pids:
        try:
            handles.append((pid, os.pidfd_open(pid)))
        except ProcessLookupError:
            pass
    try:
        for kill, seconds in kills:
            for _, handle in handles:
                try:
                    signal.pidfd_send_signal(handle, kill)  # never hits a process that has taken over the number
                except ProcessLookupError:
                    pass
            left = [(pid, handle) for pid, handle in handles if not _gone(handle, seconds)]
            if not left:
                return
    finally:
        for _, handle in handles:
            os.close(handle)


def _gone(handle: int, seconds: float) -> bool:
    poll = select.poll()  # a pidfd is readable when the process has ended
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def batch(name: str, lines: Iterable[str]) -> None:
    """Lines of `ip -batch`, executed inside the namespace."""
    run("ip", "-n", name, "-batch", "-", text="\n".join(lines) + "\n")


def prefix(name: str, core: int | None = None) -> list[str]:
    """What stands before a command line that is to run inside: dies with its parent thread; on one core if given."""
    words = ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net={RUN / name}"]
    return words if core is None else [*words, "taskset", "-c", str(core)]


def enter(name: str) -> None:
    """This thread, and what it starts, for good. Raises OSError."""
    with (RUN / name).open("rb") as there:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(there.fileno(), _CLONE_NEWNET):  # os.setns exists from Python 3.12
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), name)


def inside(name: str, work: Callable[[], T]) -> T:
    """work() in a thread that has entered the namespace. Raises what it raises."""
    result: list[T] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            enter(name)
            result.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body, name=f"in {name}")
    with deferred():  # a thread left behind would hold the namespace
        thread.start()
        thread.join()
    if failure:
        raise failure[0]
    return result[0]


def quiet(name: str) -> None:
    """New interfaces of the namespace send nothing of their own: no IPv6, no neighbour discovery."""

    def work() -> None:
        for scope in ("all", "default"):
            try:
                Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6").write_text("1")
            except FileNotFoundError:
                pass  # a kernel without IPv6

    inside(name, work)
    batch(name, ["link set lo up"])


def announce(name: str, interface: str, mac: str, address: str) -> None:
    """A gratuitous ARP from an interface: the switch knows where it is, and floods nothing that is meant for it."""

    def work() -> None:
        source, ip = bytes.fromhex(mac.replace(":", "")), socket.inet_aton(address)
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sender:
            sender.bind((interface, 0))
            sender.send(b"\xff" * 6 + source + b"\x08\x06" + bytes.fromhex("0001080006040001") + source + ip
                        + bytes(6) + ip)

    inside(name, work)


def only_switch(name: str) -> None:
    """Bridges of the namespace look at Ethernet alone: br_netfilter would drop frames for what is inside them."""

    def work() -> None:
        for entry in Path("/proc/sys/net/bridge").glob("bridge-nf-call-*"):
            entry.write_text("0")

    inside(name, work)


def plain(name: str, interfaces: Iterable[str]) -> None:
    """Switch off what makes frames that no cable carries: checksum offload, TSO, GSO, GRO."""

    def work() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            for interface in interfaces:
                for command in _OFFLOADS:
                    value = array.array("B", struct.pack("II", command, 0))
                    address, _ = value.buffer_info()
                    request = struct.pack("16sP", interface.encode(), address)
                    try:
                        fcntl.ioctl(control, _SIOCETHTOOL, request)
                    except OSError as error:
                        if error.errno != errno.EOPNOTSUPP:
                            raise

    inside(name, work)
