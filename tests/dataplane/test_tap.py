"""A second look at a ring: what another consumer takes is seen as well, and what was too late is counted."""

from __future__ import annotations

from parser.observer import Observer

from dataplane.tap import AT_ONCE, Tap
from tests.flowcheck.memory_ring import MemoryRing, unread


class Reader:
    """Consumes like Observer.drain, and keeps what it got."""

    def __init__(self) -> None:
        self.got: list[bytes] = []

    def __call__(self, address: int, most: int) -> int:
        observer = Observer()
        before = len(self.got)
        self.got += unread(address)
        assert observer.drain(address, most) == len(self.got) - before
        return len(self.got) - before


def frames(first: int, last: int) -> list[tuple[int, bytes]]:
    return [(number, b"%064d" % number) for number in range(first, last)]


def test_what_another_consumer_takes() -> None:
    ring, other, reader = MemoryRing(64), Observer(), Reader()
    ring.put(frames(0, 5))
    tap = Tap(ring.ring_address)
    assert tap.look(reader) == 0, "it begins with what comes from now on"
    for turn in range(6):
        ring.put(frames(5 + 20 * turn, 25 + 20 * turn))
        assert other.drain(ring.ring_address) == 20 + 5 * (turn == 0)
        assert tap.look(reader) == 20 and tap.look(reader) == 0
    assert reader.got == [frame for _, frame in frames(5, 125)] and tap.missed == 0
    assert ring.waiting == 0 and ring.put_so_far == 125, "the ring is its consumer's"


def test_the_ring_is_not_emptied() -> None:
    ring, reader = MemoryRing(64), Reader()
    tap = Tap(ring.ring_address)
    ring.put(frames(0, 30))
    assert tap.look(reader) == 30 and ring.waiting == 30


def test_what_was_too_late() -> None:
    """Half of the ring is looked at, because its producer may be filling the rest."""
    ring, other, reader = MemoryRing(64), Observer(), Reader()
    tap = Tap(ring.ring_address)
    for turn in range(3):
        ring.put(frames(40 * turn, 40 * turn + 40))
        other.drain(ring.ring_address)
    assert tap.look(reader) == 32 and tap.missed == 88
    assert reader.got == [frame for _, frame in frames(88, 120)]


def test_many_at_once() -> None:
    ring, reader = MemoryRing(1 << 14), Reader()
    tap = Tap(ring.ring_address)
    ring.put(frames(0, AT_ONCE + 100))
    assert tap.look(reader) == AT_ONCE + 100 and len(set(reader.got)) == AT_ONCE + 100


def test_what_comes_while_it_looks_waits() -> None:
    """A reader slower than the port comes back: other work of the thread is not held up."""
    ring, reader = MemoryRing(64), Reader()
    tap = Tap(ring.ring_address)
    ring.put(frames(0, 3))

    def read(address: int, most: int) -> int:
        ring.put(frames(3, 5))
        return reader(address, most)

    assert tap.look(read) == 3
    assert tap.look(reader) == 2 and reader.got == [frame for _, frame in frames(0, 5)]
