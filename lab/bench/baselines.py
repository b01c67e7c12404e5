"""bench baselines: steps of real training in the lab, with and without checkpoints (FlowCheck's Figure 9). As root.

    baselines.HOW.every-N    ms of a step, mean of an arm, while rank 0 saves every N iterations as HOW does
                             (lab/saving.py), against the same training without any checkpoint
    baselines.mirror         the same while the switch copies, and nobody listens
    baselines.captured       the same while a node takes the copies from its port, and no trainer is attached to it
    baselines.flowcheck      the same while a node follows and publishes a version for every iteration
    baselines.flowcheck.mirror   the same against `baselines.mirror`: what is left without the switch's copies
    baselines.flowcheck.hook     the same against `baselines.captured`: what is left without the lab's copies into rings

Two ranks train the lab's GPT on one core; the node has the other. Checksums are sent as often as `attach` sends them.
In the lab the switch is software on the trainers' core, and so is the way of a copy into the ring of who listens: the
kernel puts it there within the sender's call. `mirror` and `captured` are costs of the lab and not of a cluster, where
copies are work of the switch and of the node's NIC. Files go to the file system of TMPDIR. A round takes about a
minute.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from flowcheck.errors import EnvironmentProblem
from lab.bench.rows import Row, Samples, here
from lab.jobs import Training
from lab.network.fabric import Fabric
from lab.run import LabRun
from lab.saving import SAVERS
from lab.shape import FabricConfig

__all__ = ["run"]

SETTLING = 5  # first iterations of an arm; DDP's second bucket layout is among them
TIMED = 20
EVERY = (1, 10)
CHECKSUMS = 100  # iterations from one with them to the next, as trainer/cadence.py begins


def run(rounds: int, ring_bytes: int) -> list[Row]:
    """Rows of all arms. ring_bytes is not used: the job is as large as it is. Raises EnvironmentProblem."""
    job = Training(model="gpt", ranks=2, softroce={"protocol": "LL128", "mtu": 4096})
    with (
        tempfile.TemporaryDirectory() as folder,
        Fabric(FabricConfig(name="fcbaselines", ranks=2, mirrored=((0,),))) as fabric,
        LabRun(fabric, Path(folder), checksums=CHECKSUMS, node_settings={"capture": {"ring_size": 1 << 16}}) as lab,
    ):
        arms: dict[str, Callable[[], float]] = {"none": partial(_plain, lab, job)}
        arms |= {f"{how}.every-{every}": partial(_plain, lab, job, (how, every)) for how in SAVERS for every in EVERY}
        arms |= {"mirror": partial(_mirrored, lab, job), "captured": partial(_captured, lab, job),
                 "flowcheck": partial(_followed, lab, job)}
        samples: Samples = {name: [] for name in arms}
        for number in range(rounds):
            for name in list(arms)[:: -1 if number % 2 else 1]:
                samples[name].append(arms[name]())
        lab.finish_trainers()
    setting, none = here(), samples.pop("none")
    rows = [Row.of(f"baselines.{name}", "ms/step", taken, none, None, setting) for name, taken in samples.items()]
    beside = (("mirror", "mirror"), ("hook", "captured"))
    return rows + [
        Row.of(f"baselines.flowcheck.{name}", "ms/step", samples["flowcheck"], samples[arm], None, setting)
        for name, arm in beside
    ]


def _timed(lab: LabRun) -> float:
    """Mean milliseconds of a step of the job that has begun."""
    first = len(lab.iterations)
    lab.train(TIMED)
    return 1e3 * statistics.fmean(line["seconds"] for line in lab.iterations[first:])


def _plain(lab: LabRun, job: Training, saving: tuple[str, int] | None = None) -> float:
    lab.begin(job, saving=saving)
    lab.train(SETTLING)
    taken = _timed(lab)
    lab.end()
    return taken


def _mirrored(lab: LabRun, job: Training) -> float:
    lab.fabric.start_mirror()
    try:
        return _plain(lab, job)
    finally:
        lab.fabric.stop_mirror()


def _captured(lab: LabRun, job: Training) -> float:
    lab.start_nodes(job)
    taken = _plain(lab, job)
    lab.finish_nodes()
    return taken


def _followed(lab: LabRun, job: Training) -> float:
    lab.start_nodes(job)
    first = lab.attach(job)
    lab.train(SETTLING)
    taken = _timed(lab)
    lab.end()
    last = lab.iterations[-1]["iteration"]
    lab.wait_for_nodes(last)
    lab.finish_nodes()
    summary = lab.ledger.summary()
    if not summary.all_equal or summary.equal < last - first:
        odd = "; ".join(f"iteration {row.iteration} {row.verdict}: {row.why}"
                        for row in (*summary.differing, *summary.unpublished))
        raise EnvironmentProblem(f"of {last - first} versions {summary.equal} are there and equal: {odd}",
                                 where="bench baselines", remedy="a machine with less beside it: the node lost packets")
    return taken
