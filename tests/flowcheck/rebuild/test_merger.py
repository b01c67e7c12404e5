"""What filled an iteration's cells, counted by source."""

import pytest
from parser.machine import Engine

from flowcheck.rebuild.iteration.given import Given
from flowcheck.rebuild.iteration.merger import SOURCES, filled, healed
from flowcheck.rebuild.plan import BucketPlace, plan_job
from lab.synth import TransportOptions, example_job, generate
from tests.flowcheck.altered import altered, spots
from tests.flowcheck.fake_engine import FakeEngine

COUNT = 12_000
CELLS = COUNT // 2


def test_only_sources_that_occur_are_named() -> None:
    engine = FakeEngine(plan_job(example_job(count=20, startup=False, rebuild=False)).engine)
    assert filled(engine, 1, 10) == {}
    engine.cells(1)[:10] = True
    assert filled(engine, 1, 10) == {"stream": 10}
    engine.repeated[1] = 4
    assert filled(engine, 1, 10) == {"stream": 6, "retransmission": 4}
    engine.cells(1)[2] = False  # copies of it differ: it came all the same
    engine.void[1] = [(2, 3)]
    assert filled(engine, 1, 10) == {"stream": 6, "retransmission": 4}
    engine.cells(1)[0] = engine.cells(1)[9] = False  # also of the first one, and of the last
    engine.void[1] = [(0, 1), (2, 3), (9, 10)]
    assert filled(engine, 1, 10) == {"stream": 6, "retransmission": 4}
    given = Given(cells={"a": 3, "b": 4})
    assert filled(engine, 1, 10, given) == {"stream": 6, "retransmission": 4, "peer": 7}
    assert (*filled(engine, 1, 10, given), "trainer", "feed") == SOURCES


@pytest.mark.parametrize(("dtype", "elements", "cells"), [
    ("float32", 1, 1), ("float32", 2, 1), ("float32", 3, 2), ("bfloat16", 8, 2), ("bfloat16", 9, 3),
])
def test_what_the_trainer_has_healed_is_counted_as_the_cells_of_its_gradients(
    dtype: str, elements: int, cells: int,
) -> None:
    assert healed(elements, BucketPlace(0, 100, 0, 400, dtype)) == cells


@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
def test_the_packet_that_comes_late_is_counted_as_repeated(protocol: str) -> None:
    """One packet ten places late. A second stream that has it in order fills the cells before it."""
    job = example_job(count=COUNT, protocol=protocol, mtu=1024, startup=False, rebuild=False, seed=6)
    plan, made = plan_job(job, streams=2), generate(job, iterations=2, seed=6)
    spot = spots(made, protocol, job.flows[0].qpns[0], 1)[0]
    at = spot.packets[1]
    late = [*made.packets[:at], *made.packets[at + 1 : at + 11], made.packets[at], *made.packets[at + 11 :]]
    carried = {"ll": 512, "ll128": 960, "simple": 1024}[protocol] // 8
    for streams, repeated in (([late], carried), ([made.packets, late], 0), ([late, made.packets], carried)):
        engine = Engine(plan.engine)
        for stream, packets in enumerate(streams):
            for _, frame in packets:
                assert engine.feed(stream, frame)
        assert filled(engine, 0, CELLS) == {"stream": CELLS}
        expected = {"stream": CELLS - repeated, "retransmission": repeated}
        assert filled(engine, 1, CELLS) == {source: cells for source, cells in expected.items() if cells}


def test_what_the_link_repeats_is_counted_and_the_next_iteration_begins_anew() -> None:
    job = example_job(count=COUNT, protocol="ll", mtu=1024, startup=False, rebuild=False, seed=6)
    plan = plan_job(job, arenas=2)
    made = generate(job, iterations=6, seed=6, transport=TransportOptions(retransmit=0.4))
    engine, repeated = Engine(plan.engine), []

    def close() -> None:
        found = filled(engine, engine.oldest, CELLS)
        assert sum(found.values()) == CELLS
        repeated.append(found.get("retransmission", 0))
        engine.retire()

    for _, frame in made.packets:
        while not engine.feed(0, frame):
            close()
    while engine.oldest <= engine.begun:
        close()
    assert len(repeated) == 6 and max(repeated) > 0 and max(repeated) < CELLS // 2


def test_cells_whose_copies_differ_came() -> None:
    job = example_job(count=COUNT, protocol="ll", mtu=1024, startup=False, rebuild=False, seed=6)
    plan, made = plan_job(job, streams=2), generate(job, iterations=2, seed=6)
    other, _ = altered(made.packets, spots(made, "ll", job.flows[0].qpns[0], 1)[0], packet=1, byte=4)
    engine = Engine(plan.engine)
    for stream, packets in enumerate((made.packets, other)):
        for _, frame in packets:
            assert engine.feed(stream, frame)
    assert engine.covered(1) == CELLS - 1 and filled(engine, 1, CELLS) == {"stream": CELLS}
