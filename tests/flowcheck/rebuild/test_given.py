"""What peers give of an iteration: what is asked for, what is placed, compared and refused."""

from __future__ import annotations

import numpy as np
import pytest

from flowcheck.rebuild.iteration.evidence import bucket_coverage
from flowcheck.rebuild.iteration.given import NOTHING, Answer, Given, Hearsay, open_holes, place, question
from flowcheck.rebuild.iteration.intervals import intervals
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import example_job
from tests.flowcheck.fake_engine import FakeEngine

# Two buckets: 81 elements in cells 0 to 41 (the last one holds one element), and 20 in cells 48 to 58.
ODD, SECOND = 81, 48


class Scene:
    """An iteration that has closed, whole but for the holes. true: what its region would be."""

    def __init__(self, *holes: tuple[int, int], void: tuple[int, int] | None = None) -> None:
        self.plan: JobPlan = plan_job(example_job(count=[ODD, 20], startup=False, rebuild=False))
        self.engine = FakeEngine(self.plan.engine)
        for one in self.plan.iteration_places(1):
            self.engine.cells(1)[one.cells] = True
        self.true = np.arange(len(self.engine.region(1)), dtype=np.uint8)
        self.engine.region(1)[:] = self.true
        for first, end in holes:
            self.engine.cells(1)[first:end] = False
            self.engine.region(1)[8 * first : 8 * end] = 0xEE
        if void:
            self.engine.void[1] = [void]
            self.engine.cells(1)[slice(*void)] = False

    @property
    def holes(self) -> list[list[int]]:
        return open_holes(self.engine, self.plan, 1).tolist()

    def question(self) -> list[tuple[int, int]]:
        return question(self.plan, 1, open_holes(self.engine, self.plan, 1))

    def answer(self, *cells: tuple[int, int], peer: str = "a", wrong: tuple[int, ...] = ()) -> Answer:
        """Runs of cells, right but for bytes of the region that are wrong."""
        data = self.true.copy()
        for byte in wrong:
            data[byte] ^= 0x10
        pieces = []
        for first, end in cells:
            last = 4 * ODD if end == 41 else 8 * end
            pieces.append((8 * first, data[8 * first : last].tobytes()))
        return Answer(peer, tuple(pieces))

    def place(self, *answers: Answer) -> Given:
        return place(self.engine, self.plan, 1, answers)

    def right(self, *cells: tuple[int, int]) -> bool:
        region = self.engine.region(1)
        ends = [(a, 4 * ODD if b == 41 else 8 * b) for a, b in cells]
        return all((region[8 * a : end] == self.true[8 * a : end]).all() for a, end in ends)

    def missing(self, given: Given) -> list[dict[str, int]]:
        return [one.missing for one in bucket_coverage(self.plan, self.engine, 1, given=given)]


def test_holes_are_what_nothing_has_come_for() -> None:
    assert Scene().holes == []
    assert Scene((3, 5), (40, 41), (50, 52)).holes == [[3, 5], [40, 41], [50, 52]]
    assert Scene((3, 9), void=(4, 6)).holes == [[3, 4], [6, 9]], "copies of a cell are no reason to ask for another"


def test_cells_beside_a_hole_are_asked_for_as_far_as_its_bucket_goes() -> None:
    assert Scene((20, 21)).question() == [(8 * 12, 8 * 17)]
    assert Scene((2, 3)).question() == [(0, 8 * 11)]
    assert Scene((39, 40)).question() == [(8 * 31, 4 * ODD - 8 * 31)], "no byte behind the last element"
    assert Scene((10, 11), (26, 27)).question() == [(8 * 2, 8 * 33)], "what touches is one"
    assert Scene((10, 11), (28, 29)).question() == [(8 * 2, 8 * 17), (8 * 20, 8 * 17)]
    assert Scene((49, 50)).question() == [(8 * SECOND, 8 * 10)]
    assert Scene().question() == []


def test_a_question_has_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Scene((10, 11), (30, 31), (50, 51))
    whole = at.question()
    assert len(whole) == 3
    monkeypatch.setattr("flowcheck.rebuild.iteration.given.MOST_SPANS", 2)
    assert at.question() == whole[:2]
    monkeypatch.setattr("flowcheck.rebuild.iteration.given.MOST_SPANS", 3)
    monkeypatch.setattr("flowcheck.rebuild.iteration.given.MOST_BYTES", 17 * 8 + 20)
    assert at.question() == [whole[0], (whole[1][0], 16)], "whole cells"
    monkeypatch.setattr("flowcheck.rebuild.iteration.given.MOST_BYTES", 17 * 8)
    assert at.question() == whole[:1]


def test_what_a_peer_gives_fills_holes_and_nothing_else() -> None:
    at = Scene((10, 14), (20, 22), (40, 41), (50, 52))
    given = at.place(at.answer((8, 13), (21, 22), (40, 41), (48, 53)))
    assert given.filled.tolist() == [[10, 13], [21, 22], [40, 41], [50, 52]] and not len(given.void)
    assert given.cells == {"a": 7} and given.refused == {}
    assert at.right((0, 13), (14, 20), (21, 41), (48, 58)) and at.missing(given) == [{"lost": 4}, {}]
    assert (at.engine.region(1)[8 * 13 : 8 * 14] == 0xEE).all() and (at.engine.region(1)[160:168] == 0xEE).all()
    assert len(at.engine.missing(1, 0, 41)) == 3, "the engine's books are its own"


def test_two_peers_fill_what_the_other_lacks_and_agree_on_the_rest() -> None:
    at = Scene((10, 20))
    given = at.place(at.answer((8, 13), (15, 16)), at.answer((9, 11), (12, 18), peer="b"))
    assert given.filled.tolist() == [[10, 18]] and given.cells == {"a": 4, "b": 4} and given.refused == {}
    assert at.right((0, 18)) and at.missing(given) == [{"lost": 4}, {}]
    again = Scene((10, 20))
    assert again.place(again.answer((10, 20)), again.answer((10, 20), peer="b")).cells == {"a": 10}


def test_only_the_cells_of_a_hole_are_written() -> None:
    """Beside it a cell of which the streams' copies differed: what a peer has of it changes nothing."""
    at = Scene((10, 12), void=(8, 9))
    given = at.place(at.answer((7, 13), wrong=(64, 71)))
    assert given.filled.tolist() == [[10, 12]] and given.refused == {} and at.right((0, 41))
    first = Scene((3, 5))
    assert first.place(first.answer((0, 8))).cells == {"a": 2} and first.right((0, 41)), "from the region's first byte"


def test_a_peer_that_has_nothing_takes_nothing_from_the_others() -> None:
    for order in (1, -1):
        at = Scene((10, 12))
        given = at.place(*[Answer("none", ()), at.answer((9, 13)), Answer("no more", ())][::order])
        assert given.cells == {"a": 2} and given.refused == {} and at.right((0, 41))


def test_a_piece_that_touches_the_next_one_is_written_with_it() -> None:
    at = Scene((10, 20))
    assert at.place(at.answer((9, 12), (12, 15), (15, 22))).cells == {"a": 10} and at.right((0, 41))


@pytest.mark.parametrize("byte", [8 * 9, 8 * 9 + 7, 8 * 14, 8 * 14 + 7])
def test_a_witness_that_differs_voids_its_cell_and_refuses_the_peer(byte: int) -> None:
    at = Scene((10, 14))
    given = at.place(at.answer((8, 16), wrong=(byte,)), at.answer((10, 12), peer="b"))
    assert given.void.tolist() == [[byte // 8, byte // 8 + 1]] and given.cells == {"b": 2}
    assert given.refused == {"a": "1 cells that are here as well differ"}
    assert at.missing(given) == [{"disagreed": 2, "lost": 4}, {}] and at.right((0, 12))


@pytest.mark.parametrize("byte", [8 * 10, 8 * 13 + 7])
def test_two_peers_that_differ_are_both_refused(byte: int) -> None:
    at = Scene((10, 14), (20, 21))
    given = at.place(at.answer((10, 14), (20, 21), wrong=(byte,)), at.answer((9, 14), peer="b"))
    assert given.void.tolist() == [[byte // 8, byte // 8 + 1]] and given.cells == {} and not len(given.filled)
    assert given.refused == {"a": "1 cells differ from those of b", "b": "1 cells differ from those of a"}
    assert at.missing(given) == [{"disagreed": 2, "lost": 8}, {}]
    assert (at.engine.region(1)[80:112] == 0xEE).all(), "nothing of either is written"


@pytest.mark.parametrize("byte", [8 * 10, 8 * 14, 8 * 22, 8 * 27 + 7, 8 * 33])
@pytest.mark.parametrize("turned", [False, True])
def test_all_that_two_peers_both_give_is_compared(byte: int, turned: bool) -> None:
    """Their pieces begin and end at different cells, and some touch."""
    at = Scene((10, 36))
    answers = [at.answer((10, 13), (14, 15), (20, 28), (30, 34), wrong=(byte,)),
               at.answer((9, 12), (14, 16), (18, 24), (26, 28), (33, 35), peer="b")]
    given = at.place(*reversed(answers) if turned else answers)
    assert given.void.tolist() == [[byte // 8, byte // 8 + 1]] and given.refused.keys() == {"a", "b"}
    other = Scene((10, 36))
    agreed = other.place(*(other.answer(*spans, peer=peer) for spans, peer in (
        (((10, 13), (14, 15), (20, 28), (30, 34)), "a"), (((9, 12), (14, 16), (18, 24), (26, 28), (33, 35)), "b"))))
    assert agreed.filled.tolist() == [[10, 13], [14, 16], [18, 28], [30, 35]] and agreed.refused == {}


def test_no_majority_decides() -> None:
    at = Scene((10, 14))
    answers = [at.answer((10, 14), peer=peer, wrong=(81,) if peer == "b" else ()) for peer in ("a", "b", "c")]
    given = at.place(*answers)
    assert given.cells == {} and given.refused.keys() == {"a", "b", "c"} and given.void.tolist() == [[10, 11]]


def test_a_peer_that_is_refused_for_a_witness_refuses_no_other() -> None:
    at = Scene((10, 14))
    given = at.place(at.answer((8, 14), wrong=(64, 81)), at.answer((10, 14), peer="b"))
    assert given.cells == {"b": 4} and given.refused.keys() == {"a"} and given.void.tolist() == [[8, 9]]


def test_cells_whose_copies_differ_stay_holes_and_are_no_witnesses() -> None:
    at = Scene((10, 12), void=(12, 13))
    given = at.place(at.answer((9, 15), wrong=(96,)))
    assert given.filled.tolist() == [[10, 12]] and given.refused == {}
    assert at.missing(given) == [{"disagreed": 2}, {}]


def test_what_lies_between_buckets_is_nobodys() -> None:
    at = Scene((40, 41))
    piece = (8 * 40, at.true[320:384].tobytes()[:4] + b"\x00" * 60)
    given = at.place(Answer("a", (piece,)))
    assert given.filled.tolist() == [[40, 41]] and given.refused == {}


def test_without_answers_nothing_changes() -> None:
    at = Scene((10, 12))
    given = at.place()
    assert not len(given.filled) and not len(given.void) and given.cells == {} == given.refused
    assert at.missing(given) == at.missing(NOTHING) == [{"lost": 4}, {}]


def test_missing_of_a_place() -> None:
    at = Scene()
    first, second = at.plan.iteration_places(1)
    given = Given(intervals([(3, 5)]), intervals([(7, 8), (50, 51)]))
    gaps = np.array([(2, 6)])
    assert given.missing(gaps, first).tolist() == [[2, 3], [5, 6], [7, 8]]
    assert given.missing(gaps[:0], second).tolist() == [[50, 51]]
    assert NOTHING.missing(gaps, first) is gaps
    assert Given(filled=intervals([(2, 6)])).missing(gaps, first).tolist() == []
    assert Given(void=intervals([(7, 8)])).missing(gaps[:0], first).tolist() == [[7, 8]]


def test_hearsay_says_since_when_and_from_whom() -> None:
    none = Hearsay()
    assert str(none) == "" and none.after(7, NOTHING) is none
    once = none.after(7, Given(cells={"b": 3}))
    twice = once.after(8, Given()).after(9, Given(cells={"a": 2, "b": 1}))
    assert twice == Hearsay(7, 6, ("a", "b"))
    assert str(twice) == "6 cells since iteration 7 came from a, b, and no checksum of the trainer has matched since"


def test_hearsay_of_a_version_that_others_were_built_on() -> None:
    begun = Hearsay(version="step 7 came from node1")
    assert str(begun) == "step 7 came from node1, and no checksum of the trainer has matched since"
    assert str(begun.after(9, Given(cells={"a": 2}))) == (
        "step 7 came from node1 and 2 cells since iteration 9 came from a, and no checksum of the trainer has matched"
        " since")
