"""`make demo` proves what it says, and can fail."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.network import netns
from lab.network.fabric import clear
from tests.namespaces import need_namespaces

ROOT = Path(__file__).resolve().parents[2]
FLOWCHECK = Path(sys.executable).with_name("flowcheck")
DEMO = [sys.executable, "-P", str(ROOT / "tools" / "demo.py")]

pytestmark = pytest.mark.skipif(
    not FLOWCHECK.exists(), reason="flowcheck is not installed here"
)


@pytest.fixture
def lab_name() -> Iterator[str]:
    """A lab of this process alone: somebody may run a demo beside the tests."""
    need_namespaces()
    name = f"t{os.getpid():x}n9000"
    yield name
    clear(name)


def test_demo_proves_both_protocols(tmp_path: Path) -> None:
    command = [*DEMO, "pcaps/ring2-ll", "pcaps/ring4-simple", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PROVEN: ") == 2


def test_demo_notices_another_training(tmp_path: Path) -> None:
    """The same capture and a truth of other numbers: the proof must not be a formality."""
    for path in (ROOT / "pcaps").glob("ring2-ll.*"):
        shutil.copy(path, tmp_path)
    truth = json.loads((tmp_path / "ring2-ll.truth.json").read_text())
    (tmp_path / "ring2-ll.truth.json").write_text(json.dumps({**truth, "seed": truth["seed"] + 1}))
    command = [*DEMO, str(tmp_path / "ring2-ll"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG: " in done.stdout and "PROVEN" not in done.stdout


def test_demo_of_an_incomplete_capture_ends_there(tmp_path: Path) -> None:
    command = [*DEMO, "pcaps/ring4-ll-loss", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "PROVEN" not in done.stdout
    steps = sorted(path.name for path in tmp_path.rglob("step-*"))
    assert steps == ["step-000001"], "iteration 0 is complete, iteration 1 is not"


@pytest.mark.root
@pytest.mark.slow
def test_demo_trains_live(lab_name: str, tmp_path: Path) -> None:
    """Where a lab can be built; the last line has the numbers."""
    command = [*DEMO, "--lab", "--name", lab_name, "pcaps/ring2-ll", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    versions = re.search(r"^EQUAL: (\d+) of (\d+) versions of the replica", done.stdout, re.MULTILINE)
    assert versions is not None and versions[1] == versions[2] and int(versions[1]) >= 30
    again = re.search(r"^EQUAL: (\d+) losses, and all state of all ranks", done.stdout, re.MULTILINE)
    assert again is not None and int(again[1]) >= 10 and re.search(r"^killed +rank 2", done.stdout, re.MULTILINE)
    assert re.search(r"ratio \d+\.\d+", done.stdout) and "prove nothing about a cluster" in done.stdout


@pytest.mark.root
def test_an_interrupted_demo_leaves_nothing(lab_name: str, tmp_path: Path) -> None:
    demo = subprocess.Popen([*DEMO, "--lab", "--name", lab_name, "pcaps/ring2-ll", "--out", str(tmp_path)],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while not netns.exists(f"flowcheck-{lab_name}-leaf"):
            assert demo.poll() is None
            time.sleep(0.01)
        demo.send_signal(signal.SIGINT)
        said, _ = demo.communicate()
    finally:
        demo.kill()
        demo.wait()
        left = clear(lab_name)
    assert demo.returncode == 130 and "Traceback" not in said, said
    assert not left


def test_demo_without_root_says_so(tmp_path: Path) -> None:
    """What it then shows is the replay, and it is not called training."""
    tmp_path.chmod(0o777)
    other = ["setpriv", "--reuid", "65534", "--clear-groups"] if os.geteuid() == 0 else []
    try:
        if other:
            subprocess.run([FLOWCHECK, "--version"], user=65534, extra_groups=[], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"another user cannot run this installation: {error}")
    command = [*other, *DEMO, "--lab", "pcaps/ring2-ll", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.stdout.startswith("NO LIVE TRAINING: ") and "needs root" in done.stdout, done.stdout + done.stderr
    assert "Captures are replayed instead" in done.stdout and "EQUAL" not in done.stdout
    assert done.returncode in (0, 3), done.stdout + done.stderr  # 3: no DPDK for that user
