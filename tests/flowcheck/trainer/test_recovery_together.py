"""With whom `recover` agrees: the ranks of torch.distributed, through the store that it was started with."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake", which has no peers

from flowcheck.errors import EnvironmentProblem
from flowcheck.trainer.recover import together

from ..hand_node import until


@contextmanager
def group(rank: int, ranks: int, store: dist.Store) -> Iterator[None]:
    dist.init_process_group("fake", store=store, rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_a_job_agree_through_its_store(ranks: int) -> None:
    """Exchange after exchange, each what was said in it, by rank."""
    store = dist.HashStore()
    with group(0, ranks, store):
        mine = together.ranks_of(True)
        assert isinstance(mine, together._Together)
        found = dist.distributed_c10d._get_default_store()
        others = [together._Together(found, rank, ranks) for rank in range(1, ranks)]
        for turn in range(2):
            with ThreadPoolExecutor(ranks) as threads:
                heard = [threads.submit(one.exchange, {"from": number + turn})
                         for number, one in enumerate([mine, *others])]
            assert [one.result() for one in heard] == [[{"from": rank + turn} for rank in range(ranks)]] * ranks


def test_who_is_alone_agrees_with_nobody() -> None:
    assert isinstance(together.ranks_of(True), together._Alone), "torch.distributed is not up"
    with group(0, 1, dist.HashStore()):
        assert isinstance(together.ranks_of(True), together._Alone)
    with group(0, 2, dist.HashStore()):
        alone = together.ranks_of(False)
        assert isinstance(alone, together._Alone) and alone.exchange({"a": 1}) == [{"a": 1}]


def test_a_rank_that_says_nothing_is_named_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is asked less and less often, twice a second at last."""
    times = [0.0]

    class Store:
        def set(self, name: str, value: str) -> None: ...

        def check(self, names: list[str]) -> bool:
            return False

    monkeypatch.setattr(together.time, "monotonic", lambda: times[-1])
    monkeypatch.setattr(together.time, "sleep", lambda seconds: times.append(times[-1] + seconds))
    with pytest.raises(EnvironmentProblem, match="rank 1 has not said what it can have: nothing came of it in 600 s"):
        together._Together(Store(), 0, 2).exchange({})
    pauses = [b - a for a, b in itertools.pairwise(times)]
    assert 600 <= times[-1] < 601 and pauses[0] == together.POLL_SECONDS and 0.49 < pauses[-1] < 0.51


class Going:
    """A store that goes when this is asked of a name that ends so."""

    def __init__(self, what: str, ending: str) -> None:
        self._goes = what, ending

    def set(self, name: str, value: str) -> None:
        self._may("set", name)

    def check(self, names: list[str]) -> bool:
        self._may("check", *names)
        return True

    def get(self, name: str) -> bytes:
        self._may("get", name)
        return b"flowcheck/recover/x"

    def _may(self, asked: str, name: str) -> None:
        what, ending = self._goes
        if asked == what and name.endswith(ending):
            raise dist.DistNetworkError("the connection was closed\nframe 1")


@pytest.mark.parametrize(("what", "ending"), [
    ("check", "/session"), ("get", "/session"), ("set", "/here/1"), ("check", "/all"), ("get", "/all"),
])
def test_a_store_that_has_gone_is_an_error_of_ours(what: str, ending: str) -> None:
    """Whatever is asked of it when rank 0, which has it, is gone: torch's own words, and what to do."""
    with pytest.raises(EnvironmentProblem, match=r"rank 0 has not said what it can have: the connection was closed\n"):
        together._Together(Going(what, ending), 1, 2).exchange({})


@pytest.mark.parametrize(("what", "ending", "rank"), [
    ("set", "/session", 0), ("check", "/here/2", 2), ("get", "/here/2", 2), ("set", "/all", 0), ("set", "/1/0", 0),
])
def test_who_was_asked_when_the_store_went_is_named(what: str, ending: str, rank: int) -> None:
    with pytest.raises(EnvironmentProblem, match=f"rank {rank} has not said") as raised:
        together._Together(Going(what, ending), 0, 3).exchange({})
    assert raised.value.where == "recover" and raised.value.remedy


@pytest.mark.parametrize(("what", "ending"), [
    ("check", "x"), ("get", "x"), ("check", "/lives/2"), ("get", "/lives/2"),
])
def test_who_is_waited_for_when_the_store_goes_is_named(what: str, ending: str) -> None:
    class Silent(Going):
        def check(self, names: list[str]) -> bool:
            return super().check(names) and (names != ["x"] or ending == "x")

    ranks = together._Together(Silent(what, ending), 0, 3)
    ranks._session = "session"
    with pytest.raises(EnvironmentProblem, match=r"rank 2 has not said .*: the connection was closed\n"):
        ranks._get("x", 2, 0.0)


# -- signs of life, by the clock -----------------------------------------------------------------------------


class Watched:
    """A store at its own time, and rank 0 of two that waits there for "x" of rank 1. lives: the sign of life of rank 1
    at a time, "": none. says: from when on it says "x"."""

    def __init__(self, patch: pytest.MonkeyPatch, lives: Callable[[float], str], says: float = 1e9) -> None:
        self.now, self.looked = 1000.0, list[float]()
        self._lives, self._says = lives, 1000 + says
        patch.setattr(together.time, "monotonic", lambda: self.now)
        patch.setattr(together.time, "sleep", self._sleep)
        self.ranks = together._Together(self, 0, 2)
        self.ranks._session = "session"

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def check(self, names: list[str]) -> bool:
        if names == ["x"]:
            return self.now >= self._says
        assert names == ["session/lives/1"]
        self.looked.append(self.now - 1000)
        return bool(self._lives(self.now - 1000))

    def get(self, name: str) -> bytes:
        return b"said" if name == "x" else self._lives(self.now - 1000).encode()

    def silent_after(self) -> float:
        with pytest.raises(EnvironmentProblem, match=r"rank 1 .*: nothing came of it in 600 s"):
            self.ranks._get("x", 1, self.now + 600)
        return self.now - 1000


def test_signs_of_life_are_looked_for_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the last one that was new counts: ten minutes after that the rank is silent."""
    at = Watched(monkeypatch, lambda now: f"1 {min(now, 1000) // 5}")
    assert 1600 <= at.silent_after() < 1612
    pauses = [b - a for a, b in itertools.pairwise([0.0, *at.looked])]
    assert all(9.99 < pause < 10.6 for pause in pauses[:-1]) and 150 < len(pauses) < 162


@pytest.mark.parametrize("sign", ["", "1 7"], ids=["none", "always the same"])
def test_a_rank_that_shows_nothing_new_is_silent_after_ten_minutes(monkeypatch, sign: str) -> None:
    at = Watched(monkeypatch, lambda now: sign)
    seen = 600 if not sign else 610  # the first look finds one that it did not know
    assert seen <= at.silent_after() < seen + 1.2


def test_a_rank_whose_time_went_on_others_is_looked_at_before_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Watched(monkeypatch, lambda now: "1 1", says=599)
    assert at.ranks._get("x", 1, at.now - 5) == b"said" and at.looked[0] == 0
    for late in (5, 0):
        at = Watched(monkeypatch, lambda now: "", says=1)
        with pytest.raises(EnvironmentProblem):
            at.ranks._get("x", 1, at.now - late)
        assert at.now == 1000


# -- a session -----------------------------------------------------------------------------------------------


class Kept(dict[str, str]):
    """A store, and what was written into it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[str, str]] = []

    def set(self, name: str, value: str) -> None:
        self.written.append((name, value))
        self[name] = value

    def check(self, names: list[str]) -> bool:
        return all(name in self for name in names)

    def get(self, name: str) -> bytes:  # type: ignore[override]
        return self[name].encode()


@pytest.mark.parametrize("shown", [[""], ["", "old"], ["", "mine", "another"], ["mine", "old"]])
def test_a_session_of_other_ranks_is_not_gone_on_in(monkeypatch: pytest.MonkeyPatch, shown: list[str]) -> None:
    """Another number of processes had it, or other ones. Rank 1 says once that it is there, and waits for a new one."""
    times, store = [0.0], Kept()
    monkeypatch.setattr(together, "TOGETHER_SECONDS", 6.0)
    store.update({"flowcheck/recover/session": "s1", "s1/all": json.dumps(shown)})
    monkeypatch.setattr(together.time, "monotonic", lambda: times[-1])
    monkeypatch.setattr(together.time, "sleep", lambda seconds: times.append(times[-1] + seconds))
    monkeypatch.setattr(together.secrets, "token_hex", lambda size: "mine")
    with pytest.raises(EnvironmentProblem, match="rank 0 has not said what it can have: it has not begun"):
        together._Together(store, 1, 2).exchange({})
    assert 6 <= times[-1] < 6.1 and store.written == [("s1/here/1", "mine")]


def test_a_new_session_is_gone_on_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 begins it while rank 1 waits in the one before."""
    store, looks = Kept(), itertools.count()
    store.update({"flowcheck/recover/session": "s1", "s1/all": '["", "old"]'})

    def sleep(seconds: float) -> None:
        if next(looks) == 3:
            store.update({"flowcheck/recover/session": "s2", "s2/all": '["", "mine"]', "s2/1/0": '{"a": 1}'})

    monkeypatch.setattr(together.time, "sleep", sleep)
    monkeypatch.setattr(together.secrets, "token_hex", lambda size: "mine")
    assert together._Together(store, 1, 2).exchange({"b": 2}) == [{"a": 1}, {"b": 2}]
    assert store.written == [("s1/here/1", "mine"), ("s2/here/1", "mine"), ("s2/1/1", '{"b": 2}')]


# -- busy ----------------------------------------------------------------------------------------------------


def beats() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "flowcheck recover"]


def test_who_is_busy_shows_again_and_again_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it is, and no longer; a process that ends meanwhile is not kept by that."""
    monkeypatch.setattr(together, "BEAT_SECONDS", 0.001)
    store = Kept()
    ranks = together._Together(store, 1, 2)
    ranks._session, ranks._round = "s", 4
    with ranks.busy():
        (thread,) = beats()
        until(lambda: len(store.written) > 2)
        assert thread.daemon
    assert not beats()
    names, values = zip(*store.written, strict=True)
    assert set(names) == {"s/lives/1"} and len(set(values)) == len(values)
    with ranks.busy():  # in a later exchange the signs are other ones, too
        ranks._round = 5
        before = len(store.written)
        until(lambda: len(store.written) > before + 1)
    assert store.written[-1][1] not in values


def test_before_there_is_a_session_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []

    class Counted(together._Together):
        _session = property(lambda self: looks.append("") or "", lambda self, value: None)

    monkeypatch.setattr(together, "BEAT_SECONDS", 0.001)
    store = Kept()
    with Counted(store, 1, 2).busy():
        until(lambda: len(looks) > 3)
    assert not store.written


@pytest.mark.parametrize("error", [dist.DistNetworkError("gone"), ValueError("no")])
def test_a_store_that_is_gone_ends_the_signs_and_not_the_work(monkeypatch, error: Exception) -> None:
    class Gone(Kept):
        def set(self, name: str, value: str) -> None:
            super().set(name, value)
            raise error

    monkeypatch.setattr(together, "BEAT_SECONDS", 0.001)
    ranks = together._Together(Gone(), 1, 2)
    ranks._session = "s"
    with ranks.busy():
        until(lambda: not beats())
    assert len(ranks._store.written) == 1
