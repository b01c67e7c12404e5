"""`flowcheck plan verify`."""

from __future__ import annotations

import typer

from flowcheck.plan.output import JsonOption, publish

__all__ = ["verify"]


def verify(as_json: JsonOption = False) -> None:
    """The papers' printed numbers beside closed forms, exact forms and Monte Carlo; where they part, why."""
    from flowcheck.plan.verify import answer

    raise typer.Exit(publish(answer(), as_json))
