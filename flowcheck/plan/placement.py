"""Replicas in other machines' memory: who keeps what, and the probability that every state still has a holder.

Source: Gemini (SOSP'23): Algorithm 1, Theorem 1, Corollary 1. Corollary 1 is a union bound; the exact forms here count
the sets of lost machines that take no holder set with them (each is a product of polynomials, one per block).

    place(16, 2)     Gemini: group if replicas divide machines, else mixed
    ring(16, 2)      each machine's state on itself and on the next m - 1 of one ring
    survival(placement, k)       exact; union_bound(placement, k) what the paper prints
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from flowcheck.errors import UserError

__all__ = [
    "Placement", "across_domains", "beyond_most", "corollary_1", "place", "ring", "survival", "theorem_1_gap",
    "union_bound",
]


@dataclass(frozen=True)
class Placement:
    """strategy: "group", "mixed" or "ring". holders[j]: the machines, numbered from 0, that keep machine j's state.

    blocks: sizes of the groups in order of their machines, and whether a block is a ring (all machines of another block
    keep each other's state).
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

    def fatal_sets(self) -> set[frozenset[int]]:
        """The smallest sets of machines whose loss takes somebody's state with it."""
        return {frozenset(holders) for holders in self.holders}


def _check(machines: int, replicas: int) -> None:
    if machines < 1:
        raise UserError(f"{machines} is not a number of machines", where="machines", remedy="give 1 or more")
    if not 1 <= replicas <= machines:
        raise UserError(f"{replicas} replicas do not fit {machines} machines", where="replicas",
                        remedy="give at least 1 and at most as many replicas as there are machines")


def _circle(members: Sequence[int], replicas: int) -> list[tuple[int, ...]]:
    size = len(members)
    return [tuple(members[(at + step) % size] for step in range(replicas)) for at in range(size)]


def place(machines: int, replicas: int) -> Placement:
    """Algorithm 1 of Gemini; `replicas` counts the local one. Raises UserError."""
    _check(machines, replicas)
    groups = machines // replicas
    grouped = groups if machines % replicas == 0 else groups - 1
    holders = [tuple(range(at * replicas, (at + 1) * replicas)) for at in range(grouped) for _ in range(replicas)]
    blocks = [(replicas, False)] * grouped
    rest = range(grouped * replicas, machines)
    if rest:
        holders += _circle(rest, replicas)
        blocks.append((len(rest), True))
    return Placement("mixed" if rest else "group", replicas, tuple(holders), tuple(blocks))


def ring(machines: int, replicas: int) -> Placement:
    """Every machine keeps its own state and that of the replicas - 1 before it. Raises UserError."""
    _check(machines, replicas)
    return Placement("ring", replicas, tuple(_circle(range(machines), replicas)), ((machines, True),))


def across_domains(domains: Sequence[str], replicas: int) -> list[int]:
    """The order of machines in which groups of `replicas` neighbours lie in different failure domains.

    domains: the failure domain (leaf, rack) of each machine. Groups are taken at a stride through the machines sorted
    by domain, so that no group has two machines of a domain, unless a domain has more machines than there are groups.
    With a rest (replicas does not divide the machines) the last machines go into the last group, wherever they are.
    """
    by_domain = sorted(range(len(domains)), key=lambda machine: (domains[machine], machine))
    groups = len(by_domain) // replicas
    dealt = [by_domain[group + member * groups] for group in range(groups) for member in range(replicas)]
    return dealt + by_domain[groups * replicas :]


# -- probabilities ---------------------------------------------------------------------------------------


def _times(one: list[int], other: list[int], most: int) -> list[int]:
    """Product of two polynomials (lowest power first) up to x^most."""
    product = [0] * min(most + 1, len(one) + len(other) - 1)
    for i, a in enumerate(one):
        for j, b in enumerate(other[: len(product) - i]):
            product[i + j] += a * b
    return product


def _power(base: list[int], exponent: int, most: int) -> list[int]:
    product = [1]
    for bit in bin(exponent)[2:] if exponent else "":
        product = _times(product, product, most)
        if bit == "1":
            product = _times(product, base, most)
    return product


def _circular(size: int, run: int, most: int) -> list[int]:
    """How many subsets of a circle of `size` have k members and no `run` neighbours in a row, for each k <= most.

    With z = size - k others between them: size / z times the ways to write k as z ordered parts below `run`. For
    run = 2 this is N/(N-k) C(N-k, k).
    """
    counts = [1]
    for k in range(1, min(most + 1, size)):
        others = size - k
        ways = _power([1] * run, others, k)
        counts.append(size * ways[k] // others if k < len(ways) else 0)
    return counts


def survival(placement: Placement, lost: int) -> float:
    """Exact probability that `lost` machines, any of them alike and at once, take no state with them.

    Source: [x^k] of the product over blocks, / C(N, k); a group block is (1 + x)^m - x^m. For k < 2m Corollary 1 is the
    same. Raises UserError if there are not so many machines.
    """
    _check_lost(placement.machines, lost)
    ways = [1]
    for (size, circle), times in _counted(placement.blocks):
        least = min(size, lost + 1)  # higher powers never come into x^lost
        one = _circular(size, placement.replicas, lost) if circle else [math.comb(size, i) for i in range(least)]
        ways = _times(ways, _power(one, times, lost), lost)
    return ways[lost] / math.comb(placement.machines, lost) if lost < len(ways) else 0.0


def _counted(blocks: Sequence[tuple[int, bool]]) -> list[tuple[tuple[int, bool], int]]:
    return [(block, blocks.count(block)) for block in dict.fromkeys(blocks)]


def union_bound(placement: Placement, lost: int) -> float:
    """At least this: 1 minus, per fatal set, the share of the losses that contain it, but never below 0."""
    machines, replicas = placement.machines, placement.replicas
    _check_lost(machines, lost)
    if lost < replicas:
        return 1.0
    containing = len(placement.fatal_sets()) * math.comb(machines - replicas, lost - replicas)
    return max(0.0, 1 - containing / math.comb(machines, lost))


def corollary_1(machines: int, replicas: int, lost: int) -> float:
    """Gemini's Corollary 1 as printed, for replicas that divide machines: max(0, 1 - N C(N-m,k-m) / (m C(N,k)))."""
    _check(machines, replicas)
    _check_lost(machines, lost)
    if machines % replicas:
        raise UserError(f"{replicas} does not divide {machines}", where="replicas",
                        remedy="Corollary 1 is for replicas that divide the machines; use the exact form")
    if lost < replicas:
        return 1.0
    fatal = machines * math.comb(machines - replicas, lost - replicas)
    return max(0.0, 1 - fatal / (replicas * math.comb(machines, lost)))


def theorem_1_gap(machines: int, replicas: int) -> tuple[int, int]:
    """(fatal sets of Algorithm 1, the fewest that any placement can have: ceil(N / m)); they part by <= 2m - 3."""
    return len(place(machines, replicas).fatal_sets()), -(-machines // replicas)


def beyond_most(machines: int, group: int, most: int, lost: int) -> float:
    """Probability that no group of `group` machines has more than `most` among `lost` machines lost at once.

    Source: [x^k] (sum over i <= most of C(group, i) x^i)^(N/group) / C(N, k): ECCheck with most = parity nodes, REFT's
    sharding groups with most = 1. Machines that fill no group keep their state elsewhere, and count as harmless.
    Raises UserError.
    """
    _check_lost(machines, lost)
    if not 1 <= group <= machines:
        raise UserError(f"groups of {group} do not fit {machines} machines", where="group", remedy="give fewer")
    one = [math.comb(group, i) for i in range(min(most, group, lost) + 1)]
    rest = [math.comb(machines % group, i) for i in range(min(machines % group, lost) + 1)]
    ways = _times(_power(one, machines // group, lost), rest, lost)
    return ways[lost] / math.comb(machines, lost) if lost < len(ways) else 0.0


def _check_lost(machines: int, lost: int) -> None:
    if not 0 <= lost <= machines:
        raise UserError(f"{lost} of {machines} machines cannot be lost", where="simultaneous",
                        remedy=f"give a number from 0 to {machines}")
