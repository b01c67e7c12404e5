"""The states of the replica's slots: every edge that is legal, every one that is not, and who is served when."""
import itertools
import os
from contextlib import nullcontext

import pytest
import torch

from flowcheck.job.model import BucketSlice
from updater import found
from updater.errors import LayoutError, NoFreeSlot, OptimizerError, ReplicaError
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.reader import Reader
from updater.replica import Replica
from updater.rounding_modes import RoundingMode
from updater.slot import SlotState
from updater.slots import Slots
from updater.step import StepValues
from updater.store import COMPLETE as COMPLETED
from updater.store import Store

from .idle_pool import IdlePool

FREE, BUILDING, COMPLETE, PINNED = SlotState.FREE, SlotState.BUILDING, SlotState.COMPLETE, SlotState.PINNED
ROUNDING = RoundingMode("torch-cuda-foreach", "2.13.0")  # its root needs no search
WHOLE = Layout([[BucketSlice("w", 0, 3)], [BucketSlice("w", 0, 1, 3)]], {"w": (4,)}, [3, 1])


def replica(path=None, name="sgd", options=(("lr", 1.0),), **kwargs):
    spec = OptimizerSpec.check(name, [(["w"], dict(options))])
    return Replica({"w": torch.zeros(4), "k": torch.arange(2)}, spec, path=path, rounding=ROUNDING, **kwargs)


def advance(made, value=1.0):
    slot = made.build(made.current.step + 1, WHOLE)
    slot.apply(0, torch.full((3,), value))
    slot.apply(1, torch.full((1,), value))
    made.publish(slot)
    return slot


def states(made):
    return [slot.state for slot in made.slots]


def refusal(call, *given, error=ReplicaError, **named):
    with pytest.raises(error) as caught:
        call(*given, **named)
    return str(caught.value)


# -- the guarded setter ------------------------------------------------------------------------------------

PARTIAL = SlotState.PARTIAL
LEGAL = {(FREE, BUILDING), (BUILDING, COMPLETE), (BUILDING, FREE), (BUILDING, PARTIAL), (PARTIAL, FREE),
         (COMPLETE, PINNED), (COMPLETE, FREE), (PINNED, COMPLETE)}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(SlotState, SlotState)))
def test_the_setter_takes_the_legal_edges_and_no_other(before, after):
    """A refused edge changes neither the slot's state nor its word, which other processes read."""
    made = replica()
    slots, slot = Slots(made.slots, made._store), made.slots[1]
    slot.state, slot.step = before, 5
    made._store.set_slot_header(1, 2, 77)
    if (before, after) in LEGAL:
        slots.set_state(slot, after)
        assert slot.state is after
        known = {FREE: (0, 0), BUILDING: (1, 5), PARTIAL: (1, 5), COMPLETE: (2, 5)}
        assert made._store.slot_header(1) == ((2, 77) if PINNED in (before, after) else known[after])
    else:
        assert refusal(slots.set_state, slot, after) == f"slot 1 cannot go from {before.value} to {after.value}"
        assert slot.state is before and made._store.slot_header(1) == (2, 77)


def test_the_life_of_a_version(shm):
    """free, building, partial, complete, pinned, and free again; beside it what other processes see."""
    made = replica(shm / "r", slots=2)
    reader = Reader(shm / "r")
    assert states(made) == [COMPLETE, FREE] and made.building is None and reader.steps == [0] == made.steps
    slot = made.build(1, WHOLE)
    assert states(made) == [COMPLETE, BUILDING] and made.building is slot and slot is not made.current
    slot.apply(0, torch.ones(3))
    assert slot.missing == ["w"] and slot.state is BUILDING and reader.steps == [0] == made.steps
    slot.apply(1, torch.ones(1))
    assert slot.missing == [] and made.current.step == 0 and reader.steps == [0] == made.steps
    made.publish(slot)
    assert states(made) == [COMPLETE, COMPLETE] and made.current is slot and reader.steps == [0, 1] == made.steps
    with made.pinned() as pinned:
        assert pinned is slot and states(made) == [COMPLETE, PINNED] and slot.pins == 1
        assert reader.steps == [0, 1] == made.steps, "a pin is of this process alone"
        with made.pinned():
            assert slot.pins == 2 and slot.state is PINNED
        assert slot.pins == 1 and slot.state is PINNED
        following = made.build(2, WHOLE)
        assert states(made) == [BUILDING, PINNED] and reader.steps == [1] == made.steps
    assert states(made) == [BUILDING, COMPLETE] and slot.pins == 0
    made.discard(following)
    assert states(made) == [FREE, COMPLETE] and reader.steps == [1] and made.building is None


def test_a_pin_ends_with_its_block_whatever_happens_in_it():
    made = replica()
    with pytest.raises(KeyError), made.pinned():
        raise KeyError("x")
    assert made.current.state is COMPLETE and made.current.pins == 0


@pytest.mark.parametrize("state", [FREE, COMPLETE, PINNED])
def test_only_a_slot_being_built_is_published_discarded_or_given_gradients(state):
    made = replica()
    slot = made.slots[0] if state is not FREE else made.slots[1]
    with made.pinned() if state is PINNED else nullcontext():
        index, only = slot.index, "only a slot being built"
        assert refusal(made.publish, slot) == f"slot {index} is {state.value}; {only} can be published"
        assert refusal(made.discard, slot) == f"slot {index} is {state.value}; {only} can be discarded"
        assert refusal(slot.apply, 0, torch.ones(3)) == f"slot {index} is {state.value}; {only} takes gradients"


def test_a_partial_version_is_not_published_and_can_be_finished():
    made = replica()
    slot = made.build(1, WHOLE)
    assert refusal(made.publish, slot) == "step 1 lacks the gradient of 'w'; it cannot be published"
    slot.apply(1, torch.ones(1))
    assert refusal(made.publish, slot) == "step 1 lacks the gradient of 'w'; it cannot be published"
    assert refusal(slot.apply, 1, torch.ones(1)) == "bucket 1 was already applied to step 1"
    assert refusal(slot.apply, 0, torch.ones(2), error=LayoutError).startswith("bucket 0: 2 elements given")
    slot.apply(0, torch.ones(3))
    made.publish(slot)
    assert made.current.parameters["w"].tolist() == [-1] * 4


def test_a_discarded_version_may_be_built_again_and_leaves_nothing():
    made = replica(slots=2, options=(("lr", 1.0), ("momentum", 0.5)))
    advance(made)
    slot = made.build(2, WHOLE)
    slot.apply(1, torch.full((1,), 100.0))
    made.discard(slot)
    again = advance(made)
    assert again is slot and again.step == 2 and again.missing == []
    assert again.parameters["w"].tolist() == [-2.5] * 4
    assert again.optimizer_state["w"]["momentum_buffer"].tolist() == [1.5] * 4


# -- which slot is taken -----------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_free_slots_first_then_the_oldest_version(slots):
    made = replica(slots=slots)
    taken = [advance(made).index for _ in range(2 * slots)]
    assert taken == [*range(1, slots), *range(slots), 0][: 2 * slots]
    assert made.steps == list(range(slots + 1, 2 * slots + 1)) and made.current.step == 2 * slots


def test_a_free_slot_goes_before_an_older_version():
    made = replica(slots=3)
    advance(made)
    slot = made.build(2, WHOLE)
    made.discard(slot)
    assert made.build(2, WHOLE) is slot and made.steps == [0, 1]


def test_updates_wait_for_readers_of_this_and_of_other_processes(shm):
    made = replica(shm / "r", slots=2)
    reader = Reader(shm / "r")
    with made.pinned():
        advance(made)
        assert refusal(made.build, 2, WHOLE, error=NoFreeSlot) == (
            "all 2 slots are current or pinned; the update waits"
        )
    with reader.pinned(0):
        refusal(made.build, 2, WHOLE, error=NoFreeSlot)
        assert states(made) == [COMPLETE, COMPLETE]
    advance(made)
    assert made.steps == [1, 2]


@pytest.mark.parametrize(("keep", "taken"), [
    ((), [1, 2]), ((1,), [2, 3]), ((1, 2), [3, 4]), ((2, 1), [3, 4]), ((1, 2, 3), [3, 4]), ((3, 2, 1), [1, 4]),
    ((1, 2, 3, 4), [3, 4]), ((4, 3, 2, 1), [1, 2]), ((9, 1), [2, 3]), ((5, 4), [1, 2]),
])
def test_versions_that_are_kept_are_built_over_last(keep, taken):
    """The first of them last of all; the current one never."""
    made = replica(slots=4)
    for _ in range(4):
        advance(made)
    assert made.steps == [1, 2, 3, 4]
    made.keep(keep)
    for step in taken:
        before = made.steps
        advance(made)
        assert [one for one in before if one not in made.steps] == [step]
    made.keep(())
    before = made.steps
    advance(made)
    assert made.steps == [*before[1:], 7], "nothing is kept any more"


def test_what_is_free_goes_before_all_versions_kept_or_not():
    made = replica(slots=3)
    advance(made)
    made.keep((1, 0))
    assert made.build(2, WHOLE).index == 2 and made.steps == [0, 1]


def test_no_update_waits_for_a_version_that_is_kept(shm):
    """It goes where readers have the others, or a partial version takes a slot."""
    made = replica(shm / "r", slots=3)
    advance(made)
    advance(made)
    made.keep((0, 1))
    with Reader(shm / "r").pinned(1):
        advance(made)
        assert made.steps == [1, 2, 3], "the one that is kept above all, as the other cannot be taken"
        made.keep((2,))
        advance(made)
        assert made.steps == [1, 3, 4]
    made.keep((1, 3))
    made.leap(9)
    assert made.steps == [1, 4] and made.base.step == 9
    made.build(10, WHOLE)
    assert made.steps == [4]


# -- going back --------------------------------------------------------------------------------------------


def test_going_back_gives_the_newer_versions_up(shm):
    made = replica(shm / "r", slots=4)
    for _ in range(3):
        advance(made)
    assert made.rollback(1) is made.slots[1] is made.current
    assert states(made) == [COMPLETE, COMPLETE, FREE, FREE] and Reader(shm / "r").steps == [0, 1] == made.steps
    assert made.rollback(1) is made.current and made.steps == [0, 1]
    assert advance(made).step == 2
    assert made.current.parameters["w"].tolist() == [-2] * 4


def test_going_back_is_refused_where_it_cannot_be(shm):
    made = replica(shm / "r", slots=4)
    for _ in range(3):
        advance(made)
    assert refusal(made.rollback, 7) == "no complete version 7; there is 0, 1, 2, 3"
    slot = made.build(4, WHOLE)
    assert refusal(made.rollback, 4) == "step 4 is being built; publish or discard it first"
    made.discard(slot)
    assert made.steps == [1, 2, 3]
    with made.pinned():
        assert refusal(made.rollback, 1, error=NoFreeSlot) == "version 3 is pinned; it cannot be given up yet"
        assert made.rollback(3).step == 3
    with Reader(shm / "r").pinned(2):
        assert refusal(made.rollback, 1, error=NoFreeSlot) == "version 2 is pinned; it cannot be given up yet"
        assert made.current.step == 2 and made.steps == [1, 2], "what is given up first is the newest"
    assert made.rollback(1).step == 1 and made.steps == [1]
    for _ in range(3):  # every slot can be taken again
        advance(made)
    assert made.steps == [1, 2, 3, 4]


# -- what is refused when a build begins -------------------------------------------------------------------


def test_a_build_that_cannot_begin_takes_no_slot():
    made = replica(buffers=frozenset(["k"]))
    for step in (0, 2, -1):
        assert refusal(made.build, step, WHOLE) == f"step {step} cannot be built from step 0"
    other = Layout([[BucketSlice("w", 0, 2), BucketSlice("z", 2, 1)]], {"w": (2,), "z": (1,)})
    assert refusal(made.build, 1, other) == "the bucket layout and the optimizer disagree on 'w', 'z'"
    for values, error, why in [
        ({"groups": ({}, {})}, OptimizerError, "sgd has 1 groups, the step has values for 2"),
        ({"buffers": {"w": torch.zeros(4)}}, ReplicaError, "'w' is not a buffer"),
        ({"buffers": {"k": torch.zeros(2)}}, ReplicaError, "buffer 'k' is int64 (2,), given torch.float32 (2,)"),
        ({"buffers": {"k": torch.arange(3)}}, ReplicaError, "buffer 'k' is int64 (2,), given torch.int64 (3,)"),
    ]:
        assert refusal(made.build, 1, WHOLE, StepValues(**values), error=error) == why
    assert states(made) == [COMPLETE, FREE, FREE]
    slot = made.build(1, WHOLE, StepValues(buffers={"k": torch.tensor([8, 9])}))
    assert refusal(made.build, 2, WHOLE) == "step 1 is still being built; publish or discard it first"
    assert slot.parameters["k"].tolist() == [8, 9] and made.current.parameters["k"].tolist() == [0, 1]


# -- what a replica is made of -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"slots": 1}, "1 slots asked for; a replica has 2 to 4"),
        ({"slots": 5}, "5 slots asked for; a replica has 2 to 4"),
        ({"divisor": 0}, "divisor 0 or step 0 is out of range"),
        ({"step": -1}, "divisor 1 or step -1 is out of range"),
        ({"tied": {"k": "z"}}, "'k' cannot be tied to 'z': one model entry, one optimized tensor"),
        ({"tied": {"w": "w"}}, "'w' cannot be tied to 'w': one model entry, one optimized tensor"),
        ({"tied": {"z": "w"}}, "'z' cannot be tied to 'w': one model entry, one optimized tensor"),
        ({"tied": {"k": "w"}}, "'k' is tied to 'w' and differs from it"),
        ({"tied": {"same": "w"}}, "'same' is tied to 'w' and differs from it"),
        ({"optimizer_state": {"k": {}}}, "optimizer state of 'k', which is not optimized"),
        ({"optimizer_state": {"w": {"exp_avg": torch.zeros(3)}}}, "optimizer state 'exp_avg' of 'w' has shape (3,)"),
        ({"optimizer_state": {"w": {"max_exp_avg_sq": torch.zeros(4)}}},
         "optimizer state 'max_exp_avg_sq' of 'w' is not one that adam has here"),
        ({"optimizer_state": {"w": {"master": torch.zeros(4)}}},
         "optimizer state 'master' of 'w' is not one that adam has here"),
    ],
)
def test_replicas_that_cannot_be(kwargs, why):
    spec = OptimizerSpec.check("adam", [(["w"], {"lr": 1})])
    tensors = {"w": torch.zeros(4), "k": torch.arange(2), "same": torch.ones(4)}
    assert refusal(Replica, tensors, spec, rounding=ROUNDING, **kwargs) == why


def test_only_float_tensors_that_there_are_can_be_optimized():
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1})])
    assert refusal(Replica, {}, spec, rounding=ROUNDING) == "'w' is to be optimized and is not in the model"
    for dtype in (torch.float64, torch.int32):
        assert refusal(Replica, {"w": torch.zeros(4, dtype=dtype)}, spec, rounding=ROUNDING) == (
            f"'w' is to be optimized and is {dtype}; fp32, bf16 or fp16 can be"
        )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made = Replica({"w": torch.zeros(4, dtype=dtype)}, spec, rounding=ROUNDING)
        assert made.current.parameters["w"].dtype == dtype
    assert refusal(Replica, {"w": torch.zeros(4)}, spec, rounding=RoundingMode("torch-cuda-fused"),
                   error=OptimizerError) == (
        "fused SGD on CUDA multiplies in double precision; there is no kernel for that"
    )
    sgd = {"w": {"step": 3.0}}
    assert refusal(Replica, {"w": torch.zeros(4)}, spec, rounding=ROUNDING, optimizer_state=sgd) == (
        "optimizer state 'step' of 'w' is not one that sgd has here"
    )


def test_state_that_a_checkpoint_gives_is_the_first_versions():
    spec = OptimizerSpec.check("adam", [(["w", "half", "new"], {"lr": 1})])
    tensors = {"w": torch.zeros(4), "half": torch.zeros(2, dtype=torch.bfloat16), "new": torch.zeros(1)}
    state = {
        "w": {"step": torch.tensor(6.0), "exp_avg": torch.ones(4), "exp_avg_sq": torch.full((4,), 2.0),
              "max_exp_avg_sq": None},
        "half": {"master": torch.full((2,), 0.125), "exp_avg": torch.ones(2)},
    }
    now = Replica(tensors, spec, rounding=ROUNDING, optimizer_state=state, step=6).current.optimizer_state
    assert set(now) == {"w", "half"} and set(now["w"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert (float(now["w"]["step"]), float(now["half"]["step"])) == (6, 1), "who has a state has had a step"
    assert now["w"]["exp_avg_sq"].tolist() == [2] * 4 and now["half"]["exp_avg_sq"].tolist() == [0, 0]
    assert now["half"]["master"].tolist() == [0.125] * 2


# -- going on with a file ----------------------------------------------------------------------------------


def test_going_on_from_the_newest_complete_version(shm):
    made = replica(shm / "r", slots=4, run_id="run", epoch=2, divisor=2)
    advance(made)
    advance(made)
    made.build(3, WHOLE).apply(0, torch.ones(3))
    made.close()
    made.close()
    again = Replica.attach(shm / "r", run_id="run", epoch=2)
    assert states(again) == [COMPLETE, COMPLETE, COMPLETE, FREE] and again.current.step == 2
    assert [slot.step for slot in again.slots[:3]] == [0, 1, 2] and again.steps == [0, 1, 2]
    assert again._store.slot_header(3) == (0, 0), "what was being built is gone"
    advance(again)
    assert again.current.parameters["w"].tolist() == [-1.5] * 4, "the divisor is the file's"
    assert again.nbytes == (shm / "r").stat().st_size
    again.close()


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"run_id": "other"}, "belongs to run_id 'run', not 'other'"),
        ({"run_id": ""}, "belongs to run_id 'run', not ''"),
        ({"epoch": 0}, "belongs to epoch 2, not 0"),
        ({"rounding": RoundingMode("torch-cpu-fused", "2.13.0")},
         "was built with rounding mode torch-cuda-foreach of torch 2.13.0"),
        ({"rounding": RoundingMode("torch-cuda-foreach", "2.12.0")},
         "was built with rounding mode torch-cuda-foreach of torch 2.13.0"),
    ],
)
def test_a_file_of_another_job_or_order(shm, asked, why):
    """Who was refused has let go of the file, also while its error is kept."""
    replica(shm / "r", run_id="run", epoch=2).close()
    with pytest.raises(ReplicaError) as caught:
        Replica.attach(shm / "r", **asked)
    assert str(caught.value) == f"{shm}/r: {why}"
    Replica.attach(shm / "r", rounding=ROUNDING, run_id="run", epoch=2).close()


@pytest.mark.parametrize(("threads", "said"), [(0, "an unknown number of"), (3, "3")])
def test_a_file_of_another_number_of_threads(shm, threads, said):
    """What is updated in 16 bits alone rounds otherwise: the number is told, and the file's own is no difference."""
    made = RoundingMode("torch-cpu", "2.13.0", threads=threads)
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0})])
    Replica({"w": torch.zeros(4)}, spec, path=shm / "r", rounding=made).close()
    wrong = refusal(Replica.attach, shm / "r", rounding=RoundingMode("torch-cpu", "2.13.0", threads=2))
    assert wrong == f"{shm}/r: was built with rounding mode torch-cpu of torch 2.13.0, with {said} threads"
    wrong = refusal(Replica.attach, shm / "r", rounding=RoundingMode("torch-cpu", "2.12.0", threads=threads))
    assert wrong == f"{shm}/r: was built with rounding mode torch-cpu of torch 2.13.0"
    again = Replica.attach(shm / "r")
    assert again.rounding.threads == threads
    again.close()


def test_what_is_said_in_the_file_is_checked_as_when_it_was_made(shm, monkeypatch):
    """The optimizer with its order of roundings, and what is updated in 16 bits alone with both."""
    rounding = RoundingMode("torch-cpu-fused", "2.13.0")
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0, "fused": True})], fused=True)
    Replica({"w": torch.zeros(4)}, spec, path=shm / "r", rounding=rounding).close()
    seen = []
    monkeypatch.setattr(found, "check_alone", lambda *given: seen.append(given))
    again = Replica.attach(shm / "r")
    [(arrays, optimizer, mode)] = seen
    assert arrays == again._store.layout["arrays"] and optimizer is again.optimizer and mode is again.rounding
    assert mode.name == "torch-cpu-fused"
    again.close()
    check = OptimizerSpec.check
    monkeypatch.setattr(OptimizerSpec, "check", lambda *given, **named: (seen.append(named), check(*given, **named))[1])
    Replica.attach(shm / "r").close()
    assert seen[1] == {"fused": True}


def test_a_file_without_a_complete_version(shm):
    made = replica(shm / "r")
    made._store.set_slot_header(0, 1, 0)
    made.close()
    assert refusal(Replica.attach, shm / "r") == f"{shm}/r: no complete version in it"


# -- workers that are not done yet ---------------------------------------------------------------------------


def building(made):
    """(a slot with all its buckets applied and nothing of them done, its pool, what is noted of its words)."""
    slot, moments = made.build(1, WHOLE), []
    slot._pool = pool = IdlePool(slot._pool)
    write = made._store.set_slot_header

    def set_slot_header(index, state, step):
        moments.append((state, len(pool.queued)))
        write(index, state, step)

    made._store.set_slot_header = set_slot_header
    slot.apply(0, torch.full((3,), 1.0))
    slot.apply(1, torch.full((1,), 2.0))
    assert len(pool.queued) == 2
    return slot, pool, moments


def test_a_version_is_complete_when_its_workers_are_done_and_not_before():
    """Its word is what readers in other processes go by."""
    made = replica()
    slot, _, moments = building(made)
    made.publish(slot)
    assert moments == [(2, 0)]  # complete, and nothing is queued
    assert made.current.parameters["w"].tolist() == [-1, -1, -1, -2]


def test_a_slot_is_free_when_its_workers_are_done_and_not_before():
    """They would write into the version that is built there next."""
    made = replica()
    slot, _, moments = building(made)
    made.discard(slot)
    assert moments == [(0, 0)]


def test_a_file_gets_its_name_when_it_can_be_read_and_not_before(shm, monkeypatch):
    found, link = [], os.link

    def linked(*given, **named):
        link(*given, **named)
        reader = Reader(shm / "replica")
        with reader.pinned() as version:
            found.append((version.step, version.parameters["w"].tolist()))
        reader.close()

    monkeypatch.setattr(os, "link", linked)
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0})])
    made = Replica({"w": torch.tensor([1.0, 2.0])}, spec, path=shm / "replica", rounding=ROUNDING, step=9)
    assert found == [(9, [1.0, 2.0])]
    made.close()


def test_going_on_with_what_is_described_alike(shm):
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0})])
    given = {"slots": 3, "divisor": 2, "run_id": "run", "epoch": 2, "unproven": ["a mark"], "start": "one"}
    Replica({"w": torch.zeros(4)}, spec, path=shm / "r", rounding=ROUNDING, **given).close()

    def like(**change):
        kinds = {"buffers": frozenset(), "tied": {}, "masters": True}
        shape = change.pop("shape", (4,))
        tensors = {"w": torch.empty(shape, device="meta")}
        return found.describe(tensors, spec, ROUNDING, **{**given, **kinds, **change})

    again = Replica.attach(shm / "r", like=like())
    assert again.current.step == 0 and again.said == ("", (), None)
    again.close()
    for change, odd in ({"start": "two"}, "start"), ({"unproven": []}, "unproven"), ({"slots": 4}, "slots"), (
            {"shape": (5,)}, "arrays"), ({"run_id": "x", "epoch": 3}, "epoch, run_id"), ({"divisor": 1}, "divisor"):
        why = refusal(Replica.attach, shm / "r", like=like(**change))
        assert why == f"{shm}/r: is of another job or other settings: {odd}"


def test_a_file_of_other_corrections(shm):
    """They decide bits: the file goes on with its own, and with no other ones."""
    said, torch_version = {"0.9": {}, "0.95": {"6": 0.26490813493728638}}, "2.11.0+cu130"
    made = RoundingMode("torch-cuda-fused", torch_version, corrections=said)
    spec = OptimizerSpec.check("adamw", [(["w"], {"lr": 1.0, "betas": (0.9, 0.95)})], fused=True)
    Replica({"w": torch.zeros(4)}, spec, path=shm / "r", rounding=made).close()
    for others in ({}, {"0.9": {}, "0.95": {}}, {**said, "0.99": {}}):
        mode = RoundingMode("torch-cuda-fused", torch_version, corrections=others)
        assert refusal(Replica.attach, shm / "r", rounding=mode) == (
            f"{shm}/r: was built with rounding mode torch-cuda-fused of torch {torch_version},"
            " with other corrections of the GPU's powf"
        )
    for mode in (None, made):
        again = Replica.attach(shm / "r", rounding=mode)
        assert again.rounding == made
        again.close()


@pytest.mark.parametrize(("mode", "name", "options", "why"), [
    (ROUNDING, "adam", {"weight_decay": 0.1}, ""), (RoundingMode("torch-cuda-fused", "2.13.0"), "adamw", {}, ""),
    (RoundingMode("torch-cuda-fused", "2.13.0"), "adam", {"weight_decay": 0.1}, "fused Adam on CUDA"),
])
def test_a_file_of_before_there_were_corrections(shm, mode, name, options, why):
    """It has none, which is what a mode without any says. What is refused since has no kernel in a file either."""
    spec = OptimizerSpec.check(name, [(["w"], {"lr": 1.0, **options})], fused=mode.fused)
    tensors, kinds = {"w": torch.zeros(4)}, {"buffers": frozenset(), "tied": {}, "masters": True}
    like = found.describe(tensors, spec, mode, slots=2, divisor=1, run_id="", epoch=0, unproven=[], start="", **kinds)
    assert like["corrections"] == {}
    before = {key: value for key, value in like.items() if key != "corrections"}
    store = Store.create(before, shm / "r")
    store.lock_writer(shm / "r")
    store.set_slot_header(0, COMPLETED, 5)
    store.publish_file()
    store.close()
    if why:
        assert why in refusal(Replica.attach, shm / "r", like=like, error=OptimizerError)
        return
    again = Replica.attach(shm / "r", like=like, rounding=mode)
    assert again.current.step == 5
    again.close()
