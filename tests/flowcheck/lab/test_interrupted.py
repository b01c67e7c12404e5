"""A test run that is interrupted in the middle of a training leaves nothing on the machine, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

import pytest

from dataplane.counters import read_counters, start_ticks
from flowcheck.lab import netns
from flowcheck.lab.shape import SHARED, STATE

from .conftest import clear_killed_runs
from .test_lab_command import listen

pytestmark = pytest.mark.root
ROOT = Path(__file__).resolve().parents[3]
MEMINFO = Path("/proc/meminfo")
T = TypeVar("T")


def there() -> set[str]:
    """Everything a run could leave: namespaces, links, state, shared memory."""
    found = {f"namespace {name}" for name in netns.names()}
    found |= {f"interface {name}" for name in os.listdir("/sys/class/net")}
    for folder in (STATE, SHARED, Path("/dev/shm"), Path("/var/run/dpdk")):
        found |= {str(path) for path in folder.iterdir()} if folder.is_dir() else set()
    return found


def huge_pages() -> int:
    """In use or promised to somebody."""
    values = {words[0]: int(words[1]) for words in map(str.split, MEMINFO.read_text().splitlines())}
    return values["HugePages_Total:"] - values["HugePages_Free:"] + values["HugePages_Rsvd:"]


class Run:
    """pytest on some tests of labs, in a process of its own that does not outlive the block, nor does what it made."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(folder / "base"),
             *words], cwd=ROOT, stdout=self._log, stderr=subprocess.STDOUT, text=True, preexec_fn=listen,
        )  # fmt: skip
        self._mine = f"flowcheck-t{self.process.pid:x}n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()  # this test may have been interrupted itself
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            self._log.close()

    def spaces(self) -> list[str]:
        return [space for space in netns.names() if space.startswith(self._mine)]

    def until(self, found: Callable[[], T | None]) -> T:
        """What is found as soon as it is there."""
        end = time.monotonic() + 60
        while not (result := found()):
            assert self.process.poll() is None and time.monotonic() < end, Path(self._log.name).read_text()
            time.sleep(0.002)
        return result


@pytest.mark.parametrize("end", ["Ctrl-C", "SIGTERM", "node killed, then Ctrl-C", "killed"])
def test_an_interrupted_test_run_leaves_nothing(tmp_path: Path, end: str) -> None:
    before, pages = there(), huge_pages()
    with Run(tmp_path, "tests/flowcheck/lab/test_equal.py", "-k", "test_equal_pairwise and tc") as run:

        def inside() -> list[int]:
            return [pid for space in run.spaces() for pid in netns.processes(space)]

        node = run.until(lambda: next((one.pid for one in read_counters() if one.pid in inside()), None))  # it captures
        children = inside()
        assert len(children) >= 3 and there() != before
        if end == "killed":
            run.process.kill()
        else:
            if end.startswith("node"):
                os.kill(node, signal.SIGKILL)
            run.process.send_signal(signal.SIGTERM if end == "SIGTERM" else signal.SIGINT)
        run.process.wait(60)
        if end == "killed":
            clear_killed_runs()  # as the next run does when it begins
        assert not [pid for pid in children if start_ticks(pid)]
    assert there() == before and huge_pages() == pages


def test_an_interrupt_waits_for_what_is_being_taken_down(tmp_path: Path) -> None:
    before = there()
    with Run(tmp_path, "tests/flowcheck/lab/test_fabric.py", "-k", "test_cables_and_mirror and tc") as run:
        run.until(lambda: len(run.spaces()) == 5)
        run.until(lambda: len(run.spaces()) < 5)
        run.process.send_signal(signal.SIGINT)
        run.process.wait(60)
    assert there() == before
