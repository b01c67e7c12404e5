"""A process beside a node without a process: its pipes, of which a test has the other ends."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any


class Pipes:
    """What `beside.start` returns. status: with which it has ended; None: it has not. waits: how long it was waited
    for, each time."""

    pid = 0

    def __init__(self) -> None:
        read, self._its_stdin = os.pipe()
        self._read = os.fdopen(read, "rb")
        self.stdin = os.fdopen(self._its_stdin, "wb")
        out, self._its_stdout = os.pipe()
        os.set_blocking(out, False)
        self.stdout = os.fdopen(out, "rb", buffering=0)
        self.status: int | None = None
        self.killed, self.waits = 0, list[float]()
        self.hangs = False  # also when it is killed

    @property
    def returncode(self) -> int | None:
        return self.status

    def poll(self) -> int | None:
        return self.status

    def kill(self) -> None:
        self.killed += 1
        if not self.hangs:
            self.status = -9

    def wait(self, seconds: float) -> int:
        self.waits.append(seconds)
        if self.status is None:
            raise subprocess.TimeoutExpired("process", seconds)
        return self.status

    def writes(self, data: bytes) -> None:
        os.write(self._its_stdout, data)

    def says(self, event: str, **fields: Any) -> None:
        self.writes(json.dumps({"event": event, **fields}).encode() + b"\n")

    def ends(self, status: int = 0) -> None:
        """It says no more."""
        os.close(self._its_stdout)
        self._its_stdout = -1
        self.status = status

    def breaks(self) -> None:
        """It reads no more."""
        self._read.close()

    def heard(self) -> list[Any]:
        """Lines that have come since."""
        os.set_blocking(self._read.fileno(), False)
        return [json.loads(line) for line in iter(self._read.readline, b"") if line] if not self._read.closed else []

    def close(self) -> None:
        for pipe in (self._read, self.stdin, self.stdout):
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        if self._its_stdout >= 0:
            os.close(self._its_stdout)
