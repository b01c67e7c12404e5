"""Rounds of parity of every step, as quickly as holders can make them, beside training at full load: captures lose
nothing by it. Arms with and without rounds, interleaved."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from flowcheck.lab.jobs import Training
from flowcheck.lab.nodes_lost import protected
from flowcheck.lab.run import LabRun

from .conftest import lab_of

pytestmark = [pytest.mark.root, pytest.mark.slow]
ITERATIONS = 40
DEEP = {"capture": {"ring_size": 1 << 16}}


def arm(folder: Path, rounds: bool) -> tuple[list[float], int]:
    """Milliseconds of slack of each iteration of both nodes, and how many rounds there were."""
    job = Training(model="gpt", ranks=4, stages=2)
    pairs = ((0, 1), (2, 3))
    with lab_of(ranks=4, mirrored=pairs, groups=pairs, holders=2 if rounds else 0) as fabric:
        settings = protected(fabric.config, every=1) if rounds else {"replica": {"slots": 4}}
        with LabRun(fabric, folder, api=True, node_settings=DEEP | settings) as run:
            run.start_nodes(job)
            run.start_holders()
            first = run.attach(job)
            run.train(ITERATIONS)
            run.wait_for_nodes(first + ITERATIONS - 1)
            made = sum(said["event"] == "protected" for _, said in run.held)
            run.end()
            run.finish_nodes()
            run.finish_holders()
            run.finish_trainers()
            run.ledger.over = True
            assert run.ledger.summary().all_equal, run.ledger.summary()
            said = [one for _, one in run.events]
    assert not any(one["dropped"] for one in said if one["event"] == "iteration"), "the node has dropped packets"
    return [one["slack"] for one in said if one["event"] == "times" and one["slack"] is not None], made


def test_captures_lose_nothing(tmp_path: Path) -> None:
    slack: dict[bool, list[float]] = {True: [], False: []}
    for number, rounds in enumerate((False, True, True, False)):
        found, made = arm(tmp_path / str(number), rounds)
        slack[rounds] += found
        assert made >= (ITERATIONS // 4 if rounds else 0)
        print(f"rounds: {made}" if rounds else "no rounds", statistics.quantiles(found, n=10))
    for rounds, found in slack.items():
        print("with" if rounds else "without", f"median {statistics.median(found):.1f} ms of {len(found)}, tenth"
              f" {statistics.quantiles(found, n=10)[0]:.1f} ms")
