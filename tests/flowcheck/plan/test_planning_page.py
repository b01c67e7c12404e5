"""The decision that docs/use/planning.md walks through: its commands are run, and say what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowcheck.cli import app

PAGE = (Path(__file__).resolve().parents[3] / "docs/use/planning.md").read_text()
DECISION = PAGE[PAGE.index("## A decision") :]
BLOCKS = re.findall(r"```\n\$ flowcheck (.*?)\n(.*?)```", DECISION, re.DOTALL)


#: Commands in the text, without those that take files or seconds.
SHOWN = [
    line for line in re.findall(r"^    flowcheck (plan \S+ --\S.*?)(?: {3,}.*)?$", PAGE, re.MULTILINE)
    if not any(word in line for word in ("...", "--simulate", "--plot", "plan report"))
]


@pytest.mark.parametrize("command", SHOWN)
def test_commands_in_the_text_are_answered(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One of them was refused: its servers could not be divided by the default of another input."""
    app(command.split(), standalone_mode=False)
    assert capsys.readouterr().out.strip() and len(SHOWN) >= 6


def test_the_page_has_a_decision() -> None:
    assert len(BLOCKS) >= 5 and len(re.findall(r"```yaml\n", DECISION)) == 1


@pytest.mark.parametrize(("command", "said"), BLOCKS, ids=[command[:40] for command, _ in BLOCKS])
def test_its_commands_say_what_the_page_says(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fabric = re.search(r"```yaml\n(.*?)```", DECISION, re.DOTALL)
    assert fabric is not None
    (tmp_path / "topology.yaml").write_text(fabric[1])
    monkeypatch.chdir(tmp_path)
    status = app(command.split(), standalone_mode=False)
    found = " ".join(capsys.readouterr().out.split())
    lines = said.splitlines()
    assert lines and [line for line in lines if line not in found] == []
    assert bool(status) == ("MISSED" in said or "does not hold" in said)
