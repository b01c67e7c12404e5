"""Logs of Megatron-Core's own optimizers, redone in a new process: main parameters, all state and the model's own
parameters, to the bit. One rank, whose others need no process (lab/megatron.py), and of a node what keeps a log."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import flowcheck
from flowcheck.control.checksum import checksums
from flowcheck.job.model import LOG
from flowcheck.rebuild.version.records import StepRecord
from flowcheck.trainer.describe.description import Watch, entries
from flowcheck.trainer.describe.optimizers import optimizer_of
from flowcheck.trainer.describe.wrapped import parts_of
from flowcheck.trainer.log.codec import record_tree
from flowcheck.trainer.log.record import StepRecord as Stepped
from flowcheck.trainer.log.summed import summed
from lab.megatron import Places, as_cuda, make

from ..hand_node import TOKEN as HAND_TOKEN
from ..hand_node import HandNode, until
from ..node.log_scene import TOKEN, LoggedJob
from ..pair import join, leave
from .described import call, refusal
from .test_megatron import SMALL, WIDTH, Chain
from .training import COMMUNICATOR, FLOW

pytestmark = pytest.mark.filterwarnings("ignore")  # of Megatron-Core and of what it imports
BASE_AT, STEPS = 10, 30
_FP16 = {"initial_loss_scale": 1024.0, "loss_scale_window": 5, "hysteresis": 1}
# Type of parameters, of their reduction, clipping, instances of the distributed optimizer (0: none), its options.
CASES: dict[str, tuple[torch.dtype, bool, float, int, dict[str, Any]]] = {
    "bf16": (torch.bfloat16, True, 0.02, 0, {}),
    "bf16-reduced-in-bf16": (torch.bfloat16, False, 0.02, 0, {"decoupled_weight_decay": False}),
    "fp16-dynamic-scale": (torch.float16, False, 0.02, 0, _FP16),
    "fp32": (torch.float32, True, 0.02, 0, {}),
    "fp32-sgd": (torch.float32, True, 0.0, 0, {"optimizer": "sgd", "sgd_momentum": 0.9}),
    "bf16-instances": (torch.bfloat16, True, 0.02, 2, {"loss_scale": 8.0}),
}


BARE = ("bf16", "fp16-dynamic-scale", "fp32")  # without buffers and constants: a step of the base itself can be made


def calls(wires: list[torch.Tensor]) -> list[dict[str, Any]]:
    return [call("AllReduce", one.numel(), str(one.dtype).removeprefix("torch.")) for one in wires]


class Rank:
    """One of four, whose others have zeros for gradients. bits: of all that it has, by name."""

    def __init__(self, case: str, seed: int = 1) -> None:
        self.dtype, reduce_float32, clip, instances, config = CASES[case]
        leave()
        join(0, 4)
        torch.manual_seed(seed)
        chain = Chain().to(self.dtype)
        if case in BARE:
            del chain.count, chain.frozen
        everybody = dist.new_group([0, 1, 2, 3])
        across, inside = (dist.new_group([0, 2]), dist.new_group([0, 1])) if instances else (None, everybody)
        places = Places(across, inside, everybody, dist.new_group([0]))
        self._heard: Any = everybody if across is None else across
        self.model, self.optimizer = make(
            chain, places, instances=max(instances, 1), bucket_elements=SMALL,
            reduce_float32=reduce_float32, clip=clip, use_distributed_optimizer=bool(instances),
            optimizer={"lr": 0.01, "weight_decay": 0.1, "use_distributed_optimizer": bool(instances)} | config)
        self.inner = optimizer_of(self.optimizer)

    def step(self, number: int, scale: float = 1.0) -> list[torch.Tensor]:
        """An iteration; what it AllReduced."""
        self._heard.reduced.clear()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        x = torch.linspace(-1.0, 1.0 + number / 7, 4 * WIDTH).view(4, WIDTH).to(self.dtype)
        (self.model(x).float().square().mean() * scale * self.optimizer.get_loss_scale().item()).backward()
        self.model.finish_grad_sync()
        wires = list(self._heard.reduced)
        self.optimizer.step()
        return wires

    def bits(self, part: Any) -> dict[str, str]:
        held: dict[str, Any] = {f"main {name}": value for name, value in part.state_dict().items()}
        held |= {f"model {name}": value for name, value in self.model.module.state_dict().items()}
        for number, values in self.inner.state_dict()["state"].items():
            held |= {f"state {number} {key}": value for key, value in values.items()}
        out = {name: hashlib.sha256(repr((value.dtype, value.shape)).encode() + value.detach().contiguous().reshape(
            -1).view(torch.uint8).numpy().tobytes()).hexdigest() for name, value in held.items() if value is not None}
        return out | {f"groups {key}": repr([group[key] for group in self.inner.param_groups])
                      for key in self.inner.param_groups[0] if key not in ("params", "lr")}


class Logged(LoggedJob):
    """after: step -> bits."""

    def __init__(self, root: Path, case: str) -> None:
        self.root, self.rank = root, Rank(case)
        self.optimizer = self.rank.inner
        (self.part,) = parts_of([self.rank.model], self.rank.optimizer, LOG)
        self.described = entries(self.part, self.optimizer, LOG)
        said, manifest = list[dict[str, Any]](), None
        where = COMMUNICATOR | {"ranks": dist.get_world_size(self.part.group)}
        watch = Watch(self.part, self.optimizer, self.described, lambda since: said[since:], lambda: where, "run", 0)
        while manifest is None:
            said += calls(self.rank.step(0))
            self.part.over()
            self.part.said()
            manifest = watch.look()
        self.job = manifest
        held = self.part.state_dict(keep_vars=True)
        self.named = {name: held[name] for name in self.described.names.values()}
        self.bits: dict[int, dict[str, str]] = {}
        self.clipped = self.skipped = 0
        self._keep(60, {name: held[name] for name in ("frozen",) if name in held})

    def iterate(self, sums: bool) -> None:
        number, tree = self.number, list[Any]()
        with self.optimizer_heard(tree):
            for group in self.optimizer.param_groups:
                group["lr"] = 0.01 / (1 + number % 9)
            wires = self.rank.step(number, scale=float("inf") if number % 7 == 5 and self._scaled else 1.0 + number)
        self.part.check()
        clip, scale, skipped = self.part.said()
        self.part.over()
        assert skipped == (not tree)
        self.clipped, self.skipped = self.clipped + (not skipped and (clip or 1.0) < 1.0), self.skipped + skipped
        places = self.plan.iteration_buckets(number)
        region = np.zeros(max(one.offset + one.nbytes for one in places), np.uint8)
        for place, wire in zip(places, wires, strict=True):
            region[place.offset : place.offset + wire.nbytes] = wire.flatten().view(torch.uint8).numpy()
        said = {name: f"{value:016x}" for name, value in checksums(summed(self.named, self.optimizer)).items()}
        record = StepRecord(tree or [record_tree(Stepped.of(self.optimizer))], clip, scale, skipped,
                            said if sums else {}, {
                                name: one.clone() for name, one in self.rank.model.module.named_buffers()})
        self._over(record, region)
        self.bits[self.number] = self.rank.bits(self.part)

    @property
    def _scaled(self) -> bool:
        return getattr(self.rank.optimizer.chained_optimizers[0], "grad_scaler", None) is not None

    def optimizer_heard(self, tree: list[Any]) -> Any:
        handle = self.optimizer.register_step_pre_hook(lambda one, *_: tree.append(record_tree(Stepped.of(one))))

        class Heard:
            def __enter__(self) -> None: ...

            def __exit__(self, *_: object) -> None:
                handle.remove()

        return Heard()


def redone(case: str, address: str, steps: list[int]) -> list[Any]:
    """In a process that has never trained: (step, status, bits) of each."""
    out = []
    with as_cuda():
        for step in steps:
            rank = Rank(case, seed=9)
            found = flowcheck.recover(address, token=TOKEN, together=False, step=step)
            found.load(rank.model, rank.optimizer)
            (part,) = parts_of([rank.model], rank.optimizer, LOG)
            bits = rank.bits(part)
            part.close()
            out.append([found.step, found.status, bits])
    return out


@pytest.mark.parametrize("case", CASES)
def test_steps_are_made_again_in_a_new_process(tmp_path: Path, case: str) -> None:
    """30 steps, clipped and some of them skipped, by a base that is 0 to 20 steps old."""
    pytest.importorskip("megatron.core", reason="Megatron-Core (extra `dev`) is not installed")
    with as_cuda():
        job = Logged(tmp_path, case)
        for number in range(STEPS):
            if number == BASE_AT - 1:
                job.base(1)
            job.iterate(sums=number % 5 == 4)
        job.settle()
        job.part.close()
        leave()
    assert (job.clipped > 10) == (CASES[case][2] > 0) and (job.skipped >= 3) == job._scaled
    first = job.sender.whole[0].step + (case not in BARE)
    assert BASE_AT <= first <= BASE_AT + (0 if case in BARE else 3)
    steps = [first, 17, STEPS]
    code = f"import json, sys; from {__name__} import redone; print(json.dumps(redone(*json.loads(sys.argv[1]))))"
    with job.serving() as address:
        done = subprocess.run([sys.executable, "-c", code, json.dumps([case, address, steps])], capture_output=True,
                              text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    for step, (made, status, bits) in zip(steps, said, strict=True):
        assert made == step and status in ("verified", "unverified", f"follows {step // 5 * 5}")
        assert [name for name, value in job.bits[step].items() if bits[name] != value] == [], step
        assert bits.keys() == job.bits[step].keys()
    assert said[-1][1] == "verified"


def test_an_attachment_keeps_a_log_of_it(hand_node: HandNode) -> None:
    """Whatever steps inside: what no replica can follow, too."""
    pytest.importorskip("megatron.core", reason="Megatron-Core (extra `dev`) is not installed")
    with as_cuda():
        rank, said = Rank("bf16"), list[dict[str, Any]]()
        kind = type("Lion", (torch.optim.AdamW,), {})
        rank.optimizer.chained_optimizers[0].optimizer.__class__ = kind
        attachment = flowcheck.attach(
            [rank.model], rank.optimizer, node="{}:{}".format(*hand_node.address), token=HAND_TOKEN.decode(),
            max_stall_s=0.0, topology=lambda: {"communicator": COMMUNICATOR | {"ranks": 4}, "flows": [FLOW]},
            collectives=lambda since: said[since:], kind="log", checksum_every=1)
        peer = hand_node.welcome()
        until(lambda: attachment._senders[0].connected and not attachment._senders[0]._again.is_set())
        for number in range(5):
            wires = rank.step(number)
            said += calls(wires)
            if number == 3:
                peer.send("joined", iteration=3)
                until(lambda: attachment.state == "attached")
            attachment.step()
            if number == 2:
                peer.expect("flows")
                job = peer.expect("manifest")["job"]
        assert job["kind"] == "log" and {one["name"] for one in job["model"]} == {
            "one.weight", "one.bias", "two.weight", "two.bias"}
        assert {one["dtype"] for one in job["model"] if one.get("kind", "optimized") == "optimized"} == {"float32"}
        assert attachment.why == ""
        attachment.close(0.0)
        leave()


def test_what_no_log_can_be_kept_of_is_refused_by_name() -> None:
    pytest.importorskip("megatron.core", reason="Megatron-Core (extra `dev`) is not installed")
    with as_cuda():
        rank = Rank("bf16")
        where, what = refusal(lambda: parts_of(rank.model, rank.optimizer))  # as a replica
        assert where == "model" and "without its distributed optimizer" in what
        assert refusal(lambda: parts_of(rank.model, rank.inner, LOG))[0] == "optimizer"
        one = rank.optimizer.chained_optimizers[0]
        one.fp32_from_float16_groups[0][0] = one.fp32_from_float16_groups[0][0].double()
        assert refusal(lambda: parts_of(rank.model, rank.optimizer, LOG))[0] == "optimizer"
        rank.model.ddp_config.use_distributed_optimizer = True
        assert refusal(lambda: parts_of(rank.model, rank.optimizer, LOG))[0] == "model"  # one instance: ReduceScatter
        leave()
