"""Writing so that a kill or a power cut leaves the old thing or the new one, never half of one.

Rules: write aside, fsync the file, rename, fsync the directory that holds the name. A directory is made
durable in the same way: its files first, then itself, then its parent. Only local names are used aside:
`.<name>.partial-<pid>` in the same directory, so that the rename never crosses file systems. Where several may write
one name at once, eight more digits follow.

What is written holds weights, or says where they lie: files are 0600 and directories 0700, whatever the umask, and no
link is followed. `let_read` is for a process whose operator wants others to read them (output.readable_by of a node).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from flowcheck.errors import EnvironmentProblem, UserError

__all__ = [
    "adopt", "came_last", "check_writable", "exchange", "fsync_directory", "let_read", "make_directory",
    "new_directory", "partial_name", "private", "remove_left", "remove_tree", "reporting", "write_atomic",
    "write_synced",
]

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
READERS = {"owner": 0, "group": 0o040, "all": 0o044}
LEFT_SECONDS = 600.0  # after which nobody writes what is aside: on a file system of several machines, pids say little


def partial_name(path: Path, several: bool = False) -> Path:
    """The name under which `path` is written before it is renamed. several: threads, or processes of several machines,
    where numbers of processes are the same, may write one path at once: a name that nobody else has."""
    more = f"-{secrets.token_hex(4)}" if several else ""
    return path.parent / f".{path.name}.partial-{os.getpid()}{more}"


_readers = 0  # bits of those who may read besides the owner


def let_read(whom: str) -> None:
    """Who may read what this process writes from now on: "owner", "group" or "all"."""
    global _readers
    _readers = READERS[whom]


def private(path: str | os.PathLike[str], flags: int, links: int = os.O_NOFOLLOW) -> int:
    """An opener: a file that it makes is for this user, and for those that `let_read` says. links: 0: one that leads
    elsewhere is followed."""
    descriptor = os.open(path, flags | links | os.O_CLOEXEC, 0o600)
    found = os.fstat(descriptor)
    if _readers and flags & os.O_CREAT and stat.S_ISREG(found.st_mode) and not found.st_size:
        with contextlib.suppress(OSError):  # a file system without modes
            os.fchmod(descriptor, 0o600 | _readers)  # the umask has no say in it
    return descriptor


def new_directory(path: Path) -> None:
    """Make one that is not there, for what `private` makes. Raises OSError."""
    os.mkdir(path, 0o700)
    if _readers:
        with contextlib.suppress(OSError):
            os.chmod(path, 0o700 | _readers | _readers >> 2)


@contextlib.contextmanager
def reporting(
    path: Path, remedy: str = "a path that can be written, or free space on that file system", aside: Path | None = None
) -> Iterator[None]:
    """Turn an OSError into EnvironmentProblem naming the file. aside: the name under which `path` is written first,
    which nobody asked for."""
    try:
        yield
    except OSError as error:
        named = None if aside is not None and error.filename == os.fspath(aside) else error.filename
        raise EnvironmentProblem(
            f"cannot be written: {error.strerror or error}", where=str(named or path),
            remedy=remedy,
        ) from None


def _check_name(path: Path) -> None:
    """To other commands "-" is standard output, and a file of that name is what nobody wants."""
    if path == Path("-"):
        raise UserError("'-' is not standard output here", where="-", remedy="the name of what is to be written")


def write_synced(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """A new file with these bytes, on the disk when this returns. The directory entry is not yet."""
    descriptor = private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        for piece in pieces:
            left = memoryview(piece)
            while left:
                left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing; each name is durable on return. Raises UserError
    for "-"."""
    _check_name(path)
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    for folder in reversed(missing):
        try:
            new_directory(folder)
        except FileExistsError:
            if not folder.is_dir():  # otherwise somebody else was quicker
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
        fsync_directory(folder.parent)


def check_writable(directory: Path, remedy: str) -> None:
    """Make a directory if it is missing, and a file in it, which goes again. Raises EnvironmentProblem with `remedy`:
    who starts something that writes for weeks wants to know now."""
    probe = partial_name(directory / "probe")
    with reporting(directory, remedy, aside=probe):
        make_directory(directory)
        probe.unlink(missing_ok=True)
        try:
            write_synced(probe, [b"flowcheck"])
        finally:
            probe.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes | Iterable[bytes | memoryview]) -> None:
    """Replace or create one file. Raises EnvironmentProblem, and UserError for "-"; the old content then still stands.
    data: or its pieces.

    A name that is taken by something else is left alone: renaming over a device would replace it.
    """
    _check_name(path)
    aside = partial_name(path)
    with reporting(path, aside=aside):
        if path.exists() and not path.is_file():
            raise EnvironmentProblem("exists and is no regular file", where=str(path), remedy="give another name")
        try:
            aside.unlink(missing_ok=True)  # of an earlier process that had our pid
            write_synced(aside, [data] if isinstance(data, bytes) else data)
            os.replace(aside, path)
            fsync_directory(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise


def exchange(one: Path, other: Path) -> None:
    """Swap two existing names in one step (renameat2 with RENAME_EXCHANGE).

    Raises EnvironmentProblem where the file system cannot, else OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise EnvironmentProblem(
                "exists, and this file system cannot swap two directories in one step", where=str(other),
                remedy="move the old directory away, or use another one",
            )
        raise OSError(code, os.strerror(code), str(other))


def adopt(source: Path, target: Path) -> None:
    """Give a whole directory its final name, in exchange for an older one that has it. Durable on return."""
    with reporting(target):
        try:
            if target.exists():
                exchange(source, target)
            else:
                os.rename(source, target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            exchange(source, target)  # another one was quicker
        fsync_directory(target.parent)


def came_last(path: Path, others: Iterable[int]) -> None:
    """Let a file's time of change come after these (ns), whatever the clock says: it may have been set back, and what
    came last would be removed as the oldest. Raises OSError."""
    latest = max(others, default=0)
    if path.stat().st_mtime_ns <= latest:
        os.utime(path, ns=(latest + 1, latest + 1))


def remove_tree(path: Path) -> None:
    """Remove a directory that nobody may use, as far as that is possible, or what has come there in its place: shutil
    opens what it is given, and would wait for a pipe."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def remove_left(directory: Path, names: str) -> None:
    """Remove what is half and whose processes were killed. Whoever writes there again is asked to, because nobody else
    would know of it; what was touched a moment ago stays. names: what those of ours begin with."""
    with contextlib.suppress(OSError), os.scandir(directory) as found:
        for one in [entry for entry in found if ".partial-" in entry.name]:
            name, _, number = one.name.rpartition(".partial-")
            pid = number.partition("-")[0]
            ours = name.startswith(f".{names}") and pid.isdecimal() and not one.is_symlink()
            if ours and not _lives(int(pid)):
                with contextlib.suppress(OSError):
                    if time.time() - _touched(Path(one)) > LEFT_SECONDS:
                        if one.is_dir():
                            remove_tree(Path(one))
                        else:
                            os.unlink(one)


def _lives(pid: int) -> bool:
    """Is that another process? Ours writes nothing else in that directory now."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _touched(path: Path) -> float:
    return max(one.lstat().st_mtime for one in (path, *(path.iterdir() if path.is_dir() else ())))
