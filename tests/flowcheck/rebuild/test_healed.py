"""When a version may be built with what peers have given, and what is shown to them (node/test_live_peers.py has all of
it together)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flowcheck.rebuild.version.going_on import PartialFollower
from flowcheck.rebuild.version.healed import HealedFollower


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Without streams, as if peers had answered for iteration 3."""
    monkeypatch.setattr(PartialFollower, "_has_room", lambda self, iteration: ("as without peers", iteration))
    made: Any = HealedFollower.__new__(HealedFollower)
    made._asked, made._answers, made.replica = 3, ["an answer"], SimpleNamespace(ready=True)
    made._builder = SimpleNamespace(reserve=lambda replica, iteration: ("reserved", replica, iteration))
    return made


def test_room_is_reserved_for_what_peers_have_given(follower: Any) -> None:
    assert follower._has_room(3) == ("reserved", follower.replica, 3)


@pytest.mark.parametrize(("name", "value"), [
    ("_asked", 2), ("_answers", []), ("_answers", None), ("replica", None), ("replica", SimpleNamespace(ready=False)),
])
def test_without_an_answer_or_a_version_it_is_as_without_peers(follower: Any, name: str, value: Any) -> None:
    setattr(follower, name, value)
    assert follower._has_room(3) == ("as without peers", 3)


def test_peers_are_shown_what_the_streams_have_brought_and_for_how_long(follower: Any) -> None:
    """Ten cells, of which the engine lacks 2 to 4, and 7 is not to be trusted. Four arenas."""
    asked: list[tuple[int, ...]] = []

    def missing(*given: int) -> np.ndarray:
        asked.append(given)
        return np.array([[2, 5]], dtype=np.int64)

    follower.engine = SimpleNamespace(
        missing=missing, region=lambda iteration: f"region of {iteration}", begun=6, config=SimpleNamespace(arenas=4))
    follower.plan = SimpleNamespace(engine=SimpleNamespace(gradient_bytes=73))
    shown: list[tuple[Any, ...]] = []
    peers, void = SimpleNamespace(show=lambda *given: shown.append(given)), np.array([[7, 8]], dtype=np.int64)
    follower._show(peers, 3, void, "closed")
    ((iteration, region, there, alive, closed),) = shown
    assert asked == [(3, 0, 10)] and (iteration, region, closed) == (3, "region of 3", "closed")
    assert np.asarray(there.tolist()).tolist() == [[0, 2], [5, 7], [8, 10]]
    assert alive()
    follower.engine.begun = 7  # its arena is another iteration's
    assert not alive()
