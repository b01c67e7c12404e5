"""Parts of a base as bytes, records as text: whatever a state holds comes back as it was, and what is not such bytes is
refused."""

from __future__ import annotations

import json
import math
import random
import struct
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.errors import UserError
from flowcheck.trainer.log.base import BaseHead, BasePiece, Made
from flowcheck.trainer.log.codec import packed, record_of, record_tree, unpacked
from flowcheck.trainer.log.copies import Place, TensorCopy, copy_of
from flowcheck.trainer.log.record import Opaque, StepRecord

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.uint16, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)
NANS = tuple(struct.unpack(">d", bytes.fromhex(bits))[0] for bits in ("7ff8000000000000", "7ff0dead0000beef",
                                                                      "fff8000000000001"))


def exact(value: Any) -> Any:
    """Equal for what is equal to the bit, in type, order in memory and place."""
    if isinstance(value, TensorCopy):
        held = value.tensor
        if held.layout is torch.sparse_coo:
            parts = [exact(TensorCopy(one, value.place)) for one in (held._indices(), held._values())]
            return "sparse", parts, held.shape, held.is_coalesced()
        strides = None if held.is_contiguous() else held.stride()
        bits = held.contiguous().as_strided((held.numel(),), (1,))
        return value.place, held.dtype, held.shape, strides, bits.view(torch.uint8).tolist()
    if isinstance(value, dict):
        return type(value), [(type(key), key, exact(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [exact(one) for one in value]
    return type(value), struct.pack(">d", value) if isinstance(value, float) else value


@st.composite
def tensors(draw: st.DrawFn) -> TensorCopy:
    """Of any bits; as they come, transposed, with gaps, repeated, or sparse."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = math.prod(shape)
    top = 1 if dtype == torch.bool else 255
    data = draw(st.lists(st.integers(0, top), min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    flat = torch.tensor(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    made, how = flat.reshape(shape), draw(st.integers(0, 4))
    if how == 1 and made.dim() > 1:
        made = made.transpose(0, 1)
    elif how == 2 and made.dim():
        made = made[::2]
    elif how == 3 and made.dim():
        made = made[:1].expand(3, *made.shape[1:]) if made.shape[0] else made
    elif how == 4 and made.dim() and dtype == torch.float32:
        made = made.to_sparse(1)
    copied = copy_of(made, None, "tensor")
    assert isinstance(copied, TensorCopy)
    assert made.layout is not torch.strided or made.is_contiguous() or made.stride() == copied.tensor.stride()
    return TensorCopy(copied.tensor, draw(st.sampled_from(Place)))


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 4000), 1 << 4000), st.floats(), st.sampled_from(NANS), st.text(),
    st.binary(max_size=9), st.sampled_from(DTYPES), st.sampled_from([0.0, -0.0, math.inf]), tensors(),
)
KEYS = st.one_of(st.text(max_size=5), st.integers())
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.lists(inner, max_size=3).map(tuple),
                            st.dictionaries(KEYS, inner, max_size=4),
                            st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)),
    max_leaves=12,
)


@settings(max_examples=60)
@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), tensors())
def test_a_piece_comes_back_as_it_was(state: dict[str, Any], value: TensorCopy) -> None:
    piece = BasePiece("layer.0", 7, value, state)
    again = unpacked(packed(piece), "piece")
    assert isinstance(again, BasePiece) and (again.name, again.step) == ("layer.0", 7)
    assert exact(again.value) == exact(value) and exact(again.state) == exact(state)


@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), max_size=3))
def test_options_come_back_from_the_text_of_a_record(options: list[dict[str, Any]]) -> None:
    text = json.dumps(record_tree(StepRecord(options, None, None)))
    assert exact(record_of(json.loads(text), "record").options) == exact(options)


HEAD = BaseHead(Made("Adam", "torch.optim.adam", "2.13.0", "cpu", 2, "highest"), ["a", "b"], [["b"], ["a"]],
                {"all": {"count": 3}})
PIECE = BasePiece("a", 0, TensorCopy(torch.zeros(2), Place.HOST), None)
PARTS: dict[str, BaseHead | BasePiece] = {"head": HEAD, "piece": PIECE}


def test_a_record_and_a_head_come_back_as_they_were() -> None:
    options = [{"lr": TensorCopy(torch.tensor(0.1), Place.HOST), "schedule": Opaque("function")}]
    scale = TensorCopy(torch.tensor(2.0), Place.DEVICE)
    again = record_of(json.loads(json.dumps(record_tree(StepRecord(options, scale, None)))), "record")
    assert exact(again.options[0]["lr"]) == exact(options[0]["lr"]) and exact(again.grad_scale) == exact(scale)
    assert again.options[0]["schedule"] == Opaque("function") and again.found_inf is None
    assert unpacked(packed(HEAD), "head") == HEAD


@pytest.mark.parametrize("what", PARTS)
def test_damaged_bytes_are_refused(what: str) -> None:
    """Each byte, cut anywhere, and longer than it was."""
    data = packed(PARTS[what])
    choose = random.Random(1)
    for at in [*range(0, len(data), 7), len(data) - 1]:
        broken = bytearray(data)
        broken[at] ^= 1 << choose.randrange(8)
        with pytest.raises(UserError):
            unpacked(broken, "part")
    for length in (0, 7, 8, 60, len(data) // 2, len(data) - 1):
        with pytest.raises(UserError):
            unpacked(data[:length], "part")
    with pytest.raises(UserError):
        unpacked(data + bytes(8), "part")


T = [["=00000000", "float32", [1], None], "host"]
TREES: dict[str, Any] = {
    "not a dict": [1], "no options": {"dict": []}, "unknown kind": {"surprise": 1},
    "two kinds": {"dict": [], "tuple": []},
    "far apart": {"tensor": ["=00000000", "float32", [1 << 40, 2], [1 << 40, 1], "host"]},
    "huge": {"tensor": ["=00000000", "float32", [1 << 50], None, "host"]},
    "spans gigabytes": {"tensor": ["=" + "00" * 8, "float32", [2], [1 << 30], "host"]},
    "over each other": {"tensor": ["=" + "00" * 16, "float32", [2, 2], [1, 1], "host"]},
    "negative stride": {"tensor": ["=" + "00" * 8, "float32", [2], [-1], "host"]},
    "other size": {"tensor": ["=000000", "float32", [1], None, "host"]},
    "no such dtype": {"tensor": ["=00", "float", [1], None, "host"]},
    "no such tensor": {"tensor": ["5", "float32", [1], None, "host"]},
    "no such place": {"tensor": ["=00000000", "float32", [1], None, "moon"]},
    "sparse outside": {"sparse": [["=" + "09" * 8, "int64", [1, 1], None], T[0], [2], True, "host"]},
    "sparse of nothing": {"sparse": [7, T[0], [2], True, "host"]},
    "deep": None,
}


@pytest.mark.parametrize("what", TREES)
def test_trees_from_a_stranger_are_refused_and_take_no_memory(what: str) -> None:
    tree = TREES[what]
    if what == "deep":
        tree = 1
        for _ in range(200):
            tree = [tree]
    if isinstance(tree, dict) and tree.keys() & {"tensor", "sparse"}:
        tree = {"dict": [["options", [{"dict": [["lr", tree]]}]], ["grad_scale", None], ["found_inf", None]]}
    with pytest.raises(UserError) as caught:
        record_of(tree, "record")
    assert caught.value.where == "record" and caught.value.remedy


def test_what_is_repeated_is_written_once() -> None:
    wide = copy_of(torch.zeros(1).expand(1 << 20), None, "grad")
    data = packed(BasePiece("a", 0, wide, {}))
    again = unpacked(data, "piece")
    assert len(data) < 1000 and isinstance(again, BasePiece) and again.value.tensor.stride() == (0,)


def test_names_that_no_header_has_room_for_are_refused() -> None:
    with pytest.raises(UserError) as caught:
        packed(replace(HEAD, names=[f"{at}" * 200 for at in range(1 << 15)]))
    assert caught.value.remedy
