"""A replica that begins without any version: all of it is anything until it was patched, and nobody finds it before."""
import os
import signal

import pytest
import torch

from flowcheck.job.model import BucketSlice
from updater.errors import NoFreeSlot, OptimizerError, ReplicaError
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.reader import Reader
from updater.replica import Replica
from updater.rounding_modes import RoundingMode
from updater.slot import SlotState

from ..forks import fork

ROUNDING = RoundingMode("torch-cuda-foreach")
W, K, N = 6, 5, 3
LAYOUT = Layout([[BucketSlice("w", 0, W)]], {"w": (2, 3)}, [W])
SPEC = OptimizerSpec.check("adam", [(["w"], {"lr": 0.5})])


def meta(shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def model():
    return {"w": meta((2, 3)), "k": meta((K,), torch.int64), "mean": meta(N), "head": meta((2, 3))}


def empty(path=None, **options):
    return Replica(model(), SPEC, rounding=ROUNDING, path=path, buffers=frozenset(["mean"]), tied={"head": "w"},
                   empty=True, **{"step": 4, **options})


def state(value):
    return {"w": {"step": torch.tensor(9.0), "exp_avg": torch.full((W,), value), "exp_avg_sq": torch.full((W,), 4.0)}}


def build(replica):
    slot = replica.build(replica.base.step + 1, LAYOUT)
    slot.apply(0, torch.ones(W))
    replica.finish(slot, {"mean": torch.full((N,), 7.0)})
    return slot


def complete(replica):
    slot = build(replica)
    slot.patch([("w", 0, W)], {"w": torch.arange(6.0)}, state(2.0))
    replica.fill([("k", 0, K)], {"k": torch.arange(K)})
    replica.publish(slot)


@pytest.mark.parametrize("threads", [0, 2])
def test_it_is_built_upon_patched_and_then_complete(shm, threads):
    path = shm / "r"
    replica = empty(path, threads=threads)
    assert replica.empty and replica.steps == [] and replica.partial is replica.base and replica.base.step == 4
    with pytest.raises(ReplicaError, match="no version of this replica is complete yet"):
        _ = replica.current
    with pytest.raises(ReplicaError, match="complete yet"), replica.pinned():
        pass
    replica.hold(build(replica))
    assert replica.base.step == 5 and replica.empty and not path.exists(), "a file of no name is nobody's"
    complete(replica)
    assert not replica.empty and replica.steps == [6] and replica.partial is None
    with Reader(path).pinned() as version:
        assert version.step == 6 and version.parameters["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert version.parameters["head"].data_ptr() == version.parameters["w"].data_ptr()
        assert version.parameters["k"].tolist() == [0, 1, 2, 3, 4] and version.parameters["mean"].tolist() == [7.0] * N
        held = version.optimizer_state["w"]
        assert held["step"] == 9.0 and set(held["exp_avg"].reshape(-1).tolist()) == {2.0}
    replica.publish(build(replica))
    assert replica.current.optimizer_state["w"]["step"] == 10.0, "counted from what was patched"


def test_it_may_leap_before_anything_is_there():
    replica = empty(step=0)
    replica.leap(8)
    assert replica.base.step == 8 and replica.empty
    complete(replica)
    assert replica.steps == [9]


def test_constants_are_written_while_no_version_has_them():
    replica = empty()
    replica.fill([("k", 3, 2), ("k", 0, 1)], {"k": torch.tensor([30, 40, 10])})
    complete(replica)
    with pytest.raises(ReplicaError, match="a complete version has these constants"):
        replica.fill([("k", 0, 1)], {"k": torch.tensor([5])})
    assert replica.current.parameters["k"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("ranges", "values", "why"), [
    ([("k", 0, 1), ("k", 4, 2)], {"k": torch.zeros(3, dtype=torch.int64)}, r"elements \[4, 6\) of 'k' are none"),
    ([("k", -1, 2)], {"k": torch.zeros(2, dtype=torch.int64)}, "are none of a constant"),
    ([("k", 2, 0)], {"k": torch.zeros(0, dtype=torch.int64)}, "are none of a constant"),
    ([("w", 0, 1)], {"w": torch.zeros(1)}, r"of 'w' are none of a constant"),
    ([("k", 0, 2)], {}, "the constant 'k' without their values"),
    ([("k", 0, 2)], {"k": torch.zeros(3, dtype=torch.int64)}, r"of the constant 'k' come as torch.int64 \(3,"),
    ([("k", 0, 2)], {"k": torch.zeros(2)}, r"come as torch.float32 \(2,\), and it is torch.int64"),
])
def test_what_does_not_fit_a_constant_is_refused(ranges, values, why):
    replica = empty()
    replica.fill([("k", 0, K)], {"k": torch.full((K,), 8)})
    with pytest.raises(ReplicaError, match=why):
        replica.fill(ranges, values)
    complete_without_constants(replica)
    assert replica.current.parameters["k"].tolist() == [8] * K


def complete_without_constants(replica):
    slot = build(replica)
    slot.patch([("w", 0, W)], {"w": torch.zeros(W)}, state(0.0))
    replica.publish(slot)


def test_what_no_replica_can_hold_is_refused_without_its_tensors():
    with pytest.raises(ReplicaError, match="'head' is tied to 'w' and differs from it"):
        Replica({**model(), "head": meta((3, 2))}, SPEC, tied={"head": "w"}, rounding=ROUNDING, empty=True)
    with pytest.raises(OptimizerError):
        empty(values=[{"lr": 1.0}, {"lr": 1.0}])


def test_when_it_is_given_up_there_is_nothing_to_go_on_with():
    replica = empty()
    replica.abandon()
    with pytest.raises(ReplicaError, match="complete yet"):
        _ = replica.base


def test_two_slots_are_too_few():
    replica = empty(slots=2)
    replica.discard(build(replica))
    replica.hold(build(replica))
    slot = build(replica)
    assert sorted(one.state.value for one in replica.slots) == ["building", "partial"]
    replica.discard(slot)
    complete(replica)
    with pytest.raises(NoFreeSlot):
        replica.leap(20), build(replica)


def test_a_kill_before_the_first_version_leaves_nothing(shm):
    """Neither a file nor its memory."""
    path = shm / "r"
    for partial in (0, 1, 2):
        start, end = os.pipe()
        pid = fork()
        if pid == 0:
            try:
                replica = empty(path)
                for _ in range(partial):
                    replica.hold(build(replica))
                os.write(end, b"!")
                signal.pause()
            finally:
                os._exit(1)
        os.close(end)
        assert os.read(start, 1) == b"!"
        os.close(start)
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]) and list(shm.iterdir()) == []
    complete(replica := empty(path))
    assert Reader(path).steps == [5] and replica.slots[0].state is SlotState.FREE
