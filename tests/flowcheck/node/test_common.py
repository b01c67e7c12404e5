"""Which step is common, what is kept for it, and who is apart: the rule alone, in jobs that are played through, and by
the clock of a node."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.control.protocol import Steps
from flowcheck.node.peers.common_step import (
    APART_SECONDS,
    MOST_NAMED,
    MOST_NODES,
    Common,
    is_behind,
    newest_common,
    worth,
)

RUN = ("run", 2)
steps = st.frozensets(st.integers(0, 30), max_size=4)


# -- the rule ------------------------------------------------------------------------------------------------


@given(own=steps, others=st.lists(steps, max_size=4))
def test_what_is_worth_most_is_the_newest_step_that_all_have(own: Any, others: list[Any]) -> None:
    found = worth(own, others)
    others = [one for one in others if one]
    shared = [step for step in own if all(step in one for one in others)]
    assert len(set(found)) == len(found) and set(found) <= own
    if not others:
        assert found == (), "alone everything is as it ever was"
        return
    assert newest_common(own, others) == max(shared, default=None)
    assert not shared or found[0] == max(shared)
    rest = found[1:] if shared else found
    assert list(rest) == sorted(rest), "what is reached sooner is worth more"
    for step in own:
        hopeless = any(step not in one and step < max(one) for one in others)
        assert (step in rest) == (not hopeless and step not in shared and step > max(shared, default=-1))


@pytest.mark.parametrize(("own", "others", "kept"), [
    ({5, 6, 7}, [], ()), ({5, 6, 7}, [set()], ()),
    ({5, 6, 7}, [{6, 7, 8}], (7,)), ({5, 6, 7}, [{4, 5, 6}], (6, 7)), ({5, 6, 7}, [{4, 5}], (5, 6, 7)),
    ({5, 6, 7}, [{3, 4}], (5, 6, 7)), ({5, 6, 7}, [{8, 9}], ()), ({5, 6, 7}, [{5, 9}], (5,)),
    ({5, 6, 7}, [{5, 6}, {6, 7}], (6, 7)), ({5, 6, 7}, [{5, 6}, {5, 7}], (5, 7)), ({5, 6, 7}, [{5}, {7}], (7,)),
    (set(), [{5}], ()), ({0}, [{1}], ()), ({1}, [{0}], (1,)), ({0, 1}, [{0}], (0, 1)),
])
def test_what_is_kept(own: set[int], others: list[set[int]], kept: tuple[int, ...]) -> None:
    assert worth(own, others) == kept


@pytest.mark.parametrize(("own", "other", "slots", "behind"), [
    ({7, 8}, {6, 7}, 3, False), ({7, 8}, {5, 6}, 3, False), ({7, 8}, {4, 5}, 3, True), ({7, 8}, {4, 5}, 4, False),
    ({5, 8}, {4, 5}, 3, True), ({5, 8}, {5, 9}, 3, True), ({7, 8}, {20, 21}, 3, False), ({8}, set(), 3, False),
    (set(), {1}, 3, False), ({4, 5}, {8, 9}, 3, False),
])
def test_who_is_behind(own: set[int], other: set[int], slots: int, behind: bool) -> None:
    """One that leaps ahead and has nothing newer in common with us is behind as well."""
    assert is_behind(own, other, slots) is behind


# -- jobs that are played through ----------------------------------------------------------------------------


class Node:
    """Slots as a replica has them: one is built while the others are complete, and the newest is never taken."""

    def __init__(self, slots: int) -> None:
        self.slots, self.steps, self.taken = slots, [0], 0

    def begin(self, others: list[set[int]]) -> None:
        """The slot for the next version."""
        if len(self.steps) < self.slots:
            return
        idle = [step for step in self.steps if step != max(self.steps)]
        assert idle, "a node never waits"
        kept = worth(set(self.steps), others)
        order = sorted(idle, key=lambda one: (one in kept, -kept.index(one) if one in kept else one))
        self.taken = order[0]
        self.steps.remove(self.taken)

    def publish(self, step: int) -> None:
        self.steps.append(step)


def common_of(nodes: list[Node]) -> int | None:
    return newest_common(nodes[0].steps, [one.steps for one in nodes[1:]])


@settings(max_examples=200, deadline=None)
@given(slots=st.sampled_from([3, 4]), count=st.integers(2, 4), moves=st.lists(st.integers(0, 3), max_size=120))
def test_once_there_is_a_common_step_there_is_one_ever_after(slots: int, count: int, moves: list[int]) -> None:
    """Whoever stands still, however long, and whoever runs ahead: as long as each hears what the others have."""
    nodes = [Node(slots) for _ in range(count)]
    newest = 0
    for move in moves:
        node = nodes[move % count]
        node.begin([set(one.steps) for one in nodes if one is not node])
        assert common_of(nodes) is not None
        node.publish(max(node.steps) + 1)
        found = common_of(nodes)
        assert found is not None and found >= newest, "it does not go back"
        newest = found
        assert len(node.steps) <= slots


@settings(max_examples=60, deadline=None)
@given(slots=st.sampled_from([2, 3, 4]), late=st.integers(0, 1), moves=st.lists(st.booleans(), max_size=80))
def test_nodes_that_keep_up_do_as_if_they_were_alone(slots: int, late: int, moves: list[bool]) -> None:
    """A node that is one step after the other, at most: the oldest version makes room, as ever."""
    one, other = Node(slots), Node(slots)
    for first in moves:
        node, far = (one, other) if first else (other, one)
        if max(node.steps) - max(far.steps) >= min(late, slots - 2):
            node, far = far, node  # whoever is ahead waits for the other
        before = min(node.steps)
        full = len(node.steps) == slots
        node.begin([set(far.steps)])
        assert not full or node.taken == before
        node.publish(max(node.steps) + 1)


@settings(max_examples=40, deadline=None)
@given(behind=st.integers(1, 12), seed=st.integers(0, 1000))
def test_with_four_slots_a_node_that_is_ever_behind_holds_nothing_up(behind: int, seed: int) -> None:
    """The common step comes on by as much as the other is behind, again and again."""
    draw = random.Random(seed)
    ahead, after = Node(4), Node(4)
    for step in range(1, 100):
        ahead.begin([set(after.steps)])
        ahead.publish(step)
        if step > behind and draw.random() < 0.98:
            after.begin([set(ahead.steps)])
            after.publish(max(after.steps) + 1)
        found = common_of([ahead, after])
        assert found is not None and max(after.steps) - found <= 2 * (step - max(after.steps)) + 2


def share_of_time(keeping: bool, slots: int, seed: int = 1) -> float:
    """Of a job of two stages in lockstep, one of whose nodes stands still for thirty steps of a hundred: the share of
    its time in which both have a step in common. What a node is told is half a step old."""
    draw = random.Random(seed)
    nodes = [Node(slots), Node(slots)]
    told: list[list[tuple[float, set[int]]]] = [[(-1.0, {0})], [(-1.0, {0})]]
    moments = sorted(
        (step + shift + draw.random() / 3, i, shift)
        for step in range(1, 101) for i in (0, 1) for shift in (0.0, 0.5) if not (i and 40 <= step < 70)
    )
    has = last = 0.0
    for at, i, shift in moments:
        has += (at - last) * (common_of(nodes) is not None)
        last = at
        if shift:
            nodes[i].publish(int(at))
        else:
            heard = next(said for when, said in reversed(told[1 - i]) if when <= max(at - 0.5, 0.0))
            nodes[i].begin([heard] if keeping else [])
        told[i].append((at, set(nodes[i].steps)))
    return has / last


@pytest.mark.parametrize("slots", [3, 4])
def test_a_node_that_stands_still_takes_no_common_step_away(slots: int) -> None:
    assert share_of_time(False, slots) < 0.8 and share_of_time(True, slots) == 1


# -- a node --------------------------------------------------------------------------------------------------


class Scene:
    def __init__(self, slots: int = 3, seconds: float = 60.0) -> None:
        self.now = 1000.0
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.common = Common("a", seconds, slots, lambda event, **more: self.said.append((event, more)),
                             lambda: self.now)

    def hear(self, *have: Any, node: str = "b", name: str = "b") -> Steps:
        """have: groups with their steps, of RUN."""
        shares = [[*RUN, group, sorted(of)] for group, of in have]
        return self.common.hear(Steps(node * 32, name, shares), "10.0.0.3:7070")

    def order(self, *steps: int, group: str = "s0", run: tuple[str, int] = RUN) -> tuple[int, ...] | None:
        return self.common.order(group, run, steps)

    def look(self, seconds: float = 0.0) -> list[tuple[str, dict[str, Any]]]:
        self.now += seconds
        self.said.clear()
        self.common.look()
        return self.said


def test_a_group_that_hears_nothing_does_as_it_does_alone() -> None:
    scene = Scene()
    for newest in range(3, 40):
        assert scene.order(newest - 1, newest) == ()
    assert scene.look(1e6) == [] and scene.common.document() == {}


def test_groups_of_one_node_and_of_others_are_heard_alike() -> None:
    scene = Scene()
    assert scene.order(6, 7) == ()
    assert scene.order(5, 6, group="s1") == (6,)
    assert scene.order(6, 7) == (6, 7), "the other group has come meanwhile"
    assert scene.order(6, 7) is None, "nothing new"
    scene.hear(("s2", [4, 6]))
    assert scene.order(6, 7) == (6, 7) and scene.order(5, 6, group="s1") == (6,)
    scene.hear(("s2", [6, 7]))
    scene.order(6, 7, group="s1")
    assert scene.order(6, 7) == (7,)
    assert scene.common.document()["s1"] == {"step": 7, "groups": 3, "apart": []}


@pytest.mark.parametrize("run", [("run", 3), ("other", 2), ("", 2)])
def test_groups_of_other_runs_and_epochs_are_no_part_of_the_job(run: tuple[str, int]) -> None:
    scene = Scene()
    scene.hear(("s1", [4, 5]))
    scene.order(4, 5, group="s2")
    assert scene.order(6, 7, run=run) == () and scene.look(1e6) == []


def test_what_another_node_says_of_the_same_group_is_not_ours() -> None:
    """A peer of the group, or one that lies: what it has is no reason to keep anything."""
    scene = Scene()
    scene.hear(("s0", [1, 2]))
    assert scene.order(6, 7) == ()


def test_of_a_group_at_several_nodes_what_any_of_them_has_counts() -> None:
    scene = Scene()
    scene.hear(("s1", [1, 2]), node="b")
    scene.hear(("s1", [6, 7]), node="c")
    assert scene.order(6, 7) == (7,) and scene.look(5) == []


def test_what_a_node_said_last_is_all_that_it_has() -> None:
    scene = Scene()
    scene.hear(("s1", [5, 6]), ("s2", [5, 6]))
    assert scene.order(5, 6, 7) == (6, 7)
    scene.hear(("s1", [6, 7]))
    assert scene.order(5, 6, 7) == (7,)
    scene.hear(("s1", [6, 7]))
    assert scene.order(5, 6, 7) is None, "the same once more is nothing new"
    scene.hear()
    assert scene.order(5, 6, 7) == ()


def test_a_node_says_what_all_its_groups_have() -> None:
    scene = Scene()
    scene.order(6, 7)
    scene.order(5, 6, group="s1", run=("x", 0))
    scene.order(group="s2")
    said = scene.hear()
    assert sorted(said.have) == [("run", 2, "s0", [6, 7]), ("x", 0, "s1", [5, 6])] and said.name == "a"
    scene.common.gone("s1")
    assert scene.common.steps_now().have == [("run", 2, "s0", [6, 7])]
    assert scene.common.hear(scene.common.steps_now(), "itself") == scene.common.steps_now() and scene.order(6, 7) == ()


def test_who_tells_others_is_woken_by_what_is_new_here_and_by_nothing_else() -> None:
    scene = Scene()
    seen = scene.common.wait(-1, 0)
    scene.hear(("s1", [5, 6]))
    assert scene.common.wait(seen, 0) == seen
    scene.order(6, 7)
    assert (new := scene.common.wait(seen, 60)) != seen
    scene.order(6, 7)
    assert scene.common.wait(new, 0) == new
    scene.common.gone("nobody")
    assert scene.common.wait(new, 0) == new
    scene.common.gone("s0")
    assert (gone := scene.common.wait(new, 60)) != new
    scene.order(6, 7)
    assert (new := scene.common.wait(gone, 60)) != gone
    scene.common.wake()
    assert scene.common.wait(new, 60) != new


def test_a_group_that_is_behind_is_named_and_its_step_is_kept_for_a_time() -> None:
    scene = Scene(seconds=60)
    scene.hear(("s1", [4, 5]))
    scene.hear(("s2", [5, 7, 8]), node="c", name="c")
    scene.order(5, 6, 7)
    assert scene.look(100) == [], "two steps behind are not too many"
    scene.order(5, 7, 8)
    assert scene.look() == [], "what it says takes its time to be here"
    [(event, said)] = scene.look(APART_SECONDS)
    assert event == "group_behind" and (said["name"], said["shard"], said["step"], said["newest"]) == ("s0", "s1", 5, 8)
    assert said["nodes"] == ["b (10.0.0.3:7070)"] and "step 5 of group 's1' is more than 2 behind step 8" in said["why"]
    assert scene.look(1) == [], "once"
    assert scene.common.document()["s0"] == {"step": 8, "groups": 3, "apart": ["s1"]}, "the rest goes on"
    assert scene.order(5, 7, 8) is None and worth({5, 7, 8}, [{4, 5}, {5, 7, 8}]) == (5, 7, 8)
    scene.order(5, 8, 9)
    scene.hear(("s2", [5, 9]), node="c", name="c")
    assert scene.order(5, 8, 9) == (5, 9)
    assert scene.look(57.9) == []
    [(event, said)] = scene.look(0.2)
    assert event == "group_abandoned" and (said["name"], said["shard"], said["step"]) == ("s0", "s1", 5)
    assert scene.order(5, 8, 9) == (9,), "nothing is kept for it any more"
    assert scene.look(1000) == []
    scene.hear(("s1", [8, 9]))
    assert scene.look() == [("group_caught_up", {"name": "s0", "shard": "s1", "step": 9})]
    assert scene.order(5, 8, 9) == (9,) and scene.common.document()["s0"] == {"step": 9, "groups": 3, "apart": []}


def test_a_group_that_comes_back_in_time_was_never_named() -> None:
    scene = Scene()
    scene.hear(("s1", [4, 5]))
    scene.order(5, 7, 8)
    assert scene.look() == scene.look(APART_SECONDS - 0.1) == []
    scene.hear(("s1", [7, 8]))
    assert scene.look(0.2) == []
    scene.hear(("s1", [4, 5]))
    assert scene.look() == scene.look(APART_SECONDS - 0.1) == [], "the time begins anew"


def test_a_group_that_is_gone_altogether_is_not_apart_any_more() -> None:
    scene = Scene()
    scene.hear(("s1", [4, 5]))
    scene.order(5, 7, 8)
    scene.look()
    assert [event for event, _ in scene.look(APART_SECONDS)] == ["group_behind"]
    scene.hear()
    assert scene.look() == [("group_caught_up", {"name": "s0", "shard": "s1", "step": None})]


# -- liars ---------------------------------------------------------------------------------------------------

LIES: dict[str, Callable[[int], list[int]]] = {
    "an old step": lambda newest: [3], "none": lambda newest: [], "the next one": lambda newest: [newest + 1],
    "far ahead": lambda newest: [newest + 1000], "ahead, and an old one": lambda newest: [3, newest + 1000],
    "all of them": lambda newest: list(range(max(newest - 15, 0), newest + 1)), "what we have": lambda newest: [newest],
    "another one each time": lambda newest: [max(newest - 7 * (newest % 3), 0)],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("slots", [3, 4])
def test_a_liar_costs_a_slot_for_a_time_and_nothing_else(slots: int, lie: Callable[[int], list[int]]) -> None:
    """Versions go on at every step, the newest ones are there, and the group that is honest has a step in common with
    us: but for the kept slot as if nobody had lied, and after the time just so."""
    scene, honest = Scene(slots, seconds=10), Node(slots)
    mine, alone = Node(slots), Node(slots)
    released = False
    for newest in range(1, 60):
        for node in (honest, alone):
            node.begin([])
            node.publish(newest)
        scene.hear(("s1", honest.steps))
        scene.hear(("s2", lie(newest)), node="c", name="c")
        kept = scene.order(*sorted(mine.steps)) or ()
        full = len(mine.steps) == mine.slots
        if full:
            idle = [step for step in mine.steps if step != max(mine.steps)]
            mine.steps.remove(sorted(idle, key=lambda one: (one in kept, -kept.index(one) if one in kept else one))[0])
        mine.publish(newest)
        scene.order(*sorted(mine.steps))
        assert newest in mine.steps
        lost = set(alone.steps) - set(mine.steps)
        assert len(lost) <= (1 if slots == 3 else 2) and newest_common(mine.steps, [honest.steps]) is not None
        released |= any(event == "group_abandoned" for event, _ in scene.look(1.0))
    if released:
        assert set(alone.steps) == set(mine.steps)


def test_groups_without_end_fill_neither_the_log_nor_the_board() -> None:
    scene = Scene(seconds=10)
    scene.order(6, 7, 8)
    for number in range(8):
        shares = [[*RUN, f"x{number}.{i}", [1]] for i in range(64)]
        scene.common.hear(Steps(f"{number:032x}", "x", shares), "10.6.6.6:1")
    scene.look()
    assert [event for event, _ in scene.look(APART_SECONDS)] == ["group_behind"] * MOST_NAMED
    assert len(scene.common.document()["s0"]["apart"]) == MOST_NAMED and scene.look(1) == []
    scene.hear(("s1", [7, 8]))
    assert scene.common.document()["s0"]["step"] == 8, "whoever is apart does not count, named or not"
    assert [event for event, _ in scene.look(10)] == ["group_abandoned"] * MOST_NAMED and scene.look(10) == []
    assert scene.order(6, 7, 8) == (8,)


def test_one_that_says_it_is_another_node_each_time_is_forgotten_again() -> None:
    scene = Scene()
    scene.order(6, 7)
    for number in range(3 * MOST_NODES):
        scene.common.hear(Steps(f"{number:032x}", "x", [[*RUN, f"s{number}", [7]]]), "10.6.6.6:1")
    assert len(scene.common._nodes) == MOST_NODES
    assert scene.common.document()["s0"]["groups"] == 1 + MOST_NODES
    scene.hear(("s1", [6, 7]))
    assert f"{3 * MOST_NODES - MOST_NODES:032x}" not in scene.common._nodes and "b" * 32 in scene.common._nodes
