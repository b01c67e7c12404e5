"""What ranks give of themselves, next to the versions that it belongs to: a small file for each rank and step.

    states = UserStates(say)
    states.put(replica, step, rank, data)          the group's thread: never waits
    states.published(steps)                        those that the replica has now: the others are let go of
    states.resume(replica, steps)                  so of one that an earlier process left
    states.gathered(replica, step)                 of every rank that gives some, for who writes the version to disk

    DIR/flowcheck-NODE-GROUP-1.replica             the replica
        flowcheck-NODE-GROUP-1.user/step-000020/rank-00003.safetensors

So another process that serves the replica (holdings.py) finds them by its name. The folder is made with that name
(replica_files.py), and neither it nor what is in it is used unless it is this user's: where it lies everybody may put
something (flowcheck/checkpoint/owned.py). A thread writes them, each aside and renamed, so a file of that name is
whole; what is in it is checked by who reads it (flowcheck/control/user_state.py). A state may come before its version,
or after it. Nothing here can keep a version from being published.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path

from flowcheck.checkpoint import owned
from flowcheck.checkpoint.owned import read, write
from flowcheck.control.messages import MOST_RANKS
from flowcheck.control.user_state import USER_BYTES
from flowcheck.durable import remove_tree

__all__ = ["UserStates", "rank_file", "ranks_in", "steps_of", "user_folder", "user_in", "users_in"]

AHEAD = 64  # steps, newer than the newest version, whose states are kept
UNWRITTEN = 64 << 20  # bytes that wait for the thread
GATHER_SECONDS = 1.0  # that a checkpoint waits for states that are still on their way

_Item = tuple[Path, int, int, bytes] | tuple[Path, frozenset[int]] | frozenset[int] | None


def user_folder(replica: Path, step: int) -> Path:
    """Where the states of a step lie."""
    return replica.with_suffix(".user") / f"step-{step:06d}"


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"


def ranks_in(folder: Path) -> list[int]:
    """Whose states lie in a folder, in order."""
    try:
        with _opened(folder) as inside:
            names = os.listdir(inside)
    except OSError:
        return []
    found = (re.fullmatch(r"rank-([0-9]{5})\.safetensors", name) for name in names)
    return sorted(rank for one in found if one and (rank := int(one[1])) < MOST_RANKS)


def user_in(folder: Path, rank: int) -> bytes:
    """What a rank gave. Raises OSError: nothing, or it is not this user's."""
    with _opened(folder) as inside:
        return read(inside, rank_file(folder, rank).name, USER_BYTES)


def users_in(folder: Path) -> dict[int, bytes]:
    """What lies in a folder, by rank."""
    out = {}
    for rank in ranks_in(folder):
        with contextlib.suppress(OSError):  # removed with its replica
            out[rank] = user_in(folder, rank)
    return out


def steps_of(replica: Path) -> set[int]:
    """Of which there are folders."""
    place = replica.with_suffix(".user")
    try:
        with owned.folder(place.parent, place.name) as inside:
            names = os.listdir(inside)
    except OSError:
        return set()
    found = (re.fullmatch(r"step-([0-9]{6,18})", name) for name in names)
    return {int(one[1]) for one in found if one}


def _opened(folder: Path, make: bool = False) -> AbstractContextManager[int]:
    """A descriptor of it; both it and the folder that it is in are this user's."""
    return owned.folder(folder.parent.parent, folder.parent.name, folder.name, make=make)


class UserStates:
    """say: events. Its thread begins with the first state."""

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._waiting = 0  # bytes in the queue
        self._came = self._done = 0  # states
        self._replica: Path | None = None  # that the rest is of
        self._newest: dict[int, int] = {}  # by rank: of the last state that came
        self._steps: set[int] = set()  # that have a folder
        self._complete: frozenset[int] = frozenset()  # versions
        self._failing = ""
        self._thread: threading.Thread | None = None

    # -- the group's thread --

    def put(self, replica: Path, step: int, rank: int, data: bytes) -> None:
        """Of a version that the replica of this name has, or will have. Dropped where the thread is too far behind."""
        with self._changed:
            if self._waiting + len(data) > UNWRITTEN:
                return
            self._waiting += len(data)
            self._came += 1
        self._begin()
        self._queue.put((replica, step, rank, data))

    def resume(self, replica: Path, steps: Collection[int]) -> None:
        """A replica that an earlier process left, with its versions: their states stay, and others that it left go."""
        self._begin()
        self._queue.put((replica, frozenset(steps)))

    def _begin(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._main, name="flowcheck user states", daemon=True)
            with contextlib.suppress(RuntimeError):  # none is to be had: the next state tries again
                thread.start()
                self._thread = thread

    def published(self, steps: Collection[int]) -> None:
        """The versions that there are."""
        if self._thread is not None:
            self._queue.put(frozenset(steps))

    def close(self) -> None:
        """Write what has come. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    # -- any thread --

    def gathered(self, replica: Path, step: int, seconds: float = GATHER_SECONDS) -> dict[int, bytes]:
        """By rank, of a version that stays meanwhile. Waits for those that are still coming, `seconds` at most."""
        deadline = time.monotonic() + seconds

        def all_here() -> bool:
            """What had come by now is written, and who gave one for a step shortly before this one has for this one."""
            late = any(step - AHEAD <= newest < step for newest in self._newest.values())
            return self._done >= came and (self._replica != replica or not late)

        with self._changed:
            came = self._came
            self._changed.wait_for(all_here, max(0.0, deadline - time.monotonic()))
        return users_in(user_folder(replica, step))

    # -- the thread --

    def _main(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, frozenset):
                    self._complete = item
                elif len(item) == 2:
                    self._of(item[0])
                    self._steps, self._complete = steps_of(item[0]), item[1]
                else:
                    self._write(*item)
                self._prune()
                self._failing = ""
            except OSError as error:
                if not self._failing:
                    self._say("problem", why=f"states of ranks cannot be kept beside {self._replica}:"
                              f" {error.strerror or error}; versions are without them until there is room")
                self._failing = str(error)

    def _write(self, replica: Path, step: int, rank: int, data: bytes) -> None:
        try:
            self._of(replica)
            if not self._is_old(step):
                folder = user_folder(replica, step)
                with _opened(folder, make=True) as inside:
                    write(inside, rank_file(folder, rank).name, data)
                self._steps.add(step)
        finally:
            with self._changed:
                self._waiting -= len(data)
                self._done += 1
                self._newest[rank] = max(step, self._newest.get(rank, 0))
                self._changed.notify_all()

    def _of(self, replica: Path) -> None:
        with self._changed:
            if replica != self._replica:
                self._replica, self._newest, self._steps = replica, {}, set()
                self._complete = frozenset()

    def _is_old(self, step: int) -> bool:
        return bool(self._complete) and step < max(self._complete) and step not in self._complete

    def _prune(self) -> None:
        if self._replica is None:
            return
        ahead = sorted(step for step in self._steps if step > max(self._complete, default=-1))
        for step in [*(step for step in self._steps if self._is_old(step)), *ahead[:-AHEAD]]:
            remove_tree(user_folder(self._replica, step))
            self._steps.discard(step)
