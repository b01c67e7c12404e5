"""What cannot be supported or followed, refused by name and with a remedy (docs/use/learn.md lists it).

    refuse_unsupported(...)      by NCCL's log or its bootstrap
    refuse_unread(...)           because what is there cannot be read
    check_connections(layout)    by the connections: mid-stream, undecided queue pairs, registered buffers
    refuse_modified(groups)      by contents, when nothing else explains the traffic

All raise UserError. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowcheck.diagnose.remedies import remedy_of
from flowcheck.errors import UserError
from flowcheck.learning.bootstrap import Bootstrap
from flowcheck.learning.check import modified_nccl
from flowcheck.learning.layout import Layout
from flowcheck.learning.logs import LogFacts

__all__ = ["check_connections", "refuse_modified", "refuse_unread", "refuse_unseen_ring", "refuse_unsupported"]

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


def refuse_unread(connections: int, encrypted: int, unread: Mapping[str, int], packets: int) -> None:
    """Frames that nothing can be read from. connections: found all the same; unread: frames by cause; packets: read."""
    if encrypted and not connections:
        raise UserError(
            f"the traffic is encrypted: {encrypted} MACsec or IPsec frames and no RoCEv2 write",
            remedy="mirror behind the decryption, or switch it off for the mirrored ports",
        )
    damaged = sum(count for cause, count in unread.items() if not cause.startswith("encapsulated"))
    if damaged > packets or (unread and not connections):  # tunnels may be somebody else's
        causes = ", ".join(f"{cause} {count}" for cause, count in unread.items())
        raise UserError(f"most RoCEv2 packets cannot be read: {causes}; {packets} can", remedy=remedy_of(unread))


def check_connections(layout: Layout) -> None:
    """What the connections themselves show that cannot be learnt from."""
    for wire in layout.wires:
        c = wire.connection
        # where messages go round several QPs, some may be new to a capture that begins later
        later = len(c.queues) > 1 and bool(c.posted) and min(c.posted) >= c.total // c.used
        if later or not any(queue.whole for queue in c.queues):
            raise UserError(
                "the capture begins in mid-stream: the calls before it are not known, so neither is the position",
                where=c.name(),
                remedy="capture from the job's start, or give the manifest of this job with --job",
            )
        if c.unsure:
            raise UserError(
                f"which queue pairs are one connection is not decided: {c.unsure}", where=c.name(),
                remedy="mirror all ports of the rank in both directions (clear-to-send writes name the addresses), "
                "capture the TCP bootstrap, or give a manifest with --job",
            )
        starting = c.queues[0].messages if c.used > 1 else c.pieces()  # the first QP has every message's beginning
        places = {(m.rkey, m.va) for m in starting if m.size}
        if len(places) > REGIONS_MAX:
            raise UserError(
                f"its writes go to {len(places)} addresses, more than the slots of NCCL's buffers: registered user "
                "buffers", where=c.name(),
                remedy="run the job with NCCL_LOCAL_REGISTER=0 and NCCL_GRAPH_REGISTER=0",
            )


def refuse_unseen_ring(layout: Layout, algorithms: set[str], rings_known: bool) -> None:
    """Beside a tree only the ring 0, 1, 2, ... is proposed. Which chunk a ring call sends depends on the place in it,
    so all of it has to be seen, or said by a log."""
    ring = layout.rings[0]
    edges = {(w.src, w.dst) for w in layout.wires}
    whole = all((a, b) in edges for a, b in zip(ring, (*ring[1:], ring[0]), strict=True))
    if layout.tree and "ring" in algorithms and not whole and not rings_known:
        raise UserError(
            "some AllReduce calls go through a tree and some round the ring, whose order does not show: not all of its "
            "edges were captured",
            where=layout.wires[0].connection.name(),
            remedy="give NCCL's log with --nccl-log, mirror every rank, or name rings and flows in a manifest",
        )


def refuse_modified(groups: list[list[Layout]]) -> None:
    """Only where no announcements of DDP explain the traffic as it is: contents alone can deceive."""
    for layout in (layout for group in groups for layout in group):
        modified = modified_nccl(layout)
        if modified:
            raise UserError(
                f"{modified}: a modified NCCL (2n-1 sends per loop instead of 2n-2). Released NCCL looks like that "
                "only if the same gradients repeat and no two ranks contribute to the same elements",
                where=layout.wires[0].connection.name(),
                remedy="run the job with NCCL as released; if that is what it ran with, give a manifest with --job",
            )
