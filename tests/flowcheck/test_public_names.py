"""What `import flowcheck` offers: the table of names, what importing them loads, and the page's examples."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flowcheck
from lab.synth import example_job, generate
from updater.optimizers import OptimizerSpec
from updater.replica import Replica as Writer

ROOT = Path(__file__).resolve().parents[2]


# -- the table -----------------------------------------------------------------------------------------------


def test_every_name_is_listed_once_for_people_for_checkers_and_for_loading() -> None:
    tree = ast.parse((ROOT / "flowcheck/__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    checked = {
        (node.module, alias.name) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    loaded = {(module, name) for module, names in flowcheck._HOMES.items() for name in names}
    assert checked == loaded
    assert sorted(name for _, name in loaded) == flowcheck.__all__
    assert set(flowcheck.__all__) <= set(dir(flowcheck))


@pytest.mark.parametrize("name", flowcheck.__all__)
def test_names_are_what_they_say(name: str) -> None:
    found = getattr(flowcheck, name)
    (home,) = [module for module, names in flowcheck._HOMES.items() if name in names]
    assert found is getattr(importlib.import_module(home), name) and found.__doc__


def test_functions_have_real_signatures() -> None:
    for name in ("attach", "fetch", "inspect", "learn", "load_checkpoint", "load_job", "recover", "replay"):
        function = getattr(flowcheck, name)
        parameters = inspect.signature(function).parameters.values()
        assert all(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters), name
        assert {p.name for p in parameters} | {"return"} == set(typing.get_type_hints(function)), name


def test_no_room_takes_a_names_place() -> None:
    """Importing a package flowcheck.x would put it where the public name x was."""
    rooms = {path.name.removesuffix(".py") for path in (ROOT / "flowcheck").iterdir() if path.suffix in ("", ".py")}
    assert not rooms & set(flowcheck.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'flowcheck' has no attribute 'replays'"):
        flowcheck.replays  # noqa: B018


LIGHT = """
import sys
import flowcheck
dir(flowcheck)
heavy = {"torch", "numpy", "dataplane", "parser", "updater", "rich", "typer"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
flowcheck.load_job, flowcheck.Job, flowcheck.UserError
assert not heavy & set(sys.modules), heavy & set(sys.modules)
flowcheck.Replica, flowcheck.load_checkpoint, flowcheck.replay, flowcheck.learn, flowcheck.inspect
assert not {"dataplane", "_pydpdk"} & {name.partition(".")[0] for name in sys.modules}, "DPDK is for child processes"
assert callable(flowcheck.learn) and callable(flowcheck.inspect)
"""


def test_importing_loads_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# -- the examples ----------------------------------------------------------------------------------------------


def example(heading: str) -> list[str]:
    """The code blocks under a heading of the page."""
    page = (ROOT / "docs/reference/python.md").read_text()
    (section,) = [part for part in re.split(r"^## ", page, flags=re.MULTILINE) if part.startswith(f"{heading}\n")]
    found = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert found
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """run(heading, **names): execute the page's blocks beside pcaps/; returns the namespace."""
    (tmp_path / "pcaps").symlink_to(ROOT / "pcaps")
    monkeypatch.chdir(tmp_path)

    def execute(heading: str, **names: Any) -> SimpleNamespace:
        space = {"flowcheck": flowcheck, **names}
        for block in example(heading):
            exec(compile(block, f"python.md, {heading}", "exec"), space)
        return SimpleNamespace(**{key: value for key, value in space.items() if not key.startswith("__")})

    return execute


def model_of(**layers: tuple[int, ...]) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, shape in layers.items():
        layer = torch.nn.Module()
        layer.register_parameter("weight", torch.nn.Parameter(torch.zeros(shape)))
        model.add_module(name, layer)
    return model


def test_replay_and_load_checkpoint(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("replay")
    assert capsys.readouterr().out == (
        "1 of 2 iterations are incomplete, the first is 1\n1 Missing(bucket=0, start=128, end=256)\n"
    )
    assert found.result.iterations[1].causes == {"lost": 128}
    names = {entry.name for entry in flowcheck.load_job("pcaps/ring4-ll-loss.job.json").model}
    assert set(found.whole) < set(found.result.gradients(0)) == names
    shapes = {name: tensor.shape for name, tensor in found.result.state_dict().items()}
    model = torch.nn.ParameterDict()
    for name, shape in shapes.items():
        owner, _, leaf = name.rpartition(".")
        model[owner] = model[owner] if owner in model else torch.nn.ParameterDict()
        model[owner][leaf] = torch.nn.Parameter(torch.zeros(shape))
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    loaded = run("load_checkpoint", model=model, optimizer=optimizer).checkpoint
    assert loaded.step == 1 and loaded.run_id == "synth-3"
    assert all(torch.equal(tensor, loaded.parameters[name]) for name, tensor in model.state_dict().items())
    group = optimizer.state_dict()["param_groups"][0]
    assert group["lr"] == loaded.optimizer["groups"][0]["options"]["lr"] != 1.0
    assert len(optimizer.state_dict()["state"]) == len(shapes)


def test_inspect(run: Any) -> None:
    found = run("inspect").found
    assert repr(found) == "Inspection(1 captures, 172 RoCEv2 packets, 2 connections (LL), 4 flows, 0 notes)"
    assert found.packets["roce"] == 172 and found.notes == []


def test_learn_and_load_job(run: Any) -> None:
    true = example_job(ranks=2, count=[700, 300])
    generate(true, iterations=3, ports=[0], directions="both", seed=1).write("ddp.pcap")
    job = run("learn and load_job").job
    assert job.communicator.ranks == 2 and job.optimizer.groups[0].options == {"lr": 0.01}
    assert [entry.shape for entry in job.model] == [entry.shape for entry in true.model]
    assert repr(job).startswith("Job(run ") and len(repr(job)) < 200


def test_replica(run: Any, shm: Path) -> None:
    spec = OptimizerSpec.check("adam", [(["layer.weight"], {"lr": 0.5})])
    made = {"layer.weight": torch.arange(6.0).reshape(2, 3)}
    state = {"layer.weight": {"step": 7.0, "exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.full((2, 3), 2.0)}}
    path = shm / "flowcheck-node--1.replica"
    with_state = Writer(made, spec, path=path, run_id="example", step=7, optimizer_state=state)
    model = model_of(layer=(2, 3))
    optimizer = torch.optim.Adam(model.parameters())
    replica = run("Replica", directory=shm, model=model, optimizer=optimizer).replica
    assert repr(replica) == f"Replica(step 7 of run 'example', epoch 0, unverified, no checksum compared; {path})"
    assert model.state_dict()["layer.weight"].equal(made["layer.weight"])
    held = optimizer.state_dict()
    assert held["state"][0]["exp_avg_sq"].equal(torch.full((2, 3), 2.0)) and held["state"][0]["step"] == 7
    assert held["param_groups"][0]["lr"] == 0.5
    with_state.close()


def test_attach(run: Any, wrapped: Any) -> None:
    """No node is there: training goes on."""
    model = wrapped(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.module.weight.detach().clone()
    found = run(
        "attach", ddp_model=model, optimizer=optimizer, secret="a secret of the tests", data=[torch.ones(1, 2)] * 2
    )
    assert found.attachment.state == "closed" and not model.module.weight.equal(before)
