"""Bringing a replacement: the operator's command, and the word for what is left if none of the copies is.

    operator = Operator(command, "my cluster", say)
    operator.ask(number, member)            has the command succeeded for this loss? Never waits
    operator.close()

The command gets a member that is lost in its environment, and is to see to it that another one comes. It may be started
again for the same loss, by another root or after it has failed, always with the same FLOWCHECK_RECOVERY.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from flowcheck.node.protect.placement import Member

__all__ = ["Operator"]

SECONDS = 1800.0  # that a command may take
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0  # before it is tried again


class _Try:
    """process: None: none runs. done: it has succeeded. again: when it is tried again. ends: when it is killed."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.done, self.pause, self.again, self.ends = False, FIRST_PAUSE, 0.0, 0.0


class Operator:
    """command: a program and its arguments. cluster: what it learns of that. say: events. now: seconds. One thread."""

    def __init__(
        self, command: Sequence[str], cluster: str, say: Callable[..., None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._command, self._cluster, self._say, self._now = list(command), cluster, say, now
        self._tries: dict[tuple[int, str], _Try] = {}

    def ask(self, number: int, member: Member) -> bool:
        """number: of the recovery. Starts the command for a member, unless that was done, and looks how it goes."""
        one = self._tries.setdefault((number, member.site.name), _Try())
        if not one.done and one.process is None and self._now() >= one.again:
            self._start(one, number, member)
        elif one.process is not None:
            self._look(one, one.process, member)
        return one.done

    def _start(self, one: _Try, number: int, member: Member) -> None:
        site = member.site
        told = {"LOST": site.name, "ADDRESS": member.address, "HOST": site.host, "LEAF": site.leaf, "RACK": site.rack,
                "FOLLOWS": str(int(member.follows)), "RECOVERY": str(number), "CLUSTER": self._cluster}
        try:
            one.process = subprocess.Popen(  # its output must not mix with ours, which the node reads
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | {f"FLOWCHECK_{key}": value for key, value in told.items()},
            )
        except OSError as error:
            self._failed(one, member, f"cannot be started: {error.strerror}")
            return
        one.ends = self._now() + SECONDS
        self._say("replacing", lost=site.name, recovery=number)

    def _look(self, one: _Try, process: subprocess.Popen[bytes], member: Member) -> None:
        status = process.poll()
        if status is None and self._now() < one.ends:
            return
        if status is None:
            _kill(process)
        one.process = None
        if status == 0:
            one.done = True
        else:
            self._failed(one, member, f"has not ended after {SECONDS:g} s" if status is None else
                         f"ended with status {status}")

    def _failed(self, one: _Try, member: Member, why: str) -> None:
        self._say("problem", why=f"protect.replace, {self._command[0]!r} for {member.site.name}: {why}; it is tried"
                  f" again in {one.pause:g} s")
        one.again, one.pause = self._now() + one.pause, min(2 * one.pause, LONGEST_PAUSE)

    def close(self) -> None:
        """Commands that run are ended: another root starts them again. May be called twice."""
        for one in self._tries.values():
            if one.process is not None:
                _kill(one.process)
                one.process = None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """It, and what it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
