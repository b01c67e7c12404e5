"""Tensors from a stranger: equal to safetensors' own reading of good bytes, a UserError for everything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from flowcheck.control import tensors as module
from flowcheck.control.tensors import TensorSpec, header, is_shape, memory, packed, packed_bytes, pieces, unpack
from flowcheck.errors import UserError

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
])
def test_headers_that_lie(change: dict[str, object], what: str) -> None:
    text = json.dumps(change).encode()
    data = bytearray(len(text).to_bytes(8, "little") + text + bytes(64))
    with pytest.raises(UserError, match=what):
        unpack(data, SPECS, "here")


def _file(entries: object, data: bytes, *, text: bytes | None = None) -> bytearray:
    """A file whose header is not padded."""
    text = json.dumps(entries).encode() if text is None else text
    return bytearray(len(text).to_bytes(8, "little") + text + data)


def _entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_the_bytes_of_a_file() -> None:
    """The widest elements first, each after the other; spaces until the data is aligned to 8 bytes."""
    tensors = {
        "b": torch.tensor([7], dtype=torch.uint8), "w": torch.tensor([[1.0, 2.0]]),
        "h": torch.tensor([1], dtype=torch.int16),
    }
    head, order = header(tensors)
    assert order == ["w", "h", "b"]
    text = (
        b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},'
        b'"h":{"dtype":"I16","shape":[1],"data_offsets":[8,10]},"b":{"dtype":"U8","shape":[1],"data_offsets":[10,11]}}'
    )
    assert len(text) % 8 and head == (len(text) + -len(text) % 8).to_bytes(8, "little") + text + b" " * (-len(text) % 8)
    assert packed_bytes(tensors) == len(head) + 11


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 8])
def test_data_begins_at_a_multiple_of_8(length: int) -> None:
    head, _ = header({"n" * length: torch.ones(1)})
    assert len(head) % 8 == 0 and int.from_bytes(head[:8], "little") == len(head) - 8 and len(head) < 120


@pytest.mark.parametrize(("dtype", "shape", "size"), [
    ("float32", (), 4), ("float64", (3,), 24), ("bfloat16", (2, 5), 20), ("bool", (7,), 7), ("int64", (2, 0, 3), 0),
])
def test_the_bytes_of_a_tensor(dtype: str, shape: tuple[int, ...], size: int) -> None:
    assert TensorSpec(dtype, shape).nbytes == size
    assert TensorSpec.of(torch.empty(shape, dtype=getattr(torch, dtype))) == TensorSpec(dtype, shape)


@pytest.mark.parametrize("dtype", [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
], ids=str)
def test_every_type_is_safetensors_own(dtype: torch.dtype) -> None:
    tensors = {"x": torch.tensor([1, 0, 1]).to(dtype)}
    head, _ = header(tensors)
    data = bytearray(head + b"".join(pieces(tensors["x"])))
    for found in (load(bytes(data))["x"], unpack(data, {"x": TensorSpec.of(tensors["x"])}, "here")["x"]):
        assert found.dtype == dtype and found.tolist() == tensors["x"].tolist()


def test_pieces_are_bounded_and_in_row_major_order(monkeypatch) -> None:
    """8 MiB at a time; 8 bytes here."""
    assert [len(piece) for piece in pieces(torch.zeros((16 << 20) + 5, dtype=torch.uint8))] == [8 << 20, 8 << 20, 5]
    monkeypatch.setattr(module, "CHUNK", 8)
    tensor = torch.arange(10, dtype=torch.int16, requires_grad=False).reshape(2, 5)
    assert [bytes(piece) for piece in pieces(tensor.T)] == [
        b"\0\0\5\0\1\0\6\0", b"\2\0\7\0\3\0\10\0", b"\4\0\11\0"
    ]
    assert [bytes(piece) for piece in pieces(torch.ones((), requires_grad=True))] == [b"\0\0\x80?"]
    assert list(pieces(torch.empty(0, 3))) == []


SPEC = {"x": TensorSpec("float32", (2,)), "y": TensorSpec("uint8", (1,))}
VALUES = b"\0\0\x80?\0\0\0@"  # 1.0 and 2.0


@pytest.mark.parametrize("blank", range(4))
def test_tensors_that_are_not_aligned_are_read_too(blank: int) -> None:
    text = json.dumps({"x": _entry("F32", [2], 0, 8)}).encode() + b" " * blank
    assert unpack(_file({}, VALUES, text=text), SPEC, "here")["x"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("blank", range(4))
def test_every_tensor_that_is_read_is_aligned(blank: int) -> None:
    text = json.dumps({"y": _entry("U8", [1], 0, 1), "x": _entry("F32", [2], 1, 9)}).encode() + b" " * blank
    found = unpack(_file({}, b"!" + VALUES, text=text), SPEC, "here")
    assert found["x"].tolist() == [1.0, 2.0] and found["x"].data_ptr() % 4 == 0 and found["y"].tolist() == [33]


def test_an_empty_tensor_has_its_type_and_shape() -> None:
    spec = {"e": TensorSpec("int64", (3, 0))}
    found = unpack(_file({"e": _entry("I64", [3, 0], 0, 0)}, b""), spec, "here")["e"]
    assert (found.dtype, found.shape) == (torch.int64, (3, 0))


def test_an_aligned_tensor_lies_over_the_data() -> None:
    text = json.dumps({"x": _entry("F32", [2], 0, 8)}).encode()
    data = _file({}, VALUES, text=text + b" " * (-len(text) % 4))
    found = unpack(data, SPEC, "here")["x"]
    data[-8:] = bytes(8)
    assert found.tolist() == [0.0, 0.0]


def test_what_is_missing_is_missing_and_the_order_is_the_expected_one() -> None:
    both = {"y": _entry("U8", [1], 8, 9), "x": _entry("F32", [2], 0, 8)}
    assert [*unpack(_file(both, VALUES + b"!"), SPEC, "here")] == ["x", "y"]
    assert [*unpack(_file({"y": _entry("U8", [1], 0, 1)}, b"!"), SPEC, "here")] == ["y"]
    assert unpack(_file({}, b""), SPEC, "here") == {}
    assert unpack(_file({"__metadata__": {"format": "pt"}}, b""), SPEC, "here") == {}


@pytest.mark.parametrize(("data", "what"), [
    (b"", "a safetensors header of 0 bytes in 0"), (bytes(7), "a safetensors header of 0 bytes in 7"),
    (b"\3" + bytes(7) + b"{}", "a safetensors header of 3 bytes in 10"),
    (b"\xff" * 8, "a safetensors header of 18446744073709551615 bytes in 8"),
    (((16 << 20) + 1).to_bytes(8, "little") + b"{}" + b" " * ((16 << 20) - 1),
     "a safetensors header of 16777217 bytes in 16777225"),
    (b"\1" + bytes(7) + b"{", "the safetensors header is not JSON"),
    (b"\1" + bytes(7) + b"\xff", "the safetensors header is not JSON"),
    (b"\0\0\2" + bytes(5) + b"[" * 131072, "the safetensors header is not JSON"),
    (b"\2" + bytes(7) + b"[]", "the safetensors header is no object"),
    (_file({"x": _entry("F32", [2], 0, 8)}, VALUES[:-1]), "tensor 'x' lies at 0..8 of 7 bytes"),
    (_file({"x": _entry("F32", [2], 0, 7)}, VALUES), "tensor 'x' lies at 0..7 of 8 bytes"),
    (_file({"x": _entry("F32", [2], 1, 9)}, VALUES + b"!"), "tensors overlap or leave a gap at byte 0"),
    (_file({"x": _entry("F32", [2], 8, 0)}, VALUES), "tensor 'x' lies at 8..0 of 8 bytes"),
    (_file({"x": _entry("F32", [2], 0, 8), "y": _entry("U8", [1], 7, 8)}, VALUES),
     "tensors overlap or leave a gap at byte 8"),
    (_file({"x": _entry("F32", [2], 0, 8), "y": _entry("U8", [1], 9, 10)}, VALUES + b"!!"),
     "tensors overlap or leave a gap at byte 8"),
    (_file({"x": _entry("F32", [2], 0, 8)}, VALUES + b"!!!"), "3 bytes behind the last tensor"),
    (_file({"z" * 200: 0}, b""), "tensor '" + "z" * 80 + "' is not expected"),
    (_file({"x": _entry("F32", [True, 2], 0, 8)}, VALUES), "tensor 'x' has no proper header entry"),
    (_file({"x": _entry("F32", [2], False, 8)}, VALUES), "tensor 'x' has no proper header entry"),
    (_file({"x": _entry("F32", [2], 0, 8.0)}, VALUES), "tensor 'x' has no proper header entry"),
    (_file({"x": _entry("F32", 2, 0, 8)}, VALUES), "tensor 'x' has no proper header entry"),  # type: ignore[arg-type]
    (_file({"x": {"dtype": "F32", "shape": [2]}}, VALUES), "tensor 'x' has no proper header entry"),
    (_file({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, VALUES),
     "tensor 'x' has no proper header entry"),
    (_file({"x": _entry("I32", [2], 0, 8)}, VALUES), "tensor 'x' is I32 [2], not F32 [2]"),
    (_file({"x": _entry("F32", [1, 2], 0, 8)}, VALUES), "tensor 'x' is F32 [1, 2], not F32 [2]"),
    (_file({"x": _entry("Q" * 99, [2] * 99, 0, 8)}, VALUES),
     f"tensor 'x' is {'Q' * 16} [{'2, ' * 26}2, not F32 [2]"),
], ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_files_that_are_refused(data: bytes, what: str) -> None:
    """In one sentence of bounded length, whatever the stranger wrote."""
    with pytest.raises(UserError) as caught:
        unpack(bytearray(data), SPEC, "the state of rank 0")
    assert caught.value.what.startswith(what) and caught.value.where == "the state of rank 0"


def test_a_header_may_have_16_mib() -> None:
    text = b"{}" + b" " * ((16 << 20) - 2)
    assert unpack(_file({}, b"", text=text), SPEC, "here") == {}


@pytest.mark.parametrize("said", [[], [0], [3, 4], [0, 1 << 48], [1 << 48], [1 << 24, 1 << 24], [0, 0, 5]])
def test_a_shape(said: Any) -> None:
    assert is_shape(said)


@pytest.mark.parametrize("said", [
    None, 3, "3", {}, (3,), [-1], [1.0], [True], ["3"], [None], [[3]], [(1 << 48) + 1], [1 << 24, (1 << 24) + 1],
    [0, 1 << 48, 2], [10**400], [3, -3],
])
def test_what_is_no_shape(said: Any) -> None:
    """An extent of 0 lets no other be of any size."""
    assert not is_shape(said)


def test_a_whole_file_is_what_safetensors_reads() -> None:
    data = b"".join(map(bytes, packed(TENSORS, {"step": "7"})))
    theirs = load(data)
    assert set(theirs) == set(TENSORS) and all(torch.equal(theirs[name], TENSORS[name]) for name in TENSORS)
    assert json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"] == {"step": "7"}


@pytest.mark.parametrize("name", ["__metadata__", "half\ud800"])
def test_a_name_that_nobody_could_read_is_not_written(name: str) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        header({name: torch.ones(1)})


@pytest.mark.parametrize("name", ["", "a\0b", "a/b", 'quo"te\n', "\U0001f600", "x" * 100_000, "__metadata__.x"])
def test_a_strange_name_is_written_and_read(name: str) -> None:
    assert set(load(b"".join(map(bytes, packed({name: torch.ones(1)}))))) == {name}


@pytest.mark.parametrize("tensor", [torch.empty(3, device="meta"), torch.arange(6).reshape(2, 3).t()])
def test_memory_that_lies_elsewhere_or_otherwise_is_not_given(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"a tensor on (meta|cpu), contiguous: (True|False)"):
        memory(tensor)
