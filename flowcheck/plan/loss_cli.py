"""`flowcheck plan loss`: options in, an answer out. The formulas are in loss_law.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import typer

from flowcheck.plan import loss_law as law
from flowcheck.plan.amounts import amount
from flowcheck.plan.answer import (
    Answer,
    Grid,
    Inputs,
    Plot,
    Result,
    Series,
    Value,
    need,
    need_at_most,
    need_positive,
    need_probability,
    shown,
)
from flowcheck.plan.output import JsonOption, PlotOption, publish

__all__ = ["loss", "loss_answer"]

PAPER = "FlowCheck, equation (2)'s example"
WIRE_SHARE = {"ll": 1 / 2, "ll128": 15 / 16, "simple": 1.0}  # data bytes per wire byte, nccl-wire 4
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Of the fp32 parameter, and what the optimizer keeps of it.
STATE_BYTES = {"adam": 12, "adamw": 12, "amsgrad": 16, "sgd": 4, "momentum": 8}
LOSSES = [10 ** (exponent / 2) for exponent in range(-20, -5)]  # of the plot, 1e-10 to 1e-3
SECONDS_PER_DAY = 86400
MOST_WATCHED = 10**9  # some seconds of summing; more than a job has
MOST_PARAMETERS, MOST_PACKETS = 1e15, 1e15  # a thousand times the largest model
IN_TABLE = 5  # mirrored ports from 1 on that have a row; as many as are asked for have one, too


def loss(
    ranks: Annotated[int | None, typer.Option("--ranks", help="Hosts of the data-parallel group.")] = None,
    mirrors: Annotated[int | None, typer.Option("--mirrors", help="Mirrored ports (hosts) of the group.")] = None,
    loss: Annotated[float | None, typer.Option("--loss", help="Probability that the mirror loses a copy.")] = None,
    packets: Annotated[
        float | None,
        typer.Option("--packets", help="Reduced packets of an iteration. Default: from --parameters.", parser=amount,
                     metavar="NUMBER"),
    ] = None,
    parameters: Annotated[
        float | None,
        typer.Option("--parameters", help="Of the group's model: 7e9, 70B.", parser=amount, metavar="NUMBER"),
    ] = None,
    direction: Annotated[
        law.Direction | None, typer.Option("--direction", help="What is copied of a port.")
    ] = None,
    algorithm: Annotated[Literal["ring", "tree"] | None, typer.Option("--algorithm", help="NCCL's.")] = None,
    positions: Annotated[
        str | None, typer.Option("--positions", help="Ring positions of the ports, such as 0,2,5. Default: the worst.")
    ] = None,
    protocol: Annotated[Literal["ll", "ll128", "simple"] | None, typer.Option("--protocol", help="NCCL's.")] = None,
    mtu: Annotated[int | None, typer.Option("--mtu", help="RDMA path MTU.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option("--dtype", help="Of the gradients.")
    ] = None,
    optimizer: Annotated[
        Literal["adam", "adamw", "amsgrad", "sgd", "momentum"] | None,
        typer.Option("--optimizer", help="What a loss costs."),
    ] = None,
    wanted: Annotated[
        float | None, typer.Option("--wanted", help="Share of iterations that may stay incomplete.")
    ] = None,
    iteration_s: Annotated[float | None, typer.Option("--iteration-s", help="Seconds of an iteration.")] = None,
    iterations: Annotated[int | None, typer.Option("--iterations", help="So many are watched.")] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """How often does an iteration stay incomplete, how many ports are needed, and what does a loss cost?

    Exit status 1: more iterations stay incomplete than --wanted.
    """
    made = loss_answer(
        ranks=ranks, mirrors=mirrors, loss=loss, packets=packets, parameters=parameters, direction=direction,
        algorithm=algorithm, positions=positions, protocol=protocol, mtu=mtu, dtype=dtype, optimizer=optimizer,
        wanted=wanted, iteration_s=iteration_s, iterations=iterations,
    )
    raise typer.Exit(publish(made, as_json, plot))


def loss_answer(
    *, ranks: int | None = None, mirrors: int | None = None, loss: float | None = None, packets: float | None = None,
    parameters: float | None = None, direction: law.Direction | None = None,
    algorithm: str | None = None, positions: str | None = None, protocol: str | None = None, mtu: int | None = None,
    dtype: str | None = None, optimizer: str | None = None, wanted: float | None = None,
    iteration_s: float | None = None, iterations: int | None = None, sources: Mapping[str, str] | None = None,
) -> Answer:
    """The answer of `flowcheck plan loss` to these options; None: not given. sources: where options come from that the
    person who asks has not given. Raises UserError."""
    from flowcheck.plan.wire_volume import MTUS

    inputs = Inputs(sources)
    n = inputs.take("ranks", ranks, 8, "hosts", PAPER)
    m = inputs.take("mirrors", mirrors, len(positions.split(",")) if positions else min(3, n), "ports",
                    "what `flowcheck switch plan` takes, and the paper recommends")
    p = inputs.take("loss", loss, 1e-9, "per copy", PAPER)
    way: law.Direction = inputs.take("direction", direction, "both", "", "what `flowcheck switch plan` prefers")
    kind = inputs.take("algorithm", algorithm, "ring", "", "equation (2) is of rings")
    wire = inputs.take("protocol", protocol, "simple", "", "NCCL's for large calls, nccl-wire 3.4")
    size = inputs.take("mtu", mtu, 4096, "bytes", "the largest of RoCE")
    element = inputs.take("dtype", dtype, "float32", "", "DDP's without a communication hook")
    need_probability(p, "--loss")
    need_at_most(n, law.MOST_RANKS, "--ranks", "no group has so many")
    need(size in MTUS, f"{size} is not an RDMA path MTU", "--mtu", "256, 512, 1024, 2048 or 4096")
    per_packet = size * WIRE_SHARE[wire] / ELEMENT_BYTES[element]
    if parameters is None:
        k = inputs.take("packets", packets, 16e6, "per iteration", PAPER)
        need_positive(k, "--packets")
        need_at_most(k, MOST_PACKETS, "--packets", "no iteration has so many")
        total = inputs.note("parameters", k * per_packet, "", "packets x elements of a packet")
    else:
        need(packets is None, "--packets and --parameters say the same thing", "--packets", "give one of them")
        need_positive(parameters, "--parameters")
        need_at_most(parameters, MOST_PARAMETERS, "--parameters", "no model has so many")
        total = inputs.note("parameters", parameters)
        k = inputs.note("packets", float(math.ceil(total / per_packet)), "per iteration", "parameters / elements")
    state = STATE_BYTES[inputs.take("optimizer", optimizer, "adam", "", "12 bytes per parameter in float32")]
    limit = inputs.take("wanted", wanted, 1e-8, "of the iterations", "FlowCheck, Figure 13")
    seconds = inputs.take("iteration-s", iteration_s, 10.0, "s", "an example: no paper says it")
    watched = inputs.take("iterations", iterations, 100, "", "FlowCheck, Figure 13")
    need_probability(limit, "--wanted")
    need_positive(seconds, "--iteration-s", "seconds")
    need(1 <= watched <= MOST_WATCHED, f"{watched} iterations cannot be watched", "--iterations",
         f"1 to {MOST_WATCHED}")
    if positions is None:
        copies = law.worst(n, m, way, kind)
    else:
        named = _positions(positions)
        need(len(named) == m, f"{len(named)} positions for {m} mirrored ports", "--positions", "leave --mirrors out")
        copies = law.ring_copies(n, named, way) if kind == "ring" else law.tree_copies(n, named, way)
        inputs.note("positions", positions)
    rate, lost = law.incomplete(copies, k, p), law.missing(copies, k, p)
    enough = law.mirrors_needed(n, k, p, limit, way, kind)
    low, high = law.binomial_interval(watched, rate)
    exact = f"exact law of a {kind}"
    results = [
        Result("copies of the packets seen least", copies.least, "", exact),
        Result("an iteration stays incomplete", rate, "probability", exact),
        Result("so one in", 1 / rate if rate else math.inf, "iterations", ""),
        Result("that is one in", seconds / rate / SECONDS_PER_DAY if rate else math.inf, "days", "x iteration-s"),
        Result("packets missing", lost, "per iteration", "sum of packets x loss^copies"),
        Result("mirrored ports needed", enough if enough else "more than there are", "ports", "fewest within --wanted"),
        Result("a lost packet costs, by ranges", per_packet * state, "bytes", "its elements x (parameter + state)"),
        Result("by the whole state again", total * state, "bytes", "all elements x (parameter + state)"),
        Result("expected, by ranges", lost * per_packet * state, "bytes/iteration", ""),
        Result("expected, by the whole state", rate * total * state, "bytes/iteration", ""),
        Result("seen incomplete, 99 %", f"{low} to {high}", f"of {watched:,}", "binomial interval"),
    ]
    notes = [
        "every copy is lost by itself: an assumption. A monitor port that overflows loses bursts of all its sources at "
        "once; measure that, it cannot be computed",
    ]
    if high == 0:
        notes.append(
            f"{watched:,} iterations cannot show this rate: none of them is expected to be incomplete. It takes "
            f"{shown(math.log(100) / rate) if rate else 'infinitely many'} to see one with 99 %"
        )
    if copies.least == 0:
        notes.append("some packets are not mirrored in reduced form at all: one direction of one port never is enough")
    good = rate <= limit
    verdict = (
        f"{'holds' if good else 'does not hold'}: {shown(rate)} of the iterations stay incomplete, {shown(limit)} may"
        + ("" if good or enough is None else f"; {enough} mirrored ports would do")
    )
    grid = Grid("by_mirrors", "By mirrored ports", ("ports", "eq. (2), edges", "ring, apart", "ring, neighbours",
                "tree, worst"), [_row(n, count, way, k, p) for count in _counts(n, m)],
                "loss_law: the probability that an iteration stays incomplete")
    return Answer(
        "loss", "How often does an iteration stay incomplete, and what does that cost?", inputs, results, [grid],
        verdict, good, notes, _figure_13(n, m, way, kind, k, p),
    )


def _counts(ranks: int, mirrors: int) -> list[int]:
    """Mirrored ports that the table has: the first few, and as many as are asked for."""
    return sorted({*range(1, min(ranks, IN_TABLE) + 1), mirrors})


def _positions(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    need(all(part.isdecimal() for part in parts), f"{text!r} is not a list of whole numbers", "--positions",
         "write 0,2,5")
    return [int(part) for part in parts]


def _row(ranks: int, mirrors: int, way: law.Direction, packets: float, p: float) -> list[Value]:
    return [
        mirrors,
        law.equation_2(ranks, mirrors, packets, p),
        law.incomplete(law.ring_copies(ranks, law.apart(ranks, mirrors), way), packets, p),
        law.incomplete(law.worst(ranks, mirrors, way, "ring"), packets, p),
        law.incomplete(law.worst(ranks, mirrors, way, "tree"), packets, p),
    ]


def _figure_13(
    ranks: int, mirrors: int, way: law.Direction, kind: str, packets: float, p: float
) -> list[Plot]:
    """The paper's Figure 13: iterations that stay incomplete, over the mirror's loss; and over the mirrored ports."""
    losses = sorted({*LOSSES, p} - {0.0})
    counts = _counts(ranks, mirrors)

    def over_loss(copies: law.Copies) -> list[float | None]:
        return [law.incomplete(copies, packets, one) or None for one in losses]

    lines = [
        Series(f"{count} mirrored, {way}", losses, over_loss(law.worst(ranks, count, way, kind)))
        for count in sorted({*range(1, min(ranks, 3) + 1), mirrors})
    ]
    lines += [
        Series(f"equation (2), {count} edges", losses, [law.equation_2(ranks, count, packets, one) or None
               for one in losses], dashed=True)
        for count in (2, 3) if count <= ranks
    ]
    exact = [law.incomplete(law.worst(ranks, count, way, kind), packets, p) or None for count in counts]
    paper = [law.equation_2(ranks, count, packets, p) or None for count in counts]
    heading = f"Incomplete iterations, {kind} of {ranks}, {packets:.3g} packets"
    return [
        Plot(heading, "loss of a copy", "probability", lines, log_x=True, log_y=True),
        Plot(f"{heading}, loss {p:.3g}", "mirrored ports (edges for equation (2))", "probability",
             [Series(f"exact, {way}", [float(c) for c in counts], exact),
              Series("equation (2)", [float(c) for c in counts], paper, dashed=True)], log_y=True),
    ]
