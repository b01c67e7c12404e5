"""What an NCCL process can say of its communicator's connections: all but which is which channel.

    describe(log, logged, kernel, gids, version) -> {"communicator": ..., "flows": [...]}       for `attach`

NCCL's log has rings, trees, settings, and the queue pairs that send; the kernel has each queue pair's own number and
its peer's; neither says to which rank a queue pair goes. So this rank names each of its queue pairs once for each rank
that it may go to, with what it knows: its own address, and both numbers. The other end does the same, and the node
keeps what both have named (flowcheck/node/groups/checks.py:union). What is left over, such as other communicators'
queue pairs between the same ranks, and which connection is which channel, is decided on the wire (docs/use/nccl.md).

Pure. torch is not needed; the standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from flowcheck.errors import UserError
from flowcheck.trainer.nccl.log import Log, LoggedCommunicator
from flowcheck.trainer.nccl.rdma import Gid, KernelQueuePair

__all__ = ["describe"]

THRESHOLD = 8192  # NCCL_IB_AR_THRESHOLD, src/transport/net_ib.cc


def describe(
    log: Log, logged: LoggedCommunicator, kernel: Sequence[KernelQueuePair], gids: Sequence[Gid], version: str
) -> dict[str, Any]:
    """kernel: the connected queue pairs of this process; gids: of its ports. version: NCCL's. Raises UserError, naming
    what is missing, or what is not followed without `topology=`."""
    where = log.where
    if log.version and version and log.version != version:
        _refuse(f"is of NCCL {log.version}, and torch has NCCL {version}", where)
    if not (version or log.version):
        _refuse("does not say NCCL's version (rank 0's alone does), and torch does not", where)
    if _number(log, "NCCL_IB_QPS_PER_CONNECTION", 1) != 1:
        _refuse("has several queue pairs for a connection: which belong together is not said", where)
    if not logged.hash:
        _refuse(f"says that communicator {logged.pointer} was split off another, and not its ranks there", where)
    if not logged.channels or sorted(logged.rings) != list(range(logged.channels)):
        _refuse(f"has {len(logged.rings)} rings for {logged.channels} channels of this communicator", where)
    sending = {(_device(log, one.device), one.number): one for one in log.queue_pairs if one.sends}
    mtus = {one.mtu for one in sending.values() if one.mtu}
    if len(mtus) != 1:
        _refuse(f"has queue pairs with the path MTUs {sorted(mtus)}", where)
    orders = [logged.orders.get(channel) for channel in range(logged.channels)]
    communicator = {
        "ranks": logged.ranks, "nccl_version": version or log.version, "channels": logged.channels,
        "rings": [] if None in orders else orders, "mtu": mtus.pop(), "buffer_bytes": log.buffer_bytes,
        "adaptive_routing": _number(log, "NCCL_IB_ADAPTIVE_ROUTING", 0) == 1,
        "ar_threshold": _number(log, "NCCL_IB_AR_THRESHOLD", THRESHOLD),
    }
    if logged.rank == 0 and not communicator["rings"]:
        _refuse("does not have the whole rings, which NCCL cuts where there are many ranks", where)
    flows = list(_named(log, logged, kernel, gids, set(sending)))
    if not flows:
        _refuse("and the kernel's list have no queue pair in common that sends", where)
    return {"communicator": communicator, "flows": flows}


def _named(
    log: Log, logged: LoggedCommunicator, kernel: Sequence[KernelQueuePair], gids: Sequence[Gid],
    sending: set[tuple[str, int]],
) -> Iterator[dict[str, Any]]:
    """One side of a connection each; the address of the other is "" until its own rank has said it."""
    me, addresses = logged.rank, _addresses(log, gids)
    trees = {peer for tree in logged.trees.values() for peer in (tree.up, *tree.down)} - {-1}
    before = {ends[0] for ends in logged.rings.values()} | trees
    after = {ends[1] for ends in logged.rings.values()} | trees
    for one in kernel:
        address = addresses.get((one.device, one.port))
        if address is None or one.peer == one.number:  # a loopback's peer is itself
            continue
        if (one.device, one.number) in sending:
            yield from (
                {"src": me, "dst": peer, "src_addr": address, "dst_addr": "", "qpns": [one.peer],
                 "cts_qpns": [one.number]} for peer in sorted(after - {me})
            )
        else:
            yield from (
                {"src": peer, "dst": me, "src_addr": "", "dst_addr": address, "qpns": [one.number],
                 "cts_qpns": [one.peer]} for peer in sorted(before - {me})
            )


def _addresses(log: Log, gids: Sequence[Gid]) -> dict[tuple[str, int], str]:
    """By device and port: as the log says it of a queue pair there; otherwise by the entry of the table that NCCL took
    on other ports."""
    found = {(_device(log, one.device), one.port): one.address for one in log.queue_pairs if one.address}
    indices = {one.gid_index for one in log.queue_pairs if one.gid_index >= 0}
    if len(indices) == 1:
        (index,) = indices
        for gid in gids:
            if gid.index == index:
                found.setdefault((gid.device, gid.port), gid.address)
    return found


def _device(log: Log, number: int) -> str:
    return log.devices.get(number, ("", 0))[0]


def _number(log: Log, name: str, otherwise: int) -> int:
    """A setting's value, NCCL's default where the log has none, or -2."""
    text = log.environment.get(name, "-2")
    if not text.removeprefix("-").isdecimal() or len(text) > 12:
        _refuse(f"has {name} as {text[:40]!r}", log.where)
    return otherwise if int(text) == -2 else int(text)


def _refuse(what: str, where: str) -> NoReturn:
    raise UserError(what, where=where, remedy="topology= (docs/use/nccl.md)")
