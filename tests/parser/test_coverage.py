"""What an engine says of its coverage: covered() is counted as cells come, missing() reads words. Both against cells().

Copies, losses and another order than the sender's, over one stream and two: the same cells whoever brings them.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
from parser.machine import Engine

from flowcheck.rebuild.plan import plan_job
from lab.synth import example_job, generate

from .test_copies import COUNT, PROTOCOLS, shuffled, traffic

ITERATIONS = range(3)


def check(engine: Engine, iteration: int | None) -> None:
    cells = engine.cells(iteration)
    assert engine.covered(iteration) == int(cells.sum())
    for first, end in ((0, len(cells)), (0, 0), (3, len(cells) - 5), (64, 640)):
        absent = np.zeros(len(cells), bool)
        runs = engine.missing(iteration, first, end)
        for start, stop in runs:
            assert first <= start < stop <= end and not absent[start:stop].any()
            absent[start:stop] = True
        assert (absent[first:end] == ~cells[first:end]).all()
        assert (runs[1:, 0] > runs[:-1, 1]).all()  # no two of them touch


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("order", ["sent", "shuffled"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("seed", range(3))
def test_the_count_and_the_gaps_are_those_of_the_cells(protocol: str, order: str, streams: int, seed: int) -> None:
    _, plan, made = traffic(protocol)
    engine, rng = Engine(plan.engine), random.Random(seed)
    packets = made.packets if order == "sent" else shuffled(made.packets)
    assert engine.covered(0) == 0 and engine.missing(0, 0, 7).tolist() == [[0, 7]]
    for number, (_, frame) in enumerate(packets):
        for stream in range(streams):
            if rng.random() > 0.05:
                assert engine.feed(stream, frame)
        if number % 97 == 0:
            for iteration in ITERATIONS:
                check(engine, iteration)
    for iteration in ITERATIONS:
        check(engine, iteration)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_complete_has_no_gap_and_all_cells(protocol: str) -> None:
    _, plan, made = traffic(protocol)
    engine = Engine(plan.engine)
    for _, frame in made.packets:
        assert engine.feed(0, frame)
    for iteration in ITERATIONS:
        assert engine.covered(iteration) == COUNT // 2
        assert engine.missing(iteration, 0, COUNT // 2).shape == (0, 2)
    for _, frame in made.packets:
        assert engine.feed(1, frame)
    assert [engine.covered(iteration) for iteration in ITERATIONS] == 3 * [COUNT // 2]  # copies are not counted


def test_an_arena_counts_anew_for_its_next_iteration() -> None:
    job, _, made = traffic("ll")
    engine = Engine(plan_job(job, arenas=2).engine)  # iteration 2 has the arena of iteration 0
    for _, frame in made.packets:
        if not engine.feed(0, frame):
            assert engine.covered(0) == COUNT // 2 and engine.covered(2) == 0
            assert engine.missing(2, 0, 9).tolist() == [[0, 9]] and not engine.cells(2).any()
            engine.retire()
            assert engine.feed(0, frame)
        check(engine, 2)
    assert engine.covered(2) == COUNT // 2 and engine.covered(0) == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_arenas_are_clear_again_one_iteration_after_they_retired(threads: int) -> None:
    """Bitmaps of several pieces. What retired last stays as it was: it is looked at by the iteration after it."""
    job = example_job(count=1_200_000, protocol="ll", startup=False, rebuild=False)
    plan, made = plan_job(job, streams=2, arenas=4), generate(job, iterations=2, ports=[0], seed=1)
    engine = Engine(replace(plan.engine, threads=threads))
    assert engine.clear == 4
    rng = random.Random(1)
    packets = made.packets
    first = [packet for packet in packets if packet[0] < packets[-1][0] // 2 + packets[0][0] // 2]
    for number, (_, frame) in enumerate(first):
        assert rng.random() < 0.05 or engine.feed(number % 2, frame)
    there = engine.cells(0)
    assert 0 < there.sum() < len(there) and engine.clear == 3
    engine.retire()
    assert (engine.cells(0) == there).all() and engine.clear == 3
    engine.retire()
    assert engine.clear == 4 and engine.covered(0) == 0 and not engine.cells(0).any()


def test_cells_outside_the_region_are_refused() -> None:
    _, plan, _ = traffic("ll")
    engine = Engine(plan.engine)
    for first, end in ((-1, 3), (3, 2), (0, 1 << 40)):
        with pytest.raises(IndexError, match="not all in the region"):
            engine.missing(0, first, end)
    assert engine.missing(None, 0, 0).shape == (0, 2)
