"""Signals that end a process: who hears them for a while, and a start that they end in silence."""

import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["command", "handled"]


@contextmanager
def handled(handler: Callable[[int, Any], Any], *numbers: signal.Signals) -> Iterator[None]:
    """Inside the block these signals go to `handler` (signal.default_int_handler: as Ctrl-C does). Main thread only."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def command(module: str) -> None:
    """main() of a module. Ctrl-C while it is being imported ends the process, too, without a traceback."""
    try:
        main = importlib.import_module(module).main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
