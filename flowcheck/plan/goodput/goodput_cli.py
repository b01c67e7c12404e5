"""Options of `flowcheck plan goodput`. What has no option of its own is set by --set NAME=VALUE; all are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from flowcheck.plan.answers.amounts import amount
from flowcheck.plan.answers.answer import Inputs, Value, need, need_positive
from flowcheck.plan.answers.grouped import grouped
from flowcheck.plan.answers.output import JsonOption, PlotOption, publish
from flowcheck.plan.goodput.cluster import DEFAULTS, OPTIONS

__all__ = ["ClusterOptions", "given", "goodput"]


@dataclass(frozen=True)
class ClusterOptions:
    """Of a cluster and its job. None, or empty: not given."""

    scale: Annotated[str, typer.Option("--scale", help="175b, 530b, 1t or 405b: that job, as in capacity.")] = ""
    gpus: Annotated[int | None, typer.Option("--gpus", help="GPUs of the job.")] = None
    parameters: Annotated[
        float | None, typer.Option("--parameters", help="Of the model: 7e9, 70B.", parser=amount, metavar="NUMBER")
    ] = None
    iteration: Annotated[float | None, typer.Option("--iteration", help="Seconds of an iteration.")] = None
    failures_per_day: Annotated[
        float | None, typer.Option("--failures-per-day", help="Failures of the whole job.")
    ] = None
    server_price: Annotated[
        float | None, typer.Option("--server-price", help="$ per hour of a trainers' server.")
    ] = None
    node_price: Annotated[float | None, typer.Option("--node-price", help="$ per hour of a checkpoint node.")] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Any other input, by the name in the output; may be repeated."
        ),
    ] = None


WHOLE = {"gpus", "gpus_per_server", "data_parallel", "simultaneous", "replicas", "code_data", "code_parity",
         "reft_group", "nodes"}


def given(asked: ClusterOptions) -> dict[str, Value]:
    """Options and --set together, by DEFAULTS' names. Raises UserError for an unknown name or what is not a number."""
    values: dict[str, Value] = {name: getattr(asked, name) for name in OPTIONS}
    for setting in asked.settings or []:
        name, equals, text = setting.partition("=")
        key = name.strip().replace("-", "_")
        where = f"--set {setting}"
        need(bool(equals), "names no value", where, "write NAME=VALUE")
        need(key in DEFAULTS, f"there is no input {name}", where,
             f"one of {', '.join(known.replace('_', '-') for known in DEFAULTS)}")
        need(values.get(key) is None, f"{name} is given twice", where, "give it once")
        try:
            values[key] = int(text) if key in WHOLE else float(text)
        except ValueError:
            need(False, f"{text} is not a {'whole ' if key in WHOLE else ''}number", where, "write a number")
    return values


@grouped
def goodput(
    asked: ClusterOptions,
    system: Annotated[list[str] | None, typer.Option("--system", help="Only this one; may be repeated.")] = None,
    interval: Annotated[
        float | None, typer.Option("--interval", help="Seconds between periodic checkpoints. Default: the best.")
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Also simulate each system (extra `plan`).")] = False,
    failures: Annotated[int, typer.Option("--failures", min=80, max=100_000, help="With --simulate: how many.")] = 400,
    seed: Annotated[int, typer.Option("--seed", help="With --simulate: of the dice.")] = 1,
    bursts: Annotated[
        list[str] | None,
        typer.Option("--bursts", metavar="KIND=SHARE", help="leaf=, rack=: share of failures that take all of one; "
                     "follow=: probability that one more follows. May be repeated; simulated only."),
    ] = None,
    follow_within: Annotated[float, typer.Option("--follow-within", help="Seconds, with --bursts follow=.")] = 600.0,
    leaf_size: Annotated[int, typer.Option("--leaf-size", help="Servers of a leaf, with --bursts.")] = 16,
    rack_size: Annotated[int, typer.Option("--rack-size", help="Servers of a rack, with --bursts.")] = 4,
    spread: Annotated[
        bool, typer.Option("--spread", help="With --bursts: copies of a group lie on different leaves.")
    ] = False,
    as_json: JsonOption = False, plot: PlotOption = None,
) -> None:
    """Share of the time that trains under failures, for each checkpointing system, and what the rest costs a day."""
    from flowcheck.plan.goodput.cluster import read_cluster
    from flowcheck.plan.goodput.goodput import Simulation, answer
    from flowcheck.plan.goodput.simulation import Bursts

    inputs = Inputs()
    cluster = read_cluster(given(asked), inputs, asked.scale)
    if interval is not None:
        need_positive(interval, "--interval", "seconds")
        inputs.note("interval", interval, "s")
    simulation = None
    need(simulate or not bursts, "bursts are simulated only", "--bursts", "give --simulate too")
    need(bool(bursts) or not spread, "says where the copies lie that bursts take", "--spread",
         "give --simulate and --bursts too")
    if simulate:
        shares = _bursts(bursts or [])
        simulation = Simulation(failures, seed, Bursts(**shares, within=follow_within, leaf_size=leaf_size,
                                                       rack_size=rack_size, spread=spread))
        for name, value in (("failures", failures), ("seed", seed), *shares.items()):
            inputs.note(name, value, "", "of the simulation")
        if bursts:
            for name, value in (("follow-within", follow_within), ("leaf-size", leaf_size), ("rack-size", rack_size),
                                ("spread", spread)):
                inputs.note(name, value, "", "of the simulation")
    raise typer.Exit(publish(answer(cluster, inputs, interval, system or (), simulation), as_json, plot))


def _bursts(given: Sequence[str]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for entry in given:
        name, equals, text = entry.partition("=")
        need(bool(equals) and name in ("leaf", "rack", "follow"), "is not KIND=SHARE", f"--bursts {entry}",
             "leaf=SHARE, rack=SHARE or follow=PROBABILITY")
        need(name not in shares, f"{name} is given twice", f"--bursts {entry}", "give it once")
        try:
            shares[name] = float(text)
        except ValueError:
            need(False, f"{text} is not a number", f"--bursts {entry}", "write a number from 0 to 1")
    return shares
