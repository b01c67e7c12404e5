"""What one node has said of itself: what it wants and takes, and which versions it has.

    node.hear(message, reasons, here)       the listening thread, of each message that is Heard
    node.disconnected()                     what holds for one connection does so no more
    node.give_up()                          the job is not known any more: what the node wants of it is void
"""

from __future__ import annotations

from collections.abc import Callable

from flowcheck.control.protocol import BaseWanted, Epoch, Joined, Notice, Progress, Wanted
from flowcheck.trainer.connection.reasons import Reasons

__all__ = ["Heard", "NodeState"]

Heard = Wanted | Joined | Notice | Epoch | BaseWanted | Progress  # which change nothing but this


class NodeState:
    """What the training thread reads at a boundary.

    wanted, joined: what the node has asked for, and the iteration with which it has joined; None: it has not.
    pledged: iteration of the state that the caller has put: records follow it. None again when the connection ends.
    notice: what keeps the node from making versions although it wants nothing, "": nothing does.
    by_ranges: the node asks for elements of the state, and no boundary waits for it.
    takes_user: the node keeps what ranks give of themselves; takes_head: as UserHead, too; takes_notice: it hears why
        a job is not known.
    epoch: that versions of this start have there, where it is another than the one said; None: it is not.
    base_steps: boundaries over which it wants a base, 0: it wants none. base_again: one that is on its way will do.
    final: the node does not take this run any more, and is not tried again.
    iteration, status: of the node's newest version, -1: none yet."""

    def __init__(self) -> None:
        self.wanted: frozenset[str] = frozenset()
        self.joined: int | None = None
        self.pledged: int | None = None
        self.notice = ""
        self.by_ranges = False
        self.takes_user = self.takes_head = self.takes_notice = False
        self.base_steps, self.base_again = 0, False
        self.epoch: int | None = None
        self.final = False
        self.iteration, self.status = -1, ""

    def give_up(self) -> None:
        self.wanted, self.joined, self.pledged = frozenset(), None, None
        self.base_steps = 0

    def disconnected(self) -> None:
        self.give_up()
        self.notice = ""
        self.takes_user = self.takes_head = self.takes_notice = False

    def hear(self, message: Heard, reasons: Reasons, here: Callable[[], bool]) -> None:
        """here: is the connection on which it came still the one that is used?"""
        if isinstance(message, Wanted) and "user" in message.what:
            self.takes_user, self.takes_head = True, "userhead" in message.what
            self.takes_notice = "notice" in message.what
        elif isinstance(message, Wanted):
            self.wanted = frozenset(message.what)
            if message.what and message.why:
                reasons.say(message.why)
            elif message.what and here():
                reasons.why = self.notice  # it gives no reason: the one before is out of date
        elif isinstance(message, Joined):
            # Nothing is wanted any more, of no rank: those that have no state to send hear it only here.
            self.wanted, self.joined = frozenset(), message.iteration
            if here():
                reasons.why = self.notice
        elif isinstance(message, Notice):
            before, self.notice = self.notice, message.why
            if message.why:
                reasons.say(message.why)
            elif here() and reasons.why == before:
                reasons.why = ""  # what else has been said meanwhile stays
        elif isinstance(message, BaseWanted):
            self.base_steps, self.base_again = message.steps, message.again
        elif isinstance(message, Epoch):
            if message.epoch != self.epoch and message.why:
                reasons.log(message.why)
            self.epoch = message.epoch
        else:
            self.iteration, self.status = message.iteration, message.status
