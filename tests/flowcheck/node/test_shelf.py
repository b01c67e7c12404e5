"""What a node lets its peers read of its last iterations, alone and over a real connection."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from flowcheck.control.protocol import RANGES_TEXT, Bytes, Flows, Holes, Limits, Link, RecordsError
from flowcheck.errors import UserError
from flowcheck.node.peers.shelf import AT_ONCE, Shelf, serve
from flowcheck.rebuild.iteration.intervals import intervals

PLAN = "a" * 64
REGION = np.arange(800, dtype=np.uint8)
GONE = "its arena has been given to a later iteration"


def runs(*cells: tuple[int, int]) -> np.ndarray:
    return intervals(list(cells))


def holes(iteration: int, *spans: tuple[int, int], plan: str = PLAN, seconds: float = 0.01, request: int = 4) -> Holes:
    return Holes(request, iteration, plan, [list(span) for span in spans], seconds)


def filled(most: int = 3, *iterations: int) -> Shelf:
    """Cells 10 to 20 and 30 to 40 of each iteration are there."""
    shelf = Shelf(most)
    shelf.follow(PLAN)
    for iteration in iterations:
        shelf.show(iteration, REGION, runs((10, 20), (30, 40)), lambda: True)
    return shelf


@pytest.mark.parametrize(("asked", "given"), [
    ([(80, 80)], [(80, 80)]),
    ([(0, 800)], [(80, 80), (240, 80)]),
    ([(88, 8), (104, 8)], [(88, 8), (104, 8)]),
    ([(72, 16), (152, 96)], [(80, 8), (152, 8), (240, 8)]),
    ([(80, 8), (88, 16), (104, 56), (160, 8)], [(80, 8), (88, 16), (104, 56)]),  # one begins where another ends
    ([(72, 16), (88, 100)], [(80, 8), (88, 72)]),
    ([(80, 5)], [(80, 5)]),  # the end of a bucket
    ([(312, 3)], [(312, 3)]),
])
def test_only_what_was_shown_is_given(asked: list[tuple[int, int]], given: list[tuple[int, int]]) -> None:
    answer, pieces = filled(3, 7).read(holes(7, *asked))
    expected = b"".join(REGION[start : start + length].tobytes() for start, length in given)
    assert answer == Bytes(4, 7, given, hashlib.sha256(expected).hexdigest()) and b"".join(pieces) == expected


@pytest.mark.parametrize("asked", [[(0, 80)], [(160, 80)], [(320, 480)], [(800, 8)], [(10_000_000, 8)]])
def test_what_is_not_there_is_not_given(asked: list[tuple[int, int]]) -> None:
    assert filled(3, 7).read(holes(7, *asked)) == (Bytes(4, 7, why="nothing of it is here either"), [])


def test_a_region_is_not_read_behind_its_end() -> None:
    shelf = Shelf(1)
    shelf.follow(PLAN)
    shelf.show(7, REGION, runs((90, 120)), lambda: True)
    answer, pieces = shelf.read(holes(7, (720, 800)))
    assert answer.ranges == [(720, 80)] and sum(map(len, pieces)) == 80


def test_pieces_are_copied_one_after_the_other() -> None:
    region = np.arange(2 * AT_ONCE + 8, dtype=np.uint8)
    shelf = Shelf(1)
    shelf.follow(PLAN)
    shelf.show(7, region, runs((0, len(region) // 8)), lambda: True)
    answer, pieces = shelf.read(holes(7, (0, len(region))))
    assert [len(piece) for piece in pieces] == [AT_ONCE, AT_ONCE, 8] and b"".join(pieces) == region.tobytes()
    assert answer.digest == hashlib.sha256(region.tobytes()).hexdigest()


def test_the_last_iterations_are_kept_and_no_more() -> None:
    shelf = filled(2, 7, 8, 9)
    assert shelf.read(holes(7, (80, 8)))[0].why == GONE
    assert not shelf.read(holes(8, (80, 8)))[0].why and not shelf.read(holes(9, (80, 8)))[0].why
    shelf.hide(8)
    assert shelf.read(holes(8, (80, 8)))[0].why == GONE and not shelf.read(holes(9, (80, 8)))[0].why
    assert filled(3, 7, 9).read(holes(8, (80, 8)))[0].why == GONE, "it has closed, or never will"


def test_what_is_shown_again_takes_the_place_of_what_was_shown() -> None:
    shelf = filled(2, 7)
    shelf.show(7, REGION, runs((10, 11)), lambda: True)
    assert shelf.read(holes(7, (0, 800)))[0].ranges == [(80, 8)]


def test_an_arena_that_was_given_away_while_it_was_read_is_gone() -> None:
    alive = True

    class Region(np.ndarray):
        """Another iteration takes it while its first bytes are copied."""

        def tobytes(self, *_: object) -> bytes:  # type: ignore[override]
            nonlocal alive
            alive = False
            return super().tobytes()

    shelf = Shelf(1)
    shelf.follow(PLAN)
    shelf.show(7, REGION.copy().view(Region), runs((0, 100)), lambda: alive)
    assert shelf.read(holes(7, (0, 8))) == (Bytes(4, 7, why=GONE), [])


@pytest.mark.parametrize("what", ["hide", "follow"])
def test_what_the_group_takes_back_while_it_is_read_is_gone(what: str) -> None:
    shelf = Shelf(1)

    class Region(np.ndarray):
        def tobytes(self, *_: object) -> bytes:  # type: ignore[override]
            shelf.hide(7) if what == "hide" else shelf.follow("b" * 64)
            return super().tobytes()

    shelf.follow(PLAN)
    shelf.show(7, REGION.copy().view(Region), runs((0, 100)), lambda: True)
    assert shelf.read(holes(7, (0, 8))) == (Bytes(4, 7, why=GONE), [])


def test_another_job_or_start_is_given_nothing() -> None:
    shelf = filled(3, 7)
    other = "another job is followed here, or none"
    assert shelf.read(holes(7, (80, 8), plan="b" * 64, seconds=9))[0].why == other
    shelf.follow("b" * 64)
    assert shelf.read(holes(7, (80, 8)))[0].why == other
    assert shelf.read(holes(7, (80, 8), plan="b" * 64))[0].why == "it has not closed here", "nothing stays"


def test_an_iteration_that_is_not_over_is_waited_for() -> None:
    shelf = filled(3, 7)
    assert shelf.read(holes(8, (80, 8), seconds=0.01))[0].why == "it has not closed here"
    found: list[Bytes] = []
    reader = threading.Thread(target=lambda: found.append(shelf.read(holes(9, (80, 8), seconds=10))[0]))
    reader.start()
    shelf.show(8, REGION, runs((10, 20)), lambda: True)
    assert not found
    shelf.show(9, REGION, runs((10, 20)), lambda: True)
    reader.join(10)
    assert found[0].ranges == [(80, 8)]


def test_who_waits_hears_at_once_that_the_job_has_ended() -> None:
    shelf = filled(3, 7)
    found: list[Bytes] = []
    reader = threading.Thread(target=lambda: found.append(shelf.read(holes(9, (80, 8), seconds=10))[0]))
    reader.start()
    shelf.follow("")
    reader.join(240)
    assert found[0].why == "another job is followed here, or none"


# -- over a connection ---------------------------------------------------------------------------------------------


class Served:
    """A real connection. shelf: None: there is no such group. error: how it ended."""

    def __init__(self, shelf: Shelf | None) -> None:
        mine, its = socket.socketpair()
        self.link, self._other = Link(mine), Link(its)
        self.link.limits = lambda: Limits(RANGES_TEXT, {"bytes": 1000})
        self.shelf, self.error = shelf, ""
        self.thread = threading.Thread(target=self._main)
        self.thread.start()

    def _main(self) -> None:
        try:
            serve(self._other, lambda: self.shelf)
        except RecordsError as error:
            self.error = error.what
        self._other.close()

    def ask(self, question: Holes) -> tuple[Bytes, bytes]:
        self.link.send(question)
        answer, size = self.link.receive(wait=10)
        return answer, bytes(self.link.payload(size))

    def end(self) -> str:
        self.link.close()
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.error


@pytest.fixture
def served() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(shelf: Shelf | None) -> Served:
        made.append(Served(shelf))
        return made[-1]

    yield start
    for one in made:
        one.end()


def test_questions_are_answered_one_after_the_other(served: Callable[..., Served]) -> None:
    at = served(filled(3, 7))
    answer, payload = at.ask(holes(7, (80, 16)))
    assert answer.ranges == [(80, 16)] and payload == REGION[80:96].tobytes()
    assert at.ask(holes(7, (0, 8), request=5)) == (Bytes(5, 7, why="nothing of it is here either"), b"")
    assert at.end() == ""


def test_the_group_of_a_question_is_looked_up_anew(served: Callable[..., Served]) -> None:
    at = served(filled(3, 7))
    assert at.ask(holes(7, (80, 8)))[0].ranges
    at.shelf = filled(3)
    assert at.ask(holes(7, (80, 8)))[0].why == "it has not closed here"
    at.shelf = None
    at.link.send(holes(7, (80, 8)))
    at.thread.join(10)
    assert at.error == "no such group is followed here"


def test_a_peer_says_nothing_but_what_it_lacks(served: Callable[..., Served]) -> None:
    at = served(filled(3, 7))
    at.link.send(Flows([]))
    at.thread.join(10)
    assert at.error == "a Flows from a peer"


@pytest.mark.parametrize(("fields", "what"), [
    ({"ranges": []}, "asks for nothing"),
    ({"ranges": [[0, 0]]}, "overlaps, is empty"),
    ({"ranges": [[4, 8]]}, "begins within a cell"),
    ({"ranges": [[8, 8], [8, 8]]}, "overlaps"),
    ({"ranges": [[-8, 8]]}, "8 bytes from -8 on"),
    ({"ranges": [[0, 1 << 64]]}, "bytes from 0 on"),
    ({"ranges": [[0, 64 << 20], [1 << 30, 8]]}, "at most 67108864 are given at once"),
    ({"ranges": [[0, True]]}, "is not [first byte, bytes]"),
    ({"ranges": [[0, 8, 8]]}, "is not [first byte, bytes]"),
    ({"ranges": [[16 * i, 8] for i in range(16385)]}, "at most 16384 are taken at once"),
    ({"request": -1}, "-1 is less than 0"), ({"iteration": -1}, "-1 is less than 0"),
    ({"seconds": 0.0}, "0.0 is not between 0 and 10.0"), ({"seconds": 10.5}, "10.5 is not between 0 and 10.0"),
])
def test_a_question_that_is_none(fields: dict[str, object], what: str) -> None:
    said = {"request": 1, "iteration": 2, "plan": PLAN, "ranges": [[0, 8]], "seconds": 1.0}
    Holes(**said)  # type: ignore[arg-type]
    with pytest.raises(UserError) as refused:
        Holes(**{**said, **fields})  # type: ignore[arg-type]
    assert what in refused.value.what


@pytest.mark.parametrize("fields", [
    {"ranges": [[0, 8]], "why": "gone"}, {}, {"why": "gone", "request": -1}, {"why": "gone", "iteration": -1},
    {"ranges": [[8, 8], [0, 8]]},
])
def test_an_answer_that_is_none(fields: dict[str, object]) -> None:
    with pytest.raises(UserError):
        Bytes(**{"request": 1, "iteration": 2, **fields})  # type: ignore[arg-type]
