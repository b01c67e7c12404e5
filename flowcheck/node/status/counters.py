"""What a node counts of itself: sums over its events, for metrics and the status page.

    tally = Tally(name);  say = tally.counting(say)     every event goes on as before, and is counted
    tally.document()                                  all of it, as plain data: docs/reference/metrics.md has the units

Counting an event takes microseconds on the thread that says it, and keeps a bounded number of rows: the last ROWS
iterations of each group, and the last EVENTS events that ask for somebody. Any thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

from flowcheck.errors import of_the_machine, said_of
from flowcheck.node.status.event_log import Events, shown
from flowcheck.node.status.group_tally import MOST_TEXT, ROWS, GroupTally
from flowcheck.node.status.problems import Wrong

__all__ = ["EVENTS", "Tally"]

EVENTS = 64
MOST_GROUPS = 16  # groups that are kept; a node follows fewer, but they may change
MOST_NAMES = 1024  # names whose events are counted: a holder has one for each shard that it copies

# Events that say nothing that somebody would have to read.
QUIET = frozenset({
    "iteration", "times", "placing", "updating", "written", "gathered", "stored", "copied", "protected", "peers",
    "ranges", "capture", "journaled", "base",
    "connection",  # anybody can cause that without a token, and would push out what somebody has to read
})


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

    def counting(self, say: Callable[..., None]) -> Callable[..., None]:
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


def _text(fields: Mapping[str, Any]) -> str:
    """What a line of the log says, without the name."""
    said = [
        str(value) if key in ("why", "text") else shown(key, value)
        for key, value in fields.items()
        if key not in ("name", "job") and value is not None and value not in ("", [], {})
    ]
    return " ".join(", ".join(said).split())[:MOST_TEXT]
