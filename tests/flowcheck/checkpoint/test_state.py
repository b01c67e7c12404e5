"""A checkpoint directory as one object, and the optimizer's state in torch's own form."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from flowcheck.ask.torch_state import torch_state
from flowcheck.checkpoint.directory import Meta, write_parameters, write_step
from flowcheck.checkpoint.state import Checkpoint, load_checkpoint
from flowcheck.control.user_state import pack
from flowcheck.control.version import seal
from flowcheck.errors import UserError

from ..odd_json import one_place_odd


def _trained(kind: Any, shapes: list[list[tuple[int, ...]]], **options: Any) -> Any:
    """An optimizer of torch after two steps, with a group for each list of shapes."""
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(shape)) for shape in part], "lr": 0.1 * (i + 1)}
        for i, part in enumerate(shapes)
    ]
    made = kind(groups, **options)
    for _ in range(2):
        for parameter in [parameter for group in groups for parameter in group["params"]]:
            parameter.grad = torch.full_like(parameter, 0.5)
        made.step()
    return made


KINDS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"betas": (0.8, 0.9), "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"eps": 1e-6, "fused": True}),
}


@pytest.mark.parametrize("name", list(KINDS))
def test_it_is_what_torch_itself_would_have_given(name: str) -> None:
    """Two groups, three parameters whose numbers go on from group to group; the lists of a manifest become tuples."""
    kind, options = KINDS[name]
    trained = _trained(kind, [[(2, 3), (4,)], [(5,)]], **options)
    wanted = trained.state_dict()
    names = ["a", "b", "c"]
    said = [
        {"params": part, "options": {key: list(value) if isinstance(value, tuple) else value
                                     for key, value in {**options, "lr": lr}.items() if key != "fused"}}
        for part, lr in ((["a", "b"], 0.1), (["c"], 0.2))
    ]
    state = {name: dict(wanted["state"][i]) for i, name in reversed(list(enumerate(names)))}
    rounding = "torch-cpu-fused" if options.get("fused") else "torch-cpu"
    found = torch_state({"name": name, "groups": said}, state, rounding, "here")
    with pytest.raises(UserError, match="state of 'unknown', which is in none of its optimizer's groups"):
        torch_state({"name": name, "groups": said}, {**state, "unknown": {}}, rounding, "here")
    assert list(found) == ["state", "param_groups"] and list(found["state"]) == [0, 1, 2]
    for number, values in wanted["state"].items():
        assert set(found["state"][number]) == set(values)
        assert all(torch.equal(torch.as_tensor(found["state"][number][key]), torch.as_tensor(value))
                   for key, value in values.items() if value is not None)
    assert found["param_groups"] == wanted["param_groups"]
    fresh = kind([{"params": [torch.nn.Parameter(torch.ones(s)) for s in p]} for p in ([(2, 3), (4,)], [(5,)])], lr=9.0)
    fresh.load_state_dict(found)
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.2]


def test_only_an_optimizer_that_rounds_as_fused_does_is_said_to_be_fused() -> None:
    optimizer = {"name": "adam", "groups": [{"params": ["a"], "options": {"lr": 0.1}}]}
    for rounding, fused in (("torch-cpu-fused", True), ("torch-cuda-fused", True), ("torch-cpu", None), ("", None)):
        (group,) = torch_state(optimizer, {}, rounding, "here")["param_groups"]
        assert group["fused"] is fused, rounding


def test_values_are_given_and_not_those_of_another() -> None:
    state = {"a": {"exp_avg": torch.ones(2)}}
    found = torch_state({"name": "adam", "groups": [{"params": ["a", "b"], "options": {}}]}, state, "", "here")
    assert found["state"] == {0: {"exp_avg": state["a"]["exp_avg"]}} and found["state"][0] is not state["a"]


@pytest.mark.parametrize("optimizer", [{}, {"name": ""}, {"name": None, "groups": []}])
def test_without_an_optimizer_there_is_no_state(optimizer: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="has no optimizer state") as refused:
        torch_state(optimizer, {}, "", "a place")
    assert refused.value.where == "a place"


@pytest.mark.parametrize(("optimizer", "why"), [
    ({"name": "lion", "groups": []}, "is not one of sgd, adam, adamw"),
    ({"name": "sgd"}, "has groups that are none"),
    ({"name": "sgd", "groups": [{"params": ["a"]}]}, "has groups that are none"),
    ({"name": "sgd", "groups": [{"params": ["a"], "options": {"params": "x"}}]}, "has 'params' among its options"),
    ({"name": "sgd", "groups": [{"params": ["a"], "options": {"params": []}}]}, "has 'params' among its options"),
    ({"name": "sgd", "groups": [{"params": ["a"], "options": {}}] * 2}, "has a parameter twice"),
])
def test_an_optimizer_that_is_none_has_no_state(optimizer: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError) as refused:
        torch_state(optimizer, {}, "", "a place")
    assert (refused.value.what, refused.value.where) == (f"has an optimizer that {why}", "a place")


# -- which checkpoint ----------------------------------------------------------------------------------------


def _write(folder: Path, step: int, value: float) -> Path:
    optimizer = {"name": "sgd", "groups": [{"params": ["w"], "options": {"lr": 0.5, "momentum": 0.9}}]}
    about = Meta("r", 4, "verified", ("a thing",), optimizer, "torch-cpu-fused")
    state = {"w": {"momentum_buffer": torch.full((3,), value + 1)}}
    return write_step(folder, step, {"w": torch.full((3,), value)}, state, about)


def test_every_field_is_what_was_written(tmp_path: Path) -> None:
    path = _write(tmp_path, 20, 1.5)
    found = load_checkpoint(str(path))
    assert (found.path, found.step, found.run_id, found.epoch, found.status) == (path, 20, "r", 4, "verified")
    assert found.unproven == ("a thing",) and found.rounding == "torch-cpu-fused" and found.optimizer["name"] == "sgd"
    assert found.parameters["w"].tolist() == [1.5] * 3
    assert found.state_dict() == found.parameters and found.state_dict() is not found.parameters
    held = found.optimizer_state_dict()
    assert held["state"][0]["momentum_buffer"].tolist() == [2.5] * 3
    assert held["param_groups"][0]["momentum"] == 0.9 and held["param_groups"][0]["fused"] is True
    assert repr(found) == (
        f"Checkpoint(step 20 of run 'r', epoch 4, verified, unproven: a thing: 1 tensors, 12 bytes, sgd; {path})")


def test_what_it_says_of_itself() -> None:
    tensors = {"a": torch.zeros(500, dtype=torch.bfloat16), "b": torch.zeros(3, dtype=torch.float64)}
    made = Checkpoint(Path("x"), 7, "run", 0, "unverified", (), tensors, {}, {}, "")
    assert repr(made) == (
        "Checkpoint(step 7 of run 'run', epoch 0, unverified: 2 tensors, 1,024 bytes, no optimizer state; x)")
    two = Checkpoint(Path("x"), 7, "run", 0, "unverified", ("one", "two"), tensors, {}, {}, "")
    assert "unverified, unproven: one; two: 2 tensors" in repr(two)
    with pytest.raises(UserError, match="has no optimizer state") as refused:
        made.optimizer_state_dict()
    assert refused.value.where == "x"


def test_the_newest_step_of_a_folder(tmp_path: Path) -> None:
    """By its number and not by its letters; what only looks like a step is left alone."""
    for step in (9, 10, 1_000_000):
        _write(tmp_path, step, float(step))
    (tmp_path / "step-99999999x").mkdir()
    (tmp_path / "astep-99999999").mkdir()
    assert load_checkpoint(tmp_path).step == 1_000_000
    assert load_checkpoint(tmp_path / "step-000010").step == 10


def test_a_folder_without_one_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        load_checkpoint(tmp_path)
    assert (refused.value.what, refused.value.where) == ("holds no checkpoint", str(tmp_path))
    assert refused.value.remedy == "give a directory step-NNNNNN, or one that holds some directly"
    with pytest.raises(UserError) as missing:
        load_checkpoint(tmp_path / "step-000001")
    assert str(tmp_path / "step-000001") in missing.value.message()


def test_parameters_alone_where_there_is_no_step(tmp_path: Path) -> None:
    """Gathered parameters: no optimizer. A step is taken before newer parameters, for it is all of a version."""
    for step in (8, 11):
        write_parameters(tmp_path, step, {"w": torch.full((2,), float(step))}, [], Meta("r", 1, "verified", ()))
    found = load_checkpoint(tmp_path)
    assert (found.step, found.optimizer, found.rounding, found.optimizer_state) == (11, {}, "", {})
    assert found.parameters["w"].tolist() == [11.0, 11.0]
    _write(tmp_path, 2, 1.0)
    assert load_checkpoint(tmp_path).step == 2


# -- a seal that is right, over what is not --------------------------------------------------------------------


def _sealed(path: Path, manifest: dict[str, Any]) -> None:
    (path / "manifest.json").write_text(json.dumps(seal(manifest)))


SAID = {"run_id", "epoch", "step", "status", "unproven", "rounding", "optimizer"}
ALONE = {"run_id", "epoch", "step", "status", "unproven"}


@pytest.mark.parametrize(("kind", "change"), [
    *((kind, {field: None}) for kind, fields in (("step", SAID), ("parameters", ALONE)) for field in sorted(fields)),
    *((kind, change) for kind in ("step", "parameters") for change in (
        {"epoch": "x"}, {"epoch": True}, {"epoch": -1}, {"step": True}, {"unproven": 5}, {"unproven": "icrc off"},
        {"status": 1}, {"status": ["verified"]}, {"run_id": 7},
    )),
    *(("step", {"optimizer": one}) for one in (
        5, {"name": "lion"}, {"name": "lion", "groups": []}, {"name": "sgd"}, {"name": "sgd", "groups": [{}]},
        {"name": "sgd", "groups": [{"params": ["w"]}]}, {"name": "sgd", "groups": [{"options": {}}]},
        {"name": "sgd", "groups": [{"params": ["w"], "options": {}}] * 2},
        {"name": "sgd", "groups": [{"params": ["w"], "options": {"params": "x"}}]},
        {"name": "sgd", "groups": [{"params": ["w"], "options": {"params": []}}]},
    )),
])
def test_a_field_that_no_checkpoint_has_is_refused(tmp_path: Path, kind: str, change: dict[str, Any]) -> None:
    """None: it is missing."""
    path = _write(tmp_path, 3, 1.0) if kind == "step" else write_parameters(
        tmp_path, 3, {"w": torch.ones(3)}, [], Meta("r", 1))
    manifest = {**json.loads((path / "manifest.json").read_text()), **change}
    _sealed(path, {name: value for name, value in manifest.items() if value is not None})
    with pytest.raises(UserError) as refused:
        load_checkpoint(path)
    assert refused.value.where.startswith(str(path / "manifest.json")) and refused.value.remedy


def test_parameters_alone_have_no_optimizer_whatever_they_say(tmp_path: Path) -> None:
    path = write_parameters(tmp_path, 3, {"w": torch.ones(3)}, [], Meta("r", 1))
    said = {"optimizer": 5, "rounding": 7, "user": {"0": {"bytes": 1, "sha256": "a" * 64}}}
    _sealed(path, json.loads((path / "manifest.json").read_text()) | said)
    found = load_checkpoint(path)
    assert (found.optimizer, found.rounding, found.users) == ({}, "", ())


def test_whatever_a_manifest_says_it_is_read_or_refused(tmp_path: Path) -> None:
    optimizer = {"name": "adam", "groups": [{"params": ["w"], "options": {"lr": 0.5, "betas": [0.5, 0.5]}}]}
    meta = Meta("r", 4, "verified", ("a thing",), optimizer, "torch-cpu-fused", "dp0", 3)
    user = pack({"at": 1}, step=3, rank=0, ranks=1)
    path = write_step(tmp_path, 3, {"w": torch.ones(3)}, {"w": {"step": 3.0}}, meta, lambda: {0: user})
    sound = json.loads((path / "manifest.json").read_text())

    @settings(max_examples=300, deadline=None)
    @given(one_place_odd(sound))
    def check(manifest: dict[str, Any]) -> None:
        _sealed(path, manifest)
        with suppress(UserError):
            found = load_checkpoint(path)
            assert found.parameters["w"].tolist() == [1.0] * 3 and repr(found) and set(found.users) <= {0, 1}
            for call in (found.optimizer_state_dict, lambda: found.user(0)):
                with suppress(UserError):
                    call()

    check()
