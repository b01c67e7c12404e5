"""Clean traffic of every shape the schedule knows is counted to the packet and placed to the byte.

A fixed, small part of what test_machine_properties.py draws: quick, and always the same.
"""

from __future__ import annotations

import numpy as np
import pytest
from parser.machine import Engine

from flowcheck.job.model import dtype_size
from flowcheck.rebuild.plan import plan_job
from lab.synth import TransportOptions, example_job, generate

SHAPES: dict[str, dict] = {
    "plain": {"count": [5000]},
    "small": {"count": [1, 3, 700], "ranks": 3},
    "two-channels": {"count": [9001, 40], "channels": 2, "ranks": 3},
    "four-ranks": {"count": [30_001], "ranks": 4, "mtu": 512},
    "sixteen-bit": {"count": [7777, 5], "dtype": "bfloat16", "mtu": 1024},
    "eight-bytes": {"count": [3001], "dtype": "float64", "mtu": 256},
    "tree": {"count": [9001, 64], "algorithm": "tree", "ranks": 5, "channels": 2},
    "ipv6": {"count": [5001], "ipv6": True, "mtu": 1024},
    "two-queue-pairs": {"count": [20_003, 900], "qps": 2, "mtu": 1024},
    "split": {"count": [20_003, 900], "qps": 2, "split_data_on_qps": True, "mtu": 1024},
    "split-in-four": {"count": [33_333, 17], "qps": 4, "split_data_on_qps": True, "mtu": 512},
    "adaptive-routing": {"count": [33_333, 100], "adaptive_routing": True, "mtu": 1024},
    "no-startup": {"count": [9999], "startup": False, "rebuild": False, "mtu": 2048},
    "old-version": {"count": [50_001], "version": "2.12.12"},
}


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_that_was_carried_is_placed(shape: str, protocol: str, streams: int) -> None:
    """Two mirrors see both ends of a connection, so that all they have in common is compared."""
    job = example_job(**{"protocol": protocol, "seed": 9, **SHAPES[shape]})
    made = generate(job, iterations=3, ports=[0, 1], seed=9)
    plan = plan_job(job, streams=streams, arenas=8)
    engine = Engine(plan.engine)
    captures = list(made.ports.values()) if streams == 2 else [made.packets]
    for stream, packets in enumerate(captures):
        for _, frame in packets:
            assert engine.feed(stream, frame)
    engine.finish()
    assert engine.disagreements() == [] and engine.losses() == []
    size = dtype_size(job.gradients.dtype)
    for iteration in made.truth["iterations"]:
        cells, region = engine.cells(iteration["iteration"]), engine.region(iteration["iteration"])
        assert engine.copies(iteration["iteration"])[0] == 0
        places = {place.index: place for place in plan.iteration_buckets(iteration["iteration"])}
        for bucket in iteration["buckets"]:
            place = places[bucket["bucket"]]
            truth = made.reduced[iteration["iteration"], bucket["bucket"]].tobytes()
            carried = np.zeros(-(-place.nbytes // 8), bool)
            for start, end in bucket["carried"]:
                carried[start * size // 8 : -(-end * size // 8)] = True
            found = cells[place.offset // 8 :][: len(carried)]
            assert (found == carried).all()
            where = np.repeat(carried, 8)[: place.nbytes]
            assert (region[place.offset :][: place.nbytes][where] == np.frombuffer(truth, np.uint8)[where]).all()
    for stream, packets in enumerate(captures):
        outcomes = engine.outcomes(stream)
        assert sum(count for count, _ in outcomes.values()) == len(packets)
        assert {name for name, (count, _) in outcomes.items() if count} <= {
            "placed", "compared", "released", "repeated", "control",
        }
        assert not engine.flows()["gaps"][stream].any()


@pytest.mark.parametrize(("count", "longest"), [(4000, 8000), (4096, 8192), (4100, 8208)])
def test_the_threshold_of_adaptive_routing_is_exact(count: int, longest: int) -> None:
    """Messages of 8192 bytes are sent whole, longer ones as a pair."""
    job = example_job(count=count, protocol="simple", adaptive_routing=True, startup=False, rebuild=False, mtu=1024)
    made, engine = generate(job, iterations=2), Engine(plan_job(job).engine)
    for _, frame in made.packets:
        assert engine.feed(0, frame)
    assert max(int.from_bytes(f[66:70], "big") for _, f in made.packets if f[42] == 6) == longest
    assert any(f[42] == 8 for _, f in made.packets) == (longest > 8192)  # LAST without an immediate
    assert engine.disagreements() == [] and engine.cells(0)[: count // 2].all()


@pytest.mark.parametrize("first", [2**31 // 2 - 2, 2**31 // 2, 2**31 // 2 + 1000, 3 * 2**31 // 2 + 7])
def test_slots_that_ll_cleans_are_counted(first: int) -> None:
    """Eight steps of every 2^31 send their whole slot, which shifts all later PSNs."""
    job = example_job(count=3000, startup=False, rebuild=False)
    made, engine = generate(job, iterations=6, first_iteration=first), Engine(plan_job(job, arenas=8).engine)
    for _, frame in made.packets:
        assert engine.feed(0, frame)
    assert engine.disagreements() == [] and engine.oldest == first
    for (iteration, _), truth in made.reduced.items():
        assert engine.cells(iteration)[:1500].all()
        assert engine.region(iteration)[:12_000].tobytes() == truth.tobytes()


@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
def test_writes_that_the_nic_cut(protocol: str) -> None:
    """A write as several of one packet, each with its own RETH, is one message all the same."""
    job = example_job(count=30_000, protocol=protocol, adaptive_routing=True, mtu=1024, startup=False, rebuild=False)
    made = generate(job, iterations=2, transport=TransportOptions(cut_ranks=frozenset({0, 1})))
    engine = Engine(plan_job(job).engine)
    for _, frame in made.packets:
        assert engine.feed(0, frame)
    assert engine.disagreements() == []
    for iteration in range(2):
        assert engine.region(iteration)[:120_000].tobytes() == made.reduced[iteration, 0].tobytes()
