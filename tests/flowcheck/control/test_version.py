"""The description of a version: what it is as JSON, and what is refused of one that somebody else wrote."""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from flowcheck.ask.torch_state import torch_state
from flowcheck.control.tensors import TensorSpec
from flowcheck.control.version import MODEL, OPTIMIZER, SCHEMA, Digest, Version, seal, self_hash
from flowcheck.errors import UserError

from ..odd_json import one_place_odd

A, B = "a" * 64, "b" * 64
SGD = {"name": "sgd", "groups": [{"params": ["w"], "options": {}}]}
VERSION = Version(
    "a run", 2, 7, "stage1", "verified", ("icrc off",), SGD, "torch-cpu",
    {MODEL: {"w": Digest(TensorSpec("bfloat16", (2, 3)), A)},
     OPTIMIZER: {"state.w.step": Digest(TensorSpec("float32", ()), B)}}, 5,
)
DOCUMENT: dict[str, Any] = {
    "schema": "flowcheck/checkpoint/3", "run_id": "a run", "epoch": 2, "step": 7, "shard": "stage1",
    "status": "verified", "unproven": ["icrc off"], "optimizer": SGD,
    "rounding": "torch-cpu", "matches": 5,
    "files": {
        "model.safetensors": {"bytes": 12, "tensors": {"w": {"dtype": "bfloat16", "shape": [2, 3], "sha256": A}}},
        "optimizer.safetensors": {
            "bytes": 4, "tensors": {"state.w.step": {"dtype": "float32", "shape": [], "sha256": B}},
        },
    },
}


def changed(**fields: Any) -> dict[str, Any]:
    return seal({**DOCUMENT, **fields})


def refused(document: Any) -> str:
    with pytest.raises(UserError) as caught:
        Version.of(document, "the manifest")
    assert caught.value.where.startswith("the manifest") and caught.value.remedy
    return caught.value.what


def test_a_version_is_one_json_object_and_back() -> None:
    text = json.dumps(DOCUMENT, sort_keys=True, separators=(",", ":")).encode()
    assert VERSION.document() == {**DOCUMENT, "manifest_sha256": hashlib.sha256(text).hexdigest()}
    assert Version.of(json.loads(json.dumps(VERSION.document())), "x") == VERSION
    assert VERSION.nbytes == 16 and SCHEMA == "flowcheck/checkpoint/3"


def test_the_schema_before_had_no_shard() -> None:
    old = {name: value for name, value in DOCUMENT.items() if name != "shard"}
    assert Version.of(seal({**old, "schema": "flowcheck/checkpoint/1"}), "x").shard == ""


@pytest.mark.parametrize(("status", "matches"), [("verified", 1), ("unverified", 0)])
def test_what_does_not_say_how_many_checksums_matched_is_of_an_earlier_release(status: str, matches: int) -> None:
    old = {name: value for name, value in DOCUMENT.items() if name != "matches"} | {"status": status}
    assert Version.of(seal(old), "x").matches == matches


@pytest.mark.parametrize(("schema", "status", "read"), [
    (3, "verified", "verified"), (3, "follows 6", "follows 6"), (3, "diverged", "diverged"),
    (3, "unverified", "unverified"), (3, "follows 7", "unverified"), (3, "good", "unverified"), (3, "", "unverified"),
    (2, "verified", "unverified"), (1, "verified", "unverified"), (2, "unverified", "unverified"),
])
def test_a_status_is_of_that_version_alone(schema: int, status: str, read: str) -> None:
    """Of an earlier release it may have been another one that was compared, and nobody knows which."""
    assert Version.of(changed(schema=f"flowcheck/checkpoint/{schema}", status=status), "x").status == read


@pytest.mark.parametrize("matches", [-1, True, 1.0, "3", None])
def test_how_many_matched_is_a_number(matches: Any) -> None:
    assert "matches is not what every version has" in refused(changed(matches=matches))


def test_the_hash_is_over_all_but_itself() -> None:
    assert self_hash(seal(DOCUMENT)) == self_hash(DOCUMENT) != self_hash({**DOCUMENT, "step": 8})


@pytest.mark.parametrize("field", [name for name in DOCUMENT if name not in ("schema", "shard", "matches")])
def test_every_field_is_needed(field: str) -> None:
    missing = {name: value for name, value in DOCUMENT.items() if name != field}
    assert refused(seal(missing)) == f"{field} is not what every version has"


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"run_id": 1}, "run_id is"), ({"epoch": True}, "epoch is"), ({"step": 1.0}, "step is"),
        ({"shard": None}, "shard is"), ({"unproven": "icrc off"}, "unproven is"), ({"optimizer": []}, "optimizer is"),
        ({"rounding": None}, "rounding is"), ({"files": []}, "files is"), ({"status": 1}, "status is"),
        ({"unproven": [1]}, "unproven is"), ({"epoch": -1}, "epoch, step or matches is"),
        ({"step": -1}, "epoch, step or matches is"),
        ({"schema": "flowcheck/checkpoint/4"}, f"is not a {SCHEMA} manifest"),
        ({"files": {MODEL: {}}}, f"files are not {MODEL} and {OPTIMIZER}"),
        ({"files": {MODEL: {}, OPTIMIZER: {}, "x": {}}}, f"files are not {MODEL} and {OPTIMIZER}"),
        ({"files": {MODEL: {}, OPTIMIZER: {"tensors": {}}}}, "lists no tensors"),
        ({"files": {MODEL: {"tensors": []}, OPTIMIZER: {"tensors": {}}}}, "lists no tensors"),
        ({"files": {MODEL: 3, OPTIMIZER: {"tensors": {}}}}, "lists no tensors"),
    ],
)
def test_a_field_that_is_something_else(fields: dict[str, Any], what: str) -> None:
    assert refused(changed(**fields)).startswith(what)


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (3, "is not described"), ({}, "has no proper dtype and shape"),
        ({"dtype": "complex128", "shape": [1], "sha256": A}, "has no proper dtype and shape"),
        ({"dtype": ["float32"], "shape": [1], "sha256": A}, "has no proper dtype and shape"),
        ({"dtype": {"a": 1}, "shape": [1], "sha256": A}, "has no proper dtype and shape"),
        ({"dtype": "float32", "shape": 1, "sha256": A}, "has no proper dtype and shape"),
        ({"dtype": "float32", "shape": [-1], "sha256": A}, "has no proper dtype and shape"),
        ({"dtype": "float32", "shape": [True], "sha256": A}, "has no proper dtype and shape"),
        ({"dtype": "float32", "shape": [1], "sha256": A[1:]}, "has no SHA-256"),
        ({"dtype": "float32", "shape": [1], "sha256": None}, "has no SHA-256"),
    ],
)
def test_a_tensor_that_is_not_described(tensor: Any, what: str) -> None:
    document = changed(files={MODEL: {"tensors": {"w": tensor}}, OPTIMIZER: {"tensors": {}}})
    assert refused(document) == what


def test_dimensions_may_be_empty() -> None:
    entry = {"dtype": "float32", "shape": [0, 3], "sha256": A}
    document = changed(files={MODEL: {"tensors": {"w": entry}}, OPTIMIZER: {"tensors": {}}}, step=0, epoch=0)
    assert Version.of(document, "x").nbytes == 0


@pytest.mark.parametrize("document", [None, [], 3, {}])
def test_what_is_no_manifest_at_all(document: Any) -> None:
    assert refused(document) == f"is not a {SCHEMA} manifest"


def test_a_flipped_bit_shows() -> None:
    sealed = seal(DOCUMENT)
    assert refused({**sealed, "step": 8}) == "was changed after it was written (its own hash does not match)"
    assert "own hash" in refused({**sealed, "manifest_sha256": "0" * 64}) and "own hash" in refused(DOCUMENT)


@pytest.mark.parametrize(("optimizer", "why"), [
    ({"name": "lion", "groups": SGD["groups"]}, "is not one of sgd, adam, adamw"),
    ({"groups": SGD["groups"]}, "is not one of"),
    ({"name": "sgd"}, "has groups that are none"),
    ({"name": "sgd", "groups": 7}, "has groups that are none"),
    ({"name": "sgd", "groups": [7]}, "has groups that are none"),
    ({"name": "sgd", "groups": [{"params": [["w"]], "options": {}}]}, "has groups that are none"),
    ({"name": "sgd", "groups": [{"params": ["w"], "options": 7}]}, "has groups that are none"),
    ({"name": "sgd", "groups": [{"params": ["w", "x", "w"], "options": {}}]}, "has a parameter twice"),
    ({"name": "sgd", "groups": 2 * SGD["groups"]}, "has a parameter twice"),  # type: ignore[operator]
    ({"name": "sgd", "groups": [{"params": ["w"], "options": {"params": []}}]}, "has 'params' among its options"),
    ({"name": "sgd", "groups": [{"params": ["w"], "options": {"param_names": ["x"]}}]},
     "has 'param_names' among its options"),
])
def test_an_optimizer_that_is_none(optimizer: Any, why: str) -> None:
    assert refused(changed(optimizer=optimizer)).startswith(f"optimizer {why}")


@pytest.mark.parametrize("shape", [[0, 10**30], [0, 1 << 62, 1 << 62], [1 << 49], [1 << 24, 1 << 25], [1 << 70, 0]])
def test_a_shape_that_no_tensor_has(shape: list[int]) -> None:
    files = json.loads(json.dumps(DOCUMENT["files"]))
    files["model.safetensors"]["tensors"]["w"]["shape"] = shape
    assert refused(changed(files=files)) == "has no proper dtype and shape"


@pytest.mark.parametrize("name", ["w.step", "step", "state.w", "state..", "state.w.", "state..step", ""])
def test_a_state_of_no_parameter(name: str) -> None:
    """Parameter and key must be told apart in one way: `w.step` would be the same as `state.w.step`."""
    entry = {"dtype": "float32", "shape": [], "sha256": B}
    tensors = {"state.w.step": entry, name: entry}
    document = changed(files={**DOCUMENT["files"], OPTIMIZER: {"tensors": tensors}})
    assert refused(document) == f"tensor {name!r} is no state of a parameter"


def test_what_is_nested_almost_too_deeply_to_be_read() -> None:
    """It is read, and then there is no room left to hash it."""
    deep: Any = []
    for _ in range(sys.getrecursionlimit() - 40):
        deep = [deep]
    assert refused({**DOCUMENT, "more": deep, "manifest_sha256": A}).startswith("was changed after it was written")


@settings(max_examples=400, deadline=None)
@given(one_place_odd(DOCUMENT))
def test_a_hash_that_is_right_proves_no_field(document: dict[str, Any]) -> None:
    """Whatever is said: it is refused, or all that is made of a version can be made, or is refused."""
    try:
        version = Version.of(seal(document), "x")
    except UserError:
        return
    assert version.nbytes >= 0 and Version.of(json.loads(json.dumps(version.document())), "x").files == version.files
    for tensors in version.files.values():
        for one in tensors.values():
            torch.empty(one.spec.shape, dtype=getattr(torch, one.spec.dtype), device="meta")
    with suppress(UserError):
        state = torch_state(version.optimizer, {"w": {"step": torch.ones(())}}, version.rounding, "x")
        assert [number for group in state["param_groups"] for number in group["params"]] == list(
            range(sum(len(group["params"]) for group in version.optimizer["groups"])))
