"""What a node offers: versions by tier, run, epoch, step and shard, as its answer to /v1/versions lists them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flowcheck.ask.receiving import AskError
from flowcheck.control.messages import MOST_RANKS
from flowcheck.control.start import Key, line_of
from flowcheck.job.version_status import VersionStatus

__all__ = [
    "COPY", "DISK", "JOURNAL", "LATER", "LOG", "MEMORY", "MOST_EPOCHS", "OWN", "PARITY", "STORE", "TIERS", "Offer",
    "Spans", "rows", "spans",
]

MEMORY, COPY, DISK, PARITY, JOURNAL, STORE, LOG = "memory", "copy", "disk", "parity", "journal", "store", "log"
# Of a node, the nearest first. A copy is of another node's version, in memory; from parity a version is made when it is
# asked for, and so are steps of a journal that are none of its bases; of a log it is made by the trainers.
TIERS = (MEMORY, COPY, DISK, PARITY, JOURNAL, STORE, LOG)
LATER = (JOURNAL, LOG)  # which the first release does not know: they are listed apart
MOST_OF_LOG = 1 << 16  # steps that can be made of one
MOST_ROWS = 64  # of steps with the same ranks' own states
OWN = "own"  # `statuses` of /v1/versions: what is said of a version is of that version alone
MOST_AGE = 1e12
MOST_EPOCHS = 1 << 31
MOST_NBYTES = 1 << 50  # of a version


Spans = tuple[tuple[int, int], ...]
Row = tuple[int, int, Spans]


@dataclass(frozen=True)
class Offer:
    """A version that a node says it has. id: its name in requests. tier: one of TIERS. nbytes: of all tensors. user:
    whose own states it has: first and last rank of each row of them. age_steps: that the trainers are known to have
    made since. age_seconds: since it was published. None: the node does not know. matches: checksums of the trainer
    that had matched when it was published, as far as the node says it. start: of which start of the job's trainers it
    is (flowcheck/control/start.py), "": the node does not say it. attached: a node vouches that trainers have attached
    with that run and epoch. oldest: of a log, the oldest step that can be made of it; users: whose own states there are
    of its steps, as `user`, behind the first and last step of each row."""

    id: str
    tier: str
    run_id: str
    epoch: int
    step: int
    shard: str
    status: str
    nbytes: int
    user: Spans = ()
    age_steps: int | None = None
    age_seconds: float | None = None
    matches: int = 0
    start: str = ""
    attached: bool = False
    oldest: int | None = None
    users: tuple[Row, ...] = ()

    @property
    def each(self) -> list[Offer]:
        """One for each step that can be had."""
        first = self.step if self.oldest is None else max(self.oldest, self.step - MOST_OF_LOG)
        steps = range(first, self.step + 1)
        of_step = dict.fromkeys(steps, () if self.users else self.user)  # nodes of before say it of the newest alone
        for begin, end, user in self.users:
            of_step |= dict.fromkeys(range(max(begin, first), min(end, self.step) + 1), user)
        return [replace(self, step=step, oldest=None, user=of_step[step], users=()) for step in steps]

    @property
    def key(self) -> Key:
        """What orders the versions of a run."""
        line = line_of(self.start)
        return (self.epoch, self.step, line) if line else (self.epoch, self.step)

    @property
    def with_user(self) -> list[int]:
        """Ranks whose own states it has."""
        return [rank for first, last in self.user for rank in range(first, last + 1)]

    def has_user(self, rank: int) -> bool:
        return any(first <= rank <= last for first, last in self.user)

    @classmethod
    def of(cls, said: Any, where: str) -> Offer:
        """Raises AskError."""
        kinds = {"id": str, "tier": str, "run_id": str, "epoch": int, "step": int, "shard": str, "status": str,
                 "nbytes": int}
        values: dict[str, Any] = {name: said.get(name) if isinstance(said, dict) else None for name in kinds}
        sound = all(type(values[name]) is kind for name, kind in kinds.items())
        if not sound or min(values["epoch"], values["step"], values["nbytes"]) < 0 or (
                values["epoch"] >= MOST_EPOCHS or values["nbytes"] > MOST_NBYTES):
            raise AskError("lists a version that is not described", where=where)
        if values["tier"] not in TIERS or not (values["id"].isascii() and values["id"].isalnum()):
            raise AskError("lists a version of an unknown tier, or without a name", where=where)
        values["status"] = str(VersionStatus.of(values["status"], values["step"]))
        return cls(**values, user=_spans(said.get("user", []), where), age_steps=_age(said.get("age_steps")),
                   age_seconds=_age(said.get("age_seconds")), matches=int(_age(said.get("matches")) or 0),
                   start=start if isinstance(start := said.get("start"), str) else "",
                   attached=said.get("attached") is True, oldest=_age(said.get("oldest")),
                   users=_rows(said.get("users", []), where))


def _age(said: Any) -> Any:
    """Nothing is decided by it, so what cannot be an age counts as unsaid."""
    return said if type(said) in (int, float) and 0 <= said < MOST_AGE else None


def rows(users: Mapping[int, Spans]) -> tuple[Row, ...]:
    """The newest steps, in ascending order: those that follow each other and have the same ranks' states in one row."""
    out: list[Row] = []
    for step in sorted(users):
        if out and out[-1][1:] == (step - 1, users[step]):
            out[-1] = out[-1][0], step, users[step]
        else:
            out.append((step, step, users[step]))
    return tuple(out[-MOST_ROWS:])


def spans(ranks: Iterable[int]) -> Spans:
    """Ranks in ascending order as first and last of each row of them."""
    out: list[tuple[int, int]] = []
    for rank in ranks:
        if out and out[-1][1] == rank - 1:
            out[-1] = out[-1][0], rank
        else:
            out.append((rank, rank))
    return tuple(out)


def _spans(said: Any, where: str) -> Spans:
    """As a node says them; one that knows nothing of them says nothing."""
    sound = isinstance(said, list) and all(
        isinstance(one, list) and len(one) == 2 and all(type(rank) is int and 0 <= rank < MOST_RANKS for rank in one)
        for one in said
    )
    flat = [rank for one in said for rank in one] if sound else []
    # Each rank once: with rows that overlap a short list would be of more ranks than there is memory for.
    if not sound or any(first > last for first, last in said) or any(
            last >= first for last, first in zip(flat[1::2], flat[2::2], strict=False)):
        raise AskError("lists a version with states of ranks that are none", where=where)
    return tuple((first, last) for first, last in said)


def _rows(said: Any, where: str) -> tuple[Row, ...]:
    sound = isinstance(said, list) and len(said) <= MOST_ROWS and all(
        isinstance(one, list) and len(one) == 3 and type(one[0]) is type(one[1]) is int and 0 <= one[0] <= one[1]
        for one in said
    )
    if not sound:
        raise AskError("lists a log with states of steps that are none", where=where)
    return tuple((first, last, _spans(user, where)) for first, last, user in said)
