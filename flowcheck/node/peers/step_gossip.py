"""Says to other nodes of a job which versions the groups here have complete, and hears the same of them.

    neighbours = Neighbours(addresses, token, common, say)
    neighbours.start();  neighbours.close()

A thread for each of them. It connects as a peer, proves that it knows the token, and says what this node has whenever
that has changed, and every BEAT_SECONDS; each time the other one answers with what it has (common_step.py). One that is
gone, slow, or says something else is let go, named once (`absent`), and tried again every PAUSE_SECONDS; no other
thread ever waits for one of these.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Sequence

from flowcheck.control.protocol import Limits, Link, RecordsError, Refused, Steps, greet
from flowcheck.errors import FlowcheckError
from flowcheck.node.peers.client import dial
from flowcheck.node.peers.common_step import Common

__all__ = ["Neighbours"]

BEAT_SECONDS = 1.0
ANSWER_SECONDS = 5.0  # for each step of the way: connecting, the opening, an answer
PAUSE_SECONDS = 2.0
TEXT = 64 << 10  # bytes of an answer


class Neighbours:
    """addresses: (host, port) of control ports. token(): asked for each connection. tls: None: not encrypted. say:
    events. seconds, pause: ANSWER_SECONDS and PAUSE_SECONDS."""

    def __init__(
        self, addresses: Sequence[tuple[str, int]], token: Callable[[], bytes], common: Common,
        say: Callable[..., None], tls: ssl.SSLContext | None = None, seconds: float = ANSWER_SECONDS,
        pause: float = PAUSE_SECONDS,
    ) -> None:
        self._common = common
        self._all = [_Neighbour(address, token, common, say, tls, seconds, pause) for address in addresses]

    def start(self) -> None:
        for one in self._all:
            one.thread.start()

    def close(self) -> None:
        """End all threads; idempotent."""
        for one in self._all:
            one.end()
        self._common.wake()
        for one in self._all:
            if one.thread.is_alive():
                one.thread.join()


class _Neighbour:
    def __init__(
        self, address: tuple[str, int], token: Callable[[], bytes], common: Common, say: Callable[..., None],
        tls: ssl.SSLContext | None, seconds: float, pause: float,
    ) -> None:
        self._address, self._token, self._common, self._say, self._tls = address, token, common, say, tls
        self._seconds, self._pause = seconds, pause
        self.name = f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
        self.thread = threading.Thread(target=self._main, name=f"flowcheck to node {self.name}", daemon=True)
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._ended = threading.Event()
        self._absent = False

    def end(self) -> None:
        self._ended.set()
        with self._lock:
            if self._link is not None:
                self._link.close()

    def _main(self) -> None:
        seen = -1
        while not self._ended.is_set():
            try:
                link = self._link or self._connect()
                link.send(self._common.steps_now(), seconds=self._seconds)
                self._common.hear(self._answer(link), self.name)
            except (FlowcheckError, OSError) as error:
                self._let_go()
                if not self._ended.is_set():
                    self._is_absent(error)
                    self._ended.wait(self._pause)
                continue
            if self._absent:
                self._absent = False
                self._say("present", node=self.name)
            seen = self._common.wait(seen, BEAT_SECONDS)
        self._let_go()

    def _is_absent(self, error: Exception) -> None:
        if not self._absent:
            self._absent = True
            why = error.what if isinstance(error, FlowcheckError) else getattr(error, "strerror", None) or "no answer"
            self._say("absent", node=self.name, why=why)

    def _connect(self) -> Link:
        """Raises FlowcheckError, OSError."""
        link = dial(self._address, self._tls, self._seconds)
        with self._lock:
            self._link = link
        if self._ended.is_set():
            raise RecordsError("not needed any more", where=link.peer)
        link.limits = lambda: Limits(TEXT, seconds=self._seconds)
        greet(link, self._token(), run_id="", epoch=0, rank=0, ranks=1, group="", role="peer")
        return link

    def _answer(self, link: Link) -> Steps:
        message, size = link.receive(wait=self._seconds)
        if isinstance(message, Refused):
            raise RecordsError(f"refused: {message.why}", where=link.peer)
        if not isinstance(message, Steps) or size:
            raise RecordsError(f"a {type(message).__name__} where steps were due", where=link.peer)
        return message

    def _let_go(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()
