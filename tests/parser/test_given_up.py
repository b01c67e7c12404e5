"""Iterations that are given up: from a boundary to a boundary packets are counted and not placed, and need no arena."""

from __future__ import annotations

from dataclasses import replace

import pytest
from parser.machine import Engine
from parser.placers import Placers

from flowcheck.rebuild.plan import plan_job
from lab.synth import example_job, generate
from tests.flowcheck.memory_ring import MemoryRing

PROTOCOLS = ["ll", "ll128", "simple"]
COUNT = 12_000


def run(engine: Engine, packets: list[tuple[int, bytes]], stream: int = 0) -> None:
    ring = MemoryRing(1 << max(len(packets), 2).bit_length())
    ring.put(packets, stream)
    done, blocked = engine.run(stream, ring.ring_address, 1 << 30)
    assert done == len(packets) and not blocked


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_from_boundary_to_boundary_nothing_is_placed_and_everything_is_counted(protocol: str) -> None:
    """Asked for amid iteration 1, taken back amid 6: 2 to 6 are given up, with two arenas; no other lacks a cell."""
    job = example_job(count=COUNT, protocol=protocol, mtu=1024, seed=3, startup=False, rebuild=False)
    plan, made = plan_job(job, arenas=2), generate(job, iterations=9, seed=3)
    engine, each = Engine(plan.engine), len(made.packets) // 9
    assert list(engine.given_up) == []
    run(engine, made.packets[: each + each // 2])
    assert engine.begun == 1 and engine.give_up() == 2 and 10**9 in engine.given_up
    run(engine, made.packets[each + each // 2 : 6 * each + each // 2])
    assert (engine.begun, engine.oldest, engine.take_up()) == (6, 0, 7)
    assert engine.given_up == range(2, 7)
    for iteration in (0, 1):
        assert engine.complete(iteration, plan.cells[min(iteration, 1)])
    for iteration in range(2, 7):
        assert engine.covered(iteration) == 0 and not engine.cells(iteration).any()
    assert engine.reached(0) == 6
    engine.retire(7)
    run(engine, made.packets[6 * each + each // 2 :])
    for iteration in (7, 8):
        assert engine.complete(iteration, plan.cells[1])
        place = plan.iteration_buckets(iteration)[0]
        found = engine.region(iteration)[place.offset :][: place.nbytes]
        assert found.tobytes() == made.reduced[iteration, 0].tobytes()
    counts = {name: packets for name, (packets, _) in engine.outcomes(0).items()}
    assert sum(counts.values()) == len(made.packets) and counts["late"] == counts["unanchored"] == 0
    other = Engine(plan_job(job, arenas=16).engine)
    run(other, made.packets)
    whole = {name: packets for name, (packets, _) in other.outcomes(0).items()}
    assert counts["placed"] * 9 == whole["placed"] * 4, "five iterations of nine are not placed"
    assert counts["overload"] == sum(whole[name] - counts[name] for name in ("placed", "released"))
    assert counts["overload"] >= whole["placed"] - counts["placed"]
    assert all(counts[name] == whole[name] for name in counts if name not in ("overload", "placed", "released"))
    assert engine.disagreed == 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_packet_that_waits_for_an_arena_waits_no_longer(protocol: str) -> None:
    job = example_job(count=COUNT, protocol=protocol, mtu=1024, seed=3, startup=False, rebuild=False)
    made = generate(job, iterations=4, seed=3)
    engine = Engine(plan_job(job, arenas=2).engine)
    taken = 0
    while engine.feed(0, made.packets[taken][1]):
        taken += 1
    assert engine.wanted(0) == 2 and engine.give_up() == 2
    for _, frame in made.packets[taken:]:
        assert engine.feed(0, frame)
    assert engine.begun == 3 and engine.covered(2) == engine.covered(3) == 0


def test_what_has_retired_without_a_packet_is_not_given_up() -> None:
    job = example_job(count=100, startup=False, rebuild=False)
    made, engine = generate(job, iterations=1), Engine(plan_job(job).engine)
    run(engine, made.packets)
    engine.retire(3)
    assert engine.begun == 0 and engine.give_up() == 3
    engine.retire(2)
    assert engine.take_up() == 5 and engine.given_up == range(3, 5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_iteration_is_given_up_by_all_threads_or_by_none(protocol: str) -> None:
    """Again and again, while three threads place: whatever moment it is, each iteration is whole or empty."""
    job = example_job(ranks=4, channels=4, count=COUNT, protocol=protocol, mtu=1024, seed=3)
    plan = plan_job(job, streams=3, arenas=64)
    plan = replace(plan, engine=replace(plan.engine, threads=3))
    made = generate(job, iterations=40, ports=range(4), seed=3)
    streams: list[list[tuple[int, bytes]]] = [[], [], []]
    edges = {flow.qpn: flow.edge for flow in plan.engine.flows}
    for ns, frame in made.packets:
        streams[edges.get(int.from_bytes(frame[47:50], "big"), 0) % 3].append((ns, frame))
    rings = [MemoryRing(1 << max(len(packets), 2).bit_length()) for packets in streams]
    engine, given_up, first, resumed = Engine(plan.engine), set[int](), -1, -1
    with Placers([ring.ring_address for ring in rings]) as placers:
        placers.attach(engine)
        for at in range(0, max(map(len, streams)), 40):
            for i, ring in enumerate(rings):
                ring.put(streams[i][at : at + 40], i)
            if first >= 0 and engine.begun > first:
                resumed = engine.take_up()
                given_up |= set(range(first, resumed))
                first = -1
            elif first < 0 <= engine.begun and all(engine.past(i) > resumed for i in range(3)):
                first = engine.give_up()
        if first >= 0:
            given_up |= set(range(first, engine.take_up()))
        while any(ring.waiting for ring in rings):
            pass
    assert given_up & set(range(40))
    for iteration in range(40):
        if iteration in given_up:
            assert engine.covered(iteration) == 0
        else:
            assert engine.complete(iteration, plan.cells[min(iteration, 1)]), iteration


def test_when_an_iteration_came_is_known_by_the_captures_clock() -> None:
    job = example_job(count=COUNT, protocol="ll", mtu=1024, seed=3, startup=False, rebuild=False)
    plan, made = plan_job(job), generate(job, iterations=2, seed=3)
    engine, each = Engine(plan.engine), len(made.packets) // 2
    assert engine.times(0) is None
    run(engine, made.packets)
    for iteration in (0, 1):
        own = [ns for ns, _ in made.packets[iteration * each : (iteration + 1) * each]]
        first, last = engine.times(iteration)
        tenth = (own[-1] - own[0]) // 10
        assert own[0] <= first < own[0] + tenth and own[-1] - tenth < last <= own[-1]
    assert engine.times(2) is None and engine.times(64) is None


def test_a_source_without_a_clock_says_no_times() -> None:
    job = example_job(count=100, startup=False, rebuild=False)
    made, engine = generate(job, iterations=1), Engine(plan_job(job).engine)
    for _, frame in made.packets:
        engine.feed(0, frame)
    assert engine.begun == 0 and engine.times(0) is None


def test_how_many_packets_wait_in_a_ring() -> None:
    engine, ring = Engine(plan_job(example_job(count=100)).engine), MemoryRing(8)
    assert engine.waiting(ring.ring_address) == (0, 8)
    ring.put([(1, b"x")] * 5, 0)
    assert engine.waiting(ring.ring_address) == (5, 8)
