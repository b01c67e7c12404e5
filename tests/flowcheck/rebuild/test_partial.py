"""Partial: which elements are stale after a hole, who is asked for what, and what an answer is good for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from flowcheck.errors import UserError
from flowcheck.job.model import Job, ParameterGroup
from flowcheck.rebuild.iteration.evidence import BucketCoverage
from flowcheck.rebuild.plan import JobPlan, plan_job
from flowcheck.rebuild.version.partial import MOST, OPEN, Partial, Patch, cost_of
from flowcheck.rebuild.version.stale import SHARE, Range
from lab.synth import example_job
from updater.errors import ReplicaError

FIRST, SECOND = ["layer1.bias", "layer1.weight"], ["layer0.bias", "layer0.weight"]  # 8 and 62, 3 and 27 elements
LOTS = 1 << 30


def job(count: Sequence[int] = (70, 30), **options: Any) -> Job:
    return example_job(ranks=2, count=list(count), **{"optimizer": "adam", **options})


def plan(count: Sequence[int] = (70, 30)) -> JobPlan:
    return plan_job(job(count))


def coverage(made: JobPlan, iteration: int, *placed: Sequence[tuple[int, int]]) -> list[BucketCoverage]:
    """placed: of each bucket."""
    return [
        BucketCoverage(place, np.zeros(0, np.uint8), sum(e - s for s, e in runs), tuple(runs), {})
        for place, runs in zip(made.iteration_places(iteration), placed, strict=True)
    ]


def stale(partial: Partial) -> dict[str, list[list[int]]]:
    return {name: partial.stale.of(name).tolist() for name in sorted(partial.stale.names)}


class Written:
    """A replica that notes what it is patched with."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Range, ...], Mapping[str, Any], Mapping[str, Any]]] = []
        self.refuses = False

    def patch(self, ranges: Sequence[Range], parameters: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        if self.refuses:
            raise ReplicaError("no such thing")
        self.calls.append((tuple(ranges), parameters, state))


def answer(asked: tuple[int, int, list[Range]], iteration: int) -> Patch:
    rank, request, ranges = asked
    return Patch(rank, request, iteration, tuple(ranges), {"rank": torch.tensor(rank)}, {"of": {"it": iteration}})


# -- bytes ---------------------------------------------------------------------------------------------------


def test_every_entry_has_the_cost_of_its_own_group() -> None:
    """fp32: the parameter, and what the optimizer keeps of it."""
    made = job()
    made.optimizer.groups = [
        ParameterGroup(["layer0.weight"], {"lr": 1.0}), ParameterGroup(["layer0.bias"], {"lr": 1.0, "amsgrad": True}),
    ]
    assert cost_of(made) == {"layer0.weight": 12, "layer0.bias": 16}
    made.optimizer.name = "sgd"
    made.optimizer.groups[1].options = {"lr": 1.0, "momentum": 0.5}
    assert cost_of(made) == {"layer0.weight": 4, "layer0.bias": 8}


@pytest.mark.parametrize(("masters", "cost"), [("", 2 + 4 * 3), ("none", 2 * 3)])
def test_sixteen_bits_with_and_without_masters(masters: str, cost: int) -> None:
    """A master, two moments of 32 bits and the parameter itself; or all three in the parameter's own type."""
    made = job(dtype="bfloat16", masters=masters)
    assert set(made.narrow) == {entry.name for entry in made.model}
    assert set(cost_of(made).values()) == {cost}
    assert set(cost_of(job(dtype="float32", masters=masters)).values()) == {12}


# -- what is stale -------------------------------------------------------------------------------------------


def test_a_hole_is_stale_in_the_entries_that_it_touches() -> None:
    """The first bucket is whole; of the second, elements 2 to 6 and the last one are missing."""
    made = plan()
    partial = Partial(made)
    assert not partial.stale and partial.refused == ""
    partial.lost(4, coverage(made, 4, [(0, 70)], [(0, 2), (6, 29)]))
    assert stale(partial) == {"layer0.bias": [[2, 3]], "layer0.weight": [[0, 3], [26, 27]]}


def test_a_bucket_of_which_nothing_came() -> None:
    made = plan()
    partial = Partial(made)
    partial.lost(4, coverage(made, 4, [], [(0, 30)]))
    assert stale(partial) == {"layer1.bias": [[0, 8]], "layer1.weight": [[0, 62]]}


def test_iteration_0_has_buckets_of_its_own() -> None:
    made = plan()
    partial = Partial(made)
    partial.lost(0, coverage(made, 0, [(0, 28), (31, 100)]))
    assert stale(partial) == {"layer0.bias": [[1, 3]], "layer1.weight": [[0, 1]]}


def test_part_of_a_tensor_lies_at_its_own_place() -> None:
    """A bucket that holds the second half of a tensor."""
    made = plan()
    piece = made.job.buckets.steady[1].slices[1]
    made.job.buckets.steady[1].slices[1] = type(piece)(piece.name, piece.offset, 7, 20)
    partial = Partial(made)
    partial.lost(1, coverage(made, 1, [(0, 70)], [(0, 4), (8, 30)]))
    assert stale(partial) == {"layer0.weight": [[21, 25]]}


def test_every_loss_is_younger_than_the_one_before() -> None:
    made = plan()
    partial = Partial(made)
    partial.lost(1, coverage(made, 1, [(0, 70)], [(0, 29)]))
    partial.lost(2, coverage(made, 2, [(1, 70)], [(0, 30)]))
    partial.lost_all()
    [(_, _, ranges)] = partial.ask(2 * 12, [0])
    assert ranges == [("layer0.weight", 26, 1), ("layer1.bias", 0, 1)]
    assert partial.stale.elements == 100


def test_a_state_of_everything_ends_it_all() -> None:
    made = plan()
    partial = Partial(made)
    partial.lost_all()
    [one] = partial.ask(LOTS, [0])
    partial.lost_all()
    partial.refuse(99, "nobody asked")
    assert partial.refused == ""
    partial.refuse(one[1], "cannot")
    assert partial.refused == "cannot"
    partial.lost_all()
    [two] = partial.ask(LOTS, [1])
    assert partial.take(answer(two, 5), 0)
    partial.ask(LOTS, [1])
    partial.clear()
    assert not partial.stale and partial.refused == "" and not partial.awaits(9)
    replica: Any = Written()
    assert partial.write(replica, 5) == 0 and replica.calls == []


# -- asking --------------------------------------------------------------------------------------------------


def test_nothing_is_asked_of_nobody_nor_without_need() -> None:
    partial = Partial(plan())
    assert partial.ask(LOTS, [0, 1]) == []
    partial.lost_all()
    assert partial.ask(LOTS, []) == [] and partial.ask(0, [0]) == []


def test_the_budget_is_what_is_under_way() -> None:
    """12 bytes an element: 30 elements, then 10 more, then none until one is answered."""
    partial = Partial(plan())
    partial.lost_all()
    [one] = partial.ask(30 * 12, [0])
    assert sum(length for _, _, length in one[2]) == 30 and partial.asked == 360
    [two] = partial.ask(40 * 12, [0])
    assert sum(length for _, _, length in two[2]) == 10 and partial.asked == 480
    assert partial.ask(40 * 12, [0]) == []
    assert partial.take(answer(one, 3), 0) and partial.received == 360
    [three] = partial.ask(40 * 12, [0])
    assert sum(length for _, _, length in three[2]) == 30
    asked = [range_ for _, _, ranges in (one, two, three) for range_ in ranges]
    elements = [(name, i) for name, start, length in asked for i in range(start, start + length)]
    assert len(elements) == len(set(elements)) == 70, "what is asked for, or answered and not written, is not again"


def test_ranks_are_asked_in_turn_with_numbers_of_their_own() -> None:
    """Large enough to be dealt to three ranks, and then to go on with the next one."""
    elements = 4 * SHARE // 12
    partial = Partial(plan([elements, 2]))
    partial.lost_all()
    first = partial.ask(3 * SHARE, [7, 2, 5])
    assert [(rank, number) for rank, number, _ in first] == [(2, 1), (5, 2), (7, 3)]
    [more] = partial.ask(3 * SHARE + 12, [7, 2, 5])
    assert more[:2] == (2, 4)
    [last] = partial.ask(3 * SHARE + 24, [7, 2, 5])
    assert last[:2] == (5, 5)


def test_a_rank_has_a_few_requests_at_most() -> None:
    partial = Partial(plan())
    partial.lost_all()
    for number in range(1, OPEN + 1):
        assert [one[:2] for one in partial.ask(number * 12, [4])] == [(4, number)]
    assert partial.ask(LOTS, [4]) == []
    [one] = partial.ask(LOTS, [4, 6])
    assert one[0] == 6


def test_ranges_of_one_request_are_not_more_than_a_message_holds() -> None:
    made = plan([2 * MOST + 200, 2])
    partial = Partial(made)
    partial.lost(1, coverage(made, 1, [(i, i + 1) for i in range(0, 2 * MOST + 200, 2)], [(0, 2)]))
    asked = partial.ask(LOTS, [0])
    assert sum(len(ranges) for _, _, ranges in asked) == MOST


def test_those_who_have_left_are_asked_no_more() -> None:
    partial = Partial(plan())
    partial.lost_all()
    assert [partial.ask(12 * n, [0, 1])[0][0] for n in (1, 2)] == [0, 1]
    assert not partial.left([0, 1, 2]) and partial.left([1, 2]) and not partial.left([1])
    [again] = partial.ask(24, [1])
    assert again[2] == [("layer0.weight", 0, 1)], "what the one was asked for that is gone"


# -- answers -------------------------------------------------------------------------------------------------


def test_an_answer_is_good_once_and_in_time() -> None:
    partial = Partial(plan())
    partial.lost_all()
    [one] = partial.ask(12, [0])
    [two] = partial.ask(24, [0])
    assert partial.take(answer(one, 4), 4) is True
    assert partial.take(answer(one, 4), 4) is False, "it was answered"
    assert partial.take(answer(two, 3), 4) is False, "that iteration was built"
    assert partial.received == 24
    [three] = partial.ask(12, [0])
    assert three[2] == two[2], "it is asked for again"


@pytest.mark.parametrize("other", [(1, None), (0, (("layer0.bias", 0, 1),))])
def test_an_answer_of_another_rank_or_to_another_question_is_refused(other: tuple[int, Any]) -> None:
    partial = Partial(plan())
    partial.lost_all()
    [(rank, number, ranges)] = partial.ask(12, [0])
    with pytest.raises(UserError) as refused:
        partial.take(Patch(other[0], number, 3, other[1] or tuple(ranges), {}, {}), 0)
    assert refused.value.where == f"rank {other[0]}"
    assert refused.value.what == "a patch of other elements than request 1 names"
    assert partial.take(answer((rank, number, ranges), 3), 0), "the right one may still come"


def test_a_version_is_patched_with_what_is_of_its_iteration() -> None:
    partial = Partial(plan())
    partial.lost_all()
    asked = [partial.ask(12 * n, [0])[0] for n in (10, 20, 30)]
    for one, iteration in zip(asked, (4, 5, 5), strict=True):
        assert partial.take(answer(one, iteration), 0)
    replica: Any = Written()
    assert partial.write(replica, 3) == 0 and replica.calls == []
    assert partial.write(replica, 5) == 20 and partial.healed == 20 and partial.stale.elements == 80
    assert [ranges for ranges, _, _ in replica.calls] == [tuple(asked[1][2]), tuple(asked[2][2])]
    assert replica.calls[0][1:] == ({"rank": torch.tensor(0)}, {"of": {"it": 5}})
    assert partial.write(replica, 4) == 0, "an iteration that was passed"
    assert partial.write(replica, 5) == 0 and partial.healed == 20
    [(_, _, again)] = partial.ask(LOTS, [0])
    assert sorted(again) == [("layer0.weight", 0, 10), ("layer1.bias", 0, 8), ("layer1.weight", 0, 62)]


def test_answers_for_later_iterations_are_kept() -> None:
    partial = Partial(plan())
    partial.lost_all()
    [one] = partial.ask(12, [0])
    partial.take(answer(one, 6), 0)
    replica: Any = Written()
    assert partial.write(replica, 5) == 0 and partial.write(replica, 6) == 1


def test_what_was_not_stale_any_more_is_not_counted_as_healed() -> None:
    made = plan()
    partial = Partial(made)
    partial.lost(1, coverage(made, 1, [(0, 70)], [(3, 30)]))
    [one] = partial.ask(LOTS, [0])
    partial.stale.remove("layer0.bias", np.array([(0, 2)]))
    partial.take(answer(one, 3), 0)
    replica: Any = Written()
    assert partial.write(replica, 3) == 1 and not partial.stale


def test_what_does_not_fit_is_said_and_the_next_one_is_taken() -> None:
    partial = Partial(plan())
    partial.lost_all()
    one, two = partial.ask(12, [3])[0], partial.ask(24, [3])[0]
    partial.take(answer(one, 3), 0)
    partial.take(answer(two, 3), 0)
    replica: Any = Written()
    replica.refuses = True
    assert partial.write(replica, 3) == 0 and partial.stale.elements == 100
    assert partial.refused == "what rank 3 sent does not fit: no such thing"
    half: Any = Written()
    partial.take(answer(partial.ask(12, [3])[0], 4), 0)
    partial.take(answer(partial.ask(24, [3])[0], 4), 0)
    patch, turns = half.patch, iter([True, False])

    def once(*given: Any) -> None:
        half.refuses = next(turns)
        patch(*given)  # which refuses the first one

    half.patch = once
    assert partial.write(half, 4) == 2 and len(half.calls) == 1


# -- waiting -------------------------------------------------------------------------------------------------


def test_an_answer_may_come_until_the_record_of_its_rank_has() -> None:
    partial = Partial(plan())
    partial.lost_all()
    assert not partial.awaits(0)
    assert [partial.ask(12 * n, [0, 1])[0][0] for n in (1, 2)] == [0, 1]
    assert partial.awaits(0) and partial.awaits(7)
    partial.heard(0, 0)
    partial.heard(1, 0)
    assert not partial.awaits(0) and partial.awaits(1)
    partial.heard(0, 7)
    partial.heard(0, 3)  # an older one, repeated
    assert partial.awaits(7)
    partial.heard(1, 7)
    assert not partial.awaits(7) and partial.awaits(8)


def test_what_ranks_were_asked_for_whose_record_does_not_come_is_free_again() -> None:
    partial = Partial(plan())
    partial.lost_all()
    one, two, three = (partial.ask(12 * n, [0, 1, 2])[0] for n in (1, 2, 3))
    assert [asked[0] for asked in (one, two, three)] == [0, 1, 2]
    partial.heard(0, 5)
    partial.heard(1, 4)
    partial.give_up(5)
    assert not partial.awaits(5)
    assert partial.take(answer(two, 6), 0) is False and partial.take(answer(three, 6), 0) is False
    assert partial.take(answer(one, 6), 0) is True
    partial.ask(12 * 4, [3])
    partial.give_up(0)
    assert not partial.awaits(0), "of a rank that never said anything nothing is known"


def test_sums_are_compared_of_entries_of_which_nothing_is_stale() -> None:
    made = plan()
    partial = Partial(made)
    made.job.model[1].tied = "layer0.weight"
    sums = {"layer0.weight": 1, "layer0.bias": 2, "layer1.weight": 3, "layer1.bias": 4}
    sums |= {"optimizer.layer0.weight.exp_avg": 5, "optimizer.layer1.bias.step": 6}
    assert partial.trusted(sums) == sums
    partial.lost(1, coverage(made, 1, [(0, 70)], [(0, 29)]))
    assert partial.trusted(sums) == {"layer1.weight": 3, "layer1.bias": 4, "optimizer.layer1.bias.step": 6}


def test_the_count_of_steps_of_an_entry_without_elements_waits_for_a_patch_too() -> None:
    """A shard may have nothing of a parameter: no range asks for it, and a job that goes on has another count of it."""
    made = plan()
    made.job.model[3].shape = [0]
    partial = Partial(made)
    sums = {"layer1.weight": 3, "optimizer.layer1.bias.step": 6}
    assert partial.trusted(sums) == sums and partial.trusts()("layer1.bias")
    partial.lost(1, coverage(made, 1, [(0, 70)], [(0, 29)]))
    assert partial.trusted(sums) == {"layer1.weight": 3} and not partial.trusts()("layer1.bias")
