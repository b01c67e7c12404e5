"""A node that is told no channels: it finds them on the wire, and every version is the trainers' own state."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from lab.jobs import Training
from lab.run import LabRun

from .conftest import lab_of

pytestmark = [pytest.mark.root, pytest.mark.slow]
VERSIONS = 6
SECONDS = 180.0


def until(run: LabRun, *events: str) -> dict[str, Any]:
    """Train until a node says it."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if found := [event for _, event in run.events if event["event"] in events]:
            return found[-1]
        run.train(1)
    raise AssertionError(run.events[-5:])


def follow(out: Path, ranks: int, mirrored: tuple[int, ...], **softroce: Any) -> LabRun:
    settings = {"channels": 2, "seed": 1, "tell_channels": False, **softroce}
    job = Training(model="mlp", ranks=ranks, softroce=settings)
    with lab_of(ranks=ranks, mirrored=(mirrored,)) as fabric, LabRun(fabric, out) as run:
        run.start_nodes(job)
        run.begin(job, attach=True)
        until(run, "attached")
        first = until(run, "patched", "state")["iteration"]
        run.train(VERSIONS)
        run.end()
        run.wait_for_nodes(first + VERSIONS - 1)
        assert set(run.finish_nodes()) == {0}
        summary = run.ledger.summary()
        assert summary.all_equal and summary.published >= VERSIONS, (summary, [e for _, e in run.events][-6:])
        return run


@pytest.mark.parametrize(("protocol", "ranks", "mirrored"), [
    ("LL", 2, (0,)), ("LL128", 3, (0, 1)), ("SIMPLE", 2, (1,)),
])
def test_equal(tmp_path: Path, protocol: str, ranks: int, mirrored: tuple[int, ...]) -> None:
    run = follow(tmp_path, ranks, mirrored, protocol=protocol)
    events = [event["event"] for _, event in run.events]
    assert events.index("assigning") < events.index("assigned") < events.index("attached")
    (assigned,) = [event for _, event in run.events if event["event"] == "assigned"]
    assert assigned["connections"] + assigned["unseen"] == 2 * ranks
