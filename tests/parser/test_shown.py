"""What another thread is told of has reached memory: stores past the caches are ordered by nothing but a fence.

No result shows a fence that is missing: for some hundred nanoseconds, on another core, bytes are not there yet that are
said to be. So the processor is followed: a child places one packet, step by step, and every instruction is looked at.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import parser.machine
import pytest
from parser.machine import Engine, placing

from flowcheck.rebuild.plan import plan_job
from tests.flowcheck.altered import spots
from tests.forks import fork
from tests.parser.odd_packets import PROTOCOLS, feed, traffic

TRACE_ME, PEEK_USER, SINGLE_STEP, INSTRUCTION_POINTER = 0, 3, 9, 16 * 8  # sys/ptrace.h, sys/user.h
# MOVNT* with each prefix that compilers give it; SFENCE and MFENCE. What locks the bus is a fence as well, but where
# Python counts its references, after others were told.
PAST_THE_CACHES = re.compile(
    rb"\x66?[\x40-\x4f]?\x0f[\xe7\x2b\xc3]|\xc5.[\xe7\x2b]|\xc4[\x01\x21\x41\x61\x81\xa1\xc1\xe1].[\xe7\x2b]"
    rb"|\x62[\x01-\xf1]..[\xe7\x2b]", re.DOTALL,
)
FENCE = re.compile(rb"\x0f\xae[\xf0\xf8]")

pytestmark = pytest.mark.skipif(placing()[0] == "portable", reason="portable kernels store through the caches")


def code_of(module: ModuleType) -> range:
    """Addresses of a compiled module's instructions."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (mapped,) = [line[0] for line in lines if line[-1] == module.__file__ and "x" in line[1]]
    first, end = (int(part, 16) for part in mapped.split("-"))
    return range(first, end)


def kind(instruction: bytes) -> str:
    return "past" if PAST_THE_CACHES.match(instruction) else "fence" if FENCE.match(instruction) else ""


def followed(action: Callable[[], object], code: range) -> list[str]:
    """What a child does in this code: "past" for a store past the caches, "fence" for a fence, in their order."""
    libc = ctypes.CDLL(None)
    libc.ptrace.restype, libc.ptrace.argtypes = ctypes.c_long, [ctypes.c_long] * 4
    child = fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            if libc.ptrace(TRACE_ME, 0, 0, 0) == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
                action()
                os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(1)
    try:
        if not os.WIFSTOPPED(os.waitpid(child, 0)[1]):
            pytest.skip("a process may not be followed here")
        known: dict[int, str] = {}  # the child's code is where ours is
        found = []
        while True:
            libc.ptrace(SINGLE_STEP, child, 0, 0)
            status = os.waitpid(child, 0)[1]
            assert os.WIFSTOPPED(status), "the child has ended"
            if os.WSTOPSIG(status) == signal.SIGSTOP:
                return found
            at = libc.ptrace(PEEK_USER, child, INSTRUCTION_POINTER, 0) & (1 << 64) - 1
            if at in code:
                if at not in known:
                    known[at] = kind(ctypes.string_at(at, 15))
                found += [known[at]] if known[at] else []
    finally:
        os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_fence_follows_what_goes_past_the_caches(protocol: str) -> None:
    job, _, made = traffic(protocol)
    plan = plan_job(job, streams=2)
    engine = Engine(replace(plan.engine, threads=2))
    packet = spots(made, protocol, job.flows[0].qpns[0], 0)[0].packets[2]
    feed(engine, made.packets[:packet])
    frame, before = made.packets[packet][1], engine.outcomes(0)["placed"][0]
    found = followed(lambda: engine.feed(0, frame), code_of(parser.machine))
    assert engine.feed(0, frame) and engine.outcomes(0)["placed"][0] == before + 1
    assert found.count("past") >= 8 and found[-1] == "fence"
