"""When a trainer may be asked for its state again: an upload stops training for as long as it takes.

    asking = Asking(tell, say, drops)       of one job (first_state.py); begin=...: it is begun again by ranges
    asking.ask(why)                         now, or later: then trainers hear why, and `again` asks
    asking.uploads.announced(), taken()     a state has begun to come, is here (or came too late)

The first question goes out at once. After that uploads take at most one part in SHARE of the time, whatever the
losses were. Where the node itself dropped packets their cause is still there after the next upload: that waits for
OWN seconds, twice as long each time a chain ended so soon after its state, up to MOST seconds, and in any case until
the node has dropped nothing for QUIET seconds.

A job whose state comes by ranges stops for nothing, and is begun again at once; but after that with the same pauses, if
its versions ended soon after they were begun: one that cannot be followed would send all of its state for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flowcheck.control.protocol import Notice, Wanted

__all__ = ["Asking", "Beginnings", "Uploads"]

SHARE = 20
OWN, MOST = 10.0, 300.0
SOON = 8  # times the pause: a chain that lasted longer begins anew
QUIET = 5.0
LOOK_SECONDS = 0.1


class Asking:
    """What trainers hear while there are no versions: what is wanted of them, or why nothing is. tell: sends a message
    to all of them. say: events. drops(): packets that the node itself has dropped so far. begin(): what is done in
    place of asking for a state. now: seconds of a clock. One thread."""

    def __init__(
        self, tell: Callable[[Any], None], say: Callable[..., None], drops: Callable[[], int],
        begin: Callable[[], None] | None = None, now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.uploads = Uploads(drops, now)
        self.beginnings = Beginnings(now)
        self._pace: Uploads | Beginnings = self.uploads if begin is None else self.beginnings
        self._tell, self._say, self._begin = tell, say, begin
        self._later = ""  # why a state is to be asked for, as soon as uploads allow it
        self._silence = ""
        self._notice = Notice("")

    def ask(self, why: str) -> None:
        """Ask for a state: now, or as soon as an upload is worth what it costs the trainer."""
        self._later, seconds = why, self._pace.lost()
        if self._pace.due():
            self._question()
            return
        self._say("deferred", seconds=round(seconds, 1), why=self._pace.WHY)
        self._tell(Wanted([], ""))
        self._note()

    def again(self) -> None:
        """Ask for what had to wait, if its time has come."""
        if self._later and self._pace.due():
            self._question()

    def answered(self) -> None:
        """A state is here."""
        self._later = ""
        self._note()

    def by_state(self) -> None:
        """From now on a state is asked for."""
        self._begin, self._pace = None, self.uploads

    def silent(self, why: str) -> None:
        """The mirror brings nothing; "": it does again."""
        self._silence = why
        self._note()

    def _question(self) -> None:
        why, self._later = self._later, ""
        self._note()
        if self._begin is None:
            self._tell(Wanted(["state"], why))
        else:
            self._begin()

    def _note(self) -> None:
        later = f"{self._later}; a state is asked for later" if self._later else ""
        notice = Notice("; ".join(why for why in (self._silence, later) if why))
        if notice != self._notice:
            self._notice = notice
            self._tell(notice)


class Uploads:
    """announced, taken: see above. lost(): the chain of versions has ended; seconds until the next question, at least.
    due(): may it go out now? drops(): packets that the node itself has dropped so far. Of one job; one thread."""

    WHY = ("uploads would follow each other too fast: the next one is asked for after this time, and not while the node"
           " itself drops packets")

    def __init__(self, drops: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._drops, self._clock = drops, clock
        self._since = self._earliest = self._looked = 0.0
        self._began: float | None = None
        self._cost, self._pause = 0.0, OWN
        self._any = False  # a state has come
        self._base = self._count = drops()
        self._own = False
        self._quiet_since = 0.0

    def announced(self) -> None:
        self._began, self._base = self._clock(), self._drops()

    def taken(self) -> None:
        self._any, self._since = True, self._clock()
        self._cost = 0.0 if self._began is None else self._since - self._began
        self._began = None

    def lost(self) -> float:
        now = self._clock()
        self._count, self._quiet_since, self._looked = self._drops(), now, now
        self._own = self._count > self._base
        if not self._any:
            self._earliest = now
            return 0.0
        self._earliest = max(now, self._since + SHARE * self._cost)
        if self._own:
            if now - self._since > SOON * self._pause:
                self._pause = OWN
            self._earliest = max(self._earliest, now + self._pause)
            self._pause = min(2 * self._pause, MOST)
        return self._earliest - now

    def due(self) -> bool:
        now = self._clock()
        if now < self._earliest:
            return False
        if not self._own:
            return True
        if now - self._looked >= LOOK_SECONDS:
            self._looked, count = now, self._drops()
            if count != self._count:
                self._count, self._quiet_since = count, now
        return now - self._quiet_since >= QUIET


class Beginnings:
    """begun(): versions are built from now on. lost(), due(): as of Uploads, of the next beginning."""

    WHY = "versions ended soon after they were begun: they are begun again after this time"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._earliest = clock()
        self._in_a_row = 0  # endings that came soon

    def begun(self) -> None:
        self._began = self._clock()

    def lost(self) -> float:
        now = self._clock()
        self._in_a_row = self._in_a_row + 1 if now - self._began <= SOON * self._pause(self._in_a_row + 1) else 1
        self._earliest = now + (self._pause(self._in_a_row) if self._in_a_row > 1 else 0.0)
        return self._earliest - now

    def due(self) -> bool:
        return self._clock() >= self._earliest

    def _pause(self, endings: int) -> float:
        return min(OWN * 2.0 ** max(endings - 2, 0), MOST)
