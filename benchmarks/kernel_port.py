"""What the kernel takes for a packet of an af_packet port: `--kernel-ns` of `flowcheck plan capacity`.

    .venv/bin/python -P benchmarks/kernel_port.py [--packets 100000] [--rounds 9] [--bytes 1100]        as root

Frames go through a pair of veth interfaces, sent by this thread, which the kernel makes handle them at the other end
as well: there into the ring of a packet socket (PACKET_RX_RING, as DPDK's net_af_packet has it), or to nobody. The
processor time of this thread differs by what reception takes: the copy into the ring, and what leads to it. The ring
is emptied between bursts, so that nothing is dropped for want of room. Medians; what carries the frame from one
interface to the other is in both, and a real NIC's driver in neither.
"""

from __future__ import annotations

import argparse
import mmap
import socket
import statistics
import struct
import time

import numpy as np

from lab.network import netns

SPACE, NEAR, FAR = "fc-kernel-port", "near", "far"
SOL_PACKET, PACKET_RX_RING, PACKET_VERSION, PACKET_STATISTICS, TPACKET_V2 = 263, 5, 10, 6, 1
FRAME, FRAMES, BLOCK = 2048, 2048, 1 << 20
BURST = 1024
ALL = 3  # ETH_P_ALL


class Ring:
    """A packet socket's."""

    def __init__(self, interface: str) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self._socket.setsockopt(SOL_PACKET, PACKET_VERSION, TPACKET_V2)
        size = FRAME * FRAMES
        self._socket.setsockopt(SOL_PACKET, PACKET_RX_RING, struct.pack("4I", BLOCK, size // BLOCK, FRAME, FRAMES))
        self._memory = mmap.mmap(self._socket.fileno(), size)
        self._status = np.frombuffer(self._memory, np.uint32)[:: FRAME // 4]
        self._socket.bind((interface, ALL))

    def empty(self) -> int:
        """Give all frames back; how many were there."""
        found = int(np.count_nonzero(self._status))
        self._status[:] = 0
        return found

    def close(self) -> None:
        self._socket.close()


def send(to: socket.socket, frame: bytes, packets: int, ring: Ring | None) -> float:
    """Nanoseconds of this thread for a packet."""
    taken = found = 0
    for first in range(0, packets, BURST):
        burst = min(BURST, packets - first)
        begin = time.thread_time_ns()
        for _ in range(burst):
            to.send(frame)
        taken += time.thread_time_ns() - begin
        found += ring.empty() if ring is not None else burst
    assert found == packets, f"{packets - found} packets were lost"
    return taken / packets


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--packets", type=int, default=100_000)
    asked.add_argument("--rounds", type=int, default=9)
    asked.add_argument("--bytes", type=int, default=1100)
    options = asked.parse_args()
    netns.require()
    netns.add(SPACE)
    try:
        netns.quiet(SPACE)
        netns.batch(SPACE, [f"link add {NEAR} mtu 9000 type veth peer name {FAR} mtu 9000", f"link set {NEAR} up",
                            f"link set {FAR} up"])
        measured = netns.inside(SPACE, lambda: rounds(options.packets, options.rounds, bytes(options.bytes)))
    finally:
        netns.delete(SPACE)
    heard, unheard = (statistics.median(column) for column in zip(*measured, strict=True))
    added = sorted(one - other for one, other in measured)
    print(f"sent and received {heard:.0f} ns, sent to nobody {unheard:.0f} ns, of frames of {options.bytes} bytes")
    print(f"--kernel-ns {statistics.median(added):.0f}   [{added[0]:.0f}..{added[-1]:.0f}]")


def rounds(packets: int, count: int, frame: bytes) -> list[tuple[float, float]]:
    """(with a listener, without one), of each round."""
    frame = b"\xff" * 6 + bytes(6) + b"\x08\x00" + frame[14:]
    out = []
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as to:
        to.bind((NEAR, 0))
        for _ in range(count):
            ring = Ring(FAR)
            heard = send(to, frame, packets, ring)
            ring.close()
            out.append((heard, send(to, frame, packets, None)))
    return out


if __name__ == "__main__":
    main()
