"""Which epoch a start of a job's trainers has here: the one that it says, or one of its own.

    seen = versions_here(config, run_id)            versions of a run in files of this node
    given = starts.decide(coming, seen)             its epoch, for all groups of that start alike
    starts.said(), starts.hear(node, have)          what nodes tell each other of that, among steps (common_step.py)

A start that goes on from an older version under the same run and epoch makes steps again that lie here already. Both
lines in one epoch would share folders, and whoever asks for the newest step would be given the line that was left. So
a start whose first step is at or below a step of another start gets the epoch after that one's; so does one that says
an older epoch than the newest that is here. A start that was numbered once keeps its number: this process remembers
it, and so do its files. Any thread.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from flowcheck.checkpoint.directory import read_step_manifest
from flowcheck.control.message_fields import GROUP
from flowcheck.control.messages import Share
from flowcheck.control.start import LINE, line_of
from flowcheck.errors import UserError
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.versions.runs import run_folder
from updater.errors import UpdaterError
from updater.reader import Reader

__all__ = ["Coming", "Seen", "Starts", "epoch_for", "versions_here"]

MOST = 64  # starts that are remembered, of this node and of each other one
MOST_SAID = 8  # of them, to other nodes
MOST_NODES = 256
Run = tuple[str, int]  # id and epoch


@dataclass(frozen=True)
class Seen:
    """A version that is here. line: of its start, as far as files say it; otherwise whatever they say of the start."""

    epoch: int
    step: int
    line: str


@dataclass(frozen=True)
class Coming:
    """A start whose trainers have come. epoch: that they say. first: number of the iteration that they go on with.
    line: in their own words (control/start.py); otherwise what tells it from others at this node. start: of the
    group's files, as of runs.start_of."""

    run_id: str
    epoch: int
    first: int
    line: str
    start: str = ""


def epoch_for(coming: Coming, seen: Collection[Seen]) -> int:
    """What this node numbers it by itself."""
    names = {coming.line, coming.start} - {""}
    if mine := [one.epoch for one in seen if one.line in names]:
        return max(*mine, coming.epoch)
    newest = max((one.epoch for one in seen), default=-1)
    # A line that would come after this one, although it was here before: some clock of theirs is wrong.
    again = any(one.epoch == coming.epoch and (one.step >= coming.first or _is_later(one.line, coming.line))
                for one in seen)
    return newest + 1 if again or newest > coming.epoch else coming.epoch


def _is_later(line: str, than: str) -> bool:
    return bool(LINE.fullmatch(line) and LINE.fullmatch(than)) and line > than


class Starts:
    """Of one node, and what it has heard of others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: OrderedDict[tuple[str, str], int] = OrderedDict()  # (run, line) -> epoch, what came last comes last
        self._others: OrderedDict[str, dict[tuple[str, str], int]] = OrderedDict()  # by node

    def decide(self, coming: Coming, seen: Collection[Seen]) -> int:
        key = coming.run_id, coming.line
        with self._lock:
            known = max([-1, *(of[key] for of in self._others.values() if key in of)])
            if (own := self._own.get(key)) is None:
                own = epoch_for(coming, seen)
            self._own[key] = epoch = max(own, known, coming.epoch)
            self._own.move_to_end(key)
            while len(self._own) > MOST:
                self._own.popitem(last=False)
            return epoch

    def epoch(self, run_id: str, line: str) -> int:
        """The newest under which any node has a start; -1: nobody says it."""
        key = run_id, line
        with self._lock:
            return max([self._own.get(key, -1), *(of[key] for of in self._others.values() if key in of)])

    # -- what nodes tell each other: shares without a group and without steps, which older nodes leave alone --

    def said(self) -> list[Share]:
        with self._lock:
            known = [(run_id, line, epoch) for (run_id, line), epoch in self._own.items() if LINE.fullmatch(line)]
        return [(f"{line} {run_id}", epoch, "", []) for run_id, line, epoch in known[-MOST_SAID:]]

    def hear(self, node: str, have: Sequence[Share]) -> None:
        found: dict[tuple[str, str], int] = {}
        for said, epoch, group, steps in have[-MOST:]:
            line, space, run_id = said.partition(" ")
            if space and not group and not steps and LINE.fullmatch(line):
                found[run_id, line] = epoch
        with self._lock:
            self._others[node] = found
            self._others.move_to_end(node)
            while len(self._others) > MOST_NODES:
                self._others.popitem(last=False)

    def line_at(self, node: str, run: Run) -> str:
        """Of what another node has of a run and epoch; "": it does not say it."""
        with self._lock:
            lines = [line for (run_id, line), epoch in self._others.get(node, {}).items() if (run_id, epoch) == run]
            return lines[-1] if lines else ""

    def there(self, node: str, run: Run) -> Run:
        """Under which epoch another node has what is here of a run and epoch."""
        with self._lock:
            for (run_id, line), epoch in reversed(self._own.items()):
                if (run_id, epoch) == run:
                    return run_id, self._others.get(node, {}).get((run_id, line), epoch)
        return run


def versions_here(config: NodeConfig, run_id: str) -> list[Seen]:
    """Of all groups: in replica files, in checkpoints, and in copies of what other nodes have."""
    replicas = _in_replicas(config.replica.directory, config.name, run_id)
    folders = [config.output.directory, *([config.copies] if config.copies is not None else [])]
    return [*replicas, *(one for folder in folders for one in _in_folder(folder, run_id))]


def _in_replicas(directory: Path, node: str, run_id: str) -> Iterator[Seen]:
    named = re.compile(rf"flowcheck-{re.escape(node)}-{GROUP.pattern}-[0-9]+\.replica")
    for path in sorted(directory.glob("*.replica")):
        if not named.fullmatch(path.name):
            continue
        try:
            with closing(Reader(path, mine=True)) as reader:
                if reader.run_id == run_id:
                    line = line_of(reader.start) or reader.start
                    yield from [Seen(reader.epoch, step, line) for step in reader.steps[-1:]]
        except (UpdaterError, OSError):
            continue  # torn, of another format, or gone meanwhile: nobody can go on from it


def _in_folder(directory: Path, run_id: str) -> Iterator[Seen]:
    """The newest step of each epoch; what lies below it in the same folder is of its line, or of one that ended
    before that."""
    run = run_folder(run_id, 0).parent
    for prefix in (Path(), Path("*")):
        for folder in directory.glob(str(prefix / _literal(run.name) / "epoch-*")):
            steps = [path for path in folder.glob("step-*") if re.fullmatch("step-[0-9]+", path.name)]
            epoch = folder.name.removeprefix("epoch-")
            if steps and epoch.isdecimal():
                newest = max(steps, key=lambda path: int(path.name.removeprefix("step-")))
                yield Seen(int(epoch), int(newest.name.removeprefix("step-")), _line(newest))


def _literal(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _line(path: Path) -> str:
    try:
        manifest: Mapping[str, object] = read_step_manifest(path)
    except UserError:
        return "?"  # somebody's
    start = str(manifest.get("start", ""))
    return line_of(start) or start
