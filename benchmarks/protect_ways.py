"""Copy, journal and second mirror side by side: bytes between nodes, processor time, and time to recover.

    .venv/bin/python -P benchmarks/protect_ways.py [--megaparams 20] [--iterations 10] [--rounds 3] [--dtype float32]

A source is a process of its own: a real replica in /dev/shm with AdamW's state, the process that answers api.listen,
and the shelf on which the last iterations' gradients lie, on a control port. Gradients are made up; nothing is
captured. A holder, this process, does what the process that keeps copies does:
    copy            take_copy of one step: what each `every`-th step costs
    journal         one iteration more: pulled and kept. Beside it the source's hashes of that step, which prove it
    redo            a base and so many iterations of the journal into the newest step, proved and offered
    second mirror   nothing between the nodes. What it takes instead is another node's own update of each iteration
cpu: seconds of processor time of the holder, and of the source with all that it started; both per step or iteration.
Target: none. Equality of the step that was made again is part of `redo`: it fails otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowcheck.ask.client import NodeClient, reader_key
from flowcheck.checkpoint.copies import take_copy
from flowcheck.control.protocol import Link, RecordsError, accept
from flowcheck.job.clock import Clock
from flowcheck.job.model import Job
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.peers.client import dial
from flowcheck.node.peers.peer_set import digest_of
from flowcheck.node.peers.shelf import Followed, Shelf, serve
from flowcheck.node.protect.journal import Journal
from flowcheck.node.protect.journal_loop import Reading
from flowcheck.node.protect.redo import redo
from flowcheck.rebuild.iteration.evidence import elements_of
from flowcheck.rebuild.iteration.intervals import intervals
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.records import StepRecord
from flowcheck.rebuild.version.replica import JobReplica, ReplicaOptions
from lab.synth import example_job

TOKEN = "0123456789abcdef"
BUCKETS = 8
RUN = ("run", 0, 2)


def job_of(parameters: int, dtype: str) -> Job:
    job = example_job(count=[parameters // BUCKETS] * BUCKETS, startup=False, rebuild=False, optimizer="adamw",
                      options={"lr": 1e-3}, dtype=dtype)
    assert job.optimizer is not None
    job.optimizer.rounding = "torch-cuda-foreach"
    if dtype != "float32":
        job.optimizer.masters = "upcast"
    return job


def cpu(who: int = resource.RUSAGE_SELF) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def source(orders: Connection, folder: Path, parameters: int, dtype: str) -> None:
    """The node that is protected. Orders: "step" -> (number, seconds of the update), "cpu" -> seconds."""
    torch.set_num_threads(1)
    job = job_of(parameters, dtype)
    body, plan, clock = job.to_dict(), plan_job(job), Clock()
    job.run_id = "run"
    replica = JobReplica(plan, None, ReplicaOptions(4, folder / "flowcheck-n--1.replica", 1, True))
    replica.start({one.name: torch.randn(one.shape).to(getattr(torch, one.dtype)) for one in job.model}, {}, 0)
    shelf = Shelf(2)
    shelf.follow(digest_of(body, plan, RUN, clock), Followed(body, RUN, 0))
    config = NodeConfig.model_validate({
        "name": "n", "control": {"listen": "127.0.0.1:0", "token_file": "t"}, "capture": {"device": "x"},
        "api": {"listen": "127.0.0.1:0"}, "replica": {"directory": str(folder), "slots": 4},
        "output": {"directory": str(folder / "out")},
    })
    serving = Serving(config, TOKEN.encode(), print)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=answer, args=(listener, shelf), daemon=True).start()
    random = np.random.default_rng(0)
    regions = [np.zeros(plan.engine.gradient_bytes, np.uint8) for _ in range(4)]
    for region in regions:
        for place in plan.iteration_buckets(1):
            made = torch.from_numpy(random.standard_normal(place.elements, dtype=np.float32))
            elements_of(region, place).copy_(made)
    orders.send((serving.address, listener.getsockname()[:2]))
    while (order := orders.recv()) != "end":
        if order == "step":
            iteration, region = replica.step, regions[replica.step % len(regions)]
            began, record = time.perf_counter(), StepRecord()
            replica.begin(iteration, record.values())
            for place in plan.iteration_buckets(iteration):
                replica.apply(place.index, elements_of(region, place))
            replica.finish({})
            replica.written(-1)
            replica.publish()
            took = time.perf_counter() - began
            shelf.show(iteration, region, intervals([(0, len(region) // 8)]), lambda: True, record)
            orders.send((iteration, took))
        else:
            used = Path(f"/proc/{serving._process.pid}/stat").read_text().rpartition(")")[2].split()
            orders.send(cpu() + (int(used[11]) + int(used[12])) / 100)
    serving.close()
    replica.close()


def answer(listener: socket.socket, shelf: Shelf) -> None:
    while True:
        link = Link(listener.accept()[0])
        with contextlib.suppress(RecordsError):
            accept(link, TOKEN.encode())
            serve(link, lambda: shelf)
        link.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Copy, journal and second mirror side by side.")
    parser.add_argument("--megaparams", type=float, default=20.0)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="flowcheck-protect-", dir=options.folder))
    orders, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=source, args=(theirs, folder, int(options.megaparams * 1e6), options.dtype))
    process.start()
    try:
        found = measure(orders, folder, options)
        orders.send("end")
        process.join(30.0)
    finally:
        process.kill()
        shutil.rmtree(folder)
    if options.json:
        print(json.dumps(found))
        return
    print(f"{'':16} {'bytes':>14} {'seconds':>9} {'cpu holder':>11} {'cpu source':>11}")
    for name, row in found.items():
        print(f"{name:16} {row['bytes']:>14,.0f} {row['seconds']:>9.3f} {row['holder']:>11.3f} {row['source']:>11.3f}")


def measure(orders: Connection, folder: Path, options: Any) -> dict[str, dict[str, float]]:
    def ask(order: str) -> Any:
        orders.send(order)
        return orders.recv()

    rows: dict[str, list[dict[str, float]]] = {}

    def timed(name: str, call: Callable[[], int]) -> None:
        """call returns bytes that came from the source."""
        theirs, mine, began = ask("cpu"), cpu(), time.perf_counter()
        nbytes = call()
        seconds = time.perf_counter() - began
        rows.setdefault(name, []).append({"bytes": nbytes, "seconds": seconds, "holder": cpu() - mine,
                                          "source": ask("cpu") - theirs})

    api, control = orders.recv()
    host, _, port = api.rpartition(":")
    ask("step")
    for turn in range(options.rounds):
        run = folder / "copies" / f"lane{turn}" / "run" / "epoch-0"
        node = NodeClient((host, int(port)), reader_key(TOKEN.encode()), seconds=60.0)
        journal = Journal(run / "journal")
        reading = Reading(dial(tuple(control), None, 10.0), TOKEN.encode(), "", journal)

        def copy(node: NodeClient = node, run: Path = run) -> int:
            newest = max(node.offers(), key=lambda one: one.step)
            take_copy(node, newest, run)
            return newest.nbytes

        timed("copy", copy)
        for _ in range(options.iterations):
            number, took = ask("step")
            rows.setdefault("second mirror", []).append({"bytes": 0, "seconds": took, "holder": took, "source": 0.0})

            def pull(number: int = number, reading: Reading = reading) -> int:
                while (entry := reading.entry(number)).job:
                    pass  # which job it is, the first time
                return reading.keep(entry)

            def hashes(node: NodeClient = node, journal: Journal = journal) -> int:
                newest = max(node.offers(), key=lambda one: one.step)
                journal.hashed(node.version(newest, release=True))
                return (journal.folder / f"hashes-{newest.step:012d}").stat().st_size

            timed("journal", pull)
            timed("journal: hashes", hashes)
        base = next(run.glob("step-*"))

        def again(base: Path = base, journal: Journal = journal) -> int:
            redo(base, journal, 2)
            return 0

        timed(f"redo of {options.iterations}", again)
        reading.close()
        shutil.rmtree(run.parents[1])
    return {name: {key: statistics.median(row[key] for row in found) for key in found[0]}
            for name, found in rows.items()}


if __name__ == "__main__":
    main()
