"""What every packet is held against: a witness that says something else ends its flow, and nothing of it is placed.

Packets come from flowcheck.synth. One of them is changed, with the ICRC made right again where it should be right.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from parser.machine import Engine

from flowcheck.jobplan import JobPlan, plan_job
from flowcheck.manifest import Job
from flowcheck.synth import Synthesis, example_job, generate
from parser.plan import Phase
from tests.flowcheck.altered import (
    FIRST,
    LAST,
    LAST_IMM,
    MIDDLE,
    PAYLOAD_AT,
    Packet,
    destination,
    messages,
    opcode,
    psn,
    sealed,
    spots,
)
from tests.flowcheck.memory_ring import MemoryRing

COUNT = 12_000
PROTOCOLS = ["ll", "ll128", "simple"]
Change = Callable[[bytes], bytes]


@functools.cache
def traffic(protocol: str, iterations: int = 2) -> tuple[Job, JobPlan, Synthesis]:
    job = example_job(count=COUNT, protocol=protocol, mtu=1024, startup=False, rebuild=False, seed=4)
    return job, plan_job(job), generate(job, iterations=iterations, seed=4)


def feed(engine: Engine, packets: list[Packet], stream: int = 0) -> None:
    for _, frame in packets:
        assert engine.feed(stream, frame)


def writes(packets: list[Packet], qpn: int) -> list[Packet]:
    """The data packets to a QP, without acknowledgements."""
    return [packet for packet in packets if destination(packet[1]) == qpn and opcode(packet[1]) in PAYLOAD_AT]


def kinds(engine: Engine) -> list[str]:
    return [entry["kind"] for entry in engine.disagreements()]


def patched(at: int, data: bytes) -> Change:
    """Bytes of the frame replaced; negative places count from the payload's end."""

    def change(frame: bytes) -> bytes:
        where = at if at >= 0 else len(frame) - 4 + at
        return sealed(frame[:where] + data + frame[where + len(data) :])

    return change


def added(at: int, size: int, value: int) -> Change:
    """A value added to a big-endian number of the headers."""

    def change(frame: bytes) -> bytes:
        number = int.from_bytes(frame[at : at + size], "big") + value
        return sealed(frame[:at] + (number % 256**size).to_bytes(size, "big") + frame[at + size :])

    return change


def shortened(by: int) -> Change:
    """The last bytes of the payload are not there, and all lengths say so."""

    def change(frame: bytes) -> bytes:
        body = bytearray(frame[: -4 - by] + bytes(4))
        for at in (16, 38):
            body[at : at + 2] = (int.from_bytes(body[at : at + 2], "big") - by).to_bytes(2, "big")
        return sealed(bytes(body))

    return change


def without_immediate(frame: bytes) -> bytes:
    """A LAST with an immediate becomes a MIDDLE of the same payload."""
    body = bytearray(frame[:54] + frame[58:])
    body[42] = MIDDLE
    for at in (16, 38):
        body[at : at + 2] = (int.from_bytes(body[at : at + 2], "big") - 4).to_bytes(2, "big")
    return sealed(bytes(body))


VA, DMA_LENGTH, IMMEDIATE, SLOT = 54, 66, 54, {"ll": 4 << 16, "ll128": 0, "simple": 512 << 10}


@pytest.mark.parametrize(
    ("which", "change", "kind"),
    [
        (1, shortened(16), "payload length"),
        (-1, shortened(16), "payload length"),
        (0, shortened(16), "payload length"),
        (1, patched(42, bytes([LAST])), "opcode"),
        (-1, without_immediate, "opcode"),
        (-1, added(IMMEDIATE, 4, 1), "immediate"),
        (0, added(DMA_LENGTH, 4, 16), "RETH length"),
        (0, added(VA, 8, 8), "RETH address"),
    ],
)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_headers_that_contradict_the_count_end_the_flow(protocol: str, which: int, change: Change, kind: str) -> None:
    """The packet is of the second message that carries reduced bytes, so that the slots' address is known."""
    job, plan, made = traffic(protocol)
    qpn = job.flows[0].qpns[0]
    spot = spots(made, protocol, qpn, 1)[0]
    at = spot.packets[which]
    assert opcode(made.packets[at][1]) == {0: FIRST, 1: MIDDLE, -1: LAST_IMM}[which]
    engine = Engine(plan.engine)
    feed(engine, made.packets[:at])
    before, cells = engine.outcomes(0), engine.cells(1)
    assert engine.feed(0, change(made.packets[at][1]))
    assert kinds(engine) == [kind]
    assert engine.outcomes(0)["disagreed"][0] == before["disagreed"][0] + 1
    assert engine.outcomes(0)["placed"] == before["placed"] and (engine.cells(1) == cells).all()
    flow = [spec.qpn for spec in plan.engine.flows].index(qpn)
    assert engine.flow_counters(0)[flow]["state"] == "LOST"
    for place in spot.packets:
        if place > at:
            assert engine.feed(0, made.packets[place][1])
    assert engine.outcomes(0)["placed"] == before["placed"]
    assert engine.outcomes(0)["not_synced"][0] == sum(place > at for place in spot.packets)
    assert kinds(engine) == [kind]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_address_of_another_slot_ends_the_flow(protocol: str) -> None:
    """A write into the slot after the message's own, as announced for the next message."""
    job, plan, made = traffic(protocol)
    places = messages(made.packets, job.flows[0].qpns[0])
    first, second = (int.from_bytes(made.packets[places[i][0]][1][VA : VA + 8], "big") for i in (0, 1))
    assert first != second
    at = places[2][0]
    data = writes(made.packets[:at], job.flows[0].qpns[0])
    engine = Engine(plan.engine)  # without clear-to-send, which would say the same
    feed(engine, data)
    assert engine.feed(0, added(VA, 8, second - first)(made.packets[at][1]))
    assert kinds(engine) == ["RETH address"]


def clear_to_sends(made: Synthesis, plan: JobPlan) -> list[int]:
    """Places of the clear-to-send writes."""
    control = {spec.qpn for spec in plan.engine.flows if not spec.data}
    return [at for at, (_, f) in enumerate(made.packets) if destination(f) in control and opcode(f) == 10]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_another_announced_address_ends_the_flow(protocol: str) -> None:
    """The write goes where all before it went, but its clear-to-send named another place."""
    _, plan, made = traffic(protocol)
    for at in clear_to_sends(made, plan)[-4:]:
        frame = made.packets[at][1]
        address = int.from_bytes(frame[70:78], "little") + 4096
        engine = Engine(plan.engine)
        odd = patched(70, address.to_bytes(8, "little"))(frame)
        feed(engine, [*made.packets[:at], (0, odd), *made.packets[at + 1 :]])
        assert kinds(engine) == ["CTS address"]


def test_a_damaged_clear_to_send_is_not_believed() -> None:
    _, plan, made = traffic("simple")
    at = clear_to_sends(made, plan)[-2]
    frame = bytearray(made.packets[at][1])
    frame[71] ^= 1
    engine = Engine(plan.engine)
    feed(engine, [*made.packets[:at], (0, bytes(frame)), *made.packets[at + 1 :]])
    assert kinds(engine) == [] and engine.outcomes(0)["icrc"] == (1, len(frame) - 74)


def test_senders_that_clear_to_sends_name_differently_are_not_named() -> None:
    """Of one connection only: the other one keeps its name. The order of the two names does not matter."""
    _, plan, made = traffic("simple")
    clean = Engine(plan.engine)
    feed(clean, made.packets)
    named = clean.cts_tags()
    assert len(named) == 2
    at = clear_to_sends(made, plan)[-2]
    frame = made.packets[at][1]
    tag_at = 70 + (plan.engine.cts_tag_at if len(frame) == 70 + 64 + 4 else 20)
    tag = int.from_bytes(frame[tag_at : tag_at + 4], "little")
    assert tag in named.values()
    engine = Engine(plan.engine)
    odd = patched(tag_at, (tag + 1).to_bytes(4, "little"))(frame)
    feed(engine, [*made.packets[:at], (0, odd), *made.packets[at + 1 :]])
    left = engine.cts_tags()
    assert len(left) == 1 and left.items() <= named.items()


@pytest.mark.parametrize("twice", [False, True], ids=["first-copy", "second-copy"])
@pytest.mark.parametrize("packet", [0, 2, -1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("protocol", ["ll", "ll128"])
def test_one_wrong_flag_ends_the_flow(protocol: str, packet: int, twice: bool) -> None:
    """In the last line of data that the packet has, of the second flag where a line has two."""
    job, _, made = traffic(protocol)
    engine = Engine(plan_job(job, streams=2).engine)
    spot = spots(made, protocol, job.flows[0].qpns[0], 1)[0]
    at = spot.packets[packet]
    if twice:
        feed(engine, made.packets, stream=1)
    feed(engine, made.packets[:at])
    before = engine.outcomes(0)
    frame = made.packets[at][1]
    assert engine.feed(0, patched(-4, (int.from_bytes(frame[-8:-4], "little") ^ 1 << 30).to_bytes(4, "little"))(frame))
    assert kinds(engine) == ["flag"]
    after = engine.outcomes(0)
    assert (after["placed"], after["compared"]) == (before["placed"], before["compared"])
    rest = spot.packets[packet + 1 :] if packet >= 0 else ()
    for place in rest:
        assert engine.feed(0, made.packets[place][1])
    assert engine.outcomes(0)["placed"] == before["placed"]


@pytest.mark.parametrize("protocol", ["ll", "ll128"])
def test_a_wrong_flag_of_a_partial_sum_ends_the_flow(protocol: str) -> None:
    """Of what nobody keeps, the first packet's first lines show the step."""
    job, plan, made = traffic(protocol)
    qpn = job.flows[0].qpns[0]
    kept = {at for spot in spots(made, protocol, qpn, 0) for at in spot.packets}
    at = next(places[0] for places in messages(made.packets, qpn) if places[0] not in kept)
    frame = made.packets[at][1]
    engine = Engine(plan.engine)
    feed(engine, made.packets[:at])
    where = PAYLOAD_AT[opcode(frame)] + (4 if protocol == "ll" else 120)
    assert engine.feed(0, patched(where, bytes([frame[where] ^ 4]))(frame))
    assert kinds(engine) == ["flag"]


def test_a_message_after_the_last_call_ends_the_flow() -> None:
    """A manifest whose calls end with iteration 0."""
    _, plan, made = traffic("ll")
    edges = tuple(
        replace(edge, calls=tuple(call for call in edge.calls if call.phase != Phase.STEADY))
        for edge in plan.engine.edges
    )
    engine = Engine(replace(plan.engine, edges=edges))
    feed(engine, made.packets)
    assert engine.outcomes(0)["beyond"][0] == 2 and set(kinds(engine)) == {"extra message"}
    assert engine.cells(0).all()


# -- the ICRC ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [-1, -2, -3, -4, -12, 43, 44])
@pytest.mark.parametrize("packet", [0, 1, 2, -1])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_damaged_final_bytes_are_not_placed_and_not_counted(protocol: str, packet: int, where: int) -> None:
    """Any byte: of the payload, of the BTH, of the ICRC itself. The right packet may still come."""
    job, plan, made = traffic(protocol)
    qpn = job.flows[0].qpns[0]
    flow = [spec.qpn for spec in plan.engine.flows].index(qpn)
    spot = spots(made, protocol, qpn, 0)[0]
    at = spot.packets[packet]
    engine = Engine(plan.engine)
    feed(engine, made.packets[:at])
    before, cells = engine.flow_counters(0)[flow], engine.cells(0)
    frame = bytearray(made.packets[at][1])
    frame[where] ^= 0x20
    assert engine.feed(0, bytes(frame))
    assert engine.outcomes(0)["icrc"][0] == 1 and (engine.cells(0) == cells).all()
    assert engine.flow_counters(0)[flow] == {**before, "icrc_wrong": 1}
    carries = protocol != "ll128" or packet >= 0  # of LL128's last packet here all is padding
    assert len(engine.losses()) == carries
    for loss in engine.losses():
        assert loss["cause"] == "icrc" and loss["iteration"] == 0 and loss["offset"] % 8 == 0
        assert spot.start <= loss["offset"] < loss["offset"] + loss["bytes"] <= spot.start + len(spot.wire)
    feed(engine, made.packets[at:])
    assert kinds(engine) == [] and engine.cells(0)[: COUNT // 2].all()
    assert engine.region(0)[: 4 * COUNT].tobytes() == made.reduced[0, 0].tobytes()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_damaged_packet_names_the_bytes_it_stood_for(protocol: str) -> None:
    """Of a tensor that does not fill its last packet: not one byte behind its end."""
    job = example_job(count=6001, protocol=protocol, mtu=1024, startup=False, rebuild=False)
    made = generate(job, iterations=1)
    found = [spot for flow in job.flows for spot in spots(made, protocol, flow.qpns[0], 0)]
    last = max(found, key=lambda spot: spot.start)
    packet = int(last.wire[-1]) // 1024
    frame = bytearray(made.packets[last.packets[packet]][1])
    frame[-1] ^= 1
    engine = Engine(plan_job(job).engine)
    at = last.packets[packet]
    feed(engine, [*made.packets[:at], (0, bytes(frame)), *made.packets[at + 1 :]])
    [loss] = engine.losses()
    before = {"ll": 512, "ll128": 960, "simple": 1024}[protocol] * packet
    assert (loss["offset"], loss["offset"] + loss["bytes"]) == (last.start + before, 4 * 6001)


def test_the_other_kernels_check_too() -> None:
    if os.environ.get("FLOWCHECK_SIMD"):
        pytest.skip("FLOWCHECK_SIMD already chooses the kernel of this run")
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-k", "damaged_final", __file__]
    done = subprocess.run(command, env={**os.environ, "FLOWCHECK_SIMD": "portable"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# -- whose packet --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ipv6", [False, True], ids=["v4", "v6"])
def test_other_hosts_with_the_same_queue_pair_are_strangers(ipv6: bool) -> None:
    """Each byte of both addresses, of a MIDDLE and of others."""
    job = example_job(count=COUNT, mtu=1024, startup=False, rebuild=False, ipv6=ipv6)
    plan, made = plan_job(job), generate(job, iterations=1)
    engine = Engine(replace(plan.engine, check_icrc=False))
    start, end = (22, 54) if ipv6 else (26, 34)
    frames = [frame for _, frame in made.packets[:40]]
    feed(engine, made.packets[:20])
    before = engine.outcomes(0)["other_roce"][0]
    strange = 0
    for frame in frames:
        for at in range(start, end):
            assert engine.feed(0, frame[:at] + bytes([frame[at] ^ 0x10]) + frame[at + 1 :])
            strange += 1
    assert engine.outcomes(0)["other_roce"][0] == before + strange


# -- one send too many ---------------------------------------------------------------------------------


def repeated(zeros: bool, protocol: str, keep: float = 1.0) -> list[str]:
    """Disagreements when iteration 1 begins with the chunk that iteration 0 ended with, on either flow."""

    def values(iteration: int, bucket: int, rank: int) -> np.ndarray:
        random = np.random.default_rng([iteration, bucket, rank]).random(COUNT, np.float32)
        return random * 0 if zeros else random

    job = example_job(count=COUNT, protocol=protocol, mtu=1024, startup=False, rebuild=False)
    plan, made = plan_job(job), generate(job, iterations=2, gradients=values)
    out = []
    for flow in job.flows:
        qpn = flow.qpns[0]
        loops = messages(made.packets, qpn)
        first = loops[len(loops) // 2]
        whole = made.reduced[0, 0].tobytes()
        frame = made.packets[first[0]][1]
        start = PAYLOAD_AT[opcode(frame)]
        for half in (0, len(whole) // 2):
            data, body = whole[half : half + 512], bytearray(frame)
            if protocol == "ll":
                for line in range(len(body[start:-4]) // 16):
                    at = start + 16 * line
                    body[at : at + 4], body[at + 8 : at + 12] = data[8 * line :][:4], data[8 * line + 4 :][:4]
            elif protocol == "ll128":
                body[start : start + 120] = data[:120]
            else:
                body[start : start + 512] = data
            engine = Engine(plan.engine)
            lost = [at for at, (_, f) in enumerate(made.packets[: first[0]]) if keep < 1 and opcode(f) == MIDDLE]
            feed(engine, [packet for at, packet in enumerate(made.packets[: first[0]]) if at not in lost])
            assert engine.feed(0, sealed(bytes(body)))
            out += kinds(engine)
    return out


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_loop_that_begins_with_the_chunk_before_ends_the_flow(protocol: str) -> None:
    """Size, slot and flag agree; only the bytes tell that somebody sends once too often. One of two chunks is it."""
    assert repeated(False, protocol) == ["repeated chunk"] * 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_zeros_repeat_by_honest_means(protocol: str) -> None:
    assert repeated(True, protocol) == []


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
    assert numbers(engine, plan, qpn)["missing"] == 0 and engine.gaps(0) == 3  # they may still come
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


def test_a_damaged_packet_does_not_say_where_a_flow_is() -> None:
    job = example_job(count=30_000, mtu=1024, startup=False, rebuild=False)
    made = generate(job, iterations=1, first_iteration=900)
    damaged = made.packets[0][1][:-1] + bytes([made.packets[0][1][-1] ^ 1])
    engine = Engine(plan_job(job).engine)
    assert engine.feed(0, damaged)
    assert not any(flow["packets"] or flow["anchored"] for flow in engine.flow_counters(0))


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
    assert engine.gaps(0) == 0
