"""A process that gets only a part of its core's time: stopped and continued in turns, all its threads together.

    with Share([process.pid], 0.1):        10 ms of every 100 ms
        ...

What a too small machine does to a node, in every stage at once: receiving, placing, updating, control. Needs no cgroup.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from typing import Self

__all__ = ["PERIOD", "Share"]

PERIOD = 0.02  # seconds: short, so that the kernel's rings outlast a stop


class Share:
    """groups: process groups, by their leaders' ids. share: of the time, above 0 and below 1. One that has ended
    meanwhile is left alone."""

    def __init__(self, groups: Sequence[int], share: float) -> None:
        assert 0 < share < 1
        self._groups, self._share = tuple(groups), share
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._turns, name="lab share", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _turns(self) -> None:
        try:
            while not self._end.is_set():
                self._send(signal.SIGSTOP)
                self._end.wait(PERIOD * (1 - self._share))
                self._send(signal.SIGCONT)
                self._end.wait(PERIOD * self._share)
        finally:
            self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)
