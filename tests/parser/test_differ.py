"""Cells of which two copies differ are void: missing for the rest of their iteration, whatever comes later.

What of a packet is compared is tested in test_copies.py; packets of every kind against a model in test_model.py.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser.machine import Engine
from parser.placers import Placers

from flowcheck.job.model import Job
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import Synthesis, example_job, generate
from parser.engine_config import Target
from tests.flowcheck.altered import PAYLOAD_AT, Packet, altered, destination, opcode, payload, psn, sealed, spots
from tests.flowcheck.memory_ring import MemoryRing

PROTOCOLS = ["ll", "ll128", "simple"]
COUNT = 12_000
CELLS = COUNT // 2


@functools.cache
def traffic(protocol: str, ranks: int = 2) -> tuple[Job, JobPlan, Synthesis]:
    job = example_job(
        ranks=ranks, count=COUNT, protocol=protocol, mtu=1024, startup=False, rebuild=False, seed=21
    )
    return job, plan_job(job, streams=3), generate(job, iterations=2, seed=21)


def fed(plan: JobPlan, *turns: tuple[int, list[Packet]]) -> Engine:
    engine = Engine(plan.engine)
    for stream, packets in turns:
        for _, frame in packets:
            assert engine.feed(stream, frame)
    return engine


def void(engine: Engine, iteration: int) -> list[int]:
    runs = engine.void_cells(iteration, 0, CELLS).tolist()
    cells = [cell for first, end in runs for cell in range(first, end)]
    assert not engine.cells(iteration)[cells].any()
    return cells


def everywhere(packets: list[Packet]) -> list[Packet]:
    """One bit of every packet's payload is another one: of its data, in each protocol."""
    out = []
    for time, frame in packets:
        if opcode(frame) in PAYLOAD_AT and len(payload(frame)) >= 128:
            at = PAYLOAD_AT[opcode(frame)]
            frame = sealed(frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :])
        out.append((time, frame))
    return out


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    protocol=st.sampled_from(PROTOCOLS), order=st.permutations([0, 1, 2]), threads=st.sampled_from([1, 2, 3]),
    wrong=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 40), st.integers(0, 7), st.sampled_from([1, 2])),
        max_size=12,
    ),
)
def test_exactly_the_cells_that_differ_are_holes(protocol, order, threads, wrong) -> None:  # type: ignore[no-untyped-def]
    """Three mirrors, some bits of some of them wrong: as three tables of cells say it."""
    job, plan, made = traffic(protocol)
    spot = spots(made, protocol, job.flows[0].qpns[0], 1)[0]
    mirrors, tables = [made.packets] * 3, [bytearray(made.reduced[1, 0].tobytes()) for _ in range(3)]
    for stream, packet, cell, byte, flip in wrong:
        mirrors[stream], offset = altered(mirrors[stream], spot, packet, byte, cell, flip)
        tables[stream][offset + byte] ^= flip
    cells = [[bytes(table[8 * i : 8 * i + 8]) for i in range(CELLS)] for table in tables]
    expected = [i for i in range(CELLS) if len({table[i] for table in cells}) > 1]
    engine = fed(
        replace(plan, engine=replace(plan.engine, threads=threads)), *((stream, mirrors[stream]) for stream in order)
    )
    assert void(engine, 1) == expected and void(engine, 0) == []
    assert engine.covered(1) == CELLS - len(expected) and engine.complete(1, CELLS) is (not expected)
    if threads == 1:  # several may take the same cell off the count
        assert engine.covered_places(1).sum() == engine.covered(1)
    right = np.frombuffer(tables[order[0]], np.uint8).reshape(-1, 8)
    there = engine.cells(1)[:CELLS]
    assert there.sum() == CELLS - len(expected)
    assert (engine.region(1)[: 4 * COUNT].reshape(-1, 8)[there] == right[there]).all()
    gaps = [cell for first, end in engine.missing(1, 0, CELLS).tolist() for cell in range(first, end)]
    assert gaps == expected
    assert sum(one["bytes"] for one in engine.differences()) == 8 * engine.copies(1)[0]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_third_copy_does_not_decide(protocol: str) -> None:
    """Two against one: both may be one mistake of one switch, so the cell stays void."""
    job, plan, made = traffic(protocol)
    spot = spots(made, protocol, job.flows[0].qpns[0], 1)[0]
    other, offset = altered(made.packets, spot, packet=1, byte=4)
    for mirrors in ([made.packets, other, made.packets], [other, made.packets, made.packets],
                    [made.packets, made.packets, other]):
        engine = fed(plan, *enumerate(mirrors))
        assert void(engine, 1) == [offset // 8]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_packets_of_both_copies_are_named(protocol: str, ranks: int) -> None:
    """Of three ranks two connections of each mirror carry the same reduced bytes."""
    job, plan, made = traffic(protocol, ranks)
    seen_here = [(flow, found) for flow in job.flows if (found := spots(made, protocol, flow.qpns[0], 1))]
    assert len(seen_here) == 2  # into rank 0 and out of it
    for flow, (spot, *_) in seen_here:
        number = next(i for i, one in enumerate(plan.engine.flows) if one.data and one.qpn == flow.qpns[0])
        for packet, cell in ((0, 3), (1, 0), (1, 63)):
            other, offset = altered(made.packets, spot, packet, byte=1, cell=cell)
            engine = fed(plan, (0, made.packets), (1, other))
            its = psn(made.packets[spot.packets[packet]][1])
            assert engine.differences() == [{
                "stream": 1, "flow": number, "psn": its, "target": 1, "iteration": 1, "offset": offset, "bytes": 8,
            }]
            carriers = engine.carriers(1, offset)
            assert (number, its) in carriers and len(carriers) == ranks - 1
            named = {(plan.engine.flows[index].qpn, at) for index, at in carriers}
            left = [one for one in made.packets if (destination(one[1]), psn(one[1])) not in named]
            assert len(made.packets) - len(left) in range(1, ranks)
            seen, without = fed(plan, (0, made.packets)), fed(plan, (0, left))
            assert seen.cells(1)[offset // 8] and not without.cells(1)[offset // 8]


def test_who_carries_a_cell_is_known_far_from_the_beginning() -> None:
    """Two QPs for each connection, messages over both of them; iteration 5000 begins in the middle of both."""
    job = example_job(
        count=[COUNT, 700], protocol="simple", mtu=1024, qps=2, split_data_on_qps=True, startup=False, rebuild=False
    )
    plan, made = plan_job(job), generate(job, iterations=2, first_iteration=5000)
    engine = Engine(plan.engine)
    for offset in (0, 8 * 1000, 4 * COUNT - 8, plan.iteration_buckets(5001)[1].offset):
        ((flow, at),) = engine.carriers(5001, offset)
        qpn = plan.engine.flows[flow].qpn.to_bytes(3, "big")
        (frame,) = [one for _, one in made.packets if (one[47:50], psn(one)) == (qpn, at % (1 << 24))]
        place = next(p for p in plan.iteration_buckets(5001) if p.offset <= offset < p.end)
        truth = made.reduced[5001, place.index].tobytes()[offset - place.offset :][:8]
        assert truth in payload(frame)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_log_is_bounded_and_the_holes_are_not(protocol: str) -> None:
    _, plan, made = traffic(protocol)
    small = example_job(count=200_000, protocol=protocol, mtu=256, startup=False, rebuild=False, seed=2)
    plan, made = plan_job(small, streams=2), generate(small, iterations=1, seed=2)
    engine = fed(plan, (0, made.packets), (1, everywhere(made.packets)))
    differ = engine.copies(0)[0]
    assert differ > 256 and len(engine.differences()) == 256
    runs = engine.void_cells(0, 0, 100_000)
    assert (runs[:, 1] - runs[:, 0]).sum() == differ == 100_000 - engine.covered(0)
    assert engine.carriers(0, 8) and engine.outcomes(1)["compared"][0] > 256
    engine.retire()
    engine.forget()
    assert engine.differences() == []


def test_closed_iterations_leave_the_log() -> None:
    job, plan, made = traffic("ll")
    packets = made.packets
    for iteration in (0, 1):
        spot = spots(made, "ll", job.flows[0].qpns[0], iteration)[0]
        packets, _ = altered(packets, spot, packet=1, byte=2)
    engine = fed(plan, (0, made.packets), (1, packets))
    assert [one["iteration"] for one in engine.differences()] == [0, 1]
    engine.retire()
    engine.forget()
    assert [one["iteration"] for one in engine.differences()] == [1]


def test_cells_outside_the_region_are_refused() -> None:
    _, plan, _ = traffic("ll")
    engine = Engine(plan.engine)
    with pytest.raises(IndexError, match="not all in the region"):
        engine.void_cells(0, 0, 1 << 20)
    assert len(engine.void_cells(0, 0, 64)) == len(engine.void_cells(None, 0, 0)) == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_threads_that_place_for_real_find_the_same(protocol: str) -> None:
    """Each of two threads has a mirror; the second one begins when the first has placed everything."""
    job, plan, made = traffic(protocol)
    plan = replace(plan, engine=replace(plan.engine, streams=2, threads=2))
    spot = spots(made, protocol, job.flows[0].qpns[0], 1)[0]
    other, offset = altered(made.packets, spot, packet=2, byte=5)
    rings = [MemoryRing(1 << len(made.packets).bit_length()) for _ in range(2)]
    engine = Engine(plan.engine)
    with Placers([ring.ring_address for ring in rings]) as placers:
        seat = placers.attach(engine)
        for stream, packets in enumerate((made.packets, other)):
            rings[stream].put(packets, stream)
            while seat.look(stream)[0] < len(packets):
                pass
    assert void(engine, 1) == [offset // 8] and engine.covered(1) == CELLS - 1
    assert not engine.complete(1, CELLS) and engine.complete(0, CELLS)


def test_differences_of_two_packets_side_by_side_are_each_ones_own() -> None:
    """The last cell of a packet and the first of the next one lie together."""
    job, plan, made = traffic("simple")
    first, second = spots(made, "simple", job.flows[0].qpns[0], 0)[0].packets[1:3]
    changed = list(made.packets)
    for at, byte in ((first, -1), (second, 0)):
        time, frame = changed[at]
        where = (len(frame) - 4 if byte < 0 else PAYLOAD_AT[opcode(frame)]) + byte
        changed[at] = time, sealed(frame[:where] + bytes([frame[where] ^ 1]) + frame[where + 1 :])
    found = fed(plan, (0, made.packets), (1, changed)).differences()
    assert [(one["psn"], one["bytes"]) for one in found] == [
        (psn(made.packets[first][1]), 8), (psn(made.packets[second][1]), 8)]


def test_differences_of_the_parameters_leave_the_log_with_the_first_iteration() -> None:
    job = example_job(count=COUNT, mtu=1024, rebuild=False, seed=21)
    made = generate(job, iterations=1, seed=21)
    engine = fed(plan_job(job, streams=2), (0, made.packets), (1, everywhere(made.packets)))
    assert Target.PARAMETERS in {one["target"] for one in engine.differences()}
    engine.retire()
    engine.forget()
    assert engine.differences() == []
