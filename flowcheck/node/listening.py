"""A node's listening sockets: of its control port and of its HTTP API."""

from __future__ import annotations

import os
import socket

from flowcheck.errors import EnvironmentProblem

__all__ = ["check_address", "listen"]


def check_address(address: tuple[str, int], setting: str) -> None:
    """Is it one of this machine? Its port may be taken: a node may be running. Raises EnvironmentProblem."""
    try:
        listen((address[0], 0), setting, 1)[0].close()
    except EnvironmentProblem as error:
        raise EnvironmentProblem(error.what, where=f"{address[0]}:{address[1]}", remedy=error.remedy) from None


def listen(address: tuple[str, int], setting: str, backlog: int) -> tuple[socket.socket, str]:
    """A listening socket, and HOST:PORT as it is now; port 0 takes a free one. setting: where the address stands.
    Raises EnvironmentProblem naming it."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        listener = socket.create_server(address, family=family, backlog=backlog)
    except OSError as error:  # its text names the port that was tried, which check_address makes 0
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        raise EnvironmentProblem(
            f"cannot listen: {why}", where=f"{address[0]}:{address[1]}",
            remedy=f"an address of this machine and a free port in {setting}",
        ) from None
    host, port = listener.getsockname()[:2]
    return listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
