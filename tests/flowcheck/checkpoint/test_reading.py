"""What a checkpoint's manifest says, field by field, and every reason to refuse one, each alone."""
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flowcheck import __version__
from flowcheck.checkpoint.directory import (
    Meta,
    load_init,
    load_parameters,
    load_step,
    parameters_path,
    step_path,
    tensor_sha256,
    write_parameters,
    write_step,
)
from flowcheck.checkpoint.open_replica import Replica
from flowcheck.checkpoint.state import load_checkpoint
from flowcheck.errors import UserError
from flowcheck.job.model import ModelEntry

WEIGHT = torch.tensor([[1.5, -2.0], [0.25, 3.0]])
SUM = hashlib.sha256(WEIGHT.numpy().tobytes()).hexdigest()
DAMAGED = "use another step of the same run; this one is damaged"
FOREIGN = "give a directory named step-NNNNNN that this project wrote"


def file_entry(path, tensors):
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "tensors": tensors}


def seal(manifest):
    """The manifest with the hash that its own text has."""
    body = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return {**body, "manifest_sha256": hashlib.sha256(text.encode()).hexdigest()}


def refused(call, *given):
    with pytest.raises(UserError) as caught:
        call(*given)
    return caught.value.where, caught.value.what, caught.value.remedy


# -- what is written ---------------------------------------------------------------------------------------


def test_where_steps_and_parameters_lie():
    assert step_path(Path("/out"), 20) == Path("/out/step-000020")
    assert parameters_path(Path("/out"), 1234567) == Path("/out/parameters-1234567")


def test_the_manifest_of_a_step(tmp_path):
    meta = Meta("run", 2, "verified", ("icrc off", "other"), {"name": "adam", "groups": []}, "torch-cpu", "stage1")
    path = write_step(tmp_path, 7, {"w": WEIGHT}, {"w": {"step": 3, "scale": 0.1, "on": True}}, meta)
    scalars = {
        "state.w.step": ("int64", (3).to_bytes(8, "little")),
        "state.w.scale": ("float64", b"\x9a\x99\x99\x99\x99\x99\xb9\x3f"),
        "state.w.on": ("int64", (1).to_bytes(8, "little")),
    }
    assert json.loads((path / "manifest.json").read_text()) == seal({
        "schema": "flowcheck/checkpoint/3", "run_id": "run", "epoch": 2, "step": 7, "shard": "stage1",
        "status": "verified", "unproven": ["icrc off", "other"], "optimizer": {"name": "adam", "groups": []},
        "rounding": "torch-cpu", "matches": 0,
        "written_by": {"flowcheck": __version__, "torch": str(torch.__version__)},
        "files": {
            "model.safetensors": file_entry(
                path / "model.safetensors", {"w": {"dtype": "float32", "shape": [2, 2], "sha256": SUM}}
            ),
            "optimizer.safetensors": file_entry(path / "optimizer.safetensors", {
                name: {"dtype": dtype, "shape": [], "sha256": hashlib.sha256(data).hexdigest()}
                for name, (dtype, data) in scalars.items()
            }),
        },
    })


def test_what_a_checkpoint_says_of_itself_if_nothing_is_known(tmp_path):
    manifest = load_step(write_step(tmp_path, 0, {}, {}, Meta())).manifest
    known = {key: manifest[key] for key in ("run_id", "epoch", "step", "status", "unproven", "optimizer", "rounding")}
    assert known == {"run_id": "", "epoch": 0, "step": 0, "status": "unverified", "unproven": [], "optimizer": {},
                     "rounding": ""}


@pytest.mark.parametrize(
    ("tensors", "dtype"),
    [
        ({"w": WEIGHT.bfloat16(), "b": torch.zeros(1, dtype=torch.bfloat16)}, "bfloat16"),
        ({"w": WEIGHT}, "float32"), ({"w": WEIGHT, "b": WEIGHT.half()}, "mixed"), ({}, "mixed"),
    ],
)
def test_the_manifest_of_gathered_parameters(tmp_path, tensors, dtype):
    path = write_parameters(tmp_path, 3, tensors, ["head", "mask"], Meta("run", 1, "verified", ("icrc off",)))
    assert path == tmp_path / "parameters-000003"
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "parameters.safetensors"]
    manifest = json.loads((path / "manifest.json").read_text())
    entries = manifest["files"]["parameters.safetensors"].pop("tensors")
    assert list(entries) == list(tensors)
    del manifest["manifest_sha256"], manifest["files"], manifest["written_by"]
    assert manifest == {
        "schema": "flowcheck/parameters/1", "run_id": "run", "epoch": 1, "step": 3, "kind": "parameters",
        "dtype": dtype, "absent": ["head", "mask"], "status": "verified", "unproven": ["icrc off"],
    }
    loaded = load_parameters(path)
    assert (loaded.step, loaded.optimizer_state, list(loaded.parameters)) == (3, {}, list(tensors))
    assert all(torch.equal(loaded.parameters[name], tensor) for name, tensor in tensors.items())
    assert loaded.manifest["kind"] == "parameters"


def test_names_of_parameters_may_hold_dots_and_words_of_ours(tmp_path):
    state = {"a.b.state": {"exp_avg": WEIGHT}, "state.w": {"exp_avg": WEIGHT + 1, "exp_avg_sq": WEIGHT}}
    loaded = load_step(write_step(tmp_path, 1, {}, state, Meta())).optimizer_state
    assert {name: sorted(keys) for name, keys in loaded.items()} == {
        "a.b.state": ["exp_avg"], "state.w": ["exp_avg", "exp_avg_sq"]
    }
    assert torch.equal(loaded["state.w"]["exp_avg"], WEIGHT + 1)


def test_the_sum_of_a_tensor_is_that_of_its_bytes_in_row_major_order():
    assert tensor_sha256(WEIGHT) == SUM == tensor_sha256(WEIGHT.T.contiguous().T)
    assert tensor_sha256(torch.empty(0)) == hashlib.sha256(b"").hexdigest()
    large = torch.arange((8 << 20) // 4 + 3, dtype=torch.int32)  # more than is read at a time
    assert tensor_sha256(large) == hashlib.sha256(large.numpy().tobytes()).hexdigest()


def test_a_tensor_that_no_checkpoint_holds_is_named_before_anything_is_made(tmp_path):
    odd = torch.ones(1, dtype=torch.complex128)
    where = str(tmp_path / "out" / "step-000003")
    for parameters, state, name in (({"w": odd}, {}, "w"), ({"a": WEIGHT}, {"a": {"k": odd}}, "state.a.k")):
        assert refused(write_step, tmp_path / "out", 3, parameters, state, Meta()) == (
            where, f"tensor '{name}' is torch.complex128, which no checkpoint holds", ""
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_not_a_checkpoint_of_ours_is_left_alone(tmp_path, make):
    make(tmp_path / "step-000001")
    assert refused(write_step, tmp_path, 1, {"w": WEIGHT}, {}, Meta()) == (
        str(tmp_path / "step-000001"), "exists and is not a checkpoint of this project; it is left alone",
        "move it away, or use another directory",
    )
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.fixture
def step(tmp_path):
    return write_step(tmp_path, 1, {"w": WEIGHT}, {"w": {"exp_avg": WEIGHT}}, Meta("run"))


def changed(path, change):
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(seal(manifest)))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("step"), lambda m: m.update(step="1"), lambda m: m.update(step=1.0),
        lambda m: m.pop("files"), lambda m: m.update(files=[]),
        lambda m: m["files"].pop("model.safetensors"), lambda m: m["files"].pop("optimizer.safetensors"),
        lambda m: m["files"].update({"optimizer.safetensors": []}),
        lambda m: m["files"]["model.safetensors"].pop("bytes"),
        lambda m: m["files"]["model.safetensors"].pop("sha256"),
        lambda m: m["files"]["model.safetensors"].pop("tensors"),
        lambda m: m["files"]["model.safetensors"].update(tensors=[]),
        lambda m: m["files"]["model.safetensors"]["tensors"].update(w="x sha256"),
        lambda m: m["files"]["model.safetensors"]["tensors"]["w"].pop("sha256"),
        lambda m: m["files"]["optimizer.safetensors"]["tensors"].update(other={}),
    ],
)
def test_a_field_that_every_checkpoint_has(step, change):
    changed(step, change)
    assert refused(load_step, step) == (
        str(step / "manifest.json"), "lacks a field that every checkpoint has", FOREIGN
    )


def model(manifest):
    return manifest["files"]["model.safetensors"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: model(m).update(bytes=model(m)["bytes"] + 1), "has {0} bytes, its manifest says {1}"),
        (lambda m: model(m).update(bytes=model(m)["bytes"] - 1), "has {0} bytes, its manifest says {2}"),
        (lambda m: model(m).update(sha256="0" * 64),
         "has other bytes than those written (SHA-256 does not match its manifest)"),
        (lambda m: model(m)["tensors"]["w"].update(sha256="0" * 64),
         "tensor 'w' has other bytes than those written (SHA-256 differs)"),
        (lambda m: model(m)["tensors"].update(a=model(m)["tensors"]["w"], z=model(m)["tensors"]["w"]),
         "and its manifest do not list the same tensors ('a')"),
        (lambda m: model(m)["tensors"]["w"].update(shape=[4]),
         "tensor 'w' is float32 [2, 2], its manifest says float32 [4]"),
        (lambda m: model(m)["tensors"]["w"].update(dtype="int32"),
         "tensor 'w' is float32 [2, 2], its manifest says int32 [2, 2]"),
        (lambda m: model(m)["tensors"].clear(), "and its manifest do not list the same tensors ('w')"),
    ],
)
def test_a_file_that_its_manifest_does_not_describe(step, change, what):
    size = (step / "model.safetensors").stat().st_size
    changed(step, change)
    assert refused(load_step, step) == (str(step / "model.safetensors"), what.format(size, size + 1, size - 1), DAMAGED)


def test_a_manifest_that_was_changed_after_it_was_written(step):
    text = (step / "manifest.json").read_text()
    (step / "manifest.json").write_text(text.replace('"unverified"', '"verified"'))
    hash_does_not_match = "was changed after it was written (its own hash does not match)"
    assert refused(load_step, step) == (str(step / "manifest.json"), hash_does_not_match, DAMAGED)
    manifest = json.loads(text)
    del manifest["manifest_sha256"]
    (step / "manifest.json").write_text(json.dumps(manifest))
    assert refused(load_step, step) == (str(step / "manifest.json"), hash_does_not_match, DAMAGED)


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        ("", "is not JSON", DAMAGED), ("{", "is not JSON", DAMAGED), ("[" * 100_000, "is not JSON", DAMAGED),
        ("[]", "is not a flowcheck/checkpoint/3 manifest", FOREIGN),
        ("{}", "is not a flowcheck/checkpoint/3 manifest", FOREIGN),
        ('{"schema": "flowcheck/checkpoint/4"}', "is not a flowcheck/checkpoint/3 manifest", FOREIGN),
    ],
)
def test_a_manifest_that_is_none(step, text, what, remedy):
    (step / "manifest.json").write_text(text)
    assert refused(load_step, step) == (str(step / "manifest.json"), what, remedy)


def test_a_step_of_the_schema_before_is_read(step):
    manifest = json.loads((step / "manifest.json").read_text())
    del manifest["shard"]
    (step / "manifest.json").write_text(json.dumps(seal({**manifest, "schema": "flowcheck/checkpoint/1"})))
    assert torch.equal(load_step(step).parameters["w"], WEIGHT)


def test_parameters_are_no_step_and_a_step_is_no_parameters(tmp_path, step):
    gathered = write_parameters(tmp_path, 1, {"w": WEIGHT}, [], Meta())
    alone = "holds gathered parameters alone, in compute precision, and no optimizer state"
    assert refused(load_step, gathered) == (str(gathered), alone, FOREIGN)
    assert refused(load_init, gathered, []) == (str(gathered), alone, FOREIGN)
    assert refused(load_parameters, step) == (
        str(step / "manifest.json"), "is not a flowcheck/parameters/1 manifest",
        "give a directory named parameters-NNNNNN that this project wrote",
    )


def test_a_directory_whose_name_is_of_another_step(tmp_path, step):
    for old, new in ((step, tmp_path / "step-000002"), (tmp_path / "step-000002", tmp_path / "step-10")):
        old.rename(new)
        assert refused(load_step, new) == (str(new), "holds step 1", "give the directory its own name back")
    for name in ("step-1", "best", "step-2-best", "parameters-000002"):  # other names claim nothing
        new.rename(tmp_path / name)
        new = tmp_path / name
        assert load_step(new).step == 1
    gathered = write_parameters(tmp_path, 5, {}, [], Meta())
    gathered.rename(tmp_path / "parameters-6")
    assert refused(load_parameters, tmp_path / "parameters-6")[1] == "holds step 5"


def test_what_is_written_aside_is_refused_though_it_is_whole(tmp_path, step):
    aside = step.rename(tmp_path / ".step-000001.partial-77")
    assert refused(load_step, aside) == (str(aside), "is a step that was not finished or was replaced", FOREIGN)


def test_what_cannot_be_read(tmp_path, step):
    remedy = "give an existing, readable path"
    absent = tmp_path / "step-000009"
    no_file = "cannot be read: No such file or directory"
    assert refused(load_step, absent) == (str(absent / "manifest.json"), no_file, remedy)
    assert refused(load_init, tmp_path / "a.safetensors", []) == (str(tmp_path / "a.safetensors"), no_file, remedy)
    (step / "model.safetensors").unlink()
    assert refused(load_step, step) == (str(step / "model.safetensors"), no_file, remedy)
    (step / "model.safetensors").mkdir()
    assert refused(load_step, step)[1:] == ("cannot be read: Is a directory", remedy)


# -- initial weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["fifo", "model.safetensors", "manifest.json"])
def test_a_pipe_is_not_waited_for(tmp_path, step, there):
    path = tmp_path / "fifo" if there == "fifo" else step / there
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    call = (load_init, path, []) if there == "fifo" else (load_step, step)
    assert refused(*call) == (str(path), "is no regular file", "give FILE.safetensors or a step directory")


def test_a_file_is_not_read_beyond_what_its_manifest_says(tmp_path, step):
    """It may be of any size: a terabyte without content costs its writer nothing."""
    for name, what in (("model.safetensors", f"has {1 << 40} bytes, its manifest says "),
                       ("manifest.json", f"has {1 << 40} bytes; no manifest has more than {256 << 20}")):
        os.truncate(step / name, 1 << 40)
        where, said, _ = refused(load_step, step)
        assert where == str(step / name) and said.startswith(what)


@pytest.mark.parametrize("path", [5, None, b"x", [], "a\0b", "\ud800", Path("a\0b")])
@pytest.mark.parametrize("call", [load_step, load_parameters, load_checkpoint, Replica.open, Replica.latest])
def test_what_no_file_can_be_called(call, path):
    assert " is not the name of a " in refused(call, path)[1]


@pytest.mark.parametrize("call", [load_step, load_checkpoint, Replica.open, Replica.latest])
def test_a_name_that_is_too_long(call):
    assert "File name too long" in refused(call, "x" * 5000)[1]


@pytest.mark.parametrize(
    ("start", "pickled"),
    [
        (b"PK\x03\x04", True), (b"\x80\x02", True), (b"\x80\x05", True), (b"\x80\x06", False), (b"\x7f\x02", False),
        (b"PK\x03\x05", False), (b"\x80", True),
    ],
)
def test_a_pickle_is_told_by_its_first_bytes(tmp_path, start, pickled):
    path = tmp_path / "weights"
    path.write_bytes(start + bytes(3) if len(start) > 1 else start)
    where, what, remedy = refused(load_init, path, [])
    assert where == str(path)
    if pickled:
        assert what == "is a pickle (torch.save), which can run code when it is loaded and is never read"
        assert remedy == "convert it where you trust it: safetensors.torch.save_file(torch.load(FILE), NEW)"
    else:
        assert what.startswith("is not a whole safetensors file: ") and remedy == "copy or write the file again"


def test_a_whole_file_may_begin_as_a_pickle_does(tmp_path):
    """The first eight bytes are the header's length: 0x280 of them look like the start of a pickle."""
    head = json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    data = (0x280).to_bytes(8, "little") + head.ljust(0x280) + WEIGHT.numpy().tobytes()
    assert data[:2] == b"\x80\x02"
    (tmp_path / "w.safetensors").write_bytes(data)
    loaded = load_init(tmp_path / "w.safetensors", [ModelEntry("w", [2, 2])])
    assert torch.equal(loaded.parameters["w"], WEIGHT)
    assert (loaded.step, loaded.optimizer_state, loaded.manifest) == (0, {}, {})


def test_loaded_tensors_are_ours_and_not_the_files(tmp_path):
    """A file that is written over later changes nothing."""
    file = tmp_path / "w.safetensors"
    save_file({"w": WEIGHT}, file)
    loaded = load_init(file, [ModelEntry("w", [2, 2])])
    with file.open("r+b") as opened:
        opened.seek(-16, os.SEEK_END)
        opened.write(bytes(16))
    assert torch.equal(loaded.parameters["w"], WEIGHT)
    assert not torch.equal(load_init(file, [ModelEntry("w", [2, 2])]).parameters["w"], WEIGHT)


def test_a_step_as_initial_weights_keeps_its_state_and_manifest(step):
    loaded = load_init(step, [ModelEntry("w", [2, 2])])
    assert loaded.step == 1 and loaded.manifest["run_id"] == "run"
    assert torch.equal(loaded.optimizer_state["w"]["exp_avg"], WEIGHT)


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ([("w", [2, 2], "float32"), ("b", [1], "float32")], "tensor 'b' is missing"),
        ([("w", [4], "float32")], "tensor 'w' has shape [2, 2], not [4]"),
        ([("w", [2, 2], "bfloat16")], "tensor 'w' is float32, not bfloat16"),
        ([], "tensor 'w' is not in the job's model"),
        ([("a", [1], "float32"), ("b", [1], "float32"), ("w", [2, 2], "float16")],
         "tensor 'a' is missing; tensor 'b' is missing; tensor 'w' is float32, not float16"),
        ([("a", [1], "float32"), ("b", [1], "float32"), ("w", [1], "float32"), ("z", [1], "float32")],
         "tensor 'a' is missing; tensor 'b' is missing; tensor 'w' has shape [2, 2], not [1] (and 1 more)"),
    ],
)
def test_what_differs_from_the_jobs_model_is_said_three_times_at_most(tmp_path, entries, what):
    save_file({"w": WEIGHT}, tmp_path / "w.safetensors")
    assert refused(load_init, tmp_path / "w.safetensors", [ModelEntry(*entry) for entry in entries]) == (
        str(tmp_path / "w.safetensors"), f"does not hold the job's model: {what}",
        "give the weights this job started from, or correct `model` in the job manifest",
    )


def test_an_element_type_that_no_manifest_can_name(tmp_path):
    save_file({"w": torch.zeros(2, dtype=torch.float8_e4m3fn)}, tmp_path / "w.safetensors")
    assert "tensor 'w' is float8_e4m3fn, not float32" in refused(
        load_init, tmp_path / "w.safetensors", [ModelEntry("w", [2])]
    )[1]
