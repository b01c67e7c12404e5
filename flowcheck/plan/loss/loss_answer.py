"""What `flowcheck plan loss` says: results out. The formulas are in traffic/loss_law.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flowcheck.plan.answers.answer import (
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
from flowcheck.plan.loss.loss_options import LossOptions
from flowcheck.plan.traffic import loss_law as law
from flowcheck.plan.traffic.wire_volume import MTUS

__all__ = ["loss_answer"]

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


@dataclass(frozen=True)
class _Case:
    """ranks, mirrors: hosts of the group, and those of them that are mirrored. loss: of a copy. packets: reduced ones
    of an iteration, each with per_packet of its `parameters`; state: bytes of one. wanted: the share of iterations that
    may stay incomplete. seconds: of one. watched: how many."""

    ranks: int
    mirrors: int
    loss: float
    way: law.Direction
    kind: str
    per_packet: float
    packets: float
    parameters: float
    state: int
    wanted: float
    seconds: float
    watched: int
    copies: law.Copies

    @property
    def rate(self) -> float:
        """Of iterations that stay incomplete."""
        return law.incomplete(self.copies, self.packets, self.loss)


def loss_answer(asked: LossOptions, sources: Mapping[str, str] | None = None) -> Answer:
    """sources: where options come from that the person who asks has not given. Raises UserError."""
    inputs = Inputs(sources)
    case = _case(asked, inputs)
    enough = law.mirrors_needed(case.ranks, case.packets, case.loss, case.wanted, case.way, case.kind)
    low, high = law.binomial_interval(case.watched, case.rate)
    good = case.rate <= case.wanted
    verdict = (
        f"{'holds' if good else 'does not hold'}: {shown(case.rate)} of the iterations stay incomplete, "
        f"{shown(case.wanted)} may" + ("" if good or enough is None else f"; {enough} mirrored ports would do")
    )
    grid = Grid("by_mirrors", "By mirrored ports", ("ports", "eq. (2), edges", "ring, apart", "ring, neighbours",
                "tree, worst"), [_row(case, count) for count in _counts(case)],
                "loss_law: the probability that an iteration stays incomplete")
    return Answer(
        "loss", "How often does an iteration stay incomplete, and what does that cost?", inputs,
        _results(case, enough, low, high), [grid], verdict, good, _notes(case, high), _figure_13(case),
    )


def _case(asked: LossOptions, inputs: Inputs) -> _Case:
    """Every value noted with its source."""
    places = asked.positions
    n = inputs.take("ranks", asked.ranks, 8, "hosts", PAPER)
    m = inputs.take("mirrors", asked.mirrors, len(places.split(",")) if places else min(3, n), "ports",
                    "what `flowcheck switch plan` takes, and the paper recommends")
    p = inputs.take("loss", asked.loss, 1e-9, "per copy", PAPER)
    way: law.Direction = inputs.take("direction", asked.direction, "both", "", "what `flowcheck switch plan` prefers")
    kind = inputs.take("algorithm", asked.algorithm, "ring", "", "equation (2) is of rings")
    wire = inputs.take("protocol", asked.protocol, "simple", "", "NCCL's for large calls, nccl-wire 3.4")
    size = inputs.take("mtu", asked.mtu, 4096, "bytes", "the largest of RoCE")
    element = inputs.take("dtype", asked.dtype, "float32", "", "DDP's without a communication hook")
    need_probability(p, "--loss")
    need_at_most(n, law.MOST_RANKS, "--ranks", "no group has so many")
    need(size in MTUS, f"{size} is not an RDMA path MTU", "--mtu", "256, 512, 1024, 2048 or 4096")
    per_packet = size * WIRE_SHARE[wire] / ELEMENT_BYTES[element]
    packets, parameters = _packets(asked, per_packet, inputs)
    state = STATE_BYTES[inputs.take("optimizer", asked.optimizer, "adam", "", "12 bytes per parameter in float32")]
    limit = inputs.take("wanted", asked.wanted, 1e-8, "of the iterations", "FlowCheck, Figure 13")
    seconds = inputs.take("iteration-s", asked.iteration_s, 10.0, "s", "an example: no paper says it")
    watched = inputs.take("iterations", asked.iterations, 100, "", "FlowCheck, Figure 13")
    need_probability(limit, "--wanted")
    need_positive(seconds, "--iteration-s", "seconds")
    need(1 <= watched <= MOST_WATCHED, f"{watched} iterations cannot be watched", "--iterations",
         f"1 to {MOST_WATCHED}")
    if places is None:
        copies = law.worst(n, m, way, kind)
    else:
        named = _positions(places)
        need(len(named) == m, f"{len(named)} positions for {m} mirrored ports", "--positions", "leave --mirrors out")
        copies = law.ring_copies(n, named, way) if kind == "ring" else law.tree_copies(n, named, way)
        inputs.note("positions", places)
    return _Case(n, m, p, way, kind, per_packet, packets, parameters, state, limit, seconds, watched, copies)


def _packets(asked: LossOptions, per_packet: float, inputs: Inputs) -> tuple[float, float]:
    """(reduced packets of an iteration, parameters): one of them is given, or neither."""
    if asked.parameters is None:
        k = inputs.take("packets", asked.packets, 16e6, "per iteration", PAPER)
        need_positive(k, "--packets")
        need_at_most(k, MOST_PACKETS, "--packets", "no iteration has so many")
        return k, inputs.note("parameters", k * per_packet, "", "packets x elements of a packet")
    need(asked.packets is None, "--packets and --parameters say the same thing", "--packets", "give one of them")
    need_positive(asked.parameters, "--parameters")
    need_at_most(asked.parameters, MOST_PARAMETERS, "--parameters", "no model has so many")
    total = inputs.note("parameters", asked.parameters)
    return inputs.note("packets", float(math.ceil(total / per_packet)), "per iteration", "parameters / elements"), total


def _results(case: _Case, enough: int | None, low: int, high: int) -> list[Result]:
    rate, lost = case.rate, law.missing(case.copies, case.packets, case.loss)
    exact, of_packet = f"exact law of a {case.kind}", case.per_packet * case.state
    return [
        Result("copies of the packets seen least", case.copies.least, "", exact),
        Result("an iteration stays incomplete", rate, "probability", exact),
        Result("so one in", 1 / rate if rate else math.inf, "iterations", ""),
        Result("that is one in", case.seconds / rate / SECONDS_PER_DAY if rate else math.inf, "days", "x iteration-s"),
        Result("packets missing", lost, "per iteration", "sum of packets x loss^copies"),
        Result("mirrored ports needed", enough if enough else "more than there are", "ports", "fewest within --wanted"),
        Result("a lost packet costs, by ranges", of_packet, "bytes", "its elements x (parameter + state)"),
        Result("by the whole state again", case.parameters * case.state, "bytes",
               "all elements x (parameter + state)"),
        Result("expected, by ranges", lost * case.per_packet * case.state, "bytes/iteration", ""),
        Result("expected, by the whole state", rate * case.parameters * case.state, "bytes/iteration", ""),
        Result("seen incomplete, 99 %", f"{low} to {high}", f"of {case.watched:,}", "binomial interval"),
    ]


def _notes(case: _Case, high: int) -> list[str]:
    """high: of the iterations that are watched so many may be incomplete."""
    notes = [
        "every copy is lost by itself: an assumption. A monitor port that overflows loses bursts of all its sources at "
        "once; measure that, it cannot be computed",
    ]
    if high == 0:
        notes.append(
            f"{case.watched:,} iterations cannot show this rate: none of them is expected to be incomplete. It takes "
            f"{shown(math.log(100) / case.rate) if case.rate else 'infinitely many'} to see one with 99 %"
        )
    if case.copies.least == 0:
        notes.append("some packets are not mirrored in reduced form at all: one direction of one port never is enough")
    return notes


def _counts(case: _Case) -> list[int]:
    """Mirrored ports that the table has: the first few, and as many as are asked for."""
    return sorted({*range(1, min(case.ranks, IN_TABLE) + 1), case.mirrors})


def _positions(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    need(all(part.isdecimal() for part in parts), f"{text!r} is not a list of whole numbers", "--positions",
         "write 0,2,5")
    return [int(part) for part in parts]


def _row(case: _Case, mirrors: int) -> list[Value]:
    ranks, way, packets, p = case.ranks, case.way, case.packets, case.loss
    return [
        mirrors,
        law.equation_2(ranks, mirrors, packets, p),
        law.incomplete(law.ring_copies(ranks, law.apart(ranks, mirrors), way), packets, p),
        law.incomplete(law.worst(ranks, mirrors, way, "ring"), packets, p),
        law.incomplete(law.worst(ranks, mirrors, way, "tree"), packets, p),
    ]


def _figure_13(case: _Case) -> list[Plot]:
    """The paper's Figure 13: iterations that stay incomplete, over the mirror's loss; and over the mirrored ports."""
    ranks, mirrors, way, kind, packets, p = (
        case.ranks, case.mirrors, case.way, case.kind, case.packets, case.loss
    )
    losses = sorted({*LOSSES, p} - {0.0})
    counts = _counts(case)

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
