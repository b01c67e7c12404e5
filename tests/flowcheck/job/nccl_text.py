"""What NCCL's log of one rank looks like, by version: the formats of its sources, filled in.

    text(Shape(...), "2.27.7")      the bytes of NCCL_DEBUG_FILE
    FORMATS                         each format with the versions and the source file that have it; test_nccl_log.py
                                    looks for them in a clone of NVIDIA/nccl that FLOWCHECK_NCCL names
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

__all__ = ["FORMATS", "VERSIONS", "Format", "Shape", "line", "text"]

VERSIONS = (
    "2.18.6", "2.19.4", "2.20.5", "2.21.5", "2.22.3", "2.23.4", "2.24.3", "2.25.1", "2.26.2", "2.27.7", "2.28.9",
    "2.29.7", "2.30.7",
)
HCA = "src/transport/net_ib.cc"
CONNECT = "src/transport/net_ib/connect.cc"


@dataclass(frozen=True)
class Format:
    """C's format, in 2.`first` to 2.`last`."""

    name: str
    first: int
    last: int
    file: str
    c: str


ECE = "query_ece={supported=%d, vendor_id=0x%x, options=0x%x, comp_mask=0x%x} "
COMM = "comm %p rank %d nranks %d cudaDev %d nvmlDev %d busId %lx "
FORMATS = (
    Format("start", 18, 20, "src/init.cc", COMM + "commId 0x%llx - Init START"),
    Format("start", 21, 22, "src/init.cc", "ncclCommInitRank " + COMM + "commId 0x%llx - Init START"),
    Format("start", 23, 28, "src/init.cc", "%s " + COMM + "commId 0x%llx - Init START"),
    Format("start", 29, 30, "src/init.cc", "[Rank %d] %s " + COMM + "commId 0x%llx - Init START"),
    Format("complete", 18, 20, "src/init.cc", COMM + "commId 0x%llx - Init COMPLETE"),
    Format("complete", 21, 22, "src/init.cc", "ncclCommInitRank " + COMM + "commId 0x%llx - Init COMPLETE"),
    Format("complete", 23, 30, "src/init.cc", "%s " + COMM + "commId 0x%llx - Init COMPLETE"),
    Format("split", 24, 28, "src/init.cc", "%s " + COMM + "parent %p splitCount %d color %d key %d- Init START"),
    Format("split", 29, 30, "src/init.cc", "%s " + COMM + "parent %p childCount %d color %d key %d- Init START"),
    Format("split complete", 24, 28, "src/init.cc",
           "%s " + COMM + "parent %p splitCount %d color %d key %d - Init COMPLETE"),
    Format("split complete", 29, 30, "src/init.cc",
           "%s " + COMM + "parent %p childCount %d color %d key %d - Init COMPLETE"),
    Format("gone", 18, 21, "src/init.cc", "comm %p rank %d nranks %d cudaDev %d busId %lx - Destroy COMPLETE"),
    Format("gone", 22, 30, "src/init.cc", "comm %p rank %d nranks %d cudaDev %d busId %lx - %s COMPLETE"),
    Format("nodes", 20, 30, "src/init.cc",
           "comm %p rank %d nRanks %d nNodes %d localRanks %d localRank %d MNNVL %d"),
    Format("order", 18, 22, "src/graph/rings.cc", "Channel %02d/%02d : "),
    Format("order", 23, 30, "src/graph/rings.cc", "Channel %02d/%02d :"),
    Format("ring", 18, 30, "src/init.cc", "Ring %02d : %d -> %d -> %d"),
    Format("tree", 18, 30, "src/init.cc", " [%d] %d/%d/%d->%d->%d"),
    Format("trees", 18, 30, "src/init.cc", "Trees%s"),
    Format("channels", 18, 19, "src/init.cc",
           "%d coll channels, %d nvls channels, %d p2p channels, %d p2p channels per peer"),
    Format("channels", 20, 30, "src/init.cc",
           "%d coll channels, %d collnet channels, %d nvls channels, %d p2p channels, %d p2p channels per peer"),
    Format("set", 18, 30, "src/misc/param.cc", "%s set by environment to %lld."),
    Format("set text", 18, 23, "src/graph/tuning.cc", "NCCL_PROTO set by environment to %s"),
    Format("network", 18, 25, "src/init.cc", "Using network %s"),
    Format("send", 18, 25, "src/transport/net.cc", "Channel %02d/%d : %d[%d] -> %d[%d] [send] via NET/%s/%d%s%s"),
    Format("send", 26, 30, "src/transport/net.cc", "Channel %02d/%d : %d[%d] -> %d[%d] [send] via NET/%s/%d%s%s%s"),
    Format("receive", 18, 25, "src/transport/net.cc",
           "Channel %02d/%d : %d[%d] -> %d[%d] [receive] via NET/%s/%d%s%s"),
    Format("receive", 26, 30, "src/transport/net.cc",
           "Channel %02d/%d : %d[%d] -> %d[%d] [receive] via NET/%s/%d%s%s%s"),
    Format("pxn", 18, 25, "src/transport/net.cc",
           "Channel %02d/%d : %d[%d] -> %d[%d] [send] via NET/%s/%d(%d)%s%s"),
    Format("pxn", 26, 30, "src/transport/net.cc",
           "Channel %02d/%d : %d[%d] -> %d[%d] [send] via NET/%s/%d(%d)%s%s%s"),
    Format("shm", 18, 29, "src/transport/shm.cc", "Channel %02d : %d[%d] -> %d[%d] via SHM/%s/%s"),
    Format("shm", 30, 30, "src/transport/shm.cc", "Channel %02d : %d[%d] -> %d[%d] via SHM/direct"),
    Format("devices", 18, 28, HCA, "NET/IB : Using%s %s; OOB %s:%s"),
    Format("devices", 29, 30, "src/transport/net_ib/init.cc", "NET/IB : Using%s %s; OOB %s:%s"),
    Format("qp", 18, 18, HCA, "NET/IB: Dev %d Port %d qpn %d mtu %d GID %ld (%lX/%lX)"),
    Format("qp", 19, 19, HCA, "NET/IB: Dev %d Port %d qpn %d mtu %d " + ECE + "GID %ld (%lX/%lX)"),
    Format("qp", 20, 26, HCA, "NET/IB: %s %d IbDev %d Port %d qpn %d mtu %d " + ECE
           + "GID %ld (%lX/%lX) fifoRkey=0x%x fifoLkey=0x%x"),
    Format("qp", 27, 28, HCA, "NET/IB: %s %d IbDev %d Port %d qpn %d mtu %d GID %ld (%lX/%lX)"
           " fifoRkey=0x%x fifoLkey=0x%x"),
    Format("qp", 29, 30, CONNECT, "NET/IB: %s: %s %d IbDev %d Port %d qp_num %d mtu %d GID %ld (%lX/%lX)"
           " ctsFifoRkey=0x%x ctsFifoLkey=0x%x"),
    Format("set_ece", 20, 28, HCA, "NET/IB: IbDev %d Port %d qpn %d set_ece={supported=%d, vendor_id=0x%x,"
           " options=0x%x, comp_mask=0x%x}"),
    Format("created", 29, 29, CONNECT, "NET/IB: %s: QP created: port=%d dev=%d devName=%s ndevs=%d nmdevs=%d qp_num=%u"
           " pkey=%u pd=%p"),
    Format("created", 30, 30, CONNECT, "NET/IB: %s: QP created: port=%d dev=%d devName=%s ndevs=%d nmdevs=%d qp_num=%u"
           " pkey=%u pd=%p oooRq=%d"),
)


def printed(name: str, minor: int, *values: object) -> str:
    """A format of this version, filled in; values that it does not have are left over."""
    (one,) = [one for one in FORMATS if one.name == name and one.first <= minor <= one.last]
    python = one.c.replace("%p", "0x%x").replace("%ll", "%l")
    return python % values[:len(re.findall(r"%[0-9]*l?[a-zA-Z]", python))]


def line(said: str, thread: int = 140, process: str = "node-a:101", device: int = 0) -> str:
    return f"{process}:{thread} [{device}] NCCL INFO {said}\n"[:1024]


@dataclass(frozen=True)
class Shape:
    """A communicator as one rank has it. rings: by channel the ranks in order. queue pairs: (number, address)."""

    rank: int = 0
    rings: tuple[tuple[int, ...], ...] = ((0, 2, 1, 3), (0, 2, 1, 3))
    pointer: int = 0x55D0C0FFEE00
    hash: int = 0x9C41F00DBEEF0001
    nodes: int = 4
    trees: tuple[tuple[int, int, int, int], ...] = ((2, -1, -1, -1), (-1, -1, -1, 1))
    queue_pairs: tuple[tuple[int, str], ...] = ((1107, "10.0.0.1"), (1108, "10.0.0.1"))
    environment: tuple[tuple[str, int], ...] = (("NCCL_IB_GID_INDEX", 3), ("NCCL_BUFFSIZE", 1048576))


def qp(minor: int, number: int, address: str, index: int = 3) -> str:
    known = ip_address(address)
    gid = (known if isinstance(known, IPv6Address) else IPv6Address(f"::ffff:{address}")).packed
    halves = int.from_bytes(gid[:8], "little"), int.from_bytes(gid[8:], "little")
    keys = (0x1004, 0x1004)
    if minor < 19:
        return printed("qp", minor, 0, 1, number, 5, index, *halves)
    ece = (1, 0x15B3, 0x10000002, 0x1)
    if minor < 20:
        return printed("qp", minor, 0, 1, number, 5, *ece, index, *halves)
    if minor < 27:
        return printed("qp", minor, "NCCL Dev", 0, 0, 1, number, 5, *ece, index, *halves, *keys)
    if minor < 29:
        return printed("qp", minor, "NCCL Dev", 0, 0, 1, number, 5, index, *halves, *keys)
    return printed("qp", minor, "ncclIbConnect", "NCCL Dev", 0, 0, 1, number, 5, index, *halves, *keys)


def text(shape: Shape, version: str) -> bytes:
    """All lines of this rank's file."""
    minor, rank, ranks = int(version.split(".")[1]), shape.rank, len(shape.rings[0])
    begun = (shape.pointer, rank, ranks, 0, 0, 0x1000, shape.hash)
    ends = [(ring[ring.index(rank) - 1], ring[(ring.index(rank) + 1) % ranks]) for ring in shape.rings]
    function = "ncclCommInitRankConfig"
    out = [line("Bootstrap : Using eth0:10.9.0.1<0>", 101)]
    if rank == 0:
        out.append(line(f"NCCL version {version}+cuda12.4", 101))
    out += [line(printed("set", minor, name, value)) for name, value in shape.environment]
    using = "[0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE"
    out.append(line(printed("devices", minor, f" {using}", "[RO]", "eth0", "10.9.0.1<0>")))
    out.append(line(printed("network", min(minor, 25), "IB")))
    named = begun if minor < 23 else (function, *begun) if minor < 29 else (rank, function, *begun)
    out.append(line(printed("start", minor, *named)))
    if minor >= 20:
        out.append(line(printed("nodes", minor, shape.pointer, rank, ranks, shape.nodes, 1, 0, 0)))
    for channel, ring in enumerate(shape.rings):
        if rank == 0:
            values = "".join(f" {one:3d}" for one in ring[:20]) if minor < 23 else "".join(f" {one}" for one in ring)
            whole = printed("order", minor, channel, len(shape.rings)) + values
            out.append(line(whole if len(whole) < 128 or minor < 23 else whole[:124] + "..."))
    trees = ""
    for channel, (before, after) in enumerate(ends):
        up, *down = shape.trees[channel % len(shape.trees)][3], *shape.trees[channel % len(shape.trees)][:3]
        trees += printed("tree", minor, channel, *down, rank, up)
        out.append(line(printed("ring", minor, channel, before, rank, after)))
    out.append(line(printed("trees", minor, trees[:1023])))
    for channel, (before, after) in enumerate(ends):
        out.append(line(printed("receive", minor, channel, 0, before, 0, rank, 0, "IB", 0, "/GDRDMA", "", "")))
        out.append(line(printed("send", minor, channel, 0, rank, 0, after, 0, "IB", 0, "/GDRDMA", "", "")))
    for number, address in shape.queue_pairs:
        if minor >= 29:
            out.append(line(printed("created", minor, "ncclIbSenderQpsCreate", 1, 0, "mlx5_0", 2, 2, number, 0, 0x7, 0),
                            150))
        out.append(line(qp(minor, number, address), 150))
        if 20 <= minor < 29:  # to 2.26 the number is the peer's
            out.append(line(printed("set_ece", minor, 0, 1, 77777, 1, 0x15B3, 0, 1), 150))
    counts = (len(shape.rings), 0, 0, 2, 2) if minor >= 20 else (len(shape.rings), 0, 2, 2)
    out.append(line(printed("channels", minor, *counts)))
    done = begun if minor < 23 else (function, *begun)
    out.append(line(printed("complete", minor, *done)))
    return "".join(out).encode()
