"""What a step of training takes more where rank 0 sends its gradients (docs/use/feed.md).

    .venv/bin/python -P benchmarks/feed_cost.py [--layers 8] [--width 1024] [--rounds 41]

Two ranks of DDP on gloo, and a node of [feed] whose journal is in /dev/shm; all of them share this machine. A step with
an attachment and one without take turns. Printed: the medians of both, of their ratio, of optimizer.step() alone, the
longest of each, and how many steps were not sent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flowcheck

TOKEN = "only for this benchmark, on this machine"
PAUSE = 0.05  # seconds between two steps, as if the next batch were waited for
WARM = 6
NODE = """
[feed]
[control]
listen = "127.0.0.1:0"
token_file = "{0}/token"
[api]
listen = "127.0.0.1:0"
[replica]
directory = "{0}"
slots = 4
[output]
directory = "{0}/out"
[journal]
directory = "{0}/journal"
megabytes = 2048
"""


def job(given: argparse.Namespace, fed: bool) -> tuple[Callable[[], tuple[float, float]], Any]:
    """A step, which says how long it took and its optimizer alone; and its attachment."""
    torch.manual_seed(1)
    layers = torch.nn.Sequential(*(torch.nn.Linear(given.width, given.width) for _ in range(given.layers)))
    model = DistributedDataParallel(layers, process_group=dist.new_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    attachment = flowcheck.attach(model, optimizer, node=given.node, token=TOKEN, run_id="cost", checksum_every=0,
                                  kind="log", source="feed") if fed else None
    inputs = torch.ones(64, given.width)

    def step() -> tuple[float, float]:
        begin = time.perf_counter()
        model(inputs).square().mean().backward()
        before = time.perf_counter()
        optimizer.step()
        stepped = time.perf_counter() - before
        optimizer.zero_grad()
        if attachment is not None:
            attachment.step()
        return time.perf_counter() - begin, stepped

    return step, attachment


def rank(given: argparse.Namespace) -> None:
    dist.init_process_group("gloo", init_method=f"file://{given.store}", rank=given.rank, world_size=2)
    torch.set_num_threads(1)
    plain, (fed, attachment) = job(given, fed=False)[0], job(given, fed=True)
    taken: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    for number in range(-WARM, given.rounds):
        turns = (("without", plain), ("with", fed))
        for name, step in turns if number % 2 else reversed(turns):
            one = step()
            if number >= 0:
                taken[name].append(one)
            time.sleep(PAUSE)
    state = attachment.state, attachment.why
    attachment.close()
    dist.barrier()
    if given.rank == 0:
        median = statistics.median
        for name, all_of_them in taken.items():
            steps, stepped = zip(*all_of_them, strict=True)
            print(f"{name:8} {1e3 * median(steps):8.2f} ms/step, optimizer.step() {1e3 * median(stepped):.2f},"
                  f" longest {1e3 * max(steps):.1f}")
        ratios = [one[0] / other[0] for one, other in zip(taken["with"], taken["without"], strict=True)]
        print(f"ratio {median(ratios):.3f}, attachment {state[0]} {state[1]}", flush=True)
    os._exit(0)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 8), ("width", 1024), ("rounds", 41), ("rank", -1)):
        asked.add_argument(f"--{name}", type=int, default=default)
    asked.add_argument("--store")
    asked.add_argument("--node")
    given = asked.parse_args()
    if given.rank >= 0:
        rank(given)
    with tempfile.TemporaryDirectory(prefix="flowcheck-bench-", dir="/dev/shm") as made:
        folder = Path(made)
        (folder / "token").write_text(TOKEN)
        (folder / "token").chmod(0o600)
        (folder / "node.toml").write_text(NODE.format(folder))
        with subprocess.Popen([sys.executable, "-P", "-m", "flowcheck.node", "--config", str(folder / "node.toml"),
                               "--json"], stdout=subprocess.PIPE, text=True) as node:
            try:
                assert node.stdout is not None
                lines = map(json.loads, node.stdout)
                address = next(line["control"] for line in lines if line["event"] == "listening")
                ranks = [subprocess.Popen([
                    sys.executable, "-P", __file__, *sys.argv[1:], "--rank", str(number), "--store", f"{folder}/store",
                    "--node", address]) for number in range(2)]
                closed = []
                for line in lines:
                    closed += [line["published"]] if line["event"] == "iteration" else []
                    if line["event"] == "end":
                        break
                print(f"iterations in the log: {sum(closed)} of {len(closed)}")
                for one in ranks:
                    one.wait()
            finally:
                node.terminate()
                for _ in node.stdout or ():
                    pass


if __name__ == "__main__":
    main()
