"""Checkpoints: what is written is what is read; half a one never exists, whatever is killed or fails when."""
import errno
import hashlib
import json
import os
import pickle
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from flowcheck.checkpoint.directory import Meta, load_init, load_step, tensor_sha256, write_step
from flowcheck.errors import EnvironmentProblem, FlowcheckError, UserError
from flowcheck.job.model import ModelEntry
from updater.optimizers import OptimizerSpec
from updater.replica import Replica
from updater.rounding_modes import RoundingMode

from ...forks import fork

PARAMETERS = {
    "z.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7,
    "mask": torch.tensor([True, False, True]),
    "half": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "nothing": torch.empty(0, 4),
}
STATE = {
    "z.weight": {"step": torch.tensor(3.0), "exp_avg": torch.full((2, 3), 0.1), "flag": 2},
    "half": {"momentum_buffer": torch.zeros(2, dtype=torch.bfloat16), "scale": 0.1},
}
META = Meta(run_id="run", epoch=2, optimizer={"name": "adam", "groups": []}, unproven=("icrc off",))


def same(a, b):
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def test_what_is_written_is_what_is_read(tmp_path):
    path = write_step(tmp_path / "a" / "out", 20, PARAMETERS, STATE, META)
    assert path == tmp_path / "a" / "out" / "step-000020"
    assert sorted(p.name for p in path.parent.iterdir()) == ["step-000020"]
    loaded = load_step(path)
    same(loaded.parameters, PARAMETERS)
    assert loaded.step == 20
    assert loaded.optimizer_state["z.weight"]["flag"].dtype == torch.int64
    assert loaded.optimizer_state["half"]["scale"].item() == 0.1
    assert torch.equal(loaded.optimizer_state["z.weight"]["exp_avg"], STATE["z.weight"]["exp_avg"])
    assert loaded.manifest["unproven"] == ["icrc off"] and loaded.manifest["status"] == "unverified"


def test_the_library_reads_it_and_the_hashes_are_those_of_the_bytes(tmp_path):
    path = write_step(tmp_path, 1, PARAMETERS, STATE, META)
    theirs = load_file(path / "model.safetensors")
    for name, tensor in PARAMETERS.items():
        assert torch.equal(theirs[name], tensor) and theirs[name].dtype == tensor.dtype
    flat = load_file(path / "optimizer.safetensors")
    assert set(flat) == {"state.z.weight.step", "state.z.weight.exp_avg", "state.z.weight.flag",
                         "state.half.momentum_buffer", "state.half.scale"}
    manifest = json.loads((path / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        data = (path / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["bytes"], entry["sha256"])
    weight = manifest["files"]["model.safetensors"]["tensors"]["z.weight"]
    digest = hashlib.sha256(PARAMETERS["z.weight"].numpy().tobytes()).hexdigest()
    assert weight == {"dtype": "float32", "shape": [2, 3], "sha256": digest}
    assert tensor_sha256(PARAMETERS["z.weight"].T.contiguous().T) == digest


def test_a_step_directory_resumes_a_replica_and_a_torch_optimizer(tmp_path):
    """The recipe of docs/reference/checkpoint.md, taken from there."""
    weight = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.arange(5.0)
    optimizer.step()
    spec = OptimizerSpec.check("adamw", [(["w"], {"lr": 0.1})])
    replica = Replica(
        {"w": weight.detach()}, spec, step=1, rounding=RoundingMode("torch-cpu"),
        optimizer_state={"w": optimizer.state[weight]},
    )
    now = replica.current
    path = write_step(tmp_path, 1, now.parameters, now.optimizer_state, Meta(optimizer=spec.to_dict()))

    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(5))
    names = {"torch": torch, "load_step": load_step, "path": path, "model": model}
    page = (Path(__file__).parents[3] / "docs" / "reference" / "checkpoint.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0], names)
    for p, o in ((weight, optimizer), (model.w, names["optimizer"])):
        p.grad = torch.ones(5)
        o.step()
    assert torch.equal(weight, model.w)


def test_an_existing_step_is_replaced_and_foreign_directories_are_left_alone(tmp_path):
    write_step(tmp_path, 1, {"w": torch.zeros(2)}, {}, META)
    path = write_step(tmp_path, 1, {"w": torch.ones(2)}, {}, META)
    assert torch.equal(load_step(path).parameters["w"], torch.ones(2))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    (tmp_path / "step-000002").mkdir()
    (tmp_path / "step-000002" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="left alone"):
        write_step(tmp_path, 2, {"w": torch.ones(2)}, {}, META)
    assert (tmp_path / "step-000002" / "thesis.txt").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="/file"):
        write_step(tmp_path / "file", 2, {"w": torch.ones(2)}, {}, META)
    with pytest.raises(UserError, match=r"'w' is torch\.complex128"):
        write_step(tmp_path, 3, {"w": torch.ones(2, dtype=torch.complex128)}, {}, META)


# -- killed or failing between any two calls ----------------------------------------------------------


class AtCall:
    """Do something instead of the n-th call of an operating system function, in the real code path.

    Functions of Python's `posix` module are seen through sys.setprofile before they run; nothing is patched.
    """

    CALLS = ("close", "fsync", "lstat", "mkdir", "open", "rename", "replace", "rmdir", "scandir", "stat",
             "unlink", "write")

    def __init__(self, n, action):
        self.n, self.action, self.seen = n, action, []

    def __call__(self, frame, event, function):
        if event == "c_call" and getattr(function, "__module__", None) == "posix":
            if function.__name__ not in self.CALLS:
                return
            self.seen.append(function.__name__)
            if len(self.seen) == self.n:
                self.action()

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *exc):
        sys.setprofile(None)


def check_directory(out, old, new):
    """Only whole steps carry a step's name; nothing that is written aside is accepted. True: the new one."""
    for path in out.iterdir():
        if path.name.startswith("step-"):
            assert path.name == "step-000001"
            continue
        assert path.name.startswith(".step-000001.partial-")
        with pytest.raises(UserError, match="not finished or was replaced"):
            load_step(path)
    if not (out / "step-000001").exists():
        assert old is None
        return False
    weight = load_step(out / "step-000001").parameters["w"]
    assert any(torch.equal(weight, w) for w in (old, new) if w is not None)
    return torch.equal(weight, new)


def killed_at(n, work, calls=AtCall):
    """Run work() in a child that kills itself at its n-th call; False when it got to the end."""
    pid = fork()
    if not pid:
        with calls(n, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            work()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


def test_what_killed_processes_left_goes_with_the_next_step(tmp_path):
    """Of any step; but nothing that is being written, here or on another machine, and nothing that is not ours."""
    dead = fork()
    if not dead:
        os._exit(0)
    os.waitpid(dead, 0)
    gone = [f".step-000001.partial-{dead}", f".step-000002.partial-{os.getpid()}", f".step-000003.partial-{1 << 70}",
            f".step-000008.partial-{dead}-01ab45ef"]
    stay = [f".step-000004.partial-{dead}", f".step-000005.partial-{os.getppid()}", ".step-000006.partial-x", "notes",
            f".holiday.partial-{dead}"]
    for name in gone + stay:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
        for path in (tmp_path / name / "model.safetensors", tmp_path / name):
            os.utime(path, (0, 0))
    (tmp_path / f".step-000009.pt.partial-{dead}").write_bytes(b"half")
    os.utime(tmp_path / f".step-000009.pt.partial-{dead}", (0, 0))
    os.utime(tmp_path / stay[0] / "model.safetensors")  # touched now: its process may be another machine's
    write_step(tmp_path, 7, {"w": torch.ones(3)}, {}, META)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*stay, "step-000007"])


@pytest.mark.parametrize("replacing", [False, True])
def test_killed_between_any_two_calls(tmp_path, replacing):
    old, new = torch.zeros(3), torch.ones(3)
    n, news = 0, []
    while not n or news[-1] is not None:
        n += 1
        out = tmp_path / str(n)
        out.mkdir()
        if replacing:
            write_step(out, 1, {"w": old}, {}, META)
        killed = killed_at(n, lambda out=out: write_step(out, 1, {"w": new}, {"w": {"step": 1.0}}, META))
        landed = check_directory(out, old if replacing else None, new)
        news.append(landed if killed else None)
        # The next run is not disturbed by what the killed one left, even if it has the same pid.
        for left in list(out.glob(".step-*")):
            left.rename(left.parent / f".step-000001.partial-{os.getpid()}")
        assert torch.equal(load_step(write_step(out, 1, {"w": new}, {}, META)).parameters["w"], new)
        assert [p.name for p in out.iterdir()] == ["step-000001"]
    assert n > 15 and {True, False} <= set(news)
    assert news[:-1] == sorted(news[:-1])  # once landed, never lost again


@pytest.mark.parametrize("replacing", [False, True])
def test_every_failing_call_is_reported_and_leaves_nothing_half(tmp_path, replacing):
    old, new = torch.zeros(3), torch.ones(3)

    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    n, outcomes = 0, set()
    while True:
        n += 1
        out = tmp_path / str(n)
        out.mkdir()
        if replacing:
            write_step(out, 1, {"w": old}, {}, META)
        call = AtCall(n, full)
        try:
            with call:
                write_step(out, 1, {"w": new}, {}, META)
        except EnvironmentProblem as problem:
            assert "No space left" in str(problem) and "remedy" in str(problem)
            outcomes.add("reported")
        else:
            outcomes.add("done")  # what failed was cleaning up, or nothing
        check_directory(out, old if replacing else None, new)
        if len(call.seen) < n:
            break
    assert n > 15 and outcomes == {"reported", "done"}


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path):
    with AtCall(0, None) as call:
        write_step(tmp_path, 1, {"w": torch.ones(3)}, {}, META)
    calls = [name for name in call.seen if name in ("open", "write", "fsync", "rename", "replace")]
    file = ["open", "write", "fsync"]
    per_file = ["open", "write", "write", "fsync"]  # header and one tensor
    assert calls[: calls.index("rename")] == [*per_file, *file, *file, "open", "fsync"]
    assert calls[calls.index("rename") + 1 :][:2] == ["open", "fsync"]


# -- reading what is wrong ----------------------------------------------------------------------------


@given(st.data())
def test_any_flipped_byte_and_any_truncation_is_refused(tmp_path_factory, data):
    path = write_step(tmp_path_factory.mktemp("out"), 1, PARAMETERS, STATE, META)
    file = path / data.draw(st.sampled_from(["model.safetensors", "optimizer.safetensors", "manifest.json"]))
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:at]
    else:
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    try:
        loaded = load_step(path)
    except UserError as error:
        assert str(path) in str(error) and "remedy" in str(error)
    else:  # only white space of the manifest can go unnoticed
        assert file.name == "manifest.json"
        same(loaded.parameters, PARAMETERS)


def test_incomplete_foreign_and_renamed_directories(tmp_path):
    path = write_step(tmp_path, 1, PARAMETERS, STATE, META)
    for name in ("model.safetensors", "optimizer.safetensors", "manifest.json"):
        copy = tmp_path / f"copy-{name}"
        shutil.copytree(path, copy)
        load_step(copy)
        (copy / name).unlink()
        with pytest.raises(UserError, match=f"{name}: cannot be read: No such file"):
            load_step(copy)
    with pytest.raises(UserError, match="cannot be read"):
        load_step(tmp_path)
    shutil.copytree(path, tmp_path / "step-000002")
    with pytest.raises(UserError, match="holds step 1"):
        load_step(tmp_path / "step-000002")
    (path / "manifest.json").write_text('{"schema": "other"}')
    with pytest.raises(UserError, match="is not a flowcheck/checkpoint/3 manifest"):
        load_step(path)
    for text in ("[1]", "[" * 100_000, "\x00"):
        (path / "manifest.json").write_text(text)
        with pytest.raises(UserError, match=r"manifest\.json"):
            load_step(path)
    body = {"schema": "flowcheck/checkpoint/1", "step": 1, "files": {"model.safetensors": 3}}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**body, "manifest_sha256": digest}))
    with pytest.raises(UserError, match="lacks a field"):
        load_step(path)


MODEL = [ModelEntry("a", [2, 3]), ModelEntry("b", [4], "bfloat16")]
GOOD = {"b": torch.ones(4, dtype=torch.bfloat16), "a": torch.rand(2, 3)}


def test_initial_weights_from_a_file_or_a_step(tmp_path):
    save_file(GOOD, tmp_path / "init.safetensors")
    loaded = load_init(tmp_path / "init.safetensors", MODEL)
    assert list(loaded.parameters) == ["a", "b"] and loaded.step == 0 and not loaded.optimizer_state
    assert torch.equal(loaded.parameters["a"], GOOD["a"])
    path = write_step(tmp_path, 9, GOOD, {"a": {"exp_avg": torch.ones(2, 3)}}, META)
    loaded = load_init(path, MODEL)
    assert list(loaded.parameters) == ["a", "b"] and loaded.step == 9
    assert torch.equal(loaded.optimizer_state["a"]["exp_avg"], torch.ones(2, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": None}, "tensor 'a' is missing"),
        ({"c": torch.ones(1)}, "tensor 'c' is not in the job's model"),
        ({"a": torch.ones(3, 2)}, r"tensor 'a' has shape \[3, 2\], not \[2, 3\]"),
        ({"b": torch.ones(4)}, "tensor 'b' is float32, not bfloat16"),
        ({str(i): torch.ones(1) for i in range(5)}, r"\(and 2 more\)"),
    ],
)
def test_weights_of_another_model(tmp_path, change, message):
    tensors = {name: tensor for name, tensor in {**GOOD, **change}.items() if tensor is not None}
    save_file(tensors, tmp_path / "init.safetensors")
    with pytest.raises(UserError, match=message) as caught:
        load_init(tmp_path / "init.safetensors", MODEL)
    assert "init.safetensors" in str(caught.value) and "remedy" in str(caught.value)


def test_files_that_are_not_weights(tmp_path):
    file = tmp_path / "init.safetensors"
    with pytest.raises(UserError, match="cannot be read: No such file"):
        load_init(file, MODEL)
    for content, message in [
        (b"", "not a whole safetensors file"),
        (b"\xff" * 20, "not a whole safetensors file"),
        (b"\x10\0\0\0\0\0\0\0{}", "not a whole safetensors file"),
        (pickle.dumps({"a": 1}), "pickle"),
    ]:
        file.write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_init(file, MODEL)
    torch.save(GOOD, file)
    with pytest.raises(UserError, match="never read"):
        load_init(file, MODEL)


@given(st.integers(0, 10_000), st.integers(0, 7), st.booleans())
def test_damaged_weights_never_give_a_traceback(tmp_path_factory, at, bit, cut):
    file = tmp_path_factory.mktemp("init") / "init.safetensors"
    save_file(GOOD, file)
    content = bytearray(file.read_bytes())
    at %= len(content)
    if cut:
        del content[at:]
    else:
        content[at] ^= 1 << bit
    file.write_bytes(content)
    try:
        loaded = load_init(file, MODEL)
    except FlowcheckError as error:
        assert str(file) in str(error)
    else:  # the data section of a plain file has no hash
        assert not cut and {n: t.shape for n, t in loaded.parameters.items()} == {"a": (2, 3), "b": (4,)}
