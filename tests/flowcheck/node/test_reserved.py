"""A job's memory is there before its packets come."""

import numpy as np

from flowcheck.node.groups.session import LiveSession
from flowcheck.rebuild.plan import plan_job
from lab.synth import example_job
from tests.flowcheck.memory_ring import MemoryRing

PAGE = 4096
PRESENT = np.uint64(1 << 63)  # Documentation/admin-guide/mm/pagemap.rst


def test_all_arenas_lie_in_memory_when_a_session_begins() -> None:
    """The first touch of a page takes longer than a packet; a port waits for neither."""
    plan = plan_job(example_job(count=3_000_000), arenas=3)
    session = LiveSession(plan, [MemoryRing()], slots=2, threads=0, record_seconds=1.0)
    try:
        for arena in range(3):
            region = session.engine.region(arena)
            first, pages = region.ctypes.data // PAGE + 1, region.nbytes // PAGE - 1
            entries = np.fromfile("/proc/self/pagemap", np.uint64, pages, offset=8 * first)
            assert pages > 2900 and (entries & PRESENT).all()
            assert not region.any()
    finally:
        session.close()
