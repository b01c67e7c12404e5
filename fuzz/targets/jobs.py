"""The fixed jobs whose packets the sequence targets take apart, with the truth of every region.

Small on purpose: a few hundred packets each, so that a whole job is one fuzz input of a few bytes, and arenas
fewer than iterations, so that the machine has to close some. Made by lab.synth, which shares no code
with the parser. No state, any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flowcheck.job.model import dtype_size
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import Synthesis, TransportOptions, example_job, generate

__all__ = ["FuzzJob", "make_jobs"]

STREAMS = 2
ARENAS = 2
ITERATIONS = 3


@dataclass(frozen=True)
class FuzzJob:
    """packets: (nanoseconds, frame) of all mirrored ports. truth: iteration (-1: parameters) -> (bytes of the
    region, mask of the 8-byte cells that anything belongs to)."""

    plan: JobPlan
    unchecked: JobPlan  # the same with check_icrc off
    packets: list[tuple[int, bytes]]
    truth: dict[int, tuple[np.ndarray, np.ndarray]]


JOBS: tuple[dict[str, Any], ...] = (
    {"protocol": "ll", "count": 300, "mtu": 1024},
    {"protocol": "simple", "count": [300, 200], "mtu": 256, "ranks": 3},
    {"protocol": "ll128", "count": 1000, "mtu": 1024, "version": "2.20.5"},
    {"protocol": "simple", "count": 700, "mtu": 512, "qps": 2, "split_data_on_qps": True, "channels": 2},
    {"protocol": "simple", "count": 1500, "mtu": 1024, "adaptive_routing": True, "ar_threshold": 512},
    {"protocol": "ll", "count": 200, "mtu": 256, "ranks": 4, "algorithm": "tree", "channels": 2, "ipv6": True},
    {"protocol": "ll128", "count": 1500, "mtu": 512, "dtype": "bfloat16", "startup": False, "version": "2.12.12"},
    {"protocol": "ll", "count": 200, "mtu": 4096, "qps": 2, "version": "2.30.7", "dtype": "float64"},
)


def make_jobs() -> list[FuzzJob]:
    return [_make(number, dict(options)) for number, options in enumerate(JOBS)]


def _make(number: int, options: dict[str, Any]) -> FuzzJob:
    threshold = options.pop("ar_threshold", None)
    job = example_job(seed=number, **options)
    if threshold:
        job.communicator.ar_threshold = threshold
    cut = frozenset({1}) if threshold else frozenset()
    transport = TransportOptions(vlan=5 if number % 3 == 1 else None, cut_ranks=cut)
    made = generate(job, iterations=ITERATIONS, ports=[0, 1], seed=number, transport=transport)
    plan, unchecked = (plan_job(job, streams=STREAMS, arenas=ARENAS, check_icrc=icrc) for icrc in (True, False))
    return FuzzJob(plan, unchecked, made.packets, _truth(plan, made))


def _truth(plan: JobPlan, made: Synthesis) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    truth: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for iteration in range(ITERATIONS):
        region, cells = _region(plan.engine.gradient_bytes)
        for place in plan.iteration_buckets(iteration):
            _put(region, cells, place.offset, made.reduced[iteration, place.index])
        truth[iteration] = region, cells
    region, cells = _region(plan.engine.parameter_bytes)
    for entry in plan.parameters:
        assert entry.nbytes == entry.elements * dtype_size(made.job.gradients.dtype)
        _put(region, cells, entry.offset, made.parameters[entry.name])
    truth[-1] = region, cells
    return truth


def _region(size: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(size, np.uint8), np.zeros(-(-size // 8), bool)


def _put(region: np.ndarray, cells: np.ndarray, offset: int, values: np.ndarray) -> None:
    data = np.frombuffer(values.tobytes(), np.uint8)
    region[offset : offset + len(data)] = data
    cells[offset // 8 : -(-(offset + len(data)) // 8)] = True
