"""A node's document for tests of what is made of it: a tally that was told of two groups, without a node."""

from __future__ import annotations

import json
from typing import Any

from flowcheck.node.status.board_writer import LOST
from flowcheck.node.status.counters import Tally

START = 1_700_000_000.0


PART = {"norm": 2.5, "largest": 1.5, "zeros": 0.25, "nans": 0, "infs": 0, "ratio": 0.001}
MEASURED = {
    "iteration": 6, "seconds": 0.5, "unmeasured": 1, "finite": False, "passes": 3, "seconds_total": 1.25,
    "parts": {"": PART | {"nans": 2, "ratio": None}, "layer0": PART | {"nans": 2, "norm": 1.5}},
    "first": {"iteration": 6, "tensor": "layer0.bias", "element": 4, "kind": "nan"},
    "rows": {"written": 40, "dropped": 8},
}


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def attached(name: str = "dp0", **fields: Any) -> tuple[str, dict[str, Any]]:
    given = {"name": name, "run_id": "run-7", "epoch": 1, "ranks": 4, "flows": 8, "resync": "ranges"}
    return "attached", given | fields


def iteration(number: int, name: str = "dp0", **fields: Any) -> tuple[str, dict[str, Any]]:
    return "iteration", {
        "name": name, "iteration": number, "published": True, "status": "verified", "packets": 100, "placed": 60,
        "missing": {}, "healed": 0, "duplicates": 40, "dropped": {}, "lag": 0, "updates": "early", "rebuilt": 0,
        "patched": 0, "stale": 0, "final": "", "filled": {"stream": 1000}, "unproven": [], "failed": [], "why": [],
        "matches": 2,
    } | fields


def times(number: int, name: str = "dp0", **fields: Any) -> tuple[str, dict[str, Any]]:
    return "times", {
        "name": name, "iteration": number, "first": START + number, "last": 40.0, "measured": None, "covered": 42.0,
        "record": 41.0, "applied": 60.0, "published": 61.0, "next": 100.0, "slack": 39.0, "rings": [300, 4096],
        "arenas": [2, 4],
    } | fields


def tally(*events: tuple[str, dict[str, Any]], clock: Clock | None = None) -> Tally:
    made = Tally("node-a", clock or Clock())
    for event, fields in events:
        made.hear(event, fields)
    return made


def document(*events: tuple[str, dict[str, Any]], captures: tuple[str, ...] = ("af_packet:eth1",), **more: Any) -> Any:
    """As the board has it."""
    ports = [
        {"device": device, "received": 1000, "bytes": 4_000_000, "last": START - 1, "claimed": 900,
         "last_claimed": START - 2, "streams": [1000], "lost": dict.fromkeys(LOST, 0)} for device in captures
    ]
    body = tally(*events).document() | {
        "version": "9.9", "captures": ports, "unclaimed": {}, "connected": {"dp0": 4}, "shadow": 0,
        "common": {"dp0": {"step": 6, "groups": 3, "apart": ["dp2"]}},
        "ports": {"control": {"known": 4, "strangers": 1, "ended": 7}, "api": {}},
        "inboxes": {"dp0": {"bytes": 10, "most": 100, "held_up": 2}}, "telemetry": {"dp0": MEASURED},
    } | more
    return json.loads(json.dumps(body))
