"""What it costs to drive placing from Python: one look of a follower at empty rings, and of an engine: decision 0007.

    .venv/bin/python -P benchmarks/follower_poll.py

Microseconds of processor time, 10th percentile, median and 90th of 21 rounds of 2,000 looks.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from flowcheck.rebuild.iteration.wire_arenas import WireArenas
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.follower import Follower
from flowcheck.rebuild.version.policy import Policy
from lab.synth import example_job

ROUNDS, LOOKS, REFERENCES = 21, 2000, 64


class EmptyRing:
    """A ring without packets, with the layout of dataplane/include/packetref.h."""

    error = None

    def __init__(self) -> None:
        self._entries = ctypes.create_string_buffer(24 * REFERENCES)
        self._memory = ctypes.create_string_buffer(320)
        self.ring_address = ctypes.addressof(self._memory) + -ctypes.addressof(self._memory) % 64
        ctypes.c_uint64.from_address(self.ring_address + 128).value = REFERENCES - 1
        ctypes.c_void_p.from_address(self.ring_address + 136).value = ctypes.addressof(self._entries)


def measure(name: str, look: Callable[[], object]) -> None:
    taken = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        for _ in range(LOOKS):
            look()
        taken.append(1e6 * (time.thread_time() - begin) / LOOKS)
    taken.sort()
    print(f"{name:24} {taken[2]:6.2f} {taken[10]:6.2f} {taken[18]:6.2f} us")


def main() -> None:
    ring = EmptyRing()
    plan = plan_job(example_job())
    arenas = WireArenas(plan, [ring], ["a"])
    follower = Follower(plan, arenas, Policy.live(record_seconds=30.0))
    measure("Follower.poll, no packet", lambda: list(follower.poll()))
    measure("Engine.run, no packet", lambda: arenas.engine.run(0, ring.ring_address, 2048))


if __name__ == "__main__":
    main()
