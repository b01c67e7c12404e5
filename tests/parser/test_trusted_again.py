"""When a flow that disagreed is trusted again: after one whole iteration that agrees in everything, and not before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
from parser.machine import Engine

from flowcheck.job.model import Job
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import Synthesis, example_job, generate
from tests.flowcheck.altered import FIRST, ONLY_IMM, PAYLOAD_AT, Packet, destination, opcode, payload, sealed
from tests.flowcheck.memory_ring import MemoryRing

UNLIKE, ALIKE = (4000, 9000), (4096,)  # elements of the buckets: one place in an iteration, or all, look alike
PROTOCOLS = ["ll", "ll128", "simple"]
VA, DMA_LENGTH = 54, 66
PAUSE_NS = 250_000  # synth leaves more than this between iterations, and never within one


@functools.cache
def traffic(protocol: str, count: tuple[int, ...] = UNLIKE, mtu: int = 1024) -> tuple[Job, JobPlan, Synthesis]:
    job = example_job(count=list(count), protocol=protocol, mtu=mtu, startup=False, rebuild=False, seed=6)
    return job, plan_job(job, arenas=16), generate(job, iterations=8, seed=6)


def iterations(made: Synthesis, qpn: int) -> list[list[list[Packet]]]:
    """The QP's messages by iteration, as lists of packets. Between iterations the wire is silent."""
    out: list[list[list[Packet]]] = []
    last = -PAUSE_NS
    for time, frame in made.packets:
        if destination(frame) != qpn or opcode(frame) not in PAYLOAD_AT:
            continue
        if time - last > PAUSE_NS:
            out.append([])
        if opcode(frame) in (FIRST, ONLY_IMM):
            out[-1].append([])
        out[-1][-1].append((time, frame))
        last = time
    assert len(out) == 8
    return out


def with_data(part: list[list[Packet]]) -> list[list[Packet]]:
    """The messages of an iteration that are not empty: SIMPLE's second slices are, where there is little data."""
    return [message for message in part if payload(message[0][1])]


def added(frame: bytes, at: int, size: int, value: int) -> bytes:
    number = (int.from_bytes(frame[at : at + size], "big") + value) % 256**size
    return sealed(frame[:at] + number.to_bytes(size, "big") + frame[at + size :])


def stray(packet: Packet) -> Packet:
    """Right but for its address: this ends the flow."""
    return packet[0], added(packet[1], VA, 8, 4096)


def back(plan: JobPlan, qpn: int, parts: list[list[list[Packet]]]) -> tuple[range, int]:
    """Iterations that the flow brought nothing to, and how often it disagreed. Recovery is considered at once."""
    engine, known = Engine(plan.engine), 0
    flow = [spec.qpn for spec in plan.engine.flows].index(qpn)
    for part in parts:
        for message in part:
            for _, frame in message:
                assert engine.feed(0, frame)
                if engine.disagreed > known:
                    known = engine.disagreed
                    engine.consider_recovery()
    return engine.flow_counters(0)[flow]["ignored"], known


@pytest.mark.parametrize("lost_in", [0, -1], ids=["first-message", "last-message"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_one_whole_iteration_is_needed(protocol: str, lost_in: int) -> None:
    """Lost in iteration 2. Iteration 3 agrees from its beginning; 4 is the first that is believed."""
    job, plan, made = traffic(protocol)
    qpn = job.flows[0].qpns[0]
    parts = iterations(made, qpn)
    message = with_data(parts[2])[lost_in]
    message.insert(0, stray(message[0]))
    assert back(plan, qpn, parts) == (range(2, 4), 1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_where_all_places_look_alike_a_flow_stays_lost(protocol: str) -> None:
    """Traffic that is off by a call would agree as well."""
    job, plan, made = traffic(protocol, ALIKE)
    qpn = job.flows[0].qpns[0]
    parts = iterations(made, qpn)
    parts[2][0].insert(0, stray(parts[2][0][0]))
    assert back(plan, qpn, parts)[0].stop > 1 << 60


def longer(frame: bytes) -> bytes:
    """16 bytes more of payload than the MTU, and lengths that say so."""
    body = bytearray(frame[:-4] + frame[-20:-4] + bytes(4))
    for at in (16, 38):
        body[at : at + 2] = (int.from_bytes(body[at : at + 2], "big") + 16).to_bytes(2, "big")
    return sealed(bytes(body))


def other_flag(at: int) -> Callable[[bytes], bytes]:
    def change(frame: bytes) -> bytes:
        where = PAYLOAD_AT[opcode(frame)] + at
        return sealed(frame[:where] + bytes([frame[where] ^ 1]) + frame[where + 1 :])

    return change


ODD = [
    ("simple", longer),
    ("simple", lambda frame: added(frame, DMA_LENGTH, 4, 16)),
    ("simple", lambda frame: added(frame, VA, 8, 4096)),
    ("ll", lambda frame: added(frame, DMA_LENGTH, 4, -16)),
    ("ll", other_flag(4)),
    ("ll", other_flag(12 + 16 * 63)),
    ("ll128", other_flag(120)),
    ("ll128", other_flag(120 + 128 * 7)),
]


@pytest.mark.parametrize("again", [False, True], ids=["instead", "before"])
@pytest.mark.parametrize("message", [0, 2, -1])
@pytest.mark.parametrize(
    ("protocol", "change"), ODD,
    ids=["length", "size", "address", "ll-size", "ll-flag", "ll-last-flag", "ll128-flag", "ll128-last-flag"],
)
def test_one_odd_first_packet_puts_it_off(protocol: str, change: Callable, message: int, again: bool) -> None:
    """In the iteration on trial, instead of the right packet or before it: one iteration later at least."""
    job, plan, made = traffic(protocol)
    qpn = job.flows[0].qpns[0]
    parts = iterations(made, qpn)
    parts[2][0].insert(0, stray(parts[2][0][0]))
    chosen = with_data(parts[3])[message]
    time, frame = chosen[0]
    assert opcode(frame) == FIRST
    chosen[0:1] = [(time, change(frame)), *([(time, frame)] if again else [])]
    ignored, known = back(plan, qpn, parts)
    later = 4 if message == 0 and again else 5  # the trial begins with the right packet
    assert (ignored, known) == (range(2, later), 1)


@pytest.mark.parametrize("message", [0, 1, -1])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_first_packet_that_was_not_seen_puts_it_off(protocol: str, message: int) -> None:
    job, plan, made = traffic(protocol)
    qpn = job.flows[0].qpns[0]
    parts = iterations(made, qpn)
    parts[2][0].insert(0, stray(parts[2][0][0]))
    del with_data(parts[3])[message][0]
    assert back(plan, qpn, parts) == (range(2, 5), 1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_first_packet_that_comes_twice_puts_nothing_off(protocol: str) -> None:
    """A second mirror's copy, or a retransmission, in the iteration on trial."""
    job, plan, made = traffic(protocol)
    qpn = job.flows[0].qpns[0]
    parts = iterations(made, qpn)
    parts[2][0].insert(0, stray(parts[2][0][0]))
    messages = with_data(parts[3])
    messages[2].insert(1, messages[1][0])
    assert back(plan, qpn, parts) == (range(2, 4), 1)


def test_a_flow_that_came_back_and_is_another_connections_stays_away() -> None:
    """It had been looked at whether it could ever come back."""
    job, plan, made = traffic("simple")
    qpn = job.flows[0].qpns[0]
    parts = iterations(made, qpn)
    first = parts[0][0][0]
    parts[2][0].insert(0, stray(parts[2][0][0]))
    parts[5][0].insert(0, (first[0], sealed(first[1][:50] + bytes([first[1][50] ^ 0x80]) + first[1][51:])))
    ignored, known = back(plan, qpn, parts)
    assert known == 2 and ignored.start == 4 and ignored.stop > 1 << 60, "from its newest message on"


def test_one_send_too_many_is_for_good() -> None:
    """A loop begins with the chunk that the one before ended with: one of two. All headers after it agree, and would if
    the bytes were of another message each time."""
    job, plan, made = traffic("simple")
    qpn = job.flows[0].qpns[0]
    first = iterations(made, qpn)[2][0][0]
    at, whole, stays_away = made.packets.index(first), made.reduced[1, 1].tobytes(), []
    for half in (0, len(whole) // 2):
        start, engine = PAYLOAD_AT[FIRST], Engine(plan.engine)
        odd = sealed(first[1][:start] + whole[half : half + 512] + first[1][start + 512 :])
        for place, (_, frame) in enumerate(made.packets):
            assert engine.feed(0, odd if place == at else frame)
            if engine.disagreed:
                engine.consider_recovery()
        stays_away += [one["ignored"].stop > 1 << 60 for one in engine.flow_counters(0) if one["disagreements"]]
    assert stays_away == [True]


@pytest.mark.parametrize("protocol", ["ll", "ll128"])
def test_where_it_is_found_anew_amid_an_iteration_another_one_is_needed(protocol: str) -> None:
    """Given up in iteration 2, then an outage up to amid iteration 4: 5 is on trial, and 6 is believed."""
    job, _, made = traffic(protocol)
    qpn = job.flows[0].qpns[0]
    plan, parts = plan_job(job, arenas=16), iterations(made, qpn)
    parts[2][0].insert(0, stray(parts[2][0][0]))
    engine, ring, packets = Engine(plan.engine), MemoryRing(1 << 16), []
    for number, part in enumerate([*parts[:3], parts[4][2:], *parts[5:]]):
        packets += [(ns + 10**9 * (number > 2), frame) for message in part for ns, frame in message]
    ring.put(packets)
    while ring.waiting:
        engine.run(0, ring.ring_address, 1)
        if engine.disagreed:
            engine.consider_recovery()
    found = engine.flow_counters(0)[[spec.qpn for spec in plan.engine.flows].index(qpn)]
    assert (found["ignored"], engine.disagreed) == (range(2, 6), 1)


@pytest.mark.parametrize("message", [1, -1])
def test_another_immediate_puts_it_off(message: int) -> None:
    """Messages of one packet, whose first packet has the immediate."""
    job, plan, made = traffic("simple", (200, 450), 4096)
    qpn = job.flows[0].qpns[0]
    parts = iterations(made, qpn)
    assert {opcode(m[0][1]) for part in parts for m in part} == {ONLY_IMM}
    parts[2][0].insert(0, stray(parts[2][0][0]))
    chosen = with_data(parts[3])[message]
    time, frame = chosen[0]
    chosen[0] = (time, added(frame, 70, 4, 1))
    assert back(plan, qpn, parts) == (range(2, 5), 1)


def test_another_connection_on_the_same_queue_pair_is_noticed() -> None:
    """Its PSN 0 has other contents, when no retransmission of the first packet can come any more. A mirror's copy has
    the same; and an early retransmission may differ in a bit of its headers."""
    job, plan, made = traffic("simple")
    qpn = job.flows[0].qpns[0]
    packets = [packet for part in iterations(made, qpn) for one in part for packet in one]
    copy = packets[0][1]
    other = sealed(copy[:51 - 1] + bytes([copy[50] ^ 0x80]) + copy[51:])  # asks for an acknowledgement, or does not
    assert destination(other) == qpn
    begins = iterations(made, job.flows[1].qpns[0])[0][0][0]  # another connection, so that PSN 1 is young beside it

    def found(after: int, frame: bytes, swapped: bool = False, lost: bool = False, icrc: bool = True) -> list[str]:
        engine = Engine(replace(plan.engine, check_icrc=icrc))
        first = [begins, packets[1]] if lost else [begins, packets[1], packets[0]] if swapped else packets[:2]
        for _, each in first + packets[2:after]:
            assert engine.feed(0, each)
        assert engine.feed(0, frame)
        return [entry["kind"] for entry in engine.disagreements()]

    late = sum(len(one) for part in iterations(made, qpn)[:4] for one in part)
    messages = [one for part in iterations(made, qpn) for one in part]
    assert [found(sum(map(len, messages[:count])), other) for count in (9, 10)] == [[], ["made anew"]]
    assert found(5, copy) == [] and found(5, other) == []
    assert found(late, copy) == [] and found(late, other) == ["made anew"]
    assert found(5, other, swapped=True) == [] and found(late, copy, swapped=True) == []
    assert found(late, other, swapped=True) == ["made anew"], "PSN 0 came second"
    assert found(late, copy, lost=True) == [], "nobody knows what it was"
    assert found(late, other, icrc=False) == [], "it is by the ICRC that contents are compared"
