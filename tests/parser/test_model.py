"""The engine against a model of it (model.py): same packets, same counters, same bytes, same cells, same lost flows.

Small jobs, and everything that a mirror may do to them: packets lost, copied, exchanged, damaged, forged (another byte
and the right ICRC), captures that begin late, silences in which a lap of PSNs could have passed, streams that share an
arena. After every burst each packet has ended in the counter that the model names.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parser.machine import Engine

from flowcheck.job.model import Job
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import TransportOptions, example_job, generate
from parser.engine_config import Target
from tests.flowcheck.altered import PAYLOAD_AT, Packet, destination, opcode, sealed
from tests.flowcheck.memory_ring import MemoryRing
from tests.nccl_versions import VERSIONS
from tests.parser.model import Model

PACKETS = 700  # of a job, at most: enough for three iterations of nearly all
WITHIN = 8  # places by which a packet comes late, or a second time: far less than the engine's window
AN_OUTAGE = 10**9  # ns


@functools.lru_cache(maxsize=8)
def traffic(number: int) -> tuple[Job, list[list[Packet]]]:
    """Job `number`, and what the mirrors of two of its ranks see."""
    r = random.Random(number)
    job = example_job(
        ranks=r.choice([2, 2, 3, 4]), channels=r.choice([1, 1, 2]), mtu=r.choice([256, 512, 1024]),
        protocol=r.choice(["ll", "ll128", "simple", "simple"]), dtype=r.choice(["float32", "bfloat16"]),
        count=[r.choice([1, 700, 3000, 6001]) for _ in range(r.choice([1, 1, 2]))],
        version=r.choice(VERSIONS),
        qps=r.choice([1, 1, 2]), split_data_on_qps=r.random() < 0.5, adaptive_routing=r.random() < 0.2,
        startup=r.random() < 0.2, rebuild=r.random() < 0.2, seed=number,
    )
    made = generate(
        job, iterations=r.choice([2, 3]), ports=[0, 1], directions=r.choice(["both", "both", "in", "out"]), seed=number,
        transport=TransportOptions(retransmit=r.choice([0.0, 0.1]), cut_ranks=r.choice([frozenset(), frozenset({0})])),
    )
    return job, [packets[:PACKETS] for packets in made.ports.values()]


@dataclass(frozen=True)
class Mirror:
    """What happens to one stream. Chances for each packet; begin: share of the packets that are not there;
    silence: an outage lies somewhere, and up to so many packets are lost in it, -1 for none."""

    loss: float
    copies: float
    late: float
    damage: float
    forgery: float
    begin: float
    silence: int


mirrors = st.builds(
    Mirror, loss=st.sampled_from([0, 0, 0.01, 0.1]), copies=st.sampled_from([0, 0, 0.1]),
    late=st.sampled_from([0, 0, 0.02, 0.2]), damage=st.sampled_from([0, 0, 0.05]),
    forgery=st.sampled_from([0, 0, 0, 0.01]), begin=st.sampled_from([0, 0, 0, 0.01, 0.3, 0.6]),
    silence=st.sampled_from([-1, -1, 0, 1, 30]),
)


def damaged(frame: bytes, r: random.Random) -> bytes:
    """One bit of a write, from its opcode to its ICRC."""
    payload = PAYLOAD_AT[opcode(frame)]
    at = r.choice([42, r.randrange(50, payload), r.randrange(payload, len(frame)), len(frame) - 1])
    return frame[:at] + bytes([frame[at] ^ 1 << r.randrange(8)]) + frame[at + 1 :]


def forged(frame: bytes, r: random.Random) -> bytes:
    """One bit of what comes after the BTH, now and then of what is a flag in LL, or another opcode of a write; the ICRC
    is right."""
    payload = PAYLOAD_AT[opcode(frame)]
    lines = range(payload + 4, len(frame) - 4, 8)
    headers = range(54, payload) or [42]
    at = r.choice([42, r.choice(headers), r.randrange(54, max(55, len(frame) - 4)), r.choice(lines or [42])])
    byte = frame[at] ^ 1 << r.randrange(8) if at > 42 else r.randrange(6, 12)
    return sealed(frame[:at] + bytes([byte]) + frame[at + 1 :])


def mirrored(packets: list[Packet], mirror: Mirror, r: random.Random) -> list[Packet]:
    out: list[tuple[float, bytes]] = []
    for place, (_, frame) in enumerate(packets):
        if r.random() < mirror.loss:
            continue
        if opcode(frame) in PAYLOAD_AT and r.random() < mirror.damage:
            frame = damaged(frame, r)
        elif opcode(frame) in PAYLOAD_AT and r.random() < mirror.forgery:
            frame = forged(frame, r)
        out.append((place + (r.random() < mirror.late) * (r.randrange(WITHIN) + 1.5), frame))
        if r.random() < mirror.copies:
            out.append((place + r.randrange(WITHIN) + 1.25, frame))
    frames = [frame for _, frame in sorted(out, key=lambda one: one[0])][int(mirror.begin * len(out)) :]
    times = sorted(packets[min(int(place), len(packets) - 1)][0] for place, _ in out)
    seen = list(zip(times[len(times) - len(frames) :], frames, strict=True))
    if mirror.silence >= 0 and seen:
        at = r.randrange(len(seen))
        after = seen[at + r.randint(0, mirror.silence) :]
        seen = seen[:at] + [(time + AN_OUTAGE, frame) for time, frame in after]
    return seen


class Both:
    """An engine and a model with the same packets."""

    def __init__(self, plan: JobPlan, streams: list[list[Packet]], look: bool) -> None:
        self.plan, self.streams = plan, streams
        self.engine, self.model = Engine(plan.engine), Model(plan.engine)
        self.taken = [0] * len(streams)
        self.rings = [MemoryRing(4096) for _ in streams]
        for ring, packets in zip(self.rings, streams, strict=True):
            ring.put(packets)
            ring.end()
        if look:
            for ring, packets in zip(self.rings, streams, strict=True):
                self.engine.look_ahead(ring.ring_address)
                self.model.look_ahead([frame for _, frame in packets])

    def take(self, stream: int, limit: int) -> bool:
        """Up to `limit` packets of a stream. False: none was left, or the next one is blocked."""
        n, blocked = self.engine.run(stream, self.rings[stream].ring_address, limit)
        rest = self.streams[stream][self.taken[stream] :]
        said = [self.model.feed(stream, time, frame) for time, frame in rest[: n + blocked]]
        assert [one is None for one in said] == [False] * n + [True] * blocked
        self.taken[stream] += n
        self.same_counters()
        return n > 0

    def same_counters(self) -> None:
        for stream, counted in enumerate(self.model.outcomes):
            found = {name: packets for name, (packets, _) in self.engine.outcomes(stream).items() if packets}
            assert found == +counted, f"stream {stream}, after {self.taken} packets"
            assert sum(found.values()) == self.taken[stream]

    def same_region(self, iteration: int | None) -> None:
        key = (Target.PARAMETERS, 0) if iteration is None else (Target.GRADIENT, iteration)
        region, wanted = self.engine.region(iteration), self.model.regions.get(key, {})
        differ = self.model.differ.get(key, Counter())
        there = self.engine.cells(iteration)
        assert np.flatnonzero(there).tolist() == sorted(wanted.keys() - differ.keys())
        assert self.engine.covered(iteration) == len(wanted) - len(differ)
        void = self.engine.void_cells(iteration, 0, len(there))
        assert [cell for first, end in void.tolist() for cell in range(first, end)] == sorted(differ)
        for cell, data in wanted.items():
            assert region[8 * cell : 8 * cell + len(data)].tobytes() == data
        assert self.engine.copies(iteration)[0] == differ.total()

    def close_oldest(self) -> None:
        assert self.engine.oldest == self.model.oldest
        self.same_region(self.engine.oldest)
        self.engine.retire()
        self.model.retire()

    def finish(self) -> None:
        self.engine.finish()
        self.model.finish()
        self.same_counters()
        while self.engine.oldest <= self.engine.begun:
            self.close_oldest()
        if self.plan.engine.parameter_bytes:
            self.same_region(None)
        for stream in range(len(self.streams)):
            for index, said in enumerate(self.engine.flow_counters(stream)):
                flow = self.model.flows.get((stream, index))
                if flow is not None:
                    assert (said["state"] == "LOST", said["anchored"]) == (
                        flow.lost, flow.first_anchor is not None
                    )


def compare(plan: JobPlan, streams: list[list[Packet]], look: bool, r: random.Random) -> Both:
    both = Both(plan, streams, look)
    while any(taken < len(packets) for taken, packets in zip(both.taken, streams, strict=True)):
        moved = [both.take(stream, r.choice([1, 5, 64, 200])) for stream in range(len(streams))]
        if not any(moved):
            both.close_oldest()
    both.finish()
    return both


def by_way(job: Job, packets: list[Packet]) -> list[list[Packet]]:
    """What goes to receivers of data, and what goes to its senders: clear-to-sends and acknowledgements."""
    receivers = {qpn for flow in job.flows for qpn in flow.qpns}
    return [[one for one in packets if (destination(one[1]) in receivers) == data] for data in (True, False)]


def check(number: int, seen_by: list[Mirror], arenas: int, look: bool, seed: int, *, apart: bool = False) -> None:
    job, ports = traffic(number)
    r = random.Random(seed)
    if apart:
        ports = by_way(job, ports[0])
    streams = [mirrored(packets, mirror, r) for packets, mirror in zip(ports, seen_by, strict=False)]
    compare(plan_job(job, streams=len(streams), arenas=arenas), streams, look, r)


examples = given(
    number=st.integers(0, 39), seen_by=st.lists(mirrors, min_size=1, max_size=2), arenas=st.sampled_from([2, 8, 8]),
    look=st.booleans(), seed=st.integers(0, 10**6), apart=st.booleans(),
)


@settings(max_examples=300, derandomize=True, suppress_health_check=list(HealthCheck))
@examples
def test_the_engine_does_what_the_model_does(number, seen_by, arenas, look, seed, apart) -> None:  # type: ignore[no-untyped-def]
    check(number, seen_by, arenas, look, seed, apart=apart)


def test_one_forged_announcement_leads_nowhere() -> None:
    """Captures that begin late; a clear-to-send that says message 137,438,953,484 in place of 12."""
    mirror = Mirror(loss=0, copies=0, late=0, damage=0, forgery=0.01, begin=0.6, silence=30)
    check(23, [mirror, mirror], 8, False, 62642)


@pytest.mark.slow
@settings(max_examples=2000, suppress_health_check=list(HealthCheck))
@given(number=st.integers(0, 10**6), seen_by=st.lists(mirrors, min_size=1, max_size=2),
       arenas=st.sampled_from([2, 8]), look=st.booleans(), seed=st.integers(0, 10**6), apart=st.booleans())
def test_the_engine_does_what_the_model_does_on_many_jobs(number, seen_by, arenas, look, seed, apart) -> None:  # type: ignore[no-untyped-def]
    """Another 2000 each time. 40 s of one core."""
    check(number, seen_by, arenas, look, seed, apart=apart)
