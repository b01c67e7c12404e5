"""A place in shared memory for replicas that others read, and file systems of a test's own. What a killed run has left
in shared memory is removed by the next one."""

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = Path("/dev/shm")
PREFIX = "flowcheck-test-"
LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in tmpfs, gone afterwards."""
    if not os.path.ismount(SHARED):
        pytest.skip(f"no tmpfs at {SHARED}")
    for old in SHARED.glob(f"{PREFIX}*-*"):
        if not Path("/proc", old.name.split("-")[2]).exists():
            shutil.rmtree(old)
    path = Path(tempfile.mkdtemp(dir=SHARED, prefix=f"{PREFIX}{os.getpid()}-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def mounted(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of its own: (type, options)."""
    kind, options = request.param
    path = Path(tempfile.mkdtemp(prefix="flowcheck-test-"))
    if LIBC.mount(b"flowcheck-test", str(path).encode(), kind.encode(), 0, options.encode()):
        path.rmdir()
        pytest.skip(f"{kind} cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    yield path
    LIBC.umount2(str(path).encode(), 2)
    path.rmdir()


def huge_pages_free() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("HugePages_Free:"):
            return int(line.split()[1])
    return 0
