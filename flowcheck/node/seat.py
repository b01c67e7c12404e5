"""A member's place among holders: its lease, the election of a root, what the root decides, and whose copies to keep.

    seat = Seat(registry, Member(Site("ck0", leaf="leaf1"), "10.0.0.2:7071"), replicas=2, grace=10.0, say, kept=path)
    seat.turn(have) -> {name: address}           each second, on one thread: whose copies this member keeps

The root is a member like others, with one more thing to do: when who is there differs from the placement for longer
than `grace`, it decides. A member whose lease is gone is replaced: one that has come takes its place, where it shares a
leaf with the fewest. What has no replacement after PATIENCE graces is placed anew among those that are there
(checkpoint/coding/holders.py). Every decision has an epoch, and is written only while its writer is root.

A registry that is gone, slow or split changes nothing: the last placement holds, also for a member that is started
again meanwhile, because it keeps it in a file. That is said once, and once more when the registry is back. A registry
that came back empty has nothing newer to say either.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from flowcheck.checkpoint.coding.holders import Site, place_across, together
from flowcheck.durable import write_atomic
from flowcheck.errors import EnvironmentProblem
from flowcheck.node.registry import HAVE, MEMBERS, PLACEMENT, ROOT, Entry, Registry, RegistryError

__all__ = ["Decided", "Member", "Seat"]

PATIENCE = 4  # graces until a place is given up


@dataclass(frozen=True)
class Member:
    """address: HOST:PORT of its API, as others reach it."""

    site: Site
    address: str

    def text(self) -> str:
        return json.dumps(asdict(self.site) | {"address": self.address}, sort_keys=True)

    @classmethod
    def of(cls, name: str, text: str) -> Self | None:
        """None: it is not one."""
        try:
            said = json.loads(text)
            labels = [said.get(key, "") for key in ("host", "leaf", "rack")]
            host, _, port = said["address"].rpartition(":")
            if not host or not port.isdecimal() or not all(isinstance(label, str) for label in labels):
                return None
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        return cls(Site(name, *labels), said["address"])


@dataclass(frozen=True)
class Decided:
    """epoch: of the decision; 0: there is none. members: as they were then. holders: of each, who keeps copies of its
    versions."""

    epoch: int = 0
    members: Mapping[str, Member] = field(default_factory=dict)
    holders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def sources(self, name: str) -> dict[str, str]:
        """Whose copies a member keeps, and where those are."""
        return {one: self.members[one].address for one, holders in self.holders.items() if name in holders}

    def text(self) -> str:
        return json.dumps({
            "epoch": self.epoch, "members": {name: json.loads(one.text()) for name, one in self.members.items()},
            "holders": {name: list(holders) for name, holders in self.holders.items()},
        }, sort_keys=True)

    @classmethod
    def of(cls, text: str) -> Self:
        """Epoch 0: it is not one."""
        try:
            said = json.loads(text)
            members = {name: Member.of(name, json.dumps(one)) for name, one in said["members"].items()}
            holders = {name: tuple(map(str, keep)) for name, keep in said["holders"].items()}
            known = {name: one for name, one in members.items() if one is not None}
            if type(said["epoch"]) is not int or known.keys() != members.keys() or holders.keys() != known.keys():
                return cls()
            return cls(said["epoch"], known, holders)
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls()


class Seat:
    """replicas: of each state, the one of the node itself counts. grace: seconds. kept: the file with the last
    placement. now: seconds. One thread."""

    def __init__(
        self, registry: Registry, me: Member, replicas: int, grace: float, say: Callable[..., None], kept: Path,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry, self.me, self._replicas, self._grace = registry, me, replicas, grace
        self._say, self._kept, self._now = say, kept, now
        self._said: str | None = None  # why the registry is of no use; "": it is
        self._since: tuple[frozenset[str], float] | None = None  # who is there instead of who was, and since when
        try:
            self.decided = Decided.of(kept.read_text())
        except (OSError, UnicodeDecodeError):
            self.decided = Decided()

    def turn(self, have: Sequence[Mapping[str, Any]] = ()) -> dict[str, str]:
        """have: copies that are whole here, as JSON. Answers what holds, whatever the registry does."""
        try:
            found = self._meet(have)
        except RegistryError as error:
            what = error.what.partition(" (")[0]  # details differ each time
            if what != self._said:
                self._say("unregistered", why=f"{error.where}: {error.what}", epoch=self.decided.epoch,
                          copies=sorted(self.decided.sources(self.me.site.name)))
            self._said, self._since = what, None
        else:
            if self._said != "":
                self._say("registered", members=len(_members(found)), root=found[ROOT].value if ROOT in found else "",
                          epoch=self.decided.epoch)
            self._said = ""
        return self.decided.sources(self.me.site.name)

    def _meet(self, have: Sequence[Mapping[str, Any]]) -> Mapping[str, Entry]:
        name = self.me.site.name
        held = json.dumps({"epoch": self.decided.epoch, "copies": list(have)}, sort_keys=True)
        self._registry.renew({MEMBERS + name: self.me.text(), HAVE + name: held})
        found = self._registry.read()
        if ROOT not in found and self._registry.elect(name):
            found = self._registry.read()
        there = Decided.of(found[PLACEMENT].value) if PLACEMENT in found else Decided()
        if there.epoch > self.decided.epoch:
            self._adopt(there)
        root = found.get(ROOT)
        if root is None or root.value != name:
            self._since = None
            return found
        members = _members(found)
        wanted = self._wanted(members, max([self.decided.epoch, *map(_epoch, _under(found, HAVE).values())]))
        if wanted is None and there.epoch < self.decided.epoch:
            wanted = self.decided  # the registry has lost it
        if wanted is not None and self._registry.decide(PLACEMENT, wanted.text(), root):
            self._adopt(wanted)
        return found

    def _adopt(self, decided: Decided) -> None:
        self.decided, self._since = decided, None
        try:
            write_atomic(self._kept, decided.text().encode())
        except EnvironmentProblem as error:
            self._say("problem", why=error.message())
        name = self.me.site.name
        alone = sorted(one for one, holders in decided.holders.items() if not holders)
        sites = [decided.members[one].site for one in decided.holders]
        at = {one: number for number, one in enumerate(decided.holders)}
        shared = together([[at[one], *(at[two] for two in holders)] for one, holders in decided.holders.items()], sites)
        self._say("placed", epoch=decided.epoch, members=len(decided.members), copies=sorted(decided.sources(name)),
                  holders=list(decided.holders.get(name, ())), alone=alone,
                  together=[[sites[one].name for one in members] for members in shared])

    # -- what the root decides --

    def _wanted(self, members: Mapping[str, Member], newest: int) -> Decided | None:
        """What is to hold from now on; None: what holds already, or it is too early to say. newest: epoch that anybody
        knows."""
        decided, now = self.decided, self._now()
        if dict(members) == dict(decided.members):
            self._since = None
            return None
        there = frozenset(members)
        if self._since is None or self._since[0] != there:
            self._since = there, now
        waited = now - self._since[1]
        gone, come = decided.members.keys() - there, sorted(there - decided.members.keys())
        if not gone and not come:
            return Decided(newest + 1, dict(members), decided.holders)  # one has another address
        if waited < self._grace:
            return None
        if gone and len(come) <= len(gone) and decided.epoch:
            if not come and waited < PATIENCE * self._grace:
                return None
            if come:
                return self._replaced(members, sorted(gone), come, newest)
        return self._anew(members, newest)

    def _replaced(
        self, members: Mapping[str, Member], gone: Sequence[str], come: Sequence[str], newest: int
    ) -> Decided:
        """Those that have come take places of those that are gone, which keep theirs otherwise."""
        holders, left, known = dict(self.decided.holders), list(gone), dict(self.decided.members)
        for one in come:
            place = min(left, key=lambda old: (_shared(members[one].site, old, holders, known), old))
            left.remove(place)
            known = {one if name == place else name: members[one] if name == place else member
                     for name, member in known.items()}
            holders = {one if name == place else name: tuple(one if two == place else two for two in keep)
                       for name, keep in holders.items()}
        known |= {name: member for name, member in members.items() if name in known}
        return Decided(newest + 1, known, holders)

    def _anew(self, members: Mapping[str, Member], newest: int) -> Decided | None:
        names = sorted(members)
        if not names:
            return None
        placement = place_across([members[name].site for name in names], min(self._replicas, len(names)))
        holders = {name: tuple(names[one] for one in placement.holders[at][1:]) for at, name in enumerate(names)}
        return Decided(newest + 1, dict(members), holders)


def _under(found: Mapping[str, Entry], prefix: str) -> dict[str, str]:
    return {key.removeprefix(prefix): entry.value for key, entry in found.items() if key.startswith(prefix)}


def _members(found: Mapping[str, Entry]) -> dict[str, Member]:
    said = _under(found, MEMBERS)
    return {name: one for name, text in sorted(said.items()) if (one := Member.of(name, text)) is not None}


def _epoch(text: str) -> int:
    """Of the placement that a member follows."""
    try:
        return int(json.loads(text)["epoch"])
    except (ValueError, KeyError, TypeError):
        return 0


def _shared(site: Site, place: str, holders: Mapping[str, tuple[str, ...]], members: Mapping[str, Member]) -> int:
    """With how many that need its pieces, or whose pieces it needs, a member would share a leaf in that place."""
    near = {*holders[place], *(name for name, keep in holders.items() if place in keep)} - {place}
    return sum(bool(site.leaf) and members[name].site.leaf == site.leaf for name in near)
