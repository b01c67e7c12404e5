"""bench ingest: packets through DPDK, from a port to placed gradients, against a minimal loop on the same port.

The limit is C of the bench's own (src/minimal.c): rx burst, parse, PSN, flags, placing, coverage, free, and nothing
that a product has to find out. It takes the same packets from the same port in the same rounds, into arenas of the same
size; its payload is fetched ahead or not, whichever was faster in the round. The bare loop (take a burst, free it) is
only reported: writing the gradient's bytes alone takes longer than it.

The source is `net_pcap,infinite_rx=1`: the only software source here that outruns the node. Its file holds one
communicator's life from PSN 0 and comes round again and again, so at each lap the flows are armed anew: the timed
part goes on with the next engine, which was made, and its arena touched, before the clock started (a running node
makes its engine once). What is placed is compared: in every round the bytes of all laps, once every single byte.
The life is short enough for the processor's last cache: from a longer one the driver copies out of memory, becomes
the bottleneck itself and flatters what is compared with it. The cold ring is filled from longer lives, as a node's
arena is larger than any cache. All packet memory lies in huge pages where so many are free; without them the
driver's random walk over 4 KB pages is most of what is measured.

    ingest.MTU.PROTOCOL              `hold`, state machine and placement            limit: minimal loop, Mpkt/s
    ingest.MTU.PROTOCOL.bare         the bare loop                                  limit: minimal loop, Mpkt/s
    ingest.MTU.STRATEGY              rx and dump, the consumer only releases        limit: bare loop, Mpkt/s
    ingest.MTU.STRATEGY.place        ... and state machine and placement after it   limit: bare loop, Mpkt/s
    ingest.MTU.STRATEGY.place.icrc   ... and every ICRC checked                     limit: bare loop, Mpkt/s
    ingest.MTU.STRATEGY.place.threads  rx thread and placing thread                 limit: bare loop, Mpkt/s
    ingest.MTU.cold                  state machine and placement over a dense       limit: copy past the cache
                                     ring that `copy` filled before, GB/s read and written

Rows of a STRATEGY are of LL. All but `threads` share one thread and so one core: a burst is placed while it is in its
cache. `dma` is moved by dma_skeleton, a thread that copies: a functional stand-in for an engine, and reported as no
more than that.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from parser.machine import Engine

from dataplane.pydpdk import DmaDevice, DpdkError, Eal, Mempool, Port
from dataplane.pydpdk.ffi import ffi, lib
from dataplane.rx import RingMemory, RxConfig, RxThread, slot_for
from flowcheck.errors import EnvironmentProblem
from lab.bench import limits
from lab.bench.minimal import MinimalLoop
from lab.bench.rows import Row, Setting, alternate, here
from lab.bench.workload import Traffic, aligned, make
from parser.chunk_layout import Protocol

__all__ = ["run"]

FLOWS = {Protocol.LL: 16, Protocol.LL128: 16, Protocol.SIMPLE: 8}  # a message of each makes no longer life than 4 MB
LAP_BYTES = 4 << 20
LAPS = 32
COLD_LAP_BYTES = 32 << 20
BURST = 64
ROUND = {1024: 4, 4096: 2}  # bursts between two visits of the engine, on one thread: they stay in a core's cache
HOT_RING = 256
CACHE = 512  # buffers that a thread keeps for itself: the pool behind it would hand out its coldest
COLD_TARGETS = {1024: 0.70, 4096: 0.72}
MINIMAL_TARGET = 0.85
MINIMAL_AHEAD = (0, 2)  # packets whose payload the minimal loop fetches ahead
STRATEGIES = ("hold", "copy", "dma")
MEMORY_MB = 416


def run(rounds: int, ring_bytes: int) -> list[Row]:
    """Rows for both MTUs. ring_bytes: of the cold ring."""
    try:
        with Eal.start(memory_mb=MEMORY_MB) as eal:
            setting = here("2 MB" if eal.huge else None)
            rows = []
            for mtu in COLD_TARGETS:
                for protocol in Protocol:
                    rows += _rows(eal, protocol, mtu, rounds, setting)
                rows.append(_cold_row(eal, mtu, rounds, ring_bytes, setting))
            return rows
    except DpdkError as exc:
        raise EnvironmentProblem(exc.what, where="bench ingest", remedy=exc.remedy) from exc


def _rows(eal: Eal, protocol: Protocol, mtu: int, rounds: int, setting: Setting) -> list[Row]:
    with ExitStack() as stack:
        traffic = make(protocol, mtu, FLOWS[protocol], LAP_BYTES, icrc=protocol == Protocol.LL)
        port = stack.enter_context(_port(eal, traffic))
        engine = None
        if protocol == Protocol.LL:
            engine = stack.enter_context(DmaDevice(eal, f"dma_skeleton_bench{mtu}"))
        bench = _Bench(eal, port, traffic, engine)
        minimal = bench.minimal(protocol)
        contenders: dict[str, Callable[[], float]] = {"bare": bench.bare}
        contenders |= {f"minimal {ahead}": minimal(ahead) for ahead in MINIMAL_AHEAD}
        strategies = STRATEGIES if protocol == Protocol.LL else STRATEGIES[:1]
        for dump in strategies:
            contenders[f"{dump}.place"] = bench.placing(dump, icrc=False)
            if protocol == Protocol.LL:
                contenders[dump] = bench.alone(dump)
                contenders[f"{dump}.place.icrc"] = bench.placing(dump, icrc=True)
                contenders[f"{dump}.place.threads"] = bench.threads(dump)
        seconds = alternate(contenders, rounds)
    packets = LAPS * traffic.packets
    rate = {name: [1e-6 * packets / s for s in taken] for name, taken in seconds.items()}
    limit = [max(of_round) for of_round in zip(*(rate[f"minimal {ahead}"] for ahead in MINIMAL_AHEAD), strict=True)]
    name = f"ingest.{mtu}.{protocol.name.lower()}"
    rows = [
        Row.of(name, "Mpkt/s", rate["hold.place"], limit, MINIMAL_TARGET, setting),
        Row.of(f"{name}.bare", "Mpkt/s", rate["bare"], limit, None, setting),
    ]
    if protocol == Protocol.LL:
        for contender in sorted(key for key in rate if key.startswith(STRATEGIES)):
            rows.append(Row.of(f"ingest.{mtu}.{contender}", "Mpkt/s", rate[contender], rate["bare"], None, setting))
    return rows


def _cold_row(eal: Eal, mtu: int, rounds: int, ring_bytes: int, setting: Setting) -> Row:
    traffic = make(Protocol.LL, mtu, FLOWS[Protocol.LL], COLD_LAP_BYTES, icrc=True)
    with _port(eal, traffic) as port:
        cold = _Cold(_Bench(eal, port, traffic, None), ring_bytes)
        seconds = alternate({"limit": cold.limit, "place": cold.place}, rounds)
    moved = 1e-9 * cold.laps * (traffic.wire_bytes + traffic.expected.size)
    limit = [2e-9 * cold.copied / s for s in seconds["limit"]]
    values = [moved / s for s in seconds["place"]]
    return Row.of(f"ingest.{mtu}.cold", "GB/s", values, limit, COLD_TARGETS[mtu], setting)


@contextmanager
def _port(eal: Eal, traffic: Traffic) -> Iterator[Port]:
    """The packets as a file that never ends. The driver keeps them in buffers of the pool."""
    slot = traffic.frames.shape[1]
    # A file without a name: nothing of it is left, however the bench ends.
    with os.fdopen(os.memfd_create("flowcheck-bench"), "wb") as file:
        file.write(struct.pack("<IHHIIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1))
        for frame, length in zip(traffic.frames, traffic.lengths.tolist(), strict=True):
            file.write(struct.pack("<IIII", 0, 0, length, length))
            file.write(frame[:length].tobytes())
        file.flush()
        path = f"/proc/self/fd/{file.fileno()}"
        count = traffic.packets + HOT_RING + 4 * BURST + 2 * CACHE
        with Mempool(eal, f"bench_{traffic.mtu}", count, slot_for(slot), cache=CACHE) as pool:
            with Port(eal, f"net_pcap_bench{traffic.mtu}", f"rx_pcap={path},infinite_rx=1") as port:
                port.configure()
                port.rx_queue(0, pool)
                port.start()
                yield port


class _Bench:
    """Contenders over one port. Each takes LAPS whole laps, so that the next begins at PSN 0 again."""

    def __init__(self, eal: Eal, port: Port, traffic: Traffic, engine: DmaDevice | None) -> None:
        assert traffic.packets % BURST == 0
        self.eal, self.port, self.traffic, self.engine = eal, port, traffic, engine
        self.slot = slot_for(traffic.frames.shape[1])
        self.proven = False

    def bare(self) -> float:
        want = LAPS * self.traffic.packets
        begin = time.perf_counter()
        taken = lib.fc_rx_bare(self.port.number, 0, BURST, want, ffi.NULL, ffi.NULL)
        seconds = time.perf_counter() - begin
        assert taken == want
        return seconds

    def minimal(self, protocol: Protocol) -> Callable[[int], Callable[[], float]]:
        """The limit: a contender for each number of packets whose payload is fetched ahead; they share their arenas."""
        traffic, want = self.traffic, LAPS * self.traffic.packets
        loop = MinimalLoop(traffic.flows, int(protocol), traffic.mtu, traffic.expected.size, traffic.packets, LAPS)
        take, itself = ffi.cast("fc_rx_taker", loop.take), ffi.cast("void *", loop.address)

        def contender(ahead: int) -> Callable[[], float]:
            def measure() -> float:
                loop.reset(ahead)
                begin = time.perf_counter()
                taken = lib.fc_rx_bare(self.port.number, 0, BURST, want, take, itself)
                seconds = time.perf_counter() - begin
                assert taken == want == loop.counts["placed"], loop.counts
                assert all((loop.arenas[lap] == traffic.expected).all() for lap in (0, LAPS - 1))
                return seconds

            return measure

        return contender

    @contextmanager
    def queue(self, dump: str, entries: int, laps: int) -> Iterator[tuple[RingMemory, RxThread]]:
        slot = 0 if dump == "hold" else self.slot
        with RingMemory(self.eal, entries, slot) as memory:
            config = RxConfig(
                burst=BURST, wait_when_full=True, expected=laps * self.traffic.packets, dump=dump,
                engines=(self.engine,) if dump == "dma" and self.engine else (),
            )
            with RxThread(self.port, memory, config) as rx:
                yield memory, rx

    def alone(self, dump: str) -> Callable[[], float]:
        def measure() -> float:
            with self.queue(dump, HOT_RING, LAPS) as (memory, rx):
                ring, released = ffi.cast("fc_ring *", memory.ring_address), 0
                begin = time.perf_counter()
                while not lib.fc_ring_drained(ring):
                    rx.poll(ROUND[self.traffic.mtu])
                    released += lib.fc_reader_discard(ring, HOT_RING)
                seconds = time.perf_counter() - begin
            assert released == LAPS * self.traffic.packets
            return seconds

        return measure

    def armed(self, laps: int, icrc: bool) -> list[Engine]:
        """An engine for each lap, its arena touched."""
        engines = [Engine(replace(self.traffic.config, check_icrc=icrc)) for _ in range(laps)]
        for machine in engines:
            machine.region(0)[:] = 0
        return engines

    def placing(self, dump: str, icrc: bool) -> Callable[[], float]:
        def measure() -> float:
            engines = self.armed(LAPS, icrc)
            with self.queue(dump, HOT_RING, LAPS) as (memory, rx):
                begin = time.perf_counter()
                consume(engines, memory.ring_address, self.traffic.packets, lambda: rx.poll(ROUND[self.traffic.mtu]))
                seconds = time.perf_counter() - begin
            self.check(engines)
            return seconds

        return measure

    def threads(self, dump: str) -> Callable[[], float]:
        def measure() -> float:
            engines = self.armed(LAPS, icrc=False)
            with self.queue(dump, HOT_RING, LAPS) as (memory, rx):
                begin = time.perf_counter()
                rx.start()
                consume(engines, memory.ring_address, self.traffic.packets, lambda: 0)
                seconds = time.perf_counter() - begin
            self.check(engines)
            return seconds

        return measure

    def check(self, engines: list[Engine]) -> None:
        """Placed = laps x truth, by count each time and byte by byte once."""
        for machine in engines:
            packets, placed = machine.outcomes(0)["placed"]
            assert packets == self.traffic.packets, machine.disagreements()
            assert placed == self.traffic.wire_bytes
        if not self.proven:
            for machine in engines:
                self.proven = bool((machine.region(0) == self.traffic.expected).all() and machine.cells(0).all())
                assert self.proven, "the engine placed other bytes than were sent"


def consume(engines: list[Engine], ring_address: int, per_lap: int, fill: Callable[[], int]) -> None:
    """One engine after the other, `per_lap` packets each, asking for more whenever the ring is empty."""
    for machine in engines:
        left = per_lap
        while left:
            fill()
            done, blocked = machine.run(0, ring_address, left)
            assert not blocked
            left -= done


class _Cold:
    """A dense ring in memory, larger than any cache, filled by `copy` through the port."""

    def __init__(self, bench: _Bench, ring_bytes: int) -> None:
        self.bench = bench
        self.laps = max(1, ring_bytes // (bench.traffic.packets * bench.slot))
        need = self.laps * bench.traffic.packets
        self.entries = 1 << (need - 1).bit_length()
        self.copied = need * bench.slot // 256 * 256
        self.arena = aligned(self.copied)

    @contextmanager
    def filled(self) -> Iterator[RingMemory]:
        with self.bench.queue("copy", self.entries, self.laps) as (memory, rx):
            while not rx.finished:
                rx.poll(1024)
            yield memory

    def place(self) -> float:
        engines = self.bench.armed(self.laps, icrc=False)
        with self.filled() as memory:
            begin = time.perf_counter()
            consume(engines, memory.ring_address, self.bench.traffic.packets, lambda: 0)
            seconds = time.perf_counter() - begin
        self.bench.check(engines)
        return seconds

    def limit(self) -> float:
        with self.filled() as memory:
            slots = int(ffi.cast("uintptr_t", memory.slots))
            begin = time.perf_counter()
            limits.copy(self.arena.ctypes.data, slots, self.copied)
            return time.perf_counter() - begin
