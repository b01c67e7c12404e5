"""Open vSwitch of a lab: ovsdb-server and ovs-vswitchd of its own, userspace datapath, inside the leaf's namespace.

No kernel module, no system service: database, sockets and log lie in the lab's state directory.

A port of the userspace datapath is a packet socket, and its buffer is the switch's: with the kernel's 208 KiB it loses
the end of every burst of more than some 30 large frames, each time anew when go-back-N repeats the burst. Switches of
RoCE networks lose nothing (PFC), so the ports get a buffer that holds what ranks may have under way.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flowcheck.errors import EnvironmentProblem
from flowcheck.interrupts import deferred
from lab.network import netns

__all__ = ["OpenVSwitch", "listens"]

START_SECONDS = 30.0
PORT_BUFFER = 32 << 20
PIDFD_GETFD = 438  # the same number on all architectures; Python has no function for it
SO_RCVBUFFORCE = 33


class OpenVSwitch:
    def __init__(self, rundir: Path, namespace: str, core: int | None, *, keep: bool) -> None:
        self.rundir, self._namespace, self._core, self._keep = rundir, namespace, core, keep
        self._started: list[subprocess.Popen[bytes]] = []
        self._env = {**os.environ, "OVS_RUNDIR": str(rundir), "OVS_LOGDIR": str(rundir), "OVS_DBDIR": str(rundir)}

    def start(self, bridge: str, ports: Sequence[str], mtu: int) -> None:
        """Daemons up, bridge made, ports added. Raises EnvironmentProblem with the log's last lines."""
        if shutil.which("ovs-vswitchd") is None:
            raise EnvironmentProblem("Open vSwitch is not installed", where="leaf switch",
                                     remedy="apt-get install openvswitch-switch, or take --switch tc")
        self.rundir.mkdir(parents=True)
        database = self.rundir / "db.sock"
        self._control("ovsdb-tool", "create", str(self.rundir / "conf.db"))
        self._daemon("ovsdb-server", str(self.rundir / "conf.db"), f"--remote=punix:{database}",
                     f"--pidfile={self.rundir}/ovsdb-server.pid", ready=lambda: listens(database))
        self._control("ovs-vsctl", "--no-wait", "init")
        self._daemon("ovs-vswitchd", f"unix:{database}", f"--pidfile={self.rundir}/ovs-vswitchd.pid",
                     ready=(self.rundir / "ovs-vswitchd.pid").exists)
        self._control("ovs-vsctl", "add-br", bridge, "--", "set", "bridge", bridge, "datapath_type=netdev")
        words = [word for port in ports for word in ("--", "add-port", bridge, port)]
        self._control("ovs-vsctl", *words[1:])
        self._control("ovs-vsctl", "set", "interface", bridge, f"mtu_request={mtu}")
        self._deepen(self._started[-1].pid, len(ports))

    def settle(self) -> None:
        """Until every flow does what the bridge says now. A purge passes over a flow that a thread is just looking at,
        and a round of such looks that ends may have begun before the change: so two rounds, half a second each."""
        for _ in range(2):
            self._control("ovs-appctl", "revalidator/wait")

    def check(self) -> None:
        """Raises EnvironmentProblem if one of its daemons has died."""
        for process in self._started:
            if (status := process.poll()) is not None:
                raise EnvironmentProblem(f"an Open vSwitch daemon has ended with status {status}", where="leaf switch",
                                         remedy="run again; --switch tc needs no daemons")

    def stop(self) -> None:
        for process in reversed(self._started):
            process.terminate()
        for process in self._started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        self._started.clear()

    def _deepen(self, pid: int, ports: int) -> None:
        """Force the receive buffers of the switch's packet sockets: the daemon has no setting for it."""
        found = 0
        with os.fdopen(os.pidfd_open(pid), "rb", buffering=0) as process:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                try:
                    if not os.readlink(entry).startswith("socket:"):
                        continue
                    number = _syscall(PIDFD_GETFD, process.fileno(), int(entry.name), 0)
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.EBADF):  # closed meanwhile: its threads go on
                        raise
                    continue
                # A copy: closing it leaves the switch's own. Without a family Python asks for an address, which some
                # sockets have not.
                with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0, fileno=number) as port:
                    if port.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) == socket.AF_PACKET:
                        port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, PORT_BUFFER)
                        found += 1
        if found < ports:
            raise EnvironmentProblem(f"{found} packet sockets for {ports} ports", where="leaf switch",
                                     remedy="take --switch tc: this Open vSwitch receives in another way")

    def _daemon(self, *words: str, ready: Callable[[], bool]) -> None:
        prefix = netns.prefix(self._namespace, self._core)
        with (self.rundir / "log").open("ab") as log, deferred():  # never running without being known
            process = subprocess.Popen([*(prefix[3:] if self._keep else prefix), *words], env=self._env, stdout=log,
                                       stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
            self._started.append(process)
        end = time.monotonic() + START_SECONDS
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                said = (self.rundir / "log").read_text(errors="replace")[-500:]
                raise EnvironmentProblem(f"{words[0]} did not start: {said}", where="leaf switch",
                                         remedy="take --switch tc, or see why it does not run here")
            time.sleep(0.01)

    def _control(self, *words: str) -> None:
        remedy, where = "see why Open vSwitch does not run here, or take --switch tc", " ".join(words[:4])
        end = time.monotonic() + START_SECONDS
        one: subprocess.Popen[str] | None = None
        try:
            with deferred():
                one = subprocess.Popen(words, env=self._env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                       text=True)
            while True:
                try:
                    said = one.communicate(timeout=0.2)[1]
                    break
                except subprocess.TimeoutExpired:
                    self.check()  # it would wait for a daemon that is gone
                    if time.monotonic() > end:
                        raise EnvironmentProblem(
                            f"no answer within {START_SECONDS:g} s", where=where, remedy=remedy
                        ) from None
        finally:
            if one is not None and one.returncode is None:
                one.kill()
                one.communicate()
        if one.returncode:
            raise EnvironmentProblem(" ".join(said.split()), where=where, remedy=remedy)


def listens(path: Path) -> bool:
    """Does somebody listen there? The file of a socket is there a moment before that."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(f"/proc/self/fd/{folder}/{path.name}")  # a path of its own may be too long for an address
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    finally:
        os.close(folder)
    return True


def _syscall(*arguments: int) -> int:
    result: int = ctypes.CDLL(None, use_errno=True).syscall(*map(ctypes.c_long, arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "pidfd_getfd")
    return result
