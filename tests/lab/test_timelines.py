"""A job that is started again from the beginning under the same run and epoch, and dies before it has come as far: the
next start goes on from what the second one made, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.jobs import Training
from lab.run import LabRun

from .conftest import lab_of
from .test_recovery import results

pytestmark = [pytest.mark.root, pytest.mark.slow]
FIRST, SECOND, MORE = 24, 14, 3  # iterations


def test_the_line_that_lives_is_gone_on_with(tmp_path: Path) -> None:
    job = Training(model="mlp", ranks=2, softroce={"seed": 3}, seed=3, optimizer={"name": "adamw", "lr": 1e-2})
    with lab_of(ranks=2, mirrored=((0,),)) as fabric, LabRun(fabric, tmp_path, api=True, checksums=3) as run:
        run.start_nodes(job)
        run.wait_for_nodes(run.attach(job))
        run.train(FIRST - len(run.iterations))
        run.wait_for_nodes(FIRST - 1)
        run.start_trainers_again()  # killed, as by hand
        second = Training(**{**job.to_dict(), "seed": 4})
        run.begin(second, attach=True)
        run.train(SECOND)
        run.wait_for_nodes(SECOND - 1)
        said = run.wait_for_event("numbered")
        assert (said["epoch"], said["said"], said["first"]) == (1, 0, 0)
        expected = results(run)
        run.start_trainers_again()
        run.begin(second, attach=True, recover=True)
        (step,) = {one["step"] for one in run.recovered}
        assert SECOND - 1 <= step <= SECOND, run.recovered[0]["text"]
        run.train(MORE)
        again = results(run)
        run.end()
        assert set(run.finish_nodes()) == {0}
        run.begin(second)
        run.train(SECOND + MORE)
        undisturbed = results(run)
        run.end()
        assert expected == {number: undisturbed[number] for number in expected}
        assert again == {number: undisturbed[number] for number in again}
