"""What a session's events are called in a node's lines, and their fields: docs/reference/events.md. Pure.

    name, fields = line(event, number)      number: the trainer's of an iteration, by its number here
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flowcheck.rebuild.version.events import (
    Asked,
    Begun,
    Behind,
    CaughtUp,
    Closed,
    Event,
    FromPeers,
    GivenUp,
    Held,
    NotCaughtUp,
    OnTime,
    Patched,
    Skipped,
    TakenUp,
    Timed,
    Waiting,
)

__all__ = ["closed_fields", "line"]

Number = Callable[[int], int]
_Line = tuple[str, dict[str, Any]]

_REMEDIES = {
    "telemetry": "it had to wait until the gradients of the one before were measured: raise telemetry.every or"
    " telemetry.threads",
    "placing": "its packets are placed, or looked at, late: more capture.queues, each with cores of its own in"
    " capture.cores and capture.place_cores, and a core for the group's thread",
    "record": "its step record comes late: look at the trainer and the control network, and leave a core for the"
    " group's thread",
    "update": "its update is late: raise replica.threads, with cores that nothing else uses",
    "checksums": "comparing its checksums takes long: raise replica.threads, or attach's checksum_every",
    "rings": "packets wait to be placed: capture.queues, each with cores of its own in capture.cores and"
    " capture.place_cores",
}


def line(event: Event, number: Number) -> tuple[str, dict[str, Any]] | None:
    """None: it has no line of its own, or more belongs to it."""
    made = _LINES.get(type(event))
    return made(event, number) if made is not None else None


def closed_fields(
    closed: Closed, number: int, dropped: Mapping[str, int], *, lost: bool, matches: int
) -> dict[str, Any]:
    """Of the event `iteration`. lost: no version is left to go on from. matches: checksums that have matched."""
    return {
        "iteration": number, "published": closed.published, "status": closed.status, "packets": closed.packets,
        "placed": closed.placed, "missing": closed.missing, "healed": closed.healed, "duplicates": closed.duplicates,
        "dropped": dropped, "lag": closed.lag, "updates": closed.updates, "rebuilt": closed.rebuilt,
        "patched": closed.patched, "stale": closed.stale,
        "final": closed.final, "filled": closed.filled, "unproven": closed.unproven, "matches": matches,
        "sampled": closed.sampled,
        "failed": [clause for clause, _ in closed.why], "why": closed.why[:1] if lost else closed.why,
    }


def _times(event: Timed, number: Number) -> dict[str, Any]:
    """Milliseconds after the first byte, but for that itself."""
    times, first = event.times, event.times.first

    def after(at: int | None) -> float | None:
        return None if at is None or first is None else _ms(at - first)

    return {
        "iteration": number(times.iteration), "first": None if first is None else round(first / 1e9, 6),
        "last": after(times.last), "measured": after(times.measured), "covered": after(times.covered),
        "record": after(times.record), "applied": after(times.applied), "published": after(times.published),
        "next": after(times.next),
        "slack": None if times.slack is None else _ms(times.slack), "rings": list(event.rings),
        "arenas": list(event.arenas),
    }


def _why_behind(event: Behind) -> str:
    said = []
    if event.late:
        said.append(f"the next iteration had begun {_ms(event.late)} ms before the version was there")
    if event.in_a_row > 1:
        said.append(f"{event.in_a_row} versions in a row were late")
    if event.left is not None:
        said.append(f"in about {event.left} iterations there is no room for another one")
    return "; ".join([*said, _REMEDIES[event.stage]])


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)


# -- one for each event ------------------------------------------------------------------------------------------------


def _waiting(event: Waiting, number: Number) -> _Line:
    return "waiting", {"iteration": number(event.iteration), "why": event.why}


def _timed(event: Timed, number: Number) -> _Line:
    return "times", _times(event, number)


def _behind(event: Behind, number: Number) -> _Line:
    return "behind", {
        "iteration": number(event.iteration), "late_ms": _ms(event.late), "in_a_row": event.in_a_row,
        "left": event.left, "why": _why_behind(event),
    }


def _on_time(event: OnTime, number: Number) -> _Line:
    return "on_time", {"iteration": number(event.iteration)}


def _given_up(event: GivenUp, number: Number) -> _Line:
    waiting, room = event.rings
    why = "iterations wait for arenas" if event.waits else "packets come faster than they are placed"
    return "overload", {
        "iteration": number(event.first),
        "why": f"{why}, and a ring has {waiting} of {room} packets: from here on they are counted and not placed, until"
               " what waits is done",
    }


def _begun(event: Begun, number: Number) -> _Line:
    why = ("all of the job's state is asked for by ranges: no version is published until the trainers have sent their"
           " own state of these elements")
    if not event.elements:
        why = "the version before this iteration is here, and nothing of it is stale"
    return "begun", {"iteration": number(event.iteration), "elements": event.elements, "why": why}


def _held(event: Held, number: Number) -> _Line:
    what = "the iteration was lost whole" if event.all else "its version is built without them"
    return "stale", {
        "iteration": number(event.iteration), "elements": event.stale,
        "why": f"{event.why}; {what}, and none is published until the trainers have sent their own state of these"
               " elements",
    }


def _asked(event: Asked, number: Number) -> _Line:
    return "ranges", {
        "iteration": number(event.iteration), "elements": event.elements, "bytes": event.nbytes,
        "ranks": list(event.ranks),
    }


def _patched(event: Patched, number: Number) -> _Line:
    return "patched", {
        "iteration": number(event.iteration), "since": number(event.since), "elements": event.elements,
        "bytes": event.nbytes, "source": "trainer",
    }


def _from_peers(event: FromPeers, number: Number) -> _Line:
    return "peers", {
        "iteration": number(event.iteration), "bytes": event.nbytes, "filled": dict(event.filled),
        "failed": dict(event.failed),
    }


def _caught_up(event: CaughtUp, number: Number) -> _Line:
    return "caught_up", {
        "iteration": number(event.iteration), "step": event.step, "source": event.source, "bytes": event.nbytes,
        "seconds": round(event.seconds, 3),
    }


def _not_caught_up(event: NotCaughtUp, number: Number) -> _Line:
    return "not_caught_up", {
        "failed": dict(event.failed),
        "why": "no version of a peer was taken: trainers are asked for all of the state by ranges",
    }


def _skipped(event: Skipped, number: Number) -> _Line:
    return "unjudged", {"first": number(event.first), "last": number(event.last), "why": f"they passed {event.why}"}


def _taken_up(event: TakenUp, number: Number) -> _Line:
    return "recovered", {"first": number(event.first), "last": number(event.last), "packets": event.packets}


_LINES: dict[type[Event], Callable[[Any, Number], _Line]] = {
    Waiting: _waiting, Timed: _timed, Behind: _behind, OnTime: _on_time, GivenUp: _given_up, Begun: _begun, Held: _held,
    Asked: _asked, Patched: _patched, FromPeers: _from_peers, CaughtUp: _caught_up, NotCaughtUp: _not_caught_up,
    Skipped: _skipped, TakenUp: _taken_up,
}
