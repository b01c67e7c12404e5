"""Replicas in other machines' memory: the probability that every state still has a holder.

Source: Gemini (SOSP'23), Corollary 1, which is a union bound; the exact forms here count the sets of
lost machines that take no holder set with them (each is a product of polynomials, one per block). Who keeps what, which
is Algorithm 1: flowcheck/checkpoint/coding/holders.py.

    survival(place(16, 2), k)       exact; union_bound(placement, k) what the paper prints
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flowcheck.checkpoint.coding.holders import CodeGroup, Placement
from flowcheck.errors import UserError

__all__ = ["beyond_most", "code_survival", "survival", "union_bound"]


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


def code_survival(groups: Sequence[CodeGroup], lost: int) -> float:
    """Probability that no code group has more than its parity among `lost` machines lost at once, any of them alike.

    Source: [x^k] of the product over groups of (sum over i <= parity of C(members, i) x^i) / C(N, k). Raises UserError.
    """
    machines, ways = sum(len(one.members) for one in groups), [1]
    _check_lost(machines, lost)
    for one in groups:
        ways = _times(ways, [math.comb(len(one.members), i) for i in range(min(one.parity, lost) + 1)], lost)
    return ways[lost] / math.comb(machines, lost) if lost < len(ways) else 0.0


def _check_lost(machines: int, lost: int) -> None:
    if not 0 <= lost <= machines:
        raise UserError(f"{lost} of {machines} machines cannot be lost", where="simultaneous",
                        remedy=f"give a number from 0 to {machines}")
