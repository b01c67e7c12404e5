"""What a journal's two threads decide at each turn: which hashes are fetched, which iteration is asked for next, what
is said, when something is made of it. The source's API is made by hand, and a group's thread does nothing by
itself."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import Offer
from flowcheck.ask.receiving import AskError
from flowcheck.control.protocol import Entry, RecordsError
from flowcheck.errors import FlowcheckError
from flowcheck.node.protect import journal_loop as module
from flowcheck.node.protect.journal import FOLDER, Journal
from flowcheck.node.protect.journal_loop import (
    AGAIN_SECONDS,
    GONE_SECONDS,
    PAUSE_SECONDS,
    Journaling,
    Lacking,
    _Group,
    _parts,
    bases_of,
    lane_of,
    youngest,
)
from flowcheck.node.protect.redo import Reach
from flowcheck.node.versions.journal.job_text import JobText
from flowcheck.rebuild.plan import BucketPlace

from ..hand_api import KEY, HandApi, HandVersion

JOB = JobText({"schema": "x"}, ("run", 0, 2), 5, "a" * 64)


@pytest.fixture
def api() -> Iterator[HandApi]:
    with HandApi() as made:
        yield made


class Scene:
    """A Journaling of a source, whose threads a test is. now: of its clock."""

    def __init__(self, tmp_path: Path, api: HandApi, monkeypatch: pytest.MonkeyPatch, name: str = "") -> None:
        monkeypatch.setattr(_Group, "_main", lambda group: None)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.now, self.said, self.asked = 1000.0, list[Any](), list[NodeClient]()
        self.directory, self.name, self.api = tmp_path / "copies", name or api.name, api
        self.journaling = Journaling(
            self.directory, self.name, self.node, ("127.0.0.1", 9), lambda: b"token", None, lambda nbytes: None,
            lambda event, **fields: self.said.append((event, fields)), 7.0)

    def node(self) -> NodeClient:
        self.asked.append(NodeClient(self.api.address, KEY, 60.0))
        return self.asked[-1]

    def group(self, shard: str = "") -> _Group:
        return self.journaling._groups[shard]

    def folder(self, shard: str = "", run: str = "run/epoch-0") -> Path:
        return lane_of(self.directory, self.name, shard) / run / FOLDER

    def begun(self, shard: str = "", run: str = "run/epoch-0") -> Journal:
        """Of that group the job is known."""
        journal = Journal(self.folder(shard, run))
        journal.begin(JOB)
        return journal

    def unjournaled(self) -> list[tuple[str, str]]:
        assert all(event == "unjournaled" and fields["source"] == self.name for event, fields in self.said)
        return [(fields["name"], fields["why"]) for _, fields in self.said]


@pytest.fixture
def scene(tmp_path: Path, api: HandApi, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, api, monkeypatch)


# -- pure ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "shard", "name"), [
    ("h:1", "", "h:1%2F"), ("[::1]:7", "dp0", "[::1]:7%2Fdp0"), ("h:1", "a/b c", "h:1%2Fa%2Fb%20c"),
    ("h:1", "a+@=,b", "h:1%2Fa+@=,b"),
])
def test_where_a_group_lies(source: str, shard: str, name: str) -> None:
    assert lane_of(Path("x"), source, shard) == Path("x") / name


def aged(step: int, age: float | None) -> Offer:
    return Offer(f"m{step}", "memory", "run", 0, step, "", "verified", 1, age_seconds=age)


def test_the_youngest_is_what_was_published_last() -> None:
    old, new = aged(900, 60.0), aged(3, 0.5)
    assert youngest([old, new]) is new and youngest([new, old]) is new
    unknown = aged(1, None)
    assert youngest([old, unknown, new]) is unknown, "one that does not say has no age"


def test_copies_of_a_run(tmp_path: Path) -> None:
    for name in ("step-000012", "step-9", "step-1000000", "step-x", "step-", ".step-000001.partial-4", "journal"):
        (tmp_path / name).mkdir()
    assert bases_of(tmp_path) == [9, 12, 1_000_000] and bases_of(tmp_path / "nothing") == []


def parts(*sizes: int) -> list[list[tuple[int, int, int]]]:
    return _parts(tuple(BucketPlace(index, size, 0, size) for index, size in enumerate(sizes)))


@pytest.mark.parametrize(("sizes", "asked"), [
    ((), []), ((0,), []), ((16,), [[(0, 0, 16)]]), ((17,), [[(0, 0, 16)], [(0, 16, 1)]]),
    ((8, 8, 8), [[(0, 0, 8), (1, 0, 8)], [(2, 0, 8)]]),
    ((4, 20), [[(0, 0, 4), (1, 0, 8)], [(1, 8, 12)]]),  # a piece ends with a cell, but for a bucket's last
    ((9, 8), [[(0, 0, 9)], [(1, 0, 8)]]), ((40, 0, 3), [[(0, 0, 16)], [(0, 16, 16)], [(0, 32, 8), (2, 0, 3)]]),
])
def test_what_is_asked_for_at_once(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], asked: list[list[tuple[int, int, int]]]
) -> None:
    monkeypatch.setattr(module, "PEER_BYTES", 16)
    assert parts(*sizes) == asked


def test_so_many_pieces_at_most_are_asked_for_at_once() -> None:
    assert [len(part) for part in parts(*[8] * 2049)] == [1024, 1024, 1]


# -- the thread that looks -----------------------------------------------------------------------------------------


def test_each_group_of_a_source_has_a_journal_of_the_run_that_it_follows(scene: Scene, api: HandApi) -> None:
    api.versions[:] = [
        HandVersion(9, shard="b"), HandVersion(900, run_id="old run", epoch=3), HandVersion(7),
        HandVersion(20, shard="c", tier="disk"), HandVersion(20, shard="d", tier="copy"),
    ]
    for one, age in zip(api.versions, (1.0, 60.0, 0.5, 0.0, 0.0), strict=True):
        one.offer["age_seconds"] = age
    scene.journaling._look()
    assert sorted(scene.journaling._groups) == ["", "b"]
    assert {shard: group.journal and group.journal.folder for shard, group in scene.journaling._groups.items()} == {
        "": scene.folder(), "b": scene.folder("b")}
    threads = [group.thread for group in scene.journaling._groups.values()]
    assert {thread.name for thread in threads} == {"flowcheck journal of ", "flowcheck journal of b"}
    assert all(thread.daemon for thread in threads), "a source that hangs does not keep the process"
    assert api.asked_for("/manifest.json?release") == 0 and not scene.asked[-1].connection.is_open
    before, journal = scene.group(), scene.group().journal
    scene.journaling._look()
    assert scene.group() is before and before.journal is journal, "it stays as long as its run does"
    api.versions[2].offer["age_seconds"] = 99.0
    scene.journaling._look()
    assert before.journal is not None and before.journal.folder == scene.folder(run="old%20run/epoch-3")
    assert scene.said == []


def test_hashes_of_the_newest_step_are_fetched_once(scene: Scene, api: HandApi) -> None:
    """As soon as it is known of which job. It is not held for that."""
    journal = scene.begun()
    for newest, steps in ((7, [7]), (7, [7]), (9, [7, 9])):
        scene.now += 1.0
        api.versions[:] = [HandVersion(newest), HandVersion(newest - 1)]
        for one in api.versions:
            one.offer["age_seconds"] = 10.0 - one.offer["step"]
        scene.journaling._look()
        assert journal.steps == steps and scene.journaling._seen == scene.now
    assert [path.rpartition("/")[2] for path, _ in api.asked if "manifest" in path] == ["manifest.json?release"] * 2


def test_a_source_that_refuses_is_let_go(scene: Scene, api: HandApi) -> None:
    scene.begun()
    api.versions[:] = [HandVersion(7)]
    api.versions[0].document["step"] = 8
    with pytest.raises(AskError):
        scene.journaling._look()
    assert not scene.asked[-1].connection.is_open


class Waits:
    """In place of the event that ends: `turns` waits, and it has ended. at: what happens at each."""

    def __init__(self, turns: int, at: Callable[[int], None] = lambda number: None) -> None:
        self.waits, self._turns, self._at = list[float](), turns, at

    def is_set(self) -> bool:
        return len(self.waits) >= self._turns

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self._at(len(self.waits))


def test_it_is_looked_at_again_and_again_and_made_when_it_is_gone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers, is gone for a moment, then for long, and answers."""
    made: list[float] = []
    there = [True]

    def look() -> None:
        if not there[0]:
            raise AskError("connection refused")
        scene.journaling._seen = scene.now

    def at(number: int) -> None:
        there[0] = number in (1, 4)
        scene.now += {1: 0.0, 2: GONE_SECONDS, 3: 0.1, 4: 100.0}.get(number, 0.0)

    monkeypatch.setattr(scene.journaling, "_look", look)
    monkeypatch.setattr(scene.journaling, "make", lambda: made.append(scene.now))
    ending = scene.journaling._ending = Waits(5, at)  # type: ignore[assignment]
    scene.journaling._main()
    assert ending.waits == [7.0, 7.0, PAUSE_SECONDS, PAUSE_SECONDS, 7.0]  # type: ignore[attr-defined]
    assert made == [1000.0 + GONE_SECONDS + 0.1] and scene.said == []


@pytest.mark.parametrize(("error", "why"), [
    (RuntimeError("no such state"), "RuntimeError: no such state"),
    (FlowcheckError("no room", where="there", remedy="more"), "there: no room\n  remedy: more"),
])
def test_what_fails_is_said_once_until_it_goes_well(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    failing = [True]

    def look() -> None:
        if failing[0]:
            raise error

    def at(number: int) -> None:
        failing[0] = number != 2

    monkeypatch.setattr(scene.journaling, "_look", look)
    ending = scene.journaling._ending = Waits(5, at)  # type: ignore[assignment]
    scene.journaling._main()
    assert scene.unjournaled() == [("", why)] * 2
    assert ending.waits == [PAUSE_SECONDS, PAUSE_SECONDS, 7.0, PAUSE_SECONDS, PAUSE_SECONDS]  # type: ignore[attr-defined]


# -- what is made --------------------------------------------------------------------------------------------------


class Making(Scene):
    """redo: what was made, and of what; whether it fails, and why."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.redone, self.fails = list[Any](), dict[str, Exception]()

    def redo(self, base: Path, journal: Journal, threads: int) -> tuple[Path, Reach]:
        assert threads > 0
        self.redone.append((str(base.relative_to(self.directory)), journal.folder))
        shard = base.parents[2].name.partition("%2F")[2]
        if shard in self.fails:
            raise self.fails[shard]
        self.now += 1.23456
        to = module.reach(int(base.name[5:]), journal)
        return base.with_name(f"step-{to.step:06d}"), to

    def has(self, shard: str, base: int | None, *entries: int, steps: tuple[int, ...] = ()) -> Journal:
        """A copy of step `base`, iterations, and hashes of the steps that they make, or of these."""
        journal = self.begun(shard)
        if base is not None:
            (journal.folder.parent / f"step-{base:06d}").mkdir(exist_ok=True)
        for number in entries:
            journal.add(number, {}, [torch.zeros(1)], {})
        for step in steps or tuple(number + 1 for number in entries):
            (journal.folder / f"hashes-{step:012d}").write_text("{}")
        return journal


@pytest.fixture
def making(tmp_path: Path, api: HandApi, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Making]:
    def made(name: str = "[::1]:7") -> Making:
        scene = Making(tmp_path, api, monkeypatch, name)
        monkeypatch.setattr(module, "redo", lambda *given: scene.redo(*given))
        return scene

    return made


def test_of_each_group_the_newest_step_is_made_once(making: Callable[..., Making]) -> None:
    """Of this source, whose name has characters of patterns, and of no other."""
    at = making()
    at.has("b", 7, 7, 8, 9)
    journal = at.has("a/c", 3, 3)
    at.has("d", 3)
    lane = lane_of(at.directory, "[::1]:71", "") / "run" / "epoch-0" / FOLDER
    Journal(lane).begin(JOB)
    at.journaling.make()
    assert [base for base, _ in at.redone] == ["[::1]:7%2Fa%2Fc/run/epoch-0/step-000003",
                                               "[::1]:7%2Fb/run/epoch-0/step-000007"]
    assert at.redone[0][1] == journal.folder
    assert at.said == [("redone", {"source": "[::1]:7", "name": name, "step": step, "base": base, "seconds": 1.235,
                                   "why": "", "path": str(path)}) for name, step, base, path in (
        ("a/c", 4, 3, journal.folder.parent / "step-000004"), ("b", 10, 7, at.folder("b").parent / "step-000010"))]
    at.now += 10_000.0
    at.journaling.make()
    assert len(at.redone) == 2, "what was made is not made again"
    at.has("b", None, 10)
    at.journaling.make()
    assert [base for base, _ in at.redone[2:]] == ["[::1]:7%2Fb/run/epoch-0/step-000007"]


def test_it_begins_with_the_newest_copy(making: Callable[..., Making]) -> None:
    at = making()
    at.has("", 7, 7, 8, 9)
    at.has("", 9)
    at.journaling.make()
    assert [base for base, _ in at.redone] == ["[::1]:7%2F/run/epoch-0/step-000009"]


@pytest.mark.parametrize("base", [8, 9])
def test_a_copy_that_is_as_new_is_enough(making: Callable[..., Making], base: int) -> None:
    at = making()
    at.has("", base, 7)
    at.journaling.make()
    assert at.redone == [] and at.said == []


def test_without_a_copy_there_is_nothing_to_begin_with(making: Callable[..., Making]) -> None:
    at = making()
    at.has("", None, 7)
    at.journaling.make()
    assert at.redone == [] and at.said == []
    at.has("", 7)
    at.journaling.make()
    assert len(at.redone) == 1, "as soon as there is one"


def test_where_it_ends_is_said_with_what_is_made(making: Callable[..., Making]) -> None:
    at = making()
    at.has("", 7, 7, 9)
    at.journaling.make()
    [(event, fields)] = at.said
    assert (event, fields["step"], fields["why"]) == ("redone", 8, "iteration 8 is not in the journal")


def test_one_step_that_nothing_proves_is_no_gap(making: Callable[..., Making]) -> None:
    at = making()
    at.has("", 7, 7, 8, steps=(8,))
    at.journaling.make()
    assert at.said[0][1]["why"] == "" and at.said[0][1]["step"] == 8


def test_where_nothing_can_be_made_that_is_said_and_not_tried_again(making: Callable[..., Making]) -> None:
    at = making()
    at.has("x", 7, 8)
    for _ in range(2):
        at.journaling.make()
        at.now += 10_000.0
    assert at.redone == []
    assert at.unjournaled() == [("x", "step 7 is the newest that is left of 9: iteration 7 is not in the journal")]
    assert list(at.journaling._made.values()) == [(9, math.inf)]


def test_what_failed_is_tried_again_later_and_hides_no_other_group(making: Callable[..., Making]) -> None:
    at = making()
    at.has("a", 7, 7)
    at.has("b", 7, 7)
    at.fails["a"] = FlowcheckError("no room", where="memory")
    at.journaling.make()
    assert [base[:9] for base, _ in at.redone] == ["[::1]:7%2", "[::1]:7%2"] and len(at.said) == 2
    assert at.said[0] == ("unjournaled", {"source": "[::1]:7", "name": "a", "why": "memory: no room"})
    at.now = 1000.0 + AGAIN_SECONDS - 0.1
    at.journaling.make()
    assert len(at.redone) == 2
    at.now = 1000.0 + AGAIN_SECONDS
    at.fails["a"] = RuntimeError("of a library")
    at.journaling.make()
    assert len(at.redone) == 3 and at.said[2][1]["why"] == "RuntimeError: of a library"
    at.has("a", None, 8)
    del at.fails["a"]
    at.journaling.make()
    assert at.said[3][1] | {"name": "a", "step": 9, "base": 7} == at.said[3][1], "a newer one is another one"


class Parity:
    """What is made of it: a copy of step `gives`; None: nothing. took: what was asked for."""

    def __init__(self, gives: int | None) -> None:
        self.gives, self.took = gives, list[Any]()

    def take(self, *given: Any) -> None:
        self.took.append(given)
        if self.gives is not None:
            (given[3] / f"step-{self.gives:06d}").mkdir()


@pytest.mark.parametrize(("base", "after"), [(None, -1), (3, 3)])
def test_of_a_member_of_a_group_it_begins_with_what_parity_gives(
    making: Callable[..., Making], base: int | None, after: int
) -> None:
    """What was made before goes, of all starts of the run: parity has it."""
    at = making()
    parity = at.journaling._parity = Parity(7)  # type: ignore[assignment]
    journal = at.has("dp0", base, 7, 8)
    out = journal.folder.parent
    old = out.with_name("epoch-4") / "step-000900"
    old.mkdir(parents=True)
    other = lane_of(at.directory, "h:1", "") / "run" / "epoch-0" / "step-000001"
    other.mkdir(parents=True)
    redo = at.redo

    def made(*given: Any) -> tuple[Path, Reach]:
        path, to = redo(*given)
        path.mkdir()
        return path, to

    at.redo = made  # type: ignore[method-assign]
    at.journaling.make()
    assert parity.took == [("dp0", "run", 0, out, after)]  # type: ignore[attr-defined]
    assert at.redone == [(f"{out.relative_to(at.directory)}/step-000007", journal.folder)]
    assert bases_of(out) == [9] and not old.exists() and other.is_dir() and at.said[0][1]["base"] == 7


def test_where_parity_gives_nothing_it_is_asked_again(making: Callable[..., Making]) -> None:
    at = making()
    parity = at.journaling._parity = Parity(None)  # type: ignore[assignment]
    at.has("dp0", None, 7)
    at.journaling.make()
    at.journaling.make()
    assert len(parity.took) == 2 and at.redone == [] and at.said == []  # type: ignore[attr-defined]


def test_of_a_job_that_is_not_known_nothing_is_made_of_parity(making: Callable[..., Making]) -> None:
    at = making()
    parity = at.journaling._parity = Parity(7)  # type: ignore[assignment]
    (at.has("dp0", None, 7).folder / "job.json").unlink()
    at.journaling.make()
    assert parity.took == [] and at.redone == []  # type: ignore[attr-defined]


# -- a group's thread ----------------------------------------------------------------------------------------------


class Following:
    """A group and a source that says what a test has it say. asked: iterations; kept: those."""

    def __init__(self, tmp_path: Path, *said: Any) -> None:
        self.ending, self.gaps, self.asked, self.kept = threading.Event(), list[Any](), list[int](), list[int]()
        self.losses, self.closed, self.said = list[Any](), 0, list(said)
        self.group = _Group(self, "dp0")  # type: ignore[arg-type]
        self.journal = self.group.journal = Journal(tmp_path / "journal")

    def gap(self, *said: Any) -> None:
        self.gaps.append(said)

    def entry(self, iteration: int) -> Entry:
        self.asked.append(iteration)
        one = self.said.pop(0)
        if not self.said:
            self.ending.set()
        return Entry(1, iteration, **{"plan": "p", "newest": -1, **one})

    def keep(self, entry: Entry) -> None:
        if entry.clip is not None:
            raise Lacking(f"{entry.clip:g} bytes came over no mirror")
        self.kept.append(entry.iteration)

    def follow(self) -> None:
        self.group._follow(self, self.journal)  # type: ignore[arg-type]


JOIN: dict[str, Any] = {"job": {"a": 1}, "run": ["run", 0, 1]}


@pytest.mark.parametrize(("said", "asked", "kept", "gaps"), [
    ([{}, {}, {}], [0, 1, 2], [0, 1, 2], []),
    ([JOIN | {"newest": 9, "first": 4}, {}, {}], [0, 9, 10], [9, 10], []),  # from what it can still have on
    ([JOIN | {"newest": -1, "first": 4}, {}], [0, 4], [4], []),
    ([{"why": "it has not closed here", "newest": -1}] * 2 + [{}], [0, 0, 0], [0], []),
    ([{"why": "gone", "newest": 0}, {"why": "gone", "newest": 9}, {}], [0, 1, 9], [9], [(0, "gone"), (1, "gone")]),
    ([{"clip": 24.0}, {}], [0, 1], [1], [(0, "24 bytes came over no mirror")]),
])
def test_which_iteration_comes_next(
    tmp_path: Path, said: list[dict[str, Any]], asked: list[int], kept: list[int], gaps: list[Any]
) -> None:
    at = Following(tmp_path, *said)
    at.group._said = "it was gone"
    at.follow()
    assert (at.asked, at.kept) == (asked, kept) and at.gaps == [("dp0", *gap) for gap in gaps]
    assert at.group._said == ("" if kept else "it was gone"), "what was said of it is over"


def test_it_goes_on_after_what_it_has(tmp_path: Path) -> None:
    at = Following(tmp_path, {})
    at.journal.begin(JOB)
    for number in (7, 12, 9):
        at.journal.add(number, {}, [], {})
    at.follow()
    assert at.asked == [13]


def test_a_source_that_follows_nothing_is_left(tmp_path: Path) -> None:
    at = Following(tmp_path, {"plan": ""}, {})
    at.follow()
    assert at.asked == [0] and not at.ending.is_set()


def test_another_run_ends_it(tmp_path: Path) -> None:
    at = Following(tmp_path, {}, {}, {})
    kept = at.keep

    def keep(entry: Entry) -> None:
        kept(entry)
        at.group.journal = Journal(tmp_path / "other")

    at.keep = keep  # type: ignore[method-assign]
    at.follow()
    assert at.asked == [0] and not at.ending.is_set()


def test_a_connection_that_ends_is_let_go_and_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason is handed on with the one from before. Without a run there is nothing to read."""
    main = _Group._main
    at, closed, read = Following(tmp_path), list[int](), list[Any]()
    errors = [RecordsError("gone", where="x"), RecordsError("gone", where="x")]

    class Reads:
        def close(self) -> None:
            closed.append(1)

    owner = SimpleNamespace(
        ending=Waits(4, lambda number: setattr(at.group, "journal", at.journal if number > 1 else None)),
        read=lambda *given: read.append(given) or Reads(), lost=lambda *said: at.losses.append(said) or "gone so")
    at.group.journal = None
    at.group._owner = owner
    followed: list[Any] = []

    def follow(reading: Any, journal: Any) -> None:
        assert isinstance(reading, Reads)
        followed.append(journal)
        raise errors.pop()

    monkeypatch.setattr(at.group, "_follow", follow)
    main(at.group)
    assert followed == [at.journal] * 2 and read == [("dp0", at.journal)] * 2
    assert owner.ending.waits == [PAUSE_SECONDS] * 4
    assert [(shard, error.what, said) for shard, error, said in at.losses] == [("dp0", "gone", ""),
                                                                              ("dp0", "gone", "gone so")]
    assert len(closed) == 2


@pytest.mark.parametrize(("error", "what", "said"), [
    (RecordsError("closed", where="x"), "closed", "closed"), (OSError(111, "Connection refused"), "Connection refused",
                                                              "Connection refused"),
    (TimeoutError("timed out"), "timed out", "timed out"), (KeyError("x"), "'x'", "KeyError: 'x'"),
])
def test_why_a_connection_has_ended_is_said_once(scene: Scene, error: Exception, what: str, said: str) -> None:
    assert scene.journaling.lost("dp0", error, "") == what
    assert scene.journaling.lost("dp0", error, what) == what
    assert scene.unjournaled() == [("dp0", said)]


def test_a_gap_is_said_with_its_iteration(scene: Scene) -> None:
    scene.journaling.gap("dp0", 6, "it is gone")
    assert scene.unjournaled() == [("dp0", "iteration 6: it is gone; steps after it need a newer copy")]


def test_a_connection_is_made_as_settings_say(scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    scene.journaling._tls, scene.journaling._parity = "context", "parity"  # type: ignore[assignment]
    monkeypatch.setattr(module, "dial", lambda *given: ("link", *given))
    monkeypatch.setattr(module, "Reading", lambda *given: given)
    assert scene.journaling.read("dp0", journal) == (
        ("link", ("127.0.0.1", 9), "context", module.PEER_SECONDS), b"token", "dp0", journal, scene.journaling._room,
        "parity")


def test_its_own_thread_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(Journaling, "_main", lambda journaling: ran.append(threading.current_thread().name))
    at = Journaling(tmp_path, "h:1", lambda: None, ("h", 9), bytes, None, lambda _: None,  # type: ignore[arg-type,return-value]
                    lambda *_, **__: None, 7.0)
    at.start()
    at.close(60.0)
    assert ran == ["flowcheck journal h:1"] and at._thread.daemon and not at._thread.is_alive()


def test_a_groups_own_thread_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(_Group, "_main", lambda group: ran.append(threading.current_thread().name))
    thread = _Group(SimpleNamespace(), "dp0").thread  # type: ignore[arg-type]
    thread.start()
    thread.join(60.0)
    assert ran == ["flowcheck journal of dp0"] and thread.daemon


# -- the end -------------------------------------------------------------------------------------------------------


def test_what_is_under_way_is_waited_for_so_long_at_most(scene: Scene) -> None:
    joined: list[float] = []

    class Thread:
        def is_alive(self) -> bool:
            return True

        def join(self, seconds: float) -> None:
            joined.append(seconds)
            scene.now += 2.0

    ended: list[int] = []
    for shard in ("a", "b"):
        scene.journaling._groups[shard] = SimpleNamespace(thread=Thread(), end=lambda: ended.append(1))  # type: ignore[assignment]
    scene.journaling._thread = Thread()  # type: ignore[assignment]
    scene.journaling.close(3.0)
    assert joined == [3.0, 1.0, 0.0] and ended == [1, 1] and scene.journaling.ending.is_set()


def test_one_that_never_began_is_closed_at_once(scene: Scene) -> None:
    with contextlib.closing(SimpleNamespace(close=lambda: scene.journaling.close(60.0))):
        scene.journaling._groups["a"] = _Group(scene.journaling, "a")
