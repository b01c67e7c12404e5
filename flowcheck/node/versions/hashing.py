"""SHA-256 of the tensors of versions, in the background: as many threads as there are cores, for all versions together.

    hashers = Hashers()                        threads begin with the first version
    work = hashers.begin(tensors)              of one version; never waits
    work.hashed, work.total                    bytes so far, and of all of it
    work.sums                                  a Future: in hexadecimal digits, of each tensor in order
    work.end(error)                            nothing more of it is hashed, and the Future has this error
    hashers.close()

A version has a lane for each core, and a lane is one piece of work of the pool: SLICE bytes, and then it stands at the
end of the queue again. So versions that are hashed at the same time all grow, however large a tensor of one of them is,
and whoever waits for one sees that it does. Any thread may call anything here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor

import torch

from flowcheck.control.tensors import memory

__all__ = ["Hashers", "Work"]

SLICE = 32 << 20  # bytes: some 20 to 80 ms of a core


class Hashers:
    def __init__(self) -> None:
        self._cores = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self._cores, "flowcheck hash")

    def begin(self, tensors: Sequence[torch.Tensor]) -> Work:
        return Work(tensors, self._pool, self._cores)

    def close(self) -> None:
        """What is not over by now never is, unless it is ended."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Work:
    """The tensors of one version. Their memory has to stay until `sums` is done; what is in it then is another matter:
    whoever lets go of it says so with `end`, and the hashes are nobody's."""

    def __init__(self, tensors: Sequence[torch.Tensor], pool: ThreadPoolExecutor, lanes: int) -> None:
        self.sums: Future[list[str]] = Future()
        self.hashed, self.total = 0, sum(tensor.nbytes for tensor in tensors)
        self._pool, self._lock = pool, threading.Lock()
        self._found = [""] * len(tensors)
        self._left = deque(enumerate(tensors))
        self._lanes = lanes
        for _ in range(lanes):
            self._next(self._lane())

    def end(self, error: BaseException) -> None:
        with contextlib.suppress(InvalidStateError):  # it is over already
            self.sums.set_exception(error)

    def _next(self, lane: Iterator[None]) -> None:
        try:
            self._pool.submit(self._turn, lane)
        except RuntimeError as error:  # the pool is closed
            self.end(error)

    def _turn(self, lane: Iterator[None]) -> None:
        if self.sums.done():
            return
        try:
            for _ in lane:
                self._next(lane)
                return
        except Exception as error:  # it must not be waited for for ever
            self.end(error)
            return
        with self._lock:
            self._lanes -= 1
            last = not self._lanes
        if last:
            with contextlib.suppress(InvalidStateError):
                self.sums.set_result(self._found)

    def _lane(self) -> Iterator[None]:
        """Tensor after tensor, as long as there are any; a pause after each SLICE bytes."""
        room = SLICE
        while True:
            try:
                index, tensor = self._left.popleft()
            except IndexError:
                return
            view, at, digest = memory(tensor), 0, hashlib.sha256()
            while at < len(view):
                piece = view[at : at + room]
                digest.update(piece)
                at, room = at + len(piece), room - len(piece)
                with self._lock:
                    self.hashed += len(piece)
                if not room:
                    room = SLICE
                    yield
            self._found[index] = digest.hexdigest()
