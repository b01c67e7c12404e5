"""The state machine, one packet at a time: what a single odd packet may do, and what it may not."""

import pytest
from parser.machine import Engine

from flowcheck.rebuild.plan import plan_job
from lab.synth import Synthesis, example_job, generate
from tests.flowcheck.altered import (
    FIRST,
    LAST_IMM,
    MIDDLE,
    PAYLOAD_AT,
    Packet,
    Spot,
    destination,
    messages,
    opcode,
    payload,
    psn,
    spots,
)
from tests.flowcheck.memory_ring import MemoryRing
from tests.parser.odd_packets import feed, kinds, patched, with_psn

COUNT = 12_000
PROTOCOLS = ["ll", "ll128", "simple"]


def writes(packets: list[Packet], qpn: int) -> list[Packet]:
    """The data packets to a QP, without acknowledgements."""
    return [packets[at] for places in messages(packets, qpn) for at in places]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_late_message_is_not_placed_into_the_arena_of_a_later_iteration(protocol: str) -> None:
    """Two flows on one stream. One stops amid its last message, the other goes on until it needs that arena."""
    job = example_job(count=COUNT, protocol=protocol, mtu=1024, startup=False, rebuild=False)
    made = generate(job, iterations=3)
    qpns = [flow.qpns[0] for flow in job.flows]
    spot = spots(made, protocol, qpns[0], 0)[-1]
    engine = Engine(plan_job(job, arenas=2).engine)
    for _, frame in writes(made.packets[: spot.packets[1] + 1], qpns[0]):
        assert engine.feed(0, frame)
    fast = [frame for _, frame in writes(made.packets, qpns[1])]
    taken = 0
    while engine.feed(0, fast[taken]):
        taken += 1
    assert engine.wanted(0) == 2
    engine.retire()
    for frame in fast[taken:]:
        assert engine.feed(0, frame)
    cells, region = engine.cells(2), engine.region(2).copy()
    assert 0 < cells.sum() < COUNT // 2
    placed = engine.outcomes(0)["placed"]
    rest = [made.packets[at][1] for at in spot.packets[2:]]
    assert len(rest) > 3 and {opcode(frame) for frame in rest} == {MIDDLE, LAST_IMM}
    for frame in rest:
        assert engine.feed(0, frame)
    assert engine.outcomes(0)["late"][0] == len(rest) and engine.outcomes(0)["placed"] == placed
    assert (engine.cells(2) == cells).all() and (engine.region(2) == region).all()


@pytest.mark.parametrize("bit", [0, 1, 2, 12, 22])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_damaged_psn_moves_nothing(protocol: str, bit: int) -> None:
    """A MIDDLE of a partial sum, whose ICRC nobody would check if it came in order."""
    job = example_job(count=COUNT, protocol=protocol, mtu=1024, startup=False, rebuild=False)
    plan, made = plan_job(job), generate(job, iterations=1)
    qpn = job.flows[0].qpns[0]
    flow = [spec.qpn for spec in plan.engine.flows].index(qpn)
    partial = messages(made.packets, qpn)[0]
    assert partial[0] not in [at for spot in spots(made, protocol, qpn, 0) for at in spot.packets]
    engine = Engine(plan.engine)
    for at in partial[:3]:
        assert engine.feed(0, made.packets[at][1])
    before = engine.flow_counters(0)[flow]
    assert before["next_psn"] == 3
    frame = bytearray(made.packets[partial[3]][1])
    assert opcode(bytes(frame)) == MIDDLE and psn(bytes(frame)) == 3
    frame[53 - bit // 8] ^= 1 << bit % 8
    assert engine.feed(0, bytes(frame))
    assert engine.outcomes(0)["icrc"] == (1, 1024)
    after = engine.flow_counters(0)[flow]
    assert after == {**before, "icrc_wrong": 1}
    for at in partial[3:]:
        assert engine.feed(0, made.packets[at][1])
    assert engine.flow_counters(0)[flow]["missing"] == 0 and engine.disagreements() == []


def test_packets_with_an_anchor_after_them_only_stay_missing() -> None:
    """SIMPLE, the first packet of a message was lost, and nothing agreed before: the message's end alone vouches for
    nothing. A loss report names the place."""
    job = example_job(count=COUNT, protocol="simple", mtu=1024, startup=False, rebuild=False)
    made = generate(job, iterations=1)
    qpns = [flow.qpns[0] for flow in job.flows]
    spot = spots(made, "simple", qpns[0], 0)[0]
    engine = Engine(plan_job(job).engine)
    assert engine.feed(0, writes(made.packets, qpns[1])[0][1])  # connections begin here
    rest = [made.packets[at][1] for at in spot.packets[1:]]
    assert opcode(made.packets[spot.packets[0]][1]) == FIRST and opcode(rest[-1]) == LAST_IMM
    middles = rest[:-1]
    assert len(middles) > 3 and {opcode(frame) for frame in middles} == {MIDDLE}
    for frame in middles:
        assert engine.feed(0, frame)
    assert engine.outcomes(0)["aside"][0] == len(middles)
    assert engine.feed(0, rest[-1])
    assert engine.outcomes(0)["aside"][0] == len(middles) and engine.outcomes(0)["placed"][0] == 1
    engine.finish()
    assert engine.outcomes(0)["unanchored"][0] == len(middles) and engine.outcomes(0)["aside"][0] == 0
    size = sum(len(frame) - 58 for frame in middles)
    where = {"cause": "unanchored", "target": 1, "iteration": 0}
    losses = engine.losses()
    assert [{key: loss[key] for key in where} for loss in losses] == [where] * len(middles)
    assert (min(loss["offset"] for loss in losses), sum(loss["bytes"] for loss in losses)) == (spot.start + 1024, size)
    cells = engine.cells(0)[(spot.start + 1024) // 8 :][: size // 8]
    assert not cells.any()


def held_up(protocol: str, *, late: bool = False) -> tuple[Engine, Synthesis, Spot, list[list[int]]]:
    """A SIMPLE call, then one of `protocol`. Of iteration 1's reduced SIMPLE message, returned with the flow's messages
    after it, the first and last packet are lost: the others wait. late: they come behind all of iteration 1."""
    job = example_job(count=[COUNT, COUNT], protocol=protocol, mtu=1024, startup=False, rebuild=False, seed=4)
    job.collectives.steady[0].protocol = "simple"
    made, qpn = generate(job, iterations=3, seed=4), job.flows[0].qpns[0]
    [spot] = spots(made, "simple", qpn, 1)
    after = [places for places in messages(made.packets, qpn) if places[0] > spot.packets[-1]]
    end = after[2][0] if late else spot.packets[0]
    engine = Engine(plan_job(job).engine)
    feed(engine, [packet for at, packet in enumerate(made.packets[:end]) if at not in spot.packets])
    feed(engine, [made.packets[at] for at in spot.packets[1:-1]])
    assert engine.outcomes(0)["aside"][0] == len(spot.packets) - 2 > 2
    return engine, made, spot, after


def assert_vouched(engine: Engine, spot: Spot, waited: int, *, vouched: bool) -> None:
    """Is what waited there, or is it counted as unanchored?"""
    outcomes = engine.outcomes(0)
    assert (outcomes["aside"][0], outcomes["unanchored"][0]) == (0, 0 if vouched else waited)
    middles = engine.cells(1)[(spot.start + 1024) // 8 :][: waited * 128]
    assert middles.all() if vouched else not middles.any()
    assert [loss["cause"] for loss in engine.losses()] == ["unanchored"] * (0 if vouched else waited)


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
@pytest.mark.parametrize(("message", "packet"), [(0, 0), (1, 0), (1, -1)], ids=["partial-sum", "first", "last"])
@pytest.mark.parametrize("protocol", ["ll", "ll128"])
def test_a_right_header_beside_a_wrong_flag_vouches_for_nothing(
    protocol: str, message: int, packet: int, wrong: bool
) -> None:
    """The address or the immediate agrees with the count, and a flag of the same packet shows that the count is wrong:
    what waits may lie elsewhere too."""
    engine, made, spot, after = held_up(protocol)
    frame = made.packets[after[message][packet]][1]
    assert PAYLOAD_AT[opcode(frame)] > 54, "it has an address or an immediate"
    at = PAYLOAD_AT[opcode(frame)] + (4 if protocol == "ll" else 120)
    assert engine.feed(0, patched(at, bytes([frame[at] ^ wrong]))(frame))
    assert kinds(engine) == ["flag"] * wrong
    assert_vouched(engine, spot, len(spot.packets) - 2, vouched=not wrong)




@pytest.mark.parametrize("message", [0, 1], ids=["partial-sum", "reduced"])
@pytest.mark.parametrize("protocol", ["ll", "ll128"])
def test_a_flow_that_never_agreed_is_not_anchored(protocol: str, message: int) -> None:
    """The first packet that was seen of it has the right address and a wrong flag."""
    job = example_job(count=COUNT, protocol=protocol, mtu=1024, startup=False, rebuild=False)
    plan, made = plan_job(job), generate(job, iterations=1)
    qpn, other = (flow.qpns[0] for flow in job.flows)
    frame = made.packets[messages(made.packets, qpn)[message][0]][1]
    at = PAYLOAD_AT[opcode(frame)] + (4 if protocol == "ll" else 120)
    engine = Engine(plan.engine)
    feed(engine, writes(made.packets, other)[:1])  # connections begin here
    assert engine.feed(0, patched(at, bytes([frame[at] ^ 1]))(frame))
    assert kinds(engine) == ["flag"]
    flow = engine.flow_counters(0)[[spec.qpn for spec in plan.engine.flows].index(qpn)]
    assert (flow["state"], flow["anchored"]) == ("LOST", False)


def test_a_right_header_of_one_send_too_many_vouches_for_nothing() -> None:
    """A loop begins with the chunk that the neighbour's loop before it ended with: all was read one message off."""
    engine, made, spot, after = held_up("simple", late=True)
    frame, chunk = made.packets[after[2][0]][1], made.reduced[1, 1].tobytes()
    assert opcode(frame) == FIRST
    here = spots(made, "simple", destination(frame), 1, bucket=1)[0].start
    there = len(chunk) // 2 - here
    assert engine.feed(0, patched(PAYLOAD_AT[FIRST], chunk[there : there + 1024])(frame))
    assert kinds(engine) == ["repeated chunk"]
    assert_vouched(engine, spot, len(spot.packets) - 2, vouched=False)


# -- outages ------------------------------------------------------------------------------------------


OUTAGE = {256: 21_474_836, 1024: 85_899_345, 4096: 343_597_383}  # ns of 2^23 packets: docs/understand/wire.md, 0.34 s


@pytest.mark.parametrize("mtu", OUTAGE)
def test_an_outage_is_as_long_as_half_a_lap_of_the_psn(mtu: int) -> None:
    assert plan_job(example_job(mtu=mtu)).engine.outage_ns == OUTAGE[mtu]


@pytest.mark.parametrize(("share", "adrift"), [(0.9, False), (1.1, True)])
def test_after_an_outage_the_count_alone_is_not_believed(share: float, adrift: bool) -> None:
    """SIMPLE without clear-to-send: nothing absolute is on the wire. One packet is missing after the silence."""
    job = example_job(count=COUNT, protocol="simple", startup=False, rebuild=False)
    plan, made = plan_job(job), generate(job, iterations=3)
    qpn = job.flows[0].qpns[0]
    flow = [spec.qpn for spec in plan.engine.flows].index(qpn)
    data = writes(made.packets, qpn)
    before, after = data[: len(data) // 3], data[len(data) // 3 + 1 :]
    silence = before[-1][0] + int(share * 343_597_383) - after[0][0]
    ring, engine = MemoryRing(), Engine(plan.engine)
    ring.put(before + [(time + silence, frame) for time, frame in after])
    assert engine.run(0, ring.ring_address, 1 << 20) == (len(data) - 1, False)
    found = engine.flow_counters(0)[flow]
    assert found["adrift"] == adrift
    assert engine.outcomes(0)["unanchored"][0] == (len(after) if adrift else 0)
    assert found["packets"] == (len(before) if adrift else len(data) - 1)


def test_after_an_outage_the_packet_that_is_due_is_believed() -> None:
    job = example_job(count=COUNT, protocol="simple", startup=False, rebuild=False)
    plan, made = plan_job(job), generate(job, iterations=3)
    qpn = job.flows[0].qpns[0]
    flow = [spec.qpn for spec in plan.engine.flows].index(qpn)
    data = writes(made.packets, qpn)
    ring, engine = MemoryRing(), Engine(plan.engine)
    ring.put(data[:5] + [(time + 10**9, frame) for time, frame in data[5:]])
    engine.run(0, ring.ring_address, 1 << 20)
    found = engine.flow_counters(0)[flow]
    assert not found["adrift"] and found["packets"] == len(data)


def test_a_message_that_comes_slowly_is_no_outage() -> None:
    """From its first packet on an outage's time has passed, and from one packet to the next never so much."""
    job = example_job(count=COUNT, protocol="simple", startup=False, rebuild=False)
    plan, made = plan_job(job), generate(job, iterations=1)
    qpn = job.flows[0].qpns[0]
    flow = [spec.qpn for spec in plan.engine.flows].index(qpn)
    first, second, _lost, fourth, *_ = [made.packets[at][1] for at in messages(made.packets, qpn)[0]]
    ring, engine = MemoryRing(), Engine(plan.engine)
    step = int(0.6 * plan.engine.outage_ns)
    ring.put([(10**9 + at * step, frame) for at, frame in enumerate((first, second, fourth))])
    engine.run(0, ring.ring_address, 1 << 20)
    found = engine.flow_counters(0)[flow]
    assert not found["adrift"] and found["packets"] == 3


# -- clear-to-send --------------------------------------------------------------------------------------


def announced(first_iteration: int) -> tuple[Engine, list[bytes], list[bytes], int]:
    """An engine, a connection's data and its clear-to-sends, and which flow of the engine those are."""
    job = example_job(count=COUNT, protocol="simple", mtu=1024, startup=False, rebuild=False)
    plan, made = plan_job(job), generate(job, iterations=8, first_iteration=first_iteration)
    qpns = job.flows[0].qpns[0], job.flows[0].cts_qpns[0]
    data, frames = ([frame for _, frame in writes(made.packets, qpn)] for qpn in qpns)
    return Engine(plan.engine), data, frames, [spec.qpn for spec in plan.engine.flows].index(qpns[1])


@pytest.mark.parametrize("first_iteration", [900, 3_000_000], ids=["in-the-first-half-of-a-lap", "in-the-second"])
def test_clear_to_sends_from_before_the_capture_are_not_missing(first_iteration: int) -> None:
    """What went before the first one that was mirrored is of before the capture. One that comes after it, out of order,
    is as well; one that is not there in between is missing."""
    engine, _, frames, flow = announced(first_iteration)
    assert psn(frames[2]) - psn(frames[0]) == 2 and (psn(frames[0]) >= 2**23) == (first_iteration > 900)
    for frame in [*frames[2:5], frames[1], *frames[6:]]:
        assert engine.feed(0, frame)
    engine.finish()
    found = engine.flow_counters(0)[flow]
    assert (found["packets"], found["missing"]) == (len(frames) - 2, 1)
    assert found["out_of_order"] == found["retransmissions"] == found["duplicates"] == 0


def test_the_first_clear_to_send_is_missing_where_connections_begin() -> None:
    """The data's first packet is there, and so the capture began before the connection."""
    engine, data, frames, flow = announced(0)
    assert psn(data[0]) == 0 and engine.feed(0, data[0]) and psn(frames[2]) == 2
    for frame in frames[2:]:
        assert engine.feed(0, frame)
    engine.finish()
    assert engine.flow_counters(0)[flow]["missing"] == 2


def test_a_clear_to_send_of_an_earlier_lap_moves_nothing() -> None:
    """PSN 0 begins a new lap, and one from just before it comes after it."""
    engine, _, frames, flow = announced(0)
    assert psn(frames[0]) == 0
    for frame in [*frames[:3], with_psn(frames[0], 2**24 - 2), *frames[3:]]:
        assert engine.feed(0, frame)
    engine.finish()
    found = engine.flow_counters(0)[flow]
    assert (found["next_psn"], found["missing"], found["out_of_order"]) == (len(frames), 0, 0)


# -- what is counted of repeats, and of others -----------------------------------------------------------


def test_after_a_sender_has_gone_back_second_copies_are_the_mirrors_again() -> None:
    job = example_job(count=COUNT, mtu=1024, startup=False, rebuild=False)
    plan, qpn = plan_job(job), job.flows[0].qpns[0]
    data = [frame for _, frame in writes(generate(job, iterations=1).packets, qpn)]
    engine = Engine(plan.engine)
    for frame in [*data[:20], *data[8:22], data[21], data[23], data[22]]:
        assert engine.feed(0, frame)
    found = engine.flow_counters(0)[[spec.qpn for spec in plan.engine.flows].index(qpn)]
    assert (found["retransmissions"], found["duplicates"], found["out_of_order"]) == (12, 1, 1)


def test_a_repeat_of_what_is_too_far_back_to_know_is_a_retransmission() -> None:
    job = example_job(count=400_000, protocol="simple", mtu=256, startup=False, rebuild=False)
    plan, qpn = plan_job(job), job.flows[0].qpns[0]
    first, later = (
        writes(generate(job, iterations=1, first_iteration=number, directions="out").packets, qpn) for number in (0, 3)
    )
    engine = Engine(plan.engine)
    for _, frame in [*first[:20], later[-1], first[5]]:
        assert engine.feed(0, frame)
    found = engine.flow_counters(0)[[spec.qpn for spec in plan.engine.flows].index(qpn)]
    assert (found["retransmissions"], found["duplicates"], found["out_of_order"]) == (1, 0, 0)


def test_bytes_of_others_are_payload_where_they_are_roce_and_frames_where_not() -> None:
    job = example_job(count=COUNT, mtu=1024, startup=False, rebuild=False)
    engine, frame = Engine(plan_job(job).engine), generate(job, iterations=1).packets[0][1]
    other = frame[:47] + b"\0\0\x07" + frame[50:]
    for one in (other, other, bytes(60)):
        assert engine.feed(0, one)
    outcomes = engine.outcomes(0)
    assert (outcomes["other_roce"], outcomes["not_roce"]) == ((2, 2 * len(payload(other))), (1, 60))


@pytest.mark.parametrize(("back", "stale"), [(63, False), (64, True)])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_packet_of_a_message_too_long_ago_is_stale_and_ends_nothing(protocol: str, back: int, stale: bool) -> None:
    """An engine remembers 64 messages of a connection, of whichever iterations, the newest included."""
    job = example_job(count=[300] * 40, protocol=protocol, mtu=256, startup=False, rebuild=False)
    plan, qpn = plan_job(job), job.flows[0].qpns[0]
    made = generate(job, iterations=2)
    known = sorted({psn(made.packets[places[0]][1]): places for places in messages(made.packets, qpn)}.items())
    old = made.packets[known[5][1][1]]
    newest = known[5 + back // (2 if protocol == "simple" else 1)][1][-1]
    engine = Engine(plan.engine)
    feed(engine, [one for one in writes(made.packets[: newest + 1], qpn) if one != old])
    before = engine.outcomes(0)["stale"][0]
    feed(engine, [old])
    assert kinds(engine) == [] and (before, engine.outcomes(0)["stale"][0]) == (0, stale)


@pytest.mark.parametrize("stream", [0, 1], ids=["first-copy", "second-copy"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_witness_counts_once(protocol: str, stream: int) -> None:
    """Flags of what is kept, and headers that say a place: of packets that are placed, and of those compared."""
    job = example_job(count=COUNT + 1, protocol=protocol, mtu=1024, startup=False, rebuild=False)
    made, qpn = generate(job, iterations=2), job.flows[0].qpns[0]
    plan = plan_job(job, streams=2)
    kept = {at for iteration in (0, 1) for spot in spots(made, protocol, qpn, iteration) for at in spot.packets}
    ours = [at for at, (_, frame) in enumerate(made.packets) if destination(frame) == qpn]
    data = [at for at in ours if opcode(made.packets[at][1]) in PAYLOAD_AT]
    engine = Engine(plan.engine)
    for one in range(stream + 1):
        feed(engine, made.packets, one)
    found = engine.flow_counters(stream)[[spec.qpn for spec in plan.engine.flows].index(qpn)]
    flags = sum(at in kept for at in data) if protocol != "simple" else 0
    assert found["agreements"] == flags + sum(PAYLOAD_AT[opcode(made.packets[at][1])] > 54 for at in data)
