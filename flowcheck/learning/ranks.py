"""Ranks of addresses, and places in the ring: what options, logs and clear-to-send tags say, and what they leave open.

    labels_of(connections, log, hints) -> Labels       who is said to be which rank
    rankings(path, closed, labels, log) -> Ranking     every place of the hosts seen in a ring of every size
    parents_of(ranks, wires)                           parent_ranks for the manifest

A tag numbers the ranks of the communicator that this one was split from (nccl-wire.md 5.4). Nothing on the wire tells
whether it was split, so tags are a claim: rankings that agree with them come as they are, all others as `split`, with
the tags as numbers of the parent. Which bytes go where depends on the place of rank 0 alone, not on the names of the
other ranks. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowcheck.errors import UserError
from flowcheck.learning.connections import Connection
from flowcheck.learning.hints import Hints
from flowcheck.learning.logs import LogFacts
from flowcheck.learning.walk import Wire

__all__ = ["RANKS_TRIED", "Labels", "Ranking", "from_zero", "labels_of", "parents_of", "rankings"]

RANKS_TRIED = 64  # with a single rank mirrored and nothing that says how many there are


@dataclass(frozen=True)
class Labels:
    """ranks: by address. source: "--rank", "log", "tags" or "" (nothing known)."""

    ranks: dict[str, int]
    source: str
    reason: str


@dataclass(frozen=True)
class Ranking:
    """A ring in which the hosts seen have these ranks. about: for refusals. split: the tags are a parent's numbers."""

    ranks: dict[str, int]
    ring: tuple[int, ...]
    about: str
    split: bool = False


def labels_of(found: Sequence[Connection], log: LogFacts, hints: Hints) -> Labels:
    """Raises UserError for an address of --rank that is not there."""
    hosts = {address for c in found for address in (c.src, c.dst)}
    if hints.ranks:
        absent = [address for address in hints.ranks if address not in hosts]
        if absent:
            raise UserError(
                f"{absent[0]} sends and receives no collective in the captures", where="--rank",
                remedy=f"name some of {', '.join(sorted(hosts)[:8])}",
            )
        return Labels(dict(hints.ranks), "--rank", "given")
    by_log = log.ranks_of_addresses([(c.src, c.cts_qpn) for c in found] + [(c.dst, c.qpn) for c in found])
    if by_log:
        return Labels(by_log, "log", "QP numbers in NCCL's logs, which name the rank")
    tags: dict[str, set[int]] = {}
    for c in found:
        if c.tag is not None:
            tags.setdefault(c.src, set()).add(c.tag)
    single = {address: next(iter(t)) for address, t in tags.items() if len(t) == 1}
    several = len(single) > 1 or (bool(single) and max(single.values()) > 0)
    if len(set(single.values())) == len(single) and (several or (single and len({c.src for c in found}) == 1)):
        return Labels(single, "tags", "the tag of the clear-to-send writes is the sender's rank")
    return Labels({}, "", "the clear-to-send tags are all equal or absent: they say nothing")


def from_zero(ring: Sequence[int]) -> tuple[int, ...]:
    """The same ring, beginning with rank 0."""
    at = list(ring).index(0)
    return (*ring[at:], *ring[:at])


def rankings(path: list[str], closed: bool, labels: Labels, log: LogFacts) -> Iterator[Ranking]:
    """Every place of the path in a ring of every size; what agrees with the labels first."""
    t, largest = len(path), max(labels.ranks.values(), default=0)
    if log.rings:
        sizes: Sequence[int] = [len(log.rings[0])]
    elif closed:
        sizes = [t]
    else:
        least = max(t, 2) if labels.source == "tags" else max(t, 1 + largest, 2)
        sizes = range(least, max(RANKS_TRIED, 1 + largest) + 1)
    split = []
    for n in sizes:
        if n < t:
            continue
        for offset in range(n):
            about = f"{n} ranks, {path[0]} at place {offset} of the ring"
            ring = _named(path, offset, n, labels.ranks)
            if ring is not None and log.rings and from_zero(log.rings[0]) != ring:
                continue
            if ring is not None:
                yield Ranking({a: ring[(offset + j) % n] for j, a in enumerate(path)}, ring, about)
            elif labels.source == "tags" and not log.rings:
                split.append((n, offset, about))
    for n, offset, about in split:
        ranks = {address: (offset + j) % n for j, address in enumerate(path)}
        yield Ranking(ranks, tuple(range(n)), f"{about}, tags numbered in a parent communicator", True)


def _named(path: list[str], offset: int, n: int, labels: dict[str, int]) -> tuple[int, ...] | None:
    """The ring with the labels in it and other ranks ascending, None if the labels do not allow this place."""
    ring = [-1] * n
    for j, address in enumerate(path):
        ring[(offset + j) % n] = labels.get(address, -1)
    if ring[0] not in (0, -1) or 0 in ring[1:]:
        return None
    ring[0] = 0
    known = [r for r in ring if r >= 0]
    if len(set(known)) != len(known) or any(r >= n for r in known):
        return None
    free = iter(r for r in range(n) if r not in known)
    return tuple(next(free) if r < 0 else r for r in ring)


def parents_of(ranks: int, wires: Sequence[Wire]) -> list[int]:
    """communicator.parent_ranks: the tags, where they differ from the ranks; [] where they agree or say nothing.
    Ranks that show nowhere get numbers that nobody has."""
    tags = {w.src: w.connection.tag for w in wires if w.connection.tag is not None}
    values = set(tags.values())
    told = len(values) == len(tags) and (len(tags) > 1 or values - {0})
    if not told or all(tag == rank for rank, tag in tags.items()):
        return []
    free = iter(n for n in range(ranks + len(tags)) if n not in values)
    return [tags[r] if r in tags else next(free) for r in range(ranks)]
