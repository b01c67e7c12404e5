"""The process that keeps copies of other nodes' versions: python -P -m flowcheck.node.protect.worker (supervisor.py).

What it is given and says: border.py; an order changes which keys it shows and takes. With a registry a thread asks that
each second whose copies are kept here (registry_loop.py), and all else goes on without it. Copies: copier.py. In a
group with parity a node keeps copies of its own versions so, which the holders of parity encode: a thread of a holder
makes rounds (parity_rounds.py). Who is what is in the settings, or the registry says it.

All pulls of versions together read no more bytes a second than the settings say. What is made for others is not one.
"""

from __future__ import annotations

import os
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from flowcheck.ask.client import NodeClient
from flowcheck.ask.pace import Pace
from flowcheck.ask.sources import addresses
from flowcheck.checkpoint.coding.code import Code
from flowcheck.control.proof import Proven
from flowcheck.control.tls import client_context
from flowcheck.errors import FlowcheckError
from flowcheck.node.process.child import Lines, begun, guarded, orders
from flowcheck.node.protect.border import EVENTS, CopierSettings, OtherTokens, Rules
from flowcheck.node.protect.copier import END_SECONDS, Copier, again
from flowcheck.node.protect.journal_loop import Journaling
from flowcheck.node.protect.parity_base import ParityBase
from flowcheck.node.protect.parity_rounds import Rounds, Streams
from flowcheck.node.protect.placement import Part, Run
from flowcheck.node.protect.registry_loop import sit

__all__ = ["main"]

ROUND_PAUSE = 5.0  # the longest between two rounds: until a member is back, less is protected than could be


class _Sources:
    """Sources of copies: those of the settings, and those that the registry says. Any thread.

    part: what is done here for parity; None: nothing."""

    def __init__(self, copier: Copier, settings: CopierSettings) -> None:
        self._copier, self._settings = copier, settings
        self._lock = threading.Lock()
        self._placed: list[tuple[str, int]] = []
        self._pace = Pace(settings.rate) if settings.rate else None  # of all pulls together
        self.part: Part | None = None
        self._follow()

    def renew(self, order: OtherTokens) -> None:
        with self._lock:
            self._settings = order.on(self._settings)
            self._follow()

    def placed(self, found: Sequence[tuple[str, int]], steps: Mapping[Run, int], part: Part | None) -> None:
        """What the registry says: the sources of copies, which steps are frozen, and what is done for parity."""
        self._copier.freeze(steps)
        self.part = part
        with self._lock:
            if list(found) != self._placed:
                before, self._placed = self._placed, list(found)
                try:
                    self._follow()
                except Exception:
                    self._placed = before  # the next time it is said it is followed
                    raise

    def node(self, address: tuple[str, int]) -> NodeClient:
        """One to which this node proves its key. What comes from here takes nobody's network."""
        node = NodeClient(address, Proven(self._settings.key), tls=self._tls(), pace=self._pace)
        if node.name == self._settings.own:
            node.connection.pace = None
        return node

    def keys(self) -> list[bytes]:
        """With which what members say in the registry is signed, the newest first."""
        return [bytes.fromhex(key) for key in self._settings.keys]

    def _tls(self) -> ssl.SSLContext | None:
        return client_context(self._settings.ca) if self._settings.ca else None

    def journal(self, address: tuple[str, int], control: tuple[str, int], say: Callable[..., None]) -> Journaling:
        """Of the node with this API and this control port."""
        settings, room = self._settings, partial(self._copier.check_room, what="an iteration")
        parity, base = settings.parity, None
        if parity is not None and parity.number is not None and parity.members and address not in settings.sources:
            # its group has it, and no copy is kept
            own, making = parity.members[parity.number], partial(self._copier.check_room, what="what parity gives")
            base = ParityBase(parity.directory, partial(self.node, own), making)
        return Journaling(settings.directory, self.node(address).name, partial(self.node, address), control,
                          lambda: self._settings.token.encode(), self._tls(), room, say, settings.rules.seconds, base)

    def _follow(self) -> None:
        self._copier.follow(self.nodes(dict.fromkeys([*self._settings.sources, *self._placed])))

    def nodes(self, addresses: Iterable[tuple[str, int]]) -> list[NodeClient]:
        """As they are asked now."""
        return [self.node(address) for address in addresses]


def _go_round(directory: Path, rules: Rules, copier: Copier, sources: _Sources, say: Callable[..., None],
              ending: threading.Event) -> None:
    """The thread of a member that keeps a stream of parity, or may have to."""
    now: tuple[tuple[tuple[int, int], int], Rounds] | None = None

    def turn() -> None:
        nonlocal now
        part = sources.part
        if part is None or not part.data:
            return
        if now is None or now[0] != (part.code, part.number):
            now = (part.code, part.number), Rounds(
                directory, Code(*part.code), part.number, rules.every, say, rules.keep, rules.most)
        now[1].turn(sources.nodes(addresses(part.data)), copier.frozen)

    def failed(error: Exception, why: str) -> None:
        where = error.where if isinstance(error, FlowcheckError) else ""
        say("unprotected", name="", why=f"{where}: {why}" if where else why)

    again(turn, failed, rules.seconds, ending, ROUND_PAUSE)


def main() -> int:
    """The process itself."""
    settings, say = begun(CopierSettings), Lines(EVENTS)
    if settings is None:
        return 0
    say.live()
    parity, registry = settings.parity, settings.registry
    number = parity.number if parity is not None and parity.members else None
    own = parity is not None and number is not None and number < parity.code[0]
    if parity is not None and own:  # what holders of parity encode stays here longer than in a slot
        settings = settings.model_copy(update={"sources": (*settings.sources, parity.members[number or 0])})
    copier = Copier(settings.directory, settings.rules, say)
    sources, ending = _Sources(copier, settings), threading.Event()
    if parity is not None and not own:
        if number is not None:
            sources.part = Part(parity.code, number, parity.data)
        rounds = parity.directory, settings.rules, copier, sources, say, ending
        threading.Thread(target=_go_round, args=rounds, daemon=True, name="flowcheck rounds").start()
    sitting: threading.Thread | None = None
    if registry is not None:
        streams = Streams(parity.directory).held if parity is not None else list
        given = registry, copier.held, streams, sources.placed, sources.node, sources.keys, say, ending
        sitting = threading.Thread(target=sit, args=given, daemon=True, name="flowcheck registry")
        sitting.start()
    journals = [sources.journal(node, control, say) for node, control in settings.journal]
    for journal in journals:
        journal.start()
    for order in orders(OtherTokens):
        sources.renew(order)
    ending.set()
    copier.close()
    for journal in journals:
        journal.close(END_SECONDS)
    if sitting is not None:
        sitting.join(END_SECONDS)  # it leaves, so that nobody has to wait for its lease
    os._exit(0)  # threads that wait for a node are not waited for


if __name__ == "__main__":
    sys.exit(guarded(main))
