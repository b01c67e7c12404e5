"""A live session goes on from lost gradients: what is stale, what is asked for, what is published (holes_scene.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from flowcheck.errors import UserError
from flowcheck.rebuild.version.events import Event, Held, Patched
from flowcheck.rebuild.version.partial import Patch, cost_of

from .holes_scene import HOLE, Scene
from .live_scene import NAMES, Live, alike, small_job

GRADIENTS_LOST = "gradients were lost"


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    return lambda **options: Scene(monkeypatch, **options)


@pytest.mark.parametrize("threads", [0, 2])
def test_what_was_lost_is_asked_for_and_patched(scene: Callable[..., Scene], threads: int) -> None:
    at = scene(holes={3: HOLE}, threads=threads)
    at.go(2)
    at.go(3)
    assert at.last == (3, False, 0, 6) and at.closed[-1].missing == {"lost": 6}
    assert at.closed[-1].why[0][1].startswith("6 elements of the version wait for the trainer's own state of them; buc")
    assert at.said == [Held(3, 6, False, GRADIENTS_LOST)] and at.lost == []
    assert at.values() == alike(0.5) and at.session.serves == 2, "the last complete version is served"
    assert at.ask() == 6 and at.ask() == 0, "once is enough"
    assert at.partial.asked == 6 * 4
    at.answer(4, -0.5)
    at.go(4)
    assert at.last == (4, True, 6, 0) and at.values() == alike(-0.5)
    assert at.said[1:] == [Patched(4, 3, 6, 24)] and at.closed[-1].status == "unverified"
    at.go(5, checksums=at.sums(-1.0))
    assert at.last == (5, True, 0, 0) and at.closed[-1].status == "verified" and at.lost == []


def test_what_was_patched_follows_nothing_that_was_compared_before(scene: Callable[..., Scene]) -> None:
    """Nor does what was made of it, until its own checksums match: also where the patch comes behind a leap."""
    at = scene(holes={4: HOLE})
    at.go(2, checksums=at.sums(0.5))
    at.go(3)
    assert [one.status for one in at.closed] == ["verified", "follows 3"]
    at.go(4)
    assert at.ask() == 6
    at.answer(5, -1.0)
    at.go(5)
    at.go(6)
    assert [(one.published, one.status) for one in at.closed[3:]] == [(True, "unverified"), (True, "unverified")]
    at.go(7, checksums=at.sums(-2.0))
    at.go(8)
    assert [one.status for one in at.closed[-2:]] == ["verified", "follows 8"]


def test_an_iteration_waits_for_the_record_of_a_rank_that_was_asked(scene: Callable[..., Scene]) -> None:
    """The record comes behind the patch; without it nobody knows whether one is on its way."""
    at = scene(holes={2: HOLE})
    at.go(2)
    assert at.ask() == 6
    [(rank, _, _)] = at.asked
    at.record(3, 1 - rank)
    at.poll()
    assert len(at.closed) == 1
    at.now += 6
    at.poll()
    assert at.waiting == [(3, "the step record of a rank that was asked is not here")] and len(at.closed) == 1
    at.answer(3, 0.0)
    at.go(3, (rank,))
    assert at.last == (3, True, 6, 0) and at.values() == alike(0.0)


def test_a_rank_that_says_nothing_is_waited_for_as_long_as_for_a_record(scene: Callable[..., Scene]) -> None:
    at = scene(holes={2: HOLE})
    at.go(2)
    assert at.ask() == 6
    [(rank, _, _)] = at.asked
    at.record(3, 1 - rank)
    at.poll()
    at.now += 11
    at.poll()
    assert at.last == (3, False, 0, 6)
    assert at.answer(3, 0.0) == [False] and at.partial.stale.elements == 6, "it was given up"
    assert at.ask(ranks=(1 - rank,)) == 6
    at.answer(4, -0.5)
    at.go(4, (1 - rank,))
    assert at.last == (4, True, 6, 0) and at.values() == alike(-0.5)


def test_new_holes_join_and_those_that_are_being_asked_for_are_not_asked_for_again(scene: Callable[..., Scene]) -> None:
    at = scene(holes={2: HOLE, 3: (7, 10), 4: (0, 1)})
    at.go(2)
    assert at.ask() == 6
    at.go(3)
    assert at.last == (3, False, 0, 10) and at.ask() == 4
    at.answer(4, -0.5)
    at.go(4)
    assert at.last == (4, False, 10, 2), "what is lost in the iteration of a patch, too"
    assert at.ask() == 2
    at.answer(5, -1.0)
    at.go(5)
    assert at.last == (5, True, 2, 0) and at.values() == alike(-1.0)
    assert at.said == [Held(2, 6, False, GRADIENTS_LOST), Patched(5, 2, 12, 48)]


def test_a_hole_in_what_a_patch_brings_is_healed_by_it(scene: Callable[..., Scene]) -> None:
    at = scene(holes={2: HOLE, 3: HOLE, 4: HOLE})
    at.go(2)
    at.ask()
    at.answer(4, -0.5)
    at.go(3)
    assert at.ask() == 0
    at.go(4)
    assert at.last == (4, True, 6, 0) and at.values() == alike(-0.5)


@pytest.mark.parametrize("right", [True, False])
def test_a_wrong_patch_is_found_by_the_next_sum_and_ends_it(scene: Callable[..., Scene], right: bool) -> None:
    at = scene(holes={2: HOLE})
    at.go(2)
    at.ask()
    at.answer(3, 0.0 if right else 0.25)
    closed = at.go(3, checksums=at.sums(0.0))
    assert (closed.published, closed.status) == ((True, "verified") if right else (False, "diverged"))
    if not right:
        assert at.lost == ["tensor 'layer1.weight' of iteration 3 differs from the trainer's"]
        assert at.session.replica is None and at.session.next is None and not at.partial.stale


def test_sums_of_stale_entries_are_not_compared_and_all_others_are(scene: Callable[..., Scene]) -> None:
    at = scene(holes={2: HOLE})
    at.go(2)
    [stale] = at.partial.stale.names
    at.go(3, checksums=at.sums(0.0))
    assert at.last == (3, False, 0, 6) and at.lost == []
    other = next(name for name in NAMES if name != stale)
    at.go(4, checksums=at.sums(-0.5) | {other: "0" * 16})
    assert at.lost == [f"tensor {other!r} of iteration 4 differs from the trainer's"]


def test_an_iteration_without_a_record_leaves_everything_stale_and_it_is_patched_in_slices(
    scene: Callable[..., Scene],
) -> None:
    at = scene()
    at.go(2)
    at.now += 11
    at.poll()
    assert at.ended[-1] == (3, False, ["step_record"]) and at.lost == []
    everything = sum(int(np.prod(entry.shape)) for entry in at.job.model)
    [held] = at.said
    assert isinstance(held, Held) and (held.iteration, held.stale, held.all) == (3, everything, True)
    assert "step_record" in held.why and at.values() == alike(0.5)
    step, left = 4, everything
    while left:
        found = at.ask(4 * 17)
        assert found == min(left, 17)
        left -= found
        at.answer(step, 0.5 - 0.5 * (step - 2))
        at.go(step)
        assert at.last == (step, left == 0, found, left)
        step += 1
    assert at.values() == alike(0.5 - 0.5 * (step - 3))
    assert at.said[1:] == [Patched(step - 1, 3, everything, 4 * everything)]
    at.go(step, checksums=at.sums(0.5 - 0.5 * (step - 2)))
    assert at.closed[-1].status == "verified" and at.partial.asked == 4 * everything


def test_iterations_of_which_no_packet_came_leave_everything_stale(scene: Callable[..., Scene]) -> None:
    """A long outage: the stream goes on far behind what the arenas hold."""
    at = scene(wire=[2, *range(40, 46)])
    for t in range(2, 41):
        at.record(t, 0)
        at.record(t, 1)
        at.poll()
    assert at.last[:2] == (40, False) and at.lost == []
    assert at.ask() == at.partial.stale.elements > 0
    at.answer(41, 1.0 - 0.5 * 40)
    at.go(41)
    assert at.closed[-1].published and at.values() == alike(1.0 - 0.5 * 40)


def test_iterations_that_were_skipped_leave_everything_stale(scene: Callable[..., Scene]) -> None:
    """An outage so long that nobody judges each of them: the chain goes on after it."""
    at = scene(wire=[2, *range(3000, 3004)])
    at.go(2)
    assert at.session.next == 3
    at.now += 60  # the record of 3 does not come
    at.poll()
    assert at.said[0] == Held(2997, at.partial.elements, True, "iterations 3 to 2997 passed while no packet came")
    assert at.lost == [] and at.session.next == 2998 and at.session.serves == 2


def test_an_answer_that_comes_too_late_is_asked_for_again(scene: Callable[..., Scene]) -> None:
    at = scene(holes={2: HOLE})
    at.go(2)
    assert at.ask() == 6
    at.go(3)
    assert at.answer(3, 0.0) == [False]
    assert at.ask() == 6
    at.answer(4, -0.5)
    at.go(4)
    assert at.last == (4, True, 6, 0)


def test_a_request_to_a_rank_that_has_left_goes_to_another(scene: Callable[..., Scene]) -> None:
    at = scene(holes={2: HOLE})
    at.go(2)
    assert at.ask() == 6
    [(rank, _, _)] = at.asked
    at.asked = []
    assert at.ask(ranks=(1 - rank,)) == 6 and at.asked[0][0] == 1 - rank
    assert at.ask(ranks=()) == 0


def test_an_answer_to_another_question_is_refused(scene: Callable[..., Scene]) -> None:
    at = scene(holes={2: HOLE})
    at.go(2)
    at.ask()
    [(rank, request, ranges)] = at.asked
    with pytest.raises(UserError, match="other elements than request 1 names"):
        at.partial.take(Patch(rank, request, 3, (*ranges, ("layer0.bias", 0, 1)), {}, {}), 3)
    with pytest.raises(UserError, match="other elements"):
        at.partial.take(Patch(1 - rank, request, 3, tuple(ranges), {}, {}), 3)
    assert at.partial.take(Patch(rank, 77, 3, tuple(ranges), {}, {}), 3) is False


def test_values_that_do_not_fit_are_no_patch(scene: Callable[..., Scene]) -> None:
    at = scene(holes={2: HOLE})
    at.go(2)
    at.ask()
    [(rank, request, ranges)] = at.asked
    at.partial.take(Patch(rank, request, 3, tuple(ranges), {ranges[0][0]: torch.ones(1)}, {}), 3)
    at.go(3)
    assert at.last == (3, False, 0, 6) and at.partial.refused.startswith(f"what rank {rank} sent does not fit: a patch")


def test_without_ranges_it_ends_as_before_and_goes_on_with_a_state(scene: Callable[..., Scene]) -> None:
    at = scene(holes={3: HOLE, 6: HOLE})
    at.go(2)
    at.go(3)
    at.take(at.joining.ranges.give_up("the trainer cannot"))
    assert at.lost == ["the trainer cannot"] and at.session.next is None and at.session.serves == 2
    at.session.announce(6)  # what follows a state is kept until it is here
    at.poll()
    assert at.ended[-1] == (5, False, ["previous"])
    at.state(6, 2.0)
    assert at.go(6).why[0][0] == "covered" and len(at.lost) == 2, "a hole ends it"


def test_a_state_ends_what_was_stale(scene: Callable[..., Scene]) -> None:
    at = scene(holes={2: HOLE})
    at.go(2)
    at.ask()
    at.state(3, 0.5)
    assert not at.partial.stale and at.answer(3, 9.0) == [False]
    at.go(3)
    assert at.last == (3, True, 0, 0) and at.values() == alike(0.0)


def test_traffic_that_cannot_be_placed_at_all_is_no_matter_of_ranges(scene: Callable[..., Scene]) -> None:
    at = scene(holes={2: HOLE})
    at.engine.disagree(2, "extra message")
    failed = [clause for clause, _ in at.go(2).why]
    assert "supported" in failed and len(at.lost) == 1 and at.said == [] and not at.partial.stale


@pytest.mark.parametrize(("name", "options", "cost"), [
    ("sgd", {"lr": 0.5}, 4), ("sgd", {"lr": 0.5, "momentum": 0.9}, 8), ("adam", {"lr": 0.5}, 12),
    ("adamw", {"lr": 0.5, "amsgrad": True}, 16),
])
def test_bytes_of_an_element(name: str, options: dict[str, Any], cost: int) -> None:
    job = small_job(optimizer=name, options=options)
    assert set(cost_of(job).values()) == {cost}


class Catching:
    """In place of a CatchUp: of what it was shown, and whether it was closed."""

    def __init__(self) -> None:
        self.busy, self.looked, self.closed = True, list[Any](), 0

    def look(self, session: Any) -> Iterator[Event]:
        self.looked.append(session)
        yield Held(len(self.looked), 6, False, "of a test")

    def close(self) -> None:
        self.closed += 1


def test_trainers_are_not_asked_while_peers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    catching, asked = Catching(), list[Any]()
    at = Live(monkeypatch, members={}, patched=True, catching=catching)  # type: ignore[arg-type]
    assert at.resync is not None
    monkeypatch.setattr(at.resync, "look", lambda ranges: asked.append(ranges) or iter(()))
    at.look()
    assert catching.looked == [at.joining] and asked == [] and at.said == [Held(1, 6, False, "of a test")]
    catching.busy = False
    at.look()
    assert catching.looked == [at.joining] * 2 and asked == [at.joining.ranges]
    at.session.close()
    assert catching.closed == 1
