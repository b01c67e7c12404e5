"""What the consumer has not released stays as it is, byte for byte, while the ring goes round beside it."""

from __future__ import annotations

import time

import pytest

from dataplane.pydpdk import Mempool, Port
from dataplane.reader import RingReader
from dataplane.rx import RingMemory, RxConfig, RxThread
from tests.flowcheck.memory_ring import unread

RING, SLOT, ROOM, PACKETS = 8, 1152, 1000, 600
# One buffer; one buffer, filled; two buffers; two that fill their slot, of which the second begins inside a cache line.
SIZES = (60, 1000, 1001, 1152)


@pytest.mark.parametrize("take", [1, 3, 7])
def test_unread_packets_stay_while_the_ring_goes_round(eal, captures, dump, tmp_path, take):
    """The ring is full whenever it is looked at, so beside each new packet lies the oldest unread one."""
    records = captures.records(PACKETS, sizes=SIZES)
    frames = [record.data for record in records]
    path = tmp_path / "mixed.pcap"
    path.write_bytes(captures.pcap(records))
    pool = Mempool(eal, "unread", 255, ROOM)
    port = Port(eal, "net_pcap_unread", f"rx_pcap={path}")
    memory = RingMemory(eal, RING, SLOT)
    port.configure()
    port.rx_queue(0, pool)
    port.start()
    assert pool.in_use == 0
    chosen = dump()
    rx = RxThread(port, memory, RxConfig(wait_when_full=True, **chosen))
    reader, released = RingReader(memory.ring_address), 0
    deadline = time.monotonic() + 120
    while released < PACKETS:
        expected = frames[released : released + RING]
        rx.poll(1)
        while reader.ready < len(expected):  # an engine copies on a thread of its own
            assert time.monotonic() < deadline
            rx.poll(1)
        assert unread(memory.ring_address) == expected
        # Entries of `hold` keep their one buffer until they are released; nothing else keeps any.
        held = sum(len(frame) <= ROOM for frame in expected) if chosen["dump"] == "hold" else 0
        assert pool.in_use == held
        assert [packet.data for packet in reader.take(take)] == expected[:take]
        released += len(expected[:take])
    rx.stop()
    assert reader.drained
    rx.close()
    assert pool.in_use == 0
