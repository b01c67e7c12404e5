"""Which elements of a call travel on which channel, and in chunks of what size: NCCL's planning code.

    threads_and_channels(topology, ...)   how many of both a call uses (3.1)
    segments(topology, ...)               per channel the loops of chunks, in closed form (2.4-2.6, 7.3, 8)

Here too: what a communicator fixes for all its calls. What differs between versions is in nccl.py. Pure, any thread.

Sources: reference nccl-wire.md, section numbers in the comments; NCCL files are named there. What is
proven by what: docs/understand/wire.md. Units: elements of the call's dtype unless a name says bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from parser.nccl import Chunks, Nccl, Parts, WireError, of

__all__ = [
    "Protocol",
    "Segment",
    "Topology",
    "UnsupportedCall",
    "channel_split",
    "segments",
    "threads_and_channels",
]


class UnsupportedCall(WireError):
    """A call whose layout is not known: refused, never guessed."""


class Protocol(IntEnum):
    LL = 0
    LL128 = 1
    SIMPLE = 2


@dataclass(frozen=True)
class Topology:
    """What a communicator fixes for all its calls.

    rings: per channel, ranks in ring order beginning with rank 0. slot_bytes: wire bytes of one step,
    buffer / 8, by protocol. max_threads by protocol. ranks_per_node is 1: only inter-node edges of one
    GPU per node are modelled for trees; for rings any edge between two nodes is described alike.
    """

    version: str
    ranks: int
    channels: int
    rings: tuple[tuple[int, ...], ...]
    slot_bytes: tuple[int, int, int] = (65536, 614400, 524288)
    max_threads: tuple[int, int, int] = (512, 640, 512)

    @property
    def nccl(self) -> Nccl:
        return of(self.version)

    def ring(self, channel: int) -> tuple[int, ...]:
        return self.rings[channel] if len(self.rings) > 1 else self.rings[0]


@dataclass(frozen=True)
class Segment:
    """`loops` loops: chunk j of loop l is [base + l*loop_stride + j*chunk_stride, +chunk) cut at limit."""

    base: int
    loop_stride: int
    chunk_stride: int
    chunk: int
    limit: int
    loops: int


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _up(a: int, grain: int) -> int:
    return _ceil(a, grain) * grain


# -- 3.1 channels and threads of one operation ------------------------------------------------------


def threads_and_channels(topology: Topology, algorithm: str, protocol: Protocol, total_bytes: int) -> tuple[int, int]:
    """(channels, threads) of a call of `total_bytes` (AllGather, ReduceScatter: bytes of all ranks)."""
    channels, threads = topology.channels, topology.max_threads[protocol]
    if protocol == Protocol.SIMPLE:
        threshold = 64
    elif protocol == Protocol.LL and algorithm == "ring":
        threshold = 8 * topology.ranks
    else:
        threshold = 8
    while total_bytes < channels * threads * threshold:
        if channels >= 2:
            channels -= 1
        elif threads % 128 == 0:
            threads //= 2
        else:
            break
    if protocol == Protocol.SIMPLE:
        threads += 32 if algorithm == "ring" else 128
    threads = max(threads, 96)
    if algorithm == "tree" and topology.nccl.tree_threads:
        threads = topology.nccl.tree_threads
    return channels, threads


# -- chunk sizes ------------------------------------------------------------------------------------


def _step_data_bytes(topology: Topology, protocol: Protocol) -> int:
    """Data bytes of one step (2.3): LL sends flags with every 4 bytes, LL128 with every 120."""
    slot = topology.slot_bytes[protocol]
    return {Protocol.LL: slot // 2, Protocol.LL128: slot // 16 * 15, Protocol.SIMPLE: slot}[protocol]


def _full_chunk_bytes(topology: Topology, op: str, algorithm: str, protocol: Protocol) -> int:
    steps = 4 if protocol == Protocol.SIMPLE and algorithm == "ring" and op != "Broadcast" else 1
    return steps * _step_data_bytes(topology, protocol)


def channel_split(
    rule: Chunks, protocol: Protocol, total_bytes: int, elem_bytes: int, channels: int, available: int, tpb: int
) -> list[tuple[int, int]]:
    """(offset, count) per channel of one ungrouped call, 2.22 and later (2.6, continuous byte distribution).

    total_bytes: of the tensor (AllGather: one rank's block). channels: used by the call (3.1).
    available: channels of the communicator. tpb: traffic per byte, 2 AllReduce, n AllGather and
    ReduceScatter, else 1.
    """
    count = total_bytes // elem_bytes
    if available == 1 or count == 0:
        return [(0, count)] + [(0, 0)] * (available - 1)
    if protocol == Protocol.LL:
        tpb *= rule.ll_weight
    cell = rule.cell or _up(_ceil(rule.min_traffic, tpb), 16)
    cells = _ceil(total_bytes, cell)
    per_channel = total_bytes * tpb // channels
    per_channel = max(rule.min_traffic, per_channel) if rule.clamped else _up(per_channel, 16)
    per = max(1, min(cells, _ceil(per_channel, cell * tpb)))
    low = min(cells, per_channel // (cell * tpb) if rule.floored else _ceil(per_channel, cell * tpb))
    first = 0
    if low == 0:  # floored only: the first channel is skipped
        first, low = 1, min(cells, per)
    middle, high = divmod(cells - low, per)
    room = available - first
    if 1 + middle + (high > 0) > room:
        middle = room - 2
        per = (cells - low) // (middle + 1)
        high = per + (cells - low) % (middle + 1)
    if high == 0 and middle > 0:
        high, middle = per, middle - 1
    parts = [low * cell // elem_bytes] + [per * cell // elem_bytes] * middle
    if high:
        parts.append(high * cell // elem_bytes)
    parts[-1] -= sum(parts) - count  # the overhang past the end
    out, offset = [(0, 0)] * first, 0
    for part in parts:
        out.append((offset, part))
        offset += part
    return out + [(0, 0)] * (available - len(out))


def _contiguous(base: int, part: int, group: int, full: int, last_align: int) -> tuple[Segment, ...]:
    """Segments of one channel's contiguous part: loops of `group` chunks of `full`, then a clipped one."""
    if part == 0:
        return ()
    whole, rest = divmod(part, group * full)
    limit = base + part
    out: list[Segment] = []
    if whole:
        out.append(Segment(base, group * full, full, full, limit, whole))
    if rest:
        chunk = full if group == 1 else _up(_ceil(rest, group), last_align)
        if chunk > full:  # only with buffers far below their defaults before 2.22
            raise UnsupportedCall(f"a last chunk of {chunk} elements would not fit into a step's buffer of {full}")
        out.append(Segment(base + whole * group * full, 0, chunk, chunk, limit, 1))
    return tuple(out)


def _interleaved(
    topology: Topology, op: str, protocol: Protocol, count: int, ts: int, channels: int, threads: int, full: int
) -> tuple[tuple[Segment, ...], ...]:
    """2.4 and 8.1/8.4: loops over all channels, 2.12-2.19. Ring only."""
    group = topology.ranks if op == "AllReduce" else 1
    span = channels * group * full
    last = (_ceil(count, span) - 1) * span if count else 0

    def chunk_of(rest: int) -> int:
        if protocol == Protocol.SIMPLE:
            return _up(min(full, _ceil(rest, channels * group)), (threads - 32) * 8 // ts)
        if protocol == Protocol.LL:
            minimum = threads * (8 // ts)
            if op != "AllReduce":
                return full if rest >= span else _up(_ceil(rest, channels), minimum)
        else:
            minimum = threads * (60 // ts) // (2 if op != "Broadcast" else 1)
        return min(full, _ceil(rest, channels * group * minimum) * minimum)

    out: list[tuple[Segment, ...]] = []
    for channel in range(topology.channels):
        if channel >= channels or count == 0:
            out.append(())
            continue
        parts = []
        for first, loops, chunk in ((0, last // span, full), (last, 1, chunk_of(count - last))):
            if not loops:
                continue
            if protocol == Protocol.SIMPLE:
                base, stride = first + channel * group * chunk, chunk
            else:
                base, stride = first + channel * chunk, channels * chunk
            parts.append(Segment(base, span, stride, chunk, count, loops))
        out.append(tuple(parts))
    return tuple(out)


def _tree_chunk_bytes(topology: Topology, protocol: Protocol, part_bytes: int, channels: int) -> int:
    """7.3, before the per-family rounding. One GPU per node: depth = floor(log2 N)."""
    log2 = topology.ranks.bit_length() - 1
    if protocol == Protocol.LL:
        return _step_data_bytes(topology, protocol)
    if protocol == Protocol.SIMPLE:
        chunk = topology.slot_bytes[protocol]
        if topology.nccl.chunks.parts == Parts.LOOPS:
            for factor, floor in ((8, 131072), (4, 65536), (1, 32768)):
                while part_bytes < channels * chunk * factor * log2 and chunk > floor:
                    chunk //= 2
        return chunk
    # 2.19 halves the slot and takes 15/16 at the end, later versions halve the data bytes
    early = topology.nccl.chunks.parts == Parts.LOOPS
    chunk = topology.slot_bytes[protocol] if early else _step_data_bytes(topology, protocol)
    steps = 1 + log2 + 0.1
    for factor, floor in ((64, 131072), (16, 32768)):
        while part_bytes / (channels * chunk) < steps * factor and chunk > floor:
            chunk //= 2
    return chunk // 16 * 15 if early else chunk


def segments(
    topology: Topology, op: str, algorithm: str, protocol: Protocol, count: int, ts: int, channels: int, threads: int
) -> tuple[tuple[Segment, ...], ...]:
    rule = topology.nccl.chunks
    full = _full_chunk_bytes(topology, op, algorithm, protocol) // ts
    group = topology.ranks if op == "AllReduce" and algorithm == "ring" else 1
    if rule.parts == Parts.LOOPS:
        if algorithm == "tree":
            return _tree_interleaved(topology, protocol, count, ts, channels, threads)
        return _interleaved(topology, op, protocol, count, ts, channels, threads, full)
    tpb = topology.ranks if op in ("AllGather", "ReduceScatter") else 2 if op == "AllReduce" else 1
    if rule.parts == Parts.RANGES:
        split, align = _ranges(topology, protocol, count, ts, channels, threads)
    else:
        split = channel_split(rule, protocol, count * ts, ts, channels, topology.channels, tpb)
        align = 16 // ts
    grain = {Protocol.LL: 16, Protocol.LL128: 1920, Protocol.SIMPLE: 512}[protocol]
    out: list[tuple[Segment, ...]] = []
    for base, part in split:
        if algorithm == "tree":  # 2.20-2.21 size the chunk by the whole call (computeCollChunkInfo)
            sized_by = (count * ts, channels) if rule.parts == Parts.RANGES else (part * ts, 1)
            full = _tree_chunk_bytes(topology, protocol, *sized_by) // ts
        if rule.parts == Parts.BYTES:
            full = full * ts // grain * grain // ts
        out.append(_contiguous(base, part, group, full, align))
    return tuple(out)


def _ranges(
    topology: Topology, protocol: Protocol, count: int, ts: int, channels: int, threads: int
) -> tuple[list[tuple[int, int]], int]:
    """2.5: one contiguous range per channel, rounded to an alignment that depends on the threads."""
    align = {Protocol.LL: 8 // ts * threads, Protocol.LL128: 480 // ts * (threads // 32), Protocol.SIMPLE: 4096 // ts}[
        protocol
    ]
    per = _up(_ceil(_up(_ceil(count * ts, channels), 16), ts), align)
    out: list[tuple[int, int]] = []
    for channel in range(topology.channels):
        base = min(count, channel * per) if channel < channels else count
        out.append((base, min(per, count - base)))
    return out, align


def _tree_interleaved(
    topology: Topology, protocol: Protocol, count: int, ts: int, channels: int, threads: int
) -> tuple[tuple[Segment, ...], ...]:
    """7.3 for 2.12-2.19: chunk c of a loop at g + c*size."""
    chunk = _tree_chunk_bytes(topology, protocol, count * ts, channels) // ts
    minimum = {
        Protocol.SIMPLE: (threads - 64) * 8 * (8 // ts),
        Protocol.LL: threads * (8 // ts),
        Protocol.LL128: threads * (60 // ts) // 8,
    }[protocol]
    if channels * chunk > count:
        chunk = _ceil(count, channels * minimum) * minimum
    out: list[tuple[Segment, ...]] = []
    for channel in range(topology.channels):
        if channel >= channels or count == 0:
            out.append(())
            continue
        loops = _ceil(count, channels * chunk)
        out.append((Segment(channel * chunk, channels * chunk, chunk, chunk, count, loops),))
    return tuple(out)
