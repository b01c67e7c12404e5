"""Rows of `bench pipeline` as a picture: how long a GB of gradients takes, one stage after another and overlapped.

    flowcheck bench pipeline --json | python -P -m lab.bench.figure > docs/understand/pipeline.svg

Bars are medians; a whisker goes from the 10th to the 90th percentile of the ratio, in multiples of the bar's limit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

from lab.bench.pipeline import OPTIMIZERS, STAGES

__all__ = ["draw"]

WIDTH, LEFT, RIGHT = 760, 170, 70
BAR, GAP, HEAD = 18, 8, 34
COLOURS = {"receive": "#7aa6c2", "place": "#d9a35b", "update": "#8fb573", "overlapped": "#555555", "bound": "#c8c8c8"}
TITLES = {"adam": "Adam: 28 bytes per parameter", "sgd": "SGD: 12 bytes per parameter"}


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """An SVG of the rows of one run (`--json`)."""
    by_name = {str(row["name"]).removeprefix("pipeline."): row for row in rows}
    bars = {optimizer: list(_bars(optimizer, by_name)) for optimizer in OPTIMIZERS}
    most = max(sum(size for _, size in segments) for drawn in bars.values() for _, segments, _ in drawn)
    scale = (WIDTH - LEFT - RIGHT) / most
    parts, y = [], 46
    for optimizer in OPTIMIZERS:
        parts.append(_text(10, y, f"{TITLES[optimizer]}", "bold"))
        y += HEAD - BAR
        for label, segments, whisker in bars[optimizer]:
            parts += list(_bar(y, label, segments, whisker, scale))
            y += BAR + GAP
        y += HEAD
    first = rows[0]
    said = f"{first['processor']}; medians of {first['rounds']} rounds; whiskers: p10 to p90"
    head = _text(10, 20, "Milliseconds per GB of gradients: the stages of a node") + _text(10, y - 4, said)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 10}" font-family="sans-serif"'
        f' font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{head}{"".join(parts)}</svg>\n'
    )


def _bars(
    optimizer: str, rows: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, list[tuple[str, float]], tuple[float, float] | None]]:
    """(label, (colour, milliseconds) of each segment, whisker in milliseconds)."""

    def row(name: str) -> dict[str, Any]:
        return rows[f"{optimizer}.{name}"]

    yield "one after another", [(stage, row(stage)["value"]) for stage in STAGES], None
    over = row("overlapped")
    yield "overlapped", [("overlapped", over["value"])], (over["p10"] * over["limit"], over["p90"] * over["limit"])
    yield "slowest stage alone", [("bound", row("overlapped.slowest")["limit"])], None
    yield "all bytes, copy limit", [("bound", row("overlapped.memory")["limit"])], None
    yield "work over processors", [("bound", row("overlapped.cores")["limit"])], None


def _bar(
    y: int, label: str, segments: list[tuple[str, float]], whisker: tuple[float, float] | None, scale: float
) -> Iterator[str]:
    yield _text(10, y + BAR - 5, label)
    x, total = float(LEFT), sum(size for _, size in segments)
    for colour, size in segments:
        width = size * scale
        yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[colour]}"/>\n'
        if len(segments) > 1 and width > 60:
            yield _text(x + 4, y + BAR - 5, colour)
        x += width
    if whisker is not None:
        low, high = (LEFT + end * scale for end in whisker)
        yield f'<path d="M{low:.1f} {y + BAR // 2}H{high:.1f}" stroke="#d03030" stroke-width="2"/>\n'
        x = max(x, high)
    yield _text(x + 6, y + BAR - 5, f"{total:.0f}")


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-weight="{weight}">{escape(text)}</text>\n'


def main() -> None:
    sys.stdout.write(draw(json.load(sys.stdin)))


if __name__ == "__main__":
    main()
