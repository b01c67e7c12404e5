"""`flowcheck lab run --protect K+M`: M nodes are killed with all that they hold, then the job; it goes on from parity.

    settings = protected(config, every)                 tables of node.toml, for all members
    outcome = lose_nodes(run, job)                      job is attached and has trained; holders are there
    say(outcome, console) -> was everything equal

First the nodes with data are killed, one after the other, while training goes on; then holders, if M are more. Then all
ranks. New nodes know nothing; the ranks take what the members that are left can make. Compared are losses and the
SHA-256 of every tensor of every rank since the step from which the job went on. What happened when goes into RECORD,
beside what members said (events.jsonl): tools/lost_picture.py draws it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from lab.compare import Summary
from lab.fault import results
from lab.jobs import Training
from lab.run import LabRun
from lab.shape import FabricConfig

__all__ = ["BETWEEN", "EVERY", "RECORD", "LostNodes", "lose_nodes", "protected", "say"]

EVERY = 20  # of each 20th step there is parity: longer apart than a copy takes, or nodes copy different steps
BETWEEN = 2  # iterations that the job trains on after each death
AFTER = 10
RECORD = "lost.json"
SHOWN = 3  # losses that are printed: before that step, from it on, and the last ones; and those that differ


@dataclass(frozen=True)
class LostNodes:
    """lost: as `LabRun.lose` names them. died: the iteration in which the ranks were killed. step: from which the job
    went on; recovered: of each shard, in words. losses, differ, tensors, versions: as of fault.Outcome.

    Seconds. back: from the beginning of the recovery until all ranks had the state; whole: until all members had their
    pieces of one step again, which was step `again`; anew: from the start of one more holder in place of one that was
    lost to its parity, which no trainer notices."""

    parity: str
    lost: tuple[str, ...]
    died: int
    step: int
    recovered: tuple[str, ...]
    back: float
    whole: float
    again: int
    anew: float
    losses: Mapping[int, tuple[float, float]]
    differ: tuple[int, ...]
    tensors: int
    versions: Summary

    @property
    def equal(self) -> bool:
        return not self.differ and self.tensors > 0 and self.versions.all_equal


def protected(config: FabricConfig, every: int = EVERY) -> dict[str, dict[str, Any]]:
    """Tables of every member's node.toml."""
    return {
        "nodes": {"addresses": config.hosts},
        "protect": {"parity": f"{config.nodes}+{config.holders}", "every": every, "seconds": 0.2},
        "replica": {"slots": 4},
    }


def lose_nodes(run: LabRun, job: Training) -> LostNodes:
    """Ends the job, the nodes and the holders. Raises EnvironmentProblem where the job does not come back."""
    config, marks = run.fabric.config, list[dict[str, Any]]()

    def mark(who: str, what: str) -> None:
        marks.append({"time": round(time.time(), 3), "who": who, "what": what, "iteration": run.trained})

    mark("ranks", "train")
    run.train_until_parity(0, run.trained)
    members = [*(f"node {number}" for number in range(config.nodes)),
               *(f"holder {number}" for number in range(config.holders))]
    lost = tuple(members[: config.holders])
    for member in lost:
        run.lose(member)
        mark(member, "lost")
        run.train(BETWEEN)  # nothing of it waits for a node
    died, before = run.trained, results(run, job)
    mark("ranks", "lost")
    run.start_trainers_again()
    run.start_nodes(job)
    began = time.monotonic()
    run.begin(job, attach=True, recover=True)
    back = time.monotonic() - began
    mark("ranks", "train")
    step, texts = run.recovered[0]["step"], [one["text"] for one in run.recovered]
    run.start_holders()
    run.train_until_parity(1)
    whole, again = time.monotonic() - began, run.whole(1)
    run.train(max(0, died + AFTER - run.trained))
    run.lose(members[-1])
    mark(members[-1], "lost")
    began = time.monotonic()
    run.start_holders()
    run.train_until_parity(1, again)
    anew, last, after = time.monotonic() - began, run.trained, results(run, job)
    run.end()
    mark("ranks", "end")
    run.wait_for_nodes(last - 1)
    run.finish_nodes()
    run.finish_holders()
    run.ledger.over = True
    versions = run.ledger.summary()
    run.begin(job)
    run.train(last)
    run.end()
    undisturbed = results(run, job)
    differ = tuple(number for number in range(step, last) if after.get(number) != undisturbed[number])
    tensors = sum(len(part) for number in range(step, last) for rank in undisturbed[number][1] for part in rank)
    found = {**before, **after}
    losses = {number: (undisturbed[number][0], found[number][0]) for number in range(max(0, step - SHOWN), last)}
    (run.out / RECORD).write_text(json.dumps({
        "parity": f"{config.nodes}+{config.holders}", "members": members, "died": died, "step": step, "marks": marks,
        "undisturbed": {number: one[0] for number, one in undisturbed.items() if number < last},
        "before": {number: one[0] for number, one in before.items()},
        "after": {number: one[0] for number, one in after.items()},
    }))
    return LostNodes(f"{config.nodes}+{config.holders}", lost, died, step, tuple(texts), back, whole, again, anew,
                     losses, differ, tensors, versions)


def say(outcome: LostNodes, console: Console) -> bool:
    """The losses side by side, and what was shown, in numbers."""

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    line(f"\nprotected    parity {outcome.parity}; {' and '.join(outcome.lost)} killed -9 with all that they held, then"
         f" all ranks\n             before iteration {outcome.died}")
    for number, text in enumerate(outcome.recovered):
        line(f"{'' if number else 'back':<12} {text}")
    line(f"             {outcome.back:.1f} s until training went on; {outcome.whole:.1f} s until all members had"
         f" their pieces\n             of one step again, step {outcome.again}"
         f"\nanew         a holder was lost and replaced: {outcome.anew:.1f} s from its start to its parity, while"
         f" training\n             went on\n")
    line(f"{'loss':<4} {'undisturbed':>13} {'nodes lost':>13}")
    numbers = list(outcome.losses)
    left_out = [number for number in numbers[2 * SHOWN : -SHOWN] if number not in outcome.differ]
    for number, (one, other) in outcome.losses.items():
        if number in left_out[1:]:
            continue
        if number in left_out:
            line("   .             .             .")
            continue
        marks = ["differs"] * (number in outcome.differ or one != other) + ["<- goes on here"] * (
            number == outcome.step)
        line(f"{number:>4} {one:>13.6f} {other:>13.6f}   {' '.join(marks)}".rstrip())
    versions = outcome.versions
    if outcome.equal:
        line(f"EQUAL: losses and all state of all ranks since step {outcome.step} are bit for bit those of a run that"
             f" nobody\ndisturbed ({outcome.tensors:,} tensors by SHA-256); so are the nodes' {versions.equal} versions"
             " since then.")
        return True
    line(f"NOT EQUAL: {len(outcome.differ)} iterations are not those of a run that nobody disturbed; of the nodes'"
         f" versions since\nthen {versions.equal} are equal, {len(versions.differing)} differ,"
         f" {len(versions.unpublished)} were not published.")
    return False
