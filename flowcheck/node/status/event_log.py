"""What a node says: a line for each event on standard output, as text or as JSON, and the last of each in a file.
Lines of text begin with the time, in UTC, unless standard output is systemd's journal, which has it already.

    with Events(as_json, status_file) as say:
        say("attached", name="a", run_id="r")      on any thread; it never waits
    ...                                            in the end what is still to be written gets END_SECONDS

A terminal that was stopped, a log collector that hangs and a disk that does not answer hold up who prints. So a thread
of its own prints, and another one writes the file: who says an event follows a job and has no time for either. Lines
wait for at most MOST events; what comes then is counted, and the count is said (`events_dropped`) when lines are
taken again. The file needs no such bound: what is written next is what holds then. It has the last events of the node
and of the MOST_GROUPS groups that spoke last. What is said here by itself (lines that were not taken, a file that
cannot be written) goes to `also` as well, which counts it. Nothing here ends a node: neither a reader that has gone
nor a disk that is full.

Standard output is descriptor 1, and not Python's object: a thread that is held up inside that keeps its lock, and the
process could not end.
"""

from __future__ import annotations

import errno
import json
import os
import select
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flowcheck.durable import write_atomic
from flowcheck.errors import EnvironmentProblem

__all__ = ["END_SECONDS", "FORMER", "MOST", "MOST_GROUPS", "Events", "as_text", "shown"]

MOST = 10_000  # events that wait to be printed: minutes of them, and some megabytes
MOST_GROUPS = 256  # names whose last events are kept: a node follows fewer, but others may come, and copies have names
MOMENTS = frozenset({"detected", "restored", "resumed"})  # fields that are seconds since 1970
MOST_OWN = 16  # events of its own that wait for somebody who counts them
END_SECONDS = 5.0
STDOUT = 1
FORMER = {  # names that earlier releases had; a line says them as `was`, and the next release does not
    "group_abandoned": "let_go", "group_behind": "apart", "group_caught_up": "abreast", "job_recovered": "came_back",
    "events_dropped": "unsaid", "mirror_back": "heard", "holder_ready": "holding",
}
UNSAID = "standard output did not take events as fast as they came"


class Events:
    """Called by any thread. status_file: the last event of each kind and group, replaced whole."""

    def __init__(self, as_json: bool, status_file: Path | None) -> None:
        self._json, self._file = as_json, status_file
        self._stamps = not _in_journal()
        self._changed = threading.Condition(threading.RLock())
        self._lines: deque[tuple[str, int]] = deque()  # with how many events each stands for
        self._printing = False
        self._unsaid = 0  # events that found no room
        self._last: dict[str, Any] = {}
        self._jobs: dict[str, str] = {}  # run ids, by group
        self._spoke: OrderedDict[str, set[str]] = OrderedDict()  # by group: keys of _last; who spoke last comes last
        self._hear: Callable[[str, Mapping[str, Any]], None] | None = None
        self._own: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MOST_OWN)
        self._said, self._written = 0, 0  # events, and those that the file has
        self._closed = False
        for name, run in (("events", self._print_all), *([("status", self._keep)] if status_file is not None else [])):
            threading.Thread(target=run, name=f"flowcheck {name}", daemon=True).start()

    def __call__(self, event: str, **fields: Any) -> None:
        was = {"was": FORMER[event]} if event in FORMER else {}
        line = {"event": event, "time": round(time.time(), 3), **was, **fields}
        with self._changed:
            if event == "attached":
                self._jobs[fields["name"]] = fields["run_id"]
            elif "run_id" not in fields and fields.get("name") in self._jobs:
                line["job"] = self._jobs[fields["name"]]
            if self._file is not None:
                key = f"{event} {fields.get('name', '')}".strip()
                self._last[key] = json.loads(json.dumps(line))  # as it is now
                self._said += 1
                self._keep_keys(fields.get("name"), key)
            else:
                self._keep_keys(fields.get("name"))
            self._put(line)

    def also(self, hear: Callable[[str, Mapping[str, Any]], None]) -> None:
        """hear(event, fields): of each event that this says by itself, those before now too; on any thread."""
        with self._changed:
            self._hear, before = hear, list(self._own)
            self._own.clear()
        for event, fields in before:
            hear(event, fields)

    def _tell(self, event: str, **fields: Any) -> None:
        """Without the lock: who hears it may say something."""
        with self._changed:
            if (hear := self._hear) is None:
                self._own.append((event, fields))
        if hear is not None:
            hear(event, fields)

    def _keep_keys(self, name: str | None, *keys: str) -> None:
        """Of a group; the one that spoke longest ago goes if there are too many. Those of the node itself stay."""
        if not name:
            return
        self._spoke.setdefault(name, set()).update(keys)
        self._spoke.move_to_end(name)
        while len(self._spoke) > MOST_GROUPS:
            gone, of = self._spoke.popitem(last=False)
            self._jobs.pop(gone, None)
            for key in of:
                self._last.pop(key, None)

    def _put(self, line: dict[str, Any]) -> None:
        count = line["count"] if line["event"] == "events_dropped" else 1
        if len(self._lines) < MOST:
            stamp = f"{_utc(line['time'])} " if self._stamps else ""
            self._lines.append((json.dumps(line) if self._json else stamp + as_text(line), count))
        else:
            self._unsaid += count
        self._changed.notify_all()

    # -- the two threads ---------------------------------------------------------------------------------------------

    def _print_all(self) -> None:
        whole = True
        while True:
            with self._changed:
                self._printing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                (text, count), self._printing = self._lines.popleft(), True
            line = f"{'' if whole else chr(10)}{text}\n".encode(errors="backslashreplace")  # names of files may be odd
            left, nobody = _write(line)
            whole = not left or (whole and left == len(line))
            unsaid = 0
            with self._changed:
                if left and not nobody:
                    self._unsaid += count
                elif self._unsaid and not self._lines:  # those that came since found no room
                    unsaid, self._unsaid = self._unsaid, 0
                    say = self.__call__
                    say("events_dropped", count=unsaid, why=UNSAID)
            if unsaid:
                self._tell("events_dropped", count=unsaid, why=UNSAID)

    def _keep(self) -> None:
        """A full disk ends nothing, either: versions are made all the same."""
        assert self._file is not None
        unwritable = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._written != self._said or self._closed)
                if self._written == self._said:
                    return
                number, last = self._said, dict(self._last)
            try:
                write_atomic(self._file, (json.dumps(last, indent=1) + "\n").encode())
                if unwritable:
                    self._own_event("solved", about="status_file")
                unwritable = False
            except EnvironmentProblem as error:
                if not unwritable:
                    self._own_event("problem", why=error.message(), about="status_file")
                unwritable = True
            with self._changed:
                self._written = number
                self._changed.notify_all()

    def _own_event(self, event: str, **fields: Any) -> None:
        """One that the file does not have: it is about the file."""
        with self._changed:
            self._put({"event": event, "time": round(time.time(), 3), **fields})
        self._tell(event, **fields)

    # -- the end -----------------------------------------------------------------------------------------------------

    def flush(self, seconds: float) -> bool:
        """Until all that was said is written. False: it is not, after so long."""
        with self._changed:
            return self._changed.wait_for(self._done, seconds)

    def _done(self) -> bool:
        return not self._lines and not self._printing and (self._file is None or self._written == self._said)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        """What is not written by then never is."""
        self.flush(END_SECONDS)
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _write(line: bytes) -> tuple[int, bool]:
    """Bytes that are left, and whether that is so because nobody reads."""
    left = memoryview(line)
    while left:
        try:
            left = left[os.write(STDOUT, left) :]
        except BlockingIOError:
            select.select([], [STDOUT], [])
        except OSError as error:  # a full disk: there may be room again
            return len(left), error.errno in (errno.EPIPE, errno.EBADF)
    return 0, False


def _in_journal() -> bool:
    """Is standard output systemd's journal, which puts a time to each line by itself?"""
    try:
        at = os.fstat(STDOUT)
    except OSError:  # it is closed
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{at.st_dev}:{at.st_ino}"


def _utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC).isoformat(timespec='milliseconds').removesuffix('+00:00')}Z"


def shown(key: str, value: Any) -> str:
    """A field of an event, for people."""
    if key in MOMENTS:
        value = f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"{key} {value}"


def as_text(line: dict[str, Any]) -> str:
    """For people. line: of an event, as it is written as JSON."""
    fields = {
        key: value for key, value in line.items()
        if key not in ("event", "time", "job") and value is not None and value not in ("", [], {})
    }
    if line["event"] != "iteration":
        said = ", ".join(str(value) if key == "text" else shown(key, value) for key, value in fields.items())
        said = "; ".join(part.strip() for part in said.splitlines())  # an event is one line, its remedy too
        return f"{line['event']}: {said}" if said else line["event"]
    missing = " ".join(f"{cause} {count}" for cause, count in line["missing"].items())
    dropped = " ".join(f"{cause} {count}" for cause, count in line["dropped"].items())
    name = f"{line['name']} " if line["name"] else ""
    failed = f", {'; '.join(f'{clause}: {reason}' for clause, reason in line['why'])}" if line["why"] else ""
    updates = f", updates {line['updates']}" if line["updates"] else ""
    updates += f", rebuilt {line['rebuilt']}" if line["rebuilt"] else ""
    updates += f", patched {line['patched']}" if line["patched"] else ""
    updates += f", stale {line['stale']}" if line["stale"] else ""
    return (
        f"{name}iteration {line['iteration']}: {'published' if line['published'] else 'NOT published'}"
        f" {line['status']}, {line['packets']} packets, {line['placed']} placed, missing {missing or 0},"
        f" healed {line['healed']}, duplicates {line['duplicates']}"
        f"{f', the node itself dropped {dropped}' if dropped else ''}, lag {line['lag']}{updates}{failed}"
    )
