"""What was made of some values, and need not be made again while they are the same objects.

    last = Unchanged()
    last.of(values, make)       make(), or what it gave the last time

Hyper-parameters are the same objects from step to step, but for a rate that a scheduler sets: so a look at them costs a
comparison of identities. Values that can change in themselves (a tensor, a list) are never taken for the same. The
training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

__all__ = ["Unchanged", "options_of"]

_FIXED = frozenset({bool, float, int, str, type(None)})


class Unchanged:
    """Of one place where values are read."""

    def __init__(self) -> None:
        self._values: Sequence[Any] | None = None
        self._made: Any = None

    def of(self, values: Sequence[Any], make: Callable[[], Any]) -> Any:
        """What `make` gave for these values. It is handed out again, so nobody may write to it."""
        before = self._values
        if before is None or len(values) != len(before) or not all(map(is_, values, before)):
            self._made = make()
            self._values = values if all(map(_is_fixed, values)) else None
        return self._made


def options_of(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """What an optimizer's groups say besides their parameters: keys and values of all, one after the other."""
    return [one for group in groups for pair in group.items() if pair[0] != "params" for one in pair]


def _is_fixed(value: Any) -> bool:
    return type(value) in _FIXED or (type(value) is tuple and all(map(_is_fixed, value)))
