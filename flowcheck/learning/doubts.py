"""What was learnt and could still be otherwise, because no capture can tell: a mark wherever the result goes.

    doubts_of(chosen, split) -> [Doubt]

    iterations   an AllReduce that is no gradient, of just the sizes of one that is, counts as one
    calls        the captures show no announcement: what the calls carry, and where the iteration ends, is assumed
    ranks        clear-to-send tags number a parent communicator, and another place of rank 0 fits as well
    channels     two connections of one direction carry the same sizes: which is which channel is a guess
    queues       which QP of a connection comes first, or how many there are, shows too late in these captures

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from flowcheck.job.model import Collective, dtype_size
from flowcheck.learning.connections import Connection
from flowcheck.learning.explain import Found

__all__ = ["Doubt", "doubts_of"]


@dataclass(frozen=True)
class Doubt:
    """about: "iterations", "calls", "ranks", "channels" or "queues"."""

    about: str
    text: str


def doubts_of(chosen: Found, split: Sequence[Found]) -> list[Doubt]:
    """split: explanations in which the tags are the numbers of a parent communicator."""
    return [
        *_iterations(chosen), *_calls(chosen), *_ranks(chosen, split), *_channels(chosen), *_queues(chosen),
    ]


def _padded(call: Collective) -> str:
    """The numbers of elements that have this call's size on the wire."""
    size = dtype_size(call.dtype)
    if call.protocol == "simple":
        return f"{call.count}"
    grain = max(1, (8 if call.protocol in ("ll", None) else 1920) // size)
    low = max(1, (call.count - 1) // grain * grain + 1)
    high = -(-call.count // grain) * grain
    return f"{low} to {high}" if low < high else f"{call.count}"


def _iterations(chosen: Found) -> Iterator[Doubt]:
    calls = chosen.program.collectives.steady
    if not calls:
        return
    sizes = ", ".join(_padded(c) for c in calls[:4]) + (", ..." if len(calls) > 4 else "")
    count = "an AllReduce" if len(calls) == 1 else f"{len(calls)} AllReduce calls"
    # a rebuilt layout is announced right behind the first gradients, and makes them sure
    since = "From the second one on" if chosen.program.collectives.rebuild else "From the very first on"
    text = (
        f"iterations: counted by sizes alone. {since} {count} of {sizes} {calls[0].dtype} "
        f"({'that carry' if len(calls) > 1 else 'that carries'} no gradient: averaged parameters, a metric) would be "
        "counted as an iteration and applied as a gradient"
    )
    alike = [i for i, (a, b) in enumerate(zip(calls, [*calls[1:], calls[0]], strict=True)) if _padded(a) == _padded(b)]
    if alike and len(calls) > 1:
        text += f"; bucket {alike[0]} and its successor have one size, so a single such call could shift the buckets"
    yield Doubt("iterations", text)


def _calls(chosen: Found) -> Iterator[Doubt]:
    program = chosen.program
    if program.model:
        return
    text = "calls: no announcement is in the captures. That the AllReduce calls carry gradients is assumed"
    if not program.collectives.steady:
        text += "; calls behind the end of the capture may belong to the same iteration"
    yield Doubt("calls", text)


def _ranks(chosen: Found, split: Sequence[Found]) -> Iterator[Doubt]:
    if not split:
        return
    places = [f.layout.about for f in split]
    yield Doubt(
        "ranks",
        f"ranks: {chosen.layout.ranks_by}, if the communicator was not split from a larger one, which numbers its "
        f"ranks otherwise. The sizes fit as well with {' or '.join(dict.fromkeys(places[:2]))}; the parts of every "
        "bucket would then be exchanged. --rank or communicator.parent_ranks in a manifest settle it",
    )


def _channels(chosen: Found) -> Iterator[Doubt]:
    layout = chosen.layout
    if layout.source != "traffic":
        return
    by_edge: dict[tuple[int, int], list[tuple[int, Connection]]] = {}
    for w in layout.wires:
        by_edge.setdefault((w.src, w.dst), []).append((w.channel, w.connection))
    for (src, dst), found in by_edge.items():
        alike = [(a, b) for (a, one), (b, other) in combinations(found, 2) if _alike(one, other)]
        if alike:
            a, b = alike[0]
            more = f", and {len(alike) - 1} more pairs" if len(alike) > 1 else ""
            yield Doubt(
                "channels",
                f"channels: QP numbers are taken to ascend with the channel. From rank {src} to {dst} nothing on the "
                f"wire distinguishes channels {a} and {b}{more}; exchanged, every bucket's parts would be too",
            )
            return


def _queues(chosen: Found) -> Iterator[Doubt]:
    wires = chosen.layout.wires
    first = wires[0].connection
    if first.used == 1 and all(len(q.messages) < 2 for w in wires for q in w.connection.queues):
        yield Doubt(
            "queues",
            f"queues: no QP carries a second message: a connection may have more than {len(first.queues)}, and the "
            "next message go over another",
        )
        return
    for w in wires:
        if w.connection.doubt:
            yield Doubt("queues", f"queues: {w.connection.name()}: {w.connection.doubt}")
            return


def _alike(one: Connection, other: Connection) -> bool:
    """Is there no message that both began at one PSN, with different sizes? Then either could be the other."""
    for mine, its in zip(one.queues, other.queues, strict=True):
        sizes = {m.psn: m.size for m in mine.messages}
        if any(sizes.get(m.psn, m.size) != m.size for m in its.messages):
            return False
    return True
