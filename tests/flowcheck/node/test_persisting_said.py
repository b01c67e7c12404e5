"""What is said of uploads to a store, word for word, which versions are due at the bounds of the rules, and what an
upload is given. The scene is that of test_persisting.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowcheck.checkpoint.objects import StoreError
from flowcheck.checkpoint.store import Rules
from flowcheck.control.user_state import pack
from flowcheck.node.store import worker as persisting
from flowcheck.node.store.worker import MOST_LEFT_OUT, Persister, Wants, _Upload
from flowcheck.node.versions.user_states import rank_file, user_folder
from updater.errors import ReplicaError
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

from .test_persisting import SECONDS, Scene, advance


@pytest.fixture
def replica(shm: Path) -> Iterator[Replica]:
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0, "momentum": 0.5})])
    made = Replica({"w": torch.zeros(3)}, spec, path=shm / "flowcheck-n-dp0-1.replica", run_id="run", epoch=3, slots=3)
    with contextlib.closing(made):
        yield made


@pytest.fixture
def scene(shm: Path, tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    with contextlib.ExitStack() as stack:
        yield lambda **wants: stack.enter_context(contextlib.closing(Scene(shm, tmp_path / "store", **wants)))


# -- word for word -------------------------------------------------------------------------------------------------


def test_what_was_stored_and_what_went(
    replica: Replica, scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = scene(every=1, rules=Rules(keep=1))
    here.store.url = "s3://boX/"
    put = here.store.put

    def slow(name: str, pieces: Iterable[bytes | memoryview]) -> None:
        here.now += 1.23456 if name.endswith("model.safetensors") else 0.0
        put(name, pieces)

    monkeypatch.setattr(here.store, "put", slow)
    folders = []
    for step in (1, 2):
        advance(replica)
        here.done(10.0)
        (_, fields), *_ = [one for one in here.said if one[0] == "stored"][::-1]
        folders.append(fields["path"].removeprefix("s3://boX/"))
        assert fields == {"name": "dp0", "step": step, "bytes": 24, "seconds": 1.235, "path": f"s3://boX/{folders[-1]}"}
        assert folders[-1].startswith("n/dp0/run/epoch-3/step-")
    assert (tmp_path / "store" / folders[1] / "manifest.json").is_file()
    assert here.events("expired") == [{"name": "dp0", "versions": 1, "path": folders[0]}] and len(here.said) == 3


def test_what_stays_although_it_should_go(
    replica: Replica, scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise StoreError("no", where="there")

    here = scene(every=1)
    monkeypatch.setattr("flowcheck.node.store.worker.Lane.tidy", refused)
    advance(replica)
    here.done()
    assert here.events("problem") == [{"name": "dp0", "why": "older versions stay in the store: there: no"}]
    assert here.events("unstored") == [] and here.steps() == [1]


def test_what_is_left_out_and_why(replica: Replica, scene: Callable[..., Scene]) -> None:
    here = scene(every=1)
    here.store.gate.clear()
    advance(replica)
    here.look()
    assert here.store.came.wait(SECONDS)
    advance(replica)
    here.look(1.0)
    assert here.said == [("skipped", {"name": "dp0", "step": 2,
                                      "why": "an older version is still on its way to the store"})]


def test_a_version_that_is_there_no_more(
    replica: Replica, scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def reader(path: Path, **more: Any) -> Any:
        given.append((path.name, more))
        raise ReplicaError("belongs to another run")

    here = scene(every=1)
    monkeypatch.setattr(persisting, "Reader", reader)
    advance(replica)
    here.done()
    assert given == [("flowcheck-n-dp0-1.replica", {"run_id": "run", "epoch": 3, "mine": True})]
    assert here.said == [("skipped", {"name": "dp0", "step": 1, "why": "it is there no more: belongs to another run"})]
    here.done(10_000.0)
    assert len(here.said) == 1


def test_a_pin_that_cannot_be_had_leaves_nothing_open(
    replica: Replica, scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []

    class Full:
        def pinned(self, step: int) -> Any:
            assert step == 1
            raise OSError("too many")

        def close(self) -> None:
            closed.append(1)

    here = scene(every=1)
    monkeypatch.setattr(persisting, "Reader", lambda *_, **__: Full())
    advance(replica)
    here.done()
    assert closed == [1] and here.events("skipped")[0]["why"] == "it is there no more: too many"


# -- an upload -----------------------------------------------------------------------------------------------------


def test_its_thread_does_not_keep_the_process(replica: Replica, scene: Callable[..., Scene]) -> None:
    here = scene(every=1)
    here.store.gate.clear()
    advance(replica)
    here.look()
    assert here.store.came.wait(SECONDS)
    [upload] = here.persister._uploads.values()
    assert upload.thread is not None and upload.thread.daemon and upload.thread.name == "flowcheck store dp0"
    here.persister.join(0.0)
    assert upload.thread.is_alive(), "nobody waited for it"


def test_a_lane_has_the_clock_of_the_day(
    replica: Replica, scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    real = persisting.Lane

    def lane(*given: Any) -> Any:
        made.append(given)
        return real(*given)

    here = scene(every=1)
    here.persister._wall = lambda: 5_000.0
    monkeypatch.setattr(persisting, "Lane", lane)
    advance(replica)
    here.done()
    [(objects, name, moving, wall)] = made
    assert (objects, name, wall()) == (here.store, "n/dp0/run", 5_000.0)
    [upload] = here.persister._uploads.values()
    here.now += 77.0
    moving()
    assert upload.moved == here.now


def test_states_that_are_all_there_are_not_waited_for(
    replica: Replica, scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, shm: Path
) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("nobody is missing")

    for step in (1, 2):
        folder = user_folder(shm / "flowcheck-n-dp0-1.replica", step)
        folder.mkdir(parents=True)
        for rank in (0, 1):
            rank_file(folder, rank).write_bytes(pack({"at": step}, step=step, rank=rank, ranks=2))
    here = scene(every=2)
    monkeypatch.setattr(persisting, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    advance(replica, 2)
    here.look()
    [upload] = here.persister._uploads.values()
    assert upload.thread is not None
    upload.thread.join(SECONDS)
    assert here.steps() == [2] and here.events("unstored") == []


def test_those_under_way_are_waited_for_so_long_in_all(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, joined = [100.0], list[float]()

    class Thread:
        def join(self, seconds: float) -> None:
            joined.append(seconds)
            now[0] += 3.0

        def is_alive(self) -> bool:
            return False

    here = scene(every=1)
    with monkeypatch.context() as patch:
        patch.setattr(persisting, "time", SimpleNamespace(monotonic=lambda: now[0]))
        for number in range(3):
            here.persister._uploads[Path(str(number)), 0] = _Upload("x", False, Thread())  # type: ignore[arg-type]
        here.persister._uploads[Path("none"), 0] = _Upload("x", False)
        here.persister.join(4.0)
    assert joined == [4.0, 1.0, 0.0]


# -- what is due ---------------------------------------------------------------------------------------------------


class Due:
    """Whether versions are due, without uploads."""

    def __init__(self, **wants: Any) -> None:
        self.now, self.said, self.upload = 1000.0, list[Any](), _Upload("dp0", False)
        shelf: Any = SimpleNamespace(look=list)
        self.persister = Persister(SimpleNamespace(url="x"), shelf, "n", Wants(**wants),  # type: ignore[arg-type]
                                   lambda event, **fields: self.said.append((event, fields)), lambda: self.now)

    def due(self, *steps: int, later: float = 0.0) -> int | None:
        self.now += later
        found: Any = self.persister._due(self.upload, {step: step for step in steps})  # type: ignore[misc]
        return found  # type: ignore[no-any-return]


def test_the_newest_multiple_and_each_once() -> None:
    at = Due(every=3)
    assert at.due(0, 1, 2) is None and at.due(1, 2, 3, 4) == 3 and at.due(3, 4, later=9.0) is None
    assert at.due(4, 6, 9, 10, later=9.0) == 9 and at.due(6, later=9.0) is None and at.due(9, 12, later=9.0) == 12


def test_without_rules_nothing_is_due() -> None:
    at = Due()
    assert at.due(1, 2, 3, later=1e9) is None


def test_after_so_many_minutes_to_the_second() -> None:
    at = Due(minutes=1.5)
    assert at.due(4, 5) == 5
    at.upload.tried, at.upload.step = 1000.0, 5
    assert at.due(6, later=89.9) is None and at.due(6, later=0.2) == 6
    assert at.due(5) is None, "that is there"
    at.upload.again = at.now + 10.0
    assert at.due(6, later=9.9) is None and at.due(6, later=0.2) == 6
    at.upload.thread = SimpleNamespace(is_alive=lambda: True)  # type: ignore[assignment]
    assert at.due(7) is None, "while another is on its way"
    at.upload.thread = SimpleNamespace(is_alive=lambda: False)  # type: ignore[assignment]
    assert at.due(7) == 7 and at.said == []


@pytest.mark.parametrize(("seconds", "written"), [
    (8.0, [2, 4, 6, 8]), (8.1, [4, 8]), (16.0, [4, 8]), (16.1, [8]),
])
def test_an_upload_has_to_be_done_before_the_next_one(seconds: float, written: list[int]) -> None:
    """By a quarter of its time; multiples come every ten seconds."""
    at = Due(every=2)
    assert at.due(0, later=10.0) is None
    at.upload.due, at.upload.seconds = at.now, seconds
    assert [step for step in (2, 4, 6, 8) if at.due(step, later=10.0) is not None] == written
    stride = 8 // len(written)
    left_out = [{"name": "dp0", "step": step, "why": f"the store takes {seconds:.1f} s for a version, so each"
                 f" {stride}th step is written; raise store.every"} for step in (2, 4, 6, 8) if step not in written]
    assert at.said == [("skipped", fields) for fields in left_out]


def test_one_that_is_on_its_way_says_how_long_it_takes() -> None:
    at = Due(every=1)
    at.upload.thread = SimpleNamespace(is_alive=lambda: True)  # type: ignore[assignment]
    at.upload.began, at.upload.seconds = 990.0, 3.0
    assert at.due(1) is None and at.upload.seconds == 10.0
    at.upload.seconds = 99.0
    assert at.due(2, later=1.0) is None and at.upload.seconds == 99.0
    assert [fields["step"] for _, fields in at.said] == [1, 2]


def test_two_at_one_time_leave_out_no_end_of_them() -> None:
    at = Due(every=1)
    at.upload.seconds = 1.0
    assert at.due(1) == 1 and at.due(2) is None
    assert f"each {MOST_LEFT_OUT}th step is written" in at.said[0][1]["why"]
    assert at.due(3, later=100.0) == 3


def test_one_that_failed_is_left_alone_until_its_time() -> None:
    at = Due(every=1)
    at.upload.again = 1005.0
    assert at.due(1, later=4.9) is None and at.due(2, later=0.2) == 2
    assert at.said == [("skipped", {"name": "dp0", "step": 1, "why": "the store failed a moment ago"})]
