"""The process that answers a node's HTTP API, as the node has it (child.py): its socket, its keys, its settings.

    serving = Serving(config, keys, say, board)  in the node; board: of its BoardWriter
    serving.address, serving.look()            where; again and again
    serving.renew(keys)                        other keys, or another certificate, from the next connection on

It shares nothing with the node but files, and a board that it can only read (status/board.py). What it does, and
however it ends, holds up no capture. The node keeps the listening socket, so a process that died or hangs is replaced
without a connection being refused. The key comes over stdin: neither arguments nor environment show it. The process
itself: worker.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from flowcheck.control.proof import node_key
from flowcheck.node.api.border import PROGRAM, ApiSettings, OtherKeys, Parity
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.doors.http_door import Limits
from flowcheck.node.listening import listen
from flowcheck.node.process.child import ChildProcess
from flowcheck.node.tokens import HTTP_ROLES, PEER, keys_of

__all__ = ["Serving"]

BACKLOG = 1024


class Serving:
    """config: with an `api`. keys: as Access.keys, or a token of all roles. say: events. board: what the node tells of
    itself, -1: nothing; a file descriptor that stays open for as long as this. Belongs to the node's main thread."""

    def __init__(
        self, config: NodeConfig, keys: Mapping[str, list[str]] | bytes, say: Callable[..., None], board: int = -1
    ) -> None:
        assert config.api is not None
        if isinstance(keys, bytes):
            keys = keys_of(dict.fromkeys((*HTTP_ROLES, PEER), (keys,)), False)
        self._config, shown = config, _shown(config)
        self._socket, self.address = listen(config.api.address, "api.listen", BACKLOG)
        descriptor = self._socket.fileno()
        store = config.store
        self.child = ChildProcess(PROGRAM, ApiSettings(
            keys=_plain(keys), shown=shown, node=config.name, replicas=config.replica.directory,
            tls=(config.tls.cert, config.tls.key) if config.tls is not None else None,
            checkpoints=config.output.directory, cores=tuple(sorted(os.sched_getaffinity(0) - config.pinned)),
            reserved=int(store is not None), follows=config.follows, shadow=config.api.shadow,
            copies=config.copies, journals=config.journals,
            store=store, made=config.made,
            parity=_parity(config), names=_names(config), socket=descriptor, board=board,
            limits=Limits(config.api.connections, config.api.strangers, config.api.strangers_per_address),
        ), say, [descriptor] if board < 0 else [descriptor, board])

    @property
    def connected(self) -> dict[str, int]:
        """As it said last: doors/http_door.py."""
        return self.child.counts

    def renew(self, keys: Mapping[str, list[str]]) -> None:
        """These keys from now on; the certificate is read again."""
        self.child.order(OtherKeys(keys=_plain(keys), shown=_shown(self._config)))

    def look(self) -> None:
        self.child.look()

    def close(self) -> None:
        """End it; answers that are under way are cut. May be called twice."""
        self.child.close()
        self._socket.close()


def _plain(keys: Mapping[str, list[str]]) -> dict[str, tuple[str, ...]]:
    return {key: tuple(roles) for key, roles in keys.items()}


def _parity(config: NodeConfig) -> Parity | None:
    """Of a holder of parity: where it lies, and which nodes it asks for the other streams."""
    protect, member = config.protect, config.member
    if protect is None or protect.code is None or config.parity is None or config.placement is None:
        return None
    others = None
    if not protect.placed:
        if member is None or member < protect.code[0]:
            return None
        others = tuple(address for number, address in enumerate(protect.members) if number != member)
    return Parity(directory=config.parity, others=others, most=protect.memory_mb << 20,
                  ca=str(config.tls.ca) if config.tls is not None else "", placement=config.placement)


def _shown(config: NodeConfig) -> str:
    """The key that it proves to others."""
    return node_key(config.token(PEER)).hex() if _parity(config) is not None else ""


def _names(config: NodeConfig) -> tuple[str, ...]:
    """What others may call it besides the addresses at which their connections end."""
    return (config.advertise,) if config.advertise is not None else ()
