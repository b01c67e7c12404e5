"""Parts of a file through a pipe: what libpcap reads in place of a file that it would not read to its end.

    feed = Feed(fd, parts); Port(..., f"rx_pcap={feed.path}"); ...; feed.close()

The kernel moves the bytes (sendfile); a part costs one call, however many packets are in it. One thread, which ends
with the last part, or when nobody reads any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Sequence

from dataplane.capturefile import Part

__all__ = ["Feed"]

PIPE_BYTES = 1 << 20


class Feed:
    """fd: of the file, open until close()."""

    def __init__(self, fd: int, parts: Sequence[Part]) -> None:
        self._fd, self._parts = fd, parts
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # beyond the user's allowance: a smaller pipe does as well
            fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._thread = threading.Thread(target=self._run, name="fc-feed", daemon=True)
        self._thread.start()

    @property
    def path(self) -> str:
        """Under which the stream can be opened once, until close."""
        return f"/proc/self/fd/{self._read}"

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})  # whatever the process does at one
        try:
            # A reader that goes, or a file that fails: the source counts what has not arrived.
            with contextlib.suppress(OSError):
                for part in self._parts:
                    self._give(part)
        finally:
            os.close(self._write)

    def _give(self, part: Part) -> None:
        if isinstance(part, bytes):
            while part:
                part = part[os.write(self._write, part) :]
            return
        at, end = part
        while at < end:
            sent = os.sendfile(self._write, self._fd, at, end - at)
            if not sent:
                raise OSError("the file became shorter")
            at += sent

    def close(self) -> None:
        """Idempotent. Whoever opened the path has closed it."""
        if self._read >= 0:
            os.close(self._read)
            self._read = -1
            self._thread.join()
