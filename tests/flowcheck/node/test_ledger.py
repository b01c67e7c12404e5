"""What a failure costs: which endings count as one, when it was noticed, and what is repeated."""

from __future__ import annotations

from typing import Any

import pytest

from flowcheck.node.status.failures import Ledger


class Scene:
    """A ledger with a clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.ledger = Ledger(lambda event, **fields: self.said.append((event, fields)), lambda: self.now)
        self.ledger.restarted("run")
        self.ledger.attached(0)

    def over(self, *numbers: int) -> None:
        for number in numbers:
            self.ledger.over(number)

    def resumed(self) -> list[dict[str, Any]]:
        return [fields for event, fields in self.said if event == "job_recovered"]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_start_by_itself_is_no_failure(scene: Scene) -> None:
    scene.over(0, 1, 2)
    assert scene.said == []


def test_a_killed_rank_and_a_start_from_the_last_version(scene: Scene) -> None:
    scene.over(5, 6, 7)
    scene.now = 1010.0
    scene.ledger.left(1)
    scene.now = 1012.0
    scene.ledger.left(0)
    assert scene.said == [("left", {"rank": 1, "iteration": 7}), ("left", {"rank": 0, "iteration": 7})]
    scene.now = 1020.0
    scene.ledger.restarted("run")
    scene.now = 1031.5
    scene.ledger.attached(6)  # iterations 6 and 7 are done again
    assert scene.resumed() == []
    scene.now = 1040.25
    scene.over(6)
    assert scene.resumed() == [{"iteration": 6, "detected": 1010.0, "restored": 1031.5, "resumed": 1040.25,
                                "seconds": 30.25, "repeated": 2}]
    scene.over(7, 8)
    assert len(scene.resumed()) == 1


def test_nothing_is_repeated_where_the_last_version_was_there(scene: Scene) -> None:
    scene.over(7)
    scene.ledger.left(0)
    scene.ledger.restarted("run")
    scene.ledger.attached(8)
    scene.over(8)
    assert [fields["repeated"] for fields in scene.resumed()] == [0]


def test_a_start_that_nobody_saw_go_is_noticed_when_it_comes(scene: Scene) -> None:
    scene.over(7)
    scene.now = 1500.0
    scene.ledger.restarted("run")
    scene.ledger.attached(7)
    scene.now = 1501.0
    scene.over(7)
    assert [(one["detected"], one["seconds"], one["repeated"]) for one in scene.resumed()] == [(1500.0, 1.0, 1)]


def test_a_job_that_said_goodbye_has_not_failed(scene: Scene) -> None:
    scene.over(7)
    for rank in (0, 1):
        scene.ledger.bye(rank)
        scene.ledger.left(rank)
    scene.ledger.restarted("run")
    scene.ledger.attached(8)
    scene.over(8)
    assert scene.said == []


def test_the_goodbye_of_another_rank_is_not_the_jobs(scene: Scene) -> None:
    scene.over(7)
    scene.ledger.bye(1)
    scene.ledger.left(1)
    scene.ledger.left(0)
    scene.ledger.restarted("run")
    scene.ledger.attached(7)
    scene.over(7)
    assert [event for event, _ in scene.said] == ["left", "job_recovered"]


def test_goodbyes_are_forgotten_with_their_start(scene: Scene) -> None:
    scene.over(7)
    scene.ledger.bye(0)
    scene.ledger.restarted("run")
    scene.ledger.attached(8)
    scene.over(8)
    scene.ledger.left(0)
    scene.ledger.restarted("run")
    scene.ledger.attached(8)
    scene.over(8)
    assert [event for event, _ in scene.said] == ["left", "job_recovered"]


def test_a_connection_that_comes_back_is_no_failure_and_dates_none(scene: Scene) -> None:
    scene.over(7)
    scene.now = 1100.0
    scene.ledger.left(1)
    scene.ledger.back(1)
    scene.over(8)
    assert scene.resumed() == []
    scene.now = 1200.0
    scene.ledger.left(1)
    scene.now = 1210.0
    scene.ledger.restarted("run")
    scene.ledger.attached(9)
    scene.over(9)
    assert [one["detected"] for one in scene.resumed()] == [1200.0]


def test_another_run_is_not_this_one_again(scene: Scene) -> None:
    scene.over(7)
    scene.ledger.left(0)
    scene.ledger.restarted("other")
    scene.ledger.attached(0)
    scene.over(0)
    assert scene.resumed() == []
    scene.ledger.restarted("run")  # nor is the first one, by now
    scene.ledger.attached(0)
    scene.over(0)
    assert scene.resumed() == []


def test_a_start_that_fails_before_it_has_done_anything_belongs_to_the_failure_before(scene: Scene) -> None:
    scene.over(7)
    scene.now = 1100.0
    scene.ledger.left(0)
    for at in (1110.0, 1120.0):
        scene.now = at
        scene.ledger.restarted("run")
        scene.now = at + 5
        scene.ledger.attached(7)
    scene.now = 1130.0
    scene.over(7)
    assert scene.resumed() == [{"iteration": 7, "detected": 1100.0, "restored": 1125.0, "resumed": 1130.0,
                                "seconds": 30.0, "repeated": 1}]


def test_records_of_a_start_that_has_not_said_its_job_end_no_failure(scene: Scene) -> None:
    scene.over(7)
    scene.ledger.restarted("run")
    scene.over(3)
    assert scene.resumed() == []


def test_who_leaves_before_anything_was_done_is_not_worth_a_line(scene: Scene) -> None:
    scene.ledger.left(1)
    assert scene.said == []
    scene.over(0)
    scene.ledger.left(0)
    assert scene.said == [("left", {"rank": 0, "iteration": 0})]


def test_the_last_iteration_is_the_newest_of_all_ranks(scene: Scene) -> None:
    scene.over(9, 8)
    scene.ledger.left(0)
    assert scene.said[-1][1]["iteration"] == 9


def test_a_clock_that_was_set_back_gives_no_negative_time(scene: Scene) -> None:
    scene.over(7)
    scene.ledger.left(0)
    scene.ledger.restarted("run")
    scene.ledger.attached(7)
    scene.now = 10.0
    scene.over(7)
    assert scene.resumed()[0]["seconds"] == 0.0


def test_who_goes_on_later_than_it_ended_repeats_nothing(scene: Scene) -> None:
    """Iterations that this node has not seen lie between; seconds have three digits."""
    scene.over(7)
    scene.now = 1100.0018
    scene.ledger.restarted("run")
    scene.now = 1200.0014
    scene.ledger.attached(12)
    scene.now = 1300.0026
    scene.over(12)
    assert scene.resumed() == [{"iteration": 12, "detected": 1100.002, "restored": 1200.001, "resumed": 1300.003,
                                "seconds": 200.001, "repeated": 0}]


def test_a_rank_that_goes_again_is_noticed_when_it_went_first(scene: Scene) -> None:
    """And it is named each time."""
    scene.over(7)
    for at in (1100.0, 1200.0):
        scene.now = at
        scene.ledger.left(1)
    scene.now = 1300.0
    scene.ledger.restarted("run")
    scene.ledger.attached(8)
    scene.over(8)
    assert [one["detected"] for one in scene.resumed()] == [1100.0]
    assert [event for event, _ in scene.said] == ["left", "left", "job_recovered"]
    scene.ledger.back(0)  # it was never away
    scene.ledger.left(1)
    assert scene.said[-1] == ("left", {"rank": 1, "iteration": 8})


def test_what_comes_before_any_start_fails_nothing() -> None:
    """Not even where the start has no name."""
    said: list[str] = []
    ledger = Ledger(lambda event, **_: said.append(event), lambda: 1000.0)
    ledger.left(1)
    ledger.bye(2)
    ledger.left(2)
    assert said == []
    ledger.over(7)
    ledger.left(0)
    ledger.restarted("")
    ledger.attached(7)
    ledger.over(7)
    assert said == ["left"]
