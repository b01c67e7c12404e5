"""The trainer's checksum against an independent model in numpy: its bits, its order, and what it must see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flowcheck.control import checksum as module
from flowcheck.control.checksum import checksum, checksums, sums_on_device

from .simple_sum import mix, simple_sum

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
]


def noise(dtype: torch.dtype, count: int, seed: int = 3) -> torch.Tensor:
    """Every bit pattern may occur, NaN and negative zero among them."""
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8,
                        generator=torch.Generator().manual_seed(seed))
    return raw > 127 if dtype is torch.bool else raw.view(dtype)


@pytest.fixture(autouse=True)
def _no_overflow_warnings():
    with np.errstate(over="ignore"):
        yield


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_has_the_documented_sum(dtype: torch.dtype, count: int) -> None:
    tensor = noise(dtype, count)
    assert checksum(tensor) == simple_sum(tensor)


def test_known_values() -> None:
    """They are in records and in files; a change of them would need a new protocol."""
    assert checksum(torch.empty(0)) == 0x17FB89EE9DCAB42A
    assert checksum(torch.tensor(1.5)) == 0x149A8416703F6DC2
    assert checksum(torch.tensor([1, -2, 3], dtype=torch.int8)) == 0x42FB3ADA5D3E4E49
    assert checksum(torch.tensor([1, -2, 3], dtype=torch.int64)) == 0x109D32F87E0E9F49


def test_a_scalar_is_one_element() -> None:
    scalar = torch.tensor(2.75, dtype=torch.float64)
    assert checksum(scalar) == checksum(scalar.reshape(1)) == simple_sum(scalar)


@pytest.mark.parametrize("count", [1, 3, 5, 65535, 65536, 65537, 131072, 131075])
def test_lengths_round_a_block(count: int) -> None:
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        tensor = noise(dtype, count)
        assert checksum(tensor) == simple_sum(tensor)


@pytest.mark.parametrize("count", [2 * 65536 - 1, 2 * 65536, 2 * 65536 + 1, 5 * 65536 + 9])
def test_a_long_tensor_is_summed_in_parts_and_the_blocks_count_on(monkeypatch, count: int) -> None:
    """A part is 2^24 elements; two blocks here, so that the test is quick."""
    monkeypatch.setattr(module, "_PART", 2 * 65536)
    tensor = noise(torch.int32, count)
    assert checksum(tensor) == simple_sum(tensor)


def test_a_tensor_of_more_than_one_part() -> None:
    """Of 2^24 elements and more, nearly all of them zeros: the others count with the weights of their places."""
    tensor = torch.zeros((1 << 24) + 65536 + 9, dtype=torch.uint8)
    places = [5, (1 << 24) - 1, 1 << 24, (1 << 24) + 9, (1 << 24) + 65536, (1 << 24) + 65536 + 8]
    tensor[places] = torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.uint8)
    place = np.array(places, dtype=np.uint64)
    inner = mix(place & np.uint64(0xFFFF)) | np.uint64(1)
    outer = mix((place >> np.uint64(16)) + np.uint64(65536)) | np.uint64(1)
    words = np.array([1, 2, 3, 4, 5, 6], dtype=np.uint64)
    expected = (inner * outer * words).sum(dtype=np.uint64) + mix(np.array([tensor.numel()]))[0]
    assert checksum(tensor) == int(expected)


def test_elements_are_taken_in_row_major_order_whatever_the_strides() -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert not tensor.T.is_contiguous()
    assert checksum(tensor.T) == checksum(tensor.T.contiguous()) != checksum(tensor)
    assert checksum(tensor[:, ::2]) == checksum(torch.tensor([0.0, 2.0, 4.0, 6.0, 8.0, 10.0]))
    assert checksum(torch.ones(1).expand(5)) == checksum(torch.ones(5))


def test_shape_and_type_are_not_part_of_it_but_bits_and_length_are() -> None:
    tensor = noise(torch.float32, 12)
    assert checksum(tensor) == checksum(tensor.reshape(3, 4)) == checksum(tensor.view(torch.int32))
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 65536), (7, 65536 + 7), (65535, 65536), (65536, 65541),
                                            (131071, 131072)])
def test_an_exchange_of_two_elements_is_seen(dtype: torch.dtype, one: int, other: int) -> None:
    tensor = torch.zeros(131080).to(dtype)
    tensor[one], tensor[other] = 1, 2
    exchanged = tensor.clone()
    exchanged[one], exchanged[other] = 2, 1
    assert checksum(tensor) != checksum(exchanged)


def test_equal_errors_that_cancel_in_a_plain_sum_are_seen() -> None:
    tensor = noise(torch.int64, 200)
    other = tensor.clone()
    other[10] += 1
    other[11] -= 1
    assert checksum(tensor) != checksum(other)


@pytest.mark.parametrize("bit", [0, 15, 31, 32, 62, 63])
def test_every_bit_of_an_element_counts(bit: int) -> None:
    tensor = noise(torch.int64, 100)
    other = tensor.clone()
    other[99] ^= -(1 << 63) if bit == 63 else 1 << bit
    assert checksum(tensor) != checksum(other)


def test_gradients_are_not_tracked_and_the_tensor_stays_as_it_is() -> None:
    tensor = torch.ones(3, requires_grad=True)
    total = sums_on_device([tensor.detach()])
    assert total.dtype is torch.int64 and total.shape == (1,) and not total.requires_grad
    assert int(total) % (1 << 64) == checksum(tensor) and tensor.tolist() == [1.0, 1.0, 1.0]


def test_an_element_of_16_bytes_has_no_checksum() -> None:
    with pytest.raises(ValueError, match=r"elements of 16 bytes \(torch.complex128\) have no checksum"):
        checksum(torch.zeros(2, dtype=torch.complex128))


def test_it_is_computed_where_the_tensor_is() -> None:
    """On a device without memory of its own: whatever was made on the CPU would not fit to it."""
    tensor = torch.empty(65536 + 3, device="meta")
    assert sums_on_device([tensor]).device == tensor.device
    assert sums_on_device([torch.empty(0, device="meta")]).device == tensor.device


def test_checksums_by_name_in_the_given_order() -> None:
    tensors = {"b": noise(torch.float32, 9, 1), "a": noise(torch.float32, 9, 2), "c": torch.tensor(True)}
    found = checksums(tensors)
    assert list(found) == ["b", "a", "c"] and found == {name: simple_sum(tensor) for name, tensor in tensors.items()}
    assert found["a"] != found["b"] and all(0 <= value < 1 << 64 for value in found.values())
    assert checksums({}) == {}


def test_some_sums_are_above_2_63() -> None:
    """Torch has them as negative numbers; they are given as unsigned ones."""
    found = checksums({str(n): torch.full((1,), n) for n in range(16)})
    assert max(found.values()) >> 63 == 1 and found == {str(n): checksum(torch.full((1,), n)) for n in range(16)}
