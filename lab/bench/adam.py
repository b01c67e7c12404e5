"""bench adam: one step of Adam over 100 million parameters, beside its memory traffic and torch's own optimizers.

As one tensor and as 200, on one and on two threads. All sides use the same memory, in alternating rounds.

    adam.SHAPE.THREADS.MODE              GB/s that the step reads and writes (28 bytes per parameter), against the roof:
                                         the same loads and non-temporal stores with an addition in place of Adam
    adam.SHAPE.THREADS.MODE.bf16         the same with bf16 gradients (26 bytes)
    adam.SHAPE.THREADS.MODE[.bf16].torch-single
                                         parameters per microsecond, against torch.optim.Adam as it is on a CPU
                                         unless told otherwise, with fp32 gradients
    adam.SHAPE.THREADS.torch-foreach, torch-fused
                                         torch-cpu against torch.optim.Adam so
    adam.200.1t.torch-cuda-foreach.shared
                                         GB/s where versions lie in shared memory, as a replica's in /dev/shm do (in
                                         pages of 4 KB unless the kernel is told otherwise), against the same elsewhere;
                                         for information
    adam.SHAPE.THREADS.in-place          ours against a roof that stores through the cache where it has just read, which
                                         a replica cannot do (it would overwrite the version it serves); for information

MODE is one of the rounding modes (docs/understand/updater.md). How this machine updates is measured first, and is part
of every row.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from flowcheck.rebuild.calibration import look_at_updates
from lab.bench import roof
from lab.bench.rows import Row, alternate, here, on_threads, timed
from lab.bench.workload import aligned
from updater import kernels
from updater.rounding_modes import ROUNDING_MODES, RoundingMode, cpu_root, rule
from updater.tuning import PART, Tuning

__all__ = ["SHAPES", "Arena", "run", "step"]

PARAMETERS = 100_000_000
SHAPES = {"flat": 1, "200": 200}
TARGETS = {"float32": 0.95, "bfloat16": 0.93}  # one thread
OVER_TORCH = 1.0  # never slower than its default
LR = 1e-3
MODES = {"torch-single": {"foreach": False}, "torch-foreach": {"foreach": True}, "torch-fused": {"fused": True}}
LINE = 16  # floats
SHARED_MODE, SHARED_PARAMETERS = "torch-cuda-foreach", 40_000_000


def run(rounds: int, ring_bytes: int) -> list[Row]:
    """Rows of every shape and number of threads. Less than 256 MB of `ring_bytes` takes fewer parameters."""
    count = min(PARAMETERS, ring_bytes * 2 // 5) // (200 * LINE) * (200 * LINE)
    tuning = look_at_updates(measure=True, recall=False).ways[PART]
    arena = Arena(count)
    before = torch.get_num_threads()
    rows = []
    try:
        for shape, tensors in SHAPES.items():
            for threads in (1, 2):
                torch.set_num_threads(threads)
                rows += _rows(arena, shape, tensors, threads, rounds, tuning)
    finally:
        torch.set_num_threads(before)
    return [*rows, _shared_row(arena, min(count, SHARED_PARAMETERS), rounds, tuning)]


class Arena:
    """Parameters, two moments and their next version, gradients in both widths; values as in a running job. shared:
    versions lie in shared memory, as a replica's do, and not in pages that numpy asks for."""

    def __init__(self, count: int, shared: bool = False) -> None:
        self.count = count
        generator = torch.Generator().manual_seed(1)

        def made() -> torch.Tensor:
            memory = np.frombuffer(mmap.mmap(-1, 4 * count), np.uint8) if shared else aligned(4 * count)
            return torch.from_numpy(memory.view(np.float32))

        self.now, self.next = ([made() for _ in range(3)] for _ in "12")
        self.g = torch.from_numpy(aligned(4 * count).view(np.float32))
        self.narrow = torch.from_numpy(aligned(2 * count)).view(torch.bfloat16)
        self.g.normal_(generator=generator).mul_(0.01)
        self.narrow.copy_(self.g)
        self.now[0].normal_(generator=generator)
        self.now[1].copy_(self.g)
        torch.mul(self.g, self.g, out=self.now[2])
        for tensor in self.next:
            tensor.zero_()


def _rows(arena: Arena, shape: str, tensors: int, threads: int, rounds: int, tuning: Tuning) -> list[Row]:
    pool = kernels.Pool(threads, "", *tuning)
    setting = here(adam=str(tuning), root=cpu_root())
    contenders: dict[str, Callable[[], float]] = {
        "roof": _roof(arena, arena.g, threads), "roof.bf16": _roof(arena, arena.narrow, threads),
        "in-place": _roof(arena, arena.g, threads, in_place=True),
    }
    for rounding in ROUNDING_MODES:
        contenders[rounding] = step(arena, pool, rounding, arena.g, tensors)
        contenders[f"{rounding}.bf16"] = step(arena, pool, rounding, arena.narrow, tensors)
    for mode, options in MODES.items():
        contenders[mode] = _torch(arena, tensors, options)
    seconds = alternate(contenders, rounds)
    pool.close()
    name, rows = f"adam.{shape}.{threads}t", []
    moved = {key: 1e-9 * (26 if "bf16" in key else 28) * arena.count for key in seconds}
    speed = {key: [moved[key] / s for s in taken] for key, taken in seconds.items()}
    rate = {key: [1e-6 * arena.count / s for s in taken] for key, taken in seconds.items()}
    for key in ROUNDING_MODES:
        for suffix, dtype in (("", "float32"), (".bf16", "bfloat16")):
            ours, target = key + suffix, TARGETS[dtype] if threads == 1 else None
            rows.append(Row.of(f"{name}.{ours}", "GB/s", speed[ours], speed["roof" + suffix], target, setting))
            torchs = rate["torch-single"]
            rows.append(Row.of(f"{name}.{ours}.torch-single", "param/us", rate[ours], torchs, OVER_TORCH, setting))
    rows.append(Row.of(f"{name}.in-place", "GB/s", speed["torch-cpu"], speed["in-place"], None, setting))
    for mode in ("torch-foreach", "torch-fused"):
        rows.append(Row.of(f"{name}.{mode}", "param/us", rate["torch-cpu"], rate[mode], None, setting))
    return rows


def _shared_row(arena: Arena, count: int, rounds: int, tuning: Tuning) -> Row:
    shared = Arena(count, shared=True)
    pool = kernels.Pool(1, "", *tuning)
    seconds = alternate(
        {name: step(of, pool, SHARED_MODE, of.g, 200) for name, of in (("here", arena), ("shared", shared))}, rounds
    )
    pool.close()
    rate = {name: [28e-9 * of.count / s for s in seconds[name]] for name, of in (("here", arena), ("shared", shared))}
    return Row.of(f"adam.200.1t.{SHARED_MODE}.shared", "GB/s", rate["shared"], rate["here"], None,
                  here(adam=str(tuning), root=cpu_root()))


def step(
    arena: Arena, pool: kernels.Pool, rounding: str, gradient: torch.Tensor, tensors: int
) -> Callable[[], float]:
    """A contender: one step by the kernels, from version t to t+1."""
    dtype, size = str(gradient.dtype).removeprefix("torch."), arena.count // tensors
    constants = rule(RoundingMode(rounding), "adam", {"lr": LR}, 10, grad=dtype)
    pieces = []
    for first in range(0, arena.count, size):
        now, then = ([t.data_ptr() + 4 * first for t in version] for version in (arena.now, arena.next))
        pieces.append((0, size, gradient.data_ptr() + first * gradient.element_size(), *now, 0, *then, 0, 0, 0))

    return timed(lambda: not pool.wait(pool.submit([constants], pieces, keep=gradient)))


def _roof(arena: Arena, gradient: torch.Tensor, threads: int, in_place: bool = False) -> Callable[[], float]:
    """A contender: the memory traffic alone, the parameters divided among the threads.

    In place it works on the version that is written anyway, so that values stay what they are elsewhere.
    """
    narrow = gradient.element_size() == 2

    def part(first: int, end: int) -> None:
        source = arena.next if in_place else arena.now
        t, t1 = (tuple(a.data_ptr() + 4 * first for a in version) for version in (source, arena.next))
        roof.adam(gradient.data_ptr() + first * gradient.element_size(), narrow, t, t1, end - first)

    return on_threads(part, arena.count, threads, LINE)


def _torch(arena: Arena, tensors: int, options: dict[str, Any]) -> Callable[[], float]:
    """A contender: torch.optim.Adam in place, on the memory that ours writes (values do not matter to its speed)."""
    size = arena.count // tensors
    parameters = []
    for first in range(0, arena.count, size):
        p = arena.next[0][first : first + size].requires_grad_(True)
        p.grad = arena.g[first : first + size]
        parameters.append(p)
    optimizer = torch.optim.Adam(parameters, lr=LR, **options)
    for i, p in enumerate(parameters):
        part = slice(i * size, (i + 1) * size)
        optimizer.state[p] = {
            "step": torch.tensor(10.0), "exp_avg": arena.next[1][part], "exp_avg_sq": arena.next[2][part],
        }

    return timed(optimizer.step)
