"""What the registry's texts say: who is there, what each has, and what the root has decided. Text to data, and back.

    Member.of(name, text), Have.of(text), Decided.of(text)

Whoever may write to the registry may have written anything: a text that is none of these is as if there were none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from flowcheck.checkpoint.coding.holders import Site

__all__ = ["Decided", "Have", "Member", "Recovery", "Run", "Shard"]

Run = tuple[str, int]  # id and epoch of a job
Shard = tuple[str, int, str]  # the same, and the group that is one of its shards
MOST = 1 << 53  # an epoch or a step: larger ones could not be counted on, and text of them not be written
_WRONG = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


def _number(said: Any) -> int:
    """Raises one of _WRONG."""
    number = int(said)
    if not 0 <= number < MOST:
        raise ValueError(said)
    return number


@dataclass(frozen=True)
class Member:
    """address: HOST:PORT of its API, as others reach it. follows: jobs, over a mirror port. standby: it has no place
    until it takes that of one that is lost."""

    site: Site
    address: str
    follows: bool = True
    standby: bool = False

    def text(self) -> str:
        more = {"address": self.address, "follows": self.follows, "standby": self.standby}
        return json.dumps(asdict(self.site) | more, sort_keys=True)

    @classmethod
    def of(cls, name: str, text: str) -> Self | None:
        """None: it is not one."""
        try:
            said = json.loads(text)
            labels = [said.get(key, "") for key in ("host", "leaf", "rack")]
            flags = [said.get("follows", True), said.get("standby", False)]
            host, _, port = said["address"].rpartition(":")
            sound = all(isinstance(label, str) for label in labels) and all(type(flag) is bool for flag in flags)
            if not host or not port.isdecimal() or not sound:
                return None
        except _WRONG:
            return None
        return cls(Site(name, *labels), said["address"], *flags)


@dataclass(frozen=True)
class Have:
    """epoch: of the decision that the member follows. own: shards of which its own node has versions. copies: by the
    address of a source and the shard, which steps of it are whole there."""

    epoch: int = 0
    own: frozenset[Shard] = frozenset()
    copies: Mapping[tuple[str, Shard], frozenset[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> Self:
        try:
            said = json.loads(text)
            own = frozenset(_shards([one["run_id"], one["epoch"], one["shard"]] for one in said.get("own", [])))
            copies: dict[tuple[str, Shard], frozenset[int]] = {}
            for one in said["copies"]:
                address, _, shard = one["source"].partition("/")
                (of,) = _shards([(one["run_id"], one["epoch"], shard)])
                copies[address, of] = frozenset(map(_number, one["steps"]))
            return cls(_number(said["epoch"]), own, copies)
        except _WRONG:
            return cls()


@dataclass(frozen=True)
class Recovery:
    """A loss of members, from the decision that names it to the one that ends it.

    number: epoch of the first of these decisions. lost: whose places nobody has taken. asked: of these, for whom the
    operator's command has succeeded. shards: that lost members followed. void: of these, those of which nobody has
    anything any more. steps: of each run the step that copies of all its shards have in common; those stay."""

    number: int
    lost: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    shards: tuple[Shard, ...] = ()
    void: tuple[Shard, ...] = ()
    steps: Mapping[Run, int] = field(default_factory=dict)

    def said(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "number": self.number, "lost": list(self.lost), "asked": list(self.asked),
            "shards": [list(one) for one in self.shards], "void": [list(one) for one in self.void],
            "steps": [[*run, step] for run, step in sorted(self.steps.items())],
        }

    @classmethod
    def of(cls, said: Any) -> Self | None:
        """Raises one of _WRONG."""
        if said is None:
            return None
        return cls(_number(said["number"]), tuple(map(str, said["lost"])), tuple(map(str, said["asked"])),
                   _shards(said["shards"]), _shards(said["void"]),
                   {(str(run_id), _number(epoch)): _number(step) for run_id, epoch, step in said["steps"]})


def _shards(said: Iterable[Any]) -> tuple[Shard, ...]:
    return tuple((str(run_id), _number(epoch), str(shard)) for run_id, epoch, shard in said)


@dataclass(frozen=True)
class Decided:
    """epoch: of the decision; 0: there is none. members: as they were then. holders: of each, who keeps copies of its
    versions. recovery: from a loss; None: nothing is lost."""

    epoch: int = 0
    members: Mapping[str, Member] = field(default_factory=dict)
    holders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    recovery: Recovery | None = None

    def sources(self, name: str) -> dict[str, str]:
        """Whose copies a member keeps, and where those are."""
        return {one: self.members[one].address for one, holders in self.holders.items() if name in holders}

    def text(self) -> str:
        return json.dumps({
            "epoch": self.epoch, "members": {name: json.loads(one.text()) for name, one in self.members.items()},
            "holders": {name: list(holders) for name, holders in self.holders.items()},
            "recovery": self.recovery.said() if self.recovery is not None else None,
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
            if not known.keys() >= {one for keep in holders.values() for one in keep}:
                return cls()
            return cls(_number(said["epoch"]), known, holders, Recovery.of(said.get("recovery")))
        except _WRONG:
            return cls()
