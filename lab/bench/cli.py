"""`flowcheck bench`: the command. Rows go to standard output, nothing else does with --json."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from flowcheck.errors import UserError

__all__ = ["BENCHES", "bench"]

#: Name, module and what it measures.
BENCHES = {
    "parse": ("lab.bench.parse", "packets that carry nothing to keep, against a minimal parse"),
    "ingest": ("lab.bench.ingest", "packets from a DPDK port to placed gradients, against a minimal loop"),
    "place": ("lab.bench.place", "gradients into the arena, against a roof of the same traffic"),
    "merge": ("lab.bench.merge", "three mirrors of the same packets, compared, against one of them"),
    "streams": ("lab.bench.streams", "the same packets over 1 to 16 streams, against over one"),
    "loss": ("lab.bench.loss", "the live node with one packet lost in 10^5, against none lost"),
    "closing": ("lab.bench.closing", "evidence and verdict of an iteration that closes, per GB"),
    "pipeline": ("lab.bench.pipeline", "stages alone, in sequence and overlapped, against the memory"),
    "checksum": ("lab.bench.sums", "checksums of a version's parameters, against reading them"),
    "telemetry": ("lab.bench.telemetry", "norms and counts of gradients, against reading them, beside checksums"),
    "protect": ("lab.bench.coding", "parity of streams of bytes, against copying as much and against isa-l"),
    "journal": ("lab.bench.journal", "iterations into a journal's files, against dd of as many bytes"),
    "hook": ("lab.bench.hook", "what an attachment costs the training process per step, beside a budget"),
    "baselines": ("lab.bench.baselines", "steps of training in the lab, beside those of other ways to save"),
    "adam": ("lab.bench.adam", "one step of the optimizer, against its memory traffic and torch's"),
}
_ITEMS = BENCHES.items()


def bench(
    names: Annotated[list[str], typer.Argument(help=" ".join(f"{name}: {what}." for name, (_, what) in _ITEMS))],
    as_json: Annotated[bool, typer.Option("--json", help="For machines (docs/understand/performance.md).")] = False,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, max=1001, help="Alternating rounds; figures to quote need at least 21.")
    ] = 21,
    megabytes: Annotated[
        int, typer.Option("--megabytes", min=1, max=4096, help="Packets in memory; less than 256 stays in some cache.")
    ] = 256,
) -> None:
    """Measure stages beside the limit of this machine, in alternating rounds."""
    from importlib import import_module

    from lab.bench.rows import print_rows

    for name in names:
        if name not in BENCHES:
            raise UserError(f"{name!r} is not a benchmark", remedy=f"the names are {', '.join(BENCHES)}")
    rows = [row for name in names for row in import_module(BENCHES[name][0]).run(rounds, megabytes << 20)]
    if as_json:
        json.dump([row.as_dict() for row in rows], sys.stdout, indent=1)
        print()
    else:
        console = Console()
        print_rows(rows, console if console.is_terminal else Console(width=80))
