"""What the process that writes to a store is given, and says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowcheck.node.config.store import Store
from flowcheck.node.process.child import Program
from flowcheck.node.process.lines import Event, Problem, Settings, table

__all__ = ["EVENTS", "PROGRAM", "REMAKE", "StoreSettings", "StoredRemakeSettings", "Unstored"]

REMAKE = "flowcheck.node.store.remaking"


class StoreSettings(Settings):
    """node: its name. replicas: where its replica files lie. probe: only whether the store can be used. token_file: of
    nodes, None: without one. readable_by: as of Output. journals: of the node, whose gradients are written, too."""

    node: str
    replicas: Path
    probe: bool
    store: Store
    token_file: Path | None
    readable_by: str
    journals: Path | None = None


class StoredRemakeSettings(Settings):
    """url, options, seconds: of the store. base: the folder in it of the version that is begun with. step: that is
    wanted. into: where it is to lie. threads: of the updater. It says `Said`, as the process of a journal does."""

    url: str
    options: dict[str, Any]
    seconds: float
    base: str
    step: int
    into: Path
    threads: int


class Stored(Event):
    kind, well = "stored", True
    name: str
    step: int
    bytes: int
    seconds: float
    path: str


class Delta(Event):
    kind, well = "delta", True
    name: str
    first: int
    last: int
    bytes: int
    seconds: float
    path: str


class DeltaGap(Event):
    kind = "delta_gap"
    name: str
    first: int
    last: int
    why: str


class Unstored(Event):
    """step: None: none in particular. again: seconds until it is tried again, None: it is not."""

    kind = "unstored"
    name: str
    step: int | None
    why: str
    again: float | None


class Expired(Event):
    kind = "expired"
    name: str
    versions: int
    path: str


class Marked(Event):
    kind = "marked"
    name: str
    steps: int
    newest: int
    path: str


class Skipped(Event):
    kind = "skipped"
    name: str
    step: int
    why: str


EVENTS = table(Stored, Delta, DeltaGap, Unstored, Expired, Marked, Skipped, Problem)
PROGRAM = Program("flowcheck.node.store.worker", "persisting", "writes to the store", EVENTS)
