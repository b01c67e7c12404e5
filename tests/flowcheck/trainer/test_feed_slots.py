"""Copies of gradients beside a step: what is sent is what the optimizer has read, or nothing is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
import torch

from flowcheck.control.checksum import sum_text
from flowcheck.control.protocol import Unfed
from flowcheck.errors import UserError
from flowcheck.trainer.feed.layout import FeedLayout
from flowcheck.trainer.feed.slots import Slot, Slots

SHAPES = [(7, 5), (), (0,), (33,)]


@pytest.fixture
def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    found = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    for one in found:
        one.grad = torch.randn_like(one)
    return found


@pytest.fixture
def layout(parameters: list[torch.nn.Parameter]) -> FeedLayout:
    return FeedLayout([[("a", parameters[0]), ("b", parameters[1])], [("c", parameters[2]), ("d", parameters[3])]],
                      [0, 0], torch.float32, torch.device("cpu"), range(2))


@pytest.fixture
def slots(layout: FeedLayout) -> Iterator[Slots]:
    with closing(Slots(layout)) as found:
        yield found


@pytest.fixture
def held_up() -> Iterator[tuple[ThreadPoolExecutor, threading.Event]]:
    """A thread that begins to copy once the event is set."""
    event = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(event.wait)
        yield thread, event
        event.set()


def read(parameters: list[torch.nn.Parameter]) -> list[bytes]:
    """What the optimizer reads, by bucket."""
    flat = [one.grad.detach().reshape(-1).numpy() for one in parameters if one.grad is not None]
    return [np.concatenate(flat[:2]).tobytes(), np.concatenate(flat[2:]).tobytes()]


def sent(slot: Slot) -> list[bytes]:
    out: list[bytes] = []
    for message, data in slot.pieces(9):
        if isinstance(message, Unfed):
            assert slot.spoilt and message.iteration == 9 and message.why and not data and not out
            continue
        assert (message.iteration, message.bucket, message.first) == (9, len(out), 0)
        assert message.total == len(data) and message.sum == sum_text(data)
        out.append(bytes(data))
    assert slot.spoilt == (not out)
    return out


def test_what_the_optimizer_reads_is_sent(slots: Slots, parameters: list[torch.nn.Parameter]) -> None:
    for _ in range(5):
        wanted, slot = read(parameters), slots.take()
        assert slot is not None
        slot.begin()
        for one in parameters:
            one.grad = torch.randn_like(one)  # a backward pass that has memory of its own
        assert sent(slot) == wanted


def test_of_a_third_step_nothing_is_taken_while_two_are_on_their_way(slots: Slots) -> None:
    pieces = []
    for _ in range(2):
        slot = slots.take()
        assert slot is not None
        slot.begin()
        pieces.append(slot.pieces(0))
    assert slots.take() is None
    slot.end()
    del pieces[1]
    assert slots.take() is slot


def test_gradients_that_are_set_to_none_stay_what_they_were(
    layout: FeedLayout, parameters: list[torch.nn.Parameter], held_up: tuple[ThreadPoolExecutor, threading.Event]
) -> None:
    slot, wanted = Slot(layout, held_up[0], None), read(parameters)
    slot.begin()
    for one in parameters:
        one.grad = None
    held_up[1].set()
    assert sent(slot) == wanted


def test_gradients_that_were_written_to_first_are_not_sent(
    layout: FeedLayout, parameters: list[torch.nn.Parameter], held_up: tuple[ThreadPoolExecutor, threading.Event]
) -> None:
    """By a hook that comes between the copy and the update."""
    slot = Slot(layout, held_up[0], None)
    slot.begin()
    assert parameters[3].grad is not None
    parameters[3].grad.zero_()
    held_up[1].set()
    slot.end()
    assert sent(slot) == [] and slot.spoilt


@pytest.mark.parametrize("settles", [True, False], ids=["before", "after"])
def test_whatever_is_written_later_is_nothing_to_a_copy(
    layout: FeedLayout, parameters: list[torch.nn.Parameter], held_up: tuple[ThreadPoolExecutor, threading.Event],
    settles: bool,
) -> None:
    """Also what nothing counts: before the step, of an optimizer that writes to gradients, or after it."""
    slot, wanted = Slot(layout, held_up[0], None), read(parameters)
    slot.begin()
    threading.Timer(0.05, held_up[1].set).start()
    if settles:
        slot.settle()
    else:
        slot.end()
    for one in parameters:
        assert one.grad is not None
        one.grad.data.zero_()
        one.grad.zero_()
    if settles:
        slot.end()
    assert sent(slot) == wanted


@pytest.mark.parametrize("odd", [None, torch.zeros(33, dtype=torch.bfloat16)], ids=["none", "bfloat16"])
def test_another_kind_of_gradient_is_refused(
    slots: Slots, layout: FeedLayout, parameters: list[torch.nn.Parameter], odd: torch.Tensor | None
) -> None:
    if odd is None:
        parameters[3].grad = None
    else:

        layout.buckets[1][1] = ("d", torch.nn.Parameter(odd.clone()))
        layout.buckets[1][1][1].grad = odd
    slot = slots.take()
    assert slot is not None
    with pytest.raises(UserError):
        slot.begin()
