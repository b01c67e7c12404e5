"""docs/proven.toml, written into README.md and the pages of docs/: what is proven, by what, since when; which jobs are
followed; and what `flowcheck plan goodput` says of FlowCheck beside other systems.

    python -P tools/proven.py             writes every block anew, and names the pages that it changed
    python -P tools/proven.py --check     changes nothing; status 1 and their names if there are any

A block is what stands between <!-- proven: NAME --> and <!-- end -->: a table of TABLES, or a sentence of [pages]. With
the marks on lines of their own it is a paragraph; inside a line it is a part of a sentence. Such a mark never begins a
line: Markdown would take the rest of that line for HTML.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from flowcheck.plan.answers.answer import Inputs
from flowcheck.plan.goodput.cluster import OPTIONS, Cluster, read_cluster
from flowcheck.plan.goodput.goodput import Row, answer, evaluate
from flowcheck.plan.goodput.sensitivity import break_even

__all__ = ["BLOCK", "ROOT", "TABLES", "facts", "main", "pages", "stated", "written"]

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "docs/proven.toml"
BLOCK = re.compile(r"(<!-- proven: (\w+) -->)(.*?)(<!-- end -->)", re.DOTALL)
LINK = re.compile(r"\]\(([^()\s:#]+)((?:#[\w-]+)?)\)")
WIDTH = 140
NUMBERS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
FOLLOWED = {"yes": "**yes**", "parameters": "parameters alone", "no": "no"}


@cache
def stated() -> dict[str, Any]:
    """The file, as it stands."""
    return tomllib.loads((ROOT / SOURCE).read_text())


def facts() -> dict[str, str]:
    """By name: what texts of the file take from it as {name}."""
    return dict(stated()["facts"])


def pages() -> list[Path]:
    """Those that may have blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


# -- tables ----------------------------------------------------------------------------------------------------------


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["".join(f"| {cell} " if cell else "| " for cell in cells) + "|" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def _claims() -> str:
    rows = [[one["claim"], one["by"], f"{one['since']:%Y-%m-%d}"] for one in stated()["proven"]]
    return _table(["claim", "by what", "since"], rows)


def _open() -> str:
    return "\n".join(f"- {one['what']}" for one in stated()["open"])


def _jobs() -> str:
    rows = [[one["job"], one["live"], one["offline"]] for one in stated()["job"] if "job" in one]
    return _table(["job", "live (`flowcheck.attach`)", "offline (`replay`)"], rows)


def _ten() -> list[dict[str, Any]]:
    """Those that are followed first."""
    order = list(FOLLOWED)
    return sorted((one for one in stated()["job"] if "usual" in one), key=lambda one: order.index(one["followed"]))


def _usual() -> str:
    rows = [[one["usual"], FOLLOWED[one["followed"]], one["because"]] for one in _ten()]
    return _table(["job", "followed today", ""], rows)


def _count() -> str:
    found = Counter(one["followed"] for one in _ten())
    return (f"Of {NUMBERS[found.total()]} usual jobs {NUMBERS[found['yes']]} are followed today, of"
            f" {NUMBERS[found['parameters']]} the parameters alone are, and {NUMBERS[found['no']]} are refused.")


# -- what the planner says -------------------------------------------------------------------------------------------


def _given(more: dict[str, Any] | None = None) -> dict[str, Any]:
    return {**stated()["planner"]["cluster"], **(more or {})}


def _cluster(more: dict[str, Any] | None = None) -> Cluster:
    return read_cluster({name.replace("-", "_"): value for name, value in _given(more).items()}, Inputs())


def _short(value: float) -> str:
    return f"{value:g}".replace("e+", "e")


def _systems() -> list[str]:
    return [one["system"] for one in stated()["beside"]]


def _case() -> str:
    one = _cluster()
    job = f"{one.job.parameters / 1e9:g} billion parameters, HSDP on {one.job.gpus} GPUs"
    return (
        f"What `flowcheck plan goodput` says of one job: {job}, {one.failures.failures_per_day:g} failures a day,"
        f" {one.speeds.storage / 1e9:g} GB/s of storage. What the job loses is servers that do not train. What"
        f" FlowCheck costs besides is its {one.flowcheck.nodes} nodes, which fail as often as hosts do. The command"
        " prints all inputs, and where each comes from."
    )


def _command() -> str:
    """With what it says last."""
    words = [f"--{name} {_short(value)}" if name.replace("-", "_") in OPTIONS else f"--set {name}={_short(value)}"
             for name, value in _given().items()]
    words += [f"--system {name}" for name in _systems()]
    said = answer(_cluster(), Inputs(), None, _systems()).verdict
    return f"```\n$ flowcheck plan goodput {' '.join(words)}\n{said}\n```"


def _figures(row: Row) -> str:
    return f"{100 * row.share:.2f} %, {row.dollars:,.0f} $"


def _beside() -> str:
    cluster, rows = _cluster(), []
    for one, row in zip(stated()["beside"], evaluate(cluster, names=_systems()), strict=True):
        figures = [f"{100 * row.share:.2f} %", f"{row.dollars:,.0f}", _cheaper(cluster, one["system"])]
        rows.append([one["what"], f"`{one['system']}`", *figures, one["instead"]])
    head = ["", "in the planner", "trains", "$ a day", "FlowCheck costs less from", "take it instead"]
    return _table(head, rows)


def _cheaper(cluster: Cluster, other: str) -> str:
    if other == "flowcheck":
        return ""
    least = break_even(cluster, other)
    return "never" if least is None else f"{least:.2g} failures a day"


def _change() -> str:
    names, rows = _systems(), []
    for one in stated()["change"]:
        rows.append([one["what"], *map(_figures, evaluate(_cluster(one.get("set")), names=names))])
    return _table(["", *(f"`{name}`" for name in names)], rows)


TABLES: dict[str, Callable[[], str]] = {
    "claims": _claims, "open": _open, "jobs": _jobs, "usual": _usual, "count": _count,
    "case": _case, "command": _command, "beside": _beside, "change": _change,
}


# -- pages -----------------------------------------------------------------------------------------------------------


def _linked(text: str, page: Path) -> str:
    """Links from the root of the tree, as this page has them."""

    def link(found: re.Match[str]) -> str:
        target = ROOT / found[1]
        name = "" if target == page and found[2] else os.path.relpath(target, page.parent)
        return f"]({name}{found[2]})"

    return LINK.sub(link, text)


@cache
def _text(name: str) -> str:
    if name in TABLES:
        return TABLES[name]().format_map(facts())
    if name not in stated()["pages"]:
        raise SystemExit(f"{name}: {SOURCE} has no such sentence in [pages], and it is none of {', '.join(TABLES)}")
    return str(stated()["pages"][name]).format_map(facts())


def written(page: Path, text: str) -> str:
    """The text of a page with every block as the file has it. Ends with a message for a name that is not there."""

    def block(found: re.Match[str]) -> str:
        said = _linked(_text(found[2]), page)
        if not found[3].startswith("\n"):
            return f"{found[1]}{said}{found[4]}"
        if "\n" not in said:
            said = textwrap.fill(said, WIDTH, break_long_words=False, break_on_hyphens=False)
        return f"{found[1]}\n{said}\n{found[4]}"

    return BLOCK.sub(block, text)


def main(arguments: list[str]) -> int:
    """Status 1 with --check if a page is not as the file says."""
    changed = []
    for page in pages():
        before = page.read_text()
        if (after := written(page, before)) != before:
            changed.append(page.relative_to(ROOT))
            if "--check" not in arguments:
                page.write_text(after)
    for path in changed:
        print(path)
    return int(bool(changed) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
