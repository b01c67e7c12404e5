"""What ranks give of themselves, as the node keeps it beside its versions: what is there, what goes, what waits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowcheck.control.messages import MOST_RANKS
from flowcheck.node.versions import user_states
from flowcheck.node.versions.user_states import UserStates, rank_file, ranks_in, user_folder

LONGEST = 60.0


class Kept:
    """states, what they said, and the replica that they are of."""

    def __init__(self, folder: Path) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.states = UserStates(lambda event, **fields: self.said.append((event, fields)))
        self.replica = folder / "flowcheck-n--1.replica"

    def put(self, step: int, rank: int = 0, data: bytes = b"") -> None:
        self.states.put(self.replica, step, rank, data or f"{step} {rank}".encode())

    def settle(self) -> None:
        """All that was put has been done; a thread begins anew with the next."""
        self.states.close()

    @property
    def there(self) -> dict[int, list[int]]:
        """Step -> ranks."""
        found = {int(one.name.removeprefix("step-")): ranks_in(one)
                 for one in self.replica.with_suffix(".user").glob("*")}
        return dict(sorted(found.items()))


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path)
    yield made
    made.states.close()


def test_each_rank_and_step_has_a_file(kept: Kept) -> None:
    for step in (20, 21):
        for rank in (0, 3):
            kept.put(step, rank)
    kept.settle()
    assert kept.there == {20: [0, 3], 21: [0, 3]} and kept.said == []
    path = kept.replica.parent / "flowcheck-n--1.user" / "step-000020" / "rank-00003.safetensors"
    assert path == rank_file(user_folder(kept.replica, 20), 3) and path.read_bytes() == b"20 3"
    assert sorted(os.listdir(path.parent)) == ["rank-00000.safetensors", "rank-00003.safetensors"]


def test_a_file_is_replaced_as_a_whole(kept: Kept) -> None:
    kept.put(20, data=b"old")
    kept.settle()
    before = rank_file(user_folder(kept.replica, 20), 0)
    with before.open("rb") as held:
        kept.put(20, data=b"new")
        kept.settle()
        assert held.read() == b"old" and before.read_bytes() == b"new"


def test_those_of_versions_that_are_gone_go(kept: Kept) -> None:
    for step in range(1, 6):
        kept.put(step)
    kept.states.published([2, 3])
    kept.settle()
    assert kept.there == {2: [0], 3: [0], 4: [0], 5: [0]}  # newer ones will have their versions
    kept.states.published([3])  # nothing is under way: a thread begins with a state
    kept.put(6)
    kept.put(4, 1)
    kept.states.published([3, 6])
    kept.settle()
    assert kept.there == {3: [0], 6: [0]}


def test_one_that_comes_after_its_version_is_kept_as_long_as_that(kept: Kept) -> None:
    kept.put(5)
    kept.states.published([4, 5])
    for step in (3, 4, 5, 6):
        kept.put(step, 1)
    kept.settle()
    assert kept.there == {4: [1], 5: [0, 1], 6: [1]}


def test_those_ahead_are_bounded(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that is held has no version for a while; the one that it will have is a new one."""
    monkeypatch.setattr(user_states, "AHEAD", 3)
    for step in range(1, 9):
        kept.put(step)
    kept.settle()
    assert list(kept.there) == [6, 7, 8]


def test_another_replica_has_its_own(kept: Kept, tmp_path: Path) -> None:
    kept.put(5)
    kept.states.published([5])
    kept.settle()
    first, kept.replica = kept.replica, tmp_path / "flowcheck-n--2.replica"
    kept.put(2)
    kept.settle()
    assert kept.there == {2: [0]} and ranks_in(user_folder(first, 5)) == [0]


def test_what_waits_is_bounded(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_states, "UNWRITTEN", 10)
    kept.put(1, data=b"x" * 11)
    assert kept.states._thread is None
    kept.put(1, data=b"x" * 10)
    kept.settle()
    kept.put(2, data=b"y" * 10)
    kept.settle()
    assert kept.there == {1: [0], 2: [0]}


def test_no_room_is_said_once_and_ends_nothing(kept: Kept) -> None:
    folder = kept.replica.with_suffix(".user")
    folder.write_text("in the way")
    kept.put(1)
    kept.put(2)
    kept.settle()
    ((event, fields),) = kept.said
    assert event == "problem" and fields["why"].startswith("states of ranks cannot be kept beside ")
    folder.unlink()
    kept.put(3)
    kept.settle()
    assert kept.there == {3: [0]} and len(kept.said) == 1


# -- for a checkpoint ------------------------------------------------------------------------------------------


def test_a_checkpoint_has_those_of_every_rank(kept: Kept) -> None:
    assert kept.states.gathered(kept.replica, 7) == {}  # nobody gives any: nobody is waited for
    for rank in (0, 1):
        kept.put(6, rank)
    kept.put(7, 1)
    waiting = threading.Timer(0.05, lambda: kept.put(7, 0))
    waiting.start()
    assert kept.states.gathered(kept.replica, 7, LONGEST) == {0: b"7 0", 1: b"7 1"}
    waiting.join()


def test_it_does_not_wait_for_long_nor_for_who_is_past_it(kept: Kept) -> None:
    kept.put(6, 0)
    kept.put(8, 1)  # its state of step 7 will not come any more
    kept.put(7, 2)
    began = time.monotonic()
    assert kept.states.gathered(kept.replica, 7, 1.0) == {2: b"7 2"}
    assert time.monotonic() - began < LONGEST / 2
    kept.put(7, 0)
    assert kept.states.gathered(kept.replica, 7, LONGEST) == {0: b"7 0", 2: b"7 2"}


def test_a_state_of_an_older_step_does_not_hold_up_its_rank(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gave one for step 9 before. Rank 2 has not yet."""
    here: list[bool] = []
    for step, rank in ((9, 0), (8, 0), (9, 1)):
        kept.put(step, rank)
    kept.settle()
    monkeypatch.setattr(kept.states._changed, "wait_for", lambda true, seconds: here.append(true()))
    kept.states.gathered(kept.replica, 9)
    kept.put(8, 2)
    kept.settle()
    kept.states.gathered(kept.replica, 9)
    assert here == [True, False]


def test_who_has_given_nothing_for_long_is_not_waited_for(kept: Kept) -> None:
    kept.put(1, 0)
    kept.put(1 + user_states.AHEAD + 1, 1)
    assert kept.states.gathered(kept.replica, 1 + user_states.AHEAD + 1, LONGEST).keys() == {1}


def test_another_replica_has_none_of_them(kept: Kept, tmp_path: Path) -> None:
    kept.put(6)
    assert kept.states.gathered(tmp_path / "other.replica", 7, LONGEST) == {}


def test_its_thread_has_a_name_and_does_not_keep_a_process(kept: Kept) -> None:
    def threads() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name == "flowcheck user states"]

    assert threads() == []
    kept.put(20)
    assert [one.daemon for one in threads()] == [True]
    kept.settle()
    assert threads() == []


def test_nobody_else_may_look_into_a_folder(kept: Kept) -> None:
    before = os.umask(0)
    try:
        kept.put(20)
        kept.settle()
    finally:
        os.umask(before)
    assert user_folder(kept.replica, 20).stat().st_mode & 0o777 == 0o700


def test_names_of_ranks_that_there_cannot_be_are_none(tmp_path: Path) -> None:
    for rank in (0, MOST_RANKS - 1, MOST_RANKS):
        rank_file(tmp_path, rank).write_bytes(b"x")
    assert ranks_in(tmp_path) == [0, MOST_RANKS - 1]


def test_what_waits_is_bounded_by_all_of_it(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three states of four bytes, room for ten bytes, and a thread that does nothing yet."""
    monkeypatch.setattr(user_states, "UNWRITTEN", 10)
    hold = threading.Event()
    monkeypatch.setattr(kept.states, "_main", lambda main=kept.states._main: (hold.wait(LONGEST), main()))
    for step in (20, 21, 22):
        kept.put(step, data=b"four")
    hold.set()
    kept.settle()
    assert kept.there == {20: [0], 21: [0]}
    kept.put(23, data=b"four")
    kept.put(24, data=b"four")
    kept.settle()
    assert list(kept.there) == [20, 21, 23, 24], "what is written waits no more"


def test_those_beside_what_an_earlier_process_left(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its versions stay for as long as nothing new is published; what else it left goes."""
    for step in range(3, 9):
        kept.put(step)
    kept.states.close()
    monkeypatch.setattr(user_states, "AHEAD", 3)
    kept.states = UserStates(lambda event, **fields: None)
    kept.states.resume(kept.replica, [4, 5])
    for step in range(20, 25):
        kept.put(step)
    kept.settle()
    assert list(kept.there) == [4, 5, 22, 23, 24]
    kept.put(25)
    kept.states.published([5, 24])
    kept.settle()
    assert list(kept.there) == [5, 24, 25]
