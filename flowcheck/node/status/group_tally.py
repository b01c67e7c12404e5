"""What a node counts of one group, from its events: of its job, its versions, its pace, its failures.

    tally = GroupTally(name)
    tally.hear(event, now, fields)       an event of this group
    tally.document(rows)                 plain data: docs/reference/metrics.md has the units

Each part has fields of the document, and a method `_EVENT` for each event that changes them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowcheck.job.clock import Clock
from flowcheck.job.version_status import DIVERGED, VersionStatus

__all__ = ["BUCKETS", "CONDITIONS", "MOST_TEXT", "ROWS", "STAGES", "GroupTally"]

ROWS = 48
FAILURES = 16
MOST_TEXT = 600  # characters of a sentence that are kept

# Of an iteration, in this order; the fields of `times` at which each ends.
STAGES = {"receive": "last", "telemetry": "measured", "place": "covered", "record": "record", "update": "applied",
          "publish": "published"}
BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # seconds

# A condition of a group holds from one event until another of its group.
CONDITIONS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "silent": (frozenset({"silent"}), frozenset({"mirror_back", "attached", "end"})),
    "behind": (frozenset({"behind"}), frozenset({"on_time", "attached", "end"})),
    "overload": (frozenset({"overload"}), frozenset({"recovered", "attached", "end"})),
    "stale": (frozenset({"stale", "begun"}), frozenset({"patched", "caught_up", "state", "attached", "end"})),
    "lost": (frozenset({"lost"}), frozenset({"patched", "caught_up", "state", "attached", "end"})),
    "withheld": (frozenset({"withheld"}), frozenset({"offered", "attached", "end"})),
    "refused": (frozenset({"job_refused"}), frozenset({"attached", "end"})),
}


@dataclass
class _Stage:
    """A histogram: counts[i]: spans of at most BUCKETS[i]; the last: of any length."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    sum: float = 0.0

    def add(self, seconds: float) -> None:
        self.sum += seconds
        for i, bound in enumerate(BUCKETS):
            if seconds <= bound:
                self.counts[i] += 1
        self.counts[-1] += 1


@dataclass
class _Job:
    """The job that is followed. manifest: of one that no trainer attaches. refused: when, since it is attached and
    has a version."""

    job: str = ""
    epoch: int = 0
    ranks: int = 0
    flows: int = 0
    attached: float = 0.0
    ended: bool = False
    resync: str = ""
    manifest: str = ""
    refused: float = 0.0

    def _attached(self, now: float, said: Mapping[str, Any]) -> None:
        self.job, self.epoch, self.ranks, self.flows = said["run_id"], said["epoch"], said["ranks"], said["flows"]
        self.attached, self.resync, self.ended, self.refused = now, said["resync"], False, 0.0
        self.manifest = said.get("manifest", "")

    def _incomplete(self, now: float, said: Mapping[str, Any]) -> None:
        self.ranks, self.ended = said["ranks"], False

    def _refused(self, now: float, said: Mapping[str, Any]) -> None:
        self.refused = now

    def _iteration(self, now: float, said: Mapping[str, Any]) -> None:
        if said["published"] and not self.manifest:
            self.refused = 0.0

    def _end(self, now: float, said: Mapping[str, Any]) -> None:
        self.ended = True


@dataclass
class _Versions:
    """The newest version, and what is written of it."""

    kept: dict[str, Any] | None = None
    status: str = "waiting"
    step: int = 0
    step_time: float = 0.0
    verified: int | None = None
    stale: int = 0
    lag: int = 0
    matches: int = 0
    checkpoint: dict[str, Any] = field(default_factory=lambda: {"step": 0, "time": 0.0})
    parameters: dict[str, Any] = field(default_factory=lambda: {"step": 0, "time": 0.0})

    def __post_init__(self) -> None:
        self._job = ""
        self._gathers = False  # parameters alone, which are no version

    def _attached(self, now: float, said: Mapping[str, Any]) -> None:
        if said["run_id"] != self._job:  # what the job before it had is as old as that job
            self.step, self.step_time, self.lag, self.checkpoint = 0, 0.0, 0, {"step": 0, "time": 0.0}
            self.verified = None
            self.parameters = {"step": 0, "time": 0.0}
        self._job, self._gathers = said["run_id"], bool(said.get("manifest"))
        self.status, self.stale, self.matches = "waiting", 0, 0

    def _kept(self, now: float, said: Mapping[str, Any]) -> None:
        if self.kept is None or said["step"] > self.kept["step"]:
            self.kept = {"job": said["run_id"], "step": said["step"]}

    def _iteration(self, now: float, said: Mapping[str, Any]) -> None:
        self.status, self.stale, self.lag, self.matches = said["status"], said["stale"], said["lag"], said["matches"]
        if said["published"] and not self._gathers:
            self.step, self.step_time, self.kept = Clock().after(said["iteration"]), now, None
            self.verified = self.step if VersionStatus.of(self.status).verified else self.verified

    def _state(self, now: float, said: Mapping[str, Any]) -> None:
        self.status = "unverified"

    def _diverged(self, now: float, said: Mapping[str, Any]) -> None:
        self.status, self.verified = DIVERGED, said["verified"]

    def _job_refused(self, now: float, said: Mapping[str, Any]) -> None:
        self.status = "refused"

    def _lost(self, now: float, said: Mapping[str, Any]) -> None:
        self.status = "lost"

    def _written(self, now: float, said: Mapping[str, Any]) -> None:
        self.checkpoint = {"step": said["step"], "time": now}

    def _gathered(self, now: float, said: Mapping[str, Any]) -> None:
        self.parameters = {"step": said["step"], "time": now}


@dataclass
class _Sums:
    """Of all iterations."""

    patched: int = 0
    sampled: int = 0
    counts: dict[str, int] = field(default_factory=lambda: {
        "published": 0, "not_published": 0, "packets": 0, "placed": 0, "duplicates": 0, "healed": 0,
    })
    clauses: dict[str, int] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    filled: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=lambda: {"trainers": 0, "peers": 0})

    def _iteration(self, now: float, said: Mapping[str, Any]) -> None:
        counts = self.counts
        counts["published" if said["published"] else "not_published"] += 1
        for name in ("packets", "placed", "duplicates", "healed"):
            counts[name] += max(said[name], 0)
        for clause in said["failed"]:
            self.clauses[clause] = self.clauses.get(clause, 0) + 1
        _add(self.missing, said["missing"])
        _add(self.filled, said["filled"])
        self.patched += said["patched"]
        self.sampled += said.get("sampled", 0)

    def _ranges(self, now: float, said: Mapping[str, Any]) -> None:
        self.asked["trainers"] += said["bytes"]

    def _peers(self, now: float, said: Mapping[str, Any]) -> None:
        self.asked["peers"] += said["bytes"]


@dataclass
class _Pace:
    """How long iterations take, and what waits."""

    slack: float | None = None
    late: int = 0
    rings: tuple[int, int] = (0, 0)
    arenas: tuple[int, int] = (0, 0)
    stages: dict[str, _Stage] = field(default_factory=lambda: {stage: _Stage() for stage in STAGES})

    def _attached(self, now: float, said: Mapping[str, Any]) -> None:
        self.slack = None

    def _times(self, now: float, said: Mapping[str, Any]) -> None:
        waited, size = said["rings"]  # size: 1 where nothing has waited
        self.rings, self.arenas = (waited, max(size, self.rings[1])), tuple(said["arenas"])
        begin = 0.0
        for stage, key in STAGES.items():
            end = said[key]
            if end is not None:
                self.stages[stage].add(max(end - begin, 0.0) / 1e3)
                begin = max(begin, end)
        if said["slack"] is not None:
            self.slack = said["slack"] / 1e3
            self.late += self.slack < 0


@dataclass
class _Journal:
    """What is kept of its iterations. holes: by cause. bytes, seconds: of those that are written, from the copy in
    memory to the whole entry. back: steps that can be had at all times. base: step of the newest base, 0: there is
    none."""

    journal: dict[str, Any] = field(default_factory=lambda: {
        "entries": 0, "bytes": 0, "seconds": 0.0, "room": 0, "back": 0, "base": 0, "holes": {}, "hole": None})

    def _attached(self, now: float, said: Mapping[str, Any]) -> None:
        self.journal |= {"room": 0, "back": 0, "base": 0, "hole": None}

    def _journal(self, now: float, said: Mapping[str, Any]) -> None:
        self.journal |= {"room": said["entries"], "back": said["back"]}

    def _journaled(self, now: float, said: Mapping[str, Any]) -> None:
        self.journal["entries"] += 1
        self.journal["bytes"] += said["bytes"]
        self.journal["seconds"] += said["seconds"]

    def _base(self, now: float, said: Mapping[str, Any]) -> None:
        self.journal["base"] = said["step"]

    def _hole(self, now: float, said: Mapping[str, Any]) -> None:
        _add(self.journal["holes"], {said["cause"]: said["last"] - said["iteration"] + 1})
        self.journal["hole"] = {name: said[name] for name in ("iteration", "last", "cause", "why")}


@dataclass
class _Failures:
    """Of the job, that it came back from."""

    failures: dict[str, Any] = field(default_factory=lambda: {"count": 0, "seconds": 0.0, "repeated": 0})
    failed: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=FAILURES))

    def _job_recovered(self, now: float, said: Mapping[str, Any]) -> None:
        self.failures["count"] += 1
        self.failures["seconds"] += said["seconds"]
        self.failures["repeated"] += said["repeated"]
        self.failed.append(dict(said))


@dataclass
class _Rows:
    """The last iterations, by number."""

    rows: OrderedDict[int, dict[str, Any]] = field(default_factory=OrderedDict)

    def _attached(self, now: float, said: Mapping[str, Any]) -> None:
        self.rows.clear()

    def _iteration(self, now: float, said: Mapping[str, Any]) -> None:
        row = self._row(said["iteration"])
        row["published"], row["missing"], row["filled"] = said["published"], said["missing"], said["filled"]
        row["why"] = "; ".join(reason for _, reason in said["why"])[:MOST_TEXT]

    def _times(self, now: float, said: Mapping[str, Any]) -> None:
        self._row(said["iteration"])["times"] = {key: said[key] for key in ("first", *STAGES.values(), "next")}

    def _row(self, iteration: int) -> dict[str, Any]:
        row = self.rows.setdefault(iteration, {"iteration": iteration})
        while len(self.rows) > ROWS:
            self.rows.popitem(last=False)
        return row


_PARTS = (_Job, _Versions, _Sums, _Pace, _Journal, _Failures, _Rows)


class GroupTally:
    def __init__(self, name: str) -> None:
        self._name = name
        self._parts = [part() for part in _PARTS]
        self._since: dict[str, float] = {}  # by condition

    def hear(self, event: str, now: float, fields: Mapping[str, Any]) -> None:
        """An event of this group."""
        for condition, (begins, ends) in CONDITIONS.items():
            if event == "begun" and not fields["elements"]:
                continue  # from a version that is here
            if event in begins:
                self._since.setdefault(condition, now)
            elif event in ends:
                self._since.pop(condition, None)
        for part in self._parts:
            handle = getattr(part, f"_{event}", None)
            if callable(handle):
                handle(now, fields)

    @staticmethod
    def follows(event: str) -> bool:
        """It is of a group that this node follows, and not of copies, say, that it holds of others' shards."""
        return any(hasattr(part, f"_{event}") for part in _PARTS) or any(
            event in begins | ends for begins, ends in CONDITIONS.values())

    def document(self, rows: int) -> dict[str, Any]:
        """Plain data that nobody changes any more, with the last so many iterations."""
        found: dict[str, Any] = {"name": self._name, "since": dict(self._since)}
        for part in self._parts:
            found |= {name: dict(value) if isinstance(value, dict) else value
                      for name, value in vars(part).items() if not name.startswith("_")}
        stages = {name: {"counts": list(one.counts), "sum": one.sum} for name, one in found["stages"].items()}
        last = list(found["rows"].values())[-rows:] if rows else []
        journal = found["journal"] | {"holes": dict(found["journal"]["holes"])}
        return found | {"stages": stages, "journal": journal, "failed": list(found["failed"]),
                        "rows": [dict(row) for row in last]}


def _add(sums: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        sums[name] = sums.get(name, 0) + count
