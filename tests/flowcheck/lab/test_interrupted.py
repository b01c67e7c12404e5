"""A test run that is interrupted in the middle of a training leaves nothing on the machine, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dataplane.counters import read_counters, start_ticks
from flowcheck.lab import netns
from flowcheck.lab.shape import SHARED, STATE

from .conftest import clear_killed_runs
from .test_lab_command import listen

pytestmark = pytest.mark.root
ROOT = Path(__file__).resolve().parents[3]
MEMINFO = Path("/proc/meminfo")


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


@pytest.mark.parametrize("end", ["Ctrl-C", "SIGTERM", "node killed, then Ctrl-C", "killed"])
def test_an_interrupted_test_run_leaves_nothing(tmp_path: Path, end: str) -> None:
    before, pages = there(), huge_pages()
    log = (tmp_path / "log").open("w+")
    run = subprocess.Popen(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base"),
         "tests/flowcheck/lab/test_equal.py", "-k", "test_equal_pairwise and tc"],
        cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, text=True, preexec_fn=listen,
    )  # fmt: skip
    mine = f"flowcheck-t{run.pid:x}n"
    try:
        deadline, node = time.monotonic() + 60, None
        while node is None:  # it captures
            assert run.poll() is None and time.monotonic() < deadline, Path(log.name).read_text()
            time.sleep(0.05)
            inside = [pid for space in netns.names() if space.startswith(mine) for pid in netns.processes(space)]
            node = next((one.pid for one in read_counters() if one.pid in inside), None)
        assert len(inside) >= 3 and there() != before
        if end == "killed":
            run.kill()
        else:
            if end.startswith("node"):
                os.kill(node, signal.SIGKILL)
            run.send_signal(signal.SIGTERM if end == "SIGTERM" else signal.SIGINT)
        run.wait(60)
        if end == "killed":
            clear_killed_runs()  # as the next run does when it begins
        assert not [pid for pid in inside if start_ticks(pid)]
    finally:
        run.kill()
        run.wait()
        log.close()
    assert there() == before and huge_pages() == pages
