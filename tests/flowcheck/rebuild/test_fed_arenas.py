"""Gradients that a trainer sends, as a source of arenas: what is there is what was sent, and nothing is waited for that
does not come."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.control.checksum import sum_text
from flowcheck.errors import UserError
from flowcheck.job.manifest import job_from_dict
from flowcheck.rebuild.iteration.fed_arenas import FedArenas
from flowcheck.rebuild.plan import plan_job
from tests.flowcheck.hand_node import until

COUNTS = (1000, 33)  # elements of the buckets
ARENAS = 3


def fed_arenas(ranks: int = 1) -> FedArenas:
    calls = [{"op": "AllReduce", "count": count} for count in COUNTS]
    names = [f"p{number}" for number in range(len(COUNTS))]
    job = job_from_dict({
        "communicator": {"ranks": ranks, "nccl_version": "0.0"}, "flows": [],
        "collectives": {"startup": [], "iteration_0": calls, "rebuild": [], "steady": calls},
        "buckets": {"iteration_0": [], "steady": [{"slices": [{"name": name, "offset": 0, "length": count}]}
                                                  for name, count in zip(names, COUNTS, strict=True)]},
        "model": [{"name": name, "shape": [count]} for name, count in zip(names, COUNTS, strict=True)],
        "step_values": ["lr"], "kind": "log", "source": "feed",
    })
    return FedArenas(plan_job(job, arenas=ARENAS), sum_text)


def bucket(iteration: int, number: int) -> bytes:
    return np.random.default_rng([iteration, number]).bytes(4 * COUNTS[number])


def send(
    arenas: FedArenas, iteration: int, number: int, cuts: tuple[int, ...] = (), checksum: str = "", rank: int = 0
) -> None:
    data = bucket(iteration, number)
    edges = [0, *sorted(cut for cut in set(cuts) if 0 < cut < len(data)), len(data)]
    for first, end in itertools.pairwise(edges):
        if arenas.wait(rank, iteration, lambda: False):
            arenas.give(rank, iteration, number, first, data[first:end], len(data),
                        checksum or sum_text(bytearray(data)))


def end(arenas: FedArenas, due: range) -> bool:
    """Close, judge and release. Is the first of them complete?"""
    arenas.close(due)
    judged = arenas.judge(due[0], record=True, follows=True)
    if judged.verdict.complete:
        assert [bytes(one.data) for one in judged.buckets] == [bucket(due[0], i) for i in range(len(COUNTS))]
    arenas.release(due)
    return judged.verdict.publishable


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, 4 * max(COUNTS)), max_size=6), order=st.permutations(range(len(COUNTS))))
def test_whatever_parts_it_comes_in(cuts: list[int], order: list[int]) -> None:
    arenas = fed_arenas()
    for number in order:
        assert not arenas.due() and not arenas.complete(0)
        send(arenas, 0, number, tuple(cuts))
    assert arenas.due() == range(1) and arenas.is_whole(0)
    assert len(arenas.missing(0, 0, 10_000)) == 0
    assert end(arenas, range(1))


def test_a_bucket_that_is_damaged_is_not_there() -> None:
    arenas = fed_arenas()
    send(arenas, 0, 1)
    with pytest.raises(UserError):
        send(arenas, 0, 0, checksum="0" * 16)
    assert not arenas.due()
    arenas.left(0, "the connection has ended")
    assert arenas.due() == range(1)
    arenas.close(range(1))
    judged = arenas.judge(0, record=True, follows=True)
    assert [one.missing for one in judged.buckets] == [{"not_fed": COUNTS[0]}, {}]
    assert not judged.verdict.publishable


@pytest.mark.parametrize(("first", "number", "total"), [(4, 0, 4000), (0, 2, 4000), (0, 0, 3996), (0, 1, 4000)])
def test_what_is_not_of_the_job_is_refused(first: int, number: int, total: int) -> None:
    arenas = fed_arenas()
    with pytest.raises(UserError):
        arenas.give(0, 0, number, first, bytes(8), total, "0" * 16)


def test_a_bucket_comes_once() -> None:
    arenas = fed_arenas()
    send(arenas, 0, 0)
    with pytest.raises(UserError):
        send(arenas, 0, 0)


def test_a_skipped_step_counts_as_zeros() -> None:
    arenas = fed_arenas()
    send(arenas, 0, 0)
    send(arenas, 0, 1)
    end(arenas, range(1))
    for iteration in range(1, 4):  # in the arena of the first, too
        arenas.withhold(0, iteration, "")
        assert arenas.due() == range(iteration, iteration + 1)
        assert not arenas.region(iteration).any()
        arenas.close(arenas.due())
        assert arenas.judge(iteration, record=True, follows=True).verdict.publishable
        arenas.release(range(iteration, iteration + 1))


@pytest.mark.parametrize("said", [True, False], ids=["said", "a later one has come"])
def test_what_does_not_come_is_not_waited_for(said: bool) -> None:
    arenas = fed_arenas()
    send(arenas, 0, 0)
    assert not arenas.due()
    if said:
        arenas.withhold(0, 0, "both slots are on their way")
    send(arenas, 1, 0)
    assert arenas.due() == range(1)
    assert not end(arenas, range(1))
    send(arenas, 0, 1)  # late
    send(arenas, 1, 1)
    assert end(arenas, arenas.due())


def test_iterations_of_which_nothing_came_have_passed() -> None:
    arenas = fed_arenas()
    send(arenas, 2, 0)
    assert arenas.due() == range(2)
    arenas.close(range(2))
    arenas.release(range(2))
    send(arenas, 2, 1)
    assert arenas.oldest == 2 and end(arenas, range(2, 3))


@pytest.mark.parametrize("ahead", [ARENAS, 1000])
def test_who_is_too_far_ahead_waits_for_an_arena(ahead: int) -> None:
    arenas = fed_arenas()
    send(arenas, 0, 0)
    waiter = threading.Thread(target=send, args=(arenas, ahead, 0))
    waiter.start()
    until(lambda: bool(arenas.due()))  # whoever sends a later one has sent all of the earlier
    assert waiter.is_alive() and arenas.begun == 0
    while waiter.is_alive():
        if due := arenas.due():
            arenas.close(due)
            arenas.release(due)
    assert arenas.begun == ahead


def test_nobody_waits_for_one_that_has_stopped() -> None:
    arenas = fed_arenas()
    waiter = threading.Thread(target=send, args=(arenas, ARENAS, 0))
    waiter.start()
    arenas.stop()
    waiter.join()
    assert arenas.begun == -1


def test_each_of_two_ranks_sends_its_share() -> None:
    arenas = fed_arenas(2)
    send(arenas, 0, 0)
    send(arenas, 1, 0)
    assert not arenas.due()  # what the other one sends may come
    with pytest.raises(UserError):
        send(arenas, 1, 1)
    send(arenas, 0, 1, rank=1)
    assert end(arenas, arenas.due())
    send(arenas, 2, 1, rank=1)
    assert arenas.due() == range(1, 2) and not end(arenas, range(1, 2))
    with pytest.raises(UserError):
        send(arenas, 2, 1, rank=2)


def test_who_has_left_is_not_waited_for_until_it_comes_again() -> None:
    arenas = fed_arenas(2)
    for iteration in (0, 1):
        send(arenas, iteration, 0)
    send(arenas, 0, 1, rank=1)
    arenas.left(1, "it has left")
    assert end(arenas, range(1)) and arenas.due() == range(1, 2)  # of the first all was there
    assert not end(arenas, range(1, 2))
    send(arenas, 2, 0)
    assert arenas.due() == range(2, 3) and not end(arenas, range(2, 3))
    send(arenas, 3, 1, rank=1)
    send(arenas, 3, 0)
    assert end(arenas, range(3, 4))


def test_a_rank_that_has_nothing_to_send_says_so_from_wherever_it_begins() -> None:
    arenas = fed_arenas()
    assert not arenas.wait(0, 9, lambda: True)
    arenas.release(arenas.due())
    for iteration in range(9, 20):
        assert arenas.wait(0, iteration, lambda: True)
        arenas.withhold(0, iteration, "")
        arenas.close(arenas.due())
        assert arenas.judge(iteration, record=True, follows=True).verdict.publishable
        arenas.release(arenas.due())


def test_a_step_that_all_ranks_skip_counts_as_zeros() -> None:
    arenas = fed_arenas(2)
    arenas.withhold(0, 0, "")
    assert not arenas.due()
    arenas.withhold(1, 0, "")
    assert arenas.due() == range(1) and arenas.is_whole(0) and not arenas.region(0).any()


@pytest.mark.parametrize("first", [True, False], ids=["the skip first", "the bytes first"])
def test_a_step_that_one_rank_alone_skips_is_none(first: bool) -> None:
    """Zeros in place of gradients would be a wrong version."""
    arenas = fed_arenas(2)
    if first:
        arenas.withhold(1, 0, "")
    send(arenas, 0, 0)
    if not first:
        arenas.withhold(1, 0, "")
    assert arenas.due() == range(1) and not arenas.is_whole(0)
    assert not end(arenas, range(1))
