"""What a hostile or unlucky environment does to a replica: no memory, kills in the middle, odd files, odd numbers."""
import ctypes
import ctypes.util
import hashlib
import json
import math
import os
import random
import signal
import tempfile
import time
import zlib
from pathlib import Path

import pytest
import torch

from updater import kernels
from updater.errors import NoFreeSlot, ReplicaError
from updater.optimizers import OptimizerSpec
from updater.reader import Reader
from updater.replica import Replica
from updater.rounding_modes import RoundingMode
from updater.store import _CRC_AT, _HEADER, Store

from ..forks import fork
from .test_kernels import assert_equal, compare
from .test_shared import advance, fresh, layout, state_bits, undisturbed

LIBC = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)


@pytest.fixture
def mounted(request):
    """A file system of its own: (type, options)."""
    kind, options = request.param
    path = Path(tempfile.mkdtemp(prefix="flowcheck-test-"))
    if LIBC.mount(b"flowcheck-test", str(path).encode(), kind.encode(), 0, options.encode()):
        path.rmdir()
        pytest.skip(f"{kind} cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    yield path
    LIBC.umount2(str(path).encode(), 2)
    path.rmdir()


def huge_pages_free():
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("HugePages_Free:"):
            return int(line.split()[1])
    return 0


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


def test_versions_that_the_job_still_needs_are_kept_and_gone_back_to(shm):
    path, at = shm / "replica", undisturbed()
    replica = fresh(path, slots=3)
    for _ in range(3):
        advance(replica)
    assert replica.steps == Reader(path).steps == [1, 2, 3]
    replica.keep((2,))
    advance(replica)  # 1 makes room
    advance(replica)  # and 3
    with Reader(path).pinned(2) as version:
        assert state_bits(version) == at(2)
        with pytest.raises(ReplicaError, match="no complete version 1; there is 2, 4, 5"):
            Reader(path).pinned(1).__enter__()
        with pytest.raises(ReplicaError, match="no complete version 9"):
            replica.rollback(9)
        with Reader(path).pinned(5), pytest.raises(NoFreeSlot, match="version 5 is pinned"):
            replica.rollback(2)
        assert replica.current.step == 5
        assert replica.rollback(2) is replica.current and replica.steps == [2]
    for _ in range(2):
        advance(replica)
    assert state_bits(replica.current) == at(4)
    replica.keep(())
    advance(replica)
    replica.close()
    assert Replica.attach(path).current.step == 5


def forged(path, change):
    """A file whose hash and CRC fit a layout that we would never write."""
    whole = bytearray(path.read_bytes())
    fields = list(_HEADER.unpack(whole[: _HEADER.size]))
    layout = json.loads(whole[4096 : 4096 + fields[4]])
    change(layout)
    text = json.dumps(layout).encode()
    fields[4], fields[8] = len(text), hashlib.sha256(text).digest()
    head = _HEADER.pack(*fields)
    whole[: len(head)] = head
    whole[_CRC_AT : _CRC_AT + 4] = zlib.crc32(head).to_bytes(4, "little")
    whole[4096 : 4096 + len(text)] = text
    return bytes(whole)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["arrays"][-1].update(offset=1 << 40), lambda d: d["arrays"][0].update(offset=-64),
        lambda d: d["arrays"][0].update(dtype="float31"), lambda d: d.pop("arrays"), lambda d: d.update(slots=4),
        lambda d: d["constants"][0].update(shape=[1 << 30]), lambda d: d["arrays"].clear() or d.pop("constants"),
        lambda d: d["arrays"][0].update(offset=math.inf),
    ],
)
def test_a_layout_that_would_reach_outside_is_refused(shm, change):
    path = shm / "replica"
    fresh(path)
    (shm / "other").write_bytes(forged(path, change))
    for how in (Replica.attach, Reader):
        with pytest.raises(ReplicaError, match="none of ours"):
            how(shm / "other")


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


def test_steps_far_beyond_any_training_fit_the_slot_header():
    store = Store.create({"slots": 2, "constants": [], "arrays": []}, None)
    for step in (0, 1, 255, 256, 10**9, (1 << 48) - 1):
        store.set_slot_header(1, 2, step)
        assert store.slot_header(1) == (2, step)


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


def test_one_layout_for_another_model_is_refused():
    spec = OptimizerSpec.check("adam", [(["w"], {"lr": 0.1})])
    replica = Replica({"w": torch.ones(3)}, spec, rounding=RoundingMode("torch-cpu"))
    other = fresh(slots=2)
    with pytest.raises(ReplicaError, match="disagree on 'b', 'w'"):
        replica.build(1, layout())
    advance(other)
    assert_equal(replica.current.parameters["w"], torch.ones(3), "untouched")
