"""A whole node whose journal lies on a disk that is slow, full and hung, one after the other, while a job trains."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest

import flowcheck
from flowcheck.ask.client import NodeClient, reader_key
from flowcheck.checkpoint.directory import load_step, tensor_sha256
from flowcheck.errors import FlowcheckError

from .conftest import TOKEN
from .test_live_ranges import SECONDS, Training, small_job

pytestmark = [pytest.mark.root, pytest.mark.slow]
HUNG = 60.0  # seconds
ELEMENTS = 200_000  # 0.8 MB an iteration, of which a call of 150 ms writes at most all: some 5 MB/s
QUICK = 0.5  # seconds that an iteration may take at most: nobody waits for a minute, nor for a write


def holes(node: Any) -> set[str]:
    return {one["cause"] for one in node.said("hole")}


def test_versions_go_on_whatever_the_disk_does(
    start_node: Any, attach: Any, truth: Any, lan: Any, slow_files: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk, hold, fails = tmp_path / "disk", tmp_path / "hold", tmp_path / "fails"
    disk.mkdir()
    for name, value in {"LD_PRELOAD": slow_files, "SLOW_UNDER": disk, "SLOW_MS": 150, "SLOW_HOLD": hold,
                        "SLOW_FAILS": fails}.items():
        monkeypatch.setenv(name, str(value))
    at = Training(small_job(count=[ELEMENTS], protocol="simple", mtu=4096), truth, lan)
    at.train(), at.train()
    node = start_node(f'[api]\nlisten = "127.0.0.1:0"\n[journal]\ndirectory = "{disk}"\nmegabytes = 256',
                      resync="ranges", replica="slots = 4")
    at.attach(node, attach)
    at.until_patched(node)
    api = node.seen("listening")["api"]
    host, _, port = api.rpartition(":")

    def train() -> float:
        """How long it took until the version was published."""
        number, began = at.train(sums=True), time.monotonic()
        line = node.wait("iteration", SECONDS, iteration=number)
        assert line["published"] and line["status"] == "verified", line
        return time.monotonic() - began

    took: list[float] = []
    while not node.said("journaled"):  # its files take long to make
        took.append(train())
    while "busy" not in holes(node):
        took.append(train())
    fails.write_text(f"pwrite {errno.ENOSPC}")
    while "ENOSPC" not in holes(node):
        took.append(train())
    fails.unlink()
    before = len(node.said("journaled"))
    while len(node.said("journaled")) < before + 3:
        took.append(train())
    hold.touch()
    end, answers = time.monotonic() + HUNG, list[float]()
    while time.monotonic() < end:
        took.append(train())
        began = time.monotonic()
        asked = NodeClient((host, int(port)), reader_key(TOKEN))
        assert max(one.step for one in asked.offers()) == at.run.step
        asked.close()
        answers.append(time.monotonic() - began)
    assert "hung" in holes(node)
    assert sorted(answers)[-2] < 2.0, "one reader finds out that the disk hangs, and others do not wait for it"
    hold.unlink()
    before = len(node.said("journaled"))
    while len(node.said("journaled")) < before + 10:
        took.append(train())
        time.sleep(0.2)
    took.sort()
    assert took[len(took) // 2] < QUICK, f"an iteration took {took[len(took) // 2]} s"

    there, refused = [], []
    for step in range(at.run.step - 25, at.run.step + 1):
        try:
            path = flowcheck.fetch(api, tmp_path / f"step{step}", token=TOKEN.decode(), step=step).path
        except FlowcheckError:
            refused.append(step)
            continue
        found = load_step(path)
        mine = {name: tensor_sha256(one) for name, one in found.parameters.items()}
        assert mine == at.known[step]["tensors"], step
        there.append(step)
    assert len(there) >= 3 and refused, (there, refused)
    assert node.said("lost") == [] and node.end() == 0
