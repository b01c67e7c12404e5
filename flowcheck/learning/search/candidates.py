"""The search for the one explanation: each kind of program over every hypothesis, and what several differ in.

    Search(read, hints, budget)
        .candidates(kind, hypotheses)   the loop: every explanation by one kind of program
        .alone(hypotheses)              by AllReduce calls alone
        .check_communicators(chosen)    would several communicators explain it as well?
    only(found)                         the one candidate
    check_rings(chosen, siblings)       would another ring order explain it as well?

One candidate is a result, none or several are a refusal that names them: a gradient placed on a guess would look like
any other. Two are the same if they place the same bytes of the same calls at the same places. Pure but for `read`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flowcheck.errors import UserError
from flowcheck.job.model import Collective, dtype_size
from flowcheck.learning.connections import PlacedConnection
from flowcheck.learning.hints import Hints
from flowcheck.learning.search.ddp import announced, begins
from flowcheck.learning.search.programs import Failure, Program, ProgramKind, Stage, allreduce_alone, replayed
from flowcheck.learning.search.ranks import RANKS_TRIED
from flowcheck.learning.search.walk import Budget, BudgetExceeded, Hypothesis, Reader, Walk, tree_number
from parser.chunk_layout import Protocol, Topology
from parser.nccl import WireError
from parser.wire import plan_call

__all__ = ["Candidate", "Progress", "Search", "check_rings", "only"]

Progress = Callable[[int, int], None]  # (hypotheses tried, of how many)

RANKS_BARE = 16  # tried where nothing says how many ranks there are, and no announcement rules most of them out
EXPLANATIONS_MAX = 16  # more need not be found to refuse
SHOWN = 4


@dataclass(frozen=True)
class Candidate:
    """A hypothesis and a program of calls that explain every observed message."""

    hypothesis: Hypothesis
    program: Program

    def walk(self, connections: Iterable[PlacedConnection], topology: Topology) -> Walk:
        """By its rules over other connections or rings."""
        both = topology.ranks == 2 or self.hypothesis.tree
        return Walk(
            topology, [*connections], self.hypothesis.variant.mtu, algorithms=("ring", "tree") if both else ("ring",)
        )

    @property
    def key(self) -> tuple:
        """The same for candidates that place the same bytes of the same calls at the same places."""
        h, program = self.hypothesis, self.program
        calls = json.dumps([vars(c) for c in program.calls], sort_keys=True)
        # a QP number is unique at its host only: without addresses two swapped ranks would look the same
        ends = tuple((on.channel, on.src, on.dst, on.connection.name()) for on in h.connections)
        model = json.dumps([vars(e) for e in program.model])
        return program.signature, calls, model, h.ranks, ends, program.cut

    def described(self) -> str:
        about = f"{self.hypothesis.about}: " if self.hypothesis.about else ""
        return f"{about}{self.program.called()}"


@dataclass
class Search:
    """One search over the observed messages. read: fetches payloads. failure: the attempt that came furthest."""

    read: Reader
    hints: Hints
    budget: Budget
    progress: Progress | None = None
    failure: Failure = field(default_factory=Failure)

    def candidates(self, kind: ProgramKind, hypotheses: Sequence[Hypothesis]) -> list[Candidate]:
        """Every explanation by this kind of program. Raises UserError where the budget ends first."""
        found: list[Candidate] = []
        distinct: set[tuple] = set()  # many versions may give one explanation: only different ones are a refusal
        gathers: dict[tuple[int, str, int], bool] = {}  # sizes of DDP's first call do not depend on places in the ring
        for number, h in enumerate(hypotheses):
            if self.progress is not None and number % 16 == 0:
                self.progress(number, len(hypotheses))
            tried = h.variant
            self.failure.where = (
                f"{h.about or f'{h.ranks} ranks'}, NCCL {tried.version}, "
                f"{tried.channels} channel{'s' * (tried.channels > 1)}, "
                f"{tried.algorithms[0]}{' first' * (len(tried.algorithms) > 1)}"
            )
            try:
                if kind is announced:
                    key = h.ranks, h.variant.version, h.variant.channels
                    if key not in gathers:
                        gathers[key] = begins(h.walk(self.budget), self.failure)
                    if not gathers[key] or _same_plans(h, found):
                        continue
                for program in kind(h.walk(self.budget), self.hints, self.read, self.failure):
                    found.append(Candidate(h, program))
                    if kind is allreduce_alone:
                        distinct.add(found[-1].key)
                        if len(found) >= EXPLANATIONS_MAX and len(distinct) > 1:
                            return found
            except WireError as error:
                self.failure.note(str(error))
            except BudgetExceeded:
                raise UserError(
                    f"the search was stopped after {number} of {len(hypotheses)} combinations of ranks, places in the "
                    f"ring, channels and NCCL version, with {len(found)} explanations; the others were not tried",
                    remedy="narrow it down: --nccl-log or --nccl-version, --rank, --dtype, --buckets, mirror a second "
                    "rank, or give a manifest with --job",
                ) from None
        return found

    def alone(self, hypotheses: Sequence[Hypothesis]) -> list[Candidate]:
        """Explanations by AllReduce calls alone: with the ranks that are said first, then with others."""
        few = [h for h in hypotheses if not h.several or h.ranks <= RANKS_BARE]
        split = [h for h in few if h.split]
        found = self.candidates(allreduce_alone, [h for h in few if not h.split])
        if not split:
            return found
        if found:
            only(found)  # raises: then the others need not be looked at
        if not found or found[0].hypothesis.several:
            return found + self.candidates(allreduce_alone, split)
        first = found[0]
        for h in split:  # the same calls, with rank 0 at another place
            one, other = h.variant, first.hypothesis.variant
            if (one.version, one.channels) == (other.version, other.channels):
                if replayed(h.walk(self.budget), first.program):
                    found.append(Candidate(h, first.program))
        return found

    def unexplained(self, several: bool) -> UserError:
        """Nothing explains all messages: where the best attempt stopped, and what it was. several: nothing says how
        many ranks there are."""
        stage = self.failure.reached[0]
        tried = RANKS_TRIED if stage else RANKS_BARE
        beside = f". Up to {tried} ranks were tried; more need --nccl-log or a manifest" if several else ""
        said = {
            Stage.NOTHING: "neither a DDP job nor AllReduce calls alone",
            Stage.GATHERED: "the first calls have the sizes of DDP's start-up and other contents",
            Stage.SHAPES: "it is a DDP job, by its start-up, and what follows does not fit",
        }[stage]
        return UserError(
            f"no program of calls explains all messages ({said}); the best attempt stops here: "
            f"{self.failure.text or 'nothing fits'}{beside}",
            remedy=self.failure.remedy
            or "give --job (docs/reference/manifest.md), or hints: --dtype, --buckets, --rank, --nccl-log",
        )

    def check_communicators(self, chosen: Candidate) -> None:
        """Calls alone on several connections between the same hosts: one communicator with channels, or several
        communicators? Each would have connections, buffers and step counters of its own either way."""
        h = chosen.hypothesis
        channels = sorted({on.channel for on in h.connections})
        if h.source != "traffic" or h.connected or chosen.program.model or len(channels) < 2:
            return
        half = len(channels) // 2
        partitions = [[[c] for c in channels]]
        if len(channels) % 2 == 0 and half > 1:
            partitions += [[channels[:half], channels[half:]], [channels[::2], channels[1::2]]]
        for parts in partitions:
            if all(self._explains_itself(chosen, part) for part in parts):
                raise UserError(
                    f"2 explanations fit every message: (1) one communicator with {len(channels)} channels, "
                    f"{chosen.program.called()} (2) {len(parts)} communicators of the same hosts with calls of their "
                    f"own, of {len(parts[0])} channel{'s' * (len(parts[0]) > 1)} each",
                    remedy="say the sizes of whole calls with --buckets, give --nccl-log, or name the flows with "
                    "--job; NCCL's TCP bootstrap in the capture would tell",
                )

    def _explains_itself(self, chosen: Candidate, part: list[int]) -> bool:
        h = chosen.hypothesis
        placed = [replace(on, channel=part.index(on.channel)) for on in h.connections if on.channel in part]
        rings = tuple(h.topology.ring(channel) for channel in part)
        walk = chosen.walk(placed, replace(h.topology, channels=len(part), rings=rings))
        walk.algorithms = ("tree" if chosen.program.algorithms == {"tree"} else "ring",)
        walk.budget = self.budget
        try:
            return next(allreduce_alone(walk, self.hints, self.read, Failure()), None) is not None
        except (UserError, WireError):  # too many ways are ways
            return True


def _same_plans(h: Hypothesis, found: Sequence[Candidate]) -> bool:
    """Does this hypothesis lay out every call of what the same connections were explained with just as that one did?
    Then it explains the same, and the messages need not be compared again."""
    alike = (h.proposal, h.variant.algorithms)
    known = [f for f in found if (f.hypothesis.proposal, f.hypothesis.variant.algorithms) == alike]
    return bool(known) and all(
        _segments(h.topology, call) == _segments(f.hypothesis.topology, call) for f in known for call in f.program.calls
    )


def _segments(topology: Topology, call: Collective) -> tuple:
    plan = plan_call(
        topology, call.op, Protocol[(call.protocol or "ll").upper()], call.count, dtype_size(call.dtype),
        root=call.root, algorithm=call.algorithm or "ring",
    )
    trees = tuple(tree_number(topology.channels, c) for c in range(plan.channels)) if call.algorithm == "tree" else ()
    return tuple(part for part in plan.segments if part), trees


# -- several explanations --------------------------------------------------------------------------------


def _sizes(f: Candidate) -> str:
    calls = f.program.collectives.steady or f.program.collectives.iteration_0
    return "+".join(str(c.count) for c in calls[:4])


#: (what may differ, its value, the option that decides, are the values shown), the most telling first.
DIFFERENCES: tuple[tuple[str, Callable[[Candidate], Any], str, bool], ...] = (
    ("the number of ranks", lambda f: f.hypothesis.ranks, "--nccl-log", True),
    ("the place in the ring", lambda f: f.hypothesis.about, "--rank or --nccl-log", False),
    ("ring or tree", lambda f: sorted(f.program.algorithms or {"ring"}), "--algorithm or --nccl-log", False),
    ("the element type", lambda f: f.program.dtype, "--dtype", True),
    ("the sizes of the calls", _sizes, "--buckets", True),
    ("where an iteration ends", lambda f: (f.program.iterations, f.program.cut), "--buckets", False),
    ("shapes", lambda f: str([e.shape for e in f.program.model]), "--job", False),
    ("the number of channels", lambda f: f.hypothesis.variant.channels, "--nccl-log", False),
    ("the NCCL version", lambda f: f.hypothesis.variant.version, "--nccl-version or --nccl-log", True),
    ("the connections", lambda f: sorted(on.connection.name() for on in f.hypothesis.connections), "--job", False),
)


def only(found: Sequence[Candidate]) -> Candidate:
    """The explanation, if all are the same in everything that places a byte. Raises UserError naming what they differ
    in, and which option decides."""
    by_key: dict[tuple, Candidate] = {}
    for f in found:
        by_key.setdefault(f.key, f)
    distinct = list(by_key.values())
    if len(distinct) == 1:
        return found[0]
    differ: list[str] = []
    options: list[str] = []
    for what, value, option, shown in DIFFERENCES:
        values = list(dict.fromkeys(str(value(f)) for f in distinct))
        if len(values) > 1 and (what not in ("the number of channels", "the NCCL version") or not differ):
            named = f" ({', '.join(values[:6])}{', ...' if len(values) > 6 else ''})" if shown else ""
            differ.append(f"{what}{named}")
            options.append(option)
    texts = list(dict.fromkeys(f"{f.described()};" for f in distinct))
    if len(texts) == 1:  # same calls, other chunk layout
        texts = list(dict.fromkeys(
            f"{f.described()} as NCCL {one.version} lays them out on {one.channels} channels;"
            for f in distinct for one in (f.hypothesis.variant,)
        ))
    few = [*texts[: SHOWN - 1], texts[-1]] if len(texts) > SHOWN else texts
    listed = " ".join(f"({i}) {text}" for i, text in enumerate(few, 1))
    raise UserError(
        f"{len(distinct)} explanations fit every message, and nothing decides between them. They differ in "
        f"{', '.join(differ) or 'the layout'}: {listed}"
        + (f" and {len(texts) - len(few)} more" if len(texts) > len(few) else ""),
        remedy=f"say which with {', '.join(dict.fromkeys(options)) or '--nccl-log'}, or give a manifest with --job. "
        "NCCL's TCP bootstrap in the capture names ranks, channels and connections",
    )


def check_rings(chosen: Candidate, siblings: Sequence[Hypothesis]) -> None:
    """Each channel may have its own ring order: would another one explain a single channel as well? siblings: of the
    same connections. Raises UserError."""
    h, topology = chosen.hypothesis, chosen.hypothesis.topology
    channels = sorted({on.channel for on in h.connections})
    if len(channels) < 2 or len(siblings) < 2:
        return
    base = chosen.walk(h.connections, topology)
    replayed(base, chosen.program)
    for other in siblings:
        rings = other.rings * topology.channels if len(other.rings) == 1 else other.rings
        if other.ranks != h.ranks or rings == topology.rings or other.split != h.split:
            continue
        for channel in channels:
            placed = [on for on in h.connections if on.channel != channel]
            placed += [on for on in other.connections if on.channel == channel]
            placed.sort(key=lambda on: (on.channel, on.connection.name()))
            mixed = tuple(rings[c] if c == channel else ring for c, ring in enumerate(topology.rings))
            walk = chosen.walk(placed, replace(topology, rings=mixed))
            if replayed(walk, chosen.program) and sorted(walk.signature) != sorted(base.signature):
                raise UserError(
                    f"two ring orders explain every message of channel {channel}: (1) {list(topology.rings[channel])} "
                    f"(2) {list(rings[channel])}",
                    remedy="give NCCL's log with --nccl-log, or the rings in a manifest with --job",
                )
