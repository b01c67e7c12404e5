"""`flowcheck plan capacity`: options in, an answer out."""

from __future__ import annotations

from typing import Annotated

import typer

from flowcheck.plan.answers.answer import need
from flowcheck.plan.answers.grouped import grouped
from flowcheck.plan.answers.output import JsonOption, PlotOption, publish
from flowcheck.plan.capacity.capacity_options import (
    Asked,
    JobOptions,
    NodeOptions,
    PaceOptions,
    PortOptions,
    SpeedOptions,
    WireOptions,
)

__all__ = ["capacity"]


@grouped
def capacity(
    job: JobOptions,
    wire: WireOptions,
    pace: PaceOptions,
    ports: PortOptions,
    speeds: SpeedOptions,
    node: NodeOptions,
    figure: Annotated[int | None, typer.Option(help="The paper's Figure 10, 15 or 16, for its models.")] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Can a job be followed, does a node keep up with it, and how many nodes, ports, cores and GB does that take?

    Exit status 1: it cannot be followed, the deadline is missed, or the node lacks ports, cores or memory.
    """
    from flowcheck.plan.capacity.capacity_answer import FIGURES, capacity_answer, figure_answer

    asked = Asked(job, wire, pace, ports, speeds, node)
    if figure is None:
        raise typer.Exit(publish(capacity_answer(asked), as_json, plot))
    need(figure in FIGURES, f"figure {figure} is not of this question", "--figure", ", ".join(map(str, FIGURES)))
    for name, value in (("model", job.model), ("parameters", job.parameters), ("topology", ports.topology),
                        ("iteration-s", pace.iteration_s), ("gap-s", pace.gap_s)):
        need(value is None, "a figure has its own models and times", f"--{name}",
             "leave it out, or leave --figure out")
    raise typer.Exit(publish(figure_answer(figure, asked), as_json, plot))
