"""What a shelf says of an iteration to a holder, for how long it waits for one, and how a connection is answered: with
a clock, a lock and a link by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flowcheck.control.protocol import RANGES_TEXT, Bytes, Entry, Flows, Holes, Journal, Limits, RecordsError, Steps
from flowcheck.control.tensors import TensorSpec, unpack
from flowcheck.node.peers import shelf as module
from flowcheck.node.peers.shelf import IDLE_SECONDS, Followed, Shelf, serve
from flowcheck.rebuild.iteration.intervals import intervals
from flowcheck.rebuild.version.records import StepRecord

PLAN, OTHER = "a" * 64, "b" * 64
REGION = np.arange(80, dtype=np.uint8)
FOLLOWED = Followed({"body": 1}, ("run", 3, 8), 100)
RECORD = StepRecord([{"lr": 0.5}], 0.25, 2.0, True, buffers={"mean": torch.tensor([1.0, 2.0])})
ANOTHER, OPEN = "another job is followed here, or none", "it has not closed here"
GONE = "its arena has been given to a later iteration"


class Changed:
    """The shelf's condition. Each wait takes `takes` seconds of the clock, unless it is over before; then something
    happens."""

    def __init__(self, takes: float) -> None:
        self.now, self.takes, self.waits, self.notified, self.happens = 1000.0, takes, list[float](), 0, list[Any]()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, seconds: float) -> bool:
        self.waits.append(round(seconds, 6))
        self.now += min(self.takes, seconds)
        if self.happens:
            self.happens.pop(0)()
        return self.takes < seconds

    def notify_all(self) -> None:
        self.notified += 1


class Scene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: float = 0.2, follow: bool = True) -> None:
        self.shelf = Shelf(3)
        self.changed = self.shelf._changed = Changed(takes)  # type: ignore[assignment]
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.changed.now))
        if follow:
            self.shelf.follow(PLAN, FOLLOWED)

    def show(self, iteration: int, closed: StepRecord | None = RECORD) -> None:
        self.shelf.show(iteration, REGION, intervals([(0, 10)]), lambda: True, closed)

    def entry(self, iteration: int, plan: str = PLAN, seconds: float = 0.5) -> Entry:
        answer, buffers = self.shelf.entry(Journal(4, iteration, plan, seconds))
        assert (answer.request, answer.iteration) == (4, iteration) and bool(answer.why) == (not buffers)
        return answer

    def read(self, iteration: int, plan: str = PLAN, seconds: float = 0.5) -> Bytes:
        return self.shelf.read(Holes(4, iteration, plan, [[0, 8]], seconds))[0]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    return lambda **given: Scene(monkeypatch, **given)


# -- what is said --------------------------------------------------------------------------------------------------


def test_what_a_step_was_made_with(scene: Callable[..., Scene]) -> None:
    at = scene()
    at.show(7)
    answer, buffers = at.shelf.entry(Journal(4, 7, PLAN, 0.5))
    assert answer == Entry(4, 7, PLAN, 7, groups=[{"lr": 0.5}], clip=0.25, scale=2.0, skipped=True)
    assert buffers.keys() == {"buffer.mean"} and buffers["buffer.mean"] is RECORD.buffers["mean"]
    answer.groups[0]["lr"] = 9.0
    assert RECORD.groups[0]["lr"] == 0.5 and at.changed.waits == []


def test_which_job_is_followed_is_said_to_who_names_another(scene: Callable[..., Scene]) -> None:
    at = scene()
    at.show(7)
    for plan in ("", OTHER):
        assert at.entry(7, plan, 9.0) == Entry(4, 7, PLAN, 7, job={"body": 1}, first=100, run=["run", 3, 8],
                                               why=ANOTHER)
    assert at.changed.waits == [], "at once"


@pytest.mark.parametrize("follow", [False, True])
def test_where_nothing_is_followed_that_is_said_at_once(scene: Callable[..., Scene], follow: bool) -> None:
    at = scene(follow=follow)
    if follow:
        at.show(7)
        at.shelf.follow("")
    assert at.entry(0, "", 9.0) == Entry(4, 0, "", -1, why=ANOTHER)
    assert at.entry(0, PLAN, 9.0) == Entry(4, 0, "", -1, why=ANOTHER) and at.changed.waits == []


def test_a_job_of_which_nothing_may_be_said_is_another_one(scene: Callable[..., Scene]) -> None:
    at = scene(follow=False)
    at.shelf.follow(PLAN)
    at.show(7)
    assert at.entry(7) == Entry(4, 7, PLAN, 7, why=ANOTHER)
    assert at.read(7).why == "", "for peers it is there"


def test_another_start_has_nothing_of_the_one_before(scene: Callable[..., Scene]) -> None:
    at = scene()
    at.show(7)
    at.shelf.follow(OTHER, FOLLOWED)
    assert at.entry(7, OTHER) == Entry(4, 7, OTHER, -1, why=OPEN) and at.read(7, OTHER).why == OPEN
    at.show(0)
    assert at.entry(0, OTHER).newest == 0


def test_what_has_closed_and_what_has_not(scene: Callable[..., Scene]) -> None:
    at = scene()
    at.show(9)
    at.show(8)
    at.show(10, None)
    assert [at.entry(t).newest for t in (8, 9, 10)] == [9, 9, 9], "the newest, whatever came last"
    assert [at.entry(t).why for t in (7, 8, 9, 10, 11)] == [GONE, "", "", OPEN, OPEN]
    assert at.read(10).why == "" and at.read(11).why == OPEN
    at.show(11)
    assert [at.entry(t).why for t in (8, 9, 10, 11)] == [GONE, "", GONE, ""], "three are kept; 10 closed with nothing"
    at.shelf.hide(9)
    assert [at.entry(t).why for t in (9, 11)] == [GONE, ""] and at.entry(9).newest == 11


def test_the_last_ones_are_those_of_the_greatest_numbers(scene: Callable[..., Scene]) -> None:
    at = scene()
    for iteration in (12, 9, 10, 11):
        at.show(iteration)
    assert sorted(at.shelf._shown) == [10, 11, 12] and at.read(12).why == ""
    assert at.read(13).why == OPEN and at.read(8).why == GONE


# -- for how long it is waited -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [Scene.entry, Scene.read])
def test_one_that_does_not_close_is_waited_for_as_long_as_it_is_of_use(scene: Callable[..., Scene], ask: Any) -> None:
    at = scene()
    at.show(7)
    assert ask(at, 8).why == OPEN and at.changed.waits == [0.5, 0.3, 0.1]


@pytest.mark.parametrize("ask", [Scene.entry, Scene.read])
def test_who_wakes_up_too_late_does_not_wait_again(scene: Callable[..., Scene], ask: Any) -> None:
    at = scene()
    at.changed.happens = [lambda: setattr(at.changed, "now", 1000.5)]
    assert ask(at, 8).why == OPEN and at.changed.waits == [0.5]


@pytest.mark.parametrize("ask", [Scene.entry, Scene.read])
def test_one_that_closes_meanwhile_is_given(scene: Callable[..., Scene], ask: Any) -> None:
    at = scene()
    at.changed.happens = [lambda: at.show(7), lambda: at.show(8)]
    assert ask(at, 8).why == "" and at.changed.waits == [0.5, 0.3]


def test_what_a_step_was_made_with_is_not_there_before_its_end(scene: Callable[..., Scene]) -> None:
    at = scene()
    at.changed.happens = [lambda: at.show(8, None), lambda: at.show(8)]
    assert at.entry(8).why == "" and at.changed.waits == [0.5, 0.3]


@pytest.mark.parametrize("ask", [Scene.entry, Scene.read])
def test_a_job_that_ends_is_not_waited_for(scene: Callable[..., Scene], ask: Any) -> None:
    at = scene()
    at.changed.happens = [lambda: at.shelf.follow("")]
    assert ask(at, 8).why == ANOTHER and at.changed.waits == [0.5]


def test_who_waits_is_woken_by_all_that_changes(scene: Callable[..., Scene]) -> None:
    at = scene()
    before = at.changed.notified
    at.show(7, None)
    at.show(7)
    at.shelf.follow("")
    assert at.changed.notified == before + 3


def test_a_real_thread_is_woken() -> None:
    shelf, found = Shelf(3), list[Entry]()
    shelf.follow(PLAN, FOLLOWED)
    reader = threading.Thread(target=lambda: found.append(shelf.entry(Journal(1, 7, PLAN, 10.0))[0]))
    reader.start()
    shelf.show(7, REGION, intervals([(0, 10)]), lambda: True, RECORD)
    reader.join(240)
    assert found[0].why == ""


# -- a connection --------------------------------------------------------------------------------------------------


class Hand:
    """A link: what comes over it, an exception last; what is sent."""

    peer = "somebody"

    def __init__(self, *comes: Any) -> None:
        self.comes, self.sent, self.waits = list(comes), list[Any](), list[Any]()
        self.limits: Callable[[], Limits] = Limits

    def receive(self, *, wait: float) -> tuple[Any, int]:
        self.waits.append(wait)
        assert self.limits() == Limits(RANGES_TEXT)
        one = self.comes.pop(0)
        if isinstance(one, Exception):
            raise one
        return one, 0

    def send(self, message: Any, payload: Any = (), size: int = 0, *, seconds: float = 10.0) -> None:
        self.sent.append((message, b"".join(payload), size, seconds))


CLOSED = RecordsError("connection closed", where="x")


def answered(at: Scene | None, *comes: Any, hear: Any = None) -> Hand:
    link = Hand(*comes)
    serve(link, lambda: at and at.shelf, hear)  # type: ignore[arg-type]
    return link


@pytest.mark.parametrize("end", [TimeoutError("silent"), CLOSED])
def test_who_goes_or_is_silent_for_very_long_is_let_go(end: Exception) -> None:
    link = answered(None, end)
    assert link.waits == [IDLE_SECONDS] and link.sent == []


def test_another_end_is_an_error() -> None:
    with pytest.raises(RecordsError, match="connection lost"):
        answered(None, RecordsError("connection lost", where="x"))


def test_questions_are_answered_each_in_its_time(scene: Callable[..., Scene]) -> None:
    at = scene()
    at.show(7)
    link = answered(at, Holes(1, 7, PLAN, [[0, 16], [24, 8]], 3.0), Journal(2, 7, PLAN, 4.0),
                    Holes(3, 7, OTHER, [[0, 8]], 5.0), Journal(4, 7, OTHER, 6.0), CLOSED)
    (bytes_, data, size, seconds), (entry, buffers, length, more), nothing, other = link.sent
    assert bytes_.ranges == [(0, 16), (24, 8)] and data == REGION[:16].tobytes() + REGION[24:32].tobytes()
    assert (size, seconds) == (24, 3.0) and (entry.why, more, length) == ("", 4.0, len(buffers))
    found = unpack(bytearray(buffers), {"buffer.mean": TensorSpec("float32", (2,))}, "x")
    assert found["buffer.mean"].tolist() == [1.0, 2.0]
    assert nothing == (Bytes(3, 7, why=ANOTHER), b"", 0, 5.0)
    assert other[0].job == {"body": 1} and other[1:] == (b"", 0, 6.0)
    assert link.waits == [IDLE_SECONDS] * 5


def test_a_step_without_buffers_has_no_payload(scene: Callable[..., Scene]) -> None:
    at = scene()
    at.show(7, StepRecord())
    [(entry, payload, size, seconds)] = answered(at, Journal(2, 7, PLAN, 4.0), CLOSED).sent
    assert (entry.why, payload, size, seconds) == ("", b"", 0, 4.0)


def test_what_other_groups_have_is_heard_and_answered() -> None:
    heard: list[Any] = []
    mine, its = Steps("c" * 32, "c", []), Steps("d" * 32, "d", [])

    def hear(said: Steps, where: str) -> Steps:
        heard.append((said, where))
        return mine

    link = answered(None, its, its, CLOSED, hear=hear)
    assert heard == [(its, "somebody")] * 2 and [sent[:3] for sent in link.sent] == [(mine, b"", 0)] * 2


@pytest.mark.parametrize(("message", "why"), [
    (Flows([]), "a Flows from a peer"), (Steps("c" * 32, "c", []), "a Steps from a peer"),
    (Holes(1, 7, PLAN, [[0, 8]], 3.0), "no such group is followed here"),
    (Journal(1, 7, PLAN, 3.0), "no such group is followed here"),
])
def test_what_cannot_be_answered_ends_it(message: Any, why: str) -> None:
    with pytest.raises(RecordsError) as refused:
        answered(None, message, CLOSED)
    assert (refused.value.what, refused.value.where) == (why, "somebody")
