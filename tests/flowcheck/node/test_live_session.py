"""What a live session publishes, what it waits for and what it gives up, one signal at a time (live_scene.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flowcheck.rebuild.version.follower
import flowcheck.rebuild.version.trainers
from flowcheck.errors import UserError
from flowcheck.rebuild.version.events import Closed
from flowcheck.rebuild.version.replica import JobReplica
from updater.errors import ReplicaError
from updater.reader import Reader
from updater.replica import Replica

from ..fake_engine import Packet
from .live_scene import NAMES, Live, alike, small_job


@pytest.fixture
def live(monkeypatch) -> Callable[..., Live]:
    return lambda job=None, **options: Live(monkeypatch, job, **options)


# -- checksums ---------------------------------------------------------------------------------------------------


def test_versions_are_verified_from_the_first_checksum_on(live) -> None:
    at = live()
    assert (at.chain.status, at.session.serves, at.follower.published) == ("waiting", -1, -1)
    at.state(2)
    assert (at.chain.status, at.session.serves, at.follower.published, at.session.next) == ("unverified", 1, 1, 2)
    assert at.step(2) == Closed(2, True, "unverified", 1, 1, {}, 0, 0, 0, [], "at_record", filled={"stream": 30})
    assert at.values() == alike(0.5)
    verified = Closed(3, True, "verified", 1, 1, {}, 0, 0, 0, [], "at_record", filled={"stream": 30})
    assert at.step(3, checksums=at.sums(0.0)) == verified
    assert at.chain.verified == 4
    assert at.step(4).status == "follows 4"
    assert (at.session.serves, at.follower.published, at.session.next) == (4, 4, 5)
    assert at.values() == alike(-0.5) and at.lost == []


def test_a_job_is_followed_from_its_first_iteration(live) -> None:
    """Its buckets are others there: all of the model is one."""
    at = live()
    at.state(0)
    assert at.step(0, checksums=at.sums(0.5)).status == "verified"
    assert at.step(1, checksums=at.sums(0.0)).status == "verified" and at.lost == []


def test_a_state_says_with_which_options_its_step_was_made(live, tmp_path) -> None:
    """A schedule has left those of the manifest by then."""
    at, path = live(), tmp_path / "one.replica"
    at.take(at.session.state(2, at.tensors(1.0), {}, [{"lr": 0.125}], path))
    with closing(Reader(path)) as reader, reader.pinned() as version:
        assert [group["options"]["lr"] for group in version.optimizer["groups"]] == [0.125]
    at.step(2)
    with closing(Reader(path)) as reader, reader.pinned() as version:
        assert [group["options"]["lr"] for group in version.optimizer["groups"]] == [0.5]


@pytest.mark.parametrize("odd", NAMES)
@pytest.mark.parametrize("matched", [0, 1, 3])
def test_one_tensor_that_differs_ends_it_however_many_matched(live, matched: int, odd: str) -> None:
    at = live()
    at.state(2)
    for t in range(2, 2 + matched):
        assert at.step(t, checksums=at.sums(0.0 - 0.5 * (t - 3))).status == "verified"
    assert at.chain.verified == (2 + matched if matched else None)
    t = 2 + matched
    right = at.sums(0.5 - 0.5 * matched)
    line = at.step(t, checksums=right | {odd: f"{int(right[odd], 16) ^ 1:016x}"})
    assert (line.published, line.status, line.why) == (
        False, "diverged", [("checksum", "the trainer's checksum or sample of its state differs from the replica's")]
    )
    assert at.lost == [f"tensor {odd!r} of iteration {t} differs from the trainer's"]
    assert at.session.next is None and (at.session.replica is None) == (not matched)
    assert at.session.serves == at.follower.published == (t - 1 if matched else -1), "what was verified stays"
    assert at.step(t + 1, checksums=at.sums(-0.5 * matched)).published is False
    assert at.ended[-1] == (t + 1, False, ["previous"]) and len(at.lost) == 1


def test_any_digit_of_a_checksum_counts(live) -> None:
    at = live()
    at.state(2)
    name, right = "layer1.bias", at.sums(0.5)
    assert not at.step(2, checksums=right | {name: f"{int(right[name], 16) ^ 1 << 63:016x}"}).published


def test_sums_of_some_tensors_are_compared_as_well(live) -> None:
    at = live()
    at.state(2)
    assert at.step(2, checksums={"layer1.bias": at.sums(0.5)["layer1.bias"]}).status == "unverified"
    assert at.step(3, checksums={"layer1.bias": at.sums(0.5)["layer1.bias"]}).status == "diverged"


def test_a_new_state_after_divergence_begins_unverified(live, tmp_path) -> None:
    at = live(first=5, folder=tmp_path)
    at.state(2)
    assert at.step(2, checksums=at.sums(0.5)).status == "verified"
    assert at.session.serves == 7 and at.follower.published == 2  # as the trainer counts, and as the manifest does
    at.step(3, checksums=at.sums(0.5))
    assert at.lost == ["tensor 'layer0.weight' of iteration 8 differs from the trainer's"]
    at.state(4, 7.0)
    assert (at.chain.status, at.chain.verified, at.session.serves) == ("unverified", None, 8)
    assert at.step(4).status == "unverified" and at.values() == alike(6.5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2.replica", "4.replica"]


def test_what_is_followed_is_said_of_each_version(live, tmp_path) -> None:
    """In shared memory, too: a state is compared anew, and follows nothing that was compared before it."""
    at = live(folder=tmp_path, slots=4)
    at.state(2)
    for t, sums, status in ((2, 0.5, "verified"), (3, None, "follows 3"), (4, -0.5, "verified"),
                            (5, None, "follows 5")):
        assert at.step(t, **({} if sums is None else {"checksums": at.sums(sums)})).status == status
    with closing(Reader(tmp_path / "2.replica")) as reader:
        assert reader.statuses == {3: "verified", 4: "follows 3", 5: "verified", 6: "follows 5"}
        assert not at.step(6, checksums=at.sums(7.0)).published
        assert reader.statuses == {4: "follows 3", 5: "verified"}, "what was made since 5 may be wrong"
        assert (at.session.serves, at.withdrawn) == (4, [False])
    at.state(7, 3.0)
    assert (at.chain.status, at.step(7).status, at.session.serves) == ("unverified", "unverified", 7)


class Gate:
    """Keeps the results of real comparisons back until it is opened. asked: how long each look would wait."""

    def __init__(self, replica: JobReplica) -> None:
        self.open, self.asked, self._compare = False, list[float](), replica.compare
        replica.compare = self._gated  # type: ignore[method-assign, assignment]

    def _gated(self, checksums: Any) -> Any:
        comparison = self._compare(checksums)

        def differing(seconds: float = -1) -> str | None:
            self.asked.append(seconds)
            return comparison.differing() if self.open or seconds < 0 else None

        return SimpleNamespace(differing=differing, whole=comparison.whole)


def gated(at: Live) -> Gate:
    at.state(2)
    assert at.session.replica is not None
    gate = Gate(at.session.replica)
    at.traffic(2)
    at.record(2, checksums=at.sums(0.5))
    for _ in range(3):
        assert at.look()
    return gate


def test_rings_are_drained_while_checksums_are_compared_and_nothing_else_closes(live) -> None:
    at = live()
    gate = gated(at)
    at.traffic(3)
    at.record(3)
    for _ in range(5):
        assert at.look()
    assert not at.sources[0].packets and at.closed == [] and at.session.serves == 1
    assert at.engine.oldest == 3, "the arena of 2 is free"
    looks = flowcheck.rebuild.version.follower.LOOK_SECONDS
    assert set(gate.asked[1:]) == {0, looks}, "waits only if there was nothing to do"
    gate.open = True
    at.poll()
    assert at.ended == [(2, True, []), (3, True, [])] and at.values() == alike(0.0)
    assert [(one.packets, one.status) for one in at.closed] == [(1, "verified"), (1, "follows 3")]


@pytest.mark.parametrize("right", [True, False])
def test_the_end_waits_for_the_comparison(live, right: bool) -> None:
    at = live()
    at.state(2)
    gate = Gate(at.session.replica)
    at.traffic(2, 3)
    at.record(2, checksums=at.sums(0.5 if right else 0.25))
    at.record(3, checksums=at.sums(0.0))
    for _ in range(3):
        at.look()
    assert at.closed == []
    at.finish()
    assert not gate.open and [one.published for one in at.closed] == [right, right]
    assert at.chain.status == ("verified" if right else "diverged")


def test_a_new_state_is_taken_after_the_comparison_was_heeded(live) -> None:
    at = live()
    gated(at)
    at.state(3, 7.0)
    assert at.ended == [(2, True, [])] and at.session.next == 3 and at.chain.status == "unverified"
    assert at.values() == alike(7.0)


def test_a_session_that_is_closed_publishes_nothing_more(live, tmp_path) -> None:
    at = live(folder=tmp_path)
    gated(at)
    at.session.close()
    assert at.closed == []
    with closing(Replica.attach(tmp_path / "2.replica")) as left:
        assert left.current.step == 2


# -- records -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "text"), [
    ("no such", "0" * 16), ("layer0.weight", "0" * 15), ("layer0.weight", "0" * 17), ("layer0.weight", "A" * 16),
    ("layer0.weight", "g" * 16), ("layer0.weight", ""), ("layer0.weight", "0" * 15 + "\n"), ("", "0" * 16),
    ("layer0.weight", "0x" + "0" * 14), ("layer0.weight", "0" * 16 + "\n"),
])
def test_a_checksum_has_sixteen_digits_and_the_name_of_a_tensor(live, name: str, text: str) -> None:
    at = live()
    at.state(2)
    good = at.sums(0.5)
    assert at.record(2, checksums=good | {name: text}) == f"a checksum {text!r} of {name!r}"
    at.traffic(2)
    at.poll()
    assert at.closed == []  # nothing was kept of it
    assert at.record(2, checksums=good) == ""
    at.poll()
    assert at.closed[0].status == "verified"


def test_long_names_and_sums_are_cut_in_the_answer(live) -> None:
    assert live().record(2, checksums={"n" * 81: "1" * 21}) == f"a checksum {'1' * 20!r} of {'n' * 80!r}"


def test_records_may_come_long_before_their_traffic(live) -> None:
    at = live()
    for t in range(2, 5):
        assert at.record(t, groups=[{"lr": 2.0**-t}]) == ""
    at.state(2)
    at.traffic(2, 3, 4)
    at.poll()
    assert at.ended == [(2, True, []), (3, True, []), (4, True, [])]
    assert at.values() == alike(1 - 0.25 - 0.125 - 0.0625)


def test_records_more_than_256_ahead_are_not_kept_and_that_is_said_once(live) -> None:
    at = live(first=10)
    at.state(2)
    assert at.record(258) == "" and at.waiting == []
    assert at.record(259) == at.record(260) == ""
    assert at.waiting == [(2, "no packets of it, while a record says that iteration 269 is over; records further than"
                              " 256 ahead are not kept")]
    assert at.step(2).lag == 256  # to 258, the newest that was taken
    assert at.record(260) == "" and len(at.waiting) == 2  # 3 is awaited; 258 is kept since it was near enough
    assert at.waiting[1][0] == 3 and "iteration 270 is over" in at.waiting[1][1]
    at.state(5)
    assert at.record(262) == "" and len(at.waiting) == 3  # after a state it is said again
    assert at.record(261) == "" and len(at.waiting) == 3


def test_records_with_buffers_are_kept_as_far_ahead_as_memory_allows(live, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many a rank sends; but for those of iterations that have an arena."""
    monkeypatch.setattr(flowcheck.rebuild.version.trainers, "RECORDS_BYTES", 1000)
    at, buffers = live(), {"b": torch.zeros(25)}  # 100 bytes
    at.state(2)
    assert at.record(12, buffers=buffers) == "" and at.waiting == []
    assert at.record(13, buffers=buffers) == "" and "further than 10 ahead" in at.waiting[0][1]
    assert at.record(6, buffers={"b": torch.zeros(1000)}) == "" and len(at.waiting) == 1
    assert at.record(7, buffers={"b": torch.zeros(1000)}) == "" and "further than 4 ahead" in at.waiting[1][1]


def test_a_state_far_ahead_is_what_records_are_counted_from(live) -> None:
    at = live()
    at.traffic(2)
    at.poll()
    at.state(500)
    assert at.record(756) == "" and at.waiting == []
    assert at.record(757) == "" and at.waiting[0][0] == 500


def test_without_a_state_records_are_counted_from_the_oldest_iteration(live) -> None:
    at = live()
    assert at.record(257) == "" and at.waiting[0][0] == 0
    at.traffic(2, 3)
    at.poll()
    assert at.record(260) == "" and len(at.waiting) == 1
    assert at.record(261) == "" and at.waiting[1][0] == 4


def test_a_record_of_a_closed_iteration_is_held_against_what_was_built_with(live) -> None:
    """Of a rank that is slower than the traffic: its own state is another one, or all is well."""
    at = live()
    at.state(2)
    at.step(2)
    at.step(3)
    assert at.record(3, 1) == at.record(2, 1) == ""
    assert at.record(3, 1, groups=[{"lr": 9.0}]) == "" and at.step(4).published is False
    assert at.session.next is None and len(at.follower.records) == 0


@pytest.mark.parametrize("other", [
    {"groups": [{"lr": 0.25}]}, {"clip": 0.5}, {"scale": 2.0}, {"skipped": True},
    {"checksums": {"layer0.weight": "0" * 16}},
])
def test_when_two_ranks_disagree_neither_is_believed(live, other: dict[str, Any]) -> None:
    at = live(first=5)
    at.state(2)
    same = {"groups": [{"lr": 0.5}], "checksums": {"layer0.weight": "1" * 16}}
    assert at.record(2, 0, **same) == at.record(2, 1, **same) == ""
    assert at.record(2, 3, **same | other) == "rank 3 and another one sent different step records of iteration 7"
    assert at.record(2, 2, **same) == ""
    at.traffic(2)
    at.poll()
    assert at.ended == [(2, False, ["step_record"])] and at.chain.status == "lost"
    assert at.lost == ["iteration 7 is not published: step_record: the manifest declares per-step values and their"
                       " record is not here"]


@pytest.mark.parametrize(("fields", "value"), [
    ({}, 0.5), ({"groups": [{}]}, 0.5), ({"groups": [{"lr": 0.25}]}, 0.75), ({"clip": 0.5}, 0.75),
    ({"scale": 2.0}, 0.75), ({"skipped": True}, 1.0), ({"scale": 0.5, "clip": 0.25}, 0.75),
])
def test_the_values_of_a_record_are_those_of_the_step(live, fields: dict[str, Any], value: float) -> None:
    at = live()
    at.state(2)
    assert at.step(2, **fields).published and at.values() == alike(value)


def test_values_that_the_optimizer_cannot_use_end_the_chain(live) -> None:
    at = live(first=5)
    at.state(2)
    line = at.step(2, clip=-1.0)
    assert (line.published, line.status) == (False, "lost")
    (why,) = at.lost
    assert why.startswith("iteration 7 cannot be applied: the clip coefficient") and why.endswith("found -1.0")
    assert at.session.serves == 6 and at.values() == alike(1.0)  # the last good one stays


def test_buffers_are_those_of_rank_0(live) -> None:
    at = live(small_job(buffers=True))
    at.state(2)
    assert at.record(2, 1, {"mean": torch.zeros(3)}) == ""
    at.traffic(2)
    at.poll()
    assert at.closed == []  # that of another rank does not count
    assert at.record(2, 0, {"mean": torch.full((3,), 9.0)}) == at.record(2, 2, {}) == ""
    at.poll()
    assert at.ended == [(2, True, [])]
    assert at.values() == alike(0.5) | {"mean": {9.0}}
    assert at.session.replica is not None
    assert not any("buffers" in mark for mark in at.session.replica.unproven)  # each step brings them


def test_a_rank_other_than_0_may_be_the_first_where_there_are_no_buffers(live) -> None:
    at = live()
    at.state(2)
    at.record(2, 1)
    at.traffic(2)
    at.poll()
    assert at.ended == [(2, True, [])]


# -- waiting for a record --------------------------------------------------------------------------------------------


def test_a_complete_iteration_waits_for_its_record(live) -> None:
    at = live(record_seconds=10.0)
    at.state(2)
    at.traffic(2)
    for now, said in ((0.0, 0), (0.5, 0), (0.51, 1), (9.0, 1), (9.99, 1)):
        at.now = 1000.0 + now
        at.poll()
        assert at.closed == [] and len(at.waiting) == said
    assert at.waiting == [(2, "its step record is not here")]
    at.now = 1010.0
    at.poll()
    assert at.ended == [(2, False, ["step_record"])] and len(at.waiting) == 1
    assert len(at.lost) == 1 and at.session.serves == 1


def test_a_record_that_comes_in_time_is_enough(live) -> None:
    at = live()
    at.state(2)
    at.traffic(2, 3)
    at.poll()
    at.now += 9.5
    at.poll()
    at.record(2)
    at.poll()
    assert at.ended == [(2, True, [])]
    at.now += 9.5  # the next one waits from when it could close
    at.poll()
    assert at.ended == [(2, True, [])] and [t for t, _ in at.waiting] == [2, 3]
    at.now += 0.5
    at.poll()
    assert at.ended[1] == (3, False, ["step_record"])


def test_that_a_record_is_late_is_said_at_half_of_a_short_wait(live) -> None:
    at = live(record_seconds=0.5)
    at.state(2)
    at.traffic(2)
    at.poll()
    at.now += 0.25
    at.poll()
    assert at.waiting == []
    at.now += 0.125
    at.poll()
    assert at.waiting == [(2, "its step record is not here")] and at.closed == []


def test_a_job_without_values_of_its_steps_waits_for_no_record(live) -> None:
    at = live(small_job(records=False))
    at.state(2)
    at.traffic(2)
    at.poll()
    assert at.ended == [(2, True, [])] and at.values() == alike(0.5)


@pytest.mark.parametrize("records", [False, True])
def test_an_update_waits_for_a_slot_and_gradients_in_their_arenas(live, records: bool) -> None:
    """Two slots, of which a reader pins the older version. Nothing is lost, however long it takes."""
    at = live(small_job(records=records), slots=2, arenas=4)
    at.state(2)
    at.step(2)
    with at.session.replica.pinned():
        at.step(3)
        at.traffic(4, 5, 6, 7, 8)  # the last one has no arena yet
        for iteration in range(4, 9):
            assert at.record(iteration) == ""
        for now, said in ((0.0, 0), (0.5, 0), (0.51, 1), (1e6, 1)):
            at.now = 1000.0 + now
            at.poll()
            assert len(at.waiting) == said and [one.iteration for one in at.closed] == [2, 3]
        [(iteration, why)] = at.waiting
        assert iteration == 4 and "no slot of the replica is free" in why
        assert at.values() == alike(0.0) and at.sources[0].packets
    at.poll()
    assert at.ended == [(t, True, []) for t in range(2, 9)] and at.lost == []
    assert at.values() == alike(-2.5) and {one.updates for one in at.closed[3:]} <= {"early", "at_record"}


def test_what_will_not_be_published_waits_for_no_slot(live) -> None:
    at = live(small_job(records=False), slots=2, arenas=2)
    at.state(2)
    at.step(2)
    with at.session.replica.pinned():
        at.step(3)
        at.part(4, (0, 20), past=True)
        at.traffic(5, 6)
        at.poll()
        assert at.ended[2][:2] == (4, False) and len(at.lost) == 1 and at.waiting == []


def test_where_nothing_is_built_nothing_waits(live) -> None:
    at = live()
    at.traffic(2)
    at.poll()
    assert at.closed[0].lag == 0 and at.closed[0].status == "waiting"
    assert at.ended == [(2, False, ["previous"])]  # that its record is not here is of no interest
    at.state(4)
    at.traffic(3)
    at.poll()
    assert at.ended[1:] == [(3, False, ["step_record", "previous"])]
    assert at.lost == [] and at.waiting == [] and at.session.next == 4


# -- states ----------------------------------------------------------------------------------------------------------


def test_iterations_from_an_announced_state_on_are_kept(live) -> None:
    at = live()
    at.session.announce(3)
    for t in (2, 3, 4):
        at.record(t)
    at.traffic(2, 3, 4)
    at.poll()
    assert [t for t, _, _ in at.ended] == [2]
    at.state(3)
    at.poll()
    assert at.ended[1:] == [(3, True, []), (4, True, [])]


@pytest.mark.parametrize("end", ["withdraw", "finish"])
def test_a_state_that_will_not_come_holds_nothing(live, end: str) -> None:
    at = live()
    at.session.announce(2)
    at.traffic(2)
    at.poll()
    assert at.closed == []
    at.finish() if end == "finish" else at.session.withdraw()
    at.poll()
    assert at.ended == [(2, False, ["previous"])]
    at.traffic(3)
    at.poll()
    assert [t for t, _, _ in at.ended] == [2, 3]


def test_a_state_that_is_too_late_is_refused(live) -> None:
    at = live(first=5)
    at.traffic(2, 3)
    at.poll()
    at.session.announce(4)
    for t, why in ((2, "the state before iteration 7 is here, and 8 has passed"),
                   (3, "the state before iteration 8 is here, and 8 has passed")):
        with pytest.raises(UserError) as refused:
            at.state(t)
        assert refused.value.what == why
        assert (at.session.next, at.session.replica, at.chain.status) == (None, None, "waiting")
    at.traffic(4)
    at.poll()
    assert [t for t, _, _ in at.ended] == [2, 3, 4]  # and what was announced is no longer waited for
    at.state(5)
    assert at.session.next == 5


def test_a_state_may_come_before_any_packet(live) -> None:
    at = live()
    at.engine.oldest = 7  # as it may be while nothing has begun
    at.state(2)
    assert at.session.next == 2


def test_a_state_that_does_not_fit_changes_nothing(live) -> None:
    at = live()
    at.state(2)
    at.step(2)
    with pytest.raises(UserError):
        at.take(at.session.state(3, {"layer0.weight": torch.zeros(1)}, {}))
    assert at.step(3).published and at.values() == alike(0.0)


def test_the_optimizer_goes_on_from_the_trainers_state(live) -> None:
    """Momentum 0.5 and a buffer of 2: 0.5 * 2 + 1 = 2, and half of it is taken away; without the buffer, half of 1."""
    at = live(small_job(optimizer="sgd", options={"lr": 0.5, "momentum": 0.5}))
    buffers = {name: {"momentum_buffer": tensor} for name, tensor in at.tensors(2.0).items()}
    at.state(2, 1.0, state=buffers)
    assert at.step(2).published and at.values() == alike(0.0)


@pytest.mark.parametrize("iteration", [0, 1])
def test_a_state_is_too_late_after_the_very_first_iteration(live, iteration: int) -> None:
    at = live()
    at.traffic(*range(iteration + 1))
    at.poll()
    with pytest.raises(UserError, match=f"before iteration {iteration} is here, and {iteration} has passed"):
        at.state(iteration)


def test_a_state_replaces_the_replica(live, tmp_path) -> None:
    at = live(folder=tmp_path)
    at.state(2)
    at.step(2, checksums=at.sums(0.5))
    first = at.session.replica
    at.state(4, 3.0)
    assert at.session.replica is not first
    assert (at.chain.status, at.session.next, at.session.serves) == ("unverified", 4, 3)
    at.step(3)
    assert at.ended[-1] == (3, False, ["previous"]) and at.lost == []
    assert at.step(4).published and at.values() == alike(2.5)
    with pytest.raises(ReplicaError):
        Replica.attach(tmp_path / "4.replica")  # it is being written
    Replica.attach(tmp_path / "2.replica").close()  # its predecessor was let go of
    at.session.close()
    at.session.close()
    Replica.attach(tmp_path / "4.replica").close()


# -- what ends the chain -----------------------------------------------------------------------------------------------


def test_nothing_is_built_after_an_iteration_with_gaps(live) -> None:
    at = live(first=5)
    at.state(2)
    at.step(2)
    at.engine.region(3)
    for t in range(3, 8):
        at.record(t)
    at.sources[0].packets += [Packet(3, past=4, cells=(0, 4))]
    at.traffic(4, 5, 6, 7)
    at.poll()
    assert [(t, published) for t, published, _ in at.ended] == [(2, True)] + [(t, False) for t in (3, 4, 5, 6, 7)]
    assert at.ended[1][2] == ["covered"] and at.ended[2][2] == ["previous"]
    assert at.closed[1].missing == {"lost": 52} and at.chain.status == "lost"  # 8 of 40 and 20 are there
    assert len(at.lost) == 1 and at.lost[0].startswith("iteration 8 is not published: covered: bucket 0: 8 of 40")
    assert at.session.serves == 7 and at.values() == alike(0.5)
    at.state(8)
    assert at.step(8).published


def test_what_two_streams_bring_is_counted_for_each_iteration(live) -> None:
    at = live(streams=2)
    at.state(2)
    at.engine.unseen[1] = 3  # skipped in one capture, and the other had them
    at.engine.flow(0, 0)["duplicates"], at.engine.flow(1, 1)["duplicates"] = 4, 5
    at.engine.counts[0]["icrc"] = (2, 100)
    line = at.step(2)
    assert (line.packets, line.placed, line.healed, line.duplicates, line.missing) == (4, 2, 3, 9, {})
    at.engine.unseen[1], at.engine.unseen[0] = 1, 1  # one of them came late
    at.engine.flow(0, 0)["duplicates"] = 6
    line = at.step(3)
    assert (line.packets, line.placed, line.healed, line.duplicates) == (2, 2, 0, 2)
    at.engine.unseen[0] = 4
    at.engine.copied[4] = (1, 8, 64)
    line = at.step(4)
    assert (line.healed, line.why[0][0]) == (0, "copies_agree")  # of an iteration that is not right nothing is healed


def test_records_ahead_of_the_traffic_are_the_lag(live) -> None:
    at = live()
    at.state(2)
    at.record(5)
    at.record(3)
    assert [at.step(2).lag, at.step(3).lag, at.step(4).lag] == [3, 2, 1]
    at.traffic(5)
    at.poll()
    assert at.closed[-1].lag == 0
    at = live(small_job(records=False))
    at.state(2)
    at.traffic(2)
    at.poll()
    assert at.closed[-1].lag == 0  # not less, where no records come


def test_iterations_that_passed_unseen_end_the_chain(live) -> None:
    at = live(first=5)
    at.state(2)
    at.step(2)
    at.record(3)
    at.traffic(2000)
    at.poll()
    assert at.lost == ["iterations 8 to 2000 passed while no packet came"]  # the last four are judged one by one
    assert at.session.next is None and at.chain.status == "lost" and at.session.serves == 7


def test_packets_that_begin_after_the_state_end_the_chain_for_that_reason(live) -> None:
    """What the mirror missed is the reason, and not that the record of the first iteration it brings is not here."""
    at = live(first=5)
    at.state(2)
    for t in (2, 3):
        at.record(t)
    at.engine.oldest = 4  # as an engine that finds its place in mid-stream
    at.traffic(4)
    at.poll()
    assert at.lost == ["iterations 7 to 8 passed while no packet came"]
    assert at.ended == [(4, False, ["previous"])]
    at = live(first=5)
    at.state(2)
    at.engine.oldest = 3
    at.traffic(3)
    at.poll()
    assert at.lost == ["iteration 7 passed while no packet came"]


# -- a mirror that brings nothing --------------------------------------------------------------------------------


def test_a_mirror_that_delivers_nothing_is_named_within_seconds(live) -> None:
    at = live(first=5)
    at.state(2)
    at.poll()
    at.now += 100
    at.poll()
    assert at.silent == []  # nothing says that the job is training
    at.record(2)
    at.now += 2.9
    at.poll()
    assert at.silent == []
    at.record(3)
    at.now += 0.2
    at.poll()
    assert at.silent == [
        "no packet has come to af_packet:eth1 for 3 s, and iteration 8 is over: is the mirror session on, and does it"
        " end at this port? (flowcheck switch verify)"
    ]
    at.now += 60
    at.record(4)
    at.poll()
    assert len(at.silent) == 1  # once


def test_packets_that_are_not_of_the_job_are_counted_and_its_connections_named(live) -> None:
    at = live()
    at.port.count = 50
    at.engine.counts[0]["unanchored"] = (50, 1)
    for number in range(len(at.engine.config.flows)):
        at.engine.flow(number)["seen"] = False
    at.state(2)
    at.record(2)
    at.port.count, at.engine.counts[0]["unanchored"] = 90, (60, 1)
    at.engine.counts[0]["icrc"] = (30, 1)
    at.now += 3
    at.poll()
    (why,) = at.silent
    assert why.startswith(
        "nothing that af_packet:eth1 brings is of iterations that are over, and iteration 2 is over; 40 packets in 3 s:"
        " icrc 30, unanchored 10; no packet ever of channel 0, rank 0 -> 1 (QP "
    )
    assert why.endswith("Mirror them unchanged")  # of what most of them suffer from


def test_connections_that_found_no_place_are_not_called_absent(live) -> None:
    """One direction of a job in SIMPLE: its packets come, and the clear-to-sends that say where they belong do not."""
    job = small_job()
    job.communicator.protocol = "simple"
    at = live(job)
    for number, spec in enumerate(at.engine.config.flows):
        at.engine.flow(number).update(seen=spec.data and spec.edge == 0, packets=0)
    at.state(2)
    at.record(2)
    at.port.count, at.engine.counts[0]["unanchored"] = 40, (40, 1)
    at.now += 3
    at.poll()
    (why,) = at.silent
    assert "no packet ever of channel 0, rank 1 -> 0 (QP " in why and "rank 0 -> 1" not in why
    assert why.endswith("mirror both directions of each port")


def test_a_mirror_that_is_back_is_said(live) -> None:
    at = live()
    at.state(2)
    at.record(2)
    at.now += 3
    at.poll()
    at.traffic(2)
    at.now += 3
    at.poll()
    at.now += 3
    at.poll()
    assert at.silent[1:] == [""] and at.closed[-1].published
    at.record(3)
    at.now += 3
    at.poll()
    assert len(at.silent) == 3 and at.silent[2]


@pytest.mark.parametrize("progress", ["begun", "placed", "blocked"])
def test_a_node_that_is_behind_is_not_a_silent_mirror(live, progress: str) -> None:
    at = live()
    at.state(2)
    for t in range(2, 9):
        at.record(t)
    for t in range(2, 6):
        at.now += 2
        if progress == "begun":
            at.engine.begun = t
        elif progress == "placed":
            at.engine.counts[0]["placed"] = (t, 1)
        else:
            at.session.arenas.scheduler._blocked = [True]
        at.take(at.session._mirror._silence.look(at.session.arenas.scheduler.blocked))
    assert at.silent == []
    at.take(at.session._mirror._silence.look(False))
    at.now += 3
    at.take(at.session._mirror._silence.look(False))
    assert len(at.silent) == 1


@pytest.mark.parametrize(("last", "lost"), [(8, 0), (9, 1), (10, 1)])
def test_iterations_that_passed_unseen_before_a_state_are_none_of_ours(live, last: int, lost: int) -> None:
    at = live()
    at.take(at.follower._skip(3, last))
    at.state(9)
    at.take(at.follower._skip(3, last))
    assert len(at.lost) == lost and (at.session.next is None) == bool(lost)
    at.take(at.follower._skip(3, last))
    assert len(at.lost) == lost  # once


def test_old_evidence_is_dropped_from_the_third_iteration_on(live) -> None:
    """What refutes the manifest as a whole shows in the first two and stays."""
    at = live()
    for t, dropped in ((2, 0), (3, 0), (4, 1), (5, 2)):
        at.traffic(t)
        at.poll()
        assert at.engine.forgotten == dropped
    at.traffic(2)  # late; nothing begins anew
    at.poll()
    assert at.engine.forgotten == 2


def test_the_end_of_training_judges_what_is_open(live) -> None:
    at = live()
    at.state(2)
    at.step(2)
    at.record(3)
    at.sources[0].packets += [Packet(3)]  # nothing shows that it is over
    at.poll()
    assert len(at.closed) == 1
    at.engine.begun = 4
    at.finish()
    assert at.engine.finished == 1
    assert [t for t, _, _ in at.ended] == [2, 3, 4] and at.engine.oldest == 5
    assert at.closed[1].why == [("streams_past", "queue 0 is behind")]
    at.finish()
    assert len(at.closed) == 3


def test_a_poll_says_whether_anything_moved(live) -> None:
    at = live()
    assert at.look() is False
    at.state(2)
    at.traffic(2)
    assert at.look() is True  # a packet
    assert at.look() is False
    at.record(2)
    assert at.look() is True  # an iteration closed
    assert at.look() is False
