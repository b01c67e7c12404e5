"""What stands beside FlowCheck in the bench does save, and what it saved is of one iteration."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lab.saving import SAVERS, TwoPhase

SHAPE = (400, 1000)


def training(tmp_path: Path, how: str, every: int, steps: int) -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    """The model, and its state after each iteration."""
    torch.manual_seed(1)
    model = torch.nn.Linear(*SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saver, states = SAVERS[how](tmp_path / how, every), []
    for iteration in range(steps):
        model(torch.randn(4, SHAPE[0])).square().sum().backward()
        saver.before_update()
        optimizer.step()
        optimizer.zero_grad()
        saver.after_step(iteration, model, optimizer)
        states.append(copy.deepcopy(model.state_dict()))
    saver.close()
    return model, states


@pytest.mark.parametrize("how", ["torch-save", "two-phase"])
def test_the_last_file_is_the_last_iterations_state(tmp_path: Path, how: str) -> None:
    _, states = training(tmp_path, how, every=3, steps=7)
    found = torch.load(tmp_path / how / "latest.pt", weights_only=True)
    assert all(torch.equal(found["model"][name], value) for name, value in states[5].items())
    assert set(found["optimizer"]["state"]) == {0, 1} and [path.name for path in (tmp_path / how).iterdir()] == [
        "latest.pt"]


def test_an_update_waits_until_the_copy_is_done(tmp_path: Path) -> None:
    """Every checkpoint is looked at before the next replaces it; none is a mixture of two iterations."""
    torn = []

    class Watched(TwoPhase):
        def _write(self, state: dict[str, dict[str, torch.Tensor]]) -> None:  # type: ignore[override]
            torn.append({name: value.clone() for name, value in state["model"].items()})
            super()._write(state)

    SAVERS["watched"] = Watched
    try:
        _, states = training(tmp_path, "watched", every=1, steps=6)
    finally:
        del SAVERS["watched"]
    assert len(torn) == 6
    for one, other in zip(torn, states, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())


def test_dcp_writes_what_dcp_reads(tmp_path: Path) -> None:
    """In a process of its own: it needs a process group."""
    code = f"""
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from pathlib import Path
from tests.lab.test_saving import training
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
model, states = training(Path("{tmp_path}"), "async-dcp", every=1, steps=3)
(last,) = [path for path in (Path("{tmp_path}") / "async-dcp").iterdir() if path.name == "2"]
found = {{"model": torch.nn.Linear(400, 1000).state_dict()}}
dcp.load(found, checkpoint_id=last, no_dist=True)
assert all(torch.equal(found["model"][name], value) for name, value in states[2].items())
print("equal")
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          cwd=Path(__file__).parents[2])
    assert done.stdout.endswith("equal\n"), done.stderr
