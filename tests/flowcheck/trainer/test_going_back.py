"""What `load` takes where a log does not make what the trainer had: an older base, or the newest step that was verified
on the way; never anything else. Real optimizers, and of a node all that keeps and serves a log."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flowcheck
from flowcheck.control.checksum import checksum, checksums
from flowcheck.control.user_state import pack
from flowcheck.control.version import seal
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node.versions.journal.log_bases import whole_bases
from flowcheck.node.versions.journal.log_folder import log_folder, users_of
from flowcheck.node.versions.user_states import UserStates
from flowcheck.trainer.log.base import BasePiece
from flowcheck.trainer.log.codec import packed, unpacked
from lab.optimizers import OrthogonalMomentum

from ..node.log_scene import TOKEN, LoggedJob

MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nadam": lambda held: torch.optim.NAdam(held, lr=0.01, weight_decay=0.1),
    "muon": lambda held: OrthogonalMomentum(held, lr=0.01),
}


def job(root: Path, name: str = "nadam", **how: Any) -> LoggedJob:
    """23 steps, checksums after each fourth, bases from about 4 and from about 14 on, and what rank 0 gave."""
    made = LoggedJob(root, MAKE[name])
    made.train(3, **how)
    made.base()
    made.train(10, **how)
    made.base()
    made.train(10, **how)
    made.settle()
    states = UserStates(print)
    for step in range(1, 24):
        states.put(users_of(made.folder.path), step, 0, pack({"scheduler": {"last_epoch": step}, "groups": [], "user": {
            "at": step}}, step=step, rank=0, ranks=1))
    states.close()
    return made


def recover(address: str, **more: Any) -> flowcheck.Recovered:
    return flowcheck.recover(address, token=TOKEN, together=False, rank=0, **more)


def alter_base(made: LoggedJob, which: int, renewed: int) -> None:
    """A bit of a tensor of its. renewed: of the sums over it, one in the next, how many are renewed."""
    folder = log_folder(made.folder.path)
    base = whole_bases(folder)[which]
    path = folder / f"base-{base.number:06d}" / "piece-00002"
    piece = unpacked(path.read_bytes(), "")
    assert isinstance(piece, BasePiece)
    data = bytearray(path.read_bytes())
    if renewed == 2:
        piece.value.tensor.view(-1)[0] += 0.5
        data = bytearray(packed(piece))
    else:
        data[-1] ^= 1
    path.write_bytes(data)
    if renewed:
        said = [[one.step, one.nbytes, one.sum] for one in base.pieces]
        said[2][2] = f"{checksum(torch.frombuffer(data, dtype=torch.uint8)):016x}"
        document = seal({"schema": "flowcheck/base/1", "number": base.number, "pieces": said})
        path.with_name("base.json").write_text(json.dumps(document))
        assert whole_bases(folder)[which] == replace(base, pieces=whole_bases(folder)[which].pieces)


def damage_entry(made: LoggedJob, number: int) -> None:
    """A bit of its gradients, where they lie on the disk."""
    for path in made.folder.ring.rglob("*"):
        data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        if (at := data.find(made.regions[number])) >= 0:
            data[at] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError("it is nowhere")


def before(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    for one in model.parameters():
        one.grad = torch.ones_like(one) if one.requires_grad else None
    return {name: one.clone() for name, one in model.state_dict().items()}


def unchanged(model: torch.nn.Module, optimizer: torch.optim.Optimizer, was: dict[str, torch.Tensor]) -> bool:
    return not optimizer.state and all(torch.equal(one, was[name]) for name, one in model.state_dict().items()) and all(
        one.grad is not None and bool((one.grad == 1).all()) for one in model.parameters() if one.requires_grad)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("renewed", [0, 1, 2])
def test_a_base_that_was_altered_is_left_for_an_older_one(tmp_path: Path, name: str, renewed: int) -> None:
    made = job(tmp_path, name)
    with made.serving() as address:
        model, optimizer = made.fresh()
        whole = recover(address)
        whole.load(model, optimizer)
        assert (whole.why, whole.status, made.differ(model, optimizer, 23)) == ("", "follows 20", [])
        alter_base(made, -1, renewed)
        model, optimizer = made.fresh()
        found = recover(address)
        found.load(model, optimizer)
    assert made.differ(model, optimizer, 23) == []
    assert (found.step, found.status, found.scheduler, bool(found.why)) == (23, "follows 20", {"last_epoch": 23}, True)
    assert found.why in str(found) and "\n" not in found.why


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("bases", [(), (-1,)])
@pytest.mark.parametrize("silently", [False, True])
def test_an_entry_that_was_altered_ends_at_the_step_that_was_verified_before(
    tmp_path: Path, name: str, bases: tuple[int, ...], silently: bool
) -> None:
    """silently: its sums were made afterwards."""
    made = job(tmp_path, name, alter=(17,) if silently else ())
    if not silently:
        damage_entry(made, 17)
    for which in bases:
        alter_base(made, which, 2)
    with made.serving() as address:
        model, optimizer = made.fresh()
        was = before(model)
        found = recover(address)
        assert found.step == 23
        found.load(model, optimizer)
        assert (found.step, found.status) == (16, "verified") and found.why in str(found) and "16" in found.why
        assert made.differ(model, optimizer, 16) == []
        assert (found.scheduler, found.user) == ({"last_epoch": 16}, {"at": 16})
        assert all(bool((one.grad == 1).all()) for one in model.parameters() if one.grad is not None)

        model, optimizer = made.fresh()
        was = before(model)
        with pytest.raises(EnvironmentProblem) as refused:  # a step that was asked for by its number, and no other
            recover(address, step=23).load(model, optimizer)
        assert unchanged(model, optimizer, was) and "16" in refused.value.remedy
        recover(address, step=16).load(model, optimizer)
        assert made.differ(model, optimizer, 16) == []


def test_where_nothing_was_verified_nothing_is_loaded(tmp_path: Path) -> None:
    made = job(tmp_path, sums=1 << 30)
    damage_entry(made, 17)
    with made.serving() as address:
        model, optimizer = made.fresh()
        was = before(model)
        with pytest.raises(EnvironmentProblem):
            recover(address).load(model, optimizer)
        assert unchanged(model, optimizer, was)


def test_bases_that_are_all_altered_are_none(tmp_path: Path) -> None:
    made = job(tmp_path)
    for which in (0, 1):
        alter_base(made, which, 2)
    with made.serving() as address:
        model, optimizer = made.fresh()
        was = before(model)
        with pytest.raises(EnvironmentProblem):
            recover(address).load(model, optimizer)
        assert unchanged(model, optimizer, was)


def test_a_step_of_which_the_script_has_read_is_not_left_for_another(tmp_path: Path) -> None:
    """A loader that stands at 23 and a model of step 16 would go on without a word."""
    made = job(tmp_path, alter=(17,))
    with made.serving() as address:
        model, optimizer = made.fresh()
        was, found = before(model), recover(address)
        assert found.user == {"at": 23}
        with pytest.raises(UserError):
            found.load(model, optimizer)
        assert unchanged(model, optimizer, was) and (found.step, found.user) == (23, {"at": 23})


def test_steps_of_an_older_base_can_be_had(tmp_path: Path) -> None:
    made = job(tmp_path)
    with made.serving() as address:
        for step in (9, 15, 23):
            model, optimizer = made.fresh()
            recover(address, step=step).load(model, optimizer)
            assert made.differ(model, optimizer, step) == []


RANK = """
import json, os, sys
import torch, torch.distributed as dist
import flowcheck
from flowcheck.control.checksum import checksums
from tests.flowcheck.node.log_scene import TOKEN, net
rank, address, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = net()
optimizer = torch.optim.NAdam([one for one in model.parameters() if one.requires_grad], lr=0.01, weight_decay=0.1)
found = flowcheck.recover(address, token=TOKEN)
chosen = found.step
try:
    found.load(model, optimizer)
    said = [chosen, found.step, found.status, bool(found.why), checksums(model.state_dict())]
except flowcheck.FlowcheckError as error:
    said = [chosen, type(error).__name__, len(optimizer.state)]
print(json.dumps(said), flush=True)
dist.destroy_process_group()
os._exit(0)  # a thread of gloo that is still at work would abort the interpreter's own end
"""


def _ranks(addresses: list[str], store: Path) -> list[Any]:
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), address, str(store)], stdout=subprocess.PIPE)
             for rank, address in enumerate(addresses)]
    outs = [one.communicate(timeout=120)[0] for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0]
    return [json.loads(out.splitlines()[-1]) for out in outs]


def test_ranks_go_back_together(tmp_path: Path) -> None:
    """One of them reads from a node whose log is damaged, the other could have made all of it."""
    made = job(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    damage_entry(made, 17)
    other = LoggedJob.__new__(LoggedJob)
    other.root = tmp_path / "b"
    with made.serving() as first, other.serving() as second:
        said = _ranks([first, second], tmp_path / "store")
    assert said == [[23, 16, "verified", True, checksums(made.after[16][0])]] * 2
