"""One slot of a replica: what a bucket updates, what is copied, and which constants each piece is given."""
import gc
import weakref

import pytest
import torch

from flowcheck.job.model import BucketSlice as S
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.replica import Replica
from updater.rounding_modes import RoundingMode
from updater.slot import SlotState
from updater.step import StepValues

from .idle_pool import IdlePool

ROUNDING = RoundingMode("torch-cuda-foreach", "2.13.0")
SHAPES = {"a": (4,), "b": (2, 3), "s": (), "e": (0, 2)}


def replica(groups=((("a", "b", "s", "e"), {"lr": 1.0}),), name="sgd", dtype=torch.float32, **kwargs):
    tensors = {n: torch.zeros(shape, dtype=dtype) for n, shape in SHAPES.items()}
    kwargs.setdefault("rounding", ROUNDING)
    return Replica({**tensors, "k": torch.arange(2)}, OptimizerSpec.check(name, groups), **kwargs)


def layout():
    """Two buckets: b and the end of a; the rest of a, padding, and the scalar."""
    return Layout([[S("b", 0, 6), S("a", 6, 1, 3)], [S("a", 0, 3), S("s", 5, 1), S("e", 6, 0)]], SHAPES, [7, 6])


FIRST, SECOND = torch.arange(1.0, 8.0), torch.arange(11.0, 17.0)


def advance(made, values=None, buckets=(0, 1), data=(FIRST, SECOND)):
    slot = made.build(made.current.step + 1, layout(), values)
    for index in buckets:
        slot.apply(index, data[index])
    made.publish(slot)
    return slot


def test_a_slot_that_was_never_built_is_of_no_step():
    slot = replica().slots[1]
    assert (slot.step, slot.state, slot.pins, slot.missing) == (-1, SlotState.FREE, 0, [])


@pytest.mark.parametrize("threads", [0, 1])
def test_there_is_nothing_to_wait_for_before_the_first_bucket(threads):
    made = replica(threads=threads)
    made.slots[1].flush()
    slot = made.build(1, layout())
    made.discard(slot)
    assert slot.state is SlotState.FREE
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_version_is_what_was_given(dtype):
    """Without a master in the state a tensor begins at its own value; with a state but no step it has had one step."""
    tensors = {name: torch.full((3,), value, dtype=dtype) for name, value in (("a", 1.5), ("b", 2.5), ("c", 3.5))}
    state = {"a": {"step": 7.0, "exp_avg": torch.full((3,), 0.25), "exp_avg_sq": torch.full((3,), 0.5)},
             "b": {"exp_avg": torch.full((3,), 0.75)}}
    if dtype == torch.bfloat16:
        state["a"]["master"] = torch.full((3,), 1.5001)
    spec = OptimizerSpec.check("adam", [(["a", "b", "c"], {"lr": 1.0})])
    made = Replica({**tensors, "k": torch.tensor([8, 9])}, spec, rounding=ROUNDING, optimizer_state=state,
                   buffers=frozenset(["k"]), step=7)
    now = made.current
    assert now.step == 7 and now._steps.tolist() == [7, 1, 0]
    assert {name: value.tolist() for name, value in now.parameters.items()} == {
        "a": [1.5] * 3, "b": [2.5] * 3, "c": [3.5] * 3, "k": [8, 9]
    }
    if dtype == torch.bfloat16:
        assert now.masters["a"].tolist() == torch.full((3,), 1.5001).tolist()
        assert now.masters["b"].tolist() == [2.5] * 3 and now.masters["c"].tolist() == [3.5] * 3
    found = now.optimizer_state
    assert found["a"]["exp_avg"].tolist() == [0.25] * 3 and found["a"]["exp_avg_sq"].tolist() == [0.5] * 3
    assert found["b"]["exp_avg"].tolist() == [0.75] * 3 and found["b"]["exp_avg_sq"].tolist() == [0] * 3
    assert "step" not in found.get("c", {})


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("buckets", [(0, 1), (1, 0)])
def test_each_element_gets_the_gradient_that_the_layout_says(buckets, threads):
    made = replica(threads=threads)
    now = advance(made, buckets=buckets).parameters
    assert now["a"].tolist() == [-11, -12, -13, -7] and now["b"].tolist() == [[-1, -2, -3], [-4, -5, -6]]
    assert now["s"].item() == -16 and now["e"].shape == (0, 2) and now["k"].tolist() == [0, 1]
    assert list(now) == ["a", "b", "s", "e", "k"]
    made.close()


def test_a_tensor_is_missing_until_its_last_bucket_came():
    made = replica()
    slot = made.build(1, layout())
    assert slot.missing == ["a", "b", "s"], "what has no elements is awaited by nobody"
    slot.apply(1, SECOND)
    assert slot.missing == ["a", "b"]
    slot.apply(0, FIRST)
    assert slot.missing == []


def test_each_group_has_its_own_options_and_values():
    made = replica(((("a",), {"lr": 1.0}), (("b", "s", "e"), {"lr": 0.5})))
    assert advance(made).parameters["b"].tolist() == [[-0.5, -1, -1.5], [-2, -2.5, -3]]
    slot = advance(made, StepValues(groups=({"lr": 0.0}, {"lr": 2.0})))
    assert slot.parameters["a"].tolist() == [-11, -12, -13, -7] and slot.parameters["s"].item() == -40
    assert advance(made).parameters["s"].item() == -48, "the values were of one step"


def test_a_tensor_has_its_own_count():
    """The first step of momentum takes the gradient as it is, whatever the others' count."""
    options = {"lr": 1.0, "momentum": 0.5, "dampening": 0.5}
    made = replica(((("a", "b", "s", "e"), options),), optimizer_state={"s": {"momentum_buffer": torch.tensor(16.0)}})
    assert "b" not in made.current.optimizer_state and "s" in made.current.optimizer_state
    slot = advance(made)
    assert slot.optimizer_state["b"]["momentum_buffer"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert slot.optimizer_state["s"]["momentum_buffer"].item() == 0.5 * 16 + 0.5 * 16
    assert slot._steps.tolist() == [1, 1, 2, 1]


def test_a_skipped_step_changes_nothing_and_counts():
    made = replica(name="adam", buffers=frozenset(["k"]))
    first = advance(made)
    values = StepValues(skip=True, buffers={"k": torch.tensor([5, 6])})
    slot = advance(made, values, data=(torch.full((7,), float("nan")), torch.full((6,), float("inf"))))
    assert made.current.step == 2 and slot.parameters["k"].tolist() == [5, 6]
    for name in SHAPES:
        assert torch.equal(slot.parameters[name], first.parameters[name])
        for key, value in first.optimizer_state[name].items():
            assert torch.equal(slot.optimizer_state[name][key], value)
    assert float(slot.optimizer_state["a"]["step"]) == 1


def test_clip_loss_scale_and_divisor_come_before_the_optimizer():
    made = replica(divisor=2)
    slot = advance(made, StepValues(clip=0.25, loss_scale=4.0))
    assert slot.parameters["s"].item() == -16 / 2 / 4 * 0.25
    assert slot.parameters["b"].tolist() == [[-1 / 32, -2 / 32, -3 / 32], [-4 / 32, -5 / 32, -6 / 32]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_have_masters_beside_them(dtype):
    made = replica(dtype=dtype)
    first = made.current
    assert list(first.masters) == list(SHAPES) and set(first.optimizer_state) == set(SHAPES)
    data = (FIRST + 0.0001, SECOND)
    slot = made.build(1, layout())
    for index in (0, 1):
        slot.apply(index, data[index])
    slot.flush()
    made.publish(slot)
    assert slot.parameters["b"].dtype == dtype and slot.parameters["b"].tolist() == [[-1, -2, -3], [-4, -5, -6]]
    assert torch.equal(slot.masters["b"].reshape(-1), -(FIRST + 0.0001)[:6])
    assert slot.optimizer_state["b"]["master"] is slot.masters["b"]
    assert slot.masters["a"].tolist() == [-11, -12, -13, float(-data[0][6])]
    assert slot.parameters["a"].tolist() == [-11, -12, -13, -7], "each piece is narrowed to its own place"
    assert replica().current.masters == {} and replica().current.optimizer_state == {}


def test_gradients_may_be_raw_bits_of_the_wires_type():
    made = replica()
    slot = made.build(1, layout())
    slot.apply(0, FIRST.bfloat16().view(torch.uint8).numpy(), torch.bfloat16)
    slot.apply(1, SECOND.bfloat16().view(torch.int16), torch.bfloat16)
    made.publish(slot)
    assert slot.parameters["b"].tolist() == [[-1, -2, -3], [-4, -5, -6]] and slot.parameters["s"].item() == -16


@pytest.mark.parametrize("size", [7, 8, 9, 16, 19])
@pytest.mark.parametrize("cut", [0, 1, 5, 6])
def test_the_scalar_tail_of_the_fused_order_is_of_the_whole_tensor(size, cut):
    """A tensor that is cut over two buckets has its last elements where torch has them: torch's bits, cut or not."""
    generator = torch.Generator().manual_seed(size)
    spec = OptimizerSpec.check("adam", [(["w"], {"lr": 0.1})], fused=True)
    found = []
    start, g = torch.randn(size, generator=generator), torch.randn(3, size, generator=generator)
    for pieces in ([[S("w", 0, size)]], [[S("w", 0, size - cut, cut)], [S("w", 0, cut)]]):
        made = Replica({"w": start}, spec, rounding=RoundingMode("torch-cpu-fused"))
        for step in range(3):
            where = Layout(pieces, {"w": (size,)})
            slot = made.build(step + 1, where)
            for index, (piece,) in enumerate(pieces):
                slot.apply(index, g[step, piece.start : piece.start + piece.length])
            made.publish(slot)
        found.append((made.current.parameters["w"], made.current.optimizer_state["w"]["exp_avg_sq"]))
    theirs = start.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([theirs], lr=0.1, fused=True)
    for gradient in g:
        theirs.grad = gradient.clone()
        optimizer.step()
    wanted = theirs.detach(), optimizer.state[theirs]["exp_avg_sq"]
    for straight, apart, right in zip(*found, wanted, strict=True):
        assert torch.equal(straight, right) and torch.equal(apart, right)


def test_a_piece_is_given_the_places_of_both_versions():
    """Elements, gradient, the arrays that are read, those that are written, the narrow copy; 0 where there is none."""
    made = replica(groups=((("a", "b", "s", "e"), {"lr": 1.0, "momentum": 0.5}),), dtype=torch.bfloat16)
    slot, source = made.build(1, layout()), made.current
    slot._pool = pool = IdlePool(slot._pool)
    slot.apply(0, FIRST)
    ((_, pieces, kept),) = pool.queued
    places = []
    for name, begin in (("b", 0), ("a", 3)):
        for version in (source, slot):
            master, momentum = version.masters[name], version._tensors[name, "m"]
            places += [master.data_ptr() + 4 * begin, momentum.data_ptr() + 4 * begin, 0, 0]
        places.append(slot.parameters[name].data_ptr() + 2 * begin)
    assert pieces == [
        (0, 6, kept.data_ptr(), *places[:9], 0),
        (0, 1, kept.data_ptr() + 4 * 6, *places[9:], 0),
    ]
    plain = replica()
    slot = plain.build(1, layout())
    slot._pool = pool = IdlePool(slot._pool)
    slot.apply(0, FIRST)
    ((_, pieces, _),) = pool.queued
    assert [piece[4:7] + piece[8:] for piece in pieces] == [(0, 0, 0, 0, 0, 0, 0, 0)] * 2


def test_gradients_stay_until_the_workers_are_done():
    """The caller may let go of them at once."""
    made = replica()
    slot = made.build(1, layout())
    slot._pool = IdlePool(slot._pool)
    data = FIRST.numpy().copy()
    kept = weakref.ref(data)
    slot.apply(0, data)
    del data
    gc.collect()
    assert kept() is not None
    slot.flush()
    gc.collect()
    assert kept() is None and slot.parameters["b"].tolist() == [[-1, -2, -3], [-4, -5, -6]]


def test_what_a_patch_brings_stays_until_the_workers_have_written_it():
    """Over what was built by then, and no other element."""
    made = replica()
    slot = made.build(1, layout())
    for index, gradient in enumerate((FIRST, SECOND)):
        slot.apply(index, gradient)
    slot._pool = IdlePool(slot._pool)
    data = torch.tensor([5.0, 6.0]).numpy()
    kept = weakref.ref(data)
    slot.patch([("a", 1, 1), ("b", 4, 1)], {"a": torch.from_numpy(data[:1]), "b": torch.from_numpy(data[1:])}, {})
    del data
    gc.collect()
    assert kept() is not None and slot.parameters["a"].tolist() == [-11, -12, -13, -7]
    slot.flush()
    gc.collect()
    assert kept() is None and slot.parameters["a"].tolist() == [-11, 5, -13, -7]
    assert slot.parameters["b"].tolist() == [[-1, -2, -3], [-4, 6, -6]]
