"""`flowcheck plan goodput`: share of effective training time under failures, per system, and what it costs a day.

FlowCheck's Figure 17 (failures per day against effective time) and Figure 12 (intervals) for any cluster. Money is
what servers cost while they do not train, and what checkpoint nodes cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowcheck.plan.answers.answer import Answer, Grid, Inputs, Plot, Result, Series, Value, shown
from flowcheck.plan.goodput.cluster import DAY, Cluster
from flowcheck.plan.goodput.renewal import best_interval, daly_interval, effective_share, young_interval
from flowcheck.plan.goodput.simulation import CONFIDENCE, Bursts, Estimate, run
from flowcheck.plan.goodput.systems import System, by_name, systems

__all__ = ["FAILURES", "Row", "Simulation", "answer", "dollars", "evaluate"]

FAILURES = tuple(range(1, 9))  # a day
HOURS = 24
MISSING = (
    "Figure 12 needs CPR's interval model, which the paper does not print: the intervals here are sqrt(N f / 2 o) of "
    "the just-in-time paper, Daly's and the exact one. Figure 17 needs iteration times that the paper takes from "
    "Calculon and does not print: --iteration is an input."
)
TAKEN = (
    "What a system takes from the trainers besides time is not priced: network and host memory for copies in memory, "
    "interception of all device calls for jit-transparent, checkpoint code in the job for all but flowcheck."
)


@dataclass(frozen=True)
class Simulation:
    """What to simulate: how many failures per system, from which seed, and failures that come together."""

    failures: int = 400
    seed: int = 1
    bursts: Bursts = field(default_factory=Bursts)


@dataclass(frozen=True)
class Row:
    """One system: its effective share, and dollars a day."""

    system: System
    share: float
    lost_dollars: float
    node_dollars: float

    @property
    def dollars(self) -> float:
        return self.lost_dollars + self.node_dollars


def dollars(cluster: Cluster, system: System, share: float) -> tuple[float, float]:
    """(servers that do not train, checkpoint nodes), dollars a day.

    FlowCheck's 5,760 $ are 192 servers x 30 $/h x 2 failures x 0.5 h; its 526 $ are 16 nodes x 1.37 $/h x 24 h.
    """
    lost = cluster.servers * cluster.prices.server_price * HOURS * (1 - share)
    return lost, system.nodes * cluster.prices.node_price * HOURS


def evaluate(cluster: Cluster, interval: float | None = None, names: Sequence[str] = ()) -> list[Row]:
    """Every system (or those named) on this cluster. Raises UserError."""
    rows = []
    for system in by_name(systems(cluster, interval), names):
        share = effective_share(system.rhythm, cluster.rate)
        rows.append(Row(system, share, *dollars(cluster, system, share)))
    return rows


def answer(
    cluster: Cluster, inputs: Inputs, interval: float | None = None, names: Sequence[str] = (),
    simulation: Simulation | None = None,
) -> Answer:
    """All of it. `good`: every simulation without bursts has its closed form in its confidence interval."""
    rows = evaluate(cluster, interval, names)
    per_day = {count: evaluate(cluster.with_failures(count), interval, names) for count in FAILURES}
    grids = [_systems(rows), _failures(rows, per_day), _intervals(cluster)]
    notes = [TAKEN, MISSING, *_rests(cluster, rows)]
    good = True
    if simulation is not None:
        found = [(row, run(row.system, cluster, simulation.failures, simulation.seed, simulation.bursts))
                 for row in rows]
        grids.append(_simulated(found, simulation.bursts))
        good = simulation.bursts.any or all(estimate.holds(row.share) for row, estimate in found)
    best = max(rows, key=lambda row: row.share)
    cheapest = min(rows, key=lambda row: row.dollars)
    results = [
        Result("most effective", best.system.name, "", f"{100 * best.share:.2f} % of the time trains"),
        Result("cheapest a day", cheapest.system.name, "", f"{shown(round(cheapest.dollars))} $ a day"),
    ]
    return Answer(
        "goodput", f"With {shown(cluster.failures.failures_per_day)} failures a day, how much of the time is training, "
        "and what does the rest cost?",
        inputs, results, grids, _verdict(rows, good), good, notes, _plots(rows, per_day),
    )


def _verdict(rows: Sequence[Row], good: bool) -> str:
    if not good:
        return "A closed form lies outside its simulation's confidence interval: one of the two is wrong. Report it."
    best = max(rows, key=lambda row: row.share)
    ours = next((row for row in rows if row.system.name == "flowcheck"), None)
    if ours is None or len(rows) == 1:
        return f"{best.system.name} trains {100 * best.share:.2f} % of the time."
    others = [row for row in rows if row is not ours]
    other, cheapest = max(others, key=lambda row: row.share), min(others, key=lambda row: row.dollars)
    apart = (
        f"{ours.dollars - cheapest.dollars:,.0f} $ a day more" if ours.dollars > cheapest.dollars
        else f"{cheapest.dollars - ours.dollars:,.0f} $ a day less"
    )
    return (
        f"flowcheck trains {100 * ours.share:.2f} % of the time, {other.system.name} {100 * other.share:.2f} %; "
        f"it costs {apart} than {cheapest.system.name}, the cheapest other."
    )


def _rests(cluster: Cluster, rows: Sequence[Row]) -> list[str]:
    """Servers that fill no group: nothing is known of where their copies lie. Gemini places them by itself."""
    found = [(row.system.name, cluster.servers % row.system.group) for row in rows
             if not row.system.name.startswith("gemini")]
    return [f"{rest} servers fill no group of {name}, and count as if their copies were safe"
            for name, rest in found if rest]


# -- tables and plots --------------------------------------------------------------------------------------------------


def _percent(share: float) -> float:
    return round(100 * share, 4)


def _systems(rows: Sequence[Row]) -> Grid:
    columns = ["system", "every s", "stall s", "lag s", "restart s", "tier lost", "effective %", "hours lost a day",
               "$ lost a day", "$ nodes a day", "interval by"]
    table: list[list[Value]] = []
    for row in rows:
        rhythm = row.system.rhythm
        table.append([
            row.system.name, round(rhythm.work, 3), round(rhythm.stall, 3), round(rhythm.lag, 3),
            round(rhythm.restart, 3), rhythm.lost, _percent(row.share), round(HOURS * (1 - row.share), 4),
            round(row.lost_dollars, 2), round(row.node_dollars, 2), row.system.why,
        ])
    return Grid("systems", "Each system at its own interval", columns, table,
                "renewal.py: exact for Poisson failures; systems.py has each system's paper")


def _failures(rows: Sequence[Row], per_day: dict[int, list[Row]]) -> Grid:
    columns = ["effective %", *(f"{count}/day" for count in FAILURES)]
    table: list[list[Value]] = [[row.system.name, *(_percent(per_day[count][at].share) for count in FAILURES)]
                                for at, row in enumerate(rows)]
    return Grid("failures", "By failures a day", columns, table, "FlowCheck, Figure 17, for this cluster")


def _intervals(cluster: Cluster) -> Grid:
    stall = cluster.state / cluster.speeds.storage
    table: list[list[Value]] = []
    for count in FAILURES:
        rate = count / DAY
        exact = best_interval(stall, rate)
        table.append([count, round(young_interval(stall, rate), 1), round(daly_interval(stall, rate), 1),
                      round(exact, 1), round(exact / cluster.job.iteration, 1)])
    return Grid("intervals", f"Best interval of storage, with {shown(round(stall, 1))} s of stall per checkpoint",
                ["failures/day", "Young s", "Daly s", "exact s", "iterations"], table,
                "FlowCheck, Figure 12, by sqrt(N f / 2 o) of just-in-time (Young), Daly eq. 37, and exactly")


def _simulated(found: Sequence[tuple[Row, Estimate]], bursts: Bursts) -> Grid:
    table: list[list[Value]] = []
    for row, estimate in found:
        word = "" if bursts.any else "agrees" if estimate.holds(row.share) else "DIFFERS"
        table.append([row.system.name, _percent(row.share), _percent(estimate.share), _percent(estimate.low),
                      _percent(estimate.high), estimate.failures, estimate.lost, word])
    what = "with failures that come together; the closed form is without them" if bursts.any else "the same assumptions"
    return Grid("simulated", f"Simulated, event by event: {what}",
                ["system", "closed %", "simulated %", "from", "to", "failures", "tier lost", "closed form"], table,
                f"simulation.py; {100 * CONFIDENCE:g} % confidence")


def _plots(rows: Sequence[Row], per_day: dict[int, list[Row]]) -> list[Plot]:
    names = [row.system.name for row in rows]
    lines = [Series(name, FAILURES, [100 * per_day[count][at].share for count in FAILURES])
             for at, name in enumerate(names)]
    lost = [Series(line.label, FAILURES, [100 - share for share in line.y if share is not None]) for line in lines]
    money = [Series("servers that do not train", names, [row.lost_dollars for row in rows]),
             Series("checkpoint nodes", names, [row.node_dollars for row in rows])]
    return [Plot("Effective training time", "failures a day", "%", lines),
            Plot("Time lost", "failures a day", "%", lost, log_y=True),
            Plot("What failures and nodes cost", "", "$ a day", money, kind="stacked")]
