"""The checkpoint nodes that one part of a rank is sent to: of several each is served as if it were the only one.

    nodes = Nodes(epoch, say)
    nodes.connect(addresses, token, tls, identity, opening, prepare)
    nodes.state(known), nodes.why(known, closed), nodes.epoch, nodes.published     all together, as the user sees them
    nodes.answered                      set whenever one of them says something
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flowcheck.control.protocol import Ranges
from flowcheck.trainer.connection.sender import Sender
from flowcheck.trainer.loop import AttachmentState
from flowcheck.trainer.ranges import Wish
from flowcheck.trainer.starts import Identity

__all__ = ["STATES", "Nodes"]

STATES = [*AttachmentState]


class Nodes:
    """epoch: what the script said. say: a line of the log."""

    def __init__(self, epoch: int, say: Callable[[str], None]) -> None:
        self._epoch, self._say = epoch, say
        self.senders: list[Sender] = []
        self.answered = threading.Event()

    def connect(
        self, addresses: Sequence[tuple[str, int]], token: Callable[[], bytes], tls: ssl.SSLContext | None,
        identity: Identity, opening: Callable[[], list[Any]], prepare: Callable[[Ranges, int], Wish],
    ) -> None:
        """opening, prepare: as of Sender, whose threads call them."""
        for address in addresses:
            self.senders.append(
                Sender(address, token, identity, opening, partial(self._said, address), prepare, self.answered, tls))
        for sender in self.senders:
            sender.start()

    def state(self, known: bool) -> AttachmentState:
        """That of the best of them. known: the job is."""
        return min((_state(sender, known) for sender in self.senders), key=STATES.index)

    def why(self, known: bool, closed: bool) -> str:
        """Why versions are not made there, of each; or ""."""
        reasons = [(sender, _why(sender, known, closed)) for sender in self.senders]
        return "; ".join(f"{self._called(sender.address)}{why}" for sender, why in reasons if why)

    def _said(self, address: tuple[str, int], why: str) -> None:
        self._say(f"{self._called(address)}{why}")

    def _called(self, address: tuple[str, int]) -> str:
        """A node, where there are several."""
        return f"{address[0]}:{address[1]}: " if len(self.senders) > 1 else ""

    @property
    def connected(self) -> bool:
        """Any of them; or none has to be connected to."""
        return not self.senders or any(sender.connected for sender in self.senders)

    @property
    def epoch(self) -> int:
        """Under which nodes have versions of this start: the newest, where they number it themselves."""
        return max([self._epoch, *(one.node.epoch for one in self.senders if one.node.epoch is not None)])

    @property
    def published(self) -> tuple[int, str]:
        """(iteration, status) of the nodes' newest version; (-1, "") if they have none."""
        return max(((sender.node.iteration, sender.node.status) for sender in self.senders), default=(-1, ""))


def _state(sender: Sender, known: bool) -> AttachmentState:
    if sender.node.final:
        return AttachmentState.REFUSED
    if not sender.connected:  # the first attempt may still be under way
        return AttachmentState.LOST if sender.tried.is_set() else AttachmentState.WATCHING
    if not known:
        return AttachmentState.WATCHING
    return AttachmentState.ATTACHED if sender.attached else AttachmentState.ATTACHING


def _why(sender: Sender, known: bool, closed: bool) -> str:
    attached = closed or _state(sender, known) is AttachmentState.ATTACHED
    return sender.why or ("" if attached else "the node has not joined yet")
