"""Asking other nodes that mirror the same group for what is missing of an iteration, all of them at once.

    peers = Peers(addresses, token, who, seconds)
    peers.ask(iteration, spans)             one question to each
    peers.answers()                         None: somebody is still at it; else what has come
    peers.close()

A thread for each peer, made when it is asked for the first time. It connects, proves that it knows the token, asks,
and takes the answer, all within the time of the question; then it waits for the next one. A peer that is late, gone or
wrong is let go, and not asked again for PAUSE seconds, or DISTRUST; what it was asked for is somebody else's. The
caller never waits.

What a peer sends is believed to be this: bytes of just this run, epoch and iteration, where the same plan puts them
(Who.plan stands for all that decides that), inside what was asked for, as many as it says, with the SHA-256 it says. It
is held against what is here by rebuild/iteration/given.py. That it is the trainer's is not known before a checksum has
matched.
"""

from __future__ import annotations

import hashlib
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flowcheck.control.protocol import RANGES_TEXT, Bytes, Holes, Limits, Link, RecordsError, Refused, Span, greet
from flowcheck.control.tls import Secure
from flowcheck.errors import FlowcheckError
from flowcheck.rebuild.iteration.given import Answer

__all__ = ["DISTRUST", "PAUSE", "Peers", "Who", "checked", "dial"]

PAUSE = 5.0
Token = bytes | Callable[[], bytes]
DISTRUST = 300.0  # seconds; one of the two nodes is wrong, and each answer would void more
CELL = 8


@dataclass(frozen=True)
class Who:
    """What both nodes must follow. run_id, epoch: as trainers say hello. group: its name at both. plan: 64 hexadecimal
    digits."""

    run_id: str
    epoch: int
    group: str
    plan: str


class Peers:
    """addresses: (host, port) of control ports. token: asked for each connection, if it is a callable. tls: None: not
    encrypted. seconds: for an answer. Iterations are the trainer's numbers."""

    def __init__(
        self, addresses: Sequence[tuple[str, int]], token: Token, who: Who, seconds: float,
        now: Callable[[], float] = time.monotonic, tls: ssl.SSLContext | None = None,
    ) -> None:
        self._now, self._seconds = now, seconds
        self._peers = [_Peer(address, token, who, now, tls) for address in addresses]
        self._question: _Question | None = None
        self._requests = 0
        self.failed: Mapping[str, str] = {}

    def ask(self, iteration: int, spans: Sequence[Span]) -> None:
        self._requests += 1
        self._question = _Question(self._requests, iteration, tuple(spans), self._now() + self._seconds)
        for peer in self._peers:
            peer.put(self._question)

    def answers(self) -> list[Answer] | None:
        question = self._question
        if question is None:
            return []
        said = question.said()
        if len(said) < len(self._peers) and self._now() < question.deadline:
            return None
        self._question = None
        late = {peer.name: "no answer in time" for peer in self._peers if peer.name not in said}
        self.failed = late | {name: found for name, found in said.items() if isinstance(found, str)}
        return [found for found in said.values() if isinstance(found, Answer)]

    def distrust(self, refused: Mapping[str, str]) -> None:
        """What these peers gave differs from what is here, or from what another one gave."""
        for peer in self._peers:
            if peer.name in refused:
                peer.pause(refused[peer.name], DISTRUST)

    def close(self) -> None:
        """Let go of all connections and threads. Idempotent."""
        for peer in self._peers:
            peer.end()
        for peer in self._peers:
            peer.join()


class _Question:
    def __init__(self, request: int, iteration: int, spans: tuple[Span, ...], deadline: float) -> None:
        self.request, self.iteration, self.spans, self.deadline = request, iteration, spans, deadline
        self._lock = threading.Lock()
        self._said: dict[str, Answer | str] = {}

    def say(self, peer: str, found: Answer | str) -> None:
        with self._lock:
            self._said[peer] = found

    def said(self) -> dict[str, Answer | str]:
        with self._lock:
            return dict(self._said)


class _Peer:
    """One of them: a thread, and the connection that it keeps."""

    def __init__(
        self, address: tuple[str, int], token: Token, who: Who, now: Callable[[], float], tls: ssl.SSLContext | None
    ) -> None:
        self._tls = tls
        self._address, self._token, self._who, self._now = address, token, who, now
        self.name = f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._ended = False
        self._paused = ("", 0.0)  # why, and until when, it is not asked

    def put(self, question: _Question) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=f"flowcheck peer {self.name}", daemon=True)
            self._thread.start()
        self._questions.put(question)

    def pause(self, why: str, seconds: float) -> None:
        self._paused = why, self._now() + seconds

    def end(self) -> None:
        with self._lock:
            self._ended = True
            if self._link is not None:
                self._link.close()
        self._questions.put(None)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _main(self) -> None:
        while (question := self._questions.get()) is not None:
            why, again = self._paused
            if self._now() < again:
                question.say(self.name, f"not asked: {why}")
                continue
            try:
                question.say(self.name, self._put(question))
            except (FlowcheckError, OSError) as error:
                self._let_go()
                why = error.what if isinstance(error, FlowcheckError) else error.strerror or "no answer in time"
                self.pause(why, PAUSE)
                question.say(self.name, why)
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()

    def _put(self, question: _Question) -> Answer | str:
        """Raises RecordsError, OSError (TimeoutError among them)."""
        link = self._link or self._connect(question)
        left = self._left(question)
        ranges = [list(span) for span in question.spans]
        link.send(Holes(question.request, question.iteration, self._who.plan, ranges, left), seconds=left)
        most = sum(length for _, length in question.spans)
        link.limits = lambda: Limits(RANGES_TEXT, {"bytes": most}, self._left(question), float("inf"))
        message, size = link.receive(wait=self._left(question))
        if isinstance(message, Refused):
            raise RecordsError(f"refused: {message.why}", where=link.peer)
        if not isinstance(message, Bytes):
            raise RecordsError(f"a {type(message).__name__} where bytes were due", where=link.peer)
        payload = link.payload(size)
        found = checked(question.request, question.iteration, question.spans, message, payload)
        return Answer(self.name, found) if found else message.why

    def _connect(self, question: _Question) -> Link:
        link = dial(self._address, self._tls, self._left(question))
        with self._lock:
            self._link = link
            ended = self._ended
        if ended:
            raise RecordsError("not needed any more", where=link.peer)
        link.limits = lambda: Limits(seconds=self._left(question))
        who = self._who
        token = self._token() if callable(self._token) else self._token
        greet(link, token, run_id=who.run_id, epoch=who.epoch, rank=0, ranks=1, group=who.group, role="peer")
        return link

    def _left(self, question: _Question) -> float:
        """Seconds. Raises TimeoutError."""
        left = question.deadline - self._now()
        if left <= 0:
            raise TimeoutError("no answer in time")
        return left


def dial(address: tuple[str, int], tls: ssl.SSLContext | None, seconds: float) -> Link:
    """A connection to a control port, before its opening. Raises OSError."""
    sock = socket.create_connection(address, timeout=seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Link(sock, Secure(sock, tls, address[0]) if tls is not None else None)


def checked(
    request: int, iteration: int, spans: Sequence[Span], message: Bytes, payload: bytearray
) -> tuple[tuple[int, memoryview], ...]:
    """(first byte, bytes) of each range of an answer; () if it has none. Raises RecordsError if it does not answer the
    question, or not what it says."""
    if (message.request, message.iteration) != (request, iteration):
        raise RecordsError(f"an answer to question {message.request}, iteration {message.iteration}, not to {request},"
                           f" {iteration}")
    if sum(length for _, length in message.ranges) != len(payload):
        raise RecordsError(f"{len(payload)} bytes, and its ranges have another sum")
    if not message.ranges:
        return ()
    if hashlib.sha256(payload).hexdigest() != message.digest:
        raise RecordsError("its bytes do not have the sum that it says")
    found, at, asked = [], 0, 0
    for start, length in message.ranges:
        while asked < len(spans) and start >= sum(spans[asked]):
            asked += 1
        if asked == len(spans) or start < spans[asked][0] or start + length > sum(spans[asked]):
            raise RecordsError(f"{length} bytes from {start} on were not asked for")
        if (start + length) % CELL and start + length != sum(spans[asked]):
            raise RecordsError(f"{length} bytes from {start} on end within a cell")
        found.append((start, memoryview(payload)[at : at + length]))
        at += length
    return tuple(found)
