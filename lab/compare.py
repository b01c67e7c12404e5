"""The replica against the trainers, bit for bit: their hashes of every tensor after every iteration, side by side.

    ledger = Ledger(stages)
    ledger.trainer(line)      a line of rankR.jsonl        ledger.node(line)     a line of the node's keep_hashes
    ledger.status(event)      ledger.state(event)          ledger.row(stage, iteration) -> Row;  ledger.summary()
    ledger.over = True        nothing more will be known: what nobody has said anything of is not published

Equal means: every rank of the stage has the same parameters and optimizer state, the node has published a version for
that iteration, and each of its tensors (parameters, buffers, optimizer state) has the first rank's SHA-256, with none
missing on either side. A version that is not there is "not published", never equal; only before the node's first
state there is nothing to publish. The summary counts rows, so that it says what they say. Lines may come in any order.
One thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Ledger", "Row", "Summary"]

Hashes = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Row:
    """One iteration of one stage. verdict: equal | differs | not published | waiting | no state yet (the node's first
    state is of a later one). why: names or clauses."""

    stage: int
    iteration: int
    verdict: str
    why: str = ""
    line: Mapping[str, Any] = field(default_factory=dict)  # of the stage's first rank
    status: Mapping[str, Any] = field(default_factory=dict)  # of the node
    tensors: int = 0


@dataclass(frozen=True)
class Summary:
    """All iterations that trainers finished, by the verdict of their rows."""

    published: int
    equal: int
    differing: list[Row]
    unpublished: list[Row]
    before: int  # iterations before the node's first state: manifest and state were on their way
    tensors: int

    @property
    def all_equal(self) -> bool:
        return self.equal > 0 and not self.differing and not self.unpublished


class Ledger:
    """ranks, names: for each stage (or other group of the job) how many ranks there are, one number for all of them or
    one each, and under which name the node knows it."""

    def __init__(self, ranks: int | Sequence[int], names: list[str]) -> None:
        self._ranks = [ranks] * len(names) if isinstance(ranks, int) else list(ranks)
        self.names = names
        self._trainers: dict[tuple[int, int], dict[int, Mapping[str, Any]]] = defaultdict(dict)
        self._nodes: dict[tuple[int, int], Hashes] = {}
        self._status: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._states: dict[int, int] = {}  # stage -> iteration that its first state precedes
        self.over = False

    def trainer(self, line: Mapping[str, Any]) -> None:
        self._trainers[line["stage"], line["iteration"]][line["rank"]] = line

    def node(self, line: Mapping[str, Any]) -> None:
        self._nodes[self._stage(line), line["iteration"]] = line

    def status(self, event: Mapping[str, Any]) -> None:
        self._status[self._stage(event), event["iteration"]] = event

    def state(self, event: Mapping[str, Any]) -> None:
        """The node has taken a state: versions begin with this iteration."""
        stage = self._stage(event)
        self._states[stage] = min(event["iteration"], self._states.get(stage, event["iteration"]))

    def _stage(self, line: Mapping[str, Any]) -> int:
        return self.names.index(line["name"]) if len(self.names) > 1 else 0

    def iterations(self, stage: int) -> list[int]:
        """Iterations of which anything is known."""
        return sorted({i for s, i in (*self._trainers, *self._nodes, *self._status) if s == stage})

    def _first(self, stage: int) -> int | None:
        """The first iteration that the node could publish; None: it has no state yet."""
        return min([i for s, i in self._nodes if s == stage] + [i for s, i in self._states.items() if s == stage],
                   default=None)

    def ranks(self, stage: int, iteration: int) -> list[Mapping[str, Any]]:
        """What each rank has said of an iteration, by rank."""
        return [line for _, line in sorted(self._trainers.get((stage, iteration), {}).items())]

    def row(self, stage: int, iteration: int) -> Row:
        ranks = self._trainers.get((stage, iteration), {})
        version = self._nodes.get((stage, iteration))
        status = self._status.get((stage, iteration), {})
        first = ranks[min(ranks)] if ranks else {}

        def row(verdict: str, why: str = "", tensors: int = 0) -> Row:
            return Row(stage, iteration, verdict, why, first, status, tensors)

        if len(ranks) < self._ranks[stage]:
            return row("waiting", "trainers")
        for rank, line in ranks.items():
            # DDP's buffers are those of the first rank: it broadcasts them before the next forward
            if wrong := _differences(line, first, line["buffers"]):
                return row("differs", f"rank {rank} is not as rank {min(ranks)}: {wrong}")
        if version is None:
            begins = self._first(stage)
            if begins is None:
                return row("no state yet" if self.over else "waiting", "" if self.over else "node")
            if iteration < begins:
                return row("no state yet")
            if status and not status.get("published"):
                return row("not published", _clauses(status))
            return row("not published", "the node has not said why") if self.over else row("waiting", "node")
        if wrong := _differences(version, first):
            return row("differs", wrong)
        return row("equal", tensors=len(first["tensors"]) + len(first["optimizer"]))

    def summary(self) -> Summary:
        """As of now: what the node has not said anything about counts as not published, if it has had a state."""
        found: dict[str, list[Row]] = defaultdict(list)
        for stage in range(len(self.names)):
            for iteration in self.iterations(stage):
                row = self.row(stage, iteration)
                verdict = row.verdict
                if verdict == "waiting" and row.why == "node":
                    verdict = "no state yet" if self._first(stage) is None else "not published"
                found[verdict].append(row)
        tensors = sum(row.tensors for row in found["equal"])
        return Summary(len(self._nodes), len(found["equal"]), found["differs"], found["not published"],
                       len(found["no state yet"]), tensors)


def _differences(one: Hashes, other: Hashes, ignored: Sequence[str] = ()) -> str:
    """Names whose hashes differ or that only one side has, the first few."""
    names = [
        name
        for part in ("tensors", "optimizer")
        for name in sorted(one[part].keys() | other[part].keys())
        if one[part].get(name) != other[part].get(name) and name not in ignored
    ]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _clauses(status: Mapping[str, Any]) -> str:
    """Why the node did not publish, in its own clauses."""
    failed = status.get("failed") or status.get("why") or []
    return ", ".join(dict.fromkeys(one if isinstance(one, str) else str(one[0]) for one in failed))
