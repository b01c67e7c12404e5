"""What the group's thread decides at each of its turns while a peer's version is looked for, with a clock of its own.
The search is a real one whose thread does nothing: the test says what that would show."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import MEMORY, Offer
from flowcheck.control.version import MODEL, OPTIMIZER
from flowcheck.errors import EnvironmentProblem
from flowcheck.job.model import ModelEntry
from flowcheck.node.peers import catch_up as catching_up
from flowcheck.node.peers.catch_up import ASK_SECONDS, DISTRUST, PAUSE, QUIET_SECONDS, RATE, SHARE, CatchUp
from flowcheck.rebuild.iteration.given import Hearsay
from flowcheck.rebuild.version.events import CaughtUp, Event, NotCaughtUp
from updater.errors import UpdaterError

from .live_scene import small_job

NAMES = ["127.0.0.1:1", "127.0.0.1:2"]


class Quiet(catching_up._Search):
    def _main(self) -> None:
        pass


class Joins:
    """Of a Joining what is looked at, and what it is asked to do. refuses: what `expect` and `go_on_with` raise."""

    def __init__(self) -> None:
        replica = SimpleNamespace(rounding="torch-cpu")
        self.chain = SimpleNamespace(status="", next=7, builds=False, replica=replica)
        self.ranges = SimpleNamespace(given_up=False, emptied=1)
        self.hearsay, self.useful, self.expecting, self.gives_up = Hearsay(), (5, 7), True, False
        job = small_job()
        job.model += [ModelEntry("fixed", [5], kind="constant"), ModelEntry("twin", [2], tied="layer0.bias")]
        self.follower = SimpleNamespace(plan=SimpleNamespace(job=job))
        names = {entry.name: torch.zeros(entry.shape) for entry in job.model}
        self.slot = SimpleNamespace(parameters=names, optimizer_state={"layer0.bias": {"step": torch.zeros(())}})
        self.refuses: Exception | None = None
        self.did: list[Any] = []

    def expect(self, step: int) -> Any:
        self.did.append(step)
        if self.refuses is not None:
            raise self.refuses
        return self.slot

    def go_on_with(self, *given: Any) -> int:
        self.did.append(given)
        if self.refuses is not None:
            raise self.refuses
        return 70

    def go_on_without(self) -> Iterator[Event]:
        self.did.append("without")
        yield Event()


class Turns:
    """A CatchUp, its session and its clock."""

    def __init__(self) -> None:
        self.now, self.joining = 1000.0, Joins()
        self.nodes = [NodeClient(("127.0.0.1", port), "key") for port in (1, 2)]
        self.catching = CatchUp(lambda: list(self.nodes), "dp0", "one start", lambda: self.now)

    def look(self, later: float = 0.0) -> list[Event]:
        self.now += later
        return list(self.catching.look(self.joining))  # type: ignore[arg-type]

    def begin(self, later: float = 0.0) -> Quiet:
        """All has become stale again, and peers are asked."""
        self.joining.ranges.emptied += 1
        assert self.look(later) == [] and self.catching.busy
        return self.search

    @property
    def search(self) -> Quiet:
        found = self.catching._search
        assert isinstance(found, Quiet)
        return found

    def wish(self, step: int = 6, nbytes: int = 100, name: str = NAMES[0]) -> Quiet:
        """The search would take that version."""
        self.search.source, self.search.wishes = name, offer(step, nbytes)
        return self.search

    def fails(self, why: str = "", name: str = NAMES[0]) -> list[Event]:
        """A version of that peer is taken, and does not come."""
        self.wish(name=name)
        assert self.look() == [] and self.search.placed
        if why:
            self.search.failed[name] = why
        self.search.over = True
        return self.look()


def offer(step: int, nbytes: int = 100) -> Offer:
    return Offer(f"m{step}", MEMORY, "run", 0, step, "dp0", "verified", nbytes, start="one start")


def version(step: int) -> Any:
    return SimpleNamespace(step=step, optimizer={"name": "sgd"}, nbytes=240)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    monkeypatch.setattr(catching_up, "_Search", Quiet)
    return Turns()


# -- when peers are asked ------------------------------------------------------------------------------------------


def test_peers_are_asked_once_whenever_everything_becomes_stale(turns: Turns) -> None:
    turns.joining.ranges.emptied = 0
    assert turns.look() == [] and not turns.catching.busy, "nothing ever was"
    turns.joining.ranges.emptied, turns.joining.chain.next = 1, None
    assert turns.look() == [] and not turns.catching.busy, "no iteration is waited for yet"
    turns.joining.chain.next = 7
    assert turns.look() == [] and turns.catching.busy
    assert (turns.search._nodes, turns.search._shard, turns.search._start) == (turns.nodes, "dp0", "one start")
    assert turns.search.useful == (5, 7) and turns.search.failed == {}
    assert turns.fails("gone") == [NotCaughtUp({NAMES[0]: "gone"}), Event()]
    assert turns.look(10_000.0) == [] and not turns.catching.busy, "it is the same as before"


def test_it_is_not_tried_again_soon(turns: Turns) -> None:
    turns.begin()
    turns.fails()
    turns.joining.ranges.emptied += 1
    assert turns.look(PAUSE - 0.1) == [] and not turns.catching.busy
    assert turns.look(10_000.0) == [] and not turns.catching.busy, "whoever was told to answer by ranges does"
    turns.begin()


def test_the_pause_is_over_at_its_end(turns: Turns) -> None:
    turns.begin()
    turns.fails()
    turns.begin(PAUSE)


def test_a_machine_that_has_just_started_asks_at_once(turns: Turns) -> None:
    turns.now = 0.0
    turns.begin()


def test_one_that_took_long_is_not_tried_again_for_longer(turns: Turns) -> None:
    turns.begin()
    turns.now += 5.0
    turns.fails()
    turns.joining.ranges.emptied += 1
    assert turns.look(SHARE * 5.0 - 0.1) == [] and not turns.catching.busy
    turns.begin(0.1)


def test_a_peer_that_failed_is_left_out_for_a_time_and_named(turns: Turns) -> None:
    turns.begin()
    turns.fails("lied")
    search = turns.begin(DISTRUST - 0.1)
    assert [node.name for node in search._nodes] == [NAMES[1]] and search.failed == {NAMES[0]: "not asked: lied"}
    turns.fails("lied, too", NAMES[1])
    search = turns.begin(PAUSE)
    assert [node.name for node in search._nodes] == [NAMES[0]] and search.failed == {NAMES[1]: "not asked: lied, too"}


def test_it_is_asked_again_when_that_time_is_over(turns: Turns) -> None:
    turns.begin()
    turns.fails("lied")
    search = turns.begin(DISTRUST)
    assert [node.name for node in search._nodes] == NAMES and search.failed == {}


def test_the_thread_of_a_search_does_not_keep_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for a peer that hangs when the node ends."""
    made: list[Any] = []
    monkeypatch.setattr(catching_up, "threading", SimpleNamespace(
        Event=threading.Event, Lock=threading.Lock,
        Thread=lambda **given: made.append(given) or SimpleNamespace(start=lambda: made.append("starts"))))
    search = catching_up._Search([], "dp0", "one start", (5, 7), {})
    assert made == [{"target": search._main, "name": "flowcheck catch up", "daemon": True}, "starts"]


def test_where_there_is_no_thread_that_is_said(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(catching_up, "_Search", refuse)
    assert turns.look() == [NotCaughtUp({"": "can't start new thread"})] and not turns.catching.busy
    assert turns.look() == [], "once"


def test_who_cannot_be_asked_is_said(turns: Turns) -> None:
    def nodes() -> list[NodeClient]:
        raise EnvironmentProblem("Permission denied", where="token")

    turns.catching._nodes = nodes
    assert turns.look() == [NotCaughtUp({"": "token: Permission denied"})] and not turns.catching.busy


# -- while they are asked ------------------------------------------------------------------------------------------


def test_what_is_of_use_is_told_as_it_changes(turns: Turns) -> None:
    search = turns.begin()
    turns.joining.useful = (6, 9)
    assert turns.look() == [] and search.useful == (6, 9)


@pytest.mark.parametrize(("step", "held"), [(4, False), (5, True), (6, True), (7, True), (8, False)])
def test_a_version_of_use_is_taken_and_another_one_refused(turns: Turns, step: int, held: bool) -> None:
    turns.begin()
    search = turns.wish(step)
    assert turns.look() == [] and search.placed == held and search._answered.is_set()
    assert turns.joining.did == ([step] if held else []) and (search.wishes is None) != held


def test_a_version_is_not_taken_while_another_one_is_built(turns: Turns) -> None:
    turns.begin()
    search = turns.wish()
    turns.joining.chain.builds = True
    assert turns.look() == [] and not search.placed and turns.joining.did == [] and not search._answered.is_set()
    assert turns.look(10_000.0) == [] and turns.catching.busy, "nobody is late"
    turns.joining.chain.builds = False
    assert turns.look() == [] and search.placed


def test_where_a_version_goes(turns: Turns) -> None:
    """Into the slot, but for what every version of this replica has in common: it is held against that afterwards."""
    turns.begin()
    search = turns.wish()
    turns.look()
    model, slot = search._targets[MODEL], turns.joining.slot.parameters
    apart = {name for name, tensor in model.items() if tensor is not slot[name]}
    assert apart == {"fixed", "twin"} and model.keys() == slot.keys()
    assert {name: tuple(model[name].shape) for name in apart} == {"fixed": (5,), "twin": (2,)}
    assert search._targets[OPTIMIZER].keys() == {"state.layer0.bias.step"} and search._rounding == "torch-cpu"


@pytest.mark.parametrize(("error", "why"), [
    (EnvironmentProblem("no slot", where="replica", remedy="r"), "no slot"), (UpdaterError("all are pinned"),
                                                                             "all are pinned"),
])
def test_where_it_can_go_nowhere_trainers_are_asked(turns: Turns, error: Exception, why: str) -> None:
    search = turns.begin()
    turns.wish()
    turns.joining.refuses = error
    assert turns.look() == [NotCaughtUp({NAMES[0]: why}), Event()]
    assert not turns.catching.busy and search._ended and turns.joining.did == [6, "without"]
    turns.joining.refuses = None
    assert turns.begin(PAUSE).failed == {}, "that was nobody's fault"


def test_nothing_of_use_ends_it(turns: Turns) -> None:
    search = turns.begin()
    search.failed[NAMES[1]] = "has nothing"
    search.over = True
    turns.joining.chain.builds = True
    assert turns.look() == [NotCaughtUp({NAMES[1]: "has nothing"}), Event()] and not turns.catching.busy


def test_who_does_not_say_in_time_is_not_waited_for(turns: Turns) -> None:
    turns.begin()
    turns.search.failed[""] = "of another kind"
    assert turns.look(ASK_SECONDS + 3 * QUIET_SECONDS) == []
    assert turns.look(0.1) == [NotCaughtUp({"": "of another kind"}), Event()]
    turns.begin(10_000.0)
    assert turns.look(ASK_SECONDS + 3 * QUIET_SECONDS + 0.1) == [
        NotCaughtUp({"": "they did not say in time what they have"}), Event()]


def test_trainers_that_give_whole_states_end_it_without_a_word(turns: Turns) -> None:
    search = turns.begin()
    turns.joining.ranges.given_up = True
    assert turns.look() == [] and not turns.catching.busy and search._ended
    turns.joining.ranges.emptied += 1
    assert turns.look() == [] and not turns.catching.busy
    turns.catching.close()


# -- while it comes ------------------------------------------------------------------------------------------------


def test_a_version_that_came_is_gone_on_with(turns: Turns) -> None:
    turns.begin()
    search = turns.wish()
    turns.look(2.0)
    apart = {name: search._targets[MODEL][name] for name in ("fixed", "twin")}
    assert turns.look(2.0) == [], "it is on its way"
    search.version, search.over = version(6), True
    assert turns.look(3.0) == [CaughtUp(70, 6, NAMES[0], 240, 7.0)] and not turns.catching.busy
    step, optimizer, given, source = turns.joining.did[-1]
    assert (step, optimizer, source) == (6, {"name": "sgd"}, NAMES[0])
    assert given.keys() == apart.keys() and all(given[name] is apart[name] for name in apart)
    assert turns.catching._apart == {}, "memory of constants goes"
    turns.joining.ranges.emptied += 1
    assert turns.look(SHARE * 7.0 - 0.1) == [] and not turns.catching.busy


@pytest.mark.parametrize(("error", "why"), [
    (EnvironmentProblem("another optimizer", where="x", remedy="r"), "another optimizer"),
    (UpdaterError("cannot be switched"), "cannot be switched"),
])
def test_a_version_that_is_none_is_its_peers_fault(turns: Turns, error: Exception, why: str) -> None:
    turns.begin()
    search = turns.wish()
    turns.look()
    search.version, search.over, turns.joining.refuses = version(6), True, error
    assert turns.look() == [NotCaughtUp({NAMES[0]: why}), Event()] and search._ended and not turns.catching.busy
    assert turns.begin(PAUSE).failed == {NAMES[0]: f"not asked: {why}"}


def test_one_that_says_nothing_of_why_is_named_as_well(turns: Turns) -> None:
    turns.begin()
    assert turns.fails() == [NotCaughtUp({NAMES[0]: "its version did not come"}), Event()]


@pytest.mark.parametrize(("field", "value", "why"), [
    ("expecting", False, "the job has ended meanwhile"), ("gives_up", True, "rings were full before it was here"),
])
def test_what_ends_it_is_nobodys_fault(turns: Turns, field: str, value: bool, why: str) -> None:
    turns.begin()
    search = turns.wish()
    turns.look()
    setattr(turns.joining, field, value)
    assert turns.look() == [NotCaughtUp({NAMES[0]: why}), Event()] and search._ended
    turns.joining.expecting, turns.joining.gives_up = True, False
    assert turns.begin(PAUSE).failed == {}


def test_a_version_has_as_long_as_its_size_takes(turns: Turns) -> None:
    turns.begin()
    turns.wish(nbytes=int(2 * RATE))
    turns.look()
    assert turns.look(3 * QUIET_SECONDS + 2.0) == []
    assert turns.look(0.01) == [NotCaughtUp({NAMES[0]: "too slow"}), Event()]


def test_a_version_that_is_not_the_trainers_is_its_peers_for_ever(turns: Turns) -> None:
    turns.begin()
    search = turns.wish()
    turns.look()
    search.version, search.over = version(6), True
    turns.look()
    turns.joining.chain.status = "diverged"
    turns.look()
    assert turns.catching._left_out == {}, "a checksum had confirmed it before"
    turns.joining.chain.status, turns.joining.hearsay = "unverified", Hearsay(version="of a peer")
    turns.look()
    assert turns.catching._left_out == {}, "nothing is wrong yet"
    turns.joining.chain.status = "diverged"
    search = turns.begin(1e9)
    assert search.failed == {NAMES[0]: "not asked: its version was not the trainer's"}
    assert [node.name for node in search._nodes] == [NAMES[1]]
    turns.catching._left_out.clear()
    turns.look()
    assert turns.catching._left_out == {}, "it is said of whom it was once"


def test_whoever_diverges_alone_blames_nobody(turns: Turns) -> None:
    turns.joining.chain.status, turns.joining.hearsay = "diverged", Hearsay(version="of an earlier process")
    turns.begin()
    assert turns.catching._left_out == {} and turns.search.failed == {}
