"""Captures that cannot be read twice, or in the middle: compressed files, pipes, standard input.

    fd, note = open_capture(path)       a plain file, whatever `path` is; the caller closes it

A scan reads a capture before a port does, and learning reads it several times. So what is unpacked, and what comes
through a pipe, is kept in an unlinked file in TMPDIR until the process ends. A stream that breaks off is kept as far
as it came; `note` says that.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import stat
import tempfile
import time
import zlib
from collections.abc import Callable
from typing import IO, Final

from dataplane.capturefile import CaptureFileError

__all__ = ["open_capture"]

CHUNK: Final = 1 << 20
WRITER_SECONDS: Final = 10.0  # for somebody to open a named pipe's other end
LOOK_SECONDS: Final = 0.02
_UNPACKERS: Final[dict[bytes, tuple[str, Callable[[IO[bytes]], gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile]]]] = {
    b"\x1f\x8b": ("gzip", lambda file: gzip.GzipFile(fileobj=file)),
    b"BZh": ("bzip2", bz2.BZ2File),
    b"\xfd7zXZ\0": ("xz", lzma.LZMAFile),
}
_kept: dict[tuple[object, ...], tuple[int, str]] = {}  # what was unpacked or came, by what it was: (fd, note)


def open_capture(path: str) -> tuple[int, str]:
    """(a descriptor of its own, why not all of it could be had or "").

    Raises:
        CaptureFileError: it cannot be opened, or what it holds does not fit.
    """
    try:
        # Without O_NONBLOCK a pipe without a writer would hang here.
        fd = os.dup(0) if path == "-" else os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise CaptureFileError(path, 0, f"cannot be opened: {reason}", "check path and permissions") from None
    try:
        status = os.fstat(fd)
        pipe = stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)
        if not pipe and (not stat.S_ISREG(status.st_mode) or not _packed(fd)):
            return os.dup(fd), ""
        key = (path, status.st_ino) if pipe else (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if key not in _kept:
            _kept[key] = _spool(path, fd, pipe)
        kept, note = _kept[key]
        return os.dup(kept), note
    except OSError as exc:
        raise CaptureFileError(path, 0, f"cannot be read: {exc.strerror}", "check the file and its disk") from None
    finally:
        os.close(fd)


def _packed(fd: int) -> bool:
    return os.pread(fd, 6, 0).startswith(tuple(_UNPACKERS))


def _spool(path: str, fd: int, pipe: bool) -> tuple[int, str]:
    first = b""
    if pipe and path != "-":  # a shell has opened both ends of standard input
        first = _first(path, fd)
        os.set_blocking(fd, True)
    folder = tempfile.gettempdir()
    try:
        with os.fdopen(os.dup(fd), "rb", buffering=0) as came, tempfile.TemporaryFile(dir=folder) as whole:
            if not pipe:
                came.seek(0)
                return _unpack(came, folder)
            whole.write(first)
            while chunk := came.read(CHUNK):
                whole.write(chunk)
            whole.seek(0)
            whole.flush()
            return _unpack(whole, folder) if _packed(whole.fileno()) else (os.dup(whole.fileno()), "")
    except OSError as exc:
        raise CaptureFileError(
            path, 0, f"what it holds cannot be kept in {folder}: {exc.strerror}",
            "set TMPDIR to a folder with room for the capture unpacked, or unpack it into a file first",
        ) from None


def _first(path: str, fd: int) -> bytes:
    """What a pipe that does not block holds already, once somebody has opened its other end."""
    end = time.monotonic() + WRITER_SECONDS
    while time.monotonic() < end:
        try:
            if first := os.read(fd, CHUNK):
                return first
        except BlockingIOError:  # somebody has, and has written nothing yet
            return b""
        time.sleep(LOOK_SECONDS)
    raise CaptureFileError(
        path, 0, f"a pipe that nobody has written to for {WRITER_SECONDS:.0f} s", "start what writes to it first"
    )


def _unpack(packed: IO[bytes], folder: str) -> tuple[int, str]:
    start = packed.read(6)
    packed.seek(0)
    name, opener = next(how for magic, how in _UNPACKERS.items() if start.startswith(magic))
    note = ""
    with opener(packed) as stream, tempfile.TemporaryFile(dir=folder) as out:
        while True:
            try:
                chunk = stream.read1(CHUNK)  # what came before a fault, and then the fault
            except EOFError:
                note = f"its {name} stream ends early"
                break
            except (zlib.error, lzma.LZMAError, OSError) as exc:
                if isinstance(exc, OSError) and exc.errno is not None:
                    raise
                note = f"its {name} stream is damaged"
                break
            if not chunk:
                break
            out.write(chunk)
        out.flush()
        return os.dup(out.fileno()), note
