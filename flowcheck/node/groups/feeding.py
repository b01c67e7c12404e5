"""Gradients that rank 0 sends, on their way from its connection to the arenas of the job that is followed.

    feeding = Feeding(arenas, clock)
    feeding.wait(message, over)         until there is an arena for it; False: nobody wants it
    feeding.give(message, data)         bytes of a bucket
    feeding.withhold(message)           an iteration of which none come
    feeding.left()                      the connection has ended

Any thread. Iterations are counted as the trainer does.
"""

from __future__ import annotations

from collections.abc import Callable

from flowcheck.control.protocol import Fed, Unfed
from flowcheck.job.clock import Clock
from flowcheck.rebuild.iteration.fed_arenas import FedArenas

__all__ = ["Feeding"]


class Feeding:
    """arenas, clock: of a session."""

    def __init__(self, arenas: FedArenas, clock: Clock) -> None:
        self._arenas, self._clock = arenas, clock

    def wait(self, message: Fed, over: Callable[[], bool]) -> bool:
        """over: has the connection been closed?"""
        return self._arenas.wait(self._clock.iteration(message.iteration), over)

    def give(self, message: Fed, data: bytes | bytearray) -> None:
        """Raises UserError: these are not bytes of the job, or they are damaged."""
        self._arenas.give(self._clock.iteration(message.iteration), message.bucket, message.first, data, message.total,
                          message.sum)

    def withhold(self, message: Unfed) -> None:
        self._arenas.withhold(self._clock.iteration(message.iteration), message.why)

    def left(self) -> None:
        self._arenas.left("the connection that sent gradients has ended")
