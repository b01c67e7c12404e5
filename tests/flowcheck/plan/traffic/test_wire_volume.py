"""What the planner counts at a port, against every message of the parser's lanes and every packet that synth writes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser.lane import messages

from flowcheck.plan.traffic import wire_volume as wire
from lab.synth import example_job, generate
from parser.chunk_layout import Protocol
from parser.wire import edge_lane

VERSIONS = ("2.19.4", "2.20.5", "2.22.3", "2.27.7", "2.30.7")
PROTOCOLS = {"ll": Protocol.LL, "ll128": Protocol.LL128, "simple": Protocol.SIMPLE}
WRITES, ACK = (6, 7, 8, 9, 10, 11), 17


def listed(call: wire.Call, position: int, mtu: int) -> tuple[int, int, int, int, int, int]:
    """(messages, packets, payload, final packets, final payload, final data) of a port, by listing every message."""
    plan = call.plan()
    total = [0] * 6
    for channel in range(call.channels):
        for other in range(call.ranks):
            for source, target in ((position, other), (other, position)):
                lane = None if source == target else edge_lane(plan, channel, source, target)
                if lane is None:
                    continue
                for _, count, size, final, _ in messages(lane):
                    packets = max(1, -(-size // mtu))
                    total[0] += 1
                    total[1] += packets
                    total[2] += size
                    if final:
                        total[3] += packets
                        total[4] += size
                        total[5] += count * call.element_bytes
    return (*total,)  # type: ignore[return-value]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(Protocol)), st.integers(2, 9), st.integers(1, 3_000_000), st.sampled_from([2, 4]),
    st.sampled_from(["ring", "tree"]), st.sampled_from([1, 2, 4]), st.sampled_from(VERSIONS),
    st.integers(0, 8), st.sampled_from([1024, 4096]),
)
def test_what_is_counted_is_what_the_parser_lists(
    protocol: Protocol, ranks: int, elements: int, element_bytes: int, algorithm: str, channels: int, version: str,
    position: int, mtu: int,
) -> None:
    call = wire.Call(protocol, ranks, elements, element_bytes, algorithm, channels, version)
    found = wire.traffic_at(call, position % ranks, mtu)
    counted = (found.messages, found.packets, found.payload, found.final_packets, found.final_payload, found.final_data)
    assert counted == listed(call, position % ranks, mtu)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("algorithm", "channels"), [("ring", 1), ("ring", 2), ("tree", 2)])
@pytest.mark.parametrize("mtu", [1024, 4096])
def test_what_is_counted_is_what_synth_sends(protocol: str, algorithm: str, channels: int, mtu: int) -> None:
    """Of a steady iteration: synth is written from the reference alone. Frames of a capture lack checksum, preamble and
    gap, 24 bytes each."""
    sizes = (30_000, 70_001)
    job = example_job(
        ranks=4, channels=channels, count=sizes, protocol=protocol, algorithm=algorithm, mtu=mtu, startup=False,
        rebuild=False,
    )
    made = generate(job, iterations=1, ports=[1], first_iteration=2)
    data = [frame for _, frame in made.ports[1] if frame[42] in WRITES and not is_cts(frame)]
    control = [frame for _, frame in made.ports[1] if frame[42] == ACK or is_cts(frame)]
    expected = wire.Traffic()
    for size in sizes:
        call = wire.Call(PROTOCOLS[protocol], 4, size, 4, algorithm, channels)
        expected = expected.plus(wire.traffic_at(call, 1, mtu))
    assert len(data) == expected.packets
    assert sum(len(frame) + 24 for frame in data) == expected.frames
    assert sum(is_cts(frame) for frame in control) == expected.messages
    assert len(control) == expected.control
    assert sum(len(frame) + 24 for frame in control) == expected.control_frames


def is_cts(frame: bytes) -> bool:
    """A plain write of one packet, of the size that a clear-to-send has (nccl-wire 5.4)."""
    return frame[42] == 10 and struct.unpack(">I", frame[66:70])[0] == 64


@pytest.mark.parametrize(("protocol", "factor"), [("ll", 2), ("ll128", 16 / 15), ("simple", 1)])
def test_protocols_cost_what_the_reference_says(protocol: str, factor: float) -> None:
    """LL doubles the bytes, LL128 sends 128 for 120; a ring of n sends 2 (n-1)/n of the tensor in each direction."""
    call = wire.Call(PROTOCOLS[protocol], 8, 250_000_000, 4)
    found = wire.traffic_at(call, 0, 4096, "ingress")
    assert found.payload == pytest.approx(2 * 7 / 8 * 1e9 * factor, rel=0.002)
    assert found.final_data == pytest.approx(7 / 8 * 1e9, rel=0.001)


def test_llama2_7b_in_ll_is_56_gb_per_data_parallel_copy_and_simple_halves_it() -> None:
    """Tiers, section 5: the paper says 60 GB."""
    for protocol, gigabytes in ((Protocol.LL, 56), (Protocol.SIMPLE, 28)):
        found, _ = wire.iteration_of(wire.Call(protocol, 8, 7_000_000_000, 4), 7_000_000_000, 4096, "ingress")
        assert found.final_payload * 8 / 7 == pytest.approx(gigabytes * 1e9, rel=1e-3)


def test_both_directions_are_one_and_the_other() -> None:
    call = wire.Call(Protocol.LL128, 6, 1_000_000, 2)
    both, out, into = (wire.traffic_at(call, 2, 1024, way) for way in ("both", "ingress", "egress"))
    assert both == out.plus(into) and out.packets > 0 and into.control > 0


def test_buckets_add_up() -> None:
    call = wire.Call(Protocol.SIMPLE, 4, 25_000_000, 4)
    found, buckets = wire.iteration_of(call, 6_553_600, 4096)
    assert buckets == 4
    parts = [wire.traffic_at(wire.Call(Protocol.SIMPLE, 4, count, 4), 0, 4096) for count in (6_553_600, 5_339_200)]
    assert found == parts[0].times(3).plus(parts[1])


@pytest.mark.parametrize("protocol", list(Protocol))
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_reduced_packets_are_one_copy_of_the_gradient(protocol: Protocol, algorithm: str) -> None:
    """All ports together send N - 1 copies of it."""
    call, ranks = wire.Call(protocol, 6, 5_000_000, 4, algorithm, 2), range(6)
    sent = sum(wire.iteration_of(call, 2_000_000, 4096, "ingress", rank)[0].final_packets for rank in ranks)
    assert wire.reduced_packets(call, 2_000_000, 4096) == sent / 5
    factor = {Protocol.LL: 2, Protocol.LL128: 16 / 15, Protocol.SIMPLE: 1}[protocol]
    assert sent / 5 == pytest.approx(5_000_000 * 4 * factor / 4096, rel=0.05)
