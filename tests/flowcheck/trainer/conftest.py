"""A training loop with an attachment, and what its node does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flowcheck.trainer.connection import sender as sending

from ..hand_node import LONGEST, HandNode
from .training import Training


@pytest.fixture(autouse=True)
def read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node made by hand does not end a connection when it has heard the last word, as a real one does."""
    monkeypatch.setattr(sending, "READ_SECONDS", 0.1)


CLIPPING = torch.nn.utils.clip_grads_with_norm_


@pytest.fixture(autouse=True)
def torchs_own() -> Iterator[None]:
    """Torch's functions are the whole process's: a test that leaves an attachment open changes the next one's."""
    before = torch.nn.utils.clip_grads_with_norm_
    yield
    assert torch.nn.utils.clip_grads_with_norm_ is before, "an attachment was not closed"


@pytest.fixture
def training(wrapped: Any, hand_node: HandNode) -> Iterator[Callable[..., Training]]:
    """training(**options) -> one that has not begun."""
    made: list[Training] = []

    def start(**options: Any) -> Training:
        made.append(Training(wrapped, hand_node.address, **options))
        return made[-1]

    yield start
    for one in made:
        one.attachment.close(0.0)


@pytest.fixture
def script() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """script(play): what a node does while the training thread waits. Its failures are those of the test."""
    threads: list[threading.Thread] = []
    failures: list[BaseException] = []

    def run(play: Callable[[], Any]) -> None:
        def guarded() -> None:
            try:
                play()
            except BaseException as error:
                failures.append(error)

        threads.append(threading.Thread(target=guarded, daemon=True))
        threads[-1].start()

    yield run
    for thread in threads:
        thread.join(LONGEST)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
