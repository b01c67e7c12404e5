"""Merged NICs: a connection whose QPs are on several ports, and whose messages are striped over these (5.3).

    devices_of(announcers) -> [[Announcer]]          flows of clear-to-send writes that announce one buffer in turns
    arrange_devices(by_device, announced) -> Order   the QPs of all ports in the connection's order

Clear-to-send number k comes from port k modulo their number, and names the same keys and buffer as its neighbours: that
is what shows that ports with addresses of their own are one NIC. Nothing else does, so without clear-to-send it is not
learnt. QP i is on port i modulo their number. Pure. Section numbers: nccl-wire.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from flowcheck.learning.queuepairs import Order, byte_order, imm_size, matching, pieces
from flowcheck.learning.traffic import Announcer, Cts, Queue

__all__ = ["arrange_devices", "devices_of"]

DEVICES_MAX = 8
SLOTS = 8


def devices_of(announcers: Sequence[Announcer]) -> list[list[Announcer]]:
    """Announcers of one connection each, port by port; only connections with several are returned."""
    regions: dict[tuple[int, ...], dict[int, tuple[int, int, int]]] = defaultdict(dict)  # by keys: (from, to, room)
    for number, announcer in enumerate(announcers):
        for c in announcer.elements:
            low, high, room = regions[c.keys].get(number, (c.address, c.address, 0))
            regions[c.keys][number] = min(low, c.address), max(high, c.address), max(room, c.size)
    together: dict[int, set[int]] = {}
    for region in regions.values():
        spans = sorted((*span, number) for number, span in region.items())
        for (low, _, room, one), (_, high, _, other) in pairwise(spans):
            if high - low < SLOTS * room:  # inside one buffer
                joined = together.get(one, {one}) | together.get(other, {other})
                if len(joined) <= DEVICES_MAX:
                    together.update(dict.fromkeys(joined, joined))
    groups = []
    for numbers in {tuple(sorted(numbers)) for numbers in together.values()}:
        group, n = [announcers[i] for i in numbers], len(numbers)
        turns = [{(c.index - 1) % n for c in a.elements} for a in group]
        if sorted(map(sorted, turns)) != [[i] for i in range(n)]:
            continue  # each has numbers of its own, or it is another connection
        if len({(a.src, a.dst) for a in group}) == n:
            groups.append([a for _, a in sorted(zip(map(min, turns), group, strict=True), key=lambda pair: pair[0])])
    return groups


def arrange_devices(by_device: Sequence[Sequence[Queue]], announced: Sequence[Cts]) -> Order:
    """by_device: the QPs on each port, of port 0 first. announced: the clear-to-send writes of all ports."""
    n = len(by_device)
    members = [q for queues in by_device for q in sorted(queues, key=lambda q: q.qpn)]
    device = {id(q): d for d, queues in enumerate(by_device) for q in queues}
    total = len(members)
    if len({len(queues) for queues in by_device}) > 1:
        counts = ", ".join(str(len(queues)) for queues in by_device)
        return Order(tuple(members), unsure=f"the ports of a merged NIC have {counts} QPs: some are not captured")
    for used in dict.fromkeys((n, total)):
        order, fits, other = byte_order(members, used)
        if not order or other * 8 > fits:
            continue
        slots = {c.index - 1: c.address for c in announced}
        possible = [
            {p for p in range(device[id(q)], total, n) if _goes(q, p, total, used, slots, order)} for q in members
        ]
        found, sure = matching(possible)
        if found is not None and sure:
            how = "numbers and addresses of clear-to-send writes on every port"
            return Order(tuple(members[i] for i in found), used, order, how)
    return Order(
        tuple(members), unsure=f"the messages do not go round {total} QPs on {n} ports as NCCL sends them"
    )


def _goes(queue: Queue, place: int, total: int, used: int, slots: dict[int, int], order: str) -> bool:
    """Is this what the QP at `place` carries? Messages behind a gap say nothing here."""
    for turn, m in enumerate(queue.messages[: queue.whole]):
        number, i = divmod(turn * total + place, used)
        offset, part = pieces(imm_size(m.imm or 0, order), used)[i]
        if m.size != part or (m.size and slots.get(number, m.va - offset) != m.va - offset):
            return False
    return True
