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

_REMEDIES = {
    "placing": "its packets are placed, or looked at, late: more capture.queues, each with cores of its own in"
    " capture.cores and capture.place_cores, and a core for the group's thread",
    "record": "its step record comes late: look at the trainer and the control network, and leave a core for the"
    " group's thread",
    "update": "its update is late: raise replica.threads, with cores that nothing else uses",
    "checksums": "comparing its checksums takes long: raise replica.threads, or attach's checksum_every",
    "rings": "packets wait to be placed: capture.queues, each with cores of its own in capture.cores and"
    " capture.place_cores",
}


def line(event: Event, number: Callable[[int], int]) -> tuple[str, dict[str, Any]] | None:
    """None: it has no line of its own, or more belongs to it."""
    match event:
        case Waiting():
            return "waiting", {"iteration": number(event.iteration), "why": event.why}
        case Timed():
            return "times", _times(event, number)
        case Behind():
            return "behind", {
                "iteration": number(event.iteration), "late_ms": _ms(event.late), "in_a_row": event.in_a_row,
                "left": event.left, "why": _why_behind(event),
            }
        case OnTime():
            return "on_time", {"iteration": number(event.iteration)}
        case GivenUp():
            waiting, room = event.rings
            why = "iterations wait for arenas" if event.waits else "packets come faster than they are placed"
            return "overload", {
                "iteration": number(event.first),
                "why": f"{why}, and a ring has {waiting} of {room} packets: from here on they are counted and not"
                " placed, until what waits is done",
            }
        case Begun():
            why = ("all of the job's state is asked for by ranges: no version is published until the trainers have sent"
                   " their own state of these elements")
            if not event.elements:
                why = "the version before this iteration is here, and nothing of it is stale"
            return "begun", {"iteration": number(event.iteration), "elements": event.elements, "why": why}
        case Held():
            what = "the iteration was lost whole" if event.all else "its version is built without them"
            return "stale", {
                "iteration": number(event.iteration), "elements": event.stale,
                "why": f"{event.why}; {what}, and none is published until the trainers have sent their own state of"
                " these elements",
            }
        case Asked():
            return "ranges", {
                "iteration": number(event.iteration), "elements": event.elements, "bytes": event.nbytes,
                "ranks": list(event.ranks),
            }
        case Patched():
            return "patched", {
                "iteration": number(event.iteration), "since": number(event.since), "elements": event.elements,
                "bytes": event.nbytes, "source": "trainer",
            }
        case FromPeers():
            return "peers", {
                "iteration": number(event.iteration), "bytes": event.nbytes, "filled": dict(event.filled),
                "failed": dict(event.failed),
            }
        case CaughtUp():
            return "caught_up", {
                "iteration": number(event.iteration), "step": event.step, "source": event.source,
                "bytes": event.nbytes, "seconds": round(event.seconds, 3),
            }
        case NotCaughtUp():
            return "not_caught_up", {
                "failed": dict(event.failed),
                "why": "no version of a peer was taken: trainers are asked for all of the state by ranges",
            }
        case Skipped():
            why = f"they passed {event.why}"
            return "unjudged", {"first": number(event.first), "last": number(event.last), "why": why}
        case TakenUp():
            return "recovered", {"first": number(event.first), "last": number(event.last), "packets": event.packets}
    return None


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


def _times(event: Timed, number: Callable[[int], int]) -> dict[str, Any]:
    """Milliseconds after the first byte, but for that itself."""
    times, first = event.times, event.times.first

    def after(at: int | None) -> float | None:
        return None if at is None or first is None else _ms(at - first)

    return {
        "iteration": number(times.iteration), "first": None if first is None else round(first / 1e9, 6),
        "last": after(times.last), "covered": after(times.covered), "record": after(times.record),
        "applied": after(times.applied), "published": after(times.published), "next": after(times.next),
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
