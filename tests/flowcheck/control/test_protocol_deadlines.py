"""Deadlines of a connection, what is asked of its sockets, and what is left of them.

Real sockets, which note what is asked of them. The clock is the test's own: it moves when a test says so.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from flowcheck.control import link as records
from flowcheck.control.protocol import Bye, Limits, Link, RecordsError, State, accept

BYE = b"FCR1" + bytes([0, 0, 0, 14]) + bytes(8) + b'{"type":"bye"}'
STEP = 8 * 1024 * 1024
TOGETHER = 64 << 10  # bytes that go out in one piece with their message


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Noted(socket.socket):
    """A real socket that notes what is asked of it. Each recv and send may let time pass, or fail."""

    clock: Clock
    passes = 0.0
    fails: OSError | None = None
    timeouts: list[float | None]
    asked: list[int]
    made: list[Noted]

    def settimeout(self, value: float | None) -> None:
        self.timeouts.append(value)
        super().settimeout(value)

    def recv(self, size: int, flags: int = 0) -> bytes:
        self.asked.append(size)
        if self.fails is not None and size > 1:
            raise self.fails
        got = super().recv(size, flags)
        self.clock.now += self.passes
        return got

    def send(self, data: Any, flags: int = 0) -> int:
        self.asked.append(len(data))
        sent = super().send(data, flags)
        self.clock.now += self.passes
        return sent

    def dup(self) -> Noted:
        twin = super().dup()
        self.made.append(twin)
        return twin


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Link, type[Noted], socket.socket]]:
    """A link whose clock stands still, the class of its sockets, and the raw other end of the connection."""
    clock = Clock()
    monkeypatch.setattr(records, "time", clock)
    kind = type("NotedHere", (Noted,), {"clock": clock, "timeouts": [], "asked": [], "made": []})
    near, far = socket.socketpair()
    far.settimeout(10)
    mine = kind(fileno=near.detach())
    kind.made.append(mine)
    link = Link(mine)
    kind.timeouts.clear()
    yield link, kind, far
    link.close()
    far.close()


def test_a_reader_waits_long_for_the_first_byte_and_five_seconds_for_the_rest(noted: Any) -> None:
    link, kind, far = noted
    far.sendall(BYE)
    link.receive()
    assert kind.timeouts == [1e6, 5.0, 5.0] and kind.asked == [1, 15, 14]
    kind.timeouts.clear()
    far.sendall(BYE)
    link.receive(wait=0.5)
    assert kind.timeouts == [0.5, 5.0, 5.0]


def test_the_seconds_are_for_the_whole_frame(noted: Any) -> None:
    link, kind, far = noted
    link.peer = "host:1"
    link.limits = lambda: Limits(seconds=3.0)
    kind.passes = 1.5  # for each piece; the first byte begins the frame
    far.sendall(BYE[:-1])
    with pytest.raises(RecordsError) as late:
        link.receive()
    assert kind.timeouts == [1e6, 3.0, 1.5]
    assert (late.value.what, late.value.where) == ("too slow: 1 bytes of a message still missing", "host:1")


def test_the_deadline_itself_is_too_late(noted: Any) -> None:
    link, kind, far = noted
    kind.passes = 5.0
    far.sendall(BYE)
    with pytest.raises(RecordsError, match="too slow: 14 bytes of a message still missing"):
        link.receive()


@pytest.mark.parametrize(("limits", "size", "seconds"), [
    (Limits(), 2_000_000, 7.0),
    (Limits(seconds=30.0, rate=1000.0), 500, 30.5),
    (Limits(seconds=1.0, rate=4.0), 0, None),
])
def test_a_payload_must_come_at_its_rate(noted: Any, limits: Limits, size: int, seconds: float | None) -> None:
    link, kind, far = noted
    link.limits = lambda: limits
    kind.passes = seconds or 0.0
    far.send(b"x")
    if seconds is None:
        assert link.payload(size) == b"" and kind.timeouts == []
        return
    with pytest.raises(RecordsError, match=f"too slow: {size - 1} bytes"):
        link.payload(size)
    assert kind.timeouts == [seconds]


def test_nothing_within_the_wait_is_a_timeout_and_loses_nothing(noted: Any) -> None:
    link, _, far = noted
    with pytest.raises(TimeoutError):
        link.receive(wait=0.001)
    far.sendall(BYE)
    assert link.receive(wait=10) == (Bye(), 0)


@pytest.mark.parametrize(("size", "options", "seconds"), [
    (0, {}, 10.0), (0, {"seconds": 1.0}, 1.0), (5_000_000, {}, 15.0), (20_000_000, {"seconds": 1.0}, 3.0),
])
def test_a_writer_has_ten_seconds_and_ten_more_for_each_ten_megabytes(
    noted: Any, size: int, options: dict[str, float], seconds: float
) -> None:
    link, kind, _ = noted
    try:
        link.send(State(1), [], size, **options)
    except RecordsError as error:
        assert size and "announced" in error.what
    assert kind.timeouts == [seconds]


def test_the_writers_seconds_are_for_all_of_it(noted: Any) -> None:
    link, kind, _ = noted
    link.peer = "host:1"
    kind.passes = 4.0
    with pytest.raises(RecordsError) as slow:
        link.send(State(1), [bytes(TOGETHER), b"b", b"c"], TOGETHER + 2, seconds=10 / (1 + (TOGETHER + 2) / 1e7))
    assert kind.timeouts == pytest.approx([10.0, 6.0, 2.0])
    assert (slow.value.what, slow.value.where) == ("too slow: it does not take what is sent", "host:1")


def test_a_peer_that_does_not_read_ends_the_writer(noted: Any) -> None:
    link, _, _ = noted
    with pytest.raises(RecordsError, match="too slow: it does not take what is sent"):
        link.send(State(1), [bytes(1 << 20)] * 64, 64 << 20, seconds=0.005)


def test_reader_and_writer_have_timeouts_of_their_own(noted: Any) -> None:
    link, _, far = noted
    waits = threading.Thread(target=lambda: far.sendall(BYE) if far.recv(1) else None)
    waits.start()
    link.send(Bye(), seconds=1.0)
    assert link.receive() == (Bye(), 0)
    waits.join()


def test_much_is_taken_and_given_in_steps(noted: Any) -> None:
    link, kind, far = noted
    link.limits = lambda: Limits(rate=1e12)
    far.sendall(b"x")
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(RecordsError):
        link.payload(STEP + 2)
    assert kind.asked == [STEP, STEP]  # one byte has come
    kind.asked.clear()
    with pytest.raises(RecordsError, match="too slow"):  # nobody reads
        link.send(State(1), [bytes(STEP + 1)], STEP + 1, seconds=0.5)
    assert kind.asked[1] == STEP and max(kind.asked) == STEP


def test_not_a_byte_of_the_next_message_is_asked_for(noted: Any) -> None:
    link, kind, far = noted
    far.sendall(b"ab")
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(RecordsError, match="3 bytes before its end"):
        link.payload(5)
    assert kind.asked == [5, 3]


def test_a_challenge_has_no_longer_than_its_answer(noted: Any) -> None:
    link, kind, far = noted
    link.limits = lambda: Limits(seconds=0.25)
    far.close()
    with pytest.raises(RecordsError, match="connection lost: Broken pipe"):
        accept(link, b"a token that only tests have")
    assert kind.timeouts == [0.25]


@pytest.mark.parametrize(("error", "what"), [
    (OSError(errno.ECONNRESET, "Connection reset by peer"), "connection lost: Connection reset by peer"),
    (OSError("odd"), "connection lost: odd"),
])
def test_a_connection_that_is_lost_within_a_message(noted: Any, error: OSError, what: str) -> None:
    link, kind, far = noted
    link.peer = "host:1"
    kind.fails = error
    far.sendall(BYE)
    with pytest.raises(RecordsError) as lost:
        link.receive()
    assert (lost.value.what, lost.value.where) == (what, "host:1")


def test_close_wakes_a_reader_tells_the_peer_and_leaves_no_descriptor(noted: Any) -> None:
    link, kind, far = noted
    said: list[str] = []
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        try:
            link.receive()
        except RecordsError as error:
            said.append(error.what)

    reader = threading.Thread(target=wait)
    reader.start()
    begun.wait(10)
    link.close()
    link.close()
    reader.join(10)
    assert said and "connection" in said[0]
    assert far.recv(1) == b""
    assert len(kind.made) == 2 and all(sock.fileno() == -1 for sock in kind.made)
    with pytest.raises(RecordsError, match="connection closed"):
        link.send(Bye())
    with pytest.raises(RecordsError, match="connection closed"):
        link.receive()


class Held(socket.socket):
    """A real socket whose callers stand still right before the system call, until they are let go."""

    there: threading.Event
    go: threading.Event

    def recv(self, size: int, flags: int = 0) -> bytes:
        self._stand()
        return super().recv(size, flags)

    def send(self, data: Any, flags: int = 0) -> int:
        self._stand()
        return super().send(data, flags)

    def dup(self) -> Any:
        return self

    def _stand(self) -> None:
        self.there.set()
        assert self.go.wait(240)


@pytest.mark.parametrize("call", ["receive", "payload", "send"])
def test_a_descriptor_is_given_back_only_when_nobody_is_about_to_use_it(call: str) -> None:
    """Else the system call would be made on the number's next owner: another rank's connection."""
    near, far = socket.socketpair()
    held = Held(fileno=near.detach())
    held.there, held.go = threading.Event(), threading.Event()
    link = Link(held)
    ended: list[RecordsError] = []

    def use() -> None:
        try:
            link.send(Bye()) if call == "send" else link.payload(1) if call == "payload" else link.receive()
        except RecordsError as error:
            ended.append(error)

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    assert held.there.wait(240)
    link.close()
    link.close()
    assert far.recv(1) == b"", "the other side hears of it at once"
    assert held.fileno() >= 0
    held.go.set()
    thread.join()
    assert len(ended) == 1 and held.fileno() == -1
    for later in (link.receive, lambda: link.payload(1), lambda: link.send(Bye())):
        with pytest.raises(RecordsError, match="connection closed"):
            later()
    far.close()
