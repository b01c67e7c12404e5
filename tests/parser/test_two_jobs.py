"""Jobs of one node that are easily taken for each other: queue pair numbers are each host's own, so two jobs may have
the same ones. What a job gets is what it would get alone, and what an engine that has left meets is its own."""

from __future__ import annotations

import ipaddress
import random
from dataclasses import replace

import pytest
from parser.machine import Engine
from parser.placers import Placers

from flowcheck.job.model import Job
from lab.synth import example_job, generate
from tests.flowcheck.altered import Packet

from .test_placers import assert_equal, job_of, passed, placing, plan_of, room, shuffled, until
from .test_threads import alone, outcomes

FOREIGN = b"no packet of ours".ljust(60, b"\0")


def twin(number: int, **options: object) -> Job:
    """Jobs whose queue pairs have the same numbers, on other hosts: of IPv6 in the same network, of IPv4 anywhere."""
    job = example_job(**{"ranks": 2, "count": 3000, "protocol": "ll", "mtu": 1024, **options})
    away = number << 4 if options.get("ipv6") else random.Random(number).randrange(1 << 19) << 4
    for flow in job.flows:
        flow.src_addr = str(ipaddress.ip_address(flow.src_addr) + away)
        flow.dst_addr = str(ipaddress.ip_address(flow.dst_addr) + away)
    return job


@pytest.mark.parametrize(("ipv6", "jobs"), [(True, 2), (False, 40)])
def test_jobs_of_other_hosts_may_have_the_same_queue_pairs(ipv6: bool, jobs: int) -> None:
    """jobs: of IPv4 so many that places of the table of flows are wanted by several. Nobody follows the last one.
    Each carries values of its own, so a packet of another one would be seen."""
    made = [generate(twin(i, ipv6=ipv6), iterations=2, seed=i) for i in range(jobs)]
    followed = [plan_of(twin(i, ipv6=ipv6)) for i in range(jobs if ipv6 else jobs - 1)]
    (ring,) = rings = room(sum(len(one.packets) for one in made))
    with placing(rings) as placers:
        seats = [placers.attach(Engine(plan.engine)) for plan in followed]
        ring.put(shuffled([one.packets for one in made], 1))
        for seat in seats:
            passed(seat, rings)
        nobodys = sum(packets for packets, _ in placers.strangers(0).values())
    assert nobodys == sum(len(one.packets) for one in made[len(followed) :])
    for seat, plan, one in zip(seats, followed, made, strict=False):
        assert_equal(seat.engine, alone(plan, [one.packets]), 2)
        for iteration in range(2):
            assert seat.engine.region(iteration)[:12_000].tobytes() == one.reduced[iteration, 0].tobytes()


def test_of_two_twins_one_that_is_not_followed_is_nobodys() -> None:
    """IPv6: their addresses differ behind the first eight bytes."""
    other, mine = (generate(twin(i, ipv6=True), iterations=2, seed=i) for i in range(2))
    plans = plan_of(twin(1, ipv6=True)), plan_of(job_of(7))
    (ring,) = rings = room(len(other.packets) + len(mine.packets))
    with placing(rings) as placers:
        seats = [placers.attach(Engine(plan.engine)) for plan in plans]
        ring.put(shuffled([other.packets, mine.packets], 1))
        for seat in seats:
            passed(seat, rings)
        assert placers.strangers(0)["other_roce"][0] == len(other.packets)
    assert_equal(seats[0].engine, alone(plans[0], [mine.packets]), 2)


def test_several_flows_that_two_jobs_claim_are_of_both() -> None:
    """And none of them is taken for another one, nor a flow that the manifest lists twice for two."""
    job = job_of(1, ranks=3, channels=2)
    made, plan = generate(job, iterations=2, ports=range(3), seed=1), plan_of(job)
    twice = replace(plan.engine, flows=(*plan.engine.flows, plan.engine.flows[0]))
    (ring,) = rings = room(len(made.packets))
    with placing(rings) as placers:
        seats = [placers.attach(Engine(config)) for config in (plan.engine, plan.engine, twice)]
        ring.put(made.packets)
        for seat in seats:
            passed(seat, rings)
        assert placers.claimed(0) == 3 * len(made.packets)
    one = alone(plan, [made.packets])
    for seat in seats[:2]:
        assert_equal(seat.engine, one, 2)
    assert outcomes(seats[2].engine) == outcomes(one) and (seats[2].engine.region(1) == one.region(1)).all()


def test_where_the_one_that_waited_has_left_nothing_comes_twice() -> None:
    job, other = job_of(1), job_of(2)
    made = [generate(one, iterations=4, seed=i) for i, one in enumerate((job, other))]
    packets = shuffled([one.packets for one in made], 1)
    (ring,) = rings = room(len(packets))
    plan = plan_of(other)
    with placing(rings) as placers:
        waits, goes_on = placers.attach(Engine(plan_of(job, arenas=2).engine)), placers.attach(Engine(plan.engine))
        ring.put(packets)
        until(lambda: waits.look(0)[1])
        passed(goes_on, rings)
        before = waits.look(0)[0]
        waits.leave()
        until(lambda: ring.waiting == 0)
        assert goes_on.look(0) == (len(made[1].packets), False)
        assert placers.claimed(0) == before + len(made[1].packets)
        assert sum(packets for packets, _ in placers.strangers(0).values()) == 0
    assert_equal(goes_on.engine, alone(plan, [made[1].packets]), 4)


def test_a_job_that_is_alone_begins_with_what_comes_after_it() -> None:
    job = job_of(1)
    made = generate(job, iterations=2, seed=1)
    (ring,) = rings = room(2 * len(made.packets))
    placers = Placers([ring.ring_address])  # nobody reads yet
    ring.put(made.packets)
    seat = placers.attach(Engine(plan_of(job).engine))
    with placers:
        passed(seat, rings)
        assert seat.look(0) == (0, False)
        ring.put(made.packets)
        passed(seat, rings)
        assert placers.strangers(0)["other_roce"][0] == len(made.packets)
        assert seat.ring(0) == (2 * len(made.packets), 0, seat.ring(0)[2])
    assert_equal(seat.engine, alone(plan_of(job), [made.packets]), 2)


def test_a_ring_that_another_reader_has_used_is_read_from_there() -> None:
    job = job_of(1)
    made, plan = generate(job, iterations=2, seed=1), plan_of(job)
    (ring,) = rings = room(len(made.packets))
    ring.put([(0, FOREIGN)] * 100)
    first = Engine(plan_of(job_of(2)).engine)
    assert first.run(0, ring.ring_address, 1000) == (100, False)
    with placing(rings) as placers:
        seat = placers.attach(Engine(plan.engine))
        ring.put(made.packets)
        passed(seat, rings)
        assert sum(packets for packets, _ in placers.strangers(0).values()) == 0
    assert_equal(seat.engine, alone(plan, [made.packets]), 2)


@pytest.mark.parametrize("jobs", [1, 3], ids=["alone", "caught-up"])
def test_an_engine_that_has_left_counts_what_it_meets_itself(jobs: int) -> None:
    """Also one that has caught up, past packets that two others claim and it does not."""
    mine, shared = job_of(1), job_of(2)
    made = [generate(one, iterations=4, seed=i) for i, one in enumerate((mine, shared)[:jobs])]
    packets = shuffled([one.packets for one in made], 1)
    (ring,) = rings = room(len(packets))
    plan = plan_of(mine, arenas=2)
    with placing(rings) as placers:
        seat = placers.attach(Engine(plan.engine))
        others = [placers.attach(Engine(plan_of(shared).engine)) for _ in range(jobs - 1)]
        ring.put(packets)
        while not seat.passed([ring.put_so_far]):
            if seat.look(0)[1] and seat.engine.complete(seat.engine.oldest, plan.cells[min(seat.engine.oldest, 1)]):
                seat.engine.retire()
        for other in others:
            passed(other, rings)
        assert seat.look(0) == (len(made[0].packets), False)
        seat.leave()
        before = outcomes(seat.engine)
        assert sum(before.values()) == len(made[0].packets)
        nobodys = placers.strangers(0)
        for _ in range(3):
            assert seat.engine.feed(0, FOREIGN)
        assert outcomes(seat.engine) == {**before, "not_roce": before["not_roce"] + 3}
        assert placers.strangers(0) == nobodys


def test_what_waits_in_any_ring_has_not_passed() -> None:
    """Two rings, and packets in the second alone."""
    job = job_of(1)
    made = generate(job, iterations=1, seed=1)
    rings = room(len(made.packets), len(made.packets))
    placers = Placers([ring.ring_address for ring in rings])
    seat = placers.attach(Engine(plan_of(job, 2).engine))
    assert seat.passed(seat.mark())
    rings[1].put(made.packets)
    assert not seat.passed(seat.mark())
    with placers:
        passed(seat, rings)


def test_what_an_engine_took_counts_once_although_it_leaves_twice() -> None:
    job = job_of(1)
    made = generate(job, iterations=1, seed=1)
    (ring,) = rings = room(len(made.packets))
    with placing(rings) as placers:
        seat = placers.attach(Engine(plan_of(job).engine))
        ring.put(made.packets)
        passed(seat, rings)
        for _ in range(2):
            seat.leave()
            assert placers.claimed(0) == len(made.packets)


def test_tunnels_are_counted_of_all_rings_each_by_its_name() -> None:
    made: list[Packet] = generate(job_of(7), iterations=1, seed=1).packets
    wrapped = made[0][1][:12] + bytes.fromhex("884700020140") + b"\x55" * 60  # MPLS, and in it nobody knows what
    bridged = made[0][1][:23] + bytes([115]) + made[0][1][24:]  # L2TP
    rings = room(16, 16, 16)
    with placing(rings, 2) as placers:
        for number, ring in enumerate(rings):
            ring.put([(0, wrapped)] * (number + 1) + [(0, bridged)])
        until(lambda: not any(ring.waiting for ring in rings))
        assert placers.encapsulated() == {"MPLS": 6, "L2TP or EtherIP": 3}
