"""`flowcheck plan verify`: the papers' printed numbers beside what comes out here, and why where they part.

A figure that differs is no error: why stands beside it. An error is a Monte Carlo estimate that does not contain our
own value, for then a formula here is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flowcheck.plan.answer import Answer, Grid, Inputs, Result
from flowcheck.plan.figures import AGREES, DIFFERS, MISSING, Figure
from flowcheck.plan.figures_costs import flowcheck, just_in_time
from flowcheck.plan.figures_memory import eccheck, gemini, reft

__all__ = ["PAPERS", "answer", "figures"]

#: Key, title, and the figures of each paper.
PAPERS: dict[str, tuple[str, Callable[[], Iterable[Figure]]]] = {
    "gemini": ("Gemini (SOSP'23)", gemini),
    "eccheck": ("ECCheck", eccheck),
    "reft": ("REFT", reft),
    "just_in_time": ("Just-in-time checkpointing (EuroSys'24)", just_in_time),
    "flowcheck": ("FlowCheck", flowcheck),
}
COLUMNS = ("figure", "printed", "closed form", "exact", "Monte Carlo", "verdict", "why")


def figures() -> dict[str, list[Figure]]:
    """Every figure, by the key of its paper. Takes some seconds: Monte Carlo."""
    return {key: list(make()) for key, (_, make) in PAPERS.items()}


def answer() -> Answer:
    """All figures. good: no Monte Carlo estimate contradicts a formula of ours."""
    found = figures()
    every = [figure for rows in found.values() for figure in rows]
    counts = {word: sum(figure.verdict == word for figure in every) for word in (AGREES, DIFFERS, MISSING)}
    unsound = [figure.name for figure in every if not figure.sound]
    grids = [Grid(key, PAPERS[key][0], COLUMNS, [figure.row() for figure in rows]) for key, rows in found.items()]
    results = [
        Result("figures that agree", counts[AGREES], "", "within rounding; tolerance 1 % where nothing else is said"),
        Result("figures that differ", counts[DIFFERS], "", "each with why"),
        Result("figures not reproduced", counts[MISSING], "", "each with the input that is not printed"),
        Result("Monte Carlo estimates that hold", sum(figure.simulated is not None for figure in every) - len(unsound)),
    ]
    verdict = (
        f"{counts[AGREES]} printed figures agree, {counts[DIFFERS]} differ for the reason beside them, "
        f"{counts[MISSING]} need an input that their paper does not print."
    )
    if unsound:
        verdict += f" WRONG HERE: Monte Carlo contradicts {'; '.join(unsound)}. Report it."
    return Answer("verify", "What the papers print, and what comes out here.", Inputs(), results, grids, verdict,
                  not unsound)
