"""Who is asked for what is stale, by which message, and what becomes of the answers (holes_scene.py)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowcheck.control.protocol import Patch, Ranges
from flowcheck.errors import UserError
from flowcheck.job.clock import Clock
from flowcheck.job.model import ModelEntry
from flowcheck.node.config.replica import ReplicaSettings
from flowcheck.node.groups.members import RankSession
from flowcheck.node.groups.ranges import Resync, wished
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.events import Asked, Patched
from lab.synth import example_job

from .group_scene import Peer
from .holes_scene import HOLE, Scene
from .live_scene import alike, small_job


class Asking(Scene):
    """peers: by rank; members: those that are attached."""

    def __init__(self, patch: pytest.MonkeyPatch, **options: Any) -> None:
        self.peers = {rank: Peer(rank) for rank in (0, 1)}
        self.members: dict[int, RankSession] = {rank: peer.member for rank, peer in self.peers.items()}
        super().__init__(patch, members=self.members, **options)

    def told(self, rank: int) -> list[Ranges]:
        return [message for message in self.peers[rank].told if isinstance(message, Ranges)]

    def give(self, rank: int, number: int, value: float, request: int = -1) -> None:
        """A rank's answer to the last question, as it comes over its connection. number: the trainer's iteration."""
        asked = self.told(rank)[-1]
        sizes: dict[str, int] = {}
        for name, _, length in asked.ranges:
            sizes[name] = sizes.get(name, 0) + length
        tensors = {f"model.{name}": torch.full((size,), value) for name, size in sizes.items()}
        answer = Patch(asked.request if request < 0 else request, number, asked.ranges)
        self.session.patch(rank, answer, tensors)


def ranges(partial: Any, awaited: int | None, given_up: bool = False) -> Any:
    """Of a RangeRepair what is looked at."""
    follower = SimpleNamespace(chain=SimpleNamespace(next=awaited), clock=Clock(100))
    return SimpleNamespace(partial=partial, given_up=given_up, follower=follower)


@pytest.mark.parametrize("first", [0, 100])
def test_a_hole_is_asked_for_and_healed(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Iterations of messages are the trainer's, who may count from another one."""
    at = Asking(monkeypatch, holes={3: HOLE}, first=first)
    at.go(2)
    assert at.told(0) == at.told(1) == []
    at.go(3)
    [question] = at.told(0)
    assert sum(length for _, _, length in question.ranges) == 6 and at.told(1) == []
    assert at.said[1:] == [Asked(4, 6, 24, (0,))]
    at.poll()
    assert len(at.told(0)) == 1, "once"
    at.give(0, first + 4, -0.5)
    at.go(4)
    assert at.last == (4, True, 6, 0) and at.values() == alike(-0.5) and at.said[2:] == [Patched(4, 3, 6, 24)]


def test_the_next_hole_is_asked_of_the_next_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Asking(monkeypatch, holes={2: HOLE, 3: (0, 1)})
    at.go(2)
    at.go(3)
    assert [len(at.told(rank)) for rank in (0, 1)] == [1, 1]
    at.give(0, 4, -0.5)
    at.give(1, 4, -0.5)
    at.go(4)
    assert at.last == (4, True, 8, 0)


def test_a_rank_that_has_left_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Asking(monkeypatch, holes={2: HOLE})
    at.go(2)
    del at.members[0]
    at.record(3, 1)
    at.poll()
    at.poll()
    assert at.last == (3, False, 0, 6) and len(at.told(1)) == 1, "the other one is asked"
    at.give(1, 4, -0.5)
    at.go(4, (1,))
    assert at.last == (4, True, 6, 0)


def test_who_cannot_give_it_is_not_asked_again_and_a_state_is(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Asking(monkeypatch, holes={2: HOLE})
    at.go(2)
    at.session.patch(0, Patch(at.told(0)[0].request, 0, refused="exp_avg is not all on this rank"), {})
    at.poll()
    assert at.lost == ["the state of single elements cannot be had: exp_avg is not all on this rank"]
    assert at.joining.ranges.given_up and at.session.next is None
    at.give(0, 3, 0.0)  # too late, and of no use


def test_an_answer_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Asking(monkeypatch, holes={2: HOLE})
    at.go(2)
    at.give(0, 3, 0.0, request=99)
    with pytest.raises(UserError, match="other elements than request"):
        at.session.patch(1, Patch(at.told(0)[0].request, 3, [("layer0.bias", 0, 1)]), {})
    at.give(0, 3, 0.0)
    at.go(3)
    assert at.last == (3, True, 6, 0)


@pytest.mark.parametrize(("settings", "values", "how"), [
    ({}, ["lr"], "ranges"),
    ({"resync": "state"}, ["lr"], "state"),
    ({"resync": "ranges"}, ["lr"], "ranges"),
    ({"resync": "ranges", "slots": 2}, ["lr"], "state: replica.slots is 2, and a version with stale elements takes a"),
    ({"resync": "ranges", "slots": 3}, ["lr"], "ranges"),
    ({"resync": "ranges"}, [], "state: the manifest declares no values of a step"),
])
def test_how_a_job_is_healed(settings: dict[str, Any], values: list[str], how: str) -> None:
    job = example_job(count=[40, 20], startup=False)
    job.step_values = values
    assert Resync(ReplicaSettings(**settings), plan_job(job), dict).how.startswith(how)


def test_an_entry_without_elements_makes_nobody_wait() -> None:
    """A shard may have none: what the optimizer keeps of it per tensor comes with every patch."""
    job = example_job(count=[40, 20], startup=False)
    job.step_values = ["lr"]
    job.model += [ModelEntry("mean", [0], kind="buffer"), ModelEntry("unused", [0], kind="optimized")]
    assert Resync(ReplicaSettings(), plan_job(job), dict).how == "ranges"


@pytest.mark.parametrize("where", ["groups_0", "groups"])
def test_gathered_parameters_are_not_healed_by_ranges(where: str) -> None:
    """Whichever iterations gather them, the first or the later ones."""
    job = example_job(count=[40, 20], startup=False)
    job.step_values = ["lr"]
    plan = plan_job(job)
    gathered = replace(plan.iteration_places(0)[0], carries="parameters")
    how = Resync(ReplicaSettings(), replace(plan, **{where: (gathered,)}), dict).how
    assert how == "state: parameters are gathered, and no rank holds all of its state"


@pytest.mark.parametrize(("settings", "how"), [
    ({"slots": 3}, "ranges"), ({"slots": 2}, "state"), ({"slots": 4, "resync": "state"}, "state"),
])
def test_what_a_node_says_before_it_knows_the_job(settings: dict[str, Any], how: str) -> None:
    assert wished(ReplicaSettings(**settings)) == how


def test_what_is_out_counts_against_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 MiB an iteration, 4 bytes an element: of a larger hole so many elements are asked for, and no more."""
    at = Asking(monkeypatch, job=small_job(count=[300_000, 20]), holes={2: (0, 140_000)}, resync_mb=1)
    at.go(2)
    asked = [said for said in at.said if isinstance(said, Asked)]
    assert [(said.elements, said.nbytes) for said in asked] == [(1 << 18, 1 << 20)]


def test_what_has_been_answered_makes_no_room_before_the_next_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a rank that answers fast would be asked for more than the budget of an iteration."""
    at = Asking(monkeypatch, job=small_job(count=[300_000, 20]), holes={2: (0, 140_000)}, resync_mb=1)
    at.go(2)
    asked = [rank for rank in (0, 1) if at.told(rank)]
    for rank in asked:
        at.give(rank, 3, -0.5)
    at.poll()
    at.poll()
    assert [said.elements for said in at.said if isinstance(said, Asked)] == [1 << 18]
    at.go(3)
    assert [said.elements for said in at.said if isinstance(said, Asked)] == [1 << 18, 280_000 - (1 << 18)]


def test_nothing_is_asked_where_no_iteration_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Asking(monkeypatch, holes={2: HOLE})
    at.go(2)
    at.session.patch(0, Patch(at.told(0)[0].request, 0, refused="exp_avg is not all on this rank"), {})
    for given_up, awaited in ((False, None), (True, 3)):
        assert list(at.resync.look(ranges(at.partial, awaited, given_up))) == []
    assert at.resync.by_ranges and len(at.told(0)) == 1


@pytest.mark.parametrize(("following", "first"), [(7, 7), (0, 0), (None, 0)])
def test_an_answer_is_of_use_from_the_next_iteration_on(following: int | None, first: int) -> None:
    job = example_job(count=[40, 20], startup=False)
    taken: list[Any] = []
    partial = SimpleNamespace(take=lambda *given: taken.append(given))
    parameters, states = torch.ones(2), torch.zeros(2)
    Resync(ReplicaSettings(), plan_job(job), dict).take(
        ranges(partial, following), 1, Patch(5, 109, [("w", 3, 2)]),
        {"model.w": parameters, "state.w.exp_avg": states})
    [(patch, since)] = taken
    assert (patch.rank, patch.request, patch.iteration, patch.ranges, since) == (1, 5, 9, (("w", 3, 2),), first)
    assert patch.parameters["w"] is parameters and patch.state["w"]["exp_avg"] is states


def test_each_question_says_its_own_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the questions before."""
    at = Asking(monkeypatch, holes={2: HOLE, 3: (0, 1)})
    at.go(2)
    at.go(3)
    assert [said.nbytes for said in at.said if isinstance(said, Asked)] == [24, 8]


def test_a_refusal_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Asking(monkeypatch, holes={2: HOLE})
    at.go(2)
    at.session.patch(0, Patch(at.told(0)[0].request, 0, refused="exp_avg is not all on this rank"), {})
    at.poll()
    assert at.resync.how == "state: exp_avg is not all on this rank" and not at.resync.by_ranges


def test_each_chain_says_its_own_elements_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the chains before it."""
    at = Asking(monkeypatch, holes={2: HOLE, 5: (0, 1)})
    at.go(2)
    at.give(0, 3, -0.5 + 0.5)
    at.go(3)
    at.go(4)
    at.go(5)
    at.give(1, 6, -1.5)
    at.go(6)
    assert [said for said in at.said if isinstance(said, Patched)] == [Patched(3, 2, 6, 24), Patched(6, 5, 2, 8)]
