"""Tensors from a stranger: equal to safetensors' own reading of good bytes, a UserError for everything else."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from flowcheck.errors import UserError
from flowcheck.tensors import TensorSpec, header, packed_bytes, pieces, unpack

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.tensor([1, -2], dtype=torch.int8),
    "c": torch.tensor(3.5), "d": torch.empty(0, 4), "e": torch.arange(3, dtype=torch.int64),
}
SPECS = {name: TensorSpec.of(tensor) for name, tensor in TENSORS.items()}


def _packed() -> bytearray:
    head, order = header(TENSORS)
    return bytearray(head + b"".join(bytes(piece) for name in order for piece in pieces(TENSORS[name])))


def test_what_is_packed_is_what_safetensors_reads() -> None:
    data = _packed()
    assert len(data) == packed_bytes(TENSORS)
    theirs, ours = load(bytes(data)), unpack(data, SPECS, "here")
    assert list(ours) == list(TENSORS)
    assert all(torch.equal(ours[n], TENSORS[n]) and torch.equal(theirs[n], TENSORS[n]) for n in TENSORS)


@settings(max_examples=300, derandomize=True)
@given(st.data())
def test_damaged_bytes_never_give_another_form(data: st.DataObject) -> None:
    """Bits flipped, bytes cut off or added: refused, or the same names, types and shapes (values may differ)."""
    packed = _packed()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(packed) - 1))
        packed[at] ^= 1 << data.draw(st.integers(0, 7))
    packed = packed[: data.draw(st.integers(0, len(packed)))] if data.draw(st.booleans()) else packed + b"x" * (at % 2)
    try:
        found = unpack(packed, SPECS, "here")
    except UserError:
        return
    assert all(TensorSpec.of(tensor) == SPECS[name] for name, tensor in found.items())


@pytest.mark.parametrize(("change", "what"), [
    ({"z": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "not expected"),
    ({"a": {"dtype": "F64", "shape": [2, 3], "data_offsets": [0, 48]}}, "is F64"),
    ({"a": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}}, "not F32"),
    ({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 1 << 60]}}, "lies at"),
    ({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [-24, 0]}}, "lies at"),
    ({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": "00"}}, "proper header"),
    ({"a": 7}, "proper header"),
    ({}, "behind the last"),
])  # fmt: skip
def test_headers_that_lie(change: dict[str, object], what: str) -> None:
    text = json.dumps(change).encode()
    data = bytearray(len(text).to_bytes(8, "little") + text + bytes(64))
    with pytest.raises(UserError, match=what):
        unpack(data, SPECS, "here")
