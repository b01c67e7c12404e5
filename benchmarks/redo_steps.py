"""A step that a node makes again from its journal, beside one step of the optimizer over as many parameters
(lab/bench/adam.py), which has its gradients in memory.

    .venv/bin/python -P benchmarks/redo_steps.py [--megabytes 256] [--rounds 21]

    redo.THREADS.MODE      parameters per microsecond of a step of `remake`: its entry read, all its sums checked,
                           applied and published; against the same kernels on as many threads without any of that

The journal lies in /dev/shm. Each round makes STEPS steps from one base. The first one is not counted: reading the base
is no part of a step. Memory: some 20 times --megabytes, which is what the gradients of an iteration take.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from flowcheck.job.clock import Clock
from flowcheck.job.model import Job
from flowcheck.journal.ring import Hole, RingWriter
from flowcheck.node.versions.journal.entries import Heads
from flowcheck.node.versions.journal.folders import Folder, folder_of
from flowcheck.node.versions.journal.job_text import JobText
from flowcheck.node.versions.journal.remaking import remake
from flowcheck.rebuild.calibration import look_at_updates
from flowcheck.rebuild.iteration.evidence import elements_of
from flowcheck.rebuild.plan import digest_of, plan_job
from flowcheck.rebuild.version.records import StepRecord
from flowcheck.rebuild.version.replica import JobReplica, ReplicaOptions
from lab.bench.adam import Arena, step
from lab.bench.rows import Row, alternate, here, print_rows
from lab.synth import example_job
from updater import kernels
from updater.rounding_modes import cpu_root
from updater.tuning import PART

TARGET = 1 / 1.1
MODE = "torch-cuda-foreach"
TENSORS, STEPS = 50, 8
LINE = "bench"


def run(rounds: int, ring_bytes: int) -> list[Row]:
    """Rows for one and two threads."""
    count = ring_bytes // 4 // (TENSORS * 1024) * (TENSORS * 1024)
    tuning = look_at_updates(measure=True, recall=False).ways[PART]
    arena = Arena(count)
    rows = []
    with tempfile.TemporaryDirectory(prefix="flowcheck-bench-", dir="/dev/shm") as made:
        folder = _journal(Path(made), count)
        for threads in (1, 2):
            pool = kernels.Pool(threads, "", *tuning)
            contenders = {"ours": _remade(folder, threads), "adam": step(arena, pool, MODE, arena.g, TENSORS)}
            seconds = alternate(contenders, rounds)
            pool.close()
            speed = {name: [1e-6 * count / one for one in taken] for name, taken in seconds.items()}
            rows.append(Row.of(f"redo.{threads}t.{MODE}", "param/us", speed["ours"], speed["adam"],
                               TARGET if threads == 1 else None, here(adam=str(tuning), root=cpu_root())))
    return rows


def _job(count: int) -> Job:
    job = example_job(count=[count // TENSORS] * TENSORS, startup=False, rebuild=False, optimizer="adam",
                      options={"lr": 1e-3})
    assert job.optimizer is not None
    job.optimizer.rounding = MODE
    job.run_id = "bench"
    return job


def _journal(root: Path, count: int) -> Folder:
    """A base, and the entries after it."""
    job = _job(count)
    plan, clock, run_of = plan_job(job), Clock(0), (job.run_id, 0, 2)
    digest = digest_of(job.to_dict(), plan, run_of, clock)
    folder, heads = folder_of(root, "", job.run_id, 0), Heads(plan, digest)
    folder.ring.mkdir(parents=True)
    folder.job.write_text(JobText(job.to_dict(), run_of, 0, digest).text())
    generator = torch.Generator().manual_seed(1)
    replica = JobReplica(plan, None, ReplicaOptions(slots=2, threads=2))
    replica.start({one.name: torch.randn(one.shape, generator=generator) for one in job.model}, {}, 0)
    with replica.pinned() as version:
        replica.write(folder.base_of(LINE), (), version, "verified", "")
    replica.close()
    region = np.zeros(plan.engine.gradient_bytes, np.uint8)
    for place in plan.iteration_buckets(1):
        elements_of(region, place).copy_(torch.randn(place.elements, generator=generator) * 0.01)
    with RingWriter(folder.ring, (STEPS + 1) * (heads.most + (1 << 20)), heads.most) as writer:
        for number in range(STEPS):
            writer.offer(number, heads.head(number, number, LINE, StepRecord(), (), 0), region, heads.spans(number))
            while not (said := writer.taken()):
                time.sleep(0.001)
            assert not any(isinstance(one, Hole) for one in said), said
    return folder


def _remade(folder: Folder, threads: int) -> Callable[[], float]:
    """A contender: seconds of one step, the middle one of those after the first."""
    base, = folder.bases

    def measure() -> float:
        at: list[float] = []
        path = remake(folder, base, STEPS, threads, lambda made: at.append(time.perf_counter()))
        shutil.rmtree(path)
        return statistics.median(np.diff(at).tolist())

    return measure


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--megabytes", type=int, default=256)
    asked.add_argument("--rounds", type=int, default=21)
    given = asked.parse_args()
    print_rows(run(given.rounds, given.megabytes << 20), Console(width=100))


if __name__ == "__main__":
    main()
