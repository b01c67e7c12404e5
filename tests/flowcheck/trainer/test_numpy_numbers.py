"""Numbers of numpy as hyper-parameters and in what a rank gives: kept as the numbers that they are where torch computes
the same bits with them, and refused by name where numpy rounds otherwise."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from flowcheck.control.user_state import Refused, UserState, pack
from flowcheck.errors import UserError
from flowcheck.trainer.describe.described import Model, Stepping, group_options

CLASSES = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
FORMS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.013},
    "adam": {"lr": 0.013, "betas": (0.9, 0.97), "eps": 1e-6, "weight_decay": 0.013},
    "adamw": {"lr": 0.013, "betas": (0.9, 0.97), "eps": 1e-6, "weight_decay": 0.013},
}
KINDS = (np.float64, np.float32, np.float16, np.longdouble, np.int64, np.int8, np.uint8)
CASES = [(name, form, key) for name, options in OPTIONS.items() for form in FORMS for key in options]


def made(name: str, form: str, options: dict[str, Any]) -> torch.optim.Optimizer:
    torch.manual_seed(1)
    return CLASSES[name]([torch.randn(67, requires_grad=True)], **options, **FORMS[form])


def stepped(optimizer: torch.optim.Optimizer, value: Any, key: str) -> torch.Tensor:
    (parameter,) = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0][key] = value  # as a loop that computes its own schedule does
    for step in range(6):
        parameter.grad = torch.randn(67, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return parameter.detach()


def described(name: str) -> Model:
    return Model([], {}, [["w"]], Stepping(name, ("torch-cpu", "")))


@pytest.mark.parametrize(("name", "form", "key"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_followed_has_torchs_bits(name: str, form: str, key: str, kind: Any) -> None:
    value = OPTIONS[name][key]
    if np.issubdtype(kind, np.integer):
        value = 1 if key != "betas" else (0, 0)
    given = tuple(map(kind, value)) if key == "betas" else kind(value)
    optimizer = made(name, form, OPTIONS[name])
    optimizer.param_groups[0][key] = given
    try:
        (found,) = group_options(described(name), optimizer)
    except UserError as error:
        assert error.where == "optimizer" and key in error.what and error.remedy and kind is not np.float64
        return
    numbers = found[key] if key == "betas" else [found[key]]
    assert all(type(one) in (int, float) for one in numbers)
    assert list(numbers) == (list(given) if key == "betas" else [given])
    plain = tuple(numbers) if key == "betas" else found[key]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with_numpy = stepped(optimizer, given, key)
    assert torch.equal(with_numpy, stepped(made(name, form, OPTIONS[name]), plain, key))


@pytest.mark.parametrize(("name", "form", "key", "kind", "followed"), [
    ("sgd", "loop", "lr", np.float32, True), ("sgd", "foreach", "lr", np.float32, True),
    ("adam", "fused", "lr", np.float32, True), ("adamw", "fused", "weight_decay", np.float32, True),
    ("adam", "loop", "lr", np.float32, False), ("adamw", "foreach", "weight_decay", np.float32, False),
    ("sgd", "loop", "lr", np.uint8, False),  # torch negates it
])
def test_where_numpy_rounds_by_itself_that_is_named(name: str, form: str, key: str, kind: Any, followed: bool) -> None:
    optimizer = made(name, form, OPTIONS[name])
    optimizer.param_groups[0][key] = kind(1) if kind is np.uint8 else kind(0.013)
    if followed:
        assert group_options(described(name), optimizer)[0][key] == float(np.float32(0.013))
        return
    with pytest.raises(UserError, match=f"{key} is .*numpy computes otherwise"):
        group_options(described(name), optimizer)


def test_flags_are_flags() -> None:
    optimizer = made("sgd", "loop", OPTIONS["sgd"])
    optimizer.param_groups[0]["nesterov"] = np.bool_(False)
    assert group_options(described("sgd"), optimizer)[0]["nesterov"] is False


@pytest.mark.parametrize(("value", "kept"), [
    (np.float64(0.1), 0.1), (np.float32(0.1), float(np.float32(0.1))), (np.float16(0.5), 0.5), (np.int64(-7), -7),
    (np.uint8(255), 255), (np.bool_(True), True), (np.str_("b"), "b"), (np.bytes_(b"b"), b"b"),
])
def test_numbers_of_numpy_are_kept_as_numbers(value: Any, kept: Any) -> None:
    state = UserState.of(pack({"a": [value], value: 1} if type(kept) in (int, str) else {"a": [value]},
                              step=1, rank=0, ranks=1), "x").state
    assert state["a"] == [kept] and type(state["a"][0]) is type(kept)
    assert all(type(key) in (int, str) for key in state)


@pytest.mark.parametrize("value", [np.longdouble(0.1), np.complex64(1), np.datetime64("2026-01-02T03:04:05", "ns"),
                                   np.timedelta64(3, "ns"), np.array(1.0), np.zeros(3)])
def test_what_of_numpy_is_no_number_is_refused_by_its_path(value: Any) -> None:
    with pytest.raises(Refused) as caught:
        pack({"a": [value]}, step=1, rank=0, ranks=1)
    assert caught.value.where == "user state['a'][0]"
