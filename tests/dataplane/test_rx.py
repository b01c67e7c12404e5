"""What the receiving thread drops, and what a reader takes: counted by cause, never more than there is room for."""

from __future__ import annotations

import pytest

from dataplane.pydpdk import Mempool, Port
from dataplane.pydpdk.ffi import ffi, lib
from dataplane.reader import RingReader
from dataplane.rx import RingMemory, RxConfig, RxThread
from tests.flowcheck.memory_ring import MemoryRing

from .conftest import wait_until


def test_other_traffic_is_dropped_and_counted_if_asked(eal, captures, tmp_path):
    """TCP, DNS and ARP; RoCE stays, and so does what may hide it."""
    roce = [r.data[:36] + b"\x12\xb7" + r.data[38:] for r in captures.records(40, sizes=(100, 1082))]
    tcp = [frame[:23] + b"\x06" + frame[24:] for frame in roce]
    dns = [frame[:36] + b"\0\x35" + frame[38:] for frame in roce]
    arp = [bytes(12) + b"\x08\x06" + bytes(50)] * 40
    gre = [frame[:23] + b"\x2f" + frame[24:] for frame in roce]
    mixed = [frame for group in zip(roce, tcp, dns, arp, gre, strict=True) for frame in group]
    path = tmp_path / "mixed.pcap"
    path.write_bytes(captures.pcap([captures.Record(frame) for frame in mixed]))
    pool = Mempool(eal, "mixed", 1023, 4352)
    port = Port(eal, "net_pcap_mixed", f"rx_pcap={path}")
    memory = RingMemory(eal, 256, 4352)
    port.configure()
    port.rx_queue(0, pool)
    port.start()
    rx = RxThread(port, memory, RxConfig(expected=200, roce_only=True))
    rx.start()
    wait_until(lambda: rx.finished)
    kept = [frame for pair in zip(roce, gre, strict=True) for frame in pair]
    assert [packet.data for packet in RingReader(memory.ring_address)] == kept
    counters = memory.counters()
    assert (counters["received"], counters["not_roce"], counters["published"]) == (200, 120, 80)
    assert counters["bytes"] == sum(map(len, mixed))
    rx.close()
    assert pool.in_use == 0


@pytest.mark.parametrize(("capacity", "taken"), [(99, 0), (100, 1), (199, 1), (200, 2), (299, 2), (300, 3), (1000, 3)])
def test_a_reader_takes_whole_packets_that_fit(capacity, taken):
    ring = MemoryRing(8)
    ring.put([(7, bytes([number]) * 100) for number in (1, 2, 3)])
    memory = ffi.new("uint8_t[]", b"\xa5" * 1024)
    refs = ffi.new("fc_packetref[]", 8)
    assert lib.fc_reader_take(ffi.cast("fc_ring *", ring.ring_address), refs, 8, memory, capacity) == taken
    whole = b"".join(bytes([number]) * 100 for number in range(1, taken + 1))
    assert bytes(ffi.buffer(memory))[:1024] == whole.ljust(1024, b"\xa5")
    assert ring.waiting == 3 - taken


def test_a_reader_takes_no_more_than_it_was_asked_for():
    ring = MemoryRing(8)
    ring.put([(7, bytes([number]) * 10) for number in range(5)])
    reader = RingReader(ring.ring_address)
    assert [packet.data[0] for packet in reader.take(2)] == [0, 1]
    assert [packet.data[0] for packet in reader.take(9)] == [2, 3, 4]
    assert reader.take(1) == [] and not reader.drained
    ring.put([(7, bytes(10))])
    ring.end()
    assert not reader.drained and len(reader.take()) == 1 and reader.drained
