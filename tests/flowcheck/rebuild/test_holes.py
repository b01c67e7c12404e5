"""When a hole is a hole for good, and what the scheduler and the follower make of it."""

import pytest
from parser.machine import NOTHING_SEEN, Engine

from flowcheck.rebuild.iteration.holes import HoleWatch
from flowcheck.rebuild.iteration.scheduler import ArenaScheduler
from flowcheck.rebuild.iteration.wire_arenas import WireArenas
from flowcheck.rebuild.plan import JobPlan, plan_job
from flowcheck.rebuild.version.events import Closed, Event
from flowcheck.rebuild.version.follower import Follower
from flowcheck.rebuild.version.policy import Policy
from lab.synth import TransportOptions, example_job, generate
from tests.flowcheck.altered import Packet as Frame
from tests.flowcheck.altered import opcode, spots
from tests.flowcheck.fake_engine import FakeEngine, FakeSource, Packet
from tests.flowcheck.memory_ring import MemoryRing

DATA, DATA_BACK = 0, 2
ACK = 17


def made(streams: int = 2) -> tuple[JobPlan, FakeEngine]:
    """Buckets of 24 elements in cells 0..11 and 9 in cells 16..20; everything but cell 5 is there."""
    plan = plan_job(example_job(ranks=2, count=[24, 9], startup=False, rebuild=False), streams=streams)
    engine = FakeEngine(plan.engine)
    engine.cells(3)[:] = True
    engine.cells(3)[5] = False
    return plan, engine


# -- by which sign ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hopes", "sign"), [
    (["acknowledged", "all_came"], "acknowledged"),
    (["passed", "acknowledged"], "passed"),
    (["all_came", "passed"], "passed"),
    (["all_came", "all_came"], "passed"),  # packets that nobody remembers are lost all the same
    (["acknowledged", "may_come"], ""),
    (["may_come", "may_come"], ""),
])
def test_the_weakest_sign_of_all_streams_counts(hopes: list[str], sign: str) -> None:
    plan, engine = made()
    engine.hopes = {(stream, 3): hope for stream, hope in enumerate(hopes)}
    assert HoleWatch(plan, engine).final(3, range(2)) == sign
    assert HoleWatch(plan, engine).final(2, range(2)) == ""


def test_without_streams_nothing_is_final() -> None:
    assert HoleWatch(*made()).final(3, []) == ""


def test_a_packet_that_came_and_was_of_no_use() -> None:
    plan, engine = made()
    engine.hopes = {(0, 3): "all_came", (1, 3): "all_came"}
    engine.lost = [{"cause": "icrc", "target": 1, "iteration": 3, "offset": 40, "bytes": 8}]
    assert HoleWatch(plan, engine).final(3, range(2)) == "all_came"


def test_what_a_connection_would_bring_that_has_not_begun_may_come() -> None:
    """Of the first bucket the second connection brings some elements; the second bucket is there."""
    plan, engine = made()
    engine.cells(3)[:12] = False
    engine.hopes = {(0, 3): "acknowledged", (1, 3): "acknowledged"}
    for stream in range(2):
        engine.flow(DATA_BACK, stream)["packets"] = 0
    watch = HoleWatch(plan, engine)
    assert watch.final(3, range(2)) == watch.final(3, range(2)) == ""
    engine.flow(DATA_BACK, 1)["packets"] = 1
    assert watch.final(3, range(2)) == "acknowledged"


# -- the scheduler ----------------------------------------------------------------------------------------


def scheduled(*sources: FakeSource) -> tuple[ArenaScheduler, FakeEngine]:
    plan, _ = made(streams=len(sources))
    engine = FakeEngine(plan.engine, sources)
    return ArenaScheduler(engine, sources, plan.cells, holes=HoleWatch(plan, engine)), engine


def test_an_iteration_with_holes_closes_when_they_are_final_and_not_before() -> None:
    sources = [FakeSource([Packet(0, past=1, cells=(0, 12))], open=True) for _ in range(2)]
    scheduler, engine = scheduled(*sources)
    assert scheduler.poll() and not scheduler.due()
    engine.hopes = {(0, 0): "acknowledged"}
    assert not scheduler.due()
    engine.hopes[1, 0] = "passed"
    assert scheduler.due() == range(1) and scheduler.final(0) == "passed"
    engine.cells(0)[:] = True  # late, and in time
    assert scheduler.due() == range(1) and scheduler.final(0) == ""


def test_a_stream_that_is_not_past_may_bring_it() -> None:
    sources = [FakeSource([Packet(0, past=past, cells=(0, 12))], open=True) for past in (1, None)]
    scheduler, engine = scheduled(*sources)
    engine.hopes = {(0, 0): "acknowledged", (1, 0): "acknowledged"}
    assert scheduler.poll() and not scheduler.due()
    sources[1].end()
    assert scheduler.poll() and scheduler.due() == range(1)


def test_what_waits_in_the_ring_of_a_silent_stream_may_bring_it() -> None:
    sources = [FakeSource([Packet(0, past=1, cells=(0, 12))], open=True), FakeSource(open=True)]
    scheduler, engine = scheduled(*sources)
    engine.hopes = {(0, 0): "acknowledged", (1, 0): "all_came"}
    assert scheduler.poll()
    engine.stand[1] = NOTHING_SEEN
    sources[1].packets = [Packet(0, past=1)]
    assert not scheduler.due()
    sources[1].packets = []
    assert scheduler.due() == range(1)


def test_an_arena_that_is_needed_is_taken_as_before() -> None:
    source = FakeSource([Packet(0, past=1, cells=(0, 12)), *(Packet(t, past=t + 1) for t in range(1, 9))], open=True)
    scheduler, _ = scheduled(source)
    assert scheduler.poll() and scheduler.due() == range(1) and scheduler.final(0) == "arena_needed"


def test_at_the_end_of_all_captures_what_is_open_ends() -> None:
    scheduler, engine = scheduled(FakeSource([Packet(0, past=1, cells=(0, 12))]))
    engine.hopes = {(0, 0): "acknowledged"}
    assert scheduler.poll() and not scheduler.due() and scheduler.final(0) == "ended"


# -- packets ----------------------------------------------------------------------------------------------


def followed(job, packets: list[Frame], *, at_once: int = 50) -> list[tuple[Closed, int]]:  # type: ignore[no-untyped-def]
    """Every iteration as it closed, and how many iterations had begun after it. The ring fills slowly."""
    ring, out = MemoryRing(), list[tuple[Closed, int]]()
    plan = plan_job(job)
    arenas = WireArenas(plan, [ring], ["a"])
    follower = Follower(plan, arenas, Policy.live(0.0))

    def note(events: list[Event]) -> None:
        out.extend((one, arenas.begun - one.iteration) for one in events if isinstance(one, Closed))

    for start in range(0, len(packets), at_once):
        ring.put(packets[start : start + at_once])
        note(list(follower.poll()))
    ring.end()
    note(list(follower.poll()))
    note(list(follower.finish()))
    return out


@pytest.mark.parametrize("acks", [True, False])
@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
def test_a_lost_packet_is_named_in_the_iteration_after_it(protocol: str, acks: bool) -> None:
    """Not four iterations later, when its arena is needed. Without ACKs the next iteration's packets show it."""
    job = example_job(count=20_000, protocol=protocol, mtu=1024, startup=False, rebuild=False, seed=3)
    made = generate(job, iterations=8, seed=3)
    lost = {spots(made, protocol, job.flows[0].qpns[0], t)[0].packets[1] for t in (2, 5)}
    packets = [one for at, one in enumerate(made.packets) if at not in lost and (acks or opcode(one[1]) != ACK)]
    closed = followed(job, packets)
    assert [one.iteration for one, _ in closed] == list(range(8))
    for one, later in closed[:-1]:
        holed = one.iteration in (2, 5)
        assert bool(one.missing) is holed and set(one.missing) <= {"lost"}
        assert one.final == (("acknowledged" if acks else "passed") if holed else "")
        assert later <= 1


@pytest.mark.parametrize("protocol", ["ll", "simple"])
def test_what_the_link_repeats_is_waited_for(protocol: str) -> None:
    """Go-back-N in every second message, nothing lost by the mirror: no iteration closes without its repeats."""
    job = example_job(count=20_000, protocol=protocol, mtu=1024, startup=False, rebuild=False, seed=3)
    made = generate(job, iterations=6, seed=3, transport=TransportOptions(retransmit=0.5))
    assert made.truth["retransmitted"]
    for step in (1, 50):
        closed = followed(job, made.packets, at_once=step)
        assert [(one.iteration, one.missing, one.final) for one, _ in closed] == [(t, {}, "") for t in range(6)]


def test_the_engine_says_as_much_as_its_names() -> None:
    engine = Engine(plan_job(example_job(count=100)).engine)
    assert engine.hope(0, 0) == "all_came"  # of flows that were not seen nothing is known
