"""The laws of loss against packets: synth writes them, its mirror loses some, and the engine says what is missing."""

from __future__ import annotations

import pytest
from parser.machine import Engine

from flowcheck.plan.traffic import loss_law as law
from flowcheck.rebuild.plan import plan_job
from lab.synth import example_job, generate

MTU = 1024
CHUNK = 8192  # float32 elements of a full LL chunk (nccl-wire 2.3)
PACKET = MTU // 8  # float32 elements of a full LL packet
LOOPS = 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("ranks", "algorithm", "ports", "direction", "loss"), [
    (4, "ring", (0,), "both", 0.02),
    (4, "ring", (0, 2), "both", 0.2),
    (4, "ring", (0, 1), "both", 0.2),
    (4, "ring", (1, 3), "ingress", 0.05),
    (4, "tree", (0, 3), "both", 0.1),
    (8, "ring", (0,), "both", 0.005),
    (8, "ring", (0, 2, 5), "ingress", 0.05),
    (8, "ring", (0, 4), "both", 0.1),
    (8, "ring", (0, 2, 4, 6, 7), "egress", 0.2),
    (8, "ring", (0, 2, 4), "both", 0.3),
    (8, "tree", (1,), "both", 0.02),
])
def test_as_many_packets_are_missing_as_the_law_says(
    ranks: int, algorithm: str, ports: tuple[int, ...], direction: law.Direction, loss: float, seed: int
) -> None:
    """2 to 6 connections; within the 99.9 % interval of each share of the packets: a share is one number of copies."""
    elements = LOOPS * ranks * CHUNK
    channels = 2 if algorithm == "tree" else 1
    job = example_job(
        ranks=ranks, channels=channels, count=elements, protocol="ll", algorithm=algorithm, mtu=MTU, startup=False,
        rebuild=False,
    )
    way = {"both": "both", "ingress": "out", "egress": "in"}[direction]
    made = generate(job, iterations=1, ports=ports, directions=way, loss=loss, seed=seed)
    engine = Engine(plan_job(job, streams=len(ports)).engine)
    for stream, port in enumerate(ports):
        for _, frame in made.ports[port]:
            engine.feed(stream, frame)
    covered = engine.cells(0)[: elements // 2]
    missing = (covered.size - int(covered.sum())) / (PACKET // 2)
    copies = (law.ring_copies if algorithm == "ring" else law.tree_copies)(ranks, ports, direction)
    packets = elements // PACKET
    ends = [law.binomial_interval(round(share * packets), loss**count, 0.999) for count, share in copies.shares.items()]
    low, high = sum(end[0] for end in ends), sum(end[1] for end in ends)
    assert 0 < low <= missing <= high
