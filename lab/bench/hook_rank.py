"""One of the two ranks that `bench hook` measures (hook.py): three jobs of the same model, taking turns.

    python -P -m lab.bench.hook_rank '{"rank": 0, "store": FILE, "node": "127.0.0.1:PORT", ...}'

    plain       no attachment
    attached    with one
    checked     with one that sends checksums in every iteration

A turn is `steps` iterations of one job, and ends when the attachment has sent all that it has to: what its other
threads do counts for the process, and in the turn that caused it. The rank's own thread is measured where flowcheck is
called: between two hooks of the optimizer around the attachment's, before and after its step, and in `step`. Rank 0
writes a line of JSON per round: {"plain": [thread, process, longest], ...}, milliseconds: of the rank's thread per
step, that and of all other threads per step (gloo's are among them), and of the longest step by the clock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flowcheck

__all__ = ["ARMS", "TOKEN", "main"]

ARMS = ("plain", "attached", "checked")
TOKEN = "only for bench hook, on this machine"
BYTES = 1_600_000  # of parameters, in fp32
BATCH = 4
WARM = 3  # turns of each job that are not counted
QUIET = 0.003  # seconds that the attachment's threads have to come to rest


class Job:
    """One model of `tensors` parameters, and what its iterations cost."""

    def __init__(self, arm: str, tensors: int, node: str) -> None:
        self._arm = arm
        width = int((BYTES / 4 / (tensors // 2)) ** 0.5)
        torch.manual_seed(7)
        layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(tensors // 2)))
        self._model = DistributedDataParallel(layers, process_group=dist.new_group())
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._inputs = torch.ones(BATCH, width)
        self._calls: list[tuple[str, int, str]] = []
        self._counts: list[int] = []  # of an iteration's buckets
        self._spent = 0.0  # seconds of this thread, in this turn
        self._since = 0.0
        self._optimizer.register_step_pre_hook(self._enter)
        self._attachment: Any = None
        if arm != "plain":
            self._attachment = flowcheck.attach(
                self._model, self._optimizer, node=node, token=TOKEN, run_id=f"{arm}.{tensors}",
                checksum_every=int(arm == "checked"), topology=self._topology, collectives=self._collectives,
            )
        self._optimizer.register_step_pre_hook(self._leave)
        self._step_post_hooks()

    def _step_post_hooks(self) -> None:
        """Around those of the attachment, if it has any: the first one is put before them."""
        self._optimizer.register_step_post_hook(self._enter)
        hooks: Any = self._optimizer._optimizer_step_post_hooks
        hooks.move_to_end(next(reversed(hooks)), last=False)
        self._optimizer.register_step_post_hook(self._leave)

    def _topology(self) -> dict[str, Any]:
        flow = {"src": dist.get_rank(), "dst": 1 - dist.get_rank(), "channel": 0, "src_addr": "10.0.0.1",
                "dst_addr": "10.0.0.2", "qpns": [17]}
        return {"communicator": {"ranks": 2, "nccl_version": "2.27.7"}, "flows": [flow]}

    def _collectives(self, since: int) -> list[dict[str, Any]]:
        """What DDP has called, one AllReduce for each bucket: gloo does not say it."""
        return [{"op": op, "count": count, "dtype": dtype} for op, count, dtype in self._calls[since:]]

    def _enter(self, *_: object) -> None:
        self._since = time.thread_time()

    def _leave(self, *_: object) -> None:
        self._spent += time.thread_time() - self._since

    def _iterate(self) -> None:
        self._model(self._inputs).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        buckets = self._model.reducer._get_zeros_like_grad_buckets() if len(self._calls) < 100 else ()
        counts = [bucket.buffer().numel() for bucket in buckets] or self._counts
        self._counts = counts
        self._calls += [("AllReduce", count, "float32") for count in counts]
        if self._attachment is not None:
            self._enter()
            self._attachment.step()
            self._leave()

    def turn(self, steps: int) -> list[float]:
        """[thread, process, longest] of so many iterations, as above."""
        self._spent, longest = 0.0, 0.0
        others = time.process_time() - time.thread_time()  # of training itself this thread has most, and that varies
        for _ in range(steps):
            begin = time.perf_counter()
            self._iterate()
            longest = max(longest, time.perf_counter() - begin)
        if self._attachment is not None:
            time.sleep(QUIET)
        others = time.process_time() - time.thread_time() - others
        return [1e3 * self._spent / steps, 1e3 * (self._spent + others) / steps, 1e3 * longest]

    def check(self) -> None:
        """Raises RuntimeError if there was nothing to measure: it is not attached."""
        if self._attachment is not None and self._attachment.state != "attached":
            raise RuntimeError(f"{self._arm}: {self._attachment.state}: {self._attachment.why}")

    def close(self) -> None:
        if self._attachment is not None:
            self._attachment.close()


def main() -> None:
    """The rank, with its settings as JSON in the first argument."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{given['store']}", rank=given["rank"], world_size=2)
    jobs = {arm: Job(arm, given["tensors"], given["node"]) for arm in ARMS}
    for _ in range(WARM):
        for job in jobs.values():
            job.turn(max(given["steps"], 5))
    for job in jobs.values():
        job.check()
    for number in range(given["rounds"]):
        order = ARMS[:: -1 if number % 2 else 1]
        taken = {arm: jobs[arm].turn(given["steps"]) for arm in order}
        if given["rank"] == 0:
            print(json.dumps(taken), flush=True)
    for job in jobs.values():
        job.check()
        job.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
