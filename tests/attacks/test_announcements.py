"""Clear-to-sends of another stream that are forged, stale, or contradict others: nothing wrong is placed, no flow ends.

A clear-to-send says the number of a message and its address. Together with the PSN, which comes again every 2^24
packets, the number says where a flow is that was met in mid-stream. LAPS iterations later everything looks the same:
the PSNs, the addresses, the lengths. Only the number differs.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from parser.machine import Engine

from flowcheck.job.model import Job
from flowcheck.rebuild.plan import plan_job
from lab.synth import example_job, generate
from tests.flowcheck.altered import PAYLOAD_AT, Packet, destination, opcode, sealed
from tests.flowcheck.memory_ring import MemoryRing

COUNT = 30_000
FIRST, LAPS = 900, 2**24
ADDRESS_AT, NUMBER_AT = 70, 70 + 40  # in a clear-to-send of NCCL 2.27: least significant byte first


@functools.cache
def run(first: int) -> tuple[Job, list[Packet], list[Packet], dict]:
    """Two iterations of the job from `first` on, at times from 0 on: data, clear-to-sends, what is reduced."""
    job = example_job(count=COUNT, protocol="simple", mtu=1024, startup=False, rebuild=False, version="2.27.7")
    made = generate(job, iterations=2, first_iteration=first)
    receivers = {qpn for flow in job.flows for qpn in flow.qpns}
    senders = {qpn for flow in job.flows for qpn in flow.cts_qpns}
    began = made.packets[0][0]
    written = [(ns - began, frame) for ns, frame in made.packets if opcode(frame) in PAYLOAD_AT]
    return (
        job, [one for one in written if destination(one[1]) in receivers],
        [one for one in written if destination(one[1]) in senders], made.reduced,
    )


def engine_of(job: Job, streams: int, threads: int = 1) -> Engine:
    plan = plan_job(job, streams=streams)
    return Engine(replace(plan.engine, threads=threads))


def in_time(engine: Engine, *streams: list[Packet]) -> None:
    """All packets in the order of their times, each over its stream."""
    rings = [MemoryRing(1 << max(len(packets), 1).bit_length()) for packets in streams]
    for ring, packets in zip(rings, streams, strict=True):
        ring.put(packets)
    for _, stream in sorted((ns, -i) for i, packets in enumerate(streams) for ns, _ in packets):
        assert engine.run(-stream, rings[-stream].ring_address, 1) == (1, False)


def patched(packet: Packet, at: int, flip: int) -> Packet:
    ns, frame = packet
    return ns, sealed(frame[:at] + bytes([frame[at] ^ flip]) + frame[at + 1 :])


def later(packets: list[Packet], ns: int) -> list[Packet]:
    return [(time + ns, frame) for time, frame in packets]


def nothing_placed(engine: Engine) -> bool:
    assert engine.disagreements() == []
    return all(engine.outcomes(s)[name] == (0, 0) for s in range(engine.config.streams) for name in ("placed", "aside"))


def all_placed(engine: Engine, reduced: dict) -> bool:
    assert engine.disagreements() == []
    return all(
        engine.oldest <= iteration and engine.cells(iteration)[: COUNT // 2].all()
        and engine.region(iteration)[: 4 * COUNT].tobytes() == truth.tobytes()
        for (iteration, _), truth in reduced.items()
    )


threads = pytest.mark.parametrize("threads", [1, 2])
up_to_three = pytest.mark.parametrize("threads", [1, 2, 3])


def test_laps_later_all_looks_the_same() -> None:
    """What the tests below rest on."""
    _, data, announced, _ = run(FIRST)
    _, late_data, late_announced, _ = run(FIRST + LAPS)
    assert [frame[42:54] for _, frame in data] == [frame[42:54] for _, frame in late_data]
    assert [f[ADDRESS_AT : ADDRESS_AT + 8] for _, f in announced] == [
        f[ADDRESS_AT : ADDRESS_AT + 8] for _, f in late_announced
    ]
    assert announced[0][1][NUMBER_AT : NUMBER_AT + 8] != late_announced[0][1][NUMBER_AT : NUMBER_AT + 8]


@threads
@pytest.mark.parametrize("share", [0.5, 1.5])
@pytest.mark.parametrize("turn", [1, -1], ids=["announced-before", "clock-behind"])
def test_what_an_older_run_announced_leads_nowhere(threads: int, share: float, turn: int) -> None:
    """An older run on the same queue pairs was whole laps behind. Within the time in which half a lap can pass the two
    could not be told apart, nor could any run be so far by then."""
    job, _, announced, _ = run(FIRST)
    _, data, _, _ = run(FIRST + LAPS)
    engine = engine_of(job, 2, threads)
    gap = turn * int(share * engine.config.outage_ns)
    rings = [MemoryRing(1 << len(packets).bit_length()) for packets in (data, announced)]
    for ring, packets in zip(rings, (later(data, gap + 10**9), later(announced, 10**9)), strict=True):
        ring.put(packets)
    engine.run(1, rings[1].ring_address, len(announced))
    engine.run(0, rings[0].ring_address, len(data))
    assert (engine.begun < 0) == nothing_placed(engine) == (share > 1)


@threads
def test_a_run_is_found_by_its_own_announcements_after_those_of_an_older_one(threads: int) -> None:
    job, _, stale, _ = run(FIRST)
    _, data, announced, reduced = run(FIRST + LAPS)
    engine = engine_of(job, 2, threads)
    in_time(engine, later(data, 10**9), stale + later(announced, 10**9))
    assert all_placed(engine, reduced)


@threads
def test_one_forged_announcement_does_not_say_the_lap(threads: int) -> None:
    """The first of them all, which nothing else bears out yet, names a message 2^37 later."""
    job, data, announced, _ = run(FIRST)
    engine = engine_of(job, 2, threads)
    first = data[0]
    [wanted] = [p for p in announced[:20] if p[1][ADDRESS_AT : ADDRESS_AT + 8] == first[1][54:62][::-1]][:1]
    assert wanted[1][NUMBER_AT + 4] == 0
    own = [p for p in announced if p[0] <= first[0] and p is not wanted]
    in_time(engine, [first], [*own, patched(wanted, NUMBER_AT + 4, 0x20)])
    assert nothing_placed(engine) and engine.begun == -1 and engine.outcomes(0)["unanchored"][0] == 1


@up_to_three
@pytest.mark.parametrize("first", [1, 2])
def test_streams_that_announce_different_laps_are_not_believed(threads: int, first: int) -> None:
    job, data, announced, _ = run(FIRST)
    engine = engine_of(job, 3, threads)
    streams = [run(FIRST + LAPS)[2], announced][:: 1 if first == 1 else -1]
    in_time(engine, data, *streams)
    assert nothing_placed(engine) and engine.begun == -1


@up_to_three
@pytest.mark.parametrize("first", [1, 2])
def test_streams_that_announce_different_addresses_are_not_believed(threads: int, first: int) -> None:
    """The same numbers: each of the other stream's buffers lies 16 MiB further."""
    job, data, announced, _ = run(FIRST)
    engine = engine_of(job, 3, threads)
    other = [patched(packet, ADDRESS_AT + 3, 1) for packet in announced]
    in_time(engine, data, *[other, announced][:: 1 if first == 1 else -1])
    assert nothing_placed(engine) and engine.begun == -1


@threads
def test_the_own_stream_contradicts_others(threads: int) -> None:
    """Its announcements name no place that the packets have; what the other stream says of the same numbers fits."""
    job, data, announced, _ = run(FIRST)
    engine = engine_of(job, 2, threads)
    own = [patched(packet, ADDRESS_AT + 3, 1) for packet in announced]
    in_time(engine, sorted(own + data), announced)
    assert nothing_placed(engine) and engine.begun == -1


@threads
@pytest.mark.parametrize("wrong", ["address", "run"])
def test_another_stream_ends_no_flow(threads: int, wrong: str) -> None:
    """The connections are seen from their beginning. The other stream has other addresses for the same numbers, or is
    of an older run."""
    job, data, announced, reduced = run(0)
    odd = [patched(packet, ADDRESS_AT + 1, 0x10) for packet in announced] if wrong == "address" else run(FIRST)[2]
    engine = engine_of(job, 2, threads)
    in_time(engine, data, odd)
    assert all_placed(engine, reduced)
