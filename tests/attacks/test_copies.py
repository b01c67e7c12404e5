"""A mirror that lies in every packet, with an ICRC that is right: it costs holes, never a wrong byte, and no memory."""

import pytest
from parser.machine import Engine

from flowcheck.job.model import Job
from flowcheck.rebuild.iteration.evidence import bucket_coverage
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import Synthesis, example_job, generate
from tests.flowcheck.altered import PAYLOAD_AT, Packet, opcode, payload, sealed

ITERATIONS = 8


def example(protocol: str) -> tuple[Job, JobPlan, Synthesis]:
    job = example_job(count=30_000, protocol=protocol, mtu=1024, startup=False, rebuild=False, seed=5)
    return job, plan_job(job, streams=2, arenas=2), generate(job, iterations=ITERATIONS, seed=5)


def lies(packets: list[Packet]) -> list[Packet]:
    """The first data byte of every packet is another one."""
    out = []
    for time, frame in packets:
        at = PAYLOAD_AT.get(opcode(frame), 0)
        if at and len(payload(frame)) >= 128:
            frame = sealed(frame[:at] + bytes([frame[at] ^ 0x80]) + frame[at + 1 :])
        out.append((time, frame))
    return out


@pytest.mark.parametrize("honest", [0, 1])
@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
def test_every_packet_of_a_mirror_lies(protocol: str, honest: int) -> None:
    """Iteration after iteration, in the same two arenas; the mirror that is read first is right, or the other one."""
    _, plan, made = example(protocol)
    streams = [made.packets, lies(made.packets)] if honest == 0 else [lies(made.packets), made.packets]
    engine, taken, judged = Engine(plan.engine), [0, 0], 0
    while judged < ITERATIONS:
        for stream, packets in enumerate(streams):
            while taken[stream] < len(packets) and engine.feed(stream, packets[taken[stream]][1]):
                taken[stream] += 1
        (found,) = bucket_coverage(plan, engine, judged)
        assert set(found.missing) == {"disagreed"} and 0 < found.missing["disagreed"] < found.place.elements // 8
        truth = made.reduced[judged, 0].tobytes()
        for start, end in found.placed:
            assert found.data[4 * start : 4 * end].tobytes() == truth[4 * start : 4 * end]
        engine.retire()
        engine.forget()
        judged += 1
    assert engine.disagreements() == [] and len(engine.differences()) <= 256
