"""What a node writes of its versions: hashes of every one, and checkpoints on disk. Its events: status/event_log.py.

Hashes are written on the thread that publishes (they are a harness for the lab), checkpoints by a thread for each
group: while one is being written the next ones of that group that are due are skipped and said so. Files are appended
or written aside; nothing is half. Versions go on whatever the disk does: a checkpoint that holds the slot that an
update waits for is given up.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flowcheck.checkpoint.directory import mark_diverged, tensor_sha256
from flowcheck.control.divergence import Divergence
from flowcheck.durable import check_writable, let_read, make_directory, private, reporting
from flowcheck.errors import EnvironmentProblem, FlowcheckError
from flowcheck.node.config.store import Output

__all__ = ["Hashes", "Versions", "Writer", "check_places"]

Users = Callable[[], Mapping[int, bytes]]  # by rank: a file of flowcheck/control/user_state.py
Vouch = Callable[[str, int], str]  # of tokens.Access
MARGIN = 1.25  # a checkpoint has to be done before the next one is due by this factor
MOST_LEFT_OUT = 1 << 20
LOOK_SECONDS = 0.05  # between two looks whether the slot of a version that is being written is needed
WANTED_SECONDS = 2.0  # that an update waits for it: a disk that is nearly done keeps it
END_SECONDS = 60.0  # that checkpoints have to end, when the node does; service managers kill after some time


class Versions(Protocol):
    """What has a current version that can be written: a replica, or parameters alone (groups/unattended.py)."""

    @property
    def step(self) -> int: ...

    @property
    def refused(self) -> int:
        """As of JobReplica."""

    @property
    def unproven(self) -> Sequence[str]: ...

    def pinned(self) -> AbstractContextManager[Any]:
        """The current version, kept as it is: its step, parameters and optimizer_state."""

    def write(
        self, out: Path, unproven: Sequence[str], version: Any, status: str, shard: str, users: Users | None,
        matches: int,
    ) -> Path:
        """As of JobReplica."""


def check_places(output: Output) -> None:
    """Whether everything can be written that the settings ask for, by this process from now on as `readable_by` says.
    Raises EnvironmentProblem naming the setting."""
    let_read(output.readable_by)
    if output.every:
        check_writable(output.directory, "a directory that the node may write to as output.directory, and free space")
    for setting, path in (("keep_hashes", output.keep_hashes), ("status_file", output.status_file)):
        if path is None:
            continue
        check_writable(path.parent, f"a directory that the node may write to in output.{setting}, and free space")
        replaced = setting == "status_file"  # hashes are appended, and may go into a pipe
        if path.is_dir() or (replaced and path.exists() and not path.is_file()):
            raise EnvironmentProblem(
                "is no regular file", where=str(path), remedy=f"the name of a file in output.{setting}"
            )
        if not replaced and path.exists() and not os.access(path, os.W_OK):
            raise EnvironmentProblem(
                "cannot be written to", where=str(path), remedy=f"a file that the node may write to in output.{setting}"
            )


class Hashes:
    """SHA-256 of all tensors of a version, one JSON line each."""

    _REMEDY = "free space on that file system, or another file as output.keep_hashes"

    def __init__(self, path: Path) -> None:
        self._path = path
        with reporting(path, self._REMEDY):
            make_directory(path.parent)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._file = os.fdopen(private(path, flags, links=0), "a", encoding="utf-8")  # a pipe, too
        self._lock = threading.Lock()

    def add(self, iteration: int, name: str, replica: Versions) -> None:
        with replica.pinned() as slot:
            tensors = {key: tensor_sha256(tensor) for key, tensor in slot.parameters.items()}
            state = {
                f"{key}.{what}": tensor_sha256(tensor)
                for key, states in slot.optimizer_state.items() for what, tensor in states.items() if what != "step"
            }
        line = {"iteration": iteration, "name": name, "tensors": tensors, "optimizer": state}
        with self._lock, reporting(self._path, self._REMEDY):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Held:
    """A version of a replica, pinned while it is written: until all of it is read, or its slot is given back before
    that, after `kept` seconds. Raises what `pinned` does."""

    kept = 0.0

    def __init__(self, replica: Versions, users: Users | None) -> None:
        self._pin, self._users, self._lock = ExitStack(), users, threading.Lock()
        self.version = self._pin.enter_context(replica.pinned())
        self.gone = threading.Event()

    def let_go(self) -> bool:
        """False: it was before."""
        with self._lock:
            if self.gone.is_set():
                return False
            self._pin.close()
            self.gone.set()
            return True

    def users(self) -> Mapping[int, bytes]:
        """What write_step asks for when all tensors are on the disk: from then on nothing of the version is read."""
        if not self.let_go():
            raise _GivenUp
        return self._users() if self._users is not None else {}


class _GivenUp(Exception):
    """The slot was needed, and may have had other bytes since. It was said then."""


class Writer:
    """One checkpoint of each group at a time to disk, on a thread of its own. `close` waits for those under way, for a
    minute: a disk that hangs ends no node, and neither do threads that it holds.

    Groups that move in lockstep (the stages of a pipeline, on this node or on others) must share steps on disk. Where
    writing is slower than versions become due, a group therefore leaves out by the number of the step and not by
    chance: it writes multiples of 2, 4, 8, ... times `every`, and those of the slower group are among the faster one's.
    """

    def __init__(
        self, say: Callable[..., None], every: int = 1, clock: Callable[[], float] = time.monotonic,
        vouch: Vouch | None = None,
    ) -> None:
        self._say, self._every, self._clock = say, max(every, 1), clock
        self._more: dict[str, Any] = {} if vouch is None else {"vouch": vouch}
        self._lock = threading.Lock()
        self._lanes: dict[tuple[str, bool], _Lane] = {}

    def write(
        self, name: str, replica: Versions, out: Path, status: str, done: Callable[[], None] | None = None,
        unproven: Sequence[str] = (), users: Users | None = None, matches: int = 0, base: bool = False,
    ) -> bool:
        """Begin to write the current version of a group, unless it is one that is left out: False. done: called on the
        writer's thread when it is on disk. unproven: marks of its verdict. users: what ranks gave of
        themselves; it may wait a little. matches: checksums of the trainer that have matched by now. base: it is one
        of a journal, which leaves itself out when it is not due, and waits for no checkpoint."""
        with self._lock:
            lane = self._lanes.setdefault((name, base), _Lane())
        stride, now = 1, self._clock()
        if lane.due is not None and not base:
            while stride < MOST_LEFT_OUT and stride * (now - lane.due) < MARGIN * lane.seconds:
                stride *= 2
        lane.due = now
        if lane.thread is not None and lane.thread.is_alive():
            lane.seconds = max(lane.seconds, now - lane.began)
            if not base:
                self._say("skipped", name=name, step=replica.step, why="an older checkpoint is still being written")
            return False
        if replica.step // self._every % stride:
            self._say("skipped", name=name, step=replica.step, why=f"a checkpoint takes {lane.seconds:.1f} s, so each"
                      f" {stride * self._every}th step is written; raise output.every")
            return False
        lane.began = now
        try:
            held = _Held(replica, users)  # from here on the replica may go on: this version stays
        except FlowcheckError as error:
            self._say("problem", name=name, step=replica.step, why=error.message())
            return False
        writer = threading.Thread(
            target=self._work, args=(lane, (name, base), replica, out, status, held, done, unproven, matches),
            name=f"flowcheck writer {name}", daemon=True,
        )
        watch = threading.Thread(
            target=self._watch, args=(lane, name, replica, held), name=f"flowcheck pin {name}", daemon=True,
        )
        try:
            watch.start()
            writer.start()
        except RuntimeError as error:  # there is no thread to be had
            held.let_go()
            self._say("problem", name=name, step=replica.step, why=f"step {replica.step} is not written: {error}")
            return False
        lane.thread = writer
        return True

    def withdraw(self, name: str, out: Path, divergence: Divergence) -> None:
        """Mark those checkpoints of a group that have diverged, on a thread: the disk may be slow. What is being
        written when this is called is waited for."""
        with self._lock:
            lane = self._lanes.setdefault((name, False), _Lane())
        lane.marking = [one for one in lane.marking if one.is_alive()]
        thread = threading.Thread(target=self._mark, args=(name, out, divergence, lane.thread), daemon=True,
                                  name=f"flowcheck marks {name}")
        try:
            thread.start()
        except RuntimeError as error:  # there is no thread to be had
            self._say("problem", name=name, why=f"{out}: checkpoints that have diverged are not marked: {error}")
            return
        lane.marking.append(thread)

    def _mark(self, name: str, out: Path, divergence: Divergence, writing: threading.Thread | None) -> None:
        if writing is not None:
            writing.join()
        try:
            if steps := mark_diverged(out, divergence):
                self._say("marked", name=name, steps=len(steps), newest=steps[0], path=str(out))
        except FlowcheckError as error:
            self._say("problem", name=name, why=error.message())

    def _work(
        self, lane: _Lane, of: tuple[str, bool], replica: Versions, out: Path, status: str, held: _Held,
        done: Callable[[], None] | None, unproven: Sequence[str], matches: int,
    ) -> None:
        version, before, (name, base) = held.version, lane.seconds, of
        step = version.step
        try:
            path = replica.write(out, [*replica.unproven, *unproven], version, status, name, held.users, matches,
                                 **self._more)
            lane.seconds = self._clock() - lane.began
            if done is not None:
                done()
            if base:
                self._say("base", name=name, step=step, path=str(path))
            else:
                self._say("written", name=name, step=step, path=str(path))
        except _GivenUp:
            lane.seconds = held.kept  # and not how long the disk has hung: it may be well again
        except FlowcheckError as error:
            lane.seconds = before  # a disk that hung before it failed has said nothing of its speed
            if base:
                self._say("problem", name=name, why=f"a base of the journal is not written: {error.message()}")
            else:
                self._say("problem", name=name, step=step, why=error.message())
        finally:
            held.let_go()

    def _watch(self, lane: _Lane, name: str, replica: Versions, held: _Held) -> None:
        """Give a slot back that updates have wanted in vain for some time. On a thread of its own: the writer's may
        hang in a call to the disk."""
        step, seen = held.version.step, replica.refused
        since = last = -math.inf  # when an update was refused a slot first, without a pause since, and last
        while not held.gone.wait(LOOK_SECONDS):
            if replica.refused == seen:
                continue
            seen, now = replica.refused, self._clock()
            since = since if now - last <= WANTED_SECONDS else now  # else an update got one meanwhile
            last = now
            if now - since < WANTED_SECONDS:
                continue
            held.kept = now - lane.began
            if held.let_go():
                self._say("skipped", name=name, step=step, why="updates need its slot, and the disk has not taken it in"
                          f" {held.kept:.1f} s; replica.slots = 4 leaves it more time")

    def close(self) -> None:
        with self._lock:
            lanes = dict(self._lanes)
        end = self._clock() + END_SECONDS
        for (name, _), lane in lanes.items():
            for marking in lane.marking:
                marking.join(max(0.0, end - self._clock()))
            if lane.thread is None:
                continue
            lane.thread.join(max(0.0, end - self._clock()))
            if lane.thread.is_alive():
                self._say("problem", name=name, why="the node ends without the checkpoint that is being written: the"
                          f" disk has not taken it in {self._clock() - lane.began:.0f} s")


@dataclass
class _Lane:
    """Of one group. seconds: that a checkpoint takes. due: when one was due last. began: when one was begun. marking:
    threads that mark checkpoints that have diverged."""

    thread: threading.Thread | None = None
    seconds: float = 0.0
    due: float | None = None
    began: float = 0.0
    marking: list[threading.Thread] = field(default_factory=list)
