"""Ctrl-C ends the commands in silence, also while they are only being imported."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("module", ["flowcheck", "flowcheck.node"])
def test_ctrl_c_while_modules_are_imported(tmp_path: Path, module: str) -> None:
    (tmp_path / "typer.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, "--help"], capture_output=True, text=True, check=False, timeout=60,
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
