"""The files of a ring: made whole before anything is written to them, found again, or replaced.

Rule for a directory that has some already. Files of the same ring stay as they are, with their entries. What is missing
of it is made. Files of a ring of another size, and those whose first block is damaged, are replaced by empty ones: what
was in them is gone. What has such a name and another format, or version, is left alone: UserError.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flowcheck.durable import fsync_directory, make_directory, private, reporting
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.journal.format import BLOCK, Geometry, NotOurs, Torn, aligned, file_name
from updater.ring import file_system

__all__ = ["RingFiles", "found_files", "opened_to_read"]

NAME = re.compile(r"ring-\d{5}")
ROOM = "a smaller journal, or more room on that file system"


def found_files(directory: Path) -> list[Path]:
    """Those called like a ring's, in order. Raises OSError."""
    return sorted(path for path in directory.iterdir() if NAME.fullmatch(path.name))


@contextlib.contextmanager
def opened_to_read(path: Path) -> Iterator[int]:
    """A descriptor of a regular file. Raises OSError, NotOurs."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotOurs("it is no regular file")
        yield descriptor
    finally:
        os.close(descriptor)


class RingFiles:
    """All files of a ring, open to be written by this process alone. descriptors: by file. addresses: of their memory,
    where the file system is memory. direct: past the page cache. disk: what was written is there after fdatasync.
    replaced: files that were, and why. Raises UserError, EnvironmentProblem."""

    def __init__(self, directory: Path, nbytes: int, entry_bytes: int) -> None:
        self.directory = directory
        self.descriptors: list[int] = []
        self._mapped: list[mmap.mmap] = []
        self.addresses: list[int] = []
        self.replaced: list[str] = []
        self.direct = False
        with reporting(directory, "a directory that can be written"):
            make_directory(directory)
            self._locks = [os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)]
        try:
            with reporting(directory, "a file system of this machine's, or one that has locks"):
                self._alone()
                self.memory = file_system(self._locks[0])
                self.disk = not self.memory
                self.page = os.fstatvfs(self._locks[0]).f_bsize if self.memory == "hugetlbfs" else BLOCK
            self.geometry = self._cut(nbytes, entry_bytes)
            self._prepare()
            self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """May be called twice."""
        for memory in self._mapped:
            memory.close()
        for descriptor in [*self.descriptors, *self._locks]:
            os.close(descriptor)
        self.descriptors, self._mapped, self.addresses, self._locks = [], [], [], []

    def block(self, index: int, at: int) -> bytes:
        """A block of a file. Raises EnvironmentProblem."""
        with reporting(self.directory / file_name(index), "a disk that can be read"), mmap.mmap(-1, BLOCK) as block:
            if os.preadv(self.descriptors[index], [block], at) != BLOCK:
                raise OSError(errno.EIO, "it is too short")
            return bytes(block)

    def _alone(self) -> None:
        try:
            fcntl.flock(self._locks[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EnvironmentProblem(
                "another process writes this journal", where=str(self.directory), remedy="a directory for each process"
            ) from None

    def _cut(self, nbytes: int, entry_bytes: int) -> Geometry:
        try:
            return Geometry.of(nbytes, entry_bytes, self.page)
        except ValueError as error:
            raise UserError(str(error), where=str(self.directory), remedy="more megabytes for the journal") from None

    # -- files -------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        with reporting(self.directory, ROOM):
            self._check_room(self.geometry.files, os.statvfs(self.directory).f_blocks)  # before they are counted out
            for path in self.directory.glob(".ring-*.partial"):
                path.unlink()
            wanted = {file_name(index): index for index in range(self.geometry.files)}
            for path in found_files(self.directory):  # what is not kept makes room for what is made
                why = self._unfit(path, wanted.get(path.name))
                if why:
                    self.replaced.append(f"{path.name}: {why}")
                    path.unlink()
            missing = {self.directory / name: index for name, index in wanted.items()
                       if not (self.directory / name).exists()}
            self._check_room(len(missing), os.statvfs(self.directory).f_bavail)  # before it is taken from others
            try:
                for path, index in missing.items():
                    self._make(path, index)
            except OSError:  # a disk that has no room for all of them keeps none
                for path in missing:
                    path.unlink(missing_ok=True)
                raise
            fsync_directory(self.directory)

    def _check_room(self, files: int, blocks: int) -> None:
        """Raises OSError: so many blocks do not hold so many files. hugetlbfs may not say how many it has."""
        room = os.statvfs(self.directory)
        if room.f_blocks and files * aligned(self.geometry.used, self.page) > blocks * room.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _unfit(self, path: Path, index: int | None) -> str:
        """Why a file is replaced; "": it is kept. Raises UserError: it is not ours."""
        try:
            with opened_to_read(path) as descriptor:
                found = Geometry.read(os.pread(descriptor, BLOCK, 0))
                size = os.fstat(descriptor).st_size
        except Torn as error:
            return str(error)
        except NotOurs as error:
            raise UserError(
                str(error), where=str(path), remedy="another directory, or move what is there away"
            ) from None
        if found != (self.geometry, index):
            return "of a ring of another size"
        return "" if size >= self.geometry.used else "it was cut short"

    def _make(self, path: Path, index: int) -> None:
        """Whole or not at all."""
        aside = path.parent / f".{path.name}.partial"
        descriptor = private(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            size = aligned(self.geometry.used, self.page)
            os.posix_fallocate(descriptor, 0, size)
            block = self.geometry.block(index)
            if self.memory:
                with mmap.mmap(descriptor, self.page) as memory:
                    memory[:BLOCK] = block
            else:
                os.pwrite(descriptor, block, 0)
                os.fsync(descriptor)
            os.rename(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
        finally:
            os.close(descriptor)

    def _open(self) -> None:
        with reporting(self.directory, "a file system that can be written"):
            flags = os.O_RDWR
            if self.disk and self._takes_direct(self.directory / file_name(0)):
                self.direct, flags = True, os.O_RDWR | os.O_DIRECT
            for index in range(self.geometry.files):
                self.descriptors.append(private(self.directory / file_name(index), flags))
            if self.memory:
                size = aligned(self.geometry.used, self.page)
                self._mapped = [mmap.mmap(descriptor, size) for descriptor in self.descriptors]
                self.addresses = [np.frombuffer(memory, np.uint8).ctypes.data for memory in self._mapped]

    def _takes_direct(self, path: Path) -> bool:
        """Some file systems refuse it when a file is opened, others when it is read."""
        try:
            descriptor = private(path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return False
            raise
        try:
            with mmap.mmap(-1, BLOCK) as block:
                return os.preadv(descriptor, [block], 0) == BLOCK and os.pwritev(descriptor, [block], 0) == BLOCK
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return False
            raise
        finally:
            os.close(descriptor)
