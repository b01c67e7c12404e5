"""Packets of lab.synth with one thing changed, and what tests of the engine alone do with them.

Frames are IPv4 without a VLAN tag. Changes make the ICRC right again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from parser.machine import Engine

from flowcheck.job.model import Job
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import Synthesis, example_job, generate
from tests.flowcheck.altered import PAYLOAD_AT, Packet, destination, opcode, sealed

COUNT = 12_000
PROTOCOLS = ["ll", "ll128", "simple"]
VA, DMA_LENGTH, IMMEDIATE = 54, 66, 54  # where these lie in a frame that has them
Change = Callable[[bytes], bytes]


@functools.cache
def traffic(protocol: str, iterations: int = 2) -> tuple[Job, JobPlan, Synthesis]:
    job = example_job(count=COUNT, protocol=protocol, mtu=1024, startup=False, rebuild=False, seed=4)
    return job, plan_job(job), generate(job, iterations=iterations, seed=4)


def feed(engine: Engine, packets: list[Packet], stream: int = 0) -> None:
    for _, frame in packets:
        assert engine.feed(stream, frame)


def writes(packets: list[Packet], qpn: int) -> list[Packet]:
    """The data packets to a QP, without acknowledgements."""
    return [packet for packet in packets if destination(packet[1]) == qpn and opcode(packet[1]) in PAYLOAD_AT]


def kinds(engine: Engine) -> list[str]:
    return [entry["kind"] for entry in engine.disagreements()]


def patched(at: int, data: bytes) -> Change:
    """Bytes of the frame replaced; negative places count from the payload's end."""

    def change(frame: bytes) -> bytes:
        where = at if at >= 0 else len(frame) - 4 + at
        return sealed(frame[:where] + data + frame[where + len(data) :])

    return change


def added(at: int, size: int, value: int) -> Change:
    """A value added to a big-endian number of the headers."""

    def change(frame: bytes) -> bytes:
        number = int.from_bytes(frame[at : at + size], "big") + value
        return sealed(frame[:at] + (number % 256**size).to_bytes(size, "big") + frame[at + size :])

    return change


def shortened(by: int) -> Change:
    """The last bytes of the payload are not there, and all lengths say so."""

    def change(frame: bytes) -> bytes:
        body = bytearray(frame[: -4 - by] + bytes(4))
        for at in (16, 38):
            body[at : at + 2] = (int.from_bytes(body[at : at + 2], "big") - by).to_bytes(2, "big")
        return sealed(bytes(body))

    return change


def with_psn(frame: bytes, number: int) -> bytes:
    return sealed(frame[:51] + number.to_bytes(3, "big") + frame[54:])
