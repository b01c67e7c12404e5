"""Starting, stopping, closing and failing: nothing leaks, nothing hangs, every refusal says why."""

from __future__ import annotations

import os
import threading

import pytest

from dataplane.capture import PcapSource
from dataplane.pcapfile import CaptureFileError, scan
from dataplane.pydpdk import DpdkError, Mempool, NotEnoughMemory, Port
from dataplane.reader import RingReader
from dataplane.rx import RingMemory, RxConfig, RxThread, ring_bytes, slot_for

from .conftest import threads, wait_until


@pytest.fixture
def capture(captures, tmp_path):
    path = tmp_path / "capture.pcap"
    path.write_bytes(captures.pcap(captures.records(300)))
    return path


def open_files():
    return len(os.listdir("/proc/self/fd"))


def mapped():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def test_hundred_cycles_leave_nothing(eal, capture, dump):
    """Ports, queues, pools, rings and engines, with every strategy."""

    def cycle():
        chosen = dump()
        with PcapSource(eal, capture, ring_size=64, **chosen) as source:
            source.start()
            assert sum(1 for _ in RingReader(source.ring_address)) == 300
        for engine in chosen.get("engines", ()):
            engine.close()

    cycle()
    before = open_files(), threading.active_count(), len(threads())
    memory = mapped()
    for _ in range(100):
        cycle()
    assert (open_files(), threading.active_count(), len(threads())) == before
    assert mapped() - memory < 32 << 20


def test_ports_and_queues_restart(eal, capture):
    pool = Mempool(eal, "restart", 511, 4352)
    port = Port(eal, "net_pcap_restart", f"rx_pcap={capture}")
    port.configure()
    port.rx_queue(0, pool)
    for _ in range(100):
        with RingMemory(eal, 512, 4352) as memory:
            port.start()
            with RxThread(port, memory, RxConfig(expected=300)) as rx:
                rx.start()
                assert sum(1 for _ in RingReader(memory.ring_address)) == 300
            port.stop()
            assert memory.counters()["published"] == 300
        assert pool.in_use == 0
    pool.close()
    assert port.closed


@pytest.mark.parametrize("victim", ["memory", "pool", "port", "rx", "eal"])
def test_any_order_of_closing(eal, capture, victim):
    parts = {"eal": eal}
    parts["memory"] = memory = RingMemory(eal, 64, 4352)
    parts["pool"] = pool = Mempool(eal, "order", 511, 4352)
    parts["port"] = port = Port(eal, "net_pcap_order", f"rx_pcap={capture}")
    port.configure()
    port.rx_queue(0, pool)
    port.start()
    parts["rx"] = rx = RxThread(port, memory, RxConfig(expected=300, wait_when_full=True))
    rx.start()
    wait_until(lambda: memory.counters()["waits"] > 0)
    parts[victim].close()
    assert rx.closed
    for part in (rx, port, pool, memory):
        part.close()
        part.close()
    assert all(part.closed for name, part in parts.items() if name != "eal")
    for use in (port.start, port.stats, lambda: pool.in_use, lambda: memory.ring_address, rx.start):
        with pytest.raises(ValueError, match="is closed"):
            use()


def test_stop_while_waiting_for_the_consumer(eal, capture):
    with PcapSource(eal, capture, ring_size=16) as source:
        source.start()
        wait_until(lambda: source.counters()["waits"] > 0)
        assert not source.finished
        source.stop()
        source.stop()
        assert source.finished and source.error is None
        assert sum(1 for _ in RingReader(source.ring_address)) == 16
        assert "284 not read" in source.summary()
    assert source.counters()["published"] == 16
    source.close()


def test_stop_before_start_ends_the_consumer(eal, capture):
    with PcapSource(eal, capture) as source:
        source.stop()
        assert list(RingReader(source.ring_address)) == []
        assert source.finished


def test_start_twice(eal, capture):
    with PcapSource(eal, capture) as source:
        source.start()
        with pytest.raises(DpdkError, match="rx thread"):
            source._rx.start()


def test_closed_eal_block_closes_sources(eal, capture):
    source = PcapSource(eal, capture)
    source.start()
    eal.close()
    assert source.counters()["received"] <= 300
    source.close()


def test_file_that_delivers_less_than_it_promised(eal, captures, tmp_path):
    path = tmp_path / "shrinks.pcap"
    data = captures.pcap(captures.records(1000, sizes=(1000,)))
    path.write_bytes(data)
    with PcapSource(eal, path, stall_seconds=0.3) as source:
        os.truncate(path, 24 + 1016 * 600 + 500)
        source.start()
        got = sum(1 for _ in RingReader(source.ring_address))
        assert source.finished
        error = source.error
    assert isinstance(error, CaptureFileError)
    assert got == 600 and "600 of 1000 packets arrived" in str(error) and str(path) in str(error)


def test_file_that_changed_since_the_scan(eal, captures, capture):
    info = scan(capture)
    capture.write_bytes(captures.pcap(captures.records(2)))
    with pytest.raises(CaptureFileError, match="changed since"):
        PcapSource(eal, capture, info=info)


@pytest.mark.parametrize("ahead", [1, -1, 10**9], ids=["a-nanosecond", "backwards", "a-second"])
def test_file_of_equal_size_that_changed_since_the_scan(eal, capture, ahead):
    """One byte is written again in place: only the time of the change tells."""
    info = scan(capture)
    with capture.open("r+b") as file:
        file.seek(40)
        byte = file.read(1)
        file.seek(40)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(capture, ns=(info.mtime_ns, info.mtime_ns + ahead))
    assert capture.stat().st_size == info.size
    with pytest.raises(CaptureFileError, match="changed since"):
        PcapSource(eal, capture, info=info)


def test_file_that_did_not_change_since_the_scan(eal, capture):
    info = scan(capture)
    os.utime(capture, ns=(0, info.mtime_ns))  # read meanwhile
    with PcapSource(eal, capture, info=info) as source:
        assert source.info == info


def test_refusals_leave_nothing_behind(eal, capture, tmp_path):
    before = open_files()
    with pytest.raises(CaptureFileError, match="cannot be opened"):
        PcapSource(eal, tmp_path / "absent.pcap")
    with pytest.raises(DpdkError, match=r"(?s)dump strategy 'teleport'.*dump='copy'"):
        PcapSource(eal, capture, dump="teleport")
    with pytest.raises(DpdkError, match="burst 0"):
        PcapSource(eal, capture, burst=0)
    with pytest.raises(ValueError, match="slots of 1152 bytes, the largest frame has 4170"):
        PcapSource(eal, capture, slot_size=1152)
    with pytest.raises(ValueError, match="power of two"):
        PcapSource(eal, capture, ring_size=1000)
    with pytest.raises(ValueError, match="multiple of 64"):
        PcapSource(eal, capture, slot_size=4200)
    with pytest.raises(NotEnoughMemory, match=r"ring of 268435456 slots x 4224 bytes \+ .* = \d+ bytes"):
        PcapSource(eal, capture, ring_size=1 << 28)
    assert open_files() == before
    assert not eal._children


def test_absent_core(eal, capture):
    with PcapSource(eal, capture, core=1000) as source:
        source.start()
        assert list(RingReader(source.ring_address)) == []
        assert "core 1000" in str(source.error)
    assert "core 1000" in str(source.error)


def test_pinned_core(eal, capture):
    core = max(os.sched_getaffinity(0))
    mask = os.sched_getaffinity(0)
    with PcapSource(eal, capture, core=core, ring_size=16) as source:
        source.start()
        wait_until(lambda: source.counters()["waits"] > 0)
        masks = {name: os.sched_getaffinity(task) for task, name in threads().items()}
        assert masks["fc-rx"] == {core}
        assert sum(1 for _ in RingReader(source.ring_address)) == 300
    assert os.sched_getaffinity(0) == mask


def test_dpdk_refusals_name_object_and_remedy(eal, tmp_path):
    with pytest.raises(DpdkError, match=r"(?s)device net_nosuch0.*needs: "):
        Port(eal, "net_nosuch0")
    with pytest.raises(DpdkError, match="device net_pcap_x"):
        Port(eal, "net_pcap_x", "rx_pcap=/nonexistent/file.pcap")
    with pytest.raises(DpdkError, match=r"(?s)packet pool huge_pool.*needs: "):
        Mempool(eal, "huge_pool", 10_000_000, 4352)
    Mempool(eal, "twice", 255, 1152)
    with pytest.raises(DpdkError, match="packet pool twice"):
        Mempool(eal, "twice", 255, 1152)


def test_ring_arithmetic():
    assert slot_for(1152) == 1152 and slot_for(1153) == 1216 and slot_for(1) == 64
    assert ring_bytes(4096, 1152) == 4096 * (1152 + 24) + 384
    for size in (0, -1, 3, 2**50):
        with pytest.raises(ValueError):
            ring_bytes(size, 64)
