"""What giving ranges costs a trainer's step: a job beside a mirror that loses packets, and beside one that does not.

    .venv/bin/python -P benchmarks/range_steps.py [--pairs 20] [--steps 10] [--drop 0.01]        as root

Two labs of the same form are up at once, each with trainers, a mirror and a node. One mirror loses copies of one
direction, so that iterations have holes and the ranks are asked for the state of single elements; the other loses
nothing, and nobody is asked. They train in turns, never both at once: a block of steps here, a block there, and the
next pair begins with the other one. Printed are medians of both, the median of the pairs' ratios with its quartiles,
and, for each lab, how long steps are beside their neighbours (the three before and after): the median, the 99th
percentile and the longest; of the lossy one also those in which a question was open. Trainers share one core, the nodes
have the other.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from lab.bench.rows import here
from lab.jobs import Training
from lab.network.fabric import Fabric, FabricConfig
from lab.network.impair import Impairment
from lab.run import LabRun

SETTLING = 10  # steps after attach that do not count
NEAR = 3  # neighbours on either side; and steps after a question in which it is answered


def begun(undo: ExitStack, name: str, drop: float) -> LabRun:
    """A lab whose node has its first version."""
    wires = (Impairment("mirror0", way="from", drop=drop, seed=1),)
    config = FabricConfig(name=name, ranks=3, mirrored=((0, 1),), direction="ingress", impairments=wires)
    fabric = undo.enter_context(Fabric(config))
    folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
    run = undo.enter_context(LabRun(fabric, folder, node_settings={"capture": {"ring_size": 1 << 16}}))
    job = Training(model="mlp", ranks=3, softroce={"protocol": "LL", "mtu": 1024, "seed": 1})
    run.start_nodes(job)
    run.attach(job)
    run.train(SETTLING)
    return run


def beside(seconds: Sequence[float]) -> list[float]:
    """Each step but the first and last ones over the median of its neighbours."""
    found = []
    for i in range(NEAR, len(seconds) - NEAR):
        found.append(seconds[i] / statistics.median([*seconds[i - NEAR : i], *seconds[i + 1 : i + 1 + NEAR]]))
    return found


def told(name: str, ratios: Sequence[float]) -> str:
    if len(ratios) < 2:
        return f"{name}: too few steps"
    return (f"{name}: {len(ratios)} steps over their neighbours: median {statistics.median(ratios):.3f},"
            f" 99th percentile {statistics.quantiles(ratios, n=100)[98]:.2f}, longest {max(ratios):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="in a block")
    parser.add_argument("--drop", type=float, default=0.01)
    options = parser.parse_args()
    print(here())
    with ExitStack() as undo:
        lossy, whole = begun(undo, "fcsteps1", options.drop), begun(undo, "fcsteps0", 0.0)
        first = {run: len(run.iterations) for run in (lossy, whole)}
        pairs = []
        for pair in range(options.pairs):
            medians = {}
            for run in (lossy, whole) if pair % 2 else (whole, lossy):
                before = len(run.iterations)
                run.train(options.steps)
                medians[run] = statistics.median(one["seconds"] for one in run.iterations[before:])
                run.wait_for_nodes(run.iterations[-1]["iteration"], 5.0)
            pairs.append(medians[lossy] / medians[whole])
        seconds = {run: [one["seconds"] for one in run.iterations[first[run]:]] for run in (lossy, whole)}
        begins = lossy.iterations[first[lossy]]["iteration"]
        asked = [one["iteration"] - begins for _, one in lossy.events if one["event"] == "ranges"]
        for run in (lossy, whole):
            run.end()
            run.finish_nodes()
        lines = [one for _, one in lossy.events if one["event"] == "iteration" and one["iteration"] >= begins]
    quartiles = statistics.quantiles(pairs, n=4)
    print(f"with loss {statistics.median(seconds[lossy]) * 1e3:.1f} ms, without"
          f" {statistics.median(seconds[whole]) * 1e3:.1f} ms a step (medians); of {len(pairs)} pairs of blocks the"
          f" median ratio is {quartiles[1]:.3f} [{quartiles[0]:.3f} to {quartiles[2]:.3f}]")
    ratios = beside(seconds[lossy])
    print(told("without loss", beside(seconds[whole])))
    print(told("with loss", ratios))
    open_ = {at + late - NEAR for at in asked for late in range(NEAR + 1)}
    print(told("with loss, a question open", [ratio for i, ratio in enumerate(ratios) if i in open_]))
    print(f"{sum(bool(one['missing']) for one in lines)} of {len(lines)} iterations had holes, {len(asked)} questions"
          f" in all, {sum(one['published'] for one in lines)} versions published")


if __name__ == "__main__":
    main()
