"""What an engine says of several streams that several threads serve: each of the right one, and all together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from parser.machine import Engine

from flowcheck.job.model import Job
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import Synthesis, example_job, generate
from tests.flowcheck.altered import PAYLOAD_AT, Packet, destination, opcode, psn, spots
from tests.flowcheck.memory_ring import MemoryRing
from tests.parser.odd_packets import patched, writes

COUNT = 12_000
ACK = 17


def jobs(streams: int, threads: int, **options: object) -> tuple[Job, JobPlan]:
    job = example_job(**{"count": COUNT, "mtu": 1024, "startup": False, "rebuild": False, "seed": 6, **options})
    plan = plan_job(job, streams=streams)
    return job, replace(plan, engine=replace(plan.engine, threads=threads))


def run(engine: Engine, stream: int, packets: list[Packet]) -> None:
    ring = MemoryRing(1 << max(len(packets), 2).bit_length())
    ring.put(packets)
    assert engine.run(stream, ring.ring_address, 1 << 20) == (len(packets), False)


def at(packets: list[Packet], ns: int) -> list[Packet]:
    """One nanosecond after another, from ns on."""
    return [(ns + number, frame) for number, (_, frame) in enumerate(packets)]


def of_iterations(made: Synthesis, qpn: int, iterations: int) -> list[list[Packet]]:
    data = writes(made.packets, qpn)
    each = len(data) // iterations
    return [data[each * i : each * (i + 1)] for i in range(iterations)]


@pytest.mark.parametrize("ask", [
    lambda engine, stream: engine.wanted(stream), lambda engine, stream: engine.past(stream),
    lambda engine, stream: engine.outcomes(stream), lambda engine, stream: engine.reached(stream),
    lambda engine, stream: engine.feed(stream, bytes(60)),
])
def test_a_stream_that_is_not_there_is_refused(ask) -> None:  # type: ignore[no-untyped-def]
    engine = Engine(jobs(3, 2)[1].engine)
    ask(engine, 2)
    for stream in (3, 4, 64):
        with pytest.raises(IndexError, match=f"stream {stream} of 3"):
            ask(engine, stream)


@pytest.mark.parametrize("stream", range(4))
def test_the_newest_and_the_oldest_iteration_are_those_of_any_thread(stream: int) -> None:
    """In mid-stream, with packets of one stream alone."""
    job, plan = jobs(4, 2)
    made = generate(job, iterations=2, first_iteration=900, seed=6)
    engine = Engine(plan.engine)
    run(engine, stream, made.packets)
    assert (engine.oldest, engine.begun) == (900, 901)
    assert [engine.reached(i) for i in range(4)] == [901 if i % 2 == stream % 2 else -1 for i in range(4)]


def test_times_are_of_each_stream_and_of_all() -> None:
    job, plan = jobs(4, 2)
    packets = of_iterations(generate(job, iterations=1, seed=6), job.flows[0].qpns[0], 1)[0]
    engine = Engine(plan.engine)
    for stream, ns in ((0, 5000), (1, 3000), (3, 8000)):
        run(engine, stream, at(packets, ns))
    last = len(packets) - 1
    assert engine.stream_times(0) == [(5000, 5000 + last), (3000, 3000 + last), None, (8000, 8000 + last)]
    assert engine.times(0) == (3000, 8000 + last)
    assert engine.stream_times(64) == engine.flow_times(64) == [None] * 4 and engine.times(64) is None


def test_flows_overlap_from_the_last_that_begins_to_the_first_that_ends() -> None:
    """Two flows over one stream. While they bring the newest iteration, what has come of each counts."""
    job, plan = jobs(2, 2)
    made = generate(job, iterations=2, seed=6)
    one, two = (of_iterations(made, flow.qpns[0], 2) for flow in job.flows)
    engine, size = Engine(plan.engine), len(one[0])
    run(engine, 1, at(one[0], 1000) + at(two[0], 5000))
    assert engine.flow_times(0) == [None, (5000, 1000 + size - 1)]
    run(engine, 1, at(one[1], 7000) + at(two[1], 9000))
    assert engine.flow_times(0) == [None, (5000, 1000 + size - 1)]
    assert engine.flow_times(1) == [None, (9000, 7000 + len(one[1]) - 1)]


def test_what_may_still_come_is_asked_of_each_stream() -> None:
    """One thread, two streams. Over the second a packet is missing, which was acknowledged there."""
    job, plan = jobs(2, 1)
    made = generate(job, iterations=3, seed=6)
    lost = spots(made, "ll", job.flows[0].qpns[0], 1)[-1].packets[1]
    without = [one for number, one in enumerate(made.packets) if number != lost]
    silent = [one for one in without if opcode(one[1]) != ACK]
    engine = Engine(plan.engine)
    run(engine, 0, made.packets)
    run(engine, 1, without)
    assert (engine.hope(0, 1), engine.hope(1, 1)) == ("all_came", "acknowledged")
    engine = Engine(plan.engine)
    run(engine, 0, silent)
    run(engine, 1, without)
    assert (engine.hope(0, 1), engine.hope(1, 1)) == ("passed", "acknowledged")


def test_an_ack_that_comes_late_takes_nothing_back() -> None:
    job, plan = jobs(1, 1)
    made = generate(job, iterations=3, seed=6)
    lost = spots(made, "ll", job.flows[0].qpns[0], 1)[-1].packets[1]
    acks = [frame for _, frame in made.packets
            if opcode(frame) == ACK and destination(frame) == job.flows[0].cts_qpns[0]]
    engine = Engine(plan.engine)
    run(engine, 0, [one for number, one in enumerate(made.packets) if number != lost])
    assert engine.hope(0, 1) == "acknowledged"
    old = next(frame for frame in acks if psn(frame) < psn(made.packets[lost][1]))
    assert engine.feed(0, old) and engine.hope(0, 1) == "acknowledged"


def test_what_was_closed_stays_closed() -> None:
    job, plan = jobs(2, 2)
    made = generate(job, iterations=3, seed=6)
    engine, each = Engine(plan.engine), len(made.packets) // 3
    engine.close(2)
    engine.close(1)
    for stream in (0, 1):
        run(engine, stream, made.packets[: 2 * each])
        outcomes = engine.outcomes(stream)
        assert outcomes["late"][0] > 0 and outcomes["placed"] == (0, 0)
    run(engine, 0, made.packets[2 * each :])
    assert engine.complete(2, plan.cells[1])


@pytest.mark.parametrize("stream", range(4))
def test_a_disagreement_is_of_the_stream_that_it_was_seen_in(stream: int) -> None:
    job, plan = jobs(4, 2)
    made = generate(job, iterations=2, seed=6)
    spot = spots(made, "ll", job.flows[0].qpns[0], 1)[0].packets[0]
    odd = list(made.packets)
    odd[spot] = (odd[spot][0], patched(-4, b"\xff\xff\xff\xff")(odd[spot][1]))  # a flag
    engine = Engine(plan.engine)
    run(engine, stream, odd)
    (found,) = engine.disagreements()
    assert (found["stream"], found["kind"], found["iteration"]) == (stream, "flag", 1)
    ignored = [int((flows["ignored_until"] > flows["ignored_from"]).sum()) for flows in engine.flows()]
    assert ignored == [int(i == stream) for i in range(4)]
    never = [counters["ignored"] for counters in engine.flow_counters(stream) if counters["disagreements"]]
    assert len(never) == 1 and 0 not in never[0] and 1 in never[0] and 10**12 in never[0]


def test_iterations_whose_disagreements_found_no_room_are_named() -> None:
    """A log holds 256. Of 16 connections over each of 20 streams a packet has a wrong flag."""
    job, plan = jobs(20, 1, ranks=4, channels=4, count=20_000)
    made = generate(job, iterations=4, ports=range(4), seed=6)
    engine = Engine(replace(plan.engine, arenas=5))

    def one_each(stream: int, iteration: int) -> None:
        first = [of_iterations(made, flow.qpns[0], 4)[iteration][0] for flow in job.flows]
        run(engine, stream, [
            (ns, patched(PAYLOAD_AT[opcode(frame)] + 4, b"\xff\xff\xff\xff")(frame)) for ns, frame in first
        ])

    run(engine, 0, [writes(made.packets, flow.qpns[0])[0] for flow in job.flows])  # connections begin here
    for stream in range(16):
        one_each(stream, 3)
    assert len(engine.disagreements()) == 256 and not engine.unlogged
    for stream, iteration, unlogged in ((16, 1, range(1, 2)), (17, 2, range(1, 3)), (18, 1, range(1, 3))):
        one_each(stream, iteration)
        assert len(engine.disagreements()) == 256 and engine.unlogged == unlogged
    assert engine.disagreed == 19 * 16
    engine.retire(2)
    engine.forget()
    assert engine.unlogged == range(1, 3), "iteration 2 is open"
    engine.retire()
    engine.forget()
    assert engine.unlogged == range(0) and len(engine.disagreements()) == 256
    one_each(19, 3)
    assert engine.unlogged == range(3, 4)
    engine.retire()
    engine.forget()
    assert engine.unlogged == range(0) and engine.disagreements() == []


def test_clear_to_sends_that_were_not_captured_are_no_gap() -> None:
    """A gap is of gradients."""
    job, plan = jobs(1, 1, protocol="simple")
    made = generate(job, iterations=2, seed=6)
    announced, data = (writes(made.packets, qpns[0]) for qpns in (job.flows[0].cts_qpns, job.flows[0].qpns))
    engine = Engine(plan.engine)
    run(engine, 0, announced[:2] + announced[4:])
    assert engine.flows()["gaps"].sum() == 0
    run(engine, 0, data[:2] + data[4:8])
    assert engine.flows()["gaps"].sum() == 2


def test_clear_to_sends_of_all_threads_are_counted() -> None:
    """And one that names another sender makes the connection's sender unknown."""
    job, plan = jobs(2, 2, protocol="simple")
    made = generate(job, iterations=2, seed=6)
    announced = writes(made.packets, job.flows[0].cts_qpns[0])
    engine = Engine(plan.engine)
    for stream in (0, 1):
        run(engine, stream, announced)
    assert engine.cts_forms()[plan.engine.cts] == 2 * len(announced)
    edge = next(spec.edge for spec in plan.engine.flows if spec.qpn == job.flows[0].qpns[0])
    tag, tag_at = engine.cts_tags()[edge], 70 + plan.engine.cts.tag_at
    assert engine.feed(1, patched(tag_at, (tag + 1).to_bytes(4, "little"))(announced[-1][1]))
    assert edge in engine.cts_tags()  # of the other stream
    assert engine.feed(0, patched(tag_at, (tag + 1).to_bytes(4, "little"))(announced[-1][1]))
    assert edge not in engine.cts_tags()


@pytest.mark.parametrize("too_far", [0, 1])
def test_an_earlier_capture_goes_back_as_far_as_there_are_arenas(too_far: int) -> None:
    """Both begin in mid-stream. An iteration further back would have the arena of the one that is there."""
    job, plan = jobs(2, 1)
    first = 900 + plan.engine.arenas - 1 + too_far
    made = {iteration: generate(job, iterations=1, first_iteration=iteration, seed=6) for iteration in (900, first)}
    engine = Engine(plan.engine)
    run(engine, 1, made[first].packets)
    run(engine, 0, made[900].packets)
    kept = (first,) if too_far else (900, first)
    assert (engine.oldest, engine.missed_iteration) == (kept[0], 900 if too_far else -1)
    assert (engine.outcomes(0)["late"][0] > 0) == too_far
    for iteration in kept:
        assert engine.region(iteration)[: 4 * COUNT].tobytes() == made[iteration].reduced[iteration, 0].tobytes()
        assert engine.cells(iteration)[: COUNT // 2].all()


def test_an_iteration_lasts_from_the_earliest_packet_to_the_latest_in_whichever_order_they_come() -> None:
    job, plan = jobs(1, 1)
    packets = of_iterations(generate(job, iterations=1, seed=6), job.flows[0].qpns[0], 1)[0]
    engine = Engine(plan.engine)
    run(engine, 0, [(9000 - number, frame) for number, (_, frame) in enumerate(packets)])
    assert engine.times(0) == (9000 - len(packets) + 1, 9000)


@pytest.mark.parametrize("order", [(900, 901), (901, 900)], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_oldest_iteration_that_was_missed_is_named(threads: int, order: tuple[int, int]) -> None:
    """Two captures begin earlier than the one that was read first, whose first iteration has retired. Where several
    threads place, none goes back alone, retired or not."""
    job, plan = jobs(6, threads)
    made = {one: generate(job, iterations=1, first_iteration=one, seed=6) for one in (900, 901, 902)}
    engine = Engine(plan.engine)
    run(engine, 0, made[902].packets)
    if threads == 1:
        engine.retire()
    for stream, iteration in zip((2, 4), order, strict=True):
        run(engine, stream, made[iteration].packets)
        assert engine.outcomes(stream)["late"][0] > 0 and engine.outcomes(stream)["placed"] == (0, 0)
    assert (engine.oldest, engine.missed_iteration) == (903 if threads == 1 else 902, 900)


def test_what_never_came_is_a_gap_once_however_often_a_capture_ends() -> None:
    job, plan = jobs(1, 1)
    made = generate(job, iterations=2, seed=6)
    lost = writes(made.packets, job.flows[0].qpns[0])[3:5]
    engine = Engine(plan.engine)
    run(engine, 0, [packet for packet in made.packets if packet not in lost])
    for _ in range(3):
        assert engine.flows()["gaps"].sum() == 2
        engine.finish()
