"""Who is there, who is root, and what was decided: one interface, and the registry of a single process.

    registry = Shared().session()  or  Etcd(endpoints, cluster)
    registry.renew({"members/a": "..."})      a lease of LEASE_SECONDS, kept; these keys are there as long as it is
    registry.read() -> {key: Entry}           all keys, as of one moment
    registry.elect("a") -> bool               root, if nobody is; for as long as the lease
    registry.decide("placement", text, root)  only while that root is root

    members/NAME   where a member is, and its failure domains
    have/NAME      the copies that it has whole, and the epoch of the placement that it follows
    root           name of the root
    placement      who keeps whose copies, with an epoch

Every call answers within a second or so, or raises RegistryError: then nothing is known, and nothing may be changed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from flowcheck.errors import FlowcheckError

__all__ = ["HAVE", "LEASE_SECONDS", "MEMBERS", "PLACEMENT", "ROOT", "Entry", "Registry", "RegistryError", "Shared"]

LEASE_SECONDS = 3
MEMBERS, HAVE, ROOT, PLACEMENT = "members/", "have/", "root", "placement"


class RegistryError(FlowcheckError):
    """The registry does not answer, or has somebody else under this member's name."""

    exit_code = 3


@dataclass(frozen=True)
class Entry:
    """A key's value. created: number of the change that made it, which no other key's has been. lease: with which it
    goes, 0: with none."""

    value: str
    created: int
    lease: int = 0


class Registry(Protocol):
    """One member's. One thread."""

    def keep(self) -> int:
        """Keep the lease, or take another where it has run out; which one it is. Raises RegistryError."""

    def put(self, keys: Mapping[str, str]) -> None:
        """Own keys as they are now, with that lease. Raises RegistryError, also where another lease has one of them."""

    def renew(self, keys: Mapping[str, str]) -> None:
        """Both."""

    def read(self) -> Mapping[str, Entry]:
        """Raises RegistryError."""

    def elect(self, name: str) -> bool:
        """Whether this member has become root. Raises RegistryError."""

    def decide(self, key: str, value: str, root: Entry) -> bool:
        """Write what a root has decided, if it still is: `root` as it was read. Raises RegistryError."""

    def close(self) -> None:
        """Leave at once, if that can be said."""


class Shared:
    """The registry of one process: what its sessions see. now: seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.lock = threading.Lock()
        self.revision = self.leases = 0
        self.keys: dict[str, tuple[Entry, _Session | None]] = {}

    def session(self) -> _Session:
        return _Session(self)

    def look(self) -> None:
        """Keys of leases that have run out go. The lock is held."""
        now = self.now()
        for key in [key for key, (_, owner) in self.keys.items() if owner is not None and owner.ends <= now]:
            del self.keys[key]

    def put(self, key: str, value: str, owner: _Session | None) -> None:
        """The lock is held."""
        self.revision += 1
        before = self.keys.get(key)
        lease = owner.lease if owner is not None else 0
        self.keys[key] = Entry(value, before[0].created if before else self.revision, lease), owner


class _Session:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.ends, self.lease = 0.0, 0

    def keep(self) -> int:
        shared = self._shared
        with shared.lock:
            shared.look()
            if self.ends <= shared.now():
                shared.leases += 1
                self.lease = shared.leases
            self.ends = shared.now() + LEASE_SECONDS
            return self.lease

    def put(self, keys: Mapping[str, str]) -> None:
        shared = self._shared
        with shared.lock:
            shared.look()
            for key in keys:
                if key in shared.keys and shared.keys[key][1] is not self:
                    raise RegistryError(f"{key} is somebody else's", where="registry",
                                        remedy="a name of its own for each node")
            for key, value in keys.items():
                shared.put(key, value, self)

    def renew(self, keys: Mapping[str, str]) -> None:
        self.keep()
        self.put(keys)

    def read(self) -> Mapping[str, Entry]:
        with self._shared.lock:
            self._shared.look()
            return {key: entry for key, (entry, _) in self._shared.keys.items()}

    def elect(self, name: str) -> bool:
        shared = self._shared
        with shared.lock:
            shared.look()
            if ROOT in shared.keys or self.ends <= shared.now():
                return False
            shared.put(ROOT, name, self)
            return True

    def decide(self, key: str, value: str, root: Entry) -> bool:
        shared = self._shared
        with shared.lock:
            shared.look()
            there, owner = shared.keys.get(ROOT, (None, None))
            if there is None or there.created != root.created or owner is not self:
                return False
            shared.put(key, value, None)
            return True

    def close(self) -> None:
        self.ends = 0.0
