"""One suite over every source and every dump strategy: the same packets out, in order, byte for byte."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataplane.capture import PcapSource, memory_needed
from dataplane.pcapfile import MAX_FRAME, CaptureFileError, scan
from dataplane.pydpdk import DmaDevice, Mempool, Port
from dataplane.pydpdk.ffi import lib
from dataplane.reader import RingReader
from dataplane.rx import RingMemory, RxConfig, RxThread

from .conftest import wait_until


def adds_up(counters, offered):
    lost = counters["nic_missed"] + counters["errors"] + counters["no_mbuf"]
    assert counters["received"] + lost == offered
    dropped = ("ring_full", "oversize", "not_roce", "bad_checksum", "unfinished")
    assert counters["received"] == counters["published"] + sum(counters[name] for name in dropped)


def replay(source):
    with source:
        source.start()
        packets = list(RingReader(source.ring_address))
        assert source.finished and source.error is None, source.error
    adds_up(source.counters(), source.info.packet_count)
    return packets


def test_every_format(eal, captures, file_format, dump, tmp_path):
    records = captures.records(3000)
    path = tmp_path / "capture"
    path.write_bytes(file_format(records))
    packets = replay(PcapSource(eal, path, stream=7, **dump()))
    assert [p.data for p in packets] == [r.data for r in records]
    # net_pcap keeps microseconds, whatever the file has
    assert [p.timestamp_ns for p in packets] == [
        r.seconds * 10**9 + r.nanoseconds // 1000 * 1000 for r in records
    ]
    assert {p.stream for p in packets} == {7}
    assert not any(p.truncated for p in packets)


def test_ring_smaller_than_the_file_and_a_slow_consumer(eal, captures, dump, tmp_path):
    records = captures.records(2000)
    path = tmp_path / "capture.pcap"
    path.write_bytes(captures.pcap(records))
    with PcapSource(eal, path, ring_size=16, **dump()) as source:
        source.start()
        reader, packets = RingReader(source.ring_address), []
        while not reader.drained:
            packets += reader.take(3)
            assert reader.ready <= 16
        assert source.error is None
        counters = source.counters()
    assert [p.data for p in packets] == [r.data for r in records]
    assert counters["waits"] > 0 and counters["ring_full"] == 0
    adds_up(counters, 2000)


def test_a_pause_of_the_consumer_is_not_a_stall(eal, captures, dump, tmp_path):
    records = captures.records(100)
    path = tmp_path / "capture.pcap"
    path.write_bytes(captures.pcap(records))
    with PcapSource(eal, path, ring_size=8, **dump(), stall_seconds=0.05) as source:
        source.start()
        reader = RingReader(source.ring_address)
        deadline = time.monotonic() + 0.3  # six times the stall limit, the ring being full
        while time.monotonic() < deadline:
            assert not source.finished
            time.sleep(0.01)
        assert [p.data for p in reader] == [r.data for r in records]
        assert source.error is None


@pytest.mark.parametrize("size", [1, 13, 14, 63, 64, 65, 1151, 1152, 1153, 4352, 4353, 9018, 65535])
def test_frame_sizes(eal, captures, dump, tmp_path, size):
    """From shorter than a header to many buffers per packet."""
    rng = __import__("random").Random(size)
    records = [captures.Record(rng.randbytes(max(1, size - i % 3))) for i in range(300)]
    path = tmp_path / "capture.pcap"
    path.write_bytes(captures.pcap(records))
    packets = replay(PcapSource(eal, path, ring_size=64, **dump()))
    assert [p.data for p in packets] == [r.data for r in records]


@pytest.mark.parametrize("room", [64, 100, 1000])
def test_packets_in_many_buffers(eal, captures, dump, tmp_path, room):
    records = captures.records(500, sizes=(60, 1082, 4170, 9000))
    path = tmp_path / "capture.pcap"
    path.write_bytes(captures.pcap(records))
    source = PcapSource(eal, path, data_room=room, **dump())
    packets = replay(source)
    assert [p.data for p in packets] == [r.data for r in records]
    assert source.counters()["bytes"] == sum(len(r.data) for r in records)


def test_cut_packets_are_delivered_and_marked(eal, captures, file_format, dump, tmp_path):
    whole = captures.records(40, sizes=(1082,))
    records = [
        captures.Record(r.data[: 64 + i], length=len(r.data)) if i % 2 else r for i, r in enumerate(whole)
    ]
    path = tmp_path / "cut"
    path.write_bytes(file_format(records))
    source = PcapSource(eal, path, **dump())
    assert source.info.truncated_packets == 20
    packets = replay(source)
    assert [p.data for p in packets] == [r.data for r in records]
    assert [p.truncated for p in packets] == [bool(i % 2) for i in range(40)]
    assert source.counters()["truncated"] == 20


def test_truncation_by_the_ip_length(eal, captures, dump, tmp_path):
    """VLAN tags, IPv6, padding, headers cut in the middle, frames without an IP length."""
    mac = bytes(12)
    ip4 = b"\x45\0\0\x2e" + bytes(42)  # 46 bytes
    ip6 = b"\x60\0\0\0\0\x08\x11\x40" + bytes(40)  # 40 + 8
    cases = [
        (mac + b"\x08\0" + ip4, False),
        (mac + b"\x08\0" + ip4[:-1], True),
        (mac + b"\x08\0" + ip4 + bytes(9), False),
        (mac + b"\x81\0\0\1\x08\0" + ip4, False),
        (mac + b"\x81\0\0\1\x08\0" + ip4[:-1], True),
        (mac + b"\x88\xa8\0\1\x81\0\0\2\x86\xdd" + ip6, False),
        (mac + b"\x88\xa8\0\1\x81\0\0\2\x86\xdd" + ip6[:-1], True),
        (mac + b"\x86\xdd" + ip6[:5], True),
        (mac + b"\x08\x06" + bytes(28), False),
        (mac + b"\x81\0\0", True),
        (mac + b"\x08", True),
        (b"\0", True),
    ]
    path = tmp_path / "cases.pcap"
    path.write_bytes(captures.pcap([captures.Record(data) for data, _ in cases]))
    packets = replay(PcapSource(eal, path, **dump()))
    assert [(p.data, p.truncated) for p in packets] == cases


def test_several_files_at_once(eal, captures, dump, tmp_path):
    truth, sources, got = {}, [], {}
    for stream in range(6):
        truth[stream] = captures.records(1500, seed=stream)
        path = tmp_path / f"{stream}.pcap"
        path.write_bytes(list(captures.formats.values())[stream](truth[stream]))
        sources.append(PcapSource(eal, path, stream=stream, ring_size=64, **dump()))

    def consume(stream):
        got[stream] = list(RingReader(sources[stream].ring_address))

    threads = [threading.Thread(target=consume, args=(stream,)) for stream in truth]
    for source, thread in zip(sources, threads, strict=True):
        source.start()
        thread.start()
    for source, thread in zip(sources, threads, strict=True):
        thread.join()
        assert source.error is None
        source.close()
    for stream, records in truth.items():
        assert [p.data for p in got[stream]] == [r.data for r in records]
        assert {p.stream for p in got[stream]} == {stream}


@pytest.mark.parametrize(
    "name", ["a,b.pcap", "a b.pcap", "rx_pcap=x,iface=y z.pcap", "ü(1)[2]'\".pcap", "-x"]
)
def test_awkward_paths(eal, captures, dump, tmp_path, name):
    records = captures.records(20)
    path = tmp_path / name
    path.write_bytes(captures.pcap(records))
    assert [p.data for p in replay(PcapSource(eal, path, **dump()))] == [r.data for r in records]


@pytest.mark.captures
def test_shared_captures(eal, shared_captures, dump):
    utils = pytest.importorskip("scapy.utils", reason="scapy is the oracle here")
    strategy = dump()  # its engines serve one file after the other
    need = memory_needed([scan(path) for path in shared_captures])
    assert need.total_mb > 0 and str(shared_captures[0]) in need.text
    for path in shared_captures:
        with utils.RawPcapReader(str(path)) as oracle:
            truth = [bytes(data) for data, _ in oracle if len(data) < MAX_FRAME]  # where scapy cuts
        packets = replay(PcapSource(eal, path, ring_size=512, **strategy))
        assert [p.data for p in packets] == truth[: scan(path).packet_count], path


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["pcap", "pcap-nanoseconds-big-endian", "pcapng", "pcapng-two-interfaces"]),
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_what_the_scan_accepts_arrives(eal, captures, tmp_path, name, edits):
    """Damage: either the scan names it, or DPDK delivers exactly what the scan counted."""
    data = bytearray(captures.formats[name](captures.records(6, sizes=(60, 90))))
    for place, value in edits:
        data[place % len(data)] = value
    path = tmp_path / "flipped"
    path.write_bytes(data)
    try:
        source = PcapSource(eal, path, stall_seconds=0.2)
    except CaptureFileError:
        return
    assert len(replay(source)) == source.info.packet_count


def test_every_byte_changed(eal, captures, file_format, tmp_path):
    """The same for every single byte of a small file: the scan and libpcap agree on what is acceptable."""
    whole = file_format([captures.Record(bytes([i]) * (13 + i)) for i in range(3)])
    path = tmp_path / "changed"
    for place in range(len(whole)):
        for value in (0, 9, 255):
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            try:
                source = PcapSource(eal, path, ring_size=64, stall_seconds=0.2)
            except CaptureFileError:
                continue
            packets = replay(source)
            assert len(packets) == source.info.packet_count, (place, value)
            assert sum(len(p.data) for p in packets) == source.info.captured_bytes, (place, value)


# -- a live source: net_pcap again, but told that it cannot wait -------------------------------------


def live(eal, path, *, ring_size, slot_size, expected, room=4352, **dump):
    pool = Mempool(eal, "live", 1023, room)
    port = Port(eal, "net_pcap_live", f"rx_pcap={path}")
    memory = RingMemory(eal, ring_size, slot_size)
    port.configure()
    port.rx_queue(0, pool)
    port.start()
    rx = RxThread(port, memory, RxConfig(expected=expected, **dump))
    rx.start()
    return pool, memory, rx


def test_overload_is_counted_to_the_packet(eal, captures, dump, tmp_path):
    records = captures.records(5000)
    path = tmp_path / "overload.pcap"
    path.write_bytes(captures.pcap(records))
    pool, memory, rx = live(eal, path, ring_size=128, slot_size=4352, **dump(), expected=5000)
    wait_until(lambda: rx.finished)
    counters = memory.counters()
    assert counters["received"] == 5000
    assert counters["bytes"] == sum(len(r.data) for r in records)
    assert counters["published"] == 128 and counters["ring_full"] == 5000 - 128
    adds_up(counters, 5000)
    assert [p.data for p in RingReader(memory.ring_address)] == [r.data for r in records[:128]]
    rx.close()  # hold keeps what the ring keeps
    assert pool.in_use == 0


def test_frames_larger_than_a_slot_are_counted(eal, captures, dump, tmp_path):
    records = captures.records(400, sizes=(60, 1082, 4170))
    path = tmp_path / "oversize.pcap"
    path.write_bytes(captures.pcap(records))
    pool, memory, rx = live(eal, path, ring_size=512, slot_size=1152, room=1152, **dump(), expected=400)
    wait_until(lambda: rx.finished)
    fitting = [r.data for r in records if len(r.data) <= 1152]
    assert [p.data for p in RingReader(memory.ring_address)] == fitting
    assert memory.counters()["oversize"] == 400 - len(fitting)
    adds_up(memory.counters(), 400)
    rx.close()  # hold keeps what the ring keeps
    assert pool.in_use == 0


def test_an_engine_that_is_full(eal, captures, tmp_path):
    """31 descriptors, bursts of 64: the CPU moves the rest, and nothing is out of order."""
    records = captures.records(3000)
    path = tmp_path / "full.pcap"
    path.write_bytes(captures.pcap(records))
    with DmaDevice(eal, "dma_skeleton_full", depth=32) as engine:
        with PcapSource(eal, path, dump="dma", engines=(engine,), dma_minimum=1) as source:
            packets = replay(source)
        counters = source.counters()
    assert [p.data for p in packets] == [r.data for r in records]
    assert counters["cpu_pieces"] > 0 and counters["dma_pieces"] > 0
    assert counters["cpu_pieces"] + counters["dma_pieces"] == 3000


def test_small_pieces_are_moved_by_the_cpu(eal, captures, tmp_path):
    """Half of the packets are shorter than the least that an engine is given."""
    records = captures.records(400, sizes=(100, 1082))
    path = tmp_path / "small.pcap"
    path.write_bytes(captures.pcap(records))
    with DmaDevice(eal, "dma_skeleton_small") as engine:
        with PcapSource(eal, path, dump="dma", engines=(engine,), dma_minimum=1000) as source:
            packets = replay(source)
        counters = source.counters()
    assert [p.data for p in packets] == [r.data for r in records]
    small = sum(len(r.data) < 1000 for r in records)
    assert 0 < small < 400 and counters["cpu_pieces"] >= small and counters["dma_pieces"] <= 400 - small


def test_an_engine_that_hangs(eal, captures, tmp_path):
    """Its device stopped, it completes nothing: the thread ends and says which, what it had is counted."""
    path = tmp_path / "hangs.pcap"
    path.write_bytes(captures.pcap(captures.records(100)))
    engine = DmaDevice(eal, "dma_skeleton_hangs")
    lib.rte_dma_stop(engine.device)
    with PcapSource(eal, path, ring_size=64, dump="dma", engines=(engine,), dma_minimum=1) as source:
        source.start()
        wait_until(lambda: source.counters()["received"] >= 64)
        source.stop()
        assert list(RingReader(source.ring_address)) == []
        assert "dma_skeleton_hangs: copies were never completed" in str(source.error)
        counters = source.counters()
        assert counters["unfinished"] == counters["received"] == 64
