"""A clear-to-send that one placing thread writes down while another one reads it: both belong together."""

from __future__ import annotations

import time
from dataclasses import replace

from parser.machine import Engine
from parser.placers import Placers

from flowcheck.rebuild.plan import plan_job
from lab.synth import example_job, generate
from tests.flowcheck.altered import Packet, messages
from tests.flowcheck.memory_ring import MemoryRing
from tests.parser.odd_packets import VA, patched, writes

SIZE = 1 << 14
LOOKS = 24 * SIZE
SLOTS = 256  # of NCCL's ring of clear-to-sends
FAR = 1 << 24  # bytes
LONG_AGO = 10**10  # ns: of another lap of the PSN


def test_an_address_is_never_read_as_that_of_the_message_before() -> None:
    """SIMPLE in mid-stream. Two announcements take turns in one place of the table: that of a message, and one of a
    buffer far away that is 256 messages later and of another time. The message's packet is looked up all the while,
    with the far address: no announcement that counts has it. How often the two threads meet is chance: most runs see a
    mistake, and not each of them."""
    job = example_job(count=30_000, protocol="simple", mtu=1024, startup=False, rebuild=False)
    made = generate(job, iterations=1, first_iteration=900)
    plan = plan_job(job, streams=2)
    engine = Engine(replace(plan.engine, threads=2, check_icrc=False))
    cts = plan.engine.cts
    first = made.packets[messages(made.packets, job.flows[0].qpns[0])[0][0]][1]
    buffer = int.from_bytes(first[VA : VA + 8], "big")
    announced = writes(made.packets, job.flows[0].cts_qpns[0])
    own = next(frame for _, frame in announced if frame[70:78] == buffer.to_bytes(8, "little"))
    number = int.from_bytes(own[70 + cts.number_at : 78 + cts.number_at], "little")
    away = patched(70 + cts.number_at, (number + SLOTS).to_bytes(8, "little"))(
        patched(70, (buffer + FAR).to_bytes(8, "little"))(own))
    wanted = patched(VA, (buffer + FAR).to_bytes(8, "big"))(first)
    now = LONG_AGO * 2
    turns: list[Packet] = [(now, own), (now - LONG_AGO, away)] * SIZE
    rings = [MemoryRing(SIZE), MemoryRing(SIZE)]
    placers = Placers([ring.ring_address for ring in rings])
    seat = placers.attach(engine)
    rings[0].put([(now, wanted)] * SIZE)
    rings[1].put([*((now, frame) for _, frame in announced), *turns][:SIZE], 1)
    with placers:
        while rings[0].put_so_far < LOOKS:
            for ring in rings:
                ring.repeat(SIZE - ring.waiting if ring is rings[1] else SIZE // 2 * (ring.waiting < SIZE // 2))
            time.sleep(0.001)  # both cores are the threads'
        while not seat.passed([ring.put_so_far for ring in rings]):
            pass
        assert engine.outcomes(0)["unanchored"][0] == LOOKS and engine.begun == -1
        for stream, frame in ((1, own), (0, first)):  # with its own address it is found
            rings[stream].put([(now, frame)], stream)
            while not seat.passed([ring.put_so_far for ring in rings]):
                pass
        assert engine.outcomes(0)["unanchored"][0] == LOOKS and engine.begun == 900
