"""Rows of a benchmark, and how they are taken.

This machine is shared and its clock wanders, so absolute figures move by 15 % from run to run. What counts is the
ratio inside one round: every round runs all contenders of a comparison, one after the other, each second round
in the opposite order, and the row holds the median over the rounds with the 10th and 90th percentile.

A figure says little without where it was taken, and with which kernels: that is its Setting.
"""

from __future__ import annotations

import functools
import itertools
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby

from parser.machine import placing
from rich.console import Console
from rich.table import Table

from flowcheck.rebuild.calibration import NAMES, Way
from lab.bench.workload import aligned
from parser.chunk_layout import Protocol
from updater.choosing import processor

__all__ = [
    "Row", "Samples", "Setting", "alternate", "here", "on_threads", "page_kind", "print_rows", "quantile", "timed",
]

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Setting:
    """Where a row was taken, and with what.

    processor: its model, with family, model number and stepping. pages: of the memory in which packets or parameters
    lie. kernels: the instructions that were chosen, which FLOWCHECK_SIMD may lower. choices: what else was chosen, by
    name: how each protocol is placed.
    """

    processor: str
    pages: str
    kernels: str
    choices: Mapping[str, str]


def here(pages: str | None = None, **choices: str) -> Setting:
    """The setting of a bench in this process, as it is at the moment. pages: if not those of ordinary memory."""
    kernels, ways = placing()
    placed = {NAMES[protocol]: str(Way(*way)) for protocol, way in zip(Protocol, ways, strict=True)}
    return Setting(processor(), pages or _ordinary_pages(), kernels, {**placed, **choices})


@functools.cache
def _ordinary_pages() -> str:
    """What the kernel puts under large arrays: found out from one, too large to be memory the C library had kept."""
    probe = aligned(40 << 20)
    with open("/proc/self/smaps") as file:
        return page_kind(file, probe.ctypes.data + probe.size // 2)


def page_kind(smaps: Iterable[str], address: int) -> str:
    """Size of the pages at an address, from the lines of /proc/PID/smaps."""
    inside, page, huge = False, 0, 0
    for line in smaps:
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):
            low, _, high = key.partition("-")
            inside = int(low, 16) <= address < int(high, 16)
        elif inside and key == "KernelPageSize:":
            page = int(rest.split()[0])
        elif inside and key == "AnonHugePages:":
            huge = int(rest.split()[0])
    if not page:
        return "unknown"
    size = f"{page >> 10} MB" if page >= 1024 else f"{page} KB"
    return f"{size}, transparently 2 MB" if huge and page < 2048 else size


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
    setting: Setting

    @classmethod
    def of(
        cls, name: str, unit: str, values: list[float], limits: list[float], target: float | None,
        setting: Setting | None = None,
    ) -> Row:
        """From the samples of alternating rounds: values[i] and limits[i] are of the same round."""
        ratios = sorted(value / limit for value, limit in zip(values, limits, strict=True))
        value, limit = (round(statistics.median(samples), 3) for samples in (values, limits))
        ratio, p10, p90 = (round(quantile(ratios, q), 4) for q in (0.5, 0.1, 0.9))
        return cls(name, value, unit, limit, ratio, target, p10, p90, len(ratios), setting or here())

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
        """Flat: the setting's fields stand beside the row's own."""
        fields = asdict(self)
        where: dict[str, object] = fields.pop("setting")
        return fields | where


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


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """A contender that prepares nothing: the seconds of `work`, which returns something true if it went wrong."""

    def measure() -> float:
        begin = time.perf_counter()
        wrong = work()
        seconds = time.perf_counter() - begin
        assert not wrong, wrong
        return seconds

    return measure


def on_threads(part: Callable[[int, int], object], elements: int, threads: int, grain: int) -> Callable[[], float]:
    """A contender: part(first, end) for every share of the elements, one on this thread, each of the others on its
    own. Shares begin at multiples of `grain`."""
    cuts = [elements * i // threads // grain * grain for i in range(threads + 1)]

    def work() -> None:
        workers = [threading.Thread(target=part, args=cut) for cut in list(itertools.pairwise(cuts))[1:]]
        for worker in workers:
            worker.start()
        part(cuts[0], cuts[1])
        for worker in workers:
            worker.join()

    return timed(work)


def print_rows(rows: list[Row], console: Console) -> None:
    """The rows beside their limits, a table for each bench and setting; 80 columns are enough."""
    for (bench, setting), group in groupby(rows, key=lambda row: (row.name.partition(".")[0], _sentence(row.setting))):
        console.print(f"{setting}", highlight=False)
        titles = (bench, "value", "unit", "limit", "ratio", "p10..p90", "target")
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for column in titles:
            table.add_column(column, justify="left" if column in (bench, "unit", "target") else "right", no_wrap=True)
        shown = [(row.name.partition(".")[2], _cells(row)) for row in group]
        widths = [max(map(len, column)) for column in zip(titles[1:], *(cells for _, cells in shown), strict=True)]
        room = console.width - sum(widths) - len(widths)
        for name, cells in shown:
            table.add_row(_in_lines(name, room), *cells)
        console.print(table)
    if any(row.reached is False for row in rows):
        console.print("! missed")


def _cells(row: Row) -> tuple[str, ...]:
    """All but its name."""
    target = ""
    if row.target is not None:
        target = f"{'<=' if row.less_is_better else '>='}{row.target:g}{'!' if row.reached is False else ''}"
    spread = f"{row.p10:.2f}..{row.p90:.2f}"
    return _figure(row.value), row.unit, _figure(row.limit), f"{row.ratio:.2f}", spread, target


def _in_lines(name: str, room: int) -> str:
    """A name that has no room in a line goes on below, behind one of its dots."""
    lines = [""]
    for part in re.findall(r"[^.]+\.?", name):
        if lines[-1].strip() and len(lines[-1] + part) > room:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


def _sentence(setting: Setting) -> str:
    choices = ", ".join(f"{name} {choice}" for name, choice in setting.choices.items())
    return f"{setting.processor}; pages of {setting.pages}; {setting.kernels}: {choices}"


def _figure(number: float) -> str:
    """Three digits or more."""
    return f"{number:.{0 if number >= 100 else 1 if number >= 10 else 2}f}"
