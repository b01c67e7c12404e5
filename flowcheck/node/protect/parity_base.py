"""What a journal begins with where there is parity and no copy: the lost shard, made of what is left of its group.

    parity = ParityBase(directory, node, room)        directory: of Rounds; node(): asks this holder's own API
    parity.oldest("run", 0)                           the oldest step of which there is parity here; None: of none
    parity.take("stage0", "run", 0, out, after=20)    a newer step than that as a copy below `out`, if it can be made

The journal reaches back to the oldest round that is kept, because the newest may be one that another holder missed.
The API makes the shard, as for everybody who asks (parity_shelf.py). Any thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import PARITY
from flowcheck.checkpoint.copies import take_copy
from flowcheck.durable import remove_tree
from flowcheck.node.versions.runs import run_folder

__all__ = ["ParityBase"]

ROUND = ".parity"  # ends the names of rounds


class ParityBase:
    """room(bytes): raises FlowcheckError where it lacks."""

    def __init__(self, directory: Path, node: Callable[[], NodeClient], room: Callable[[int], None]) -> None:
        self._directory, self._node, self._room = directory, node, room

    def oldest(self, run_id: str, epoch: int) -> int | None:
        found = (path.name.removeprefix("step-").removesuffix(ROUND)
                 for path in (self._directory / run_folder(run_id, epoch)).glob(f"step-*{ROUND}"))
        return min((int(text) for text in found if text.isdecimal()), default=None)

    def take(self, shard: str, run_id: str, epoch: int, out: Path, after: int) -> Path | None:
        """Raises FlowcheckError: it could not be made, and will be tried again."""
        with contextlib.closing(self._node()) as node:
            offers = [one for one in node.offers() if (one.tier, one.shard, one.run_id, one.epoch) == (
                PARITY, shard, run_id, epoch) and one.step > after]
            if not offers:
                return None
            newest = max(offers, key=lambda one: one.step)
            self._room(newest.nbytes)
            return take_copy(node, newest, out)

    def tidy(self, lane: Path, run_id: str, epoch: int) -> None:
        """What was made of a shard's parity goes when its run has no parity of so old a step any more."""
        oldest, now = self.oldest(run_id, epoch), lane / run_folder(run_id, epoch)
        if oldest is None:
            return
        for path in lane.glob("*/epoch-*/step-*"):
            number = path.name.removeprefix("step-")
            if number.isdecimal() and (path.parent != now or int(number) < oldest):
                remove_tree(path)
