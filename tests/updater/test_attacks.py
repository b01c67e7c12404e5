"""What a hostile or unlucky environment does to a replica: no memory, kills in the middle, odd files, odd numbers."""
import os
import random
import signal
import time
from pathlib import Path

import pytest

from updater import kernels
from updater.errors import ReplicaError
from updater.reader import Reader
from updater.replica import Replica

from ..forks import fork
from .bits import state_bits
from .conftest import huge_pages_free
from .test_kernels import compare
from .test_shared import advance, fresh, undisturbed


@pytest.mark.parametrize("mounted", [("tmpfs", "size=512k")], indirect=True)
def test_a_full_file_system_refuses_and_keeps_nothing(mounted):
    with pytest.raises(ReplicaError, match="bytes cannot be reserved: No space left"):
        fresh(mounted / "replica", slots=4)
    assert not list(mounted.iterdir()) and os.statvfs(mounted).f_bfree == os.statvfs(mounted).f_blocks


@pytest.mark.parametrize("mounted", [("hugetlbfs", "pagesize=2M")], indirect=True)
def test_huge_pages_carry_a_replica(mounted):
    if huge_pages_free() < 2:
        pytest.skip("no two huge pages of 2 MiB are free")
    path = mounted / "replica"
    replica = fresh(path)
    advance(replica)
    assert os.stat(path).st_size % (2 << 20) == 0
    replica.close()
    del replica
    again = Replica.attach(path, run_id="run")
    advance(again)
    with Reader(path).pinned() as version:
        assert version.step == 2 and state_bits(version) == undisturbed()(2)


def forked(work):
    """Run work(report) in a child; report(b"x") wakes us. Returns its pid after the first report."""
    start, end = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            work(lambda: os.write(end, b"!"))
        finally:
            os._exit(1)
    os.close(end)
    assert os.read(start, 1) == b"!"
    os.close(start)
    return pid


def killed(pid):
    os.kill(pid, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_killed_while_it_is_created(shm):
    """There is a whole file or none; what was reserved is given back."""
    fresh()  # what is slow once is done before the children are timed
    path, rng, whole = shm / "replica", random.Random(5), 0

    def create(report):
        report()
        fresh(path, slots=4)
        signal.pause()

    for _ in range(12):
        pid = forked(create)
        time.sleep(rng.uniform(0, 0.004))
        killed(pid)
        assert {p.name for p in shm.iterdir()} <= {"replica"}
        if path.exists():
            whole += 1
            with Reader(path).pinned() as version:
                assert version.step == 0 and state_bits(version) == undisturbed()(0)
            path.unlink()
    fresh(path)


def test_a_reader_outlives_the_writer_it_pinned_from(shm):
    path = shm / "replica"

    def write(report):
        replica = fresh(path, slots=3)
        advance(replica)
        report()
        while True:
            advance(replica)

    pid = forked(write)
    reader = Reader(path)
    with reader.pinned() as version:
        step, kept = version.step, state_bits(version)
        killed(pid)
        assert state_bits(version) == kept == undisturbed()(step)
        replica = Replica.attach(path)
        begin = replica.current.step
        for _ in range(4):
            advance(replica)
        assert state_bits(version) == kept
        assert step not in (replica.building.step if replica.building else -1, replica.current.step)
    assert replica.current.step == begin + 4 and state_bits(replica.current) == undisturbed()(begin + 4)


def test_a_fork_of_the_writer_is_not_a_second_writer(shm):
    """The lock belongs to the open file, which a fork shares: it must not be let go of when the child ends."""
    path = shm / "replica"
    replica = fresh(path)
    pid = fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(ReplicaError, match="another process is writing"):
        Replica.attach(path)
    advance(replica)


def test_what_is_no_file_is_refused(shm):
    os.mkfifo(shm / "fifo")
    for path in (shm, shm / "fifo", Path("/dev/zero"), shm / "no" / "such"):
        for how in (Replica.attach, Reader):
            with pytest.raises(ReplicaError):
                how(path)
    with pytest.raises(ReplicaError, match="cannot be created"):
        fresh(shm / "no" / "replica")
    with pytest.raises(ReplicaError, match="already there"):
        fresh(shm / "fifo")


# -- odd numbers: whatever torch computes from them, we do too ---------------------------------------------


@pytest.mark.parametrize("kernel", kernels.names())
@pytest.mark.parametrize("mode", ["single", "fused"])
@pytest.mark.parametrize(
    "options",
    [{"lr": 0.0}, {"lr": 1e-3, "eps": 0.0}, {"lr": 1e30}, {"lr": 1e-45, "weight_decay": 1e20},
     {"lr": 1e-3, "betas": (0.9, 0.0)}, {"lr": 1e-3, "betas": (0.999999, 0.99999999)}],
)
def test_extreme_options(options, mode, kernel):
    compare("adamw", mode, options, [1, 15, 33, 200], 6, kernel, special=True)


@pytest.mark.parametrize("kernel", kernels.names())
@pytest.mark.parametrize("mode", ["single", "fused"])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_infinite_and_huge_gradients(name, mode, kernel):
    """Their results are infinite or not a number; which, and in which places, is torch's."""
    options = {"lr": 1e-3, "amsgrad": True} if name == "adam" else {"lr": 0.1, "momentum": 0.9}
    compare(name, mode, options, [17, 100, 2049], 5, kernel, special=True, infinite=True)
