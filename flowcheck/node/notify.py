"""What a node tells systemd: that it is ready, that it lives, that it ends. sd_notify's protocol, of which this is all.

    notify = Notify()       from the environment; without NOTIFY_SOCKET nothing is said
    notify.ready()          control port and API listen
    notify.alive()          again and again: a watchdog that hears nothing restarts the service
"""

from __future__ import annotations

import os
import socket
import time

__all__ = ["Notify"]


class Notify:
    """Never raises and never waits: a service manager that is gone is not a reason to lose an iteration."""

    def __init__(self) -> None:
        name = os.environ.get("NOTIFY_SOCKET", "")
        self._name = "\0" + name[1:] if name.startswith("@") else name
        usec = os.environ.get("WATCHDOG_USEC", "")
        asked = usec.isdecimal() and os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._every = int(usec) / 2e6 if asked else 0.0  # half of the time that it waits
        self._next = 0.0

    def ready(self) -> None:
        self._tell("READY=1")

    def stopping(self) -> None:
        self._tell("STOPPING=1")

    def alive(self) -> None:
        """At most as often as is needed."""
        if self._every and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            self._tell("WATCHDOG=1")

    def _tell(self, text: str) -> None:
        if not self._name:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto(text.encode(), self._name)
        except OSError:
            pass
