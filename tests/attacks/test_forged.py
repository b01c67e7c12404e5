"""Somebody who can put packets on the mirror: right addresses, QP, PSN and ICRC, and other bytes.

As long as the true packet comes too, the worst is a hole that is named. Where the true one does not come and the forged
one does, nothing on the wire tells them apart: that is shown as well, because docs/understand/security.md says it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from parser.machine import Engine

from flowcheck.job.model import Job
from flowcheck.rebuild.iteration.evidence import bucket_coverage
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import Synthesis, example_job, generate
from tests.flowcheck.altered import PAYLOAD_AT, Packet, opcode, payload, psn, sealed

ITERATIONS, SEEDS = 5, 5
Forger = Callable[[Packet, random.Random], list[Packet]]


def example(protocol: str) -> tuple[Job, JobPlan, Synthesis]:
    job = example_job(count=20_000, protocol=protocol, mtu=1024, startup=False, rebuild=False, seed=5)
    return job, plan_job(job, streams=1, arenas=2), generate(job, iterations=ITERATIONS, seed=5)


def other(packet: Packet, at: int = 0) -> Packet:
    """The same packet with another byte of gradient."""
    time, frame = packet
    at += PAYLOAD_AT[opcode(frame)]
    return time, sealed(frame[:at] + bytes([frame[at] ^ 0x80]) + frame[at + 1 :])


def moved(packet: Packet, by: int) -> Packet:
    time, frame = packet
    return time, sealed(frame[:51] + (psn(frame) + by & 0xFFFFFF).to_bytes(3, "big") + frame[54:])


FORGERS: dict[str, Forger] = {
    "after the true one": lambda packet, chance: [packet, other(packet)],
    "before the true one": lambda packet, chance: [other(packet), packet],
    "on both sides of it": lambda packet, chance: [other(packet), packet, other(packet)],
    "with a PSN of the near future": lambda packet, chance: [moved(packet, chance.randint(1, 40)), packet],
    "with a PSN of the past": lambda packet, chance: [packet, moved(packet, -chance.randint(1, 40))],
    "with a PSN from anywhere": lambda packet, chance: [moved(packet, chance.getrandbits(24)), packet],
    "with other bytes and a PSN of the near future": lambda packet, chance: [
        moved(other(packet), chance.randint(1, 3)), packet,
    ],
}


def carries(packet: Packet) -> bool:
    frame = packet[1]
    return opcode(frame) in PAYLOAD_AT and len(payload(frame)) >= 128


def followed(plan: JobPlan, made: Synthesis, packets: list[Packet]) -> list[tuple[bool, dict[str, int], int]]:
    """Of each iteration: whether it is whole, what is missing by cause, and how many covered bytes are wrong. One is
    closed when a packet asks for an arena that is not there, as in a node whose arenas are full."""
    engine, out = Engine(plan.engine), []

    def close() -> None:
        (found,) = bucket_coverage(plan, engine, len(out))
        truth = np.frombuffer(made.reduced[len(out), 0].tobytes(), np.uint8)
        data = np.frombuffer(found.data.tobytes(), np.uint8)
        parts = [slice(4 * start, 4 * end) for start, end in found.placed]
        wrong = sum(int((data[part] != truth[part]).sum()) for part in parts)
        whole = sum(end - start for start, end in found.placed) == found.place.elements
        out.append((whole, dict(found.missing), wrong))
        engine.retire()
        engine.forget()

    for _, frame in packets:
        while not engine.feed(0, frame) and len(out) < ITERATIONS:
            close()
    while len(out) < ITERATIONS:
        close()
    return out


@pytest.mark.parametrize("forger", FORGERS)
@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
def test_beside_the_true_packet_nothing_wrong_is_covered(protocol: str, forger: str) -> None:
    """Every iteration is the truth, or lacks something by a name."""
    _, plan, made = example(protocol)
    places = [at for at, packet in enumerate(made.packets) if carries(packet)]
    spoilt = 0
    for seed in range(SEEDS):
        chance = random.Random(seed)
        chosen = set(chance.sample(places[len(places) // 4 :], chance.choice((1, 3, 20))))
        packets = [
            one for at, packet in enumerate(made.packets)
            for one in (FORGERS[forger](packet, chance) if at in chosen else [packet])
        ]
        for whole, missing, wrong in followed(plan, made, packets):
            assert wrong == 0, (seed, missing)
            assert whole or any(missing.values()), "incomplete without a cause"
            spoilt += not whole
    if forger in ("after the true one", "before the true one", "on both sides of it"):
        assert spoilt, "the forger did not reach anything: this test would not notice"


def test_in_place_of_the_true_packet_nothing_on_the_wire_tells() -> None:
    """The limit, so that nobody claims more: a whole iteration with a wrong byte. A trainer's checksum finds it."""
    _, plan, made = example("ll128")
    places = [at for at, packet in enumerate(made.packets) if carries(packet)]
    unnoticed = 0
    for at in places[len(places) // 2 :: 7]:
        packets = [*made.packets[:at], other(made.packets[at]), *made.packets[at + 1 :]]
        unnoticed += any(whole and wrong for whole, _, wrong in followed(plan, made, packets))
    assert unnoticed


def test_what_was_covered_stays_where_its_flow_is_lost_before_the_true_one() -> None:
    """The other limit: a wrong byte in an iteration that is not whole, so not published. No iteration that is whole has
    one, and a version in which such an iteration's holes are filled is verified by nothing but a checksum."""
    _, plan, made = example("ll")
    places = [at for at, packet in enumerate(made.packets) if carries(packet)]
    covered = 0
    for early, late in zip(places[len(places) // 2 :: 9], places[len(places) // 2 + 40 :: 9], strict=False):
        packets = list(made.packets)
        packets.insert(early, other(made.packets[late]))
        packets.insert(early + 1, moved(made.packets[early], 2))
        found = followed(plan, made, packets)
        assert not any(whole and wrong for whole, _, wrong in found)
        covered += sum(wrong for _, _, wrong in found)
    assert covered
