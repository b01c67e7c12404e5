"""Versions that turned out to be wrong: nobody can read those that are newer than the last verified one any more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flowcheck.job.model import BucketSlice
from updater.errors import ReplicaError
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.reader import Reader
from updater.replica import Replica

LAYOUT = Layout([[BucketSlice("w", 0, 3)]], {"w": (3,)}, [3])


@pytest.fixture
def made(shm: Path) -> Iterator[Callable[..., Replica]]:
    """made(statuses): a replica with these versions after the first one."""
    with contextlib.ExitStack() as stack:

        def make(*statuses: str) -> Replica:
            spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0})])
            replica = stack.enter_context(contextlib.closing(
                Replica({"w": torch.zeros(3)}, spec, path=shm / "r", slots=4)))
            for status in statuses:
                slot = replica.build(replica.current.step + 1, LAYOUT)
                slot.apply(0, torch.ones(3))
                replica.publish(slot, status)
                if status == "verified":
                    replica.mark_verified()
            return replica

        yield make


@pytest.mark.parametrize(("statuses", "gone", "left"), [
    (("unverified", "verified", "follows 2"), [3], [0, 1, 2]),
    (("verified", "follows 1", "follows 1"), [2, 3], [0, 1]),
    (("unverified", "unverified", "verified"), [], [0, 1, 2, 3]),
    (("unverified", "unverified"), [0, 1, 2], []),
    (("verified", "unverified", "follows 1", "follows 1"), [2, 3, 4], [1]),  # of 5 versions, 4 have a slot
])
def test_those_after_the_last_verified_one_go(made, shm: Path, statuses: tuple[str, ...], gone: list[int],
                                              left: list[int]) -> None:
    replica = made(*statuses)
    with contextlib.closing(Reader(shm / "r")) as reader:
        assert replica.withdraw() == gone
        assert reader.steps == replica.steps == left and replica.empty == (not left)
        for step in gone:
            with pytest.raises(ReplicaError), reader.pinned(step):
                pass
        assert left == [] or replica.current.step == left[-1]


def test_who_has_pinned_one_finds_that_it_is_gone_and_its_slot_waits_for_him(made, shm: Path) -> None:
    replica = made("verified", "follows 1", "follows 1")
    with contextlib.closing(Reader(shm / "r")) as reader:
        with reader.pinned(3) as other, replica.pinned() as own, reader.pinned(1) as good:
            assert other.is_there() and own.step == 3
            assert replica.withdraw() == [2, 3] and reader.steps == [0, 1]
            assert not other.is_there() and good.is_there()
            slot = replica.build(2, LAYOUT)
            assert slot.index != own.index, "its bytes stay as they are until both have let go"
            replica.discard(slot)
        assert reader.steps == replica.steps == [0, 1], "nor is it there again then"


def test_not_while_one_is_built(made) -> None:
    replica = made("verified")
    replica.build(2, LAYOUT)
    with pytest.raises(ReplicaError):
        replica.withdraw()


def test_a_file_of_an_earlier_release_says_verified_of_later_versions_too(made, shm: Path, monkeypatch) -> None:
    """There it was said of every version once a checksum had matched; only the step that was marked was compared."""
    monkeypatch.setattr("updater.found.OWN", None)
    replica = made("unverified", "verified")
    slot = replica.build(3, LAYOUT)
    slot.apply(0, torch.ones(3))
    replica.publish(slot, "verified", (), 1)
    with contextlib.closing(Reader(shm / "r")) as reader:
        assert reader.statuses == {0: "unverified", 1: "unverified", 2: "verified", 3: "unverified"}
        assert reader.matches[3] == 1
