"""Connections that have shown nothing yet: how many there may be, and which one goes for another.

    room = WaitingRoom(most, per_address)
    gone = room.enter(one, "10.0.0.7")      the connection that has to go for it, None: there is room
    room.shrink()                           those that have to go because descriptors ran out
    room.leave(one)                         it has ended, or has shown who it is

Pure; one thread. An IPv6 address counts as its /64, of which one machine has all.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Generic, TypeVar

__all__ = ["FAIR", "WaitingRoom", "network_of"]

One = TypeVar("One", bound=Hashable)
SPARE = 16  # descriptors that are kept free where they have run out
SHRUNK_SECONDS = 60.0
FAIR = 16  # connections of one address that nobody is sent away for: the ranks of a host come together


@lru_cache(4096)
def network_of(host: str) -> str:
    """What is counted as one address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


class WaitingRoom(Generic[One]):
    """most: connections; per_address: of them, of one address. Order is age: the oldest comes first."""

    def __init__(self, most: int, per_address: int, now: Callable[[], float] = time.monotonic) -> None:
        self._most = self._wanted = most
        self._per_address, self._now = per_address, now
        self._shrunk = 0.0
        self._places: dict[One, tuple[str, float]] = {}  # network, and since when
        self._networks: dict[str, dict[One, None]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, one: One) -> bool:
        return one in self._places

    def enter(self, one: One, host: str) -> One | None:
        """It has a place from now on. Returns the one that has lost its own for that."""
        network = network_of(host)
        if self._most != self._wanted and self._now() - self._shrunk >= SHRUNK_SECONDS:
            self._most = self._wanted
        here = self._networks.get(network, {})
        gone = None
        if len(here) >= self._per_address:
            gone = next(iter(here))
        elif len(self._places) >= self._most:
            gone = self.oldest()
        if gone is not None:
            self.leave(gone)
        self._places[one] = network, self._now()
        self._networks.setdefault(network, {})[one] = None
        return gone

    def oldest(self) -> One | None:
        """Who goes first: the oldest of the address that has by far the most, else the oldest of all."""
        if not self._places:
            return None
        crowd = max(self._networks.values(), key=len)
        return next(iter(crowd if len(crowd) > FAIR else self._places))

    def shrink(self) -> list[One]:
        """There may be fewer for a while, so that each that comes does not find the same again."""
        self._most, self._shrunk = max(1, min(self._most, len(self._places) - SPARE)), self._now()
        gone = list[One]()
        while len(self._places) > self._most and (oldest := self.oldest()) is not None:
            self.leave(oldest)
            gone.append(oldest)
        return gone

    def leave(self, one: One) -> bool:
        """False: it has no place."""
        place = self._places.pop(one, None)
        if place is None:
            return False
        here = self._networks[place[0]]
        del here[one]
        if not here:
            del self._networks[place[0]]
        return True

    def late(self, seconds: float) -> list[One]:
        """Those that have been here for so long, and keep their places until they leave."""
        end, found = self._now() - seconds, list[One]()
        for one, (_, since) in self._places.items():
            if since > end:
                break
            found.append(one)
        return found
