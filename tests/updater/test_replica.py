"""The replica against torch.optim run directly, bit for bit, and what a half-built version may not do."""
import hashlib
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.job.model import BucketSlice
from updater.errors import NoFreeSlot
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.replica import Replica, SlotState
from updater.rounding_modes import RoundingMode

from .bits import bits, state_bits

CPU = RoundingMode("torch-cpu")
TORCH = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def deal(shapes, count):
    """One layout: tensors in reverse order dealt round robin to `count` buckets, one cut over two of them."""
    buckets, reach = [[] for _ in range(count)], [0] * count
    for i, (name, shape) in enumerate(reversed(shapes.items())):
        size = torch.Size(shape).numel()
        cut = size // 3 if i == 0 else size
        for part, (start, length) in enumerate([(0, cut), (cut, size - cut)]):
            if length:
                b = (i + part) % count
                buckets[b].append(BucketSlice(name, reach[b], length, start))
                reach[b] += length
    return Layout(buckets, shapes, reach)


def fill(layout, gradients):
    out = []
    for index, bucket in enumerate(layout.buckets):
        data = torch.zeros(layout.elements[index], dtype=next(iter(gradients.values())).dtype)
        for s in bucket:
            data[s.offset : s.offset + s.length] = gradients[s.name].reshape(-1)[s.start : s.start + s.length]
        out.append(data)
    return out


options = {
    "sgd": st.one_of(
        st.fixed_dictionaries(
            {"lr": st.sampled_from([0.1, 1e-3]), "momentum": st.sampled_from([0.0, 0.9]),
             "dampening": st.sampled_from([0.0, 0.1]), "weight_decay": st.sampled_from([0.0, 0.01]),
             "maximize": st.booleans()}
        ),
        st.fixed_dictionaries({"lr": st.just(0.05), "momentum": st.just(0.8), "nesterov": st.just(True)}),
    ),
    "adam": st.fixed_dictionaries(
        {"lr": st.sampled_from([0.1, 1e-3]), "betas": st.sampled_from([[0.9, 0.999], [0.5, 0.9]]),
         "eps": st.sampled_from([1e-8, 1e-3]), "weight_decay": st.sampled_from([0.0, 0.01]),
         "amsgrad": st.booleans(), "maximize": st.booleans()}
    ),
}
options["adamw"] = options["adam"]


@given(st.data(), st.sampled_from(["sgd", "adam", "adamw"]), st.sampled_from([1, 3]),
       st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=60)
def test_equal_to_torch_optim_bit_for_bit(data, name, divisor, wire):
    sizes = data.draw(st.lists(st.integers(1, 100), min_size=2, max_size=5))
    shapes = {f"p{i}": (size,) if i % 2 else (size, 2) for i, size in enumerate(sizes)}
    seed = data.draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    split = data.draw(st.integers(1, len(shapes) - 1))
    names = data.draw(st.permutations(list(shapes)))
    groups = [(part, data.draw(options[name])) for part in (names[:split], names[split:])]
    initial = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    spec = OptimizerSpec.check(name, groups)
    replica = Replica({**initial, "constant": torch.arange(3)}, spec, divisor=divisor, rounding=CPU)

    twin = {n: t.clone() for n, t in initial.items()}
    optimizer = TORCH[name]([
        {"params": [twin[n] for n in part], **{k: tuple(v) if k == "betas" else v for k, v in o.items()}}
        for part, o in groups
    ])
    for step in range(1, 5):
        layout = deal(shapes, 1 if step == 1 else data.draw(st.integers(1, 3)))
        scale = 10.0 ** (step - 2)
        gradients = {n: (torch.randn(s, generator=generator) * scale).to(wire) for n, s in shapes.items()}
        if data.draw(st.booleans()):  # an iteration that was lost half-way leaves no trace
            lost = replica.build(step, layout)
            lost.apply(0, torch.ones(layout.elements[0]))
            replica.discard(lost)
        slot = replica.build(step, layout)
        for index in data.draw(st.permutations(range(len(layout.buckets)))):
            slot.apply(index, fill(layout, gradients)[index])
        replica.publish(slot)
        for n in shapes:
            twin[n].grad = (gradients[n] / divisor).float()
        optimizer.step()

    now = replica.current
    assert now.step == 4 and list(now.parameters) == [*shapes, "constant"]
    assert torch.equal(now.parameters["constant"], torch.arange(3))
    for n in shapes:
        assert bits(now.parameters[n]) == bits(twin[n])
        theirs = {k: v for k, v in optimizer.state[twin[n]].items() if v is not None}
        mine = now.optimizer_state.get(n, {})
        assert set(mine) == set(theirs)
        for key in mine:
            assert bits(mine[key]) == bits(theirs[key]), key


def small(slots=3, **kwargs):
    spec = OptimizerSpec.check("adam", [(["a", "b"], {"lr": 0.1, "amsgrad": True})])
    tensors = {"a": torch.ones(4), "k": torch.arange(2), "b": torch.ones(3)}
    replica = Replica(tensors, spec, slots=slots, rounding=CPU, **kwargs)
    layout = Layout([[BucketSlice("b", 0, 3), BucketSlice("a", 3, 1)], [BucketSlice("a", 0, 3, 1)]],
                    {"a": (4,), "b": (3,)}, [4, 3])
    return replica, layout


def advance(replica, layout, value=1.0):
    slot = replica.build(replica.current.step + 1, layout)
    for index, elements in enumerate(layout.elements):
        slot.apply(index, torch.full((elements,), value))
    replica.publish(slot)
    return slot


def test_a_half_built_version_never_touches_the_current_one():
    replica, layout = small(slots=2)
    advance(replica, layout)
    before = state_bits(replica.current)
    for buckets in ([], [0], [1], [0, 1]):
        slot = replica.build(2, layout)
        for index in buckets:
            slot.apply(index, torch.full((layout.elements[index],), float("nan")))
        assert state_bits(replica.current) == before
        replica.discard(slot)
    assert state_bits(replica.current) == before
    after = state_bits(advance(replica, layout, 0.5))

    undisturbed, layout = small(slots=2)
    advance(undisturbed, layout)
    assert state_bits(advance(undisturbed, layout, 0.5)) == after


def test_a_replica_resumed_from_its_own_state_goes_on_with_the_same_bits():
    replica, layout = small()
    advance(replica, layout)
    resumed = Replica(replica.current.parameters, replica.optimizer, step=1, rounding=CPU,
                      optimizer_state=replica.current.optimizer_state)
    assert state_bits(advance(resumed, layout, 0.25)) == state_bits(advance(replica, layout, 0.25))


def test_a_pinned_version_does_not_change_and_updates_wait_when_nothing_is_free():
    replica, layout = small(slots=3)
    with replica.pinned() as first, replica.pinned() as same:
        assert first is same and first.state is SlotState.PINNED
        kept = state_bits(first)
        advance(replica, layout)
        with replica.pinned() as second:
            assert second is not first
            advance(replica, layout)
            assert replica.refused == 0
            with pytest.raises(NoFreeSlot, match="the update waits"):
                replica.build(3, layout)
            assert replica.building is None and replica.refused == 1
        advance(replica, layout)
        assert state_bits(first) == kept
    assert first.state is SlotState.COMPLETE
    advance(replica, layout)
    assert replica.current.step == 4


def test_readers_in_other_threads_see_whole_versions():
    replica, layout = small(slots=3)
    torn, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            with replica.pinned() as slot:
                step, before = slot.step, state_bits(slot)
                if state_bits(slot) != before or slot.step != step:
                    torn.append(step)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    while replica.current.step < 150:
        try:
            advance(replica, layout)
        except NoFreeSlot:
            continue
    stop.set()
    for thread in threads:
        thread.join()
    assert not torn and all(slot.pins == 0 for slot in replica.slots)


def test_groups_as_torch_lists_them_are_taken():
    for name, cls in TORCH.items():
        group = cls([torch.zeros(1)], lr=0.1).param_groups[0]
        given_options = {k: v for k, v in group.items() if k != "params"}
        assert OptimizerSpec.check(name, [(["a"], given_options)]).params == ["a"]


# d(loss)/d(output) of each iteration as it stood on the wire (a GPU's dot product, a few ulp from a CPU's).
ON_THE_WIRE = [
    2.2808695, 1.5064979, 0.2639256, -0.44131666, -2.802729, -0.8489866, 1.2046201, 0.054107785, -0.8077736,
    -2.0716867, 2.6645062, 0.75140834, -2.401643, 0.34143043, -3.9951043, 1.6280131, -0.49835742, -2.794498,
    0.7642305, 2.2330468,
]


def test_the_job_behind_the_connectx_capture():
    """20 steps of SGD lr 0.001 on Linear(5000, 1), seed 2024: gradient t is fl32(c_t * x_t).

    The last digest is that of the checkpoint after 20 steps; the one before guards the gradients.
    """
    torch.manual_seed(2024)
    weight = torch.nn.Linear(5000, 1, bias=False).weight.detach()
    torch.empty((), dtype=torch.int64).random_()
    spec = OptimizerSpec.check("sgd", [(["weight"], {"lr": 0.001})])
    replica = Replica({"weight": weight}, spec, rounding=CPU)
    layout = Layout([[BucketSlice("weight", 0, 5000)]], {"weight": (1, 5000)}, [5000])
    digest = hashlib.sha256()
    for step, scale in enumerate(ON_THE_WIRE, start=1):
        x, _ = torch.randn(5000), torch.randn(1)
        gradient = torch.tensor(scale, dtype=torch.float32) * x
        digest.update(bits(gradient))
        slot = replica.build(step, layout)
        slot.apply(0, gradient.numpy())
        replica.publish(slot)
    assert digest.hexdigest() == "636656c3917b472ca7d70d2ea404c39279f558cc31e7bdccb84cafcf08b85ad0"
    final = hashlib.sha256(bits(replica.current.parameters["weight"])).hexdigest()
    assert final == "1fd37e6261c2b75b30c9d856b07d2eb8e889c17ca33a872e4cd18f7a61e1eae0"
