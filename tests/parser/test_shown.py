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
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import parser.machine
import pytest
from parser.machine import Engine, placing

from flowcheck.rebuild.plan import plan_job
from tests.flowcheck.altered import spots
from tests.forks import fork
from tests.parser.odd_packets import PROTOCOLS, feed, patched, traffic, writes

TRACE_ME, PEEK_USER, SINGLE_STEP, INSTRUCTION_POINTER = 0, 3, 9, 16 * 8  # sys/ptrace.h, sys/user.h
# MOVNT* with each prefix that compilers give it; SFENCE and MFENCE. What locks the bus is a fence as well, but where
# Python counts its references, after others were told.
PAST_THE_CACHES = re.compile(
    rb"\x66?[\x40-\x4f]?\x0f[\xe7\x2b\xc3]|\xc5.[\xe7\x2b]|\xc4[\x01\x21\x41\x61\x81\xa1\xc1\xe1].[\xe7\x2b]"
    rb"|\x62[\x01-\xf1]..[\xe7\x2b]", re.DOTALL,
)
FENCE = re.compile(rb"\x0f\xae[\xf0\xf8]")

def code_of(module: ModuleType) -> range:
    """Addresses of a compiled module's instructions."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (mapped,) = [line[0] for line in lines if line[-1] == module.__file__ and "x" in line[1]]
    first, end = (int(part, 16) for part in mapped.split("-"))
    return range(first, end)


def kind(instruction: bytes) -> str:
    return "past" if PAST_THE_CACHES.match(instruction) else "fence" if FENCE.match(instruction) else ""


def steps(action: Callable[[], object], code: range) -> Iterator[tuple[int, int]]:
    """Each instruction of a child in this code, before it: (the child, its address). What is there is the parent's."""
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
        while True:
            libc.ptrace(SINGLE_STEP, child, 0, 0)
            status = os.waitpid(child, 0)[1]
            assert os.WIFSTOPPED(status), "the child has ended"
            if os.WSTOPSIG(status) == signal.SIGSTOP:
                return
            at = libc.ptrace(PEEK_USER, child, INSTRUCTION_POINTER, 0) & (1 << 64) - 1
            if at in code:
                yield child, at
    finally:
        os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def followed(action: Callable[[], object], code: range) -> list[str]:
    """What a child does in this code: "past" for a store past the caches, "fence" for a fence, in their order."""
    known: dict[int, str] = {}  # the child's code is where ours is
    found = []
    for _, at in steps(action, code):
        if at not in known:
            known[at] = kind(ctypes.string_at(at, 15))
        found += [known[at]] if known[at] else []
    return found


@pytest.mark.skipif(placing()[0] == "portable", reason="portable kernels store through the caches")
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


SLOTS = 256  # of NCCL's ring of clear-to-sends
INDEX, ADDRESS, TURN = 0, 8 * SLOTS, 3 * 8 * SLOTS  # fc_cts_table: three arrays of 8 bytes a slot, and one of 4


def places_of(number: int, address: int) -> set[int]:
    """Where an announcement's number lies in this process with its address, and copies that this reader makes."""
    found = set()
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in Path("/proc/self/maps").read_text().splitlines():
            first, end = (int(part, 16) for part in line.split()[0].split("-"))
            if line.split()[1].startswith("rw") and not line.endswith(("[vvar]", "[vsyscall]")):
                memory.seek(first)
                part = memory.read(end - first) or b""
                place = -1
                while (place := part.find(address.to_bytes(8, "little"), place + 1)) >= 0:
                    before = place - ADDRESS + INDEX
                    if before >= 0 and part[before : before + 8] == number.to_bytes(8, "little"):
                        found.add(first + before)
    return found


def at_places(process: int | str, *places: tuple[int, int]) -> list[int]:
    """The numbers at addresses of a process, each with its size in bytes; none where no memory is by now."""
    with open(f"/proc/{process}/mem", "rb", buffering=0) as memory, contextlib.suppress(OSError):
        return [int.from_bytes(os.pread(memory.fileno(), size, at), "little") for at, size in places]
    return []


def test_no_moment_has_one_announcements_number_and_anothers_address() -> None:
    """Clear-to-sends that follow each other in one place of the table, which other threads read meanwhile: what is not
    whole has an odd turn. The second shows which place is the table's, and while the third comes it is read."""
    job, plan, made = traffic("simple")
    cts, engine = plan.engine.cts, Engine(plan.engine)
    (_, frame), *_ = writes(made.packets, job.flows[0].cts_qpns[0])
    number = int.from_bytes(frame[70 + cts.number_at : 78 + cts.number_at], "little")
    addresses = (0x123456789ABC0000, 0x23456789ABCD0000, 0x3456789ABCDE0000)
    pairs = [(number + turn * SLOTS, address) for turn, address in enumerate(addresses)]
    first, second, third = (
        patched(70 + cts.number_at, one.to_bytes(8, "little"))(patched(70, address.to_bytes(8, "little"))(frame))
        for one, address in pairs
    )
    assert engine.feed(0, first)
    places = places_of(*pairs[0])
    assert engine.feed(0, second)
    (index,) = (one for one in places if at_places("self", (one, 8), (one + ADDRESS, 8)) == [*pairs[1]])
    at = (number - 1) % SLOTS
    address, turn = index + ADDRESS, index - 8 * at + TURN + 4 * at
    seen = []
    for child, _ in steps(lambda: engine.feed(0, third), code_of(parser.machine)):
        words = at_places(child, (index, 8), (address, 8), (turn, 4))
        seen.append(((words[0], words[1]), words[2] % 2))
    assert [pair for pair, odd in seen if not odd and pair not in pairs[1:]] == []
    assert {pair for pair, odd in seen if not odd} == {*pairs[1:]} and {odd for _, odd in seen} == {0, 1}
