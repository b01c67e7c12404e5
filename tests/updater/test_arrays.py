"""Which arrays a replica has, how much memory they take before there is any, and what no replica holds."""

import pytest
import torch

from updater import arrays
from updater.arrays import check_alone, check_tensors, needed, plan
from updater.errors import ReplicaError
from updater.optimizers import OptimizerSpec
from updater.replica import Replica
from updater.rounding_modes import RoundingMode
from updater.slot import STATES

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


def _plan(tensors, *, buffers=(), tied=None, masters=True, optimized=("w",), options=None):
    spec = OptimizerSpec.check("adam", [(list(optimized), options or {"lr": 0.1})])
    return plan(tensors, spec, frozenset(buffers), tied or {}, masters)


def _arrays(planned, part="arrays"):
    return [(one["name"], one["role"], one["dtype"], tuple(one["shape"])) for one in planned[part]]


def test_every_entry_has_its_arrays() -> None:
    """Optimized, a buffer, and what no iteration changes; the counts and options of a step at the end."""
    tensors = {"k": torch.zeros(2, dtype=torch.int64), "w": torch.zeros(3, 2), "mean": torch.zeros(5)}
    planned = _plan(tensors, buffers=["mean"])
    assert planned["entries"] == [
        {"name": "k", "role": "fixed", "tied": ""}, {"name": "w", "role": "p", "tied": ""},
        {"name": "mean", "role": "raw", "tied": ""},
    ]
    assert planned["states"] == {"w": ["exp_avg", "exp_avg_sq"]}
    assert _arrays(planned, "constants") == [("k", "fixed", "int64", (2,))]
    held = _arrays(planned)
    assert held[:4] == [("w", "p", "float32", (3, 2)), ("w", STATES["exp_avg"], "float32", (3, 2)),
                        ("w", STATES["exp_avg_sq"], "float32", (3, 2)), ("mean", "raw", "float32", (5,))]
    assert held[4][:3] == ("", "steps", "float32") and held[4][3] == (1,)
    assert held[5][:3] == ("", "options", "float64") and len(held) == 6


def test_sixteen_bits_have_masters_or_stand_alone() -> None:
    tensors = {"w": torch.zeros(4, dtype=torch.bfloat16), "v": torch.zeros(4)}
    masters, alone = (_plan(tensors, optimized=("w", "v"), masters=with_) for with_ in (True, False))
    assert [entry["role"] for entry in masters["entries"]] == ["low", "p"]
    assert [entry["role"] for entry in alone["entries"]] == ["p", "p"]
    roles = ["p", STATES["exp_avg"], STATES["exp_avg_sq"]]
    assert _arrays(masters)[:4] == [*(("w", role, "float32", (4,)) for role in roles), ("w", "low", "bfloat16", (4,))]
    assert _arrays(alone)[:3] == [("w", role, "bfloat16", (4,)) for role in roles]
    assert _arrays(alone)[3:6] == [("v", role, "float32", (4,)) for role in roles]


@pytest.mark.parametrize(("dtype", "masters", "role"), [
    (torch.float32, True, "p"), (torch.bfloat16, True, "low"), (torch.float16, False, "p"),
])
def test_a_tied_entry_is_its_owners(dtype, masters, role) -> None:
    tensors = {name: torch.zeros(4, dtype=dtype) for name in ("w", "again")}
    planned = _plan(tensors, tied={"again": "w"}, masters=masters)
    assert planned["entries"] == [{"name": "w", "role": role, "tied": ""}, {"name": "again", "role": role, "tied": "w"}]
    assert {name for name, *_ in _arrays(planned)} == {"w", ""} and planned["constants"] == []


def _refused(tensors, tied):
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 0.1})])
    with pytest.raises(ReplicaError) as refused:
        check_tensors(tensors, spec, {}, tied, True)
    return str(refused.value)


def test_what_is_tied_is_equal() -> None:
    one = torch.arange(4.0)
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 0.1})])
    check_tensors({"w": one, "again": one.clone()}, spec, {}, {"again": "w"}, True)
    assert _refused({"w": one, "again": one + 1}, {"again": "w"}) == "'again' is tied to 'w' and differs from it"
    assert _refused({"w": one, "again": one.reshape(2, 2)}, {"again": "w"}).endswith("differs from it")
    for tensors, tied in (({"w": one, "a": one}, {"a": "x"}), ({"w": one}, {"a": "w"}), ({"w": one}, {"w": "w"})):
        assert "cannot be tied to" in _refused(tensors, tied)


def test_sixteen_bits_alone_are_asked_of_the_rounding_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the type that is updated, for each there is; where there are masters, none is."""
    asked, here = [], []
    monkeypatch.setattr(RoundingMode, "check", lambda self, *given: asked.append(given))
    monkeypatch.setattr(arrays, "check_here", here.append)
    tensors = {"w": torch.zeros(4, dtype=torch.float16), "v": torch.zeros(2, dtype=torch.bfloat16), "f": torch.zeros(1)}
    spec = OptimizerSpec.check("adam", [(["w", "v", "f"], {"lr": 0.1})])
    for masters in (True, False):
        check_alone(plan(tensors, spec, frozenset(), {}, masters)["arrays"], spec, RoundingMode("torch-cpu", threads=1))
        assert here == ([] if masters else ["bfloat16", "float16"])
    assert asked == [("adam", "bfloat16"), ("adam", "float16")]
