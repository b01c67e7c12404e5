"""The base of a log, to nodes that ask for one: some parameters at each boundary, by a budget of bytes.

    upload = BaseUpload(optimizer, parameters, constants)
    upload.over(senders, number)            at the boundary before iteration `number`, after its record

Nobody waits for it. What one boundary takes is copied there, in the order of the device's stream, and goes out at the
next one, when the copies have long been made. A node that does not take a part of it has no use of the rest, and asks
again. The training thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from flowcheck.control.checksum import sum_text
from flowcheck.control.protocol import Base
from flowcheck.trainer.connection.sender import Sender
from flowcheck.trainer.describe.parts import local
from flowcheck.trainer.log.base import BaseHead, BasePiece, Taken, Taker
from flowcheck.trainer.log.codec import packed
from flowcheck.trainer.log.copies import copy_of, nbytes_of
from flowcheck.trainer.log.refusals import coupled

__all__ = ["LEAST", "PART", "BaseUpload"]

PART = 4 << 20  # bytes of a message
LEAST = 1 << 20  # bytes at a boundary, if there are so many


class BaseUpload:
    """parameters: that the optimizer has, by name, as they are now. constants: those that nobody steps."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Callable[[], Mapping[str, torch.Tensor]],
        constants: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        self._optimizer, self._parameters, self._constants = optimizer, parameters, constants
        self._left: list[tuple[str, torch.Tensor]] = []  # constants of that base
        self._budget = LEAST
        self._to: list[Sender] = []
        self._taker: Taker | None = None  # of the base that is being sent
        self._taken: Taken | None = None  # at the last boundary
        self._step, self._number, self._of = 0, 0, 0  # of what was taken; of the piece that comes next; of all pieces

    def over(self, senders: Sequence[Sender], number: int) -> None:
        """Raises UserError: the optimizer keeps something that cannot be written."""
        self._to = [one for one in self._to if one in senders]
        if wanting := [one for one in senders if one.node.base_steps]:
            self._begin(wanting)
        elif self._taken is not None:
            self._send(self._taken.parts())
        elif self._to:
            self._step = number
            self._send(self._some_constants())
        if not self._to or self._taker is None:
            self._taker = self._taken = None
        elif not self._taker.whole:
            self._step, self._taken = number, self._taker.take(number)
        else:
            self._taken = None

    def _begin(self, wanting: list[Sender]) -> None:
        """A base from its first piece on, to those, too, that had some of the one before."""
        steps = min(one.node.base_steps for one in wanting)
        for one in wanting:
            one.node.base_steps = 0
        self._to = [*wanting, *(one for one in self._to if one not in wanting)]
        parameters, constants = self._parameters(), self._constants()
        whole = sum(nbytes_of([one, self._optimizer.state.get(one)]) for one in parameters.values())
        self._budget = max(LEAST, math.ceil((whole + nbytes_of(dict(constants))) / steps))
        self._taker, self._left = self._new_taker(parameters), list(constants.items())
        self._taken, self._number, self._of = None, 0, len(parameters) + len(constants) + 1

    def _new_taker(self, parameters: Mapping[str, torch.Tensor]) -> Taker:
        return Taker(self._optimizer, parameters, self._budget, at_once=bool(coupled(self._optimizer)))

    def _some_constants(self) -> Iterator[BasePiece]:
        room = self._budget
        while self._left and room > 0:
            name, value = self._left.pop(0)
            room -= value.nbytes
            yield BasePiece(name, self._step, copy_of(local(value).detach().cpu(), None, name), None)

    def _send(self, parts: Iterable[BaseHead | BasePiece]) -> None:
        for part in parts:
            data = packed(part)
            total, text, held = len(data), sum_text(data), memoryview(data)
            for first in range(0, total, PART):
                message = Base(self._step, self._number, self._of, total, text, first)
                self._to = [one for one in self._to if one.put(message, bytes(held[first : first + PART]))]
            self._number += 1
        if self._number == self._of:
            self._to = []
