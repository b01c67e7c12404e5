"""The thread that sits in the registry, beside a seat that is the test's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowcheck.errors import UserError
from flowcheck.node.protect import registry_loop as sitting

from .conftest import LONGEST
from .test_sitting_turns import sits


class HandSeat:
    """Each turn says what the test has put there. It counts them: each keeps the lease."""

    steps: Mapping[Any, int] = {}
    part = None

    def __init__(self) -> None:
        self.turns, self.closed = 0, False
        self.found: dict[str, str] = {}
        self.fails: Exception | None = None

    def turn(self, *_: Any) -> dict[str, str]:
        self.turns += 1
        if self.fails is not None:
            raise self.fails
        return dict(self.found)

    def close(self) -> None:
        self.closed = True


def until(happened: Any) -> None:
    end = time.monotonic() + LONGEST
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_placement_that_cannot_be_followed_costs_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that is none, of one member; then a file of certificates that cannot be read just now. Each is said
    once, turns go on, and what is right again is followed."""
    seat = HandSeat()
    monkeypatch.setattr(sitting, "TURN_SECONDS", 0.1)
    monkeypatch.setattr(sitting, "Seat", lambda *_, **__: seat)
    said: list[tuple[str, str]] = []
    took: list[Sequence[tuple[str, int]]] = []
    fails: list[Exception] = []
    ending = threading.Event()

    def take(sources: Sequence[tuple[str, int]], steps: Any, part: Any) -> None:
        if fails:
            raise fails[0]
        took.append(sources)

    seat.found = {"source": "10.0.0.2:0"}
    thread = threading.Thread(target=sitting.sit, args=(
        sits(directory=str(tmp_path), kept=str(tmp_path / "placement.json"), standby=False), list, list, take, None,
        list,
        lambda event, **fields: said.append((event, fields["why"])), ending))
    thread.start()
    try:
        until(lambda: seat.turns >= 4)
        assert took == [] and len(said) == 1 and said[0][0] == "problem" and "10.0.0.2:0" in said[0][1]
        fails.append(UserError("cannot be read", where="ca.pem"))
        seat.found = {"source": "10.0.0.2:7000"}
        until(lambda: len(said) == 2)
        assert "ca.pem" in said[1][1]
        fails.clear()
        until(lambda: took)
        assert took[0] == [("10.0.0.2", 7000)] and len(said) == 2
        seat.fails = RuntimeError("of a library")  # nor does what nobody expected
        until(lambda: len(said) == 3)
        before = seat.turns
        until(lambda: seat.turns > before + 2)
        assert said[2][0] == "problem" and "RuntimeError: of a library" in said[2][1] and len(said) == 3
    finally:
        ending.set()
        thread.join(LONGEST)
    assert seat.closed
