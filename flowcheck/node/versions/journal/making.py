"""A step that a process makes, and that is then read as any on disk.

    held = Making(holding, begin, base, steps, took)     begin(): starts the process; took(seconds): it has made it

What follows the process has a thread of its own; the rest belongs to its shelf's.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path

from flowcheck.errors import FlowcheckError
from flowcheck.node.process.child import let_go
from flowcheck.node.versions.held import Gone, Held, Holding, OnDisk, inode_of
from flowcheck.node.versions.journal.border import Said

__all__ = ["Making"]


class Making(Held):
    """now: the shelf's clock. base: the step that it is made from. brought: how much of the way it is to have the base
    and the gradients here, in steps."""

    making = True

    def __init__(
        self, holding: Holding, begin: Callable[[], subprocess.Popen[bytes]], base: int, now: Callable[[], float],
        took: Callable[[float], None], brought: int = 0,
    ) -> None:
        super().__init__(holding, now())
        self._now, self._base, self._took, self._done = now, base, took, 0
        self._brought, self._of = brought, holding.offer.step - base
        self._coming: Future[bytes] = Future()
        self._there: OnDisk | None = None
        self._over = ""
        self.busy = 1
        try:
            self._process = begin()
        except OSError as error:
            raise Gone(f"cannot be made: {error.strerror or error}", where=f"step {holding.offer.step}") from None
        threading.Thread(target=self._follow, args=(self._process,), daemon=True, name="flowcheck remake").start()

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        """On a thread of its own, until the process has ended."""
        why = "the process that made it has ended"
        assert process.stdout is not None
        for line in process.stdout:
            try:
                said = Said.model_validate_json(line)
            except ValueError:
                continue  # what a library prints
            self._done, why = max(said.steps, self._done), said.why or why
            if said.path is not None:
                why = self._take(said.path, said.seconds) or why
        process.wait()
        let_go(process)
        if self._there is None:
            self._over = why
            with suppress(InvalidStateError):
                self._coming.set_exception(Gone(f"cannot be made: {why}", where=f"step {self.offer.step}"))
        self.busy = 0

    def _take(self, path: Path, seconds: float) -> str:
        """It is made. Why it cannot be read, "": it can."""
        self._took(seconds / self._of)
        try:
            there = OnDisk(Holding(self.offer, path, inode_of(path)), time.monotonic())
            text = there.manifest()
        except FlowcheckError as error:
            return error.what
        self._began = self._read = self._now()
        self._there = there
        with suppress(InvalidStateError):  # it was let go
            self._coming.set_result(text)
        return ""

    def begin(self) -> Future[bytes]:
        return self._coming

    def manifest(self) -> bytes:
        return self._coming.result()

    @property
    def progress(self) -> tuple[int, int]:
        """As if bytes of it came with each step that is made."""
        return self.offer.nbytes * self._done // (self._of + self._brought), self.offer.nbytes

    @property
    def under_way(self) -> str:
        if self._done < self._brought:
            return f"what it is made of is being read, from step {self._base} on"
        return (f"it is being made again from step {self._base}: {self._done - self._brought} of {self._of} steps"
                " so far")

    def is_due(self, now: float) -> bool:
        return not self.busy and super().is_due(now)

    def is_gone(self) -> bool:
        """One that failed stays for as long as any that nobody reads: whoever asks again hears why."""
        return self._there is not None and self._there.is_gone()

    def _read_from(self) -> OnDisk:
        if self._there is None:
            raise Gone(self._over or "is not made yet: its manifest says when it is", where=f"step {self.offer.step}")
        return self._there

    def size(self, file: str) -> int:
        return self._read_from().size(file)

    def read(self, file: str, first: int, count: int) -> bytes:
        return self._read_from().read(file, first, count)

    def user(self, rank: int) -> bytes:
        return self._read_from().user(rank)

    def close(self) -> None:
        if self.busy:
            self._process.kill()  # its thread sees the end
        with suppress(InvalidStateError):
            self._coming.set_exception(Gone("was let go", where=f"step {self.offer.step}"))
        if self._there is not None:
            self._there.close()
