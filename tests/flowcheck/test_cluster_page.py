"""docs/use/cluster.md: its commands are run in their order, with its own files, and say what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/use/cluster.md").read_text()
BLOCKS = re.findall(r"```\n\$ (flowcheck\S*) (.*?)\n(.*?)```", PAGE, re.DOTALL)
MODULES = {"flowcheck": "flowcheck", "flowcheck-node": "flowcheck.node"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What somebody has who has followed the page so far. The NIC and the node's address are the loopback's."""
    path = tmp_path_factory.mktemp("cluster")
    (yaml,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (toml,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (path / "topology.yaml").write_text(yaml)
    (path / "node.toml").write_text(toml.replace("af_packet:eth1", "af_packet:lo").replace("10.0.1.2:", "127.0.0.1:"))
    (path / "token").write_text("a token that only tests have\n")
    shutil.copy(ROOT / "pcaps/ring2-ddp.pcap", path / "mirror.pcap")
    return path


def test_all_that_is_marked_is_run() -> None:
    assert len(BLOCKS) == len(re.findall(r"\(\*run\*", PAGE)) == 5


@pytest.mark.parametrize(("command", "arguments", "said"), BLOCKS, ids=[rest[:24] for _, rest, _ in BLOCKS])
def test_commands_say_what_the_page_says(folder: Path, command: str, arguments: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", MODULES[command], *arguments.split()], cwd=folder, capture_output=True, text=True,
        timeout=280, env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "110"},
    )
    assert done.returncode == 0, done.stderr
    found = " ".join(done.stdout.split())
    assert said.strip() and [line for line in said.splitlines() if " ".join(line.split()) not in found] == []
