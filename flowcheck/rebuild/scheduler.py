"""Several captures into one engine: who may read on, and when an iteration closes.

    Streams.run(close)           a replay: until every capture has ended
    Streams.poll(), advance(close)   one look at the rings, and whatever may close: the live node's loop

A stream is blocked when its next packet belongs to an iteration that has no arena yet. The oldest
iteration closes as soon as every stream is past it (or ended) and nothing of it is missing; an iteration
with gaps stays open for late packets until its arena is needed: then every stream is past it, ended, or
blocked itself. Iterations that no stream saw anything of, because the mirror was down, close one by one too; after
a very long outage all but the last of them are skipped. A stream that is ahead waits for the others, so the
slowest can always go on and nothing dead-locks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from parser.machine import Engine

from flowcheck.errors import UserError

__all__ = ["IDLE_SECONDS", "Source", "StreamState", "Streams"]

BATCH = 2048
OPENING = 32  # packets at a time, until the first iteration has begun
UNSEEN = 1000  # iterations without a packet that are still judged one by one
IDLE_SECONDS = 0.0005  # between two looks at empty rings, while the rx threads work

StreamState = Literal["past", "ended", "lost", "behind"]


class Source(Protocol):
    """What feeds a stream: the ring of a file or of a live queue."""

    @property
    def ring_address(self) -> int: ...
    @property
    def error(self) -> Exception | None: ...


class Streams:
    """sources[i] feeds stream i of the engine. All sources were started by the caller.

    full: asked before an early close: is everything of this iteration there? skipped(first, last): told of
    iterations that passed unseen and will not be closed. hold: asked when an iteration could close: must it wait for
    something that does not come over the wire? Then streams may block, and their sources fill up.
    """

    def __init__(
        self, engine: Engine, sources: Sequence[Source], full: Callable[[int], bool],
        skipped: Callable[[int, int], None], hold: Callable[[int], bool] = lambda iteration: False,
    ) -> None:
        self._engine, self._sources, self._full, self._skipped = engine, sources, full, skipped
        self._hold = hold
        self._known = 0  # disagreements
        self._whole = -1  # the newest iteration that every stream has passed and of which nothing is missing
        self._ended = [False] * len(sources)
        self._blocked = [False] * len(sources)
        self.consumed = 0

    def run(self, close: Callable[[int], bool], progress: Callable[[int], None]) -> None:
        """Drive until all streams have ended or `close` says False.

        close(iteration): called once per iteration in order, when it closes; returns whether to go on.
        The engine's arena is retired after it. progress(packets) is called now and then.
        Raises UserError when a source did not deliver what its file promised.
        """
        self._open(progress)
        while not all(self._ended):
            moved = self.poll()
            progress(self.consumed)
            closed, go_on = self.advance(close)
            if not go_on:
                return
            if not moved and not closed:
                time.sleep(IDLE_SECONDS)
        self._engine.finish()
        while self._engine.oldest <= self._engine.begun:
            if not self._close_oldest(close):
                return

    def _open(self, progress: Callable[[int], None]) -> None:
        """See whether connections begin here; then read in the order of time until the first iteration has begun.

        Where captures begin in mid-stream, the packet that is read first says which iteration is the first: it must
        not be one of the capture that began last, nor, where none does, one that overtook others on its way."""
        engine = self._engine
        for source in self._sources:
            while engine.look_ahead(source.ring_address) is None:
                time.sleep(IDLE_SECONDS)
        while len(self._sources) > 1 and engine.begun < 0 and not any(self._blocked):
            heads = {}
            for i, source in enumerate(self._sources):
                if not self._ended[i]:
                    heads[i] = engine.next_ns(source.ring_address)
                    if heads[i] is None and engine.drained(source.ring_address):
                        del heads[i]
                        self._end(i)
            if not heads:
                return
            if None in heads.values():
                time.sleep(IDLE_SECONDS)
                continue
            first = min(heads, key=heads.__getitem__)
            done, self._blocked[first] = engine.run(first, self._sources[first].ring_address, OPENING)
            self.consumed += done
            progress(self.consumed)

    def poll(self) -> bool:
        """Take what is in the rings, a batch of each. True if anything moved."""
        moved = False
        for i, source in enumerate(self._sources):
            if self._ended[i]:
                continue
            done, self._blocked[i] = self._engine.run(i, source.ring_address, BATCH)
            moved |= done > 0
            self.consumed += done
            if self._engine.drained(source.ring_address):
                self._end(i)
                moved = True
        if self._engine.disagreed > self._known:
            self._known = self._engine.disagreed
            self._engine.consider_recovery()
        return moved

    def advance(self, close: Callable[[int], bool]) -> tuple[bool, bool]:
        """Close what may close. (anything closed, go on)."""
        closed = False
        while self._may_close():
            closed = True
            if not self._close_oldest(close):
                return closed, False
        return closed, True

    @property
    def blocked(self) -> bool:
        """Does any stream wait for an arena?"""
        return any(self._blocked)

    def state(self, stream: int, iteration: int) -> StreamState:
        """Where a stream stands with respect to an iteration that is closing."""
        if self._ended[stream]:
            return "ended"
        if self._engine.past(stream) > iteration:
            return "past"
        # its own later packets wait for an arena: what is missing of this iteration will not come
        return "lost" if self._blocked[stream] else "behind"

    def _end(self, stream: int) -> None:
        self._ended[stream] = True
        error = self._sources[stream].error
        if error is not None:
            raise UserError(str(error))

    def _may_close(self) -> bool:
        oldest = self._engine.oldest
        if oldest > self._engine.begun and not any(self._blocked):
            return False
        past = [self._ended[i] or self._engine.past(i) > oldest for i in range(len(self._sources))]
        if self._whole != oldest and all(past) and not all(self._ended) and self._full(oldest):
            self._whole = oldest
        forced = any(self._blocked) and all(p or b for p, b in zip(past, self._blocked, strict=True))
        return (self._whole == oldest or forced) and not self._hold(oldest)

    def _close_oldest(self, close: Callable[[int], bool]) -> bool:
        oldest = self._engine.oldest
        if oldest > self._engine.begun and any(self._blocked):
            wanted = min(self._engine.wanted(i) for i, blocked in enumerate(self._blocked) if blocked)
            unseen = wanted - self._engine.config.arenas - oldest
            if unseen > UNSEEN:
                self._skipped(oldest, oldest + unseen - 1)
                self._engine.retire(unseen)
                return True
        go_on = close(oldest)
        self._engine.retire()
        self._blocked = [False] * len(self._sources)
        return go_on
