"""Where a training job's nodes and their secret come from when they are not given: the environment.

    FLOWCHECK_NODE          HOST:PORT of a node's control port, or several with commas: for `attach`
    FLOWCHECK_TOKEN_FILE    a file whose first line is the nodes' token: for `attach` and `recover`
    FLOWCHECK_CA            a file of certificates that the nodes' are held against, or "system": their connections are
                            TLS then. Without it nothing is encrypted
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowcheck.control.address import host_and_port, why_not
from flowcheck.control.protocol import token_bytes
from flowcheck.control.tls import client_context
from flowcheck.errors import UserError

__all__ = [
    "CA", "NODE", "TOKEN_FILE", "address_of", "context_of", "given_for", "nodes_of", "stall_of", "token_of",
    "tokens_of",
]

_log = logging.getLogger("flowcheck")
_told: set[Path] = set()  # files that others may read, of which that was said
STALL_SECONDS = 10.0  # that ranks wait for a whole state, which a node takes where a job does not qualify for ranges
NODE, TOKEN_FILE, CA = "FLOWCHECK_NODE", "FLOWCHECK_TOKEN_FILE", "FLOWCHECK_CA"


def nodes_of(given: str | Sequence[str] | None) -> list[str]:
    """As given, or as the environment has them. Raises UserError if neither says one."""
    if given is not None:
        return [given] if isinstance(given, str) else list(given)
    found = [one.strip() for one in os.environ.get(NODE, "").split(",") if one.strip()]
    if not found:
        raise UserError("no node is named", where="node", remedy=f"node=\"HOST:PORT\", or {NODE} in the environment")
    return found


def stall_of(given: float | None) -> float:
    """Seconds that ranks wait for a whole state; of an argument that the next release does not read, as given."""
    if given is None:
        return STALL_SECONDS
    if not 0 <= given <= threading.TIMEOUT_MAX:
        raise UserError(f"{given!r} is not a time", where="max_stall_s", remedy="seconds, 0 or more")
    _log.warning("flowcheck: the next release does not read max_stall_s: leave it out, the node chooses")
    return given


def token_of(given: str | None) -> bytes:
    """As given, or the first line of the file that the environment names. Raises UserError for none, or a short one."""
    if given is None:
        path = os.environ.get(TOKEN_FILE, "")
        try:
            given = _first_line(Path(path)) if path else ""
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot be read: {error}", where=f"{TOKEN_FILE}: {path}",
                            remedy="a readable file with the nodes' token") from None
    if not isinstance(given, str) or not given.strip().isprintable():
        raise UserError("is not a text", where="token", remedy="the nodes' secret, as its file has it")
    if not given.strip():
        raise UserError("there is none", where="token",
                        remedy=f"the nodes' token as token=, or a file with it as {TOKEN_FILE} in the environment")
    return token_bytes(given)


def _first_line(path: Path) -> str:
    """Raises OSError, UnicodeDecodeError. What others may read is said once: whoever has it can speak for this job."""
    with path.open(encoding="utf-8") as file:
        if path not in _told and os.fstat(file.fileno()).st_mode & (stat.S_IRGRP | stat.S_IROTH):
            _told.add(path)
            _log.warning("flowcheck: %s: other users of this machine may read the nodes' token: chmod 600", path)
        return file.readline().rstrip("\n")


def tokens_of(given: str | None) -> Callable[[], bytes]:
    """The token for each new connection: one that is replaced in its file is used from the next one on. Raises
    UserError now, as `token_of` does, and so may each call."""
    first = token_of(given)
    return lambda: token_of(None) if given is None else first


def context_of(ca: str | None) -> ssl.SSLContext | None:
    """ca: as FLOWCHECK_CA has it, which stands in for None. None: no TLS. Raises UserError."""
    named = os.environ.get(CA, "") if ca is None else ca
    if not isinstance(named, str) or "\0" in named:
        raise UserError(f"{named!r} is not the name of a file", where="ca", remedy='a PEM file, or "system"')
    return client_context(named) if named else None


def address_of(node: str) -> tuple[str, int]:
    """Of HOST:PORT. Raises UserError if it is not one."""
    if (found := host_and_port(node)) is None:
        raise UserError(f"{node!r} {why_not(node)}", where="node", remedy="HOST:PORT of the node's control port")
    return found


def given_for(part: str, given: Any, parts: int, what: str) -> Any:
    """What the caller gave for a part, by its name. Raises UserError where it gave one for several."""
    if isinstance(given, Mapping):
        if part not in given:
            raise UserError(f"none of {part!r}; there are: {', '.join(map(repr, given)) or 'none'}", where=what,
                            remedy="one for each part of this rank, by its name")
        return given[part]
    if given is not None and parts > 1:
        raise UserError(f"one for {parts} parts, each of which has a communicator of its own", where=what,
                        remedy=f"a dict by name: {{{part!r}: ..., ...}}")
    return given
