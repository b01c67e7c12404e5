"""Lifetimes of DPDK objects: idempotent close, children before parents.

Every object that needs another one to stay alive names it as a parent. Closing a parent closes its
children first, newest first, so any order of close calls is legal:

    Eal <- Mempool <- Port <- RxThread
    Eal <-----------  Port

Thread rule: one control thread creates and closes.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

__all__ = ["Resource"]


class Resource:
    """A context-managed owner of something in C. Subclasses release it in `_release`, called once."""

    def __init__(self, *parents: Resource) -> None:
        """Register with the parents. Call it only after construction of the C object succeeded."""
        self._parents: list[Resource] = []
        self._children: list[Resource] = []
        self._closed = False
        for parent in parents:
            self._depend_on(parent)

    def require_open(self) -> None:
        """Raises ValueError on a closed object, whose C side is gone."""
        if self._closed:
            raise ValueError(f"{self!r} is closed")

    def _depend_on(self, parent: Resource) -> None:
        if parent not in self._parents:
            self._parents.append(parent)
            parent._children.append(self)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Gives everything back. Calling it again does nothing."""
        if self._closed:
            return
        self.close_children()
        self._closed = True
        for parent in self._parents:
            parent._children.remove(self)
        self._release()

    def close_children(self) -> None:
        while self._children:
            self._children[-1].close()

    def _release(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
