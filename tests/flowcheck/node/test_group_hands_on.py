"""What a group hands on to its parts, and of which run and start: names, steps, connections, answers to questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.control.protocol import Flows, Manifest, Patch, Record, User, Wanted
from flowcheck.errors import EnvironmentProblem
from flowcheck.job.model import Job
from flowcheck.node.groups.assigning import WHY
from flowcheck.node.groups.members import Inbound
from flowcheck.node.groups.move_detector import Moved
from flowcheck.node.groups.state_requests import OWN
from flowcheck.node.versions.runs import start_of
from flowcheck.node.versions.user_states import ranks_in, user_folder
from flowcheck.rebuild.version.events import CaughtUp, Closed

from ..hand_node import until
from .group_scene import FakeReplica, Scene, left_behind, scenes, small_job

PUBLISHED = Closed(6, True, "unverified", 1, 1, {}, 0, 0, 0)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    with scenes(tmp_path) as make:
        yield make


def by_ranges() -> Job:
    """A job whose state comes by ranges."""
    job = small_job()
    job.step_values = ["lr"]
    return job


# -- a run and its start -------------------------------------------------------------------------------------------


def test_the_name_of_a_start_is_that_of_its_job_run_first_iteration_and_instance(scene: Callable[..., Scene]) -> None:
    """A version of a peer, or of an earlier process, is taken for this start's by that name alone."""
    body, names = small_job().to_dict(), set()
    for first, instance in ((0, "a"), (5, "a"), (0, "b")):
        at = scene()
        at.follow(first=first, instance=instance)
        names.add(at.session.options["job_start"])
        assert at.session.options["job_start"] == start_of(body, ("synth-0", 0, 2), first, instance)
    assert len(names) == 3


def test_another_run_is_no_repetition_of_the_one_before(scene: Callable[..., Scene]) -> None:
    at, job = scene(), small_job()
    first = at.follow()
    at.give(first, Record(3))
    at.intake.ranks.leave(first.member)
    at.turn()
    job.run_id = "another"
    at.give(at.follow(job, run=("another", 0, 2)), Record(0))
    assert at.events("job_recovered") == []


def test_a_mirror_that_moves_again_and_again_makes_no_storm_of_joins(scene: Callable[..., Scene]) -> None:
    at = scene()
    at.follow()

    def moves() -> int:
        """Sessions by now."""
        at.happens(Moved("nothing comes"))
        at.turn()
        return len(at.sessions)

    assert [moves() for _ in range(4)] == [2, 3, 3, 3]
    at.now += OWN
    assert moves() == 4 and len(at.events("moved")) == 3


# -- files and versions --------------------------------------------------------------------------------------------


def test_of_its_own_run_a_group_keeps_what_is_further_than_its_first_version(
    scene: Callable[..., Scene], tmp_path: Path
) -> None:
    older, newer = (left_behind(tmp_path / f"flowcheck-node--{step}.replica", "synth-0", step) for step in (3, 9))
    at = scene(resync="ranges")
    at.follow(by_ranges())
    at.session.replica.step = 5
    at.happens(PUBLISHED)
    assert not older.exists() and newer.exists()


@pytest.mark.parametrize(("shadow", "there"), [(2, [True, True]), (None, [False, True])])
def test_what_is_offered_stays_where_the_newest_is_withheld(
    scene: Callable[..., Scene], tmp_path: Path, shadow: int | None, there: list[bool]
) -> None:
    paths = [left_behind(tmp_path / f"flowcheck-node--{3 - matches}.replica", "before", 5 - matches, matches=matches)
             for matches in (2, 1)]
    at = scene(resync="ranges", shadow=shadow)
    at.follow(by_ranges())
    at.happens(PUBLISHED)
    assert [path.exists() for path in paths] == there


def test_whichever_step_is_withheld_is_named(scene: Callable[..., Scene]) -> None:
    at = scene(shadow=2)
    at.follow()
    at.session.replica, at.session.matches = FakeReplica(31), 1
    at.happens(PUBLISHED)
    at.session.matches = 2
    at.happens(CaughtUp(40, 41, "b:7071", 360, 0.5))
    said = [(event, fields["step"], fields["matches"]) for event, fields in at.said if "needs" in fields]
    assert said == [("withheld", 31, 1), ("offered", 41, 2)]


def test_what_ranks_gave_of_steps_that_are_gone_goes_when_a_peers_version_comes(scene: Callable[..., Scene]) -> None:
    at = scene(resync="ranges")
    peer = at.follow(by_ranges())
    old, kept = (user_folder(at.session.path, step) for step in (8, 9))
    for number in (7, 8):
        at.intake.put(Inbound(peer.member, User(number, 0), data=b"of rank 0"))
    at.turn()
    until(lambda: ranks_in(old) == ranks_in(kept) == [0])
    at.session.replica.steps = [9]
    at.happens(CaughtUp(8, 9, "b:7071", 360, 0.5))
    until(lambda: not old.exists())
    assert ranks_in(kept) == [0]


# -- answers to what trainers were asked for -----------------------------------------------------------------------


@pytest.mark.parametrize("message", [Patch(1, 3, [["w", 0, 1]]), Patch(1, 3, refused="not here")])
def test_state_by_ranges_goes_to_the_session(scene: Callable[..., Scene], message: Patch) -> None:
    at, tensors = scene(), {"model.w": torch.ones(1)}
    at.follow()
    other = at.join(1)
    at.give(other, message, tensors)
    assert at.session.calls == [("patch", 1, message, tensors)] and other.ended == []


def test_without_a_session_it_goes_nowhere(scene: Callable[..., Scene]) -> None:
    at = scene()
    peer = at.join(0)
    at.give(peer, Patch(1, 3, refused="not here"))
    assert peer.ended == [] and at.said == []


# -- connections without channels ----------------------------------------------------------------------------------


class Unknown:
    """A job of two ranks that have said their connections without channels. marks: what else its manifest says."""

    def __init__(self, at: Scene, *marks: str) -> None:
        self.at, self.job = at, small_job()
        self.body = self.job.to_dict() | {"flows": []}
        del self.body["unproven"]
        self.body |= {"unproven": list(marks)} if marks else {}
        self.flows = [{key: value for key, value in asdict(flow).items() if key != "channel"}
                      for flow in self.job.flows]
        self.ranks = [at.join(rank) for rank in (0, 1)]
        at.give(self.ranks[0], Manifest(self.body))
        for rank in self.ranks:
            at.give(rank, Flows(self.flows))

    def answer(self, monkeypatch: pytest.MonkeyPatch, **said: Any) -> None:
        """The process that looks for them says that."""
        assigning = self.at.assigning

        def look() -> bool:
            assigning._take(said)
            return True

        monkeypatch.setattr(assigning, "look", look)
        self.at.turn()


@pytest.mark.parametrize("marks", [(), ("a mark",)])
def test_a_job_without_channels_waits_until_they_are_known(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, marks: tuple[str, ...]
) -> None:
    at = scene()
    unknown = Unknown(at, *marks)
    assert all(rank.told[-1] == Wanted(["flows"], WHY) for rank in unknown.ranks) and at.sessions == []
    assert at.join(1 + 1).told == [Wanted(["flows"], WHY)]
    asked = at.assigning._asked
    assert asked is not None and asked["job"] == unknown.body
    assert sorted(map(repr, asked["flows"])) == sorted(map(repr, unknown.flows))
    flows = unknown.job.to_dict()["flows"]
    unknown.answer(monkeypatch, flows=flows, unproven="found on the wire", spare=0, unseen=0)
    assert at.session.plan.job.flows == unknown.job.flows
    assert at.session.plan.job.unproven == [*marks, "found on the wire"]


def test_channels_that_cannot_be_told_apart_send_all_ranks_away(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = scene()
    unknown = Unknown(at)
    unknown.answer(monkeypatch, refused={"what": "they send alike", "where": "connections"})
    assert [rank.ended for rank in unknown.ranks] == [["connections: they send alike"]] * 2 and at.sessions == []
    assert [said["why"] for said in at.events("problem")] == ["connections: they send alike"]


def test_so_does_what_keeps_the_node_from_looking(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = scene()
    unknown = Unknown(at)

    def look() -> bool:
        raise EnvironmentProblem("ended with status 1", where="connections")

    monkeypatch.setattr(at.assigning, "look", look)
    at.turn()
    assert [rank.ended for rank in unknown.ranks] == [["connections: ended with status 1"]] * 2


def test_nobody_looks_for_channels_of_a_job_that_has_gone(scene: Callable[..., Scene]) -> None:
    at = scene()
    unknown = Unknown(at)
    at.intake.ranks.leave(unknown.ranks[0].member)
    at.turn()
    assert at.assigning._observer is not None, "rank 1 is still there"
    at.intake.ranks.leave(unknown.ranks[1].member)
    at.turn()
    assert at.assigning._observer is None
