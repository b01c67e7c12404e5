"""Software switches in network namespaces. Every namespace and interface begins with `fc`/`flowcheck`; what an
interrupted run left behind is cleared when the next one starts."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lab.network.ovs import listens

from ..links import wait_for_links

PREFIX = "flowcheck"
ETH_P_ALL = 3
HANG = 60.0  # seconds; longer than anything here takes on the slowest machine


def sh(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, (words, done.stderr)
    return done.stdout


def enter(namespace: int) -> None:
    """setns(2) for a network namespace; Python has it from 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0x40000000):
        raise OSError(ctypes.get_errno(), "setns")


@dataclass
class Bed:
    """Hosts a, b behind switch ports va, vb; a collector behind vm. All ends live in one namespace, so that frames
    are written to and read from the far ends by packet sockets."""

    netns: str
    mtu: int = 9000
    sockets: dict[str, socket.socket] = field(default_factory=dict)

    def ip(self, *words: str, check: bool = True) -> str:
        return sh("ip", "netns", "exec", self.netns, "ip", *words, check=check)

    def tc(self, *words: str, check: bool = True) -> str:
        return sh("ip", "netns", "exec", self.netns, "tc", *words, check=check)

    def cable(self, port: str, mtu: int | None = None) -> None:
        """A switch port and its far end <port>0."""
        size = str(mtu or self.mtu)
        self.ip("link", "add", port, "mtu", size, "type", "veth", "peer", "name", f"{port}0", "mtu", size)
        for end in (port, f"{port}0"):
            sh("ip", "netns", "exec", self.netns, "sysctl", "-qw", f"net.ipv6.conf.{end}.disable_ipv6=1", check=False)
            self.ip("link", "set", end, "up")
        wait_for_links(self.ip, port, f"{port}0")

    def socket(self, end: str) -> socket.socket:
        """Packet socket on a far end; opened inside the namespace, used from outside."""
        if end not in self.sockets:
            here = os.open("/proc/self/ns/net", os.O_RDONLY)
            there = os.open(f"/run/netns/{self.netns}", os.O_RDONLY)
            try:
                enter(there)
                opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # nothing before it is bound
                opened.bind((end, ETH_P_ALL))
            finally:
                enter(here)
                os.close(here)
                os.close(there)
            opened.setblocking(False)
            self.sockets[end] = opened
        return self.sockets[end]

    def drain(self, end: str) -> list[bytes]:
        frames = []
        while True:
            try:
                frame, (_, _, kind, *_) = self.socket(end).recvfrom(65536)
            except BlockingIOError:
                return frames
            if kind != socket.PACKET_OUTGOING:
                frames.append(frame)

    def send(self, count: int = 10, size: int = 4168, source: str = "va0", target: str = "vb0") -> list[bytes]:
        """RoCE-sized frames from one far end to the other; returns what the collector got. A switch copies a frame
        before or as it forwards it, so no more comes soon after the last one has arrived."""
        if "vm0" in self.links():
            self.socket("vm0")
        self.drain(target)
        mac = {end: bytes.fromhex(self.mac(end).replace(":", "")) for end in (source, target)}
        for number in range(count):
            head = mac[target] + mac[source] + b"\x88\xb5" + number.to_bytes(4, "big")
            self.socket(source).send(head + bytes(size - len(head)))
        end = time.monotonic() + HANG
        while (arrived := len(self.ours(target))) < count:
            assert time.monotonic() < end, f"{count} frames of {source} have not reached {target}"
            count -= arrived
            time.sleep(0.001)
        frames: list[bytes] = []
        quiet = time.monotonic() + 0.15
        while time.monotonic() < quiet:
            new = self.ours("vm0") if "vm0" in self.sockets else []
            if new:
                frames += new
                quiet = time.monotonic() + 0.15
            else:
                time.sleep(0.01)
        return frames

    def ours(self, end: str) -> list[bytes]:
        """Frames of `send` that have come to a far end."""
        return [frame for frame in self.drain(end) if frame[12:14] == b"\x88\xb5"]

    def mac(self, end: str) -> str:
        return self.ip("-br", "link", "show", end).split()[2]

    def links(self) -> set[str]:
        return {line.split()[0].partition("@")[0] for line in self.ip("-br", "link", "show").splitlines()}

    def close(self) -> None:
        for opened in self.sockets.values():
            opened.close()
        sh("ip", "netns", "del", self.netns, check=False)


def _why_not() -> str:
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("tc") or not shutil.which("ip"):
        return "iproute2 is not installed"
    return ""


def _clear() -> None:
    """What an interrupted run of a process that is gone has left."""
    for line in sh("ip", "netns", "list", check=False).splitlines():
        name = line.split()[0]
        owner = name.removeprefix(f"{PREFIX}-sw").partition("-")[0]
        if name.startswith(f"{PREFIX}-sw") and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            sh("ip", "netns", "del", name, check=False)


@pytest.fixture
def bed() -> Iterator[Bed]:
    if why := _why_not():
        pytest.skip(why)
    _clear()
    bed = Bed(f"{PREFIX}-sw{os.getpid()}-{time.monotonic_ns() % 10**6}")
    if subprocess.run(["ip", "netns", "add", bed.netns], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no network namespaces")
    try:
        bed.ip("link", "set", "lo", "up")
        for port in ("va", "vb", "vm"):
            bed.cable(port)
        yield bed
    finally:
        bed.close()


@pytest.fixture
def bridged(bed: Bed) -> Bed:
    """A Linux bridge over va and vb: the switch that tc mirrors on."""
    bed.ip("link", "add", f"{PREFIX}br", "type", "bridge", "mcast_snooping", "0")
    bridge = f"net.ipv6.conf.{PREFIX}br.disable_ipv6=1"
    sh("ip", "netns", "exec", bed.netns, "sysctl", "-qw", bridge, check=False)  # no frames of its own
    bed.ip("link", "set", f"{PREFIX}br", "mtu", str(bed.mtu), "up")
    for port in ("va", "vb"):
        bed.ip("link", "set", port, "master", f"{PREFIX}br")
    wait_for_links(bed.ip, "va", "vb", f"{PREFIX}br")
    return bed


@dataclass
class Ovs:
    bed: Bed
    rundir: Path

    def __call__(self, program: str, *words: str, check: bool = True) -> str:
        env = {**os.environ, "OVS_RUNDIR": str(self.rundir)}
        done = subprocess.run([program, *words], env=env, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, (program, words, done.stderr)
        return done.stdout


@pytest.fixture
def ovs(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ovs]:
    """ovsdb-server and ovs-vswitchd of their own, userspace datapath, inside the namespace."""
    if not shutil.which("ovs-vswitchd"):
        pytest.skip("Open vSwitch is not installed (Debian package openvswitch-switch)")
    run = tmp_path_factory.mktemp("ovs")
    env = {**os.environ, "OVS_RUNDIR": str(run), "OVS_LOGDIR": str(run), "OVS_DBDIR": str(run)}
    inside = ["ip", "netns", "exec", bed.netns]
    subprocess.run(["ovsdb-tool", "create", str(run / "conf.db")], env=env, check=True, capture_output=True)
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str, ready: Callable[[], bool]) -> None:
        with (run / "log").open("ab") as log:
            started.append(subprocess.Popen([*inside, *words], env=env, stdout=log, stderr=log))
        end = time.monotonic() + HANG
        while not ready():
            assert started[-1].poll() is None and time.monotonic() < end, (run / "log").read_text()[-2000:]
            time.sleep(0.02)

    control = Ovs(bed, run)
    try:
        db = run / "db.sock"
        start("ovsdb-server", str(run / "conf.db"), f"--remote=punix:{db}", f"--pidfile={run}/ovsdb-server.pid",
              ready=lambda: listens(db))
        control("ovs-vsctl", "--no-wait", "init")
        start("ovs-vswitchd", f"unix:{db}", f"--pidfile={run}/ovs-vswitchd.pid",
              ready=(run / "ovs-vswitchd.pid").exists)
        control("ovs-vsctl", "add-br", "br0", "--", "set", "bridge", "br0", "datapath_type=netdev")
        for port in ("va", "vb", "vm"):
            control("ovs-vsctl", "add-port", "br0", port)
        yield control
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(10)
