"""What trainers hear while there are no versions: each message once, in which order, and what the log says."""

from __future__ import annotations

from typing import Any

import pytest

from flowcheck.control.protocol import Notice, Wanted
from flowcheck.node.groups import state_requests
from flowcheck.node.groups.state_requests import LOOK_SECONDS, OWN, QUIET, SOON, Asking, Beginnings


class Scene:
    def __init__(self, now: float = 0.0) -> None:
        self.now, self.drops = now, 0
        self.told: list[Any] = []
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.asking = Asking(self.told.append, lambda event, **fields: self.said.append((event, fields)),
                             lambda: self.drops, now=lambda: self.now)

    def heard(self) -> list[Any]:
        found, self.told[:] = list(self.told), []
        return found

    def state(self) -> None:
        """One came, and cost no time."""
        self.asking.uploads.announced()
        self.asking.uploads.taken()
        self.asking.answered()


@pytest.fixture
def at() -> Scene:
    return Scene()


def test_the_first_question_goes_out_at_once_and_nothing_else(at: Scene) -> None:
    at.asking.ask("gone")
    assert at.heard() == [Wanted(["state"], "gone")] and at.said == []
    at.asking.again()
    at.state()
    at.asking.again()
    assert at.heard() == []


def test_what_has_to_wait_is_said_and_asked_later(at: Scene) -> None:
    at.state()
    at.drops = 1
    at.now = 3.0
    at.asking.ask("gone")
    assert at.heard() == [Wanted([], ""), Notice("gone; a state is asked for later")]
    assert at.said == [("deferred", {"seconds": OWN, "why": (
        "uploads would follow each other too fast: the next one is asked for after this time, and not while the node"
        " itself drops packets")})]
    at.now += OWN - 0.001
    at.asking.again()
    assert at.heard() == []
    at.now += 0.001
    at.asking.again()
    assert at.heard() == [Notice(""), Wanted(["state"], "gone")]
    at.asking.again()
    assert at.heard() == [] and len(at.said) == 1


def test_seconds_are_said_to_a_tenth(at: Scene) -> None:
    at.asking.uploads.announced()
    at.now = 0.123456
    at.asking.uploads.taken()
    at.asking.ask("gone")
    assert [fields["seconds"] for _, fields in at.said] == [2.5]


def test_a_state_that_comes_unasked_ends_the_waiting(at: Scene) -> None:
    at.state()
    at.drops = 1
    at.asking.ask("gone")
    at.heard()
    at.state()
    assert at.heard() == [Notice("")]
    at.now += 1000
    at.asking.again()
    assert at.heard() == []


def test_a_silent_mirror_is_said_beside_what_waits(at: Scene) -> None:
    at.asking.silent("nothing comes")
    assert at.heard() == [Notice("nothing comes")]
    at.asking.silent("nothing comes")
    assert at.heard() == []
    at.state()
    at.drops = 1
    at.asking.ask("gone")
    assert at.heard() == [Wanted([], ""), Notice("nothing comes; gone; a state is asked for later")]
    at.asking.silent("")
    assert at.heard() == [Notice("gone; a state is asked for later")]
    at.asking.answered()
    assert at.heard() == [Notice("")]
    at.asking.silent("")
    assert at.heard() == []


# -- the clock's own beginning -------------------------------------------------------------------------------


def test_a_job_that_begins_when_the_machine_does_waits_no_longer() -> None:
    """A monotonic clock may begin at 0; nothing may be measured from there."""
    at = Scene(now=0.0)
    assert at.asking.uploads.due()
    at.asking.uploads.taken()  # of which no beginning was seen: it cost nothing
    at.now = 0.05
    assert at.asking.uploads.lost() == 0.0 and at.asking.uploads.due()


def test_before_a_state_came_no_pause_is_due_whatever_was_dropped(at: Scene) -> None:
    at.drops = 5
    assert at.asking.uploads.lost() == 0.0
    at.now = QUIET
    assert at.asking.uploads.due()


def test_drops_are_looked_at_now_and_then_and_a_new_one_starts_the_quiet_time_anew(at: Scene) -> None:
    at.state()
    at.drops = 1
    at.asking.uploads.lost()
    at.now = OWN
    at.drops = 2
    assert not at.asking.uploads.due()
    at.now = OWN + LOOK_SECONDS / 2
    at.drops = 3  # seen at the next look only
    assert not at.asking.uploads.due()
    at.now = OWN + QUIET - 0.5
    assert not at.asking.uploads.due()
    at.now = OWN + 2 * QUIET - 0.75
    assert not at.asking.uploads.due()
    at.now = OWN + 2 * QUIET - 0.5
    assert at.asking.uploads.due()


def test_a_chain_of_just_the_length_is_still_a_short_one(at: Scene) -> None:
    at.state()
    at.now, at.drops = SOON * OWN, 1
    assert at.asking.uploads.lost() == OWN
    at.state()
    at.now, at.drops = at.now + SOON * 2 * OWN, 2
    assert at.asking.uploads.lost() == 2 * OWN
    at.state()
    at.now, at.drops = at.now + SOON * 4 * OWN + 1, 3
    assert at.asking.uploads.lost() == OWN


def test_a_look_is_due_when_its_time_is_over(at: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was dropped is dated by it."""
    monkeypatch.setattr(state_requests, "LOOK_SECONDS", 0.25)
    at.state()
    at.drops = 1
    at.asking.uploads.lost()
    at.now = OWN
    assert at.asking.uploads.due()
    at.now, at.drops = OWN + 0.25, 2
    assert not at.asking.uploads.due()
    at.now = OWN + QUIET
    assert not at.asking.uploads.due()
    at.now = OWN + QUIET + 0.25
    assert at.asking.uploads.due()


def test_versions_that_are_begun_by_ranges_are_not_asked_for() -> None:
    """They are begun again, at the pace of beginnings; once that cannot be, a state is asked for at the other pace."""
    now, told, said, begun = [1000.0], list[Any](), list[tuple[str, dict[str, Any]]](), list[float]()
    asking = Asking(told.append, lambda event, **fields: said.append((event, fields)), lambda: 0,
                    lambda: begun.append(now[0]), lambda: now[0])
    asking.ask("gone")
    assert (begun, told, said) == ([1000.0], [], [])
    asking.beginnings.begun()
    asking.ask("gone again")
    assert told == [Wanted([], ""), Notice("gone again; a state is asked for later")]
    assert said == [("deferred", {"seconds": OWN, "why": Beginnings.WHY})] and len(begun) == 1
    now[0] += OWN
    asking.again()
    assert begun == [1000.0, 1000.0 + OWN] and told[2:] == [Notice("")]
    asking.by_state()
    asking.ask("no ranges any more")
    assert told[3:] == [Wanted(["state"], "no ranges any more")] and len(begun) == 2
