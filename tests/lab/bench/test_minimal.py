"""The minimal loop, limit of `bench ingest`: it places what was sent, and sees a wrong flag, a gap and a repeat."""

import pytest

from lab.bench.minimal import MinimalLoop
from lab.bench.workload import Traffic, make
from parser.chunk_layout import Protocol

PLACED = {"placed": 0, "repeated": 0, "wrong": 0, "strange": 0, "gaps": 0}


def loop_of(traffic: Traffic, laps: int = 1) -> MinimalLoop:
    config = traffic.config
    protocol = config.edges[0].calls[0].lane.protocol  # type: ignore[union-attr]
    loop = MinimalLoop(
        traffic.flows, int(protocol), traffic.mtu, traffic.expected.size, traffic.packets, laps
    )
    loop.reset(2)
    return loop


def feed(loop: MinimalLoop, traffic: Traffic, numbers: "range | list[int]") -> None:
    frames = [traffic.frames[i, : traffic.lengths[i]] for i in numbers]
    for at in range(0, len(frames), 64):
        loop.feed(frames[at : at + 64])


@pytest.mark.parametrize("protocol", list(Protocol))
@pytest.mark.parametrize("mtu", [1024, 4096])
@pytest.mark.parametrize("flows", [1, 3])
def test_it_places_what_was_sent(protocol: Protocol, mtu: int, flows: int) -> None:
    """Lap after lap, each from PSN 0 into an arena of its own."""
    traffic = make(protocol, mtu, flows, 2 << 20)
    loop = loop_of(traffic, laps=2)
    for lap in range(2):
        feed(loop, traffic, range(traffic.packets))
        assert loop.counts == {**PLACED, "placed": (lap + 1) * traffic.packets}
    assert all((arena == traffic.expected).all() for arena in loop.arenas)
    feed(loop, traffic, [0])
    assert loop.counts["strange"] == 1  # no arena is left
    loop.reset(0)
    assert loop.counts == PLACED and not loop.arenas[0].any()


@pytest.mark.parametrize("protocol", [Protocol.LL, Protocol.LL128])
def test_it_checks_every_flag(protocol: Protocol) -> None:
    traffic = make(protocol, 1024, 1, 1 << 17)
    first, step = (4, 8) if protocol == Protocol.LL else (120, 128)
    start = int(traffic.payloads[1] - traffic.addresses[1])
    for flag in range(first, 1024, step):
        byte = start + flag
        traffic.frames[1, byte] ^= 0x40
        loop = loop_of(traffic)
        feed(loop, traffic, [0, 1, 2])
        traffic.frames[1, byte] ^= 0x40
        assert loop.counts == {**PLACED, "placed": 2, "wrong": 1}, flag


def test_it_sees_gaps_repeats_and_strangers() -> None:
    traffic = make(Protocol.SIMPLE, 1024, 1, 1 << 19)
    loop = loop_of(traffic)
    feed(loop, traffic, [0, 1, 3, 3])
    assert loop.counts == {**PLACED, "placed": 3, "repeated": 1, "gaps": 2}
    frame = traffic.frames[4, : traffic.lengths[4]].copy()
    frame[49] ^= 1  # another QP
    loop.feed([frame, frame[:40], traffic.frames[5, :900]])
    assert loop.counts["strange"] == 3


def test_whole_packets_only() -> None:
    with pytest.raises(ValueError, match="whole packets"):
        MinimalLoop([(bytes(4), bytes(4), 1)], 0, 1024, 1000, 64, 1)
