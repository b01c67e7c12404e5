"""Paths may be strings: everything public that takes a path takes `str | os.PathLike`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.checkpoint.directory import (
    Meta,
    load_init,
    load_parameters,
    load_step,
    parameters_path,
    step_path,
    write_parameters,
    write_step,
)
from flowcheck.job.manifest import load_job
from flowcheck.job.model import ModelEntry
from flowcheck.offline.report import Report, write_report
from lab.synth import example_job
from updater.optimizers import OptimizerSpec
from updater.reader import Reader
from updater.replica import Replica

from ..updater.conftest import shm

__all__ = ["shm"]

#: What people call from Python. Not here: commands (typer makes their paths) and helpers between modules.
PUBLIC = [
    "dataplane.capture", "dataplane.pcapfile", "flowcheck", "flowcheck.checkpoint.directory",
    "flowcheck.checkpoint.open_replica", "flowcheck.checkpoint.state", "flowcheck.offline.gradients",
    "flowcheck.rebuild.iteration.sharded", "flowcheck.diagnose.inspect", "flowcheck.learning.captures",
    "flowcheck.job.manifest",
    "flowcheck.node.config",
    "flowcheck.rebuild.version.replica",
    "flowcheck.offline.report", "lab.synth", "switch_configs.schema", "updater.reader", "updater.replica",
]


#: Classes whose objects people are given and do not make.
RETURNED = ("Checkpoint", "Replica", "Result", "Protected", "Taken")


class Named:
    """A path that is neither str nor Path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


FORMS: list[Callable[[Path], Any]] = [str, Path, Named]


def functions(module: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    loaded = importlib.import_module(module)
    for name in getattr(loaded, "__all__", ()):
        item = getattr(loaded, name)
        if inspect.isclass(item):
            for key, member in vars(item).items():
                member = getattr(member, "__func__", member)
                made = key == "__init__" and name not in RETURNED
                if inspect.isfunction(member) and (not key.startswith("_") or made):
                    yield f"{module}.{name}.{key}", member
        elif inspect.isfunction(item):
            yield f"{module}.{name}", item


@pytest.mark.parametrize("module", PUBLIC)
def test_public_functions_take_strings_for_paths(module: str) -> None:
    odd = [
        f"{name}({parameter})"
        for name, function in functions(module) if name != "flowcheck.diagnose.inspect.run"  # the command
        for parameter, kind in getattr(function, "__annotations__", {}).items()
        if parameter != "return" and "Path" in str(kind) and "PathLike" not in str(kind)
    ]
    assert odd == []


@pytest.mark.parametrize("form", FORMS, ids=["str", "Path", "PathLike"])
def test_checkpoints_are_written_and_read_by_any_form_of_path(tmp_path: Path, form: Callable[[Path], Any]) -> None:
    tensors = {"w": torch.arange(3.0)}
    path = write_step(form(tmp_path), 1, tensors, {}, Meta())
    assert path == step_path(form(tmp_path), 1) == tmp_path / "step-000001"
    assert load_step(form(path)).parameters["w"].equal(tensors["w"])
    assert load_init(form(path), [ModelEntry("w", [3])]).step == 1
    path = write_parameters(form(tmp_path), 2, tensors, [], Meta())
    assert path == parameters_path(form(tmp_path), 2)
    assert load_parameters(form(path)).step == 2
    assert write_report(Report(), form(tmp_path / "report.json")) == tmp_path / "report.json"
    (tmp_path / "job.json").write_text(example_job().to_json())
    assert load_job(form(tmp_path / "job.json")).run_id == example_job().run_id


@pytest.mark.parametrize("form", FORMS, ids=["str", "Path", "PathLike"])
def test_replica_files_are_made_and_read_by_any_form_of_path(shm: Path, form: Callable[[Path], Any]) -> None:
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 0.5})])
    Replica({"w": torch.ones(3)}, spec, path=form(shm / "r")).close()
    with Reader(form(shm / "r")).pinned() as version:
        assert version.step == 0
    Replica.attach(form(shm / "r")).close()
