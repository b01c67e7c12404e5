"""A collective under way, as c10d sees it. Completed by the group's completion thread; any thread may wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["SoftRoceWork"]


class SoftRoceWork(dist.Work):
    """keep: what the engine reads and writes until then. after: run before completion (copying results out)."""

    def __init__(self, result: list[torch.Tensor], keep: Any = None, after: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._result, self._keep, self._after = result, keep, after
        self._done = threading.Event()
        self._error: RuntimeError | None = None
        # A future's own set_exception stores the exception as its value, which C++ takes for tensors and crashes on;
        # an exception in a callback becomes a real error of the future that `then` gives.
        self._begun: torch.futures.Future[None] = torch.futures.Future()
        self._future: torch.futures.Future[list[torch.Tensor]] = self._begun.then(self._outcome)

    def _outcome(self, _: torch.futures.Future[None]) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def complete(self, error: str) -> None:
        """Called once, when the engine is through with it."""
        if not error and self._after is not None:
            try:
                self._after()
            except RuntimeError as problem:  # torch could not copy the result to where it belongs
                error = str(problem)
        self._keep = self._after = None
        if error:
            self._error = RuntimeError(f"softroce: {error}")
        self._done.set()
        self._begun.set_result(None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raises RuntimeError if the operation failed, or not done after `timeout` (0: however long it takes)."""
        if not self._done.wait(timeout.total_seconds() or None):
            raise RuntimeError(f"softroce: a collective is not done after {timeout.total_seconds()} s")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> RuntimeError | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._result
