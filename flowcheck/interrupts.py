"""Signals that end a process: who hears them for a while, blocks that they wait for, and a start that they end in
silence."""

import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Heard", "command", "deferred", "handled"]

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


def command(module: str) -> None:
    """main() of a module. Ctrl-C while it is being imported ends the process, too, without a traceback."""
    try:
        main = importlib.import_module(module).main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
