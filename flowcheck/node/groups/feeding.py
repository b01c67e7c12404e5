"""Gradients that ranks send, on their way from their connections to the arenas of the job that is followed.

    feeding = Feeding(arenas, clock)
    feeding.wait(rank, message, over)   until there is an arena for it; False: nobody wants it
    feeding.give(rank, message, data)   bytes of a bucket
    feeding.withhold(rank, message)     an iteration of which none come
    feeding.left(rank)                  its connection has ended

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

    def wait(self, rank: int, message: Fed | Unfed, over: Callable[[], bool]) -> bool:
        """over: has the connection been closed? Raises UserError: nothing is to come from this rank."""
        return self._arenas.wait(rank, self._clock.iteration(message.iteration), over)

    def give(self, rank: int, message: Fed, data: bytes | bytearray) -> None:
        """Raises UserError: these are not bytes that come from this rank, or they are damaged."""
        self._arenas.give(rank, self._clock.iteration(message.iteration), message.bucket, message.first, data,
                          message.total, message.sum)

    def withhold(self, rank: int, message: Unfed) -> None:
        self._arenas.withhold(rank, self._clock.iteration(message.iteration), message.why)

    def left(self, rank: int) -> None:
        self._arenas.left(rank, f"the connection of rank {rank} has ended")
