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


def test_only_files_of_this_machine_are_a_directory(tmp_path: Path) -> None:
    assert isinstance(open_store(f"memory://{os.getpid()}/{next(NUMBERS)}", {}), _Remote)
    for url in (str(tmp_path), f"file://{tmp_path}"):
        assert not isinstance(open_store(url, {}), _Remote)


def test_what_cannot_be_written_says_where(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "s"), {})
    (tmp_path / "s").write_text("a file")
    for work in (lambda: store.put("x/m", [b"1"]), lambda: store.replace("x/l", b"1")):
        with pytest.raises(StoreError, match=r"cannot be written: .*irectory") as caught:
            work()
        assert str(tmp_path / "s") in caught.value.where
        assert caught.value.remedy == "free space on that file system, or a smaller store.keep"


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


def test_what_another_process_removes_first_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [folder / pattern.replace("*", "gone")])
    store = open_store(str(tmp_path), {})
    store.replace("l", b"1")
    assert store.read("l", 0, 1) == b"1"


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


@pytest.mark.parametrize("url", ["s3://AKIA:SE/CRET@bucket/a", "https://host/a?sig=SECRET"])
def test_a_url_with_a_secret_in_it_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UserError) as caught:
        open_store(url, {})
    assert caught.value.where == "store.url" and "SE" not in caught.value.message()


def test_a_secret_in_what_a_library_says_is_not_shown() -> None:
    class Broken:
        def cat_file(self, path: str, **_: int) -> bytes:
            raise OSError(f"Cannot connect to https://me:SECRET@host/{path}?sig=SECRET, retry")

    with pytest.raises(StoreError) as caught:
        _Remote("https://host", Broken(), "https://host").read("a", 0, 1)
    assert "host/" in caught.value.what and "SECRET" not in caught.value.message()


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


# -- what fails, says which object and what was done with it ---------------------------------------------------------

WORK: dict[str, tuple[str, Callable[[Objects, str], object]]] = {
    "put": ("written", lambda store, name: store.put(name, [b"1"])),
    "replace": ("written", lambda store, name: store.replace(name, b"1")),
    "size": ("looked up", lambda store, name: store.size(name)),
    "read": ("read", lambda store, name: store.read(name, 0, 1)),
    "children": ("listed", lambda store, name: store.children(name)),
    "remove": ("removed", lambda store, name: store.remove(name)),
}


class Broken:
    """A library that knows every call and answers none."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise self._error

        return call


@pytest.mark.parametrize("work", WORK)
def test_what_a_library_refuses(work: str) -> None:
    did, call = WORK[work]
    with pytest.raises(StoreError, match=f"cannot be {did}: RuntimeError: no") as caught:
        call(_Remote("broken://bucket/", Broken(RuntimeError(" no\nmore of it")), "bucket"), "run/m")
    assert caught.value.where == "broken://bucket/run/m" and "store.options" in caught.value.remedy
    assert not isinstance(caught.value, Missing)


@pytest.mark.parametrize(("error", "said"), [
    (RuntimeError("y" * 301 + "\nz"), "RuntimeError: " + "y" * 300),
    (ValueError("\n first \nsecond"), "ValueError: first "),
    (OSError(28, "No space left", "a name"), "OSError: No space left"), (KeyError(), "KeyError"),
])
def test_of_what_a_library_says_one_line_is_kept(error: Exception, said: str) -> None:
    with pytest.raises(StoreError) as caught:
        _Remote("broken://bucket", Broken(error), "bucket").size("m")
    assert caught.value.what == f"cannot be looked up: {said}"


def test_what_a_library_does_not_find() -> None:
    store = _Remote("broken://bucket", Broken(FileNotFoundError(errno.ENOENT, "nothing there")), "bucket")
    assert store.children("run") == [] and store.read("run/m", 7, 0) == b""
    store.remove("run/m")
    for ask in (store.size, lambda name: store.read(name, 0, 1)):
        with pytest.raises(Missing, match="FileNotFoundError: nothing there") as caught:
            ask("run/m")
        assert caught.value.where == "broken://bucket/run/m"


@pytest.mark.parametrize("work", WORK)
def test_what_a_file_system_refuses(tmp_path: Path, work: str) -> None:
    """A name that is too long for it."""
    (did, call), name = WORK[work], f"run/{'m' * 300}"
    (tmp_path / "run").mkdir()
    with pytest.raises(StoreError, match=f"cannot be {did}: File name too long") as caught:
        call(open_store(str(tmp_path), {}), name)
    assert caught.value.where == str(tmp_path / name) and not isinstance(caught.value, Missing)
    assert ("a smaller store.keep" if did == "written" else "store.options") in caught.value.remedy


def test_what_was_stored_is_on_the_disk_and_no_more_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads it back reads what is there, and a power cut takes neither the bytes nor the name."""
    store, done = open_store(str(tmp_path), {}), list[tuple[str, ...]]()
    fsync, drop = os.fsync, os.posix_fadvise

    def named(descriptor: int) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path)

    monkeypatch.setattr(os, "fsync", lambda one: (done.append(("sync", named(one))), fsync(one)))
    monkeypatch.setattr(os, "posix_fadvise", lambda one, first, count, advice: (
        done.append(("drop", named(one), first, count, advice)), drop(one, first, count, advice)))
    for turn in range(2):
        done.clear()
        store.put("run/m", [b"abc"])
        assert done[-3:] == [("sync", "run/m"), ("sync", "run"), ("drop", "run/m", 0, 0, os.POSIX_FADV_DONTNEED)]
        assert done[:-3] == ([] if turn else [("sync", ".")])
    done.clear()
    store.replace("run/l", b"1")
    assert done == [("sync", f"run/.l.partial-{os.getpid()}"), ("sync", "run")]


class Listed(Broken):
    """Remembers what it listed until that is dropped, as object stores' libraries do. below: name -> what it holds."""

    def __init__(self, below: dict[str, list[str]]) -> None:
        super().__init__(RuntimeError("no"))
        self.below, self._kept, self.did = below, dict[str, list[str]](), list[tuple[str, str]]()

    def invalidate_cache(self) -> None:
        self._kept.clear()

    def ls(self, path: str, detail: bool) -> list[str]:
        assert detail is False
        return self._kept.setdefault(path, [f"{path}/{one}" for one in self.below.get(path, ())])

    def info(self, path: str) -> dict[str, Any]:
        return {"size": len(self._kept.setdefault(path, list(self.below[path])))}

    def isdir(self, path: str) -> bool:
        return path in self.below

    def rmdir(self, path: str) -> None:
        self.did.append(("rmdir", path))
        raise OSError(errno.ENOTEMPTY, "something has come there since")

    def rm_file(self, path: str) -> None:
        self.did.append(("rm", path))


def test_what_was_listed_before_is_not_believed() -> None:
    fs = Listed({"b/run": ["a"]})
    store = _Remote("listed://b", fs, "b")
    assert (store.children("run"), store.size("run")) == (["a"], 1)
    fs.below["b/run"] = ["a", "c"]
    assert store.size("run") == 2 and store.children("run") == ["a", "c"]


def test_all_below_a_name_is_removed_one_by_one() -> None:
    """A folder that cannot be removed then is no harm."""
    fs = Listed({"b/run": ["x", "e"], "b/run/e": ["y"]})
    _Remote("listed://b", fs, "b").remove_all("run")
    assert fs.did == [("rm", "b/run/e/y"), ("rmdir", "b/run/e"), ("rm", "b/run/x"), ("rmdir", "b/run")]
