"""What was learnt, how sure it is, and why: the sentences for people and for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowcheck.job.model import Job
from flowcheck.learning.doubts import Doubt
from flowcheck.learning.explain import Found
from flowcheck.learning.hints import Hints
from flowcheck.learning.logs import LogFacts
from flowcheck.learning.traffic import head_flags
from flowcheck.learning.walk import Wire

__all__ = ["DEFAULT_SLOTS", "Item", "items_of", "missing_of"]

DEFAULT_SLOTS = (65536, 614400, 524288)  # wire bytes of a step: LL, LL128, SIMPLE


@dataclass(frozen=True)
class Item:
    """One learnt thing. confidence: certain (read, or the only possibility), probable (a rule that held wherever it
    could be checked), given, or none (not known and not needed)."""

    what: str
    value: str
    confidence: str
    reason: str


def items_of(found: Found, job: Job, log: LogFacts, hints: Hints, doubts: Sequence[Doubt]) -> list[Item]:
    """Every part of the job with confidence and reason."""
    c, program, layout = job.communicator, found.program, found.layout
    wires = layout.wires
    unsure = {doubt.about for doubt in doubts}
    items = [Item(*said) for said in layout.said]
    about = layout.about or f"{layout.ranks_by} names every rank of the ring"
    items.append(Item("ranks", str(c.ranks), "certain", about))
    if layout.source == "traffic":
        items += [_place(found, job, hints, unsure), _channels(found, unsure)]
    sure = "given" if hints.version else "certain" if log.version else "probable"
    items.append(Item(
        "nccl_version", c.nccl_version, sure,
        f"{found.version_reason}; one version of its family, whose calls have the same layout",
    ))
    items.append(Item("protocol", c.protocol, "certain", _protocol_reason(wires, c.protocol)))
    if c.ranks == 2 or c.algorithm != "ring":
        items.append(Item(
            "algorithm", " and ".join(sorted(program.algorithms)) or c.algorithm,
            "given" if hints.algorithm else "certain", "ring and tree were tried, the messages admit this one",
        ))
    items += _queue_pairs(wires, "queues" in unsure)
    paired = sorted({w.connection.paired_by for w in wires if w.connection.paired_by})
    if paired:
        number = sum(bool(w.connection.cts_qpns) for w in wires)
        items.append(Item("directions", f"{number} of {len(wires)} paired", "certain", f"by {' and '.join(paired)}"))
    known = any(w.connection.mtus for w in wires)
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
    explained = sum(w.connection.total for w in wires)
    items.append(Item(
        "check", f"{explained} messages", "certain",
        f"all {explained} messages on {len(wires)} connections have the size, place and flags of this job",
    ))
    if job.optimizer is not None:
        items.append(Item("optimizer", job.optimizer.name, "given", "it is not on the wire"))
    return items


def _place(found: Found, job: Job, hints: Hints, unsure: set[str]) -> Item:
    """Which address is which rank, as far as bytes depend on it."""
    layout, parents = found.layout, job.communicator.parent_ranks
    ranks = {w.connection.src: w.src for w in layout.wires}
    value = ", ".join(f"{a} = {r}" for a, r in sorted(ranks.items(), key=lambda pair: pair[1])[:8])
    reason = layout.ranks_by
    if layout.split or parents:
        reason = f"the clear-to-send tags {list(parents)[:8]} are numbers in a parent communicator; " + (
            "only this place in the ring explains the messages" if layout.split else reason
        )
    if hints.ranks:
        return Item("rank of each address", value, "given", reason)
    if "ranks" in unsure:
        return Item("rank of each address", value, "probable", f"{reason}; see the doubt")
    return Item("rank of each address", value, "certain", f"{reason}; no other place in the ring explains the messages")


def _channels(found: Found, unsure: set[str]) -> Item:
    used = len({w.channel for w in found.layout.wires})
    if used == 1:
        return Item("channels", "1", "certain", "one connection per direction")
    if "channels" in unsure:
        return Item("channels", str(used), "probable", "QP numbers of a pair ascend with the channel; see the doubt")
    return Item("channels", str(used), "certain", "their messages differ in size: each fits one channel only")


def _queue_pairs(wires: Sequence[Wire], open_: bool) -> list[Item]:
    """How messages go round the QPs of a connection, where there are several."""
    first = wires[0].connection
    if len(first.queues) == 1:
        return []
    how = f"every message is split over all {len(first.queues)}" if first.used > 1 else "one message after the other"
    if first.devices > 1:
        how = f"every message is striped over {first.used} of them, on {first.devices} ports of a merged NIC"
    by = sorted({w.connection.order for w in wires if w.connection.order})
    reason = f"who writes into the slots of one buffer; order by {', '.join(by)}" if by else "named with the flows"
    return [Item(
        "queue pairs", f"{len(first.queues)} per connection, {how}", "probable" if open_ else "certain",
        reason + ("; see the doubt" if open_ else "; size, slot and immediate of every message agree"),
    )]


def _protocol_reason(wires: Sequence[Wire], protocol: str) -> str:
    if protocol == "simple":
        return "no flags in the payload, immediates equal to the sizes"
    flags = [flag for w in wires for m in w.connection.messages if (flag := head_flags(m.head, m.size)[1])]
    return f"flags in the payload, {min(flags)} to {max(flags)}, count the steps"


def missing_of(found: Found, job: Job) -> list[str]:
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
    for w in found.layout.wires:
        if w.connection.dropped:
            looked = w.connection.total
            out.append(f"{w.connection.name()}: messages beyond the first {looked} were not looked at")
    return out
