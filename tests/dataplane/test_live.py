"""The contract for live sources: net_af_packet and net_af_xdp on veth, net_ring; with every dump strategy."""

from __future__ import annotations

import itertools
import os
import random
import socket
import threading
import time

import pytest

from dataplane.counters import read_counters
from dataplane.live import LiveConfig, LiveSource, live_memory, memory_by_node, start_eal
from dataplane.pydpdk import DpdkError, Mbuf, Mempool, NotEnoughMemory, Ring
from dataplane.pydpdk.ffi import lib
from dataplane.reader import RingReader

from .conftest import threads, wait_until

SIZES = {"af_packet": (60, 64, 1082, 1514, 4170, 9014), "af_xdp": (60, 64, 1082, 1514), "ring": (60, 1082, 4170)}
numbers = itertools.count()


class Feed:
    """A live source and a way to send frames to it."""

    def __init__(self, eal, kind, veth, **options):
        self.kind, self.eal = kind, eal
        if kind == "ring":
            self.source = LiveSource(eal, LiveConfig("ring", **options))
            self.pool = Mempool(eal, f"feed{next(numbers)}", 4095, 9216)
            self.ring = Ring.of(eal, f"ETH_RXTX0_{self.source.port.name}")
            self.veth = None
            return
        self.veth = veth(1500 if kind == "af_xdp" else 9000)
        config = LiveConfig(f"{kind}:{self.veth.near}", **({"kernel_frames": 4096} | options))
        try:
            self.source = LiveSource(eal, config)
        except DpdkError as exc:
            if kind == "af_xdp":
                pytest.skip(f"net_af_xdp does not load here: {exc}")
            raise

    def send(self, frames):
        if self.veth is not None:
            self.veth.send(frames)
            return
        waiting = []
        for frame in frames:
            waiting.append(Mbuf(self.pool, frame))
            if len(waiting) == 32:
                self.push(waiting)
        self.push(waiting)

    def push(self, waiting):
        while waiting:
            del waiting[: self.ring.put(waiting)]


def arrived(source):
    """Packets that came to the port, dropped ones too."""
    c = source.counters()
    return c["received"] + c["nic_missed"] + c["errors"] + c["no_mbuf"] + c["kernel_ring_full"]


def wait_for(source, count):
    wait_until(lambda: arrived(source) >= count, source.summary)


@pytest.fixture(params=SIZES)
def kind(request):
    return request.param


@pytest.fixture
def feed(eal, veth):
    made = []

    def make(kind, **options):
        made.append(Feed(eal, kind, veth, **options))
        return made[-1]

    yield make
    for one in made:
        one.source.close()


def adds_up(counters):
    dropped = ("ring_full", "oversize", "not_roce", "bad_checksum", "unfinished")
    assert counters["received"] == counters["published"] + sum(counters[name] for name in dropped)


def test_same_packets(feed, captures, kind, live_dump):
    frames = [r.data for r in captures.records(2000, sizes=SIZES[kind])]
    it = feed(kind, ring_size=2048, **live_dump)
    begin = time.time_ns()
    it.source.start()
    it.send(frames)
    wait_for(it.source, len(frames))
    it.source.stop()
    assert it.source.finished and it.source.error is None
    packets = list(RingReader(it.source.ring_addresses[0]))
    assert [p.data for p in packets] == frames
    assert not any(p.truncated for p in packets)
    stamps = [p.timestamp_ns for p in packets]
    assert stamps == sorted(stamps) and begin <= stamps[0] and stamps[-1] <= time.time_ns()
    counters = it.source.counters()
    adds_up(counters)
    assert counters["received"] == counters["published"] == 2000
    assert "2000 arrived = 2000 received" in it.source.summary()
    if live_dump["dump"] == "dma":
        assert counters["dma_pieces"] > 0 and counters["dma_errors"] == 0
        assert counters["dma_pieces"] + counters["cpu_pieces"] == 2000
    if it.veth is not None:
        assert it.veth.transmitted(it.veth.near) == 0


def test_overload_of_the_ring(feed, captures, kind, live_dump):
    """A consumer that does not come: the ring fills, the rest is counted."""
    frames = [r.data for r in captures.records(3000, sizes=(60, 1082))]
    it = feed(kind, ring_size=64, **live_dump)
    it.source.start()
    it.send(frames)
    wait_for(it.source, 3000)
    it.source.stop()
    counters = it.source.counters()
    adds_up(counters)
    assert arrived(it.source) == 3000
    assert counters["published"] == 64
    assert counters["ring_full"] == counters["received"] - 64
    assert [p.data for p in RingReader(it.source.ring_addresses[0])] == frames[:64]
    thread, pool = it.source._threads[0], it.source.pools[0]
    thread.close()  # hold keeps what the ring keeps
    if kind != "af_xdp":  # its driver keeps buffers in the kernel's fill ring
        assert pool.in_use == 0


def test_drops_of_the_kernel(feed, captures, live_dump):
    """net_af_packet says nothing of them: frames that found the kernel's ring full are counted all the same."""
    frames = [r.data for r in captures.records(1500, sizes=(1082,))]
    it = feed("af_packet", kernel_frames=64, ring_size=2048, **live_dump)
    it.source.port.start()
    it.send(frames)  # nobody takes anything yet
    for thread in it.source._threads:
        thread.start()
    wait_for(it.source, 1500)
    it.source.stop()
    counters = it.source.counters()
    assert counters["kernel_ring_full"] > 1000
    assert counters["received"] + counters["kernel_ring_full"] == counters["kernel_seen"] == 1500
    assert [p.data for p in RingReader(it.source.ring_addresses[0])] == frames[: counters["received"]]
    assert f"{counters['kernel_ring_full']} kernel ring full + 0 left in the kernel" in it.source.summary()


@pytest.mark.parametrize("kind", ["af_packet", "af_xdp"])
def test_interface_that_vanishes(feed, captures, kind):
    """The driver would poll on for ever; the capture ends, with what it has, and says so."""
    frames = [r.data for r in captures.records(50, sizes=(60,))]
    it = feed(kind, ring_size=64)
    it.source.start()
    it.send(frames)
    wait_for(it.source, 50)
    it.veth.ip("link", "delete", it.veth.near)
    reader, packets = RingReader(it.source.ring_addresses[0]), []
    deadline = time.monotonic() + 120
    while not reader.drained:
        assert time.monotonic() < deadline
        packets += reader.take()
    assert [p.data for p in packets] == frames
    assert it.source.finished
    assert f"{kind}:{it.veth.near}: gone" in str(it.source.error)


def test_interface_goes_down_and_up_again(feed, captures):
    frames = [r.data for r in captures.records(50, sizes=(60,))]
    it = feed("af_packet", ring_size=256)
    it.source.start()
    it.send(frames)
    wait_for(it.source, 50)
    it.veth.ip("link", "set", it.veth.near, "down")
    it.veth.up()
    it.send(frames)
    wait_for(it.source, 100)
    it.source.stop()
    assert it.source.error is None
    assert [p.data for p in RingReader(it.source.ring_addresses[0])] == frames * 2


def test_what_had_come_is_in_the_ring_once_nothing_is_left_twice(feed, captures):
    """However late its thread is: by then it has looked after that."""
    frames = [r.data for r in captures.records(200, sizes=(60, 1514))]
    it = feed("af_packet", ring_size=256)
    assert it.source.empty() == [None]
    it.source.start()
    (before,) = it.source.empty()
    it.send(frames)
    wait_for(it.source, 200)  # the kernel may hand frames on later than they were sent
    (came,) = it.source.empty()
    assert before is not None and before <= came
    wait_until(lambda: it.source.empty()[0] >= came + 2, it.source.summary)
    assert [p.data for p in RingReader(it.source.ring_addresses[0]).take(256)] == frames
    it.source.stop()
    assert it.source.empty() == [None]


def test_a_port_that_is_started_long_before_its_threads(feed, captures):
    """As a node does it, which gives its rights back between the two, and waits for a job. What comes meanwhile finds
    the kernel's ring full, and is a loss of nobody's."""
    frames = [r.data for r in captures.records(50, sizes=(60, 1514))]
    it = feed("af_packet", ring_size=256, kernel_frames=64)
    it.source.start_port()
    for _ in range(20):
        it.send([frames[0]] * 50)
    it.source.start_port()
    it.source.start()
    it.send(frames[:40])
    wait_for(it.source, 40)
    it.source.stop()
    assert [p.data for p in RingReader(it.source.ring_addresses[0])] == frames[:40]
    assert arrived(it.source) == it.source.counters()["kernel_seen"] == 40, it.source.summary()
    adds_up(it.source.counters())


def test_packets_of_other_interfaces_are_never_a_ports(eal, veth, captures):
    """The driver's sockets hear every interface until they are bound: one is flooded, and ten are opened on another."""
    pair = veth()
    pair.ip("link", "add", "other0", "mtu", "9000", "type", "veth", "peer", "name", "other1", "mtu", "9000")
    for end in ("other0", "other1"):
        pair.ip("link", "set", end, "up")
    foreign = captures.frame(1082, random.Random(1))
    mine = [r.data for r in captures.records(20, sizes=(60, 1082))]
    flooded, enough = threading.Event(), threading.Event()

    def flood():
        while not enough.is_set():
            other.send(foreign)
            flooded.set()

    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as other:
        other.bind(("other1", 0))
        sender = threading.Thread(target=flood)
        sender.start()
        try:
            assert flooded.wait(60)
            for _ in range(10):
                config = LiveConfig(f"af_packet:{pair.near}", queues=2, ring_size=1 << 14, kernel_frames=1024)
                with LiveSource(eal, config) as source:
                    source.start()
                    pair.send(mine)
                    wait_for(source, len(mine))
                    source.stop()
                    counters = source.counters()
                    assert counters["received"] == counters["kernel_seen"] == len(mine)
                    assert sorted(p.data for at in source.ring_addresses for p in RingReader(at)) == sorted(mine)
        finally:
            enough.set()
            sender.join()


def test_mtu_raised_while_capturing(feed, captures):
    """Frames that the kernel cuts because its ring was made for smaller ones are never published as whole."""
    small = [r.data for r in captures.records(20, sizes=(60, 1514))]
    large = [r.data for r in captures.records(20, sizes=(2048, 4170, 9014))]
    it = feed("af_packet")
    it.source.close()
    for end in (it.veth.near, it.veth.far):
        it.veth.ip("link", "set", end, "mtu", "1500")
    it.source = LiveSource(it.eal, LiveConfig(f"af_packet:{it.veth.near}"))
    it.source.start()
    for end in (it.veth.near, it.veth.far):
        it.veth.ip("link", "set", end, "mtu", "9000")
    it.send(small + large)
    wait_for(it.source, 40)
    it.source.stop()
    assert [p.data for p in RingReader(it.source.ring_addresses[0])] == small
    counters = it.source.counters()
    assert counters["oversize"] == 20
    adds_up(counters)


def test_a_core_that_is_not_there_is_refused_at_once(eal):
    before = os.sched_getaffinity(0)
    with pytest.raises(DpdkError, match="no thread can be bound to core 1023"):
        LiveSource(eal, LiveConfig("ring", queues=2, cores=(min(before), 1023)))
    assert os.sched_getaffinity(0) == before


def test_loopback(eal, veth, captures):
    """Its MTU is larger than a packet buffer can be."""
    veth().ip("link", "set", "lo", "up")
    frames = [r.data for r in captures.records(20, sizes=(60, 9000, 32000))]
    large = [captures.frame(size, random.Random(1)) for size in (32768, 65000)]
    with LiveSource(eal, LiveConfig("af_packet:lo", kernel_frames=64)) as source:
        source.start()
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sender:
            sender.bind(("lo", 0))
            for frame in [*frames, *large]:
                sender.send(frame)
        wait_for(source, 2 * 22)  # lo shows a packet as it leaves and as it comes
        source.stop()
        got = [p.data for p in RingReader(source.ring_addresses[0])]
        assert sorted(got) == sorted(frames * 2)
        assert source.counters()["oversize"] == 4
        adds_up(source.counters())


def test_two_captures_of_one_interface(eal, feed, captures):
    """They would be in one fanout group and get a part of the packets each: the second is refused, the first
    undisturbed. A port that was never started leaves no socket in the group."""
    frames = [r.data for r in captures.records(200, sizes=(60, 1082))]
    it = feed("af_packet", ring_size=256)
    config = LiveConfig(f"af_packet:{it.veth.near}", ring_size=256)
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DpdkError, match=f"(?s){it.veth.near}: another capture.*each would get a part"):
        LiveSource(eal, config)
    assert len(os.listdir("/proc/self/fd")) == files
    it.source.close()
    it.source = LiveSource(eal, config)
    it.source.start()
    it.send(frames)
    wait_for(it.source, 200)
    it.source.stop()
    assert [p.data for p in RingReader(it.source.ring_addresses[0])] == frames


def test_several_ports_at_once(eal, feed, captures):
    """Each end of a veth pair, and a ring; drops of one are not counted at another."""
    frames = [r.data for r in captures.records(300, sizes=(60, 1082))]
    one = feed("af_packet", ring_size=512, streams=(1,))
    other = feed("ring", ring_size=64, streams=(2,))
    with LiveSource(eal, LiveConfig(f"af_packet:{one.veth.far}", ring_size=512, streams=(3,))) as far:
        for source in (one.source, other.source, far):
            source.start()
        one.send(frames)
        other.send(frames)
        for source in (one.source, other.source, far):
            wait_for(source, 300)
        for source in (one.source, other.source, far):
            source.stop()
        got = [list(RingReader(source.ring_addresses[0])) for source in (one.source, other.source, far)]
    assert [p.data for p in got[0]] == [p.data for p in got[2]] == frames  # its kernel shows what it sends, too
    assert [p.data for p in got[1]] == frames[:64]
    assert [{p.stream for p in packets} for packets in got] == [{1}, {2}, {3}]
    assert other.source.counters()["ring_full"] == 236 and one.source.counters()["ring_full"] == 0


def test_a_pinned_thread_for_each_queue(feed):
    core = max(os.sched_getaffinity(0))
    it = feed("af_packet", queues=3, cores=(core,) * 3)
    it.source.start()
    masks = [os.sched_getaffinity(task) for task, name in threads().items() if name == "fc-rx"]
    it.source.stop()
    assert it.source.error is None
    assert len(masks) == 3 and it.source.finished
    # Pinning is the thread's first act; one that was looked at before it had begun still has the process's mask.
    assert all(mask == {core} or mask == os.sched_getaffinity(0) for mask in masks)


def udp(captures, source, destination, port, mark):
    frame = bytearray(captures.frame(200, random.Random(mark)))
    frame[26:30], frame[30:34] = source, destination
    frame[34:38] = port.to_bytes(2, "big") + (4791).to_bytes(2, "big")
    frame[60:64] = mark.to_bytes(4, "big")
    return bytes(frame)


def test_two_queues_keep_a_connection_together(feed, captures):
    """16 connections, both directions: each comes to one queue, in order."""
    ends = [(bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2])), (bytes([10, 0, 0, 2]), bytes([10, 0, 0, 1]))]
    frames = [udp(captures, *ends[i // 16 % 2], 49152 + 37 * (i % 16), i) for i in range(1600)]
    it = feed("af_packet", queues=2, streams=(4, 5))
    it.source.start()
    it.send(frames)
    wait_for(it.source, 1600)
    it.source.stop()
    queues = [list(RingReader(address)) for address in it.source.ring_addresses]
    assert sum(map(len, queues)) == 1600
    assert [{p.stream for p in packets} for packets in queues] == [{4}, {5}]
    where = {}
    for number, packets in enumerate(queues):
        marks = {}
        for packet in packets:
            port, mark = int.from_bytes(packet.data[34:36], "big"), int.from_bytes(packet.data[60:64], "big")
            where.setdefault(port, set()).add(number)
            marks.setdefault(port, []).append(mark)
        assert all(order == sorted(order) for order in marks.values())
    assert len(where) == 16 and all(len(of) == 1 for of in where.values())


def test_what_is_not_roce_is_dropped_if_asked(feed, captures):
    roce = [udp(captures, bytes(4), bytes(4), 50000, i) for i in range(50)]
    tcp = [frame[:23] + b"\x06" + frame[24:] for frame in roce]
    dns = [frame[:36] + b"\0\x35" + frame[38:] for frame in roce]
    arp = [bytes(12) + b"\x08\x06" + bytes(50)] * 50
    mixed = [frame for group in zip(roce, tcp, dns, arp, strict=True) for frame in group]
    it = feed("ring", roce_only=True)
    it.source.start()
    it.send(mixed)
    wait_for(it.source, 200)
    it.source.stop()
    assert [p.data for p in RingReader(it.source.ring_addresses[0])] == roce
    counters = it.source.counters()
    assert counters["not_roce"] == 150
    adds_up(counters)


def test_larger_than_a_slot(feed, captures):
    """Slots by path MTU; what is larger than they are is no RoCE of this job, and is counted."""
    frames = [r.data for r in captures.records(300, sizes=(1082, 1514, 8000))]
    it = feed("af_packet", path_mtu=1024)
    assert it.source.config.queue_plan().slot == 1152
    it.source.start()
    it.send(frames)
    wait_for(it.source, 300)
    it.source.stop()
    fitting = [frame for frame in frames if len(frame) <= 1152]
    assert [p.data for p in RingReader(it.source.ring_addresses[0])] == fitting
    assert it.source.counters()["oversize"] == 300 - len(fitting)


@pytest.mark.parametrize(("kind", "cycles"), [("af_packet", 100), ("ring", 100)])
def test_hundred_cycles(eal, feed, captures, veth, kind, cycles):
    """Sources made, started, stopped and closed: no file, thread, buffer or counter is left behind."""
    frames = [r.data for r in captures.records(20, sizes=(60, 1082))]
    first = feed(kind, kernel_frames=64, ring_size=64)
    first.source.close()

    def left():
        shared = [name for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name]
        return len(os.listdir("/proc/self/fd")), len(threads()), sorted(shared)

    before = left()
    for _ in range(cycles):
        if kind == "ring":
            it = Feed(eal, kind, None, ring_size=64)
        else:
            it = first
            it.source = LiveSource(eal, LiveConfig(f"{kind}:{it.veth.near}", kernel_frames=64, ring_size=64))
        it.source.start()
        it.send(frames)
        wait_for(it.source, 20)
        it.source.stop()
        assert [p.data for p in RingReader(it.source.ring_addresses[0])] == frames
        assert it.source.pools[0].in_use == 0
        it.source.close()
        if kind == "ring":
            assert it.pool.in_use == 0
            it.pool.close()
    assert left() == before


def test_af_xdp_again(eal, feed, captures):
    """DPDK before 24.11 keeps the interface's queue until the process ends: a limit of the driver, said in words."""
    it = feed("af_xdp", ring_size=64)
    it.source.close()
    config = LiveConfig(f"af_xdp:{it.veth.near}", ring_size=64)
    if lib.fc_built_release() < 2411:
        with pytest.raises(DpdkError, match=r"(?s)rx queue 0.*has not captured before"):
            LiveSource(eal, config)
        return
    frames = [r.data for r in captures.records(50, sizes=(60, 1082))]
    it.source = LiveSource(eal, config)
    it.source.start()
    it.send(frames)
    wait_for(it.source, 50)
    it.source.stop()
    assert [p.data for p in RingReader(it.source.ring_addresses[0])] == frames


def test_counters_are_readable_from_outside(feed, captures):
    it = feed("ring", ring_size=64)
    assert it.source.counter_file.exists()
    it.source.start()
    it.send([r.data for r in captures.records(100, sizes=(60,))])
    wait_for(it.source, 100)
    (mine,) = [s for s in read_counters() if s.path == str(it.source.counter_file)]
    assert mine.pid == os.getpid() and mine.label == "ring"
    assert mine.queues == [it.source.counters()] and mine.queues[0]["ring_full"] == 36
    it.source.close()
    assert not it.source.counter_file.exists()
    assert it.source.counters()["received"] == 100  # still known here


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"device": "eth0"}, "not a capture device"),
        ({"device": "af_packet:"}, "not a capture device"),
        ({"device": "af_packet:no,such"}, "cannot take this name"),
        ({"device": "ring", "dump": "fly"}, "one of copy, hold, dma"),
        ({"device": "ring", "path_mtu": 1500}, "path MTU 1500"),
        ({"device": "ring", "queues": 2, "cores": (1,)}, "1 cores for 2 queues"),
        ({"device": "ring", "dump": "dma"}, "0 DMA engines"),
        ({"device": "ring", "dump": "dma", "queues": 2, "engines": ("a", "b", "c")}, "3 DMA engines, 2 queues"),
        ({"device": "ring", "engines": ("dma_skeleton",)}, "other strategies none"),
        ({"device": "ring", "burst": 257}, "burst 257: 1 to 256"),
        ({"device": "ring", "cores": (-1,)}, "core -1"),
        ({"device": "ring", "streams": (65536,)}, "stream 65536"),
        ({"device": "ring", "iteration_bytes": -1}, "iteration_bytes -1"),
        ({"device": "ring", "kernel_frames": 1 << 21}, "kernel_frames"),
    ],
)
def test_refused_configurations(options, what):
    with pytest.raises(ValueError, match=what):
        LiveConfig(**options)


def test_refusals_of_the_machine(eal, veth):
    for absent in ("flowcheck9", "lo:1", "lo" + "o" * 20):
        with pytest.raises(DpdkError, match=f"(?s)interface {absent}:.*one of: .*lo"):
            LiveConfig(f"af_packet:{absent}")
    with pytest.raises(DpdkError, match=r"interface a\\udcff:"):
        LiveConfig("af_packet:a\udcff")
    pair = veth(3400)
    with pytest.raises(DpdkError, match=r"(?s)MTU 3400; net_af_xdp.*mtu 1500"):
        LiveConfig(f"af_xdp:{pair.near}")
    with pytest.raises(DpdkError, match=r"(?s)MTU 3400, RoCE with path MTU 4096 needs 4176.*mtu 9000"):
        LiveConfig(f"af_packet:{pair.near}", path_mtu=4096)
    with pytest.raises(DpdkError, match=r"(?s)device 0000:00:1f\.7.*Eal.start\(devices="):
        LiveSource(eal, LiveConfig("0000:00:1f.7"))
    with pytest.raises(DpdkError, match=r"already runs in this process without 0000:00:1f\.7"):
        type(eal).start(memory_mb=1, devices=["0000:00:1f.7"])


def test_hold_is_sized_by_the_iteration():
    fits = LiveConfig("ring", dump="hold", path_mtu=4096, iteration_bytes=100 << 20)
    assert fits.entries == 32768 and not fits.warning
    assert fits.queue_plan().buffers >= fits.entries and fits.queue_plan().slot == 0
    assert LiveConfig("ring", path_mtu=4096, iteration_bytes=100 << 20).entries == 32768  # whatever moves the bytes
    short = LiveConfig("ring", dump="hold", path_mtu=4096, iteration_bytes=100 << 20, ring_size=1024)
    assert "up to 27201 packets, the ring holds 1024" in short.warning


def test_hold_says_at_the_start_that_an_iteration_does_not_fit(feed, caplog):
    fits = feed("ring", dump="hold", path_mtu=1024, iteration_bytes=1 << 20)
    fits.source.start()
    assert caplog.text == ""
    short = feed("ring", dump="hold", path_mtu=1024, iteration_bytes=1 << 20, ring_size=64)
    short.source.start()
    assert "up to 1089 packets, the ring holds 64" in caplog.text


def test_hold_gives_back_what_the_consumer_releases(feed, captures):
    """Twice as many packets as there are buffers, a consumer that keeps nothing: none is missing, and what was
    released goes back while the thread runs."""
    it = feed("ring", dump="hold", ring_size=64, path_mtu=1024)
    it.source.start()
    reader, sent, taken = RingReader(it.source.ring_addresses[0]), 0, 0
    frames = [r.data for r in captures.records(8, sizes=(60,))]
    deadline = time.monotonic() + 120
    while sent < 2 * it.pool.count:
        it.send(frames)
        sent += 8
        while taken < sent:
            taken += len(reader.take())
            assert time.monotonic() < deadline
    while it.pool.in_use:
        assert time.monotonic() < deadline
    assert not it.source.finished and it.source.counters()["ring_full"] == 0


def test_memory_of_several_devices_lies_where_they_are():
    small, large = LiveConfig("ring", ring_size=64, path_mtu=1024), LiveConfig("null", path_mtu=4096)
    both = live_memory([small, large])
    assert both.huge_mb < live_memory([small]).huge_mb + live_memory([large]).huge_mb  # DPDK's tables are there once
    assert memory_by_node([(small, -1), (large, -1)]) == {}
    assert memory_by_node([(small, 1), (large, -1)]) == {1: both.huge_mb}
    assert memory_by_node([(small, 1), (large, 0)]) == {
        0: live_memory([large]).huge_mb, 1: live_memory([small]).huge_mb,
    }
    assert memory_by_node([(small, 1), (large, 0), (large, -1)])[0] == live_memory([large, large]).huge_mb


def test_memory_that_is_not_there():
    arithmetic = r"(?s)is needed for: ring queue 0: .*1048576 slots x 1152 bytes.*rings 1176 MB"
    with pytest.raises(NotEnoughMemory, match=arithmetic):
        start_eal(LiveConfig("ring", path_mtu=1024, ring_size=1 << 20), huge=False)


def test_dense_slots_and_the_sum():
    for mtu, slot in ((1024, 1152), (2048, 2176), (4096, 4352)):
        assert LiveConfig("ring", path_mtu=mtu).queue_plan().slot == slot
    need = live_memory([LiveConfig("ring", path_mtu=4096, queues=2, ring_size=1 << 20)])
    assert need.ring_bytes == 2 * ((1 << 20) * (4352 + 24) + 384)
    assert "ring queue 1: " in need.text and "1048576 slots x 4352 bytes" in need.text
    assert need.huge_mb * 2**20 > need.ring_bytes + need.huge_pool_bytes
