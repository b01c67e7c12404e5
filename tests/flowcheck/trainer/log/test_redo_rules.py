"""The rules of a redo, one by one: what is used, what is refused, and what is left as it was."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.control.checksum import checksums
from flowcheck.errors import UserError
from flowcheck.trainer.log.base import Base, BasePiece, Made, Taker
from flowcheck.trainer.log.codec import packed
from flowcheck.trainer.log.copies import Place, TensorCopy, copy_of
from flowcheck.trainer.log.record import Entry, StepRecord, Wire, options_of, set_options
from flowcheck.trainer.log.redo import Redone, redo
from flowcheck.trainer.log.summed import summed

from ...pair import join, leave
from .optimizers import Hiding, Lion, Muon, Normed
from .recorded import STEPS, Job, Recorded, base_of, carried, entries_of, plain

Parameters = dict[str, torch.Tensor]


def silent(line: str) -> None:
    pass


def two(seed: int = 0, shape: tuple[int, ...] = (6,), dtype: torch.dtype = torch.float32) -> Parameters:
    torch.manual_seed(seed)
    return {name: torch.nn.Parameter(torch.randn(shape).to(dtype)) for name in ("a", "b")}


def base(optimizer: torch.optim.Optimizer, parameters: Parameters, step: int, at_once: bool = False) -> Base:
    """Whole, of this step."""
    taken = Taker(optimizer, parameters, 1 << 30, at_once).take(step)
    assert taken is not None
    return base_of([packed(part) for part in taken.parts()])


def entry(number: int, optimizer: torch.optim.Optimizer, parameters: Parameters, **more: Any) -> Entry:
    """As they are before the step."""
    gradients = {name: copy_of(one.grad, one, name) for name, one in parameters.items()}
    return Entry(number, [carried(optimizer)], gradients, **more)


def gradients(parameters: Parameters) -> None:
    for one in parameters.values():
        one.grad = torch.randn(one.shape).to(one.dtype)


def trained(
    make: Callable[[Any], torch.optim.Optimizer], steps: int = 6, **more: Any
) -> tuple[Parameters, torch.optim.Optimizer, Base, list[Entry]]:
    """A base of step 2, and entries from there on."""
    parameters = two()
    optimizer = make(list(parameters.values()))
    entries, held = [], None
    for number in range(steps):
        gradients(parameters)
        if number == 2:
            held = base(optimizer, parameters, 2, **more)
        if number >= 2:
            entries.append(entry(number, optimizer, parameters))
        optimizer.step()
    assert held is not None
    return parameters, optimizer, held, entries


def same(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    def all_of(one: torch.optim.Optimizer) -> Any:
        held = [p for group in one.param_groups for p in group["params"]]
        return plain([held, [one.state.get(p) for p in held],
                      [{key: value for key, value in group.items() if key != "params"} for group in one.param_groups]])
    return bool(all_of(optimizer) == all_of(other))


def again(
    make: Callable[[Any], torch.optim.Optimizer], held: Base, entries: Any, **more: Any
) -> tuple[Redone, Parameters, torch.optim.Optimizer]:
    parameters = two(seed=9)
    optimizer = make(list(parameters.values()))
    return redo(parameters, optimizer, held, entries, silent, **more), parameters, optimizer


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


# -- what is used ------------------------------------------------------------------------------------------------


def test_a_parameter_that_begins_late_is_put_in_place_just_before_its_own_first_step() -> None:
    """This optimizer takes a missing gradient for zeros, and moves a parameter that has not begun."""
    parameters = two()
    optimizer = Muon(list(parameters.values()))
    taker, parts, entries = Taker(optimizer, parameters, 1), [], []
    for number in range(6):
        gradients(parameters)
        if number in (1, 4) and (taken := taker.take(number)) is not None:
            parts += [packed(part) for part in taken.parts()]
        if number >= 1:
            entries.append(entry(number, optimizer, parameters))
        optimizer.step()
    held = base_of(parts)
    assert (held.first, held.last) == (1, 4)
    assert same(again(Muon, held, entries)[2], optimizer)


def test_a_second_redo_of_the_same_base_gives_the_same() -> None:
    """State is copied out of the base: a redo writes into its own."""
    _, wanted, held, entries = trained(adam)
    for _ in range(2):
        _, _, optimizer = again(adam, held, entries)
        assert same(optimizer, wanted)


def test_hooks_of_the_script_are_not_called_and_are_there_afterwards() -> None:
    """What they change in a gradient is in the log."""
    called: list[int] = []

    def doubling(optimizer: torch.optim.Optimizer, *given: Any) -> None:
        called.append(1)
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad *= 2

    def hooked(parameters: Any) -> torch.optim.Optimizer:
        optimizer = adam(parameters)
        optimizer.register_step_pre_hook(doubling)
        return optimizer

    _, wanted, held, entries = trained(adam)
    _, parameters, optimizer = again(hooked, held, entries)
    assert same(optimizer, wanted) and not called
    gradients(parameters)
    optimizer.step()
    assert called


def test_gradients_and_generators_of_the_process_stay_as_they_were() -> None:
    _, _, held, entries = trained(adam)
    parameters = two(seed=9)
    mine = parameters["a"].grad = torch.ones(6)
    state = torch.get_rng_state()
    redo(parameters, adam(list(parameters.values())), held, entries, silent)
    assert parameters["a"].grad is mine and parameters["b"].grad is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_scaler_and_a_fused_optimizer(dtype: torch.dtype) -> None:
    """It is called on a skipped step, too, gets scaled gradients, and unscales them itself."""
    def fused(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1, fused=True)

    parameters = two(dtype=dtype)
    optimizer = fused(list(parameters.values()))
    held, entries = base(optimizer, parameters, 0), []
    for number in range(6):
        scale = torch.tensor(2.0 ** (10 + number))
        for one in parameters.values():
            one.grad = torch.randn(6).to(dtype) * scale.to(dtype)
        optimizer.grad_scale, optimizer.found_inf = scale, torch.tensor(float(number % 3 == 0))  # type: ignore[attr-defined]
        entries.append(entry(number, optimizer, parameters, skipped=number % 3 == 0))
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    other = two(seed=9, dtype=dtype)
    made = fused(list(other.values()))
    assert redo(other, made, held, entries, silent).calls == 6
    assert same(made, optimizer) and not hasattr(made, "grad_scale")


def test_gradients_of_the_wire_get_what_the_trainer_did_to_them() -> None:
    """Unscaled and clipped by torch, recorded as scale and factor."""
    parameters = two()
    optimizer = adam(list(parameters.values()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    held, entries = base(optimizer, parameters, 0), []
    for number in range(5):
        losses = [(one * torch.randn(6)).sum() for one in parameters.values()]
        scaler.scale(torch.stack(losses).sum()).backward()
        carried = entry(number, optimizer, parameters)
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        clip = float(torch.clamp(1.0 / (norm + 1e-6), max=1.0))
        wire = Wire(1, scaler.get_scale(), clip)
        entries.append(Entry(number, carried.calls, carried.gradients, wire=wire))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    _, _, made = again(adam, held, entries)
    assert same(made, optimizer)


def test_a_divisor_is_divided_by_in_the_wires_type() -> None:
    parameters = two()
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    sums = {name: torch.randn(6).bfloat16() for name in parameters}
    carried = {name: TensorCopy(one, Place.DEVICE) for name, one in sums.items()}
    held = base(optimizer, parameters, 0)
    for name, one in parameters.items():
        one.grad = (sums[name].clone() / 3).float()
    log = [Entry(0, [StepRecord.of(optimizer)], carried, wire=Wire(3))]
    optimizer.step()
    assert same(again(lambda p: torch.optim.SGD(p, lr=1.0), held, log)[2], optimizer)


def test_a_gradient_of_another_type_than_its_parameter() -> None:
    parameters = two()
    optimizer = Lion(list(parameters.values()))
    held, entries = base(optimizer, parameters, 0), []
    for number in range(3):
        for one in parameters.values():
            one.grad_dtype = torch.bfloat16
            one.grad = torch.randn(6).bfloat16()
        entries.append(entry(number, optimizer, parameters))
        optimizer.step()
    _, others, made = again(Lion, held, entries)
    assert same(made, optimizer) and others["a"].grad_dtype == torch.float32


def test_gradients_have_the_strides_that_they_had() -> None:
    seen: list[tuple[int, ...]] = []

    class Looking(Lion):
        def update(self, p: torch.Tensor, grad: torch.Tensor, *given: Any) -> None:
            seen.append(grad.stride())
            super().update(p, grad, *given)

    parameters = two(shape=(4, 6))
    optimizer = Looking(list(parameters.values()))
    held = base(optimizer, parameters, 0)
    parameters["a"].grad = torch.randn(6, 4).T
    parameters["b"].grad = torch.randn(4, 1).expand(4, 6)
    log = [entry(0, optimizer, parameters)]
    optimizer.step()
    other = two(seed=9, shape=(4, 6))
    redo(other, Looking(list(other.values())), held, log, silent)
    assert sorted(seen[2:]) == sorted(seen[:2]) == [(1, 0), (1, 4)]


def test_a_learning_rate_that_is_a_tensor() -> None:
    """Schedules write into it: each record has its own."""
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(0.1), foreach=False)

    parameters = two()
    optimizer = make(list(parameters.values()))
    held, entries, rates = base(optimizer, parameters, 0), list[Entry](), []
    for _ in range(4):
        gradients(parameters)
        entries.append(entry(len(entries), optimizer, parameters))
        optimizer.step()
        optimizer.param_groups[0]["lr"].mul_(0.7)
        rates.append(options_of(optimizer))
    _, _, made = again(make, held, entries)
    set_options(made.param_groups, rates[-1])
    assert same(made, optimizer)


def test_state_of_all_parameters_together_is_of_one_step() -> None:
    """And what is here under such a key before is not mixed with it."""
    def used(parameters: Any) -> torch.optim.Optimizer:
        optimizer = Normed(parameters)
        optimizer.state["old"] = {"norm": 1}  # type: ignore[index]
        return optimizer

    _, wanted, held, entries = trained(Normed, at_once=True)
    _, _, made = again(used, held, entries)
    assert same(made, wanted) and plain(made.state["all"]) == plain(wanted.state["all"])  # type: ignore[index]
    assert "old" not in made.state


def test_a_skipped_step_needs_no_gradients() -> None:
    """A record of what its options were may be there."""
    _, wanted, held, entries = trained(adam)
    skipped = Entry(2, entries[0].calls, {}, skipped=True)
    later = [Entry(one.iteration + 1, one.calls, one.gradients) for one in entries]
    assert same(again(adam, held, [skipped, *later])[2], wanted)


# -- checksums ---------------------------------------------------------------------------------------------------


def test_a_counter_that_no_log_has_is_found_by_the_checksums_and_nothing_is_changed() -> None:
    job = Job("hiding", make=Hiding)
    said = Recorded(job, 1, budget=1 << 30, base_at=23)
    other, lines = Job("hiding", make=Hiding), list[str]()
    before = copy.deepcopy(plain(other.state()))
    held = base_of(said.base)
    redone = redo(other.parameters, other.optimizer, held, entries_of(said, held.first), lines.append)
    assert redone.differs and redone.verified is None and redone.differs in lines[-1]
    assert plain(other.state()) == before


def test_checksums_are_of_all_that_a_state_has() -> None:
    """Those on top are called as for a replica, and a step is one in float32; deeper ones and numbers, too."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Lion([parameter])
    optimizer.state[parameter] = {"step": torch.tensor(3), "m": torch.ones(2), "one": {"codes": [torch.zeros(2), 5]},
                                  "rate": 0.5, "kind": "x", "none": None, "wide": torch.ones(1, dtype=torch.complex128),
                                  "few": torch.eye(2).to_sparse()}
    found = summed({"w": parameter}, optimizer)
    assert plain(found["optimizer.w.step"]) == plain(torch.tensor(3.0))
    assert plain(found["optimizer.w.one.codes.1"]) == plain(torch.tensor(5))
    assert plain(found["optimizer.w.rate"]) == plain(torch.tensor(0.5, dtype=torch.float64))
    assert found.keys() == {"w", *(f"optimizer.w.{key}" for key in (
        "step", "m", "one.codes.0", "one.codes.1", "rate", "wide", "few.values", "few.indices"))}
    assert len(checksums(found)) == len(found)


def test_a_wrong_number_deep_in_the_state_is_found() -> None:
    job = Job("own-eightbit")
    said = Recorded(job, 1, budget=1 << 30, base_at=23)
    held, other = base_of(said.base), Job("own-eightbit")
    state = held.pieces["p1"].state
    assert state is not None
    state["step"] += 1
    redone = redo(other.parameters, other.optimizer, held, entries_of(said, held.first), silent)
    assert "optimizer.p1.step" in redone.differs


def test_state_that_the_trainer_has_not_summed_is_not_called_verified() -> None:
    parameters, _, held, entries = trained(adam)
    sums = {name: f"{value:016x}" for name, value in checksums(parameters).items()}
    entries[-1] = Entry(entries[-1].iteration, entries[-1].calls, entries[-1].gradients, checksums=sums)
    assert again(adam, held, entries)[0].verified is None


# -- what is refused, and leaves everything as it was -------------------------------------------------------------


def test_an_error_in_the_midst_leaves_model_and_optimizer_as_they_were() -> None:
    class Failing(Lion):
        calls = 0

        def begin(self, group: dict[str, Any]) -> None:
            self.calls += 1
            if self.calls == 3:
                raise MemoryError

    _, _, held, entries = trained(Lion)
    made = Made(**{**vars(held.head.made), "optimizer": Failing.__qualname__})
    of_it = Base(replace(held.head, made=made))
    for piece in held.pieces.values():
        of_it.add(piece)
    parameters = two(seed=9)
    optimizer = Failing(list(parameters.values()))
    gradients(parameters)
    before = copy.deepcopy(plain([list(parameters.values()), [one.grad for one in parameters.values()]]))
    with pytest.raises(MemoryError):
        redo(parameters, optimizer, of_it, entries, silent)
    assert plain([list(parameters.values()), [one.grad for one in parameters.values()]]) == before
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.01


def _wrong() -> Iterator[tuple[str, Callable[[Base, list[Entry]], tuple[Base, list[Entry], dict[str, Any]]]]]:
    def piece(held: Base, **more: Any) -> Base:
        changed = Base(held.head)
        for one in held.pieces.values():
            changed.add(BasePiece(**{**vars(one), **more}) if one.name == "a" else one)
        return changed

    def part(held: Base) -> Base:
        half = Base(held.head)
        half.add(held.pieces["a"])
        return half

    def of_all(held: Base) -> Base:
        more = Base(replace(held.head, others={"all": {"norm": 1.0}}))
        for one in held.pieces.values():
            more.add(one)
        return more

    def lacking(entries: list[Entry]) -> list[Entry]:
        return [*entries[:1], Entry(3, entries[1].calls, {"a": None})]

    def misshapen(entries: list[Entry]) -> list[Entry]:
        return [Entry(2, entries[0].calls, {"a": TensorCopy(torch.zeros(7), Place.HOST), "b": None})]

    double, longer = TensorCopy(torch.zeros(6).double(), Place.HOST), TensorCopy(torch.zeros(7), Place.HOST)
    yield "not whole", lambda held, log: (part(held), log, {})
    yield "other type", lambda held, log: (piece(held, value=double), log, {})
    yield "other shape", lambda held, log: (piece(held, value=longer), log, {})
    yield "a hole", lambda held, log: (held, [log[0], *log[2:]], {})
    yield "begins late", lambda held, log: (held, log[1:], {})
    yield "ends early", lambda held, log: (held, log[:2], {"to": 6})
    yield "base is newer", lambda held, log: (held, log, {"to": 1})
    yield "a piece is newer", lambda held, log: (piece(held, step=9), log, {})
    yield "state of all, of several steps", lambda held, log: (of_all(piece(held, step=3)), log, {})
    yield "no gradient", lambda held, log: (held, lacking(log), {})
    yield "another shape of a gradient", lambda held, log: (held, misshapen(log), {})
    yield "other groups", lambda held, log: (held, [Entry(2, [StepRecord([])], log[0].gradients)], {})


WRONG = dict(_wrong())


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_redone_is_refused(what: str) -> None:
    _, _, held, log = trained(adam)
    held, log, more = WRONG[what](held, log)
    parameters = two(seed=9)
    optimizer = adam(list(parameters.values()))
    state = optimizer.state[parameters["a"]] = {"step": torch.tensor(3.0)}
    before = copy.deepcopy(plain(list(parameters.values())))
    with pytest.raises(UserError) as caught:
        redo(parameters, optimizer, held, log, silent, **more)
    assert caught.value.where and caught.value.remedy
    assert plain(list(parameters.values())) == before and optimizer.state[parameters["a"]] is state
    assert len(optimizer.state) == 1 and optimizer.param_groups[0]["lr"] == 0.1


def test_another_optimizer_or_another_model_is_refused() -> None:
    _, _, held, log = trained(adam)
    with pytest.raises(UserError):
        again(Lion, held, log)
    parameters = {"a": torch.nn.Parameter(torch.zeros(6)), "c": torch.nn.Parameter(torch.zeros(6))}
    with pytest.raises(UserError):
        redo(parameters, adam(list(parameters.values())), held, log, silent)


def test_what_is_otherwise_here_is_said() -> None:
    _, _, held, log = trained(adam)
    made = Made(**{**vars(held.head.made), "version": "2.6.0"})
    old = Base(replace(held.head, made=made))
    for piece in held.pieces.values():
        old.add(piece)
    assert any("2.6.0" in one for one in again(adam, old, log)[0].unproven)
    assert again(adam, held, log)[0].unproven == ()


# -- elsewhere ---------------------------------------------------------------------------------------------------


CHILD = """
import json
import pickle
from pathlib import Path
from tests.flowcheck.trainer.log.recorded import *
from flowcheck.trainer.log.redo import redo
folder = Path({folder!r})
for kind in {kinds!r}:
    base = base_of([path.read_bytes() for path in sorted(folder.glob(f"{{kind}}.base.*"))])
    log = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob(f"{{kind}}.log.*"))]
    job = Job(kind)
    redone = redo(job.parameters, job.optimizer, base, log[base.first - log[0].iteration:], print)
    print(json.dumps([redone.verified, {{n: f"{{v:x}}" for n, v in checksums(job.parameters).items()}}]))
"""


def test_a_new_process_that_never_trained(tmp_path: Path) -> None:
    kinds, wanted = ["own-muon", "own-eightbit", "adamw-fused"], []
    for kind in kinds:
        job = Job(kind)
        said = Recorded(job, 2, budget=2000, base_at=25)
        log = [pickle.dumps(one) for one in said.entries.values()]
        for name, parts in (("base", said.base), ("log", log)):
            for at, data in enumerate(parts):
                (tmp_path / f"{kind}.{name}.{at:03}").write_bytes(data)
        wanted.append([STEPS, {name: f"{value:x}" for name, value in checksums(job.parameters).items()}])
    script = CHILD.format(folder=str(tmp_path), kinds=kinds)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300,
                          cwd=Path(__file__).parents[4])
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")] == wanted


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_shard_of_a_dtensor() -> None:
    """State that is sharded as its parameter comes back so; what is no shard stays whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    leave()
    join()
    try:
        mesh = init_device_mesh("cpu", (2,))

        def sharded(seed: int) -> Parameters:
            torch.manual_seed(seed)
            return {name: torch.nn.Parameter(DTensor.from_local(torch.randn(3, 4), mesh, [Shard(0)], run_check=False))
                    for name in ("a", "b")}

        def step(parameters: Parameters) -> None:
            for one in parameters.values():
                one.grad = DTensor.from_local(torch.randn(3, 4), mesh, [Shard(0)], run_check=False)

        parameters = sharded(0)
        optimizer = torch.optim.AdamW(parameters.values(), lr=0.1, foreach=False)
        step(parameters)
        optimizer.step()
        held, log = base(optimizer, parameters, 1), []
        for number in range(1, 4):
            step(parameters)
            log.append(entry(number, optimizer, parameters))
            optimizer.step()
        other = sharded(9)
        made = torch.optim.AdamW(other.values(), lr=0.1, foreach=False)
        redo(other, made, held, log, silent)
        for name, one in other.items():
            state, wanted = made.state[one], optimizer.state[parameters[name]]
            assert isinstance(state["exp_avg"], DTensor) and state["exp_avg"].placements == (Shard(0),)
            assert plain([one.to_local(), state["exp_avg"].to_local(), state["step"]]) == plain(  # type: ignore[attr-defined]
                [parameters[name].to_local(), wanted["exp_avg"].to_local(), wanted["step"]])  # type: ignore[attr-defined]
        whole = two(seed=3, shape=(3, 4))
        with pytest.raises(UserError):
            redo(whole, torch.optim.AdamW(whole.values(), lr=0.1), held, log, silent)
    finally:
        leave()
