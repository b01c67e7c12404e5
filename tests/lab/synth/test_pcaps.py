"""pcaps/: the commands in its README make exactly the files that stand there, and those are small."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lab.synth.cli import synth, synth_job

PCAPS = Path(__file__).resolve().parents[3] / "pcaps"
GIVEN = "ring2-ll.job.json"  # older than what synth-job writes


def commands() -> list[list[str]]:
    lines = (PCAPS / "README.md").read_text().splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("flowcheck ")]


def test_readme_remakes_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.command("synth")(synth)
    app.command("synth-job")(synth_job)
    monkeypatch.chdir(tmp_path)
    shutil.copy(PCAPS / GIVEN, GIVEN)
    for arguments in commands():
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_bytes() for path in PCAPS.iterdir() if path.name != "README.md"}
    assert set(made) == set(kept)
    for name, content in kept.items():
        assert made[name] == content, name
        assert len(content) < 300_000, name
