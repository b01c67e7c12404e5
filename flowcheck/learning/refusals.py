"""What cannot be supported or followed, refused by name and with a remedy (docs/use/learn.md lists it).

    refuse_unsupported(...)           by NCCL's log or its bootstrap
    refuse_unread(...)                because what is there cannot be read
    check_connections(hypothesis)     by the connections: mid-stream, undecided flows, registered buffers
    refuse_unseen_ring(...)           ring calls with a tree, of a ring whose order does not show
    refuse_modified(hypotheses)       by contents, when nothing else explains the traffic
    check_plan(plan, connections)     the finished manifest against every message, apart from the search

All raise UserError, check_plan InternalError. Pure.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from parser.lane import messages

from flowcheck.diagnose.remedies import remedy_of
from flowcheck.errors import InternalError, UserError
from flowcheck.learning.bootstrap import Bootstrap
from flowcheck.learning.connections import PlacedConnection
from flowcheck.learning.flow_order import pieces
from flowcheck.learning.logs import LogFacts
from flowcheck.learning.messages import Message, head_flags, packets
from flowcheck.learning.search.walk import Hypothesis
from flowcheck.rebuild.plan import JobPlan
from parser.engine_config import EdgeSpec, Phase

__all__ = [
    "check_connections", "check_plan", "refuse_modified", "refuse_unread", "refuse_unseen_ring", "refuse_unsupported",
]

REGIONS_MAX = 24  # 8 slots in each protocol's buffer


def refuse_unsupported(bootstrap: Bootstrap, log: LogFacts) -> None:
    """What NCCL's log and bootstrap say that is not supported."""
    for reason, remedy in log.refused:
        raise UserError(reason, where="NCCL's log", remedy=remedy)
    for _, graph, src, dst in bootstrap.connected:
        if graph.startswith(("collnet", "NVLS")):
            raise UserError(
                f"rank {src} -> {dst}: connections of the {graph} graph, whose data is reduced in the network",
                where="NCCL's bootstrap", remedy="run the job with NCCL_COLLNET_ENABLE=0 and NCCL_NVLS_ENABLE=0",
            )


def refuse_unread(connections: int, encrypted: int, unread: Mapping[str, int], readable: int) -> None:
    """Frames that nothing can be read from. connections: found all the same; unread: frames by cause; readable:
    packets that could be read."""
    if encrypted and not connections:
        raise UserError(
            f"the traffic is encrypted: {encrypted} MACsec or IPsec frames and no RoCEv2 write",
            remedy="mirror after the decryption, or switch it off for the mirrored ports",
        )
    damaged = sum(count for cause, count in unread.items() if not cause.startswith("encapsulated"))
    if damaged > readable or (unread and not connections):  # tunnels may be somebody else's
        causes = ", ".join(f"{cause} {count}" for cause, count in unread.items())
        raise UserError(f"most RoCEv2 packets cannot be read: {causes}; {readable} can", remedy=remedy_of(unread))


def check_connections(hypothesis: Hypothesis) -> None:
    """What the connections themselves show that cannot be learnt from."""
    for c in (on.connection for on in hypothesis.connections):
        # where messages go round several QPs, some may be new to a capture that begins later
        later = len(c.flows) > 1 and bool(c.posted) and min(c.posted) >= c.total // c.used
        if later or not any(flow.begins for flow in c.flows):
            raise UserError(
                "the capture begins in mid-stream, or lacks a connection's first packet: what came before is not "
                "known, so neither is the position",
                where=c.name(),
                remedy="capture from the job's start, or give the manifest of this job with --job",
            )
        if c.unsure:
            raise UserError(
                f"which queue pairs are one connection is not decided: {c.unsure}", where=c.name(),
                remedy="mirror all ports of the rank in both directions (clear-to-send writes name the addresses), "
                "capture the TCP bootstrap, or give a manifest with --job",
            )
        starting = c.flows[0].messages if c.used > 1 else c.pieces()  # the first flow has every message's beginning
        places = {(m.rkey, m.va) for m in starting if m.size}
        if len(places) > REGIONS_MAX:
            raise UserError(
                f"its writes go to {len(places)} addresses, more than the slots of NCCL's buffers: registered user "
                "buffers", where=c.name(),
                remedy="run the job with NCCL_LOCAL_REGISTER=0 and NCCL_GRAPH_REGISTER=0",
            )


def refuse_unseen_ring(hypothesis: Hypothesis, algorithms: set[str], rings_known: bool) -> None:
    """With a tree only the ring 0, 1, 2, ... is proposed. Which chunk a ring call sends depends on the place in it,
    so all of it has to be seen, or said by a log."""
    ring = hypothesis.rings[0]
    edges = {(on.src, on.dst) for on in hypothesis.connections}
    whole = all((a, b) in edges for a, b in zip(ring, (*ring[1:], ring[0]), strict=True))
    if hypothesis.tree and "ring" in algorithms and not whole and not rings_known:
        raise UserError(
            "some AllReduce calls go through a tree and some round the ring, whose order does not show: not all of its "
            "edges were captured",
            where=hypothesis.connections[0].connection.name(),
            remedy="give NCCL's log with --nccl-log, mirror every rank, or name rings and flows in a manifest",
        )


def refuse_modified(hypotheses: Iterable[Hypothesis]) -> None:
    """Only where no announcements of DDP explain the traffic as it is: contents alone can deceive."""
    for hypothesis in hypotheses:
        modified = _modified_nccl(hypothesis)
        if modified:
            raise UserError(
                f"{modified}: a modified NCCL (2n-1 sends per loop instead of 2n-2). Released NCCL looks like that "
                "only if the same gradients repeat and no two ranks contribute to the same elements",
                where=hypothesis.connections[0].connection.name(),
                remedy="run the job with NCCL as released; if that is what it ran with, give a manifest with --job",
            )


def _modified_nccl(hypothesis: Hypothesis) -> str:
    """What says that loops have one send too many, or "".

    Unmodified, a loop has 2n-2 sends. The modified kernel then forwards the reduced chunk that its sender received
    last. That is looked for in contents, where both directions of a rank are seen: the send after a loop repeats the
    last message of the inbound loop, flags aside. In an unmodified job that place holds the raw contribution to the
    next loop. It equals the reduced chunk where gradients repeat and the other ranks contribute zeros: so every
    connection has to show it, with contents that are not all alike."""
    period = 2 * hypothesis.ranks - 1
    compared = 0
    inbound = {(on.channel, on.dst): on.connection for on in hypothesis.connections}
    for on in hypothesis.connections:
        sent = on.connection.messages
        source = inbound.get((on.channel, on.src))
        if len(sent) % period or not sent or source is None:
            return ""
        received = source.messages
        for at in range(0, min(len(sent), len(received)) - period + 1, period):
            extra, last = sent[at + period - 1], received[at + period - 2]
            if extra.size != last.size:
                return ""
            if extra.size and (len(set(words := _words(extra))) < 2 or words != _words(last)):
                return ""
            compared += extra.size > 0
    connections = len(hypothesis.connections)
    return f"every loop has one message too many on each of {connections} connections" if compared else ""


def _words(message: Message) -> list[int]:
    """The first words of a message without what differs between two sends of the same data: LL and LL128 flags."""
    kind, _ = head_flags(message.head, message.size)
    words = list(struct.unpack_from(f"<{len(message.head) // 4}I", message.head))
    if kind == "ll":
        return words[::2]
    return words[:30] if kind == "ll128" else words


# -- the finished manifest -------------------------------------------------------------------------------


def check_plan(plan: JobPlan, placed: Iterable[PlacedConnection]) -> None:
    """Walk the engine's own schedule over the observed messages. Raises InternalError where they differ: the search
    and the plan would then not mean the same job."""
    edges = {(e.channel, e.src, e.dst): e for e in plan.engine.edges}
    for on in placed:
        edge, flows = edges[on.channel, on.src, on.dst], on.connection.flows
        if (edge.qps, edge.used) != (len(flows), on.connection.used):
            raise InternalError(
                f"the learnt manifest has {edge.qps} QPs, {edge.used} of them in use at once",
                where=on.connection.name(),
            )
        left = [deque((m.psn, m.size) for m in flow.messages) for flow in flows]
        due = _schedule(edge, plan.engine.mtu)
        while any(left):
            q, *planned = next(due, (next(i for i, rest in enumerate(left) if rest), 1 << 62, 0))
            if not left[q] or planned[0] < left[q][0][0]:
                continue  # not captured
            psn, size = left[q].popleft()
            if planned != [psn, size]:
                raise InternalError(
                    f"the learnt manifest has {planned[1]} bytes at PSN {planned[0]}, the capture {size} at {psn}",
                    where=flows[q].name(),
                )


def _schedule(edge: EdgeSpec, mtu: int) -> Iterator[tuple[int, int, int]]:
    """(QP, PSN, wire bytes) of every piece of every message of an edge, steady calls repeated for ever."""
    psn, number = [0] * edge.qps, 0
    once = [c for c in edge.calls if c.phase != Phase.STEADY]
    steady = [c for c in edge.calls if c.phase == Phase.STEADY and c.lane is not None]
    turn = once
    while turn:
        for call in turn:
            if call.lane is None:
                continue
            for _, _, size, _, _ in messages(call.lane):
                pair = edge.ar_above is not None and size > edge.ar_above
                for i, (_, part) in enumerate(pieces(size, edge.used)):
                    q = (number * edge.used + i) % edge.qps
                    yield q, psn[q], part
                    psn[q] += packets(part, mtu) + pair
                number += 1
        turn = steady
