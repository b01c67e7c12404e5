"""The whole state of a part, to nodes that ask for it: ranks wait until these have it, for a bounded time.

    upload.is_due(sender)                               does this rank give it to that node now?
    upload.serve(senders, deadline, n, meeting)         at the boundary after iteration n

The training thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from threading import Event
from typing import Any

import torch

from flowcheck.control.protocol import State
from flowcheck.job.clock import Clock
from flowcheck.trainer.connection.sender import Sender
from flowcheck.trainer.describe.parts import Part, local

__all__ = ["StateUpload"]


class StateUpload:
    """leads: this is the rank that sends what all ranks have alike. names: those of the parameters by their ids, as
    they are now. options: of the optimizer's groups, as the last step used them. answered: set whenever a node says
    something."""

    def __init__(
        self, part: Part, optimizer: torch.optim.Optimizer, leads: bool, names: Callable[[], Mapping[int, str]],
        options: Callable[[], list[dict[str, Any]]], answered: Event,
    ) -> None:
        self._part, self._optimizer, self._leads = part, optimizer, leads
        self._names, self._options, self._answered = names, options, answered

    def is_due(self, sender: Sender) -> bool:
        return self._leads and "state" in sender.node.wanted

    def serve(self, senders: Sequence[Sender], deadline: float, over: int, meeting: bool = False) -> None:
        """Give the state to those that want it, once each, and wait until they have it. meeting: wait until the others
        have joined, too, or want it."""
        given: dict[Sender, str] = {}  # and what each had noticed by then
        number = Clock().after(over)  # of updates so far, which is the number of the next iteration
        self._answered.clear()
        while True:
            wanting = [sender for sender in senders if sender not in given and self.is_due(sender)]
            given |= {sender: sender.node.notice for sender in wanting}
            if wanting:
                self._send(wanting, number)
            waiting = [
                sender for sender in senders if sender.connected and (
                    _has_not(sender, number, given[sender]) if sender in given
                    else meeting and sender.node.joined is None
                )
            ]
            left = deadline - time.monotonic()
            if not waiting or left <= 0:
                return
            self._answered.wait(left)
            self._answered.clear()

    def _send(self, senders: Sequence[Sender], number: int) -> None:
        """Model and optimizer as they are now, before iteration `number`."""
        for sender in senders:
            sender.node.wanted, sender.node.joined = sender.node.wanted - {"state"}, None
            sender.node.pledged = number
        tensors = {f"model.{name}": tensor.detach().to("cpu", copy=True)
                   for name, tensor in self._part.state_dict().items()}
        names = self._names()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    if name is not None and isinstance(value, torch.Tensor):
                        tensors[f"optimizer.{name}.{key}"] = local(value).detach().to("cpu", copy=True)
        state = State(number, self._options())
        for sender in senders:
            if not sender.put(state, tensors):
                sender.node.pledged = None


def _has_not(sender: Sender, number: int, noticed: str) -> bool:
    """The state before iteration `number` is on its way there, and nothing was said of it. Wanted again, or something
    noticed: it came too late. It goes up again at the next boundary, or when asked."""
    node = sender.node
    return node.joined != number and "state" not in node.wanted and node.notice in ("", noticed)
