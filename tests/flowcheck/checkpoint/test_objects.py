"""Stores of objects: what every one of them must do, a directory as well as what fsspec reaches."""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.spec import AbstractFileSystem

from flowcheck.checkpoint.objects import Missing, Objects, StoreError, _Remote, check_url, open_store
from flowcheck.errors import UserError

NUMBERS = itertools.count()


@pytest.fixture(params=["directory", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Objects]:
    url = {"directory": str(tmp_path / "a b"), "file": f"file://{tmp_path}/s",
           "memory": f"memory://{os.getpid()}/{next(NUMBERS)}"}[request.param]
    opened = open_store(url, {})
    assert opened.url == url
    yield opened
    opened.remove_all("x")


def test_an_object_comes_back(store: Objects) -> None:
    store.put("x/r%20un/epoch-0/m", [b"abc", memoryview(b"defgh"), b""])
    assert store.size("x/r%20un/epoch-0/m") == 8
    assert store.read("x/r%20un/epoch-0/m", 0, 8) == b"abcdefgh" and store.read("x/r%20un/epoch-0/m", 2, 3) == b"cde"
    assert store.read("x/r%20un/epoch-0/m", 0, 0) == b""
    store.put("x/r%20un/epoch-0/m", [b"shorter"])
    assert store.read("x/r%20un/epoch-0/m", 0, 7) == b"shorter" and store.size("x/r%20un/epoch-0/m") == 7


def test_a_small_one_is_replaced(store: Objects) -> None:
    for data in (b"first, which is longer", b"second"):
        store.replace("x/latest.json", data)
        assert store.read("x/latest.json", 0, store.size("x/latest.json")) == data
    assert store.children("x") == ["latest.json"]


def test_what_lies_below(store: Objects) -> None:
    assert store.children("x") == [] and store.children("") == []
    for name in ("x/b/1", "x/b/2", "x/a", "x/bb/deep/er"):
        store.put(name, [b"1"])
    assert store.children("x") == ["a", "b", "bb"] and store.children("x/b") == ["1", "2"]
    assert store.children("") == ["x"]
    assert store.children("x/nothing") == [] and store.children("x/a") in ([], ["a"])


def test_what_is_removed_is_gone_and_nothing_else(store: Objects) -> None:
    for name in ("x/a/1", "x/a/2/3", "x/ab/1"):
        store.put(name, [b"1"])
    store.remove("x/a/1")
    store.remove("x/a/1")
    assert store.children("x/a") == ["2"]
    store.remove_all("x/a")
    store.remove_all("x/a")
    assert store.children("x") == ["ab"] and store.read("x/ab/1", 0, 1) == b"1"


def test_what_is_not_there(store: Objects) -> None:
    asked: list[Callable[[], object]] = [
        lambda: store.size("x/no"), lambda: store.read("x/no", 0, 4), lambda: store.size("x/a/no")
    ]
    store.put("x/a", [b"1"])
    for ask in asked:
        with pytest.raises(Missing) as caught:
            ask()
        assert "x/" in caught.value.where and caught.value.remedy
    assert not isinstance(StoreError("x"), Missing)


def test_what_cannot_be_written_says_where(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "s"), {})
    (tmp_path / "s").write_text("a file")
    for work in (lambda: store.put("x/m", [b"1"]), lambda: store.replace("x/l", b"1")):
        with pytest.raises(StoreError, match=r"cannot be written: .*irectory") as caught:
            work()
        assert str(tmp_path / "s") in caught.value.where and "free space" in caught.value.remedy


def test_a_small_one_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), {})
    store.replace("l", b"old")
    (tmp_path / f".l.partial-{os.getpid()}").mkdir()  # the name that it is written under is taken
    with pytest.raises(StoreError, match="cannot be written"):
        store.replace("l", b"new")
    assert store.read("l", 0, 3) == b"old"


def test_what_a_killed_process_left_is_removed_and_not_listed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), {})
    (tmp_path / ".l.partial-1").write_bytes(b"half")
    (tmp_path / ".m.partial-1").write_bytes(b"of another")
    store.replace("l", b"1")
    assert store.children("") == ["l"] and sorted(os.listdir(tmp_path)) == [".m.partial-1", "l"]


@pytest.mark.parametrize(
    ("url", "what"),
    [("nothing-of-that-name://x", "no protocol that fsspec knows"), ("smb://x/y", "package is missing"),
     ("nothing://smb://x", "'nothing' is no protocol")],
)
def test_a_url_that_nothing_reaches(url: str, what: str) -> None:
    for work in (check_url, lambda url: open_store(url, {})):
        with pytest.raises(UserError, match=what) as caught:
            work(url)
        assert caught.value.where == "store.url" and caught.value.remedy


def test_a_place_where_nobody_answers() -> None:
    with pytest.raises(StoreError, match="cannot be opened: ConnectionRefusedError") as caught:
        open_store("ftp://127.0.0.1:1/x", {})
    assert caught.value.where == "ftp://127.0.0.1:1/x" and "store.options" in caught.value.remedy


def test_a_protocol_whose_packages_are_all_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its own package is there nor obstore, which would reach it, too."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    check_url("s3://bucket/x")  # by obstore
    monkeypatch.setitem(sys.modules, "obstore.fsspec", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3")  # what was found once is kept there
    with pytest.raises(UserError, match="a package is missing that reaches s3://"):
        check_url("s3://bucket/x")


class Marked(AbstractFileSystem):
    """Lists a folder's marker, as stores of objects do where a folder was made by hand, and refuses the rest."""

    cachable = False

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[str]:
        if path != "bucket/deep/run":
            raise FileNotFoundError(path)
        return ["bucket/deep/run/", "bucket/deep/run/epoch-1/", "bucket/deep/run/epoch-0"]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        raise OSError(errno.ENOSPC, "no room\nand a second line", path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        raise RuntimeError


def test_what_a_store_of_objects_lists_and_says() -> None:
    store = _Remote("marked://bucket/deep/", Marked(), "bucket/deep/")
    assert store.children("run") == ["epoch-0", "epoch-1"] and store.children("") == []
    with pytest.raises(StoreError) as full:
        store.size("run/x")
    assert str(full.value).splitlines()[0].endswith("cannot be looked up: OSError: no room")
    assert full.value.where == "marked://bucket/deep/run/x"
    with pytest.raises(StoreError, match="cannot be read: RuntimeError"):
        store.read("run/x", 0, 1)
