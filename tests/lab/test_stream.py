"""Gradients that are streamed from memory: what an engine makes of them, and which jobs are refused."""

import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from parser.machine import Engine

from flowcheck.errors import UserError
from flowcheck.job.model import Job
from flowcheck.rebuild.plan import plan_job
from lab.stream import GradientStream
from lab.synth import example_job
from lab.synth.schedule import tree_of
from tests.flowcheck.memory_ring import MemoryRing

COUNTS = [700_001, 300_000, 3]


def job_of(version: str = "2.27.7") -> Job:
    """The way down of a tree of two ranks, on four channels."""
    job = example_job(count=COUNTS, channels=4, dtype="bfloat16", protocol="simple", algorithm="tree", mtu=4096,
                      startup=False, rebuild=False, version=version)
    ring = example_job(channels=4, algorithm="ring").flows
    roots = {channel: tree_of(2, channel, 4).parent.index(-1) for channel in range(4)}
    job.flows = [flow for flow in ring if flow.src == roots[flow.channel]]
    return job


class Wire:
    """What leaves at `near` arrives as on an interface, a frame at a time; a thread takes it."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.frames: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while frame := self.far.recv(9000):
            self.frames.put(frame)

    def end(self) -> None:
        if self._reader.is_alive():
            self.near.send(b"")
            self._reader.join()
        self.far.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.end()
    made.near.close()


@pytest.mark.parametrize("version", ["2.19.3", "2.27.7", "2.29.2"])
def test_an_engine_places_what_was_streamed(wire: Wire, version: str) -> None:
    """Three iterations from the communicator's birth; with every ICRC checked, and immediates in either byte order."""
    job = job_of(version)
    plan = plan_job(job)
    engine, ring = Engine(replace(plan.engine, check_icrc=True)), MemoryRing()
    stream, total = GradientStream(job, wire.near.fileno()), 0
    for iteration in range(3):
        places = plan.iteration_buckets(iteration)
        values = [np.random.default_rng(iteration).integers(0, 256, place.nbytes, np.uint8) for place in places]
        for packets in stream.play(iteration, lambda bucket, values=values: values[bucket]):
            ring.put([(0, wire.frames.get(timeout=60)) for _ in range(packets)])
            assert engine.run(0, ring.ring_address, ring.waiting) == (packets, False)
            total += packets
        region = engine.region(iteration)
        for place, sent in zip(places, values, strict=True):
            assert (region[place.offset : place.offset + place.nbytes] == sent).all()
            assert not len(engine.missing(iteration, place.cells.start, place.cells.stop))
        engine.retire()
    # Where a small bucket leaves nothing for a channel, NCCL 2.19 sends it a message without bytes.
    taken = {outcome: packets for outcome, (packets, _) in engine.outcomes(0).items() if packets}
    assert taken.keys() <= {"placed", "released"} and sum(taken.values()) == total
    assert not engine.disagreements() and wire.frames.empty()


def test_what_cannot_be_streamed_is_refused() -> None:
    for other in ({"protocol": "ll"}, {"algorithm": "ring"}, {"startup": True}, {"qps": 2}):
        said = {"protocol": "simple", "algorithm": "tree", "startup": False, "rebuild": False} | other
        with pytest.raises(UserError, match="SIMPLE trees"):
            GradientStream(example_job(**said), 0)


def test_partial_sums_are_not_made(wire: Wire) -> None:
    job = job_of()
    job.flows = example_job(channels=4).flows  # both ways
    stream = GradientStream(job, wire.near.fileno())
    with pytest.raises(UserError, match="partial sums"):
        list(stream.play(0, lambda bucket: np.zeros(2 * sum(COUNTS), np.uint8)))


def test_an_interface_that_is_gone_is_said(wire: Wire) -> None:
    stream = GradientStream(job_of(), wire.near.fileno())
    wire.end()
    with pytest.raises(OSError):
        list(stream.play(0, lambda bucket: np.zeros(2 * sum(COUNTS), np.uint8)))
