"""The profiler plugin where the installation has none: compiled once, for this user alone, or it is said why not."""

from __future__ import annotations

import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from flowcheck.control import compiled
from flowcheck.errors import EnvironmentProblem
from flowcheck.trainer import plugin
from flowcheck.trainer.nccl.profiler import Plugin
from flowcheck.trainer.plugin import plugin_path


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An installation of a wheel, and the folder that its plugin goes to."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(plugin, "PLUGIN", replace(plugin.PLUGIN, built=tmp_path / plugin.PLUGIN.built.name))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache" / "flowcheck"


def test_what_the_installation_has_built_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = tmp_path / "nccl_profiler.plugin.so"
    built.write_bytes(b"")
    monkeypatch.setattr(plugin, "PLUGIN", replace(plugin.PLUGIN, built=built))
    assert plugin_path() == built


def test_ranks_that_compile_at_once_have_the_same_file(cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: plugin_path(), range(4)))
    assert len(paths) == 1 and list(cache.iterdir()) == [*paths]
    assert cache.stat().st_mode & 0o777 == 0o700
    assert Plugin(paths.pop()).counts().communicators == 0


def test_another_source_is_another_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = plugin_path()
    made = first.stat().st_mtime_ns
    assert plugin_path() == first and first.stat().st_mtime_ns == made
    changed = tmp_path / "changed.c"
    changed.write_text(plugin.PLUGIN.source.read_text() + "/* of the next version */\n")
    monkeypatch.setattr(plugin, "PLUGIN", replace(plugin.PLUGIN, source=changed))
    assert plugin_path() != first and len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("folder", ["of others", "a link", "unwritable"])
def test_where_the_cache_is_not_ours_alone(cache: Path, tmp_path: Path, folder: str) -> None:
    """A library is loaded into the training process: not one that somebody else may have put there."""
    if folder == "of others":
        cache.mkdir(parents=True)
        cache.chmod(0o777)
    elif folder == "a link":
        cache.parent.mkdir()
        (tmp_path / "elsewhere").mkdir()
        cache.symlink_to(tmp_path / "elsewhere")
    else:
        cache.parent.write_text("a file")
    assert plugin_path().parent == tmp_path / "temporary" / f"flowcheck-{os.geteuid()}"


def test_where_nothing_can_be_written(cache: Path, tmp_path: Path) -> None:
    cache.parent.write_text("a file")
    (tmp_path / "temporary" / f"flowcheck-{os.geteuid()}").write_text("another")
    with pytest.raises(EnvironmentProblem, match="cannot be put anywhere") as raised:
        plugin_path()
    assert "XDG_CACHE_HOME" in raised.value.remedy


@pytest.mark.parametrize(("compiler", "words"), [
    ("a-compiler-that-nobody-has", "no C compiler .a-compiler-that-nobody-has, which CC says"),
    ("cc -include absent.h", "did not compile with cc -include absent.h: .*error"),
    ("false", "did not compile with false: 1"),
])
def test_compilers_that_do_not(cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, words: str) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(EnvironmentProblem, match=words) as raised:
        plugin_path()
    assert "topology=" in raised.value.remedy
    assert not list(cache.iterdir())


def test_a_compiler_that_hangs(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 300\n")
    slow.chmod(0o755)
    monkeypatch.setattr(compiled, "SECONDS", 0.2)
    monkeypatch.setenv("CC", str(slow))
    with pytest.raises(EnvironmentProblem, match=r"within 0\.2 s"):
        plugin_path()


def test_where_the_source_is_gone(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plugin, "PLUGIN", replace(plugin.PLUGIN, source=tmp_path / "absent.c"))
    with pytest.raises(EnvironmentProblem, match="its source is not there"):
        plugin_path()
