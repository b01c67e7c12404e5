"""What is written to a store, and when: pinned, in turn, left out by number, given up, and never twice."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.checkpoint.objects import StoreError, open_store
from flowcheck.checkpoint.store import Lane, Rules
from flowcheck.control.user_state import pack
from flowcheck.node.config.store import Store
from flowcheck.node.store import worker as persisting
from flowcheck.node.store.worker import Persister, Wants, lane_name
from flowcheck.node.versions.holdings import MemoryShelf
from flowcheck.node.versions.user_states import rank_file, user_folder
from updater.errors import NoFreeSlot
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

from .holdings_scene import advance

SECONDS = 120.0


@pytest.fixture
def make(shm: Path) -> Iterator[Callable[..., Replica]]:
    with contextlib.ExitStack() as stack:

        def made(name: str = "flowcheck-n-dp0-1.replica", **options: Any) -> Replica:
            spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0, "momentum": 0.5})])
            given = {"run_id": "run", "epoch": 3, "slots": 3} | options
            replica = Replica({"w": torch.zeros(3)}, spec, path=shm / name, **given)
            return stack.enter_context(contextlib.closing(replica))

        yield made


class Slow:
    """A directory whose `put` waits until it may go on, or fails."""

    def __init__(self, root: Path) -> None:
        self._objects = open_store(str(root), {})
        self.url = self._objects.url
        self.gate, self.came = threading.Event(), threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def put(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        self.came.set()
        assert self.gate.wait(SECONDS)
        if self.error is not None:
            raise self.error
        self._objects.put(name, pieces)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)


class Scene:
    """A persister over a directory, with a clock of its own."""

    def __init__(self, shm: Path, root: Path, **wants: Any) -> None:
        self.store, self.said, self.now = Slow(root), [], 1000.0  # type: ignore[var-annotated]
        self.shelf = MemoryShelf(shm, "n")
        self.wants = Wants(**wants)
        self.begin()

    def begin(self) -> None:
        """As a new process does."""
        self.persister = Persister(
            self.store, self.shelf, "n", self.wants, lambda event, **fields: self.said.append((event, fields)),
            lambda: self.now, lambda: self.now,
        )

    def look(self, later: float = 0.0) -> None:
        self.now += later
        self.persister.look()

    def done(self, later: float = 0.0) -> None:
        """A look, and what it began is done."""
        self.look(later)
        self.persister.join(SECONDS)

    def steps(self, name: str = "n/dp0/run") -> list[int]:
        return sorted(entry.version.step for entry in Lane(self.store, name).entries()[0])

    def events(self, event: str) -> list[dict[str, Any]]:
        return [fields for one, fields in self.said if one == event]

    def close(self) -> None:
        self.store.gate.set()
        self.persister.join(SECONDS)
        self.shelf.close()


@pytest.fixture
def scene(shm: Path, tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    with contextlib.ExitStack() as stack:
        yield lambda **wants: stack.enter_context(contextlib.closing(Scene(shm, tmp_path / "store", **wants)))


def test_each_multiple_is_written_and_nothing_else(make: Callable[..., Replica], scene: Callable[..., Scene]) -> None:
    replica, here = make(), scene(every=3)
    for _ in range(10):
        advance(replica)
        here.done(1.0)
    assert here.steps() == [3, 6, 9] and [one["step"] for one in here.events("stored")] == [3, 6, 9]
    assert len(here.said) == 3
    entry = Lane(here.store, "n/dp0/run").entries()[0][0]
    about = entry.version
    assert (about.run_id, about.epoch, about.shard, about.status) == ("run", 3, "dp0", "unverified")
    assert about.optimizer["name"] == "sgd" and about.rounding == "torch-cuda-foreach" and about.nbytes == 24


def test_a_multiple_that_is_not_the_newest_any_more(make: Callable[..., Replica], scene: Callable[..., Scene]) -> None:
    replica, here = make(), scene(every=2)
    advance(replica, 5)
    here.done()
    assert here.steps() == [4]


def test_the_newest_after_so_many_minutes(make: Callable[..., Replica], scene: Callable[..., Scene]) -> None:
    replica, here = make(), scene(minutes=2.0)
    advance(replica, 5)
    here.done()
    assert here.steps() == [5]  # a run has one soon
    advance(replica)
    here.done(119.0)
    assert here.steps() == [5]
    here.done(1.0)
    assert here.steps() == [5, 6]
    here.done(1000.0)
    assert here.steps() == [5, 6]  # there is no newer one
    advance(replica)
    here.done()
    assert here.steps() == [5, 6, 7]


def test_both_rules_together(make: Callable[..., Replica], scene: Callable[..., Scene]) -> None:
    replica, here = make(), scene(every=10, minutes=1.0)
    advance(replica)
    here.done()
    advance(replica, 9)
    here.done(1.0)
    advance(replica)
    here.done(60.0)
    assert here.steps() == [1, 10, 11]


def test_what_is_uploaded_stays_as_it_is(make: Callable[..., Replica], scene: Callable[..., Scene]) -> None:
    """Versions go on meanwhile; what is due then is left out and said."""
    replica, here = make(), scene(every=2)
    here.store.gate.clear()
    advance(replica, 2)
    here.look()
    assert here.store.came.wait(SECONDS)
    advance(replica, 7)
    here.look(1.0)
    skipped = here.events("skipped")
    assert [one["step"] for one in skipped] == [8] and "older version is still on its way" in skipped[0]["why"]
    here.store.gate.set()
    here.persister.join(SECONDS)
    entry = Lane(here.store, "n/dp0/run").entries()[0][0]
    assert entry.version.step == 2
    data = here.store.read(f"{entry.folder}/model.safetensors", 0, 1 << 16)
    assert data.endswith(torch.full((3,), -5.0).numpy().tobytes())  # -2, then -3


def test_its_pin_goes_with_the_upload(make: Callable[..., Replica], scene: Callable[..., Scene]) -> None:
    replica, here = make(slots=2), scene(every=1)
    here.store.gate.clear()
    advance(replica)
    here.look()
    assert here.store.came.wait(SECONDS)
    advance(replica)
    with pytest.raises(NoFreeSlot):
        advance(replica)
    here.store.gate.set()
    here.persister.join(SECONDS)
    advance(replica)


def test_a_slow_store_gets_multiples_of_more(
    make: Callable[..., Replica], scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each due ten seconds after the other, and an upload takes 25: each fourth is written, as other groups do."""
    replica, here = make(), scene(every=2)
    put = here.store.put

    def slow(name: str, pieces: Iterable[bytes | memoryview]) -> None:
        here.now += 25.0 if name.endswith("model.safetensors") else 0.0
        put(name, pieces)

    monkeypatch.setattr(here.store, "put", slow)
    advance(replica, 2)
    here.done()
    for _ in range(8):
        here.now -= 25.0 if here.events("stored")[-1]["step"] == replica.current.step else 0.0
        advance(replica, 2)
        here.done(10.0)
    assert here.steps() == [2, 8, 16]
    assert "each 8th step is written; raise store.every" in here.events("skipped")[0]["why"]


def test_an_attempt_that_fails_is_said_and_not_repeated_at_once(
    make: Callable[..., Replica], scene: Callable[..., Scene]
) -> None:
    replica, here = make(), scene(every=1)
    here.store.error = StoreError("is full", where="s3://x", remedy="r")
    pauses = []
    for _ in range(9):
        advance(replica)
        here.done(1000.0)
        pauses.append(here.events("unstored")[-1]["again"])
    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]
    assert here.events("unstored")[0] == {"name": "dp0", "step": 1, "why": "s3://x: is full\n  remedy: r", "again": 5.0}
    advance(replica)
    here.done(1.0)
    assert here.events("skipped") == [{"name": "dp0", "step": 10, "why": "the store failed a moment ago"}]
    here.store.error = None
    advance(replica)
    here.done(1000.0)
    here.store.error = RuntimeError("a library's own")
    advance(replica)
    here.done(1000.0)
    assert here.steps() == [11]
    assert here.events("unstored")[-1] | {"again": 5.0} == here.events("unstored")[-1]
    assert here.events("unstored")[-1]["why"] == "RuntimeError: a library's own"


def test_a_timed_one_that_failed_is_tried_again_soon(make: Callable[..., Replica], scene: Callable[..., Scene]) -> None:
    replica, here = make(), scene(minutes=60.0)
    here.store.error = StoreError("is full")
    advance(replica)
    here.done()
    here.store.error = None
    here.done(4.0)
    assert here.steps() == []
    here.done(1.0)
    assert here.steps() == [1]


def test_a_replica_that_its_node_removed_is_not_written(make: Callable[..., Replica], scene: Callable[..., Scene],
                                                        shm: Path) -> None:
    """The node found it to be wrong: not even its rest."""
    replica, here = make(), scene(every=1)
    here.store.gate.clear()
    advance(replica)
    here.look()
    assert here.store.came.wait(SECONDS)
    (shm / "flowcheck-n-dp0-1.replica").unlink()
    here.store.gate.set()
    here.persister.join(SECONDS)
    assert here.steps() == [] and "the node has removed it" in here.events("unstored")[0]["why"]


def test_nothing_is_written_twice_by_another_process(make: Callable[..., Replica], scene: Callable[..., Scene]) -> None:
    replica, here = make(), scene(every=2)
    advance(replica, 2)
    here.done()
    here.begin()
    here.done()
    assert here.steps() == [2] and len(here.said) == 1
    advance(replica, 2)
    here.done()
    assert here.steps() == [2, 4]


def test_a_run_that_is_begun_again_writes_its_own(make: Callable[..., Replica], scene: Callable[..., Scene]) -> None:
    replica, here = make(), scene(every=2)
    advance(replica, 2)
    here.done()
    again = make("flowcheck-n-dp0-2.replica")
    advance(again, 2)
    here.done()
    assert here.steps() == [2, 2]


def test_groups_and_runs_apart(make: Callable[..., Replica], scene: Callable[..., Scene]) -> None:
    for name, run in (("flowcheck-n--1.replica", "run"), ("flowcheck-n-a-1.replica", "a/b"),
                      ("flowcheck-other-a-1.replica", "run")):
        advance(make(name, run_id=run), 2)
    here = scene(every=2)
    here.done()
    assert here.steps("n/-/run") == [2] and here.steps("n/a/a%2Fb") == [2]
    assert here.store.children("") == ["n"]


@pytest.mark.parametrize(
    ("given", "name"),
    [(("n", "", "r"), "n/-/r"), (("..", "..", ".."), "%2E./%2E./%2E."), (("a.b", ".x", "a b"), "a.b/%2Ex/a%20b")],
)
def test_names_of_lanes(given: tuple[str, str, str], name: str) -> None:
    assert lane_name(*given) == name


def test_what_ranks_gave_goes_with_it(make: Callable[..., Replica], scene: Callable[..., Scene], shm: Path) -> None:
    """One that is late is waited for a little, if it gave something with another version."""
    replica, here = make(), scene(every=2)
    path = shm / "flowcheck-n-dp0-1.replica"

    def give(step: int, rank: int) -> None:
        folder = user_folder(path, step)
        folder.mkdir(parents=True, exist_ok=True)
        rank_file(folder, rank).write_bytes(pack({"at": step}, step=step, rank=rank, ranks=2))

    for rank in (0, 1):
        give(1, rank)
    give(2, 0)
    advance(replica, 2)
    here.store.gate.clear()
    here.look()
    assert here.store.came.wait(SECONDS)
    threading.Timer(0.2, give, (2, 1)).start()
    here.store.gate.set()
    here.persister.join(SECONDS)
    assert set(Lane(here.store, "n/dp0/run").entries()[0][0].document["user"]) == {"0", "1"}


def test_a_rank_that_gives_nothing_more_is_not_waited_for_for_ever(
    make: Callable[..., Replica], scene: Callable[..., Scene], shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persisting, "GATHER_SECONDS", 0.1)
    folder = user_folder(shm / "flowcheck-n-dp0-1.replica", 1)
    folder.mkdir(parents=True)
    rank_file(folder, 0).write_bytes(b"x")
    replica, here = make(), scene(every=2)
    advance(replica, 2)
    here.done()
    assert here.steps() == [2] and "user" not in Lane(here.store, "n/dp0/run").entries()[0][0].document


def test_a_store_from_which_nothing_moves(make: Callable[..., Replica], scene: Callable[..., Scene]) -> None:
    replica, here = make(), scene(every=1, seconds=30.0)
    assert not here.persister.hung()
    here.store.gate.clear()
    advance(replica)
    here.look()
    assert here.store.came.wait(SECONDS)
    here.now += 30.0
    assert not here.persister.hung() and here.said == []
    here.now += 0.1
    assert here.persister.hung()
    told = here.events("unstored")[0]
    assert (told["name"], told["step"], told["again"]) == ("dp0", 1, None) and "moved for 30 s" in told["why"]
    here.store.gate.set()
    here.persister.join(SECONDS)
    assert not here.persister.hung()


def test_who_waits_for_its_turn_does_not_hang(make: Callable[..., Replica], scene: Callable[..., Scene]) -> None:
    """Two replicas of a run: one after the other."""
    here = scene(every=1, seconds=30.0)
    advance(make("flowcheck-n-dp0-1.replica"))
    here.store.gate.clear()
    here.look()
    assert here.store.came.wait(SECONDS)
    advance(make("flowcheck-n-dp0-2.replica"), 2)
    here.look()
    here.now += 20.0
    end = time.monotonic() + SECONDS
    while any(one.moved != here.now for one in list(here.persister._uploads.values())[1:]):
        assert time.monotonic() < end
        time.sleep(0.01)
    here.store.gate.set()
    here.persister.join(SECONDS)
    assert here.steps() == [1, 2]


def test_old_ones_go_by_the_rules(make: Callable[..., Replica], scene: Callable[..., Scene]) -> None:
    replica, here = make(), scene(every=1, rules=Rules(keep=2, every=4))
    for _ in range(7):
        advance(replica)
        here.done(1.0)
    assert here.steps() == [1, 4, 6, 7]
    assert [one["versions"] for one in here.events("expired")] == [1, 1, 1]


def test_old_ones_that_cannot_go_are_said_and_what_was_written_stays(
    make: Callable[..., Replica], scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, here = make(), scene(every=1, rules=Rules(keep=1))

    def refused(name: str) -> None:
        raise StoreError("cannot be removed: no", where=name)

    monkeypatch.setattr(here.store, "remove", refused, raising=False)
    for _ in range(2):
        advance(replica)
        here.done(1.0)
    assert here.steps() == [1, 2] and "older versions stay in the store" in here.events("problem")[0]["why"]


def test_settings() -> None:
    given = {"every": 5, "minutes": 1.5, "keep": 2, "keep_hours": 0.5, "keep_every": 100, "seconds": 9.0}
    assert Wants.of(Store.model_validate({"url": "/somewhere", **given})) == Wants(5, 1.5, Rules(2, 1800.0, 100), 9.0)
