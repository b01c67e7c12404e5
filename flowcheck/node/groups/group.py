"""One group of a node: the session of the job that it follows at the moment, and the thread that drives it.

    nothing -> session (joins the wire) -> versions, or parameters
                  ^---------- lost, moved, or started again: the last good version stays

    group.tick()          one turn of its thread: first what has come for it, then one look at its session
    group.start(), .stop()

What differs between jobs is in two parts that the group is made of. Its intake decides when a session begins, from
what, and when it goes: that of a job with trainers handles what they send (intake.py), that of a job without has a
manifest alone (unattended.py). Its publisher makes lines, hashes, checkpoints and answers of what the session says
(publisher.py).

The node's threads place, one for each queue, for all groups (parser/placers.pyx): a job has what comes from its
manifest on. A group that has no arena for what comes leaves it in the ring, and if that fills, packets are dropped for
all of them, and counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from parser.placers import Placers

from flowcheck.node.groups.move_detector import Moved
from flowcheck.node.groups.session import LiveSession, wind_up
from flowcheck.node.groups.state_requests import Beginnings
from flowcheck.rebuild.iteration.scheduler import IDLE_SECONDS
from flowcheck.rebuild.version.events import Event

__all__ = ["Feed", "Group", "Output"]


class Feed:
    """An intake, as its group sees it. The group's thread calls all of it, but `start` and `stop`."""

    def start(self) -> None:
        """The thread is about to begin."""

    def tick(self) -> bool:
        """Handle what has come, and begin, replace or drop the session. Was there anything?"""
        raise NotImplementedError

    def follow(self) -> None:
        """Begin a session as soon as all is here that it needs. Raises FlowcheckError."""
        raise NotImplementedError

    def hear(self, event: Event) -> None:
        """What the session has said, after it was published."""

    def dropped(self) -> None:
        """The session has ended, and what was wanted for it is not wanted."""

    def last(self) -> None:
        """Handle what came before the end."""

    def stop(self) -> None:
        """The node ends: nobody waits for room any more."""

    def close(self) -> None:
        """The thread has ended."""


class Output:
    """A publisher, as its group sees it. The group's thread calls all of it, but `close`."""

    def publish(self, session: LiveSession, event: Event) -> None:
        """Versions and arenas are as the event says only now."""
        raise NotImplementedError

    def look(self, session: LiveSession) -> None:
        """After each look at the session."""

    def drop(self, session: LiveSession, why: str) -> None:
        """What has begun is not judged, and why."""

    def close(self) -> None:
        """What is under way is waited for. Idempotent."""
        raise NotImplementedError


FeedT = TypeVar("FeedT", bound=Feed)


class Group(Generic[FeedT]):
    """name: what trainers call it. placers: the node's, None: it has no port. say: events of the group. intake_of:
    makes its intake. moved: why the job is to be joined again, "": it is not. failure: what ended the thread. now: of a
    clock that never goes back."""

    def __init__(
        self, name: str, placers: Placers | None, say: Callable[..., None], publisher: Output,
        intake_of: Callable[[Group[FeedT]], FeedT], now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._placers, self._say, self._publisher, self.now = name, placers, say, publisher, now
        self.session: LiveSession | None = None
        self.moved = ""
        self._moves = Beginnings(now)  # how often, at most
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"flowcheck group {name}")
        self.failure: BaseException | None = None
        self.intake: FeedT = intake_of(self)

    def start(self) -> None:
        """Raises RuntimeError: a thread cannot be had."""
        self.intake.start()
        self._thread.start()

    def stop(self) -> None:
        """Judge what is there, let go of everything. Idempotent."""
        self._stop.set()
        self.intake.stop()
        if self._thread.is_alive():
            self._thread.join()
        self._publisher.close()

    def _main(self) -> None:
        try:
            while not self._stop.is_set():
                if not self.tick():
                    time.sleep(IDLE_SECONDS)
            self.intake.last()
            self.finish()
        except BaseException as error:  # the node has to end, not to go on without this thread
            self.failure = error
        finally:
            self.drop("the thread that follows the group has failed")
            self.intake.close()

    def tick(self) -> bool:
        """One turn. Did it find anything to do?"""
        found = self.intake.tick()
        session = self.session
        if session is not None:
            self.take(session.poll())
            found |= session.moved
            self._publisher.look(session)
        return found

    # -- the life of a session: for the intake --

    def begin(self, session: LiveSession) -> None:
        self.session = session
        self.place()

    def place(self) -> None:
        """Packets of the job are placed from now on, or again."""
        assert self.session is not None
        self.session.place_in_threads(self._placers)

    def take(self, events: Iterable[Event]) -> None:
        """What the session says, one by one."""
        for event in events:
            assert self.session is not None
            if isinstance(event, Moved):
                self.moved = event.why if self._moves.due() else ""
            else:
                self._publisher.publish(self.session, event)
                self.intake.hear(event)

    def finish(self) -> None:
        """Judge what is there."""
        if self.session is not None:
            wind_up(self.session, self.take)

    def join_again(self) -> None:
        """What the session waits for does not come any more. Raises FlowcheckError."""
        self._moves.lost()
        self._moves.begun()
        self._say("moved", why=f"{self.moved}: was the mirror configured anew? The job is joined anew where it is now")
        self.drop("the job is joined anew")
        self.intake.follow()

    def drop(self, why: str = "") -> None:
        """why: what has begun is not judged."""
        if self.session is not None:
            self._publisher.drop(self.session, why)
            self.session.close()
        self.session, self.moved = None, ""
        self.intake.dropped()
