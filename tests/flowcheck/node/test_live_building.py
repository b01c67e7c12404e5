"""Buckets that are applied before the verdict: what is published on them, and above all what is not (live_scene.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from flowcheck.rebuild.iteration.evidence import elements_of
from updater.replica import Replica, Slot

from ..fake_engine import Packet
from .live_scene import FIRST, SECOND, Live, alike, small_job

SAME: dict[str, Any] = {"groups": [{"lr": 0.5}]}


@pytest.fixture
def live(monkeypatch) -> Callable[..., Live]:
    """After three records that agree: the fourth iteration, 5, may be assumed to have their values."""

    def begin(job: Any = None, *, agree: int = 3, **options: Any) -> Live:
        at = Live(monkeypatch, job, **options)
        at.state(2)
        for t in range(2, 2 + agree):
            at.step(t, **SAME)
        return at

    return begin


def building(at: Live) -> Slot | None:
    """The slot of the version that is being built."""
    return replica(at).building


def replica(at: Live) -> Replica:
    assert at.session.replica is not None and at.session.replica._replica is not None
    return at.session.replica._replica


def test_a_bucket_is_applied_when_it_is_complete(live) -> None:
    at = live()
    assert building(at) is None
    at.part(5, (0, 19))
    assert building(at) is None
    at.part(5, (19, 20))
    slot = building(at)
    assert slot is not None and slot._applied == {0} and at.values() == alike(-0.5)
    at.part(5, SECOND)
    assert slot._applied == {0, 1} and slot.missing == [] and at.values() == alike(-0.5), "and is not published"
    at.record(5, **SAME)
    at.sources[0].packets += [Packet(6)]
    at.poll()
    assert at.closed[-1].published and at.values() == alike(-1.0)
    assert (at.closed[-1].updates, at.closed[-1].rebuilt) == ("early", 0)


def test_the_buckets_may_come_in_any_order(live) -> None:
    at = live()
    at.part(5, SECOND)
    assert building(at)._applied == {1}
    at.part(5, FIRST, past=True)
    at.record(5, **SAME)
    at.poll()
    assert at.values() == alike(-1.0) and at.closed[-1].updates == "early"


@pytest.mark.parametrize(("record", "value"), [
    ({"groups": [{"lr": 0.25}]}, -0.75), ({"groups": [{"lr": 0.5}], "clip": 0.5}, -0.75),
    ({"groups": [{"lr": 0.5}], "scale": 2.0}, -0.75), ({"groups": [{"lr": 0.5}], "skipped": True}, -0.5),
])
def test_a_version_is_built_again_if_the_record_says_otherwise(live, record: dict[str, Any], value: float) -> None:
    """Nothing is published on an assumption. The checksums are the trainer's, of the right version."""
    at = live()
    at.part(5, FIRST)
    at.part(5, SECOND, past=True)
    assert building(at) is not None
    at.record(5, checksums=at.sums(value), **record)
    at.poll()
    assert at.closed[-1].status == "verified" and at.values() == alike(value)
    assert (at.closed[-1].updates, at.closed[-1].rebuilt) == ("at_record", 1)
    at.part(6, FIRST)
    assert building(at) is None, "nothing is assumed for a while"
    at.part(6, SECOND, past=True)
    at.record(6, **SAME)
    at.poll()
    assert (at.closed[-1].updates, at.closed[-1].rebuilt) == ("at_record", 0) and at.values() == alike(value - 0.5)


def test_a_record_that_comes_between_two_buckets_is_heeded_at_once(live) -> None:
    at = live()
    at.part(5, FIRST)
    at.record(5, groups=[{"lr": 0.25}])
    at.part(5, SECOND)
    assert building(at)._applied == {0, 1} and building(at)._options[0]["lr"] == 0.25
    at.sources[0].packets += [Packet(6)]
    at.poll()
    assert at.values() == alike(-0.75) and at.closed[-1].rebuilt == 1


def test_records_that_are_here_before_the_gradients_need_no_assumption(live) -> None:
    at = live(agree=0)
    for t, lr in ((2, 0.5), (3, 0.25), (4, 1.0)):
        at.record(t, groups=[{"lr": lr}])
        at.part(t, FIRST)
        assert building(at)._applied == {0}
        at.part(t, SECOND, past=True)
        assert (at.closed[-1].iteration, at.closed[-1].updates, at.closed[-1].rebuilt) == (t, "early", 0)
    assert at.values() == alike(-0.75)


def test_a_job_that_declares_no_values_is_applied_from_its_first_bucket_on(live) -> None:
    at = live(small_job(records=False), agree=0)
    at.part(2, FIRST)
    assert building(at)._applied == {0}
    at.part(2, SECOND, past=True)
    assert at.values() == alike(0.5) and at.closed[-1].updates == "early"


def test_clipping_in_every_step_is_left_to_the_records(live) -> None:
    at = live(agree=0)
    value = 1.0
    for t in range(2, 40):
        at.part(t, FIRST)
        assert building(at) is None
        at.part(t, SECOND, past=True)
        at.record(t, clip=1.0 / t, **SAME)
        at.poll()
        value = float(np.float32(value) - np.float32(0.5) * np.float32(1.0 / t))
        assert at.values() == alike(value) and (at.closed[-1].updates, at.closed[-1].rebuilt) == ("at_record", 0)


def test_buffers_come_with_the_record(live) -> None:
    at = live(small_job(buffers=True), agree=0)
    for t in range(2, 5):
        at.traffic(t)
        at.record(t, buffers={"mean": torch.full((3,), float(t))}, **SAME)
        at.poll()
    at.part(5, FIRST)
    assert building(at) is not None
    at.part(5, SECOND, past=True)
    at.record(5, buffers={"mean": torch.full((3,), 9.0)}, **SAME)
    at.poll()
    assert at.values() == alike(-1.0) | {"mean": {9.0}} and at.closed[-1].updates == "early"


# -- what is thrown away -----------------------------------------------------------------------------------------


def lost(at: Live, clause: str) -> None:
    """5 is not published, the version before stays, nothing is being built, and a new state goes on."""
    assert at.ended[-1][:2] == (5, False) and clause in at.ended[-1][2]
    assert at.closed[-1].updates == "" and at.chain.status == "lost" and len(at.lost) == 1
    assert building(at) is None and at.values() == alike(-0.5)
    at.state(6, 7.0)
    at.part(6, FIRST)
    at.part(6, SECOND, past=True)
    at.record(6, **SAME)
    at.poll()
    assert at.closed[-1].published and at.values() == alike(6.5)


def test_a_hole_after_early_buckets(live) -> None:
    at = live(arenas=2)
    at.part(5, FIRST)
    at.part(5, (24, 33), past=True)
    assert building(at)._applied == {0}
    at.record(5, **SAME)
    at.sources[0].packets += [Packet(7, past=7, cells=(0, 1))]  # needs the arena
    at.poll()
    lost(at, "covered")


@pytest.mark.parametrize("first", [True, False])
def test_copies_that_differ_after_a_bucket_was_applied(live, first: bool) -> None:
    at = live()
    at.part(5, FIRST)
    if first:
        at.engine.copied[5] = (1, 8, 0)
    at.part(5, SECOND)
    assert building(at)._applied == {0, 1}
    at.engine.copied[5] = (1, 8, 0)
    at.sources[0].packets += [Packet(5, past=6, cells=(0, 0))]
    at.record(5, **SAME)
    at.poll()
    lost(at, "copies_agree")


def test_a_connection_that_disagrees_after_a_bucket_was_applied(live) -> None:
    at = live()
    at.part(5, FIRST)
    at.part(5, SECOND)
    at.engine.disagree(5)
    at.sources[0].packets += [Packet(5, past=6, cells=(0, 0))]
    at.record(5, **SAME)
    at.poll()
    lost(at, "anchored")


def test_ranks_that_contradict_each_other_after_a_bucket_was_applied(live) -> None:
    at = live()
    at.part(5, FIRST)
    at.record(5, 0, **SAME)
    assert at.record(5, 1, groups=[{"lr": 0.25}]) != ""
    at.part(5, SECOND, past=True)
    at.poll()
    lost(at, "step_record")


def test_a_version_that_was_begun_is_no_obstacle_to_a_state(live) -> None:
    at = live()
    at.part(5, FIRST)
    assert building(at) is not None
    at.state(6, 3.0)
    assert at.values() == alike(3.0) and building(at) is None
    at.part(5, SECOND, past=True)
    at.part(6, FIRST)
    at.part(6, SECOND, past=True)
    at.record(6, **SAME)
    at.poll()
    assert [(t, published) for t, published, _ in at.ended[-2:]] == [(5, False), (6, True)]
    assert at.values() == alike(2.5) and at.lost == []


def test_a_session_that_is_closed_leaves_the_version_before(live, tmp_path) -> None:
    at = live(folder=tmp_path)
    at.part(5, FIRST)
    assert building(at) is not None
    at.session.close()
    with closing(Replica.attach(tmp_path / "2.replica")) as left:
        assert left.current.step == 5 and set(left.current.parameters["layer1.bias"].tolist()) == {-0.5}


def test_a_slot_that_a_reader_keeps_delays_the_update_and_loses_nothing(live) -> None:
    at = live(agree=2)
    version = replica(at).pinned()
    version.__enter__()  # of iteration 3
    at.step(4, **SAME)
    at.part(5, FIRST)
    assert building(at) is None
    version.__exit__(None, None, None)
    at.part(5, SECOND)
    assert building(at)._applied == {0, 1}
    at.record(5, **SAME)
    at.sources[0].packets += [Packet(6)]
    at.poll()
    assert at.values() == alike(-1.0) and at.lost == []


# -- workers that are at it --------------------------------------------------------------------------------------


class Held:
    """Says that the workers are not done until it is opened."""

    def __init__(self, at: Live) -> None:
        assert at.session.replica is not None
        self.open, self.asked, self._written = False, list[float](), at.session.replica.written
        at.session.replica.written = self._asked  # type: ignore[method-assign]

    def _asked(self, seconds: float = 0) -> bool:
        self.asked.append(seconds)
        return (self.open or seconds < 0) and self._written(-1)


@pytest.mark.parametrize("sums", [True, False])
def test_rings_are_drained_while_workers_write_and_nothing_else_closes(live, sums: bool) -> None:
    """The next iteration arrives, and is applied once this version is there."""
    at = live(threads=2)
    held = Held(at)
    at.part(5, FIRST)
    at.part(5, SECOND, past=True)
    at.record(5, **SAME, **({"checksums": at.sums(-1.0)} if sums else {}))
    at.look()
    at.traffic(6)
    at.record(6, **SAME)
    for _ in range(5):
        assert at.look()
    assert not at.sources[0].packets and len(at.closed) == 3 and at.session.serves == 4
    assert at.engine.oldest == 5, "workers read the arena of 5"
    assert min(held.asked) >= 0
    held.open = True
    while len(at.closed) < 5:
        at.look()
    assert [t for t, published, _ in at.ended if published] == [2, 3, 4, 5, 6] and at.values() == alike(-1.5)
    assert at.engine.oldest == 7


def test_the_end_waits_for_workers(live) -> None:
    at = live(threads=1)
    held = Held(at)
    at.traffic(5)
    at.record(5, **SAME, checksums=at.sums(-1.0))
    at.look()
    assert len(at.closed) == 3
    at.finish()
    assert not held.open and at.closed[-1].status == "verified" and at.values() == alike(-1.0)
    assert at.engine.oldest == 6


def test_a_state_is_taken_after_workers_are_done(live) -> None:
    at = live(threads=1)
    Held(at)
    at.traffic(5)
    at.record(5, **SAME)
    at.look()
    at.state(6, 3.0)
    assert at.ended[-1] == (5, True, []) and at.values() == alike(3.0)


def test_what_is_handed_over_is_the_arena_itself(live) -> None:
    """No copy is made of a bucket."""
    at = live()
    region = at.engine.region(5)
    (place, _) = at.session.plan.iteration_buckets(5)
    assert elements_of(region, place).data_ptr() == region.ctypes.data + place.offset
