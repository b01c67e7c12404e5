"""What a node has of the user state before: of the next one only the rest is sent.

    tail.same(link, data)       how many of the last bytes of this state the node has, once it has this one
    tail.shortened(link, message, data)     without them
    tail.put_back(tail.now)     the one before was the last that went, after all
    tail.forget()               one did not go: nothing is known

The training thread.
"""

from __future__ import annotations

from typing import Any

from flowcheck.control.protocol import Link, User, UserHead
from flowcheck.control.user_state import tail_bytes, tail_of
from flowcheck.trainer.connection.framed import Payload

__all__ = ["UserTail"]


class UserTail:
    """now: tensors of the newest user state, and where it went."""

    def __init__(self) -> None:
        self.now: tuple[Link, bytes] | None = None

    def same(self, link: Link, data: bytes) -> int:
        before = self.now
        if before is not None and before[0] is link and data.endswith(before[1]) and tail_bytes(data) == len(before[1]):
            return len(before[1])
        self.now = link, tail_of(data)
        return 0

    def shortened(self, link: Link, message: User, data: Payload | None) -> tuple[Any, Payload | None]:
        """Without what the node has already: the tensors of the state before this one on this connection."""
        if isinstance(data, bytes) and (same := self.same(link, data)):
            return UserHead(message.iteration, message.rank, same), data[:-same]
        return message, data

    def put_back(self, before: tuple[Link, bytes] | None) -> None:
        self.now = before

    def forget(self) -> None:
        self.now = None
