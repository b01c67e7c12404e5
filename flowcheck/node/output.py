"""What a node writes of its versions: hashes of every one, and checkpoints on disk. Its events: saying.py.

Hashes are written on the thread that publishes (they are a harness for the lab), checkpoints by a thread for each
group: while one is being written the next ones of that group that are due are skipped and said so. Files are appended
or written aside; nothing is half.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowcheck.checkpoint.directory import tensor_sha256
from flowcheck.durable import check_writable, reporting
from flowcheck.errors import EnvironmentProblem, FlowcheckError
from flowcheck.node.config import Output
from flowcheck.rebuild.replica import JobReplica

__all__ = ["Hashes", "Writer", "check_places"]

Users = Callable[[], Mapping[int, bytes]]  # by rank: a file of flowcheck/control/user_state.py
MARGIN = 1.25  # a checkpoint has to be done before the next one is due by this factor
MOST_LEFT_OUT = 1 << 20


def check_places(output: Output) -> None:
    """Whether everything can be written that the settings ask for. Raises EnvironmentProblem naming the setting."""
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


class Hashes:
    """SHA-256 of all tensors of a version, one JSON line each."""

    _REMEDY = "free space on that file system, or another file as output.keep_hashes"

    def __init__(self, path: Path) -> None:
        self._path = path
        with reporting(path, self._REMEDY):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def add(self, iteration: int, name: str, replica: JobReplica) -> None:
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


class Writer:
    """One checkpoint of each group at a time to disk, on a thread of its own. `close` waits for those under way.

    Groups that move in lockstep (the stages of a pipeline, on this node or on others) must share steps on disk. Where
    writing is slower than versions become due, a group therefore leaves out by the number of the step and not by
    chance: it writes multiples of 2, 4, 8, ... times `every`, and those of the slower group are among the faster one's.
    """

    def __init__(self, say: Callable[..., None], every: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._every, self._clock = say, max(every, 1), clock
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}

    def write(
        self, name: str, replica: JobReplica, out: Path, status: str, done: Callable[[], None] | None = None,
        unproven: Sequence[str] = (), users: Users | None = None, matches: int = 0,
    ) -> None:
        """Begin to write the current version of a group, unless it is one that is left out. done: called on the
        writer's thread when it is on disk. unproven: marks of its verdict. users: what ranks gave of
        themselves; it may wait a little. matches: checksums of the trainer that have matched by now."""
        with self._lock:
            lane = self._lanes.setdefault(name, _Lane())
        stride, now = 1, self._clock()
        if lane.due is not None:
            while stride < MOST_LEFT_OUT and stride * (now - lane.due) < MARGIN * lane.seconds:
                stride *= 2
        lane.due = now
        if lane.thread is not None and lane.thread.is_alive():
            lane.seconds = max(lane.seconds, now - lane.began)
            self._say("skipped", name=name, step=replica.step, why="an older checkpoint is still being written")
            return
        if replica.step // self._every % stride:
            self._say("skipped", name=name, step=replica.step, why=f"a checkpoint takes {lane.seconds:.1f} s, so each"
                      f" {stride * self._every}th step is written; raise output.every")
            return
        ready = threading.Event()
        lane.began = now
        lane.thread = threading.Thread(
            target=self._work, args=(lane, name, replica, out, status, ready, done, unproven, users, matches),
            name=f"flowcheck writer {name}",
        )
        lane.thread.start()
        ready.wait()  # until the version is pinned

    def _work(
        self, lane: _Lane, name: str, replica: JobReplica, out: Path, status: str, ready: threading.Event,
        done: Callable[[], None] | None, unproven: Sequence[str], users: Users | None, matches: int,
    ) -> None:
        try:
            with replica.pinned() as version:
                ready.set()  # from here on the replica may go on: this version stays
                path = replica.write(out, [*replica.unproven, *unproven], version, status, name, users, matches)
                step = version.step
            lane.seconds = self._clock() - lane.began
            if done is not None:
                done()
            self._say("written", name=name, step=step, path=str(path))
        except FlowcheckError as error:
            self._say("problem", name=name, why=error.message())
        finally:
            ready.set()

    def close(self) -> None:
        with self._lock:
            lanes = list(self._lanes.values())
        for lane in lanes:
            if lane.thread is not None:
                lane.thread.join()


@dataclass
class _Lane:
    """Of one group. seconds: that a checkpoint takes. due: when one was due last. began: when one was begun."""

    thread: threading.Thread | None = None
    seconds: float = 0.0
    due: float | None = None
    began: float = 0.0
