"""Cells from packets that came after later ones of their connection: retransmissions, as a rule. They are counted
apart, because a repair that the link made says something else than one that another mirror made."""

from __future__ import annotations

import pytest
from parser.machine import Engine

from flowcheck.rebuild.plan import JobPlan
from lab.synth import Synthesis
from tests.flowcheck.altered import Packet, spots
from tests.parser.odd_packets import COUNT, PROTOCOLS, feed, kinds, traffic

CELLS = {"ll": 64, "ll128": 120, "simple": 128}  # of a packet of 1,024 bytes
TIME = 1  # iteration looked at


def delayed(protocol: str, *which: int) -> tuple[JobPlan, Synthesis, list[Packet]]:
    """Packets of a message that carries gradients, each of which comes behind the one that was sent after it."""
    job, plan, made = traffic(protocol, 7)
    places = spots(made, protocol, job.flows[0].qpns[0], TIME)[0].packets
    packets = list(made.packets)
    for one in which:
        packets[places[one]], packets[places[one + 1]] = packets[places[one + 1]], packets[places[one]]
    return plan, made, packets


def of_iterations(packets: list[Packet], first: int, end: int) -> list[Packet]:
    each = len(packets) // 7
    return packets[first * each : end * each]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_comes_after_later_packets_is_late(protocol: str) -> None:
    plan, made, packets = delayed(protocol, 1, 4)
    engine, in_order = Engine(plan.engine), Engine(plan.engine)
    feed(engine, of_iterations(packets, 0, 3))
    feed(in_order, of_iterations(list(made.packets), 0, 3))
    assert [engine.late(iteration) for iteration in range(3)] == [0, 2 * CELLS[protocol], 0]
    assert [in_order.late(iteration) for iteration in range(3)] == [0, 0, 0]
    for iteration in range(3):
        assert engine.covered(iteration) == plan.cells[min(iteration, 1)]
        assert engine.region(iteration)[: 4 * COUNT].tobytes() == made.reduced[iteration, 0].tobytes()
    feed(engine, of_iterations(packets, 1, 3))  # all of it again: nothing is new
    assert engine.late(TIME) == 2 * CELLS[protocol] and kinds(engine) == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_next_iteration_in_an_arena_has_none_of_them(protocol: str) -> None:
    plan, _, packets = delayed(protocol, 1)
    engine = Engine(plan.engine)
    for iteration in range(7):
        feed(engine, of_iterations(packets, iteration, iteration + 1))
        assert engine.late(iteration) == (CELLS[protocol] if iteration == TIME else 0)
        engine.retire()
    assert engine.config.arenas <= 5 and kinds(engine) == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_where_each_packet_belongs_that_comes_for_a_closed_iteration_is_known(protocol: str) -> None:
    """One iteration's packets come after it was closed: their places are all of it, and nothing else."""
    _, plan, made = traffic(protocol, 7)
    engine = Engine(plan.engine)
    feed(engine, of_iterations(list(made.packets), 0, TIME))
    engine.retire(TIME + 1)
    feed(engine, of_iterations(list(made.packets), TIME, TIME + 1))
    places = sorted(engine.late_places())
    assert {iteration for iteration, _, _ in places} == {TIME} and engine.outcomes(0)["late"][0] >= len(places)
    assert {byte for _, first, nbytes in places for byte in range(first, first + nbytes)} == set(range(4 * COUNT))
