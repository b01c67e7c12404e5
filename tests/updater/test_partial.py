"""Versions of which some elements are anything: built upon, patched, never served, and gone after a kill.

The truth is a second replica of the same gradients that loses nothing; its elements stand for a trainer's.
"""
import os
import random
import signal
import time

import pytest
import torch

from flowcheck.job.model import BucketSlice
from updater.errors import NoFreeSlot, ReplicaError
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.reader import Reader
from updater.replica import Replica
from updater.rounding_modes import RoundingMode
from updater.slot import SlotState
from updater.step import StepValues

from ..forks import fork
from .test_shared import came_on, fresh, layout, state_bits, undisturbed

BUILDING, COMPLETE, PARTIAL = SlotState.BUILDING, SlotState.COMPLETE, SlotState.PARTIAL
W, B = 70 * 300, 5001
HOLES = [("w", 3, 700), ("b", 0, 1), ("w", 20990, 10), ("b", 4000, 1001)]  # over both buckets, at both ends


def gradients(step):
    """Of both buckets; as test_shared.advance makes them."""
    generator, sizes = torch.Generator().manual_seed(step), layout().elements
    return {index: torch.randn(sizes[index], generator=generator) for index in ((1, 0) if step % 2 else (0, 1))}


def holed(found, holes):
    """The buckets with anything where the holes are."""
    for bucket, pieces in enumerate(layout().buckets):
        for piece in pieces:
            for name, start, length in holes:
                first, end = max(start, piece.start), min(start + length, piece.start + piece.length)
                if name == piece.name and first < end:
                    found[bucket][piece.offset + first - piece.start : piece.offset + end - piece.start] = float("nan")
    return found


def build(replica, holes=(), values=None):
    step = replica.base.step + 1
    slot = replica.build(step, layout(), values)
    for bucket, data in holed(gradients(step), holes).items():
        slot.apply(bucket, data)
    return slot


def go_on(truth):
    truth.publish(build(truth))


def cut(version, ranges):
    """What a trainer at this version sends of these elements."""
    def part(tensor, name):
        flat = tensor.reshape(-1)
        return torch.cat([flat[start : start + length] for one, start, length in ranges if one == name])

    names = list(dict.fromkeys(name for name, _, _ in ranges))
    held = version.optimizer_state
    state = {n: {k: part(t, n) if t.dim() else t.clone() for k, t in held.get(n, {}).items()} for n in names}
    return [part(version.parameters[name], name) for name in names], state, names


def patch(slot, truth, ranges):
    parts, state, names = cut(truth.current, ranges)
    slot.patch(ranges, dict(zip(names, parts, strict=True)), state)


EVERYTHING = [("w", 0, W), ("b", 0, B)]


@pytest.mark.parametrize("threads", [0, 2])
def test_holes_of_three_steps_are_patched_and_the_version_is_the_truth(shm, threads):
    replica, truth = fresh(shm / "r", slots=3, threads=threads), fresh(slots=2)
    reader = Reader(shm / "r")
    for step in (1, 2, 3):
        slot = build(replica, HOLES if step < 3 else HOLES[:1])
        go_on(truth)
        assert [one.state for one in replica.slots].count(PARTIAL) == (step > 1)
        replica.hold(slot)
        assert replica.partial is replica.base is slot and replica.current.step == 0 and replica.steps == [0]
        assert reader.steps == [0], "nobody else sees it"
    slot = build(replica, HOLES[1:2])
    go_on(truth)
    patch(slot, truth, HOLES[:2])
    patch(slot, truth, HOLES[2:])
    replica.publish(slot)
    assert state_bits(replica.current) == state_bits(truth.current) and replica.partial is None
    assert reader.steps == [0, 4] and sorted(one.state.value for one in replica.slots) == ["complete"] * 2 + ["free"]
    for _ in range(2):
        replica.publish(build(replica))
        go_on(truth)
    assert state_bits(replica.current) == state_bits(truth.current)


def test_what_is_not_patched_shows(shm):
    """The comparison above can fail."""
    replica, truth = fresh(), fresh()
    slot = build(replica, HOLES)
    go_on(truth)
    patch(slot, truth, HOLES[1:])
    replica.publish(slot)
    assert state_bits(replica.current) != state_bits(truth.current)
    found, right = replica.current.parameters["w"].reshape(-1), truth.current.parameters["w"].reshape(-1)
    assert found[3:703].isnan().all() and torch.equal(found[703:], right[703:]) and torch.equal(found[:3], right[:3])


def test_a_leap_over_iterations_is_patched_in_slices_at_their_own_steps(shm):
    """Everything is anything; each slice comes at another step, and later gradients are applied to it."""
    replica, truth = fresh(shm / "r", slots=3), fresh()
    for _ in range(5):
        go_on(truth)
    replica.leap(3)
    replica.leap(5)
    assert (replica.base.step, replica.partial.step, replica.current.step, replica.steps) == (5, 5, 0, [0])
    assert Reader(shm / "r").steps == [0]
    for ranges in ([("w", 0, 9000)], [("b", 0, B), ("w", 20000, 1000)], [("w", 9000, 11000)]):
        slot = build(replica)
        go_on(truth)
        patch(slot, truth, ranges)
        replica.hold(slot) if ranges[0][1] != 9000 else replica.publish(slot)
    assert replica.current.step == 8 and state_bits(replica.current) == state_bits(truth.current)
    with pytest.raises(ReplicaError, match="no leap to step 8 from step 8"):
        replica.leap(8)
    build(replica)
    with pytest.raises(ReplicaError, match="no leap to step 12 from step 9"):
        replica.leap(12)


def test_a_partial_version_takes_a_third_slot():
    replica = fresh(slots=2)
    replica.hold(build(replica, HOLES))
    with pytest.raises(NoFreeSlot):
        build(replica)
    replica.abandon()
    assert replica.base is replica.current
    replica.publish(build(replica))
    assert replica.current.step == 1
    replica.abandon()


def test_nobody_can_pin_a_partial_version_and_a_reader_keeps_its_own(shm):
    replica = fresh(shm / "r", slots=4)
    replica.publish(build(replica))
    reader = Reader(shm / "r")
    with reader.pinned(0) as old, replica.pinned() as current:
        kept = state_bits(old)
        replica.hold(build(replica, HOLES))
        with pytest.raises(ReplicaError, match="no complete version 2"), reader.pinned(2):
            pass
        replica.hold(build(replica))  # the partial one before it has made room
        slot = build(replica)
        assert {one.state for one in replica.slots} == {COMPLETE, SlotState.PINNED, PARTIAL, BUILDING}
        replica.discard(slot)
        assert state_bits(old) == kept and current is replica.current and current.step == 1
    replica.rollback(0)
    assert replica.partial is None and replica.base.step == 0


def test_a_version_that_lacks_a_bucket_is_not_held():
    replica = fresh()
    slot = replica.build(1, layout())
    with pytest.raises(ReplicaError, match="lacks the gradient of 'w'; it cannot be held"):
        replica.hold(slot)
    assert slot.state is BUILDING and replica.partial is None


@pytest.mark.parametrize("ranges", [[("w", W - 1, 2)], [("w", -1, 2)], [("w", 5, 0)], [("k", 0, 1)], [("x", 0, 1)]])
def test_ranges_outside_of_a_tensor_are_refused(ranges):
    replica = fresh()
    slot = build(replica)
    before = state_bits(slot)
    with pytest.raises(ReplicaError, match="are not optimized"):
        slot.patch([("b", 0, 1), *ranges], {"b": torch.ones(1)}, {})
    assert state_bits(slot) == before


@pytest.mark.parametrize(("parameters", "state", "why"), [
    ({}, {}, "a patch of 'b' without its parameter"),
    ({"b": torch.ones(3)}, {}, r"a patch of 2 elements of 'b' has torch.float32 \(3,\) as 'p'"),
    ({"b": torch.ones(2, dtype=torch.float64)}, {}, "has torch.float64"),
    ({"b": torch.ones(2)}, {"b": {"exp_avg": torch.ones(1)}}, r"has torch.float32 \(1,\) as 'm'"),
])
def test_values_that_do_not_fit_are_refused(parameters, state, why):
    replica = fresh()
    slot = build(replica)
    before = state_bits(slot)
    with pytest.raises(ReplicaError, match=why):
        slot.patch([("b", 7, 2)], parameters, state)
    assert state_bits(slot) == before


def test_masters_and_their_narrow_copies_are_patched_both():
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0, "momentum": 0.5})])
    made = Replica({"w": torch.zeros(4, dtype=torch.bfloat16)}, spec, rounding=RoundingMode("torch-cuda-foreach"))
    whole = Layout([[BucketSlice("w", 0, 4)]], {"w": (4,)}, [4])
    slot = made.build(1, whole)
    slot.apply(0, torch.ones(4))
    narrow = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    with pytest.raises(ReplicaError, match="without its master"):
        slot.patch([("w", 1, 2)], {"w": narrow}, {})
    buffer, master = torch.tensor([7.0, 8.0]), torch.tensor([3.001, 4.001])
    slot.patch([("w", 1, 2)], {"w": narrow}, {"w": {"momentum_buffer": buffer, "master": master}})
    made.publish(slot)
    assert made.current.parameters["w"].tolist() == [-1.0, 3.0, 4.0, -1.0]
    assert made.current.masters["w"].tolist() == [-1.0, *master.tolist(), -1.0]
    assert made.current.optimizer_state["w"]["momentum_buffer"].tolist() == [1.0, 7.0, 8.0, 1.0]


def test_a_skipped_step_copies_what_is_partial():
    replica, truth = fresh(), fresh()
    replica.hold(build(replica, HOLES))
    go_on(truth)
    slot = build(replica, values=StepValues(skip=True))
    truth.publish(build(truth, values=StepValues(skip=True)))
    patch(slot, truth, HOLES)
    replica.publish(slot)
    assert state_bits(replica.current) == state_bits(truth.current)


# -- killed -------------------------------------------------------------------------------------------------------


def ever_partial(path):
    """In a child: two of three versions are partial, and some steps are leapt over. Publishes multiples of 3."""
    replica = Replica.attach(path, run_id="run", epoch=3, threads=os.getpid() % 3)
    start = replica.current
    truth = Replica(start.parameters, replica.optimizer, step=start.step, optimizer_state=start.optimizer_state,
                    slots=2, rounding=RoundingMode("torch-cpu"))
    yield
    while True:
        stale = HOLES
        if truth.current.step % 2:
            go_on(truth)
            replica.leap(truth.current.step)
            stale = EVERYTHING
        while (step := replica.base.step + 1) % 3:
            replica.hold(build(replica, HOLES))
        slot = build(replica, HOLES)
        while truth.current.step < step:
            go_on(truth)
        patch(slot, truth, stale[:1])
        patch(slot, truth, stale[1:])
        replica.publish(slot)


def kill_while_partial(shm, times, seed):
    path = shm / "replica"
    fresh(path, slots=3).close()
    at, rng, last, moved, found = undisturbed(), random.Random(seed), 0, 0, 0
    for kill in range(times):
        start, end = os.pipe()
        pid = fork()
        if pid == 0:  # only os._exit or a signal ends this process
            try:
                for _ in ever_partial(path):
                    os.write(end, b"!")
            finally:
                os._exit(1)
        os.close(end)
        assert os.read(start, 1) == b"!", "the child could not attach"
        os.close(start)
        if kill % 4:
            came_on(path, last)
        time.sleep(rng.uniform(0, 0.04))
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        reader = Reader(path)
        words = [reader._store.slot_header(i)[0] for i in range(3)]
        found += words.count(1) == 2  # a partial version, and one that is built from it
        with reader.pinned() as version:
            assert version.step >= last and version.step % 3 == 0, f"kill {kill}: version {version.step} was partial"
            moved += version.step > last
            last = version.step
            assert state_bits(version) == at(last), f"kill {kill}: step {last} is not that of an undisturbed run"
        replica = Replica.attach(path)
        assert replica.partial is None is replica.building and replica.base.step == last
        assert all(step % 3 == 0 for step in replica.steps)
        replica.close()
    assert moved > times // 4, "the children were killed before they did anything"
    assert found > times // 4, "no child was killed while it had a partial version"


def test_killed_while_partial(shm):
    kill_while_partial(shm, 20, 3)


@pytest.mark.slow
def test_killed_while_partial_at_a_hundred_random_instants(shm):
    kill_while_partial(shm, 100, 4)


# -- what a step has besides elements --------------------------------------------------------------------


FLAT = Layout([[BucketSlice("w", 0, 4)]], {"w": (4,)}, [4])


def momentum(dtype=torch.float32, **options):
    """One tensor of four elements, whose first update sets the momentum buffer as it is, and later ones dampen it."""
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0, "momentum": 0.5, "dampening": 0.5})])
    tensors = {"w": torch.zeros(4, dtype=dtype), "mean": torch.arange(2.0)}
    return Replica(tensors, spec, rounding=RoundingMode("torch-cpu", threads=1), slots=3, **options)


def once(replica, gradient, **values):
    slot = replica.build(replica.base.step + 1, FLAT, StepValues(**values))
    slot.apply(0, torch.full((4,), gradient, dtype=replica.base.parameters["w"].dtype))
    return slot


@pytest.mark.parametrize(("state", "after"), [
    ({"momentum_buffer": 4.0}, 7.0),  # 10 - (0.5 * 4 + 0.5 * 2)
    ({}, 8.0),  # the trainer had no buffer yet: its next update is the first
])
@pytest.mark.parametrize(("dtype", "masters"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_patch_says_whether_there_was_an_update_before(state, after, dtype, masters):
    replica = momentum(dtype, masters=masters)
    replica.hold(once(replica, float("nan")))
    slot = once(replica, 1.0)
    held = {key: torch.full((4,), value, dtype=dtype) for key, value in state.items()}
    slot.patch([("w", 0, 4)], {"w": torch.full((4,), 10.0, dtype=dtype)}, {"w": held} if held else {})
    replica.publish(slot)
    replica.publish(once(replica, 2.0))
    assert replica.current.parameters["w"].tolist() == [after] * 4


def test_a_leap_takes_along_what_is_not_of_elements():
    """Options of the step before, its count and its buffers; elements are anything."""
    replica = momentum(buffers=frozenset(["mean"]))
    slot = once(replica, 1.0, buffers={"mean": torch.tensor([5.0, 6.0])}, groups=[{"lr": 0.25}])
    replica.publish(slot)
    replica.leap(7)
    found = replica.partial
    assert found.step == 7 and found.parameters["mean"].tolist() == [5.0, 6.0]
    assert found.optimizer == replica.current.optimizer and found.optimizer["groups"][0]["options"]["lr"] == 0.25
    assert float(found._steps[0]) == float(replica.current._steps[0]) == 1.0
    assert found.parameters["w"].tolist() != replica.current.parameters["w"].tolist()
