"""One explanation or none: what several of them differ in, and which option decides.

    only(found) -> Found              raises UserError naming what the explanations differ in
    only_ring, only_communicator      would another ring order, or several communicators, explain it as well?
    unexplained(failure)              the refusal when nothing explains all messages

Two explanations are the same if they place the same bytes of the same calls at the same places. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flowcheck.errors import UserError
from flowcheck.learning.bare import bare
from flowcheck.learning.hints import Hints
from flowcheck.learning.layout import Layout
from flowcheck.learning.program import Failure, Program, Stage, replayed
from flowcheck.learning.walk import Budget, Reader, Walk, Wire
from parser.wire import Topology, WireError

__all__ = ["Found", "key_of", "only", "only_communicator", "only_ring", "unexplained"]

SHOWN = 4


@dataclass
class Found:
    """One explanation of all messages. version_reason: what limits the NCCL version. preference: of algorithms, in
    the hypothesis that found it."""

    layout: Layout
    topology: Topology
    program: Program
    version_reason: str
    mtu: int
    preference: tuple[str, ...]

    def walk(self, wires: list[Wire], topology: Topology) -> Walk:
        """A walk by this explanation's rules over other wires."""
        return Walk(
            topology, wires, self.mtu, any(w.connection.pairs for w in wires),
            algorithms=("ring", "tree") if topology.ranks == 2 or self.layout.tree else ("ring",),
        )


def _algorithm(f: Found) -> str:
    return " and ".join(sorted(f.program.algorithms)) or "ring"


def _sizes(f: Found) -> str:
    calls = f.program.collectives.steady or f.program.collectives.iteration_0
    return "+".join(str(c.count) for c in calls[:4])


#: (what may differ, its value, the option that decides), the most telling first.
DIFFERENCES: tuple[tuple[str, Callable[[Found], Any], str], ...] = (
    ("the number of ranks", lambda f: f.layout.ranks, "--nccl-log"),
    ("the place in the ring", lambda f: f.layout.about, "--rank or --nccl-log"),
    ("ring or tree", _algorithm, "--algorithm or --nccl-log"),
    ("the element type", lambda f: f.program.dtype, "--dtype"),
    ("the sizes of the calls", _sizes, "--buckets"),
    ("where an iteration ends", lambda f: (f.program.iterations, f.program.cut), "--buckets"),
    ("shapes", lambda f: str([e.shape for e in f.program.model]), "--job"),
    ("the number of channels", lambda f: f.topology.channels, "--nccl-log"),
    ("the NCCL version", lambda f: f.topology.version, "--nccl-version or --nccl-log"),
    ("the connections", lambda f: sorted(w.connection.name() for w in f.layout.wires), "--job"),
)


def only(found: list[Found]) -> Found:
    """The explanation, if all are the same in everything that places a byte."""
    first = found[0]
    by_key: dict[tuple, Found] = {}
    for f in found:
        by_key.setdefault(key_of(f), f)
    distinct = list(by_key.values())
    if len(distinct) == 1:
        return first
    differ: list[str] = []
    options: list[str] = []
    for what, value, option in DIFFERENCES:
        values = list(dict.fromkeys(str(value(f)) for f in distinct))
        if len(values) > 1 and (what not in ("the number of channels", "the NCCL version") or not differ):
            short = what in ("the number of ranks", "the element type", "the sizes of the calls", "the NCCL version")
            differ.append(f"{what} ({', '.join(values[:6])}{', ...' if len(values) > 6 else ''})" if short else what)
            options.append(option)
    texts = list(dict.fromkeys(_described(f) for f in distinct))
    if len(texts) == 1:  # same calls, other layout
        texts = list(dict.fromkeys(
            f"{_described(f)[:-1]} as NCCL {f.topology.version} lays them out on {f.topology.channels} channels;"
            for f in distinct
        ))
    shown = [*texts[: SHOWN - 1], texts[-1]] if len(texts) > SHOWN else texts
    listed = " ".join(f"({i}) {text}" for i, text in enumerate(shown, 1))
    raise UserError(
        f"{len(distinct)} explanations fit every message, and nothing decides between them. They differ in "
        f"{', '.join(differ) or 'the layout'}: {listed}"
        + (f" and {len(texts) - len(shown)} more" if len(texts) > len(shown) else ""),
        remedy=f"say which with {', '.join(dict.fromkeys(options)) or '--nccl-log'}, or give a manifest with --job. "
        "NCCL's TCP bootstrap in the capture names ranks, channels and connections",
    )


def key_of(f: Found) -> tuple:
    """The same for explanations that place the same bytes of the same calls at the same places."""
    calls = json.dumps([vars(c) for c in f.program.calls], sort_keys=True)
    # a QP number is unique at its host only: without addresses two swapped ranks would look the same
    ends = tuple((w.channel, w.src, w.dst, w.connection.name()) for w in f.layout.wires)
    model = json.dumps([vars(e) for e in f.program.model])
    return f.program.signature, calls, model, f.layout.ranks, ends, f.program.cut


def _described(f: Found) -> str:
    about = f"{f.layout.about}: " if f.layout.about else ""
    return f"{about}{f.program.called()};"


def unexplained(failure: Failure, several: bool, tried: int) -> UserError:
    """Nothing explains all messages: where the best attempt stopped, and what it was."""
    beside = f". Up to {tried} ranks were tried; more need --nccl-log or a manifest" if several else ""
    said = {
        Stage.NOTHING: "neither a DDP job nor AllReduce calls alone",
        Stage.GATHERED: "it begins like a DDP job whose start-up does not say what DDP says",
        Stage.SHAPES: "it is a DDP job, by its start-up, and what follows does not fit",
    }[failure.reached[0]]
    return UserError(
        f"no program of calls explains all messages ({said}); the best attempt stops here: "
        f"{failure.text or 'nothing fits'}{beside}",
        remedy="give --job (docs/reference/manifest.md), or hints: --dtype, --buckets, --rank, --nccl-log",
    )


# -- other readings of the same connections --------------------------------------------------------------


def only_ring(chosen: Found, siblings: list[Layout]) -> None:
    """Each channel may have its own ring order: would another one explain a single channel as well?"""
    layout, topology = chosen.layout, chosen.topology
    if len({w.channel for w in layout.wires}) < 2 or len(siblings) < 2:
        return
    base = chosen.walk(list(layout.wires), topology)
    replayed(base, chosen.program)
    for other in siblings:
        rings = other.rings * topology.channels if len(other.rings) == 1 else other.rings
        if other.ranks != layout.ranks or rings == topology.rings or other.split != layout.split:
            continue
        for channel in sorted({w.channel for w in layout.wires}):
            wires = [w for w in layout.wires if w.channel != channel]
            wires += [w for w in other.wires if w.channel == channel]
            mixed = [*topology.rings]
            mixed[channel] = rings[channel]
            wires.sort(key=lambda w: (w.channel, w.connection.name()))
            walk = chosen.walk(wires, replace(topology, rings=tuple(mixed)))
            if replayed(walk, chosen.program) and sorted(walk.signature) != sorted(base.signature):
                raise UserError(
                    f"two ring orders explain every message of channel {channel}: (1) {list(topology.rings[channel])} "
                    f"(2) {list(rings[channel])}",
                    remedy="give NCCL's log with --nccl-log, or the rings in a manifest with --job",
                )


def only_communicator(chosen: Found, read: Reader, hints: Hints, budget: Budget) -> None:
    """Calls alone on several connections between the same hosts: one communicator with channels, or several
    communicators? Each would have connections, buffers and step counters of its own either way."""
    layout = chosen.layout
    channels = sorted({w.channel for w in layout.wires})
    if layout.source != "traffic" or layout.channels or chosen.program.model or len(channels) < 2:
        return
    half = len(channels) // 2
    partitions = [[[c] for c in channels]]
    if len(channels) % 2 == 0 and half > 1:
        partitions += [[channels[:half], channels[half:]], [channels[::2], channels[1::2]]]
    for parts in partitions:
        if all(_alone(chosen, part, read, hints, budget) for part in parts):
            raise UserError(
                f"2 explanations fit every message: (1) one communicator with {len(channels)} channels, "
                f"{chosen.program.called()} (2) {len(parts)} communicators of the same hosts with calls of their own, "
                f"of {len(parts[0])} channel{'s' * (len(parts[0]) > 1)} each",
                remedy="say the sizes of whole calls with --buckets, give --nccl-log, or name the flows with --job; "
                "NCCL's TCP bootstrap in the capture would tell",
            )


def _alone(chosen: Found, part: list[int], read: Reader, hints: Hints, budget: Budget) -> bool:
    wires = [replace(w, channel=part.index(w.channel)) for w in chosen.layout.wires if w.channel in part]
    topology = replace(
        chosen.topology, channels=len(part), rings=tuple(chosen.topology.ring(c) for c in part)
    )
    algorithm = "tree" if chosen.program.algorithms == {"tree"} else "ring"
    walk = replace(chosen.walk(wires, topology), algorithms=(algorithm,), budget=budget)
    try:
        return next(bare(walk, hints, read, Failure()), None) is not None
    except (UserError, WireError):  # too many ways are ways
        return True
