"""What PyTorch's DistributedDataParallel says about itself on the wire, and what follows from it.

    AllGather of one int64    number of parameters
    Broadcast of int64        sizes then strides of every parameter, no dimensions in between
    Broadcast of int32        after iteration 0: parameter indices in bucket order, then the number of buckets
    Broadcast of int32        number of parameters in each bucket

Pure functions; sources: torch/csrc/distributed/c10d/reducer.cpp, torch/nn/parallel/distributed.py (nccl-wire.md
9.1). Nothing here guesses: where two readings fit, both are returned and the caller refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BadAnnouncement", "broadcast_groups", "initial_buckets", "parse_buckets", "parse_shapes"]

MAX_DIMENSIONS = 8
READINGS = 2  # more than one is ambiguous, how many more does not matter
BROADCAST_LIMIT = 250 << 20
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20


class BadAnnouncement(ValueError):
    """The bytes are not what DDP broadcasts."""


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor, as torch computes them (an extent of 0 counts as 1)."""
    strides, step = [0] * len(sizes), 1
    for axis in range(len(sizes) - 1, -1, -1):
        strides[axis] = step
        step *= max(sizes[axis], 1)
    return tuple(strides)


@dataclass(frozen=True)
class _Cut:
    dims: int
    rest: int


def parse_shapes(values: Sequence[int], count: int) -> list[list[tuple[int, ...]]]:
    """Readings (at most two) of `values` as sizes and strides of `count` row-major parameters.

    Raises BadAnnouncement if there is none."""
    n = len(values)
    if n % 2 or count < 1 or count > n // 2 or any(not 0 <= v < 1 << 48 for v in values):
        raise BadAnnouncement(f"{n} numbers are no sizes and strides of {count} parameters")
    # ways[i]: dimensions that a parameter beginning at i may have
    cuts: list[list[_Cut]] = []
    for i in range(n):
        here = []
        for dims in range(1, MAX_DIMENSIONS + 1):
            end = i + 2 * dims
            if end > n:
                break
            sizes = values[i : i + dims]
            if tuple(values[i + dims : end]) == _contiguous(sizes):
                here.append(_Cut(dims, end))
        cuts.append(here)
    # reach[i]: numbers of parameters that values[i:] can be read as, as a bit set
    reach = [0] * (n + 1)
    reach[n] = 1
    for i in range(n - 1, -1, -1):
        for cut in cuts[i]:
            reach[i] |= reach[cut.rest] << 1
        reach[i] &= (1 << (count + 1)) - 1
    found: list[list[tuple[int, ...]]] = []
    stack: list[tuple[int, int, list[tuple[int, ...]]]] = [(0, count, [])]
    while stack and len(found) < READINGS:
        at, left, shapes = stack.pop()
        if at == n and left == 0:
            found.append(shapes)
            continue
        if at == n:
            continue
        for cut in cuts[at]:
            if left and reach[cut.rest] >> (left - 1) & 1:
                stack.append((cut.rest, left - 1, [*shapes, tuple(values[at : at + cut.dims])]))
    if not found:
        raise BadAnnouncement(
            f"{n} numbers are no sizes and strides of {count} row-major parameters (channels-last weights, whose "
            "gradients are reduced in stride order, are not supported)"
        )
    return found


def parse_buckets(indices: Sequence[int], sizes: Sequence[int], parameters: int) -> list[list[int]]:
    """Parameters of each bucket from the two int32 broadcasts. Raises BadAnnouncement."""
    if len(indices) != parameters + 1 or sorted(indices[:-1]) != list(range(parameters)):
        raise BadAnnouncement(f"{len(indices)} numbers are no bucket order of {parameters} parameters")
    if indices[-1] != len(sizes) or any(s < 1 for s in sizes) or sum(sizes) != parameters:
        raise BadAnnouncement(f"bucket sizes {list(sizes)[:8]} do not hold {parameters} parameters")
    out, at = [], 0
    for size in sizes:
        out.append(list(indices[at : at + size]))
        at += size
    return out


def _assign(sizes: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
    """DDP's compute_bucket_assignment_by_size for one dtype and device: a bucket closes when it reaches its limit;
    the last limit holds for all further buckets."""
    out: list[list[int]] = []
    open_, nbytes, number = [], 0, 0
    for i, size in enumerate(sizes):
        open_.append(i)
        nbytes += size
        if nbytes >= limits[min(number, len(limits) - 1)]:
            out.append(open_)
            open_, nbytes, number = [], 0, number + 1
    if open_:
        out.append(open_)
    return out


def broadcast_groups(sizes: Sequence[int]) -> list[list[int]]:
    """Parameters (of `sizes` bytes) by start-up broadcast: flat groups of at most 250 MiB."""
    return _assign(sizes, [BROADCAST_LIMIT])


def initial_buckets(sizes: Sequence[int]) -> list[list[list[int]]]:
    """Layouts that iteration 0 may have: all in one bucket, or by the default limits, in reverse."""
    whole = [list(range(len(sizes)))]
    limited = _assign(sizes, [FIRST_BUCKET, BUCKET])[::-1]
    return [whole] if limited == whole else [whole, limited]
