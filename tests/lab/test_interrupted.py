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
from lab.network import netns
from lab.shape import SHARED, STATE

from .conftest import clear_killed_runs

pytestmark = pytest.mark.root
ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")
HANG = 250.0  # seconds; longer than anything here takes on the slowest machine


class Run:
    """pytest on some tests of labs, in a process of its own that does not outlive the block, nor does what it made."""

    def __init__(self, folder: Path, *words: str, path: str | None = None) -> None:
        self._log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(folder / "base"),
             *words], cwd=ROOT, stdout=self._log, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PATH": path or os.environ["PATH"]},
        )
        self._lab = f"t{self.process.pid:x}n"
        self.children: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()  # this test may have been interrupted itself
        try:
            self.process.wait(HANG)
        finally:
            self.process.kill()
            self.process.wait()
            self._log.close()

    def spaces(self) -> list[str]:
        return [space for space in netns.names() if space.startswith(f"flowcheck-{self._lab}")]

    def nodes(self) -> list[int]:
        """The processes that capture, once the others are there, too."""
        self.children = [pid for space in self.spaces() for pid in netns.processes(space)]
        return [one.pid for one in read_counters() if one.pid in self.children] if len(self.children) >= 3 else []

    def left(self) -> list[object]:
        """What it has made and not removed. Interfaces are in the namespaces; huge pages have no names, and go with the
        processes."""
        state = [path for folder in (STATE, SHARED) if folder.is_dir() for path in folder.glob(f"{self._lab}*")]
        counters = [path for pid in self.children for path in Path("/dev/shm").glob(f"*flowcheck-{pid}-*")]
        return [*self.spaces(), *state, *counters, *(pid for pid in self.children if start_ticks(pid))]

    def until(self, found: Callable[[], T | None]) -> T:
        """What is found as soon as it is there."""
        end = time.monotonic() + HANG
        while not (result := found()):
            assert self.process.poll() is None and time.monotonic() < end, Path(self._log.name).read_text()
            time.sleep(0.002)
        return result


@pytest.mark.parametrize("end", ["Ctrl-C", "SIGTERM", "node killed, then Ctrl-C", "killed"])
def test_an_interrupted_test_run_leaves_nothing(tmp_path: Path, end: str) -> None:
    with Run(tmp_path, "tests/lab/test_equal.py", "-k", "test_equal_pairwise and tc") as run:
        node, *_ = run.until(run.nodes)
        assert len(run.left()) > 10
        if end == "killed":
            run.process.kill()
        else:
            if end.startswith("node"):
                os.kill(node, signal.SIGKILL)
            run.process.send_signal(signal.SIGTERM if end == "SIGTERM" else signal.SIGINT)
        run.process.wait(HANG)
        if end == "killed":
            clear_killed_runs()  # as the next run does when it begins
        assert run.left() == []


def test_an_interrupt_waits_for_what_is_being_taken_down(tmp_path: Path, ip_that: Callable[[str, str], str]) -> None:
    """It comes with the first namespace that a fixture removes, while four others are still there."""
    sent = tmp_path / "sent"
    path = ip_that("netns del *-r0", f"kill -INT $PPID; touch {sent}")
    words = ["tests/lab/network/test_fabric.py", "-k", "test_cables_and_mirror and tc"]
    with Run(tmp_path, *words, path=path) as run:
        run.process.wait(HANG)
        assert sent.exists() and run.process.returncode == pytest.ExitCode.INTERRUPTED
        assert run.left() == []
