"""node.toml: what is wrong in it is named with its place, before anything is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node.config import load

GOOD = """
name = "n"
[control]
listen = "127.0.0.1:0"
token_file = "{folder}/token"
[capture]
device = "af_packet:lo"
huge = false
[replica]
directory = "{folder}"
"""


def settings(folder: Path, old: str = "", new: str = "") -> Path:
    (folder / "token").write_text("a token that only tests have\n")
    text = GOOD.format(folder=folder)
    assert old in text
    path = folder / "node.toml"
    path.write_text(text.replace(old, new) if old else text)
    return path


def test_a_good_one(tmp_path: Path) -> None:
    config = load(settings(tmp_path))
    assert config.control.address == ("127.0.0.1", 0) and config.token() == b"a token that only tests have"


@pytest.mark.parametrize(("old", "new", "where", "what"), [
    ('name = "n"', 'nmae = "n"', "nmae", "not permitted"),
    ('name = "n"', 'name = "a/b"', "name", "pattern"),
    ('name = "n"', 'groups = "two"', "groups", "integer"),
    ('name = "n"', "record_seconds = nan", "record_seconds", "less than or equal to 86400"),
    ('"127.0.0.1:0"', '"7070"', "control.listen", "HOST:PORT"),
    ('"127.0.0.1:0"', '"127.0.0.1:70000"', "control.listen", "HOST:PORT"),
    ("huge = false", "queues = 0", "capture.queues", "greater than or equal to 1"),
    ("[replica]", "[replica]\nslots = 9", "replica.slots", "less than or equal to 4"),
    ("[replica]", "[replica", "node.toml", "is not TOML"),
])  # fmt: skip
def test_wrong_ones_are_named(tmp_path: Path, old: str, new: str, where: str, what: str) -> None:
    with pytest.raises(UserError) as refused:
        load(settings(tmp_path, old, new))
    assert where in refused.value.where and what in refused.value.what and refused.value.remedy


def test_files_without_an_end(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="/dev/zero: has more than"):
        load(Path("/dev/zero"))
    with pytest.raises(UserError, match="/dev/zero: has more than"):
        load(settings(tmp_path, f"{tmp_path}/token", "/dev/zero")).token()


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"node\.toml: cannot be read"):
        load(tmp_path / "node.toml")
    with pytest.raises(EnvironmentProblem, match="No such file"):
        load(settings(tmp_path, "/token", "/tokens")).token()
    path = settings(tmp_path, f'directory = "{tmp_path}"', 'directory = "/none such"')
    done = subprocess.run(
        [sys.executable, "-P", "-m", "flowcheck.node", "--config", str(path)], capture_output=True, text=True,
        timeout=60, check=False,
    )
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert "replica.directory /none such" in done.stderr and "remedy: an existing directory" in done.stderr
