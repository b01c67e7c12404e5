"""Options of `flowcheck plan report`: those of goodput, and what loss needs; the answers feed each other."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flowcheck.errors import UserError
from flowcheck.plan.answers.answer import Answer, Inputs, Value, need
from flowcheck.plan.answers.grouped import grouped
from flowcheck.plan.capacity.stage_speeds import BENCH
from flowcheck.plan.goodput.cluster import Cluster, Training, named
from flowcheck.plan.goodput.goodput_cli import ClusterOptions, given
from flowcheck.plan.jobs.models import PRESETS
from flowcheck.plan.loss.loss_options import LossOptions

if TYPE_CHECKING:
    from flowcheck.plan.capacity.capacity_request import Case

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


@dataclass(frozen=True)
class MirrorOptions:
    """Of loss and capacity."""

    mirrors: Annotated[int | None, typer.Option("--mirrors", help="Mirrored ports of a group.")] = None
    loss: Annotated[float | None, typer.Option("--loss", help="Probability that the mirror loses a copy.")] = None
    protocol: Annotated[Literal["ll", "ll128", "simple"] | None, typer.Option("--protocol", help="NCCL's.")] = None
    topology: Annotated[Path | None, typer.Option("--topology", help="As `flowcheck switch plan` takes it.")] = None
    bench: Annotated[Path | None, typer.Option("--bench", help=f"Of a node: `{BENCH}`.")] = None


@grouped
def report(
    *,
    out: Annotated[Path, typer.Option("--out", help="The page, FILE.html.")],
    title: Annotated[str, typer.Option("--title", help="Its heading. Default: the size of the cluster.")] = "",
    asked: ClusterOptions,
    mirror: MirrorOptions,
    telemetry: Annotated[Path | None, typer.Option(
        "--telemetry", help="A node's gradients.csv (docs/use/operating.md): its pictures, too.")] = None,
) -> None:
    """One page for a cluster: the question, inputs, pictures, verdict, and what would change it. Extra `plan`.

    Loss and capacity are answered first: how often an iteration stays incomplete, how late a version stands and how
    many nodes there are go into the effective time.
    """
    from flowcheck.plan.goodput.cluster import read_cluster
    from flowcheck.plan.goodput.goodput import answer
    from flowcheck.plan.goodput.sensitivity import break_even_lines, sensitivity
    from flowcheck.plan.report.report import check_name, page, write
    from flowcheck.plan.report.telemetry import telemetry_answer

    check_name(out)
    measured = [telemetry_answer(telemetry)] if telemetry is not None else []
    values = given(asked)
    first = read_cluster(values, Inputs(), asked.scale)
    if asked.scale:
        _check_layout(asked.scale, first.job, "gpus" if values.get("gpus") is not None else "data_parallel")
    with _renamed():
        case, kept, held = _before(asked.scale, first, values, mirror)
    inputs = Inputs()
    computed = _computed(held, kept)
    if asked.scale:  # by capacity's FLOPs, also where the model or its replicas are not those of the scale
        computed["iteration"] = (case.job.iteration_s, OTHER.format("capacity"))
    cluster = read_cluster(values, inputs, asked.scale, computed)
    heading = title or f"Checkpoints for {cluster.job.gpus:,} GPUs"
    question = (
        f"A job trains {cluster.job.parameters / 1e9:,g} billion parameters on {cluster.job.gpus:,} GPUs and fails "
        f"{cluster.failures.failures_per_day:g} times a day. Do the mirrored ports suffice, does a node keep up, how "
        "much of the time trains with each checkpointing system, and what does the rest cost?"
    )
    answers = [held, kept, answer(cluster, inputs), *measured]
    write(out, page(heading, question, answers, sensitivity(cluster), break_even_lines(cluster)))
    typer.echo(f"written: {out}")


def _before(
    scale: str, cluster: Cluster, values: Mapping[str, Value], mirror: MirrorOptions
) -> tuple[Case, Answer, Answer]:
    """(the job, the answer on capacity, the answer on loss). values: what is given of the cluster."""
    from flowcheck.plan.capacity.capacity_answer import capacity_answer
    from flowcheck.plan.capacity.capacity_options import (
        Asked,
        JobOptions,
        PaceOptions,
        PortOptions,
        SpeedOptions,
        WireOptions,
    )
    from flowcheck.plan.capacity.capacity_request import case_of
    from flowcheck.plan.loss.loss_answer import loss_answer

    def own(name: str) -> bool:
        return not scale or values.get(name) is not None

    job = cluster.job
    asked = Asked(
        JobOptions(
            model=scale or None, parameters=job.parameters if own("parameters") else None,
            tp=None if scale else cluster.model_parallel, dp=job.data_parallel if own("data_parallel") else None,
        ),
        WireOptions(protocol=mirror.protocol), PaceOptions(iteration_s=job.iteration if own("iteration") else None),
        PortOptions(topology=mirror.topology, mirrors=mirror.mirrors), SpeedOptions(bench=mirror.bench),
    )
    case = case_of(asked, {"tp": LAYOUT} | {
        theirs: OTHER.format("goodput") for theirs, name in TAKEN.items() if values.get(name) is None
    })
    kept = capacity_answer(asked, case)
    held = loss_answer(
        LossOptions(
            ranks=case.job.ranks, mirrors=case.node.mirrors, loss=mirror.loss, parameters=job.parameters,
            direction=case.node.direction, mtu=case.job.mtu, iteration_s=case.job.iteration_s,
            **{name: getattr(case.job, name) for name in ("algorithm", "protocol", "dtype", "optimizer")},
        ),
        {theirs: OTHER.format("capacity") for theirs in (*SHARED, *TAKEN) if values.get(TAKEN.get(theirs, "")) is None},
    )
    return case, kept, held


def _check_layout(scale: str, job: Training, given: str) -> None:
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
