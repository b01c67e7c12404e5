"""The replica in shared memory: killed at any instant, read by others, refused when torn or foreign."""
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from flowcheck.job.model import BucketSlice
from updater.errors import NoFreeSlot, ReplicaError
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.reader import Reader
from updater.replica import Replica
from updater.rounding_modes import RoundingMode

from ..forks import fork
from .bits import state_bits

SIZES = {"w": (70, 300), "b": (5001,)}


def layout():
    w, b = 70 * 300, 5001
    return Layout([[BucketSlice("b", 0, b), BucketSlice("w", b, 500)], [BucketSlice("w", 0, w - 500, 500)]], SIZES,
                  [b + 500, w - 500])


def fresh(path=None, **kwargs):
    generator = torch.Generator().manual_seed(11)
    tensors = {n: torch.randn(s, generator=generator) for n, s in SIZES.items()} | {"k": torch.arange(3)}
    spec = OptimizerSpec.check("adamw", [(["w"], {"lr": 0.01}), (["b"], {"lr": 0.1, "amsgrad": True})])
    return Replica(tensors, spec, path=path, run_id="run", epoch=3, rounding=RoundingMode("torch-cpu"), **kwargs)


def advance(replica):
    """The gradients depend on the step alone, so that whoever goes on applies the same."""
    step, where = replica.current.step + 1, layout()
    generator = torch.Generator().manual_seed(step)
    slot = replica.build(step, where)
    for index in (1, 0) if step % 2 else (0, 1):
        slot.apply(index, torch.randn(where.elements[index], generator=generator))
    replica.publish(slot)


CHILD = """
import sys; sys.path.insert(0, sys.argv[2])
from pathlib import Path
from updater.replica import Replica
import tests.updater.test_shared as here
replica = Replica.attach(Path(sys.argv[1]), run_id="run", epoch=3, threads=int(sys.argv[3]))
print(replica.current.step, flush=True)
for line in sys.stdin:  # "go": advance until killed
    while True:
        here.advance(replica)
"""


def child(path, threads=0):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CHILD, str(path), str(Path(__file__).parents[2]), str(threads)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def undisturbed():
    """step -> bits of a run that nobody disturbs, made as far as asked."""
    replica, seen = fresh(slots=2), []

    def at(step):
        while len(seen) <= step:
            if seen:
                advance(replica)
            seen.append(state_bits(replica.current))
        return seen[step]

    return at


def came_on(path, last):
    """The child has published something: on a busy machine it may not have run at all when its time is over."""
    end = time.monotonic() + 240
    while True:
        with closing(Reader(path)) as reader:  # which pins nothing: the child needs all slots
            if max(reader.steps, default=0) > last:
                return
        assert time.monotonic() < end
        time.sleep(0.0005)


def kill_and_compare(shm, times, seed):
    """Forked children write; each is killed after a random time, and what it left is compared and gone on with."""
    path = shm / "replica"
    fresh(path, slots=3)
    at, rng, last, moved = undisturbed(), random.Random(seed), 0, 0
    for kill in range(times):
        start, end = os.pipe()
        pid = fork()
        if pid == 0:  # only os._exit or a signal ends this process
            try:
                replica = Replica.attach(path, run_id="run", epoch=3, threads=kill % 3)
                os.write(end, b"!")
                while True:
                    advance(replica)
            finally:
                os._exit(1)
        os.close(end)
        assert os.read(start, 1) == b"!", "the child could not attach"
        os.close(start)
        if kill % 4:
            came_on(path, last)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        with Reader(path).pinned() as version:
            assert version.step >= last, "a complete version was lost"
            moved += version.step > last
            last = version.step
            assert state_bits(version) == at(last), f"kill {kill}: step {last} is not that of an undisturbed run"
    replica = Replica.attach(path)
    while replica.current.step < last + 3:
        advance(replica)
    assert state_bits(replica.current) == at(last + 3)
    assert moved > times // 4, "the children were killed before they did anything"


def test_killed_at_random_instants(shm):
    kill_and_compare(shm, 20, 1)


@pytest.mark.slow
def test_killed_at_two_hundred_random_instants(shm):
    kill_and_compare(shm, 200, 2)


def test_a_new_process_goes_on_and_only_one_may_write(shm):
    path = shm / "replica"
    first = fresh(path)
    advance(first)
    with pytest.raises(ReplicaError, match="another process is writing"):
        Replica.attach(path)
    with pytest.raises(ReplicaError, match="already there"):
        fresh(path)
    before = state_bits(first.current)
    first.close()
    with child(path, threads=2) as process:
        assert process.stdout.readline() == "1\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        reader = Reader(path)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with reader.pinned() as version:
                if version.step > 5:
                    break
        process.kill()
    with reader.pinned() as version:
        assert version.step > 5 and state_bits(version) != before
        assert state_bits(version) == undisturbed()(version.step)
        assert torch.equal(version.parameters["k"], torch.arange(3))


def test_what_is_pinned_stays_where_the_file_is_taken_up_by_another_object(shm):
    """A checkpoint is being written while the job is joined anew: the writer's thread has the version of a replica that
    is closed, and the next one goes on in the same file."""
    path = shm / "replica"
    first = fresh(path)
    advance(first)
    with first.pinned() as version, first.pinned():
        step, before = version.step, state_bits(version)
        first.close()
        second = Replica.attach(path)
        assert second.current.step == step
        for _ in range(4):
            advance(second)
        assert version.step == step and state_bits(version) == before
        assert second.steps == [step, step + 3, step + 4], "the pinned version is still one of them"
    advance(second), advance(second)
    assert step not in second.steps, "nobody pins it any more"
    second.close()


def test_a_slow_reader_sees_one_version_and_stops_nobody_while_a_slot_is_free(shm):
    path = shm / "replica"
    replica = fresh(path, slots=3)
    advance(replica)
    reader = Reader(path, run_id="run", epoch=3)
    with reader.pinned() as slow:
        kept = state_bits(slow)
        for _ in range(6):
            advance(replica)
        assert state_bits(slow) == kept and slow.step == 1
        with reader.pinned() as second:
            assert second.step == 7
            advance(replica)
            with pytest.raises(NoFreeSlot, match="the update waits"):
                advance(replica)
        advance(replica)
        assert state_bits(slow) == kept
    assert replica.current.step == 9


def test_a_pin_ends_with_its_process(shm):
    path = shm / "replica"
    replica = fresh(path, slots=2)
    ready, go = os.pipe()
    pid = fork()
    if pid == 0:
        with Reader(path).pinned():
            os.write(go, b"!")
            signal.pause()
    assert os.read(ready, 1) == b"!"
    advance(replica)
    with pytest.raises(NoFreeSlot):
        advance(replica)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    advance(replica)
    assert replica.current.step == 2


def test_readers_beside_a_writer_never_see_a_torn_version(shm):
    path = shm / "replica"
    replica, torn, stop = fresh(path, slots=3, threads=1), [], threading.Event()
    at, seen = undisturbed(), {}

    def read():
        reader = Reader(path)
        while not stop.is_set():
            with reader.pinned() as version:
                step, found = version.step, state_bits(version)
                if seen.setdefault(step, found) != found:
                    torn.append(step)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    while replica.current.step < 40:
        try:
            advance(replica)
        except NoFreeSlot:
            time.sleep(0)
    stop.set()
    for thread in threads:
        thread.join()
    assert not torn and seen and all(at(step) == found for step, found in seen.items())


def test_memory_that_is_not_there_is_refused_and_leaves_nothing(shm):
    spec = OptimizerSpec.check("adam", [(["w"], {"lr": 0.1})])
    with pytest.raises(ReplicaError, match=r"cannot be reserved|cannot be created"):
        Replica({"w": torch.empty(1).expand(1 << 40)}, spec, path=shm / "replica")
    assert not list(shm.iterdir())
