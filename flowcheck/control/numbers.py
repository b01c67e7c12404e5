"""numpy's scalars as the Python numbers that they are. Scripts compute rates with numpy, and hand on what comes out."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["is_numpy", "plain"]


def is_numpy(value: Any) -> bool:
    """A scalar of numpy's; numpy is not imported for that."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def plain(value: Any) -> Any:
    """The bool, int, float, str or bytes of the same value; what is not such a scalar stays as it is (a date of
    numpy's, a longdouble)."""
    found = value.item() if is_numpy(value) and value.dtype.kind in "biufSU" else None
    return found if type(found) in (bool, int, float, str, bytes) else value
