"""Several captures into one engine: who may read on, and which iteration may close.

    scheduler.poll()              one look at the rings
    scheduler.due()               what may close now; whoever judges it decides when it does
    scheduler.close(due)          nothing is placed into it any more
    scheduler.retire(due)         it was judged: its arena is free

A stream is blocked when its next packet belongs to an iteration that has no arena yet. The oldest
iteration may close as soon as every stream is past it (or ended) and nothing of it is missing. One with gaps
stays open for late packets until none can come any more (holes.py), or its arena is needed: then every stream is
past it, ended, or blocked itself. Iterations that are given up (version/overload.py) take no arena: nothing waits for
them, and one closes when every stream is past it, or so far ahead that it would be blocked otherwise. Iterations that
no stream saw anything of, because the mirror was down, close one by one too; after a very long outage all but the last
of them are skipped. A stream that is ahead waits for the others, so the slowest can always go on and nothing
dead-locks. A live stream that has brought no data of the job holds nothing up: its port, or its queue, may be for
other jobs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from parser.machine import NOTHING_SEEN, Engine
from parser.placers import Seat

from flowcheck.errors import UserError
from flowcheck.rebuild.iteration.holes import Finality, HoleWatch

__all__ = ["IDLE_SECONDS", "ArenaScheduler", "Source", "StreamState"]

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


class ArenaScheduler:
    """sources[i] feeds stream i of the engine. All sources were started by the caller.

    cells: how many cells iteration 0 brings, and every later one; with all of them an iteration is complete.
    holes: what knows whether missing packets still come; None: they may, until the arena is needed.
    in_order: the sources are captures that begin anywhere and can wait. Until the first iteration has begun they are
    read in the order of their times.
    """

    def __init__(
        self, engine: Engine, sources: Sequence[Source], cells: tuple[int, int], *, in_order: bool = False,
        holes: HoleWatch | None = None,
    ) -> None:
        self._engine, self._sources, self._cells, self._holes = engine, sources, cells, holes
        self._seat: Seat | None = None
        self._in_order = self._opening = in_order
        self._looked = 0  # sources of which the beginning was looked at
        self._known = 0  # disagreements
        self._whole = -1  # the newest iteration that every stream has passed and of which nothing is missing
        self._final: tuple[int, Finality] = (-1, "")  # by which sign nothing more of an iteration comes
        self._ended = [False] * len(sources)
        self._blocked = [False] * len(sources)
        self._taken = [0] * len(sources)  # by the placing threads, of the job's packets
        self._gone_by = [0] * len(sources)  # packets of the rings that they are past, of whatever job
        self._highest = self.fullest = (0, 1)  # (packets that wait in a ring, its room): the most, and the most now
        self.room = 0  # of all rings
        self.consumed = 0

    # -- the rings --

    def poll(self) -> bool:
        """Take what is in the rings, a batch of each. True if anything moved.

        Raises UserError when a source did not deliver what its file promised."""
        if self._opening:
            return self._open()
        moved, self.fullest, self.room = False, (0, 1), 0
        for i, source in enumerate(self._sources):
            if self._ended[i]:
                continue
            if self._seat is not None:
                moved |= self._ask(i, self._seat)
            else:
                self._note_fill(*self._engine.waiting(source.ring_address))
                follows = self._in_order and self._engine.past(i) == NOTHING_SEEN
                moved |= self._follow(i) if follows else self._read(i, BATCH)
            if self._engine.drained(source.ring_address) if self._seat is None else self._seat.drained(i):
                self._end(i)
                moved = True
        if self._engine.disagreed > self._known:
            self._known = self._engine.disagreed
            self._engine.consider_recovery()
        return moved

    def _open(self) -> bool:
        """See whether connections begin here; then read in the order of time until the first iteration has begun.

        Where captures begin in mid-stream, the packet that is read first says which iteration is the first: it must
        not be one of the capture that began last, nor, where none does, one that overtook others on its way."""
        engine, sources = self._engine, self._sources
        while self._looked < len(sources):
            if engine.look_ahead(sources[self._looked].ring_address) is None:
                return False
            self._looked += 1
        if len(sources) == 1 or engine.begun >= 0 or any(self._blocked) or self.ended:
            self._opening = False
            return self.poll()
        heads = {}
        for i, source in enumerate(sources):
            if not self._ended[i]:
                heads[i] = engine.next_ns(source.ring_address)
                if heads[i] is None and engine.drained(source.ring_address):
                    del heads[i]
                    self._end(i)
        if None in heads.values():
            return False
        if heads:
            self._read(min(heads, key=heads.__getitem__), OPENING)
        return True

    def _follow(self, stream: int) -> bool:
        """Read a capture without data of the job as far as the others are. It may hold clear-to-sends, which say where
        others are as long as they are of the same time; and no arena ever makes it wait."""
        moved = False
        for _ in range(BATCH // OPENING):
            if self._leads(stream) or not self._read(stream, OPENING):
                break
            moved = True
        return moved

    def _leads(self, stream: int) -> bool:
        """Is there a capture with data that can go on and is not as far?"""
        engine, mine = self._engine, self._engine.next_ns(self._sources[stream].ring_address)
        for i, source in enumerate(self._sources):
            if mine is not None and not (self._ended[i] or self._blocked[i] or engine.past(i) == NOTHING_SEEN):
                its = engine.next_ns(source.ring_address)
                if its is None or its < mine:
                    return True
        return False

    def _read(self, stream: int, most: int) -> bool:
        done, self._blocked[stream] = self._engine.run(stream, self._sources[stream].ring_address, most)
        self.consumed += done
        return done > 0

    def _ask(self, stream: int, seat: Seat) -> bool:
        """What its thread has done since the last look. A packet that was blocked may have its arena by now."""
        done, blocked = seat.look(stream)
        self._blocked[stream] = (
            blocked and self._engine.wanted(stream) >= self._engine.oldest + self._engine.config.arenas
        )
        moved = done != self._taken[stream]
        self._taken[stream] = done
        gone_by, waiting, room = seat.ring(stream)
        self.consumed += gone_by - self._gone_by[stream]
        self._gone_by[stream] = gone_by
        self._note_fill(waiting, room)
        return moved

    def _note_fill(self, waiting: int, room: int) -> None:
        self.room += room
        self.fullest = max(self.fullest, (waiting, room), key=_share)
        self._highest = max(self._highest, self.fullest, key=_share)

    @property
    def by_threads(self) -> bool:
        """Do threads read the rings?"""
        return self._seat is not None

    @property
    def fill(self) -> float:
        """Part of the fullest ring that waited at the last look."""
        return _share(self.fullest)

    def take_highest(self) -> tuple[int, int]:
        """The most packets that waited in a ring at any look since this was asked last, and its room."""
        highest, self._highest = self._highest, self.fullest
        return highest

    def leave_to(self, seat: Seat | None) -> None:
        """Threads read the rings from now on, until the next call. None: whoever looks does."""
        if self._seat is not None:
            self._seat.leave()
        self._seat = seat
        if seat is not None:
            self._taken = [0] * len(self._sources)
            self._gone_by = [seat.ring(i)[0] for i in range(len(self._sources))]

    def mark(self) -> list[int]:
        """Where the rings end now: for `passed`."""
        return self._seat.mark() if self._seat is not None else []

    def passed(self, mark: Sequence[int]) -> bool:
        """Have the threads taken all that was in the rings then, as far as there are arenas for it?"""
        return self._seat is None or self.blocked or bool(self._seat.passed(mark))

    def _end(self, stream: int) -> None:
        self._ended[stream] = True
        error = self._sources[stream].error
        if error is not None:
            raise UserError(str(error))

    # -- the arenas --

    def due(self) -> range:
        """What may close now: the oldest iteration, or nothing. More than one: iterations that passed unseen and are
        too many to be judged one by one."""
        begun = self._engine.begun  # first: a thread that opens in mid-stream moves `oldest`, and then says this
        oldest = self._engine.oldest
        if not self._may_close(oldest, begun):
            return range(0)
        if oldest > begun:
            wanted = min(self._engine.wanted(i) for i, blocked in enumerate(self._blocked) if blocked)
            last = wanted - self._engine.config.arenas
            if last - oldest > UNSEEN:
                return range(oldest, last)
        return range(oldest, oldest + 1)

    @property
    def open(self) -> range:
        """Iterations of which packets have come and that have not closed: what closes when the traffic has ended."""
        return range(self._engine.oldest, self._engine.begun + 1)

    def close(self, due: range) -> None:
        """From now on packets for these iterations are late: what is known of them does not change any more."""
        self._engine.close(len(due))

    def retire(self, due: range) -> None:
        """Iterations were judged. Whoever waited for the arena of one may read on."""
        self._engine.retire(len(due))
        if len(due) == 1:
            self._blocked = [False] * len(self._sources)

    def is_whole(self, iteration: int) -> bool:
        """May it close because all of it is there?"""
        return self._whole == iteration

    def _may_close(self, oldest: int, begun: int) -> bool:
        if self._opening or (oldest > begun and not any(self._blocked)):
            return False
        past = [self._ended[i] or self._is_past(i, oldest) for i in range(len(self._sources))]
        if self._whole != oldest and all(past) and not self.ended and self._is_complete(oldest):
            self._whole = oldest
        waits = [self._waits(i, oldest) for i in range(len(self._sources))]
        given_up = oldest in self._engine.given_up
        forced = (given_up or any(waits)) and all(p or w for p, w in zip(past, waits, strict=True))
        return self._whole == oldest or forced or (all(past) and not given_up and self._nothing_comes(oldest))

    def _nothing_comes(self, oldest: int) -> bool:
        """Is all that is missing of an iteration, which every stream has passed, lost for good? What waits in the ring
        of a stream that has brought nothing yet may be the job's."""
        if self._holes is None or self.ended:
            return False
        going_on = [i for i, ended in enumerate(self._ended) if not ended]
        if any(self._engine.past(i) == NOTHING_SEEN and self._unread(i) for i in going_on):
            return False
        self._final = oldest, self._holes.final(oldest, going_on)
        return self._final[1] != ""

    def _unread(self, stream: int) -> int:
        """Packets of a stream's ring that were not looked at for this job, whatever the ring still keeps for others."""
        if self._seat is not None:
            return self._seat.ring(stream)[1]
        return self._engine.waiting(self._sources[stream].ring_address)[0]

    def final(self, iteration: int) -> Finality:
        """Why an iteration that is closing gets nothing more. "": nothing is missing."""
        if self.ended:
            return "ended"
        if self._whole == iteration:
            return ""
        return self._final[1] or "arena_needed" if self._final[0] == iteration else "arena_needed"

    def _waits(self, stream: int, oldest: int) -> bool:
        """Does a stream wait for this iteration's arena, or would it but for iterations that are given up?"""
        given_up = self._engine.given_up
        ahead = oldest < given_up.stop and self._engine.reached(stream) >= oldest + self._engine.config.arenas
        return self._blocked[stream] or ahead

    def _is_past(self, stream: int, iteration: int) -> bool:
        past = self._engine.past(stream)
        return bool(past > iteration or (past == NOTHING_SEEN and not self._in_order))

    def _is_complete(self, iteration: int) -> bool:
        """Is every cell there? By their count, which the engine keeps: asked at every look at the rings. The verdict
        goes by the cells themselves."""
        return bool(self._engine.complete(iteration, self._cells[min(iteration, 1)]))

    # -- where streams stand --

    @property
    def ended(self) -> bool:
        """Have all sources ended?"""
        return all(self._ended)

    @property
    def blocked(self) -> bool:
        """Does any stream wait for an arena?"""
        return any(self._blocked)

    @property
    def waits(self) -> bool:
        """Does any stream wait for the arena of the oldest iteration, or would it but for those that are given up?"""
        return any(self._waits(i, self._engine.oldest) for i in range(len(self._sources)))

    def state(self, stream: int, iteration: int) -> StreamState:
        """Where a stream stands with respect to an iteration that is closing."""
        if self._ended[stream]:
            return "ended"
        if self._is_past(stream, iteration):
            return "past"
        # its own later packets wait for an arena: what is missing of this iteration will not come
        return "lost" if self._waits(stream, iteration) else "behind"


def _share(fill: tuple[int, int]) -> float:
    waiting, room = fill
    return waiting / room
