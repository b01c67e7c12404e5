"""What a node's own process says to the one that answers its HTTP API: the newest state, in memory that both map.

    board = Board();  board.write(text)        in the node; False: it is too large
    board.fd                                   inherited by the other process
    Glance(fd).read()                          there: what was written last, b"" if nothing was

Neither waits for the other, and nobody asks the node anything. The text goes into one of two
areas in turn, with its length and CRC-32 before it, and a count says which one is newest. A reader that was overtaken
twice while it copied finds the CRC wrong and reads again.

The memory has no name in any file system, so a killed node leaves nothing behind. Its size is sealed: the other process
cannot take it away from under the node, and cannot write to it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import zlib

__all__ = ["ROOM", "Board", "Glance"]

ROOM = 512 << 10  # bytes of text
TRIES = 8
_COUNT = struct.Struct("<Q")
_HEAD = struct.Struct("<II")  # length, CRC-32
_AREA = _HEAD.size + ROOM
_SIZE = _COUNT.size + 2 * _AREA
_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; fcntl has no name for it


class Board:
    """One thread writes."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("flowcheck board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, _SIZE)
            self._memory = mmap.mmap(self.fd, _SIZE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            try:
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
            except OSError:
                pass  # an older kernel: the other process is ours, and maps it for reading
        except BaseException:
            os.close(self.fd)
            raise
        self._count = 0

    def write(self, text: bytes) -> bool:
        """False: it has more than ROOM bytes, and what was there before stays."""
        if len(text) > ROOM:
            return False
        at = _area(self._count + 1)
        _HEAD.pack_into(self._memory, at, len(text), zlib.crc32(text))
        self._memory[at + _HEAD.size : at + _HEAD.size + len(text)] = text
        self._count += 1
        _COUNT.pack_into(self._memory, 0, self._count)
        return True

    def close(self) -> None:
        """May be called twice."""
        if self.fd >= 0:
            self._memory.close()
            os.close(self.fd)
            self.fd = -1


class Glance:
    """fd: of a Board."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _SIZE, prot=mmap.PROT_READ)

    @property
    def count(self) -> int:
        """Grows with each text."""
        return int(_COUNT.unpack_from(self._memory)[0])

    def read(self) -> bytes:
        """b"": nothing was written yet, or each try was overtaken."""
        for _ in range(TRIES):
            count = self.count
            if not count:
                break
            at = _area(count)
            length, crc = _HEAD.unpack_from(self._memory, at)
            text = self._memory[at + _HEAD.size : at + _HEAD.size + min(length, ROOM)]
            if zlib.crc32(text) == crc:
                return text
        return b""

    def close(self) -> None:
        self._memory.close()


def _area(count: int) -> int:
    return _COUNT.size + count % 2 * _AREA
