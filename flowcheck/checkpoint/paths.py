"""What a checkpoint is called and whether it can be read: names that no file system can have, pipes, errors of reading.

Standard library only, so that what lacks other packages is named by who needs them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from flowcheck.errors import UserError

__all__ = ["opened", "path_of", "readable", "refuse"]


def refuse(path: Path, what: str, remedy: str = "") -> UserError:
    """The error to raise about a path."""
    remedy = remedy or "use another step of the same run; this one is damaged"
    return UserError(what, where=str(path), remedy=remedy)


def path_of(given: object, where: str = "path", kind: str = "file or directory") -> Path:
    """Raises UserError if no file system can have that name. where: the argument. kind: of what it is the name."""
    try:
        text = os.fspath(given)  # type: ignore[call-overload]
        usable = isinstance(text, str) and b"\0" not in os.fsencode(text)
    except (TypeError, UnicodeEncodeError):
        usable = False
    if not usable:
        said = str(given) if isinstance(given, Path) else given
        raise UserError(f"{said!r} is not the name of a {kind}", where=where, remedy="another name")
    return Path(text)


@contextlib.contextmanager
def readable(path: Path, *, any_kind: bool = False) -> Iterator[None]:
    """Turn an OSError of reading into a UserError, which is raised at once for what is neither file nor directory: a
    FIFO would be waited for. any_kind: it is not opened here, so it may be anything."""
    try:
        if not any_kind and path.exists() and not (path.is_file() or path.is_dir()):
            raise _irregular(path)
        yield
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise refuse(path, what, "give an existing, readable path") from None


def _irregular(path: Path) -> UserError:
    return refuse(path, "is no regular file", "give FILE.safetensors or a step directory")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file and its length. Raises UserError. A FIFO that has come there since is not waited for, either."""
    def without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with readable(path), open(path, "rb", opener=without_waiting) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise _irregular(path)
        yield file, found.st_size


def read_small(path: Path, most: int) -> bytes:
    """A manifest, of at most so many bytes: whatever lies there, no more are taken, and nothing is waited for. Raises
    UserError."""
    with opened(path) as (file, size):
        data = file.read(most + 1) if size <= most else b""
    if (size := max(size, len(data))) > most:
        raise refuse(path, f"has {size} bytes; no manifest has more than {most}")
    return data
