"""Which queue pair is which channel, where a job does not say it: looked for on the wire while the job runs.

    assigning = Assigning(rings, cores, say)
    assigning.of(job, flows) -> flows       None: being looked for; ask again after `look` has said so
    assigning.look()                        again and again: True once there is an answer
    assigning.rest()                        nobody wants to know any more

The job's packets are nobody's yet: the placing threads empty the rings. So a second look is taken at these (a Tap), and
what an Observer keeps of it is given to a process of its own, which decides (flowcheck/learning/running.py): seconds of
Python, which the threads of other groups would have to wait for. Nothing waits for it. The group's thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from parser.observer import Observer

from dataplane.tap import Tap
from flowcheck.errors import EnvironmentProblem, UserError

__all__ = ["WHY", "Assigning", "withheld"]

MODULE = "flowcheck.learning.running"
LEAST = 64  # packets before anybody is asked
PAUSE = 1.0  # seconds from an answer to the next question
WHY = "which of the connections is which channel is being looked for on the wire"


def withheld(flows: Sequence[Mapping[str, Any]]) -> bool:
    """Have these no channels? Raises UserError if some have one, and others have not."""
    without = [flow for flow in flows if flow.get("channel") is None]
    if without and len(without) < len(flows):
        raise UserError(f"{len(flows) - len(without)} connections have a channel, and {len(without)} have none",
                        where="flows", remedy="all of them, or none")
    return bool(without)


class Assigning:
    """rings: addresses. cores: that no thread of the node is pinned to; empty: any. say: events."""

    def __init__(
        self, rings: Sequence[int], cores: Iterable[int], say: Callable[..., None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rings, self._cores, self._say, self._now = rings, sorted(cores), say, now
        self._asked: dict[str, Any] | None = None
        self._answer: dict[str, Any] | UserError | None = None  # to what was asked
        self._known: dict[str, dict[str, Any]] = {}  # by connections, of this start of the job
        self._taps: list[Tap] = []
        self._observer: Observer | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._said = -1  # descriptor of what it says
        self._began = self._next = 0.0
        self._due = 0
        self._doubted = False  # what it refused may be a call that the job's description does not have yet

    def of(self, job: Mapping[str, Any], flows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """{"flows": with channels, "unproven": what that rests on}. Raises UserError: it was refused."""
        key = json.dumps(flows, sort_keys=True)
        if key in self._known:
            return self._known[key]
        asked = {"job": {**job, "flows": []}, "flows": list(flows)}
        if asked == self._asked and isinstance(self._answer, UserError):
            raise self._answer
        if asked != self._asked:
            before, self._asked, self._answer, self._doubted = self._asked, asked, None, False
            self._kill()
            self._due, self._next = LEAST, self._now()
            if before is None or before["flows"] != asked["flows"] or self._observer is None:
                self._taps, self._observer = [Tap(ring) for ring in self._rings], Observer(messages=True)
                self._began = self._now()
                self._say("assigning", connections=len(flows), why=WHY)
        return None

    def look(self) -> bool:
        """Raises EnvironmentProblem: it cannot be found out here."""
        if self._observer is None or self._answer is not None:
            return False
        for tap in self._taps:
            tap.look(self._observer.drain)
        if self._process is not None:
            return self._ended(self._process)
        packets = self._observer.counters()["packets"]
        if packets >= self._due and self._now() >= self._next:
            self._due = 2 * packets
            self._start(self._observer)
        return False

    def _start(self, observer: Observer) -> None:
        assert self._asked is not None
        observed = [{**flow, "src": flow["src"].hex(), "dst": flow["dst"].hex()} for flow in observer.flow_list()]
        given = os.memfd_create("flowcheck observed")
        try:
            with os.fdopen(os.dup(given), "wb") as stream:
                stream.write(json.dumps({**self._asked, "observed": observed, "cores": self._cores}).encode() + b"\n")
                stream.write(observer.start_records().tobytes())
            os.lseek(given, 0, os.SEEK_SET)
            self._said = os.memfd_create("flowcheck answer")
            self._process = subprocess.Popen(  # a session of its own: Ctrl-C is for the node, which ends it
                [sys.executable, "-P", "-m", MODULE], stdin=given, stdout=self._said, start_new_session=True,
            )
        finally:
            os.close(given)

    def _ended(self, process: subprocess.Popen[bytes]) -> bool:
        status = process.poll()
        if status is None:
            return False
        text = os.pread(self._said, os.fstat(self._said).st_size, 0)
        self._kill()
        self._next = self._now() + PAUSE
        if status:
            self.rest()
            raise EnvironmentProblem(f"the process that looks for channels ended with status {status}",
                                     where="connections", remedy="the lines that it has written on standard error")
        found = json.loads(text)
        if "early" in found:
            return False
        if "refused" in found and not self._doubted:
            self._doubted = True
            return False
        self._take(found)
        return True

    def _take(self, found: dict[str, Any]) -> None:
        assert self._asked is not None
        missed = sum(tap.missed for tap in self._taps)
        if "refused" in found:
            self._answer = UserError(**found["refused"])
        else:
            self._answer = {"flows": found["flows"], "unproven": found["unproven"]}
            self._known = {json.dumps(self._asked["flows"], sort_keys=True): self._answer}
            self._say("assigned", connections=len(found["flows"]), spare=found["spare"], unseen=found["unseen"],
                      seconds=round(self._now() - self._began, 3), missed=missed)
        self._taps, self._observer = [], None

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            os.close(self._said)
        self._process = None

    def rest(self) -> None:
        """Idempotent."""
        self._kill()
        self._taps, self._observer, self._asked, self._answer = [], None, None, None

    def forget(self) -> None:
        """The job was started again: what is known was of the one before."""
        self.rest()
        self._known = {}
