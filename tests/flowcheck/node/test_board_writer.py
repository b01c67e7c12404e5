"""What the node puts on its board: events, counters and who is connected; a few times a second, and never too much."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowcheck import __version__
from flowcheck.node.status import board_writer as module
from flowcheck.node.status.board import ROOM, Glance
from flowcheck.node.status.board_writer import LOST, BoardWriter
from flowcheck.node.status.counters import MOST_GROUPS, MOST_NAMES

from .told_scene import START, Clock, attached, iteration

ROOT = Path(__file__).resolve().parents[3]


class Scene:
    """Two captures, one of two queues, with counters that are set by hand."""

    def __init__(self) -> None:
        self.stamp = Clock()
        self.now = 100.0
        self.counters = [{"received": 0, "bytes": 0, "published": 0} | dict.fromkeys(LOST, 0) for _ in range(2)]
        self.queues = [[0], [0, 0]]
        planned: Any = [
            SimpleNamespace(device=f"af_packet:eth{i}", live=SimpleNamespace(queues=len(queues)))
            for i, queues in enumerate(self.queues)
        ]
        sources = [SimpleNamespace(counters=lambda queue=None, i=i: self.counters[i] if queue is None else {
            "received": self.queues[i][queue]}) for i in range(2)]
        self.claimed = [0, 0]
        port: Any = SimpleNamespace(unclaimed={"unknown": 3}, claimed=lambda capture: self.claimed[capture])
        self.connected = {"dp0": 2}
        self.common = {"dp0": {"step": 4, "groups": 2, "apart": []}}
        self.board_writer = BoardWriter(
            "node-a", planned, sources, port, lambda: self.connected, lambda: self.now, self.stamp, lambda: self.common)
        self.glance = Glance(self.board_writer.board.fd)

    def look(self) -> Any:
        self.now += 1.0
        self.board_writer.look()
        return json.loads(self.glance.read())


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    with contextlib.closing(made.board_writer):
        yield made


def test_what_is_on_the_board(scene: Scene) -> None:
    scene.board_writer.tally.hear(*attached())
    scene.counters[1] |= {"received": 30, "bytes": 400, "ring_full": 2}
    del scene.counters[0]["bytes"]  # as of a port that does not count them
    scene.queues[1] = [10, 20]
    told = scene.look()
    assert (told["node"], told["version"], told["started"], told["time"]) == ("node-a", __version__, START, START)
    assert told["unclaimed"] == {"unknown": 3} and told["connected"] == {"dp0": 2}
    assert told["common"] == scene.common and told["shadow"] == 0
    assert told["groups"][0]["name"] == "dp0" and told["events"][0]["event"] == "attached"
    assert told["captures"][0] == {"device": "af_packet:eth0", "received": 0, "bytes": 0, "last": 0.0,
                                   "claimed": 0, "last_claimed": 0.0, "streams": [0],
                                   "lost": dict.fromkeys(LOST, 0), "last_lost": 0.0}
    assert told["captures"][1] == {"device": "af_packet:eth1", "received": 30, "bytes": 400, "last": START,
                                   "claimed": 0, "last_claimed": 0.0, "streams": [10, 20],
                                   "lost": dict.fromkeys(LOST, 0) | {"ring_full": 2}, "last_lost": START}


def test_when_the_newest_packet_came(scene: Scene) -> None:
    lasts = []
    for received in (0, 5, 5, 9):
        scene.stamp.now += 1
        scene.counters[0]["received"] = received
        lasts.append(scene.look()["captures"][0]["last"])
    assert lasts == [0.0, START + 2, START + 2, START + 4]


def test_when_the_newest_packet_of_a_followed_job_came(scene: Scene) -> None:
    """What a switch sends by itself does not count."""
    found = []
    for received, claimed in ((5, 0), (9, 4), (20, 4), (21, 5)):
        scene.stamp.now += 1
        scene.counters[0]["received"], scene.claimed[0] = received, claimed
        one = scene.look()["captures"][0]
        found.append((one["claimed"], one["last_claimed"]))
    assert found == [(0, 0.0), (4, START + 2), (4, START + 2), (5, START + 4)]


def test_not_more_often_than_is_needed(scene: Scene) -> None:
    scene.look()
    for later, count in ((0.0, 1), (module.EVERY_SECONDS - 0.01, 1), (module.EVERY_SECONDS, 2)):
        scene.now = 101.0 + later
        scene.board_writer.look()
        assert scene.glance.count == count


def test_what_is_too_much_is_left_out_before_sums_are(scene: Scene) -> None:
    sentence = "x" * 600
    for name in (f"g{i}" for i in range(16)):
        scene.board_writer.tally.hear(*attached(name))
        for number in range(48):
            scene.board_writer.tally.hear(*iteration(number, name, why=[["covered", sentence]]))
    for _ in range(64):
        scene.board_writer.tally.hear("problem", {"why": sentence})
    assert len(json.dumps(scene.board_writer.tally.document())) > ROOM
    told = scene.look()
    rows = [len(group["rows"]) for group in told["groups"]]
    assert rows[0] in (24, 12, 6, 3) and len(set(rows)) == 1 and told["groups"][0]["rows"][-1]["iteration"] == 47
    assert all(group["counts"]["published"] == 48 for group in told["groups"])


def test_names_and_numbers_alone_have_room(scene: Scene) -> None:
    """As many as are kept, and as long as they may be: else the node would seem to hang."""
    tally = scene.board_writer.tally
    failure = {"iteration": 10**6, "detected": START, "restored": START, "resumed": START, "seconds": 60.25,
               "repeated": 3}
    names = [f"{number:032}" for number in range(MOST_NAMES)]
    for name in names[-MOST_GROUPS:]:
        for _ in range(16):
            tally.hear("job_recovered", {"name": name} | failure)
    for name in names:
        for event in ("copied", "uncopied", "problem", "protected", "unprotected", "redone", "unjournaled"):
            tally.hear(event, {"name": name, "why": "x" * 600})
    told = scene.look()
    assert len(told["counts"]["copied"]) == MOST_NAMES and len(told["groups"]) == MOST_GROUPS


def test_rows_and_events_go_before_nothing_is_said(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.board_writer.tally.hear(*attached())
    scene.board_writer.tally.hear(*iteration(1))
    written: list[bytes] = []
    monkeypatch.setattr(scene.board_writer.board, "write", lambda text: written.append(text) or False)
    scene.now += 1
    scene.board_writer.look()  # ends, although nothing fits
    last = json.loads(written[-1])
    assert last["events"] == [] and last["groups"][0]["rows"] == [] and last["groups"][0]["counts"]["published"] == 1


def test_lost_is_what_the_page_of_counters_calls_lost() -> None:
    page = (ROOT / "docs/reference/events.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)` \|.*\| yes \|$", page, re.MULTILINE)) == tuple(
        name for name in re.findall(r"uint64_t (\w+);", (ROOT / "dataplane/include/rx_counters.h").read_text())
        if name in LOST)
    assert set(LOST) == set(re.findall(r"^\| `(\w+)` \|.*\| yes \|$", page, re.MULTILINE))
