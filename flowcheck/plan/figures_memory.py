"""The printed numbers of the papers on checkpoints in memory: Gemini, ECCheck, REFT."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from flowcheck.checkpoint.coding.holders import Placement, place, ring
from flowcheck.checkpoint.coding.shape import Shape, data_nodes
from flowcheck.plan.coding import (
    cluster_survival,
    coded_survival,
    counted_volume,
    printed_volume,
    replicated_survival,
)
from flowcheck.plan.figures import Chance, Figure, chance
from flowcheck.plan.partition import Link, partition
from flowcheck.plan.placement import corollary_1, survival, theorem_1_gap, union_bound
from flowcheck.plan.renewal import Rhythm, effective_share
from flowcheck.plan.survival import days_at, node_survival, unprotected_survival, with_parity_survival

__all__ = ["eccheck", "gemini", "reft"]

DAY = 86400.0
TRIES = 20000


# -- Gemini ------------------------------------------------------------------------------------------------------------


def _tried(placement: Placement, lost: int) -> Chance:
    machines = range(placement.machines)
    return chance(lambda dice: placement.survives(dice.sample(machines, lost)), TRIES, seed=lost)


def gemini() -> Iterator[Figure]:
    """Section 1 of the papers' numbers: waste, placement, probability, effective time."""
    minutes = 530e9 * 12 * 8 / 20e9 / 60
    yield Figure("a checkpoint of MT-NLG over 20 Gb/s, minutes", 42, minutes, why="530e9 x 12 B; printed rounded")
    yield Figure("wasted per failure at f = 1 / t_ckpt, minutes", 105, 2.5 * minutes, why="eq. 1; 2.5 x 42 is printed")
    group, circle = place(16, 2), ring(16, 2)
    for lost, printed in ((2, 0.9333), (3, 0.8), (4, 0.6)):
        bound, exact = corollary_1(16, 2, lost), survival(group, lost)
        yield Figure(f"group, N = 16, m = 2, k = {lost}", printed, bound, exact, _tried(group, lost),
                     "" if lost < 4 else "Corollary 1 is a union bound, exact for k < 2m")
    for lost, printed in ((2, 0.8667), (3, 0.6), (4, 0.2)):
        bound, exact = union_bound(circle, lost), survival(circle, lost)
        yield Figure(f"ring, N = 16, m = 2, k = {lost}", printed, bound, exact, _tried(circle, lost),
                     "" if lost < 3 else "a union bound; exact: N/(N-k) C(N-k,k) / C(N,k)")
    yield Figure("ring lower than group at k = 3, %", 25.0,
                 100 * (1 - union_bound(circle, 3) / corollary_1(16, 2, 3)),
                 100 * (1 - survival(circle, 3) / survival(group, 3)), why="printed is the bound against the bound")
    shapes = [(n, m) for m in (2, 3, 4) for n in range(m, 13)]
    tight = sum(a - b == 2 * m - 3 for n, m in shapes if n % m for a, b in (theorem_1_gap(n, m),))
    worst = max((a - b) / (2 * m - 3) for n, m in shapes for a, b in (theorem_1_gap(n, m),))
    yield Figure("Theorem 1: fatal sets above the fewest, of 2m - 3, N <= 12, m <= 4", 1.0, worst,
                 why=f"counted over {len(shapes)} shapes; reached by {tight}, where r = 2m - 1")
    link, spans = Link(12.5e9, start=1e-3), [0.2] * 10
    sent = partition(spans, 10_000_000_000, 1, link)
    yield Figure("Algorithm 2: largest piece of 128 MB in 4 parts, MB", 32, max(piece.size for piece in sent) / 1e6)
    yield Figure("Algorithm 2, m = 2: remote copies that are sent", 2, sum(piece.size for piece in sent) / 1e10,
                 why="printed, copies are compared with m - 1 before they are counted: m are planned, not m - 1")
    for minutes_away, words in ((4, "fastest"), (5.5, "middle"), (7, "slowest")):
        rhythm = Rhythm(60.0, lag=30.0, restart=15 + 60 * minutes_away + 240)
        yield Figure(f"Figure 15: effective % at 1000 machines, 1.5 % a day, {words} replacement", 91.0,
                     100 * (1 - 15 / DAY * (rhythm.restart + 60)), 100 * effective_share(rhythm, 15 / DAY),
                     why="15 s detection, 4 to 7 min replacement, 4 min restart are printed; iteration (here 60 s) and "
                     "t_ckpt (30 s) are not", tolerance=0.02)
    yield Figure("Figure 16: blocking +10.1 %, interleaved without pipeline +3.5 %, Gemini 0", "10.1 / 3.5 / 0",
                 why="missing input: the idle spans of an iteration (profiled)")
    yield Figure("section 7: recovered from a peer in < 3 s; torch.save of a frozen version 162 s", "3 / 162",
                 why="missing input: the bytes per machine of that run and its host's speed")


# -- ECCheck -----------------------------------------------------------------------------------------------------------


def _shapes() -> list[Shape]:
    return [
        Shape(nodes, data, workers)
        for nodes in range(2, 13) for workers in range(1, 9) for data in range(1, nodes) if nodes * workers % data == 0
    ]


def _survive(dice: random.Random, p: float, coded: bool) -> bool:
    gone = [dice.random() < p for _ in range(4)]
    return sum(gone) <= 2 if coded else not (gone[0] and gone[1]) and not (gone[2] and gone[3])


def _printed_base3(p: float, nodes: int) -> float:
    """sum_i ((n/2)/i)^i 2^i p^i (1-p)^(n-i), as printed; the term i = 0 read as 1."""
    half = nodes // 2
    return math.fsum(
        ((half / i) ** i if i else 1) * 2**i * p**i * (1 - p) ** (nodes - i) for i in range(half + 1)
    )


def eccheck() -> Iterator[Figure]:
    """Section 2: volume by the paper's rules, and survival."""
    shapes = _shapes()
    more = [shape for shape in shapes if counted_volume(shape) > printed_volume(shape)]
    yield Figure(f"shapes (n <= 12, g <= 8) whose volume is above m s W, of {len(shapes)}", 0.0, float(len(more)),
                 why="m s W holds where every data group contains a whole node; else add s sum_j (g - overlap_j)")
    odd = Shape(5, 4, 4)
    yield Figure("volume of n = 5, k = 4, g = 4, in packets", float(printed_volume(odd)), float(counted_volume(odd)),
                 why="data groups of 5 workers lie across nodes of 4")
    different = sum(len(set(data_nodes(shape))) == shape.data for shape in shapes)
    yield Figure("shapes in which the data nodes are different nodes", float(len(shapes)), float(different))
    p, q = 0.1, 0.01
    yield Figure("survival of 4 nodes, replicated, p = 0.1", None, replicated_survival(p),
                 simulated=chance(lambda dice: _survive(dice, p, False), TRIES))
    yield Figure("survival of 4 nodes, coded, p = 0.1", None, coded_survival(p),
                 simulated=chance(lambda dice: _survive(dice, p, True), TRIES))
    yield Figure("coded above replicated, p = 0.01: 2 p^2 (1-p)^2", 2 * q**2 * (1 - q) ** 2,
                 coded_survival(q) - replicated_survival(q))
    yield Figure("500 groups, replicated, p = 0.01", 0.905, cluster_survival(replicated_survival(q), 500))
    yield Figure("500 groups, coded, p = 0.01", 0.998, cluster_survival(coded_survival(q), 500))
    yield Figure("general base3, n = 12, p = 0.1", _printed_base3(p, 12), replicated_survival(p, 12),
                 why="the printed factor ((n/2)/i)^i is a misprint of C(n/2, i): the ways would not add up")
    yield Figure("1.6x replication's checkpoint time, 5.2x faster than storage, recovery 13.9x", "1.6 / 5.2 / 13.9",
                 why="missing input: bandwidth of network and storage, and of the encoder, of those runs")
    yield Figure("broadcast pairs and keys of GPT2-345M, kB, beside 6.5 GB", "52", why="missing input: its state_dict")


# -- REFT --------------------------------------------------------------------------------------------------------------

NODES, GROUP, RATE, SOFTWARE = 3072, 6, 1e-4, 1e-5


def _groups_survive(dice: random.Random, days: float, shape: float) -> bool:
    p = 1 - node_survival(days, RATE, shape)
    return all(sum(dice.random() < p for _ in range(GROUP)) <= 1 for _ in range(NODES // GROUP))


def reft() -> Iterator[Figure]:
    """Section 3: Figure 8, days until survival is 0.9; every device counts as a node, k = 3072."""

    def days(shape: float, software: float = 0.0) -> float:
        return days_at(lambda t: with_parity_survival(t, NODES, GROUP, RATE, shape, software), 0.9)

    at = days(1.3)
    yield Figure("Figure 8, c = 1.3, with REFT, days at 0.9", 16.22, at, why="with P_re = 1: no software failures")
    yield Figure("the same with P_re = exp(-1e-5 t^c), days", 16.22, days(1.3, SOFTWARE),
                 why="what the text asks for; it was not what was drawn")
    yield Figure("survival of that cluster after those 16.18 days", 0.9,
                 with_parity_survival(at, NODES, GROUP, RATE, 1.3),
                 simulated=chance(lambda dice: _groups_survive(dice, at, 1.3), 600))
    for shape in (1.0, 1.5, 2.0):
        yield Figure(f"Figure 8, c = {shape}, with REFT, days at 0.9", None, days(shape))
    yield Figure("Figure 8, c = 1.3, without REFT, days: hardware", 0.5,
                 days_at(lambda t: unprotected_survival(t, NODES, RATE, 1.3), 0.9), why="read off a curve")
    yield Figure("the same: hardware and software", 0.5,
                 days_at(lambda t: unprotected_survival(t, NODES, RATE, 1.3, SOFTWARE), 0.9), why="read off a curve")
    yield Figure("HAS <= 3 % overhead, 17 % better than asynchronous; ARC 1 %, AOR 0.6 %", "3 / 17 / 1 / 0.6",
                 why="missing input: bubbles and device-to-host speed of those runs")
    yield Figure("load: 0.84 s ARC, 0.75 s AEC, 9.27 s NFS", "0.84 / 0.75 / 9.27",
                 why="missing input: bytes per node and network speed of those runs")
