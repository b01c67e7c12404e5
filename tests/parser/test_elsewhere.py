"""Clear-to-sends that come over another stream than their data: they say where a flow is, and nothing against it.

SIMPLE in mid-stream, where nothing else on the wire is absolute; the data on stream 0 and what goes the other way on
stream 1, served by the same thread or by another.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from parser.machine import Engine

from flowcheck.job.model import Job
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import Synthesis, example_job, generate
from tests.flowcheck.altered import Packet, destination
from tests.flowcheck.memory_ring import MemoryRing
from tests.parser.odd_packets import kinds, patched, writes

COUNT = 30_000
FIRST = 900
ADDRESS_AT = 70  # of a clear-to-send element's first field
WITH_ADDRESS = (6, 10, 11)  # opcodes


@functools.cache
def traffic(iterations: int = 3) -> tuple[Job, Synthesis]:
    job = example_job(count=COUNT, protocol="simple", mtu=1024, startup=False, rebuild=False)
    return job, generate(job, iterations=iterations, first_iteration=FIRST)


def planned(job: Job, streams: int, threads: int = 1) -> JobPlan:
    plan = plan_job(job, streams=streams)
    return replace(plan, engine=replace(plan.engine, threads=threads))


def data_and_announcements(job: Job, packets: list[Packet]) -> tuple[list[Packet], list[Packet]]:
    receivers = {flow.qpns[0] for flow in job.flows}
    return (
        [packet for packet in packets if destination(packet[1]) in receivers],
        sorted(packet for flow in job.flows for packet in writes(packets, flow.cts_qpns[0])),
    )


def in_time(engine: Engine, streams: list[list[Packet]]) -> None:
    """All packets as they were captured, each over its stream."""
    rings = [MemoryRing(1 << max(len(packets), 1).bit_length()) for packets in streams]
    for ring, packets in zip(rings, streams, strict=True):
        ring.put(packets)
    while any(ring.waiting for ring in rings):
        heads = [(packets[-ring.waiting][0], i) for i, (ring, packets) in enumerate(zip(rings, streams, strict=True))
                 if ring.waiting]
        stream = min(heads)[1]
        assert engine.run(stream, rings[stream].ring_address, 1) == (1, False)


def placed(engine: Engine) -> int:
    return sum(engine.outcomes(stream)["placed"][0] for stream in range(engine.config.streams))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("swapped", [False, True], ids=["data-first", "data-second"])
def test_a_flow_is_found_by_what_another_stream_announced(threads: int, swapped: bool) -> None:
    job, made = traffic()
    streams = list(data_and_announcements(job, made.packets))[:: -1 if swapped else 1]
    engine, one = Engine(planned(job, 2, threads).engine), Engine(planned(job, 1).engine)
    in_time(engine, streams)
    in_time(one, [sorted(packet for stream in streams for packet in stream)])
    assert engine.oldest == one.oldest == FIRST and kinds(engine) == []
    data = int(swapped)
    counted = {name: n for name, n in engine.outcomes(data).items() if name != "control"}
    assert counted == {name: n for name, n in one.outcomes(0).items() if name != "control"}
    assert engine.outcomes(data)["unanchored"] == (0, 0) and placed(engine) > 0
    for (iteration, _), truth in made.reduced.items():
        assert engine.region(iteration)[: 4 * COUNT].tobytes() == truth.tobytes()
        assert engine.cells(iteration)[: COUNT // 2].all()


def test_the_own_stream_is_believed_before_others() -> None:
    """What the other one says of the same numbers is another place, a whole buffer away."""
    job, made = traffic(1)
    data, announced = data_and_announcements(job, made.packets)
    odd = [(ns, patched(ADDRESS_AT + 3, bytes([frame[ADDRESS_AT + 3] ^ 1]))(frame)) for ns, frame in announced]
    engine = Engine(planned(job, 2).engine)
    in_time(engine, [sorted(data + announced), odd])
    assert engine.outcomes(0)["unanchored"] == (0, 0) and kinds(engine) == []
    assert engine.region(FIRST)[: 4 * COUNT].tobytes() == made.reduced[FIRST, 0].tobytes()


def test_the_queue_pairs_of_other_connections_say_nothing() -> None:
    """Each connection by its own announcements: those of the first alone find the first alone."""
    job, made = traffic(1)
    data, _ = data_and_announcements(job, made.packets)
    engine = Engine(planned(job, 2).engine)
    in_time(engine, [data, writes(made.packets, job.flows[0].cts_qpns[0])])
    found = [
        counters["packets"] > 0
        for spec, counters in zip(engine.config.flows, engine.flow_counters(0), strict=True) if spec.data
    ]
    assert sorted(found) == [False, True]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("announced", [2**31 - 4, 2**31], ids=["before", "after"])
@pytest.mark.parametrize("first", [2**31 - 2, 2**31], ids=["before", "after"])
def test_a_step_is_of_the_lap_that_another_stream_announced(first: int, announced: int, threads: int) -> None:
    """As test_counting.py has it for one stream: LL, whose flags have 32 bits of the step."""
    job = example_job(count=3000, startup=False, rebuild=False)
    before, made = (generate(job, iterations=2, first_iteration=iteration) for iteration in (announced, first))
    engine = Engine(planned(job, 2, threads).engine)
    for flow in job.flows:
        for _, frame in writes(before.packets, flow.cts_qpns[0]):
            assert engine.feed(1, frame)
    for flow in job.flows:
        for _, frame in writes(made.packets, flow.qpns[0]):
            assert engine.feed(0, frame)
    assert kinds(engine) == [] and engine.oldest == first and engine.outcomes(0)["unanchored"] == (0, 0)


def test_a_stream_that_lagged_is_listened_to_again() -> None:
    """Hundreds of packets with an address are sought in vain, in what was announced long before. When the other stream
    has caught up the flow is found, after a pause at most."""
    job, made = traffic(400)
    data, announced = data_and_announcements(job, made.packets)
    addressed = [packet for packet in data if packet[1][42] in WITH_ADDRESS and len(packet[1]) > 100]
    engine = Engine(planned(job, 2).engine)
    for _, frame in announced[:20]:
        assert engine.feed(1, frame)
    for _, frame in addressed[20:320]:
        assert engine.feed(0, frame)
    assert engine.outcomes(0)["unanchored"][0] == 300 and engine.begun == -1
    caught_up = addressed[320][0]
    for _, stream, frame in sorted(
        [(ns, 1, frame) for ns, frame in announced if ns > caught_up - 10**6]
        + [(ns, 0, frame) for ns, frame in data if ns >= caught_up]
    ):
        if not engine.feed(stream, frame):
            break
    assert placed(engine) > 0 and kinds(engine) == []
    assert engine.begun < FIRST + 400 - 20
