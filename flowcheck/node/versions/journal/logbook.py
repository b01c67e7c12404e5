"""When trainers are asked for a base of their log, so that its journal always reaches back to one.

    book = LogBook(keeper, about, ask, say)
    book.look(awaited)                  again and again; awaited: the iteration that comes next, None: none does yet
    book.take(message, data)            a part of a base
    book.users                          next to which own states of ranks are kept

Numbers are the trainer's. A base is asked for at first, where the journal has a hole behind the newest one,
and where that is half as old as the journal is long. The group's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flowcheck.control.protocol import Base, BaseWanted
from flowcheck.errors import FlowcheckError, said_of
from flowcheck.node.versions.journal.keeper import Keeper
from flowcheck.node.versions.journal.log_bases import Bases
from flowcheck.node.versions.journal.log_folder import About, log_folder, users_of, write_about

__all__ = ["LogBook"]

SPREAD = 100  # boundaries that a base is spread over, at most
PATIENCE = 16  # boundaries more than that without a part of it, until one that was asked for is asked for again


class LogBook:
    """keeper: of the journal. ask: of the ranks; rank 0 answers. say: events of the group."""

    def __init__(
        self, keeper: Keeper, about: About, ask: Callable[[BaseWanted], None], say: Callable[..., None]
    ) -> None:
        self._keeper, self._about, self._ask, self._say = keeper, about, ask, say
        self._bases: Bases | None = None  # once the journal is there
        self._sound = 0  # from this iteration on the journal has no hole
        self._alone = False  # journals of earlier runs are gone, or going
        self._asked: int | None = None  # the iteration that was next when a base was asked for, or the last part of it
        # came; None: none is awaited
        self._awaited = 0  # the iteration that comes next

    @property
    def users(self) -> Path | None:
        """None: its folder is not there yet."""
        return users_of(self._keeper.folder.path) if self._bases is not None else None

    @property
    def _spread(self) -> int:
        return max(1, min(SPREAD, self._keeper.room.entries // 4))

    def look(self, awaited: int | None) -> None:
        if self._bases is None and self._keeper.opened:
            self._bases = self._begun()
        if awaited is None or self._bases is None:
            return
        self._awaited = awaited
        if why := self._bases.failure():
            self._say("problem", about="journal", why=f"a base of the log was given up: {why}")
            self._asked = None
        if self._keeper.hole >= self._sound:  # a base whose pieces are older has no use of what comes after it
            self._sound, self._asked = self._keeper.hole + 1, None
            self._bases.drop()
        self._end_others(self._bases)
        if self._asked is not None and awaited < self._asked + self._spread + PATIENCE:
            return
        first, period = self._bases.first, max(2 * self._spread, self._keeper.room.entries // 2)
        if self._asked is not None or first is None or first < self._sound or awaited - first >= period:
            self._ask(BaseWanted(self._spread, again=self._asked is not None))
            self._asked = awaited

    def _end_others(self, bases: Bases) -> None:
        """Once steps of this run can be made: until then those of the run before are all that there is."""
        first, step = bases.first, bases.settled
        if self._alone or first is None or step is None:
            return
        if not self._keeper.hole < first <= step <= self._keeper.written:
            return
        self._alone = True

        def end() -> None:
            try:
                self._keeper.folder.end_others()
            except Exception as error:  # it must be said: it takes room
                self._say("problem", about="journal", why=f"the journal of an earlier run stays: {said_of(error)}")

        bases.later(end)

    def _begun(self) -> Bases | None:
        try:
            write_about(self._keeper.folder.path, self._about)
        except FlowcheckError as error:
            self._say("problem", about="journal", why=error.message())
            return None
        return Bases(log_folder(self._keeper.folder.path))

    def take(self, message: Base, data: bytes) -> None:
        """Raises UserError: it is not the part that is due."""
        if self._bases is None:
            return
        base = self._bases.take(message, data)
        if self._asked is not None:
            self._asked = self._awaited  # it comes, as fast as the link takes it
        if base is not None:
            self._asked = None
            self._say("log", iteration=base.step, first=base.first, bytes=base.nbytes)

    def close(self) -> None:
        if self._bases is not None:
            self._bases.close()
