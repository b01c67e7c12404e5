"""The base of a log, to nodes that ask for one: some parameters at each boundary, as fast as each node's link takes it.

    upload = BaseUpload(optimizer, parameters, constants)
    upload.over(senders, number)            at the boundary before iteration `number`, after its record

Nobody waits for it. What a boundary takes is copied there, in the order of the device's stream; the thread that sends
encodes it when the copies have been made, and sends it when nothing else is to be sent. While UNSENT bytes of it
(bulk_queue.py) are still here, boundaries take nothing more: the base is then of more boundaries. Each node has a base
of its own, so that no link waits for another. The training thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from flowcheck.control.checksum import sum_text
from flowcheck.control.protocol import Base, Link
from flowcheck.errors import UserError
from flowcheck.trainer.connection import bulk_queue
from flowcheck.trainer.connection.bulk_queue import Pieces
from flowcheck.trainer.connection.sender import Sender
from flowcheck.trainer.describe.optimizers import members
from flowcheck.trainer.describe.parts import local
from flowcheck.trainer.log.base import BaseHead, BasePiece, Taker
from flowcheck.trainer.log.codec import packed
from flowcheck.trainer.log.copies import copy_of, nbytes_of
from flowcheck.trainer.log.refusals import coupled

__all__ = ["LEAST", "BaseUpload"]

LEAST = 1 << 20  # bytes at a boundary, if there are so many


class BaseUpload:
    """parameters: that the optimizer has, by name, as they are now. constants: those that nobody steps."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Callable[[], Mapping[str, torch.Tensor]],
        constants: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        self._optimizer, self._parameters, self._constants = optimizer, parameters, constants
        self._going: dict[Sender, _Going] = {}

    def over(self, senders: Sequence[Sender], number: int) -> None:
        """Raises UserError: the optimizer keeps something that cannot be written."""
        for one in senders:
            steps, one.node.base_steps = one.node.base_steps, 0
            if steps and not (one.node.base_again and one in self._going):  # else it is on its way
                self._begin(one, steps)
        self._going = {one: going for one, going in self._going.items() if one in senders and going.over(number)}

    def _begin(self, sender: Sender, steps: int) -> None:
        """From its first piece on."""
        self._going.pop(sender, None)
        link = sender.begin_base()
        if link is None:
            return
        if len(members(self._optimizer)) > 1 and (why := coupled(self._optimizer)):
            raise UserError(f"one of several {why}: beside others its steps cannot be made again from a log",
                            where="optimizer", remedy="the one optimizer of the job")
        parameters, constants = self._parameters(), self._constants()
        whole = sum(nbytes_of([one, self._optimizer.state.get(one)]) for one in parameters.values())
        budget = max(LEAST, math.ceil((whole + nbytes_of(dict(constants))) / steps))
        self._going[sender] = _Going(sender, link, self._optimizer, parameters, constants,
                                     min(budget, bulk_queue.UNSENT))


class _Going:
    """A base that is sent on one connection. budget: bytes at a boundary."""

    def __init__(
        self, sender: Sender, link: Link, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor],
        constants: Mapping[str, torch.Tensor], budget: int,
    ) -> None:
        self._sender, self._link, self._budget = sender, link, budget
        self._taker = Taker(optimizer, parameters, budget, at_once=bool(coupled(optimizer)))
        self._left = list(constants.items())
        self._number, self._of = 0, len(parameters) + len(constants) + 1  # of the piece that comes next; of all pieces

    def over(self, step: int) -> bool:
        """False: all of it has gone out, or nothing more of it can. Raises what encoding it has raised."""
        queue = self._sender.base
        if queue.failure is not None:
            raise queue.failure
        if self._number == self._of:
            return not queue.idle
        if not queue.idle and queue.unsent + max(self._budget, self._due) > bulk_queue.UNSENT:
            return True  # as long as it is not, the connection is there
        if not self._taker.whole:
            taken = self._taker.take(step)
            assert taken is not None
            first, self._number = self._number, self._number + taken.count
            return self._put(_encoded(taken.parts, step, first, self._of), taken.nbytes)
        constants = self._some_constants(step)
        first, self._number = self._number, self._number + len(constants)
        nbytes = nbytes_of([one.value for one in constants])
        return self._put(_encoded(lambda: constants, step, first, self._of), nbytes)

    @property
    def _due(self) -> int:
        """Bytes of what comes next."""
        return self._taker.due if not self._taker.whole else self._left[0][1].nbytes

    def _put(self, pieces: Pieces, nbytes: int) -> bool:
        return self._sender.put_bulk(self._sender.base, pieces, nbytes, self._link)

    def _some_constants(self, step: int) -> list[BasePiece]:
        found, room = list[BasePiece](), self._budget
        while self._left and (not found or self._left[0][1].nbytes <= room):
            name, value = self._left.pop(0)
            room -= value.nbytes
            found.append(BasePiece(name, step, copy_of(local(value).detach().cpu(), None, name), None))
        return found


def _encoded(
    parts: Callable[[], Sequence[BaseHead | BasePiece]], step: int, first: int, of: int
) -> Pieces:
    """Each with what is said of it. step: at which they were taken. first: number of the first one."""
    for number, part in enumerate(parts(), first):
        data = packed(part)
        yield Base(step, number, of, len(data), sum_text(data), 0), data
