"""The processes that a node has of its own: one answers its API, one writes to a store, one keeps copies.

    children = Children(config, access, say, board)       those that the settings ask for
    children.look()                                       again and again
    children.renew()                                      tokens or certificate have changed
    children.close()

The node's lasting processes are all started here, by process/child.py, which watches them. Short ones are started by
groups/assigning.py (channels are looked for), protect/replacement.py (an operator's command), for --check
store/supervisor.py, and in the API's process versions/journal/shelf.py (a step is made again). Besides, whoever wants
a checksum first may run a compiler (control/compiled.py). Main thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing

from flowcheck.control.proof import node_key
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.protect.supervisor import copying, other_tokens
from flowcheck.node.store.supervisor import storing
from flowcheck.node.tokens import PEER, Access

__all__ = ["Children"]


class Children:
    """say: events. board: what the node puts there of itself, a descriptor; -1: nothing. api: where versions are
    served, if they are."""

    def __init__(self, config: NodeConfig, access: Access, say: Callable[..., None], board: int = -1) -> None:
        self._config, self._access = config, access
        with ExitStack() as undo:
            self._serving = undo.enter_context(
                closing(Serving(config, access.keys, say, board))) if config.api else None
            self.api = self._serving.address if self._serving is not None else None
            self._storing = undo.enter_context(closing(storing(config, say))) if config.store else None
            self._copying = undo.enter_context(
                closing(copying(config, self._key, self.api or "", say))) if config.protect else None
            self._undo = undo.pop_all()

    @property
    def _key(self) -> str:
        """What it proves to other nodes: that of the newest token."""
        return node_key(self._access.of(PEER)[0]).hex()

    @property
    def connected(self) -> dict[str, dict[str, int]]:
        """By port: who is connected there."""
        return {"api": self._serving.connected} if self._serving is not None else {}

    def look(self) -> None:
        for child in (self._serving, self._storing, self._copying):
            if child is not None:
                child.look()

    def renew(self) -> None:
        if self._serving is not None:
            self._serving.renew(self._access.keys)
        if self._copying is not None:
            self._copying.order(other_tokens(self._config, self._key))

    def close(self) -> None:
        """May be called twice."""
        self._undo.close()
