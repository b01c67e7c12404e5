"""A short, repeatable piece of `make fuzz` in every test run: past finds first, then new inputs from fixed seeds.

The programs are built once into build/fuzz (half a minute) and again for what has changed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FUZZ = ROOT / "fuzz"
#: Inputs per target, a few seconds each.
RUNS = {"decoder": 100_000, "machine": 3_000, "observer": 1_500, "scan": 15_000, "bootstrap": 8_000, "records": 3_000}
# The first build shares two cores with whatever else runs.
pytestmark = pytest.mark.timeout(900)


def run(script: str, *arguments: str, timeout: int = 880) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(FUZZ / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT)


@pytest.fixture(scope="module")
def built() -> None:
    done = run("build.py", timeout=880)
    if "no clang with libFuzzer" in done.stderr:
        pytest.skip("no clang with libFuzzer here: apt-get install clang-14 libclang-rt-14-dev")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", RUNS)
def test_nothing_found(built: None, target: str) -> None:
    done = run("run.py", "--target", target, "--runs", str(RUNS[target]), "--fresh")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing found" in done.stdout


def test_damaged_captures_through_dpdk(tmp_path: Path) -> None:
    pytest.importorskip("dataplane.pydpdk._dpdk", reason="the dataplane is not built: libdpdk was not found")
    done = run("captures.py", "--files", "500", "--keep", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "500 files" in done.stdout


def test_changed_records_and_requests_in_one_process() -> None:
    done = run("ports.py", "--inputs", "3000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 2 and "Manifest" in done.stdout and "401" in done.stdout, done.stdout


def test_every_find_of_the_past_is_run() -> None:
    sys.path.insert(0, str(FUZZ))
    try:
        import seeds
    finally:
        sys.path.remove(str(FUZZ))
    folders = {path.name for path in seeds.CORPUS.iterdir()}
    assert folders <= set(RUNS), "a folder of finds that no target reads"
    assert all(data for target in folders for data in seeds.corpus(target).values())
