"""Whose version lies under a name: what is recognised, and what is left alone because it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.checkpoint import identity as module
from flowcheck.checkpoint.directory import Meta, write_step
from flowcheck.checkpoint.identity import (
    NOTE,
    Identity,
    check_directory,
    check_file,
    check_noted,
    folder_of,
    note,
)
from flowcheck.control.version import MODEL, OPTIMIZER, Version
from flowcheck.errors import UserError

from ..hand_api import seal

RUN = Identity("run", 2, 7, "a")
SAID = {"run_id": "run", "epoch": 2, "step": 7, "shard": "a"}
OTHERS = [Identity("x", 2, 7, "a"), Identity("run", 3, 7, "a"), Identity("run", 2, 8, "a"), Identity("run", 2, 7, "")]
VERSION = Version("run", 2, 7, "a", "verified", ("one",), {}, "torch-cpu", {MODEL: {}, OPTIMIZER: {}})
Check = Callable[[Path, Identity], None]


def refused(check: Check, path: Path, wanted: Identity = RUN) -> str:
    with pytest.raises(UserError) as caught:
        check(path, wanted)
    assert caught.value.where == str(path) and caught.value.remedy == "move it away, or use another directory"
    what, end = caught.value.what.split(", and not ", 1)
    assert end == f"{wanted}; it is left alone"
    return what


UNKNOWN = "exists and cannot be recognised as a version of a step"


def test_what_a_version_is_called() -> None:
    assert Identity.of(VERSION) == RUN and str(RUN) == "step 7 of run 'run', epoch 2, shard 'a'"
    assert str(OTHERS[3]) == "step 7 of run 'run', epoch 2"


def test_what_says_whose_it_is() -> None:
    assert Identity.found(SAID | {"more": 1}) == RUN
    for said in (None, [], "x", {}, SAID | {"step": True}, SAID | {"step": "7"}, SAID | {"run_id": 5},
                 SAID | {"epoch": 2.0}, SAID | {"shard": None}, {key: SAID[key] for key in SAID if key != "shard"}):
        assert Identity.found(said) is None


def test_folders_have_names(tmp_path: Path) -> None:
    assert folder_of("a/b") == folder_of(Path("a/b")) == Path("a/b")
    for name, shown in (("a\0b", "'a\\x00b'"), ("a\ud800b", "'a\\ud800b'")):
        with pytest.raises(UserError) as caught:
            folder_of(name)
        assert (caught.value.what, caught.value.where) == (f"{shown} is not the name of a directory", "out")
        assert caught.value.remedy == "another name"


# -- a directory that says it in a note ------------------------------------------------------------------------------


def test_a_note_says_whose_it_is_and_how_good(tmp_path: Path) -> None:
    note(tmp_path, VERSION)
    text = (tmp_path / NOTE).read_bytes()
    said = {"schema": "flowcheck/fetched/1", **SAID, "status": "verified", "unproven": ["one"]}
    assert text == json.dumps(said, indent=1).encode() + b"\n"
    check_noted(tmp_path, RUN)
    for other in OTHERS:
        assert refused(check_noted, tmp_path, other) == f"is {RUN}"


@pytest.mark.parametrize("text", [
    b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000, json.dumps(SAID).encode(),
    json.dumps(SAID | {"schema": "another/1"}).encode(), json.dumps({"schema": "flowcheck/fetched/1"}).encode(),
])
def test_a_note_that_is_none(tmp_path: Path, text: bytes) -> None:
    (tmp_path / NOTE).write_bytes(text)
    assert refused(check_noted, tmp_path) == UNKNOWN


def test_of_a_note_no_more_is_read_than_one_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note(tmp_path, VERSION)
    size = (tmp_path / NOTE).stat().st_size
    monkeypatch.setattr(module, "NOTE_BYTES", size)
    check_noted(tmp_path, RUN)
    monkeypatch.setattr(module, "NOTE_BYTES", size - 2)
    assert refused(check_noted, tmp_path) == UNKNOWN


def test_a_note_that_cannot_be_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note(tmp_path, VERSION)

    def denied(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", denied)
    assert refused(check_noted, tmp_path) == UNKNOWN


# -- a directory and a file of their own -----------------------------------------------------------------------------


def step_of(folder: Path) -> Path:
    return write_step(folder, 7, {"w": torch.zeros(2)}, {}, Meta("run", 2, "verified", (), {}, "torch-cpu", "a", 1))


def test_a_checkpoint_directory_says_it_in_its_manifest(tmp_path: Path) -> None:
    path = step_of(tmp_path)
    check_directory(path, RUN)
    for other in OTHERS:
        assert refused(check_directory, path, other) == f"is {RUN}"
    (path / "manifest.json").write_text("{}")
    assert refused(check_directory, path) == UNKNOWN
    (path / "manifest.json").unlink()
    assert refused(check_directory, path) == UNKNOWN


def test_a_directory_of_the_first_schema_is_of_no_shard(tmp_path: Path) -> None:
    path = step_of(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text()) | {"schema": "flowcheck/checkpoint/1"}
    del manifest["shard"]
    (path / "manifest.json").write_text(json.dumps(seal(manifest)))
    check_directory(path, OTHERS[3])
    assert refused(check_directory, path) == f"is {OTHERS[3]}"


def test_a_file_of_torch_says_it_in_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(SAID | {"model": {"w": torch.zeros(2)}}, path)
    check_file(path, RUN)
    for other in OTHERS:
        assert refused(check_file, path, other) == f"is {RUN}"
    for odd in ([1], {"model": {}}):
        torch.save(odd, path)
        assert refused(check_file, path) == UNKNOWN
    path.write_bytes(b"no file of torch")
    assert refused(check_file, path) == UNKNOWN


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return (tmp_path / "ran").touch, ()

    torch.save(SAID | {"model": Runs()}, tmp_path / "x.pt")
    assert refused(check_file, tmp_path / "x.pt") == UNKNOWN and not (tmp_path / "ran").exists()


# -- what is something else ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [check_directory, check_noted, check_file])
def test_what_is_not_there_is_nobodys(tmp_path: Path, check: Check) -> None:
    check(tmp_path / "none", RUN)


@pytest.mark.parametrize("check", [check_directory, check_noted, check_file])
def test_a_link_is_left_alone_wherever_it_leads(tmp_path: Path, check: Check) -> None:
    real = step_of(tmp_path / "real")
    note(real, VERSION)
    torch.save(SAID, tmp_path / "x.pt")
    for number, target in enumerate((real, tmp_path / "x.pt", tmp_path / "nowhere")):
        link = tmp_path / f"link {number}"
        link.symlink_to(target)
        assert refused(check, link) == "is a link"


def test_one_form_is_not_another(tmp_path: Path) -> None:
    path = step_of(tmp_path)
    torch.save(SAID, tmp_path / "x.pt")
    for check, other in ((check_noted, path), (check_file, path), (check_directory, tmp_path / "x.pt"),
                         (check_noted, tmp_path / "x.pt")):
        assert refused(check, other) == UNKNOWN
