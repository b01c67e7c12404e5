"""Checksums of many tensors at once: by the library without the GIL, by torch with few kernels; the same numbers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flowcheck.control import checksum as module
from flowcheck.control.checksum import begin_checksums, checksums, library, sums_on_device

from .simple_sum import simple_sum

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64]
COUNTS = [0, 1, 7, 65535, 65536, 65537, 3 * 65536 + 5]
VIEWS = {"view", "slice", "alias", "detach", "_unsafe_view", "expand", "unsqueeze", "select"}
WAITS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal"}


def tensors() -> dict[str, torch.Tensor]:
    """Of every width and length, every bit pattern."""
    torch.manual_seed(5)
    out = {}
    for count in COUNTS:
        for dtype in DTYPES:
            raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
            out[f"{dtype}.{count}"] = raw > 127 if dtype is torch.bool else raw.view(dtype)
    out["strided"] = torch.randn(40, 50).t()
    out["parameter"] = torch.nn.Parameter(torch.randn(9))
    return out


@pytest.mark.parametrize("way", ["library", "threads", "torch"])
def test_every_way_gives_the_reference_sums(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors()
    if way == "threads":
        monkeypatch.setattr(module, "_LARGE", 0)
        monkeypatch.setattr(module, "_AT_ONCE", 8 * 65536)  # one block of the widest: several pieces of a tensor
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    if way == "torch":
        monkeypatch.setattr(module, "library", lambda: None)
    else:
        assert library() is not None, "the library was not built"
    assert checksums(given) == {name: simple_sum(tensor) for name, tensor in given.items()}


def test_batches_are_summed_up_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PART_HERE", 65536)
    module._plan.cache_clear()
    given = [one.contiguous() for one in tensors().values()]
    found = [value % (1 << 64) for value in sums_on_device([one.detach() for one in given]).tolist()]
    module._plan.cache_clear()
    assert found == list(map(simple_sum, given))


class Operators(TorchDispatchMode):
    """Counts what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[function._schema.name.removeprefix("aten::")] += 1
        return function(*args, **(kwargs or {}))


def kernels(count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a device's way, for so many tensors of parameters and buffers."""
    monkeypatch.setattr(module, "library", lambda: None)
    given = {f"{n}.{dtype}": torch.ones(500, dtype=dtype) for n in range(count) for dtype in DTYPES[1:3]}
    checksums(given)  # what depends on their sizes alone stays on the device
    with Operators() as operators:
        begun = begin_checksums(given)
    assert not operators.seen.keys() & WAITS, "nobody waits on the training thread"
    begun.get()
    return sum(times for name, times in operators.seen.items() if name not in VIEWS)


def test_kernels_are_few_however_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = kernels(24, monkeypatch), kernels(400, monkeypatch)
    assert few == many <= 40


def test_without_the_library_torch_forms_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any) -> None:
    monkeypatch.setattr(module, "LIBRARY", module.LIBRARY.__class__(
        "the library", tmp_path / "absent.so", tmp_path / "absent.c", tmp_path, "leave it"))
    library.cache_clear()
    try:
        with caplog.at_level("INFO", logger="flowcheck"):
            ones = {"a": torch.ones(3)}
            assert checksums(ones) == checksums(ones) == {"a": simple_sum(torch.ones(3))}
        assert len(caplog.records) == 1
    finally:
        library.cache_clear()


def test_an_element_that_is_too_wide_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        begin_checksums({"a": torch.ones(2, dtype=torch.complex128)})
