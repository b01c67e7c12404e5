"""examples/lab_trainer.py: somebody's own trainer and own node do what the manual says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.root
def test_a_trainer_and_a_node_of_ones_own(fabric, tmp_path: Path) -> None:
    lab = fabric(ranks=2, mirrored=((0, 1),))
    lab.start_mirror()
    (tmp_path / "token").write_text("a token that only tests have\n")
    text = (ROOT / "examples" / "node.toml").read_text().replace('"mine"', f'"{lab.config.name}"')
    (tmp_path / "node.toml").write_text(text.replace('"token"', f'"{tmp_path}/token"'))
    script = (ROOT / "examples" / "lab_trainer.py").read_text()
    script = script.replace("flowcheck-mine--", f"flowcheck-{lab.config.name}--")
    (tmp_path / "trainer.py").write_text(script.replace('Path("token")', f'Path("{tmp_path}/token")'))
    node = lab.spawn("node", [sys.executable, "-P", "-m", "flowcheck.node", "--config", str(tmp_path / "node.toml")],
                     stdout=subprocess.PIPE)
    assert node.stdout is not None and any("listening" in line for line in node.stdout)
    ranks = [lab.spawn(f"r{rank}", [sys.executable, "-P", str(tmp_path / "trainer.py"), str(rank)],
                       stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)}) for rank in (0, 1)]
    said = [rank.communicate()[0] for rank in ranks]
    node.terminate()
    rest, _ = node.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0], (said, rest)
    assert said[0] == "rank 0: equal, verified\n" and "NOT published" not in rest
