"""Ctrl-C ends the commands in silence, also while they are only being imported."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("module", ["flowcheck", "flowcheck.node"])
def test_ctrl_c_while_modules_are_imported(tmp_path: Path, module: str) -> None:
    # A shell's background job ignores Ctrl-C, and so would whatever it starts: the tests may run in one.
    (tmp_path / "typer.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, "--help"], capture_output=True, text=True, check=False, timeout=60,
        env={"PYTHONPATH": str(tmp_path)}, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
