"""Which flows are one connection: data, and what comes back for it. The same code for `inspect` and for learning.

    Announced(regions).by(writes) -> announcers     by the addresses that clear-to-send writes name (5.4)
    port_partners(flows) -> {flow: its partner}     by UDP source port (5.8): both directions share one that is made of
                                                    both queue pairs' numbers, or each has its sender's number

A flow is one direction of one queue pair. Pure functions; section numbers: reference nccl-wire.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

__all__ = ["Announced", "connection_port", "port_partners"]

FlowId = TypeVar("FlowId", bound=Hashable)
MANAGEMENT_QPS = (0, 1)
NEIGHBOURS = 16
CANDIDATES_MAX = 4096
_SENDER_PORTS: tuple[Callable[[int], int], ...] = (lambda qpn: qpn & 0xFFFF, lambda qpn: qpn & 0x3FFF | 0xC000)


def connection_port(qp_a: int, qp_b: int) -> int:
    """UDP source port that the kernel and ConnectX derive from a connection's two queue pair numbers."""
    v = qp_a * qp_b
    v ^= v >> 20
    v ^= v >> 40
    label = v & 0xFFFFF
    return ((label & 0x3FFF) ^ (label >> 14)) | 0xC000


class Announced:
    """Who announces an address, among the clear-to-send flows from one host to another.

    regions: (announcer, memory key, address, bytes) of every clear-to-send write."""

    def __init__(self, regions: Iterable[tuple[int, int, int, int]]) -> None:
        sizes: dict[tuple[int, int, int], int] = {}
        for announcer, key, start, size in regions:
            sizes[key, start, announcer] = max(size, sizes.get((key, start, announcer), 0))
        self._ranges: dict[int, list[tuple[int, int, int]]] = {}  # by key: (start, end, announcer)
        for (key, start, announcer), size in sizes.items():
            self._ranges.setdefault(key, []).append((start, start + size, announcer))
        for ranges in self._ranges.values():
            ranges.sort()
        self._starts = {key: [r[0] for r in ranges] for key, ranges in self._ranges.items()}

    def by(self, writes: Iterable[tuple[int, int, int]]) -> set[int]:
        """All announcers of slots that a flow writes into. writes: (memory key, address, bytes) of each; empty ones
        count where no other says anything."""
        writes = list(writes)
        places = {(key, at) for key, at, size in writes if size} or {(key, at) for key, at, _ in writes}
        found = set()
        for key, address in places:
            behind = bisect_right(self._starts.get(key, []), address)
            # slots of one buffer do not overlap; those of others may, in a hostile capture
            near = self._ranges.get(key, [])[max(0, behind - NEIGHBOURS) : behind]
            found |= {announcer for _, end, announcer in near if address < end}
        return found


def port_partners(flows: Mapping[FlowId, tuple[Hashable, Hashable, int, int]]) -> dict[FlowId, FlowId]:
    """Flows whose UDP source port is made of both queue pair numbers, or of the sender's own as NICs do that have
    no flow label: 14 bits that must fit, so a pair counts only if neither side fits a second partner.

    flows: (source, destination, QP number, port) of each; both ways are returned."""
    index: dict[tuple[Hashable, Hashable, int], list[FlowId]] = {}
    for flow, (src, dst, qpn, port) in flows.items():
        if qpn not in MANAGEMENT_QPS:
            index.setdefault((src, dst, port), []).append(flow)
    shared = _both_ways(_sharing(flows, index))
    for number_of in _SENDER_PORTS:
        own = {}
        for flow, (src, dst, qpn, port) in flows.items():
            there = index.get((dst, src, number_of(qpn)), [])
            if flow not in shared and qpn not in MANAGEMENT_QPS and len(there) <= CANDIDATES_MAX:
                own[flow] = [other for other in there if other not in shared and number_of(flows[other][2]) == port]
        shared |= _both_ways(own)
    return shared


def _both_ways(partners: Mapping[FlowId, list[FlowId]]) -> dict[FlowId, FlowId]:
    return {
        flow: found[0] for flow, found in partners.items() if len(found) == 1 and partners.get(found[0]) == [flow]
    }


def _sharing(
    flows: Mapping[FlowId, tuple[Hashable, Hashable, int, int]],
    index: Mapping[tuple[Hashable, Hashable, int], list[FlowId]],
) -> dict[FlowId, list[FlowId]]:
    partners: dict[FlowId, list[FlowId]] = {}
    for (src, dst, port), here in index.items():
        there = index.get((dst, src, port), [])
        if len(here) * len(there) > CANDIDATES_MAX:
            continue  # a port shared by so many is not made of queue pair numbers
        for flow in here:
            qpn = flows[flow][2]
            partners[flow] = [other for other in there if connection_port(qpn, flows[other][2]) == port]
    return partners
