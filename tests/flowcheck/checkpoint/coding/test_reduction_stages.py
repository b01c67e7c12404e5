"""The parts of a round that need no other worker: pieces and their padding, what waits between two stages, what others
say of themselves, and how an end is said."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowcheck.checkpoint.coding.fingerprint import WIDTH
from flowcheck.checkpoint.coding.reduction import DEPTH, MOST, Reduction, _Lane, _Over, _padded
from flowcheck.checkpoint.coding.shape import Shape

from ...hand_node import until


def worker(number: int, shape: Shape, said: Sequence[Sequence[int]] = ()) -> tuple[Reduction, list[list[int]]]:
    """One whose others say `said`, and what it says to them."""
    one, told = object.__new__(Reduction), list[list[int]]()

    def allgather(into: list[list[torch.Tensor]], mine: list[torch.Tensor]) -> Any:
        told.append(mine[0].tolist())
        assert len(into[0]) == len(said)
        for tensor, values in zip(into[0], said, strict=True):
            tensor[:] = torch.tensor(values, dtype=tensor.dtype)
        return SimpleNamespace(wait=lambda: None)

    one._shape, one._worker, one._all = shape, number, SimpleNamespace(allgather=allgather)
    return one, told


def test_pieces_are_cut_and_the_last_one_is_padded() -> None:
    packet = torch.arange(1, 8, dtype=torch.uint8)
    assert _padded(packet, 0, 7).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert _padded(packet, 2, 3).tolist() == [3, 4, 5] and _padded(packet, 4, 3).tolist() == [5, 6, 7]
    assert _padded(packet, 5, 4).tolist() == [6, 7, 0, 0] and _padded(packet, 7, 2).tolist() == [0, 0]
    assert _padded(packet, 40, 1).tolist() == [0] and _padded(packet, 5, 4).dtype == torch.uint8


def test_lengths_are_believed_up_to_a_terabyte() -> None:
    """Of all workers, as each says; its own is told to all."""
    one, told = worker(1, Shape(2, 1, 2), [[0], [MOST], [7], [8]])
    assert one._lengths(5) == [0, MOST, 7, 8] and told == [[5]]
    for odd in (MOST + 1, -1):
        one, _ = worker(1, Shape(2, 1, 1), [[7], [odd]])
        with pytest.raises(RuntimeError, match=f"worker 1 says that its packet has {odd} bytes"):
            one._lengths(5)


def test_a_worker_without_a_chunk_has_nothing_to_hold_against_others() -> None:
    one, told = worker(1, Shape(2, 1, 1), [[0] * WIDTH, [1] * WIDTH])
    one._check(bytes(range(WIDTH)), None, 40)
    assert told == [list(range(WIDTH))]


def test_an_end_is_said_in_one_line() -> None:
    one, _ = worker(3, Shape(2, 1, 2))
    error = one._ended(RuntimeError("x" * 300 + "\nmore"))
    assert error.what == f"the round has ended: {'x' * 200}" and error.where == "worker 3" and error.remedy
    assert one._ended(RuntimeError("gone\nmore")).what == "the round has ended: gone"


def test_what_waits_between_two_stages_is_bounded_and_in_order() -> None:
    lane = _Lane[int]()
    put: list[int] = []

    def fill() -> None:
        for number in range(DEPTH + 2):
            lane.put(number)
            put.append(number)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    until(lambda: len(put) == DEPTH and len(lane._changed._waiters) == 1)  # type: ignore[attr-defined]
    assert list(lane._waiting) == list(range(DEPTH))
    assert [lane.get() for _ in range(DEPTH + 2)] == list(range(DEPTH + 2))
    thread.join(60.0)
    assert put == list(range(DEPTH + 2))


@pytest.mark.parametrize("full", [True, False])
def test_the_end_of_one_stage_ends_those_that_wait(full: bool) -> None:
    """One that puts while nobody takes, and one that takes while nobody puts."""
    lane, over = _Lane[int](), list[bool]()
    for number in range(DEPTH if full else 0):
        lane.put(number)

    def waits() -> None:
        try:
            lane.put(9) if full else lane.get()
        except _Over:
            over.append(True)

    threads = [threading.Thread(target=waits, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: len(lane._changed._waiters) == 2)  # type: ignore[attr-defined]
    lane.end()
    for thread in threads:
        thread.join(60.0)
    assert over == [True, True]
    with pytest.raises(_Over):
        lane.put(1)
    with pytest.raises(_Over):
        lane.get()  # also what waits there still
