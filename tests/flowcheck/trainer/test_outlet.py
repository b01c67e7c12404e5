"""What is put is sent, all of it and in order, and nobody waits; a thread of C sends it where the library is there."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from flowcheck.control.protocol import Link, RecordsError
from flowcheck.trainer import boundary
from flowcheck.trainer.connection import outlet
from flowcheck.trainer.connection.outlet import Outlet

from ..hand_node import until

Ends = tuple[Outlet, Link, socket.socket]


@pytest.fixture(params=["c", "socket"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    if request.param == "c" and boundary.library() is None:
        pytest.skip("no C compiler, or no headers of Python")
    if request.param == "socket":
        monkeypatch.setattr(outlet, "library", lambda: None)
    mine, other = socket.socketpair()
    link, out = Link(mine), Outlet()
    out.open(link, mine)
    other.settimeout(10)
    yield out, link, other
    out.close()
    link.close()
    other.close()


def read(other: socket.socket, count: int) -> bytes:
    out = b""
    while len(out) < count:
        piece = other.recv(count - len(out))
        assert piece, "it ended"
        out += piece
    return out


def test_a_node_that_does_not_read_holds_nobody_up(ends: Ends) -> None:
    """What was taken comes, in order; the rest is the caller's."""
    out, link, other = ends
    put, left = b"", b""
    for number in range(1000):
        piece = number.to_bytes(4, "big") * 4096
        rest = out.take(link, [piece[:5], piece[5:]])
        put += piece if rest is not None else b""
        if rest != b"":
            left = rest or b""
            break
    assert len(put) > 100_000 and number < 999
    taken = len(put) - len(left)
    assert read(other, taken) == put[:taken]
    out.flush(link)
    assert out.take(link, [b"again"]) == b"" and read(other, 5) == b"again"


def test_what_was_put_goes_out_before_what_the_link_writes(ends: Ends) -> None:
    out, link, other = ends
    for number in range(50):
        assert out.take(link, [bytes([number]) * 1000]) == b""
        out.flush(link)
        link.send_rest(b"between")
        assert read(other, 1007) == bytes([number]) * 1000 + b"between"


def test_a_node_that_is_gone_is_noticed(ends: Ends) -> None:
    out, link, other = ends
    other.close()

    def gone() -> bool:
        try:
            out.take(link, [b"somebody?"])
        except RecordsError:
            return True
        return False

    until(gone)


def test_another_connection_has_an_outlet_of_its_own(ends: Ends) -> None:
    out, link, other = ends
    mine, second = socket.socketpair()
    newer = Link(mine)
    assert out.take(newer, [b"new"]) == b"" and second.recv(10) == b"new"
    out.finish(1.0)
    out.close()
    assert out.take(link, [b"old"]) == b"" and other.recv(10) == b"old"
    newer.close()
    second.close()


@pytest.mark.skipif(boundary.library() is None, reason="no C compiler, or no headers of Python")
def test_an_outbox_takes_no_more_than_it_has_room_for() -> None:
    """What was sent of the bytes in it gives no room before all of them were: then it begins anew."""
    mine, other = socket.socketpair()
    link, out = Link(mine), Outlet()
    out.open(link, mine)
    other.settimeout(10)
    assert out.take(link, [bytes(1 << 20), b"1"]) is None, "not even where it is empty"
    assert out.take(link, [bytes(1_000_000)]) == b""
    until(lambda: len(other.recv(1 << 20, socket.MSG_PEEK)) > 60_000)
    assert out.take(link, [bytes(100_000)]) is None
    assert read(other, 1_000_000) == bytes(1_000_000)
    out.flush(link)
    assert out.take(link, [b"a", bytes((1 << 20) - 1)]) == b"" and read(other, 1 << 20)[:1] == b"a"
    out.close()
    link.close()
    other.close()


def test_a_flush_ends_when_all_was_taken(ends: Ends) -> None:
    """And not when its time is over, 10 s."""
    out, link, other = ends
    rest = out.take(link, [bytes(1_000_000)])
    taken = 1_000_000 - len(rest or b"")
    assert rest is not None
    began = time.monotonic()
    flushing = threading.Thread(target=out.flush, args=(link,))
    flushing.start()
    until(lambda: len(other.recv(1 << 20, socket.MSG_PEEK)) > 60_000)
    assert read(other, taken) == bytes(taken)
    flushing.join()
    assert time.monotonic() - began < 9
