"""A store of objects behind a URL: a directory, or whatever fsspec reaches.

    store = open_store("s3://bucket/checkpoints", {})
    store.put("run/step-000020.9f/model.safetensors", pieces)     all of it, or nothing of that name that is whole
    store.replace("run/latest.json", data)                        a small one: the old bytes or the new ones
    store.read(name, first, count), store.size(name)              raises Missing where there is nothing of that name
    store.children("run")                                         names directly below, as the store lists them

Nothing that a store says is believed here: who wrote reads back, who reads checks hashes (store.py). Any call may take
for ever, so it is made where nobody waits for it. What goes wrong is a StoreError with the name of the object. Names
have "/" between their parts and none at either end. Any thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from flowcheck.control.address import credentials_in, without_credentials
from flowcheck.durable import fsync_directory, make_directory, partial_name, remove_tree, write_synced
from flowcheck.errors import EnvironmentProblem, UserError

__all__ = ["Missing", "Objects", "StoreError", "check_url", "open_store"]

Piece = bytes | memoryview


class StoreError(EnvironmentProblem):
    """The store refused, or is full, or is not reached."""


class Missing(StoreError):
    """The store has no object of that name."""


class Objects(Protocol):
    """url: where everything lies."""

    url: str

    def put(self, name: str, pieces: Iterable[Piece]) -> None:
        """Write an object; durable on return, as far as the store promises that."""

    def replace(self, name: str, data: bytes) -> None:
        """Write a small object in one step."""

    def size(self, name: str) -> int: ...

    def read(self, name: str, first: int, count: int) -> bytes:
        """Bytes from `first` on, at most `count`; fewer at the end."""

    def children(self, name: str) -> list[str]:
        """Last parts of the names directly below, sorted; [] where there is nothing."""

    def remove(self, name: str) -> None:
        """One object; nothing if it does not exist."""

    def remove_all(self, name: str) -> None:
        """Everything below a name."""


def check_url(url: str) -> None:
    """Raises UserError: nothing here can reach such a URL, or it says what nobody may see."""
    if secret := credentials_in(url):
        raise UserError(f"a URL with {secret} in it", where="store.url", remedy="store.options, or where its library"
                        " looks for them")
    if protocol := _protocol(url):
        _implementation(protocol)


def open_store(url: str, options: Mapping[str, Any]) -> Objects:
    """options: for the fsspec implementation of the URL's protocol. Raises UserError, StoreError."""
    check_url(url)
    try:
        fs, root = url_to_fs(url, **options)
    except Exception as error:  # of whatever library it is
        raise StoreError(f"cannot be opened: {_said(error)}", where=url, remedy=_REMEDY) from None
    return _Directory(url, Path(root)) if isinstance(fs, LocalFileSystem) else _Remote(url, fs, root)


_REMEDY = "check store.url and store.options of the settings, and the account that the node uses"


def _protocol(url: str) -> str:
    return url.partition("://")[0] if "://" in url else ""


def _implementation(protocol: str) -> None:
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise UserError(
            f"{protocol!r} is no protocol that fsspec knows", where="store.url", remedy="such as file:// or s3://"
        ) from None
    except ImportError as error:
        if not _by_obstore(protocol):
            raise UserError(
                f"a package is missing that reaches {protocol}://: {error}", where="store.url",
                remedy="install it for the node's Python, or obstore, which reaches s3, gs and az",
            ) from None


def _by_obstore(protocol: str) -> bool:
    """Register obstore for a protocol whose own package is not installed."""
    try:
        from obstore.fsspec import SUPPORTED_PROTOCOLS, register
    except ImportError:
        return False
    if protocol not in SUPPORTED_PROTOCOLS:
        return False
    register(protocol)
    return True


def _said(error: BaseException) -> str:
    """The first line of what a library says."""
    text = without_credentials(str(getattr(error, "strerror", None) or error).strip().split("\n", 1)[0])[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Remote:
    """By fsspec. An object appears when it is whole, as in object stores; elsewhere a manifest comes last, and proves
    what it lists."""

    def __init__(self, url: str, fs: Any, root: str) -> None:
        self.url, self._fs, self._root = url, fs, root.rstrip("/")

    def put(self, name: str, pieces: Iterable[Piece]) -> None:
        try:
            self._fs.makedirs(self._path(str(PurePosixPath(name).parent)), exist_ok=True)
            with self._fs.open(self._path(name), "wb") as file:
                for piece in pieces:
                    file.write(piece)
        except Exception as error:
            raise self._failed("written", name, error) from None

    def replace(self, name: str, data: bytes) -> None:
        try:
            self._fs.pipe_file(self._path(name), data)
        except Exception as error:
            raise self._failed("written", name, error) from None

    def size(self, name: str) -> int:
        try:
            self._fs.invalidate_cache()  # what it listed may be old
            return int(self._fs.info(self._path(name))["size"])
        except Exception as error:
            raise self._failed("looked up", name, error) from None

    def read(self, name: str, first: int, count: int) -> bytes:
        if not count:
            return b""
        try:
            return bytes(self._fs.cat_file(self._path(name), start=first, end=first + count))
        except Exception as error:
            raise self._failed("read", name, error) from None

    def children(self, name: str) -> list[str]:
        path = self._path(name)
        try:
            self._fs.invalidate_cache()
            found = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._failed("listed", name, error) from None
        return sorted({PurePosixPath(one).name for one in found if one.rstrip("/") != path})

    def remove(self, name: str) -> None:
        try:
            self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            pass
        except Exception as error:
            raise self._failed("removed", name, error) from None

    def remove_all(self, name: str) -> None:
        for child in self.children(name):
            self.remove_all(f"{name}/{child}")
        try:
            if self._fs.isdir(path := self._path(name)):
                self._fs.rmdir(path)  # object stores have none, and say nothing
                return
        except Exception:
            return  # an empty folder is no harm
        self.remove(name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name not in ("", ".") else self._root

    def _failed(self, what: str, name: str, error: Exception) -> StoreError:
        kind = Missing if isinstance(error, FileNotFoundError) else StoreError
        return kind(f"cannot be {what}: {_said(error)}", where=f"{self.url.rstrip('/')}/{name}", remedy=_REMEDY)


class _Directory:
    """Of this machine's file system, or of one that is mounted."""

    def __init__(self, url: str, root: Path) -> None:
        self.url, self._root = url, root

    def put(self, name: str, pieces: Iterable[Piece]) -> None:
        """The name is there before its bytes are: it is the manifest that says what is whole."""
        path = self._root / name
        try:
            make_directory(path.parent)
            path.unlink(missing_ok=True)
            write_synced(path, pieces)
            fsync_directory(path.parent)
            with path.open("rb") as file:  # who reads it back is to read what was stored
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._failed("written", name, error) from None

    def replace(self, name: str, data: bytes) -> None:
        path = self._root / name
        aside = partial_name(path)
        try:
            make_directory(path.parent)
            for left in path.parent.glob(f".{path.name}.partial-*"):  # of a process that was killed
                left.unlink(missing_ok=True)
            write_synced(aside, [data])
            os.replace(aside, path)
            fsync_directory(path.parent)
        except OSError as error:
            try:
                aside.unlink(missing_ok=True)
            except OSError:
                pass
            raise self._failed("written", name, error) from None

    def size(self, name: str) -> int:
        try:
            return (self._root / name).stat().st_size
        except OSError as error:
            raise self._failed("looked up", name, error) from None

    def read(self, name: str, first: int, count: int) -> bytes:
        try:
            with (self._root / name).open("rb") as file:
                file.seek(first)
                return file.read(count)
        except OSError as error:
            raise self._failed("read", name, error) from None

    def children(self, name: str) -> list[str]:
        try:
            return sorted(one for one in os.listdir(self._root / name) if not one.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._failed("listed", name, error) from None

    def remove(self, name: str) -> None:
        try:
            (self._root / name).unlink(missing_ok=True)
        except OSError as error:
            raise self._failed("removed", name, error) from None

    def remove_all(self, name: str) -> None:
        remove_tree(self._root / name)

    def _failed(self, what: str, name: str, error: OSError) -> StoreError:
        kind = Missing if isinstance(error, FileNotFoundError | NotADirectoryError) else StoreError
        remedy = "free space on that file system, or a smaller store.keep" if what == "written" else _REMEDY
        return kind(f"cannot be {what}: {error.strerror or error}", where=str(self._root / name), remedy=remedy)
