"""Two checks apart from the search: the finished manifest against every message, and the sign of a modified NCCL."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from parser.lane import messages

from flowcheck.errors import InternalError
from flowcheck.jobplan import JobPlan
from flowcheck.learn.topology import Layout
from flowcheck.learn.traffic import Message, head_flags
from flowcheck.learn.walk import Wire
from parser.plan import EdgeSpec, Phase

__all__ = ["check_plan", "modified_nccl"]


def check_plan(plan: JobPlan, wires: list[Wire]) -> None:
    """Walk the engine's own schedule over the observed messages. Raises InternalError where they differ: the search
    and the plan would then not mean the same job."""
    edges = {(e.channel, e.src, e.dst): e for e in plan.engine.edges}
    for wire in wires:
        due = _schedule(edges[wire.channel, wire.src, wire.dst], plan.engine.mtu)
        at, size = next(due, (None, 0))
        for message in wire.connection.messages:
            while at is not None and at < message.psn:
                at, size = next(due, (None, 0))
            if (at, size) != (message.psn, message.size):
                raise InternalError(
                    f"the learnt manifest has {size} bytes at PSN {at}, the capture {message.size} at {message.psn}",
                    where=wire.connection.name(),
                )


def _schedule(edge: EdgeSpec, mtu: int) -> Iterator[tuple[int, int]]:
    """(PSN, wire bytes) of every message of an edge, steady calls repeated for ever."""
    psn = 0
    once = [c for c in edge.calls if c.phase != Phase.STEADY]
    steady = [c for c in edge.calls if c.phase == Phase.STEADY and c.lane is not None]
    turn = once
    while turn:
        for call in turn:
            if call.lane is None:
                continue
            for _, _, size, _, _ in messages(call.lane):
                yield psn, size
                psn += max(1, -(-size // mtu)) + (edge.ar_above is not None and size > edge.ar_above)
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
