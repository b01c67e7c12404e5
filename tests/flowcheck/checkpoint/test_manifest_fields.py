"""Fields of manifests of gathered parameters that are not what they must be, and the manifest of a step elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowcheck.checkpoint import directory
from flowcheck.checkpoint.directory import Meta, load_parameters, load_step, step_manifest, write_parameters, write_step

from .test_reading import WEIGHT, changed, refused, seal

META = Meta("run", 2, "verified", ("icrc off",), {"name": "adam", "groups": []}, "torch-cpu", "stage1", 3)
FIELD = "{} is not what every version has"


@pytest.mark.parametrize(("change", "where", "what"), [
    (lambda m: m.update(run_id=7), "", FIELD.format("run_id")),
    (lambda m: m.update(epoch=True), "", FIELD.format("epoch")),
    (lambda m: m.update(epoch=-1), "", FIELD.format("epoch, step or matches")),
    (lambda m: m.update(step=-1), "", FIELD.format("epoch, step or matches")),
    (lambda m: m.update(status=1), "", FIELD.format("status")),
    (lambda m: m.update(unproven=[7]), "", FIELD.format("unproven")),
    (lambda m: m["files"]["parameters.safetensors"]["tensors"]["w"].update(sha256="0"),
     ": parameters.safetensors: tensor 'w'", "has no SHA-256"),
    (lambda m: m["files"]["parameters.safetensors"]["tensors"]["w"].update(shape=[-1]),
     ": parameters.safetensors: tensor 'w'", "has no proper dtype and shape"),
])
def test_fields_of_gathered_parameters(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], where: str, what: str
) -> None:
    path = write_parameters(tmp_path, 1, {"w": WEIGHT}, [], META)
    assert load_parameters(path).step == 1
    changed(path, change)
    assert refused(load_parameters, path)[:2] == (f"{path}/manifest.json{where}", what)


def test_a_step_that_lies_elsewhere_has_the_manifest_of_one_in_a_directory(tmp_path: Path) -> None:
    """And what else is to be said of it; without states of ranks it says nothing of them."""
    path = write_step(tmp_path, 7, {"w": WEIGHT}, {"w": {"step": 3}}, META, lambda: {3: b"x"})
    manifest = load_step(path).manifest
    assert manifest["user"].keys() == {"3"}
    files, users = manifest["files"], manifest["user"]
    assert step_manifest(7, META, files, users) == manifest
    assert (path / "manifest.json").read_text() == json.dumps(manifest, indent=1) + "\n"  # lines, as in a store
    assert step_manifest(7, META, files, users, stored=1.5) == seal({**manifest, "stored": 1.5})
    alone = step_manifest(7, META, files, {})
    assert alone == seal({key: value for key, value in manifest.items() if key != "user"})


def test_a_manifest_that_grows_is_read_no_further_than_one_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file of the kernel's, whose length is 0 when it is opened."""
    path = write_step(tmp_path, 1, {"w": WEIGHT}, {}, META)
    (path / "manifest.json").unlink()
    (path / "manifest.json").symlink_to("/proc/self/maps")
    monkeypatch.setattr(directory, "MANIFEST_BYTES", 10)
    what = "has 11 bytes; no manifest has more than 10"
    assert refused(load_step, path)[:2] == (f"{path}/manifest.json", what)
