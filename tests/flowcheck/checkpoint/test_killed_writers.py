"""Whatever writes a version is killed between any two of its system calls: a reader finds the whole of the new one, or
what there was before, and who writes next is not disturbed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowcheck.control.user_state import pack

from ..hand_api import HandApi, HandVersion
from .killed_writers import WRITERS, Copy

ROOT = Path(__file__).resolve().parents[3]
slow = pytest.mark.slow


@pytest.fixture
def api() -> Iterator[HandApi]:
    held = HandVersion(7)
    held.give(1, pack({"epoch": 3}, step=7, rank=1, ranks=2))
    with HandApi(held) as made:
        yield made


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls are those of x86-64")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "atomic" else slow) for name in WRITERS])
def test_killed_between_any_two_system_calls(api: HandApi, tmp_path: Path, name: str) -> None:
    given = [api.name] if issubclass(WRITERS[name], Copy) else []
    done = subprocess.run(
        [sys.executable, "-m", "tests.flowcheck.checkpoint.killed_writers", name, str(tmp_path), *given],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("processes may not be traced here")
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    landed = said["landed"]
    assert said["kills"] >= 3 and not landed[0] and landed[-1], said
    assert landed == sorted(landed), "once the new one is there it stays"
    print(f"{name}: killed before each of {said['kills']} changes")
