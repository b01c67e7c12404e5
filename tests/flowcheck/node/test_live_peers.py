"""A live session whose traffic has holes, and peers that a test answers for (live_scene.py).

Every version is 0.5 less than the one before it, in all elements; what lies in a hole is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowcheck.rebuild.iteration.given import Answer
from flowcheck.rebuild.version.events import Closed, FromPeers
from flowcheck.rebuild.version.partial import Patch
from flowcheck.rebuild.version.records import StepRecord
from updater.reader import Reader

from ..fake_engine import Packet
from .live_scene import Live, alike

HOLE = (5, 8)  # cells of the first bucket: its elements 10 to 16; all cells from 0 to 16 are asked for
SPANS = [(0, 8 * 16)]
ONES = np.ones(1000, np.float32).tobytes()


class Asked:
    """Peers that say what a test has set. said: None while they are at it."""

    def __init__(self) -> None:
        self.questions: list[tuple[int, Sequence[tuple[int, int]]]] = []
        self.said: list[Answer] | None = None
        self.failed: dict[str, str] = {}
        self.shown: list[tuple[int, list[list[int]], bool]] = []
        self.records: list[StepRecord | None] = []
        self.alive: list[Callable[[], bool]] = []
        self.hidden: list[int] = []
        self.distrusted: list[dict[str, str]] = []
        self.regions: list[np.ndarray] = []
        self.closed = 0

    def ask(self, iteration: int, spans: Sequence[tuple[int, int]]) -> None:
        self.questions.append((iteration, list(spans)))

    def answers(self) -> list[Answer] | None:
        return self.said

    def distrust(self, refused: Mapping[str, str]) -> None:
        self.distrusted.append(dict(refused))

    def show(
        self, iteration: int, region: np.ndarray, there: np.ndarray, alive: Callable[[], bool],
        closed: StepRecord | None = None,
    ) -> None:
        self.shown.append((iteration, there.tolist(), alive()))
        self.records.append(closed)
        self.regions.append(region)
        self.alive.append(alive)

    def hide(self, iteration: int) -> None:
        self.hidden.append(iteration)

    def close(self) -> None:
        self.closed += 1


class Scene(Live):
    """The wire brings iterations from 2 on, with holes in some; one closes when its record has come."""

    def __init__(self, patch: pytest.MonkeyPatch, holes: dict[int, tuple[int, int]], wire: range = range(2, 10),
                 **options: Any) -> None:
        self.peers = Asked()
        super().__init__(patch, peers=self.peers, **{"arenas": 2, **options})
        self.state(2)
        for t in wire:
            first, end = holes.get(t, (0, 0))
            region = self.engine.region(t).view(np.float32)
            region[:] = 1.0
            region[2 * first : 2 * end] = np.nan
            self.sources[0].packets += [Packet(t, None, (0, first)), Packet(t, t + 1, (end, None))]

    def go(self, iteration: int, **fields: Any) -> None:
        assert self.record(iteration, **fields) == ""
        self.poll()

    def of(self, iteration: int) -> Closed:
        [found] = [one for one in self.closed if one.iteration == iteration]
        return found

    @property
    def last(self) -> tuple[int, bool, str, dict[str, int], dict[str, int]]:
        return self.about(self.closed[-1].iteration)

    def about(self, iteration: int) -> tuple[int, bool, str, dict[str, int], dict[str, int]]:
        one = self.of(iteration)
        return one.iteration, one.published, one.status, one.missing, one.filled


def answer(start: int = 0, nbytes: int = 8 * 16, peer: str = "b", value: bytes = ONES) -> Answer:
    return Answer(peer, ((start, value[:nbytes]),))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    return lambda holes, **options: Scene(monkeypatch, holes, **options)


@pytest.mark.parametrize("first", [0, 100])
def test_a_hole_is_filled_by_a_peer_and_its_version_published(scene: Callable[..., Scene], first: int) -> None:
    at = scene({3: HOLE}, first=first)
    assert at.peers.questions == [] and at.closed == []
    at.go(2)
    assert at.last[:3] == (2, True, "unverified") and at.from_peers == [] and at.closed[-1].unproven == []
    assert at.peers.questions == [(3, SPANS)], "while its record is not here"
    at.go(3)
    assert at.closed[-1].iteration == 2, "it waits for them"
    at.poll()
    assert len(at.peers.questions) == 1 and at.closed[-1].iteration == 2, "they are asked once"
    at.peers.said = [answer()]
    at.poll()
    assert at.last == (3, True, "unverified", {}, {"stream": 27, "peer": 3}) and at.values() == alike(0.0)
    assert at.from_peers == [FromPeers(3, 128, {"b": 3}, {})] and at.lost == []
    mark = f"3 cells since iteration {first + 3} came from b, and no checksum of the trainer has matched since"
    assert at.closed[-1].unproven == [mark]


def test_the_mark_stays_until_a_checksum_matches(scene: Callable[..., Scene]) -> None:
    at = scene({3: HOLE, 5: HOLE})
    at.peers.said = [answer()]
    at.go(2, checksums=at.sums(0.5))
    assert at.last[2] == "verified"
    at.go(3)
    at.go(4)
    assert at.last == (4, True, "unverified", {}, {"stream": 30})
    [mark] = at.closed[-1].unproven
    assert mark.startswith("3 cells since iteration 3 came from b")
    at.go(5)
    assert at.closed[-1].unproven[0].startswith("6 cells since iteration 3 came from b")
    at.go(6, checksums=at.sums(0.5 - 4 * 0.5))
    assert at.last == (6, True, "verified", {}, {"stream": 30}) and at.closed[-1].unproven == []
    at.go(7)
    assert at.last[2] == "follows 7" and at.closed[-1].unproven == []


def test_who_reads_the_replica_is_told_too(scene: Callable[..., Scene], tmp_path: Path) -> None:
    at = scene({3: HOLE}, folder=tmp_path, slots=3)
    at.peers.said = [answer()]
    at.go(2, checksums=at.sums(0.5))
    at.go(3)
    reader = Reader(tmp_path / "2.replica")
    assert reader.verified == 3 and reader.statuses[4] == "unverified", "it was verified before"
    with reader.pinned() as version:
        assert version.unproven[-1].startswith("3 cells since iteration 3 came from b")
    at.go(4, checksums=at.sums(-0.5))
    assert reader.statuses[5] == "verified"
    with reader.pinned() as version:
        assert not any("came from" in mark for mark in version.unproven)
    reader.close()


def test_a_checksum_of_the_iteration_itself_confirms_it(scene: Callable[..., Scene]) -> None:
    at = scene({3: HOLE})
    at.peers.said = [answer()]
    at.go(2)
    at.go(3, checksums=at.sums(0.0))
    assert at.last[:3] == (3, True, "verified") and at.closed[-1].unproven == []
    at.go(4)
    assert at.last[:3] == (4, True, "follows 4") and at.closed[-1].unproven == []


def test_a_peer_that_lies_is_found_by_the_next_checksum(scene: Callable[..., Scene]) -> None:
    at = scene({3: HOLE})
    lie = np.ones(32, np.float32)
    lie[12] = 3.0
    at.peers.said = [answer(value=lie.tobytes())]
    at.go(2, checksums=at.sums(0.5))
    at.go(3)
    assert at.last[:3] == (3, True, "unverified") and at.closed[-1].unproven, "published, and marked"
    at.go(4, checksums=at.sums(-0.5))
    assert at.about(4)[:3] == (4, False, "diverged") and at.session.replica is None
    at.state(10, -0.5)
    at.traffic(10)
    at.go(10)
    assert at.last[:3] == (10, True, "unverified") and at.closed[-1].unproven == [], "a state ends the mark"


def test_a_peer_of_another_iteration_is_found_by_what_lies_beside(scene: Callable[..., Scene]) -> None:
    at = scene({3: HOLE})
    at.peers.said = [answer(value=np.full(32, 2.0, np.float32).tobytes())]
    at.go(2)
    at.go(3)
    [asked] = at.from_peers
    assert asked == FromPeers(3, 128, {}, {"b": "13 cells that are here as well differ"})
    assert at.peers.distrusted == [dict(asked.failed)]
    assert at.about(3) == (3, False, "unverified", {"disagreed": 26, "lost": 6}, {"stream": 27})
    assert "peer b: 13 cells that are here as well differ" in at.of(3).why[0][1]
    assert at.values() == alike(0.5) and len(at.lost) == 1, "the version before stays"
    assert [there for number, there, _ in at.peers.shown if number == 3] == [[[0, 5], [8, 40]], [[16, 40]]], "voids"


def test_who_has_nothing_is_named_and_the_iteration_ends(scene: Callable[..., Scene]) -> None:
    at = scene({3: HOLE})
    at.peers.said, at.peers.failed = [], {"b": "no answer in time"}
    at.go(2)
    at.go(3)
    assert at.from_peers == [FromPeers(3, 128, {}, {"b": "no answer in time"})]
    assert at.about(3) == (3, False, "unverified", {"lost": 6}, {"stream": 27}) and len(at.lost) == 1


def test_what_peers_leave_goes_on_to_the_trainers(scene: Callable[..., Scene]) -> None:
    at = scene({3: HOLE}, patched=True, slots=3)
    at.peers.said = [answer(0, 8 * 6)]
    at.go(2)
    at.go(3)
    assert at.last == (3, False, "unverified", {"lost": 4}, {"stream": 27, "peer": 1})
    assert at.joining.ranges.partial.stale.elements == 4
    assert at.closed[-1].unproven[0].startswith("1 cells since iteration 3 came from b")
    [(_, _, ranges)] = at.joining.ranges.partial.ask(1 << 20, (0,))
    assert sum(length for _, _, length in ranges) == 4


def test_a_version_that_is_held_keeps_the_mark(scene: Callable[..., Scene]) -> None:
    """A checksum of a version of which something is stale compares not all of it."""
    at = scene({3: HOLE}, patched=True, slots=3)
    at.peers.said = [answer(0, 8 * 6)]
    at.go(2)
    at.go(3)
    [(rank, request, ranges)] = at.joining.ranges.partial.ask(1 << 20, (0,))
    at.go(4, checksums=at.sums(-0.5))
    assert at.last[:2] == (4, False) and at.closed[-1].stale == 4
    sizes: dict[str, int] = {}
    for name, _, length in ranges:
        sizes[name] = sizes.get(name, 0) + length
    values = {name: torch.full((size,), -1.0) for name, size in sizes.items()}
    assert at.joining.ranges.partial.take(Patch(rank, request, 5, tuple(ranges), values, {}), 5)
    at.go(5)
    assert at.last[:3] == (5, True, "unverified") and at.values() == alike(-1.0)
    assert at.closed[-1].filled == {"stream": 30, "trainer": 2}, "four elements of four bytes are two cells"
    assert at.closed[-1].unproven[0].startswith("1 cells since iteration 3 came from b")
    at.go(6, checksums=at.sums(-1.5))
    assert at.last[:3] == (6, True, "verified") and at.closed[-1].unproven == []


def test_an_iteration_waits_for_nobody_where_nothing_is_missing(scene: Callable[..., Scene]) -> None:
    at = scene({})
    for t in range(2, 8):
        at.go(t)
    assert at.last[:2] == (7, True) and at.peers.questions == [] and at.from_peers == []


def test_peers_are_not_asked_where_no_version_waits(scene: Callable[..., Scene]) -> None:
    at = scene({3: HOLE, 4: HOLE})
    at.peers.said = []
    at.go(2)
    at.go(3)
    at.go(4)
    assert at.peers.questions == [(3, SPANS)] and at.session.next is None


def test_what_was_given_up_is_nobodys(scene: Callable[..., Scene]) -> None:
    at = scene({}, wire=range(2, 4))
    at.engine.given_up = range(4, 5)
    at.peers.said = [answer()]
    for t in (2, 3):
        at.go(t)
    at.sources[0].packets += [Packet(4, 5), Packet(7, 8)]
    at.go(4)
    assert at.of(4).missing.keys() == {"overload"}
    assert at.peers.questions == [] and [one[0] for one in at.peers.shown if one[0] < 5] == [2, 3]


def test_what_comes_while_they_are_asked_counts_first(scene: Callable[..., Scene]) -> None:
    """The link repeats what was missing: the iteration closes at once, whole, and nobody is waited for."""
    at = scene({3: HOLE}, wire=range(2, 6))
    at.go(2)
    at.go(3)
    assert len(at.peers.questions) == 1 and at.closed[-1].iteration == 2
    at.engine.region(3).view(np.float32)[10:16] = 1.0
    at.engine.cells(3)[5:8] = True
    at.poll()
    assert at.last[:4] == (3, True, "unverified", {}) and at.closed[-1].filled == {"stream": 30}
    assert at.closed[-1].unproven == [] and at.values() == alike(0.0) and at.from_peers == []


def test_what_came_meanwhile_is_compared_with_what_a_peer_gives(scene: Callable[..., Scene]) -> None:
    at = scene({3: HOLE}, wire=range(2, 6))
    at.go(2)
    at.go(3)
    at.engine.region(3).view(np.float32)[10:12] = 2.0
    at.engine.cells(3)[5:6] = True
    at.peers.said = [answer()]
    at.poll()
    assert at.of(3).missing == {"disagreed": 2, "lost": 4} and not at.of(3).published
    assert at.from_peers[0].failed == {"b": "1 cells that are here as well differ"}


def test_every_iteration_is_shown_when_it_closes_with_what_streams_have_brought(scene: Callable[..., Scene]) -> None:
    at = scene({3: HOLE}, wire=range(2, 6))
    at.go(2)
    assert at.peers.shown[0] == (2, [[0, 40]], True) and at.peers.regions[0] is at.engine.region(2)
    at.go(3)
    assert at.peers.shown[1:] == [(3, [[0, 5], [8, 40]], True)], "others may lack something of it and wait"
    at.peers.said = [answer()]
    at.poll()
    assert at.peers.shown[2:] == [(3, [[0, 5], [8, 40]], True)], "what a peer gave is not given on"
    assert [record is not None for record in at.peers.records] == [True, False, True], "what a step was made with"
    assert at.peers.hidden == [0, 1]
    at.engine.begun = 4
    assert at.peers.alive[-1]()
    at.engine.begun = 5
    assert not at.peers.alive[-1](), "its arena is another iteration's"


def test_at_the_end_of_the_traffic_they_are_asked_too(scene: Callable[..., Scene]) -> None:
    at = scene({3: HOLE}, wire=range(2, 4))
    at.record(2)
    at.record(3)
    at.poll()
    assert [one.iteration for one in at.closed] == [2] and at.peers.questions == []
    at.peers.said = [answer()]
    at.finish()
    assert at.last == (3, True, "unverified", {}, {"stream": 27, "peer": 3}) and at.peers.questions == [(3, SPANS)]


def test_what_peers_gave_waits_for_a_slot(scene: Callable[..., Scene]) -> None:
    """A reader has the only free one: the version waits for it, as one of which nothing was lost does."""
    at = scene({3: HOLE})
    at.peers.said = [answer()]
    assert at.session.replica is not None
    with at.session.replica.pinned():
        at.go(2)
        at.go(3)
        at.now += 1
        at.poll()
        assert at.last[0] == 2 and [iteration for iteration, _ in at.waiting] == [3]
    at.poll()
    assert at.last[:2] == (3, True) and at.lost == [] and at.values() == alike(0.0)


def test_where_peers_gave_nothing_no_slot_is_waited_for(scene: Callable[..., Scene]) -> None:
    at = scene({3: HOLE})
    at.peers.said = []
    assert at.session.replica is not None
    with at.session.replica.pinned():
        at.go(2)
        at.go(3)
        assert at.about(3)[:2] == (3, False) and at.waiting == []


def test_closing_lets_the_peers_go(scene: Callable[..., Scene]) -> None:
    at = scene({})
    at.session.close()
    assert at.peers.closed == 1


def test_without_peers_nothing_is_asked_or_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Live(monkeypatch, arenas=2)
    at.state(2)
    at.sources[0].packets += [Packet(2, 3, (0, 5)), Packet(3, 4), Packet(4, 5)]
    at.record(2)
    at.poll()
    assert at.closed[0].missing == {"lost": 50} and at.from_peers == []
    at.session.close()
