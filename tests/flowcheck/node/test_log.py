"""A job that is kept as a log: what a node has of it, and what a new process makes of that."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flowcheck
from flowcheck.ask.client import NodeClient, reader_key
from flowcheck.ask.logs import FILE
from flowcheck.ask.sources import Fetched, choose, fetch, look
from flowcheck.control.protocol import Base
from flowcheck.control.version import MODEL
from flowcheck.errors import EnvironmentProblem, FlowcheckError, UserError
from flowcheck.node.versions.journal.log_bases import Bases, whole_bases
from flowcheck.node.versions.journal.log_folder import log_folder, users_of
from flowcheck.node.versions.journal.log_shelf import LogShelf
from flowcheck.node.versions.user_states import rank_file, user_folder
from lab.optimizers import Adam8bit, Lion, OrthogonalMomentum

from ..hand_api import HandApi, HandVersion
from .log_scene import TOKEN, LoggedJob

MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nadam": partial(torch.optim.NAdam, lr=0.01, weight_decay=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "adamw-fused": partial(torch.optim.AdamW, lr=0.01, fused=True, amsgrad=True),
    "lion": partial(Lion, lr=0.01, weight_decay=0.1), "muon": partial(OrthogonalMomentum, lr=0.01),
    "adam8bit": partial(Adam8bit, lr=0.01),
}


def recover(address: str, **more: Any) -> flowcheck.Recovered:
    return flowcheck.recover(address, token=TOKEN, together=False, **more)


@pytest.mark.parametrize("name", MAKE)
def test_any_step_of_any_optimizer_is_the_trainers(tmp_path: Path, name: str) -> None:
    job = LoggedJob(tmp_path, MAKE[name])
    job.train(6)
    job.base()
    job.train(16)
    job.settle()
    with job.serving() as address:
        (offer,) = NodeClient(_split(address), reader_key(TOKEN.encode())).offers()[-1:]
        assert offer.step == 22
        steps = sorted({one.step for one in NodeClient(_split(address), reader_key(TOKEN.encode())).offers()})
        assert steps == list(range(steps[0], 23)) and 6 < steps[0] < 14
        for step in (None, steps[0], 17):
            model, optimizer = job.fresh()
            found = recover(address, step=step)
            found.load(model, optimizer)
            assert job.differ(model, optimizer, found.step) == []
        assert found.step == 17


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


@pytest.mark.parametrize(("precision", "sums", "warned"), [("highest", 4, 0), ("high", 4, 1), ("highest", 1 << 30, 1)])
def test_what_may_be_otherwise_and_what_nothing_proves_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, precision: str, sums: int, warned: int
) -> None:
    job = LoggedJob(tmp_path, MAKE["nadam"])
    job.base()
    job.train(8, sums=sums)
    job.settle()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with job.serving() as address:
            recover(address).load(*job.fresh())
    finally:
        torch.set_float32_matmul_precision(before)
    assert sum(one.levelname == "WARNING" and one.name == "flowcheck" for one in caplog.records) == warned


def test_a_step_that_a_killed_rank_gave_no_state_of_is_passed_for_one_before_it(tmp_path: Path) -> None:
    """The gradients and another rank's record of it are there."""
    job = LoggedJob(tmp_path, MAKE["lion"])
    job.train(6)
    job.base()
    job.train(16)
    job.settle()
    there = {19: [0, 1], 20: [0, 1], 21: [1], 22: [1]}
    for step, ranks in there.items():
        for rank in ranks:
            file = rank_file(user_folder(users_of(job.folder.path), step), rank)
            file.parent.mkdir(0o700, parents=True, exist_ok=True)
            file.write_bytes(b"x")
    with job.serving() as address:
        offers = NodeClient(_split(address), reader_key(TOKEN.encode())).offers()
    assert {one.step: one.with_user for one in offers if one.user} == there
    keys = [{one.key for one in offers if one.has_user(rank)} for rank in (0, 1)]
    held = [{one.key: one.status for one in offers}] * 2
    assert (choose(held, users=keys, prefer_user=10) or (0, 0))[1] == 20
    assert (choose(held) or (0, 0))[1] == 22


def test_a_second_base_goes_on_where_the_first_one_is_too_old(tmp_path: Path) -> None:
    job = LoggedJob(tmp_path, MAKE["nadam"])
    job.base()
    job.train(10)
    job.base()
    job.train(12, lose=(8, 12))  # one that is lost before the second base is whole makes that one useless
    job.base()
    job.train(8)
    job.settle()
    with job.serving() as address:
        found = recover(address)
        model, optimizer = job.fresh()
        found.load(model, optimizer)
        assert (found.step, job.differ(model, optimizer, 30)) == (30, [])
        with pytest.raises(EnvironmentProblem):
            recover(address, step=14)


def test_after_a_hole_the_steps_before_it_are_what_is_there(tmp_path: Path) -> None:
    job = LoggedJob(tmp_path, MAKE["lion"])
    job.base()
    job.train(20, lose=(15,))
    job.settle()
    with job.serving() as address:
        found = recover(address)
        model, optimizer = job.fresh()
        found.load(model, optimizer)
        assert (found.step, job.differ(model, optimizer, 15)) == (15, [])


def test_a_log_without_a_whole_base_offers_nothing(tmp_path: Path) -> None:
    job = LoggedJob(tmp_path, MAKE["lion"])
    job.train(4)
    job.settle()
    assert LogShelf(tmp_path).look() == []
    with job.serving() as address:
        assert not recover(address)


def test_a_base_that_no_iteration_follows_yet_is_a_step_of_its_own(tmp_path: Path) -> None:
    job = LoggedJob(tmp_path, MAKE["lion"], model=partial(torch.nn.Linear, 7, 5))
    job.train(4)
    job.base(steps=1)
    while not job.sender.whole:
        job.train(1)
    before = job.number
    with contextlib.closing(job.bases), job.serving() as address:
        while not whole_bases(log_folder(job.folder.path)):
            time.sleep(0.001)
        for step in (before, before + 1):
            found = recover(address)
            model, optimizer = job.fresh()
            found.load(model, optimizer)
            assert (found.step, job.differ(model, optimizer, step)) == (step, [])
            job.train(1)
            job.settle()


def _read() -> int:
    """Bytes that this thread has read."""
    return int(dict(line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines())["rchar"])


def test_a_look_costs_what_is_new(tmp_path: Path) -> None:
    job = LoggedJob(tmp_path, MAKE["nadam"])
    job.base()
    job.train(40, sums=1)
    job.settle()
    shelf, taken = LogShelf(tmp_path), []
    for _ in range(3):
        before = _read()
        (holding,) = shelf.look()
        taken.append(_read() - before)
        assert holding.offer.step == 40
    assert taken[0] - taken[2] > 40 * 4096 and taken[1] == taken[2]


def test_an_entry_that_is_damaged_later_ends_what_is_offered_once_it_was_read(tmp_path: Path) -> None:
    job = LoggedJob(tmp_path, MAKE["nadam"])
    job.base()
    job.train(20)
    job.settle()
    shelf = LogShelf(tmp_path)
    (holding,) = shelf.look()
    assert holding.offer.step == 20
    (path,) = job.folder.ring.iterdir()
    data = bytearray(path.read_bytes())
    data[data.index(b'"iteration": 12,') + 3] ^= 1
    path.write_bytes(data)
    held = shelf.hold(holding.offer.id)
    assert len(held.read(FILE, 0, held.size(FILE))) < held.size(FILE)
    assert [one.offer.step for one in shelf.look()] == [12]


def test_what_was_received_from_sources_before_is_counted(tmp_path: Path) -> None:
    job = LoggedJob(tmp_path, MAKE["nadam"])
    job.base()
    job.train(8)
    job.settle()
    wrong = HandVersion(8, tier="disk", run_id=job.job.run_id, status="unverified", model={"w": [1.0] * 5000})
    wrong.files[MODEL] = wrong.files[MODEL][:-4] + bytes(4)
    key = reader_key(TOKEN.encode())

    def taken(*addresses: tuple[str, int]) -> Fetched:
        found = look([NodeClient(one, key) for one in addresses], job.job.run_id, "")
        return fetch(found, (0, 8), {})

    with job.serving() as address, HandApi(wrong) as other:
        alone, after = taken(_split(address)), taken(other.address, _split(address))
        assert after.logs and len(after.passed) == 1
        assert after.nbytes - alone.nbytes >= len(wrong.files[MODEL])


def test_another_model_or_optimizer_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    job = LoggedJob(tmp_path, MAKE["nadam"])
    job.base()
    job.train(12)
    job.settle()
    with job.serving() as address:
        for wrong in (
            lambda model, optimizer: (model, torch.optim.RAdam(optimizer.param_groups[0]["params"])),
            lambda model, optimizer: (model[:3], optimizer),
            lambda model, optimizer: (model, MAKE["nadam"](optimizer.param_groups[0]["params"][:-1])),
        ):
            model, optimizer = job.fresh()
            before = {name: one.clone() for name, one in model.state_dict().items()}
            with pytest.raises(UserError):
                recover(address).load(*wrong(model, optimizer))
            assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
            assert not optimizer.state


def two_groups(parameters: Any, first: int = 3) -> torch.optim.Optimizer:
    held = list(parameters)
    groups = [{"params": held[:first], "weight_decay": 0.3}, {"params": held[first:], "lr": 0.001}]
    return torch.optim.NAdam(groups, lr=0.01)


def _stepped(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def _other_groups(model: Any) -> torch.optim.Optimizer:
    return two_groups(_stepped(model), first=2)


def _half_constant(model: Any) -> torch.optim.Optimizer:
    model[2].weight.data = model[2].weight.data.half()
    return two_groups(_stepped(model))


def _half_buffer(model: Any) -> torch.optim.Optimizer:
    model[1].running_mean = model[1].running_mean.half()
    return two_groups(_stepped(model))


def _other_buffer(model: Any) -> torch.optim.Optimizer:
    model[1].running_var = torch.ones(6)
    return two_groups(_stepped(model))


@pytest.mark.parametrize("wrong", [_other_groups, _half_constant, _half_buffer, _other_buffer])
def test_what_no_checksum_would_show_is_refused_before_anything_is_changed(
    tmp_path: Path, wrong: Callable[[Any], torch.optim.Optimizer]
) -> None:
    job = LoggedJob(tmp_path, two_groups)
    job.base()
    job.train(8, sums=1 << 30)
    job.settle()
    with job.serving() as address:
        model, _ = job.fresh()
        optimizer = wrong(model)
        before = {name: one.clone() for name, one in model.state_dict().items()}
        with pytest.raises(UserError) as refused:
            recover(address).load(model, optimizer)
        assert refused.value.remedy and not optimizer.state
        assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())


def test_what_was_tied_has_to_be_tied(tmp_path: Path) -> None:
    def tied() -> torch.nn.Sequential:
        found = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        found[1].weight = found[0].weight
        return found

    job = LoggedJob(tmp_path, MAKE["nadam"], model=tied)
    job.base()
    job.train(8)
    job.settle()
    with job.serving() as address:
        model, optimizer = job.fresh()
        recover(address).load(model, optimizer)
        assert job.differ(model, optimizer, 8) == [] and model[1].weight is model[0].weight
        model, optimizer = job.fresh()
        model[1].weight = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
        with pytest.raises(UserError):
            recover(address).load(model, optimizer)


def test_a_model_and_optimizer_alone_cannot_be_had_of_it(tmp_path: Path) -> None:
    job = LoggedJob(tmp_path, MAKE["nadam"])
    job.base()
    job.train(12)
    job.settle()
    with job.serving() as address:
        found = recover(address)
        assert (found.model, found.optimizer, bool(found)) == ({}, {}, True)
        from flowcheck.ask.sources import take

        with pytest.raises(UserError, match="log") as refused:
            take([NodeClient(_split(address), reader_key(TOKEN.encode()))], None, None, None)
        assert refused.value.remedy


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_bit_that_changed_is_never_used(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("log")
    job = LoggedJob(root, MAKE["nadam"], places=20)
    job.base()
    job.train(10)
    job.settle()
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name != "job.json")
    path = data.draw(st.sampled_from(files))
    held = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * min(len(held), 1 << 17) - 1))
    held[bit // 8] ^= 1 << bit % 8
    path.write_bytes(held)
    with job.serving() as address:
        model, optimizer = job.fresh()
        try:
            found = recover(address, fresh=True)
            if not found:
                return
            found.load(model, optimizer)
        except FlowcheckError:
            assert not optimizer.state
        else:
            assert job.differ(model, optimizer, found.step) == []


def test_parts_of_a_base_come_in_order_or_not_at_all(tmp_path: Path) -> None:
    bases = Bases(tmp_path)
    sums = "0" * 16
    assert bases.take(Base(3, 0, 2, 4, sums, 0), b"ab") is None
    for wrong in (Base(3, 0, 2, 4, sums, 0), Base(3, 1, 2, 4, sums, 0), Base(3, 0, 2, 4, sums, 3)):
        if (wrong.number, wrong.first) == (0, 0):
            continue  # which begins another one
        with pytest.raises(UserError):
            bases.take(wrong, b"c")
    with pytest.raises(UserError):
        bases.take(Base(3, 0, 2, 4, sums, 2), b"cde")  # more than it has
    assert bases.take(Base(3, 0, 2, 4, sums, 2), b"cd") is None
    bases.drop()
    assert bases.take(Base(4, 1, 2, 1, sums, 0), b"e") is None and whole_bases(tmp_path) == []
    bases.take(Base(5, 0, 2, 1, sums, 0), b"f")
    whole = bases.take(Base(6, 1, 2, 1, sums, 0), b"g")
    bases.close()
    assert whole is not None and (whole.first, whole.step) == (5, 6)
    assert whole_bases(tmp_path) == [whole]


def test_a_base_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "base-000001").write_text("in its way")
    (tmp_path / "base-000001").chmod(0)
    bases = Bases(tmp_path)
    bases.take(Base(5, 0, 1, 1, "0" * 16, 0), b"f")
    bases.close()
    assert bool(bases.failure()) == (whole_bases(tmp_path) == [])
