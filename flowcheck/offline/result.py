"""What flowcheck.replay and flowcheck.inspect return: plain data about a replay or a capture, and where its files lie.

Everything is read off report.json (docs/reference/report.md) and the files of the replay; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowcheck.checkpoint.state import Checkpoint, load_checkpoint
from flowcheck.errors import UserError
from flowcheck.offline.gradients import gradients_path, read_gradients

__all__ = ["Inspection", "Iteration", "Missing", "Result", "result_of"]


@dataclass(frozen=True)
class Missing:
    """Elements [start, end) of a gradient bucket that were not placed."""

    bucket: int
    start: int
    end: int

    @property
    def elements(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, repr=False)
class Iteration:
    """One iteration as it was judged.

    number: counted from the communicator's birth.
    complete: every byte was placed and is accounted for.
    published: a version of the model was built from it, or would have been if the job had an optimizer.
    elements: of all its buckets. missing: ranges that were not placed. causes: missing elements by cause.
    failing: clauses of the verdict that do not hold, {name: reason}.
    """

    number: int
    complete: bool
    published: bool
    elements: int
    missing: tuple[Missing, ...]
    causes: Mapping[str, int]
    failing: Mapping[str, str]

    def __repr__(self) -> str:
        if not self.failing and not self.missing:
            return f"Iteration({self.number}: complete, {self.elements:,} elements)"
        lost = sum(part.elements for part in self.missing)
        why = "; ".join(f"{name}: {reason}" for name, reason in self.failing.items())
        said = "complete" if self.complete else "incomplete"
        return f"Iteration({self.number}: {said}, {lost:,} of {self.elements:,} elements missing; {why})"


@dataclass(frozen=True, repr=False)
class Result:
    """What a replay brought. Made by `flowcheck.replay`.

    ok: every iteration asked for is complete and nothing else failed. failure: why not, or "".
    iterations: as they were judged, in order.
    unproven: what the result rests on besides the wire and the manifest; empty: nothing was left unchecked.
    out: where checkpoints, report.json and kept gradients lie. Without `out=` a directory that goes with this object.
    checkpoint: the newest complete version's directory, or None. parameters: the same of a job that gathers parameters.
    report: report.json as it was written.
    """

    ok: bool
    failure: str
    iterations: tuple[Iteration, ...]
    unproven: tuple[str, ...]
    out: Path
    checkpoint: Path | None
    parameters: Path | None
    report: Mapping[str, Any]
    _kept: bool = False

    @property
    def missing(self) -> tuple[tuple[int, Missing], ...]:
        """(iteration, range) of everything that was not placed."""
        return tuple((iteration.number, part) for iteration in self.iterations for part in iteration.missing)

    def gradients(self, iteration: int) -> dict[str, torch.Tensor]:
        """{parameter: reduced gradient} of an iteration; {"bucket.K": values} where the job does not say what lies in
        bucket K. Values and dtype are those of the wire. A tensor that lacks an element is not in it.

        Raises UserError: the replay was not asked to keep gradients, has no such iteration, or refuted its manifest.
        """
        if not self._kept:
            raise UserError(
                "the gradients were not kept", where="flowcheck.replay", remedy="replay again with gradients=True"
            )
        numbers = [one.number for one in self.iterations]
        if iteration not in numbers:
            raise UserError(
                f"iteration {iteration} was not replayed", where=str(self.out),
                remedy=f"one of {numbers[0]} to {numbers[-1]}",
            )
        path = gradients_path(self.out, iteration)
        if not path.exists():
            raise UserError(
                f"the gradients were withdrawn: {self.failure}", where=str(path),
                remedy="correct the job manifest and replay again",
            )
        return read_gradients(path)

    def load(self) -> Checkpoint:
        """The newest complete version: the replica's state after the last iteration that could be published.

        Raises UserError if nothing was written.
        """
        path = self.checkpoint or self.parameters
        if path is None:
            raise UserError(
                f"no checkpoint was written{f': {self.failure}' if self.failure else ''}", where=str(self.out),
                remedy="see `notes` of the report, and the clauses of each iteration",
            )
        return load_checkpoint(path)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`load().state_dict()`."""
        return self.load().state_dict()

    def optimizer_state_dict(self) -> dict[str, Any]:
        """`load().optimizer_state_dict()`."""
        return self.load().optimizer_state_dict()

    def __repr__(self) -> str:
        complete = sum(iteration.complete for iteration in self.iterations)
        parts = [f"{complete} of {len(self.iterations)} iterations complete"]
        parts += [f"unproven: {'; '.join(self.unproven)}"] if self.unproven else []
        parts += [f"failed: {self.failure}"] if self.failure else []
        parts += [str(self.checkpoint or self.parameters or f"no checkpoint in {self.out}")]
        return f"Result({'ok' if self.ok else 'NOT OK'}: {', '.join(parts)})"


def result_of(report: Mapping[str, Any], failure: str, out: Path, kept: bool) -> Result:
    """report: as report.json has it. kept: gradients were."""
    written = [report["checkpoint"], report["parameter_checkpoint"]]
    checkpoint, parameters = [None if one is None else Path(one["path"]) for one in written]
    return Result(
        report["ok"], failure, tuple(_iteration(one) for one in report["iterations"]), tuple(report["unproven"]), out,
        checkpoint, parameters, report, kept,
    )


def _iteration(said: Mapping[str, Any]) -> Iteration:
    causes: dict[str, int] = {}
    missing: list[Missing] = []
    for bucket in said["buckets"]:
        reach = 0
        for start, end in [*((part["start"], part["end"]) for part in bucket["placed"]), (bucket["elements"],) * 2]:
            if start > reach:
                missing.append(Missing(bucket["index"], reach, start))
            reach = end
        for cause, count in bucket["missing"].items():
            causes[cause] = causes.get(cause, 0) + count
    verdict = said["verdict"]
    return Iteration(
        said["iteration"], verdict["complete"], verdict["publishable"], sum(b["elements"] for b in said["buckets"]),
        tuple(missing), causes, {one["clause"]: one["reason"] for one in verdict["failing"]},
    )


@dataclass(frozen=True, repr=False)
class Inspection:
    """What is in captures, with no job given. Made by `flowcheck.inspect`.

    document: all of it, in the form of `flowcheck inspect --json` (docs/use/inspect.md has every key).
    """

    document: Mapping[str, Any]

    @property
    def connections(self) -> list[dict[str, Any]]:
        """Pairs of flows, both directions captured, and what each is."""
        return list(self.document["connections"])

    @property
    def flows(self) -> list[dict[str, Any]]:
        """One direction of one queue pair each: addresses, protocol, messages, gaps."""
        return list(self.document["flows"])

    @property
    def notes(self) -> list[str]:
        """Sentences about what is odd or missing."""
        return [note["text"] for note in self.document["notes"]]

    @property
    def packets(self) -> Mapping[str, int]:
        """Packets by kind."""
        return dict(self.document["packets"])

    def __repr__(self) -> str:
        names = {flow["protocol"]["name"] for flow in self.flows if flow["protocol"] is not None}
        protocols = f" ({', '.join(sorted(names))})" if names else ""
        return (
            f"Inspection({len(self.document['captures'])} captures, {self.packets['roce']:,} RoCEv2 packets,"
            f" {len(self.connections)} connections{protocols}, {len(self.flows)} flows, {len(self.notes)} notes)"
        )
