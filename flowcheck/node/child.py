"""Another process of the node: started, read, watched and ended by it, and never waited for.

    class Storing(Beside): ...                     module: what is run; _tell: what becomes of what it says
    storing.look()                                 again and again: says what it did, starts it again if it has ended
    storing.close()                                a few seconds at most, whatever it does

    settings, say = begun(), Lines()               in the process itself: first of all

stdin: one line of JSON, its settings, because those may have a key in them; lines that follow are orders. It ends when
stdin does. stdout: events, a line of JSON each, signs of life among them: one that hangs is killed and started again
(status/heartbeat.py). It shares files with the node and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from flowcheck.errors import of_the_machine
from flowcheck.node.allocator import keep_little
from flowcheck.node.status.heartbeat import ALIVE, BEAT_SECONDS, Pulse

__all__ = ["PROCESSES", "Beside", "Lines", "arrived", "begun", "ended", "guarded", "let_go", "start", "write_line"]

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0  # seconds between two starts
END_SECONDS = 6.0
PROCESSES = {  # modules that are run, and what metrics and events call them
    "flowcheck.node.api.worker": "api", "flowcheck.node.protect.worker": "copier",
    "flowcheck.node.store.worker": "persisting",
}
MOST_LINE = 1 << 16
NICE = 5


class Beside:
    """module: that is run. what: it does, in words. say: events. Belongs to the node's main thread."""

    def __init__(self, module: str, what: str, settings: Mapping[str, Any], say: Callable[..., None]) -> None:
        self._module, self._what, self._settings, self._say = module, what, dict(settings), say
        self._name = PROCESSES.get(module, module.rpartition(".")[2])
        self._pause, self._began, self._text = FIRST_PAUSE, time.monotonic(), b""
        self._process: subprocess.Popen[bytes] | None = None
        self._left: list[subprocess.Popen[bytes]] = []  # killed, and not gone: the kernel waits for a file system
        self._refused = False  # the kernel would not start it, which was said
        self._down = False  # that it is not there was said, and not that it is again
        self._pulse: Pulse | None = None
        self._start()

    def look(self) -> None:
        """Never waits."""
        self._left = [one for one in self._left if one.poll() is None]
        process = self._process
        if process is None:
            if time.monotonic() - self._began >= self._pause:
                self._start()
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
            return
        self._read(process)
        if (status := process.poll()) is not None:
            self._read(process)
            let_go(process)
            self._process, self._text, self._down = None, b"", True
            self._say("problem", process=self._name, cause="ended", why="the process that"
                      f" {self._what} {ended(status)}; it is started anew in {self._pause:g} s")
            self._began = time.monotonic()
        elif self._pulse is not None and (why := self._pulse.look()):
            process.kill()
            self._left.append(process)
            let_go(process)
            self._process, self._text, self._down = None, b"", True
            self._say("problem", process=self._name, cause="hung", why="the process that"
                      f" {self._what} hangs: {why}; it was killed, and is started anew in {self._pause:g} s")
            self._began = time.monotonic()

    def _start(self) -> None:
        """Too little memory, too many processes or files, a program that was moved: the node goes on without it."""
        self._began = time.monotonic()
        try:
            self._process = start(self._module, self._settings)
            self._pulse = Pulse(self._process.pid)
        except OSError as error:
            self._down = True
            if not self._refused:
                self._say("problem", why=f"the process that {self._what} cannot be started:"
                          f" {error.strerror or error}; it is tried again and again", about=self._name)
            self._refused = True
        else:
            self._refused = False

    def order(self, line: Mapping[str, Any]) -> None:
        """Send it something new, which is sent once more when it is started again."""
        self._settings |= line
        if self._process is not None:
            write_line(self._process, line)

    def well(self) -> None:
        """It did what it is there for: if it ends, it is started again soon."""
        self._pause = FIRST_PAUSE

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        while pieces := arrived(process, self._text):
            *lines, self._text = pieces
            for line in lines:
                try:
                    said = json.loads(line)
                    event = said["event"], said["name"]
                except (ValueError, KeyError, TypeError):
                    continue  # of a library that prints
                if self._pulse is not None:
                    self._pulse.heard(event[0] == ALIVE)
                if self._down:
                    self._say("solved", about=self._name)
                    self._down = False
                if event[0] == ALIVE:
                    continue
                self._tell(*event, said)

    def _tell(self, event: str, name: str, said: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """What is nearly done is waited for; what hangs is not. May be called twice."""
        process, self._process = self._process, None
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


def start(module: str, settings: Mapping[str, Any], blocking: bool = False) -> subprocess.Popen[bytes]:
    """The process, which has its settings. Raises OSError: it cannot be started."""
    process = subprocess.Popen(  # a session of its own: Ctrl-C is for the node, which ends it
        [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
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


def write_line(process: subprocess.Popen[bytes], line: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(line).encode() + b"\n")
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


def begun() -> dict[str, Any]:
    """Its settings, and from here on it gives way to the node's threads. Empty: the node ended before it said any."""
    keep_little()
    settings: dict[str, Any] = json.loads(sys.stdin.buffer.readline() or b"{}")
    if settings:
        os.nice(NICE)
        if settings["cores"]:
            os.sched_setaffinity(0, settings["cores"])
    return settings


def guarded(main: Callable[[], int]) -> int:
    """Its status. Where the machine has too little of something that is said in one line, and no fault of ours."""
    try:
        return main()
    except Exception as error:
        if (machine := of_the_machine(error, where=sys.argv[0])) is None:
            raise
        print(machine.message(), file=sys.stderr, flush=True)
        return machine.exit_code


class Lines:
    """Events on standard output, and signs of life. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def live(self) -> None:
        """Signs of life from now on."""
        threading.Thread(target=self._live, name="flowcheck signs of life", daemon=True).start()

    def _live(self) -> None:
        while True:
            self(ALIVE, name="")
            time.sleep(BEAT_SECONDS)

    def __call__(self, event: str, **fields: Any) -> None:
        with self._lock:
            try:
                print(json.dumps({"event": event, **fields}), flush=True)
            except BrokenPipeError:
                os._exit(0)  # the node has ended
