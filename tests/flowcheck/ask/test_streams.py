"""A file's bytes over connections that a test makes, second by second, and hashing beside what still comes."""

from __future__ import annotations

import hashlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowcheck.ask import receiving
from flowcheck.ask.pace import Pace
from flowcheck.ask.receiving import ATTEMPTS, HASHERS, AskError, Hashing, Received, Stream
from flowcheck.control.tensors import CHUNK

DATA = bytes(range(256)) * 4
WHERE = "127.0.0.1:1, memory: a file"


class Hand:
    """A source. Each connection sends so many bytes of what was asked for and then ends. lengths: what answers say of
    it, one for each, in place of the truth. broken: errors of connections that cannot be made, first of all."""

    def __init__(self, *connections: int, data: bytes = DATA, encrypted: bool = False, seconds: float = 10.0) -> None:
        self.received, self.seconds = 0, seconds
        self.pace: Pace | None = None
        self.plain: socket.socket | None = None
        self.asked: list[tuple[str, int, int]] = []
        self.lengths: list[int | None] = []
        self.broken: list[Exception] = []
        self.connections, self.data, self.encrypted = list(connections), data, encrypted
        self._open: list[Any] = []

    def open(self, path: str, first: int = 0, most: int = 0) -> http.client.HTTPResponse:
        self.asked.append((path, first, most))
        if self.broken:
            raise self.broken.pop(0)
        near, far = socket.socketpair()
        near.settimeout(self.seconds)
        length = self.lengths.pop(0) if self.lengths else len(self.data) - first
        head = b"HTTP/1.1 200 OK\r\n" + (b"" if length is None else b"Content-Length: %d\r\n" % length) + b"\r\n"
        body = self.data[first : first + self.connections.pop(0)]
        sending = threading.Thread(target=self._send, args=(far, head + body))
        sending.start()
        response = http.client.HTTPResponse(near)
        self._open += [sending, response, near]
        response.begin()
        self.plain = None if self.encrypted else near
        return response

    def _send(self, sock: socket.socket, data: bytes) -> None:
        with sock:
            sock.sendall(data)

    def lost(self, error: Exception) -> AskError:
        return AskError(f"lost: {error}")

    def close(self) -> None:
        for one in self._open:
            one.join() if isinstance(one, threading.Thread) else one.close()


@pytest.fixture
def hand() -> Iterator[Any]:
    made: list[Hand] = []

    def make(*given: Any, **named: Any) -> Hand:
        made.append(Hand(*given, **named))
        return made[-1]

    yield make
    for one in made:
        one.close()


def refused(call: Any, *given: Any) -> str:
    with pytest.raises(AskError) as caught:
        call(*given)
    assert caught.value.where == WHERE
    return caught.value.what


def views(*sizes: int) -> tuple[list[bytearray], list[memoryview]]:
    made = [bytearray(size) for size in sizes]
    return made, [memoryview(one) for one in made]


# -- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("sizes", [(1024,), (1, 0, 1023), (7,) * 146 + (2,), (1000, 24), (0, 1024, 0)])
def test_views_are_filled_one_after_the_other(hand: Any, sizes: tuple[int, ...], encrypted: bool) -> None:
    one = hand(1024, encrypted=encrypted)
    stream = Stream(one, "/file", WHERE, 1024)
    made, given = views(*sizes)
    stream.fill(given)
    assert b"".join(made) == DATA and [len(part) for part in made] == list(sizes)
    assert (stream.size, one.received, one.asked) == (1024, 1024, [("/file", 0, 1024)])


def test_what_is_taken_is_as_much_as_was_asked_for(hand: Any) -> None:
    stream = Stream(hand(1024), "/file", WHERE, 1024)
    assert (stream.take(8), stream.take(0), stream.take(500), stream.take(516)) == (
        DATA[:8], b"", DATA[8:508], DATA[508:])


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_connection_that_ends_goes_on_in_the_next(hand: Any, encrypted: bool) -> None:
    one = hand(10, 600, 1024, encrypted=encrypted)
    made, given = views(4, 1000, 20)
    Stream(one, "/file", WHERE, 1024).fill(given)
    assert b"".join(made) == DATA and [first for _, first, _ in one.asked] == [0, 10, 610]
    assert one.received == 1024


def test_of_connections_that_break_there_are_three(hand: Any) -> None:
    one = hand(10, 10, 10)
    assert refused(Stream(one, "/file", WHERE, 1024).take, 1024) == "lost: closed before its end"
    assert len(one.asked) == ATTEMPTS == 3 and one.received == 30
    one = hand(1024)
    one.broken = [OSError("a"), http.client.BadStatusLine("b")]
    assert Stream(one, "/file", WHERE, 1024).take(1024) == DATA and len(one.asked) == 3
    one = hand(1024)
    one.broken = [OSError("a"), OSError("b"), OSError("c")]
    assert refused(Stream, one, "/file", WHERE, 1024) == "lost: c" and len(one.asked) == 3


def test_an_answer_says_how_long_it_is_and_twice_the_same(hand: Any) -> None:
    why = "does not say how long its answer is, or not twice the same"
    one = hand(1024)
    one.lengths = [None]
    assert refused(Stream, one, "/file", WHERE, 1024) == why
    for second in (1013, 1015):
        one = hand(10, 1024)
        one.lengths = [1024, second]
        assert refused(Stream(one, "/file", WHERE, 2048).take, 1024) == why
    assert refused(Stream, hand(1024), "/file", WHERE, 1023) == "is longer than what its manifest lists"
    empty = Stream(hand(0, data=b""), "/file", WHERE, 0)
    assert (empty.size, empty.take(0)) == (0, b"")


def test_more_than_there_is_is_not_waited_for(hand: Any) -> None:
    one = hand(1024, 0, 0)
    assert refused(Stream(one, "/file", WHERE, 1024).take, 1025) == "lost: closed before its end"


# -- time ------------------------------------------------------------------------------------------------------------


class Slow:
    """The clock of receiving.py: it moves by `each` with each receiving."""

    def __init__(self, patch: pytest.MonkeyPatch, each: float) -> None:
        self.now, self._each, self._asked = 100.0, each, 0
        patch.setattr(receiving, "time", SimpleNamespace(monotonic=self._monotonic))

    def _monotonic(self) -> float:
        self._asked += 1
        self.now += 0.0 if self._asked % 2 else self._each
        return self.now


@pytest.mark.parametrize(("seconds", "times"), [(10.0, 4), (3.0, 4), (15.0, 6)])
def test_who_is_waited_for_too_long_is_given_up(
    hand: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, times: int
) -> None:
    """Ten seconds, or as long as its node may be silent, in all; here each byte takes three."""
    monkeypatch.setattr(receiving, "RATE", 1e12)
    Slow(monkeypatch, 3.0)
    stream = Stream(hand(1024, seconds=seconds), "/file", WHERE, 1024)
    for _ in range(times):
        stream.take(1)
    assert refused(stream.take, 1) == f"too slow: {1024 - times} bytes still missing"


def test_bytes_that_came_give_time_for_more(hand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "RATE", 100.0)
    Slow(monkeypatch, 5.0)
    stream = Stream(hand(1024), "/file", WHERE, 1024)
    for size in (200, 1, 1):  # 5 of 10, 10 of 12, 15 of 12.01
        stream.take(size)
    assert refused(stream.take, 1) == "too slow: 822 bytes still missing"


def test_a_deadline_that_is_just_kept_is_kept(hand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "RATE", 1e300)
    Slow(monkeypatch, 5.0)
    stream = Stream(hand(1024), "/file", WHERE, 1024)
    assert len(stream.take(1) + stream.take(1) + stream.take(1)) == 3
    assert refused(stream.take, 1).startswith("too slow")


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_reader_with_a_pace_takes_a_piece_at_a_time(hand: Any, encrypted: bool) -> None:
    data, slept = bytes(range(251)) * 1200, list[float]()
    one = hand(len(data), data=data, encrypted=encrypted)
    one.pace = Pace(1e6, lambda: 0.0, slept.append)
    assert one.pace.piece == 65536
    assert Stream(one, "/file", WHERE, len(data)).take(len(data)) == data
    assert slept[-1] == pytest.approx(len(data) / 1e6) and len(slept) >= len(data) // 65536
    counts = [round(1e6 * (now - before)) for before, now in zip([0.0, *slept], slept, strict=False)]
    assert sum(counts) == len(data) and max(counts) <= 65536


def test_a_reader_without_one_takes_as_much_as_there_is(hand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    data = bytes(CHUNK + 100)
    stream = Stream(hand(len(data), data=data), "/file", WHERE, len(data))
    real = Stream._receive

    def receive(self: Stream, left: Any) -> int:
        asked.append(real(self, left))
        return asked[-1]

    monkeypatch.setattr(Stream, "_receive", receive)
    assert stream.take(len(data)) == data and max(asked) <= CHUNK and len(asked) <= 4


def test_one_call_waits_for_all_that_is_wanted(hand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the bytes come: nobody looks at each packet."""
    one, calls, real = hand(1024), list[int](), Stream._receive
    monkeypatch.setattr(one, "_send", lambda sock, data: _in_two(sock, data))

    def receive(self: Stream, left: Any) -> int:
        calls.append(real(self, left))
        return calls[-1]

    monkeypatch.setattr(Stream, "_receive", receive)
    stream = Stream(one, "/file", WHERE, 1024)
    early = len(stream._early)
    assert stream.take(1024) == DATA and calls == [count for count in (early, 1024 - early) if count]


def _in_two(sock: socket.socket, data: bytes) -> None:
    with sock:
        sock.sendall(data[:-500])
        time.sleep(0.02)
        sock.sendall(data[-500:])


@pytest.mark.parametrize(("seconds", "expected"), [(2.5, (2, 500_000)), (0.5, (0, 500_000)), (None, (0, 0))])
def test_a_call_waits_as_long_as_its_node_may_be_silent(
    hand: Any, seconds: float, expected: tuple[int, int]
) -> None:
    one = hand(1024, seconds=seconds)
    Stream(one, "/file", WHERE, 1024)
    assert one.plain.gettimeout() is None
    assert struct.unpack("@ll", one.plain.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)) == expected


# -- hashing ---------------------------------------------------------------------------------------------------------


def received(name: str, value: float, good: bool = True, into: torch.Tensor | None = None) -> Received:
    tensor = torch.full((2,), value)
    digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    return Received(name, tensor, digest if good else "0" * 64, into)


def test_what_agrees_is_written_where_it_is_wanted() -> None:
    into, other = torch.zeros(2, requires_grad=True), torch.zeros(2)
    with Hashing(WHERE) as hashing:
        hashing.add([received("a", 1.0, into=into), received("b", 2.0)])
        hashing.add([received("c", 3.0, into=other)])
    assert into.tolist() == [1.0, 1.0] and other.tolist() == [3.0, 3.0]


def test_what_does_not_is_named_and_not_written() -> None:
    into, after = torch.zeros(2), torch.zeros(2)

    def hash_them() -> None:
        with Hashing(WHERE) as hashing:
            hashing.add([received("a", 1.0), received("b", 2.0, False, into), received("c", 3.0, True, after)])

    assert refused(hash_them) == "tensor 'b' has other bytes than its manifest says (SHA-256 differs)"
    assert into.tolist() == after.tolist() == [0.0, 0.0]


def test_a_bad_one_is_known_soon() -> None:
    """Nobody receives the rest of a file of which the first tensor was bad."""
    hashing, added = Hashing(WHERE), 0
    with pytest.raises(AskError, match="tensor 'bad'"), hashing:
        hashing.add([received("bad", 1.0, False)])
        for _ in range(2 * HASHERS):
            hashing.add([received("good", 1.0)])
            added += 1
        raise AssertionError("it was not looked at")
    assert added < 2 * HASHERS


def test_few_wait_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow hashing is, receiving does not run away from it."""
    may, hashed = threading.Event(), list[str]()
    real = receiving._sums

    def sums(tensors: Any) -> list[str]:
        may.wait(60)
        hashed.append(tensors[0].name)
        return real(tensors)

    monkeypatch.setattr(receiving, "_sums", sums)
    with Hashing(WHERE) as hashing:
        for number in range(2 * HASHERS):
            hashing.add([received(str(number), 1.0)])
        assert len(hashing._waiting) == 2 * HASHERS and not hashed
        letting = threading.Timer(0.05, may.set)
        letting.start()
        hashing.add([received("last", 1.0)])  # waits for the first
        assert hashed and len(hashing._waiting) <= 2 * HASHERS
        letting.join()
    assert len(hashed) == 2 * HASHERS + 1


def test_another_error_is_not_hidden_by_what_was_not_hashed_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    may = threading.Event()
    real = receiving._sums
    monkeypatch.setattr(receiving, "_sums", lambda tensors: (may.wait(60), real(tensors))[1])
    with pytest.raises(KeyError, match="its own"), Hashing(WHERE) as hashing:
        hashing.add([received("bad", 1.0, False)])
        may.set()
        raise KeyError("its own")
    assert not any(thread.name.startswith("flowcheck hash") for thread in threading.enumerate())


def test_what_nobody_needs_any_more_is_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight that wait, those that threads have begun end, and no other one begins."""
    may, begun = threading.Event(), list[str]()
    real = receiving._sums

    def sums(tensors: Any) -> list[str]:
        begun.append(threading.current_thread().name)
        may.wait(60)
        return real(tensors)

    monkeypatch.setattr(receiving, "_sums", sums)
    letting = threading.Timer(0.05, may.set)
    with pytest.raises(KeyError), Hashing(WHERE) as hashing:
        for _ in range(2 * HASHERS):
            hashing.add([received("good", 1.0)])
        while len(begun) < HASHERS:
            time.sleep(0.001)
        letting.start()
        raise KeyError
    letting.join()
    assert len(begun) == HASHERS and all(name.startswith("flowcheck hash") for name in begun)
