"""How far one connection has been explained, and whether its next message is the one that is due.

    Position.take(connection, ...) -> pieces seen     moves past the message; raises Mismatch

Each flow has PSNs of its own (nccl-wire.md 5.6), a message goes round them or is split over them (5.3). Where there are
several, the slot, the order in which a slot is written and the immediate must agree as well: sizes alone would not
tell one flow from the next. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowcheck.learning.connections import Connection
from flowcheck.learning.flow_order import imm_size
from flowcheck.learning.messages import Flow, Message, head_flags, packets
from parser.chunk_layout import Protocol

__all__ = ["Mismatch", "Position"]

KINDS = {"ll": Protocol.LL, "ll128": Protocol.LL128}


class Mismatch(Exception):
    """The hypothesis does not explain the traffic. text: what it needs and what was seen. where: on the wire, "" if at
    no single place. progress: messages that it did explain."""

    def __init__(self, text: str, progress: int = 0, where: str = "") -> None:
        super().__init__(f"{where}: {text}" if where else text)
        self.text, self.progress, self.where = text, progress, where


@dataclass
class Position:
    """at, psn: of each flow, its next observed message and the PSN that is due. number: of the next message; step: its
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
        n = len(connection.flows)
        return cls([0] * n, [0] * n)

    def copy(self) -> Position:
        return Position(
            [*self.at], [*self.psn], self.number, self.step, self.short, dict(self.bases), dict(self.written)
        )

    def take(
        self, connection: Connection, size: int, protocol: Protocol, slot_bytes: int, mtu: int, pair: bool
    ) -> tuple[tuple[Flow, Message], ...]:
        """The pieces of the next message, of `size` bytes, that were seen; () if none was. Raises Mismatch."""
        parts, ended, several = [], False, len(connection.flows) > 1
        for i, offset, part in connection.due(self.number, size):
            flow = connection.flows[i]
            message = self._next(flow, self.at[i], self.psn[i], part, mtu)
            ended |= message is None and self.at[i] >= len(flow.messages)
            if message is not None:
                if several:
                    self._check_slot(flow, message, offset, protocol, slot_bytes, connection.slots)
                    _check_named(flow, message, size, connection.imm_order)
                _check_flag(flow, message, part if offset else size, protocol, self.step)
                self.at[i] += 1
                parts.append((flow, message))
            self.psn[i] += packets(part, mtu) + pair
        self.short += ended
        self.number += 1
        return tuple(parts)

    @staticmethod
    def _next(flow: Flow, at: int, psn: int, size: int, mtu: int) -> Message | None:
        """The message that begins at this PSN of a flow, None if it is missing."""
        if at >= len(flow.messages):
            return None  # the capture ends before it
        message = flow.messages[at]
        if message.psn != psn and at >= flow.whole and message.psn >= psn + packets(size, mtu):
            return None  # it fell into a gap
        if message.psn != psn:
            raise _mismatch(flow, psn, f"a message of {size} bytes here", f"one begins at PSN {message.psn}")
        if message.size != size:
            raise _mismatch(flow, psn, f"a message of {size} bytes here", f"{message.size} were sent")
        return message

    def _check_slot(
        self, flow: Flow, message: Message, offset: int, protocol: Protocol, slot_bytes: int, announced: dict[int, int]
    ) -> None:
        """A message goes to the slot of its step (2.3), which is the one that was announced for its number (5.4), and
        which is written again only when it has been taken."""
        if not message.va or (offset and not message.size):  # where an empty piece is written has not been seen
            return
        start = message.va - offset
        base = start - self.step % 8 * slot_bytes
        if self.bases.setdefault(protocol, base) != base:
            raise _mismatch(flow, message.psn, f"the slot of step {self.step}", "another one is written")
        if announced.get(self.number, start) != start:
            raise _mismatch(flow, message.psn, f"the slot announced for message {self.number}", "it goes elsewhere")
        slot = flow.src, start
        number, ns = self.written.get(slot, (self.number, message.ns))
        if number != self.number and message.ns < ns:
            raise _mismatch(flow, message.psn, "the later one of two messages", "its slot is written again")
        self.written[slot] = self.number, message.ns


def _mismatch(flow: Flow, psn: int, needs: str, seen: str) -> Mismatch:
    return Mismatch(f"{needs}, {seen}", where=f"PSN {psn} of QP {flow.qpn:#x}")


def _check_named(flow: Flow, message: Message, size: int, order: str) -> None:
    """The immediate of every piece names the size of the message."""
    if message.imm is not None and order and (named := imm_size(message.imm, order)) != size:
        raise _mismatch(flow, message.psn, f"a message of {size} bytes", f"the immediate says {named}")


def _check_flag(flow: Flow, message: Message, size: int, protocol: Protocol, step: int) -> None:
    kind, flag = head_flags(message.head, size)
    if protocol != Protocol.SIMPLE and KINDS.get(kind) == protocol and flag != step + 1:
        raise _mismatch(flow, message.psn, f"flag {step + 1}", f"the payload says {flag}")
