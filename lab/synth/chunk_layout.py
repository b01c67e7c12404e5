"""Which elements of a tensor travel on which channel, and in chunks of what size.

`chunks(op)` is the one entry: for every channel the operation uses, a list of loops; every loop is a list
of chunks; a chunk is (first element, element count), possibly empty (it still becomes a message). Ring
AllReduce has n chunks in a loop, everything else one.

Source: reference nccl-wire.md 2.3 to 2.6, 3.1, 7.3, 8; the 2.20-2.21 ranges from NCCL 2.21.5
src/enqueue.cc. Confirmed against messages of executed NCCL code: tests/lab/synth/test_vectors.py.
Pure functions; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.synth.families import Family

__all__ = ["Chunk", "Operation", "chunks", "first_slice", "steps_per_chunk", "used_channels"]

Chunk = tuple[int, int]


@dataclass(frozen=True)
class Operation:
    """One collective, ready to be laid out.

    count: elements; for AllGather elements of one rank's block, for ReduceScatter of one rank's result.
        AllGather and Broadcast are laid out in bytes: size is 1 and count a byte count.
    size: bytes of an element. channels: connected channels. threads, buffers: by protocol name.
    rings: per channel the ranks in ring order, rank 0 first.
    """

    op: str
    algorithm: str
    protocol: str
    count: int
    size: int
    root: int
    ranks: int
    channels: int
    rings: tuple[tuple[int, ...], ...]
    threads: dict[str, int]
    buffers: dict[str, int]
    family: Family

    @property
    def total_bytes(self) -> int:
        """Bytes NCCL's planner counts: the whole tensor, all ranks' blocks of it."""
        return self.count * self.size * (self.ranks if self.op in ("AllGather", "ReduceScatter") else 1)


def up(value: int, grain: int) -> int:
    return -(-value // grain) * grain


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def used_channels(op: Operation) -> tuple[int, int]:
    """(channels, threads per channel) of an operation, nccl-wire.md 3.1."""
    channels, threads = op.channels, op.threads[op.protocol]
    threshold = 64
    if op.protocol == "ll":
        threshold = 8 * (op.ranks if op.algorithm == "ring" else 1)
    elif op.protocol == "ll128":
        threshold = 8
    while op.total_bytes < channels * threads * threshold:
        if channels >= 2:
            channels -= 1
        elif threads % 128 == 0:
            threads //= 2
        else:
            break
    if op.protocol == "simple":
        threads += 32 if op.algorithm == "ring" else 128
    threads = max(threads, 96)
    if op.algorithm == "tree" and op.family.layout == "bytes":
        threads = 640
    return channels, threads


def steps_per_chunk(op: Operation) -> int:
    """Steps of one chunk: 4 (two slices of two) for the SIMPLE rings of AllReduce and friends, else 1."""
    return 4 if op.protocol == "simple" and op.algorithm == "ring" and op.op != "Broadcast" else 1


def first_slice(op: Operation, elements: int) -> int:
    """Elements of the first of the two messages that a chunk of a SIMPLE ring of four steps leaves as (2.7)."""
    return min(elements, max(-(-elements // 32) * 16, 2 * (op.buffers["simple"] // 8) // op.size // 32))


def full_chunk(op: Operation) -> int:
    """Bytes of data in a full ring chunk (2.3)."""
    slot = op.buffers[op.protocol] // 8
    data = {"ll": slot // 2, "ll128": slot // 16 * 15, "simple": slot * steps_per_chunk(op)}[op.protocol]
    if op.family.layout == "bytes":
        data -= data % {"ll": 16, "ll128": 1920, "simple": 512}[op.protocol]
    return data


def _tree_chunk(op: Operation, total: int, channels: int) -> int:
    """Bytes of data in a tree chunk (7.3); one GPU per node, so the depth counts nodes only."""
    levels = op.ranks.bit_length() - 1
    slot = op.buffers[op.protocol] // 8
    if op.protocol == "ll":
        return slot // 2
    chunk = slot
    if op.protocol == "simple":
        if op.family.layout == "loops":
            for factor, floor in ((8, 131072), (4, 65536), (1, 32768)):
                while total // (channels * chunk) < factor * levels and chunk > floor:
                    chunk //= 2
        return chunk
    # To 2.19 the planner halves the slot and takes 15/16 of the result; later it halves the data chunk.
    loops = op.family.layout == "loops"
    chunk = slot if loops else slot // 16 * 15
    steps = 1 + levels + 0.1
    for factor, floor in ((64, 131072), (16, 32768)):
        while total // (channels * chunk) < steps * factor and chunk > floor:
            chunk //= 2
    if loops:
        return chunk // 16 * 15
    return chunk - chunk % 1920 if op.family.layout == "bytes" else chunk


# -- up to 2.19: all channels advance together through the tensor -----------------------------------


def _loops_allreduce(op: Operation, channels: int, threads: int, channel: int) -> list[list[Chunk]]:
    n, size, full = op.ranks, op.size, full_chunk(op) // op.size
    least = threads * (8 // size) if op.protocol == "ll" else threads * (60 // size) // 2
    loops = []
    for grid in range(0, op.count, channels * n * full):
        rest = op.count - grid
        if op.protocol == "simple":
            chunk = up(min(full, ceil(rest, channels * n)), (threads - 32) * 8 // size)
            starts = [grid + channel * n * chunk + j * chunk for j in range(n)]
        else:
            chunk = min(full, ceil(rest, channels * n * least) * least)
            starts = [grid + (j * channels + channel) * chunk for j in range(n)]
        loops.append([_clip(start, chunk, op.count) for start in starts])
    return loops


def _loops_single(op: Operation, channels: int, threads: int, channel: int) -> list[list[Chunk]]:
    """AllGather, ReduceScatter, Broadcast, tree AllReduce: one chunk per channel and loop."""
    size = op.size
    if op.algorithm == "tree":
        full = _tree_chunk(op, op.total_bytes, channels) // size
        least = {
            "simple": (threads - 64) * 8 * (8 // size), "ll": threads * (8 // size),
            "ll128": threads * (60 // size) // 8,
        }[op.protocol]
        if channels * full > op.count:
            full = ceil(op.count, channels * least) * least
        return [[_clip(grid + channel * full, full, op.count)] for grid in range(0, op.count, channels * full)]
    full = full_chunk(op) // size
    blocks = 1 if op.op == "Broadcast" else op.ranks
    total = op.count * size * blocks
    ll_rest = up(ceil(total % (channels * blocks * full * size), channels * blocks), threads * 8) // size
    least = threads * (60 // size) // (1 if op.op == "Broadcast" else 2)
    loops = []
    for grid in range(0, op.count, channels * full):
        rest = op.count - grid
        if op.protocol == "simple":
            chunk = up(min(full, ceil(rest, channels)), (threads - 32) * 8 // size)
        elif op.protocol == "ll":
            chunk = ll_rest if rest < channels * full else full
        else:
            chunk = min(ceil(rest, channels * least) * least, full)
        loops.append([_clip(grid + channel * chunk, chunk, op.count)])
    return loops


# -- from 2.20: every channel has one contiguous part ----------------------------------------------


def _split_ranges(op: Operation, channels: int, threads: int) -> tuple[list[tuple[int, int, int]], int]:
    """2.20-2.21: [(channel, first element, count)] and the alignment of the last loop's chunks."""
    align = {
        "ll": 8 // op.size * threads, "ll128": 480 // op.size * (threads // 32), "simple": 4096 // op.size,
    }[op.protocol]
    per = up(ceil(op.count * op.size, channels), 16)
    parts, start = [], 0
    for channel in range(channels):
        left = op.count - start
        if left == 0:
            break
        part = min(up(ceil(min(per, left * op.size), op.size), align), left)
        parts.append((channel, start, part))
        start += part
    return parts, align


def split_bytes(op: Operation, channels: int) -> list[tuple[int, int, int]]:
    """2.22 and later: [(channel, first element, count)], nccl-wire.md 2.6."""
    family, size = op.family, op.size
    total = op.count * size
    per_byte = {"AllReduce": 2, "AllGather": op.ranks, "ReduceScatter": op.ranks}.get(op.op, 1)
    if op.protocol == "ll":
        per_byte *= family.ll_scale
    least = family.min_traffic
    traffic = total * per_byte
    budget = max(least, traffic // channels) if family.clamp else up(traffic // channels, 16)
    cell = family.cell or up(ceil(least, per_byte), 16)
    cells = ceil(total, cell)
    per = max(1, min(cells, ceil(budget, cell * per_byte)))
    if op.channels == 1:
        low = cells
    elif family.floor_lo:
        low = min(cells, budget // (cell * per_byte))
    else:
        low = per
    middle, high = divmod(cells - low, per)
    if 1 + middle + (high > 0) > op.channels:
        middle = op.channels - 2
        per = (cells - low) // (middle + 1)
        high = per + (cells - low) % (middle + 1)
    if high == 0 and middle > 0:
        high = per
        middle -= 1
    counts = [low] + [per] * middle + ([high] if high else [])
    parts, start = [], 0
    for channel, amount in enumerate(counts):
        part = min(amount * cell // size, op.count - start)
        if part > 0:
            parts.append((channel, start, part))
        start += part
    return parts


def _in_part(op: Operation, start: int, part: int, align: int) -> list[list[Chunk]]:
    ring_reduce = op.op == "AllReduce" and op.algorithm == "ring"
    n = op.ranks if ring_reduce else 1
    if op.algorithm == "ring":
        full = full_chunk(op) // op.size
    elif op.family.layout == "ranges":  # 2.20-2.21 decide once for the operation, later ones per channel
        full = _tree_chunk(op, op.total_bytes, used_channels(op)[0]) // op.size
    else:
        full = _tree_chunk(op, part * op.size, 1) // op.size
    loops = []
    for done in range(0, part, n * full):
        rest = part - done
        chunk = up(ceil(rest, n), align) if ring_reduce and rest < n * full else full
        loops.append([_clip(start + done + j * chunk, chunk, start + part) for j in range(n)])
    return loops


def _clip(start: int, length: int, end: int) -> Chunk:
    return start, max(0, min(length, end - start))


def chunks(op: Operation) -> dict[int, list[list[Chunk]]]:
    """Loops of chunks by channel; channels that carry nothing at all are absent."""
    if op.count == 0:
        return {}
    channels, threads = used_channels(op)
    if op.family.layout == "loops":
        ring_reduce = op.op == "AllReduce" and op.algorithm == "ring"
        lay = _loops_allreduce if ring_reduce else _loops_single
        return {channel: lay(op, channels, threads, channel) for channel in range(channels)}
    if op.family.layout == "ranges":
        parts, align = _split_ranges(op, channels, threads)
    else:
        parts, align = split_bytes(op, channels), max(1, 16 // op.size)
    return {channel: _in_part(op, start, part, align) for channel, start, part in parts}
