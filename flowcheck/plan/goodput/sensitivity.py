"""What would change the answer: one input at a time, changed by what a buyer could change or be wrong about."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowcheck.plan.answers.answer import Grid, Value
from flowcheck.plan.goodput.cluster import DAY, Cluster
from flowcheck.plan.goodput.goodput import Row, evaluate

__all__ = ["CHANGES", "SHOWN", "break_even", "break_even_lines", "sensitivity"]

Change = Callable[[Cluster], Cluster]
#: In words, and how it changes the cluster.
CHANGES: tuple[tuple[str, Change], ...] = (
    ("as given", lambda c: c),
    ("half the failures", lambda c: c.but(failures_per_day=c.failures.failures_per_day / 2)),
    ("twice the failures", lambda c: c.but(failures_per_day=2 * c.failures.failures_per_day)),
    ("standby servers: nothing to replace", lambda c: c.but(replacement=0.0)),
    ("storage four times as fast", lambda c: c.but(storage=4 * c.speeds.storage)),
    ("no failure takes a server", lambda c: c.but(hardware=0.0)),
    ("two servers per failure", lambda c: c.but(simultaneous=min(2, c.servers))),
    ("no network to spare: a tenth", lambda c: c.but(spare=c.speeds.spare / 10)),
    ("three times the checkpoint nodes",
     lambda c: c.but(nodes=3 * c.flowcheck.nodes, node_failures=3 * c.flowcheck.node_failures)),
    ("checkpoint nodes at ten times the price", lambda c: c.but(node_price=10 * c.prices.node_price)),
    ("one iteration in a hundred incomplete", lambda c: c.but(incomplete=0.01)),
)


SELDOM = 0.001  # failures a day; less is as good as none
MOST = 100  # failures a day, where a break-even is looked for
#: Whose dollars stand in the table; gemini is the first of its strategies.
SHOWN = ("storage", "checkfreq", "gemini", "eccheck", "jit-user", "jit-transparent")


def _of(rows: Sequence[Row], name: str) -> Row:
    return next(row for row in rows if row.system.name.startswith(name))


def sensitivity(cluster: Cluster) -> Grid:
    """FlowCheck under each change, and what it and others then cost a day."""
    table: list[list[Value]] = []
    for words, change in CHANGES:
        rows = evaluate(change(cluster))
        ours = _of(rows, "flowcheck")
        table.append([words, round(100 * ours.share, 2), round(ours.dollars),
                      *(round(_of(rows, name).dollars) for name in SHOWN)])
    return Grid(
        "sensitivity", "What would change it",
        ["change", "flowcheck %", "flowcheck $", *(f"{name} $" for name in SHOWN)], table,
        "$ a day; each row changes one input and keeps the others, and intervals are the best again",
    )


def break_even(cluster: Cluster, other: str) -> float | None:
    """Failures a day above which FlowCheck, with its nodes, costs less than `other`; None if never up to MOST.

    By halving below the first of 0.01, 0.02, 0.04, ... at which it does.
    """

    def apart(per_day: float) -> float:
        rows = evaluate(cluster.with_failures(per_day), names=("flowcheck", other))
        return rows[0].dollars - rows[1].dollars

    low, high = 0.0, 0.01
    while apart(high) > 0:
        low, high = high, 2 * high
        if high > MOST or cluster.job.iteration * high / DAY >= 0.5:
            return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if apart(middle) > 0 else (low, middle)
    return high


def break_even_lines(cluster: Cluster) -> list[str]:
    """One sentence for each other system: from how many failures a day on FlowCheck costs less."""
    lines = []
    for row in evaluate(cluster):
        name = row.system.name
        if name != "flowcheck":
            least = break_even(cluster, name)
            if least is None:
                lines.append(f"flowcheck never costs less than {name}, up to {MOST} failures a day")
            elif least < SELDOM:
                lines.append(f"flowcheck costs less than {name} at any number of failures")
            else:
                lines.append(f"flowcheck costs less than {name} from {least:.3g} failures a day on")
    return lines
