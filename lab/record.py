"""What the processes of a run have said: iterations, versions and their hashes, events, and waiting for them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flowcheck.errors import EnvironmentProblem, UserError
from lab.children import Children
from lab.compare import Ledger
from lab.jobs import Training
from lab.network.fabric import Fabric

__all__ = ["Record", "Tail", "clear", "nobody"]

OUTPUTS = ("rank[0-9]*.jsonl", "rank[0-9]*.log", "node[0-9]*-[0-9]*", "holder[0-9]*", "again[0-9]*", "saved[0-9]*",
           "token", "lost.json")
MARK = ".flowcheck-lab"  # such a folder's outputs are ours to remove


def nobody(ledger: Ledger, *, last: bool = False) -> None:
    """A watcher that does not look."""


def clear(out: Path) -> None:
    """Make a folder what a run writes to, without what an earlier one has left. Raises UserError: it is another's."""
    out.mkdir(parents=True, exist_ok=True)
    earlier = [path for pattern in OUTPUTS for path in out.glob(pattern)]
    if earlier and not (out / MARK).exists():
        raise UserError(
            f"{earlier[0].name} is there, and no lab has written it", where=str(out),
            remedy="a folder of its own: a lab removes what an earlier one has left in it",
        )
    (out / MARK).touch()
    for old in earlier:
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()


class Record:
    """watch: set it to be called with the ledger after every event.

    ledger: the job's iterations, each beside what the first node made of it.
    events: of the nodes of this job, all of them.
    held: what holders have said.
    twins: hashes of versions of nodes that the ledger is not of.
    iterations: of this job's first rank of each stage, in order.
    communicators: what each rank said of its connections when the job ended.
    recovered: what each rank of this job said of it.
    """

    def __init__(self, fabric: Fabric, out: Path) -> None:
        self.fabric, self.out = fabric, out
        self.watch: Callable[..., None] = nobody
        self.ledger = Ledger(0, [])
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.held: list[tuple[str, dict[str, Any]]] = []
        self.twins: list[tuple[str, dict[str, Any]]] = []
        self.iterations: list[dict[str, Any]] = []
        self.communicators: list[dict[str, Any]] = []
        self.recovered: list[dict[str, Any]] = []
        self._children = Children()
        self._tails: dict[str, Tail] = {}
        self._said: dict[str, Path] = {}  # where what a node says is kept
        self._job: Training | None = None
        self._jobs = -1  # number of the current job

    def _begin(self, job: Training) -> None:
        """Another job: nothing has been said of it."""
        self._follow()  # what is left of the job before
        self._job, self._jobs = job, self._jobs + 1
        self.ledger = Ledger([len(job.group(number)) for number in range(len(job.names))], job.names)
        self.iterations, self.communicators, self.twins, self.recovered = [], [], [], []

    @property
    def trained(self) -> int:
        """Iterations that the job has made, counted from its first start; 0: none since it was begun anew."""
        return int(self.iterations[-1]["iteration"]) + 1 if self.iterations else 0

    def wait_for_nodes(self, iteration: int, seconds: float = 60.0) -> None:
        """Until the nodes have said what became of an iteration, of every stage; gives up in silence when nothing has
        been heard for `seconds`: the ledger then says what is missing."""
        stages = range(len(self.ledger.names))
        self._quietly(lambda: all(self.ledger.row(stage, iteration).verdict != "waiting" for stage in stages), seconds)

    def wait_for_event(self, event: str, seconds: float = 60.0, **fields: Any) -> dict[str, Any]:
        """The first event of a node that is like this, past or future. Raises EnvironmentProblem if none comes."""

        def found() -> dict[str, Any] | None:
            return next((said for _, said in self.events
                         if said["event"] == event and fields.items() <= said.items()), None)

        self._quietly(lambda: found() is not None, seconds)
        said = found()
        if said is None:
            raise EnvironmentProblem(f"no node has said {event} {fields}", where="flowcheck lab",
                                     remedy=f"see the nodes' logs in {self.out}")
        return said

    def _quietly(self, until: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds

        def stop() -> bool:
            self._follow()
            return until() or time.monotonic() > end

        for name, event in self._events(stop, seconds + 1):
            self._take(name, event)

    # -- reading --------------------------------------------------------------------------------------------

    def _all_say(self, what: str, names: Sequence[str], seconds: float) -> None:
        """Until each of these processes has said an event."""
        said: set[str] = set()
        for name, event in self._events(lambda: len(said) == len(names), seconds):
            if event.get("event") == what:
                said.add(name)
            self._take(name, event)

    def _events(self, until: Callable[[], bool], seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """What processes say until then; raises EnvironmentProblem when one of them, or of the network's, is gone."""

        def stop() -> bool:
            self.fabric.check()
            return until()

        return self._children.events(stop, seconds)

    def _drain(self) -> None:
        """What has been said up to now."""
        for name, event in self._children.drain():
            self._take(name, event)

    def _take(self, name: str, event: dict[str, Any]) -> None:
        if name.startswith("node"):
            self.events.append((name, event))
            with self._said[name].open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
            if event.get("event") == "iteration" and not self._is_twin(name):
                self.ledger.status(event)
            elif event.get("event") == "unjudged" and not self._is_twin(name):
                for number in range(event["first"], event["last"] + 1):
                    self.ledger.status({**event, "iteration": number, "published": False, "failed": [event["why"]]})
            elif event.get("event") in ("state", "patched") and not self._is_twin(name):  # the first: versions begin
                self.ledger.state(event)
        elif name.startswith("holder"):
            self.held.append((name, event))
            with self._said[name].open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
        elif event.get("event") == "iteration" and self._job and event["rank"] % self._job.data_ranks == 0:
            self.iterations.append(event)
        elif event.get("event") == "recovered":
            self.recovered.append(event)
        elif event.get("event") == "communicator":
            self.communicators.append(event)
        self._follow()
        self.watch(self.ledger)

    def _is_twin(self, name: str) -> bool:
        """Does a node follow what the first one follows, too?"""
        one = self._job is None or self._job.stages == 1
        return one and name.startswith("node") and not name.startswith("node 0")

    def _follow(self) -> None:
        """Read what is new in the hash files, of this job."""
        for name, tail in self._tails.items():
            for line in tail.lines():
                if self._is_twin(name):
                    self.twins.append((name, line))
                elif name.startswith("node"):
                    self.ledger.node(line)
                elif line["job"] == self._jobs:
                    self.ledger.trainer(line)


class Tail:
    """Whole lines that a file has grown by."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def lines(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                raw = file.read()
        except FileNotFoundError:
            return []
        self._at += len(raw)
        *whole, self._rest = (self._rest + raw).split(b"\n")
        return [json.loads(line) for line in whole]
