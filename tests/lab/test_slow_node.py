"""A node whose ring is far too small for its traffic: it says so itself, and costs the trainers next to nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowcheck.node.groups import state_requests as uploads
from lab.jobs import Training
from lab.run import LabRun

from .conftest import lab_of

STATE = {"resync": "state"}  # what follows a whole state is what these tests are about
pytestmark = pytest.mark.root


def test_a_ring_that_is_too_small_is_named_and_makes_no_storm_of_uploads(tmp_path: Path) -> None:
    with lab_of(ranks=2, mirrored=((0, 1),)) as fabric:
        with LabRun(fabric, tmp_path, node_settings={"capture": {"ring_size": 64}, "replica": STATE}) as run:
            job = Training(model="mlp", ranks=2, softroce={"protocol": "LL", "mtu": 1024, "seed": 1})
            run.start_nodes(job)
            run.attach(job)
            run.train(100)
            run.end()
            run.finish_nodes()
            said = [event for _, event in run.events]
    dropped = [one for one in said if one["event"] == "dropped"]
    assert dropped and "ring_full" in dropped[0]["drops"] and "raise capture.ring_size (now 64" in dropped[0]["why"]
    lost = [one for one in said if one["event"] == "lost" and one["dropped"]]
    assert lost and "the node itself has dropped ring_full" in lost[0]["why"]
    states = [one["time"] for one in said if one["event"] == "state"]
    after = [time for time in states if time > lost[0]["time"]]
    assert all(later - earlier >= uploads.OWN for earlier, later in zip([lost[0]["time"], *after], after, strict=False))
