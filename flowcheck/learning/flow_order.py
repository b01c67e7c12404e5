"""How messages go round the flows of one connection (nccl-wire.md 5.3).

    pieces(size, used) -> [(offset, bytes)]       of one message
    arrange(flows, announced) -> FlowOrder        which QP comes first, next, ...; whether messages are split
    devices_of(cts_flows) -> [[CtsFlow]]          cts flows that announce one buffer in turns: the ports of a merged NIC
    arrange_devices(by_device, announced)         the flows of all its ports in the connection's order

Split, every message has a piece on every QP, in QP order: its size, its address and the message's size in the immediate
say which. Not split, message k goes to QP k mod n: the clear-to-send writes, the flags in the payload or the slots say
which k it is. All of that is checked again by the walk, message by message; what is not decided here is a doubt.

A merged NIC has several ports with addresses of their own. Clear-to-send number k comes from port k modulo their
number, and names the same keys and buffer as its neighbours: that alone shows that the ports are one NIC, so without
clear-to-send it is not learnt. QP i is on port i modulo their number. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from flowcheck.learning.messages import Cts, CtsFlow, Flow, Message, head_flags

__all__ = ["FlowOrder", "arrange", "arrange_devices", "byte_order", "devices_of", "imm_size", "pieces"]

GRAIN = 128
QPS_MAX = 128
TRIED = 16  # QPs of which each is tried as the first
LOOKED_AT = 256  # messages of a QP: more do not tell more
DEVICES_MAX = 8
SLOTS = 8


@dataclass
class FlowOrder:
    """flows: of one connection, the first message's first. used: over how many of them each message is spread.
    imm_order: of immediates, "little", "big" or "" if none shows it. order: what decided the order of the flows.
    unsure: why it is not known which flows belong to it, or "". doubt: what of their order is open."""

    flows: tuple[Flow, ...]
    used: int = 1
    imm_order: str = ""
    order: str = ""
    unsure: str = ""
    doubt: str = ""


def pieces(size: int, used: int) -> list[tuple[int, int]]:
    """(offset, bytes) of a message's piece on each of the QPs it uses; pieces after its end are empty."""
    if used == 1:
        return [(0, size)]
    piece = _piece(size, used)
    return [(i * piece, max(0, min(piece, size - i * piece))) for i in range(used)]


def _piece(size: int, used: int) -> int:
    return -(-size // (used * GRAIN)) * GRAIN


def imm_size(imm: int, order: str) -> int:
    """Message size of an immediate as it is on the wire."""
    return int.from_bytes(imm.to_bytes(4, "big"), "little") if order == "little" else imm


def arrange(flows: Sequence[Flow], announced: Sequence[Cts]) -> FlowOrder:
    """announced: the clear-to-send writes for these QPs, [] if none were captured."""
    members = sorted(flows, key=lambda q: q.qpn)
    if len(members) > QPS_MAX:
        return FlowOrder(tuple(members), unsure=f"{len(members)} QPs write to one buffer, NCCL uses at most {QPS_MAX}")
    order, plain, other = byte_order(members, 1)
    if len(members) == 1:
        unsure = ""
        if other > plain:
            unsure = "its immediates name larger messages than it carries: the other parts travel elsewhere"
        return FlowOrder(tuple(members), imm_order=order, unsure=unsure)
    # what is left of a write that the NIC cut may look like a message of another size
    if other * 8 <= plain:
        return _turns(members, announced, order)
    order, fits, other = byte_order(members, len(members))
    if other * 8 > fits:
        return FlowOrder(
            tuple(members), imm_order=order,
            unsure=f"{fits} of {fits + other} pieces have the size that NCCL's rule gives them on {len(members)} QPs",
        )
    return _split(members, announced, order)


def byte_order(flows: Sequence[Flow], used: int) -> tuple[str, int, int]:
    """(byte order of the immediates, pieces whose size fits the immediate, pieces that do not); what fits both ways,
    such as an empty message, counts for neither."""
    fits = {"little": 0, "big": 0}
    told = 0
    for m in (m for q in flows for m in q.messages if m.imm is not None):
        by = {order: _fits(m, imm_size(m.imm or 0, order), used) for order in fits}
        if all(by.values()):
            continue
        told += 1
        for order, fit in by.items():
            fits[order] += fit
    order = max(fits, key=lambda o: fits[o])
    return order if fits[order] else "", fits[order], told - fits[order]


def _fits(m: Message, size: int, used: int) -> bool:
    """Is this as large as some piece of a message of `size` bytes? As pieces() has it, without listing them."""
    if used == 1 or not size:
        return m.size == size
    full, rest = divmod(size, _piece(size, used))
    return (m.size == _piece(size, used) and full > 0) or (m.size == rest and (rest > 0 or full < used)) or (
        m.size == 0 and full + (rest > 0) < used
    )


# -- split over all QPs ----------------------------------------------------------------------------------


def _split(members: list[Flow], announced: Sequence[Cts], order: str) -> FlowOrder:
    n = len(members)
    starts = {(c.rkey, c.address) for c in announced}
    if not starts:
        return _split_unannounced(members, order)
    possible = [_indices(q, starts, n, order) for q in members]
    found, sure = matching(possible)
    if found is None:
        return FlowOrder(tuple(members), n, order, unsure="their pieces do not begin where the announced slots do")
    doubt = "" if sure else "pieces that are empty on several QPs do not tell their order, QP numbers are taken for it"
    return FlowOrder(
        tuple(members[i] for i in found), n, order, "sizes and addresses of the pieces of announced messages",
        doubt=doubt,
    )


def _split_unannounced(members: list[Flow], order: str) -> FlowOrder:
    """The pieces of one message lie one after the other: the QP with the lower address comes first."""
    n = len(members)
    whole = min(q.whole for q in members)
    for turn in range(whole):
        row = [(q.messages[turn], q) for q in members]
        sizes = {imm_size(m.imm or 0, order) for m, _ in row}
        if len(sizes) != 1 or not all(m.size for m, _ in row):
            continue
        row.sort(key=lambda pair: pair[0].va)
        base, size = row[0][0].va, sizes.pop()
        if [(m.va - base, m.size) for m, _ in row] == pieces(size, n):
            return FlowOrder(tuple(q for _, q in row), n, order, "addresses and sizes of the pieces of one message")
        return FlowOrder(tuple(members), n, order, unsure="their pieces are not parts of one message")
    ways = {}
    for first in members if n <= TRIED else ():  # or where a message of one of them begins
        starts = {(m.rkey, m.va) for m in first.messages}
        possible = [{0} if q is first else _indices(q, starts, n, order) - {0} for q in members]
        found, sure = matching(possible)
        if found is not None and sure:
            ways[tuple(found)] = tuple(members[i] for i in found)
    if len(ways) == 1:
        return FlowOrder(ways.popitem()[1], n, order, "addresses and sizes of the pieces")
    doubt = "no message with a piece on every QP tells their order, QP numbers are taken for it"
    filled = sorted(members, key=lambda q: (-sum(m.size > 0 for m in q.messages), q.qpn))
    return FlowOrder(tuple(filled), n, order, "sizes of the pieces", doubt=doubt)


def _indices(flow: Flow, starts: set[tuple[int, int]], n: int, order: str) -> set[int]:
    """Places that this QP may have among n, by pieces of messages that begin at one of `starts` (key, address)."""
    possible = set(range(n))
    for m in flow.messages[:LOOKED_AT]:
        if m.imm is None or not (size := imm_size(m.imm, order)):
            continue
        here = {
            i for i, (offset, part) in enumerate(pieces(size, n))
            if part == m.size and (not m.va or (m.rkey, m.va - offset) in starts)
        }
        possible &= here or possible  # its beginning may be lost
    return possible


# -- in turns --------------------------------------------------------------------------------------------


def _turns(members: list[Flow], announced: Sequence[Cts], order: str) -> FlowOrder:
    n = len(members)
    flags = [_flag(q) for q in members]
    if all(flags) and len(set(flags)) == n:
        ordered = [q for _, q in sorted(zip(flags, members, strict=True), key=lambda pair: pair[0])]
        return FlowOrder(tuple(ordered), 1, order, "flags in the payload count the messages")
    slots = {c.index - 1: (c.rkey, c.address) for c in announced}
    possible = []
    for q in members:
        here = set(range(n))
        for turn, m in enumerate(q.messages[: q.whole]):
            if m.va:  # empty messages have one too
                here &= {i for i in here if slots.get(turn * n + i, (m.rkey, m.va)) == (m.rkey, m.va)}
        possible.append(here)
    found, sure = matching(possible)
    if found is None:
        return FlowOrder(tuple(members), 1, order, unsure="their messages are not those that are announced in turn")
    if sure:
        how = "numbers and addresses of clear-to-send writes"
        return FlowOrder(tuple(members[i] for i in found), 1, order, how)
    timed = _in_time(members, possible)
    doubt = "" if all(q.whole for q in members) else (
        "first messages are missing, and those that were seen do not tell their order"
    )
    chosen = timed or tuple(members[i] for i in found)
    return FlowOrder(chosen, 1, order, "slots of the messages, and their order in time", doubt=doubt)


def _flag(flow: Flow) -> int:
    """Flag of the first message, 0 if it has none or may not be the first."""
    if not flow.whole:
        return 0
    kind, flag = head_flags(flow.messages[0].head, flow.messages[0].size)
    return flag if kind else 0


def _in_time(members: Sequence[Flow], possible: Sequence[set[int]]) -> tuple[Flow, ...] | None:
    """By the time of the first messages: a slot is written again when its message has been taken, so of two QPs that
    begin in one slot the earlier one has the earlier message. Other slots are the walk's to compare."""
    placed: dict[int, Flow] = {}
    for _, i in sorted((q.messages[0].ns if q.messages else 1 << 63, i) for i, q in enumerate(members)):
        free = [place for place in sorted(possible[i]) if place not in placed]
        if not free:
            return None
        placed[free[0]] = members[i]
    return tuple(placed[i] for i in range(len(members)))


def matching(possible: list[set[int]]) -> tuple[list[int] | None, bool]:
    """(for each place the number of its QP, is that the only way?); QPs by number where that is a way."""
    n = len(possible)
    holder: dict[int, int] = {}

    def place(q: int, tried: set[int], barred: tuple[int, int] = (-1, -1)) -> bool:
        for i in sorted(possible[q]):
            if i in tried or (q, i) == barred:
                continue
            tried.add(i)
            if i not in holder or place(holder[i], tried, barred):
                holder[i] = q
                return True
        return False

    for q in range(n):
        if not place(q, set()):
            return None, False
    kept = [holder[i] for i in range(n)]
    for i, q in enumerate(kept):  # is there another matching without this pair?
        holder = dict(enumerate(kept))
        del holder[i]
        if place(q, set(), (q, i)):
            return list(range(n)) if all(i in here for i, here in enumerate(possible)) else kept, False
    return kept, True


# -- merged NICs -----------------------------------------------------------------------------------------


def devices_of(cts_flows: Sequence[CtsFlow]) -> list[list[CtsFlow]]:
    """Cts flows of one connection each, port by port; only connections with several are returned."""
    regions: dict[tuple[int, ...], dict[int, tuple[int, int, int]]] = defaultdict(dict)  # by keys: (from, to, room)
    for number, cts_flow in enumerate(cts_flows):
        for c in cts_flow.elements:
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
        group, n = [cts_flows[i] for i in numbers], len(numbers)
        turns = [{(c.index - 1) % n for c in a.elements} for a in group]
        if sorted(map(sorted, turns)) != [[i] for i in range(n)]:
            continue  # each has numbers of its own, or it is another connection
        if len({(a.src, a.dst) for a in group}) == n:
            groups.append([a for _, a in sorted(zip(map(min, turns), group, strict=True), key=lambda pair: pair[0])])
    return groups


def arrange_devices(by_device: Sequence[Sequence[Flow]], announced: Sequence[Cts]) -> FlowOrder:
    """by_device: the QPs on each port, of port 0 first. announced: the clear-to-send writes of all ports."""
    n = len(by_device)
    members = [q for flows in by_device for q in sorted(flows, key=lambda q: q.qpn)]
    device = {id(q): d for d, flows in enumerate(by_device) for q in flows}
    total = len(members)
    if len({len(flows) for flows in by_device}) > 1:
        counts = ", ".join(str(len(flows)) for flows in by_device)
        return FlowOrder(tuple(members), unsure=f"the ports of a merged NIC have {counts} QPs: some are not captured")
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
            return FlowOrder(tuple(members[i] for i in found), used, order, how)
    return FlowOrder(
        tuple(members), unsure=f"the messages do not go round {total} QPs on {n} ports as NCCL sends them"
    )


def _goes(flow: Flow, place: int, total: int, used: int, slots: dict[int, int], order: str) -> bool:
    """Is this what the QP at `place` carries? Messages after a gap say nothing here."""
    for turn, m in enumerate(flow.messages[: flow.whole]):
        number, i = divmod(turn * total + place, used)
        offset, part = pieces(imm_size(m.imm or 0, order), used)[i]
        if m.size != part or (m.size and slots.get(number, m.va - offset) != m.va - offset):
            return False
    return True
