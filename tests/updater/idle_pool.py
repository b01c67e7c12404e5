"""Workers that begin only when they are waited for: whoever does not wait sees that nothing was done."""

from __future__ import annotations

from typing import Any


class IdlePool:
    """Give it to a slot in place of its pool: slot._pool = IdlePool(slot._pool), which has no threads.

    queued: what was submitted and is not done yet, as (rules, pieces, what is kept alive). copied: the same of copies,
    which are made last, as (blocks, what is kept alive).
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.queued: list[tuple[list[Any], list[Any], object]] = []
        self.copied: list[tuple[list[Any], object]] = []

    def submit(self, rules: list[Any], pieces: list[Any], keep: object = None) -> int:
        self.queued.append((rules, pieces, keep))
        return len(self.queued)

    def copies(self, blocks: list[Any], keep: object = None) -> int:
        self.copied.append((blocks, keep))
        return len(self.queued) + len(self.copied)

    def cancel(self) -> None:
        """The first one is under way."""
        del self.queued[1:]

    def wait(self, ticket: int, seconds: float = -1) -> bool:
        if seconds == 0:
            return not self.queued and not self.copied
        while self.queued:
            self._pool.wait(self._pool.submit(*self.queued.pop(0)))
        while self.copied:
            self._pool.wait(self._pool.copies(*self.copied.pop(0)))
        return True
