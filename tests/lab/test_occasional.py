"""A metric every seventh step and an evaluation every tenth iteration: on a communicator of their own no iteration is
lost; on that of the gradients the iterations around them are, by name, and the attachment goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.jobs import Training
from lab.run import LabRun

from .conftest import lab_of

pytestmark = pytest.mark.root
ITERATIONS, ARENAS = 26, 4


def run_of(out: Path, protocol: str, **settings: Any) -> tuple[LabRun, int]:
    """A whole run of two ranks, and the first iteration that the node followed."""
    softroce = {"protocol": protocol, "channels": 2, "seed": 1}
    job = Training(model="mlp", ranks=2, softroce=softroce, metric_every=7, evaluate_every=10, **settings)
    with lab_of(ranks=2, mirrored=((0,),)) as fabric, LabRun(fabric, out) as run:
        run.start_nodes(job)
        first = run.attach(job)
        for _ in range(ITERATIONS):
            run.train(1)  # no faster than the node; where nothing becomes of an iteration, nobody waits for long
            run.wait_for_nodes(run.iterations[-1]["iteration"] - ARENAS, 0.3)
        run.end()
        run.wait_for_nodes(run.iterations[-1]["iteration"], 20.0)
        assert set(run.finish_nodes()) == {0}
        return run, first


def said(run: LabRun, event: str) -> list[dict[str, Any]]:
    return [one for _, one in run.events if one["event"] == event]


@pytest.mark.parametrize("protocol", ["LL128", "SIMPLE"])
def test_on_a_communicator_of_their_own(tmp_path: Path, protocol: str) -> None:
    """Their packets come out of the same ports, and are nobody's."""
    run, first = run_of(tmp_path, protocol)
    summary = run.ledger.summary()
    assert summary.all_equal and summary.published == run.iterations[-1]["iteration"] - first + 1 >= ITERATIONS
    assert said(run, "lost") == [] and len(said(run, "attached")) == 1
    # A state that came too late on a busy machine is healed by ranges: what is before `first` may have been stale.
    stale = [line for line in said(run, "iteration") if line["stale"] and line["iteration"] >= first]
    assert not stale, (stale, said(run, "dropped") + said(run, "overload"))


@pytest.mark.slow
def test_on_that_of_the_gradients(tmp_path: Path) -> None:
    """What is published is equal, the odd calls are named, and versions come again after each of them."""
    run, first = run_of(tmp_path, "LL128", shared=True)
    rows = {i: run.ledger.row(0, i).verdict for i in run.ledger.iterations(0) if i >= first}
    equal = [i for i, verdict in rows.items() if verdict == "equal"]
    assert set(rows.values()) <= {"equal", "not published", "waiting"}, rows
    log = (tmp_path / "rank0.log").read_text()
    odd = [i for i in rows if (i + 1) % 7 == 0 or (i and i % 10 == 0)]
    assert len(odd) >= 4 and all(f"iteration {i} made " in log for i in odd if i - 1 not in odd), (odd, log)
    assert len(said(run, "attached")) >= 4 and said(run, "refused") == []
    for begin, end in ((14, 19), (21, 26)):
        assert any(begin <= i <= end for i in equal), (begin, rows, said(run, "stale"))
