"""A flow's place is sought: how often in vain, among announcements that lead elsewhere, and by what only looks like a
flag. LL has a step in every line; SIMPLE has clear-to-sends alone."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from parser.machine import Engine

from flowcheck.job.model import Job
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import Synthesis, example_job, generate
from tests.flowcheck.altered import FIRST, Packet, messages, opcode, psn
from tests.flowcheck.memory_ring import MemoryRing
from tests.parser.odd_packets import feed, kinds, patched, with_psn, writes

COUNT = 12_000
START = 200_000  # an iteration
LAP = 2**37  # of message numbers: their PSNs are the same
TRIES = 64
SILENCE = 10**9  # ns: more than half a lap of the PSN
NUMBER_AT = 70 + 40  # in a clear-to-send of NCCL 2.27: least significant byte first


@functools.cache
def traffic(protocol: str, first: int, iterations: int = 2, qps: int = 1) -> tuple[Job, Synthesis]:
    job = example_job(
        count=COUNT, protocol=protocol, mtu=1024, qps=qps, startup=False, rebuild=False, seed=8, version="2.27.7"
    )
    return job, generate(job, iterations=iterations, first_iteration=first, seed=8)


def planned(job: Job, streams: int = 1) -> JobPlan:
    return plan_job(job, streams=streams, arenas=16)


def run(engine: Engine, part: list[Packet], turn: int, stream: int = 0) -> None:
    """A part of a capture, a silence after the one before it."""
    ring = MemoryRing(1 << len(part).bit_length())
    ring.put([(number + turn * SILENCE, frame) for number, (_, frame) in enumerate(part)])
    assert engine.run(stream, ring.ring_address, 1 << 20) == (len(part), False)


def elsewhere(packets: list[Packet], count: int) -> list[Packet]:
    """So many of them at PSNs a quarter of a lap away."""
    frames = itertools.islice(itertools.cycle(packets), count)
    return [(0, with_psn(frame, (psn(frame) + 2**22) % 2**24)) for _, frame in frames]


def same_as_truth(engine: Engine, made: Synthesis) -> None:
    """Of every cell that is there; and some are."""
    for (iteration, _), truth in made.reduced.items():
        there = np.repeat(engine.cells(iteration)[: COUNT // 2], 8)
        region = engine.region(iteration)[: 4 * COUNT]
        assert there.any() and (region[there] == np.frombuffer(truth.tobytes(), np.uint8)[there]).all()


# -- in vain ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tries", "found"), [(TRIES - 1, True), (TRIES, False)])
@pytest.mark.parametrize("protocol", ["ll", "ll128"])
def test_flags_that_lead_nowhere_are_followed_64_times(protocol: str, tries: int, found: bool) -> None:
    """And as often again after an outage, once the place was found."""
    job, made = traffic(protocol, START)
    later, qpn = traffic(protocol, START + 2)[1], job.flows[0].qpns[0]
    engine = Engine(planned(job).engine)
    for turn, part in enumerate((made, later), 1):
        data = writes(part.packets, qpn)
        run(engine, elsewhere(data[:20], tries) + data, turn)
    outcomes = engine.outcomes(0)
    assert kinds(engine) == [] and (outcomes["placed"][0] > 0) == found
    if found:
        assert outcomes["unanchored"][0] == 2 * tries and engine.begun == START + 3
        same_as_truth(engine, made)
        same_as_truth(engine, later)


ITERATIONS = 40


@functools.cache
def announcing() -> tuple[Job, Synthesis, list[list[Packet]], list[Packet]]:
    """SIMPLE, a connection that announces each of its buffers once in an iteration: its data, iteration by iteration,
    and its clear-to-sends."""
    job, made = traffic("simple", START, ITERATIONS)
    data, ctss = (writes(made.packets, qpn) for qpn in (job.flows[0].qpns[0], job.flows[0].cts_qpns[0]))
    each, buffers = len(data) // ITERATIONS, {frame[70:78] for _, frame in ctss}
    assert len(buffers) * ITERATIONS == len(ctss) == 4 * ITERATIONS
    return job, made, [data[at : at + each] for at in range(0, len(data), each)], ctss


@pytest.mark.parametrize(
    ("times", "tries", "found"), [(6, TRIES - 1, True), (6, TRIES, False), (3, 4 * TRIES, True)],
    ids=["63-tries", "64-tries", "while-it-may-be-announced"],
)
def test_addresses_that_lead_nowhere_are_sought_64_times(times: int, tries: int, found: bool) -> None:
    """Where the buffer was announced often. Where it was not, the packet's own announcement may still come."""
    job, _, data, ctss = announcing()
    engine = Engine(planned(job).engine)
    feed(engine, ctss[-4 * times :])
    feed(engine, elsewhere([one for one in data[-1] if opcode(one[1]) == FIRST], tries))
    assert engine.outcomes(0)["unanchored"][0] == tries
    feed(engine, data[-1])
    assert (engine.begun == START + ITERATIONS - 1) == found == (engine.outcomes(0)["placed"][0] > 0)


@pytest.mark.parametrize(
    ("unannounced", "tries", "found"), [(4 * TRIES, TRIES - 1, True), (0, TRIES, False)], ids=["63-tries", "64-tries"],
)
def test_what_another_stream_announced_is_sought_64_times(unannounced: int, tries: int, found: bool) -> None:
    """Then not with every packet any more. What comes before its buffer was announced at all is no try; and after an
    outage it is sought as often again."""
    job, _, data, ctss = announcing()
    engine = Engine(planned(job, 2).engine)
    feed(engine, [packet for packet in data[0] if opcode(packet[1]) == FIRST] * (unannounced // 2))
    for turn, iteration in enumerate((1, 2), 1):
        run(engine, ctss[4 * iteration : 4 * iteration + 4], turn, stream=1)
        addressed = [one for one in data[iteration] if opcode(one[1]) == FIRST]
        run(engine, elsewhere(addressed, tries) + data[iteration], turn)
        assert engine.begun == (START + iteration if found else -1)
    outcomes = engine.outcomes(0)
    assert kinds(engine) == [] and (outcomes["unanchored"][0] == unannounced + 2 * tries) == found


@pytest.mark.parametrize("behind", range(5))
def test_a_packet_is_found_by_one_of_the_four_newest_announcements_of_its_buffer(behind: int) -> None:
    """Clear-to-sends that came over faster: the buffer was announced again before its data, up to three times."""
    job, _, data, ctss = announcing()
    engine = Engine(planned(job).engine)
    feed(engine, ctss[-24:])
    feed(engine, data[-1 - behind])
    assert kinds(engine) == [] and (engine.outcomes(0)["unanchored"] == (0, 0)) == (behind < 4)
    assert engine.begun == (START + ITERATIONS - 1 - behind if behind < 4 else -1)


def test_a_connection_of_many_messages_is_found_anew() -> None:
    """More of them than an engine remembers, before an outage and after it."""
    job = example_job(count=[300] * 70, mtu=1024, startup=False, rebuild=False, seed=8)
    qpn, engine = job.flows[0].qpns[0], Engine(planned(job).engine)
    for turn, first in enumerate((START, START + 3), 1):
        made = generate(job, iterations=1, first_iteration=first, seed=8)
        data = writes(made.packets, qpn)
        assert len(messages(made.packets, qpn)) > 2 * 64
        run(engine, data[1:] if turn == 1 else data[:1] + data[2:], turn)
    outcomes = engine.outcomes(0)
    assert kinds(engine) == [] and outcomes["unanchored"] == outcomes["stale"] == (0, 0) and engine.begun == START + 3


# -- which lap of the PSN, and of the step -----------------------------------------------------------------


def test_one_announcement_does_not_say_the_lap_of_a_step() -> None:
    """LL. A clear-to-send has a number 2^37 too high: that message has the same PSN and the same flag."""
    job, made = traffic("ll", START)
    flow, engine = job.flows[0], Engine(planned(job).engine)
    ctss = writes(made.packets, flow.cts_qpns[0])
    assert ctss[0][1][NUMBER_AT + 4] == 0
    feed(engine, [(0, patched(NUMBER_AT + 4, b"\x20")(ctss[0][1])), *ctss[1:], *writes(made.packets, flow.qpns[0])])
    assert kinds(engine) == [] and engine.outcomes(0)["unanchored"] == (0, 0)
    assert (engine.oldest, engine.begun) == (START, START + 1)


def test_one_announcement_of_an_earlier_lap_says_no_place() -> None:
    """SIMPLE. As test_counting.py has it for a number that is 2^37 too high; here it is too low."""
    first = LAP // 4 + START
    job, made = traffic("simple", first)
    flow, engine = job.flows[0], Engine(planned(job).engine)
    data, ctss = writes(made.packets, flow.qpns[0]), writes(made.packets, flow.cts_qpns[0])
    at = next(at for at, (_, frame) in enumerate(ctss) if frame[70:78] == data[0][1][54:62][::-1])
    assert ctss[at][1][NUMBER_AT + 4] == 0x20
    feed(engine, [*ctss[:at], (0, patched(NUMBER_AT + 4, b"\0")(ctss[at][1])), *ctss[at + 1 : at + 3]])
    feed(engine, data[:1])
    assert engine.outcomes(0)["unanchored"][0] == 1 and engine.begun == -1


def lapped(first: int, qps: int = 1) -> tuple[Job, list[Packet], list[Packet]]:
    """LL, two steps in an iteration: a connection's data and clear-to-sends."""
    job = example_job(count=3000, qps=qps, startup=False, rebuild=False, version="2.27.7")
    made = generate(job, iterations=2, first_iteration=first)
    flow = job.flows[0]
    data = sorted(packet for qpn in flow.qpns for packet in writes(made.packets, qpn))
    return job, data, sorted(packet for qpn in flow.cts_qpns for packet in writes(made.packets, qpn))


@pytest.mark.parametrize("streams", [(2**31, 2**31 - 1), (2**31, 900), (900, 2**31)], ids=str)
def test_streams_that_announce_different_laps_do_not_say_that_of_a_step(streams: tuple[int, int]) -> None:
    """Two other streams, and packets that have no address. Where both are near each other the flow is found."""
    job, data, _ = lapped(2**31)
    data = [packet for packet in data if opcode(packet[1]) != FIRST]
    engine = Engine(planned(job, 3).engine)
    for stream, first in enumerate(streams, 1):
        feed(engine, lapped(first)[2], stream)
    feed(engine, data)
    found = min(streams) > 900
    assert kinds(engine) == [] and (engine.outcomes(0)["unanchored"][0] == 0) == found
    assert engine.begun == (2**31 + 1 if found else -1)


def test_the_newest_announcement_says_the_lap_of_a_step() -> None:
    """An older run on the same queue pairs has announced as well, and its entries are there still."""
    job, data, ctss = lapped(2**31)
    engine = Engine(planned(job).engine)
    feed(engine, [*lapped(900)[2], *ctss, *(packet for packet in data if opcode(packet[1]) != FIRST)])
    assert kinds(engine) == [] and engine.outcomes(0)["unanchored"] == (0, 0) and engine.begun == 2**31 + 1


@pytest.mark.parametrize("first", [3 * 2**29, 2**31 - 2])
def test_a_step_beyond_half_a_lap_is_found_where_nothing_is_announced(first: int) -> None:
    job, data, _ = lapped(first)
    engine = Engine(planned(job).engine)
    feed(engine, data)
    assert kinds(engine) == [] and (engine.oldest, engine.begun) == (first, first + 1)


@pytest.mark.parametrize("announced", [2**31 - 4, 2**31])
def test_a_queue_pair_that_has_not_the_newest_message_knows_the_lap(announced: int) -> None:
    """Messages go round two queue pairs, which share their announcements."""
    job, data, _ = lapped(2**31, qps=2)
    engine = Engine(planned(job).engine)
    feed(engine, lapped(announced, qps=2)[2][:-1])
    feed(engine, data)
    assert kinds(engine) == [] and engine.outcomes(0)["unanchored"] == (0, 0) and engine.oldest == 2**31


# -- what is no flag ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["ll", "ll128"])
def test_one_wrong_flag_among_right_ones_says_no_place(protocol: str) -> None:
    """It ends no flow either: the next packet finds it."""
    job, made = traffic(protocol, START)
    engine, data = Engine(planned(job).engine), writes(made.packets, job.flows[0].qpns[0])
    flag = -4 if protocol == "ll" else -8
    odd = patched(flag, bytes([data[0][1][flag - 4] ^ 1]))(data[0][1])
    feed(engine, [(0, odd), *data[1:]])
    assert kinds(engine) == [] and engine.outcomes(0)["unanchored"][0] == 1 and engine.begun == START + 1


def simple_of(*words: int) -> tuple[Job, list[Packet], list[Packet]]:
    """SIMPLE whose gradients are these 32-bit words again and again: a connection's data and clear-to-sends."""
    job = traffic("simple", START)[0]
    values = np.resize(np.array(words, np.uint32), COUNT).view(np.float32)
    made = generate(job, iterations=4, first_iteration=START, gradients=lambda *_: values)
    return job, writes(made.packets, job.flows[0].qpns[0]), writes(made.packets, job.flows[0].cts_qpns[0])


def test_data_that_look_like_a_flag_say_no_place() -> None:
    """Every word is the step of the message, as a flag of LL has it. Nothing of SIMPLE is absolute but what was
    announced."""
    _, _, ctss = simple_of(0)
    number = int.from_bytes(ctss[0][1][NUMBER_AT : NUMBER_AT + 8], "little")
    job, data, _ = simple_of(2 * (number - 1) + 1)
    engine = Engine(planned(job).engine)
    feed(engine, data)
    assert engine.outcomes(0)["unanchored"][0] == len(data) and engine.begun == -1


@pytest.mark.parametrize("words", [(0,), (1 << 30, 2 << 29, 3 << 28, 1 << 29)], ids=["zeros", "large-words-in-turn"])
def test_data_that_cannot_be_a_flag_are_no_tries(words: tuple[int, ...]) -> None:
    """More than 64 packets of zeros, or of a last word of LL128's lines that no step is. Then the clear-to-sends come,
    and what follows is found."""
    job, data, ctss = simple_of(*words)
    engine, half = Engine(planned(job).engine), len(data) // 2
    assert half > TRIES
    feed(engine, [*data[:half], *ctss, *data[half:]])
    assert engine.outcomes(0)["unanchored"][0] == half and engine.begun == START + 3
