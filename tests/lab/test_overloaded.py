"""A mirror that carries less than the job sends, and a node that is slower than the job: what is published is equal,
what is lost is lost as a whole and named, nobody is late who has not said so, and versions are made in the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from lab.jobs import Training
from lab.run import LabRun

from .conftest import lab_of

STATE = {"resync": "state"}  # what follows a whole state is what these tests are about
pytestmark = [pytest.mark.root, pytest.mark.slow]
LONG = 600.0  # seconds of training
JOB = {"model": "mlp", "ranks": 2, "softroce": {"protocol": "LL", "mtu": 1024, "seed": 1}}
SECONDS = 120.0  # of training in which something must have happened: a node asks for no state twice in 10


def said(run: LabRun, event: str) -> list[dict[str, Any]]:
    return [one for _, one in run.events if one["event"] == event]


def train_until(run: LabRun, event: str, more_than: int) -> None:
    """Until the node has said this so often."""
    end = time.monotonic() + SECONDS
    while len(said(run, event)) <= more_than:
        assert time.monotonic() < end, [one for _, one in run.events[-5:]]
        run.train(5)


def train_until_published(run: LabRun) -> None:
    """Until a version is made of what was trained last."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        run.train(5)
        last = run.iterations[-1]["iteration"]
        run.wait_for_nodes(last, 5.0)
        if run.ledger.row(0, last).verdict == "equal":
            return
    raise AssertionError([one for _, one in run.events[-5:]])


def check(run: LabRun, first: int) -> dict[int, dict[str, Any]]:
    """What holds however bad it is; the node's lines by iteration."""
    lines = {one["iteration"]: one for one in said(run, "iteration") if one["iteration"] >= first}
    last = run.iterations[-1]["iteration"]
    assert sorted(lines) == list(range(first, last + 1)), "each iteration is named"
    for iteration, one in lines.items():
        assert run.ledger.row(0, iteration).verdict == ("equal" if one["published"] else "not published"), one
        assert one["published"] or one["failed"]
    behind = False
    for _, one in run.events:
        behind = one["event"] == "behind" or (behind and one["event"] not in ("on_time", "state"))
        if one["event"] == "times" and one["slack"] is not None and one["slack"] < 0:
            assert behind, one
    given_up = {i for one in said(run, "recovered") for i in range(one["first"], one["last"] + 1)}
    for iteration in given_up & lines.keys():
        assert set(lines[iteration]["missing"]) == {"overload"} and lines[iteration]["placed"] >= 0
    elements = {sum(lines[i]["missing"].values()) for i in given_up & lines.keys() if i > 0}
    assert len(elements) <= 1, "of what is given up everything is missing"
    assert lines[last]["published"]
    return lines


def test_a_mirror_that_carries_less_than_the_job_sends(tmp_path: Path) -> None:
    with (
        lab_of(ranks=2, mirrored=((0, 1),)) as fabric,
        LabRun(fabric, tmp_path, node_settings={"replica": STATE}) as run,
    ):
        job = Training(**JOB)
        run.start_nodes(job)
        first = run.attach(job)
        train_until_published(run)
        before, losses, states = run.iterations[-1]["iteration"], len(said(run, "lost")), len(said(run, "state"))
        fabric.limit("mirror0", 2)
        train_until(run, "lost", losses)
        fabric.limit("mirror0", None)
        train_until(run, "state", states)  # which may be there already
        train_until_published(run)
        run.end()
        run.wait_for_nodes(run.iterations[-1]["iteration"])
        run.finish_nodes()
        lines = check(run, first)
    lost = [one for iteration, one in lines.items() if iteration > before and one["missing"]]
    assert lost and {cause for one in lost for cause in one["missing"]} == {"lost"}, "the mirror's loss, not the node's"


def test_a_node_that_is_slower_than_the_job(tmp_path: Path) -> None:
    settings = {"capture": {"ring_size": 1024}, "replica": STATE}
    with lab_of(ranks=2, mirrored=((0, 1),)) as fabric, LabRun(fabric, tmp_path, node_settings=settings) as run:
        job = Training(**JOB)
        run.start_nodes(job)
        first = run.attach(job)
        train_until_published(run)
        before, overloads, states = len(run.events), len(said(run, "overload")), len(said(run, "state"))
        with run.slowed(0.05):
            train_until(run, "overload", overloads)
        train_until(run, "state", states)
        train_until_published(run)
        run.end()
        run.wait_for_nodes(run.iterations[-1]["iteration"])
        run.finish_nodes()
        lines = check(run, first)
    order = [one["event"] for _, one in run.events]
    overload = order.index("overload", before)
    told = [event for event in order[:overload] if event in ("behind", "on_time", "state")]
    assert told[-1] == "behind" and overload < order.index("recovered", overload)
    assert overload < order.index("lost", overload) < order.index("state", overload)
    assert any("overload" in one["missing"] for one in lines.values())


def test_ten_minutes_at_full_load(tmp_path: Path) -> None:
    """Iterations follow each other as fast as the trainers make them, on cores that they share with the node."""
    with (
        lab_of(ranks=3, mirrored=((0, 1),)) as fabric,
        LabRun(fabric, tmp_path, node_settings={"replica": STATE}) as run,
    ):
        job = Training(**JOB | {"model": "gpt", "ranks": 3})
        run.start_nodes(job)
        first = run.attach(job)
        begin = time.monotonic()
        while time.monotonic() - begin < LONG:
            run.train(20)
        train_until_published(run)
        run.end()
        run.wait_for_nodes(run.iterations[-1]["iteration"])
        run.finish_nodes()
        lines = check(run, first)
    times = [one for one in said(run, "times") if one["slack"] is not None]
    late = sorted(one["slack"] for one in times)
    published = sum(one["published"] for one in lines.values())
    print(f"{len(lines)} iterations, {published} published; slack of {len(times)}:"
          f" least {late[0]}, median {late[len(late) // 2]}; behind said {len(said(run, 'behind'))} times,"
          f" overload {len(said(run, 'overload'))}")
    assert len(times) > 100
