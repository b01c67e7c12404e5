"""What the process that writes to a store is given, and says."""

from __future__ import annotations

from pathlib import Path

from flowcheck.node.config.store import Store
from flowcheck.node.process.child import Program
from flowcheck.node.process.lines import Event, Problem, Settings, table

__all__ = ["EVENTS", "PROGRAM", "StoreSettings", "Unstored"]


class StoreSettings(Settings):
    """node: its name. replicas: where its replica files lie. probe: only whether the store can be used. token_file: of
    nodes, None: without one. readable_by: as of Output."""

    node: str
    replicas: Path
    probe: bool
    store: Store
    token_file: Path | None
    readable_by: str


class Stored(Event):
    kind, well = "stored", True
    name: str
    step: int
    bytes: int
    seconds: float
    path: str


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


EVENTS = table(Stored, Unstored, Expired, Marked, Skipped, Problem)
PROGRAM = Program("flowcheck.node.store.worker", "persisting", "writes to the store", EVENTS)
