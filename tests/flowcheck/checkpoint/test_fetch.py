"""A version from a node into files that stock loaders read, whole or not at all."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import flowcheck
from flowcheck.checkpoint import fetch as module
from flowcheck.checkpoint.directory import load_step
from flowcheck.cli import main
from flowcheck.control.link import MAGIC
from flowcheck.errors import EnvironmentProblem, UserError

from ..hand_api import TOKEN, HandApi, HandVersion, seal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process loads
NAMES = {"safetensors": "step-000007", "torch": "step-000007.pt", "dcp": "step-000007.dcp", "hf": "step-000007.hf"}


@pytest.fixture
def api() -> Iterator[HandApi]:
    with HandApi(HandVersion(7, status="unverified", shard="a", epoch=2)) as made:
        yield made


def fetch(api: HandApi, out: Path, format: str = "safetensors", **named: Any) -> flowcheck.Taken:
    return flowcheck.fetch(api.name, out, token=TOKEN, format=format, **{"whole": True} | named)


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of the version's shape, other values, and an optimizer that has stepped, as loaders of DCP want it."""
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(2)), "b": torch.nn.Parameter(torch.zeros(1))})
    return model, torch.optim.SGD([model["w"], model["b"]], lr=1.0, momentum=0.5)


def check(model: Any, optimizer: torch.optim.Optimizer) -> None:
    assert model["w"].tolist() == [7.5, 2.0] and model["b"].tolist() == [3.0]
    assert optimizer.state[model["w"]]["momentum_buffer"].tolist() == [1.0, 7.0]
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.1, 0.9)


@pytest.mark.parametrize(("name", "value"), [
    *[("out", value) for value in (5, None, b"x", "a\0b")], *[("nodes", value) for value in (5, None, b"h:1", [5])],
    *[("token", value) for value in (None, 5, b"x", "\ud800" * 20, "\udfff" * 20, "")],
    *[(name, value) for name in ("run_id", "shard") for value in (5, b"x")],
    *[("step", value) for value in ("5", True, -1, 1.0)],
    *[("seconds", value) for value in (None, 0, -1.0, "5", True, 1e6 + 1, float("inf"), float("nan"))],
    *[("ca", value) for value in (5, "a\0b")], *[("format", value) for value in (5, None, "zip")],
])
def test_arguments_that_cannot_be(tmp_path: Path, name: str, value: Any) -> None:
    named = {"nodes": "h:1", "out": tmp_path, "token": TOKEN} | {name: value}
    with pytest.raises(UserError) as caught:
        flowcheck.fetch(**named)
    assert caught.value.where == name and caught.value.remedy and not list(tmp_path.iterdir())


@pytest.mark.parametrize("named", [
    {"seconds": 1e-9}, {"seconds": 1}, {"seconds": module.LONGEST}, {"step": 0}, {"run_id": ""}, {"shard": ""},
    {"nodes": ["h:1"]}, {"token": "\ud7ff" * 20}, {"token": "\ue000" * 20}, {"ca": "system"}, {"ca": "a.pem"},
], ids=str)
def test_arguments_at_their_bounds_are_taken(named: dict[str, Any]) -> None:
    module._check(**{"nodes": "h:1", "token": TOKEN, "run_id": None, "shard": None, "step": None, "seconds": 1.0,
                     "ca": "", **named})


def test_what_is_said_of_it(api: HandApi, tmp_path: Path) -> None:
    taken = fetch(api, tmp_path / "new" / "out")
    assert taken.path == tmp_path / "new" / "out" / "step-000007" and taken.source == f"{api.name}, memory"
    assert (taken.step, taken.run_id, taken.epoch, taken.shard, taken.status) == (7, "run", 2, "a", "unverified")
    assert taken.unproven == taken.passed == () and taken.nbytes > 20 and taken.seconds > 0
    assert repr(taken) == (
        f"Taken(step 7 of run 'run', epoch 2, unverified, from {api.name}, memory: {taken.nbytes:,} bytes in"
        f" {taken.seconds:.2f} s; {taken.path})"
    )


def test_a_checkpoint_directory(api: HandApi, tmp_path: Path) -> None:
    taken = fetch(api, tmp_path)
    manifest = load_step(taken.path).manifest
    assert (manifest["epoch"], manifest["shard"], manifest["status"]) == (2, "a", "unverified")
    checkpoint = flowcheck.load_checkpoint(tmp_path)
    model, optimizer = made()
    model.load_state_dict(checkpoint.state_dict())
    optimizer.load_state_dict(checkpoint.optimizer_state_dict())
    check(model, optimizer)


def test_torchs_own_file(api: HandApi, tmp_path: Path) -> None:
    held = torch.load(fetch(api, tmp_path, "torch").path, weights_only=True)
    assert {key: value for key, value in held.items() if key not in ("model", "optimizer")} == {
        "step": 7, "run_id": "run", "epoch": 2, "shard": "a", "status": "unverified", "unproven": [],
    }
    model, optimizer = made()
    model.load_state_dict(held["model"])
    optimizer.load_state_dict(held["optimizer"])
    check(model, optimizer)


def test_a_directory_of_torchs_distributed_checkpoint(api: HandApi, tmp_path: Path) -> None:
    """Loaded by torch's own functions, by name: with other groups, too, b first."""
    one = HandVersion(7, state={"state.w.momentum_buffer": [1.0, 7.0], "state.b.momentum_buffer": [9.0]})
    api.versions[:] = [one]
    path = fetch(api, tmp_path, "dcp").path
    model, optimizer = made()
    other = torch.optim.SGD([model["b"], model["w"]], lr=1.0, momentum=0.5)
    for stepped in (optimizer, other):
        held, states = dcp_state.get_state_dict(model, stepped)
        both = {"model": held, "optimizer": states}
        dcp_load(both, checkpoint_id=path, no_dist=True)
        dcp_state.set_state_dict(model, stepped, model_state_dict=held, optim_state_dict=states)
        check(model, stepped)
        assert stepped.state[model["b"]]["momentum_buffer"].tolist() == [9.0]


def test_the_model_alone_as_transformers_has_it(
    api: HandApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file without an index, or shards with one: each tensor in one of them, in the model's order."""
    path = fetch(api, tmp_path, "hf").path
    assert sorted(one.name for one in path.iterdir()) == ["flowcheck.json", "model.safetensors"]
    assert json.loads((path / "flowcheck.json").read_text()) == {
        "schema": "flowcheck/fetched/1", "run_id": "run", "epoch": 2, "step": 7, "shard": "a", "status": "unverified",
        "unproven": [],
    }
    model = {"a": [1.0] * 4, "big": [2.0] * 9, "b": [3.0] * 2, "c": [4.0] * 2, "empty": []}
    api.versions[0] = HandVersion(7, model, {}, shard="a", epoch=2)
    monkeypatch.setattr(module, "SHARD_BYTES", 16)
    path = fetch(api, tmp_path, "hf").path
    files = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(one.name for one in path.iterdir()) == ["flowcheck.json", *files, "model.safetensors.index.json"]
    assert (path / "model.safetensors.index.json").read_text() == json.dumps({
        "metadata": {"total_size": 68},
        "weight_map": {"a": files[0], "big": files[1], "b": files[2], "c": files[2], "empty": files[2]},
    }, indent=2) + "\n"  # as its own, for people, too
    found = {name: load_file(path / name) for name in files}
    assert {key: one.tolist() for held in found.values() for key, one in held.items()} == model
    with safe_open(path / files[0], "pt") as opened:
        assert opened.metadata() == {"format": "pt"}  # from_pretrained refuses one that does not say it


@pytest.mark.parametrize("most", [10**9, 100])
def test_transformers_reads_it(
    api: HandApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.utils.logging.disable_progress_bar()  # it has a thread that stays
    config = transformers.GPT2Config(vocab_size=5, n_positions=4, n_embd=4, n_layer=1, n_head=2)
    given = transformers.GPT2LMHeadModel(config)
    take = module.take
    monkeypatch.setattr(module, "take", lambda *asked: replace(take(*asked), model=given.state_dict()))
    monkeypatch.setattr(module, "SHARD_BYTES", most)
    path = fetch(api, tmp_path, "hf").path
    config.save_pretrained(path)
    loaded, about = transformers.GPT2LMHeadModel.from_pretrained(path, output_loading_info=True)
    assert not about["missing_keys"] and not about["mismatched_keys"] and len(list(path.iterdir())) > 1
    for name, tensor in given.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


@pytest.mark.parametrize("format", NAMES)
def test_what_is_there_is_replaced(api: HandApi, tmp_path: Path, format: str) -> None:
    fetch(api, tmp_path, format)
    api.versions[0] = HandVersion(7, {"w": [0.25]}, {}, shard="a", epoch=2)
    path = fetch(api, tmp_path, format).path
    assert [one.name for one in tmp_path.iterdir()] == [NAMES[format]] == [path.name]
    if format == "safetensors":
        assert load_step(path).parameters["w"].tolist() == [0.25]
    elif format == "torch":
        assert torch.load(path, weights_only=True)["model"]["w"].tolist() == [0.25]
    elif format == "hf":
        assert load_file(path / "model.safetensors")["w"].tolist() == [0.25]
    else:
        into = {"model": {"w": torch.zeros(1)}}
        dcp_load(into, checkpoint_id=path, no_dist=True)
        assert into["model"]["w"].tolist() == [0.25]


OTHERS = {
    "shard": (HandVersion(7, {"w": [0.5]}, {}, shard="b", epoch=2), "step 7 of run 'run', epoch 2, shard 'b'"),
    "no shard": (HandVersion(7, {"w": [0.5]}, {}, epoch=2), "step 7 of run 'run', epoch 2"),
    "epoch": (HandVersion(7, {"w": [0.5]}, {}, shard="a", epoch=3), "step 7 of run 'run', epoch 3, shard 'a'"),
    "run": (HandVersion(7, {"w": [0.5]}, {}, shard="a", epoch=2, run_id="x"), "step 7 of run 'x', epoch 2, shard 'a'"),
}


def content(folder: Path) -> dict[Path, bytes]:
    return {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()}


@pytest.mark.parametrize("format", NAMES)
@pytest.mark.parametrize("other", OTHERS)
def test_another_version_of_the_same_step_stays(api: HandApi, tmp_path: Path, format: str, other: str) -> None:
    path = fetch(api, tmp_path, format).path
    before = content(tmp_path)
    api.versions[0], named = OTHERS[other]
    with pytest.raises(UserError) as caught:
        fetch(api, tmp_path, format)
    assert caught.value.what == f"is step 7 of run 'run', epoch 2, shard 'a', and not {named}; it is left alone"
    assert caught.value.where == str(path)
    assert caught.value.remedy == "move it away, or use another directory"
    assert content(tmp_path) == before and [one.name for one in tmp_path.iterdir()] == [NAMES[format]]
    assert fetch(api, tmp_path / "another", format).path.exists()


@pytest.mark.parametrize("format", NAMES)
def test_another_version_that_came_while_it_was_written_stays(
    api: HandApi, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that fetch of two runs into one directory at a time."""
    api.versions += [OTHERS["run"][0]]
    checks = {"safetensors": "check_directory", "torch": "check_file", "dcp": "check_noted", "hf": "check_noted"}
    real, asked = getattr(module, checks[format]), []

    def first(path: Path, wanted: Any) -> None:
        real(path, wanted)
        asked.append(path)
        if len(asked) == 1:  # nothing was there; now it is
            monkeypatch.setattr(module, checks[format], real)
            fetch(api, tmp_path, format, run_id="x")

    monkeypatch.setattr(module, checks[format], first)
    with pytest.raises(UserError, match=r"run 'x', .*, and not .* run 'run', .*; it is left alone"):
        fetch(api, tmp_path, format, run_id="run")
    assert [one.name for one in tmp_path.iterdir()] == [NAMES[format]]
    fetch(api, tmp_path, format, run_id="x")


@pytest.mark.parametrize("format", ["dcp", "hf"])
@pytest.mark.parametrize("shards", [["shard0"], ["pp0.shard1"], ["", "b"]], ids=" ".join)
def test_a_part_of_a_model_does_not_pass_for_a_whole_one(
    api: HandApi, tmp_path: Path, format: str, shards: list[str]
) -> None:
    """One of HSDP's shards: its tensors are slices, which from_pretrained would take for the model's."""
    api.versions[:] = [HandVersion(7, shard=shard) for shard in shards]
    with pytest.raises(UserError) as caught:
        fetch(api, tmp_path, format, shard=shards[0], whole=False)
    assert repr(shards[0]) in caught.value.what and "whole=True" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []
    for own in ("safetensors", "torch"):  # which say whose they are
        assert fetch(api, tmp_path, own, shard=shards[0], whole=False).path.exists()
    api.versions[:] = [HandVersion(7)]  # a job of one group that has no name
    assert fetch(api, tmp_path / "other", format, whole=False).path.exists()


def test_a_wrong_token_is_what_to_change(api: HandApi, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        flowcheck.fetch(api.name, tmp_path, token=TOKEN[::-1])
    assert "--token-file" in caught.value.remedy


def test_the_command_gives_one_json_document(
    api: HandApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    words = ["fetch", api.name, "--out", str(tmp_path / "out"), "--token-file", str(tmp_path / "token"), "--json"]
    monkeypatch.setattr(sys, "argv", ["flowcheck", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    said = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0 and said["schema"] == "flowcheck-fetch/1"
    assert (said["path"], said["step"], said["shard"]) == (str(tmp_path / "out" / "step-000007"), 7, "a")
    page = (Path(__file__).parents[3] / "docs/use/recover.md").read_text()
    assert all(f"`{key}`" in page for key in said)


@pytest.mark.parametrize("when", [1, 2], ids=["before anything is written", "before it has its name"])
@pytest.mark.parametrize("format", NAMES)
def test_several_that_fetch_one_version_at_a_time_all_have_it(
    api: HandApi, tmp_path: Path, format: str, when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads, or processes of two machines that have one number, as first processes of containers do."""
    checks = {"safetensors": "check_directory", "torch": "check_file", "dcp": "check_noted", "hf": "check_noted"}
    real, asked = getattr(module, checks[format]), []

    def another(path: Path, wanted: Any) -> None:
        real(path, wanted)
        asked.append(path)
        if len(asked) == when:
            monkeypatch.setattr(module, checks[format], real)
            fetch(api, tmp_path, format)

    monkeypatch.setattr(module, checks[format], another)
    first = fetch(api, tmp_path, format).path
    assert [one.name for one in tmp_path.iterdir()] == [NAMES[format]] == [first.name] and asked
    real(first, module.Identity("run", 2, 7, "a"))
    files = {one.name for one in first.iterdir()} if first.is_dir() else set()
    assert files == {
        "safetensors": {"manifest.json", "model.safetensors", "optimizer.safetensors"}, "torch": set(),
        "dcp": {".metadata", "__0_0.distcp", "flowcheck.json"}, "hf": {"model.safetensors", "flowcheck.json"},
    }[format]


def mine(path: Path) -> None:
    path.mkdir()
    (path / "mine").touch()


def alike(path: Path) -> None:
    """Has the files that a checkpoint has, in the forms of others: nothing says whose it is."""
    mine(path)
    for name in ("manifest.json", ".metadata", "model.safetensors", "flowcheck.json"):
        (path / name).write_text('{"run_id": "run", "epoch": 2, "step": 7, "shard": "a"}')


def of_torch(path: Path) -> None:
    """As a script saves its own, without a shard."""
    torch.save({"step": 7, "run_id": "run", "epoch": 2, "model": {}}, path)


def linked(path: Path) -> None:
    (path.parent / "else").mkdir()
    path.symlink_to("else")


@pytest.mark.parametrize("format", NAMES)
@pytest.mark.parametrize("there", [
    mine, alike, of_torch, linked, os.mkfifo, lambda path: path.write_text("x"),
    lambda path: path.symlink_to("nowhere"),
], ids=["directory", "alike", "torch", "link", "fifo", "file", "dangling"])
def test_what_is_somebody_elses_stays(
    api: HandApi, tmp_path: Path, format: str, there: Callable[[Path], Any]
) -> None:
    other = tmp_path / NAMES[format]
    there(other)
    before = {one: (one.lstat().st_ino, one.lstat().st_mode, one.lstat().st_size) for one in tmp_path.rglob("*")}
    with pytest.raises(UserError, match="it is left alone") as caught:
        fetch(api, tmp_path, format)
    assert caught.value.where == str(other)
    after = {one: (one.lstat().st_ino, one.lstat().st_mode, one.lstat().st_size) for one in tmp_path.rglob("*")}
    assert after == before


@pytest.mark.parametrize("format", NAMES)
def test_a_link_to_the_same_version_stays(api: HandApi, tmp_path: Path, format: str) -> None:
    real = fetch(api, tmp_path / "else", format).path
    (tmp_path / NAMES[format]).symlink_to(real)
    with pytest.raises(UserError, match="is a link, and not step 7 of run 'run', epoch 2, shard 'a'"):
        fetch(api, tmp_path, format)
    assert (tmp_path / NAMES[format]).is_symlink() and real.exists()
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(["else", NAMES[format]])


def test_a_checkpoint_of_the_first_schema_has_no_shard(api: HandApi, tmp_path: Path) -> None:
    """It is the same version where the job has none, and never that of a shard."""
    api.versions[0] = HandVersion(7, epoch=2)
    path = fetch(api, tmp_path).path
    manifest = json.loads((path / "manifest.json").read_text()) | {"schema": "flowcheck/checkpoint/1"}
    del manifest["shard"]
    (path / "manifest.json").write_text(json.dumps(seal(manifest)))
    api.versions[:] = [HandVersion(7, epoch=2, shard="a")]
    with pytest.raises(UserError, match=r"is step 7 of run 'run', epoch 2, and not .*; it is left alone"):
        fetch(api, tmp_path)
    api.versions[:] = [HandVersion(7, epoch=2)]
    fetch(api, tmp_path)
    assert load_step(path).manifest["schema"] == "flowcheck/checkpoint/3"


@pytest.mark.parametrize("out", ["a\0b", "a\ud800b"])
def test_a_directory_that_cannot_have_its_name(api: HandApi, out: str) -> None:
    with pytest.raises(UserError, match="is not the name of a directory") as caught:
        fetch(api, Path(out))
    assert caught.value.where == "out" and api.asked == []


@pytest.mark.parametrize("format", NAMES)
def test_what_cannot_be_written_leaves_nothing(api: HandApi, tmp_path: Path, format: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        fetch(api, tmp_path / "file", format)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_a_disk_that_is_full_leaves_the_old_one(
    api: HandApi, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch(api, tmp_path, format).path
    before = {one: one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()}

    def full(*given: Any, **named: Any) -> None:
        for one in given:
            if isinstance(one, io.IOBase):
                one.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(module, "save", full)
    with pytest.raises(EnvironmentProblem, match="No space left") as caught:
        fetch(api, tmp_path, format)
    assert caught.value.where == str(path)
    assert {one: one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()} == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("elements", [7_500, 10_000, 15_500, 40_000])
@pytest.mark.parametrize("format", NAMES)
def test_a_disk_that_is_too_small_has_nothing_of_it(
    api: HandApi, small_disk: Path, format: str, elements: int
) -> None:
    """The end of the disk comes in the tensors, and in what torch's writers put after them."""
    values = [1.0] * elements
    state = {"state.w.momentum_buffer": values if format != "hf" else [1.0]}
    api.versions[0] = HandVersion(7, {"w": values * (2 if format == "hf" else 1)}, state)
    (small_disk / "other").write_bytes(bytes(8192))
    with pytest.raises(EnvironmentProblem) as caught:
        fetch(api, small_disk, format)
    assert caught.value.what == "cannot be written: No space left on device"
    assert caught.value.where == str(small_disk / NAMES[format])
    assert [one.name for one in small_disk.iterdir()] == ["other"]


def test_an_error_of_torchs_writer_that_no_disk_is_behind_stays_ours(
    api: HandApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        fetch(api, tmp_path, "torch")
    assert list(tmp_path.iterdir()) == []


def test_a_step_and_a_run_that_are_asked_for(api: HandApi, tmp_path: Path) -> None:
    api.versions += [HandVersion(6, shard="a", epoch=2), HandVersion(5, run_id="x"), HandVersion(9, shard="b")]
    assert fetch(api, tmp_path, run_id="run", shard="a", step=6).step == 6
    assert fetch(api, tmp_path, run_id="run", shard="b").step == 9
    assert fetch(api, tmp_path, run_id="x").step == 5
    with pytest.raises(UserError, match="the nodes have several"):
        fetch(api, tmp_path)
    with pytest.raises(EnvironmentProblem, match="step 8 is not there") as caught:
        fetch(api, tmp_path, run_id="x", step=8)
    assert caught.value.where == api.name


def test_a_command_names_its_own_options(
    api: HandApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api.versions.append(HandVersion(5, run_id="x"))
    (tmp_path / "token").write_text(TOKEN)
    words = ["flowcheck", "fetch", api.name, "--out", str(tmp_path), "--token-file", str(tmp_path / "token")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "--run-id: the nodes have several" in said and "remedy: say --run-id\n" in said


def test_an_older_version_where_the_newest_is_bad(api: HandApi, tmp_path: Path) -> None:
    api.versions[0].files["optimizer.safetensors"] = b""
    with pytest.raises(EnvironmentProblem, match="none of the versions that were found is good: step 7 of epoch 2"):
        fetch(api, tmp_path)
    api.versions.append(HandVersion(6, shard="a", epoch=2))
    taken = fetch(api, tmp_path)
    assert taken.step == 6 and len(taken.passed) == 1 and taken.passed[0].startswith("step 7 of epoch 2 could be had")


def test_there_is_nothing(api: HandApi, tmp_path: Path) -> None:
    api.versions.clear()
    with pytest.raises(EnvironmentProblem, match="there is no version\n"):
        fetch(api, tmp_path)
    api.answers["/v1/versions"] = 503, b'{"why": "busy"}'
    with pytest.raises(EnvironmentProblem, match=f"there is no version: {api.name}: refused: busy"):
        fetch(api, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nobody_answers(tmp_path: Path) -> None:
    """That there is no version cannot be said then."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(EnvironmentProblem, match=f"nobody answered: {address}: connection lost: Connection ref"):
            flowcheck.fetch(address, tmp_path, token=TOKEN)


def test_the_control_port_is_not_the_api(tmp_path: Path) -> None:
    """As a node's control port opens each connection (protocol.py)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(MAGIC + bytes(60))

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with pytest.raises(EnvironmentProblem, match=r"nobody answered: .*control port.*api\.listen") as raised:
                flowcheck.fetch(f"127.0.0.1:{listener.getsockname()[1]}", tmp_path, token=TOKEN)
            assert "FCR1" not in str(raised.value)
        finally:
            thread.join()


def test_formats_that_do_not_exist(api: HandApi, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'pt' is none of safetensors, torch, dcp, hf") as caught:
        fetch(api, tmp_path, "pt")
    assert caught.value.where == "format" and api.asked == []


def test_the_command(api: HandApi, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from flowcheck.cli import app

    (tmp_path / "token").write_text(f"{TOKEN}\n")
    api.versions.append(HandVersion(6, shard="a", epoch=2))
    api.versions[0].files["model.safetensors"] = b""
    words = ["fetch", api.name, "--out", str(tmp_path / "out"), "--token-file", str(tmp_path / "token"), "--format",
             "torch", "--run-id", "run", "--shard", "a"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Taken(step 6 of run 'run'") and "not taken: step 7" in done.stderr
    assert (tmp_path / "out" / "step-000006.pt").is_file()
    assert CliRunner().invoke(app, [*words, "--step", "6"]).exit_code == 0


def test_a_file_of_a_token_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flowcheck.cli import main

    (tmp_path / "binary").write_bytes(b"\xff\xfe" * 20)
    monkeypatch.chdir(tmp_path)
    for name, status, why in (
        ("binary", 3, "binary: is empty or no text\n"),
        ("none", 2, "none: No such file or directory\n"),
        ("/dev/zero", 2, "/dev/zero: has more than"),
    ):
        monkeypatch.setattr("sys.argv", ["flowcheck", "fetch", "127.0.0.1:1", "--out", "out", "--token-file", name])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr().err
        assert ended.value.code == status and said.startswith(f"flowcheck: error: {why}"), said
        assert said.endswith("\n") and "Traceback" not in said
    assert [one.name for one in tmp_path.iterdir()] == ["binary"]
