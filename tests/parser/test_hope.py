"""May a packet that is missing still come? By ACKs where they are seen, else by what has followed it."""

import functools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser.machine import NOTHING_SEEN, Engine

from flowcheck.job.model import Job
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import Synthesis, TransportOptions, example_job, generate
from parser.engine_config import Target
from tests.flowcheck.altered import (
    FIRST,
    PAYLOAD_AT,
    Packet,
    destination,
    messages,
    opcode,
    payload,
    psn,
    sealed,
    spots,
)
from tests.flowcheck.memory_ring import MemoryRing
from tests.parser.odd_packets import with_psn, writes

COUNT = 40_000
ACK = 17
PROTOCOLS = ["ll", "ll128", "simple"]


@functools.cache
def traffic(protocol: str) -> tuple[Job, JobPlan, Synthesis]:
    job = example_job(count=COUNT, protocol=protocol, mtu=1024, startup=False, rebuild=False, seed=9)
    return job, plan_job(job), generate(job, iterations=4, seed=9)


def spot(protocol: str, message: int = -1) -> tuple[int, list[int]]:
    """A connection's QP number, and where the packets of a message lie that it brings reduced in iteration 1."""
    job, _, made = traffic(protocol)
    qpn = job.flows[0].qpns[0]
    return qpn, list(spots(made, protocol, qpn, 1)[message].packets)


def is_ack(frame: bytes) -> bool:
    return opcode(frame) == ACK


def after(engine: Engine, packets: list[Packet], *, iteration: int = 1) -> list[str]:
    """What is said of an iteration after each packet, from the first at which the stream is past it."""
    said = []
    for _, frame in packets:
        assert engine.feed(0, frame)
        if engine.past(0) > iteration:
            said.append(engine.hope(0, iteration))
    return said


def ack_of(packets: list[Packet], qpn: int, protocol: str = "ll") -> bytes:
    """An ACK of the connection's data."""
    job = traffic(protocol)[0]
    assert job.flows[0].qpns[0] == qpn
    return next(frame for _, frame in packets if is_ack(frame) and destination(frame) == job.flows[0].cts_qpns[0])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_packet_that_is_acknowledged_does_not_come_again(protocol: str) -> None:
    _, plan, made = traffic(protocol)
    _, places = spot(protocol)
    lost = [packet for at, packet in enumerate(made.packets) if at != places[1]]
    engine = Engine(plan.engine)
    said = after(engine, lost)
    assert engine.hope(0, 2) == "all_came", "it is of another iteration"
    assert set(said) == {"may_come", "acknowledged"} or set(said) == {"acknowledged"}
    assert said == sorted(said, key=["may_come", "acknowledged"].index)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_where_nothing_is_missing_nothing_is_waited_for(protocol: str) -> None:
    _, plan, made = traffic(protocol)
    assert set(after(Engine(plan.engine), made.packets)) == {"all_came"}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_without_acks_a_step_of_the_ring_has_to_follow(protocol: str) -> None:
    """The last packet but one of a connection's last message is lost: as many as the message has must follow."""
    _, plan, made = traffic(protocol)
    qpn, places = spot(protocol)
    lost = made.packets[places[-2]][1]
    engine, passed, said = Engine(plan.engine), -1, []
    for at, (_, frame) in enumerate(made.packets):
        if at == places[-2] or is_ack(frame):
            continue
        assert engine.feed(0, frame)
        if destination(frame) == qpn and psn(frame) > psn(lost):
            passed = psn(frame) - psn(lost)
        if engine.past(0) > 1 and passed > 0:
            said.append((passed, engine.hope(0, 1)))
    decided = min(passed for passed, hope in said if hope == "passed")
    step = plan.engine.edges[0].calls[-1].lane.slices * len(places)
    assert decided >= step and {hope for passed, hope in said if passed < step} <= {"may_come"}
    assert {hope for passed, hope in said if passed >= step} == {"passed"}


@pytest.mark.parametrize("patience", [1, 7])
def test_how_many_packets_have_to_follow_can_be_set(patience: int) -> None:
    job, _, made = traffic("ll")
    plan = plan_job(job)
    engine = Engine(replace(plan.engine, patience=patience))
    _, places = spot("ll")
    packets = [one for at, one in enumerate(made.packets) if at != places[-1] and not is_ack(one[1])]
    said = []
    for _, frame in packets:
        engine.feed(0, frame)
        if engine.past(0) > 1:
            said.append(engine.hope(0, 1))
    assert said == sorted(said, key=["may_come", "passed"].index) and said[-1] == "passed"
    assert (said[0] == "may_come") or patience == 1


def open_hole(patience: int = 0) -> tuple[Engine, list[Packet], bytes, int]:
    """An engine past iteration 1, whose ACKs it has seen up to there; a packet of its last message was lost, and no ACK
    of that message has come. With the packets that follow, the one that was lost, and the connection's QP."""
    _, plan, made = traffic("ll")
    qpn, places = spot("ll")
    lost = made.packets[places[1]][1]
    engine = Engine(replace(plan.engine, patience=patience))
    back = {flow.qpns[0]: flow.cts_qpns[0] for flow in traffic("ll")[0].flows}[qpn]
    later = psn(made.packets[places[0]][1])
    for at, (_, frame) in enumerate(made.packets):
        if at == places[1] or (is_ack(frame) and destination(frame) == back and psn(frame) >= later):
            continue
        engine.feed(0, frame)
        if engine.past(0) > 1:
            return engine, made.packets[at + 1 :], lost, qpn
    raise AssertionError("the stream is never past iteration 1")


def test_a_retransmission_that_comes_before_the_ack_heals() -> None:
    engine, _, lost, _ = open_hole()
    cells = COUNT // 2
    assert engine.hope(0, 1) == "may_come" and not engine.complete(1, cells)
    assert engine.feed(0, lost) and engine.complete(1, cells)
    assert engine.hope(0, 1) == "all_came"


def test_a_forged_ack_of_what_was_not_sent_proves_nothing() -> None:
    engine, _, lost, qpn = open_hole()
    ack = ack_of(traffic("ll")[2].packets, qpn)
    for ahead in (100, 5000, 1 << 22, (1 << 23) - 1, -psn(lost) - 1, -psn(lost) - 1000):  # PSNs before 0 too
        engine.feed(0, with_psn(ack, (psn(lost) + ahead) % (1 << 24)))
        assert engine.hope(0, 1) == "may_come"
    for frame in (with_psn(ack, psn(lost))[:-4] + bytes(4), with_psn(ack, psn(lost) - 1)):  # damaged; before it
        engine.feed(0, frame)
        assert engine.hope(0, 1) == "may_come"
    refusal = with_psn(ack, psn(lost) + 1)
    engine.feed(0, sealed(refusal[:54] + b"\x60" + refusal[55:]))  # a NAK
    assert engine.hope(0, 1) == "may_come"
    engine.feed(0, with_psn(ack, psn(lost)))
    assert engine.hope(0, 1) == "acknowledged"


def test_an_ack_of_the_packet_before_it_is_not_its_own() -> None:
    """The first ACK of the connection that is seen at all."""
    _, plan, made = traffic("ll")
    qpn, places = spot("ll")
    lost, ack, engine = psn(made.packets[places[1]][1]), ack_of(made.packets, qpn), Engine(plan.engine)
    back = destination(ack)
    for at, (_, frame) in enumerate(made.packets):
        if at != places[1] and not (is_ack(frame) and destination(frame) == back):
            engine.feed(0, frame)
        if engine.past(0) > 1:
            break
        assert engine.past(0) == NOTHING_SEEN or engine.hope(0, 1) == "may_come", "a connection is not past it"
    engine.feed(0, with_psn(ack, lost - 1))
    assert engine.hope(0, 1) == "may_come"
    engine.feed(0, with_psn(ack, lost))
    assert engine.hope(0, 1) == "acknowledged"


def test_an_ack_of_the_packet_that_is_sent_next_proves_nothing() -> None:
    engine, _, _, qpn = open_hole()
    flow = [spec.qpn for spec in engine.config.flows].index(qpn)
    following = engine.flow_counters(0)[flow]["next_psn"]
    engine.feed(0, with_psn(ack_of(traffic("ll")[2].packets, qpn), following % (1 << 24)))
    assert engine.hope(0, 1) == "may_come"


def unacknowledged(rest: list[Packet], qpn: int) -> list[Packet]:
    """Packets without the ACKs of a connection."""
    back = {flow.qpns[0]: flow.cts_qpns[0] for flow in traffic("ll")[0].flows}[qpn]
    return [packet for packet in rest if not (is_ack(packet[1]) and destination(packet[1]) == back)]


def test_where_acks_stay_away_a_step_slot_that_is_filled_again_decides() -> None:
    """NCCL fills it only when the write before was acknowledged: eight steps after. Where no ACK was seen, one step
    is enough."""
    engine, rest, lost, qpn = open_hole()
    said, steps = [], 0
    for _, frame in unacknowledged(rest, qpn):
        assert engine.feed(0, frame)
        if destination(frame) == qpn and opcode(frame) in PAYLOAD_AT:  # a flag is the step, and one more
            steps = int.from_bytes(payload(frame)[4:8], "little") - int.from_bytes(payload(lost)[4:8], "little")
        said.append((steps, engine.hope(0, 1)))
    assert {hope for steps, hope in said if steps < 8} == {"may_come"}
    assert {hope for steps, hope in said if steps >= 8} == {"passed"}


@pytest.mark.parametrize("patience", [40, 41])
def test_a_setting_counts_packets_whether_or_not_acks_are_seen(patience: int) -> None:
    engine, rest, lost, qpn = open_hole(patience)
    said, followed = [], 0
    for _, frame in unacknowledged(rest, qpn):
        assert engine.feed(0, frame)
        if destination(frame) == qpn and opcode(frame) in PAYLOAD_AT:
            followed = psn(frame) - psn(lost)
        said.append((followed, engine.hope(0, 1)))
    assert {hope for followed, hope in said if 0 < followed < patience} == {"may_come"}
    assert {hope for followed, hope in said if followed >= patience} == {"passed"}


def test_what_waits_aside_may_still_be_placed() -> None:
    """SIMPLE: a message's first packet was lost, and what follows it has no witness yet."""
    _, plan, made = traffic("simple")
    made_for, places = spot("simple")
    engine = Engine(plan.engine)
    for at, (_, frame) in enumerate(made.packets[: places[-1]]):
        if at != places[0] and not is_ack(frame):
            engine.feed(0, frame)
    assert engine.outcomes(0)["aside"][0] > 0
    assert engine.hope(0, 1) == "may_come"
    ack = ack_of(made.packets, made_for, "simple")
    engine.feed(0, with_psn(ack, psn(made.packets[places[-2]][1])))
    assert engine.hope(0, 1) == "may_come", "what is missing is acknowledged, and yet they wait"


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    protocol=st.sampled_from(PROTOCOLS), ranks=st.integers(2, 4), channels=st.sampled_from([1, 2]),
    loss=st.sampled_from([0.0, 0.02, 0.1]), retransmit=st.sampled_from([0.0, 0.3]), qps=st.sampled_from([1, 2]),
    seed=st.integers(0, 999),
)
def test_what_was_acknowledged_never_comes(  # type: ignore[no-untyped-def]
    protocol, ranks, channels, loss, retransmit, qps, seed
) -> None:
    """Go-back-N on the link, losses of the mirror: once all that is missing is acknowledged, nothing new is placed."""
    job = example_job(
        ranks=ranks, channels=channels, count=6000, protocol=protocol, mtu=1024, qps=qps, startup=False, rebuild=False,
        seed=seed,
    )
    made = generate(job, iterations=3, seed=seed, loss=loss, transport=TransportOptions(retransmit=retransmit))
    plan = plan_job(job)
    engine, known = Engine(plan.engine), {}
    for _, frame in made.packets:
        assert engine.feed(0, frame)
        past = engine.past(0)
        for iteration in range(1, min(past, 3)):  # in the first some connections may not have begun
            if iteration not in known and engine.hope(0, iteration) in ("acknowledged", "all_came"):
                known[iteration] = engine.covered(iteration)
    for iteration, covered in known.items():
        assert engine.covered(iteration) == covered


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_missing_of_a_partial_sum_is_not_waited_for(protocol: str) -> None:
    """Nobody keeps it: the iteration has all that it needs."""
    job, plan, made = traffic(protocol)
    qpn = job.flows[0].qpns[0]
    reduced = {at for found in spots(made, protocol, qpn, 1) for at in found.packets}
    all_messages = messages(made.packets, qpn)
    each = len(all_messages) // 4
    partial = next(places for places in all_messages[each : 2 * each] if places[0] not in reduced)
    engine = Engine(plan.engine)
    said = after(engine, [packet for at, packet in enumerate(made.packets) if at != partial[-2]])
    assert set(said) == {"all_came"} and engine.covered(1) == COUNT // 2
    flow = [spec.qpn for spec in plan.engine.flows].index(qpn)
    engine.finish()
    assert engine.flow_counters(0)[flow]["missing"] == 1


def test_what_came_before_a_large_gap_has_come() -> None:
    """SIMPLE. An iteration is whole, and of the next three only the last packet is there: it is more PSNs behind them
    than the engine remembers one by one."""
    job = example_job(count=400_000, protocol="simple", mtu=256, startup=False, rebuild=False, seed=9)
    qpn = job.flows[0].qpns[0]
    first, later = (
        writes(generate(job, iterations=1, first_iteration=number, directions="out", seed=9).packets, qpn)
        for number in (0, 3)
    )
    engine = Engine(plan_job(job).engine)
    for _, frame in [*first, later[-1]]:
        assert engine.feed(0, frame)
    assert psn(later[-1][1]) - psn(first[-1][1]) > 16_384
    assert (engine.hope(0, 0), engine.hope(0, 2)) == ("all_came", "passed")


def test_an_ack_while_nobody_knows_the_lap_proves_nothing() -> None:
    """LL. A packet of a message is missing, then comes a silence in which half of the PSN space could have passed: a
    packet of some lap, which leads nowhere, and an ACK of some lap. The message goes on where it was."""
    _, plan, made = traffic("ll")
    qpn, places = spot("ll")
    data = [packet for packet in made.packets if not is_ack(packet[1]) and packet != made.packets[places[1]]]
    silence, lost, last = 10**9, psn(made.packets[places[1]][1]), data.index(made.packets[places[-1]])
    stray, ack = (with_psn(made.packets[places[-2]][1], lost + 2**22), with_psn(ack_of(made.packets, qpn), lost))
    later = [(ns + silence, frame) for ns, frame in data[last:]]
    engine, ring = Engine(plan.engine), MemoryRing(1 << len(data).bit_length())
    ring.put([*data[:last], (later[0][0], stray), (later[0][0], ack), *later])
    while engine.past(0) <= 1:
        assert engine.run(0, ring.ring_address, 1) == (1, False)
    assert engine.outcomes(0)["unanchored"][0] == 1 and engine.hope(0, 1) == "may_come"


def test_what_waits_aside_of_an_iteration_that_is_past_may_still_be_placed() -> None:
    """SIMPLE. The first and the last packet of a message were lost, and the first of the next iteration's: those in
    between wait, although all that is missing was acknowledged."""
    _, plan, made = traffic("simple")
    qpn, places = spot("simple")
    following = next(at for at, (_, frame) in enumerate(made.packets)
                     if at > places[-1] and destination(frame) == qpn and opcode(frame) == FIRST)
    lost, engine, said = {places[0], places[-1], following}, Engine(plan.engine), []
    ack = with_psn(ack_of(made.packets, qpn, "simple"), psn(made.packets[places[-1]][1]))
    for at, (_, frame) in enumerate(made.packets):
        if at not in lost:
            assert engine.feed(0, frame)
        if engine.past(0) > 1:
            engine.feed(0, ack)
            said.append((engine.outcomes(0)["aside"][0] > 0, engine.hope(0, 1)))
    assert said[0] == (True, "may_come") and said[-1] == (False, "acknowledged")
    assert {hope for aside, hope in said if aside} == {"may_come"}


@pytest.mark.parametrize("whole", [False, True], ids=["missing", "whole"])
def test_what_is_missing_of_the_last_64_messages_may_come(whole: bool) -> None:
    """LL, of which an iteration has 80. What is missing before those is not waited for, and may be acknowledged."""
    job = example_job(count=[300] * 40, mtu=1024, startup=False, rebuild=False, seed=9)
    plan, qpn, made = plan_job(job), job.flows[0].qpns[0], generate(job, iterations=3, seed=9)
    engine = Engine(replace(plan.engine, patience=1 << 20))
    all_messages, reduced = messages(made.packets, qpn), {
        at for bucket in range(40) for found in spots(made, "ll", qpn, 1, bucket) for at in found.packets
    }
    lost = max(number for number, places in enumerate(all_messages) if places[0] in reduced)
    assert len(all_messages) > lost + 70
    for number, places in enumerate(all_messages[:-1]):
        for at in places:
            if whole or (number, at) != (lost, all_messages[lost][1]):
                assert engine.feed(0, made.packets[at][1])
        if engine.past(0) > 1:  # the message that is due next is one of the 64
            said = "all_came" if whole else "may_come" if number + 1 - lost < 64 else "passed"
            assert engine.hope(0, 1) == said, number - lost
    ack = next(frame for _, frame in made.packets if is_ack(frame) and destination(frame) == job.flows[0].cts_qpns[0])
    for at, said in ((all_messages[lost][-1], "passed"), (all_messages[-2][-1], "acknowledged")):
        engine.feed(0, with_psn(ack, psn(made.packets[at][1])))
        assert engine.hope(0, 1) == ("all_came" if whole else said)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_missing_of_a_call_that_nobody_keeps_is_not_waited_for(protocol: str) -> None:
    """The second of two calls is stepped over: no bytes of it are placed."""
    job = example_job(count=[6000, 6000], protocol=protocol, mtu=1024, startup=False, rebuild=False, seed=9)
    plan, made = plan_job(job), generate(job, iterations=3, seed=9)
    edges = tuple(
        replace(edge, calls=(*edge.calls[:-1], replace(edge.calls[-1], target=Target.NOTHING)))
        for edge in plan.engine.edges
    )
    places = spots(made, protocol, job.flows[0].qpns[0], 1, bucket=1)[-1].packets
    said = after(
        Engine(replace(plan.engine, edges=edges)), [one for at, one in enumerate(made.packets) if at != places[1]]
    )
    assert set(said) == {"all_came"}


@pytest.mark.parametrize("acknowledged", [0, 1])
def test_of_two_connections_the_later_word_counts(acknowledged: int) -> None:
    """Each lacks a packet, and ACKs are seen of one of them."""
    job, plan, made = traffic("ll")
    lost = {spots(made, "ll", flow.qpns[0], 1)[-1].packets[1] for flow in job.flows}
    silent = job.flows[1 - acknowledged].cts_qpns[0]
    engine = Engine(plan.engine)
    for at, (_, frame) in enumerate(made.packets):
        if at not in lost and not (is_ack(frame) and destination(frame) == silent):
            assert engine.feed(0, frame)
    assert engine.hope(0, 1) == "passed"


def test_a_connection_that_was_given_up_is_not_waited_for() -> None:
    """It disagreed amid an iteration, and nothing of it comes any more."""
    _, plan, made = traffic("ll")
    qpn, places = spot("ll")
    wrong, engine = made.packets[places[2]][1], Engine(plan.engine)
    for at, (_, frame) in enumerate(made.packets):
        if destination(frame) != qpn or at < places[2]:
            assert engine.feed(0, frame)
    assert engine.past(0) == 1 and engine.hope(0, 1) == "may_come"
    assert engine.feed(0, sealed(wrong[:-8] + bytes([wrong[-8] ^ 1]) + wrong[-7:]))
    assert engine.disagreed == 1 and engine.past(0) > 1 and engine.hope(0, 1) == "all_came"


def test_a_connection_that_nobody_knows_the_place_of_is_not_waited_for() -> None:
    """A packet is missing, the connection is past its iteration, and then nobody knows its lap of the PSN."""
    _, plan, made = traffic("ll")
    places = spot("ll")[1]
    data = [packet for packet in made.packets if not is_ack(packet[1]) and packet != made.packets[places[1]]]
    engine, ring = Engine(plan.engine), MemoryRing(1 << len(data).bit_length())
    ring.put(data)
    while engine.past(0) <= 1:
        assert engine.run(0, ring.ring_address, 1) == (1, False)
    assert engine.hope(0, 1) == "may_come"
    stray, ring = with_psn(made.packets[places[1]][1], psn(made.packets[places[1]][1]) + 2**22), MemoryRing(2)
    ring.put([(data[-1][0] + 10**9, stray)])
    assert engine.run(0, ring.ring_address, 1) == (1, False)
    assert engine.outcomes(0)["unanchored"][0] == 1 and engine.hope(0, 1) == "all_came"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_went_by_before_a_capture_is_not_waited_for(protocol: str) -> None:
    """It begins amid the last message of an iteration."""
    job, plan, _ = traffic(protocol)
    qpn, flow = job.flows[0].qpns[0], job.flows[0]
    made = generate(job, iterations=2, first_iteration=200_000, seed=9)
    places = spots(made, protocol, qpn, 200_000)[-1].packets
    begin = places[len(places) // 2] if protocol != "simple" else places[0]
    engine = Engine(plan.engine)
    for _, frame in writes(made.packets, flow.cts_qpns[0]) if protocol == "simple" else []:
        assert engine.feed(0, frame)
    said = after(engine, writes(made.packets[begin:], qpn), iteration=200_000)
    assert set(said) == {"all_came"}
