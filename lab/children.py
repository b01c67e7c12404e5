"""Processes of a run that speak JSON lines: one thread each reads, one queue holds what all of them have said.

    children = Children()
    children.add("rank 0", popen, log)
    for name, event in children.events(until=..., seconds=...): ...

A process that ends before it was told to ends the run: the error names it and shows the end of its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from flowcheck.errors import EnvironmentProblem

__all__ = ["Children", "Cores", "Process"]

LOG_LINES = 12


class Cores:
    """trainers, and everything else; None where there is only one core to have."""

    def __init__(self) -> None:
        usable = sorted(os.sched_getaffinity(0))
        self.trainers: int | None = usable[0] if len(usable) > 1 else None
        self.rest: int | None = usable[1] if len(usable) > 1 else None


class Process(Protocol):
    """What is used of subprocess.Popen here."""

    pid: int
    stdin: IO[str] | None
    stdout: IO[str] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


@dataclass
class _Child:
    process: Process
    log: Path
    reader: threading.Thread
    may_end: bool = False
    ended: bool = False


class Children:
    """Used by one thread; reader threads only fill the queue."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[str, dict[str, Any] | None]] = queue.Queue()
        self._children: dict[str, _Child] = {}

    def add(self, name: str, process: Process, log: Path) -> None:
        reader = threading.Thread(target=self._read, args=(name, process), name=f"reads {name}", daemon=True)
        self._children[name] = _Child(process, log, reader)
        reader.start()

    def _read(self, name: str, process: Process) -> None:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # a library's own words; its log is stderr
                if isinstance(event, dict):
                    self._queue.put((name, event))
        except (OSError, ValueError):
            pass  # closed under us: the run is being taken down
        self._queue.put((name, None))

    def tell(self, name: str, order: dict[str, Any]) -> None:
        """One line to a process's stdin."""
        stdin = self._children[name].process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(order) + "\n")
            stdin.flush()
        except OSError:
            self._fail(name)

    def let_end(self, name: str, *, close: bool = False) -> None:
        """From now on its end is no failure. close: end its stdin, which asks it to."""
        child = self._children[name]
        child.may_end = True
        if close and child.process.stdin is not None:
            child.process.stdin.close()

    def wait(self, name: str, seconds: float) -> int:
        """Exit status. Raises EnvironmentProblem if it does not end."""
        try:
            status = self._children[name].process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise EnvironmentProblem(f"{name} does not end within {seconds:g} s", where="flowcheck lab",
                                     remedy=f"its log: {self._children[name].log}") from None
        self._children[name].reader.join(seconds)
        return status

    def kill(self, names: Iterable[str], seconds: float) -> None:
        """All that still run of these, at once. What they said is in the queue then."""
        killed = [name for name in names if name in self._children]
        for name in killed:
            self._children[name].may_end = True
            self._children[name].process.kill()
        for name in killed:
            self.wait(name, seconds)
            process = self._children[name].process
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(OSError):
                    stream.close()

    def process(self, name: str) -> Process:
        return self._children[name].process

    def events(self, until: Callable[[], bool], seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """What processes say, as long as `until` is false. Raises EnvironmentProblem when one is gone, or when nothing
        was said by anybody for `seconds`."""
        last = time.monotonic()
        while not until():
            try:
                name, event = self._queue.get(timeout=0.1)
            except queue.Empty:
                if time.monotonic() - last > seconds:
                    self._ask()
                    quiet = ", ".join(name for name, child in self._children.items() if not child.ended)
                    raise EnvironmentProblem(f"nothing was heard for {seconds:g} s from {quiet}",
                                             where="flowcheck lab", remedy=self._logs()) from None
                continue
            last = time.monotonic()
            if event is None:
                self._children[name].ended = True
                if not self._children[name].may_end:
                    self._fail(name)
                continue
            yield name, event

    def drain(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What was said and not read yet, without waiting."""
        while True:
            try:
                name, event = self._queue.get_nowait()
            except queue.Empty:
                return
            if event is not None:
                yield name, event

    def _fail(self, name: str) -> None:
        child = self._children[name]
        try:
            status: int | str = child.process.wait(5)
        except subprocess.TimeoutExpired:
            status = "unknown"
        said = child.log.read_text(errors="replace").splitlines()[-LOG_LINES:] if child.log.exists() else []
        raise EnvironmentProblem(
            f"{name} ended with status {status}" + "".join(f"\n    {line}" for line in said),
            where="flowcheck lab", remedy=f"the whole log: {child.log}",
        )

    def _ask(self) -> None:
        """Trainers write into their logs where they stand (faulthandler)."""
        for name, child in self._children.items():
            if not child.ended and name.startswith("rank"):
                child.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)

    def _logs(self) -> str:
        return "logs: " + ", ".join(str(child.log) for child in self._children.values())
