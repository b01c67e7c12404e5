"""DDP's own rules, as pure functions: what its broadcasts say, and how it packs buckets. No messages, no search.

    parse_shapes(values, count)                  the broadcast of sizes and strides -> shapes
    parse_buckets(indices, sizes, parameters)    the broadcasts of a rebuilt layout -> buckets
    initial_buckets(sizes)                       the layouts that iteration 0 may have
    broadcast_groups(sizes)                      which parameters one start-up broadcast carries

A bucket is a list of parameter indices, in the order in which the parameters lie in it. Sizes are bytes.
Sources: torch/csrc/distributed/c10d/reducer.cpp (compute_bucket_assignment_by_size, sync_bucket_indices), comm.cpp
(broadcast_coalesced); nccl-wire.md 9.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowcheck.learning.search.position import Mismatch

__all__ = ["MAX_DIMENSIONS", "broadcast_groups", "initial_buckets", "parse_buckets", "parse_shapes"]

MAX_DIMENSIONS = 8
READINGS = 2  # more than one is ambiguous, how many more does not matter
BROADCAST_LIMIT = 250 << 20
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor, as torch computes them (an extent of 0 counts as 1)."""
    strides, step = [0] * len(sizes), 1
    for axis in range(len(sizes) - 1, -1, -1):
        strides[axis] = step
        step *= max(sizes[axis], 1)
    return tuple(strides)


def parse_shapes(values: Sequence[int], count: int) -> list[list[tuple[int, ...]]]:
    """Readings (at most two) of `values` as sizes and strides of `count` row-major parameters.

    Raises Mismatch if none exists."""
    n = len(values)
    if n % 2 or count < 1 or count > n // 2 or any(not 0 <= v < 1 << 48 for v in values):
        raise Mismatch(f"{n} numbers are not sizes and strides of {count} parameters")
    # cuts[i]: dimensions that a parameter beginning at i may have
    cuts = [
        [
            dims for dims in range(1, min(MAX_DIMENSIONS, (n - i) // 2) + 1)
            if tuple(values[i + dims : i + 2 * dims]) == _contiguous(values[i : i + dims])
        ]
        for i in range(n)
    ]
    # reach[i]: numbers of parameters that values[i:] can be read as, as a bit set
    reach = [0] * n + [1]
    for i in range(n - 1, -1, -1):
        for dims in cuts[i]:
            reach[i] |= reach[i + 2 * dims] << 1
        reach[i] &= (1 << (count + 1)) - 1
    found: list[list[tuple[int, ...]]] = []
    stack: list[tuple[int, list[tuple[int, ...]]]] = [(0, [])]
    while stack and len(found) < READINGS:
        at, read = stack.pop()
        left = count - len(read)
        if at == n and not left:
            found.append(read)
        elif at < n and left:
            for dims in cuts[at]:
                if reach[at + 2 * dims] >> (left - 1) & 1:
                    stack.append((at + 2 * dims, [*read, tuple(values[at : at + dims])]))
    if not found:
        raise Mismatch(
            f"{n} numbers are not sizes and strides of {count} row-major parameters (channels-last weights, whose "
            "gradients are reduced in stride order, are not supported)"
        )
    return found


def parse_buckets(indices: Sequence[int], sizes: Sequence[int], parameters: int) -> list[list[int]]:
    """Parameters of each bucket from the two int32 broadcasts. Raises Mismatch."""
    if len(indices) != parameters + 1 or sorted(indices[:-1]) != list(range(parameters)):
        raise Mismatch(f"{len(indices)} numbers are not a bucket order of {parameters} parameters")
    if indices[-1] != len(sizes) or any(s < 1 for s in sizes) or sum(sizes) != parameters:
        raise Mismatch(f"bucket sizes {list(sizes)[:8]} do not hold {parameters} parameters")
    out, at = [], 0
    for size in sizes:
        out.append(list(indices[at : at + size]))
        at += size
    return out


def _assign(sizes: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
    """DDP's compute_bucket_assignment_by_size for one dtype and device: a bucket closes when it reaches its limit;
    the last limit holds for all further buckets."""
    out: list[list[int]] = [[]]
    nbytes = 0
    for i, size in enumerate(sizes):
        out[-1].append(i)
        nbytes += size
        if nbytes >= limits[min(len(out), len(limits)) - 1]:
            out.append([])
            nbytes = 0
    return out if out[-1] else out[:-1]


def broadcast_groups(sizes: Sequence[int]) -> list[list[int]]:
    """Parameters (of `sizes` bytes) by start-up broadcast: flat groups of at most 250 MiB."""
    return _assign(sizes, [BROADCAST_LIMIT])


def initial_buckets(sizes: Sequence[int]) -> list[list[list[int]]]:
    """Layouts that iteration 0 may have: all in one bucket, or by the default limits, in reverse."""
    whole = [list(range(len(sizes)))]
    limited = _assign(sizes, [FIRST_BUCKET, BUCKET])[::-1]
    return [whole] if limited == whole else [whole, limited]
