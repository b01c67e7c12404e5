"""Stages that share cores and memory: against parts that are passed on one by one, threads that take turns, and cases
that a person can work out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.plan.capacity.sharing import Load, Stage, together

#: Receiving 2 s, placing 3 s, updating 4 s of one core each, in one part; nobody looks on.
LOAD = Load(Stage(2.0, 1, 2e9), Stage(3.0, 1, 3e9), Stage(4.0, 1, 8e9), parts=1, pace=2.0, ring=2.0, watchers=0)
WORK = st.floats(0.5, 5.0)


def in_turns(load: Load, cores: int, quantum: float) -> float:
    """The same by threads that take turns, `cores` of them for a quantum each. Buckets are whole here, and nobody takes
    a turn that he cannot use."""
    done = {"receive": 0.0, "place": 0.0, "update": 0.0}
    stages = {"receive": load.receive, "place": load.place, "update": load.update}
    queue = [(name, number) for name, stage in stages.items() for number in range(stage.threads)]
    queue += [("watch", number) for number in range(load.watchers)]
    now = 0.0
    while done["update"] < 1 - 1e-9:
        ran = []
        for who in queue:
            name, placed = who[0], done["place"] + 1e-9
            if len(ran) == cores:
                break
            if name == "watch":
                ran += [who] * (placed < 1)
                continue
            most = {
                "receive": min(1.0, (now + quantum) / load.pace, placed + load.ring), "place": done["receive"],
                "update": int(placed * load.parts) / load.parts,
            }[name]
            turn = quantum / stages[name].seconds
            if done[name] < 1 and (most >= 1 or most - done[name] >= turn):
                done[name] = min(1.0, done[name] + turn)
                ran.append(who)
        queue = [who for who in queue if who not in ran] + ran
        now += quantum
    return now


def passed_on(stages: tuple[float, float, float], parts: int) -> float:
    """Placing goes on with receiving; a part enters the update when it has left placing, and the part before the
    update."""
    receive, place, update = stages
    placed = updated = 0.0
    for _ in range(parts):
        placed += max(receive, place) / parts
        updated = max(placed, updated) + update / parts
    return updated


@settings(max_examples=100, deadline=None)
@given(WORK, WORK, WORK, st.integers(1, 50), st.floats(0.01, 2.0))
def test_with_cores_and_memory_enough_it_is_a_flow_shop(
    receive: float, place: float, update: float, parts: int, ring: float
) -> None:
    load = Load(Stage(receive, 1), Stage(place, 1), Stage(update, 1), parts, receive, ring, 1)
    assert together(load, None, None) == pytest.approx(passed_on((receive, place, update), parts))
    assert together(load, 4, None) == pytest.approx(together(load, None, None))


@settings(max_examples=25, deadline=None)
@given(WORK, WORK, WORK, st.sampled_from([1, 2, 4, 100]), st.integers(1, 3), st.integers(0, 2), st.floats(0.1, 2.0))
def test_with_fewer_it_is_what_threads_that_take_turns_need(
    receive: float, place: float, update: float, parts: int, cores: int, watchers: int, ring: float
) -> None:
    load = Load(Stage(receive, 1), Stage(place, 1), Stage(update, 1), parts, 0.8 * receive, ring, watchers)
    assert together(load, cores, None) == pytest.approx(in_turns(load, cores, 0.003), rel=0.03)


@settings(max_examples=25, deadline=None)
@given(WORK, WORK, WORK, st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_threads_of_a_stage_take_as_many_turns(
    receive: float, place: float, update: float, placing: int, updating: int, cores: int
) -> None:
    load = Load(Stage(receive, 1), Stage(place, placing), Stage(update, updating), 4, receive, 2.0, 1)
    assert together(load, cores, None) == pytest.approx(in_turns(load, cores, 0.003), rel=0.03)


def test_by_hand() -> None:
    assert together(LOAD, None, None) == pytest.approx(7.0), "3 s of placing, then the update"
    assert together(LOAD, 1, None) == pytest.approx(9.0), "all of the work on one core"
    # a third of the core for each while packets come, of which 2/3 are placed then; half of it for each until all are
    assert together(replace(LOAD, watchers=1), 1, None) == pytest.approx(2 * 3 + 1 * 2 + 4)
    halves = replace(LOAD, parts=2)
    assert together(halves, None, None) == pytest.approx(1.5 + 4.0)
    assert together(halves, 1, None) == pytest.approx(9.0)


def test_what_the_memory_carries_slows_whoever_runs() -> None:
    """13e9 bytes. Alone, placing and receiving move 2e9 a second at the most, and the update as many."""
    assert together(LOAD, None, 2.0) == pytest.approx(7.0), "as fast as they want"
    assert together(LOAD, None, 1.0) == pytest.approx(13.0), "all the time at its limit"
    # both at 4/5 of their speed until all has come, of which 2/3 are placed; 1e9 bytes more at full speed; the update
    assert together(LOAD, None, 1.6) == pytest.approx(2 / 0.8 + 1.0 + 8e9 / 1.6e9)
    assert together(LOAD, 1, 1.0) == pytest.approx(13.0), "a core waits for the memory, and does nothing else"


@settings(max_examples=60, deadline=None)
@given(WORK, WORK, WORK, st.integers(1, 9), st.integers(1, 6), st.integers(0, 2), st.floats(0.5, 20.0))
def test_never_sooner_than_all_work_all_bytes_or_more_of_either(
    receive: float, place: float, update: float, parts: int, cores: int, watchers: int, gbs: float
) -> None:
    load = Load(Stage(receive, 2, 2e9), Stage(place, 1, 3e9), Stage(update, 2, 8e9), parts, receive / 2, 0.3, watchers)
    found, close = together(load, cores, gbs), 1 + 1e-6
    assert found * close >= max(load.seconds / cores, load.nbytes / (1e9 * gbs), together(load, None, None))
    assert found * close >= together(load, cores, None) and found * close >= together(load, None, gbs)
    assert found * close >= together(load, cores, 2 * gbs)
    assert load.seconds == pytest.approx(receive + place + update) and load.nbytes == 13e9


def test_a_port_that_is_slow_is_waited_for_and_a_full_ring_holds_it_up() -> None:
    slow = replace(LOAD, pace=6.0)
    assert together(slow, None, None) == pytest.approx(10.0)
    assert together(slow, 1, None) == pytest.approx(10.0), "five sixths of a core are busy until then"
    # a third of the core for each until all has come, half of it until the other 2 s of placing are done, the update
    watched = replace(LOAD, receive=Stage(1.0, 1), pace=1.0, watchers=1)
    assert together(watched, 1, None) == pytest.approx(3 * 1 + 2 * 2 + 4)
    # a full ring makes receiving as slow as placing: of 3 + 1 + 3 s, two threads want as much and one a third of that
    full = replace(watched, ring=1e-6)
    assert together(full, 1, None) == pytest.approx(3 + 1 + 3 + 4, rel=1e-4)
