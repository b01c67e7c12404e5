"""The messages of the records protocol, field by field: what may be said. How it is said: protocol.py.

Every field has a type, and a message with any other field, or one of another type, is not one. Ranges and Patch check
themselves further when they are made, on both sides: UserError names the field. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flowcheck.control.feed_messages import Fed, Unfed
from flowcheck.control.log_messages import Base, BaseWanted
from flowcheck.control.message_fields import (
    MOST_RANGES,
    MOST_RANKS,
    MOST_SHARES,
    NODE_ID,
    PATCH_BYTES,
    PEER_BYTES,
    PEER_SECONDS,
    RANGES_TEXT,
    Range,
    Share,
    Span,
    check_count,
    check_iteration,
    checked_ranges,
    checked_share,
    checked_spans,
)
from flowcheck.errors import UserError
from flowcheck.job.form import shown

__all__ = [
    "MESSAGES", "MOST_RANGES", "MOST_RANKS", "PATCH_BYTES", "PEER_BYTES", "PEER_SECONDS", "PROTOCOL", "RANGES_TEXT",
    "RESYNC", "ROLES", "Base", "BaseWanted", "Bye", "Bytes", "Challenge", "Entry", "Epoch", "Fed", "Flows", "Hello",
    "Holes", "Joined", "Journal", "Manifest", "Members", "Notice", "Patch", "Progress", "Range", "Ranges", "Record",
    "Refused", "Share", "Span", "State", "Steps", "Unfed", "User", "UserHead", "Wanted", "Welcome",
]

PROTOCOL = "flowcheck/records/1"
RESYNC = ("state", "ranges")
ROLES = ("trainer", "peer")
@dataclass
class Challenge:
    """Node, first. nonce: 32 random bytes, hexadecimal."""

    nonce: str
    protocol: str = PROTOCOL


@dataclass
class Hello:
    """Who comes, answering: one rank of one run. group: which of a node's groups, "" if it has one. instance: of this
    attachment, so that a job that was started again is known even if it says the same run and epoch; of trainers that
    say when they began, the text of a start.Start, the same on all ranks. role: "trainer",
    or "peer": another node that follows the same group; it is rank 0 of 1."""

    run_id: str
    epoch: int
    rank: int
    ranks: int
    group: str
    nonce: str
    proof: str
    protocol: str = PROTOCOL
    instance: str = ""
    role: str = ROLES[0]


@dataclass
class Welcome:
    """Node: it knows the token too. resync: what it will ask for to have the trainer's state: "state" (all of it, from
    rank 0, while ranks wait) or "ranges" (elements, of every rank; nobody waits)."""

    proof: str
    resync: str = RESYNC[0]

    def __post_init__(self) -> None:
        if self.resync not in RESYNC:
            raise UserError(f"{shown(self.resync)} is not one of {', '.join(RESYNC)}", where="welcome: resync")


@dataclass
class Refused:
    """Node: why this connection ends. final: this run is not taken again, and not to be tried again; left out where it
    is not so, because trainers of earlier releases do not know it."""

    why: str
    final: bool = False


@dataclass
class Flows:
    """Every rank: the connections it has, in the manifest's form; a later one replaces an earlier one."""

    flows: list[dict[str, Any]]


@dataclass
class Manifest:
    """Rank 0: the job. Its flows may be empty: those that every rank has sent are put in. first: the trainer's own
    number of the manifest's iteration 0; State, Record, Joined and Progress count as the trainer does."""

    job: dict[str, Any]
    first: int = 0

    def __post_init__(self) -> None:
        check_iteration(self.first, "manifest: first")


@dataclass
class State:
    """Rank 0: the model and the optimizer before iteration `iteration`. Payload: `model.NAME` for every entry,
    `optimizer.NAME.KEY` for every tensor of the optimizer's state. groups: hyper-parameters by parameter group of the
    step that made it, or of the optimizer as it is."""

    iteration: int
    groups: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_iteration(self.iteration, "state: iteration")


@dataclass
class Record:
    """Every rank, once per iteration: what the wire does not carry. Payload: `buffer.NAME`.

    groups: hyper-parameters of this step by parameter group. clip: factor that gradients were multiplied with. scale:
    loss scale. skipped: the optimizer did nothing. checksums: 16 hexadecimal digits per model entry, by its name, and
    per tensor of the optimizer's state, as `optimizer.NAME.KEY`, after the step. sample: some elements of some of these
    tensors (flowcheck/job/sampling.py), "": of a trainer that sends none.
    """

    iteration: int
    groups: list[dict[str, Any]] = field(default_factory=list)
    clip: float | None = None
    scale: float | None = None
    skipped: bool = False
    checksums: dict[str, str] = field(default_factory=dict)
    sample: str = ""

    def __post_init__(self) -> None:
        check_iteration(self.iteration, "record: iteration")


@dataclass
class Ranges:
    """Node, to one rank: elements whose state it lacks. The rank answers with one Patch, at the next boundary that has
    a record. request: the node's number of it, in the answer again. ranges: of Range, 1 to MOST_RANGES."""

    request: int
    ranges: list[Any]

    def __post_init__(self) -> None:
        check_count(self.request, "ranges: request")
        self.ranges = checked_ranges(self.ranges, "ranges: ranges")
        if not self.ranges:
            raise UserError("asks for nothing", where="ranges: ranges")


@dataclass
class Patch:
    """Trainer: the state after iteration `iteration` of the elements that Ranges `request` named, before this rank's
    Record of that iteration on the same connection. ranges: as asked. Payload: `model.NAME` and, of an optimized entry,
    `optimizer.NAME.KEY` of these elements, the ranges of one entry one after the other in the order asked, in one
    dimension; what the optimizer keeps per tensor (`step`) as in State. refused: why not; then neither ranges nor
    payload."""

    request: int
    iteration: int
    ranges: list[Any] = field(default_factory=list)
    refused: str = ""

    def __post_init__(self) -> None:
        check_count(self.request, "patch: request")
        check_iteration(self.iteration, "patch: iteration")
        self.ranges = checked_ranges(self.ranges, "patch: ranges")
        if bool(self.ranges) == bool(self.refused):
            raise UserError("either ranges, or why they are refused", where="patch: refused")


@dataclass
class Holes:
    """Peer, asking: bytes of the arena of the trainer's iteration `iteration` that it lacks, and some next to them.
    plan: 64 hexadecimal digits that stand for the job and where its bytes lie. ranges: of Span, in order, each from
    the beginning of a cell on. seconds: for which an answer is of use."""

    request: int
    iteration: int
    plan: str
    ranges: list[Any]
    seconds: float

    def __post_init__(self) -> None:
        check_count(self.request, "holes: request")
        check_iteration(self.iteration, "holes: iteration")
        self.ranges = checked_spans(self.ranges, "holes: ranges")
        if not self.ranges:
            raise UserError("asks for nothing", where="holes: ranges")
        if not 0 < self.seconds <= PEER_SECONDS:
            raise UserError(f"{self.seconds} is not between 0 and {PEER_SECONDS}", where="holes: seconds")


@dataclass
class Bytes:
    """Node, to a peer: what it has of Holes `request`, from its own mirror and checked. ranges: of Span, each inside
    one of those asked for; payload: their bytes, one after the other. digest: SHA-256 of the payload, hexadecimal.
    why: why nothing is here; then neither ranges nor payload."""

    request: int
    iteration: int
    ranges: list[Any] = field(default_factory=list)
    digest: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        check_count(self.request, "bytes: request")
        check_iteration(self.iteration, "bytes: iteration")
        self.ranges = checked_spans(self.ranges, "bytes: ranges")
        if bool(self.ranges) == bool(self.why):
            raise UserError("either ranges, or why there are none", where="bytes: why")


@dataclass
class Journal:
    """Holder, as a peer, asking: what made the step after the trainer's iteration `iteration`, besides its gradients,
    which Holes asks for. plan: as of Holes; another than is followed: which job that is. seconds: as of Holes."""

    request: int
    iteration: int
    plan: str
    seconds: float

    def __post_init__(self) -> None:
        check_count(self.request, "journal: request")
        check_iteration(self.iteration, "journal: iteration")
        if not 0 < self.seconds <= PEER_SECONDS:
            raise UserError(f"{self.seconds} is not between 0 and {PEER_SECONDS}", where="journal: seconds")


@dataclass
class Entry:
    """Node, to a holder: the answer. plan: that is followed, "": none. newest: iteration that has closed, -1: none.
    job, first: of that plan, as of Manifest with all connections, if the holder named another one; run: [id, epoch,
    ranks] of its trainers. groups, clip, scale, skipped: as of Record, as they were applied; payload: `buffer.NAME`.
    why: why this iteration cannot be had, "": it can."""

    request: int
    iteration: int
    plan: str
    newest: int
    job: dict[str, Any] = field(default_factory=dict)
    first: int = 0
    run: list[Any] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    clip: float | None = None
    scale: float | None = None
    skipped: bool = False
    why: str = ""

    def __post_init__(self) -> None:
        check_count(self.request, "entry: request")
        check_iteration(self.iteration, "entry: iteration")
        check_iteration(self.first, "entry: first")
        if self.job and [type(one) for one in self.run] != [str, int, int]:
            raise UserError(f"{shown(self.run)} is not [run, epoch, ranks]", where="entry: run")


@dataclass
class Steps:
    """Node, as a peer, and the answer to it: which versions its groups have complete, all of them each time. node:
    32 hexadecimal digits of this process. name: what it is called. have: of Share, at most MOST_SHARES."""

    node: str
    name: str
    have: list[Any]

    def __post_init__(self) -> None:
        if not NODE_ID.fullmatch(self.node) or not self.name.isprintable() or len(self.name) > 64:
            raise UserError(f"{shown(self.node)}, {shown(self.name)} is no node", where="steps: node")
        if len(self.have) > MOST_SHARES:
            raise UserError(f"{len(self.have)} groups, at most {MOST_SHARES} are known", where="steps: have")
        self.have = [checked_share(one, f"steps: have[{i}]") for i, one in enumerate(self.have)]


@dataclass
class User:
    """Every rank, before its Record of that iteration, if the node has asked for it: what it gives of itself after
    iteration `iteration`, where the next one begins. rank: of the whole job, so the same in every group. Payload: a
    file of flowcheck/control/user_state.py, of that rank and the step after the iteration."""

    iteration: int
    rank: int

    def __post_init__(self) -> None:
        check_iteration(self.iteration, "user: iteration")
        check_count(self.rank, "user: rank")
        if self.rank >= MOST_RANKS:
            raise UserError(f"{self.rank}, at most {MOST_RANKS} ranks are known", where="user: rank")


@dataclass
class UserHead:
    """Every rank, in place of User, if the node has asked for it: only what the file begins with. Payload: the file but
    for its last `same` bytes, which are the last ones of the file before it on this connection."""

    iteration: int
    rank: int
    same: int

    def __post_init__(self) -> None:
        User(self.iteration, self.rank)
        check_count(self.same - 1, "user: same")


@dataclass
class Bye:
    """Trainer: training ends here; nothing more will come."""


@dataclass
class Wanted:
    """Node: what it needs ("flows", "manifest", "state") to have versions again, and why. Before all else, and without
    these: "user", it keeps the states of ranks; that stays so for the connection. "userhead" with it: a state may
    come as UserHead."""

    what: list[str]
    why: str


@dataclass
class Joined:
    """Node: it builds from `iteration` on. It has the state before it, or asks for that by Ranges."""

    iteration: int


@dataclass
class Progress:
    """Node: version after `iteration` is published. status: of that version (flowcheck/job/version_status.py)."""

    iteration: int
    status: str


@dataclass
class Epoch:
    """Node, to trainers that say when they began: versions of this start are of another epoch than it has said, and
    why."""

    epoch: int
    why: str

    def __post_init__(self) -> None:
        check_count(self.epoch, "epoch: epoch")


@dataclass
class Members:
    """Trainer: which ranks of the whole job its group is made of, by their numbers in the group. Only to a node that
    says that it knows this message (Wanted)."""

    places: list[int]

    def __post_init__(self) -> None:
        if len(self.places) > MOST_RANKS or not all(0 <= one < MOST_RANKS for one in self.places):
            raise UserError(f"places of {len(self.places)} ranks, or one of none", where="members: places")


@dataclass
class Notice:
    """Node: why there are no versions at the moment, although nothing is wanted of a trainer; "": that is over.
    Trainer: why it does not know its job yet, or again. Only to a node that says that it knows this (Wanted)."""

    why: str


MESSAGES: dict[str, type] = {
    kind.__name__.lower(): kind
    for kind in (
        Challenge, Hello, Welcome, Refused, Flows, Manifest, State, Record, Ranges, Patch, Holes, Bytes, Journal,
        Entry, Steps, User, UserHead, BaseWanted, Base, Bye, Wanted, Joined, Progress, Epoch, Notice, Members, Fed,
        Unfed,
    )
}
