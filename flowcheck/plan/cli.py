"""`flowcheck plan`: the group of commands. Each command stands in a module of its own and is added here by one line."""

from __future__ import annotations

import typer

from flowcheck.plan.capacity.capacity_cli import capacity
from flowcheck.plan.goodput.goodput_cli import goodput
from flowcheck.plan.holders.holders_cli import holders
from flowcheck.plan.loss.loss_cli import loss
from flowcheck.plan.report.report_cli import report

__all__ = ["plan"]

plan = typer.Typer(
    no_args_is_help=True,
    help="Before ports and servers are bought: will it hold, will it fit, what will it cost.",
)

plan.command()(loss)
plan.command()(capacity)
plan.command()(goodput)
plan.command()(holders)
plan.command()(report)
