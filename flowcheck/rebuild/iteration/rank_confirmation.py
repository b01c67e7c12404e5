"""Are the rank and channel numbers of the manifest's flows right, and its NCCL version, and who says so?

A ring sends the same sizes whoever is called rank 0, as long as its chunks are equal; two channels that
carry equal parts look alike as well. Flows with exchanged labels then place every byte at a wrong place
and no size, slot or flag disagrees. What can tell:

    CTS tag   the receiver names the sender's rank (reference nccl-wire.md 5.4), in the numbering of the
              communicator it was split from: communicator.parent_ranks
    sizes     chunks, parts or broadcasts that differ, so that exchanged labels would have disagreed

Where neither can, the result rests on the manifest's word and is marked so. Pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from parser.lane import messages

from flowcheck.rebuild.iteration.wording import flow_name
from flowcheck.rebuild.plan import JobPlan, nccl_of
from parser.nccl import TABLE, CtsElement, span
from parser.wire import CallPlan, edge_lane

__all__ = ["contradiction", "other_version", "on_trust"]

RANKS = "ranks of the flows: as the manifest says, nothing in the captures confirms them"
TOO_MANY = 50_000  # messages per edge beyond which likeness is assumed rather than computed


def _expected(plan: JobPlan, src: int) -> int:
    parents = plan.job.communicator.parent_ranks
    return parents[src] if parents else src


def _informative(plan: JobPlan, tags: Mapping[int, int]) -> bool:
    """Receivers that never set a tag send 0 for everybody."""
    sources = {plan.engine.edges[edge].src for edge in tags}
    return len(set(tags.values())) > 1 or (len(sources) == 1 and set(tags.values()) != {0})


def contradiction(plan: JobPlan, tags: Mapping[int, int]) -> str:
    """Why the CTS tags refute the manifest's ranks, or "". tags: Engine.cts_tags()."""
    if not _informative(plan, tags):
        return ""
    wrong = [edge for edge, tag in tags.items() if tag != _expected(plan, plan.engine.edges[edge].src)]
    if not wrong:
        return ""
    edge = wrong[0]
    return (
        f"the receiver of {flow_name(plan.job, edge)} calls its sender rank {tags[edge]}, the manifest says "
        f"{_expected(plan, plan.engine.edges[edge].src)}: correct the ranks of the flows, or, for a communicator split "
        f"from a larger one, list its members there in communicator.parent_ranks"
    )


def other_version(plan: JobPlan, forms: Mapping[CtsElement, int], disagreements: Sequence[Mapping[str, Any]]) -> str:
    """Why the traffic refutes the manifest's NCCL version, or "". forms: Engine.cts_forms(). disagreements: its log.

    Two rows of parser.nccl differ in what lies in every packet of a kind, whatever the calls are:

        form of the clear-to-send writes   none can be read as the manifest's, and some can as another's (5.4)
        byte order of the immediates       each that disagrees is its message's size in the other order (5.2)

    Not here: rows alike in both. Where these cut a call otherwise, its sizes disagree. Where they do not, the calls of
    the job are the same in both versions and so is the replica. A capture without clear-to-send writes tells no form,
    and one whose immediates read alike in both orders, such as those of empty messages, tells no order.
    """
    due = nccl_of(plan.job)
    rows, said = list(TABLE), []
    most = max(forms.values(), default=0)
    if most and not forms.get(due.cts):
        found = [form for form, count in forms.items() if count == most]
        rows = [row for row in rows if row.cts in found]
        sizes = sorted({form.bytes for form in found})
        said.append(
            "clear-to-send writes whose fields lie elsewhere" if due.cts.bytes in sizes
            else f"clear-to-send writes of {' or '.join(map(str, sizes))} bytes"
        )
    immediates = [d for d in disagreements if d["kind"] == "immediate"]
    if immediates and all(_swapped(d["expected"]) == d["found"] for d in immediates):
        rows = [row for row in rows if row.big_endian != due.big_endian]
        said.append(f"{'little' if due.big_endian else 'big'}-endian immediates")
    if not said:
        return ""
    return (
        f"{' and '.join(said)}, as of {f'NCCL {span(rows)}' if rows else 'no NCCL that is known'}; the manifest says "
        f"{plan.job.communicator.nccl_version}: correct nccl_version"
    )


def _swapped(immediate: int) -> int:
    return int.from_bytes(immediate.to_bytes(4, "little"), "big")


def on_trust(plan: JobPlan, seen: Collection[int], tags: Mapping[int, int]) -> list[str]:
    """What nothing in the captures confirms: marks for the report and the checkpoint."""
    marks = []
    signatures: dict[tuple[int, int, int], tuple[object, ...] | None] = {}

    def signature(channel: int, src: int, dst: int) -> tuple[object, ...] | None:
        key = channel, src, dst
        if key not in signatures:
            signatures[key] = _signature([call for _, _, call, _ in plan.calls], *key)
        return signatures[key]

    edges = [plan.engine.edges[edge] for edge in seen]
    ranks = plan.job.communicator.ranks
    confirmed = _informative(plan, tags) and not contradiction(plan, tags)
    if not confirmed and any(call.algorithm == "tree" for _, _, call, _ in plan.calls):
        # up and down edges of a tree carry the same sizes: only the names tell sums from results
        marks.append(RANKS)
    elif not confirmed and edges:
        for turn in range(1, ranks):
            order = {c: plan.job.communicator.ring(c) for c in {edge.channel for edge in edges}}

            def turned(edge_rank: int, ring: list[int], by: int = turn) -> int:
                return ring[(ring.index(edge_rank) + by) % len(ring)]

            if all(
                _alike(
                    signature(e.channel, e.src, e.dst),
                    signature(e.channel, turned(e.src, order[e.channel]), turned(e.dst, order[e.channel])),
                )
                for e in edges
            ):
                marks.append(RANKS)
                break
    for i, one in enumerate(edges):
        other = next(
            (
                e for e in edges[i + 1 :]
                if (e.src, e.dst) == (one.src, one.dst)
                and _alike(signature(one.channel, one.src, one.dst), signature(e.channel, e.src, e.dst))
                and any(call.lane is not None for call in e.calls)
            ),
            None,
        )
        if other is not None:
            marks.append(
                f"channels {one.channel} and {other.channel}: as the manifest says, both carry the same sizes"
            )
            break
    return marks


def _alike(one: tuple[object, ...] | None, other: tuple[object, ...] | None) -> bool:
    return one is None or other is None or one == other


def _signature(calls: list[CallPlan], channel: int, src: int, dst: int) -> tuple[object, ...] | None:
    """Sizes of all messages of an edge, call by call; None: too many to list."""
    out: list[object] = []
    for call in calls:
        lane = edge_lane(call, channel, src, dst)
        if lane is not None and lane.messages > TOO_MANY:
            return None
        out.append(() if lane is None else (int(lane.protocol), tuple(m[2] for m in messages(lane))))
    return tuple(out)
