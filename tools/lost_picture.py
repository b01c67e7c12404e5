"""`make lost-picture`: what `flowcheck lab run --nodes 4 --protect 2+2` did, drawn from what it recorded.

    python tools/lost_picture.py [OUT [RUN]]      OUT: an SVG file, docs/use/protect-lost.svg if it is left out
                                                  RUN: the folder of a run that is there already (its --out)

Above, who was there when, which versions a node made, and which steps copies and parity are of; below, the losses of
the job that lost its nodes, over those of one that nobody disturbed. Needs root, as the lab does, and matplotlib.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["main", "picture"]

COMMAND = ["lab", "run", "--name", "lost", "--nodes", "4", "--protect", "2+2", "--model", "mlp", "--iterations", "8"]
RECORD = "lost.json"  # lab/nodes_lost.py
SIZE = (9.0, 7.0)  # inches
CALM, BUSY, GONE, MADE = "#4c72b0", "#8fa9d0", "#c44e52", "#55a868"


def _events(run: Path, member: str) -> list[list[dict[str, Any]]]:
    """What a member said, and whoever took its place under its name: each process by itself, oldest first."""
    kind, _, number = member.partition(" ")
    begins, found = {"node": "listening", "holder": "holder_ready"}[kind], list[list[dict[str, Any]]]()
    for path in sorted(run.glob(f"{kind}{number}*/events.jsonl"), key=lambda path: path.stat().st_mtime_ns):
        for line in path.read_text().splitlines():
            said = json.loads(line)
            if said["event"] == begins:
                found.append([])
            if found:
                found[-1].append(said)
    return found


def _spans(marks: list[dict[str, Any]], who: str) -> Iterator[tuple[float, float, bool]]:
    """From when to when the ranks trained, and whether they were lost then."""
    began = None
    for mark in marks:
        if mark["who"] == who and mark["what"] == "train":
            began = mark["time"]
        elif mark["who"] == who and began is not None:
            yield began, mark["time"], mark["what"] == "lost"
            began = None


def _members(axes: Any, record: dict[str, Any], run: Path) -> None:
    marks = record["marks"]
    begin, end = marks[0]["time"], marks[-1]["time"]
    lanes = ["ranks", *record["members"]]
    for lane, who in enumerate(lanes):
        if who == "ranks":
            spans = [(one - begin, other - begin, lost) for one, other, lost in _spans(marks, who)]
            for (_, gone, _), (back, _, _) in pairwise(spans):
                axes.axvspan(gone, back, color=GONE, alpha=0.12, lw=0)
                axes.annotate(f"from parity:\ngoes on after step {record['step']}", ((gone + back) / 2, lane),
                              ha="center", va="center", fontsize="x-small")
        else:
            spans = []
            for said in _events(run, who):
                first = max(said[0]["time"], begin)
                if first >= end:
                    continue
                lost = next((mark["time"] for mark in marks if mark["who"] == who and mark["what"] == "lost"
                             and mark["time"] >= first), None)
                spans.append((first - begin, (end if lost is None else lost) - begin, lost is not None))
                _made(axes, lane, said, begin, end if lost is None else lost)
        for first, after, lost in spans:
            axes.plot([first, after], [lane, lane], color=CALM if who == "ranks" else BUSY, lw=7, solid_capstyle="butt",
                      zorder=1)
            if lost:
                axes.plot([after], [lane], "X", color=GONE, ms=11, zorder=4)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0.0, end - begin)
    axes.set_xlabel("seconds")
    axes.set_title(f"parity {record['parity']}: X is killed -9 with all that it held, | a version of a node, a number"
                   " the step of a copy or of parity", fontsize="small")


def _made(axes: Any, lane: int, said: list[dict[str, Any]], begin: float, end: float) -> None:
    """Versions that a node published, copies of its own that it keeps, and a holder's rounds."""
    seen = [one for one in said if begin <= one["time"] <= end]
    versions = [one["time"] - begin for one in seen if one["event"] == "iteration" and one["published"]]
    axes.plot(versions, [lane] * len(versions), "|", color=CALM, ms=7, zorder=2)
    for one in seen:
        if one["event"] in ("copied", "protected"):
            at = one["time"] - begin
            axes.plot([at], [lane], "o", color=MADE, ms=5, zorder=3)
            axes.annotate(str(one["step"]), (at, lane), (0, 7), textcoords="offset points", ha="center",
                          fontsize="xx-small")


def _losses(axes: Any, record: dict[str, Any]) -> None:
    for name, label, style in (
        ("undisturbed", "nobody disturbed it", {"color": "#bbbbbb", "lw": 5}),
        ("before", "until the ranks were killed", {"color": CALM, "lw": 1.5}),
        ("after", f"after step {record['step']}, from parity", {"color": GONE, "lw": 1.5, "ls": "--"}),
    ):
        numbers = sorted(record[name], key=int)
        axes.plot([int(one) for one in numbers], [record[name][one] for one in numbers], label=label, **style)
    axes.axvline(record["step"], color=MADE, lw=1, label="the step that parity gave")
    axes.axvline(record["died"], color=GONE, lw=1, label="the ranks are killed")
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss")
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize="small")


def picture(run: Path) -> str:
    """run: the folder of a run. The same record gives the same text."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    record = json.loads((run / RECORD).read_text())
    with matplotlib.rc_context({"svg.hashsalt": "flowcheck", "svg.fonttype": "none"}):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        above, below = figure.subplots(2, 1, height_ratios=(1.2, 1.0))
        _members(above, record, run)
        _losses(below, record)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def main(out: Path, run: Path | None = None) -> int:
    """The exit status: the run's, where that is not 0."""
    with tempfile.TemporaryDirectory(prefix="flowcheck-lost-") as folder:
        if run is None:
            run = Path(folder) / "lab"
            command = [sys.executable, "-P", "-m", "flowcheck", *COMMAND, "--out", str(run)]
            if status := subprocess.run(command, check=False).returncode:
                return status
        out.write_text(picture(run))
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/use/protect-lost.svg"),
                  Path(sys.argv[2]) if len(sys.argv) > 2 else None))
