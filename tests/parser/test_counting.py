"""Where a flow is: PSNs counted and not counted, a place found again, iterations that open and close, packets aside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from parser.machine import NOTHING_SEEN, Engine

from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import Synthesis, example_job, generate
from tests.flowcheck.altered import (
    FIRST,
    LAST_IMM,
    MIDDLE,
    PAYLOAD_AT,
    Packet,
    altered,
    destination,
    messages,
    opcode,
    psn,
    spots,
)
from tests.flowcheck.memory_ring import MemoryRing
from tests.parser.odd_packets import (
    COUNT,
    DMA_LENGTH,
    IMMEDIATE,
    PROTOCOLS,
    VA,
    Change,
    added,
    feed,
    kinds,
    patched,
    shortened,
    traffic,
    writes,
)

# -- the count -----------------------------------------------------------------------------------------


def numbers(engine: Engine, plan: JobPlan, qpn: int) -> dict:
    return engine.flow_counters(0)[[spec.qpn for spec in plan.engine.flows].index(qpn)]


def test_second_copies_and_retransmissions_are_told_apart() -> None:
    job, plan, made = traffic("ll")
    qpn = job.flows[0].qpns[0]
    data = writes(made.packets, qpn)[:20]
    engine = Engine(plan.engine)
    for packet in data:  # a mirror that delivers everything twice
        feed(engine, [packet, packet])
    found = numbers(engine, plan, qpn)
    assert (found["duplicates"], found["retransmissions"], found["out_of_order"]) == (20, 0, 0)
    feed(engine, data[8:])  # a sender that goes back 12 packets
    found = numbers(engine, plan, qpn)
    assert (found["duplicates"], found["retransmissions"], found["missing"]) == (20, 12, 0)


@pytest.mark.parametrize("order", ["in-order", "swapped"])
def test_what_never_came_is_counted_for_good(order: str) -> None:
    """Three PSNs, of which 16,384 others come after: too far back to come again. Both ways through the engine."""
    job = example_job(count=1 << 20, protocol="simple", mtu=256, startup=False, rebuild=False)
    plan, made = plan_job(job), generate(job, iterations=3)
    qpn = job.flows[0].qpns[0]
    data = writes(made.packets, qpn)
    assert len(data) > 18_000
    wanted = [packet for at, packet in enumerate(data) if at not in (5, 70, 71)]
    if order == "swapped":
        wanted[200:] = [packet for at in range(200, len(wanted) - 1, 2) for packet in (wanted[at + 1], wanted[at])]
    engine = Engine(plan.engine)
    feed(engine, wanted[:100])
    assert numbers(engine, plan, qpn)["missing"] == 0 and engine.flows()["gaps"].sum() == 3  # they may still come
    feed(engine, wanted[100:17_000])
    assert numbers(engine, plan, qpn)["missing"] == 3


def test_a_gap_longer_than_the_history_is_counted() -> None:
    job = example_job(count=1 << 20, protocol="simple", mtu=256, startup=False, rebuild=False)
    plan, made = plan_job(job), generate(job, iterations=3)
    qpn = job.flows[0].qpns[0]
    data = writes(made.packets, qpn)
    engine = Engine(plan.engine)
    feed(engine, [*data[:100], *data[17_100:17_200]])
    engine.finish()
    assert numbers(engine, plan, qpn)["missing"] == 17_000


@pytest.mark.parametrize("after", [16_383, 16_384])
def test_what_comes_as_late_as_the_history_reaches_is_no_repeat(after: int) -> None:
    """16,384 PSNs are remembered. One packet more, and nobody knows whether it has come before."""
    job = example_job(count=1 << 20, protocol="simple", mtu=256, startup=False, rebuild=False)
    plan, made = plan_job(job), generate(job, iterations=3)
    qpn = job.flows[0].qpns[0]
    data = writes(made.packets, qpn)
    engine = Engine(plan.engine)
    feed(engine, [*data[:100], *data[101 : 101 + after], data[100]])
    engine.finish()
    found, forgotten = numbers(engine, plan, qpn), after == 16_384
    assert (found["out_of_order"], found["retransmissions"], found["missing"]) == (not forgotten, forgotten, forgotten)


def test_a_later_lap_of_the_psn_is_not_the_beginning() -> None:
    """LL in mid-stream: its flags say where it is, though its PSN is as small as that of a young connection."""
    job = example_job(count=30_000, mtu=256, startup=False, rebuild=False)
    each = len(writes(generate(job, iterations=1).packets, job.flows[0].qpns[0]))
    first = 2**24 // each + 1
    made = generate(job, iterations=2, first_iteration=first)
    data = writes(made.packets, job.flows[0].qpns[0])
    assert 0 < psn(data[0][1]) < 1 << 16
    engine = Engine(plan_job(job).engine)
    feed(engine, made.packets)
    assert kinds(engine) == [] and engine.oldest == first
    assert engine.region(first)[:120_000].tobytes() == made.reduced[first, 0].tobytes()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_damaged_packet_does_not_say_where_a_flow_is(protocol: str) -> None:
    """Its flags, its PSN and its announced address are right. So is the undamaged one after it, which is believed."""
    job = example_job(count=30_000, protocol=protocol, mtu=1024, startup=False, rebuild=False)
    made, flow = generate(job, iterations=1, first_iteration=900), job.flows[0]
    plan, (_, frame) = plan_job(job), writes(made.packets, flow.qpns[0])[0]
    engine = Engine(plan.engine)
    feed(engine, writes(made.packets, flow.cts_qpns[0])[:2])
    for last, anchored in ((frame[-1] ^ 1, 0), (frame[-1], 1)):
        assert engine.feed(0, frame[:-1] + bytes([last]))
        found = numbers(engine, plan, flow.qpns[0])
        assert (found["packets"], found["anchored"]) == (anchored, anchored)
        assert engine.outcomes(0)["unanchored"][0] == 1


@pytest.mark.parametrize("change", [shortened(16), added(50, 4, 4096)], ids=["length", "psn"])
def test_a_step_alone_does_not_say_where_a_flow_is(change: Change) -> None:
    """The flags name a message; its length and PSN must be this packet's."""
    job = example_job(count=30_000, mtu=1024, startup=False, rebuild=False)
    made = generate(job, iterations=1, first_iteration=900)
    qpn = job.flows[0].qpns[0]
    frame = next(f for _, f in made.packets if destination(f) == qpn and opcode(f) == FIRST)
    engine = Engine(plan_job(job).engine)
    assert engine.feed(0, change(frame))
    assert engine.outcomes(0)["unanchored"][0] == 1
    engine = Engine(plan_job(job).engine)
    assert engine.feed(0, frame)
    assert engine.outcomes(0)["unanchored"][0] == 0


def test_losing_the_first_iteration_is_not_a_start_in_mid_stream() -> None:
    """The job's beginning was seen, its first gradients were not: they are missing, not before the capture."""
    job = example_job(count=COUNT, mtu=1024)
    plan, made = plan_job(job), generate(job, iterations=2)
    later = generate(job, iterations=1, first_iteration=1)
    engine = Engine(plan.engine)
    begun = [packet for packet in made.packets if packet[0] < later.packets[0][0]]
    feed(engine, begun[:5])
    feed(engine, later.packets)
    assert engine.oldest == 0 and engine.begun == 1


# -- iterations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_arena_begins_its_next_iteration_empty(protocol: str, streams: int) -> None:
    """Two arenas, the third iteration lost packets: what the first one left is not taken for it."""
    job = example_job(count=COUNT, protocol=protocol, mtu=1024, startup=False, rebuild=False)
    plan, made = plan_job(job, streams=streams, arenas=2), generate(job, iterations=3)
    qpn = job.flows[0].qpns[0]
    spot = spots(made, protocol, qpn, 2)[0]
    start = spots(made, protocol, qpn, 0)[0]
    engine = Engine(plan.engine)
    odd = list(made.packets)  # differs from the other mirror's copy, in iteration 0 only
    if streams == 2:
        frame = odd[start.packets[0]][1]
        at = PAYLOAD_AT[opcode(frame)]
        odd[start.packets[0]] = (0, patched(at, bytes([frame[at] ^ 1]))(frame))
    lost = set(spot.packets[1:4])
    for at in range(len(made.packets)):
        for stream in range(streams):
            frame = (odd if stream == 0 else made.packets)[at][1]
            if at not in lost and not engine.feed(stream, frame):
                assert engine.copies(0)[0] == streams - 1
                engine.retire()
                assert engine.feed(stream, frame)
    engine.finish()
    missing = ~engine.cells(2)[: COUNT // 2]
    assert 0 < missing.sum() * 8 <= 3 * 1024
    first = int(np.flatnonzero(missing)[0]) * 8
    assert spot.start < first < spot.start + 2048
    assert engine.copies(2)[0] == 0


def test_the_slowest_flow_says_what_is_past() -> None:
    """A flow that ended holds nothing up."""
    job, plan, made = traffic("ll")
    fast, slow = (flow.qpns[0] for flow in job.flows)
    engine = Engine(plan.engine)
    assert engine.past(0) == NOTHING_SEEN
    feed(engine, writes(made.packets, slow)[:2])
    assert engine.past(0) == 0
    ahead = writes(made.packets, fast)
    feed(engine, ahead[:-2])
    assert engine.past(0) == 0
    odd = next(f for _, f in made.packets if destination(f) == slow and opcode(f) == LAST_IMM)
    assert engine.feed(0, added(IMMEDIATE, 4, 1)(odd)) and len(kinds(engine)) == 1
    assert engine.past(0) == 1


def test_disagreements_of_open_iterations_are_kept() -> None:
    job, plan, made = traffic("ll")
    spot = spots(made, "ll", job.flows[0].qpns[0], 1)[0]
    engine = Engine(plan.engine)
    feed(engine, made.packets[: spot.packets[0]])
    assert engine.feed(0, added(DMA_LENGTH, 4, 16)(made.packets[spot.packets[0]][1]))
    engine.retire()
    engine.forget()
    assert [entry["iteration"] for entry in engine.disagreements()] == [1]
    engine.retire()
    engine.forget()
    assert engine.disagreements() == []


def test_losses_of_open_iterations_are_kept() -> None:
    job, plan, made = traffic("ll", 3)
    lost = {
        iteration: spots(made, "ll", job.flows[0].qpns[0], iteration)[0].packets[1] for iteration in range(3)
    }
    engine = Engine(replace(plan.engine, arenas=4))
    feed(engine, [(0, frame[:-1] + bytes([frame[-1] ^ 1])) if at in lost.values() else (0, frame)
                  for at, (_, frame) in enumerate(made.packets)])
    for retired in range(4):
        assert [(one["cause"], one["iteration"]) for one in engine.losses()] == [
            ("icrc", iteration) for iteration in range(retired, 3)
        ]
        engine.retire()
        engine.forget()


@pytest.mark.parametrize("size", [64, 256])
def test_a_ring_goes_round_and_a_blocked_packet_stays_in_it(size: int) -> None:
    job = example_job(count=COUNT, mtu=1024, startup=False, rebuild=False)
    plan, made = plan_job(job, arenas=2), generate(job, iterations=4)
    ring, engine, at, truth = MemoryRing(size), Engine(plan.engine), 0, made.reduced
    while at < len(made.packets) or ring.waiting:
        room = min(size - ring.waiting, len(made.packets) - at)
        ring.put(made.packets[at : at + room])
        at += room
        _, blocked = engine.run(0, ring.ring_address, 1 << 20)
        if blocked:
            assert engine.wanted(0) == engine.oldest + 2
            assert engine.region(engine.oldest)[: 4 * COUNT].tobytes() == truth[engine.oldest, 0].tobytes()
            engine.retire()
    assert engine.oldest == 2 and sum(n for n, _ in engine.outcomes(0).values()) == len(made.packets)
    for iteration in (2, 3):
        assert engine.region(iteration)[: 4 * COUNT].tobytes() == truth[iteration, 0].tobytes()
    assert not engine.flows()["gaps"].any()


@pytest.mark.parametrize("shift", [0, 1024, -1024])
def test_an_announced_address_says_where_a_flow_is(shift: int) -> None:
    """SIMPLE in mid-stream: the clear-to-send's index, this packet's PSN and its place in the buffer must fit."""
    job = example_job(count=30_000, protocol="simple", mtu=1024, startup=False, rebuild=False)
    plan, made = plan_job(job), generate(job, iterations=1, first_iteration=900)
    at = messages(made.packets, job.flows[0].qpns[0])[0][0]
    engine = Engine(plan.engine)
    feed(engine, [packet for packet in made.packets[:at] if destination(packet[1]) != job.flows[0].qpns[0]])
    before = engine.outcomes(0)["unanchored"][0]
    assert engine.feed(0, added(VA, 8, shift)(made.packets[at][1]))
    assert engine.outcomes(0)["unanchored"][0] == before + (shift != 0)


def test_one_announcement_alone_does_not_say_the_lap() -> None:
    """SIMPLE in mid-stream. A clear-to-send has a number that is 2^37 too high. That message has the same PSN, and all
    iterations up to there would close. The message after it, announced as its neighbours are, is found."""
    job = example_job(count=30_000, protocol="simple", mtu=1024, startup=False, rebuild=False)
    plan, made = plan_job(job), generate(job, iterations=2, first_iteration=900)
    flow = job.flows[0]
    first, second = messages(made.packets, flow.qpns[0])[:2]
    engine = Engine(plan.engine)
    announced = writes(made.packets[: first[0]], flow.cts_qpns[0])
    number_at = 70 + plan.engine.cts.number_at
    wanted = next(f for _, f in announced if f[70:78] == made.packets[first[0]][1][VA : VA + 8][::-1])
    feed(engine, [(0, f if f != wanted else patched(number_at + 4, b"\x20")(f)) for _, f in announced])
    assert wanted[number_at + 4] == 0
    assert engine.feed(0, made.packets[first[0]][1])
    assert engine.outcomes(0)["unanchored"][0] == 1 and engine.begun == -1
    feed(engine, [made.packets[at] for at in second])
    assert engine.begun == 900 and engine.outcomes(0)["unanchored"][0] == 1


@pytest.mark.parametrize("announced", [2**31 - 4, 2**31], ids=["before", "after"])
@pytest.mark.parametrize("first", [2**31 - 2, 2**31], ids=["before", "after"])
def test_a_step_is_of_the_lap_that_was_announced(first: int, announced: int) -> None:
    """An LL flag has 32 bits of its step. The newest clear-to-send, a few steps from it, says which lap they are of.

    Two steps are an iteration here. A lap earlier or later the same flags are of messages at other PSNs.
    """
    job = example_job(count=3000, startup=False, rebuild=False)
    before, made = (generate(job, iterations=2, first_iteration=iteration) for iteration in (announced, first))
    engine = Engine(plan_job(job).engine)
    feed(engine, [packet for flow in job.flows for packet in writes(before.packets, flow.cts_qpns[0])])
    feed(engine, [packet for flow in job.flows for packet in writes(made.packets, flow.qpns[0])])
    assert kinds(engine) == [] and engine.oldest == first and engine.outcomes(0)["unanchored"] == (0, 0)
    for iteration in (first, first + 1):
        assert engine.region(iteration)[:12_000].tobytes() == made.reduced[iteration, 0].tobytes()


def test_a_damaged_packet_does_not_begin_a_connection() -> None:
    """SIMPLE, met in a later lap of the PSN. One damaged bit of its first packet makes PSN 512 read 0."""
    job = example_job(ranks=4, count=1 << 19, protocol="simple", startup=False, rebuild=False)
    made = generate(job, iterations=1, first_iteration=2**24 // 768 + 1, ports=[0], directions="out")
    data = writes(made.packets, next(flow.qpns[0] for flow in job.flows if flow.src == 0))
    frame = data[0][1]
    assert psn(frame) == 512
    engine = Engine(plan_job(job).engine)
    feed(engine, [(0, frame[:52] + bytes([frame[52] ^ 2]) + frame[53:]), *data[1:]])
    outcomes = engine.outcomes(0)
    assert outcomes["placed"] == (0, 0) and (outcomes["icrc"][0], outcomes["unanchored"][0]) == (1, len(data) - 1)


# -- packets aside -------------------------------------------------------------------------------------


def simple_flow(iterations: int) -> tuple[JobPlan, Synthesis, Engine, list[Packet]]:
    """SIMPLE; an engine that has seen connections begin, and the data of a flow that it has not met yet."""
    job, plan, made = traffic("simple", iterations)
    engine = Engine(replace(plan.engine, arenas=64))
    feed(engine, writes(made.packets, job.flows[1].qpns[0])[:1])
    return plan, made, engine, writes(made.packets, job.flows[0].qpns[0])


def same_as_truth(engine: Engine, made: Synthesis, iterations: int) -> None:
    """Of every cell that is there."""
    for iteration in range(iterations):
        cells, region = engine.cells(iteration)[: COUNT // 2], engine.region(iteration)[: 4 * COUNT]
        truth = np.frombuffer(made.reduced[iteration, 0].tobytes(), np.uint8)
        assert (region[np.repeat(cells, 8)] == truth[np.repeat(cells, 8)]).all()


def test_packets_after_the_anchor_stay_aside() -> None:
    """The end of one message comes late, when those of the next, whose beginning was lost, are there already."""
    _, _, engine, data = simple_flow(2)
    starts = [at for at, (_, f) in enumerate(data) if opcode(f) == FIRST]
    third = starts[2]
    feed(engine, data[: starts[1]])
    end = max(at for at in range(starts[1], third) if opcode(data[at][1]) == LAST_IMM)
    feed(engine, [*data[starts[1] : end], *data[end + 1 : third]])
    before = engine.outcomes(0)["aside"][0]
    feed(engine, data[starts[3] + 1 : starts[3] + 4])
    aside = engine.outcomes(0)["aside"][0]
    assert aside == before + 3
    feed(engine, [data[end]])
    assert engine.outcomes(0)["aside"][0] == aside


def test_two_anchors_after_a_packet_are_not_one_before_it() -> None:
    """A run died at its beginning, another followed on its queue pairs. MIDDLEs of the first were seen; of the second,
    whose packets at those PSNs were lost, the message's end and what follows, which agree. They vouch for their own."""
    job, _, made = traffic("simple")
    died = generate(job, iterations=1, seed=5)
    _, _, engine, data = simple_flow(2)
    spot = spots(died, "simple", job.flows[0].qpns[0], 0)[0]
    strays = [died.packets[at] for at in spot.packets[1:-1]]
    feed(engine, strays)
    assert engine.outcomes(0)["aside"][0] == len(strays) > 3
    feed(engine, [packet for packet in data if psn(packet[1]) > psn(strays[-1][1])])
    assert kinds(engine) == []
    engine.finish()
    outcomes, losses = engine.outcomes(0), engine.losses()
    assert outcomes["unanchored"][0] == len(strays) and outcomes["aside"] == (0, 0)
    assert {loss["cause"] for loss in losses} == {"unanchored"}
    assert sum(loss["bytes"] for loss in losses) == outcomes["unanchored"][1]
    same_as_truth(engine, made, 2)


def test_an_anchor_before_a_packet_may_come_after_it() -> None:
    """PSN 24, the end of the message before, comes late. With the next anchor there is one before and one after."""
    _, made, engine, data = simple_flow(2)
    feed(engine, [*data[26:30], data[48], data[24]])
    assert engine.outcomes(0)["aside"][0] == 4
    feed(engine, [data[49]])
    assert engine.outcomes(0)["aside"][0] == 0 and engine.outcomes(0)["placed"][0] == 5
    same_as_truth(engine, made, 2)


def test_a_witness_that_disagrees_gives_up_what_is_aside() -> None:
    _, _, engine, data = simple_flow(2)
    feed(engine, [*data[:25], *data[26:30]])
    assert engine.outcomes(0)["aside"][0] == 4
    feed(engine, [(0, patched(IMMEDIATE, bytes(4))(data[48][1]))])
    assert kinds(engine) == ["immediate"]
    assert engine.outcomes(0)["aside"] == (0, 0) and engine.outcomes(0)["unanchored"] == (4, 4096)
    assert sum(loss["bytes"] for loss in engine.losses() if loss["cause"] == "unanchored") == 4096


def test_packets_aside_are_given_up_when_their_message_is_too_long_ago() -> None:
    """Only MIDDLEs of 80 messages were seen. Then two anchors agree: nothing is placed where it does not belong."""
    _, made, engine, data = simple_flow(60)
    middles = [packet for packet in data if opcode(packet[1]) == MIDDLE]
    cut = middles.index(next(p for p in middles if psn(p[1]) > psn(data[-1][1]) * 2 // 3))
    feed(engine, middles[:cut])
    feed(engine, [packet for packet in data if psn(packet[1]) > psn(middles[cut][1])])
    same_as_truth(engine, made, 60)
    given_up = engine.outcomes(0)["unanchored"]
    assert given_up[0] > 0 and sum(loss["bytes"] for loss in engine.losses()) == given_up[1]
    assert not any(engine.cells(iteration).any() for iteration in range(39)), "nothing agreed before these"


def test_packets_that_find_no_room_aside_are_lost_by_name() -> None:
    """Only MIDDLEs were seen, more than there is room for: what is lost is known, and why."""
    job = example_job(count=700_000, protocol="simple", mtu=256, startup=False, rebuild=False, seed=4)
    made, engine = generate(job, iterations=1, seed=4), Engine(plan_job(job).engine)
    feed(engine, writes(made.packets, job.flows[1].qpns[0])[:1])
    feed(engine, [p for p in writes(made.packets, job.flows[0].qpns[0]) if opcode(p[1]) == MIDDLE])
    outcomes, losses = engine.outcomes(0), engine.losses()
    assert outcomes["aside"][0] == 4096 and outcomes["unanchored"][0] > 500
    assert {loss["cause"] for loss in losses} == {"unanchored"} and len(losses) == outcomes["unanchored"][0]
    assert sum(loss["bytes"] for loss in losses) == outcomes["unanchored"][1]


def test_an_earlier_capture_read_second_opens_its_iterations() -> None:
    """Both begin in mid-stream. While nothing is closed the earlier one's iterations are taken; then they are named."""
    job = example_job(count=30_000, mtu=1024, startup=False, rebuild=False)
    made, later = generate(job, iterations=1, first_iteration=900), generate(job, iterations=1, first_iteration=901)
    engine = Engine(plan_job(job, streams=2).engine)
    feed(engine, later.packets, stream=1)
    assert engine.oldest == 901
    feed(engine, made.packets, stream=0)
    assert (engine.oldest, engine.missed_iteration) == (900, -1) and engine.outcomes(0)["late"] == (0, 0)
    for iteration, one in ((900, made), (901, later)):
        assert engine.region(iteration)[:120_000].tobytes() == one.reduced[iteration, 0].tobytes()
    engine = Engine(plan_job(job, streams=2).engine)
    feed(engine, later.packets, stream=1)
    engine.retire()
    feed(engine, made.packets, stream=0)
    assert (engine.oldest, engine.missed_iteration) == (902, 900) and engine.outcomes(0)["late"][0] > 0
    engine = Engine(plan_job(job, streams=2).engine)
    feed(engine, later.packets, stream=1)
    engine.close()  # it is being judged: going back would have 900 retire in its place
    feed(engine, made.packets, stream=0)
    assert (engine.oldest, engine.missed_iteration) == (901, 900) and engine.outcomes(0)["late"][0] > 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_two_connections_of_one_mirror_compare(protocol: str) -> None:
    """Three ranks in a ring: the same reduced bytes go by on two connections, with one byte changed on the second."""
    job = example_job(ranks=3, count=COUNT, protocol=protocol, mtu=1024, startup=False, rebuild=False, seed=4)
    made = generate(job, iterations=1, seed=4)
    known = [spot for flow in job.flows for spot in spots(made, protocol, flow.qpns[0], 0)]
    one, two = next(
        (a, b) for a in known for b in known if a.start == b.start and a.packets[-1] < b.packets[0]
    )
    assert destination(made.packets[one.packets[0]][1]) != destination(made.packets[two.packets[0]][1])
    for packet in (0, 1, 2):
        other, offset = altered(made.packets, two, packet, byte=6)
        engine = Engine(plan_job(job).engine)
        feed(engine, other)
        assert engine.copies(0)[:2] == (1, offset)
        assert engine.region(0)[: 4 * COUNT].tobytes() == made.reduced[0, 0].tobytes()
