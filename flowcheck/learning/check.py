"""Two checks apart from the search: the finished manifest against every message, and the sign of a modified NCCL."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator

from parser.lane import messages

from flowcheck.errors import InternalError
from flowcheck.learning.layout import Layout
from flowcheck.learning.queuepairs import pieces
from flowcheck.learning.traffic import Message, head_flags
from flowcheck.learning.walk import Wire
from flowcheck.rebuild.plan import JobPlan
from parser.plan import EdgeSpec, Phase

__all__ = ["check_plan", "modified_nccl"]


def check_plan(plan: JobPlan, wires: list[Wire]) -> None:
    """Walk the engine's own schedule over the observed messages. Raises InternalError where they differ: the search
    and the plan would then not mean the same job."""
    edges = {(e.channel, e.src, e.dst): e for e in plan.engine.edges}
    for wire in wires:
        edge, queues = edges[wire.channel, wire.src, wire.dst], wire.connection.queues
        if (edge.qps, edge.used) != (len(queues), wire.connection.used):
            raise InternalError(
                f"the learnt manifest has {edge.qps} QPs, {edge.used} of them in use at once",
                where=wire.connection.name(),
            )
        left = [deque((m.psn, m.size) for m in queue.messages) for queue in queues]
        due = _schedule(edge, plan.engine.mtu)
        while any(left):
            q, *planned = next(due, (next(i for i, rest in enumerate(left) if rest), 1 << 62, 0))
            if not left[q] or planned[0] < left[q][0][0]:
                continue  # not captured
            psn, size = left[q].popleft()
            if planned != [psn, size]:
                raise InternalError(
                    f"the learnt manifest has {planned[1]} bytes at PSN {planned[0]}, the capture {size} at {psn}",
                    where=queues[q].name(),
                )


def _schedule(edge: EdgeSpec, mtu: int) -> Iterator[tuple[int, int, int]]:
    """(QP, PSN, wire bytes) of every piece of every message of an edge, steady calls repeated for ever."""
    psn, number = [0] * edge.qps, 0
    once = [c for c in edge.calls if c.phase != Phase.STEADY]
    steady = [c for c in edge.calls if c.phase == Phase.STEADY and c.lane is not None]
    turn = once
    while turn:
        for call in turn:
            if call.lane is None:
                continue
            for _, _, size, _, _ in messages(call.lane):
                pair = edge.ar_above is not None and size > edge.ar_above
                for i, (_, part) in enumerate(pieces(size, edge.used)):
                    q = (number * edge.used + i) % edge.qps
                    yield q, psn[q], part
                    psn[q] += max(1, -(-part // mtu)) + pair
                number += 1
        turn = steady


def modified_nccl(layout: Layout) -> str:
    """What says that loops have one send too many, or "".

    Unmodified, a loop has 2n-2 sends. The modified kernel then forwards the reduced chunk that its sender received
    last. That is looked for in contents, where both directions of a rank are seen: the send after a loop repeats the
    last message of the inbound loop, flags aside. In an unmodified job that place holds the raw contribution to the
    next loop. It equals the reduced chunk where gradients repeat and the other ranks contribute zeros: so every
    connection has to show it, with contents that are not all alike."""
    n = layout.ranks
    period = 2 * n - 1
    compared = 0
    inbound = {(w.channel, w.dst): w for w in layout.wires}
    for wire in layout.wires:
        sent = wire.connection.messages
        source = inbound.get((wire.channel, wire.src))
        if len(sent) % period or not sent or source is None:
            return ""
        received = source.connection.messages
        for at in range(0, min(len(sent), len(received)) - period + 1, period):
            extra, last = sent[at + period - 1], received[at + period - 2]
            if extra.size != last.size:
                return ""
            if extra.size and (len(set(words := _words(extra))) < 2 or words != _words(last)):
                return ""
            compared += extra.size > 0
    return f"every loop has one message too many on each of {len(layout.wires)} connections" if compared else ""


def _words(message: Message) -> list[int]:
    """The first words of a message without what differs between two sends of the same data: LL and LL128 flags."""
    kind, _ = head_flags(message.head, message.size)
    words = list(struct.unpack_from(f"<{len(message.head) // 4}I", message.head))
    if kind == "ll":
        return words[::2]
    return words[:30] if kind == "ll128" else words
