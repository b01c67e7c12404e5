"""Rounds of parity while trainers go as fast as they can: captures lose nothing, and what versions have of slack with
rounds is printed beside what they have without, iteration by iteration of the same job, arms in turn."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lab.jobs import Training
from lab.network.fabric import Fabric
from lab.nodes_lost import protected
from lab.run import LabRun

from .conftest import lab_of

pytestmark = [pytest.mark.root, pytest.mark.slow]
ARMS, ITERATIONS, EVERY, ROUNDS = 2, 60, 10, 3
RING = {"capture": {"ring_size": 1 << 16}}  # two cores for everything: what waits for its turn is not lost
Slack = dict[tuple[str, int], float]  # by node's group and iteration


def trained(fabric: Fabric, out: Path, settings: Mapping[str, Mapping[str, Any]]) -> tuple[Slack, int]:
    """Slack of every version, and how many rounds there were. Everything is published, equal, and without a loss. Skips
    where packets are lost without rounds: such a machine shows nothing about them."""
    job = Training(model="gpt", ranks=4, stages=2)
    out.mkdir()
    with LabRun(fabric, out, api=True, node_settings={**RING, **settings}) as run:
        run.start_nodes(job)
        if settings:
            run.start_holders()
        first = run.attach(job)
        run.train(ITERATIONS)
        if settings:
            run.train_until_parity(0, len(run.iterations) // EVERY * EVERY)
        run.end()
        last = int(run.iterations[-1]["iteration"])
        run.wait_for_nodes(last)
        run.finish_nodes()
        run.finish_holders()
        run.finish_trainers()
        summary, events, held = run.ledger.summary(), [event for _, event in run.events], run.held
    lost = [one for one in events if one["event"] in ("lost", "overload", "dropped")]
    if lost and not settings:
        pytest.skip(f"this machine is too busy: packets are lost without any rounds: {lost[0]}")
    assert summary.all_equal and not summary.unpublished, summary
    lines = [one for one in events if one["event"] == "iteration" and one["iteration"] >= first]
    assert len(lines) >= 2 * (last - first), len(lines)
    assert all(one["published"] and not one["missing"] for one in lines), lines[-3:]
    assert not lost, lost
    slack = {(one["name"], one["iteration"]): one["slack"] for one in events
             if one["event"] == "times" and one["iteration"] >= first and one["slack"] is not None}
    return slack, sum(one["event"] == "protected" for _, one in held)


def test_rounds_cost_the_capture_nothing(tmp_path: Path) -> None:
    both, rounds = (list[float](), list[float]()), 0
    with lab_of(ranks=4, mirrored=((0, 1), (2, 3)), groups=((0, 1), (2, 3)), holders=1) as fabric:
        parity = protected(fabric.config, EVERY)
        for arm in range(ARMS):
            made = dict[bool, Slack]()
            for with_rounds in (True, False) if arm % 2 else (False, True):
                made[with_rounds], count = trained(fabric, tmp_path / f"{arm}-{with_rounds}",
                                                   parity if with_rounds else {})
                rounds += count
            for key in sorted(made[True].keys() & made[False].keys()):
                both[0].append(made[False][key])
                both[1].append(made[True][key])
    assert rounds >= ROUNDS * ARMS and len(both[0]) > ARMS * ITERATIONS
    differ = [two - one for one, two in zip(*both, strict=True)]
    for name, values in (("without", both[0]), ("with", both[1]), ("with less without", differ)):
        tenths = statistics.quantiles(values, n=20)
        print(f"{name:<18} slack in ms of {len(values)}: least {min(values):.1f}, 5 % {tenths[0]:.1f}, median"
              f" {statistics.median(values):.1f}, 95 % {tenths[-1]:.1f}")
    print(f"{rounds} rounds in {ARMS} arms; nothing was lost in either")
