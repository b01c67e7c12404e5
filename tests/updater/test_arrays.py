"""Which arrays a replica has: how much memory they take is known before there is any."""

import pytest
import torch

from updater.arrays import needed
from updater.optimizers import OptimizerSpec
from updater.replica import Replica
from updater.rounding_modes import RoundingMode

ELEMENTS = 1 << 18
PAGES = 1.02  # a replica's file has its description as well, and begins each slot on a page


@pytest.mark.parametrize(("name", "options", "dtype", "masters", "each"), [
    ("sgd", {"lr": 0.1}, torch.float32, True, 4),
    ("sgd", {"lr": 0.1, "momentum": 0.9}, torch.float32, True, 8),
    ("adam", {"lr": 0.1}, torch.float32, True, 12),
    ("adamw", {"lr": 0.1, "amsgrad": True}, torch.float32, True, 16),
    ("adam", {"lr": 0.1}, torch.bfloat16, True, 14),
    ("adamw", {"lr": 0.1, "amsgrad": True}, torch.float16, True, 18),
    ("sgd", {"lr": 0.1}, torch.bfloat16, False, 2),
    ("adam", {"lr": 0.1}, torch.bfloat16, False, 6),
])
@pytest.mark.parametrize("slots", [2, 4])
def test_what_a_replica_takes_is_known_before(name, options, dtype, masters, each, slots) -> None:
    """each: bytes an element in a slot."""
    tensors = {"w": torch.zeros(ELEMENTS, dtype=dtype), "odd": torch.zeros(3, 7, dtype=dtype)}
    spec = OptimizerSpec.check(name, [(["w", "odd"], options)])
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    bytes_needed = needed(shapes, spec, slots, masters=masters)
    made = Replica(tensors, spec, slots=slots, masters=masters, rounding=RoundingMode("torch-cpu", threads=1))
    assert bytes_needed <= made.nbytes <= bytes_needed * PAGES
    made.close()
    assert slots * each * (ELEMENTS + 21) <= bytes_needed <= slots * (each * (ELEMENTS + 21) + 1024)


def test_constants_are_there_once_and_a_tied_entry_not_at_all() -> None:
    shapes = {"w": ((1000,), torch.float32), "again": ((1000,), torch.float32)}
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0})])
    alone = needed({"w": shapes["w"]}, spec, 3)
    assert needed(shapes, spec, 3, tied={"again": "w"}) == alone
    assert needed(shapes, spec, 3) == alone + 4032  # on cache lines
    assert needed(shapes, spec, 3, buffers=frozenset(["again"])) == alone + 3 * 4032
