"""What modules give of themselves besides tensors of the model: `get_extra_state`, entries `..._extra_state`.

    is_extra(name)                  is it such an entry of a state_dict?
    kept(value) -> plain            as a rank's own state has it (control/user_state.py)
    extra_of(state, part)           out of that, as `set_extra_state` wants it: by entry

It may be anything and of any size, each time another one: a tensor, bytes, None, an io.BytesIO (Transformer Engine), a
dict. So it is not an entry of a replica. Each rank gives it as a part of its own state, and gets it back with that. The
standard library.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["extra_of", "is_extra", "kept", "unproven"]

SUFFIX = "_extra_state"
NAMED = 16  # entries that a mark names


def is_extra(name: str) -> bool:
    """name: of an entry of a state_dict."""
    return name.rpartition(".")[2] == SUFFIX


def kept(value: Any) -> dict[str, Any]:
    """A file in memory as its bytes, all else as it is."""
    return {"file": value.getvalue()} if type(value) is io.BytesIO else {"value": value}


def _given(plain: Mapping[str, Any]) -> Any:
    return io.BytesIO(plain["file"]) if type(plain.get("file")) is bytes else plain.get("value")


def extra_of(state: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Of a rank's own state what modules of one part want back: by their entries' names."""
    found = state.get("extra", {})
    held = found.get(part, {}) if isinstance(found, dict) else {}
    return {name: _given(plain) for name, plain in held.items() if isinstance(plain, dict)} if (
        isinstance(held, dict)) else {}


def unproven(names: Sequence[str]) -> list[str]:
    """What a checkpoint says of entries that its model has not; []: there are none."""
    if not names:
        return []
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return [f"extra states of modules ({', '.join(names[:NAMED])}{more}) are not in the model's file: each rank's own"
            " state has those that it gave"]
