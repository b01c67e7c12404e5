"""Never silently wrong: what an engine has placed, held against what the generator knows.

Any thread that may use the engine.
"""

from __future__ import annotations

import numpy as np
from parser.machine import Engine

__all__ = ["Truth", "check", "close"]

#: See jobs.FuzzJob.truth.
Truth = dict[int, tuple[np.ndarray, np.ndarray]]


def close(engine: Engine, truth: Truth | None) -> None:
    """Check the oldest iteration and give its arena back."""
    if engine.oldest <= engine.begun:  # a forged PSN skips thousands of iterations
        check(engine, truth, engine.oldest)
    engine.retire()


def check(engine: Engine, truth: Truth | None, iteration: int | None) -> None:
    """What is covered of an iteration (None: of the parameters) is the truth. truth: None for a sequence that
    forged packets are part of. Raises AssertionError."""
    engine.copies(iteration)
    cells, region = engine.cells(iteration), engine.region(iteration)
    if truth is None or not cells.any():
        return
    assert iteration is None or iteration in truth, f"bytes placed in iteration {iteration}, which never was"
    right, belongs = truth[-1 if iteration is None else iteration]
    assert not (cells & ~belongs).any(), f"cells outside every bucket are covered (iteration {iteration})"
    mask = np.repeat(cells, 8)[: len(region)]
    wrong = np.flatnonzero(mask & (region != right))
    assert not len(wrong), f"iteration {iteration}: {len(wrong)} covered bytes are not the truth, first {wrong[0]}"
