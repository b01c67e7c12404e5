"""Parameters and states in 16 bits alone, against torch.optim on such parameters: every bit, every step."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.job.model import BucketSlice
from updater import kernels, sixteen
from updater.errors import OptimizerError, ReplicaError
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.replica import Replica
from updater.rounding_modes import GRAIN, ROUNDING_MODES, RoundingMode, rule
from updater.sixteen import check_here, threads_matter
from updater.step import StepValues

from .test_pieces import guarded, untouched

CLASSES: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
ADAM: list[dict[str, Any]] = [
    {"lr": 1e-3}, {"lr": 1e-3, "weight_decay": 0.01},
    {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1},
    {"lr": 0.1, "betas": (0.3, 0.9), "eps": 1e-3, "amsgrad": True},
    {"lr": 0.02, "betas": (0.5, 0.99), "weight_decay": 0.3, "maximize": True, "amsgrad": True},
]
SGD: list[dict[str, Any]] = [
    {"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
    {"lr": 1e-2, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01, "maximize": True},
    {"lr": 1.0, "weight_decay": 0.1},
]
CASES = [(name, o) for name, many in (("adam", ADAM), ("adamw", ADAM), ("sgd", SGD)) for o in many]
EVERY_CASE = pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{n}{CASES.index((n, o))}" for n, o in CASES])
BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
ROUNDING = RoundingMode("torch-cpu", threads=1)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """torch's threads as they were."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gradients(n: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Six decades, zeros of both signs, now and then the smallest number."""
    g = torch.randn(n, generator=generator) * 10.0 ** torch.randint(-5, 1, (n,), generator=generator)
    kind = torch.randint(0, 12, (n,), generator=generator)
    g[kind == 0], g[kind == 1], g[kind == 2] = 0.0, -0.0, torch.finfo(dtype).smallest_normal / 2
    return g.to(dtype)


def bits(t: torch.Tensor) -> torch.Tensor:
    """As integers; a NaN is a NaN, whatever its sign and payload."""
    flat = t.detach().reshape(-1)
    return torch.where(flat.isnan(), torch.tensor(0x7FFF, dtype=torch.int16), flat.view(torch.int16))


def differing(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor | None]) -> dict[str, list[int]]:
    """Indices of elements that differ, by the array's name."""
    assert ours.keys() <= theirs.keys()
    wrong = {key: (bits(mine) != bits(theirs[key])).nonzero().flatten().tolist() for key, mine in ours.items()}
    return {key: found for key, found in wrong.items() if found}


class Ours:
    """One tensor and its states, stepped by the kernels as a replica does."""

    def __init__(
        self, initial: torch.Tensor, name: str, options: Mapping[str, Any], rounding: RoundingMode, kernel: str = ""
    ) -> None:
        self.held = str(initial.dtype).removeprefix("torch.")
        self.now = [initial.clone(), *(torch.zeros_like(initial) for _ in range(3))]
        self.name, self.options, self.rounding, self.step = name, options, rounding, 0
        self.pool = kernels.Pool(0, kernel)

    def update(self, g: torch.Tensor, **how: Any) -> None:
        self.step += 1
        after, pieces = [torch.zeros_like(t) for t in self.now], []
        for begin, end, odd in self.rounding.parts(g.numel(), self.held):
            arrays = [t.data_ptr() + 2 * begin for t in (*self.now, *after)]
            pieces.append((0, end - begin, g.data_ptr() + 2 * begin, *arrays, 0, odd))
        constants = rule(self.rounding, self.name, self.options, self.step, grad=self.held, held=self.held,
                         first=self.step == 1, **how)
        self.pool.submit([constants], pieces, keep=g)
        self.now = after

    def state(self) -> dict[str, torch.Tensor]:
        if self.name == "sgd":
            names = ["momentum_buffer"] if self.options.get("momentum") else []
        else:
            names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self.options.get("amsgrad") else [])]
        return {"p": self.now[0], **dict(zip(names, self.now[1:], strict=False))}


def compare(name: str, options: Mapping[str, Any], dtype: torch.dtype, sizes: Sequence[int], *, steps: int = 4,
            threads: int = 1, said: int = 0, kernel: str = "", seed: int = 0) -> dict[int, dict[str, list[int]]]:
    """Elements that differ from torch's after some steps, by size. said: threads that we are told, if others."""
    generator = torch.Generator().manual_seed(seed)
    first = [(torch.randn(n, generator=generator) * 0.1).to(dtype) for n in sizes]
    twins = [t.clone().requires_grad_(True) for t in first]
    optimizer = CLASSES[name](twins, **options)
    rounding = RoundingMode("torch-cpu", threads=said or threads)
    ours = [Ours(t, name, options, rounding, kernel) for t in first]
    for _ in range(steps):
        for twin, mine in zip(twins, ours, strict=True):
            twin.grad = gradients(twin.numel(), generator, dtype)
            mine.update(twin.grad)
        torch.set_num_threads(threads)
        optimizer.step()
        torch.set_num_threads(1)
    found = {}
    for twin, mine in zip(twins, ours, strict=True):
        if wrong := differing(mine.state(), {"p": twin, **optimizer.state[twin]}):
            found[twin.numel()] = wrong
    return found


@EVERY_CASE
@BOTH
def test_every_length_by_every_kernel(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    for kernel in kernels.names():
        assert compare(name, options, dtype, [*range(1, 70), 1003], kernel=kernel, steps=3) == {}


@pytest.mark.parametrize(("name", "options", "threads"), [
    ("adam", ADAM[2], 2), ("sgd", SGD[2], 2), ("sgd", SGD[4], 3), ("adamw", ADAM[1], 2),
])
@BOTH
def test_tensors_that_threads_share(name: str, options: dict[str, Any], dtype: torch.dtype, threads: int) -> None:
    sizes = [GRAIN, GRAIN + 1, 2 * GRAIN + 95]
    assert compare(name, options, dtype, sizes, threads=threads, steps=2) == {}


def test_another_number_of_threads_rounds_other_elements() -> None:
    """Those next to where two threads meet, in a tensor that they share, and only where a factor is added."""
    n = 2 * GRAIN + 2
    wrong = compare("sgd", {"lr": 0.1}, torch.bfloat16, [GRAIN, n], threads=2, said=1, steps=6)
    assert wrong and wrong.keys() == {n}
    assert set(wrong[n]["p"]) <= {GRAIN, 2 * GRAIN}, "the last of the first half; the last but one of all"
    assert compare("adamw", {"lr": 0.1}, torch.bfloat16, [n], threads=2, said=1) == {}


@pytest.mark.slow
@EVERY_CASE
@BOTH
def test_many_steps(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    assert compare(name, options, dtype, [1, 33, 1000, GRAIN + 5], threads=2, steps=40) == {}


REAL = st.floats(0, 1).map(lambda x: round(x, 4))
BETA = st.sampled_from([0.1, 0.5, 0.85, 0.9, 0.95, 0.99, 0.999])
ADAMS = st.fixed_dictionaries({
    "lr": st.sampled_from([1e-5, 3e-4, 1e-3, 0.01, 0.1, 1.0]), "betas": st.tuples(BETA, BETA),
    "eps": st.sampled_from([1e-8, 1e-6, 1e-3]), "weight_decay": REAL, "amsgrad": st.booleans(),
    "maximize": st.booleans(),
})
SGDS = st.fixed_dictionaries({
    "lr": REAL, "momentum": REAL, "dampening": st.just(0.0) | REAL, "weight_decay": REAL, "maximize": st.booleans(),
})


@given(st.tuples(st.sampled_from(["adam", "adamw"]), ADAMS) | st.tuples(st.just("sgd"), SGDS),
       st.sampled_from([torch.bfloat16, torch.float16]), st.integers(1, 300), st.integers(0, 1 << 30))
def test_any_options(case: tuple[str, dict[str, Any]], dtype: torch.dtype, n: int, seed: int) -> None:
    assert compare(*case, dtype, [n], steps=3, seed=seed) == {}


@BOTH
@pytest.mark.parametrize("kernel", kernels.names())
def test_a_step_writes_its_piece_and_nothing_else(kernel: str, dtype: torch.dtype) -> None:
    held = str(dtype).removeprefix("torch.")
    constants = rule(ROUNDING, "adam", {"lr": 0.1, "amsgrad": True}, 2, grad=held, held=held)
    for n, odd, shift in itertools.product([1, 15, 16, 17, 40], [0, 1], [0, 1, 5]):
        state, g = [torch.rand(n).to(dtype) for _ in range(4)], torch.rand(n).to(dtype)
        made = [guarded(n, dtype, shift) for _ in range(4)]
        addresses = [t.data_ptr() for t in (*state, *(part for part, _ in made))]
        kernels.Pool(0, kernel).submit([constants], [(0, n, g.data_ptr(), *addresses, 0, odd)])
        assert all(untouched(part, whole) for part, whole in made)
        assert torch.equal(made[3][0], torch.maximum(state[3], made[2][0]))


def test_parts_of_a_tensor() -> None:
    def parts(size: int, threads: int) -> list[tuple[int, int, int]]:
        return RoundingMode("torch-cpu", threads=threads).parts(size, "bfloat16")

    assert parts(0, 1) == [] and parts(31, 0) == [(0, 31, 31)] and parts(32, 5) == [(0, 32, 0)]
    assert parts(GRAIN, 2) == [(0, GRAIN, 0)]
    assert parts(GRAIN + 1, 2) == [(0, 16385, 1), (16385, GRAIN + 1, 0)]
    assert [end - begin for begin, end, _ in parts(3 * GRAIN, 8)] == [GRAIN] * 3
    assert RoundingMode("torch-cpu", threads=2).parts(3 * GRAIN + 1) == [(0, 3 * GRAIN + 1, 0)], "fp32 has no such loop"
    assert RoundingMode("torch-cpu-fused").parts(13) == [(0, 13, 5)]


@pytest.mark.parametrize(("name", "options", "matter"), [
    ("sgd", {}, True), ("adam", {}, False), ("adam", {"weight_decay": 0.1}, True),
    ("adamw", {"weight_decay": 0.1}, False),
    ("adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}, False),
])
def test_where_threads_matter(name: str, options: dict[str, Any], matter: bool) -> None:
    assert threads_matter(name, options) is matter


# -- replicas ------------------------------------------------------------------------------------------------

SHAPES = {"a": (37, 5), "b": (), "c": (2 * GRAIN + 77,), "d": (0,), "e": (64,)}


def two_buckets() -> Layout:
    """Buckets that cut tensors where no vector ends: c lies in both, its second part first."""
    size = SHAPES["c"][0]
    return Layout([
        [BucketSlice("c", 0, size - 40001, 40001), BucketSlice("a", size - 40001, 185)],
        [BucketSlice("e", 3, 64), BucketSlice("c", 67, 40001), BucketSlice("b", 40068, 1)],
    ], SHAPES)


class Pair:
    """A replica and torch.optim on the same 16-bit parameters."""

    def __init__(self, dtype: torch.dtype, name: str = "sgd", options: Mapping[str, Any] | None = None,
                 shared_by: int = 1, **kwargs: Any) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(1), dtype
        torch.set_num_threads(shared_by)
        start = {n: torch.randn(s, generator=self.generator).to(dtype) for n, s in SHAPES.items()}
        options = options or {"lr": 0.05, "weight_decay": 0.1, **({"momentum": 0.9} if name == "sgd" else {})}
        spec = OptimizerSpec.check(name, [(list(SHAPES), options)])
        rounding = RoundingMode("torch-cpu", threads=shared_by)
        self.replica = Replica(start, spec, rounding=rounding, masters=False, **kwargs)
        self.twins = {n: t.clone().requires_grad_(True) for n, t in start.items()}
        self.optimizer = CLASSES[name](self.twins.values(), **options)

    def backward(self) -> dict[str, torch.Tensor]:
        out = {n: torch.randn(s, generator=self.generator).to(self.dtype) for n, s in SHAPES.items()}
        for n, twin in self.twins.items():
            twin.grad = out[n].clone()
        return out

    def step(self, g: Mapping[str, torch.Tensor], values: StepValues | None = None) -> None:
        layout = two_buckets()
        slot = self.replica.build(self.replica.current.step + 1, layout, values)
        for index, bucket in enumerate(layout.buckets):
            data = torch.full((max(s.offset + s.length for s in bucket),), 7.0, dtype=self.dtype)
            for s in bucket:
                data[s.offset : s.offset + s.length] = g[s.name].reshape(-1)[s.start : s.start + s.length]
            slot.apply(index, data)
        self.replica.publish(slot)

    def check(self) -> None:
        now = self.replica.current
        assert not now.masters
        for n, twin in self.twins.items():
            theirs = self.optimizer.state[twin]
            mine = {"p": now.parameters[n], **now.optimizer_state[n]}
            assert float(mine.pop("step", 0)) == float(theirs.get("step", 0))
            assert {key: value.dtype for key, value in mine.items()} == dict.fromkeys(mine, self.dtype)
            assert differing(mine, {"p": twin, **theirs}) == {}, n


@BOTH
@pytest.mark.parametrize(("shared_by", "workers"), [(1, 0), (2, 2)])
@pytest.mark.parametrize(("name", "options"), [("sgd", None), ("adam", ADAM[2]), ("adamw", ADAM[4])])
def test_a_replica_holds_what_the_optimizer_holds(
    dtype: torch.dtype, shared_by: int, workers: int, name: str, options: dict[str, Any] | None
) -> None:
    pair = Pair(dtype, name, options, shared_by, threads=workers)
    for _ in range(3):
        g = pair.backward()
        pair.optimizer.step()
        pair.step(g)
        pair.check()


def test_it_takes_half_the_memory_of_fp32() -> None:
    narrow = Pair(torch.bfloat16, "adamw").replica
    wide = Replica({n: torch.zeros(s) for n, s in SHAPES.items()}, narrow.optimizer, rounding=ROUNDING)
    assert 0.49 < narrow.nbytes / wide.nbytes < 0.52


def test_a_run_goes_on_from_its_file_and_from_its_state(shm: Any) -> None:
    pair = Pair(torch.bfloat16, "adam", ADAM[2], 2, path=shm / "replica")

    def train() -> None:
        for _ in range(2):
            g = pair.backward()
            pair.optimizer.step()
            pair.step(g)
        pair.check()

    train()
    pair.replica.close()
    with pytest.raises(ReplicaError, match=r"rounding mode torch-cpu of torch , with 2 threads"):
        Replica.attach(shm / "replica", rounding=ROUNDING)
    pair.replica = Replica.attach(shm / "replica")
    assert pair.replica.rounding.threads == 2
    train()
    now = pair.replica.current
    again = Replica(now.parameters, pair.replica.optimizer, rounding=pair.replica.rounding, masters=False, step=4,
                    optimizer_state=now.optimizer_state)
    pair.replica.close()
    pair.replica = again
    train()


@BOTH
def test_clipping_multiplies_in_16_bits(dtype: torch.dtype) -> None:
    pair = Pair(dtype, "adamw")
    for limit in (3.0, 1e6):
        g = pair.backward()
        parts = list(pair.twins.values())
        norm = torch.nn.utils.clip_grad_norm_(parts, limit)
        coefficient = float(torch.clamp(limit / (norm + 1e-6), max=1.0))
        pair.optimizer.step()
        pair.step(g, StepValues(clip=coefficient))
        pair.check()


def test_a_divisor_and_schedules() -> None:
    pair = Pair(torch.bfloat16, "adam", ADAM[1], divisor=3)
    for step in range(4):
        g = pair.backward()
        for twin in pair.twins.values():
            twin.grad /= 3
        pair.optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        if step != 2:
            pair.optimizer.step()
        pair.step(g, StepValues(groups=({"lr": 0.01 / (step + 1)},), skip=step == 2))
        pair.check()


# -- what cannot be exact ------------------------------------------------------------------------------------

W = {"w": torch.zeros(4, dtype=torch.bfloat16)}
SPEC = OptimizerSpec.check("adam", [(["w"], {"lr": 0.1})])
ONE = Layout([[BucketSlice("w", 0, 4)]], {"w": (4,)})


@pytest.mark.parametrize("rounding", [d for d in ROUNDING_MODES if d != "torch-cpu"])
def test_other_orders_have_no_kernel_for_it(rounding: str) -> None:
    with pytest.raises(OptimizerError, match=f"bfloat16 parameters without fp32 masters.* {rounding}"):
        Replica(W, SPEC, rounding=RoundingMode(rounding), masters=False)
    with pytest.raises(ValueError, match="no kernel"):
        kernels.Rule(order=rounding if rounding.startswith("torch-cuda") else "torch-cuda-fused", held="float16",
                     grad="float16")
    Replica({"w": torch.zeros(4)}, SPEC, rounding=RoundingMode(rounding), masters=False)  # fp32 has no masters


def test_a_gradient_of_another_type_is_refused() -> None:
    replica = Replica(W, SPEC, rounding=ROUNDING, masters=False)
    slot = replica.build(1, ONE)
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(ReplicaError, match=r"gradient for 'w', which is updated in bfloat16 alone"):
            slot.apply(0, torch.zeros(4, dtype=dtype))
    slot.apply(0, torch.zeros(4, dtype=torch.bfloat16))
    replica.publish(slot)
    with pytest.raises(ValueError, match="held in bfloat16, a gradient in float32"):
        kernels.Rule(held="bfloat16")


def test_a_loss_scale_is_refused() -> None:
    replica = Replica(W, SPEC, rounding=ROUNDING, masters=False)
    with pytest.raises(OptimizerError, match=r"'w' is updated in 16 bits alone: .* a loss scale"):
        replica.build(1, ONE, StepValues(loss_scale=8.0))
    assert replica.building is None


def test_states_that_are_not_in_16_bits_are_refused() -> None:
    for state in ({"exp_avg": torch.zeros(4)}, {"exp_avg_sq": torch.zeros(4, dtype=torch.float16)}):
        with pytest.raises(ReplicaError, match=r"of 'w' is torch\.float.*, not torch\.bfloat16"):
            Replica(W, SPEC, rounding=ROUNDING, masters=False, optimizer_state={"w": state})
    with pytest.raises(ReplicaError, match="'master' of 'w' is not one"):
        Replica(W, SPEC, rounding=ROUNDING, masters=False, optimizer_state={"w": {"master": torch.zeros(4)}})


def test_a_torch_that_rounds_otherwise_is_refused() -> None:
    """Its operators without fused multiply-adds stand for a processor or a build that we have not met."""
    code = "from updater.sixteen import check_here\ncheck_here('bfloat16')"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "rounds adam on bfloat16 parameters in an order that has no kernel" in done.stderr


@BOTH
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_what_is_compared_here_notices_a_difference(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, name: str
) -> None:
    held = str(dtype).removeprefix("torch.")
    right = getattr(sixteen, f"_{name}")

    def wrong(p: torch.Tensor, *rest: Any) -> None:
        right(p, *rest)
        p[-1] += p[-1].abs() * 2**-7 + 1e-6

    monkeypatch.setattr(sixteen, f"_{name}", wrong)
    monkeypatch.setattr(sixteen, "_checked", set())
    with pytest.raises(OptimizerError, match=f"rounds {name} on {held}"):
        check_here(held)
    monkeypatch.setattr(sixteen, f"_{name}", right)
    check_here(held)
    assert sixteen._checked == {held}
