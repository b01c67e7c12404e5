"""Placing threads that serve several engines, for real: each engine ends as it does alone, whoever else is there,
comes, leaves or waits."""

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser.machine import NOTHING_SEEN, Engine
from parser.placers import Placers, Seat

from flowcheck.job.model import Job
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import example_job, generate
from tests.flowcheck.altered import Packet
from tests.flowcheck.memory_ring import MemoryRing

from .test_threads import alone, counters, outcomes, spread

SECONDS = 120.0  # until a thread must have done something


def job_of(number: int, **options: object) -> Job:
    """Jobs whose connections are their own."""
    job = example_job(**{"ranks": 2, "count": 12_000, "protocol": "ll", "mtu": 1024, "seed": number, **options})
    for flow in job.flows:
        flow.qpns = [qpn + (number << 16) for qpn in flow.qpns]
        flow.cts_qpns = [qpn + (number << 16) for qpn in flow.cts_qpns]
    return job


def plan_of(job: Job, streams: int = 1, threads: int | None = None, arenas: int = 4) -> JobPlan:
    plan = plan_job(job, streams=streams, arenas=arenas)
    return replace(plan, engine=replace(plan.engine, threads=threads or streams))


def shuffled(parts: list[list[Packet]], seed: int) -> list[Packet]:
    """Of several jobs, each one's in its order."""
    turns = [i for i, part in enumerate(parts) for _ in part]
    random.Random(seed).shuffle(turns)
    each = [iter(part) for part in parts]
    return [next(each[i]) for i in turns]


def until(condition: object) -> None:
    end = time.monotonic() + SECONDS
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "the thread has not done it"
        time.sleep(0)


def room(*counts: int) -> list[MemoryRing]:
    return [MemoryRing(1 << max(count, 2).bit_length()) for count in counts]


@contextlib.contextmanager
def placing(rings: list[MemoryRing], threads: int | None = None) -> Iterator[Placers]:
    with Placers([ring.ring_address for ring in rings], threads) as placers:
        yield placers


def passed(seat: Seat, rings: list[MemoryRing]) -> None:
    until(lambda: seat.passed([ring.put_so_far for ring in rings]))


def assert_equal(engine: Engine, one: Engine, iterations: int) -> None:
    """In all that an engine can say of its own packets."""
    assert outcomes(engine) == outcomes(one)
    assert (engine.oldest, engine.begun, engine.disagreed) == (one.oldest, one.begun, one.disagreed)
    assert engine.cts_tags() == one.cts_tags() and engine.cts_forms() == one.cts_forms()
    told = counters if engine.config.threads > 1 else Engine.flow_counters  # see counters: a matter of time
    for i in range(engine.config.streams):
        assert told(engine, i) == told(one, i)
    for iteration in range(iterations):
        cells = one.cells(iteration)
        assert (engine.cells(iteration) == cells).all()
        assert engine.complete(iteration, one.covered(iteration)) and engine.covered(iteration) == cells.sum()
        there = np.repeat(cells, 8)[: len(engine.region(iteration))]
        assert (engine.region(iteration)[there] == one.region(iteration)[there]).all()


@pytest.mark.timeout(600)
@settings(max_examples=25, deadline=None)
@given(
    protocols=st.lists(st.sampled_from(["ll", "ll128", "simple"]), min_size=1, max_size=4),
    mtu=st.sampled_from([1024, 4096]), streams=st.integers(1, 3), threads=st.integers(1, 3), ipv6=st.booleans(),
    loss=st.sampled_from([0.0, 0.05]),
    late=st.booleans(), seed=st.integers(0, 999),
)
def test_each_engine_finds_what_it_finds_alone(
    protocols: list[str], mtu: int, streams: int, threads: int, ipv6: bool, loss: float, late: bool, seed: int
) -> None:
    """late: what is in the rings is there when the threads start."""
    threads = min(threads, streams)
    jobs = [job_of(i, ranks=3, channels=2, count=9000, protocol=one, mtu=mtu if i % 2 else 1024, ipv6=ipv6 and i == 1)
            for i, one in enumerate(protocols)]
    plans = [plan_of(job, streams, threads) for job in jobs]
    splits = []
    for i, (job, plan) in enumerate(zip(jobs, plans, strict=True)):
        made = generate(job, iterations=3, ports=range(2), seed=seed + i, loss=loss, duplicate=loss, corrupt=loss)
        splits.append(split(plan, made.packets, streams))
    mixed = [shuffled([one[stream] for one in splits], seed) for stream in range(streams)]
    rings = room(*map(len, mixed))
    engines = [Engine(plan.engine) for plan in plans]
    placers = Placers([ring.ring_address for ring in rings], threads)
    seats = [placers.attach(engine) for engine in engines]
    if not late:
        placers.start()
    for stream, (ring, packets) in enumerate(zip(rings, mixed, strict=True)):
        ring.put(packets, stream)
    if late:
        placers.start()
    for seat in seats:
        passed(seat, rings)
        seat.leave()
        seat.engine.finish()
    placers.stop()
    assert [ring.waiting for ring in rings] == [0] * streams
    for engine, plan, one_split in zip(engines, plans, splits, strict=True):
        one = alone(plan, one_split)
        one.finish()
        assert_equal(engine, one, 3)
    assert all(not packets for queue in range(streams) for packets, _ in placers.strangers(queue).values())


def split(plan: JobPlan, packets: list[Packet], streams: int) -> list[list[Packet]]:
    """As a port with several queues spreads connections; those of IPv6 all to the last."""
    if packets[0][1][12] == 0x08:
        return spread(plan, packets, streams)
    return [[] for _ in range(streams - 1)] + [list(packets)]


def test_a_seat_that_waits_holds_up_nobody() -> None:
    """One job has two arenas and nobody frees them; the other's twelve iterations are placed behind it."""
    waiting, running = job_of(1), job_of(2)
    plans = [plan_of(waiting, arenas=2), plan_of(running, arenas=12)]
    made = [generate(waiting, iterations=6, seed=1), generate(running, iterations=12, seed=2)]
    mixed = shuffled([one.packets for one in made], 3)
    (ring,) = rings = room(len(mixed))
    engines = [Engine(plan.engine) for plan in plans]
    with placing(rings) as placers:
        seats = [placers.attach(engine) for engine in engines]
        ring.put(mixed)
        passed(seats[1], rings)
        assert engines[1].complete(11, plans[1].cells[1]) and seats[1].look(0)[1] is False
        until(lambda: seats[0].look(0)[1])
        assert engines[0].wanted(0) == 2 and not seats[0].passed([ring.put_so_far])
        assert ring.waiting > 0  # from the packet on that waits, the ring keeps all
        for iteration in range(6):  # as a group does it
            until(lambda iteration=iteration: engines[0].complete(iteration, plans[0].cells[min(iteration, 1)]))
            data = engines[0].region(iteration)[: made[0].reduced[iteration, 0].nbytes]
            assert data.tobytes() == made[0].reduced[iteration, 0].tobytes()
            engines[0].retire()
        passed(seats[0], rings)
        until(lambda: ring.waiting == 0)
    one = alone(plans[1], [made[1].packets])
    assert_equal(engines[1], one, 12)
    found, all_at_once = outcomes(engines[0]), outcomes(alone(plan_of(waiting, arenas=12), [made[0].packets]))
    found["placed"] += found.pop("late") + found.pop("released")
    all_at_once["placed"] += all_at_once.pop("late") + all_at_once.pop("released")
    assert found == all_at_once


def test_what_has_passed_is_all_but_the_packet_that_waits() -> None:
    job = job_of(1, startup=False, rebuild=False)
    plan, packets = plan_of(job, arenas=2), generate(job, iterations=4).packets
    alone_engine, engine = Engine(plan.engine), Engine(plan.engine)
    taken = next(at for at, (_, frame) in enumerate(packets) if not alone_engine.feed(0, frame))
    rings = room(len(packets))
    with placing(rings) as placers:
        seat = placers.attach(engine)
        rings[0].put(packets[: taken + 1])
        until(lambda: seat.look(0) == (taken, True))
        assert seat.passed([taken]) and not seat.passed([taken + 1]) and not seat.drained(0)
        engine.retire()
        passed(seat, rings)


def test_packets_of_an_engine_that_is_asked_at_the_moment_are_placed_later() -> None:
    """Whoever asks holds the engine's machine for a moment: packets wait, and none is placed twice or forgotten."""
    jobs = [job_of(i, count=40_000) for i in (1, 2)]
    plans = [plan_of(job, arenas=6) for job in jobs]
    made = [generate(job, iterations=6, seed=i) for i, job in enumerate(jobs)]
    mixed = shuffled([one.packets for one in made], 3)
    (ring,) = rings = room(len(mixed))
    engines = [Engine(plan.engine) for plan in plans]
    with placing(rings) as placers:
        seats = [placers.attach(engine) for engine in engines]
        ring.put(mixed)
        while not all(seat.passed([ring.put_so_far]) for seat in seats):
            for engine in engines:
                engine.times(0)
        assert [seat.look(0) for seat in seats] == [(len(one.packets), False) for one in made]
    for engine, plan, one in zip(engines, plans, made, strict=True):
        assert_equal(engine, alone(plan, [one.packets]), 6)


def test_where_a_stream_stands_is_told_while_a_thread_places() -> None:
    """Nobody waits for the end of a burst: what is told is of an earlier one, and never more than has come."""
    job = job_of(1, count=60_000)
    plan, made = plan_of(job, arenas=8), generate(job, iterations=8, seed=1)
    (ring,) = rings = room(len(made.packets))
    engine, told = Engine(plan.engine), []
    with placing(rings) as placers:
        seat = placers.attach(engine)
        ring.put(made.packets)
        while not seat.passed([ring.put_so_far]):
            told.append((engine.past(0), engine.begun))
    assert engine.past(0) == alone(plan, [made.packets]).past(0)
    stands = [past for past, _ in told]
    assert stands == sorted(stands) and all(past <= begun + 1 for past, begun in told)
    assert set(stands) <= {NOTHING_SEEN, *range(9)}


def test_a_waiting_seat_that_is_left_gives_the_ring_back() -> None:
    job, other = job_of(1), job_of(2)
    made = generate(job, iterations=4, seed=1)
    (ring,) = rings = room(len(made.packets))
    with placing(rings) as placers:
        seat, beside = (placers.attach(Engine(plan_of(one, arenas=2).engine)) for one in (job, other))
        ring.put(made.packets)
        until(lambda: seat.look(0)[1])
        passed(beside, rings)
        assert ring.waiting > 0
        seat.leave()
        until(lambda: ring.waiting == 0)
        assert beside.look(0) == (0, False)


@pytest.mark.parametrize("arenas", [2, 12])
def test_a_flow_that_two_engines_claim_is_of_both(arenas: int) -> None:
    """arenas: of one of them. It waits while the other goes on."""
    job = job_of(1)
    made = generate(job, iterations=6, seed=1)
    plans = [plan_of(job, arenas=12), plan_of(job, arenas=arenas), plan_of(job_of(2))]
    (ring,) = rings = room(len(made.packets))
    engines = [Engine(plan.engine) for plan in plans]
    with placing(rings) as placers:
        seats = [placers.attach(engine) for engine in engines]
        ring.put(made.packets)
        passed(seats[0], rings)
        while not seats[1].passed([ring.put_so_far]):
            if engines[1].complete(engines[1].oldest, plans[1].cells[min(engines[1].oldest, 1)]):
                engines[1].retire()
    one = alone(plans[0], [made.packets])
    assert_equal(engines[0], one, 6)
    assert [seat.look(0)[0] for seat in seats] == [len(made.packets), len(made.packets), 0]
    assert sum(outcomes(engines[1]).values()) == len(made.packets) and sum(outcomes(engines[2]).values()) == 0
    assert sum(packets for packets, _ in placers.strangers(0).values()) == 0
    if arenas == 12:
        assert_equal(engines[1], one, 6)


def test_engines_come_and_go_while_packets_flow() -> None:
    """One job stays all the time, and others are followed from their packets' beginning to their end, over and over."""
    stays, job = job_of(1, count=40_000), job_of(2, count=2000)
    plan, other = plan_of(stays, arenas=8), plan_of(job)
    whole, part = generate(stays, iterations=8, seed=1), generate(job, iterations=2, seed=2)
    one, short = alone(plan, [whole.packets]), alone(other, [part.packets])
    (ring,) = rings = [MemoryRing(1 << 12)]
    engine, batch = Engine(plan.engine), 40
    batches = [whole.packets[at : at + batch] for at in range(0, len(whole.packets), batch)]
    guests = 0
    with placing(rings) as placers:
        seat = placers.attach(engine)
        while batches:
            guest = placers.attach(Engine(other.engine))
            left = list(part.packets)
            while left:
                until(lambda: ring.waiting < 3000)
                ring.put(shuffled([left[:batch], batches.pop(0) if batches else []], len(left)))
                left = left[batch:]
            passed(guest, rings)
            guest.leave()
            guests += 1
            assert_equal(guest.engine, short, 2)
        passed(seat, rings)
        ring.put([(0, b"no packet of ours")] * 100)
        until(lambda: ring.waiting == 0)
        assert placers.claimed(0) == guests * len(part.packets) + len(whole.packets)
    assert_equal(engine, one, 8)


def test_an_engine_begins_with_what_comes_after_it() -> None:
    job, other = job_of(1), job_of(2)
    made = generate(job, iterations=2, seed=1)
    (ring,) = rings = room(2 * len(made.packets))
    placers = Placers([ring.ring_address])  # nobody reads yet
    ring.put(made.packets)
    seat, beside = placers.attach(Engine(plan_of(job).engine)), placers.attach(Engine(plan_of(other).engine))
    with placers:
        passed(seat, rings)
        assert seat.look(0) == (0, False)
        assert placers.strangers(0)["other_roce"][0] == len(made.packets)
        ring.put(made.packets)
        passed(seat, rings)
    assert_equal(seat.engine, alone(plan_of(job), [made.packets]), 2)
    assert beside.look(0) == (0, False)


def test_no_thread_touches_an_engine_that_was_left() -> None:
    job = job_of(1)
    made = generate(job, iterations=2, seed=1)
    (ring,) = rings = room(len(made.packets))
    half = len(made.packets) // 2
    with placing(rings) as placers:
        seat = placers.attach(Engine(plan_of(job).engine))
        ring.put(made.packets[:half])
        passed(seat, rings)
        seat.leave()
        seat.leave()
        before = outcomes(seat.engine)
        ring.put(made.packets[half:])
        until(lambda: ring.waiting == 0)
        assert outcomes(seat.engine) == before and sum(before.values()) == half
        assert placers.strangers(0)["other_roce"][0] == len(made.packets) - half
    for _, frame in made.packets[half:]:  # it goes on by itself
        assert seat.engine.feed(0, frame)
    assert_equal(seat.engine, alone(plan_of(job), [made.packets]), 2)


@pytest.mark.parametrize("engines", [0, 1, 2])
def test_packets_of_nobody_are_counted_once(engines: int) -> None:
    made = generate(job_of(7), iterations=1, seed=1)
    gre = made.packets[0][1]
    odd: list[Packet] = [
        (0, b"no packet of ours"), (0, b"\0" * 12 + b"\x08\x06" + b"\0" * 46),
        (0, gre[:23] + bytes([4]) + gre[24:]),  # IP in IP
        *made.packets[:5],
    ]
    (ring,) = rings = room(9000)
    with placing(rings) as placers:
        seats = [placers.attach(Engine(plan_of(job_of(i)).engine)) for i in range(engines)]
        ring.put(odd * 1000)
        until(lambda: ring.waiting == 0)
    found = {name: packets for name, (packets, _) in placers.strangers(0).items() if packets}
    alone_one = Engine(plan_of(job_of(1)).engine)
    for _, frame in odd:
        alone_one.feed(0, frame)
    assert found == {name: 1000 * packets for name, packets in outcomes(alone_one).items() if packets}
    assert placers.encapsulated() == {what: 1000 * n for what, n in alone_one.encapsulated().items()}
    for name, (packets, nbytes) in alone_one.outcomes(0).items():
        assert placers.strangers(0)[name] == (1000 * packets, 1000 * nbytes)
    assert all(sum(outcomes(seat.engine).values()) == 0 and seat.look(0) == (0, False) for seat in seats)


def test_without_an_engine_the_rings_are_emptied() -> None:
    rings = room(5000, 5000)
    with placing(rings) as placers:
        for ring in rings:
            ring.put([(0, b"no packet of ours")] * 5000)
        until(lambda: [ring.waiting for ring in rings] == [0, 0])
        assert [placers.strangers(i)["not_roce"][0] for i in range(2)] == [5000, 5000]


def test_what_is_in_the_rings_stays_when_the_threads_stop() -> None:
    (ring,) = rings = room(1000)
    with placing(rings) as placers:
        pass
    ring.put([(0, b"no packet of ours")] * 10)
    seat = placers.attach(Engine(plan_of(job_of(1)).engine))  # without threads
    assert ring.waiting == 10 and not seat.passed(seat.mark())
    placers.stop()
    with placers:
        until(lambda: ring.waiting == 0)


def test_what_waits_in_a_ring_is_said_for_each_engine() -> None:
    """One that waits for an arena has packets of all before it; beside it the other is past them."""
    job, other = job_of(1), job_of(2)
    made = generate(job, iterations=4, seed=1)
    (ring,) = rings = room(len(made.packets))
    placers = Placers([ring.ring_address])
    waits, goes_on = (placers.attach(Engine(plan_of(one, arenas=2).engine)) for one in (job, other))
    size = 1 << len(made.packets).bit_length()
    assert waits.ring(0) == (0, 0, size)
    ring.put(made.packets)
    assert waits.ring(0) == goes_on.ring(0) == (0, len(made.packets), size)
    with placers:
        until(lambda: waits.look(0)[1])
        passed(goes_on, rings)
        assert goes_on.ring(0) == (len(made.packets), 0, size)
        at, behind, _ = waits.ring(0)
        assert at + behind == len(made.packets) and 0 < at < len(made.packets)
        until(lambda: ring.waiting == behind)
        with pytest.raises(IndexError, match="stream 1 of 1"):
            waits.ring(1)


def test_threads_have_names_and_cores_of_their_own() -> None:
    before, core = os.sched_getaffinity(0), max(os.sched_getaffinity(0))
    rings = room(4, 4, 4)
    with Placers([ring.ring_address for ring in rings], cores=(core, None, core)):
        mine = {one.name: one.native_id for one in threading.enumerate() if one.name.startswith("fc-place")}
        assert sorted(mine) == ["fc-place 0", "fc-place 1", "fc-place 2"]
        for number in mine.values():  # what `top -H` shows
            until(lambda number=number: Path(f"/proc/self/task/{number}/comm").read_text().strip() == "fc-place")
        found = [os.sched_getaffinity(mine[f"fc-place {i}"] or 0) for i in range(3)]
        assert found == [{core}, before, {core}]
    assert os.sched_getaffinity(0) == before
    assert not [one for one in threading.enumerate() if one.name.startswith("fc-place")]


def test_a_core_that_is_not_there_stops_all_threads() -> None:
    rings = room(4, 4)
    placers = Placers([ring.ring_address for ring in rings], cores=(None, 1023))
    with pytest.raises(OSError, match="Invalid argument"):
        placers.start()
    assert not [one for one in threading.enumerate() if one.name.startswith("fc-place")]
    placers.attach(Engine(plan_of(job_of(1), 2).engine)).leave()


@pytest.mark.parametrize(("count", "threads", "cores", "what"), [
    (0, None, (), "0 threads for 0 rings"), (2, 3, (), "3 threads for 2 rings"), (2, 0, (), "0 threads for 2 rings"),
    (2, 2, (1,), "1 cores for 2 threads"),
])
def test_threads_that_do_not_fit_their_rings(
    count: int, threads: int | None, cores: tuple[int, ...], what: str
) -> None:
    rings = room(*[4] * count)
    with pytest.raises(ValueError, match=what):
        Placers([ring.ring_address for ring in rings], threads, cores)


def test_an_engine_of_other_streams_gets_no_seat() -> None:
    rings = room(4, 4)
    placers = Placers([ring.ring_address for ring in rings], 1)
    with pytest.raises(ValueError, match="an engine of 2 streams and 2 threads at 2 rings, which 1 threads read"):
        placers.attach(Engine(plan_of(job_of(1), 2).engine))
    with pytest.raises(IndexError, match="stream 2 of 2"):
        placers.attach(Engine(plan_of(job_of(1), 2, 1).engine)).look(2)


def test_an_engine_has_one_seat() -> None:
    rings = room(4, 4)
    first, second = (Placers([ring.ring_address]) for ring in rings)
    engine = Engine(plan_of(job_of(1)).engine)
    seat = first.attach(engine)
    for one in (first, second):
        with pytest.raises(ValueError, match="the engine has a seat already"):
            one.attach(engine)
    seat.leave()
    second.attach(engine).leave()


def test_there_is_room_for_64_engines() -> None:
    (ring,) = room(4)
    placers = Placers([ring.ring_address])
    engine = plan_of(job_of(1, count=100)).engine
    seats = [placers.attach(Engine(engine)) for _ in range(64)]
    assert sorted(seat.number for seat in seats) == list(range(64))
    with pytest.raises(ValueError, match="64 engines are attached"):
        placers.attach(Engine(engine))
    seats[17].leave()
    assert placers.attach(Engine(engine)).number == 17


def test_a_seat_is_drained_when_its_rings_have_ended() -> None:
    job = job_of(1)
    made = generate(job, iterations=1, seed=1)
    (ring,) = rings = room(len(made.packets))
    with placing(rings) as placers:
        seat = placers.attach(Engine(plan_of(job).engine))
        assert not seat.drained(0)
        ring.put(made.packets)
        passed(seat, rings)
        assert not seat.drained(0)
        ring.end()
        assert seat.drained(0)
