"""Trainers that are forked from one process: each has what it was given, and how it ended is known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowcheck.errors import EnvironmentProblem
from lab.network import netns
from lab.starter import Started, Starter

pytestmark = pytest.mark.root
LONGEST = 200.0


@pytest.fixture(scope="module")
def space() -> Iterator[str]:
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    name = f"flowcheck-st{os.getpid():x}"
    netns.add(name)
    try:
        netns.quiet(name)
        yield name
    finally:
        netns.delete(name)


@pytest.fixture(scope="module")
def starter(space: str) -> Iterator[Starter]:
    with Starter({"OMP_NUM_THREADS": "1"}) as one:
        yield one


def rank(starter: Starter, space: str, folder: Path, *more: str, out: str = "") -> Started:
    words = ["--rank", "0", "--ranks", "1", "--backend", "gloo", "--master", "127.0.0.1", "--out", out or str(folder)]
    with (folder / "log").open("ab") as log:
        return starter.start([*words, *more], namespace=space, core=max(os.sched_getaffinity(0)),
                             env={"GLOO_SOCKET_IFNAME": "lo", "FLOWCHECK_SOFTROCE": "{}"}, stderr=log)


def said(process: Started) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def closed(*processes: Started) -> None:
    for process in processes:
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def test_it_has_what_it_was_given(starter: Starter, space: str, tmp_path: Path) -> None:
    one = rank(starter, space, tmp_path)
    assert said(one) == {"event": "ready", "rank": 0} and one.poll() is None
    assert one.pid in netns.processes(space) and os.getsid(one.pid) == one.pid
    assert os.sched_getaffinity(one.pid) == {max(os.sched_getaffinity(0))}
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.01)
    opened = {int(path.name) for path in Path(f"/proc/{one.pid}/fd").iterdir()}
    assert one.stdin is not None
    one.stdin.write(json.dumps({"end": True}) + "\n")
    one.stdin.flush()
    assert said(one)["event"] == "done" and {0, 1, 2} <= opened
    one.stdin.close()
    assert one.wait(LONGEST) == 0 == one.poll()
    assert (tmp_path / "rank0.jsonl").exists() and "FLOWCHECK_SOFTROCE" not in os.environ
    one.kill()  # is over: nobody else's number is signalled
    closed(one)


def test_how_it_ended(starter: Starter, space: str, tmp_path: Path) -> None:
    """An argument that is refused, an exception, a signal; each in its own log, and the next one comes as before."""
    refused = rank(starter, space, tmp_path, "--backend", "none such")
    assert refused.wait(LONGEST) == 2 and "invalid choice" in (tmp_path / "log").read_text()
    raised = rank(starter, space, tmp_path, out=str(tmp_path / "none such"))
    assert raised.wait(LONGEST) == 1 and "FileNotFoundError" in (tmp_path / "log").read_text()
    killed = rank(starter, space, tmp_path)
    said(killed)
    killed.kill()
    assert killed.wait(LONGEST) == -signal.SIGKILL == killed.returncode
    closed(refused, raised, killed)


def test_all_end_with_the_one_that_they_are_forked_from(space: str, tmp_path: Path) -> None:
    with Starter({}) as starter:
        one = rank(starter, space, tmp_path)
        said(one)
        os.kill(starter._process.pid, signal.SIGKILL)
        assert one.wait(LONGEST) == -signal.SIGKILL
        with pytest.raises(EnvironmentProblem, match="nothing comes from the process that trainers are forked from"):
            rank(starter, space, tmp_path)
    assert one.pid not in netns.processes(space)
    closed(one)
