"""What NCCL did, as FlowCheck's profiler plugin saw it in this process.

    plugin = Plugin()                   before the first communicator: NCCL_PROFILER_PLUGIN = plugin.path
    plugin.read()                       records since the last read, in order
    plugin.record(False)                NCCL makes no more events
    plugin.counts()                     how many were dropped, ...

The plugin (src/nccl_profiler.c) keeps records in a ring in the memory of the process that NCCL runs in. Python opens
the same file, and the dynamic loader gives it the same memory: no file or socket is between them, and nothing to
clean up. NCCL unloads a plugin with its last communicator; a Plugin keeps it, with what it saw.

What each record is follows NCCL's sources (docs/use/nccl.md says which and what was run). torch is not needed; the
standard library only.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from dataclasses import dataclass

from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.trainer.plugin import plugin_path

__all__ = [
    "LOST", "Call", "Communicator", "Counts", "Finalized", "Plugin", "ProxyOperation", "Record", "parse",
]

LAYOUT = 0x46435052004E0001  # FLOWCHECK_PROFILER_LAYOUT of include/nccl_profiler.h
RECORDS = 32768
LOST = 2**64 - 1
_RECORD = struct.Struct("<QQQQQIiiiiiBBBBi16s16s16s8s")
_NAME = slice(_RECORD.size - 56, _RECORD.size)
_BATCH = 1024  # records taken at once
_INTERFACES = range(1, 7)
_CHANNELS = 64  # NCCL's MAXCHANNELS


@dataclass(frozen=True)
class Communicator:
    """NCCL made a communicator. number: this process's of it. interface: of the plugin, 1 to 6. hash: the same on all
    its ranks; 0, and rank, ranks and nodes -1, where the interface does not say them (1 to 3)."""

    serial: int
    number: int
    interface: int
    hash: int
    rank: int
    ranks: int
    nodes: int
    name: str


@dataclass(frozen=True)
class Finalized:
    """Communicator `number` is gone."""

    serial: int
    number: int


@dataclass(frozen=True)
class Call:
    """One collective, or one Send or Recv, when NCCL launched it.

    function, type, algorithm, protocol: as NCCL names them ("AllReduce", "ncclFloat32", "RING", "LL128"); algorithm
        and protocol are "" of a Send or Recv.
    count: elements of `type`. NCCL has turned AllGather and Broadcast into bytes of ncclInt8 by then.
    root: of Send and Recv the peer. sequence: NCCL's number among its calls of this function.
    warps: per channel. reduction: ncclRedOp_t where the interface says it (1), else None.
    """

    serial: int
    number: int
    interface: int
    hash: int
    rank: int
    function: str
    count: int
    type: str
    root: int
    algorithm: str
    protocol: str
    channels: int
    warps: int
    sequence: int
    reduction: int | None
    collective: bool  # not point to point


@dataclass(frozen=True)
class ProxyOperation:
    """What one connection of one channel sends or receives over the network for a call.

    call: serial of the Call; 0: another process's (`process`, its pid), or of none; LOST: of one that was dropped.
    steps, chunk_bytes: messages, and the most bytes of one. Interface 1 (NCCL 2.23) counts both in steps of the
        buffer, of which SIMPLE sends more than one in a message.
    """

    serial: int
    number: int
    interface: int
    rank: int
    call: int
    channel: int
    peer: int
    steps: int
    chunk_bytes: int
    sends: bool
    process: int


Record = Communicator | Finalized | Call | ProxyOperation


@dataclass(frozen=True)
class Counts:
    """written: records so far. taken: of these, by `read`. dropped: events, because the ring was full. strangers:
    events, or communicators, for which there was no room (256 at once). communicators: that NCCL has now.
    process: pid that made them, 0 before the first. recording: whether NCCL is asked for events."""

    written: int
    taken: int
    dropped: int
    strangers: int
    communicators: int
    process: int
    recording: bool


def parse(data: bytes, first: int) -> list[Record]:
    """data: whole records of 128 bytes; first: the serial number of the first.

    Raises EnvironmentProblem, naming the record and what of it cannot be.
    """
    if len(data) % _RECORD.size:
        raise EnvironmentProblem(f"{len(data)} bytes are no whole records of {_RECORD.size}", where="profiler plugin",
                                 remedy="use the plugin and the module of one installation")
    return [_one(data[at:at + _RECORD.size], first + at // _RECORD.size) for at in range(0, len(data), _RECORD.size)]


def _one(data: bytes, expected: int) -> Record:
    (serial, parent, count, sequence, hashed, number, rank, other, steps, chunk, process, kind, interface, channels,
     width, reduction, function, kind_of, algorithm, protocol) = _RECORD.unpack(data)

    def check(right: bool, what: str) -> None:
        if not right:
            raise EnvironmentProblem(
                f"record {expected} {what}", where="profiler plugin",
                remedy="use the plugin and the module of one installation; if they are, report it",
            )

    def text(field: bytes) -> str:
        name, _, rest = field.partition(b"\0")
        check(all(32 < byte < 127 for byte in name) and not any(rest), f"has the name {field!r}")
        return name.decode("ascii")

    check(serial == expected, f"has the number {serial}")
    check(0 < number < 2**32 - 1, f"is of communicator {number}")
    if kind == 5:
        return Finalized(serial, number)
    check(interface in _INTERFACES, f"is of interface {interface}")
    if kind == 1:
        told = interface > 3
        check((0 <= rank < other and 0 < steps <= other) if told else rank == other == steps == -1,
              f"has rank {rank} of {other} on {steps} nodes")
        named = data[_NAME].partition(b"\0")[0].decode("utf-8", "replace")
        return Communicator(serial, number, interface, hashed, rank, other, steps, named)
    check(rank >= 0, f"is of rank {rank}")
    if kind in (2, 3):
        check(count < 2**63, f"has {count} elements")
        check(other >= 0, f"has the root or peer {other}")
        check(channels <= _CHANNELS, f"has {channels} channels")
        name = text(function)
        check(bool(name), "has no function")
        return Call(
            serial, number, interface, hashed, rank, name, count, text(kind_of), other, text(algorithm),
            text(protocol), channels, width, sequence, None if reduction == -1 else reduction, kind == 2,
        )
    check(kind == 4, f"is of kind {kind}")
    check(parent == LOST or parent < serial, f"belongs to record {parent}, which is not before it")
    check(channels < _CHANNELS, f"is of channel {channels}")
    check(steps >= 0 and chunk >= 0, f"has {steps} steps of {chunk} bytes")
    check(width in (0, 1), f"has the direction {width}")
    return ProxyOperation(
        serial, number, interface, rank, parent, channels, other, steps, chunk, width == 1, process
    )


class Plugin:
    """The plugin as this process has it loaded, or loads it. Keep one per process: what one has read no other gets."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """path: the plugin's file, as in NCCL_PROFILER_PLUGIN; default: the installation's.

        Raises EnvironmentProblem if it is not there and cannot be compiled, or not FlowCheck's of this version.
        """
        self.path = str(plugin_path() if path is None else path)
        try:
            self._library = ctypes.CDLL(self.path)
            layout = self._library.flowcheck_profiler_layout
        except (OSError, AttributeError) as error:
            raise EnvironmentProblem(f"is not FlowCheck's profiler plugin: {error}", where=self.path,
                                     remedy="leave the path out: the installation's own") from None
        layout.restype = ctypes.c_uint64
        if layout() != LAYOUT:
            raise EnvironmentProblem("is the profiler plugin of another version of FlowCheck", where=self.path,
                                     remedy="leave the path out: the installation's own")
        self._library.flowcheck_profiler_read.restype = ctypes.c_uint64
        self._library.flowcheck_profiler_read.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
        self._library.flowcheck_profiler_counts.argtypes = (ctypes.c_void_p,)
        self._room = ctypes.create_string_buffer(_BATCH * _RECORD.size)
        self._process = os.getpid()
        self._reading = threading.Lock()

    def read(self) -> list[Record]:
        """All records that are whole by now, in the order in which NCCL made the events.

        Raises UserError in a process forked from the one that opened the plugin: NCCL is not in that. Raises
        EnvironmentProblem for a record that cannot be; it and what came with it are gone then.
        """
        if os.getpid() != self._process:
            raise UserError(f"was opened by process {self._process}, not by this one, which was forked from it",
                            where=self.path, remedy="open the plugin in the process that makes NCCL's communicators")
        found: list[Record] = []
        with self._reading:
            for _ in range(RECORDS // _BATCH):  # no more than the ring holds, however fast NCCL is
                first = self.counts().taken + 1
                number = self._library.flowcheck_profiler_read(self._room, _BATCH)
                found += parse(self._room.raw[:number * _RECORD.size], first)
                if number < _BATCH:
                    break
        return found

    def record(self, events: bool) -> None:
        """Have NCCL make events, as it does from the start, or none. Costs nothing then but a look at its mask.

        Calls that NCCL has begun by now keep their events. With NCCL 2.23 to 2.25 `sequence` does not count calls
        without events.
        """
        self._library.flowcheck_profiler_record(int(events))

    def counts(self) -> Counts:
        numbers = (ctypes.c_uint64 * 7)()
        self._library.flowcheck_profiler_counts(numbers)
        written, taken, dropped, strangers, communicators, process, mask = numbers
        return Counts(written, taken, dropped, strangers, communicators, process, mask != 0)
