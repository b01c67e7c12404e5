"""Steps made again by an optimizer of the same class: equal to those of the training, to the bit."""

from __future__ import annotations

import random

import pytest
import torch

from flowcheck.trainer.log.record import set_options
from flowcheck.trainer.log.redo import redo

from .optimizers import MAKE
from .recorded import STEPS, Job, Recorded, base_of, entries_of, options_at, plain, spread

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def silent(line: str) -> None:
    pass


def check(kind: str, dtype: torch.dtype, seed: int) -> None:
    """A base 0 to 40 steps old, whole or fuzzy; the rank dies at a step after it, or anyone asks for that step."""
    choose = random.Random(f"{kind} {dtype} {seed}")
    whole = choose.random() < 0.4
    job = Job(kind, dtype)
    said = Recorded(job, seed, budget=1 << 40 if whole else spread(job, seed), base_at=choose.randint(0, 40))
    to = choose.randint(said.whole_at, STEPS)
    base = base_of(said.base)
    again = Job(kind, dtype)  # it has never trained
    redone = redo(again.parameters, again.optimizer, base, entries_of(said, base.first), silent, to=to)
    set_options(again.optimizer.param_groups, options_at(said, to))  # schedules change them after a step
    assert redone.step == to and not redone.differs
    assert plain(again.state()) == plain(said.states[to])
    summed = [step for step in range(10, to + 1, 10) if step > base.last]
    assert redone.verified == max(summed, default=None)


# torch leaves anything in the last elements of a momentum there: refused, see test_refusals.py.
UNSTEADY = {"sgd-nesterov-fused"}
CASES = [(kind, dtype) for kind in MAKE for dtype in DTYPES if kind not in UNSTEADY or dtype == "fp32"]


@pytest.mark.parametrize(("kind", "dtype"), CASES[::2] + CASES[1::6])
def test_the_state_is_that_of_the_training(kind: str, dtype: str) -> None:
    check(kind, DTYPES[dtype], seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_the_state_is_that_of_the_training_for_many_seeds(kind: str, dtype: str, seed: int) -> None:
    check(kind, DTYPES[dtype], seed)
