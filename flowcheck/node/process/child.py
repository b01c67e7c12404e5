"""A process of the node's own: started, read, watched and ended by it, and never waited for.

    child = ChildProcess(PROGRAM, settings, say)   a lasting one (children.py): api, protect, store
    child.look()                                   again and again: says what it did, starts it again if it has ended
    child.order(order)                             other settings from now on, also when it is started again
    child.close()                                  a few seconds at most, whatever it does

    process = start(module, settings)              a short one, watched by whoever started it

    settings, say = begun(StoreSettings), Lines(EVENTS)       in the process itself: first of all
    for order in orders(NewKeys): ...                         until the node ends

stdin: its settings, because those may have a key in them; lines that follow are orders. It ends when stdin does.
stdout: events, signs of life among them: one that hangs is killed and started again (status/heartbeat.py). What the
lines are: lines.py. It shares files with the node and nothing else.
"""

from __future__ import annotations

import atexit
import gc
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from flowcheck.errors import of_the_machine
from flowcheck.node.allocator import keep_little
from flowcheck.node.process.lines import Event, Line, Order, Settings, SettingsT, read_event
from flowcheck.node.status.heartbeat import ALIVE, BEAT_SECONDS, Pulse

__all__ = ["ChildProcess", "Lines", "Program", "begun", "guarded", "orders", "start"]

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0  # seconds between two starts
AGAIN_SECONDS = 5.0  # of one that is needed at once: from a start to the next
END_SECONDS = 6.0
MOST_LINE = 1 << 16
NICE = 5


class Alive(Event):
    """known, strangers, ended, turned_away: of a process with connections, as of http_door.Door.counts."""

    kind = ALIVE
    known: int | None = None
    strangers: int | None = None
    ended: int | None = None
    turned_away: int | None = None


@dataclass(frozen=True)
class Program:
    """module: that is run. name: what metrics and events call it. does: in words. events: that it says, by kind.
    needed: somebody waits for it, so it is started again at once, if it was not started a moment ago."""

    module: str
    name: str
    does: str
    events: Mapping[str, type[Event]]
    needed: bool = False


class ChildProcess:
    """say: events. files: descriptors that it has, too. counts: that it gave with its newest sign of life. Belongs to
    the node's main thread."""

    def __init__(
        self, program: Program, settings: Settings, say: Callable[..., None], files: Sequence[int] = ()
    ) -> None:
        self._program, self._settings, self._say, self._files = program, settings, say, files
        self._events: dict[str, type[Event]] = {**program.events, ALIVE: Alive}
        self._pause, self._text = FIRST_PAUSE, b""
        self._began = self._due = 0.0  # when it was started, and is to be
        self.process: subprocess.Popen[bytes] | None = None
        self._left: list[subprocess.Popen[bytes]] = []  # killed, and not gone: the kernel waits for a file system
        self._refused = False  # the kernel would not start it, which was said
        self._down = False  # that it is not there was said, and not that it is again
        self._pulse: Pulse | None = None
        self.counts: dict[str, int] = {}
        self._start()

    def look(self) -> None:
        """Never waits."""
        self._left = [one for one in self._left if one.poll() is None]
        process = self.process
        if process is not None:
            self._read(process)
            if (status := process.poll()) is not None:
                self._read(process)
                self._lose(process, "ended", f"{ended(status)}; it is")
            elif self._pulse is not None and (why := self._pulse.look()):
                process.kill()
                self._left.append(process)
                self._lose(process, "hung", f"hangs: {why}; it was killed, and is")
        if self.process is None and time.monotonic() >= self._due:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._start()

    def _lose(self, process: subprocess.Popen[bytes], cause: str, how: str) -> None:
        let_go(process)
        self.process, self._text, self._down, self.counts = None, b"", True, {}
        now, when = time.monotonic(), f" in {self._pause:g} s"
        self._due = now + self._pause
        if self._program.needed:
            self._due, when = max(now, self._began + AGAIN_SECONDS), ""
        self._say("problem", process=self._program.name, cause=cause,
                  why=f"the process that {self._program.does} {how} started anew{when}")

    def _start(self) -> None:
        """Too little memory, too many processes or files, a program that was moved: the node goes on without it."""
        self._began = time.monotonic()
        try:
            self.process = start(self._program.module, self._settings, self._files)
            self._pulse = Pulse(self.process.pid)
        except OSError as error:
            self._down, self._due = True, self._began + (AGAIN_SECONDS if self._program.needed else self._pause)
            if not self._refused:
                self._say("problem", why=f"the process that {self._program.does} cannot be started:"
                          f" {error.strerror or error}; it is tried again and again", about=self._program.name)
            self._refused = True
        else:
            self._refused = False

    def order(self, order: Order) -> None:
        self._settings = order.on(self._settings)
        if self.process is not None:
            write_line(self.process, order)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        while pieces := arrived(process, self._text):
            *lines, self._text = pieces
            for line in lines:
                if (event := read_event(self._events, line)) is not None:
                    self._hear(event)

    def _hear(self, event: Event) -> None:
        if self._pulse is not None:
            self._pulse.heard(isinstance(event, Alive))
        if self._down:
            self._say("solved", about=self._program.name)
            self._down = False
        if isinstance(event, Alive):
            self.counts = event.model_dump(exclude_none=True)
            return
        if event.well:
            self._pause = FIRST_PAUSE
        self._say(event.kind, **event.model_dump())

    def close(self) -> None:
        """What is nearly done is waited for; what hangs is not. May be called twice."""
        process, self.process, self._due = self.process, None, math.inf
        if process is None:
            return
        assert process.stdin is not None
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass
        end = time.monotonic() + END_SECONDS
        while process.poll() is None and time.monotonic() < end:
            self._read(process)
            time.sleep(0.02)
        self._read(process)
        if process.poll() is None:
            process.kill()
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                self._left.append(process)  # in the kernel, for a file system that hangs: it ends when that answers
        let_go(process)


def ended(status: int) -> str:
    """How it ended, in words."""
    why = ", for want of memory or the like, as it said on standard error" if status == 3 else ""
    return f"ended with status {status}{why}"


def start(
    module: str, settings: Settings, files: Sequence[int] = (), blocking: bool = False
) -> subprocess.Popen[bytes]:
    """The process, which has its settings. files: descriptors that it has, too. Raises OSError: there cannot be one."""
    process = subprocess.Popen(  # a session of its own: Ctrl-C is for the node, which ends it
        [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=files,
        start_new_session=True,
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), blocking)
    write_line(process, settings)
    return process


def arrived(process: subprocess.Popen[bytes], begun: bytes) -> list[bytes]:
    """Whole lines that a process has written, and behind them what has come of the next one; []: nothing has come. Its
    standard output does not block. begun: what had come of a line before."""
    assert process.stdout is not None
    try:
        piece = os.read(process.stdout.fileno(), MOST_LINE)
    except BlockingIOError:
        return []
    return (begun + piece).split(b"\n") if piece else []


def write_line(process: subprocess.Popen[bytes], line: Line) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(line.encoded())
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended, which `look` will see


def let_go(process: subprocess.Popen[bytes]) -> None:
    """Close both pipes: it ends when its standard input does."""
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:
            pass


# -- in the process itself ------------------------------------------------------------------------------------------

OrderT = TypeVar("OrderT", bound=Order)


def begun(model: type[SettingsT]) -> SettingsT | None:
    """Its settings, and from here on it gives way to the node's threads. None: the node ended before it said any."""
    keep_little()
    line = sys.stdin.buffer.readline()
    if not line:
        return None
    settings = model.model_validate_json(line)
    os.nice(NICE)
    if settings.cores:
        os.sched_setaffinity(0, settings.cores)
    return settings


def orders(model: type[OrderT]) -> Iterator[OrderT]:
    """Until the node ends, or closes the pipe."""
    while line := sys.stdin.buffer.readline():
        yield model.model_validate_json(line)


def guarded(main: Callable[[], int]) -> int:
    """Its status. Where the machine has too little of something that is said in one line, and no fault of ours."""
    atexit.register(gc.freeze)  # as a command's (flowcheck/interrupts.py)
    try:
        return main()
    except Exception as error:
        if (machine := of_the_machine(error, where=sys.argv[0])) is None:
            raise
        print(machine.message(), file=sys.stderr, flush=True)
        return machine.exit_code


class Lines:
    """Events on standard output, and signs of life. events: that it may say, by kind. Any thread."""

    def __init__(self, events: Mapping[str, type[Event]]) -> None:
        self._events: dict[str, type[Event]] = {**events, ALIVE: Alive}
        self._lock = threading.Lock()

    def live(self) -> None:
        """Signs of life from now on."""
        threading.Thread(target=self._live, name="flowcheck signs of life", daemon=True).start()

    def _live(self) -> None:
        while True:
            self(ALIVE)
            time.sleep(BEAT_SECONDS)

    def __call__(self, kind: str, **fields: Any) -> None:
        """Raises ValueError: that event has other fields, which is a fault of ours."""
        event = self._events[kind].model_validate(fields)
        with self._lock:
            try:
                print(json.dumps({"event": kind, **event.model_dump(mode="json")}), flush=True)
            except BrokenPipeError:
                os._exit(0)  # the node has ended
