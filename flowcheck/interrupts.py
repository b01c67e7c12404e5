"""Signals that end a process: who hears them for a while, blocks that they wait for, and a start that they end in
silence; and a reader of the output that has gone, of which SIGPIPE would tell."""

import atexit
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["READER_GONE", "Heard", "command", "deferred", "handled", "unread"]

READER_GONE = 128 + signal.SIGPIPE  # what a shell says of a command that a closed pipe has ended
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handled(handler: Callable[[int, Any], Any], *numbers: signal.Signals) -> Iterator[None]:
    """Inside the block these signals go to `handler` (signal.default_int_handler: as Ctrl-C does). Main thread only."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def deferred() -> Iterator[None]:
    """An interrupt inside the block is heard after it; a second one is heard at once.

    For what has to be whole: a process that is started and noted, a command that creates something. Without it an
    exception may come after the process has been forked and before anybody knows of it. Other threads than the main
    one are never interrupted. Signals that no Python handler hears stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {one: old for one in ENDING if callable(old := signal.getsignal(one))}
    came: list[int] = []
    waiting = True

    def wait(number: int, frame: Any) -> None:
        if waiting and not came:
            came.append(number)
        else:
            before[number](number, frame)

    try:
        for number in before:
            signal.signal(number, wait)
        yield
    finally:
        waiting = False  # from here on `wait` passes everything on: an exception below loses no signal
        for number, old in before.items():
            signal.signal(number, old)
        if came:
            before[came[0]](came[0], None)


class Heard:
    """Notes that Ctrl-C came, and lets it do what it did. interrupted: it came since this was made. Main thread."""

    def __init__(self) -> None:
        self.interrupted = False
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, or somebody else's
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.interrupted = True
        signal.default_int_handler(number, frame)


@contextmanager
def unread() -> Iterator[None]:
    """Where whoever reads the block's output has gone, the process ends with READER_GONE. What it did is done: its
    report comes last."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        pass
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):  # typer and rich make an exit with status 1 of it
            raise
    else:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # what is still buffered has no reader either
        os.dup2(nowhere, stream.fileno())
    sys.exit(READER_GONE)


def command(module: str) -> None:
    """main() of a module. Ctrl-C while it is being imported ends the process, too, without a traceback."""
    atexit.register(gc.freeze)  # the end of Python would look through all of torch for garbage, half a second long
    try:
        main = importlib.import_module(module).main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
