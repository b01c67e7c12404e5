"""A place in shared memory for replicas that others read. What a killed run has left is removed by the next one."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = Path("/dev/shm")
PREFIX = "flowcheck-test-"


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
