"""Rows of a benchmark, and how they are taken.

This machine is shared and its clock wanders, so absolute figures move by 15 % from run to run. What counts is the
ratio inside one round: every round runs all contenders of a comparison, one after the other, each second round
in the opposite order, and the row holds the median over the rounds with the 10th and 90th percentile.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

__all__ = ["Row", "Samples", "alternate", "print_rows", "quantile"]

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Row:
    """One line of `flowcheck bench NAME --json`.

    value and limit: medians, in `unit`. ratio: median over the rounds of value / limit, between p10 and p90.
    target: what the ratio should reach, or None. With a unit of time ("ns/packet") smaller is better.
    """

    name: str
    value: float
    unit: str
    limit: float
    ratio: float
    target: float | None
    p10: float
    p90: float
    rounds: int

    @classmethod
    def of(cls, name: str, unit: str, values: list[float], limits: list[float], target: float | None) -> Row:
        """From the samples of alternating rounds: values[i] and limits[i] are of the same round."""
        ratios = sorted(value / limit for value, limit in zip(values, limits, strict=True))
        return cls(
            name=name,
            value=round(statistics.median(values), 3),
            unit=unit,
            limit=round(statistics.median(limits), 3),
            ratio=round(statistics.median(ratios), 4),
            target=target,
            p10=round(quantile(ratios, 0.1), 4),
            p90=round(quantile(ratios, 0.9), 4),
            rounds=len(ratios),
        )

    @property
    def less_is_better(self) -> bool:
        return self.unit.startswith(("ns/", "ms/"))

    @property
    def reached(self) -> bool | None:
        """None without a target."""
        if self.target is None:
            return None
        return self.ratio <= self.target if self.less_is_better else self.ratio >= self.target

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def quantile(ordered: list[float], q: float) -> float:
    """Linear interpolation in a sorted list, as numpy's default."""
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def alternate(contenders: Mapping[str, Callable[[], float]], rounds: int) -> Samples:
    """Seconds of every contender in every round. A contender prepares itself, times its work and returns that.

    One more round comes first and is thrown away: it faults pages in and warms the clock.
    """
    samples: Samples = {name: [] for name in contenders}
    for number in range(rounds + 1):
        order: Iterable[str] = contenders if number % 2 else reversed(list(contenders))
        for name in order:
            seconds = contenders[name]()
            if number:
                samples[name].append(seconds)
    return samples


def print_rows(rows: list[Row], console: Console) -> None:
    """The rows beside their limits."""
    table = Table(box=None, pad_edge=False)
    for column in ("name", "value", "unit", "limit", "ratio", "p10..p90", "target", ""):
        table.add_column(column, justify="left" if column in ("name", "unit", "") else "right", no_wrap=True)
    for row in rows:
        sign = "<=" if row.less_is_better else ">="
        table.add_row(
            row.name,
            f"{row.value:.2f}",
            row.unit,
            f"{row.limit:.2f}",
            f"{row.ratio:.3f}",
            f"{row.p10:.3f}..{row.p90:.3f}",
            "" if row.target is None else f"{sign} {row.target:g}",
            {None: "", True: "reached", False: "missed"}[row.reached],
        )
    console.print(table)
