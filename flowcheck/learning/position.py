"""How far one connection has been explained, and whether its next message is the one that is due.

    Position.take(connection, ...) -> pieces seen     moves behind the message; raises Misfit

Each QP has a PSN of its own (nccl-wire.md 5.6), a message goes round them or is split over them (5.3). Where there are
several, the slot, the order in which a slot is written and the immediate must agree as well: sizes alone would not
tell one QP from the next. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowcheck.learning.connections import Connection
from flowcheck.learning.queuepairs import imm_size
from flowcheck.learning.traffic import Message, Queue, head_flags
from parser.wire import Protocol

__all__ = ["Misfit", "Mismatch", "Position"]

KINDS = {"ll": Protocol.LL, "ll128": Protocol.LL128}


class Misfit(Exception):
    """The next message is another one. where: PSN and QP."""

    def __init__(self, where: str, needs: str, seen: str) -> None:
        super().__init__(f"{where}: {needs}, {seen}")
        self.where, self.needs, self.seen = where, needs, seen


class Mismatch(Exception):
    """The hypothesis does not explain the traffic. progress: messages that it did explain."""

    def __init__(self, text: str, progress: int) -> None:
        super().__init__(text)
        self.progress = progress


@dataclass
class Position:
    """at, psn: of each QP, its next observed message and the PSN that is due. number: of the next message; step: its
    step, moved by the caller. short: messages that did not come because the capture ends. bases: where each protocol's
    slots begin. written: the last message in each slot, and when it came."""

    at: list[int]
    psn: list[int]
    number: int = 0
    step: int = 0
    short: int = 0
    bases: dict[Protocol, int] = field(default_factory=dict)
    written: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def start(cls, connection: Connection) -> Position:
        n = len(connection.queues)
        return cls([0] * n, [0] * n)

    def copy(self) -> Position:
        return Position(
            [*self.at], [*self.psn], self.number, self.step, self.short, dict(self.bases), dict(self.written)
        )

    def take(
        self, connection: Connection, size: int, protocol: Protocol, slot_bytes: int, mtu: int, pair: bool
    ) -> tuple[tuple[Queue, Message], ...]:
        """The pieces of the next message, of `size` bytes, that were seen; () if none was. Raises Misfit."""
        parts, ended, several = [], False, len(connection.queues) > 1
        for q, offset, part in connection.due(self.number, size):
            queue = connection.queues[q]
            message = self._next(queue, self.at[q], self.psn[q], part, mtu)
            ended |= message is None and self.at[q] >= len(queue.messages)
            if message is not None:
                if several:
                    self._check_slot(queue, message, offset, protocol, slot_bytes, connection.slots)
                    _check_named(queue, message, size, connection.imm_order)
                _check_flag(queue, message, part if offset else size, protocol, self.step)
                self.at[q] += 1
                parts.append((queue, message))
            self.psn[q] += max(1, -(-part // mtu)) + pair
        self.short += ended
        self.number += 1
        return tuple(parts)

    @staticmethod
    def _next(queue: Queue, at: int, psn: int, size: int, mtu: int) -> Message | None:
        """The message that begins at this PSN of a QP, None if it is missing."""
        if at >= len(queue.messages):
            return None  # the capture ends before it
        message = queue.messages[at]
        needs = f"a message of {size} bytes here"
        if message.psn != psn:
            if at >= queue.whole and message.psn >= psn + max(1, -(-size // mtu)):
                return None  # it fell into a gap
            raise Misfit(_where(queue, psn), needs, f"one begins at PSN {message.psn}")
        if message.size != size:
            raise Misfit(_where(queue, psn), needs, f"{message.size} were sent")
        return message

    def _check_slot(
        self, queue: Queue, message: Message, offset: int, protocol: Protocol, slot_bytes: int,
        announced: dict[int, int],
    ) -> None:
        """A message goes to the slot of its step (2.3), which is the one that was announced for its number (5.4), and
        which is written again only when it has been taken."""
        if not message.va or (offset and not message.size):  # where an empty piece is written has not been seen
            return
        start = message.va - offset
        base = start - self.step % 8 * slot_bytes
        if self.bases.setdefault(protocol, base) != base:
            raise Misfit(_where(queue, message.psn), f"the slot of step {self.step}", "another one is written")
        if announced.get(self.number, start) != start:
            needs = f"the slot announced for message {self.number}"
            raise Misfit(_where(queue, message.psn), needs, "it goes elsewhere")
        slot = queue.src, start
        number, ns = self.written.get(slot, (self.number, message.ns))
        if number != self.number and message.ns < ns:
            raise Misfit(_where(queue, message.psn), "the later one of two messages", "its slot is written again")
        self.written[slot] = self.number, message.ns


def _where(queue: Queue, psn: int) -> str:
    return f"PSN {psn} of QP {queue.qpn:#x}"


def _check_named(queue: Queue, message: Message, size: int, order: str) -> None:
    """The immediate of every piece names the size of the message."""
    if message.imm is not None and order and imm_size(message.imm, order) != size:
        named = imm_size(message.imm, order)
        raise Misfit(_where(queue, message.psn), f"a message of {size} bytes", f"the immediate says {named}")


def _check_flag(queue: Queue, message: Message, size: int, protocol: Protocol, step: int) -> None:
    kind, flag = head_flags(message.head, size)
    if protocol != Protocol.SIMPLE and KINDS.get(kind) == protocol and flag != step + 1:
        raise Misfit(_where(queue, message.psn), f"flag {step + 1}", f"the payload says {flag}")
