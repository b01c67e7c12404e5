"""A rank's own state as bytes: what is kept comes back as it was, what is not is refused by its path, and no byte of a
file may be another."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from flowcheck.control.user_state import USER_BYTES, Packer, Refused, UserState, pack, seal_of
from flowcheck.errors import UserError

from ..odd_json import one_place_odd


def packed(state: Any, **options: Any) -> bytes:
    return pack(state, **{"step": 20, "rank": 3, "ranks": 4} | options)


def again(state: Any) -> Any:
    return UserState.of(packed(state), "x").state


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Of the same types and bits, -0.0 is not 0.0 and True is not 1."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


@settings(max_examples=100, deadline=None)
@given(PLAIN)
def test_what_is_kept_comes_back_as_it_was(state: Any) -> None:
    assert same(again(state), state)


def test_tensors_of_every_type_and_shape() -> None:
    state = {
        "a": torch.arange(6).reshape(2, 3).t(), "b": [torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 4)],
        7: (torch.tensor([True, False]), torch.tensor([1, 2], dtype=torch.uint8)), "n": math.inf, "m": -math.inf,
    }
    assert same(again(state), state)
    assert math.isnan(again(math.nan)) and again(-0.0) == 0.0 and math.copysign(1, again(-0.0)) == -1


def test_what_torchs_schedulers_have() -> None:
    state = {"milestones": Counter({3: 1, 5: 2}), "order": OrderedDict([("b", 1), ("a", 2)])}
    found = again(state)
    assert same(found, state) and found["milestones"][4] == 0


def test_who_and_when_is_in_it() -> None:
    found = UserState.of(packed({"a": 1}), "x")
    assert (found.step, found.rank, found.ranks, found.state) == (20, 3, 4, {"a": 1})


def test_it_is_a_safetensors_file() -> None:
    data = packed({"a": torch.tensor([1.0, 2.0]), "b": b"\x07"})
    assert sorted(tensor.tolist() for tensor in load(data).values()) == [[1.0, 2.0], [7]]  # it reads in any order


def test_a_tensor_is_as_it_was_when_it_was_packed() -> None:
    tensor = torch.tensor([1.0], requires_grad=True)
    data = packed(tensor)
    with torch.no_grad():
        tensor += 1
    found = UserState.of(data, "x").state
    assert found.tolist() == [1.0] and not found.requires_grad


class Odd(dict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(("state", "what", "where"), [
    ({"loader": {"seen": {1}}}, "a builtins.set cannot be kept", "user state['loader']['seen']"),
    ([0, [lambda: 0]], "a builtins.function cannot be kept", "user state[1][0]"),
    ({"a": (1, Odd())}, "cannot be kept", "user state['a'][1]"),
    ({"a": defaultdict(int)}, "a collections.defaultdict cannot be kept", "user state['a']"),
    ({"a": {None: 1}}, "a key that is a NoneType cannot be kept", "user state['a']"),
    ({True: 1}, "a key that is a bool cannot be kept", "user state"),
    ({"t": torch.eye(2).to_sparse()}, "torch.sparse_coo", "user state['t']"),
    ({"t": torch.zeros(1, dtype=torch.complex128)}, "complex128", "user state['t']"),
    ({"t": torch.zeros(1, device="meta")}, "on meta cannot be kept", "user state['t']"),
    ({"n": 1 << 5000}, "a number of 5001 bits", "user state['n']"),
])
def test_other_types_are_refused_by_their_path(state: Any, what: str, where: str) -> None:
    with pytest.raises(Refused) as caught:
        packed(state)
    assert what in caught.value.what and caught.value.where == where and caught.value.remedy


def test_a_value_that_holds_itself() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(Refused, match="more than 32 containers deep"):
        packed(state)


def test_it_has_a_bound() -> None:
    with pytest.raises(Refused, match=r"4,194,304 bytes, at most 1,048,576 are kept"):
        packed(torch.zeros(USER_BYTES))
    with pytest.raises(Refused, match="at most 1,048,576 are kept"):
        packed("x" * USER_BYTES)
    size = len(packed("x" * 1000))
    assert len(packed("x" * 1000, most=size)) == size
    with pytest.raises(Refused):
        packed("x" * 1000, most=size - 1)


# -- from a stranger -------------------------------------------------------------------------------------------


def bad(data: bytes) -> str:
    with pytest.raises(UserError) as caught:
        UserState.of(data, "a file")
    assert caught.value.where.startswith("a file")
    return caught.value.what


def test_no_byte_may_be_another() -> None:
    data = packed({"a": torch.tensor([1, 2]), "b": "c"})
    for at in range(len(data)):
        bad(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        if at % 9 == 0:
            bad(data[:at])
    bad(data + b"\0")


def forged(about: dict[str, Any] | None, entries: dict[str, Any] | None = None, data: bytes = b"") -> bytes:
    """A file whose hash is right, whatever it says."""
    given = {"sha256": "0" * 64, "flowcheck": "user/1", "step": "1", "rank": "0", "ranks": "1", "tree": "1"}
    head = {"__metadata__": given | about if about is not None else given, **(entries or {})}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    whole = len(text).to_bytes(8, "little") + text + data
    return whole.replace(b"0" * 64, hashlib.sha256(whole).hexdigest().encode(), 1)


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def test_what_is_forged_is_read_where_it_is_sound() -> None:
    found = UserState.of(forged({"tree": '{"tensor":"0"}'}, {"0": F32}, b"\0\0\x80?"), "x")
    assert found.state.tolist() == [1.0]


@pytest.mark.parametrize(("about", "entries", "what"), [
    ({"flowcheck": "user/2"}, {}, "is not a user state"),
    ({"step": 7}, {}, "step is not a number"),
    ({"rank": "-1"}, {}, "rank is not a number"),
    ({"ranks": "9" * 19}, {}, "ranks is not a number"),
    ({"tree": 7}, {}, "has no structure"),
    ({"tree": "{"}, {}, "has no structure"),
    ({"tree": "[" * 100_000}, {}, "has no structure"),
    ({"tree": "[" * 40 + "]" * 40}, {}, "is nested too deeply"),
    ({"tree": "{}"}, {}, "has a value of no known kind"),
    ({"tree": '{"tuple":[],"dict":[]}'}, {}, "has a value of no known kind"),
    ({"tree": '{"tensor":"1"}'}, {}, "has a value of no known kind"),
    ({"tree": '{"tensor":[]}'}, {}, "has a value of no known kind"),
    ({"tree": '{"float":"1.0"}'}, {}, "has a value of no known kind"),
    ({"tree": '{"tuple":7}'}, {}, "has a value of no known kind"),
    ({"tree": '{"dict":[[1]]}'}, {}, "has a value of no known kind"),
    ({"tree": '{"dict":[[[],1]]}'}, {}, "has a value of no known kind"),
    ({"tree": '{"set":[]}'}, {}, "has a value of no known kind"),
    ({}, {"0": 7}, "tensor '0' is not described"),
    ({}, {"0": F32 | {"dtype": ["F32"]}}, "tensor '0' is not described"),
    ({}, {"0": F32 | {"shape": [-1]}}, "tensor '0' is not described"),
    ({}, {"0": F32}, "lies at 0..4 of 0 bytes"),
    ({}, {"0": F32 | {"shape": [1 << 62, 1 << 62, 0], "data_offsets": [0, 0]}}, "tensor '0' is not described"),
    ({}, {"0": F32 | {"shape": [1 << 70, 0], "data_offsets": [0, 0]}}, "tensor '0' is not described"),
    ({"tree": '{"dict":[["a",1],["b",2],["a",3]]}'}, {}, "has a key twice"),
    ({"tree": '{"counter":[[1,1],[1,2]]}'}, {}, "has a key twice"),
])
def test_a_hash_that_is_right_proves_nothing(about: dict[str, Any], entries: dict[str, Any], what: str) -> None:
    assert what in bad(forged(about, entries))


@pytest.mark.parametrize(("dtype", "shape", "size"), [
    ("F32", [2], 8), ("I64", [1], 8), ("I8", [8], 8), ("BOOL", [8], 8), ("U8", [2, 4], 8), ("U8", [], 1),
])
def test_bytes_are_of_one_row(dtype: str, shape: list[int], size: int) -> None:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}
    assert bad(forged({"tree": '{"bytes":"0"}'}, {"0": entry}, b"\1" * size)) == "has bytes that are none"


HEAD = {"step": "1", "rank": "0", "ranks": "1"}
TREE = {"dict": [["a", {"tensor": "0"}], [7, {"tuple": [{"float": "inf"}, {"bytes": "1"}, [{"counter": [["k", 2]]}]]}]]}
ENTRIES = {"0": F32, "1": {"dtype": "U8", "shape": [2], "data_offsets": [4, 6]}}


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_whatever_it_says_it_is_read_or_refused(data: st.DataObject) -> None:
    parts: list[Any] = [HEAD, TREE, ENTRIES]
    at = data.draw(st.integers(0, 2))
    parts[at] = data.draw(one_place_odd(parts[at]))
    about, tree, entries = parts
    with suppress(UserError):
        UserState.of(forged(about | {"tree": json.dumps(tree)}, entries, b"\0\0\x80?\1\2"), "x")


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 200, pickle.dumps({"a": 1}), b"{}"])
def test_what_is_no_such_file(data: bytes) -> None:
    assert bad(data) == "is not a user state"
    with pytest.raises(UserError):
        seal_of(data, "x")


ALIKE = [0, 0.0, -0.0, False, 1, 1.0, True, "", b"", None, math.inf, [], (), [1], (1,)]
VALUES = st.one_of(PLAIN, st.sampled_from(ALIKE))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.dictionaries(st.sampled_from("abc"), VALUES), st.integers(8, 11)), max_size=6))
def test_what_is_packed_again_and_again_is_what_is_packed_once(states: list[tuple[dict[str, Any], int]]) -> None:
    """1 is not 1.0, and -0.0 not 0.0: nothing that was written before stands for another value."""
    packer = Packer()
    for state, step in states:
        data = packer.pack(state, step=step, rank=3, ranks=4)
        assert data == packer.pack(state, step=step, rank=3, ranks=4) == packed(state, step=step)


FIXED = [{"torch": b"one", "pair": (1, 0.5)}, {"torch": b"another one"}, b"", {"t": torch.ones(2)}, [7]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(FIXED), st.dictionaries(st.sampled_from("abc"), VALUES), st.integers(8, 11),
                          st.integers(2, 3)), max_size=6))
def test_what_nobody_writes_to_is_written_once(states: list[tuple[Any, dict[str, Any], int, int]]) -> None:
    """Whatever else there is; and the last file can be had of another step."""
    packer = Packer()
    for fixed, state, step, ranks in states:
        both = {"fixed": fixed, **state}
        assert packer.pack(both, step=step, rank=1, ranks=ranks, fixed=("fixed",)) == pack(
            both, step=step, rank=1, ranks=ranks)
        for other in range(7, 12):
            again = packer.again(other)
            assert again == (pack(both, step=other, rank=1, ranks=ranks) if len(str(other)) == len(str(step)) else None)


def test_bytes_that_have_changed_are_written_anew() -> None:
    packer = Packer()
    for words in (b"one", b"two", b"two", b"three"):
        data = packer.pack({"rng": {"torch": words}}, step=7, rank=0, ranks=1, fixed=("rng",))
        assert UserState.of(data, "x").state == {"rng": {"torch": words}}
