"""What a node counts of itself: sums over its events, for metrics and the status page.

    tally = Tally(name);  say = tally.beside(say)     every event goes on as before, and is counted
    tally.document()                                  all of it, as plain data: docs/reference/metrics.md has the units

Counting an event takes microseconds on the thread that says it, and keeps a bounded number of rows: the last ROWS
iterations of each group, and the last EVENTS events that ask for somebody. Any thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowcheck.errors import of_the_machine, said_of
from flowcheck.job.clock import Clock
from flowcheck.job.version_status import DIVERGED, VersionStatus
from flowcheck.node.status.event_log import Events, shown
from flowcheck.node.status.problems import Wrong

__all__ = ["BUCKETS", "CONDITIONS", "STAGES", "GroupTally", "Tally"]

ROWS = 48
EVENTS = 64
FAILURES = 16
MOST_GROUPS = 16  # groups that are kept; a node follows fewer, but they may change
MOST_NAMES = 1024  # names whose events are counted: a holder has one for each shard that it copies
MOST_TEXT = 600  # characters of an event's sentence that are kept

# Of an iteration, in this order; the fields of `times` at which each ends.
STAGES = {"receive": "last", "place": "covered", "record": "record", "update": "applied", "publish": "published"}
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
# Events that say nothing that somebody would have to read.
QUIET = frozenset({
    "iteration", "times", "placing", "updating", "written", "gathered", "stored", "copied", "protected", "peers",
    "ranges", "capture",
    "connection",  # anybody can cause that without a token, and would push out what somebody has to read
})


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
class GroupTally:
    """Of one group. Names are those of the document."""

    name: str
    job: str = ""
    epoch: int = 0
    ranks: int = 0
    flows: int = 0
    attached: float = 0.0
    ended: bool = False
    resync: str = ""
    kept: dict[str, Any] | None = None
    status: str = "waiting"
    step: int = 0
    step_time: float = 0.0
    verified: int | None = None
    stale: int = 0
    lag: int = 0
    matches: int = 0
    slack: float | None = None
    late: int = 0
    rings: tuple[int, int] = (0, 0)
    arenas: tuple[int, int] = (0, 0)
    patched: int = 0
    sampled: int = 0
    counts: dict[str, int] = field(default_factory=lambda: {
        "published": 0, "not_published": 0, "packets": 0, "placed": 0, "duplicates": 0, "healed": 0,
    })
    clauses: dict[str, int] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    filled: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=lambda: {"trainers": 0, "peers": 0})
    checkpoint: dict[str, Any] = field(default_factory=lambda: {"step": 0, "time": 0.0})
    manifest: str = ""  # of a job that no trainer attaches
    parameters: dict[str, Any] = field(default_factory=lambda: {"step": 0, "time": 0.0})
    failures: dict[str, Any] = field(default_factory=lambda: {"count": 0, "seconds": 0.0, "repeated": 0})
    refused: float = 0.0  # when, since it is attached and has a version
    failed: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=FAILURES))
    stages: dict[str, _Stage] = field(default_factory=lambda: {stage: _Stage() for stage in STAGES})
    since: dict[str, float] = field(default_factory=dict)
    rows: OrderedDict[int, dict[str, Any]] = field(default_factory=OrderedDict)

    def hear(self, event: str, now: float, fields: Mapping[str, Any]) -> None:
        """An event of this group."""
        for condition, (begins, ends) in CONDITIONS.items():
            if event == "begun" and not fields["elements"]:
                continue  # from a version that is here
            if event in begins:
                self.since.setdefault(condition, now)
            elif event in ends:
                self.since.pop(condition, None)
        handle = getattr(self, f"_{event}", None)
        if handle is not None:
            handle(now, fields)

    @classmethod
    def follows(cls, event: str) -> bool:
        """It is of a group that this node follows, and not of copies, say, that it holds of others' shards."""
        return hasattr(cls, f"_{event}") or any(event in begins | ends for begins, ends in CONDITIONS.values())

    def _attached(self, now: float, said: Mapping[str, Any]) -> None:
        if said["run_id"] != self.job:  # what the job before it had is as old as that job
            self.step, self.step_time, self.lag, self.checkpoint = 0, 0.0, 0, {"step": 0, "time": 0.0}
            self.verified = None
            self.parameters = {"step": 0, "time": 0.0}
        self.job, self.epoch, self.ranks, self.flows = said["run_id"], said["epoch"], said["ranks"], said["flows"]
        self.attached, self.resync, self.ended, self.refused = now, said["resync"], False, 0.0
        self.status, self.stale, self.slack, self.matches = "waiting", 0, None, 0
        self.manifest = said.get("manifest", "")
        self.rows.clear()

    def _incomplete(self, now: float, said: Mapping[str, Any]) -> None:
        self.ranks, self.ended = said["ranks"], False

    def _refused(self, now: float, said: Mapping[str, Any]) -> None:
        self.refused = now

    def _end(self, now: float, said: Mapping[str, Any]) -> None:
        self.ended = True

    def _kept(self, now: float, said: Mapping[str, Any]) -> None:
        if self.kept is None or said["step"] > self.kept["step"]:
            self.kept = {"job": said["run_id"], "step": said["step"]}

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
        self.status, self.stale, self.lag, self.matches = said["status"], said["stale"], said["lag"], said["matches"]
        if said["published"] and not self.manifest:
            self.step, self.step_time, self.kept, self.refused = Clock().after(said["iteration"]), now, None, 0.0
            self.verified = self.step if VersionStatus.of(self.status).verified else self.verified
        row = self._row(said["iteration"])
        row["published"], row["missing"], row["filled"] = said["published"], said["missing"], said["filled"]
        row["why"] = "; ".join(reason for _, reason in said["why"])[:MOST_TEXT]

    def _times(self, now: float, said: Mapping[str, Any]) -> None:
        waited, size = said["rings"]  # size: 1 where nothing has waited
        self.rings, self.arenas = (waited, max(size, self.rings[1])), tuple(said["arenas"])
        row = self._row(said["iteration"])
        row["times"] = {key: said[key] for key in ("first", *STAGES.values(), "next")}
        begin = 0.0
        for stage, key in STAGES.items():
            end = said[key]
            if end is not None:
                self.stages[stage].add(max(end - begin, 0.0) / 1e3)
                begin = max(begin, end)
        if said["slack"] is not None:
            self.slack = said["slack"] / 1e3
            self.late += self.slack < 0

    def _state(self, now: float, said: Mapping[str, Any]) -> None:
        self.status = "unverified"

    def _diverged(self, now: float, said: Mapping[str, Any]) -> None:
        self.status, self.verified = DIVERGED, said["verified"]

    def _job_refused(self, now: float, said: Mapping[str, Any]) -> None:
        self.status = "refused"

    def _lost(self, now: float, said: Mapping[str, Any]) -> None:
        self.status = "lost"

    def _ranges(self, now: float, said: Mapping[str, Any]) -> None:
        self.asked["trainers"] += said["bytes"]

    def _peers(self, now: float, said: Mapping[str, Any]) -> None:
        self.asked["peers"] += said["bytes"]

    def _written(self, now: float, said: Mapping[str, Any]) -> None:
        self.checkpoint = {"step": said["step"], "time": now}

    def _gathered(self, now: float, said: Mapping[str, Any]) -> None:
        self.parameters = {"step": said["step"], "time": now}

    def _job_recovered(self, now: float, said: Mapping[str, Any]) -> None:
        self.failures["count"] += 1
        self.failures["seconds"] += said["seconds"]
        self.failures["repeated"] += said["repeated"]
        self.failed.append(dict(said))

    def _row(self, iteration: int) -> dict[str, Any]:
        row = self.rows.setdefault(iteration, {"iteration": iteration})
        while len(self.rows) > ROWS:
            self.rows.popitem(last=False)
        return row

    def document(self, rows: int) -> dict[str, Any]:
        """Plain data that nobody changes any more, with the last so many iterations."""
        told = {name: value for name, value in vars(self).items() if name not in ("stages", "rows", "failed")}
        told = {name: dict(value) if isinstance(value, dict) else value for name, value in told.items()}
        stages = {name: {"counts": list(one.counts), "sum": one.sum} for name, one in self.stages.items()}
        last = list(self.rows.values())[-rows:] if rows else []
        return told | {"stages": stages, "failed": list(self.failed), "rows": [dict(row) for row in last]}


class Tally:
    """name: the node's. clock: seconds since 1970."""

    def __init__(self, name: str, clock: Callable[[], float] = time.time) -> None:
        self._name, self._clock = name, clock
        self._lock = threading.Lock()
        self._broken = False
        self._started = clock()
        self._groups: OrderedDict[str, GroupTally] = OrderedDict()
        self._names: OrderedDict[str, None] = OrderedDict()  # the one that was heard last comes last
        self._counts: dict[str, dict[str, int]] = {}
        self._replaced: dict[str, dict[str, int]] = {}  # processes that were, by cause
        self._wrong = Wrong()
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS)

    def beside(self, say: Callable[..., None]) -> Callable[..., None]:
        """say, and count; also what an Events says by itself."""

        def count(event: str, fields: Mapping[str, Any]) -> None:
            try:
                self.hear(event, fields)
            except Exception as error:  # whatever is wrong with counting, what is counted goes on
                if not self._broken:
                    self._broken = True
                    ours = "" if of_the_machine(error) is not None else ". This is a bug: report this line"
                    say("problem", why=f"the event {event} could not be counted: {said_of(error)}; metrics and the"
                                       f" status page may be wrong{ours}")

        def both(event: str, **fields: Any) -> None:
            say(event, **fields)
            count(event, fields)

        if isinstance(say, Events):
            say.also(count)
        return both

    def hear(self, event: str, fields: Mapping[str, Any]) -> None:
        now = self._clock()
        name = fields.get("name")
        with self._lock:
            self._wrong.hear(event, fields, now)
            if name:
                self._keep(name)
            if name is not None and (name in self._groups or GroupTally.follows(event)):
                self._group(name).hear(event, now, fields)
            if "process" in fields:
                causes = self._replaced.setdefault(fields["process"], {})
                causes[fields["cause"]] = causes.get(fields["cause"], 0) + 1
            of = self._counts.setdefault(event, {})
            of[name or ""] = of.get(name or "", 0) + 1
            if event not in QUIET:
                self._events.append({"event": event, "time": round(now, 3), "text": _text(fields)} | (
                    {} if name is None else {"name": name}))

    def _keep(self, name: str) -> None:
        self._names[name] = None
        self._names.move_to_end(name)
        while len(self._names) > MOST_NAMES:
            gone, _ = self._names.popitem(last=False)
            for of in self._counts.values():
                of.pop(gone, None)

    def _group(self, name: str) -> GroupTally:
        if name not in self._groups:
            while len(self._groups) >= MOST_GROUPS:
                self._groups.popitem(last=False)
            self._groups[name] = GroupTally(name)
        self._groups.move_to_end(name)
        return self._groups[name]

    def document(self, rows: int = ROWS, events: int = EVENTS) -> dict[str, Any]:
        """rows, events: the last so many."""
        with self._lock:
            groups = [group.document(rows) for group in self._groups.values()]
            counts = {event: dict(of) for event, of in self._counts.items()}
            last = list(self._events)[-events:] if events else []
            wrong = self._wrong.document(self._clock())
            replaced = {process: dict(causes) for process, causes in self._replaced.items()}
        return {
            "node": self._name, "started": self._started, "time": self._clock(),
            "groups": sorted(groups, key=lambda group: str(group["name"])), "counts": counts, "events": last,
            "wrong": wrong, "replaced": replaced,
        }


def _add(sums: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        sums[name] = sums.get(name, 0) + count


def _text(fields: Mapping[str, Any]) -> str:
    """What a line of the log says, without the name."""
    said = [
        str(value) if key in ("why", "text") else shown(key, value)
        for key, value in fields.items()
        if key not in ("name", "job") and value is not None and value not in ("", [], {})
    ]
    return " ".join(", ".join(said).split())[:MOST_TEXT]
