"""What the registry's texts say: who is there, what each has, and what the root has decided. Text to data, and back.

    Member.of(name, text), Have.of(text), Decided.of(text)

Whoever may write to the registry may have written anything: any other text is as if it were not there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from flowcheck.checkpoint.coding.holders import Site
from flowcheck.control.address import host_and_port

__all__ = ["Decided", "Have", "Member", "Parity", "Part", "Recovery", "Run", "Shard"]

Run = tuple[str, int]  # id and epoch of a job
Shard = tuple[str, int, str]  # the same, and the group that is one of its shards
NAME = re.compile(r"[A-Za-z0-9_.-]{1,32}", re.ASCII)  # of a node, as its own settings have to be
MOST_TEXT = 4096  # characters of an id, a shard or a name
MOST_LABEL = 64  # characters
MOST = 1 << 53  # an epoch or a step: larger ones could not be counted on, and text of them not be written
_WRONG = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


def _number(said: Any) -> int:
    """Raises one of _WRONG. JSON has numbers: text of digits, of whatever script, is not one."""
    if type(said) is not int or not 0 <= said < MOST:
        raise ValueError(said)
    return said


def _text(said: Any) -> str:
    """Raises one of _WRONG."""
    if not isinstance(said, str) or len(said) > MOST_TEXT or "\0" in said:
        raise ValueError(said)
    return said


@dataclass(frozen=True)
class Member:
    """address: HOST:PORT of its API, as others reach it. follows: jobs, over a mirror port. standby: it has no place
    until it takes that of one that is lost. parity: it takes part where there is parity."""

    site: Site
    address: str
    follows: bool = True
    standby: bool = False
    parity: bool = False

    def text(self) -> str:
        more = {"address": self.address, "follows": self.follows, "standby": self.standby, "parity": self.parity}
        return json.dumps(asdict(self.site) | more, sort_keys=True)

    @classmethod
    def of(cls, name: str, text: str) -> Self | None:
        """None: it is not one."""
        try:
            said = json.loads(text)
            labels = [said.get(key, "") for key in ("host", "leaf", "rack")]
            flags = [said.get("follows", True), said.get("standby", False), said.get("parity", False)]
            sound = all(isinstance(label, str) and len(label) <= MOST_LABEL and label.isprintable() for label in labels)
            sound = sound and all(type(flag) is bool for flag in flags) and NAME.fullmatch(name) is not None
            if not sound or host_and_port(said["address"]) is None:
                return None
        except _WRONG:
            return None
        return cls(Site(name, *labels), said["address"], *flags)


@dataclass(frozen=True)
class Have:
    """epoch: of the decision that the member follows. own: shards of which its own node has versions. copies: by the
    address of a source and the shard, which steps of it are whole there. streams: of parity, which steps and numbers of
    a run."""

    epoch: int = 0
    own: frozenset[Shard] = frozenset()
    copies: Mapping[tuple[str, Shard], frozenset[int]] = field(default_factory=dict)
    streams: Mapping[Run, frozenset[tuple[int, int]]] = field(default_factory=dict)

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
            streams: dict[Run, frozenset[tuple[int, int]]] = {}
            for one in said.get("parity", []):
                run = _text(one["run_id"]), _number(one["epoch"])
                streams[run] = streams.get(run, frozenset()) | {(_number(one["step"]), _number(one["stream"]))}
            return cls(_number(said["epoch"]), own, copies, streams)
        except _WRONG:
            return cls()


@dataclass(frozen=True)
class Part:
    """What a member does for parity. code: streams of data and of parity. number: of the stream that it keeps. data:
    where those are that have the data."""

    code: tuple[int, int]
    number: int
    data: tuple[str, ...]


@dataclass(frozen=True)
class Parity:
    """Members of a group with parity. data: those that follow the job's shards, in the order of the shards' names.
    holders: of the streams of parity, in the order of these. "": nobody has that place."""

    data: tuple[str, ...]
    holders: tuple[str, ...]

    @property
    def code(self) -> tuple[int, int]:
        return len(self.data), len(self.holders)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (*self.data, *self.holders) if name)

    def instead(self, names: Mapping[str, str]) -> Self:
        """The same places with others in them."""
        return type(self)(*(tuple(names.get(one, one) for one in some) for some in (self.data, self.holders)))

    def said(self) -> dict[str, Any]:
        """As JSON."""
        return {"data": list(self.data), "holders": list(self.holders)}

    @classmethod
    def of(cls, said: Any) -> Self | None:
        """Raises one of _WRONG."""
        if said is None:
            return None
        made = cls(tuple(map(_text, said["data"])), tuple(map(_text, said["holders"])))
        if not all(made.code) or len(set(made.names)) < len(made.names):
            raise ValueError(said)
        return made


@dataclass(frozen=True)
class Recovery:
    """A loss of members, from the decision that names it to the one that ends it.

    number: epoch of the first of these decisions. lost: whose places nobody has taken. asked: of these, those for which
    the operator's command has succeeded. shards: that lost members followed. void: of these, those of which nobody has
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
        return cls(_number(said["number"]), tuple(map(_text, said["lost"])), tuple(map(_text, said["asked"])),
                   _shards(said["shards"]), _shards(said["void"]),
                   {(_text(run_id), _number(epoch)): _number(step) for run_id, epoch, step in said["steps"]})


def _shards(said: Iterable[Any]) -> tuple[Shard, ...]:
    return tuple((_text(run_id), _number(epoch), _text(shard)) for run_id, epoch, shard in said)


@dataclass(frozen=True)
class Decided:
    """epoch: of the decision; 0: nothing is. members: as they were then. holders: of each, who keeps copies of its
    versions. recovery: from a loss; None: nothing is lost. parity: None: no group has any."""

    epoch: int = 0
    members: Mapping[str, Member] = field(default_factory=dict)
    holders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    recovery: Recovery | None = None
    parity: Parity | None = None

    def sources(self, name: str) -> dict[str, str]:
        """Whose copies a member keeps, and where those are. Who has data that parity is made of keeps its own, too: a
        slot is soon needed again."""
        own = self.parity is not None and name in self.parity.data
        return {one: self.members[one].address for one, holders in self.holders.items()
                if name in holders or (own and one == name)}

    def part(self, name: str) -> Part | None:
        """What a holder of parity does; None: it does not hold any."""
        parity = self.parity
        if not name or parity is None or name not in parity.holders:
            return None
        data = tuple(self.members[one].address for one in parity.data if one)
        return Part(parity.code, len(parity.data) + parity.holders.index(name), data)

    def grouped(self, name: str) -> list[str]:
        """Where the other members of the group with parity are."""
        names = self.parity.names if self.parity is not None else ()
        return [self.members[one].address for one in names if one != name]

    def text(self) -> str:
        return json.dumps({
            "epoch": self.epoch, "members": {name: json.loads(one.text()) for name, one in self.members.items()},
            "holders": {name: list(holders) for name, holders in self.holders.items()},
            "recovery": self.recovery.said() if self.recovery is not None else None,
            "parity": self.parity.said() if self.parity is not None else None,
        }, sort_keys=True)

    @classmethod
    def of(cls, text: str) -> Self:
        """Epoch 0: it is not one."""
        try:
            said = json.loads(text)
            members = {name: Member.of(name, json.dumps(one)) for name, one in said["members"].items()}
            holders = {name: tuple(map(_text, keep)) for name, keep in said["holders"].items()}
            known = {name: one for name, one in members.items() if one is not None}
            if type(said["epoch"]) is not int or known.keys() != members.keys() or holders.keys() != known.keys():
                return cls()
            parity = Parity.of(said.get("parity"))
            named = {one for keep in holders.values() for one in keep}.union(parity.names if parity is not None else ())
            if not known.keys() >= named:
                return cls()
            return cls(_number(said["epoch"]), known, holders, Recovery.of(said.get("recovery")), parity)
        except _WRONG:
            return cls()
