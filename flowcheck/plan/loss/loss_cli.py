"""`flowcheck plan loss`: options in, an answer out."""

from __future__ import annotations

import typer

from flowcheck.plan.answers.grouped import grouped
from flowcheck.plan.answers.output import JsonOption, PlotOption, publish
from flowcheck.plan.loss.loss_options import LossOptions

__all__ = ["loss"]


@grouped
def loss(asked: LossOptions, as_json: JsonOption = False, plot: PlotOption = None) -> None:
    """How often does an iteration stay incomplete, how many ports are needed, and what does a loss cost?

    Exit status 1: more iterations stay incomplete than --wanted.
    """
    from flowcheck.plan.loss.loss_answer import loss_answer

    raise typer.Exit(publish(loss_answer(asked), as_json, plot))
