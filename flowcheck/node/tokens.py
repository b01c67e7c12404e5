"""Who may speak to a node and ask it: the tokens of each role as their files are now, and its certificate.

    access = Access(config, say)      reads everything. Raises UserError or EnvironmentProblem
    access.of("trainer")              the tokens that are accepted of a role, the newest first
    access.keys                       what a reader of the HTTP API may show, and which roles that is
    access.tls                        the context for new connections; None: no TLS
    access.look()                     again and again: reads what has changed

A file that has become unreadable changes nothing: what was read before stays in force, and an event says so once. What
is read is held by whoever asks later; connections that are open stay open.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from flowcheck.ask.client import reader_key
from flowcheck.control.proof import node_key, voucher
from flowcheck.control.tls import server_context
from flowcheck.errors import FlowcheckError
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.config.tokens import read_tokens

__all__ = [
    "HTTP_ROLES", "LOOK_SECONDS", "PEER", "Access", "keys_of", "peers_of", "read_by_others", "vouched", "warnings_of",
]

HTTP_ROLES = ("trainer", "reader", "operator")  # who may show a key
PEER = "peer"  # who proves one (control/proof.py)
LOOK_SECONDS = 1.0
Stamp = tuple[tuple[int, int, int] | None, ...]


class Access:
    """say: events. `look` belongs to the node's main thread; what it leaves is replaced as a whole."""

    def __init__(self, config: NodeConfig, say: Callable[..., None]) -> None:
        self._files, self._say = config.token_files, say
        self._certificate = (config.tls.cert, config.tls.key) if config.tls is not None else None
        self._own = config.tokens.operator is not None
        self._said = ""
        self._next = time.monotonic() + LOOK_SECONDS
        self._stamp = self._look_at()  # before reading: what changes meanwhile is read again
        self._read()

    def _read(self) -> None:
        tokens = {role: read_tokens(path) for role, path in self._files.items()}
        tls = server_context(*self._certificate) if self._certificate is not None else None
        self._tokens, self.tls = tokens, tls
        self.keys = keys_of(tokens, self._own)

    def of(self, role: str) -> tuple[bytes, ...]:
        return self._tokens.get(role, ())

    def vouch(self, run_id: str, epoch: int) -> str:
        return vouched(self.keys, run_id, epoch)

    def look(self, at_once: bool = False) -> bool:
        """True: something was read again. at_once: read all of it, changed or not."""
        if not at_once and time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + LOOK_SECONDS
        stamp = self._look_at()
        if stamp == self._stamp and not at_once and not self._said:
            return False
        try:
            self._read()
        except FlowcheckError as error:
            why = f"{error.where}: {error.what}; what was read before stays in force"
            if why != self._said:
                self._say("problem", why=why, about="access")
            self._said = why
            return False
        self._stamp, self._said = stamp, ""
        self._say("access", why="asked to" if at_once else "a file has changed", roles=sorted(self._files),
                  tls=self.tls is not None)
        return True

    def _look_at(self) -> Stamp:
        return tuple(map(_stamp, [*self._files.values(), *(self._certificate or ())]))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def read_by_others(config: NodeConfig) -> list[Path]:
    """Files of secrets that users other than their owner may read."""
    files = [*config.token_files.values(), *([config.tls.key] if config.tls is not None else [])]
    files += [one for one in (config.nodes.registry_key, config.nodes.registry_password_file) if one]
    found = []
    for path in dict.fromkeys(files):
        with contextlib.suppress(OSError):
            if os.stat(path).st_mode & (stat.S_IRGRP | stat.S_IROTH):
                found.append(path)
    return found


def warnings_of(config: NodeConfig) -> list[str]:
    """A sentence for each file of secrets that others may read. Nothing is refused for it: root reads all the same."""
    return [f"{path}: other users of this machine may read this secret: chmod 600" for path in read_by_others(config)]


def peers_of(keys: Mapping[str, Collection[str]]) -> list[bytes]:
    """Of `keys_of`: what other nodes may prove, the newest first."""
    return [bytes.fromhex(key) for key, names in keys.items() if PEER in names]


def vouched(keys: Mapping[str, Collection[str]], run_id: str, epoch: int) -> str:
    """What a version of that run and epoch says of them (proof.voucher); "": without a token of nodes."""
    peers = peers_of(keys)
    return voucher(peers[0], run_id, epoch) if peers else ""


def keys_of(tokens: Mapping[str, tuple[bytes, ...]], operator: bool) -> dict[str, list[str]]:
    """What may be shown as `Bearer`, and whose it is; of other nodes, what they may prove. operator: there is a token
    of operators alone; it may be shown as it is, because scrapers send what a file has."""
    keys: dict[str, list[str]] = {}
    for role in HTTP_ROLES:
        for token in tokens.get(role, ()):
            keys.setdefault(reader_key(token), []).append(role)
            if role == "operator" and operator:
                keys.setdefault(token.decode(), []).append(role)
    for token in tokens.get(PEER, ()):
        keys[node_key(token).hex()] = [PEER]
    return keys
