"""How a connection to a node begins: the socket, TLS where it is asked for, and each side's proof of the token.

    link, sock = dialer.connect(node)
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

from flowcheck.control.protocol import RANGES_TEXT, Limits, Link, greet
from flowcheck.control.tls import Secure
from flowcheck.trainer.connection.node_state import NodeState
from flowcheck.trainer.starts import Identity

__all__ = ["Dialer"]

CONNECT_SECONDS = 5.0
READ = 4096  # bytes that are read at a time


class Dialer:
    """token: a callable is asked for each connection. tls: None: nothing is encrypted."""

    def __init__(
        self, address: tuple[str, int], token: bytes | Callable[[], bytes], identity: Identity,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.address, self.identity, self._token, self._tls = address, identity, token, tls

    def connect(self, node: NodeState) -> tuple[Link, socket.socket]:
        """node: learns what the welcome says. Raises OSError, FlowcheckError."""
        token = self._token() if callable(self._token) else self._token
        sock = socket.create_connection(self.address, timeout=CONNECT_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link = Link(sock, Secure(sock, self._tls, self.address[0]) if self._tls is not None else None)
        link.limits = lambda: Limits(64 << 10)
        try:
            node.by_ranges = greet(link, token, **self.identity.hello).resync == "ranges"
        except BaseException:
            link.close()
            raise
        link.limits = lambda: Limits(RANGES_TEXT)
        link.ahead = READ
        return link, sock
