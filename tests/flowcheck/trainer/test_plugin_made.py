"""How the profiler plugin is made where there is none: by which compiler, from what, under which name and for whom. The
compiler is a script that writes down what it is asked."""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowcheck.control import compiled
from flowcheck.errors import EnvironmentProblem
from flowcheck.trainer import plugin
from flowcheck.trainer.plugin import plugin_path

SCRIPT = """\
#!/bin/sh
printf '%s\\n' "$@" >> {log}
echo "x.c:1: warning: not this" >&2
{says}
while [ "$1" != -o ]; do shift; done
{writes}
exit {status}
"""


class Made:
    """A source with two headers, and a compiler."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch, self.log = folder, patch, folder / "log"
        self.source, self.include = folder / "a.c", folder / "include"
        self.include.mkdir()
        self.source.write_text("source")
        for name in ("b.h", "a.h"):
            (self.include / name).write_text(name)
        (self.include / "notes.txt").write_text("no header")
        self.change(source=self.source, include=self.include, built=folder / "nccl_profiler.plugin.so")
        self.compiler("gcc")

    def change(self, **fields: Any) -> None:
        """What is compiled, and how."""
        self._patch.setattr(plugin, "PLUGIN", replace(plugin.PLUGIN, **fields))

    def compiler(self, name: str = "gcc", *, says: str = "", writes: str = 'echo made > "$2"', status: int = 0) -> Path:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(SCRIPT.format(log=self.log, says=says, writes=writes, status=status))
        path.chmod(0o755)
        self._patch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
        self._patch.setattr(compiled, "COMPILERS", (name,))
        return path

    @property
    def asked(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Made:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CC", raising=False)
    return Made(tmp_path, monkeypatch)


def test_it_is_compiled_once_with_all_flags(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    path = plugin_path()
    assert path.parent == made.folder / "cache" / "flowcheck" and path.read_text() == "made\n"
    assert path.stat().st_mode & 0o777 == 0o755 and list(path.parent.iterdir()) == [path]
    *asked, scratch = made.asked
    assert asked == [*compiled.FLAGS, f"-I{made.include}", str(made.source), "-o"]
    assert Path(scratch).parent == path.parent and scratch.endswith(".so"), "what is half written has another name"
    assert plugin_path() == path and len(made.asked) == len(asked) + 1


def test_its_name_is_that_of_all_that_it_is_made_of(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [plugin_path().name]
    for change in (
        lambda: made.source.write_text("another"), lambda: (made.include / "a.h").write_text("another"),
        lambda: (made.include / "c.h").write_text(""), lambda: (made.include / "c.h").write_text("x"),
        lambda: made.change(flags=(*compiled.FLAGS, "-g")),
        lambda: monkeypatch.setattr(compiled.platform, "machine", lambda: "another"),
    ):
        change()
        names.append(plugin_path().name)
    assert len({*names}) == 6 and names[2] == names[3], "an empty file says nothing"
    (made.include / "notes.txt").unlink()
    assert plugin_path().name == names[-1]
    assert all(name.startswith("nccl_profiler-") and name.endswith(".plugin.so") and len(name) == 40 for name in names)


def test_a_compiler_with_arguments_of_its_own(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made.compiler("mine")
    monkeypatch.setattr(compiled, "COMPILERS", ())
    monkeypatch.setenv("CC", f"{path} -m64  -w")
    plugin_path()
    assert made.asked[:3] == ["-m64", "-w", compiled.FLAGS[0]]


def test_the_first_of_the_known_compilers_that_is_there(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILERS", ("no-such-compiler", "gcc", "another"))
    plugin_path()
    monkeypatch.setattr(compiled, "COMPILERS", ("no-such-compiler", "nor-this-one"))
    made.source.write_text("anew")
    with pytest.raises(EnvironmentProblem) as caught:
        plugin_path()
    assert "there is no C compiler (no-such-compiler, nor-this-one)" in caught.value.what
    assert caught.value.where == str(made.source)
    assert caught.value.remedy.endswith("; or give attach() topology= and collectives=")


@pytest.mark.parametrize(("says", "why"), [
    ("echo 'x.c:2: error: that' >&2; echo 'error: and that' >&2", "x.c:2: error: that"),
    ("", "x.c:1: warning: not this"),
])
def test_the_first_error_of_a_compiler_is_said(made: Made, says: str, why: str) -> None:
    """It has written something all the same, which nobody loads."""
    made.compiler(says=says, status=1)
    with pytest.raises(EnvironmentProblem) as caught:
        plugin_path()
    assert caught.value.what == f"NCCL's profiler plugin did not compile with gcc: {why}"
    assert not list((made.folder / "cache" / "flowcheck").iterdir())


def test_a_compiler_gets_nothing_to_read(made: Made) -> None:
    made.compiler(says=f"cat >> {made.log}; echo read >> {made.log}")
    plugin_path()
    assert "read" in made.asked


# -- where ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cache", "home", "folder"), [
    (None, "home", "home/.cache/flowcheck"), ("", "home", "home/.cache/flowcheck"),
    ("relative", "home", "home/.cache/flowcheck"), (None, "", f"temporary/flowcheck-{os.geteuid()}"),
])
def test_folders_in_their_order(made: Made, monkeypatch, cache: str | None, home: str, folder: str) -> None:
    """A user may have no home."""
    if cache is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setenv("HOME", str(made.folder / home) if home else "nowhere")
    assert plugin_path().parent == made.folder / folder


@pytest.mark.parametrize(("mode", "ours"), [(0o700, True), (0o755, True), (0o720, False), (0o702, False)])
def test_a_folder_that_others_may_write_is_left_alone(made: Made, mode: int, ours: bool) -> None:
    folder = made.folder / "cache" / "flowcheck"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert (plugin_path().parent == folder) is ours


def test_a_folder_of_another_user_is_left_alone(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(compiled.os, "geteuid", lambda: mine + 1)
    with pytest.raises(EnvironmentProblem) as caught:
        plugin_path()
    first, second = caught.value.what.removeprefix("NCCL's profiler plugin cannot be put anywhere: ").split("; ")
    for reason, folder in ((first, "cache/flowcheck"), (second, f"temporary/flowcheck-{mine + 1}")):
        assert reason == f"{made.folder / folder}: is not a folder that only this user can write"
    assert not made.log.exists()


def test_what_is_there_is_not_compiled_again(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="flowcheck"):
        path = plugin_path()
        made.log.unlink()
        path.write_text("as it is")
        assert plugin_path() == path and not made.log.exists() and path.read_text() == "as it is"
    assert [line.getMessage() for line in caplog.records] == [f"flowcheck: compiled NCCL's profiler plugin: {path}"]
