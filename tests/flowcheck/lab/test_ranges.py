"""A mirror loses packets: the trainers give their own state of just these elements, and no whole state again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowcheck.lab.impair import Impairment
from flowcheck.lab.jobs import Training
from flowcheck.lab.run import LabRun

from .conftest import lab_of

pytestmark = pytest.mark.root
ARENAS = 4  # of a node, as it comes
ADAM = 12  # bytes of state of an fp32 element: parameter, exp_avg, exp_avg_sq


def said(run: LabRun, event: str) -> list[dict[str, Any]]:
    return [one for _, one in run.events if one["event"] == event]


def train(run: LabRun, iterations: int) -> None:
    """One by one: the only losses are to be the mirror's, and not those of a node that these trainers starve."""
    for _ in range(iterations):
        run.train(1)
        run.wait_for_nodes(run.iterations[-1]["iteration"] - ARENAS)


def settled(run: LabRun, first: int) -> dict[int, dict[str, Any]]:
    """End the run. The node's lines by iteration: every version that it has published was found equal, and nothing but
    ranges was asked for."""
    run.end()
    run.wait_for_nodes(run.iterations[-1]["iteration"])
    run.finish_nodes()
    rows = {i: run.ledger.row(0, i) for i in run.ledger.iterations(0) if i >= first}
    lines = {one["iteration"]: one for one in said(run, "iteration") if one["iteration"] >= first}
    assert said(run, "attached")[0]["resync"] == "ranges" and said(run, "lost") == []
    assert len(said(run, "state")) == 1, "the whole state comes once, to begin with"
    for i, row in rows.items():
        assert row.verdict == ("equal" if lines[i]["published"] else "not published"), (i, row, lines[i])
        assert not (lines[i]["published"] and lines[i]["stale"])
    return lines


def heal(tmp_path: Path, iterations: int, drop: float, *, direction: str) -> None:
    wire = Impairment("mirror0", way="from", drop=drop)
    with lab_of(ranks=3, mirrored=((0, 1),), direction=direction, impairments=(wire,)) as fabric:
        with LabRun(fabric, tmp_path, node_settings={"replica": {"resync": "ranges"}}) as run:
            job = Training(model="mlp", ranks=3, softroce={"protocol": "LL", "mtu": 1024, "seed": 1})
            run.start_nodes(job)
            first = run.attach(job)
            train(run, iterations)
            lines = settled(run, first)
            asked, patched = said(run, "ranges"), said(run, "patched")
    missing = sum(sum(line["missing"].values()) for line in lines.values())
    assert missing and patched, "nothing was lost, or nothing healed"
    # each missing element once, and some again that were lost once more before their patch
    assert 0 < sum(one["bytes"] for one in patched) <= sum(one["bytes"] for one in asked) <= 2 * ADAM * missing
    ranks = [rank for one in asked for rank in one["ranks"]]
    assert ranks == [i % 3 for i in range(len(ranks))], "in turn"


def test_a_mirror_that_loses_packets_is_healed_by_ranges(tmp_path: Path) -> None:
    """Two links of three, one direction of each: most pieces have no second copy."""
    heal(tmp_path, 50, 0.0015, direction="ingress")


@pytest.mark.slow
def test_a_mirror_that_loses_packets_for_five_hundred_iterations(tmp_path: Path) -> None:
    heal(tmp_path, 500, 0.0015, direction="ingress")


def test_an_outage_of_twenty_iterations_is_healed_by_ranges(tmp_path: Path) -> None:
    with lab_of(ranks=2, mirrored=((0, 1),), impairments=(Impairment("mirror0"),)) as fabric:
        with LabRun(fabric, tmp_path, node_settings={"replica": {"resync": "ranges"}}) as run:
            job = Training(model="mlp", ranks=2, softroce={"protocol": "LL", "seed": 1})
            run.start_nodes(job)
            first = run.attach(job)
            run.train(3)
            cut = run.iterations[-1]["iteration"] + 1
            run.wait_for_nodes(cut - 1)
            fabric.impairer.set_down("mirror0", True)
            run.train(20)
            fabric.impairer.set_down("mirror0", False)
            while not said(run, "patched"):
                assert run.iterations[-1]["iteration"] < cut + 100, said(run, "ranges")
                train(run, 1)
            train(run, 5)
            lines = settled(run, first)
            asked, [patched] = said(run, "ranges"), said(run, "patched")
    assert all(lines[i]["published"] for i in range(first, cut))
    assert all(line["published"] for i, line in lines.items() if i >= patched["iteration"]) and len(lines) > 5
    assert sum(one["elements"] for one in asked) < 2.5 * patched["elements"]
