"""A version that a node serves, as a directory of torch's distributed checkpoint: loaded with other numbers of ranks,
replicated and sharded by FSDP2, bit for bit. Real node API, real process groups."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flowcheck
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.config.node import NodeConfig
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

TOKEN = "0123456789abcdef"
RANK = """
import hashlib, json, os, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import fully_shard
path, store, rank, ranks, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
model = nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3))
if how == "fsdp2":
    mesh = dist.init_device_mesh("cpu", (ranks,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
held, states = get_state_dict(model, optimizer)
both = {"model": held, "optimizer": states}
load(both, checkpoint_id=path)
set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
whole = lambda tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
sha = lambda tensor: hashlib.sha256(whole(tensor.detach()).contiguous().numpy().tobytes()).hexdigest()
found = {name: sha(value) for name, value in model.named_parameters()}
for name, value in model.named_parameters():
    for key, one in optimizer.state[value].items():
        found[f"{name}.{key}"] = float(one) if key == "step" else sha(one)
found["lr"] = optimizer.param_groups[0]["lr"]
parts = sum(value.to_local().numel() if how == "fsdp2" else value.numel() for value in model.parameters())
if rank == 0:
    print(json.dumps({"found": found, "parts": parts}), flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # a thread of gloo that is still at work would abort the interpreter's own end
"""


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """The directory, and SHA-256 of everything that the node's replica holds."""
    folder = tmp_path_factory.mktemp("shm")
    draw = torch.Generator().manual_seed(3)
    shapes = {"0.weight": (7, 10), "0.bias": (7,), "2.weight": (3, 7), "2.bias": (3,)}
    model = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    state = {name: {"exp_avg": torch.randn(shape, generator=draw), "exp_avg_sq": torch.rand(shape, generator=draw),
                    "step": 41.0} for name, shape in shapes.items()}
    spec = OptimizerSpec.check("adamw", [(list(shapes), {"lr": 0.125})])
    config = NodeConfig.model_validate({
        "name": "n", "control": {"listen": "127.0.0.1:0", "token_file": "t"}, "capture": {"device": "x"},
        "api": {"listen": "127.0.0.1:0"}, "replica": {"directory": str(folder)}, "output": {"directory": str(folder)},
    })
    with (
        contextlib.closing(Replica(model, spec, path=folder / "flowcheck-n--1.replica", run_id="run", step=41,
                                   optimizer_state=state, slots=3)),
        contextlib.closing(Serving(config, TOKEN.encode(), print)) as serving,
    ):
        path = flowcheck.fetch(serving.address, folder / "out", token=TOKEN, format="dcp").path
    wanted: dict[str, object] = {name: sha256(value) for name, value in model.items()}
    for name, values in state.items():
        wanted |= {f"{name}.{key}": value if isinstance(value, float) else sha256(value)
                   for key, value in values.items()}
    return path, wanted | {"lr": 0.125}


@pytest.mark.parametrize(("ranks", "how"), [
    (2, "fsdp2"),
    *(pytest.param(ranks, how, marks=pytest.mark.slow)
      for ranks, how in [(1, "replicated"), (2, "replicated"), (3, "fsdp2"), (4, "fsdp2")]),
])
def test_other_world_sizes_and_fsdp2_load_it(
    fetched: tuple[Path, dict[str, object]], tmp_path: Path, ranks: int, how: str
) -> None:
    path, wanted = fetched
    processes = [
        subprocess.Popen([sys.executable, "-c", RANK, str(path), str(tmp_path / "store"), str(rank), str(ranks), how],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(ranks)
    ]
    said = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, said
    answer = json.loads(said[0][0].splitlines()[-1])
    assert answer["found"] == wanted
    every = 7 * 10 + 7 + 3 * 7 + 3
    assert answer["parts"] == every if how == "replicated" else every / ranks <= answer["parts"] < every
