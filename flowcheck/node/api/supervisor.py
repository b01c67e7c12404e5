"""The process that answers a node's HTTP API: started, watched and ended by the node, and never waited for.

    serving = Serving(config, keys, say, board)  in the node; board: of its Telling
    serving.address, serving.look()            where; again and again
    serving.tell(keys)                         other keys, or another certificate, from the next connection on

It shares nothing with the node but files, and a board that it can only read (status/board.py). What it does, and
however it ends, holds up no capture. It has the cores that no capture is pinned to, at a lower priority. The node keeps
the listening socket, so a process that died is replaced without a connection being refused. So is one that hangs: it
gives signs of life (status/heartbeat.py). The key comes over stdin: neither arguments nor environment show it. The
process itself: worker.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from flowcheck.control.proof import node_key
from flowcheck.node.child import arrived, ended, let_go, write_line
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.listening import listen
from flowcheck.node.status.heartbeat import Pulse
from flowcheck.node.tokens import HTTP_ROLES, PEER, keys_of

__all__ = ["Serving"]

BACKLOG = 1024
AGAIN_SECONDS = 5.0  # between two starts
END_SECONDS = 5.0


class Serving:
    """config: with an `api`. keys: as Access.keys, or a token of all roles. say: events. board: what the node tells of
    itself, -1: nothing; a file descriptor that stays open for as long as this. Belongs to the node's main thread."""

    def __init__(
        self, config: NodeConfig, keys: Mapping[str, list[str]] | bytes, say: Callable[..., None], board: int = -1
    ) -> None:
        assert config.api is not None
        self._say, self._board = say, board
        if isinstance(keys, bytes):
            keys = keys_of(dict.fromkeys((*HTTP_ROLES, PEER), (keys,)), False)
        tls = [str(config.tls.cert), str(config.tls.key)] if config.tls is not None else None
        self._settings: dict[str, Any] = {
            "keys": dict(keys), "tls": tls, "node": config.name, "replicas": str(config.replica.directory),
            "checkpoints": str(config.output.directory), "cores": sorted(os.sched_getaffinity(0) - config.pinned),
            "reserved": int(config.store is not None), "follows": bool(config.capture), "shadow": config.api.shadow,
            "copies": str(config.copies) if config.copies is not None else None,
            "store": config.store.model_dump(include={"url", "options"}) if config.store is not None else None,
            "parity": _parity(config), "shown": _shown(config), "names": _names(config), "limits": {
                "connections": config.api.connections, "strangers": config.api.strangers,
                "per_address": config.api.strangers_per_address,
            },
        }
        self._config = config
        self._socket, self.address = listen(config.api.address, "api.listen", BACKLOG)
        self._process: subprocess.Popen[bytes] | None = None
        self._left: list[subprocess.Popen[bytes]] = []  # killed, and not gone: the kernel waits for a disk
        self._refused = False  # the kernel would not start it, which was said
        self._down = False  # that it is not there was said, and not that it is again
        self._pulse: Pulse | None = None
        self._text = b""
        self.connected: dict[str, int] = {}  # as it said last: doors/http_door.py
        self._start()

    def _start(self) -> None:
        """Too little memory, too many processes or files, a program that was moved: the node goes on without it."""
        self._began = time.monotonic()
        try:
            self._process = self._started()
            self._pulse, self._text = Pulse(self._process.pid), b""
        except OSError as error:
            if not self._refused:
                self._say("problem", why=f"the process that answers api.listen cannot be started:"
                          f" {error.strerror or error}; it is tried again and again", about="api")
            self._refused = self._down = True
        else:
            self._refused = False

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "flowcheck.node.api.worker"]
        descriptor = self._socket.fileno()
        given = [descriptor] if self._board < 0 else [descriptor, self._board]
        process = subprocess.Popen(  # a session of its own: Ctrl-C is for the node, which ends it
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=given, start_new_session=True,
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        write_line(process, self._settings | {"socket": descriptor, "board": self._board})
        return process

    def tell(self, keys: Mapping[str, list[str]]) -> None:
        """These keys from now on; the certificate is read again."""
        said = {"keys": dict(keys), "shown": _shown(self._config)}
        self._settings |= said
        if self._process is not None:
            write_line(self._process, said)

    def look(self) -> None:
        """Start it anew if it has ended, or hangs. Never waits."""
        self._left = [one for one in self._left if one.poll() is None]
        process = self._process
        if process is not None:
            self._hear(process)
            if process.poll() is None:
                if self._pulse is not None and (why := self._pulse.look()):
                    process.kill()
                    self._left.append(process)
                    self._say("problem", process="api", cause="hung", why=f"the process that answers api.listen hangs:"
                              f" {why}; it was killed, and is started anew")
                    self._replace(process)
                return
        if time.monotonic() - self._began < AGAIN_SECONDS:
            return
        if process is not None:
            self._say("problem", process="api", cause="ended", why="the process that answers api.listen"
                      f" {ended(process.returncode)}; it is started anew")
        self._replace(process)

    def _replace(self, process: subprocess.Popen[bytes] | None) -> None:
        if process is not None:
            let_go(process)
        self._process, self.connected, self._down = None, {}, True
        self._start()

    def _hear(self, process: subprocess.Popen[bytes]) -> None:
        """Signs of life, of which the newest says who is connected."""
        while pieces := arrived(process, self._text):
            *lines, self._text = pieces
            for line in lines:
                try:
                    said = dict(json.loads(line))
                except (ValueError, TypeError):
                    continue  # of a library that prints while it is loaded
                if self._pulse is not None:
                    self._pulse.heard()
                if self._down:
                    self._down = False
                    self._say("solved", about="api")
                self.connected = {name: count for name, count in said.items() if isinstance(count, int)}

    def _reap(self) -> None:
        process = self._process
        if process is None:
            return
        let_go(process)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk that hangs holds it: the node ends without it
                process.wait(1.0)

    def close(self) -> None:
        """End it; answers that are under way are cut. May be called twice."""
        self._reap()
        self._socket.close()


def _parity(config: NodeConfig) -> dict[str, Any] | None:
    """Of a holder of parity: where it lies, and whom it asks for the other streams; None: whom a placement says."""
    protect, member = config.protect, config.member
    if protect is None or protect.code is None:
        return None
    others = None
    if not protect.placed:
        if member is None or member < protect.code[0]:
            return None
        others = [address for number, address in enumerate(protect.members) if number != member]
    return {"directory": str(config.parity), "others": others, "most": protect.memory_mb << 20,
            "ca": config.tls.ca if config.tls is not None else "", "placement": str(config.placement)}


def _shown(config: NodeConfig) -> str:
    """The key that it proves to others."""
    return node_key(config.token(PEER)).hex() if _parity(config) is not None else ""


def _names(config: NodeConfig) -> list[str]:
    """What others may call it besides the addresses at which their connections end."""
    return [config.advertise] if config.advertise is not None else []
