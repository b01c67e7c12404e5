"""What was learnt, how sure it is and why; what could still be otherwise; what is not known. For people and reports.

    items_of(chosen, ...) -> [Item]     every part of the job with confidence and reason
    doubts_of(chosen, split) -> [str]   what no capture can tell: a mark wherever the result goes
    missing_of(chosen, job) -> [str]    what could not be learnt

A doubt begins with what it is about:

    iterations   an AllReduce that is not a gradient, of just the sizes of one that is, counts as one
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

from flowcheck.job.model import Collective, Job, dtype_size
from flowcheck.learning.connections import Connection, PlacedConnection
from flowcheck.learning.hints import Hints
from flowcheck.learning.logs import LogFacts
from flowcheck.learning.messages import head_flags
from flowcheck.learning.search.candidates import Candidate
from flowcheck.learning.search.walk import DEFAULT_SLOTS

__all__ = ["Item", "doubts_of", "items_of", "missing_of"]


@dataclass(frozen=True)
class Item:
    """One learnt thing. confidence: certain (read, or the only possibility), probable (a rule that held wherever it
    could be checked), given, or none (not known and not needed)."""

    what: str
    value: str
    confidence: str
    reason: str


def items_of(chosen: Candidate, job: Job, log: LogFacts, hints: Hints, doubts: Sequence[str]) -> list[Item]:
    """Every part of the job with confidence and reason."""
    c, program, h = job.communicator, chosen.program, chosen.hypothesis
    placed = h.connections
    unsure = {doubt.partition(":")[0] for doubt in doubts}
    items = [Item(*said) for said in h.said]
    about = h.about or f"{h.ranks_by} names every rank of the ring"
    items.append(Item("ranks", str(c.ranks), "certain", about))
    if h.source == "traffic":
        items += [_place(chosen, job, hints, unsure), _channel_item(chosen, unsure)]
    sure = "given" if hints.version else "certain" if log.version else "probable"
    items.append(Item(
        "nccl_version", c.nccl_version, sure,
        f"{h.variant.version_reason}; one version of its family, whose calls have the same layout",
    ))
    items.append(Item("protocol", c.protocol, "certain", _protocol_reason(placed, c.protocol)))
    if c.ranks == 2 or c.algorithm != "ring":
        items.append(Item(
            "algorithm", " and ".join(sorted(program.algorithms)) or c.algorithm,
            "given" if hints.algorithm else "certain", "ring and tree were tried, the messages admit this one",
        ))
    items += _queue_pairs(placed, "queues" in unsure)
    paired = sorted({on.connection.paired_by for on in placed if on.connection.paired_by})
    if paired:
        number = sum(bool(on.connection.cts_flows) for on in placed)
        items.append(Item("directions", f"{number} of {len(placed)} paired", "certain", f"by {' and '.join(paired)}"))
    known = any(on.connection.mtus for on in placed)
    items.append(Item(
        "mtu", str(c.mtu), "certain" if known else "probable",
        "payload of every full packet" if known else "no message has more than one packet: any larger MTU fits too",
    ))
    if c.adaptive_routing:
        items.append(Item("adaptive_routing", "true", "certain", "plain WRITE plus empty WRITE_WITH_IMM were seen"))
    changed = {n: b for n, b in c.buffer_bytes.items() if b // 8 not in DEFAULT_SLOTS}
    for name, size in changed.items():
        items.append(Item(f"buffer_bytes.{name}", str(size), "probable", "size that clear-to-send announces"))
    items += [Item("calls", value, "given" if hints.buckets else "certain", text) for value, text in program.said]
    items.append(Item(
        "iterations", str(program.iterations), "probable" if "iterations" in unsure else "certain",
        "how often calls of these sizes begin in the captures" + ("; see the doubt" if "iterations" in unsure else ""),
    ))
    explained = sum(on.connection.total for on in placed)
    items.append(Item(
        "check", f"{explained} messages", "certain",
        f"all {explained} messages on {len(placed)} connections have the size, place and flags of this job",
    ))
    if job.optimizer is not None:
        items.append(Item("optimizer", job.optimizer.name, "given", "it is not on the wire"))
    return items


def _place(chosen: Candidate, job: Job, hints: Hints, unsure: set[str]) -> Item:
    """Which address is which rank, as far as bytes depend on it."""
    h, parents = chosen.hypothesis, job.communicator.parent_ranks
    ranks = {on.connection.src: on.src for on in h.connections}
    value = ", ".join(f"{a} = {r}" for a, r in sorted(ranks.items(), key=lambda pair: pair[1])[:8])
    reason = h.ranks_by
    if h.split or parents:
        reason = f"the clear-to-send tags {list(parents)[:8]} are numbers in a parent communicator; " + (
            "only this place in the ring explains the messages" if h.split else reason
        )
    if hints.ranks:
        return Item("rank of each address", value, "given", reason)
    if "ranks" in unsure:
        return Item("rank of each address", value, "probable", f"{reason}; see the doubt")
    return Item("rank of each address", value, "certain", f"{reason}; no other place in the ring explains the messages")


def _channel_item(chosen: Candidate, unsure: set[str]) -> Item:
    used = len({on.channel for on in chosen.hypothesis.connections})
    if used == 1:
        return Item("channels", "1", "certain", "one connection per direction")
    if "channels" in unsure:
        return Item("channels", str(used), "probable", "QP numbers of a pair ascend with the channel; see the doubt")
    return Item("channels", str(used), "certain", "their messages differ in size: each fits one channel only")


def _queue_pairs(placed: Sequence[PlacedConnection], open_: bool) -> list[Item]:
    """How messages go round the QPs of a connection, where there are several."""
    first = placed[0].connection
    if len(first.flows) == 1:
        return []
    how = f"every message is split over all {len(first.flows)}" if first.used > 1 else "one message after the other"
    if first.devices > 1:
        how = f"every message is striped over {first.used} of them, on {first.devices} ports of a merged NIC"
    by = sorted({on.connection.order for on in placed if on.connection.order})
    reason = f"who writes into the slots of one buffer; order by {', '.join(by)}" if by else "named with the flows"
    return [Item(
        "queue pairs", f"{len(first.flows)} per connection, {how}", "probable" if open_ else "certain",
        reason + ("; see the doubt" if open_ else "; size, slot and immediate of every message agree"),
    )]


def _protocol_reason(placed: Sequence[PlacedConnection], protocol: str) -> str:
    if protocol == "simple":
        return "no flags in the payload, immediates equal to the sizes"
    flags = [flag for on in placed for m in on.connection.messages if (flag := head_flags(m.head, m.size)[1])]
    return f"flags in the payload, {min(flags)} to {max(flags)}, count the steps"


def missing_of(chosen: Candidate, job: Job) -> list[str]:
    """What could not be learnt, one sentence each."""
    out = []
    if job.optimizer is None:
        out.append("optimizer: not on the wire; give it with --optimizer, else no checkpoint can be made")
    if not job.model:
        out.append("model: no announcement of shapes in the captures; gradients are placed, no checkpoint can be made")
    elif all(entry.name == f"parameter.{i}" for i, entry in enumerate(job.model)):
        out.append("names: not on the wire; parameters are called parameter.0, parameter.1, ... in model order")
    if not job.collectives.steady:
        out.append("later iterations: none is in the captures")
    for c in (on.connection for on in chosen.hypothesis.connections):
        if c.dropped:
            out.append(f"{c.name()}: messages beyond the first {c.total} were not looked at")
    return out


# -- doubts ----------------------------------------------------------------------------------------------


def doubts_of(chosen: Candidate, split: Sequence[Candidate]) -> list[str]:
    """split: explanations in which the tags are the numbers of a parent communicator."""
    return [*_iterations(chosen), *_calls(chosen), *_ranks(chosen, split), *_channels(chosen), *_queues(chosen)]


def _padded(call: Collective) -> str:
    """The numbers of elements that have this call's size on the wire."""
    size = dtype_size(call.dtype)
    if call.protocol == "simple":
        return f"{call.count}"
    grain = max(1, (8 if call.protocol in ("ll", None) else 1920) // size)
    low = max(1, (call.count - 1) // grain * grain + 1)
    high = -(-call.count // grain) * grain
    return f"{low} to {high}" if low < high else f"{call.count}"


def _iterations(chosen: Candidate) -> Iterator[str]:
    calls = chosen.program.collectives.steady
    if not calls:
        return
    sizes = ", ".join(_padded(c) for c in calls[:4]) + (", ..." if len(calls) > 4 else "")
    count = "an AllReduce" if len(calls) == 1 else f"{len(calls)} AllReduce calls"
    # a rebuilt layout is announced right after the first gradients, and makes them sure
    since = "From the second one on" if chosen.program.collectives.rebuild else "From the very first on"
    text = (
        f"iterations: counted by sizes alone. {since} {count} of {sizes} {calls[0].dtype} "
        f"({'that carry' if len(calls) > 1 else 'that carries'} no gradient: averaged parameters, a metric) would be "
        "counted as an iteration and applied as a gradient"
    )
    alike = [i for i, (a, b) in enumerate(zip(calls, [*calls[1:], calls[0]], strict=True)) if _padded(a) == _padded(b)]
    if alike and len(calls) > 1:
        text += f"; bucket {alike[0]} and its successor have one size, so a single such call could shift the buckets"
    yield text


def _calls(chosen: Candidate) -> Iterator[str]:
    program = chosen.program
    if program.model:
        return
    text = "calls: no announcement is in the captures. That the AllReduce calls carry gradients is assumed"
    if not program.collectives.steady:
        text += "; calls after the end of the capture may belong to the same iteration"
    yield text


def _ranks(chosen: Candidate, split: Sequence[Candidate]) -> Iterator[str]:
    if not split:
        return
    places = [f.hypothesis.about for f in split]
    yield (
        f"ranks: {chosen.hypothesis.ranks_by}, if the communicator was not split from a larger one, which numbers its "
        f"ranks otherwise. The sizes fit as well with {' or '.join(dict.fromkeys(places[:2]))}; the parts of every "
        "bucket would then be exchanged. --rank or communicator.parent_ranks in a manifest settle it"
    )


def _channels(chosen: Candidate) -> Iterator[str]:
    if chosen.hypothesis.source != "traffic":
        return
    by_edge: dict[tuple[int, int], list[tuple[int, Connection]]] = {}
    for on in chosen.hypothesis.connections:
        by_edge.setdefault((on.src, on.dst), []).append((on.channel, on.connection))
    for (src, dst), found in by_edge.items():
        alike = [(a, b) for (a, one), (b, other) in combinations(found, 2) if _alike(one, other)]
        if alike:
            a, b = alike[0]
            more = f", and {len(alike) - 1} more pairs" if len(alike) > 1 else ""
            yield (
                f"channels: QP numbers are taken to ascend with the channel. From rank {src} to {dst} nothing on the "
                f"wire distinguishes channels {a} and {b}{more}; exchanged, every bucket's parts would be too"
            )
            return


def _queues(chosen: Candidate) -> Iterator[str]:
    found = [on.connection for on in chosen.hypothesis.connections]
    first = found[0]
    if first.used == 1 and all(len(flow.messages) < 2 for c in found for flow in c.flows):
        yield (
            f"queues: no QP carries a second message: a connection may have more than {len(first.flows)}, and the "
            "next message go over another"
        )
        return
    open_ = next((c for c in found if c.doubt), None)
    if open_ is not None:
        yield f"queues: {open_.name()}: {open_.doubt}"


def _alike(one: Connection, other: Connection) -> bool:
    """Is there no message that both began at one PSN, with different sizes? Then either could be the other."""
    for mine, its in zip(one.flows, other.flows, strict=True):
        sizes = {m.psn: m.size for m in mine.messages}
        if any(sizes.get(m.psn, m.size) != m.size for m in its.messages):
            return False
    return True
