"""Trainers forked from one process that has loaded torch: alone, each of them takes three seconds to load it.

    with Starter() as starter:
        process = starter.start(["--rank", "0", ...], namespace=..., core=0, env={...}, stderr=log)
        process.stdin, process.stdout, process.pid, process.poll(), process.wait(60), process.kill()

A trainer is a process of its own, with its own session, namespace, core, environment and descriptors. The one that it
is forked from has no other threads and does nothing but load, fork and say how they ended; it dies with the thread that
made it, and the trainers with it. Python's `random` begins anew in each; hashes of texts are alike in all.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, Self

from flowcheck.errors import EnvironmentProblem
from flowcheck.interrupts import deferred
from lab.network import netns

__all__ = ["Started", "Starter"]

LOAD_SECONDS = 120.0  # torch, on a core that others use too
_PR_SET_PDEATHSIG = 1
_STATUS = struct.Struct("i")


class Started:
    """A trainer, as subprocess.Popen shows a process."""

    def __init__(self, pid: int, status: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid = pid
        self.stdin: IO[str] | None = stdin
        self.stdout: IO[str] | None = stdout
        self.returncode: int | None = None
        self._status = status  # readable when it has ended
        self._process = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("lab.trainer", timeout or 0)
        return status

    def _look(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._status, select.POLLIN)
            if poll.poll(None if seconds is None else seconds * 1000):
                said = os.read(self._status, _STATUS.size)
                os.close(self._status)
                self.returncode = _STATUS.unpack(said)[0] if said else self._gone()
                os.close(self._process)
        return self.returncode

    def _gone(self) -> int:
        """Killed with the one that forked it, a moment later."""
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        poll.poll()
        return -signal.SIGKILL

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Starter:
    """Used by one thread. env: what has to be set before torch is loaded."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.settimeout(LOAD_SECONDS)
        self._loaded = False
        with theirs, deferred():
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", sys.executable, "-P", "-m", "lab.starter",
                 str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, start_new_session=True, env={**os.environ, **env},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Trainers that still run are killed."""
        self._process.kill()
        self._process.wait()
        self._orders.close()

    def start(
        self, arguments: Sequence[str], *, namespace: str, core: int | None, env: Mapping[str, str], stderr: IO[Any]
    ) -> Started:
        """A trainer (trainer.py) in a network namespace. Raises EnvironmentProblem."""
        if not self._loaded:
            self._hear()
            self._loaded = True
        order = {"arguments": list(arguments), "namespace": namespace, "core": core, "env": dict(env)}
        (orders, stdin), (stdout, words), (status, ended) = os.pipe(), os.pipe(), os.pipe()
        theirs = [orders, words, stderr.fileno(), ended]
        try:
            with deferred():  # never running without being known
                pid = int(self._hear([json.dumps(order).encode()], theirs))
        except BaseException:
            for one in (stdin, stdout, status):
                os.close(one)
            raise
        finally:
            for one in (orders, words, ended):
                os.close(one)
        return Started(pid, status, os.fdopen(stdin, "w"), os.fdopen(stdout))

    def _hear(self, order: Sequence[bytes] = (), theirs: Sequence[int] = ()) -> bytes:
        """What comes, in answer to an order if there is one."""
        why: object = "it has ended"
        try:
            if order:
                socket.send_fds(self._orders, order, theirs)
            if said := self._orders.recv(64):
                return said
        except OSError as error:
            why = error
        raise EnvironmentProblem(f"nothing comes from the process that trainers are forked from: {why}",
                                 where="flowcheck lab", remedy="python -c 'import lab.trainer' says why")


# -- in the process that is forked ---------------------------------------------------------------------------


def _serve(orders: socket.socket) -> list[str]:
    """Fork until nobody is left who asks. Returns in a trainer, with its arguments."""
    ended: dict[int, int] = {}  # pid -> where its status goes
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    poll = select.poll()
    for one in (orders.fileno(), woken):
        poll.register(one, select.POLLIN)
    orders.send(b"loaded")
    while True:
        ready = {one for one, _ in poll.poll()}
        if orders.fileno() in ready:
            text, descriptors, _, _ = socket.recv_fds(orders, 1 << 16, 4)
            if not text:
                raise SystemExit(0)
            parent, order = os.getpid(), json.loads(text)
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for one in (woken, wake, orders.detach(), descriptors[3], *ended.values()):
                    os.close(one)
                _become(parent, order, descriptors[:3])
                arguments: list[str] = order["arguments"]
                return arguments
            ended[pid] = descriptors[3]
            for one in descriptors[:3]:
                os.close(one)
            orders.send(str(pid).encode())
        if woken in ready:
            os.read(woken, 512)
        # The status is told before the process is reaped: who has not heard it may signal the number.
        while ended and (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            killed = found.si_code != os.CLD_EXITED
            with contextlib.suppress(BrokenPipeError):
                os.write(ended[found.si_pid], _STATUS.pack(-found.si_status if killed else found.si_status))
            os.close(ended.pop(found.si_pid))
            os.waitpid(found.si_pid, 0)


def _become(parent: int, order: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """What setpriv, nsenter, taskset and a shell would have made of this process."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number, one in enumerate(descriptors):
        os.dup2(one, number)
        os.close(one)
    netns.enter(order["namespace"])
    if order["core"] is not None:
        os.sched_setaffinity(0, {order["core"]})
    os.environ.update(order["env"])


def main() -> int:
    trainer: Any = importlib.import_module("lab.trainer")
    importlib.import_module("torch._dynamo")  # DistributedDataParallel loads it when it is made
    gc.freeze()  # or each trainer looks through all of torch for garbage, in pages that it then has for itself
    status: int = trainer.main(_serve(socket.socket(fileno=int(sys.argv[1]))))
    return status


if __name__ == "__main__":
    ended = main()
    sys.stdout.flush()
    os._exit(ended)  # gloo's threads may abort a process that ends in order (pytorch#190489)
