"""What processes of a node keep of memory that they have freed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from .conftest import LONGEST
from .test_fuzz_records import held
from .test_service import _iteration, _job, _join, _run

MB = 1 << 20
JOBS = """
import ctypes, random, sys, threading
FIRST
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
draw = random.Random(1)

def own():
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    return int(status["RssAnon"].split()[0]) << 10

def job(ends):
    # Blocks of the sizes that an engine has, and some small ones between them.
    taken = []
    for size in [17 << 20, 4 << 20, 1 << 20, 300 << 10] + [20 << 10] * 50:
        taken.append(libc.malloc(size))
        ctypes.memset(taken[-1], 1, size)
    ends.wait()
    draw.shuffle(taken)
    for one in taken:
        libc.free(one)

before = own()
for _ in range(4):
    ends = threading.Barrier(4)
    threads = [threading.Thread(target=job, args=(ends,)) for _ in range(4)]
    for one in threads: one.start()
    for one in threads: one.join()
print(own() - before)
"""


def kept(first: str) -> int:
    """Bytes that a process keeps of what four threads have taken and freed four times."""
    done = subprocess.run([sys.executable, "-P", "-c", JOBS.replace("FIRST", first)], capture_output=True, text=True,
                          timeout=LONGEST)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_what_was_freed_is_given_back() -> None:
    assert kept("from flowcheck.node.allocator import keep_little; assert keep_little()") < 4 * MB
    assert kept("") > 16 * MB, "this C library gives it back by itself: the module is of no use"


HOLES = """
import ctypes, sys
from flowcheck.node.allocator import give_back
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def own():
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    return int(status["RssAnon"].split()[0]) << 10

taken = [libc.malloc(4096) for _ in range(8192)]
for one in taken:
    ctypes.memset(one, 1, 4096)
for number, one in enumerate(taken):
    if number % 16 and number != len(taken) - 1:
        libc.free(one)
before = own()
give_back()
print(before - own())
"""


def test_what_lies_free_between_blocks_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", HOLES], capture_output=True, text=True, timeout=LONGEST)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 24 * MB


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_starts_of_a_job_leave_nothing_behind(start_node: Any, attach: Any, truth: Any, lan: Any) -> None:
    """A job that is started again and again, each time as another process. Memory settles within the first starts."""
    job = _job(count=[400_000, 100_001], protocol="simple", mtu=4096)
    node = start_node('[api]\nlisten = "127.0.0.1:0"')
    run, after = _run(truth, job, 2), []
    for start in range(24):
        trainer = attach(node, job, instance=str(start))
        _join(trainer, run)
        assert node.wait("iteration", iteration=_iteration(run, lan, trainer))["published"]
        trainer.close()
        node.wait("left")
        after.append(held(node.process.pid)[0])
    assert node.end() == 0
    print([round(one / 1e6, 1) for one in after])
    assert max(after[16:]) - min(after[4:12]) < 4 * MB, after
