"""Who keeps gradients is handed each iteration whose verdict stands, and its arena stays for as long as it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowcheck.rebuild.iteration.collector import Judged
from flowcheck.rebuild.version.policy import Policy
from flowcheck.rebuild.version.records import StepRecord

from ..fake_engine import Packet, whole
from .followed import PARTLY, Followed, port


class Keeping:
    """kept: (iteration, learning rate, bytes of its first bucket's begin). begun: when versions began, by how many were
    kept before."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, float, bytes]] = []
        self.begun: list[int] = []
        self.reads = False

    def begin(self) -> None:
        self.begun.append(len(self.kept))

    def offer(self, judged: Judged, record: StepRecord | None, region: np.ndarray) -> None:
        assert record is not None
        at = judged.buckets[0].place.offset
        self.kept.append((judged.verdict.iteration, record.groups[0]["lr"], region[at : at + 4].tobytes()))
        self.reads = True


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Followed:
    return Followed(monkeypatch, Policy.live(10.0), port(), arenas=4)


def come(at: Followed, iteration: int, packet: Packet | None = None) -> list[str]:
    at.engine.region(iteration)[:4] = iteration
    at.engine.sources[0].packets += whole(iteration) if packet is None else [packet]
    at.record(iteration, groups=[{"lr": 0.5 * iteration}])
    return at.look()


def test_its_arena_is_not_used_again_while_it_is_read(at: Followed) -> None:
    one = at.follower.keeping = Keeping()
    at.start(2)
    assert come(at, 2) == ["closed 2"] and one.kept == [(2, 1.0, b"\2" * 4)]
    assert come(at, 3) == [] and at.look() == [] and at.engine.retired == []
    one.reads = False
    assert at.look() == ["closed 3"] and at.engine.retired == [1]
    one.reads = False
    at.look()
    assert at.engine.retired == [1, 1] and one.kept[1] == (3, 1.5, b"\3" * 4)


def test_what_lacks_something_is_not_handed_over(at: Followed) -> None:
    one = at.follower.keeping = Keeping()
    at.start(2)
    come(at, 2, Packet(2, past=3, cells=PARTLY))
    at.take(at.follower.finish())
    assert at.said == ["not 2", "lost"]
    assert one.kept == [] and one.begun == [0]


def test_each_beginning_is_said(at: Followed) -> None:
    one = at.follower.keeping = Keeping()
    at.start(2)
    come(at, 2)
    one.reads = False
    at.start(3)
    assert one.begun == [0, 1]


def test_the_end_waits_for_what_is_read(at: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    one, waited = Keeping(), list[float]()
    at.follower.keeping = one

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        one.reads = len(waited) % 3 != 0

    monkeypatch.setattr("flowcheck.rebuild.version.follower.time.sleep", sleep)
    at.start(2)
    for iteration in (2, 3):
        at.engine.sources[0].packets += whole(iteration)
        at.record(iteration, groups=[{"lr": 1.0}])
    at.take(at.follower.poll())
    at.take(at.follower.finish())
    assert [iteration for iteration, _, _ in one.kept] == [2, 3]
    closed: Any = at.follower.close
    closed()
    assert len(waited) == 6 and not one.reads
