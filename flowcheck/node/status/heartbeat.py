"""Signs of life of another process of the node, and how long it has had a processor without giving one.

    beat(counts)                       in that process: a line on standard output, never waits
    pulse = Pulse(pid)                 in the node's
    pulse.heard()                      a line has come
    pulse.look()                       again and again: why it hangs, "": it does not

A process that gives no sign is not one that hangs: on a busy machine it may wait for a processor. So only time counts
in which its threads could have run: not what one of them waited in a queue of the kernel's, and not what this process
itself was away (stopped, or the machine asleep). One that was stopped, that waits for a lock for ever or that turns in
a circle has all of the rest, and is known by it after SILENT_SECONDS.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ALIVE", "BEAT_SECONDS", "SILENT_SECONDS", "START_SECONDS", "Pulse", "beat", "silent_output"]

ALIVE = "alive"  # the event of such a line
BEAT_SECONDS = 0.5
CALM_SECONDS = 1.0  # nobody looks closer before that
SILENT_SECONDS = 5.0
START_SECONDS = 60.0  # until the first sign: what it imports may come from a slow disk
MOST_STEP = 0.5  # seconds of one look: who looks may have been away himself
STATES = {"T": "it is stopped", "t": "a debugger holds it", "D": "it waits for a disk", "R": "it turns in a circle",
          "Z": "it has ended"}


def beat(counts: Mapping[str, Any], file: int = 1) -> None:
    """Nothing where the pipe is full: there are signs enough in it."""
    try:
        os.write(file, json.dumps({"event": ALIVE, "name": "", **counts}).encode() + b"\n")
    except (BlockingIOError, BrokenPipeError):
        pass


def silent_output(file: int = 1) -> int:
    """A descriptor for signs of life, and standard output is nobody's from now on: a library that prints must not get
    between them. It never waits."""
    own = os.dup(file)
    os.set_blocking(own, False)
    nobody = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nobody, file)
    os.close(nobody)
    return own


@dataclass(frozen=True)
class _Thread:
    """state: as ps shows it. ran, waited: seconds on a processor, and in a queue for one."""

    state: str
    ran: float
    waited: float


class Pulse:
    """pid: of the process. now: a clock that never goes back. proc: where the kernel tells of processes."""

    def __init__(self, pid: int, now: Callable[[], float] = time.monotonic, proc: Path = Path("/proc")) -> None:
        self._folder, self._now = proc / str(pid) / "task", now
        self._main, self._most = str(pid), START_SECONDS
        self._heard = self._looked = now()
        self._silent = 0.0  # seconds in which it could have run
        self._threads: dict[str, _Thread] = {}

    def heard(self, beats: bool = True) -> None:
        """beats: it was a sign of life, after which more are expected; else it said something."""
        self._heard = self._looked = self._now()
        self._silent, self._threads = 0.0, {}
        if beats:
            self._most = SILENT_SECONDS

    def look(self) -> str:
        now = self._now()
        if now - self._heard < CALM_SECONDS:
            return ""
        passed, self._looked = min(now - self._looked, MOST_STEP), now
        before, self._threads = self._threads, self._read()
        for name, thread in self._threads.items():
            last = before.get(name, thread)
            if thread.state == "R" and thread.ran == last.ran:
                passed = 0.0  # it wants to run, and does not; the others may wait for it
            passed -= max(0.0, thread.waited - last.waited)
        self._silent += max(0.0, passed)
        if self._silent < self._most:
            return ""
        main = self._threads.get(self._main)
        state = STATES.get(main.state, "it waits") if main is not None else "it is not there"
        return f"no sign of life for {self._silent:.0f} s in which it could have run; {state}"

    def _read(self) -> dict[str, _Thread]:
        found = {}
        try:
            names = os.listdir(self._folder)
        except OSError:
            return {}
        for name in names:
            try:
                state = (self._folder / name / "stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, IndexError):
                continue  # it has ended
            try:
                ran, waited, *_ = map(int, (self._folder / name / "schedstat").read_text().split())
            except (OSError, ValueError):  # this kernel does not say: then all time counts but that of who wants to run
                ran = waited = 0
            found[name] = _Thread(state, ran / 1e9, waited / 1e9)
        return found
