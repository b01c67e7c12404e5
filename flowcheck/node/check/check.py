"""What a node would take, before it is started: --check.

    check(config, as_json, job, seconds)    all of it, printed
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import typer
from rich.console import Console

from dataplane.live import check_cores
from flowcheck.errors import FlowcheckError, size_text
from flowcheck.job.manifest import load_job
from flowcheck.node.check.budget import EXAMPLE_MBPS, Budget, ask, budget
from flowcheck.node.check.files import check_files
from flowcheck.node.check.journal_figures import (
    StoreFigures,
    journal_figures,
    problem_of,
    store_figures,
)
from flowcheck.node.check.journal_table import megabytes, show_journal
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.groups.unattended import unattended_jobs
from flowcheck.node.listening import check_address
from flowcheck.node.ports.captures import naming, plan_captures
from flowcheck.node.store.supervisor import check_store
from flowcheck.rebuild.plan import plan_job
from flowcheck.tables import Column, print_table, screen

__all__ = ["check", "show"]


def check(config: NodeConfig, as_json: bool, job: Path | None = None, seconds: float = 1.0) -> None:
    """Print what the node would take. job: the manifest of one that it may follow, seconds: of its step. Raises the
    first of what cannot hold, after all of it was printed."""
    check_files(config, lambda *_, **__: None)
    check_address(config.control.address, "control.listen")
    if config.api is not None:
        check_address(config.api.address, "api.listen")
    planned = plan_captures(config)
    unattended_jobs(config)
    made = budget(config, planned, ask(config, planned))
    if config.journal is not None:
        figures = journal_figures(config.journal, config.groups, plan_job(load_job(job)) if job else None, seconds)
        wrong = problem_of(config.journal, figures)
        store = config.store
        to_store = store_figures(store, figures) if store is not None and store.deltas else None
        made = replace(made, journal=figures, store=to_store,
                       problems=(*made.problems, *([wrong] if wrong is not None else [])))
    if as_json:
        typer.echo(json.dumps(asdict(made) | {"problems": [str(problem) for problem in made.problems]}))
    else:
        show(made, screen())
    problems = list(made.problems)
    if config.store is not None:
        try:
            check_store(config)
        except FlowcheckError as error:
            problems.append(error)
    if not problems:
        for one in planned:
            with naming(one):
                check_cores((*one.live.cores, *one.settings.place_cores))
    for problem in problems[1:]:
        print(f"flowcheck-node: error: {problem.message()}", file=sys.stderr)
    if problems:
        raise problems[0]


def show(made: Budget, console: Console) -> None:
    mb = [Column("device", folds=True), Column("NUMA node", number=True), Column("dump"), Column("queues", number=True),
          Column("packets per ring", number=True), Column("buffers MB", number=True), Column("rings MB", number=True),
          Column("in the kernel MB", number=True)]
    rows = [
        [one.device, str(one.node) if one.node >= 0 else "-", one.dump, str(one.queues), f"{one.ring_packets:,}",
         megabytes(one.buffers), megabytes(one.rings), megabytes(one.kernel)] for one in made.captures
    ]
    print_table(console, mb, rows, "Captures")
    rows = [
        [one.device, f"{one.mbps / 1000:g}" if one.mbps > 0 else f"unknown; as an example {EXAMPLE_MBPS // 1000}",
         f"{one.pause_ms:.1f}", ", ".join(one.engines) or "-"] for one in made.captures
    ]
    pause = [Column("device", folds=True), Column("link Gb/s", number=True, folds=True),
             Column("longest pause ms", number=True), Column("DMA engines", folds=True)]
    print_table(console, pause, rows, "A ring bears, if full packets of the whole link come to one queue")
    kind = "huge pages" if made.huge else "ordinary memory"
    print_table(console, [Column("memory"), Column("MB", number=True)], [
        [f"captures, in {kind}", megabytes(made.dpdk)], ["captures, in the kernel", megabytes(made.kernel)],
        ["replicas and gradients of all groups, at most", megabytes(made.replicas)],
        *([["answers of peers and to them, at most", megabytes(made.peers)]] if made.peers else []),
        *([["copies and parity of other nodes, at most", megabytes(made.copies)]] if made.copies else []),
        ["trainers' messages to all groups, at most", megabytes(made.inboxes)],
        ["free huge pages", megabytes(made.huge_free)], ["available ordinary memory", megabytes(made.available)],
    ])
    if made.journal is not None:
        show_journal(made.journal, console)
    if made.store is not None:
        _show_store(made.store, console)
    if made.switches:
        print_table(console, [Column("switch"), Column("machines", folds=True)], [
            [key, ", ".join(addresses)] for key, addresses in made.switches.items()
        ])
    threads = [Column("threads", folds=True), Column("how many", number=True), Column("core", number=True)]
    print_table(console, threads, [
        [one.name, str(one.count), "any" if one.core is None else str(one.core)] for one in made.threads
    ])
    left = ", ".join(map(str, made.left)) or "none"
    console.print(f"cores that no thread is pinned to: {left}", highlight=False, markup=False)
    for note in made.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _show_store(made: StoreFigures, console: Console) -> None:
    columns = [Column("to the store, of one group", folds=True), Column("GB/s", number=True),
               Column("per day", number=True)]
    print_table(console, columns, [[what, f"{rate / 1e9:.3f}", size_text(int(day))] for what, rate, day in (
        (f"store.deltas: gradients, and a base every {made.every:,} steps", made.deltas, made.deltas_day),
        ("without: a version each time one is due", made.whole, made.whole_day),
        ("the same without: each step as a version", made.each, made.each_day),
    )])
