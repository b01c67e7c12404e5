"""What lies where everybody may write, such as /dev/shm: reached by descriptors, and used only if it is this user's.

    with folder(path, "a.user", "step-000020", make=True) as inside:    each name in the one before; those made are 0700
        write(inside, "rank-00003", data)                               aside and renamed, 0600
        read(inside, "rank-00003", most)

No link is followed in what these names lead to, so nothing leads out of it. Whose it is: not_owned(). What is not ours
raises NotOwned, an OSError: whoever has no use for the difference has what was not there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator

__all__ = ["NotOwned", "folder", "not_owned", "read", "write"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NotOwned(PermissionError):
    """Something of that name is somebody else's, or may be. strerror: why."""


def not_owned(found: os.stat_result) -> str:
    """Why others may have put there what lies there, "": nobody but this user and root."""
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {found.st_uid}, and this process runs as {os.geteuid()}"
    if found.st_mode & 0o022:
        return f"may be written to by others (mode {found.st_mode & 0o777:o})"
    if not stat.S_ISDIR(found.st_mode) and not stat.S_ISREG(found.st_mode):
        return "is no regular file and no directory"
    return "has another name as well" if stat.S_ISREG(found.st_mode) and found.st_nlink > 1 else ""


@contextlib.contextmanager
def folder(path: str | os.PathLike[str], *names: str, make: bool = False) -> Iterator[int]:
    """The descriptor of a directory: names, each in the one before, the first in `path`, which is the operator's and
    may be reached by a link. make: those that are missing. Raises OSError; NotOwned."""
    inside = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=inside)
            below = _open(name, _DIRECTORY, inside)
            os.close(inside)
            inside = below
        yield inside
    finally:
        os.close(inside)


def read(inside: int, name: str, most: int) -> bytes:
    """At most so many bytes of a file. A pipe is not waited for. Raises OSError; NotOwned."""
    descriptor = _open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, inside)
    with open(descriptor, "rb") as file:
        return file.read(most)


def write(inside: int, name: str, data: bytes) -> None:
    """Replace or create a file, whole or not at all. Raises OSError."""
    aside = f".{name}.partial-{secrets.token_hex(4)}"
    try:
        made = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=inside)
        with open(made, "wb") as file:
            file.write(data)
        os.rename(aside, name, src_dir_fd=inside, dst_dir_fd=inside)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside, dir_fd=inside)
        raise


def _open(name: str, flags: int, inside: int) -> int:
    """Of what is ours."""
    try:
        descriptor = os.open(name, flags, dir_fd=inside)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise NotOwned(error.errno, "is a link, or not what it should be", name) from None
        raise
    try:
        if why := not_owned(os.fstat(descriptor)):
            raise NotOwned(errno.EPERM, why, name)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
