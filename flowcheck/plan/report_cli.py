"""Options of `flowcheck plan report`: those of goodput, and what loss needs; the answers feed each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowcheck.plan.answer import Inputs, Value
from flowcheck.plan.goodput_cli import (
    FailuresOption,
    GpusOption,
    IterationOption,
    NodePriceOption,
    ParametersOption,
    ScaleOption,
    ServerPriceOption,
    SetOption,
    given,
)
from flowcheck.plan.loss_cli import loss_answer

__all__ = ["report"]


def report(
    out: Annotated[Path, typer.Option("--out", help="The page, FILE.html.")],
    title: Annotated[str, typer.Option("--title", help="Its heading. Default: the size of the cluster.")] = "",
    scale: ScaleOption = "", gpus: GpusOption = None, parameters: ParametersOption = None,
    iteration: IterationOption = None, failures_per_day: FailuresOption = None,
    server_price: ServerPriceOption = None, node_price: NodePriceOption = None, settings: SetOption = None,
    mirrors: Annotated[int | None, typer.Option("--mirrors", help="Mirrored ports of a group.")] = None,
    loss: Annotated[float | None, typer.Option("--loss", help="Probability that the mirror loses a copy.")] = None,
) -> None:
    """One page for a cluster: the question, inputs, pictures, verdict, and what would change it. Extra `plan`.

    How often an iteration stays incomplete is computed first, and goes into the effective time.
    """
    from flowcheck.plan.cluster import read_cluster
    from flowcheck.plan.goodput import answer
    from flowcheck.plan.report import check_name, page, write
    from flowcheck.plan.sensitivity import break_even_lines, sensitivity

    check_name(out)
    options: dict[str, Value] = {
        "gpus": gpus, "parameters": parameters, "iteration": iteration, "failures_per_day": failures_per_day,
        "server_price": server_price, "node_price": node_price,
    }
    values = given(options, settings or [])
    job = read_cluster(values, Inputs(), scale)
    held = loss_answer(ranks=job.data_parallel, mirrors=mirrors, loss=loss, parameters=job.parameters,
                       iteration_s=job.iteration)
    incomplete = next(row.value for row in held.results if row.name == "an iteration stays incomplete")
    inputs = Inputs()
    cluster = read_cluster(values, inputs, scale, {"incomplete": (incomplete, "the answer on loss, on this page")})
    heading = title or f"Checkpoints for {cluster.gpus:,} GPUs"
    question = (
        f"A job trains {cluster.parameters / 1e9:,g} billion parameters on {cluster.gpus:,} GPUs and fails "
        f"{cluster.failures_per_day:g} times a day. Do the mirrored ports suffice, how much of the time trains with "
        "each checkpointing system, and what does the rest cost?"
    )
    made = page(heading, question, [held, answer(cluster, inputs)], sensitivity(cluster), break_even_lines(cluster))
    write(out, made)
    typer.echo(f"written: {out}")
