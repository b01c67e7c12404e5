"""What the receiving thread drops, and what a reader takes: counted by cause, never more than there is room for."""

from __future__ import annotations

import time

import pytest

from dataplane.pydpdk import Mbuf, Mempool, Port, Ring
from dataplane.pydpdk.ffi import ffi, lib
from dataplane.reader import RingReader
from dataplane.rx import RingMemory, RxConfig, RxThread
from tests.flowcheck.memory_ring import MemoryRing

from .conftest import wait_until

OL_FLAGS_WORD, IP_CHECKSUM_BAD = 3, 1 << 4  # struct rte_mbuf: of DPDK's stable ABI


def test_other_traffic_is_dropped_and_counted_if_asked(eal, captures, tmp_path):
    """TCP, DNS and ARP; RoCE stays, and so does what may hide it."""
    roce = [r.data[:36] + b"\x12\xb7" + r.data[38:] for r in captures.records(40, sizes=(100, 1082))]
    tcp = [frame[:23] + b"\x06" + frame[24:] for frame in roce]
    dns = [frame[:36] + b"\0\x35" + frame[38:] for frame in roce]
    arp = [bytes(12) + b"\x08\x06" + bytes(50)] * 40
    gre = [frame[:23] + b"\x2f" + frame[24:] for frame in roce]
    pieces = [frame[:20] + b"\x20\0" + frame[22:] for frame in dns]  # the first of each datagram; all are kept
    mixed = [frame for group in zip(roce, tcp, dns, arp, gre, pieces, strict=True) for frame in group]
    path = tmp_path / "mixed.pcap"
    path.write_bytes(captures.pcap([captures.Record(frame) for frame in mixed]))
    pool = Mempool(eal, "mixed", 1023, 4352)
    port = Port(eal, "net_pcap_mixed", f"rx_pcap={path}")
    memory = RingMemory(eal, 256, 4352)
    port.configure()
    port.rx_queue(0, pool)
    port.start()
    rx = RxThread(port, memory, RxConfig(expected=240, roce_only=True))
    rx.start()
    wait_until(lambda: rx.finished)
    kept = [frame for group in zip(roce, gre, pieces, strict=True) for frame in group]
    assert [packet.data for packet in RingReader(memory.ring_address)] == kept
    counters = memory.counters()
    assert (counters["received"], counters["not_roce"], counters["published"]) == (240, 120, 120)
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


# -- what only a live port says ------------------------------------------------------------------------


@pytest.fixture
def live(eal):
    """live(name, **options) -> a port's buffers, the ring at its far end, the ring it fills, and what fills that."""
    pools = []

    def make(name: str, **options: object) -> tuple[Mempool, Ring, RingMemory, RxThread]:
        pools.append(Mempool(eal, name, 255, 4352))
        port = Port(eal, f"net_ring_{name}")
        port.configure()
        port.rx_queue(0, pools[-1])
        port.start()
        far_end, memory = Ring.of(eal, f"ETH_RXTX0_net_ring_{name}"), RingMemory(eal, 64, 4352)
        return pools[-1], far_end, memory, RxThread(port, memory, RxConfig(**options))

    yield make
    for pool in pools:
        pool.close()  # and what came from it


def test_each_burst_has_the_time_at_which_it_was_taken(live):
    pool, far_end, memory, rx = live("stamped", stamp=True)
    moments = [time.time_ns()]
    for number in range(3):
        assert far_end.put([Mbuf(pool, bytes([number]) * 60) for _ in range(2)]) == 2
        assert rx.poll() == 2
        moments.append(time.time_ns())
    stamps = [packet.timestamp_ns for packet in RingReader(memory.ring_address).take(6)]
    assert stamps[::2] == stamps[1::2], "a burst has one time"
    for before, stamp, after in zip(moments, stamps[::2], moments[1:], strict=False):
        assert before <= stamp <= after


def test_what_the_port_found_damaged_is_counted_apart_from_other_traffic(live, captures):
    """A port tells of a wrong IP checksum in the buffer's flags."""
    roce = captures.records(1, sizes=(100,))[0].data
    roce = roce[:36] + b"\x12\xb7" + roce[38:]
    tcp = roce[:23] + b"\x06" + roce[24:]
    pool, far_end, memory, rx = live("damaged", roce_only=True)
    frames = [Mbuf(pool, frame) for frame in (tcp, roce, roce, tcp, roce, tcp)]
    for at in (2, 3):
        flags = ffi.cast("uint64_t *", frames[at].pointer) + OL_FLAGS_WORD
        flags[0] |= IP_CHECKSUM_BAD
    assert far_end.put(frames) == rx.poll() == 6
    counters = memory.counters()
    assert [counters[name] for name in ("received", "bad_checksum", "not_roce", "published")] == [6, 2, 2, 2]
    assert [packet.data for packet in RingReader(memory.ring_address).take()] == [roce, roce]
    rx.close()
    assert pool.in_use == 0
