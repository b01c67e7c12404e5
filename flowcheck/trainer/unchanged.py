"""What was made of an optimizer's options, and need not be made again while they are the same objects.

    last = Unchanged()
    last.of(groups, make)       make(), or what it gave the last time

Hyper-parameters are the same objects from step to step, but for a rate that a scheduler sets: so a look at them costs a
comparison of identities. Values that can change in themselves (a tensor, a list) are never taken for the same. The
training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowcheck.trainer.looks import looks_at, options_of

__all__ = ["Unchanged"]

_FIXED = frozenset({bool, float, int, str, type(None)})


class Unchanged:
    """Of one place where they are read."""

    def __init__(self) -> None:
        self._looks = looks_at()
        self._options: list[Any] | None = None
        self.made: Any = None

    def same(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Would `of` hand out what was made?"""
        return self._options is not None and bool(self._looks.same_options(groups, self._options))

    def of(self, groups: Sequence[Mapping[str, Any]], make: Callable[[], Any]) -> Any:
        """What `make` gave for these options of an optimizer. It is handed out again, so nobody may write to it."""
        if self._options is None or not self._looks.same_options(groups, self._options):
            self.made = make()
            options = options_of(groups)
            self._options = options if all(map(_is_fixed, options)) else None
        return self.made


def _is_fixed(value: Any) -> bool:
    return type(value) in _FIXED or (type(value) is tuple and all(map(_is_fixed, value)))
