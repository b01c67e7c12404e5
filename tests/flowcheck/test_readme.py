"""README.md: the commands that need nothing but a capture run as they stand there, in their order."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^\.venv/bin/flowcheck ((?:inspect|learn|replay|synth) [^#\n]*)", PAGE, re.MULTILINE)


def test_commands_run_in_their_order(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pcaps/ring2-ddp.pcap", tmp_path / "capture.pcap")
    assert [line.split()[0] for line in COMMANDS] == ["inspect", "learn", "replay", "synth"]
    for line in COMMANDS:
        done = subprocess.run([sys.executable, "-P", "-m", "flowcheck", *line.split()], cwd=tmp_path, text=True,
                              capture_output=True, env={"PYTHONPATH": str(ROOT)}, timeout=120, check=False)
        assert done.returncode == 0, f"{line}: {done.stderr}"
    assert (tmp_path / "out/step-000006/manifest.json").exists()
