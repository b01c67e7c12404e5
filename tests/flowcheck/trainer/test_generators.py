"""Random states that are not asked for again: whatever a script does with its generators, what is taken is what they
have."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.trainer.generators import Generators, restore_rng

SAVED: list[Any] = []
DOES = {
    "python": random.random, "python's pair": lambda: random.gauss(0, 1), "python's seed": lambda: random.seed(3),
    "numpy": np.random.rand, "numpy's pair": np.random.randn, "numpy's seed": lambda: np.random.seed(3),
    "torch": lambda: torch.rand(2), "nothing": lambda: None,
    "save": lambda: SAVED.append((random.getstate(), np.random.get_state())),
    "back": lambda: SAVED and (random.setstate(SAVED[-1][0]), np.random.set_state(SAVED[-1][1])),
}


def asked() -> tuple[Any, ...]:
    """As the generators themselves say it."""
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return random.getstate(), (name, keys.tolist(), *rest), torch.get_rng_state().tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(DOES)), max_size=12))
def test_what_is_taken_is_what_they_have(does: list[str]) -> None:
    before = asked()
    taking = Generators()
    try:
        for what in does:
            DOES[what]()
            now, taken = asked(), taking.state()
            random.seed(9), np.random.seed(9), torch.manual_seed(9)
            restore_rng(taken)
            assert asked() == now, what
    finally:
        SAVED.clear()
        restore_rng({"python": before[0], "torch": torch.tensor(before[2], dtype=torch.uint8)})


def test_a_state_of_an_older_trainer_is_restored_too() -> None:
    keys: Any = np.random.get_state()
    older = {"python": random.getstate(), "torch": torch.get_rng_state(),
             "numpy": (keys[0], torch.from_numpy(keys[1]), *keys[2:])}
    now = asked()
    random.random(), np.random.randn(), torch.rand(1)
    restore_rng(older)
    assert asked() == now


def test_nobody_is_asked_again_while_nothing_has_changed(monkeypatch: Any) -> None:
    taking = Generators()
    first = taking.state()
    for change, key in ((random.random, "python"), (np.random.rand, "numpy")):
        same = taking.state()
        assert same["python"] is first["python"] and same["numpy"] is first["numpy"]
        change()
        first = taking.state()
        assert first[key] is not same[key]
