"""What a node of [feed] would take: --check without a mirror port.

    check_fed(config, as_json, job, seconds)        printed
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from flowcheck.control.messages import PROTOCOL
from flowcheck.job.manifest import load_job
from flowcheck.node.check.files import check_files
from flowcheck.node.check.journal_figures import EXAMPLE_BYTES, journal_figures, problem_of
from flowcheck.node.check.journal_table import megabytes, show_journal
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.listening import check_address
from flowcheck.node.tokens import warnings_of
from flowcheck.rebuild.plan import plan_job
from flowcheck.tables import screen

__all__ = ["check_fed"]


def check_fed(config: NodeConfig, as_json: bool, job: Path | None = None, seconds: float = 1.0) -> None:
    """job: the manifest of one that it may follow, seconds: of its step. Raises the first of what cannot hold, after
    all of it was printed."""
    check_files(config, lambda *_, **__: None)
    check_address(config.control.address, "control.listen")
    if config.api is not None:
        check_address(config.api.address, "api.listen")
    plan = plan_job(load_job(job), arenas=config.replica.regions) if job else None
    figures, problem = None, None
    if config.journal is not None:
        figures = journal_figures(config.journal, config.groups, plan, seconds)
        problem = problem_of(config.journal, figures)
    entry = plan.engine.gradient_bytes if plan is not None else EXAMPLE_BYTES
    gradients = config.groups * config.replica.regions * entry
    versions = config.groups * config.replica.memory_mb << 20
    if as_json:
        typer.echo(json.dumps({"protocol": PROTOCOL, "journal": asdict(figures) if figures is not None else None,
                               "gradients": gradients, "replicas": versions, "notes": warnings_of(config)}))
    else:
        if figures is not None:
            show_journal(figures, screen())
        typer.echo(f"gradients of all groups, at most, MB: {megabytes(gradients)}")
        typer.echo(f"replicas and gradients of all groups, at most, MB: {megabytes(versions)} (replica.memory_mb each)")
        for note in warnings_of(config):
            typer.echo(f"note: {note}")
    if problem is not None:
        raise problem
