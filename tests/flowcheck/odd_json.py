"""Documents that are sound but for one place, where anything that JSON can say stands instead.

    odd = data.draw(one_place_odd(document))        a copy; what is drawn is often near to what was there
    for place in places(document)                   keys and indexes that lead to each value of it
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

NUMBERS = (0, 1, -1, 3, 1 << 31, 1 << 48, 1 << 62, 1 << 63, 10**30, 1.0, 0.5, float("inf"), float("nan"))
TEXTS = ("", "w", "a", "0", "x", "float32", "bool", "sgd", "adam", "lion", "verified", "a" * 64, "\ud800")
KEYS = ("params", "options", "lr", "betas", "name", "groups", "dtype", "shape", "sha256", "tensors", "bytes", "tensor",
        "tuple", "dict", "counter", "float", "param_names", "w", "state.w.x", "w.x", "")
LEAVES = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(TEXTS) | st.integers()
ANY_JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=8,
)
Place = tuple[str | int, ...]


def places(document: Any) -> Iterator[Place]:
    """Of all values in it, but not of itself."""
    held = document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    for key, value in held:
        yield (key,)
        yield from ((key, *rest) for rest in places(value))


@st.composite
def one_place_odd(draw: st.DrawFn, document: Any) -> Any:
    """One value replaced, taken out, or set beside one that is there; or a list that has one of its items twice."""
    made = copy.deepcopy(document)
    *above, last = draw(st.sampled_from(list(places(document))))
    holder = made
    for key in above:
        holder = holder[key]
    how = draw(st.sampled_from(("replaced", "replaced", "taken out", "beside", "twice")))
    if how == "taken out":
        del holder[last]
    elif how == "beside" and isinstance(holder, dict):
        holder[draw(st.sampled_from(KEYS))] = draw(ANY_JSON)
    elif how == "twice" and isinstance(holder[last], list):
        holder[last] = 2 * holder[last]
    else:
        holder[last] = draw(ANY_JSON)
    return made
