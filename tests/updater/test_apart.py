"""A version in pieces: buckets in any order and of any cut, as they come, give the bits that all at once give."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flowcheck.job.model import BucketSlice
from updater import kernels
from updater.errors import ReplicaError
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.replica import Replica
from updater.rounding_modes import GRAIN, RoundingMode
from updater.slot import SlotState
from updater.step import StepValues

from ..forks import fork

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "sgd": [
        {"lr": 0.05}, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
        {"lr": 0.05, "momentum": 0.8, "nesterov": True, "maximize": True},
    ],
    "adam": [{"lr": 0.1, "weight_decay": 0.01}, {"lr": 1e-3, "betas": (0.3, 0.9), "amsgrad": True}],
    "adamw": [{"lr": 1e-3, "weight_decay": 0.1, "amsgrad": True}],
}
#: rounding mode, its threads, type of parameters, has masters, types on the wire
KINDS = [
    *((name, 0, "float32", True, wire) for name in ("torch-cpu", "torch-cpu-fused", "torch-cuda-foreach")
      for wire in ("float32", "bfloat16")),
    ("torch-cuda-fused", 0, "float32", True, "float16"), ("torch-cuda-foreach", 0, "bfloat16", True, "bfloat16"),
    *(("torch-cpu", threads, kind, False, kind) for threads in (1, 2, 3) for kind in ("bfloat16", "float16")),
]


def bits(version: Any) -> dict[str, bytes]:
    found = dict(version.parameters) | {
        f"{name} {key}": tensor for name, state in version.optimizer_state.items() for key, tensor in state.items()
    }
    return {name: tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in found.items()}


def cut(data: st.DataObject, sizes: dict[str, int], buckets: int) -> Layout:
    """Every tensor cut anywhere, each part in any bucket, with padding between them."""
    parts: list[list[tuple[str, int, int]]] = [[] for _ in range(buckets)]
    for name, size in sizes.items():
        cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=4))})
        for start, end in itertools.pairwise(cuts):
            parts[data.draw(st.integers(0, buckets - 1))].append((name, start, end - start))
    slices, elements = [], []
    for bucket in parts:
        at, out = 0, []
        for name, start, length in data.draw(st.permutations(bucket)):
            at += data.draw(st.sampled_from([0, 0, 1, 5]))
            out.append(BucketSlice(name, at, length, start))
            at += length
        slices.append(out)
        elements.append(at)
    return Layout(slices, {name: (size,) for name, size in sizes.items()}, elements)


def fill(layout: Layout, gradients: dict[str, torch.Tensor], index: int) -> torch.Tensor:
    assert layout.elements is not None
    bucket = torch.full((layout.elements[index],), float("nan"), dtype=next(iter(gradients.values())).dtype)
    for s in layout.buckets[index]:
        bucket[s.offset : s.offset + s.length] = gradients[s.name][s.start : s.start + s.length]
    return bucket


@given(st.data(), st.sampled_from(KINDS), st.sampled_from(sorted(OPTIONS)), st.integers(0, 2), st.integers(0, 2**16))
@settings(max_examples=80, deadline=None)
def test_pieces_round_as_the_whole_does(
    data: st.DataObject, kind: tuple[str, int, str, bool, str], name: str, workers: int, seed: int
) -> None:
    mode, shared, held, masters, wire = kind
    assume(name != "sgd" or mode != "torch-cuda-fused")  # no kernel
    options = data.draw(st.sampled_from(OPTIONS[name]))
    assume(not (name == "adam" and mode == "torch-cuda-fused" and options.get("weight_decay")))  # nor of that
    if mode == "torch-cpu-fused" and options.get("maximize"):
        options = options | {"maximize": False}
    sizes = {"a": data.draw(st.integers(1, 200)), "b": data.draw(st.sampled_from([7, GRAIN + 13, 2 * GRAIN + 41]))}
    generator = torch.Generator().manual_seed(seed)

    def numbers(dtype: str) -> dict[str, torch.Tensor]:
        return {n: torch.randn(size, generator=generator).to(getattr(torch, dtype)) for n, size in sizes.items()}

    first, rounding = numbers(held), RoundingMode(mode, threads=shared)
    spec = OptimizerSpec.check(name, [(["a", "b"], options)], fused=rounding.fused)
    made = [
        Replica(first, spec, rounding=rounding, masters=masters, divisor=3, threads=threads) for threads in (0, workers)
    ]
    whole = Layout([[BucketSlice("a", 0, sizes["a"]), BucketSlice("b", sizes["a"], sizes["b"])]],
                   {n: (size,) for n, size in sizes.items()}, [sum(sizes.values())])
    for step in (1, 2):
        gradients, values = numbers(wire), StepValues(clip=data.draw(st.sampled_from([None, 0.37])))
        layouts = [whole, cut(data, sizes, data.draw(st.integers(1, 4)))]
        for replica, layout in zip(made, layouts, strict=True):
            slot = replica.build(step, layout, values)
            for index in data.draw(st.permutations(range(len(layout.buckets)))):
                slot.apply(index, fill(layout, gradients, index))
                slot.written(0)
            replica.publish(slot)
        assert bits(made[1].current) == bits(made[0].current)
    for replica in made:
        replica.close()


# -- workers ---------------------------------------------------------------------------------------------------------

LARGE = 1 << 22
SPLIT = Layout([[BucketSlice("w", 0, LARGE)], [BucketSlice("w", 0, LARGE, LARGE)]], {"w": (2 * LARGE,)})


def large(threads: int, **more: Any) -> Replica:
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0, "momentum": 0.5})])
    tensors = {"w": torch.arange(2 * LARGE, dtype=torch.float32), "mean": torch.zeros(3)}
    return Replica(tensors, spec, rounding=RoundingMode("torch-cuda-foreach"), slots=2, threads=threads,
                   buffers=frozenset(["mean"]), **more)


@pytest.mark.parametrize("threads", [0, 2])
def test_a_skipped_step_is_copied_by_workers(threads: int) -> None:
    replica = large(threads)
    slot = replica.build(1, SPLIT)
    for index in (0, 1):
        slot.apply(index, torch.ones(LARGE))
    replica.publish(slot)
    before = bits(slot)
    skipped = replica.build(2, SPLIT, StepValues(skip=True))
    for index in (1, 0):
        skipped.apply(index, torch.full((LARGE,), float("nan")))
    assert skipped.written(-1)
    replica.publish(skipped)
    assert bits(skipped) == before
    replica.close()


def test_whether_workers_are_done_is_asked_without_waiting() -> None:
    replica = large(1)
    slot = replica.build(1, SPLIT)
    assert slot.written(), "nothing was applied"
    slot.apply(0, torch.ones(LARGE))
    while not slot.written():
        pass
    assert bool((slot.parameters["w"][:LARGE] == torch.arange(LARGE) - 1).all())
    replica.close()


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_what_was_begun_in_vain_leaves_no_trace(threads: int) -> None:
    """Thrown away while workers are at it, and built again in the same slot at once."""
    replica = large(threads)
    for step in range(1, 6):
        for _ in range(3):
            vain = replica.build(step, SPLIT, StepValues(clip=0.5))
            vain.apply(1, torch.full((LARGE,), float("nan")))
            vain.apply(0, torch.ones(LARGE))
            replica.discard(vain)
            assert vain.state is SlotState.FREE
        slot = replica.build(step, SPLIT)
        assert slot is vain and slot.missing == ["w"]
        slot.apply(0, torch.zeros(LARGE))
        slot.apply(1, torch.zeros(LARGE))
        replica.publish(slot)
    assert torch.equal(replica.current.parameters["w"], torch.arange(2 * LARGE, dtype=torch.float32))
    replica.close()


def test_work_that_no_worker_has_begun_is_let_go_of() -> None:
    """Sums of much are formed by the only worker; what is queued behind them is not done any more."""
    pool, much = kernels.Pool(1), torch.zeros(1 << 24, dtype=torch.uint8)
    given, taken = torch.ones(1 << 20, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)
    for _ in range(8):
        pool.checksums([(much.data_ptr(), much.numel(), 1)] * 8, keep=much)
    ticket = pool.copies([(taken.data_ptr(), given.data_ptr(), given.numel())], keep=(given, taken))
    pool.cancel()
    assert pool.wait(ticket) and not bool(taken.any())
    ticket = pool.copies([(taken.data_ptr(), given.data_ptr(), given.numel() - 5)])
    assert pool.wait(ticket) and int(taken.sum()) == given.numel() - 5
    pool.close()
    pool.cancel()


@pytest.mark.parametrize("threads", [0, 2])
def test_copies_of_any_length(threads: int) -> None:
    pool = kernels.Pool(threads)
    sizes = [0, 1, 63, 64, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 17]
    sources = [torch.randint(0, 256, (size + 3,), dtype=torch.uint8) for size in sizes]
    targets = [torch.full((size + 8,), 7, dtype=torch.uint8) for size in sizes]
    blocks = [(t.data_ptr() + 5, s.data_ptr() + 3, size) for t, s, size in zip(targets, sources, sizes, strict=True)]
    pool.wait(pool.copies(blocks))
    for target, source, size in zip(targets, sources, sizes, strict=True):
        assert torch.equal(target[5 : 5 + size], source[3:])
        assert target[:5].tolist() == [7] * 5 and target[5 + size :].tolist() == [7] * 3
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.copies(blocks)


# -- what comes last -------------------------------------------------------------------------------------------------


def test_buffers_may_come_after_the_buckets() -> None:
    replica = large(0)
    slot = replica.build(1, SPLIT)
    slot.apply(0, torch.ones(LARGE))
    slot.apply(1, torch.ones(LARGE))
    with pytest.raises(ReplicaError, match="'w' is not a buffer"):
        replica.finish(slot, {"w": torch.zeros(2 * LARGE)})
    with pytest.raises(ReplicaError, match="given torch"):
        replica.finish(slot, {"mean": torch.zeros(3, dtype=torch.float64)})
    replica.finish(slot, {"mean": torch.tensor([1.0, 2.0, 3.0])})
    replica.publish(slot)
    assert replica.current.parameters["mean"].tolist() == [1, 2, 3]
    with pytest.raises(ReplicaError, match="only a slot being built can be finished"):
        replica.finish(slot, {})


def test_killed_between_two_buckets(shm: Any) -> None:
    """kill -9 when the first bucket is written and the second one is not there: the version before is found."""
    path, (heard, tell) = shm / "replica", os.pipe()
    replica = large(1, path=path)
    before, ones = bits(replica.current), torch.ones(LARGE)
    replica.close()
    pid = fork()
    if pid == 0:  # only a signal ends this process
        try:
            child = Replica.attach(path, threads=1)
            slot = child.build(1, SPLIT)
            slot.apply(1, ones)  # torch's own threads did not come along
            slot.written(-1)
            os.write(tell, b"!")
            signal.pause()
        finally:
            os._exit(1)
    os.close(tell)
    assert os.read(heard, 1) == b"!"
    os.close(heard)
    os.kill(pid, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    found = Replica.attach(path, threads=1)
    assert found.current.step == 0 and found.building is None and bits(found.current) == before
    slot = found.build(1, SPLIT)
    slot.apply(0, torch.ones(LARGE))
    slot.apply(1, torch.ones(LARGE))
    found.publish(slot)
    assert bool((found.current.parameters["w"] == torch.arange(2 * LARGE) - 1).all())
    found.close()


def test_workers_have_a_name_of_their_own() -> None:
    """`top -H` shows it: which stage of a node takes how much of the processors."""
    pool = kernels.Pool(1)
    given, taken = (torch.ones(64, dtype=torch.uint8) for _ in "12")
    assert pool.wait(pool.copies([(taken.data_ptr(), given.data_ptr(), 64)]))
    assert "fc-update" in {task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")}
    pool.close()
