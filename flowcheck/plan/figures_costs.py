"""The printed numbers on costs and loss: the just-in-time paper's, and FlowCheck's own."""

from __future__ import annotations

import random
from collections.abc import Iterator

from flowcheck.plan.figures import Chance, Figure, chance
from flowcheck.plan.jit_costs import JitCase, gpu_dollars, wasted_share
from flowcheck.plan.loss_law import edge_copies, equation_2, incomplete, ring_copies
from flowcheck.plan.renewal import Rhythm, effective_share
from flowcheck.plan.simulation import Estimate, run_rhythm

__all__ = ["flowcheck", "just_in_time"]

# Table 8's failures, and BERT-L-PT's stall and restart in seconds.
FAILURES, STALL, RESTART = 2.0, 5.0, 9.9
# o_jit of BERT-L-PT: Table 3's percent taken as percent, so that N = 4 gives 0.0073 %. Table 3 itself was not at hand.
STEADY = 7.2e-5
SIMULATED = 800  # failures


def _wasted(estimate: Estimate) -> Chance:
    """Percent of the time, from an estimate of the useful share."""
    return Chance(*(100 * (1 - share) for share in (estimate.share, estimate.high, estimate.low)))


def just_in_time() -> Iterator[Figure]:
    """Section 4 of the papers' numbers: intervals, wasted shares, Table 8."""
    for gpus, per_hour, percent in ((4, 0.346, 0.096), (1024, 5.54, 1.53), (8192, 15.7, 4.5)):
        case = JitCase(gpus, FAILURES, STALL, RESTART)
        yield Figure(f"BERT-L-PT, N = {gpus}: c*, checkpoints per hour", None, 3600 * case.best_rate(),
                     why=f"sqrt(N f / 2 o); {per_hour} by hand")
        rhythm = Rhythm(1 / case.best_rate(), STALL, restart=RESTART)
        simulated = run_rhythm(rhythm, case.rate, SIMULATED, seed=gpus)
        exact = 100 * (1 - effective_share(rhythm, case.rate))
        yield Figure(f"BERT-L-PT, N = {gpus}: wasted %, periodic", percent, 100 * wasted_share(case.periodic()),
                     exact, _wasted(simulated),
                     "" if gpus < 8192 else "the paper's formula is of first order; exactly it is as printed", 0.02)
    for gpus, printed, right in ((4, 0.75, 0.0073), (8192, 0.94, 0.20)):
        case = JitCase(gpus, FAILURES, STALL, RESTART, steady=STEADY)
        yield Figure(f"Table 8, BERT-L-PT, N = {gpus}: wasted %, user level", printed,
                     100 * wasted_share(case.user_level()),
                     why=f"takes Table 3's percent as a fraction; as percent it is {right}")
        wrong = JitCase(gpus, FAILURES, STALL, RESTART, steady=100 * STEADY)
        yield Figure(f"the same with the percent as a fraction, N = {gpus}", printed,
                     100 * wasted_share(wrong.user_level()), why="so the printed value comes about", tolerance=0.06)
    # GPT2-8B: N = 8192 fixes r + m / 2, from which the two others follow.
    waits = 0.0057 / (1 - 0.0057) / JitCase(8192, FAILURES, 1, 0).rate
    for gpus, printed, tolerance in ((4, 0.0003, 0.2), (1024, 0.07, 0.05), (8192, 0.57, 0.01)):
        case = JitCase(gpus, FAILURES, 1e-9, waits)
        yield Figure(f"Table 8, GPT2-8B, N = {gpus}: wasted %, user level", printed,
                     100 * wasted_share(case.user_level()),
                     why=f"with r + m / 2 = {waits:.1f} s, which N = 8192 asks for, and o_jit = 0", tolerance=tolerance)
    yield Figure("Table 8, BERT-B-FT, user level, wasted %", 0.23, why="missing input: follows from nothing printed")
    yield Figure("failures cost a month, 1000 GPUs, $", 30_000.0, gpu_dollars(1000, 1, 15, 4, 30),
                 why="1 failure a day per 1000 GPUs, 30 days, 1 $ per GPU and failure; that these are 15 minutes at "
                 "4 $ an hour was not at hand")
    yield Figure("failures cost a month, 10,000 GPUs, $", 3_000_000.0, gpu_dollars(10_000, 10, 15, 4, 30),
                 why="the same: ten times the GPUs, ten times the failures")
    yield Figure("recovery: 10-55 s user level, 2-16 s transient, 9-38 s hard", "10-55 / 2-16 / 9-38",
                 why="missing input: time to make communicators, measured there (1-15 s)")


# -- FlowCheck ---------------------------------------------------------------------------------------------------------


def _stays_incomplete(dice: random.Random, edges: int, ranks: int, packets: int, loss: float) -> bool:
    """One iteration, packet by packet: chunk c of each ring step is reduced on all edges but the one before it."""
    for packet in range(packets):
        chunk = packet % ranks
        copies = sum((edge + 1) % ranks != chunk for edge in range(edges))
        if all(dice.random() < loss for _ in range(copies)):
            return True
    return False


def flowcheck() -> Iterator[Figure]:
    """Section 5: loss, cost, rates."""
    for mirrors, printed, every in ((2, 4e-3, 1000.0), (3, 6e-12, 1e12)):
        rate = equation_2(8, mirrors, 16e6, 1e-9)
        yield Figure(f"eq. (2), N = 8, K = 16e6, p = 1e-9, M = {mirrors}: incomplete", printed, rate,
                     incomplete(edge_copies(8, dict.fromkeys(range(mirrors), 1)), 16e6, 1e-9))
        yield Figure(f"the same: one of so many iterations, M = {mirrors}", every, 1 / rate,
                     why="the paper's text and its formula differ")
    yield Figure("eq. (2), N = 8, K = 160, p = 0.05, M = 2: incomplete", None, equation_2(8, 2, 160, 0.05),
                 simulated=chance(lambda dice: _stays_incomplete(dice, 2, 8, 160, 0.05), 4000))
    yield Figure("eq. (2), N = 8, K = 160, p = 0.2, M = 4: incomplete", None, equation_2(8, 4, 160, 0.2),
                 simulated=chance(lambda dice: _stays_incomplete(dice, 4, 8, 160, 0.2), 2000))
    copies = ring_copies(8, (0, 2, 4), "both")
    yield Figure("fewest copies of a packet, 3 GPUs apart mirrored both ways (6 edges)", None, float(copies.least),
                 why="eq. (2) with M = 3 counts 3 edges; the exact law 6, each chunk missing on at most one")
    yield Figure("Figure 13: 3 nodes, unrecoverable below 1e-8", "< 1e-8", incomplete(copies, 16e6, 1e-9),
                 why="the exact law; 100 measured iterations cannot show it at 1e-9")
    yield Figure("175B on 1536 GPUs: $ a day without FlowCheck", 5760.0, 192 * 30 * 2 * 0.5,
                 why="192 servers x 30 $/h x 2 failures x 0.5 h")
    yield Figure("the same with FlowCheck: $ a day", 526.0, 16 * 1.37 * 24, why="16 nodes x 1.37 $/h x 24 h, no waste")
    yield Figure("three nodes per leaf on 24 leaves, as the text says: $ a day", 526.0, 72 * 1.37 * 24,
                 why="72 nodes, not 16")
    yield Figure("section 9: GB per data-parallel group of Llama2-7B, LL", 60.0, 7e9 * 4 * 2 / 1e9,
                 why="7e9 x 4 B x 2 in LL; printed as a round number", tolerance=0.08)
    yield Figure("the same in SIMPLE", 60.0, 7e9 * 4 / 1e9, why="SIMPLE has no flags: half of LL")
    yield Figure("Figure 12: intervals by CPR", "a curve",
                 why="missing input: CPR's interval model; `flowcheck plan goodput` takes sqrt(N f / 2 o)")
    yield Figure("Figure 16: iteration and gap times by Calculon", "bars",
                 why="missing input: Calculon's results; `flowcheck plan capacity` computes them from FLOPs and MFU")
    yield Figure("Figure 17: effective time by failures a day", "curves",
                 why="missing input: iteration times and stalls of the three scales; `flowcheck plan goodput`")
