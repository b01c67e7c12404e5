"""`flowcheck lab run --kill`: a rank is killed, the job goes on from the node, and is held against an undisturbed run.

    fault = Fault(rank=2, at="backward")
    outcome = lose_a_rank(run, job, fault)      job is attached and has trained; its nodes serve (LabRun(api=True))
    say(outcome, console) -> was everything equal

Compared are the loss and the SHA-256 of every tensor of every rank, after each iteration since the one from which the
job went on. The undisturbed run is the same job from its first iteration, in the same processes, without nodes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from lab.compare import Summary
from lab.jobs import Training
from lab.run import LabRun

__all__ = ["AFTER", "BEFORE", "Fault", "Outcome", "lose_a_rank", "results", "say"]

BEFORE = 2  # iterations between the last one that was asked for and the one in which the rank dies
AFTER = 10  # iterations that the job trains on
SHOWN = 3  # losses before the fault that are printed


@dataclass(frozen=True)
class Fault:
    """A rank of the job, and the instant (lab/trainer.py, INSTANTS) at which it kills itself."""

    rank: int
    at: str = "backward"


@dataclass(frozen=True)
class Outcome:
    """died: the iteration in which the rank was killed. step: the one from which the job went on, as `recovered` says
    in words. seconds: from the death to the end of the next iteration. losses: iteration -> undisturbed, disturbed.
    differ: iterations since `step` in which a loss or a tensor of a rank is another. versions: those of the node after
    the fault, compared with the trainers' state."""

    fault: Fault
    died: int
    step: int
    recovered: str
    seconds: float
    losses: Mapping[int, tuple[float, float]]
    differ: tuple[int, ...]
    tensors: int
    versions: Summary

    @property
    def equal(self) -> bool:
        return not self.differ and self.tensors > 0 and self.versions.all_equal


def lose_a_rank(run: LabRun, job: Training, fault: Fault) -> Outcome:
    """Ends the job and the nodes. Raises EnvironmentProblem where the job does not come back."""
    died = run.iterations[-1]["iteration"] + BEFORE
    run.train_and_die(died + AFTER, rank=fault.rank, iteration=died, at=fault.at)
    killed = time.monotonic()
    run.wait_for_nodes(died - 1)
    before = results(run, job)
    run.start_trainers_again()
    run.begin(job, attach=True, recover=True)
    step, words = run.recovered[0]["step"], run.recovered[0]["text"]
    run.train(1)
    seconds = time.monotonic() - killed
    last = died + AFTER
    run.train(last - step - 1)
    again = results(run, job)
    run.end()
    run.wait_for_nodes(last - 1)
    run.finish_nodes()
    run.ledger.over = True
    run.watch(run.ledger, last=True)
    versions = run.ledger.summary()

    if job.shards > 1:  # torch keeps what it has worked out for a mesh, with process groups that are gone by now
        run.start_trainers_again()
    run.begin(job)
    run.train(last)
    run.end()
    undisturbed = results(run, job)
    disturbed = {**before, **again}
    differ = tuple(number for number in range(step, last) if again.get(number) != undisturbed[number])
    tensors = sum(len(part) for number in range(step, last) for rank in undisturbed[number][1] for part in rank)
    losses = {number: (undisturbed[number][0], disturbed[number][0])
              for number in range(max(0, died - SHOWN), last) if number in disturbed}
    return Outcome(fault, died, step, words, seconds, losses, differ, tensors, versions)


def results(run: LabRun, job: Training) -> dict[int, tuple[float, list[tuple[Any, Any]]]]:
    """iteration -> the loss, and every rank's hashes of all its state."""
    last = job.stages - 1
    return {
        line["iteration"]: (line["loss"], [
            (one["tensors"], one["optimizer"])
            for stage in range(job.stages) for one in run.ledger.ranks(stage, line["iteration"])])
        for line in run.iterations if line["stage"] == last
    }


def say(outcome: Outcome, console: Console) -> bool:
    """The losses side by side, and what was shown, in numbers."""
    fault, died, step = outcome.fault, outcome.died, outcome.step
    console.print(f"\nkilled       rank {fault.rank}, in the {fault.at} of iteration {died}", highlight=False)
    console.print(f"back         {outcome.recovered}", highlight=False, soft_wrap=True)
    repeated = max(0, died - step)
    console.print(
        f"             {outcome.seconds:.1f} s from the death to the end of the next step, most of it to start"
        f" processes;\n             {repeated or 'no'} iteration{'' if repeated == 1 else 's'} repeated\n",
        highlight=False,
    )
    console.print(f"loss   undisturbed  killed at {died}", highlight=False)
    for number, (one, other) in outcome.losses.items():
        marks = ["differs"] * (number in outcome.differ or one != other) + ["<- goes on here"] * (number == step)
        console.print(f"{number:>4} {one:>13.6f} {other:>13.6f}   {' '.join(marks)}".rstrip(), highlight=False)
    count = died + AFTER - step
    if outcome.equal:
        console.print(
            f"EQUAL: {count} losses, and all state of all ranks after each of these iterations, are bit for bit\n"
            f"those of a run that nobody disturbed ({outcome.tensors:,} tensors by SHA-256); so are the node's"
            f" {outcome.versions.equal}\nversions since then.", highlight=False,
        )
        return True
    versions = outcome.versions
    console.print(
        f"NOT EQUAL: of {count} iterations {len(outcome.differ)} are not those of a run that nobody disturbed; of the"
        f" node's versions\nsince then {versions.equal} are equal, {len(versions.differing)} differ,"
        f" {len(versions.unpublished)} were not published.", highlight=False,
    )
    return False
