"""A close of a complete iteration takes no memory that grows with the model, however many threads have placed it."""

import tracemalloc
from dataclasses import replace

import pytest
from parser.machine import Engine

from flowcheck.rebuild.iteration.collector import EvidenceCollector
from flowcheck.rebuild.iteration.verdict import StreamEvidence
from flowcheck.rebuild.plan import plan_job
from lab.synth import example_job, generate

STREAMS = (StreamEvidence("a", "past"), StreamEvidence("b", "past"))
SMALL, LARGE = 50_000, 1_200_000  # elements; the bitmap of the larger has 75 kB


def peak(count: int, threads: int, *, lost: bool = False) -> int:
    """Bytes allocated at once while an iteration is asked for, judged, closed and retired."""
    job = example_job(count=count, protocol="simple", startup=False, rebuild=False)
    plan, made = plan_job(job, streams=2), generate(job, iterations=1, ports=[0])
    engine = Engine(replace(plan.engine, threads=threads))
    collector = EvidenceCollector(plan, engine)
    for number, (_, frame) in enumerate(made.packets):
        assert (lost and number == len(made.packets) // 2) or engine.feed(0, frame)
        assert not lost or engine.feed(1, frame)  # the other stream makes up for it
    tracemalloc.start()
    try:
        assert engine.complete(0, plan.cells[0])
        judged = collector.collect(0, STREAMS, record=False, follows=True, final="ended")
        assert judged.verdict.publishable and judged.buckets[0].tensor().numel() == count
        engine.close()
        engine.retire()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("lost", [False, True], ids=["whole", "made-up-for"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_close_takes_as_much_memory_for_a_large_model_as_for_a_small_one(threads: int, lost: bool) -> None:
    small, large = peak(SMALL, threads, lost=lost), peak(LARGE, threads, lost=lost)
    assert large < 1 << 20
    assert large < small + (16 << 10), "a bit for each cell would take 75 kB, each byte of them 600"
