"""What a journal would take, for people: a part of what `flowcheck-node --check` prints.

    show_journal(figures, console)
"""

from __future__ import annotations

from rich.console import Console

from flowcheck.errors import size_text
from flowcheck.node.check.journal_figures import JournalFigures
from flowcheck.tables import Column, print_table

__all__ = ["megabytes", "show_journal"]


def megabytes(size: int) -> str:
    """Rounded up: what is taken is never less than what is shown."""
    return f"{-(-size >> 20):,}"



def show_journal(made: JournalFigures, console: Console) -> None:
    example = ", as an example: --job MANIFEST says it" if made.example else ""
    print_table(console, [Column("journal", folds=True), Column("", number=True)], [
        [f"gradients of an iteration, MB{example}", megabytes(made.entry)],
        ["state of a base, MB", megabytes(made.state)],
        ["seconds of a step (--step-seconds)", f"{made.seconds:g}"],
        ["iterations that fit", f"{made.entries:,}"], ["steps back that can be had at all times", f"{made.back:,}"],
        ["the disk must take, GB/s", f"{made.rate / 1e9:.3f}"],
        ["with a base each time it is due, GB/s", f"{made.with_bases / 1e9:.3f}"],
        ["written per day", size_text(int(made.day))],
        ["memory of iterations on their way, within replica.memory_mb, MB", megabytes(made.staged)],
        [f"journals of all groups in {made.directory}, MB{', in memory' if made.memory else ''}", megabytes(made.room)],
        ["free there, MB", megabytes(made.free)],
    ])
