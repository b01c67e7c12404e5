"""What every packet is held against: a witness that says something else ends its flow, and nothing of it is placed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from parser.machine import Engine

from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import Synthesis, example_job, generate
from parser.engine_config import Phase
from parser.nccl import CtsElement, of
from tests.flowcheck.altered import (
    FIRST,
    LAST,
    LAST_IMM,
    MIDDLE,
    PAYLOAD_AT,
    destination,
    messages,
    opcode,
    psn,
    sealed,
    spots,
)
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


def without_immediate(frame: bytes) -> bytes:
    """A LAST with an immediate becomes a MIDDLE of the same payload."""
    body = bytearray(frame[:54] + frame[58:])
    body[42] = MIDDLE
    for at in (16, 38):
        body[at : at + 2] = (int.from_bytes(body[at : at + 2], "big") - 4).to_bytes(2, "big")
    return sealed(bytes(body))


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


def big(frame: bytes, at: int, size: int) -> int:
    return int.from_bytes(frame[at : at + size], "big")


@pytest.mark.parametrize(
    ("which", "change", "kind", "read"),
    [
        (1, shortened(16), "payload length", lambda frame, _: len(frame) - 58),
        (1, patched(42, bytes([LAST])), "opcode", lambda frame, odd: opcode(frame) if odd else 1),
        (-1, added(IMMEDIATE, 4, 1 << 16), "immediate", lambda frame, _: int.from_bytes(frame[54:58], "little")),
        (0, added(DMA_LENGTH, 4, 16), "RETH length", lambda frame, _: big(frame, DMA_LENGTH, 4)),
        (0, added(VA, 8, 8), "RETH address", lambda frame, _: big(frame, VA, 8)),
    ],
)
def test_what_is_logged_names_the_packet_and_both_values(
    which: int, change: Change, kind: str, read: Callable[[bytes, bool], int]
) -> None:
    """Of the second flow, over the second stream of one thread."""
    job, _, made = traffic("ll")
    plan, qpn = plan_job(job, streams=2), job.flows[1].qpns[0]
    at = spots(made, "ll", qpn, 1)[0].packets[which]
    right = made.packets[at][1]
    odd, engine = change(right), Engine(plan.engine)
    feed(engine, made.packets[:at], stream=1)
    assert engine.feed(1, odd)
    number = next(i for i, places in enumerate(messages(made.packets, qpn)) if at in places)
    assert engine.disagreements() == [{
        "kind": kind, "stream": 1, "flow": [spec.qpn for spec in plan.engine.flows].index(qpn), "iteration": 1,
        "message": number, "psn": psn(right), "expected": read(right, False), "found": read(odd, True),
    }]
    assert engine.disagreed == 1


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
    tag_at = 70 + plan.engine.cts.tag_at
    tag = int.from_bytes(frame[tag_at : tag_at + 4], "little")
    assert tag in named.values()
    engine = Engine(plan.engine)
    odd = patched(tag_at, (tag + 1).to_bytes(4, "little"))(frame)
    feed(engine, [*made.packets[:at], (0, odd), *made.packets[at + 1 :]])
    left = engine.cts_tags()
    assert len(left) == 1 and left.items() <= named.items()


#: A form that no NCCL has: another size, and every field elsewhere.
ODD_FORM = CtsElement(
    48, address_at=16, size_at=24, size_width=8, rkey_at=40, keys=2, requests_at=4, tag_at=0, number_at=32,
)


def rewritten(frame: bytes, old: CtsElement, new: CtsElement) -> bytes:
    """A clear-to-send write that says the same in another form."""
    element, out = frame[70:-4], bytearray(new.bytes)
    for name, width in (("address", 8), ("size", 8), ("rkey", 4), ("requests", 4), ("tag", 4), ("number", 8)):
        here, there = (getattr(form, f"{name}_at") for form in (old, new))
        out[there : there + width] = element[here : here + width]
    body = bytearray(frame[:66] + len(out).to_bytes(4, "big") + out + bytes(4))
    for at in (16, 38):
        length = int.from_bytes(body[at : at + 2], "big") + new.bytes - old.bytes
        body[at : at + 2] = length.to_bytes(2, "big")
    return sealed(bytes(body))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_clear_to_send_of_any_size_and_order_is_read_as_its_form_says(protocol: str) -> None:
    """The form is data: names and addresses are those of the traffic it was made of, and a wrong address is seen."""
    _, plan, made = traffic(protocol)
    packets, announcing = list(made.packets), clear_to_sends(made, plan)
    for at in announcing:
        packets[at] = packets[at][0], rewritten(packets[at][1], plan.engine.cts, ODD_FORM)
    engine, as_made = Engine(replace(plan.engine, cts=ODD_FORM)), Engine(plan.engine)
    feed(engine, packets)
    feed(as_made, made.packets)
    assert kinds(engine) == [] and engine.outcomes(0)["control"][0] == as_made.outcomes(0)["control"][0]
    assert engine.cts_tags() == as_made.cts_tags() != {}
    assert {form: n for form, n in engine.cts_forms().items() if n} == {ODD_FORM: len(announcing)}
    at = announcing[-2]
    frame = packets[at][1]
    address = int.from_bytes(frame[70 + 16 : 70 + 24], "little") + 4096
    engine = Engine(replace(plan.engine, cts=ODD_FORM))
    odd = patched(70 + 16, address.to_bytes(8, "little"))(frame)
    feed(engine, [*packets[:at], (0, odd), *packets[at + 1 :]])
    assert kinds(engine) == ["CTS address"]


def test_a_clear_to_send_of_another_form_is_no_witness() -> None:
    """It is counted as what it can be read as. Its bytes, read as the job's own, would announce a wrong address."""
    _, plan, made = traffic("simple")
    assert plan.engine.cts == of("2.27.7").cts
    engine = Engine(replace(plan.engine, cts=of("2.20.5").cts))
    feed(engine, made.packets)
    assert kinds(engine) == [] and engine.cts_tags() == {}
    assert {form for form, n in engine.cts_forms().items() if n} == {plan.engine.cts}


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
        each = {"ll": 512, "ll128": 960, "simple": 1024}[protocol]
        assert packet < 0 or loss["offset"] == spot.start + each * packet
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


def repeated(zeros: bool, protocol: str, keep: float = 1.0, *, retired: bool = False) -> list[str]:
    """Disagreements when iteration 1 begins with the chunk that iteration 0 ended with, on either flow. retired: before
    iteration 1 begins."""

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
            if retired:
                engine.retire()
            assert engine.feed(0, sealed(bytes(body)))
            out += kinds(engine)
    return out


@pytest.mark.parametrize("retired", [False, True], ids=["open", "retired"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_loop_that_begins_with_the_chunk_before_ends_the_flow(protocol: str, retired: bool) -> None:
    """Size, slot and flag agree; only the bytes tell that somebody sends once too often. One of two chunks is it."""
    assert repeated(False, protocol, retired=retired) == ["repeated chunk"] * 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_zeros_repeat_by_honest_means(protocol: str) -> None:
    assert repeated(True, protocol) == []
