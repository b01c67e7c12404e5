"""What was learnt, how sure it is, and why: the sentences for people and for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowcheck.learn.hints import Hints
from flowcheck.learn.logs import LogFacts
from flowcheck.learn.program import Program
from flowcheck.learn.topology import Layout
from flowcheck.learn.traffic import head_flags
from flowcheck.learn.walk import Wire
from flowcheck.manifest import Job
from parser.wire import Topology

__all__ = ["DEFAULT_SLOTS", "Found", "Item", "items_of", "missing_of"]

DEFAULT_SLOTS = (65536, 614400, 524288)  # wire bytes of a step: LL, LL128, SIMPLE


@dataclass(frozen=True)
class Item:
    """One learnt thing. confidence: certain (read, or the only possibility), probable (a rule that held wherever it
    could be checked), given, or none (not known and not needed)."""

    what: str
    value: str
    confidence: str
    reason: str


@dataclass
class Found:
    """One explanation of all messages. version_reason: what limits the NCCL version."""

    layout: Layout
    topology: Topology
    program: Program
    version_reason: str
    mtu: int


def items_of(found: Found, job: Job, log: LogFacts, hints: Hints) -> list[Item]:
    """Every part of the job with confidence and reason."""
    c, program = job.communicator, found.program
    wires = found.layout.wires
    items = [
        Item(what, {"flows": f"{len(job.flows)} connections"}.get(what, ""), confidence, reason)
        for what, confidence, reason in found.layout.said
    ]
    items.append(Item("ranks", str(c.ranks), "certain", found.layout.about or "every rank of the ring is named"))
    sure = "given" if hints.version else "certain" if log.version else "probable"
    items.append(Item(
        "nccl_version", c.nccl_version, sure,
        f"{found.version_reason}; one version of its family, whose calls have the same layout",
    ))  # fmt: skip
    items.append(Item("protocol", c.protocol, "certain", _protocol_reason(wires, c.protocol)))
    paired = sorted({w.connection.paired_by for w in wires if w.connection.paired_by})
    if paired:
        items.append(Item("directions", "", "certain", f"paired by {' and '.join(paired)}"))
    known = any(w.connection.mtu for w in wires)
    items.append(Item(
        "mtu", str(c.mtu), "certain" if known else "probable",
        "payload of every full packet" if known else "no message has more than one packet: any larger MTU fits too",
    ))  # fmt: skip
    if c.adaptive_routing:
        items.append(Item("adaptive_routing", "true", "certain", "plain WRITE plus empty WRITE_WITH_IMM were seen"))
    changed = {n: b for n, b in c.buffer_bytes.items() if b // 8 not in DEFAULT_SLOTS}
    for name, size in changed.items():
        items.append(Item(f"buffer_bytes.{name}", str(size), "probable", "size that clear-to-send announces"))
    items += [Item("calls", "", "given" if hints.buckets else "certain", text) for text in program.said]
    explained = sum(len(w.connection.messages) for w in wires)
    items.append(Item(
        "check", f"{explained} messages", "certain",
        f"all {explained} messages on {len(wires)} connections have the size, place and flags of this job; "
        f"{program.iterations} iterations begin in the captures",
    ))  # fmt: skip
    if job.optimizer is not None:
        items.append(Item("optimizer", job.optimizer.name, "given", "it is not on the wire"))
    return items


def _protocol_reason(wires: Sequence[Wire], protocol: str) -> str:
    if protocol == "simple":
        return "no flags in the payload, immediates equal to the sizes"
    flags = [head_flags(m.head, m.size)[1] for w in wires for m in w.connection.messages if m.size]
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
            looked = len(w.connection.messages)
            out.append(f"{w.connection.name()}: messages beyond the first {looked} were not looked at")
    return out
