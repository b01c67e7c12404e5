"""Several placing threads of one job, for real: what is placed, compared and counted is what one thread finds.

Packets are spread as a port with several queues spreads them: all of a connection, both ways, to one stream.
"""

import ipaddress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser.machine import Engine
from parser.placers import Placers

from flowcheck.job.model import Job
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import example_job, generate
from tests.flowcheck.altered import Packet, destination
from tests.flowcheck.memory_ring import MemoryRing

COUNT = 12_000


def planned(job: Job, streams: int, threads: int, arenas: int = 4) -> JobPlan:
    plan = plan_job(job, streams=streams, arenas=arenas)
    return replace(plan, engine=replace(plan.engine, threads=threads))


def spread(plan: JobPlan, packets: list[Packet], streams: int) -> list[list[Packet]]:
    """By connection."""
    edge = {(flow.dst_addr, flow.qpn): flow.edge for flow in plan.engine.flows}
    out: list[list[Packet]] = [[] for _ in range(streams)]
    for ns, frame in packets:
        to = ipaddress.ip_address(frame[30:34]).packed
        out[edge.get((to, destination(frame)), 0) % streams].append((ns, frame))
    return out


class Placing:
    """The engine's threads over the rings of all streams, and whether they still have something to do."""

    def __init__(self, engine: Engine, streams: list[list[Packet]]) -> None:
        self.engine, self.rings = engine, [MemoryRing(1 << max(len(packets), 2).bit_length()) for packets in streams]
        self.placers = Placers([ring.ring_address for ring in self.rings], engine.config.threads)
        self.seat = self.placers.attach(engine)
        for i, (ring, packets) in enumerate(zip(self.rings, streams, strict=True)):
            ring.put(packets, i)
            ring.end()

    def __enter__(self) -> "Placing":
        self.placers.start()
        return self

    @property
    def running(self) -> bool:
        return not all(self.seat.drained(i) for i in range(len(self.rings)))

    def strangers(self, stream: int) -> int:
        return sum(packets for packets, _ in self.placers.strangers(stream).values())

    def __exit__(self, error: object, *_: object) -> None:
        """Waits until the rings are empty, unless the test has failed."""
        while error is None and self.running:
            pass
        self.placers.stop()
        if error is None:
            for i, ring in enumerate(self.rings):
                assert ring.waiting == 0 and self.seat.look(i) == (ring.put_so_far - self.strangers(i), False)


def alone(plan: JobPlan, streams: list[list[Packet]]) -> Engine:
    """The same packets by one thread, one stream after the other."""
    engine = Engine(replace(plan.engine, threads=1))
    for i, packets in enumerate(streams):
        for _, frame in packets:
            assert engine.feed(i, frame)
    return engine


def outcomes(engine: Engine) -> dict[str, int]:
    """Packets of all streams by outcome. Which of two copies came first is a matter of time."""
    found: dict[str, int] = {}
    for stream in range(engine.config.streams):
        for name, (packets, _) in engine.outcomes(stream).items():
            name = {"compared": "placed"}.get(name, name)
            found[name] = found.get(name, 0) + packets
    return found


def counters(engine: Engine, stream: int) -> list[dict[str, object]]:
    """Of all flows. Packets before a flow's first are missing if it was known by then that connections begin here,
    which another thread may be the one to see: a matter of time."""
    found = engine.flow_counters(stream)
    return [{**flow, "missing": None} if flow["first_psn"] else flow for flow in found]


@pytest.mark.timeout(300)
@settings(max_examples=40, deadline=None)
@given(
    protocol=st.sampled_from(["ll", "ll128", "simple"]), ranks=st.integers(2, 5), channels=st.sampled_from([1, 2, 4]),
    count=st.integers(1, 20_000), ports=st.integers(1, 3), streams=st.integers(2, 6), threads=st.integers(2, 4),
    loss=st.sampled_from([0.0, 0.05]), duplicate=st.sampled_from([0.0, 0.1]), seed=st.integers(0, 999),
)
def test_threads_find_what_one_finds(
    protocol: str, ranks: int, channels: int, count: int, ports: int, streams: int, threads: int, loss: float,
    duplicate: float, seed: int,
) -> None:
    job = example_job(ranks=ranks, channels=channels, count=count, protocol=protocol, mtu=1024, seed=seed)
    plan = planned(job, streams, min(threads, streams))
    made = generate(
        job, iterations=3, ports=range(min(ports, ranks)), seed=seed, loss=loss, duplicate=duplicate, corrupt=loss
    )
    split = spread(plan, made.packets, streams)
    engine, one = Engine(plan.engine), alone(plan, split)
    with Placing(engine, split) as placing:
        while placing.running:  # whoever is in charge looks on
            engine.covered(1), engine.missing(1, 0, 8), [engine.past(i) for i in range(streams)]
    engine.finish()
    one.finish()
    assert outcomes(engine) == outcomes(one)
    assert (engine.oldest, engine.begun, engine.disagreed) == (one.oldest, one.begun, one.disagreed)
    for i in range(streams):
        assert counters(engine, i) == counters(one, i)
    for iteration in range(3):
        cells = one.cells(iteration)
        assert (engine.cells(iteration) == cells).all()
        assert engine.complete(iteration, one.covered(iteration)) and engine.covered(iteration) == cells.sum()
        there = np.repeat(cells, 8)[: len(engine.region(iteration))]
        assert (engine.region(iteration)[there] == one.region(iteration)[there]).all()
        assert engine.copies(iteration)[0] == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("threads", "arenas"), [(2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
def test_iterations_close_while_threads_place(protocol: str, threads: int, arenas: int) -> None:
    """Few arenas for twelve iterations: each closes as soon as it is complete, and is read while the next one comes."""
    job = example_job(ranks=4, channels=4, count=COUNT, protocol=protocol, mtu=1024, seed=3)
    plan = planned(job, threads, threads, arenas=arenas)
    made = generate(job, iterations=12, ports=range(3), seed=3)
    engine = Engine(plan.engine)
    with Placing(engine, spread(plan, made.packets, threads)) as placing:
        for iteration in range(12):
            while not engine.complete(iteration, plan.cells[min(iteration, 1)]):
                assert placing.running or engine.complete(iteration, plan.cells[min(iteration, 1)])
            engine.close()
            place = plan.iteration_buckets(iteration)[0]
            assert engine.missing(iteration, place.cells.start, place.cells.stop).tolist() == []
            data = engine.region(iteration)[place.offset :][: place.nbytes]
            assert data.tobytes() == made.reduced[iteration, 0].tobytes()
            assert engine.copies(iteration)[0] == 0
            engine.retire()
    found, one = outcomes(engine), outcomes(alone(planned(job, 1, 1, 12), [made.packets]))
    found["placed"] += found.pop("late") + found.pop("released")  # of an iteration that is closed all are late
    one["placed"] += one.pop("late") + one.pop("released")
    assert found == one


def test_the_first_iteration_is_the_same_for_all_threads() -> None:
    """In mid-stream one thread's flows begin at iteration 2, another's later: both must use the same arenas."""
    job = example_job(ranks=4, channels=2, count=COUNT, protocol="ll", mtu=1024, seed=5)
    plan = planned(job, 2, 2)
    made = generate(job, iterations=6, ports=range(2), seed=5)
    split = spread(plan, made.packets, 2)
    late = [[packet for packet in part if packet[0] > since] for part, since in zip(
        split, (made.packets[len(made.packets) * 2 // 6][0], made.packets[len(made.packets) * 3 // 6][0]), strict=True
    )]
    engine = Engine(plan.engine)
    for _, frame in late[0][:50]:
        engine.feed(0, frame)
    first = engine.oldest
    assert first > 0
    for _, frame in late[1][:50]:
        engine.feed(1, frame)
    assert engine.oldest == first
    engine.retire()
    assert engine.oldest == first + 1


def apart(job: Job, packets: list[Packet]) -> list[list[Packet]]:
    """What goes to receivers of data; clear-to-sends and what else goes to its senders."""
    receivers = {qpn for flow in job.flows for qpn in flow.qpns}
    return [[packet for packet in packets if (destination(packet[1]) in receivers) == data] for data in (True, False)]


def test_a_flow_is_found_by_what_another_thread_has_read() -> None:
    """SIMPLE in mid-stream: one thread has the data, the other the clear-to-sends, each of them a message ahead."""
    job = example_job(ranks=2, channels=2, count=300_000, protocol="simple", mtu=1024, startup=False, rebuild=False)
    plan, made = planned(job, 2, 2), generate(job, iterations=3, first_iteration=900)
    data, announced = apart(job, made.packets)
    engine = Engine(plan.engine)
    rings = [MemoryRing(1 << len(made.packets).bit_length()) for _ in range(2)]
    with Placers([ring.ring_address for ring in rings]) as placers:
        seat = placers.attach(engine)
        for at in range(0, len(data), 50):
            until = data[at : at + 50][-1][0]
            batch = [packet for packet in announced if packet[0] <= until]
            announced = announced[len(batch) :]
            for stream, packets in ((1, batch), (0, data[at : at + 50])):
                rings[stream].put(packets, stream)
                while not seat.passed([ring.put_so_far for ring in rings]):
                    pass
    assert engine.outcomes(0)["unanchored"] == (0, 0) and engine.disagreements() == []
    for (iteration, _), truth in made.reduced.items():
        assert engine.complete(iteration, plan.cells[1])
        assert engine.region(iteration)[: truth.nbytes].tobytes() == truth.tobytes()


@pytest.mark.timeout(300)
def test_announcements_are_read_while_they_are_written() -> None:
    """Both threads run as they like. What is found depends on time, what is placed does not."""
    job = example_job(ranks=2, count=3000, protocol="simple", mtu=1024, startup=False, rebuild=False)
    plan, made = planned(job, 2, 2, arenas=64), generate(job, iterations=60, first_iteration=900)
    for _ in range(20):
        engine = Engine(plan.engine)
        with Placing(engine, apart(job, made.packets)):
            pass
        engine.finish()
        assert engine.disagreements() == []
        for (iteration, _), truth in made.reduced.items():
            if engine.oldest <= iteration <= engine.begun:
                wanted = np.frombuffer(truth.tobytes(), np.uint8).reshape(-1, 8)
                there = engine.cells(iteration)[: len(wanted)]
                assert (engine.region(iteration)[: truth.nbytes].reshape(-1, 8)[there] == wanted[there]).all()


@pytest.mark.parametrize(("streams", "threads"), [(1, 2), (2, 0), (3, 4)])
def test_every_thread_has_a_stream(streams: int, threads: int) -> None:
    with pytest.raises(ValueError, match="threads for"):
        Engine(planned(example_job(count=100), streams, threads).engine)


def test_every_stream_of_placing_threads_has_a_ring() -> None:
    engine = Engine(planned(example_job(count=100), 2, 2).engine)
    ring = MemoryRing(4)
    with pytest.raises(ValueError, match="an engine of 2 streams and 2 threads at 1 rings, which 1 threads read"):
        Placers([ring.ring_address]).attach(engine)


def test_a_stream_that_waits_for_an_arena_says_so_and_goes_on() -> None:
    job = example_job(count=COUNT, protocol="ll", mtu=1024, seed=3)
    plan = planned(job, 1, 1, arenas=2)
    made = generate(job, iterations=4, seed=3)
    engine = Engine(plan.engine)
    with Placing(engine, [made.packets]) as placing:
        while not placing.seat.look(0)[1]:
            pass
        assert "fc-place" in {task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")}
        assert engine.wanted(0) == 2 and engine.complete(0, plan.cells[0])
        while engine.oldest < 3:
            if engine.complete(engine.oldest, plan.cells[min(engine.oldest, 1)]):
                engine.retire()
    assert outcomes(engine)["late"] == 0
