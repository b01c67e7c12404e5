"""What holds of every command line: -h, plain errors, a reader that has gone, one JSON document."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from flowcheck.cli import app

ROOT = Path(__file__).parents[2]
CAPTURE, JOB = str(ROOT / "pcaps" / "ring2-ll.pcap"), str(ROOT / "pcaps" / "ring2-ll.job.json")


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


def started(*words: str, module: str = "flowcheck", **named: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-P", "-m", module, *words], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env={"PYTHONPATH": str(ROOT), "COLUMNS": "80"}, **named)


@pytest.mark.parametrize("path", [*commands(typer.main.get_command(app))], ids=lambda path: " ".join(path) or "none")
def test_h_is_help_of_every_command(path: tuple[str, ...]) -> None:
    short, long = (CliRunner().invoke(app, [*path, option]) for option in ("-h", "--help"))
    assert short.exit_code == 0 and "Usage" in short.output and short.output == long.output


@pytest.mark.parametrize(("module", "line", "where"), [
    ("flowcheck", "replay", "replay"), ("flowcheck", "switch plan --x", "switch plan"), ("flowcheck", "nothing", ""),
    ("flowcheck", "synth a --out b --seed x", "synth"), ("flowcheck", "replay --job", ""), ("flowcheck.node", "", ""),
], ids=str)
def test_a_wrong_line_is_said_in_plain_lines(module: str, line: str, where: str) -> None:
    said = started(*line.split(), module=module)
    out, errors = said.communicate(timeout=120)
    first, remedy = errors.splitlines()
    command = module.replace(".", "-")
    assert said.returncode == 2 and out == "" and errors.isascii()
    assert first.startswith(f"{command}: error: {where}") and remedy.endswith(" --help")


def test_a_reader_that_has_gone_ends_it_without_a_word_and_the_work_is_done(tmp_path: Path) -> None:
    """As `flowcheck replay ... | true`: what a shell says of a command that SIGPIPE has ended."""
    process = started("replay", CAPTURE, "--job", JOB, "--out", str(tmp_path))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.wait(timeout=120), process.stderr.read()) == (141, "")
    assert json.loads((tmp_path / "report.json").read_text())["ok"]
    process.stderr.close()


def test_a_short_text_without_a_reader() -> None:
    """It is still buffered when the command has ended."""
    process = started("--version")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.wait(timeout=120), process.stderr.read()) == (141, "")
    process.stderr.close()


@pytest.mark.parametrize("line", [
    f"replay {CAPTURE} --job {JOB} --out -", f"synth {JOB} --out -", "synth-job --out -",
    f"synth {JOB} --out x --truth -",
], ids=lambda line: line.partition(" ")[0] + line[-10:])
def test_a_dash_is_no_name_to_write_to(line: str, tmp_path: Path) -> None:
    """To other commands it is standard output. Here it was a file or a folder of that name."""
    out, errors = started(*line.split(), cwd=tmp_path).communicate(timeout=120)
    assert out == "" and errors.startswith("flowcheck: error: -: ") and "remedy" in errors
    assert not (tmp_path / "-").exists()


def test_replay_prints_its_report(tmp_path: Path) -> None:
    out, errors = started("replay", CAPTURE, "--job", JOB, "--out", str(tmp_path), "--json").communicate(timeout=120)
    assert json.loads(out) == json.loads((tmp_path / "report.json").read_text()) and errors == ""


def test_learn_prints_what_it_learnt(tmp_path: Path) -> None:
    arguments = "learn", str(ROOT / "pcaps" / "ring2-ddp.pcap"), "--out", str(tmp_path / "job.json"), "--json"
    out, errors = started(*arguments).communicate(timeout=120)
    said = json.loads(out)
    assert errors == "" and said["schema"] == "flowcheck-learn/1" and said["manifest"] == str(tmp_path / "job.json")
    assert {"flows", "calls", "check"} <= {item["what"] for item in said["items"]}
    assert json.loads((tmp_path / "job.json").read_text())["unproven"][1:] == said["doubts"]
    page = (ROOT / "docs/use/learn.md").read_text()
    assert all(f"`{key}`" in page for key in said)
