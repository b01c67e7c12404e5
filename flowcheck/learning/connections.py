"""From queue pairs to connections: which QPs carry one connection's messages, in which order, and who announces them.

    connections(flows, starts) -> [Connection]

QPs belong together where they write into the slots of one buffer: those that a single flow of clear-to-send writes
announces, or, where none was captured, those under one memory key and no further apart than a buffer is long. How
messages go round them is queuepairs.py's. What the evidence leaves open stands in `unsure` (refused where it matters)
or in `doubt`. Pure. Section numbers: nccl-wire.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from flowcheck.learning.merged import arrange_devices, devices_of
from flowcheck.learning.queuepairs import Order, arrange, pieces
from flowcheck.learning.traffic import P2P_SIZE, Announcer, Message, Queue, head_flags, observed
from parser.findings import connection_port

__all__ = ["Connection", "connections"]

# bytes by the flags that show (pieces of LL128 messages need not show theirs); other sizes show in clear-to-send writes
BUFFERS = {"ll": 8 * 65536, "ll128": 8 * 614400, "": 8 * 614400}


@dataclass
class Connection:
    """Data src -> dst over `queues`, and what comes back on cts_qpns (none: not captured).

    used: over how many QPs each message is spread. devices: ports of a merged NIC; QP i is on port i modulo devices.
    cts_qpns: where clear-to-send comes in, one of each port. imm_order: "little", "big" or "" if no immediate told.
    cts_sizes, tags: of the clear-to-send writes; posted, slots: size and address by number of the message announced.
    layout: versions by their form.
    unsure: why it is not known which QPs belong to it, or "". order: what decided the order of the QPs; doubt: what of
    it is open.
    """

    queues: tuple[Queue, ...]
    used: int = 1
    imm_order: str = ""
    devices: int = 1
    cts_qpns: tuple[int, ...] = ()
    paired_by: str = ""
    cts_sizes: Counter[int] = field(default_factory=Counter)
    tags: Counter[int] = field(default_factory=Counter)
    posted: dict[int, int] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    layout: str = ""
    unsure: str = ""
    order: str = ""
    doubt: str = ""

    @property
    def src(self) -> str:
        return self.queues[0].src

    @property
    def dst(self) -> str:
        return self.queues[0].dst

    @property
    def qpn(self) -> int:
        """Of its first QP."""
        return self.queues[0].qpn

    @property
    def cts_qpn(self) -> int | None:
        """Of its first port."""
        return self.cts_qpns[0] if self.cts_qpns else None

    @property
    def tag(self) -> int | None:
        """Rank of the sender by CTS tag."""
        return next(iter(self.tags)) if len(self.tags) == 1 else None

    @property
    def point_to_point(self) -> bool:
        return bool(self.cts_sizes) and set(self.cts_sizes) == {P2P_SIZE}

    @property
    def dropped(self) -> int:
        return sum(q.dropped for q in self.queues)

    @property
    def gaps(self) -> bool:
        """Is something missing before the last message of a QP?"""
        return any(q.whole < len(q.messages) for q in self.queues)

    @cached_property
    def total(self) -> int:
        """Messages of all QPs, pieces counted one by one."""
        return sum(len(q.messages) for q in self.queues)

    @cached_property
    def mtus(self) -> set[int]:
        """Path MTU, as far as packets tell."""
        return {q.mtu for q in self.queues if q.mtu}

    @cached_property
    def flagged(self) -> int:
        """Messages whose first bytes have flags, small enough for the steps taken since PSN 0 (at most 4 a message)."""
        return sum(0 < head_flags(m.head, m.size)[1] <= 4 * (i + 1) for i, m in enumerate(self.messages))

    @cached_property
    def pairs(self) -> int:
        """Messages (pieces) that left as adaptive-routing pairs."""
        return sum(m.pair for m in self.pieces())

    def pieces(self) -> Iterator[Message]:
        """What was seen on any QP."""
        for queue in self.queues:
            yield from queue.messages

    @cached_property
    def messages(self) -> list[Message]:
        """All messages, joined as if none were missing."""
        return self.first(self.total)

    def first(self, most: int) -> list[Message]:
        """The first messages, joined likewise."""
        return self.ahead([0] * len(self.queues), 0, most)

    def ahead(self, at: Sequence[int], number: int, most: int) -> list[Message]:
        """The next messages from message `number` on, joined as if none were missing, at most `most`. at: the next one
        of each QP."""
        if len(self.queues) == 1:
            return self.queues[0].messages[at[0] : at[0] + most]
        places = list(at)
        out: list[Message] = []
        while len(out) < most:
            joined: Message | None = None
            for i in range(self.used):
                q = (number * self.used + i) % len(self.queues)
                if places[q] >= len(self.queues[q].messages):
                    return out
                piece = self.queues[q].messages[places[q]]
                places[q] += 1
                joined = piece if joined is None else replace(joined, size=joined.size + piece.size)
            if joined is not None:
                out.append(joined)
            number += 1
        return out

    def due(self, number: int, size: int) -> list[tuple[int, int, int]]:
        """(QP, offset, bytes) of each piece of message `number` (5.3)."""
        n = len(self.queues)
        return [((number * self.used + i) % n, *part) for i, part in enumerate(pieces(size, self.used))]

    @property
    def empty_part(self) -> bool:
        """Nothing but empty pieces of messages that travel elsewhere?"""
        return bool(self.unsure) and all(not m.size and m.imm for m in self.pieces())

    def name(self) -> str:
        if len(self.queues) == 1:
            return self.queues[0].name()
        return f"{self.src} -> {self.dst} QPs {', '.join(f'{q.qpn:#x}' for q in self.queues)}"


def connections(flows: list[dict[str, Any]], starts: np.ndarray) -> list[Connection]:
    """Every connection with data, in order of appearance. flows, starts: of an Observer of messages."""
    queues, announcers = observed(flows, starts)
    place = {id(q): i for i, q in enumerate(queues)}
    found = list(_striped(queues, announcers))
    by_ends: dict[tuple[str, str], tuple[list[Queue], list[Announcer]]] = defaultdict(lambda: ([], []))
    for queue in queues:
        by_ends[queue.src, queue.dst][0].append(queue)
    for announcer in announcers:
        by_ends[announcer.dst, announcer.src][1].append(announcer)
    found += [c for together, there in by_ends.values() for c in _between(together, there)]
    return sorted(found, key=lambda c: min(place[id(q)] for q in c.queues))


def _striped(queues: list[Queue], announcers: list[Announcer]) -> Iterator[Connection]:
    """Connections over several ports of merged NICs, whose QPs and announcers are taken out of the lists."""
    by_ends: dict[tuple[str, str], list[Queue]] = defaultdict(list)
    for queue in queues:
        by_ends[queue.src, queue.dst].append(queue)
    taken: set[int] = set()
    for group in devices_of(announcers):
        by_device: list[list[Queue]] = []
        elements = [c for a in group for c in a.elements]
        for announcer in group:
            keyed = [replace(c, rkey=key) for c in elements for key in {*c.keys, c.rkey} if key]
            slots = _Slots([replace(announcer, elements=keyed)])
            free = [q for q in by_ends[announcer.dst, announcer.src] if id(q) not in taken]
            by_device.append([q for q in free if slots.announcers(q)])
        if not all(by_device):
            continue
        order = arrange_devices(by_device, elements)
        whole = replace(group[0], elements=sorted(elements, key=lambda c: c.index))
        connection = _joined(_connection(order), whole, "clear-to-send address")
        connection.devices, connection.cts_qpns = len(group), tuple(a.qpn for a in group)
        taken |= {id(q) for q in order.queues} | {id(a) for a in group}
        yield connection
    queues[:] = [q for q in queues if id(q) not in taken]
    announcers[:] = [a for a in announcers if id(a) not in taken]


def _between(queues: list[Queue], announcers: list[Announcer]) -> list[Connection]:
    """The connections of one pair of hosts, in one direction."""
    announced: dict[int, list[Queue]] = {}
    alone: list[Queue] = []
    contested: set[int] = set()
    slots = _Slots(announcers)
    for queue in queues:
        numbers = slots.announcers(queue)
        if len(numbers) == 1:
            announced.setdefault(numbers.pop(), []).append(queue)
        else:
            alone.append(queue)
            contested |= {id(queue)} if numbers else set()
    spare: dict[int, list[Announcer]] = defaultdict(list)
    for i, announcer in enumerate(announcers):
        if i not in announced:
            spare[announcer.sport].append(announcer)
    if len(announced) == 1:  # nothing but empty pieces: of the only connection there is, if it splits its messages
        (members,) = announced.values()
        empty = [q for q in alone if q.messages and not any(m.size for m in q.messages)]
        if empty and arrange(members + empty, announcers[next(iter(announced))].elements).used > 1:
            members += empty
            alone = [q for q in alone if q not in empty]
    out: list[Connection] = []
    for number, members in announced.items():
        order = arrange(members, announcers[number].elements)
        out.append(_joined(_connection(order), announcers[number], "clear-to-send address"))
    for members, unsure in _unannounced(alone):
        connection = _connection(arrange(members, []))
        if any(id(q) in contested for q in members):
            unsure = "several flows of clear-to-send writes announce the addresses it writes to"
        connection.unsure = unsure or connection.unsure
        first = connection.queues[0]
        near = spare[first.sport]  # 5.8: the port is a function of both QP numbers, and the same in both directions
        fits = [a for a in near if connection_port(first.qpn, a.qpn) == first.sport]
        if len(fits) == 1:
            _joined(connection, fits[0], "UDP source port")
            near.remove(fits[0])
        out.append(connection)
    return out


def _connection(order: Order) -> Connection:
    return Connection(
        order.queues, order.used, order.imm_order, unsure=order.unsure, order=order.reason, doubt=order.doubt
    )


def _joined(connection: Connection, announcer: Announcer, how: str) -> Connection:
    connection.cts_qpns = (announcer.qpn,)
    connection.paired_by = how
    connection.layout = announcer.layout
    connection.cts_sizes = Counter(c.size for c in announcer.elements)
    connection.tags = Counter(c.tag for c in announcer.elements)
    connection.posted = {c.index - 1: c.size for c in announcer.elements}
    connection.slots = {c.index - 1: c.address for c in announcer.elements}
    return connection


class _Slots:
    """Which announcer names an address."""

    def __init__(self, announcers: Sequence[Announcer]) -> None:
        self._ranges: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # by key: (start, end, announcer)
        for number, announcer in enumerate(announcers):
            ends: dict[tuple[int, int], int] = {}
            for c in announcer.elements:
                ends[c.rkey, c.address] = max(c.size, ends.get((c.rkey, c.address), 0))
            for (rkey, start), size in ends.items():
                self._ranges[rkey].append((start, start + size, number))
        for ranges in self._ranges.values():
            ranges.sort()
        self._starts = {rkey: [r[0] for r in ranges] for rkey, ranges in self._ranges.items()}

    def announcers(self, queue: Queue) -> set[int]:
        """All whose slots this QP writes into; empty writes count where no other says anything."""
        places = {(m.rkey, m.va) for m in queue.messages if m.size} or {(m.rkey, m.va) for m in queue.messages}
        found = set()
        for rkey, va in places:
            at = bisect_right(self._starts.get(rkey, []), va)
            # slots of one buffer do not overlap; those of others may, in a hostile capture
            found |= {number for start, end, number in self._ranges.get(rkey, [])[max(0, at - 16) : at] if va < end}
        return found


def _unannounced(queues: list[Queue]) -> Iterator[tuple[list[Queue], str]]:
    """(QPs of one connection, why that is not sure) where no clear-to-send write tells: QPs that write under one key
    within the length of one buffer."""
    regions: dict[int, list[tuple[int, int, int, str]]] = defaultdict(list)  # by key: (first, last address, QP, kind)
    for number, queue in enumerate(queues):
        reach: dict[int, tuple[int, int, str]] = {}
        for m in queue.messages:
            if m.va:  # empty pieces have an address too
                low, high, kind = reach.get(m.rkey, (m.va, m.va, ""))
                reach[m.rkey] = min(low, m.va), max(high, m.va), kind or head_flags(m.head, m.size)[0]
        for rkey, (low, high, kind) in reach.items():
            regions[rkey].append((low, high, number, kind))
    root = list(range(len(queues)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    too_long = set()
    for region in regions.values():
        region.sort()
        begin, end, first, kind = region[0]
        for low, high, number, other in region[1:]:
            kind = kind or other
            if low - end < BUFFERS[kind] // 8 * 7 and max(high, end) - begin < BUFFERS[kind]:
                root[find(number)] = find(first)
                end = max(high, end)
            else:
                if low <= end:  # it reaches into what would be another's buffer
                    too_long |= {number, first}
                begin, end, first, kind = low, high, number, other
    groups: dict[int, list[int]] = defaultdict(list)
    for number in range(len(queues)):
        groups[find(number)].append(number)
    for members in groups.values():
        unsure = ""
        if too_long & set(members):
            unsure = "no clear-to-send write was captured, and they write to one stretch that is longer than a buffer"
        yield [queues[i] for i in members], unsure
