"""A job that is kept as a log recovers, beside one that reads its whole state.

    .venv/bin/python -P benchmarks/log_recovery.py [--layers 20] [--steps 20] [--rounds 7]

    log      flowcheck.recover and load: base and gradients over loopback, all sums checked, --steps steps made again by
             AdamW (foreach) and compared with the trainer's checksums
    state    flowcheck.recover of a replica of as many parameters, and load_state_dict: 12 bytes a parameter, hashes
             checked
    steps    --steps steps of the optimizer alone, whose gradients are there

The node's API is a process of its own, and what it serves lies in /dev/shm. A layer has 1024 x 1025 parameters. Memory:
4 bytes a parameter for each step, and some 60 more.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

import flowcheck
from flowcheck.ask.client import reader_key
from flowcheck.node.api.routes import make_app
from flowcheck.node.api.worker import serve, server_of
from flowcheck.node.doors.http_door import Limits
from flowcheck.node.versions.holdings import MemoryShelf
from flowcheck.node.versions.journal.log_shelf import LogShelf
from lab.bench.rows import alternate, timed
from tests.flowcheck.node.log_scene import TOKEN, LoggedJob
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

SLACK = 6  # steps until a base is whole


@contextmanager
def served(log: Path, state: Path) -> Iterator[str]:
    """HOST:PORT of both, in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        child = os.fork()
        if child == 0:
            shelves = {"memory": MemoryShelf(state, "n"), "log": LogShelf(log)}
            serve(server_of(make_app(shelves, reader_key(TOKEN.encode()))), sock, Limits())
            os._exit(0)
        try:
            yield "{}:{}".format(*sock.getsockname())
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def logged(root: Path, layers: int, steps: int) -> LoggedJob:
    """Its newest step lies at least `steps` behind its base."""
    job = LoggedJob(root, partial(torch.optim.AdamW, lr=1e-3, foreach=True), places=2 * steps + SLACK, model=lambda: (
        torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(layers)))))
    job.train(2)
    job.base(1)
    for _ in range(steps + 2):
        job.train(1)
        job.after.clear()
    job.settle()
    return job


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--layers", type=int, default=20)
    asked.add_argument("--steps", type=int, default=20)
    asked.add_argument("--rounds", type=int, default=7)
    given = asked.parse_args()
    with tempfile.TemporaryDirectory(prefix="flowcheck-bench-", dir="/dev/shm") as made:
        log, state = Path(made, "log"), Path(made, "state")
        log.mkdir()
        state.mkdir()
        job = logged(log, given.layers, given.steps)
        names = list(job.named)
        moments = {name: {key: value if key != "step" else float(value)
                          for key, value in job.optimizer.state[one].items()} for name, one in job.named.items()}
        spec = OptimizerSpec.check("adamw", [(names, {"lr": 1e-3})])
        replica = Replica(dict(job.model.state_dict()), spec, path=state / "flowcheck-n--1.replica", run_id="state",
                          step=7, optimizer_state=moments, slots=3)
        with served(log, state) as address:
            def recovered(run_id: str) -> flowcheck.Recovered:
                return flowcheck.recover(address, token=TOKEN, together=False, run_id=run_id)

            def redone() -> None:
                recovered(job.job.run_id).load(*job.fresh())

            def read() -> None:
                found, (model, optimizer) = recovered("state"), job.fresh()
                model.load_state_dict(found.model)
                optimizer.load_state_dict(found.optimizer)

            def alone() -> None:
                for _ in range(given.steps):
                    job.optimizer.step()

            step = recovered(job.job.run_id).step
            taken = alternate({"log": timed(redone), "state": timed(read), "steps": timed(alone)}, given.rounds)
        replica.close()
    count = sum(one.numel() for one in job.named.values())
    print(f"{count:,} parameters; step {step}, {given.steps} or more behind its base; medians of {given.rounds} rounds")
    for name, seconds in taken.items():
        print(f"{name:6} {statistics.median(seconds):6.2f} s  [{min(seconds):.2f}..{max(seconds):.2f}]")


if __name__ == "__main__":
    main()
