"""How often an iteration stays incomplete: the law, and losses that are drawn copy by copy. A table, and a picture.

    .venv/bin/python -P benchmarks/loss_rates.py [--out docs/understand/loss.svg]

Rings of 4 and 8 with 2 to 6 mirrored connections. Every iteration has so many packets that of 400 about 60 stay
incomplete; the table says how many, between which numbers the law has 99 % of them, and what happens where as many
copies are lost in runs of 50, of each connection by itself and of all at once. Where that takes more losses than can be
drawn it says how many copies a wire would have to carry. The tests in
tests/flowcheck/plan/traffic/test_loss_draws.py are of the same.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np

from flowcheck.plan.answers.answer import Plot, Series
from flowcheck.plan.answers.plots import save
from flowcheck.plan.traffic import loss_law as law
from flowcheck.plan.traffic.loss_draws import Bursts, chunk_views, draw

EXPECTED, ITERATIONS, RUN = 60, 400, 50
LOSSES = (1e-1, 3e-2, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
PACKETS = 16e6  # of the picture: the paper's example
MOST_DRAWN = 2e6  # losses of a connection; loss_draws.py takes more


def packets_for(copies: law.Copies, loss: float, ranks: int) -> int:
    """Of an iteration, so that EXPECTED of ITERATIONS stay incomplete."""
    per_packet = math.fsum(-share * math.log1p(-(loss**count)) for count, share in copies.shares.items())
    return max(1, round(-math.log1p(-EXPECTED / ITERATIONS) / per_packet / ranks)) * ranks


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--out", type=Path)
    out = asked.parse_args().out
    series = []
    print("ring edges   loss   packets  law, 99 % found  runs together")
    for ranks in (4, 8):
        for edges in range(2, min(6, ranks) + 1):
            copies, views = law.edge_copies(ranks, dict.fromkeys(range(edges), 1)), chunk_views(ranks, edges)
            measured: dict[float, float] = {}
            for loss in LOSSES:
                packets = packets_for(copies, loss, ranks)
                head = f"{ranks:4} {edges:5} {loss:6g} {packets:9.3g}"
                if packets < 40 * ranks:
                    continue
                if packets / ranks * loss * ITERATIONS > MOST_DRAWN:
                    print(f"{head} needs {packets * ITERATIONS * edges:.2g} copies")
                    continue
                low, high = law.binomial_interval(ITERATIONS, law.incomplete(copies, packets, loss))
                found, runs, together = (
                    draw(views, packets, loss, ITERATIONS, np.random.default_rng(22), bursts)
                    for bursts in (None, Bursts(RUN), Bursts(RUN, shared=True))
                )
                print(f"{head} {f'{low} to {high}':>10} {found:5} {runs:5} {together:8}", flush=True)
                # the rate per packet, at the paper's number of packets
                measured[loss] = -math.expm1(math.log1p(-found / ITERATIONS) * PACKETS / packets)
            if ranks == 8:
                xs = [10 ** (-exponent / 4) for exponent in range(4, 25)]
                series.append(Series(f"{edges} connections, law", xs, [law.incomplete(copies, PACKETS, x) for x in xs],
                                     dashed=True))
                series.append(Series(f"{edges} connections, drawn", list(measured), list(measured.values())))
    if out is not None:
        save([Plot("Incomplete iterations, ring of 8, 16e6 packets", "loss of a copy", "probability", series,
                   log_x=True, log_y=True)], out)


if __name__ == "__main__":
    main()
