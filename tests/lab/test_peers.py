"""Two nodes mirror the same group, and one of the mirrors loses packets: the other node has them."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.jobs import Training
from lab.network.impair import Impairment
from lab.run import LabRun

from .conftest import lab_of

pytestmark = pytest.mark.root
ARENAS = 4  # of a node, as it comes
# With ranges the trainers would have given what the version of the first iteration holds.
SETTINGS = {"replica": {"peer_seconds": 10.0, "peer_iterations": 16, "resync": "state"}}


def said(run: LabRun, event: str, node: str = "node 0") -> list[dict[str, Any]]:
    return [one for name, one in run.events if one["event"] == event and name == node]


def test_what_one_mirror_loses_its_peer_has(tmp_path: Path) -> None:
    wire = Impairment("mirror0", way="from", drop=0.01, seed=3)
    with lab_of(ranks=3, mirrored=((0,), (1,)), impairments=(wire,)) as fabric:
        with LabRun(fabric, tmp_path, node_settings=SETTINGS) as run:
            job = Training(model="mlp", ranks=3, softroce={"protocol": "LL", "mtu": 1024, "seed": 1})
            run.start_nodes(job)
            first = run.attach(job)
            for _ in range(40):  # one by one: the only losses are to be the mirror's
                run.train(1)
                run.wait_for_nodes(run.iterations[-1]["iteration"] - ARENAS)
            run.end()
            run.wait_for_nodes(run.iterations[-1]["iteration"])
            run.finish_nodes()
            lines = [one for one in said(run, "iteration") if one["iteration"] >= first]
            summary, twins = run.ledger.summary(), run.twins
            asked, lost = said(run, "peers"), said(run, "lost")
            hashes = {i: run.ledger._nodes[0, i] for i in run.ledger.iterations(0) if (0, i) in run.ledger._nodes}
    filled: Counter[str] = Counter()
    for line in lines:
        filled.update(line["filled"])
    assert lost == [], (lost, asked)
    assert asked and all(one["failed"] == {} for one in asked), asked
    assert filled["peer"] == sum(cells for one in asked for cells in one["filled"].values()) > 0
    assert "trainer" not in filled and all(line["missing"] == {} for line in lines)
    assert summary.all_equal and summary.published >= 40, summary
    both = [(hashes[line["iteration"]], line) for _, line in twins if line["iteration"] in hashes]
    assert len(both) >= 40 and all(one == other for one, other in both)
    marked = [line["iteration"] for line in lines if line["unproven"]]
    assert marked and set(marked) >= {one["iteration"] for one in asked} - {
        line["iteration"] for line in lines if line["status"] == "verified"
    }


@pytest.mark.slow
def test_a_peer_that_hangs_and_one_that_was_killed_cost_a_moment(tmp_path: Path) -> None:
    """What it does not give the trainer gives, and every version that is published is equal."""
    wire = Impairment("mirror0", way="from", drop=0.01, seed=3)
    settings = {"replica": {"resync": "ranges", "peer_seconds": 0.2, "peer_iterations": 16}}
    with lab_of(ranks=3, mirrored=((0,), (1,)), impairments=(wire,)) as fabric:
        with LabRun(fabric, tmp_path, node_settings=settings) as run:
            job = Training(model="mlp", ranks=3, softroce={"protocol": "LL", "mtu": 1024, "seed": 1})
            run.start_nodes(job)
            first = run.attach(job)
            train_until(run, lambda: any(one["filled"] for one in said(run, "peers")))
            peer = run._children.process("node 1")
            run._children.let_end("node 1")
            for signal_ in (signal.SIGSTOP, signal.SIGKILL):
                before = len(said(run, "peers"))
                peer.send_signal(signal_)
                train_until(run, lambda before=before: any(one["failed"] for one in said(run, "peers")[before:]))
            train_until(run, lambda: any("trainer" in one["filled"] and one["iteration"] > first
                                         for one in said(run, "iteration")))
            run.end()
            run.wait_for_nodes(run.iterations[-1]["iteration"])
            run.finish_nodes()
            lines = {one["iteration"]: one for one in said(run, "iteration") if one["iteration"] >= first}
            rows = {i: run.ledger.row(0, i) for i in run.ledger.iterations(0) if i >= first}
            assert said(run, "lost") == []
    assert len(lines) == len(rows), "every iteration has ended"
    for i, row in rows.items():
        assert row.verdict == ("equal" if lines[i]["published"] else "not published"), (i, row, lines[i])


def train_until(run: LabRun, happened: Callable[[], bool]) -> None:
    for _ in range(100):
        if happened():
            return
        run.train(1)
        run.wait_for_nodes(run.iterations[-1]["iteration"] - ARENAS)
    raise AssertionError("not in a hundred iterations")
