"""Traffic of a job without an end, for benches of the live node: one window of packets that is numbered anew each lap.

A job of two ranks whose gradients come down a tree in SIMPLE messages of 512 KB, one channel per flow, every packet
to be placed. A lap of the window is MESSAGES messages of every flow, and the next lap has the same packets with
higher PSNs: in SIMPLE messages nothing else changes, because a buffer has eight slots. So an iteration of any size
needs no more memory than the window, which no cache holds. ICRCs are not checked.

    window = Window(flows)
    plan = window.plan(laps)              iterations of so many laps
    feed = Feed(window); engine takes feed.ring_address
    feed.fill(lost=[5]); ...              the next lap, one packet missing
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence

import numpy as np

from flowcheck.job.model import Flow
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.bench.limits import PacketRing
from lab.bench.workload import MESSAGE, make
from lab.synth import example_job
from lab.synth.schedule import tree_of
from parser.chunk_layout import Protocol

__all__ = ["MESSAGES", "MTU", "Feed", "Window", "drain", "flows_for"]

MTU = 1024
MESSAGES = 8  # the slots of a buffer: in the next lap every message is written to the same address
BUCKETS = 2  # of gradients in a lap: 32 MB with 16 flows, about what DDP makes
FLOWS = 16
PSN_AT = 50


def flows_for(ring_bytes: int) -> int:
    """As many flows as `--megabytes` allows, 16 with 256 MB, a power of two: window and model grow with them."""
    allowed = max(1, min(FLOWS, FLOWS * ring_bytes // (256 << 20)))
    return 1 << (allowed.bit_length() - 1)


class Window:
    """The packets. Whoever fills it, through a Feed, drains it before somebody else does."""

    def __init__(self, flows: int) -> None:
        message = MESSAGE[Protocol.SIMPLE]
        made = make(Protocol.SIMPLE, MTU, flows, flows * MESSAGES * message)
        slot = made.frames.shape[1]
        self.flows, self.gradient_bytes, self.packets = made.flows, made.wire_bytes, made.packets
        self.expected, self.addresses, self.lengths = made.expected, made.addresses, made.lengths
        self.each = made.packets // flows
        self._frames = made.frames
        self._psn = made.frames.reshape(self.each, flows, slot)[:, :, PSN_AT : PSN_AT + 4].view(">u4")[:, :, 0]
        self.ring = PacketRing(made.addresses, made.lengths, closed=False)
        self.ring.show(np.zeros(0, np.uint32))

    def plan(self, laps: int, arenas: int = 2) -> JobPlan:
        """Of a job whose iterations are so many laps."""
        channels = len(self.flows)
        bucket = self.gradient_bytes // 4 // BUCKETS
        job = example_job(
            ranks=2, channels=channels, count=[bucket] * (BUCKETS * laps), protocol="simple", algorithm="tree", mtu=MTU,
            startup=False, rebuild=False,
        )
        job.flows = []
        for channel, (src, dst, qpn) in enumerate(self.flows):
            root = tree_of(2, channel, channels).parent.index(-1)  # what comes down the tree is final
            sender, receiver = str(ipaddress.ip_address(src)), str(ipaddress.ip_address(dst))
            job.flows.append(Flow(root, 1 - root, channel, sender, receiver, [qpn]))
        return plan_job(job, arenas=arenas, check_icrc=False)

    def number(self, lap: int) -> None:
        """Give every packet the PSN of that lap."""
        self._psn[:] = ((lap * self.each + np.arange(self.each)) & 0xFFFFFF)[:, None]


class Feed:
    """A source of one stream (flowcheck.rebuild.iteration.scheduler.Source): the laps of one contender, one by one."""

    def __init__(self, window: Window) -> None:
        self._window, self.laps = window, 0
        self.ring_address: int = window.ring.address
        self.error: Exception | None = None

    def fill(self, lost: Sequence[int] = ()) -> int:
        """Show the next lap but for the packets `lost`, counted from its first; returns how many there are.

        The lap before it must have been taken."""
        assert self._window.ring.waiting == 0
        self._window.number(self.laps)
        shown = np.delete(np.arange(self._window.packets, dtype=np.uint32), list(lost))
        self._window.ring.show(shown)
        self.laps += 1
        return len(shown)

    @property
    def waiting(self) -> int:
        """Packets that nobody has taken yet."""
        return int(self._window.ring.waiting)


def drain(feed: Feed, poll: Callable[[], bool]) -> None:
    """Call `poll` until it has taken all packets. It says whether anything moved, and must not stop before."""
    while feed.waiting:
        moved = poll()
        assert moved, f"{feed.waiting} packets are left and nobody takes them"
