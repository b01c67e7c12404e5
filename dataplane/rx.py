"""The receiving side of one port and queue: its ring memory and its C thread.

Call order: RingMemory -> RxThread(port, memory, ...) -> start -> stop -> close. The consumer of
`RingMemory.ring_address` must be done before the memory is closed. See include/rx.h for the thread's rules.
"""

from __future__ import annotations

import errno
import itertools
import os
from dataclasses import dataclass
from typing import Any

from dataplane.counterfile import COUNTERS, CounterFile
from dataplane.pydpdk.dmadev import DmaDevice
from dataplane.pydpdk.eal import Eal, available_bytes
from dataplane.pydpdk.errors import DpdkError, NotEnoughMemory, check
from dataplane.pydpdk.ethdev import Port
from dataplane.pydpdk.ffi import ffi, lib
from dataplane.pydpdk.mempool import ANY_SOCKET
from dataplane.pydpdk.resource import Resource

__all__ = ["COUNTERS", "DMA_MINIMUM", "RingMemory", "RxConfig", "RxThread", "ring_bytes", "slot_for"]

DMA_MINIMUM = 1024  # a hand-over to an engine costs about as much as copying so many bytes
_names = itertools.count()


def slot_for(frame: int) -> int:
    """Bytes of a slot that holds frames of `frame` bytes: rounded up to cache lines."""
    return -(-max(frame, 64) // 64) * 64


def ring_bytes(ring_size: int, slot_size: int) -> int:
    """Memory of counters, ring, entries and slots together.

    Raises:
        ValueError: ring_size is not a power of two, or slot_size not a multiple of 64.
    """
    total = int(lib.fc_block_bytes(ring_size, slot_size)) if 0 < ring_size < 2**48 else 0
    if total == 0:
        raise ValueError(
            f"a ring of {ring_size} slots of {slot_size} bytes: the number must be a power of two, "
            "the size a multiple of 64"
        )
    return total


class RingMemory(Resource):
    """Counters, ring, entries and (slot_size > 0) dense slots as one block, reserved at once.

    counters, queue: where the thread counts instead of in the block, readable by other processes.
    socket: NUMA node.

    Raises:
        NotEnoughMemory: with the sum that does not fit.
        ValueError: see ring_bytes.
    """

    def __init__(
        self, eal: Eal, ring_size: int, slot_size: int, *, counters: CounterFile | None = None, queue: int = 0,
        socket: int = ANY_SOCKET,
    ) -> None:
        eal.require_open()
        total = ring_bytes(ring_size, slot_size)
        sum_text = (
            f"ring of {ring_size} slots x {slot_size} bytes + {ring_size} entries x "
            f"{ffi.sizeof('fc_packetref')} bytes = {total} bytes ({-(-total >> 20)} MB)"
        )
        # Ordinary memory is promised freely and fails only when touched: ask first.
        if not eal.huge and total > (available := available_bytes()):
            raise NotEnoughMemory(
                f"{sum_text}; this machine has {available} bytes available", "a smaller ring or more memory"
            )
        self._block = ffi.new("fc_block *")
        name = f"fc_ring_{os.getpid()}_{next(_names)}"
        rc = lib.fc_block_create(self._block, name.encode(), ring_size, slot_size, int(eal.huge), socket)
        if rc == -errno.ENOMEM:
            raise NotEnoughMemory(f"{sum_text}: no such piece is free in {eal.describe()}")
        check(rc, sum_text)
        self.ring_size, self.slot_size, self.bytes = ring_size, slot_size, total
        self._last: dict[str, int] = {}
        self.counter_row = self._block.counters if counters is None else counters.row(queue)
        super().__init__(*([eal] if counters is None else [eal, counters]))

    @property
    def ring_address(self) -> int:
        """Address of the fc_ring (include/packetref.h)."""
        self.require_open()
        return int(ffi.cast("uintptr_t", self._block.ring))

    @property
    def slots(self) -> Any:
        """The dense slots, NULL without; slot i belongs to entry i."""
        self.require_open()
        return self._block.slots

    @property
    def block(self) -> object:
        """The fc_block, for the C side."""
        self.require_open()
        return self._block

    def counters(self) -> dict[str, int]:
        """A snapshot; safe while the thread runs. After close the last values."""
        return dict(self._last) if self.closed else self._read_counters()

    def _read_counters(self) -> dict[str, int]:
        return {name: int(getattr(self.counter_row, name)) for name in COUNTERS}

    def _release(self) -> None:
        self._last = self._read_counters()
        lib.fc_block_destroy(self._block)


@dataclass(frozen=True, slots=True)
class RxConfig:
    """queue: of the port. wait_when_full: the source can wait (a file), so nothing is dropped.
    expected: packets after which the thread ends, 0: endless. ns_per_tick: unit of the port's receive
    timestamps, 0: it has none. stamp: give packets without one the time of their burst. core: CPU to pin
    to, None: any. roce_only: drop what cannot hold RoCE. packet_socket: file descriptor of the queue's
    AF_PACKET socket, whose drops the driver hides. bound_socket: one bound to the interface, which tells when
    that is gone. engines: for dump="dma", used by no other queue;
    dma_minimum: bytes below which the CPU copies. source: what errors call it."""

    queue: int = 0
    stream: int = 0
    burst: int = 64
    core: int | None = None
    wait_when_full: bool = False
    stall_ms: int = 3000
    expected: int = 0
    ns_per_tick: int = 0
    dump: str = "copy"
    stamp: bool = False
    roce_only: bool = False
    packet_socket: int | None = None
    bound_socket: int | None = None
    engines: tuple[DmaDevice, ...] = ()
    dma_minimum: int = DMA_MINIMUM
    source: str = ""


class RxThread(Resource):
    """One C thread that fills one ring from one queue of a started port.

    Raises:
        DpdkError: no such dump strategy, or a configuration it refuses.
    """

    def __init__(self, port: Port, memory: RingMemory, config: RxConfig) -> None:
        port.require_open()
        block = memory.block
        for engine in config.engines:
            engine.require_open()
        if len(config.engines) > lib.FC_ENGINES_MAX:
            raise ValueError(f"{len(config.engines)} DMA engines for one queue, at most {lib.FC_ENGINES_MAX}")
        self._config, self._port = config, port
        self._dump = ffi.new("char[]", config.dump.encode())
        c = ffi.new("fc_rx_config *")
        c.port, c.queue, c.stream, c.burst = port.number, config.queue, config.stream, config.burst
        c.core = -1 if config.core is None else config.core
        c.wait_when_full, c.stall_ms = config.wait_when_full, config.stall_ms
        c.expected, c.ns_per_tick = config.expected, config.ns_per_tick
        c.ring, c.counters, c.slots = block.ring, memory.counter_row, block.slots  # type: ignore[attr-defined]
        c.slot_size, c.dump = memory.slot_size, self._dump
        c.roce_only, c.stamp = config.roce_only, config.stamp
        c.packet_socket = -1 if config.packet_socket is None else config.packet_socket
        c.bound_socket = -1 if config.bound_socket is None else config.bound_socket
        c.dma_minimum, c.engine_count = config.dma_minimum, len(config.engines)
        for place, engine in zip(c.engines, config.engines, strict=False):
            place.device, place.channel, place.depth = engine.device, 0, engine.depth
        out = ffi.new("fc_rx **")
        check(
            lib.fc_rx_create(c, out), f"rx thread of {port!r} with dump strategy {config.dump!r}, burst {config.burst}",
            "dump='copy', 'hold' or 'dma' (with engines), a burst of 1..256, slots of a multiple of 64 bytes",
        )
        self._rx = out[0]
        self._last_state = int(lib.FC_RX_NEW)
        super().__init__(port, memory, *config.engines)

    @property
    def state(self) -> int:
        """One of lib.FC_RX_*; after close the last one."""
        return self._last_state if self.closed else int(lib.fc_rx_state(self._rx))

    @property
    def finished(self) -> bool:
        """The thread has ended, whatever the reason; its ring is closed or closes now."""
        return self.state not in (lib.FC_RX_NEW, lib.FC_RX_RUNNING)

    @property
    def empty(self) -> int | None:
        """How often nothing was left to take: two more than before, and what had come before is in the ring
        (include/rx.h). None: no thread takes anything."""
        return int(lib.fc_rx_empty(self._rx)) if self.state == lib.FC_RX_RUNNING else None

    def start(self) -> None:
        self.require_open()
        check(lib.fc_rx_start(self._rx), "starting the rx thread", "start it once")

    def poll(self, bursts: int = 1) -> int:
        """At most so many bursts on the caller's thread, instead of start; packets taken (include/rx.h)."""
        self.require_open()
        return int(lib.fc_rx_poll(self._rx, bursts))

    def stop(self) -> None:
        """Ends the thread and closes the ring. Idempotent."""
        if not self.closed:
            lib.fc_rx_stop(self._rx)

    def failure(self) -> DpdkError | None:
        """Why the thread could not begin its work, or go on with it."""
        if self.state != lib.FC_RX_FAILED:
            return None
        core = self._config.core
        code = self._last_error if self.closed else int(lib.fc_rx_error(self._rx))
        if code == errno.ETIMEDOUT:
            names = ", ".join(engine.name for engine in self._config.engines)
            what = f"DMA engines {names}: copies were never completed"
            return DpdkError(code, what, "working engines, or dump='copy'")
        if code == errno.ENODEV:
            return DpdkError(
                code, f"{self._config.source or repr(self._port)}: gone, deleted or moved to another network namespace",
                "a new capture, once there is an interface again",
            )
        return DpdkError(
            code, f"rx thread{'' if core is None else f' on core {core}'}: start",
            "a core this process may use, and fewer than 127 rx threads",
        )

    def _release(self) -> None:
        lib.fc_rx_stop(self._rx)
        self._last_state = int(lib.fc_rx_state(self._rx))
        self._last_error = int(lib.fc_rx_error(self._rx))
        lib.fc_rx_destroy(self._rx)
