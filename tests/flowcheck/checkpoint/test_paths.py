"""Names of checkpoints, and what is said of a path that cannot be read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from flowcheck.checkpoint.paths import opened, path_of, readable, refuse
from flowcheck.errors import UserError

DAMAGED = "use another step of the same run; this one is damaged"


def refused(call: Any) -> tuple[str, str, str]:
    with pytest.raises(UserError) as caught:
        call()
    return caught.value.what, caught.value.where, caught.value.remedy


def enter(context: Any) -> None:
    with context:
        pass


def test_an_error_about_a_path() -> None:
    error = refuse(Path("a/b"), "is none")
    assert (error.what, error.where, error.remedy) == ("is none", "a/b", DAMAGED)
    assert refuse(Path("a/b"), "is none", "another").remedy == "another"


@pytest.mark.parametrize("given", ["a/b", Path("a/b")])
def test_what_is_a_name(given: Any) -> None:
    assert path_of(given) == Path("a/b")


@pytest.mark.parametrize(("given", "shown"), [
    ("a\0b", "'a\\x00b'"), (Path("a\0b"), "'a\\x00b'"), (b"ab", "b'ab'"), (None, "None"), (5, "5"),
    ("a\ud800b", "'a\\ud800b'"),
])
def test_what_is_no_name(given: Any, shown: str) -> None:
    what, where, remedy = refused(lambda: path_of(given))
    assert (what, where, remedy) == (f"{shown} is not the name of a file or directory", "path", "another name")
    assert refused(lambda: path_of(given, "out", "file"))[:2] == (f"{shown} is not the name of a file", "out")


def test_a_file_and_its_length(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with opened(tmp_path / name) as (file, size):
            assert (file.read(), size) == (b"abc", 3)
        assert file.closed


def test_what_is_not_there_or_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    irregular = "is no regular file", str(tmp_path / "fifo"), "give FILE.safetensors or a step directory"
    assert refused(lambda: enter(opened(tmp_path / "fifo"))) == irregular
    assert refused(lambda: enter(readable(tmp_path / "fifo"))) == irregular
    absent = "cannot be read: No such file or directory", str(tmp_path / "none"), "give an existing, readable path"
    assert refused(lambda: enter(opened(tmp_path / "none"))) == absent
    assert refused(lambda: enter(opened(tmp_path)))[0] == "cannot be read: Is a directory"


def test_a_fifo_that_has_come_there_since_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr(Path, "is_file", lambda path: True)  # as it was a moment before
    assert refused(lambda: enter(opened(tmp_path / "fifo")))[0] == "is no regular file"


def test_what_is_opened_elsewhere_may_be_anything(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, tmp_path / "none"):
        enter(readable(path, any_kind=True))
    for path in (tmp_path, tmp_path / "none"):
        enter(readable(path))


@pytest.mark.parametrize(("error", "why"), [
    (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"), (OSError("of its own"), "of its own"),
])
def test_errors_of_reading_name_the_path(error: OSError, why: str) -> None:
    def read() -> None:
        with readable(Path("a/b")):
            raise error

    assert refused(read) == (f"cannot be read: {why}", "a/b", "give an existing, readable path")
