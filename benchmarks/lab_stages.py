"""How long each stage of a node takes beside the iteration, in the lab: FlowCheck's Figure 10 with the lab's models.

    .venv/bin/python -P benchmarks/lab_stages.py [--iterations 60] [--svg docs/understand/stages.svg]        as root

Two ranks train each model with DDP over soft-RoCE (LL, path MTU 4096); one of their ports is mirrored to a node. Its
event `times` says when the first and the last packet of an iteration were captured, when all of it was placed, when its
step record had come, and when its version was written, checked and published; and when the next iteration began. What
lies between two of them is a stage. Medians over the iterations that were published. Trainers share one core, the node
has the other: an iteration is as long as these two cores make it, and no network is as slow.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from lab.bench.rows import here
from lab.jobs import MODELS, Training, whole_model
from lab.network.fabric import Fabric, FabricConfig
from lab.run import LabRun

STAGES = {"receive": "last", "place": "covered", "record": "record", "update": "applied", "checksums": "published"}
COLOURS = {
    "receive": "#7aa6c2", "place": "#d9a35b", "record": "#c8c8c8", "update": "#8fb573", "checksums": "#b58fb0",
}
SETTLING = 10  # first iterations that do not count
WIDTH, LEFT, RIGHT, BAR, STEP = 760, 190, 60, 20, 44


def stages(times: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of each stage of one iteration, and of the "iteration" itself."""
    took, end = {}, 0.0
    for stage, stamp in STAGES.items():
        took[stage] = max(times[stamp] - end, 0.0)
        end = max(end, times[stamp])
    return {**took, "iteration": times["next"]}


def measured(model: str, iterations: int) -> tuple[dict[str, float], int]:
    """(medians by stage, parameters)."""
    job = Training(model=model, ranks=2, softroce={"protocol": "LL", "mtu": 4096})
    with (
        tempfile.TemporaryDirectory() as folder,
        Fabric(FabricConfig(name="fcstages", ranks=2, mirrored=((0,),))) as fabric,
        LabRun(fabric, Path(folder), node_settings={"capture": {"ring_size": 1 << 16}}) as run,
    ):
        run.start_nodes(job)
        first = run.attach(job)
        run.train(iterations + SETTLING)
        run.end()
        run.wait_for_nodes(first + iterations + SETTLING - 1)
        run.finish_nodes()
        said = [one for _, one in run.events if one["event"] == "times" and one["iteration"] >= first + SETTLING]
    whole = [stages(one) for one in said if None not in one.values()]
    if len(whole) < iterations // 2:
        raise SystemExit(f"{model}: only {len(whole)} of {iterations} iterations were published in time to be timed")
    parameters = sum(parameter.numel() for parameter in whole_model(job).parameters())
    return {stage: statistics.median(one[stage] for one in whole) for stage in (*STAGES, "iteration")}, parameters


def draw(rows: Mapping[str, tuple[Mapping[str, float], int]], title: str) -> str:
    """An SVG: a bar of stages for each model, and a line where the next iteration begins."""
    most = max(max(sum(row[stage] for stage in STAGES), row["iteration"]) for row, _ in rows.values())
    scale, parts, y = (WIDTH - LEFT - RIGHT) / most, [], 60
    for model, (row, parameters) in rows.items():
        parts += [*_bar(f"{model}, {parameters / 1e6:.2f}M", row, y, scale)]
        y += STEP
    x = float(LEFT)
    for stage, colour in COLOURS.items():
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>\n')
        parts.append(_text(x + 16, y, stage))
        x += 100
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 34}" font-family="sans-serif"'
        f' font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        f"{_text(10, 20, 'Milliseconds from the first packet of an iteration; the line: the next one begins')}"
        f'{_text(10, 38, title)}{"".join(parts)}</svg>\n'
    )


def _bar(label: str, row: Mapping[str, float], y: int, scale: float) -> Iterator[str]:
    yield _text(10, y + BAR - 5, label)
    x = float(LEFT)
    for stage in STAGES:
        width = row[stage] * scale
        yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[stage]}"/>\n'
        x += width
    end = LEFT + row["iteration"] * scale
    yield f'<path d="M{end:.1f} {y - 5}V{y + BAR + 5}" stroke="#d03030" stroke-width="2"/>\n'
    yield _text(max(x, end) + 6, y + BAR - 5, f"{row['iteration']:.0f}")


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y}">{escape(text)}</text>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    rows = {model: measured(model, options.iterations) for model in MODELS}
    print("| model | parameters | " + " | ".join([*STAGES, "iteration", "slack"]) + " |")
    print("|---" * (len(STAGES) + 4) + "|")
    for model, (row, parameters) in rows.items():
        figures = [*(row[stage] for stage in (*STAGES, "iteration")), row["iteration"] - sum(row[s] for s in STAGES)]
        print(f"| {model} | {parameters:,} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |")
    if options.svg:
        options.svg.write_text(draw(rows, f"the lab on {here().processor}, medians of {options.iterations}"))


if __name__ == "__main__":
    main()
