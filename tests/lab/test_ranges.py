"""A node is given no state: the trainers send theirs element by element, of everything when it begins, of what was lost
when a mirror loses packets, was down, or begins in the middle. Nobody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.jobs import Training
from lab.network.impair import Impairment
from lab.run import LabRun

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
    ranges was asked for, all of the state once."""
    run.end()
    run.wait_for_nodes(run.iterations[-1]["iteration"])
    run.finish_nodes()
    rows = {i: run.ledger.row(0, i) for i in run.ledger.iterations(0) if i >= first}
    lines = {one["iteration"]: one for one in said(run, "iteration") if one["iteration"] >= first}
    assert said(run, "attached")[0]["resync"] == "ranges" and said(run, "lost") == []
    assert said(run, "state") == [] and len(said(run, "begun")) == 1
    for i, row in rows.items():
        assert row.verdict == ("equal" if lines[i]["published"] else "not published"), (i, row, lines[i])
        assert not (lines[i]["published"] and lines[i]["stale"])
    return lines


def heal(
    tmp_path: Path, iterations: int, drop: float, *, direction: str, ports: tuple[int, ...] = (0, 1), least: float = 0.0
) -> None:
    """least: the share of iterations that are published."""
    wire = Impairment("mirror0", way="from", drop=drop)
    with lab_of(ranks=3, mirrored=(ports,), direction=direction, impairments=(wire,)) as fabric:
        with LabRun(fabric, tmp_path) as run:
            job = Training(model="mlp", ranks=3, softroce={"protocol": "LL", "mtu": 1024, "seed": 1})
            run.start_nodes(job)
            first = run.attach(job)
            train(run, iterations)
            lines = settled(run, first)
            asked, (_, *patched), [begun] = said(run, "ranges"), said(run, "patched"), said(run, "begun")
    missing = sum(sum(line["missing"].values()) for line in lines.values())
    published = sum(line["published"] for line in lines.values())
    if not least:
        assert missing and patched, "nothing was lost, or nothing healed"
    # each missing element once, and some again that were lost once more before their patch
    nbytes = sum(one["bytes"] for one in asked) - ADAM * begun["elements"]
    assert bool(patched) <= sum(one["bytes"] for one in patched) <= nbytes <= 2 * ADAM * missing
    assert published >= least * len(lines), (published, len(lines))
    ranks = [rank for one in asked for rank in one["ranks"]]
    assert ranks == [i % 3 for i in range(len(ranks))], "in turn"


def test_a_mirror_that_loses_packets_is_healed_by_ranges(tmp_path: Path) -> None:
    """Two links of three, one direction of each: most pieces have no second copy."""
    heal(tmp_path, 50, 0.0015, direction="ingress")


@pytest.mark.slow
def test_a_mirror_that_loses_packets_for_five_hundred_iterations(tmp_path: Path) -> None:
    heal(tmp_path, 500, 0.0015, direction="ingress")


@pytest.mark.slow
def test_one_percent_lost_of_three_mirrored_ports(tmp_path: Path) -> None:
    """Each packet has two copies: what is lost of both is rare, in some runs nothing, and nearly all is published."""
    heal(tmp_path, 500, 0.01, direction="both", ports=(0, 1, 2), least=0.9)


def test_an_outage_of_twenty_iterations_is_healed_by_ranges(tmp_path: Path) -> None:
    with lab_of(ranks=2, mirrored=((0, 1),), impairments=(Impairment("mirror0"),)) as fabric:
        with LabRun(fabric, tmp_path) as run:
            job = Training(model="mlp", ranks=2, softroce={"protocol": "LL", "seed": 1})
            run.start_nodes(job)
            first = run.attach(job)
            run.train(3)
            cut = run.iterations[-1]["iteration"] + 1
            run.wait_for_nodes(cut - 1)
            fabric.impairer.set_down("mirror0", True)
            run.train(20)
            fabric.impairer.set_down("mirror0", False)
            while len(said(run, "patched")) < 2:
                assert run.iterations[-1]["iteration"] < cut + 100, said(run, "ranges")
                train(run, 1)
            train(run, 5)
            lines = settled(run, first)
            asked, (_, patched), [begun] = said(run, "ranges"), said(run, "patched"), said(run, "begun")
    assert all(lines[i]["published"] for i in range(first, cut))
    assert all(line["published"] for i, line in lines.items() if i >= patched["iteration"]) and len(lines) > 5
    elements = sum(one["elements"] for one in asked) - begun["elements"]
    assert elements < 2.5 * begun["elements"], "some again, of iterations that were lost whole one after the other"


def test_a_node_that_is_started_in_the_middle(tmp_path: Path) -> None:
    """Trainers have attached to a node that is not there, and go on; the one that comes has no state to begin with."""
    with lab_of(ranks=2, mirrored=((0, 1),)) as fabric, LabRun(fabric, tmp_path) as run:
        job = Training(model="mlp", ranks=2, softroce={"protocol": "LL", "seed": 1})
        run.start_nodes(job)
        first = run.attach(job)
        run.train(2)
        run.wait_for_nodes(run.iterations[-1]["iteration"])
        run.finish_nodes()
        run.train(5)
        run.start_nodes(job)
        before = run.iterations[-1]["iteration"]
        run.wait_for_event("attached")
        while not said(run, "patched"):
            assert run.iterations[-1]["iteration"] < before + 200, run.events[-3:]
            run.train(1)
            run.wait_for_nodes(run.iterations[-1]["iteration"], 0.5)
        train(run, 5)
        lines = settled(run, said(run, "patched")[0]["iteration"])
    assert min(lines) > before > first and len(lines) >= 5 and all(line["published"] for line in lines.values())


@pytest.mark.slow
@pytest.mark.parametrize(("width", "resync_mb"), [(2000, 1), (6800, 11)])
def test_a_state_that_takes_fifty_iterations_to_come(tmp_path: Path, width: int, resync_mb: int) -> None:
    """18 and 195 MB of parameters. Each slice is of its own step; none of it is asked for twice but what was lost
    meanwhile."""
    settings = {"replica": {"resync_mb": resync_mb}, "capture": {"ring_size": 1 << 16}}
    with lab_of(ranks=2, mirrored=((0,),)) as fabric, LabRun(fabric, tmp_path, node_settings=settings) as run:
        job = Training(model="mlp", size={"width": width}, ranks=2, batch=1, bucket_mb=8.0,
                       softroce={"protocol": "SIMPLE", "mtu": 4096, "seed": 1})
        run.start_nodes(job)
        run.begin(job, attach=True)
        run.train(4)
        run.wait_for_event("attached")
        while not said(run, "patched"):
            run.train(1)
            last = run.iterations[-1]["iteration"]
            assert last < 200, said(run, "ranges")[-3:]
            if any(one["iteration"] < last for one in said(run, "begun")):
                run.wait_for_event("iteration", iteration=last - 1)
        train(run, 5)
        lines = settled(run, said(run, "patched")[0]["iteration"])
    [begun], asked = said(run, "begun"), said(run, "ranges")
    lost = sum(sum(one["missing"].values()) for one in said(run, "iteration") if one["iteration"] >= begun["iteration"])
    assert min(lines) - begun["iteration"] >= 48 and all(one["bytes"] <= resync_mb << 20 for one in asked)
    assert begun["elements"] <= sum(one["elements"] for one in asked) <= begun["elements"] + lost
    assert all(line["published"] for line in lines.values()) and len(lines) >= 5
