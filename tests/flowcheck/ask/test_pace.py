"""A bound on what is read: over any time no more than its rate and a piece of each reader, however many there are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from random import Random

import pytest

from flowcheck.ask.client import NodeClient
from flowcheck.ask.pace import LEAST, MOST, Pace
from flowcheck.control.version import MODEL, OPTIMIZER

from ..hand_api import KEY, HandApi, HandVersion

RATE = 1e6


class Readers:
    """Each reads a piece as soon as it may, in no time, or waits for bytes first. Time is theirs."""

    def __init__(self, count: int, gap: Callable[[], float] = lambda: 0.0) -> None:
        self.at, self.gap = 0.0, gap
        self.due = [0.0] * count
        self.pace = Pace(RATE, lambda: self.at, self._sleep)
        self.read: list[tuple[float, int]] = []

    def _sleep(self, seconds: float) -> None:
        assert seconds >= 0.0
        self.due[self.now] = self.at + seconds + self.gap()

    def until(self, end: float) -> None:
        while min(self.due) < end:
            self.now = self.due.index(min(self.due))
            self.at = self.due[self.now]
            self.read.append((self.at, self.pace.piece))
            self.pace.take(self.pace.piece)

    def most(self, seconds: float) -> int:
        """Bytes in the fullest window of so many seconds."""
        return max(sum(count for at, count in self.read if begin <= at < begin + seconds) for begin, _ in self.read)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_all_readers_together_read_at_the_rate(count: int) -> None:
    readers = Readers(count)
    readers.until(20.0)
    total = sum(read for _, read in readers.read)
    assert 20.0 * RATE <= total <= 20.0 * RATE + count * readers.pace.piece
    for seconds in (0.1, 1.0, 5.0):
        assert readers.most(seconds) <= seconds * RATE + count * readers.pace.piece


def test_what_nobody_read_is_not_saved_up() -> None:
    """Pauses of the network between two bursts: no burst makes up for one."""
    random = Random(3)
    readers = Readers(3, lambda: random.choice([0.0, 0.0, 2.0]))
    readers.until(60.0)
    assert readers.most(1.0) <= RATE + 3 * readers.pace.piece
    assert sum(read for _, read in readers.read) < 60.0 * RATE


@pytest.mark.parametrize(("rate", "piece"), [(1e3, LEAST), (10e6, 200_000), (1e12, MOST)])
def test_pieces_are_what_comes_in_a_moment(rate: float, piece: int) -> None:
    assert Pace(rate).piece == piece


def test_files_are_read_at_the_pace_of_all() -> None:
    """Over real sockets, two nodes at once: it takes as long as all their bytes do, and they are the right ones. A busy
    machine only takes longer."""
    count, rate = 100_000, 800_000.0
    model = {"w": [0.5 * at for at in range(count)]}
    pace, found = Pace(rate), list[bytes]()

    def pull(api: HandApi) -> None:
        node = NodeClient(api.address, KEY, pace=pace)
        (offer,) = node.offers()
        version = node.version(offer)
        found.append(b"".join(
            bytes(piece) for file in (MODEL, OPTIMIZER) for piece in node.pieces(offer, version, file)))

    with HandApi(HandVersion(4, model)) as one, HandApi(HandVersion(4, model)) as two:
        threads = [threading.Thread(target=pull, args=(api,)) for api in (one, two)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        took = time.monotonic() - began
        assert len(found) == 2 and found[0] == found[1] == one.versions[0].files[MODEL][-4 * count :] + (
            one.versions[0].files[OPTIMIZER][-8:])
    assert took >= 2 * 4 * count / rate - 2 * pace.piece / rate
