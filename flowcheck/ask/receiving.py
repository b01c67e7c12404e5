"""Receiving a file of a node's: its bytes straight into memory that is there, and hashing of what has come.

    stream = Stream(node, path, where, most)   the answer has begun; stream.size: of the file, at most `most`
    stream.fill([view, ...])                   exactly these bytes, one view after the other
    with Hashing(where) as hashing:
        hashing.add([(name, tensor, sha256, into), ...])

A connection that is not encrypted is read from its socket, past http.client: many tensors in one call, which the kernel
fills as bytes come, without a copy and without a look at each packet. Torch and the standard library. One thread.
"""

from __future__ import annotations

import hashlib
import http.client
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch

from flowcheck.ask.pace import Pace
from flowcheck.control.tensors import CHUNK, memory
from flowcheck.errors import FlowcheckError

__all__ = ["RATE", "SECONDS", "AskError", "Hashing", "Received", "Source", "Stream"]

SECONDS = 10.0  # without a byte
RATE = 1e6  # bytes per second that an answer must have
ATTEMPTS = 3  # connections for one file
HASHERS = 4  # threads
VIEWS = 256  # in one call: the kernel takes 1024


class AskError(FlowcheckError):
    """The node is gone, slow, does not know the key, or sent something other than what it should be. remedy: it is
    there, and was asked wrongly: what to do; "" otherwise."""

    exit_code = 3


class Source(Protocol):
    """A node, as ask.py has it."""

    received: int
    seconds: float  # that it may be silent
    pace: Pace | None  # at which files are read; None: as they come

    def open(self, path: str, first: int = 0, most: int = 0) -> http.client.HTTPResponse:
        """The answer to a request, from byte `first` on, of at most so many bytes."""

    @property
    def plain(self) -> socket.socket | None:
        """What that answer comes over; None: encrypted."""

    def lost(self, error: Exception) -> AskError:
        """In words."""


class Stream:
    """The bytes of one file, in order, over as many connections as it takes."""

    def __init__(self, node: Source, path: str, where: str, most: int) -> None:
        self._node, self._path, self._where, self._most = node, path, where, most
        self._at = 0  # bytes taken
        self._attempts = ATTEMPTS
        self._response: http.client.HTTPResponse | None = None
        self._early = memoryview(b"")  # what came with the head of the answer
        self._piece = CHUNK if node.pace is None else min(CHUNK, node.pace.piece)  # bytes at once
        self.size = -1  # of the file
        self._waited = 0.0  # seconds, for bytes: what is done with them takes as long as it takes
        self._open()

    def take(self, count: int) -> bytes:
        data = bytearray(count)
        self.fill([memoryview(data)])
        return bytes(data)

    def fill(self, views: Sequence[memoryview]) -> None:
        """Exactly so many bytes. Raises AskError."""
        left = deque(view for view in views if view)
        while left:
            count = self._some(left)
            while count:
                view = left.popleft()
                if count < len(view):
                    left.appendleft(view[count:])
                count -= min(count, len(view))

    def _some(self, views: deque[memoryview]) -> int:
        """One byte at least, into these."""
        while True:
            if self._waited > max(SECONDS, self._node.seconds) + self._at / RATE:
                raise AskError(f"too slow: {self.size - self._at} bytes still missing", where=self._where)
            if self._response is None:
                self._open()
            why: Exception = EOFError("closed before its end")
            began = time.monotonic()
            try:
                count = self._receive(views)
            except (OSError, http.client.HTTPException) as error:
                count, why = 0, error
            self._waited += time.monotonic() - began
            if count:
                self._at += count
                self._node.received += count
                if self._node.pace is not None:
                    self._node.pace.take(count)
                return count
            self._response = None
            self._again(why)

    def _receive(self, views: deque[memoryview]) -> int:
        """At most a piece, so that the deadline is looked at. 0: there are no more."""
        assert self._response is not None
        sock, first = self._node.plain, views[0]
        if self._early or sock is None:
            count = min(len(self._early), len(first))
            if not count:
                return self._response.readinto(first[: self._piece])
            first[:count], self._early = self._early[:count], self._early[count:]
            return count
        room = min(self._piece, self.size - self._at)
        taken: list[memoryview] = []
        for view in views:
            if room <= 0 or len(taken) == VIEWS:
                break
            taken.append(view[:room])
            room -= len(taken[-1])
        if not taken:
            return 0
        try:
            return sock.recvmsg_into(taken, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:  # SO_RCVTIMEO is over
            raise TimeoutError from None

    def _open(self) -> None:
        while True:
            try:
                self._response = self._node.open(self._path, self._at, self._most)
                left = self._response.length
                if left is None or (self.size >= 0 and left != self.size - self._at):
                    raise AskError("does not say how long its answer is, or not twice the same", where=self._where)
                if left > self._most:
                    raise AskError("is longer than what its manifest lists", where=self._where)
                self._early = self._begun(self._response, left)
            except (OSError, http.client.HTTPException) as error:
                self._again(error)
                continue
            self.size = self._at + left
            return

    def _begun(self, response: http.client.HTTPResponse, left: int) -> memoryview:
        """What http.client has read of the body already: from here on its socket is read."""
        sock: Any = self._node.plain
        if sock is None or not left:
            return memoryview(b"")
        early = memoryview(response.fp.peek())[:left]
        seconds = sock.gettimeout() or 0.0
        sock.settimeout(None)  # else each call would ask first whether there is something
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))
        return early

    def _again(self, error: Exception) -> None:
        self._attempts -= 1
        if not self._attempts:
            raise AskError(self._node.lost(error).what, where=self._where) from None


class Received(NamedTuple):
    """A tensor that has come. into: where it is copied once its hash agreed."""

    name: str
    tensor: torch.Tensor
    sha256: str
    into: torch.Tensor | None


class Hashing:
    """Tensors are hashed by threads while later ones arrive: hashing takes as long as receiving. At the end of the
    context every hash has agreed, or AskError was raised. Few wait at a time, so that a bad one is known soon."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._pool = ThreadPoolExecutor(HASHERS, "flowcheck hash")
        self._waiting: deque[tuple[Sequence[Received], Future[list[str]]]] = deque()

    def __enter__(self) -> Hashing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while self._waiting and kind is None:
                self._check()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def add(self, tensors: Sequence[Received]) -> None:
        """One thread hashes them. Raises AskError, of these or earlier ones."""
        self._waiting.append((tensors, self._pool.submit(_sums, tensors)))
        while self._waiting and (len(self._waiting) > 2 * HASHERS or self._waiting[0][1].done()):
            self._check()

    def _check(self) -> None:
        tensors, found = self._waiting.popleft()
        for one, sha256 in zip(tensors, found.result(), strict=True):
            if sha256 != one.sha256:
                raise AskError(f"tensor {one.name!r} has other bytes than its manifest says (SHA-256 differs)",
                               where=self._where)
            if one.into is not None:
                with torch.no_grad():
                    one.into.copy_(one.tensor)


def _sums(tensors: Sequence[Received]) -> list[str]:
    return [_sha256(one.tensor) for one in tensors]


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(memory(tensor)).hexdigest()
