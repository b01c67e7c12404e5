"""The writing side of counters.py: memory for the rx threads' counters that other processes can read."""

from __future__ import annotations

import itertools
import mmap
import os
import re
from pathlib import Path
from typing import Any

from dataplane.counters import FIXED, FOLDER, HEADER, MAGIC, PREFIX, start_ticks, sweep
from dataplane.pydpdk.ffi import ffi
from dataplane.pydpdk.resource import Resource

__all__ = ["COUNTERS", "CounterFile"]

COUNTERS = tuple(name for name, _field in ffi.typeof("fc_rx_counters").fields)
_numbers = itertools.count()


class CounterFile(Resource):
    """Counters of `queues` rx queues in FOLDER/flowcheck-PID-NUMBER-LABEL; removed at close.

    Where the folder cannot be written, `path` stays None and the counters are this process's alone: a capture
    does not fail for want of an audience.
    """

    def __init__(self, parent: Resource, label: str, queues: int, *, folder: Path = FOLDER) -> None:
        parent.require_open()
        sweep(folder)
        stride = -(-ffi.sizeof("fc_rx_counters") // 64) * 64
        size = HEADER + queues * stride
        safe = re.sub(r"[^A-Za-z0-9_.:-]", "_", label)[-64:]
        self.path: Path | None = folder / f"{PREFIX}{os.getpid()}-{next(_numbers)}-{safe}"
        self._pid = os.getpid()
        names = b"\0".join(text.encode() for text in (safe, *COUNTERS)) + b"\0"
        fixed = FIXED.pack(MAGIC, os.getpid(), queues, len(COUNTERS), stride, start_ticks(os.getpid()))
        self._map = self._create(size, fixed + names)
        self._bytes: Any = ffi.from_buffer(self._map, require_writable=True)
        self._rows = [
            ffi.cast("fc_rx_counters *", ffi.addressof(self._bytes, HEADER + q * stride)) for q in range(queues)
        ]
        self._last: list[dict[str, int]] = []
        super().__init__(parent)

    def _create(self, size: int, header: bytes) -> mmap.mmap:
        assert self.path is not None
        # Complete under another name first, so that no reader ever sees half of it.
        aside = self.path.with_name("." + self.path.name)
        try:
            fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                os.fchmod(fd, 0o644)
                os.posix_fallocate(fd, 0, size)
                mapped = mmap.mmap(fd, size)
                mapped[: len(header)] = header
                os.rename(aside, self.path)
            except BaseException:  # an interrupt, too
                aside.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
        except OSError:
            self.path = None
            mapped = mmap.mmap(-1, size)
            mapped[: len(header)] = header
        return mapped

    def row(self, queue: int) -> Any:
        """fc_rx_counters * of a queue, for the C side."""
        self.require_open()
        return self._rows[queue]

    def read(self, queue: int) -> dict[str, int]:
        """A snapshot; after close the last values."""
        if self.closed:
            return dict(self._last[queue])
        return {name: int(getattr(self._rows[queue], name)) for name in COUNTERS}

    def _release(self) -> None:
        self._last = [{name: int(getattr(row, name)) for name in COUNTERS} for row in self._rows]
        self._rows = []
        ffi.release(self._bytes)
        self._map.close()
        if self.path is not None and self._pid == os.getpid():
            self.path.unlink(missing_ok=True)
