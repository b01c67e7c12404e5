"""Options of `flowcheck plan report`: those of goodput, and what loss needs; the answers feed each other."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from flowcheck.errors import UserError
from flowcheck.plan.answer import Answer, Inputs, Value, need
from flowcheck.plan.cluster import Cluster, named
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
from flowcheck.plan.models import PRESETS
from flowcheck.plan.stage_speeds import BENCH

__all__ = ["report"]

#: What loss and capacity call an option that has another name here.
RENAMED = {"--dp": named("data_parallel"), "--ranks": named("data_parallel"), "--iteration-s": "--iteration"}
#: Options of this command that loss and capacity have, too.
OWN = ("--set", "--iteration", "--parameters", "--mirrors", "--loss", "--protocol", "--topology", "--bench", "--scale")
#: Inputs of loss that are capacity's.
SHARED = ("mirrors", "direction", "algorithm", "protocol", "mtu", "dtype", "optimizer")
OTHER = "the answer on {}, on this page"
LAYOUT = "gpus / data-parallel, the answer on goodput, on this page"
#: Inputs of loss and capacity that are goodput's, by what they are called there.
TAKEN = {"ranks": "data_parallel", "dp": "data_parallel", "parameters": "parameters", "iteration-s": "iteration"}


def report(
    out: Annotated[Path, typer.Option("--out", help="The page, FILE.html.")],
    title: Annotated[str, typer.Option("--title", help="Its heading. Default: the size of the cluster.")] = "",
    scale: ScaleOption = "", gpus: GpusOption = None, parameters: ParametersOption = None,
    iteration: IterationOption = None, failures_per_day: FailuresOption = None,
    server_price: ServerPriceOption = None, node_price: NodePriceOption = None, settings: SetOption = None,
    mirrors: Annotated[int | None, typer.Option("--mirrors", help="Mirrored ports of a group.")] = None,
    loss: Annotated[float | None, typer.Option("--loss", help="Probability that the mirror loses a copy.")] = None,
    protocol: Annotated[Literal["ll", "ll128", "simple"] | None, typer.Option("--protocol", help="NCCL's.")] = None,
    topology: Annotated[Path | None, typer.Option("--topology", help="As `flowcheck switch plan` takes it.")] = None,
    bench: Annotated[Path | None, typer.Option("--bench", help=f"Of a node: `{BENCH}`.")] = None,
) -> None:
    """One page for a cluster: the question, inputs, pictures, verdict, and what would change it. Extra `plan`.

    Loss and capacity are answered first: how often an iteration stays incomplete, how late a version stands and how
    many nodes there are go into the effective time.
    """
    from flowcheck.plan.capacity_answer import capacity_answer
    from flowcheck.plan.capacity_request import Asked, case_of
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
    if scale:
        _check_layout(scale, job, "gpus" if values.get("gpus") is not None else "data_parallel")
    own = {name for name in ("parameters", "data_parallel", "iteration") if not scale or values.get(name) is not None}
    asked = Asked(
        model=scale or None, parameters=job.parameters if "parameters" in own else None,
        tp=None if scale else job.model_parallel, dp=job.data_parallel if "data_parallel" in own else None,
        iteration_s=job.iteration if "iteration" in own else None, protocol=protocol, mirrors=mirrors,
        topology=topology, bench=bench,
    )
    with _renamed():
        case = case_of(asked, {"tp": LAYOUT} | {
            theirs: OTHER.format("goodput") for theirs, name in TAKEN.items() if values.get(name) is None
        })
        kept = capacity_answer(asked, case)
        held = loss_answer(
            ranks=case.job.ranks, mirrors=case.node.mirrors, loss=loss, parameters=job.parameters,
            direction=case.node.direction, algorithm=case.job.algorithm, protocol=case.job.protocol, mtu=case.job.mtu,
            dtype=case.job.dtype, optimizer=case.job.optimizer, iteration_s=case.job.iteration_s,
            sources={
                theirs: OTHER.format("capacity") for theirs in (*SHARED, *TAKEN)
                if values.get(TAKEN.get(theirs, "")) is None
            },
        )
    inputs = Inputs()
    computed = _computed(held, kept)
    if scale:  # by capacity's FLOPs, also where the model or its replicas are not those of the scale
        computed["iteration"] = (case.job.iteration_s, OTHER.format("capacity"))
    cluster = read_cluster(values, inputs, scale, computed)
    heading = title or f"Checkpoints for {cluster.gpus:,} GPUs"
    question = (
        f"A job trains {cluster.parameters / 1e9:,g} billion parameters on {cluster.gpus:,} GPUs and fails "
        f"{cluster.failures_per_day:g} times a day. Do the mirrored ports suffice, does a node keep up, how much of "
        "the time trains with each checkpointing system, and what does the rest cost?"
    )
    answers = [held, kept, answer(cluster, inputs)]
    write(out, page(heading, question, answers, sensitivity(cluster), break_even_lines(cluster)))
    typer.echo(f"written: {out}")


def _check_layout(scale: str, job: Cluster, given: str) -> None:
    """A job of a scale has its tensor- and pipeline-parallel ranks: one page is of one number of GPUs."""
    preset = PRESETS[scale]
    takes = preset.tp * preset.pp * job.data_parallel
    need(job.gpus == takes, f"{job.data_parallel} replicas of {scale} take {takes} GPUs, the job has {job.gpus}",
         named(given), f"{named('gpus')} {takes}, or another {named('data_parallel')}; without --scale any layout may "
         "be given")


@contextlib.contextmanager
def _renamed() -> Iterator[None]:
    """Refusals of loss and capacity, with the options that this command has."""
    try:
        yield
    except UserError as error:
        where, remedy = RENAMED.get(error.where, error.where), error.remedy
        for theirs, ours in RENAMED.items():
            remedy = re.sub(rf"{theirs}(?![a-z-])", ours, remedy)
        if where.startswith("--") and where.split()[0] not in OWN:
            remedy = f"ask `flowcheck plan capacity`, which has this option: {remedy}"
        raise UserError(error.what, where=where, remedy=remedy) from None


def _computed(held: Answer, kept: Answer) -> dict[str, tuple[Value, str]]:
    """What goodput takes from the answers on loss and capacity: by its inputs' names, with where it comes from."""
    loss = {row.name: row.value for row in held.results}
    capacity = {row.name: row.value for row in kept.results}
    late = capacity["version stands"]
    assert isinstance(late, float)
    return {
        "incomplete": (loss["an iteration stays incomplete"], OTHER.format("loss")),
        "version_lag": (max(0.0, late), OTHER.format("capacity")),
        "nodes": (capacity.get("nodes", capacity.get("nodes, each full")), OTHER.format("capacity")),
    }
