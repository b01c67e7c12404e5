"""Training scripts that change something after `attach`, in a lab: what comes of each is followed, named or caught.

Never silently wrong: no wrong version is verified, and none is published for longer than a sample takes. The table is
in scripts/; `python -P -m tests.flowcheck.scenarios` prints what comes of each.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ...lab.conftest import lab_of
from . import scripts  # fills the table
from .stage import Stage
from .table import SCENARIOS

pytestmark = pytest.mark.root
__all__ = ["scripts"]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with lab_of(ranks=2, mirrored=((0, 1),)) as fabric:
        with Stage(fabric, tmp_path_factory.mktemp("stage")) as made:
            yield made


NAMES = [pytest.param(name, marks=[] if one.quick else [pytest.mark.slow]) for name, one in SCENARIOS.items()]


def test_a_job_hears_nothing_that_was_meant_for_the_one_before(stage: Stage) -> None:
    """A request for a state that a job left open is not the next job's."""
    stage.play(SCENARIOS["amsgrad_flipped"])
    played = stage.play(SCENARIOS["adamw"])
    assert played.good, played


@pytest.mark.parametrize("name", NAMES)
def test_never_silently_wrong(stage: Stage, name: str) -> None:
    played = stage.play(SCENARIOS[name])
    assert played.good, f"{played}; wanted: {SCENARIOS[name].expected.name.lower()} ({SCENARIOS[name].about})"
