"""bench checksum: parameters summed up as a live node does it, beside reading the same memory.

    checksum.trainer.WIDTH     GB/s of the same tensors as a trainer sums them up, on one thread, against the same loads
    checksum.WIDTH.THREADS     GB/s of a version of 200 tensors compared with a trainer's checksums, as the node does it
                               (updater/verify.py), against loads of the same memory by as many threads
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from flowcheck.control.checksum import checksums
from lab.bench import roof
from lab.bench.rows import Row, alternate, on_threads, timed
from lab.bench.workload import aligned
from updater import kernels
from updater.verify import Comparison, checksum

__all__ = ["LINES", "TENSORS", "compared", "only_read", "run"]

TENSORS = 200
TARGET = 0.6
TRAINERS_TARGET = 0.5
WIDTHS = {"fp32": torch.float32, "bf16": torch.bfloat16}
LINES = 256  # bytes that the read limit takes at a time


def run(rounds: int, ring_bytes: int) -> list[Row]:
    """Rows for both widths on one and two threads, over `ring_bytes` of parameters."""
    size = ring_bytes // TENSORS // LINES * LINES
    memory = torch.from_numpy(aligned(TENSORS * size))
    memory.copy_(torch.from_numpy(np.random.default_rng(1).integers(0, 256, TENSORS * size, np.uint8)))
    rows = []
    for width, dtype in WIDTHS.items():
        version = {str(i): memory[i * size : (i + 1) * size].view(dtype) for i in range(TENSORS)}
        theirs = {name: checksum(tensor) for name, tensor in version.items()}
        for threads in (1, 2):
            pool = kernels.Pool(threads)
            seconds = alternate({"ours": compared(pool, version, theirs), "read": only_read(memory, threads)}, rounds)
            pool.close()
            speed = {name: [1e-9 * TENSORS * size / s for s in taken] for name, taken in seconds.items()}
            rows.append(Row.of(f"checksum.{width}.{threads}t", "GB/s", speed["ours"], speed["read"], TARGET))
        seconds = alternate({"ours": _trainers(version), "read": only_read(memory, 1)}, rounds)
        speed = {name: [1e-9 * TENSORS * size / s for s in taken] for name, taken in seconds.items()}
        rows.append(Row.of(f"checksum.trainer.{width}", "GB/s", speed["ours"], speed["read"], TRAINERS_TARGET))
    return rows


def compared(pool: kernels.Pool, version: dict[str, torch.Tensor], theirs: dict[str, int]) -> Callable[[], float]:
    return timed(lambda: Comparison(pool, version, theirs).differing())


def _trainers(version: dict[str, torch.Tensor]) -> Callable[[], float]:
    """Without several threads, whatever torch has."""
    threads = torch.get_num_threads()
    measure = timed(lambda: checksums(version) == {})

    def alone() -> float:
        torch.set_num_threads(1)
        try:
            return measure()
        finally:
            torch.set_num_threads(threads)

    return alone


def only_read(memory: torch.Tensor, threads: int) -> Callable[[], float]:
    def part(first: int, end: int) -> None:
        roof.read(memory.data_ptr() + first, end - first)

    return on_threads(part, memory.numel(), threads, LINES)
