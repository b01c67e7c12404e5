"""How often an iteration stays incomplete in a lab whose mirror loses copies, beside the law: a table, and a picture.

    .venv/bin/python -P benchmarks/lab_loss_rates.py [--iterations 150] [--out docs/understand/loss-lab.svg]    as root

Rings of 2 and 4 ranks, one and two mirrored ports, two rates each: so that of 150 iterations 30 and more are expected
to stay incomplete. Trainers, mirror and node are real; the cable to the node drops copies by a seed
(lab/losses.py). What the node misses is counted, and is what the log of the cable implies, iteration by
iteration. The law has the rate that was asked for, and the planner's number of packets, which is the wire's. The test
in tests/lab/test_loss_law.py is of the same.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from flowcheck.plan.answers.answer import Plot, Series
from flowcheck.plan.answers.plots import save
from flowcheck.plan.traffic import loss_law as law
from flowcheck.plan.traffic.wire_volume import Call, reduced_packets
from lab.losses import MTU, Counted, count_incomplete
from lab.shape import FabricConfig
from parser.chunk_layout import Protocol

#: Ranks, mirrored ports, losses of a copy.
CASES: list[tuple[int, tuple[int, ...], tuple[float, ...]]] = [
    (2, (0,), (0.0015, 0.003)), (2, (0, 1), (0.04, 0.06)), (4, (0,), (0.0025, 0.005)), (4, (0, 1), (0.08, 0.11)),
    (4, (0, 2), (0.12, 0.15)),
]


def planned(found: Counted, ranks: int, mirrored: tuple[int, ...]) -> tuple[law.Copies, int]:
    """(copies, packets of an iteration) as `flowcheck plan loss` has them."""
    positions = [found.rings[0].index(rank) for rank in mirrored]
    packets = sum(
        reduced_packets(Call(Protocol.LL, ranks, count, 4, "ring", len(found.rings), found.version), count, MTU)
        for count in found.calls
    )
    return law.ring_copies(ranks, positions, "both"), packets


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--iterations", type=int, default=150)
    asked.add_argument("--out", type=Path)
    options = asked.parse_args()
    series = []
    print("| ranks | mirrored | copies of a packet | packets | loss | iterations | the law, 99 % | incomplete |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks, mirrored, losses in CASES:
        rates: dict[float, float] = {}
        for loss in losses:
            with tempfile.TemporaryDirectory() as folder:
                config = FabricConfig("losslaw", ranks=ranks, mirrored=(mirrored,))
                found = count_incomplete(config, loss, options.iterations, Path(folder))
            assert found.incomplete == found.unseen, "the node misses other iterations than the log says"
            copies, packets = planned(found, ranks, mirrored)
            total, expected = len(found.judged), law.incomplete(copies, packets, loss)
            low, high = law.binomial_interval(total, expected)
            rates[loss] = len(found.incomplete) / total
            ports, seen = " and ".join(map(str, mirrored)), ", ".join(map(str, copies.shares))
            print(f"| {ranks} | {ports} | {seen} | {packets} | {loss:g} | {total} | {total * expected:.0f}, {low} to "
                  f"{high} | {len(found.incomplete)} |", flush=True)
            assert packets == found.packets, "the planner counts other packets than the wire has"
        xs = [min(losses) * 10 ** (step / 10) for step in range(-8, 9)]
        label = f"{ranks} ranks, port {ports}"
        law_at = [law.incomplete(copies, packets, min(x, 1.0)) for x in xs]
        series.append(Series(f"{label}: law", xs, law_at, dashed=True))
        series.append(Series(f"{label}: lab", list(rates), list(rates.values())))
    if options.out is not None:
        save([Plot("Incomplete iterations of the lab, 180 packets", "loss of a copy", "share of the iterations", series,
                   log_x=True, log_y=True)], options.out)


if __name__ == "__main__":
    main()
