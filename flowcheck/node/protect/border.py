"""What the process that keeps copies is given, and says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flowcheck.checkpoint.coding.holders import Site
from flowcheck.node.process.child import Program
from flowcheck.node.process.lines import Event, Line, Order, Problem, Settings, table

__all__ = ["EVENTS", "PROGRAM", "CopierSettings", "OtherTokens", "ParitySettings", "RegistrySettings", "Rules"]

Address = tuple[str, int]


@dataclass(frozen=True)
class Rules:
    """every: of each K-th step. keep: copies of a group. most: bytes of all copies. seconds: between two looks."""

    every: int = 1
    keep: int = 2
    most: int = 64 << 30
    seconds: float = 0.5


class RegistrySettings(Line):
    """endpoints, cluster, ca, cert, user, password: how the registry is reached (password: a file). replicas, grace,
    follows, standby, own, code: what this node does by it. address, site: where it is. kept: the file with the last
    decision. replace, replace_seconds: a command for a lost node. directory: of replica files."""

    endpoints: tuple[str, ...]
    cluster: str
    ca: str
    cert: tuple[str, str] | None
    user: str
    password: str
    replicas: int
    grace: float
    address: str
    follows: bool
    standby: bool
    own: bool
    code: tuple[int, int] | None
    kept: Path
    replace: tuple[str, ...]
    replace_seconds: float
    directory: Path
    site: Site


class ParitySettings(Line):
    """code: streams of data and of parity. number: of this node among `members`, None: the registry says it. data:
    where those are that have the data. directory: of parity."""

    code: tuple[int, int]
    number: int | None
    members: tuple[Address, ...]
    data: tuple[str, ...]
    directory: Path


class CopierSettings(Settings):
    """directory: of copies. key: that this node shows. keys: that others may sign with. ca: of nodes' certificates.
    sources: nodes to copy from. journal: of which nodes one is kept: API and control port. token: that journals are
    asked for with, "": none is kept. own: this node's API as others know it. rate: bytes a second, 0: any."""

    directory: Path
    key: str
    keys: tuple[str, ...]
    ca: str
    sources: tuple[Address, ...]
    journal: tuple[tuple[Address, Address], ...]
    token: str
    own: str
    rate: int
    rules: Rules
    registry: RegistrySettings | None
    parity: ParitySettings | None


class OtherTokens(Order):
    key: str
    keys: tuple[str, ...] = ()
    token: str = ""


# -- what it says ------------------------------------------------------------------------------------------------------


class Copied(Event):
    kind, well = "copied", True
    name: str
    source: str
    step: int
    bytes: int
    seconds: float
    path: str


class Uncopied(Event):
    kind = "uncopied"
    name: str
    source: str
    why: str


class Protected(Event):
    kind, well = "protected", True
    name: str
    epoch: int
    step: int
    shards: list[str]
    stream: int
    bytes: int
    padded: int
    seconds: float
    path: str


class Unprotected(Event):
    kind = "unprotected"
    name: str = ""
    why: str


class Redone(Event):
    kind = "redone"
    name: str
    source: str
    step: int
    base: int
    seconds: float
    why: str
    path: str


class Unjournaled(Event):
    kind = "unjournaled"
    name: str
    source: str
    why: str


class Registered(Event):
    kind = "registered"
    members: int
    root: str
    epoch: int


class Unregistered(Event):
    kind = "unregistered"
    why: str
    epoch: int
    copies: list[str]


class Unsigned(Event):
    kind = "unsigned"
    keys: list[str]
    count: int
    why: str


class Groups(Line):
    data: list[str]
    holders: list[str]


class Placed(Event):
    kind = "placed"
    epoch: int
    members: int
    copies: list[str]
    holders: list[str]
    alone: list[str]
    together: list[list[str]]
    parity: Groups | None


class Step(Line):
    run_id: str
    step: int


class Recovering(Event):
    kind = "recovering"
    epoch: int
    lost: list[str]
    asked: list[str]
    steps: list[Step]
    void: list[str]


class Replacing(Event):
    kind = "replacing"
    lost: str
    recovery: int


class Fallback(Event):
    kind = "fallback"
    run_id: str
    shards: list[str]
    step: int | None
    why: str


class Restored(Event):
    kind = "restored"
    epoch: int
    since: int


class Removed(Event):
    kind = "removed"
    name: str
    run_id: str
    step: int
    path: str
    why: str


EVENTS = table(
    Copied, Uncopied, Protected, Unprotected, Redone, Unjournaled, Registered, Unregistered, Unsigned, Placed,
    Recovering, Replacing, Fallback, Restored, Removed, Problem,
)
PROGRAM = Program("flowcheck.node.protect.worker", "copier", "keeps copies of other nodes' versions", EVENTS)
