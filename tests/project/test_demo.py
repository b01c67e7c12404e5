"""`make demo` proves what it says, and can fail."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = [sys.executable, "-P", str(ROOT / "tools" / "demo.py")]

pytestmark = pytest.mark.skipif(
    not Path(sys.executable).with_name("flowcheck").exists(), reason="flowcheck is not installed here"
)


def test_demo_proves_both_protocols(tmp_path: Path) -> None:
    command = [*DEMO, "pcaps/ring2-ll", "pcaps/ring4-simple", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PROVEN: ") == 2


def test_demo_notices_another_training(tmp_path: Path) -> None:
    """The same capture and a truth of other numbers: the proof must not be a formality."""
    for path in (ROOT / "pcaps").glob("ring2-ll.*"):
        shutil.copy(path, tmp_path)
    truth = json.loads((tmp_path / "ring2-ll.truth.json").read_text())
    (tmp_path / "ring2-ll.truth.json").write_text(json.dumps({**truth, "seed": truth["seed"] + 1}))
    command = [*DEMO, str(tmp_path / "ring2-ll"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG: " in done.stdout and "PROVEN" not in done.stdout


def test_demo_of_an_incomplete_capture_ends_there(tmp_path: Path) -> None:
    command = [*DEMO, "pcaps/ring4-ll-loss", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "PROVEN" not in done.stdout
    steps = sorted(path.name for path in tmp_path.rglob("step-*"))
    assert steps == ["step-000001"], "iteration 0 is complete, iteration 1 is not"
