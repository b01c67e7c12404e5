"""What people read about a job's traffic: names of connections, and what disagrees with the manifest, as sentences.

Verdicts, reports, events and errors take their words from here. Pure.
"""

from __future__ import annotations

from flowcheck.job.model import Job
from flowcheck.rebuild.plan import JobPlan

__all__ = ["describe_difference", "describe_disagreement", "flow_name", "refusal"]

_MEANING = {
    "payload length": "a packet of {expected} payload bytes was due and {found} came",
    "opcode": "packet {expected} of the message cannot have opcode {found:#x}",
    "RETH length": "a write of {expected} bytes was due and one of {found} came",
    "RETH address": "the write was due at address {expected:#x} and went to {found:#x}",
    "immediate": "the immediate should say {expected} bytes and says {found}",
    "flag": "the payload's flags should say {expected} and say {found}",
    "CTS address": "the receiver announced address {expected:#x} and the write went to {found:#x}",
    "extra message": "the sender sent one message too many: the manifest's last call has ended",
    "repeated chunk": (
        "one message too many: this message repeats the reduced chunk that its sender received last, where "
        "NCCL sends its own contribution to the next loop"
    ),
    "made anew": (
        "a first packet of other contents came behind it: the connection was made anew, by another run on the same "
        "queue pairs; give each run a capture and a manifest of its own"
    ),
}
_REFUSAL = {"extra message", "repeated chunk"}


def flow_name(job: Job, edge: int) -> str:
    """How messages to people name a connection."""
    flow = job.flows[edge]
    return f"channel {flow.channel}, rank {flow.src} -> {flow.dst} (QP {', '.join(f'{q:#x}' for q in flow.qpns)})"


def describe_disagreement(plan: JobPlan, entry: dict) -> str:
    """One logged disagreement as a sentence with its values."""
    edge = plan.engine.flows[entry["flow"]].edge
    text = _MEANING[entry["kind"]].format(**entry)
    return (
        f"{flow_name(plan.job, edge)}, iteration {entry['iteration']}, message {entry['message']}, "
        f"PSN {entry['psn']}: {text}"
    )


def describe_difference(plan: JobPlan, stream: str, entry: dict, others: list[tuple[str, int, int]]) -> str:
    """One packet whose bytes differ from those that had come before, as a sentence. entry: of Engine.differences().
    others: (stream, flow, PSN) of each packet that may have brought those; none: the same packet, sent again."""

    def packet(name: str, flow: int, psn: int) -> str:
        return f"PSN {psn} of {flow_name(plan.job, plan.engine.flows[flow].edge)} in {name}"

    before = " or ".join(packet(*other) for other in others[:4]) or "an earlier packet of the same PSN"
    return (
        f"{entry['bytes']} bytes at byte {entry['offset']} of the iteration's region: "
        f"{packet(stream, entry['flow'], entry['psn'])} differs from {before}"
    )


def refusal(plan: JobPlan, entries: list[dict]) -> str:
    """Why the traffic is refused as a whole, or ""."""
    extra = [e for e in entries if e["kind"] in _REFUSAL]
    if not extra:
        return ""
    edges = sorted({plan.engine.flows[e["flow"]].edge for e in extra})
    where = "; ".join(flow_name(plan.job, edge) for edge in edges)
    return (
        f"one message too many per operation on {where}: a modified NCCL (2n-1 sends per loop instead of 2n-2), "
        f"or calls that the manifest does not list"
    )
