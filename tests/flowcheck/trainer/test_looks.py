"""What C says of a boundary is what Python says, whatever a script does in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowcheck.control.protocol import Record, UserHead, frame
from flowcheck.control.protocol import User as UserMessage
from flowcheck.trainer import boundary, looks
from flowcheck.trainer.connection.framed import Frames, user, user_head

SIZES = (3, 40, 1, 17)
LIBRARY = boundary.library()
needs_library = pytest.mark.skipif(LIBRARY is None, reason="no C compiler, or no headers of Python")


class Script:
    """A training script's tensors, and what it does with them."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.parameters = [torch.nn.Parameter(torch.randn(size)) for size in SIZES]
        self.optimizer = torch.optim.AdamW([{"params": self.parameters[:2]}, {"params": self.parameters[2:]}], lr=0.1)
        self.members = [list(group["params"]) for group in self.optimizer.param_groups]
        self.backward()

    def backward(self) -> None:
        torch.stack([one.square().sum() for one in self.parameters]).sum().backward()

    @torch.no_grad()
    def do(self, what: str, at: int) -> None:
        one, group, state = self.parameters[at], self.optimizer.param_groups[at % 2], self.optimizer.state
        entry = state.get(one, {})
        does: dict[str, Callable[[], Any]] = {
            "step": self.optimizer.step,
            "backward": torch.enable_grad()(self.backward),
            "zero": self.optimizer.zero_grad,
            "write": lambda: one.add_(1.0),
            "memory": lambda: one.__setattr__("data", one.data.clone()),
            "freeze": lambda: one.requires_grad_(not one.requires_grad),
            "scale": lambda: None if one.grad is None else one.grad.mul_(0.5),
            "replace": lambda: one.__setattr__("grad", None if one.grad is None else one.grad.clone()),
            "drop": lambda: one.__setattr__("grad", None),
            "rate": lambda: group.update(lr=0.1 + group["lr"]),
            "option": lambda: group.update(initial_lr=0.5),
            "unset": lambda: group.pop("initial_lr", None),
            "take": lambda: group.update(params=list(group["params"])[:-1] or group["params"]),
            "swap": lambda: group.update(params=list(reversed(group["params"]))),
            "tuple": lambda: group.update(params=tuple(group["params"])),
            "forget": lambda: state.pop(one, None),
            "clear": entry.clear,
            "more": lambda: entry.update(more=1),
            "another": lambda: entry and entry.update(exp_avg=entry["exp_avg"].clone()),
            "entry": lambda: entry and state.update({one: dict(entry)}),
            "state": lambda: entry and entry["exp_avg"].add_(1.0),
            "first": lambda: state.update({one: state.pop(one)}) if one in state else None,
        }
        if entry or what not in ("another", "state") or "exp_avg" in entry:
            does[what]()


DOES = [
    "step", "backward", "zero", "write", "memory", "freeze", "scale", "replace", "drop", "rate", "option", "unset",
    "take", "swap", "tuple", "forget", "clear", "more", "another", "entry", "state", "first",
]
SCRIPT = st.tuples(st.sampled_from(DOES), st.integers(0, 3))


class Seen:
    """What one of the two has kept, and what it says after that."""

    def __init__(self, by: Any, script: Script) -> None:
        self.by, self.script, self.places = by, script, boundary.places_of(SIZES)
        self.options = looks.options_of(script.optimizer.param_groups)
        self.held, self.versions, self.there = by.gradients(script.parameters)
        self.window = by.window(script.optimizer.state, script.parameters, self.places)

    def now(self) -> dict[str, Any]:
        by, script = self.by, self.script
        groups = script.optimizer.param_groups
        return {
            "gradients": [self.versions, self.there, [*map(id, self.held)]],
            "same gradients": by.same_gradients(script.parameters, self.held, self.versions),
            "versions": by.versions(script.parameters),
            "members": by.look(groups, script.members) or looks.look(groups, script.members),
            "options": by.same_options(groups, self.options),
            "window": by.same_window(script.optimizer.state, script.parameters, self.places, *self.window),
        }


@needs_library
@settings(max_examples=150, deadline=None)
@given(st.lists(SCRIPT, max_size=4), st.lists(SCRIPT, max_size=3))
@example([("option", 0), ("option", 1)], [("unset", 1)])
def test_both_see_the_same(before: list[tuple[str, int]], then: list[tuple[str, int]]) -> None:
    script = Script()
    for one in before:
        script.do(*one)
    seen = [Seen(by, script) for by in (LIBRARY, looks)]
    assert seen[0].now() == seen[1].now()
    for one in then:
        script.do(*one)
        assert seen[0].now() == seen[1].now(), one


@needs_library
@pytest.mark.parametrize("given", [
    [], [1], [None, None], [[], []], [[torch.ones(1)], []], [{}, [], bytearray()], [b"", b"", b""], [[None]],
    [["text"]],
], ids=str)
def test_what_it_cannot_read_is_an_error_and_no_more(given: list[Any]) -> None:
    for name in ("gradients", "same_gradients", "versions", "look", "same_options", "window", "same_window", "sample",
                 "begin", "outbox_put", "outbox_flush", "outbox_idle", "open_outbox"):
        try:
            found = getattr(LIBRARY, name)(*given)
        except (TypeError, ValueError, AttributeError, OSError):
            continue
        assert found is not NotImplemented


@needs_library
@pytest.mark.parametrize("by", [LIBRARY, looks], ids=["c", "python"])
def test_each_byte_of_memory_counts(by: Any) -> None:
    """Of whichever of several pieces, the last one's last byte included."""
    tensors = [torch.arange(24, dtype=torch.uint8), torch.arange(7, dtype=torch.uint8)]
    pairs = [part for one in tensors for part in (one.data_ptr(), bytes(one.tolist()))]
    assert by.same_memory(*pairs) and by.same_memory()
    for one in tensors:
        for at in range(len(one)):
            one[at] += 1
            assert not by.same_memory(*pairs)
            one[at] -= 1
    assert by.same_memory(*pairs)


numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(st.integers(0, (1 << 46) - 1), st.none() | numbers, st.none() | numbers, st.booleans(), numbers,
       st.integers(0, 99))
def test_a_record_is_framed_as_any_message(
    iteration: int, clip: float | None, scale: float | None, skipped: bool, rate: float, size: int,
) -> None:
    frames = Frames()
    several: list[list[dict[str, Any]]] = [[{"lr": rate, "betas": [0.9, 0.95]}], [{"lr": 0.5}]]
    for groups in several:
        record = Record(iteration, groups, clip, scale, skipped, sample="QUJD")
        assert frames.record(groups, iteration, clip, scale, skipped, "QUJD", size) == frame(record, size)
    assert user(iteration, size, 7) == frame(UserMessage(iteration, size), 7)
    assert user_head(iteration, size, 9, 7) == frame(UserHead(iteration, size, 9), 7)
