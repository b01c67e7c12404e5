"""A member's place among holders: its lease, the election of a root, what the root decides, and whose copies to keep.

    seat = Seat(registry, Member(Site("ck0", leaf="leaf1"), "10.0.0.2:7071"), replicas=2, grace=10.0, say, kept=path)
    seat.turn(copies, own, parity) -> {name: address}    each second, on one thread: whose copies this member keeps
    seat.steps                                    of each run the step of which no copy may go
    seat.part                                     which stream of parity this member keeps, and whose; None: nobody's

The root is a member like others, with one more thing to do: when who is there differs from the placement for longer
than `grace`, it decides. A loss is gone through in steps, each of which is a decision (Gemini, section 6):

    a lease is gone -> one grace -> frozen: the step that copies have in common stays -> a replacement takes the old
    place: one that has come, or a standby; the operator's command is to bring one -> it pulls what it is to hold ->
    all is whole again: that ends it

Within that grace every member keeps what it takes to be that step by itself, or there would be none to freeze. A root
may be killed between any two of these steps: what is decided lies in the registry, and the next one goes on from there.

A place that nobody takes is given up after PATIENCE more graces (with an operator's command `wait` seconds, and again
once that has succeeded), and all are placed again (checkpoint/coding/holders.py). A replacement goes where it shares a
leaf with the fewest. Every decision has an epoch, and is written only while its writer is root.

A registry that is gone, slow or split changes nothing: the last decision holds, also for a member that is started
again meanwhile, because it keeps it in a file. That is said once, and once more when the registry is back. A registry
that came back empty has nothing newer to say either.

With parity the root also names the group (placement_groups.py), as soon as a job is followed as the code needs it, for
longer than `grace`. Of a group that holds only places change whose member is gone: a replacement takes them as it takes
those of copies, and where nobody has any, another member takes a stream of parity.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowcheck.checkpoint.coding.holders import Site, crowded, place_across, together
from flowcheck.durable import write_atomic
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node.protect.losses import frozen, whole
from flowcheck.node.protect.placement import Decided, Have, Member, Parity, Part, Recovery, Run
from flowcheck.node.protect.placement_groups import grouped
from flowcheck.node.protect.registry import HAVE, MEMBERS, PLACEMENT, ROOT, Entry, Registry, RegistryError
from flowcheck.node.protect.replacement import Operator

__all__ = ["Seat"]

PATIENCE = 4  # graces until a place is given up
_Said = Sequence[Mapping[str, Any]]


class Seat:
    """replicas: of each state, the one of the node itself counts. grace: seconds. kept: the file with the last
    decision. now: seconds. operator: brings replacements; None: nobody does. wait: seconds for one that is to be
    brought. void(decided): as root, for a recovery in which shards are lost with all copies. code: streams of data
    and of parity of the group that is to be; None: as root it leaves parity alone. One thread."""

    def __init__(
        self, registry: Registry, me: Member, replicas: int, grace: float, say: Callable[..., None], kept: Path,
        now: Callable[[], float] = time.monotonic, operator: Operator | None = None, wait: float = 0.0,
        void: Callable[[Decided], None] = lambda decided: None, code: tuple[int, int] | None = None,
    ) -> None:
        self._registry, self.me, self._replicas, self._grace = registry, me, replicas, grace
        self._say, self._kept, self._now = say, kept, now
        self._operator, self._void, self._code = operator, void, code
        self._patience = PATIENCE * grace if operator is None else max(wait, PATIENCE * grace)
        self._said: str | None = None  # why the registry is of no use; "": it is
        self._since: tuple[frozenset[str], float] | None = None  # who is there instead of who was, and since when
        self._last: dict[str, Have] = {}  # of everybody, when he was seen last
        self._wish: tuple[Parity | str | None, float] | None = None  # parity that is to be, or why none; since when
        self._refused = ""  # why there is no parity, as it was said
        self._told = 0  # the recovery of which `void` was told
        self._held: Mapping[Run, int] | None = None  # steps that stay until the root has decided; None: nobody is gone
        try:
            self.decided = Decided.of(kept.read_text())
        except (OSError, UnicodeDecodeError):
            self.decided = Decided()

    def turn(self, copies: _Said = (), own: _Said = (), parity: _Said = ()) -> dict[str, str]:
        """copies: that are whole here; own: shards that this node has versions of; parity: streams of it that are here;
        as JSON (decided.Have). Answers what holds, whatever the registry does."""
        try:
            found = self._meet(copies, own, parity)
        except RegistryError as error:
            what = error.what.partition(" (")[0]  # details differ each time
            if what != self._said:
                self._say("unregistered", why=f"{error.where}: {error.what}", epoch=self.decided.epoch,
                          copies=sorted(self.decided.sources(self.me.site.name)))
            self._said, self._since, self._wish = what, None, None
        else:
            if self._said != "":
                self._say("registered", members=len(_members(found)), root=found[ROOT].value if ROOT in found else "",
                          epoch=self.decided.epoch)
            self._said = ""
        return self.decided.sources(self.me.site.name)

    @property
    def steps(self) -> Mapping[Run, int]:
        """Of each run the step of which no copy may go."""
        recovery = self.decided.recovery
        return {**(self._held or {}), **(recovery.steps if recovery is not None else {})}

    @property
    def part(self) -> Part | None:
        return self.decided.part(self.me.site.name)

    def close(self) -> None:
        if self._operator is not None:
            self._operator.close()
        self._registry.close()

    def _meet(self, copies: _Said, own: _Said, parity: _Said) -> Mapping[str, Entry]:
        name = self.me.site.name
        held = json.dumps({"epoch": self.decided.epoch, "copies": list(copies), "own": list(own),
                           "parity": list(parity)}, sort_keys=True)
        self._registry.renew({MEMBERS + name: self.me.text(), HAVE + name: held})
        found = self._registry.read()
        if ROOT not in found and self._registry.elect(name):
            found = self._registry.read()
        there = Decided.of(found[PLACEMENT].value) if PLACEMENT in found else Decided()
        if there.epoch > self.decided.epoch or (there.epoch and there.epoch == self.decided.epoch
                                                and there.text() != self.decided.text()):
            self._adopt(there)  # of two decisions with one epoch what lies there holds, for all
        members = _members(found)
        haves = {one: Have.of(text) for one, text in _under(found, HAVE).items() if one in members}
        self._last |= haves
        self._hold(self.decided.members.keys() - members.keys(), haves)
        root = found.get(ROOT)
        if root is None or root.value != name:
            self._since = self._wish = None
            return found
        newest = max([self.decided.epoch, *(have.epoch for have in haves.values())])
        wanted = self._wanted(members, haves, newest + 1)
        if wanted is None and there.epoch < self.decided.epoch:
            wanted = self.decided  # the registry has lost it
        if wanted is not None and self._registry.decide(PLACEMENT, wanted.text(), root):
            self._adopt(wanted)
        recovery = self.decided.recovery
        if recovery is not None and recovery.void and self._told != recovery.number:
            self._told = recovery.number
            self._void(self.decided)
        return found

    def _hold(self, gone: Collection[str], haves: Mapping[str, Have]) -> None:
        """gone: members of the decision whose leases are."""
        known = self.decided.recovery.lost if self.decided.recovery is not None else ()
        if not set(gone).difference(known):
            self._held = None
        elif self._held is None:
            self._held = frozen(self.decided, gone, haves, self._last, 0).steps

    def _adopt(self, decided: Decided) -> None:
        before, self.decided, self._since, self._wish = self.decided, decided, None, None
        try:
            write_atomic(self._kept, decided.text().encode())
        except EnvironmentProblem as error:
            self._say("problem", why=error.message())
        if (before.members, before.holders, before.parity) != (decided.members, decided.holders, decided.parity):
            self._say_placed(decided)
        recovery = decided.recovery
        if recovery is not None and recovery != before.recovery:
            steps = [{"run_id": run_id, "step": step} for (run_id, _), step in sorted(recovery.steps.items())]
            self._say("recovering", epoch=decided.epoch, lost=list(recovery.lost), asked=list(recovery.asked),
                      steps=steps, void=sorted({shard for _, _, shard in recovery.void}))
        if recovery is None and before.recovery is not None:
            self._say("restored", epoch=decided.epoch, since=before.recovery.number)

    def _say_placed(self, decided: Decided) -> None:
        name, parity = self.me.site.name, decided.parity
        coded = parity.names if parity is not None else ()
        alone = sorted(one for one, holders in decided.holders.items() if not holders and one not in coded)
        sites = [decided.members[one].site for one in decided.holders]
        at = {one: number for number, one in enumerate(decided.holders)}
        shared = together([[at[one], *(at[two] for two in holders)] for one, holders in decided.holders.items()], sites)
        group = tuple(at[one] for one in coded)
        if parity is not None and crowded(group, sites, parity.code[1]):
            shared.append(group)
        self._say("placed", epoch=decided.epoch, members=len(decided.members), copies=sorted(decided.sources(name)),
                  holders=list(decided.holders.get(name, ())), alone=alone,
                  together=[[sites[one].name for one in members] for members in shared],
                  parity=parity.said() if parity is not None else None)

    # -- what the root decides --

    def _wanted(self, members: Mapping[str, Member], haves: Mapping[str, Have], epoch: int) -> Decided | None:
        """What is to hold from now on, under this epoch; None: what holds already, or it is too early to say."""
        decided, now = self.decided, self._now()
        active = {name: one for name, one in members.items() if not one.standby or name in decided.members}
        gone, come = decided.members.keys() - active.keys(), sorted(active.keys() - decided.members.keys())
        if not gone and not come:
            self._since = None
            if active != decided.members:  # one has another address
                return replace(decided, epoch=epoch, members={name: active[name] for name in decided.members})
            if decided.recovery is not None and whole(decided, haves):
                return replace(decided, epoch=epoch, recovery=None)
            return self._regrouped(self._parity(active, haves), epoch)
        there = frozenset(active)
        if self._since is None or self._since[0] != there:
            self._since = there, now
        waited = now - self._since[1]
        recovery = decided.recovery
        lost = sorted(gone.intersection(recovery.lost)) if recovery is not None else []
        if recovery is not None and lost:
            free = come + sorted(members.keys() - active.keys())
            if replaced := self._replaced(members, lost, free, recovery, epoch):
                return replaced
            if asked := self._asked(lost, recovery):
                return replace(decided, epoch=epoch, recovery=replace(recovery, asked=asked))
            parity = self._parity({name: active[name] for name in decided.members if name in active}, haves)
            if isinstance(parity, Parity) and parity != decided.parity:  # another member takes a stream of it
                return replace(decided, epoch=epoch, parity=parity)
        if waited < self._grace:
            return None
        if gone - set(lost) and decided.epoch:
            first = recovery.number if recovery is not None else epoch
            return replace(decided, epoch=epoch, recovery=frozen(decided, gone, haves, self._last, first))
        if recovery is not None and lost and waited < self._patience:
            return None
        return self._from_nothing(active, haves, epoch)

    def _parity(self, members: Mapping[str, Member], haves: Mapping[str, Have]) -> Parity | str | None:
        """As it is to be with these members; text: why there can be none, or no other one than there is."""
        if self._code is None:
            return self.decided.parity
        try:
            return grouped(self._code, members, {name: have.own for name, have in haves.items()}, self.decided.parity)
        except UserError as error:
            return f"{error.where}: {error.what}; {error.remedy}"

    def _regrouped(self, wish: Parity | str | None, epoch: int) -> Decided | None:
        """A group that is to be, or a reason for none, is one after a grace: nodes come to a job one by one."""
        if wish == self.decided.parity:
            self._wish = None
            return None
        if self._wish is None or self._wish[0] != wish:
            self._wish = wish, self._now()
        if self._now() - self._wish[1] < self._grace:
            return None
        if not isinstance(wish, str):
            self._refused = ""
            return replace(self.decided, epoch=epoch, parity=wish)
        if wish != self._refused:
            self._say("unprotected", why=wish)
        self._refused = wish
        return None

    def _asked(self, lost: Sequence[str], recovery: Recovery) -> tuple[str, ...]:
        """Lost members that the operator's command has succeeded for by now; (): for nobody else than is known."""
        if self._operator is None:
            return ()
        done = {name for name in lost if name not in recovery.asked
                and self._operator.ask(recovery.number, self.decided.members[name])}
        return tuple(sorted({*recovery.asked, *done})) if done else ()

    def _replaced(
        self, members: Mapping[str, Member], lost: Sequence[str], come: Sequence[str], recovery: Recovery, epoch: int
    ) -> Decided | None:
        """Those that have come take places of those that are lost, which keep theirs otherwise. None: of those that are
        there, if any, nobody can."""
        holders, left, known = dict(self.decided.holders), list(lost), dict(self.decided.members)
        parity = self.decided.parity
        for one in come:
            fitting = [old for old in left if _fits(members[one], old, parity)]
            if not fitting:
                continue
            place = min(fitting, key=lambda old: (members[one].follows != known[old].follows,
                                                  _shared(members[one].site, old, holders, known, parity), old))
            left.remove(place)
            parity = parity.instead({place: one}) if parity is not None else None
            known = {one if name == place else name: members[one] if name == place else member
                     for name, member in known.items()}
            holders = {one if name == place else name: tuple(one if two == place else two for two in keep)
                       for name, keep in holders.items()}
        if len(left) == len(lost):
            return None
        known |= {name: member for name, member in members.items() if name in known}
        asked = tuple(name for name in recovery.asked if name in left)
        return Decided(epoch, known, holders, replace(recovery, lost=tuple(left), asked=asked), parity)

    def _from_nothing(self, members: Mapping[str, Member], haves: Mapping[str, Have], epoch: int) -> Decided | None:
        names = sorted(members)
        if not names:
            return None
        placement = place_across([members[name].site for name in names], min(self._replicas, len(names)))
        holders = {name: tuple(names[one] for one in placement.holders[at][1:]) for at, name in enumerate(names)}
        recovery = self.decided.recovery
        given_up = None if recovery is None else replace(recovery, lost=(), asked=())
        parity = self.decided.parity
        if parity is not None:  # a group begins whole (_regrouped); one that has lost members keeps the others
            wish = self._parity(members, haves)
            parity = wish if isinstance(wish, Parity) else parity
            parity = parity.instead({name: "" for name in parity.names if name not in members})
        return Decided(epoch, dict(members), holders, given_up, parity)


def _under(found: Mapping[str, Entry], prefix: str) -> dict[str, str]:
    return {key.removeprefix(prefix): entry.value for key, entry in found.items() if key.startswith(prefix)}


def _members(found: Mapping[str, Entry]) -> dict[str, Member]:
    said = _under(found, MEMBERS)
    return {name: one for name, text in sorted(said.items()) if (one := Member.of(name, text)) is not None}


def _fits(member: Member, place: str, parity: Parity | None) -> bool:
    """Where the shards of a group are, a mirror port is needed, and parity anywhere in it."""
    if parity is None or place not in parity.names:
        return True
    return member.parity and (member.follows or place in parity.holders)


def _shared(
    site: Site, place: str, holders: Mapping[str, tuple[str, ...]], members: Mapping[str, Member],
    parity: Parity | None,
) -> int:
    """With how many that need its pieces, or whose pieces it needs, a member would share a leaf in that place."""
    near = {*holders[place], *(name for name, keep in holders.items() if place in keep)} - {place}
    if parity is not None and place in parity.names:
        near |= set(parity.names) - {place}
    return sum(bool(site.leaf) and members[name].site.leaf == site.leaf for name in near)
