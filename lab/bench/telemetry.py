"""bench telemetry: gradients and weights measured as a live node does it, beside checksums of the same memory.

    telemetry.gradients.WIDTH.THREADS   GB/s of 200 tensors' gradients: norm, largest, zeros, NaN, infinity
    telemetry.weights.WIDTH.THREADS     GB/s of two versions of 200 tensors: how far the step moved the weights
    telemetry.checksum.WIDTH.THREADS    GB/s of the same tensors' checksums, in the same rounds

The limit of each is loads of the same memory by as many threads.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from lab.bench.rows import Row, alternate, timed
from lab.bench.sums import LINES, TENSORS, compared, only_read
from lab.bench.workload import aligned
from updater import kernels
from updater.measure import Measurer, Parts
from updater.verify import checksum

__all__ = ["run"]

WIDTHS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run(rounds: int, ring_bytes: int) -> list[Row]:
    """Rows for each width on one and two threads, over `ring_bytes` of gradients."""
    size = ring_bytes // TENSORS // (2 * LINES) * (2 * LINES)
    memory = torch.from_numpy(aligned(TENSORS * size))
    rows = []
    for width, dtype in WIDTHS.items():
        elements = TENSORS * size // dtype.itemsize
        values = np.random.default_rng(1).standard_normal(elements // 8, np.float32) * np.float32(1e-3)
        memory.view(dtype).copy_(torch.from_numpy(np.tile(values, 8)))
        version = {str(i): memory[i * size : (i + 1) * size].view(dtype) for i in range(TENSORS)}
        theirs = {name: checksum(tensor) for name, tensor in version.items()}
        for threads in (1, 2):
            pool, measurer = kernels.Pool(threads), Measurer(threads)
            taken = alternate({
                "gradients": _gradients(measurer, memory, dtype, size),
                "weights": _weights(measurer, memory, dtype, size),
                "checksum": compared(pool, version, theirs),
                "read": only_read(memory, threads),
            }, rounds)
            measurer.close()
            pool.close()
            speed = {name: [1e-9 * TENSORS * size / s for s in seconds] for name, seconds in taken.items()}
            rows += [Row.of(f"telemetry.{name}.{width}.{threads}t", "GB/s", speed[name], speed["read"], None)
                     for name in ("gradients", "weights", "checksum")]
    return rows


def _gradients(measurer: Measurer, memory: torch.Tensor, dtype: torch.dtype, size: int) -> Callable[[], float]:
    n = size // dtype.itemsize
    parts = Parts([(i, str(dtype).removeprefix("torch."), i * size, 0, n) for i in range(TENSORS)], TENSORS)

    def work() -> bool:
        parts.gradients(memory.data_ptr())
        measurer.wait(measurer.begin(parts))
        return any(one.nans or one.infs for one in parts.found())

    return timed(work)


def _weights(measurer: Measurer, memory: torch.Tensor, dtype: torch.dtype, size: int) -> Callable[[], float]:
    """The first half of the memory is the version before, the second the one after."""
    n, half = size // 2 // dtype.itemsize, TENSORS * size // 2
    parts = Parts([(i, str(dtype).removeprefix("torch."), 0, 0, n) for i in range(TENSORS)], TENSORS)
    before = [memory.data_ptr() + i * size // 2 for i in range(TENSORS)]

    def work() -> bool:
        parts.weights(before, [at + half for at in before])
        measurer.wait(measurer.begin(parts))
        return any(not one.elements for one in parts.found())

    return timed(work)
