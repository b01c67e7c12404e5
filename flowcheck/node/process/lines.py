"""What passes between a node and a process of its own, as lines of JSON: settings and orders one way, events the other.

    class StoreSettings(Settings): node: str ...         the first line that it reads
    class NewKeys(Order): keys: ...                      a later one: fields of its settings that have changed
    class Stored(Event): kind = "stored"; step: int ...  a line that it writes, and then one of the node's own

Each process has such models in a module `border` of its room; both sides read with what the other has written with, so
a field that one of them lacks is found where it is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

__all__ = ["Event", "Line", "Order", "Problem", "Settings", "SettingsT", "read_event", "table"]


class Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    def encoded(self) -> bytes:
        return json.dumps(self.model_dump(mode="json")).encode() + b"\n"


class Settings(Line):
    """cores: that the process may use; none: all."""

    cores: tuple[int, ...]


SettingsT = TypeVar("SettingsT", bound=Settings)


class Order(Line):
    """Fields are those of the process's settings; one that is not given stays as it is."""

    def encoded(self) -> bytes:
        return json.dumps(self.model_dump(mode="json", exclude_unset=True)).encode() + b"\n"

    def on(self, settings: SettingsT) -> SettingsT:
        """The settings with what this says."""
        return settings.model_copy(update={name: getattr(self, name) for name in self.model_fields_set})


class Event(Line):
    """kind: what it is called. well: the process did what it is there for. Fields that a process of another release may
    have besides are left out."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    kind: ClassVar[str]
    well: ClassVar[bool] = False


class Problem(Event):
    kind = "problem"
    name: str = ""
    why: str


def table(*events: type[Event]) -> dict[str, type[Event]]:
    """By kind."""
    return {event.kind: event for event in events}


def read_event(events: Mapping[str, type[Event]], line: bytes) -> Event | None:
    """None: it is something else, such as what a library prints."""
    try:
        said = json.loads(line)
        return events[said["event"]].model_validate(said)
    except (ValueError, KeyError, TypeError, ValidationError):
        return None
