"""Two copies of the same bytes that differ: counted, and their cells are missing. The engine alone, fed from memory.

Both ways through the engine must compare: the fast one (a MIDDLE packet that comes in order) and the general one.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
from parser.machine import Engine

from flowcheck.job.model import Job
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import Synthesis, example_job, generate
from tests.flowcheck.altered import Packet, altered, opcode, spots

COUNT, TIME = 12_000, 1  # elements, iteration looked at
PROTOCOLS = ["ll", "ll128", "simple"]


@functools.cache
def traffic(protocol: str, mtu: int = 1024) -> tuple[Job, JobPlan, Synthesis]:
    """Three iterations at one port: every reduced byte comes once."""
    job = example_job(count=COUNT, protocol=protocol, mtu=mtu, startup=False, rebuild=False, seed=11)
    return job, plan_job(job, streams=2), generate(job, iterations=3, seed=11)


def shuffled(packets: list[Packet]) -> list[Packet]:
    """Every three packets that follow one another, backwards: nothing comes in order."""
    return [packet for at in range(0, len(packets), 3) for packet in packets[at : at + 3][::-1]]


def fed(plan: JobPlan, *turns: tuple[int, list[Packet]]) -> Engine:
    """turns: (stream, packets), one after another. It is the same whether one thread serves the streams or two."""
    engine, two = Engine(plan.engine), Engine(replace(plan.engine, threads=2))
    for stream, packets in turns:
        for _, frame in packets:
            assert engine.feed(stream, frame) and two.feed(stream, frame)
    assert engine.disagreements() == two.disagreements() == []
    for iteration in range(3):
        assert two.copies(iteration) == engine.copies(iteration)
        assert (two.cells(iteration) == engine.cells(iteration)).all()
        assert (two.region(iteration) == engine.region(iteration)).all()
        assert two.covered(iteration) == engine.covered(iteration) == engine.cells(iteration).sum()
        assert (void(two, iteration) == void(engine, iteration)).all()
    assert sorted(map(str, two.differences())) == sorted(map(str, engine.differences()))
    return engine


def void(engine: Engine, iteration: int) -> np.ndarray:
    """The cells whose copies differed."""
    runs = engine.void_cells(iteration, 0, len(engine.cells(iteration)))
    return np.concatenate([np.arange(0), *(np.arange(first, end) for first, end in runs)])


def check(engine: Engine, made: Synthesis, differ: int, offset: int, holds: bytes | None = None) -> None:
    """Everything came twice, and differs in iteration TIME only: all of it is there but the cells that differ."""
    for iteration in range(3):
        cells = void(engine, iteration)
        found = (differ, offset) if iteration == TIME else (0, 0)
        assert len(cells) == found[0] and (len(cells) == 0 or found[1] // 8 in cells)
        there = np.ones(COUNT // 2, bool)
        there[cells] = False
        assert (engine.cells(iteration)[: COUNT // 2] == there).all()
        assert engine.copies(iteration) == (*found, 4 * COUNT)
        right = made.reduced[iteration, 0].tobytes()
        if iteration == TIME and holds is not None:
            right = holds
        assert engine.region(iteration)[: 4 * COUNT].tobytes() == right


def with_byte(made: Synthesis, offset: int, flip: int = 1) -> bytes:
    """The reduced bucket of iteration TIME with a byte changed."""
    data = bytearray(made.reduced[TIME, 0].tobytes())
    data[offset] ^= flip
    return bytes(data)


@pytest.mark.parametrize("byte", range(8))
@pytest.mark.parametrize("packet", [0, 2], ids=["first", "middle"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_byte_of_a_cell_is_compared(protocol: str, packet: int, byte: int) -> None:
    job, plan, made = traffic(protocol)
    spot = spots(made, protocol, job.flows[0].qpns[0], TIME)[0]
    assert opcode(made.packets[spot.packets[packet]][1]) == (6 if packet == 0 else 7)
    other, offset = altered(made.packets, spot, packet, byte)
    check(fed(plan, (0, made.packets), (1, other)), made, 1, offset)
    check(fed(plan, (1, made.packets), (0, other)), made, 1, offset)
    check(fed(plan, (0, other), (1, made.packets)), made, 1, offset, with_byte(made, offset + byte))


WAYS = [(lambda packets: packets, "in-order"), (shuffled, "reordered")]


@pytest.mark.parametrize("second", [way for way, _ in WAYS], ids=[name for _, name in WAYS])
@pytest.mark.parametrize("first", [way for way, _ in WAYS], ids=[name for _, name in WAYS])
@pytest.mark.parametrize("mtu", [256, 1024, 4096])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_both_ways_through_the_engine_compare(protocol: str, mtu: int, first, second) -> None:  # type: ignore[no-untyped-def]
    job, plan, made = traffic(protocol, mtu)
    spot = spots(made, protocol, job.flows[0].qpns[0], TIME)[0]
    other, offset = altered(made.packets, spot, packet=1, byte=6)
    check(fed(plan, (0, first(made.packets)), (1, second(other))), made, 1, offset)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_streams_that_take_turns_compare(protocol: str) -> None:
    """Packet by packet, so that both streams are on the fast way at the same time."""
    job, plan, made = traffic(protocol)
    spot = spots(made, protocol, job.flows[0].qpns[0], TIME)[0]
    other, offset = altered(made.packets, spot, packet=3, byte=5)
    turns = [turn for a, b in zip(made.packets, other, strict=True) for turn in ((0, [a]), (1, [b]))]
    check(fed(plan, *turns), made, 1, offset)
    turns = [turn for a, b in zip(made.packets, other, strict=True) for turn in ((1, [b]), (0, [a]))]
    check(fed(plan, *turns), made, 1, offset, with_byte(made, offset + 5))


@pytest.mark.parametrize("cell", [0, 14, 15, 59, 60, 74, 88, 101, 105, 119])
def test_every_line_of_ll128_is_compared(cell: int) -> None:
    """Words of a line's end lie apart from the others: as cells they are number 15, 31, 47 and 63 of a half-slice."""
    job, plan, made = traffic("ll128")
    spot = spots(made, "ll128", job.flows[0].qpns[0], TIME)[0]
    other, offset = altered(made.packets, spot, packet=1, byte=4, cell=cell)
    check(fed(plan, (0, made.packets), (1, other)), made, 1, offset)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_cells_that_differ_are_counted_each(protocol: str) -> None:
    """Three cells: two of one packet, the earlier of them named, and one of a packet before, which comes later."""
    job, plan, made = traffic(protocol)
    spot = spots(made, protocol, job.flows[0].qpns[0], TIME)[0]
    other, first = altered(made.packets, spot, packet=2, byte=0, cell=3)
    other, again = altered(other, spot, packet=2, byte=7, cell=4)
    other, before = altered(other, spot, packet=1, byte=7, cell=4)
    assert before < first < again
    early, late = spot.packets[1], spot.packets[2]
    other[early], other[late] = other[late], other[early]
    check(fed(plan, (0, made.packets), (1, other)), made, 3, first)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_copies_that_agree_are_no_difference(protocol: str) -> None:
    """Both mirrors carry the same wrong byte: they agree, and only a checksum of the trainer could tell."""
    job, plan, made = traffic(protocol)
    spot = spots(made, protocol, job.flows[0].qpns[0], TIME)[0]
    both, offset = altered(made.packets, spot, packet=1, byte=4)
    check(fed(plan, (0, both), (1, both)), made, 0, 0, with_byte(made, offset + 4))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_third_value_differs(protocol: str) -> None:
    """Both mirrors carry a wrong byte, each its own."""
    job, plan, made = traffic(protocol)
    spot = spots(made, protocol, job.flows[0].qpns[0], TIME)[0]
    one, offset = altered(made.packets, spot, packet=1, byte=4, flip=1)
    two, _ = altered(made.packets, spot, packet=1, byte=4, flip=2)
    check(fed(plan, (0, one), (1, two)), made, 1, offset, with_byte(made, offset + 4, flip=1))
    check(fed(plan, (0, two), (1, one)), made, 1, offset, with_byte(made, offset + 4, flip=2))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_retransmission_of_other_bytes_differs(protocol: str) -> None:
    """The same packet twice on one stream, the second time with another byte."""
    job, plan, made = traffic(protocol)
    spot = spots(made, protocol, job.flows[0].qpns[0], TIME)[0]
    other, offset = altered(made.packets, spot, packet=1, byte=4)
    at = spot.packets[1]
    engine = fed(plan, (0, [*made.packets[: at + 1], other[at], *made.packets[at + 1 :]]))
    differ, where, compared = engine.copies(TIME)
    assert (differ, where) == (1, offset) and 0 < compared <= 1024
    assert engine.region(TIME)[: 4 * COUNT].tobytes() == made.reduced[TIME, 0].tobytes()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_next_iteration_in_an_arena_begins_anew(protocol: str) -> None:
    """With two arenas, iteration 2 takes the one of iteration 0, in which a copy differed."""
    job, _, made = traffic(protocol)
    plan = plan_job(job, streams=2, arenas=2)
    spot = spots(made, protocol, job.flows[0].qpns[0], 0)[0]
    other, offset = altered(made.packets, spot, packet=1, byte=4)
    engine, taken = Engine(plan.engine), [0, 0]
    for _ in range(2):
        for stream, packets in enumerate((made.packets, other)):
            while taken[stream] < len(packets) and engine.feed(stream, packets[taken[stream]][1]):
                taken[stream] += 1
        if engine.oldest == 0:
            assert engine.copies(0) == (1, offset, 4 * COUNT) and engine.copies(2) == (0, 0, 0)
            assert not engine.complete(0, COUNT // 2) and engine.covered(0) == COUNT // 2 - 1
            engine.retire()
    assert taken == [len(made.packets)] * 2
    assert engine.copies(2)[0] == 0 and engine.copies(2)[2] == 4 * COUNT
    assert engine.cells(2)[: COUNT // 2].all() and len(void(engine, 2)) == 0 and engine.complete(2, COUNT // 2)
    assert engine.copies(0) == (0, 0, 0)  # closed


def test_packets_that_waited_aside_are_compared() -> None:
    """SIMPLE, and the second mirror lost the message's first packet: the others wait for what vouches for them."""
    job, plan, made = traffic("simple")
    spot = spots(made, "simple", job.flows[0].qpns[0], TIME)[0]
    other, offset = altered(made.packets, spot, packet=2, byte=7)
    del other[spot.packets[0]]
    engine = fed(plan, (0, made.packets), (1, other))
    assert engine.copies(TIME) == (1, offset, 4 * COUNT - 1024)
    assert engine.region(TIME)[: 4 * COUNT].tobytes() == made.reduced[TIME, 0].tobytes()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_last_bytes_of_a_tensor_are_compared(protocol: str) -> None:
    """An odd number of elements: the last cell holds four bytes, and what is left of it is nobody's."""
    job = example_job(count=COUNT + 1, protocol=protocol, mtu=1024, startup=False, rebuild=False, seed=3)
    plan, made = plan_job(job, streams=2), generate(job, iterations=2, seed=3)
    truth = made.reduced[TIME, 0].tobytes()
    found = [spot for flow in job.flows for spot in spots(made, protocol, flow.qpns[0], TIME)]
    last = next(spot for spot in found if spot.start + len(spot.wire) == len(truth))
    packet = int(last.wire[-1]) // 1024
    behind = sum(int(place) // 1024 == packet for place in last.wire[::8]) - 1
    other, offset = altered(made.packets, last, packet, byte=3, cell=behind)
    assert offset == 4 * COUNT
    engine = fed(plan, (0, made.packets), (1, other))
    assert engine.copies(TIME) == (1, 4 * COUNT, 4 * COUNT + 4)
    assert engine.copies(0) == (0, 0, 4 * COUNT + 4)
