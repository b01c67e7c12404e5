"""Which node keeps what of which other: copies in groups and rings, code groups, across failure domains.

    placement = place(16, 2)                Gemini's Algorithm 1: group if replicas divide machines, else mixed
    placement = place_across(sites, 2)      the same, with the machines dealt to its groups across leaves
    placement.survives({3, 4})              has every machine's state a holder that is left?
    for group in code_groups(sites, 2, 2): group.members, group.data, group.parity
    joining(sites, [0, 1], [2, 3, 4], 2)    who of 2, 3 and 4 keeps parity of what 0 and 1 have

Source: Gemini (SOSP'23), Algorithm 1. Every machine keeps its own state and replicas - 1 of others, so none has room
for more. Pieces that need each other never lie in one leaf while another leaf has room: where any way to fill groups of
these sizes keeps each of them on different leaves, `spread` finds one. What survives how likely:
flowcheck/plan/holders/placement.py. Pure functions.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from flowcheck.errors import UserError

__all__ = [
    "CodeGroup", "Placement", "Site", "across_domains", "check_replicas", "code_groups", "crowded", "joining", "place",
    "place_across", "ring", "spread", "together",
]


@dataclass(frozen=True)
class Site:
    """Where a holder stands: its failure domains. "": it shares this one with nobody."""

    name: str
    host: str = ""
    leaf: str = ""
    rack: str = ""


@dataclass(frozen=True)
class Placement:
    """strategy: "group", "mixed" or "ring". holders[j]: the machines, numbered from 0, that keep machine j's state, its
    own first.

    blocks: sizes of the groups, and whether a block is a ring (all machines of another block keep each other's state).
    """

    strategy: str
    replicas: int
    holders: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[int, bool], ...]

    @property
    def machines(self) -> int:
        return len(self.holders)

    def survives(self, lost: Collection[int]) -> bool:
        """Has every machine's state a holder that is not lost?"""
        gone = set(lost)
        return all(not gone.issuperset(holders) for holders in self.holders)

    def left(self, machine: int, lost: Collection[int]) -> list[int]:
        """Machines that still have the state of `machine`; none: it has to come from elsewhere, and so has everybody's,
        because steps must agree."""
        return [holder for holder in self.holders[machine] if holder not in lost]

    def kept_by(self, machine: int) -> list[int]:
        """Other machines whose state this one keeps."""
        return [other for other, holders in enumerate(self.holders) if machine in holders and other != machine]

    def fatal_sets(self) -> set[frozenset[int]]:
        """The smallest sets of machines whose loss takes somebody's state with it."""
        return {frozenset(holders) for holders in self.holders}


@dataclass(frozen=True)
class CodeGroup:
    """members: machines, data of them with data and parity with parity of it; any `parity` of them may be lost."""

    members: tuple[int, ...]
    data: int
    parity: int


def check_replicas(machines: int, replicas: int) -> None:
    """Raises UserError."""
    if machines < 1:
        raise UserError(f"{machines} is not a number of machines", where="machines", remedy="give 1 or more")
    if not 1 <= replicas <= machines:
        raise UserError(f"{replicas} replicas do not fit {machines} machines", where="replicas",
                        remedy="give at least 1 and at most as many replicas as there are machines")


def _sizes(machines: int, replicas: int) -> list[int]:
    """Of the groups of Algorithm 1; the last one is larger than `replicas`, and a ring, where they do not divide."""
    groups = machines // replicas
    return [replicas] * (groups - 1) + [machines - replicas * (groups - 1)]


def _circle(members: Sequence[int], replicas: int) -> list[tuple[int, ...]]:
    size = len(members)
    return [tuple(members[(at + step) % size] for step in range(replicas)) for at in range(size)]


def place(machines: int, replicas: int) -> Placement:
    """Algorithm 1 of Gemini; `replicas` counts the local one. Raises UserError."""
    check_replicas(machines, replicas)
    return _placed(list(range(machines)), replicas)


def place_across(sites: Sequence[Site], replicas: int) -> Placement:
    """Algorithm 1 of Gemini over machines that stand somewhere. Depends on the order of `sites` nowhere but in the
    numbers of its machines. Raises UserError, also for a name that is given twice."""
    check_replicas(len(sites), replicas)
    return _placed(_joined(_dealt(sites, _sizes(len(sites), replicas)), _domains(sites)), replicas)


def ring(machines: int, replicas: int) -> Placement:
    """Every machine's state on itself and on the next replicas - 1 of one ring. Raises UserError."""
    check_replicas(machines, replicas)
    return Placement("ring", replicas, tuple(_circle(range(machines), replicas)), ((machines, True),))


def _placed(order: Sequence[int], replicas: int) -> Placement:
    """order: the machines, group after group."""
    holders: dict[int, tuple[int, ...]] = {}
    sizes, at = _sizes(len(order), replicas), 0
    for size in sizes:
        members = order[at : at + size]
        holders |= dict(zip(members, _circle(members, replicas), strict=True))
        at += size
    blocks = tuple((size, size != replicas) for size in sizes)
    return Placement("mixed" if blocks[-1][1] else "group", replicas,
                     tuple(holders[machine] for machine in range(len(order))), blocks)


def code_groups(sites: Sequence[Site], data: int, parity: int, follows: Sequence[int] = ()) -> list[CodeGroup]:
    """Groups of data + parity machines, of which any `parity` may be lost. Machines that fill no group make a smaller
    one with fewer data, if more than `parity` are left, otherwise the last group has them as data. Raises UserError.

    follows: the machines that have the data, `data` of them: then there is one group, of these and of who joins them.
    """
    size = data + parity
    if data < 1 or parity < 1 or size > len(sites):
        raise UserError(f"{data} + {parity} do not fit {len(sites)} machines", where="code",
                        remedy="one of each at least, and together at most as many as there are machines")
    if follows:
        if len(follows) != data:
            raise UserError(f"{len(follows)} machines follow a shard each, and there are {data} streams of data",
                            where="code", remedy="as many streams of data as the job has shards")
        _check_names(sites)
        spare = [at for at in range(len(sites)) if at not in follows]
        return [CodeGroup((*follows, *joining(sites, follows, spare, parity)), data, parity)]
    rest = len(sites) % size
    sizes = [size] * (len(sites) // size)
    if rest > parity:
        sizes.append(rest)
    else:
        sizes[-1] += rest
    return [CodeGroup(tuple(members), len(members) - parity, parity) for members in _dealt(sites, sizes)]


def joining(sites: Sequence[Site], members: Collection[int], spare: Sequence[int], count: int) -> list[int]:
    """Who of `spare` joins the members of a code group: `count`, or all. Each time one from where the group has the
    fewest, so no domain has more of them than it must; then from another rack and host; then in the order of `spare`.
    """
    domains, joined, left = _domains(sites), list(members), list(spare)
    for _ in range(min(count, len(left))):
        there = Counter(domains[at] for at in joined)
        near = Counter(label for at in joined for label in _labels(sites[at]))
        chosen = min(left, key=lambda at: (there[domains[at]], sum(near[label] for label in _labels(sites[at]))))
        left.remove(chosen)
        joined.append(chosen)
    return joined[len(members) :]


def _labels(site: Site) -> list[tuple[str, str]]:
    return [(level, label) for level in ("rack", "host") if (label := getattr(site, level))]


# -- failure domains -------------------------------------------------------------------------------------


def across_domains(domains: Sequence[str], replicas: int) -> list[int]:
    """The order of machines in which the groups of `place` lie in different failure domains (`spread`).

    domains: the failure domain (leaf, rack) of each machine.
    """
    check_replicas(len(domains), replicas)
    order = sorted(range(len(domains)), key=lambda machine: (domains[machine], machine))
    return _joined(spread(order, domains, _sizes(len(domains), replicas)), domains)


def spread(order: Sequence[int], domains: Sequence[str], sizes: Sequence[int]) -> list[list[int]]:
    """Machines dealt to groups of these sizes, so that a group has as few of one domain as can be.

    order: machines as they are dealt; those of one domain in the order in which they come. domains: of each machine.

    Where groups without two machines of a domain are possible, that is what comes out: each domain gives one machine to
    each of the groups with the most room left (the construction of Gale and Ryser), and goes round again only if it has
    more machines than there are groups with room. Domains that follow each other go to groups in turn.
    """
    if sum(sizes) != len(order):
        raise ValueError(f"{len(order)} machines for groups of {sum(sizes)}")
    rooms = [(-size, at, at) for at, size in enumerate(sizes)]  # most room first, then whose turn was longest ago
    heapq.heapify(rooms)
    turn, groups = len(sizes), [list[int]() for _ in sizes]
    for machines in _by_domain(order, domains).values():
        while machines:
            taken = [heapq.heappop(rooms) for _ in range(min(len(machines), len(rooms)))]
            for (room, _, group), machine in zip(taken, machines, strict=False):
                groups[group].append(machine)
                if room < -1:
                    heapq.heappush(rooms, (room + 1, turn, group))
                    turn += 1
            machines = machines[len(taken) :]
    return groups


def together(groups: Collection[Sequence[int]], sites: Sequence[Site], level: str = "leaf") -> list[tuple[int, ...]]:
    """Groups (sets of holders, or code groups) that have two machines of one `level`: "host", "leaf" or "rack"."""
    found = []
    for members in dict.fromkeys(tuple(sorted(members)) for members in groups):
        labels = [label for machine in members if (label := getattr(sites[machine], level))]
        if len(set(labels)) < len(labels):
            found.append(members)
    return found


def crowded(members: Collection[int], sites: Sequence[Site], most: int) -> str:
    """The domain that has more than `most` of these machines, which are lost with it; "": none has."""
    there = Counter(domain for at, domain in enumerate(_domains(sites)) if at in members)
    return next((domain for domain, count in sorted(there.items()) if count > most), "")


def _by_domain(order: Sequence[int], domains: Sequence[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for machine in order:
        found.setdefault(domains[machine], []).append(machine)
    return found


def _dealt(sites: Sequence[Site], sizes: Sequence[int]) -> list[list[int]]:
    """Across leaves; where that leaves a choice, across racks and hosts."""
    _check_names(sites)
    order = sorted(range(len(sites)), key=lambda at: (sites[at].rack, sites[at].leaf, sites[at].host, sites[at].name))
    return spread(order, _domains(sites), sizes)


def _check_names(sites: Sequence[Site]) -> None:
    """Raises UserError."""
    names = [site.name for site in sites]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{twice[0]!r} is given twice", where="members", remedy="a name of its own for each holder")


def _domains(sites: Sequence[Site]) -> list[str]:
    """What each machine may be lost with: its leaf; its host where no leaf is known."""
    return [f"leaf {one.leaf}" if one.leaf else f"host {one.host}" if one.host else f"name {one.name}" for one in sites]


def _joined(groups: Sequence[Sequence[int]], domains: Sequence[str]) -> list[int]:
    """Group after group; each so that neighbours, which a ring makes need each other, are of different domains."""
    return [machine for group in groups for machine in _apart(group, domains)]


def _apart(members: Sequence[int], domains: Sequence[str]) -> list[int]:
    """Machines of one domain as far from each other as others allow, in a circle: largest domain first, each of its
    machines at the next of evenly distant places that is free."""
    size, taken = len(members), dict[int, int]()
    for machines in sorted(_by_domain(members, domains).values(), key=len, reverse=True):
        begin = next(at for at in range(size) if at not in taken)
        for number, machine in enumerate(machines):
            wished = begin + number * size // len(machines)
            taken[next(at % size for at in range(wished, wished + size) if at % size not in taken)] = machine
    return [taken[at] for at in range(size)]
