"""A replica file as one version that is open: which file is found, what its calls give, and when the pin ends."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.checkpoint.open_replica import Replica
from flowcheck.errors import UserError
from flowcheck.job.model import BucketSlice
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.replica import Replica as Writer
from updater.rounding_modes import RoundingMode

WHOLE = Layout([[BucketSlice("w", 0, 4)]], {"w": (2, 2)}, [4])


def _writer(path: Path, step: int = 0, **about: Any) -> Writer:
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 0.5, "momentum": 0.9})])
    return Writer(
        {"w": torch.full((2, 2), 8.0), "count": torch.arange(2)}, spec, path=path, step=step,
        rounding=RoundingMode("torch-cuda-foreach", "2.13.0"),
        optimizer_state={"w": {"momentum_buffer": torch.ones(2, 2)}} if step else None, **about,
    )


def _advance(made: Writer) -> None:
    slot = made.build(made.current.step + 1, WHOLE)
    slot.apply(0, torch.full((4,), 2.0))
    made.publish(slot)


def test_a_version_as_torch_takes_it(shm: Path) -> None:
    made = _writer(shm / "flowcheck-n-g-1.replica", step=5, run_id="run", epoch=3)
    with Replica.open(shm / "flowcheck-n-g-1.replica") as replica:
        assert (replica.step, replica.run_id, replica.epoch, replica.verified) == (5, "run", 3, None)
        assert replica.path == shm / "flowcheck-n-g-1.replica"
        state = replica.state_dict()
        assert list(state) == ["w", "count"] and state["w"].tolist() == [[8.0, 8.0], [8.0, 8.0]]
        state["w"].zero_()  # a copy: the file is not written
        assert replica.state_dict()["w"].tolist() == [[8.0, 8.0], [8.0, 8.0]]
        held = replica.optimizer_state_dict()
        assert held["state"][0]["momentum_buffer"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
        held["state"][0]["momentum_buffer"].zero_()
        assert replica.optimizer_state_dict()["state"][0]["momentum_buffer"].sum() == 4
        assert held["param_groups"][0]["momentum"] == 0.9
        said = "epoch 3, unverified, no checksum compared"
        assert repr(replica) == f"Replica(step 5 of run 'run', {said}; {replica.path})"
    made.close()


def test_a_version_stays_while_it_is_open_and_no_longer(shm: Path) -> None:
    path = shm / "flowcheck-n-g-1.replica"
    made = _writer(path)
    replica = Replica.open(path, 0)
    for _ in range(6):
        _advance(made)
    assert replica.step == 0 and replica.state_dict()["w"].tolist() == [[8.0, 8.0], [8.0, 8.0]]
    assert Replica.open(path).step == 6 and 0 in made.steps
    replica.close()
    replica.close()
    for call in (replica.state_dict, replica.optimizer_state_dict):
        with pytest.raises(UserError) as refused:
            call()
        assert (refused.value.what, refused.value.where) == ("is closed", str(path))
    for _ in range(4):
        _advance(made)
    with pytest.raises(UserError, match="no complete version 0; there is") as gone:
        Replica.open(path, 0)
    assert gone.value.where == str(path) and gone.value.what.startswith("no complete version")
    made.close()


def test_one_that_is_forgotten_lets_go_of_its_version(shm: Path) -> None:
    path = shm / "flowcheck-n-g-1.replica"
    made = _writer(path)
    Replica.open(path)
    gc.collect()
    for _ in range(5):
        _advance(made)
    assert 0 not in made.steps
    made.close()


@pytest.mark.parametrize("again", [False, True])
def test_one_that_its_node_removes_is_read_no_more(shm: Path, again: bool) -> None:
    """Because it is wrong, perhaps. Another file that has its name since then is not the one that is open."""
    path = shm / "flowcheck-n-g-1.replica"
    made = [_writer(path, step=5)]
    with Replica.open(path) as replica:
        replica.state_dict(), replica.optimizer_state_dict()
        path.unlink()
        if again:
            made.append(_writer(path, step=6))
        for call in (replica.state_dict, replica.optimizer_state_dict):
            with pytest.raises(UserError, match="was removed since it was opened") as refused:
                call()
            assert refused.value.where == str(path) and refused.value.remedy
    for one in made:
        one.close()


def test_one_that_is_removed_while_it_is_copied_is_not_given(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [_writer(shm / f"flowcheck-n-g-{number}.replica", step=5) for number in (1, 2)]
    clone = torch.Tensor.clone
    for number, name in enumerate(("state_dict", "optimizer_state_dict"), 1):
        path = shm / f"flowcheck-n-g-{number}.replica"
        with Replica.open(path) as replica, monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "clone", lambda one, path=path: (path.unlink(missing_ok=True), clone(one))[1])
            with pytest.raises(UserError, match="was removed since it was opened"):
                getattr(replica, name)()
    for one in made:
        one.close()


def test_another_working_directory_is_no_removal(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _writer(shm / "flowcheck-n-g-1.replica")
    monkeypatch.chdir(shm)
    with Replica.latest(".") as replica:
        monkeypatch.chdir("/")
        assert replica.state_dict()["w"].tolist() == [[8.0, 8.0], [8.0, 8.0]]
    made.close()


def test_verified_is_said(shm: Path) -> None:
    path = shm / "flowcheck-n-g-1.replica"
    made = _writer(path)
    _advance(made)
    made.mark_verified()
    with Replica.open(path) as replica:
        assert replica.verified == 1 and replica.status == "verified"
        assert ", verified, verified up to step 1; " in repr(replica)
        _advance(made)
        with Replica.open(path) as newest:
            assert (newest.step, newest.status) == (2, "unverified") and newest.state_dict()
            made.withdraw()
            with pytest.raises(UserError, match="found it to be wrong"):
                newest.state_dict()
        assert replica.state_dict(), "what was verified stays"
    made.close()


def test_what_is_not_a_replica_is_refused(shm: Path) -> None:
    (shm / "text").write_text("no replica")
    for name, what in (("text", "not a replica that can be used"), ("absent", "cannot be opened: No such file")):
        with pytest.raises(UserError) as refused:
            Replica.open(str(shm / name))
        assert refused.value.what.startswith(what) and refused.value.where == str(shm / name)
        assert refused.value.remedy.startswith("give a file *.replica of a node")


# -- which file ----------------------------------------------------------------------------------------------


def test_the_file_that_was_begun_last(shm: Path) -> None:
    """By its number and not by its letters. What has another name is left alone."""
    made = [_writer(shm / f"flowcheck-node-a-{number}.replica", step=number) for number in (2, 9, 10)]
    (shm / "flowcheck-node-a-11.replica.partial").write_bytes(b"")
    (shm / "flowcheck-node-a-x12.replica").write_bytes(b"")
    with Replica.latest(shm) as replica:
        assert replica.step == 10
    with Replica.latest(str(shm), node="node", group="a") as replica:
        assert replica.step == 10
    for one in made:
        one.close()


def test_a_newer_file_without_a_version_of_the_run_is_passed_over(shm: Path) -> None:
    made = [
        _writer(shm / "flowcheck-n-g-1.replica", step=1, run_id="a", epoch=0),
        _writer(shm / "flowcheck-n-g-2.replica", step=2, run_id="a", epoch=1),
        _writer(shm / "flowcheck-n-g-3.replica", step=3, run_id="b", epoch=1),
    ]
    (shm / "flowcheck-n-g-4.replica").write_bytes(b"torn")
    for asked, step in (({}, 3), ({"run_id": "a"}, 2), ({"epoch": 1}, 3), ({"run_id": "a", "epoch": 0}, 1)):
        with Replica.latest(shm, **asked) as replica:
            assert replica.step == step, asked
    for asked, said in (({"run_id": "c"}, " of run_id 'c'"), ({"run_id": "b", "epoch": 0}, " of run_id 'b', epoch 0"),
                        ({"group": "h"}, " of group 'h'")):
        with pytest.raises(UserError) as refused:
            Replica.latest(shm, **asked)
        assert (refused.value.what, refused.value.where) == (f"no replica with a complete version{said}", str(shm))
    for one in made:
        one.close()


def test_groups_are_told_apart(shm: Path) -> None:
    """A node may have dashes of its own, and then it is no group of the node whose name is the part before."""
    labels = {"node-1-a": 1, "node-1-b": 2, "other-b": 3, "node-": 4}
    made = [_writer(shm / f"flowcheck-{label}-1.replica", step=step) for label, step in labels.items()]
    for asked, step in (
        ({"node": "node-1", "group": "a"}, 1), ({"group": "a"}, 1), ({"node": "other"}, 3),
        ({"node": "node-1", "group": "b"}, 2), ({"node": "node"}, 4), ({"group": ""}, 4),
    ):
        with Replica.latest(shm, **asked) as replica:
            assert replica.step == step, asked
    for asked, fit in (({}, "node-, node-1-a, node-1-b, other-b"), ({"node": "node-1"}, "node-1-a, node-1-b"),
                       ({"group": "b"}, "node-1-b, other-b")):
        with pytest.raises(UserError) as refused:
            Replica.latest(shm, **asked)
        assert refused.value.what == f"replicas of several groups fit: {fit} (node-group)"
        assert refused.value.where == str(shm)
    for asked in ({"node": "nod"}, {"group": "1"}, {"node": "node-1", "group": "c"}, {"node": "node", "group": "1-a"},
                  {"group": "1-a"}, {"node": "node-1-a"}):
        with pytest.raises(UserError) as refused:
            Replica.latest(shm, **asked)
        said = ", ".join(f"{name} {value!r}" for name, value in asked.items())
        assert refused.value.what == f"no replica with a complete version of {said}"
    for one in made:
        one.close()


def test_an_empty_folder_says_where_to_look(shm: Path) -> None:
    with pytest.raises(UserError) as refused:
        Replica.latest(shm)
    assert refused.value.what == "no replica with a complete version"
    assert refused.value.remedy.startswith("check `replica.directory`")


def test_a_folder_has_a_name_that_a_file_system_can_have() -> None:
    for odd in ("a\0b", 7, b"x"):
        with pytest.raises(UserError, match="is not the name of a directory") as refused:
            Replica.latest(odd)  # type: ignore[arg-type]
        assert refused.value.where == "directory"
        with pytest.raises(UserError, match="is not the name of a file or directory") as refused:
            Replica.open(odd)  # type: ignore[arg-type]
        assert refused.value.where == "path"


def test_what_is_no_folder_has_no_replica(tmp_path: Path) -> None:
    """A pipe, say: it is looked into by no name of a file in it, and nobody waits for it."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="no replica with a complete version"):
        Replica.latest(tmp_path / "pipe")


@pytest.mark.parametrize("step", [-1, True, 1.0, "1"])
def test_a_step_is_a_whole_number(shm: Path, step: Any) -> None:
    made = _writer(shm / "flowcheck-n-g-1.replica", step=1)
    with pytest.raises(UserError, match=f"{step!r} is not a number of steps") as refused:
        Replica.open(shm / "flowcheck-n-g-1.replica", step)
    assert refused.value.where == "step" and refused.value.remedy
    made.close()


def test_one_without_an_optimizer_says_so(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _writer(shm / "flowcheck-n-g-1.replica")
    with Replica.open(shm / "flowcheck-n-g-1.replica") as replica:
        monkeypatch.setattr(type(replica._version), "optimizer", {})
        with pytest.raises(UserError, match="has no optimizer state") as refused:
            replica.optimizer_state_dict()
        assert refused.value.where == str(replica.path)
    made.close()


def test_files_that_are_passed_over_are_closed(shm: Path) -> None:
    made = [_writer(shm / f"flowcheck-n-g-{number}.replica", run_id="ab"[number % 2]) for number in range(4)]
    opened = len(os.listdir("/proc/self/fd"))
    with Replica.latest(shm, run_id="a"):
        pass
    with pytest.raises(UserError):
        Replica.open(shm / "flowcheck-n-g-1.replica", 9)
    assert len(os.listdir("/proc/self/fd")) == opened
    for one in made:
        one.close()


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Its name is too long for the file system."""
    with pytest.raises(UserError) as refused:
        Replica.latest(tmp_path / ("m" * 300))
    assert refused.value.where == str(tmp_path / ("m" * 300)) and refused.value.remedy


def test_what_the_system_says_of_a_file_is_said(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> Any:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr("flowcheck.checkpoint.open_replica.Reader", broken)
    with pytest.raises(UserError) as refused:
        Replica.open(shm / "x.replica")
    assert (refused.value.what, refused.value.where) == ("Input/output error", str(shm / "x.replica"))
