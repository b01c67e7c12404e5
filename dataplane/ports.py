"""Where packets come from, live: a device by name, and what its driver needs to know.

    0000:81:00.0          a NIC by PCI address: mlx5 and every other physical driver
    af_packet:IFACE       net_af_packet, a kernel interface; needs CAP_NET_RAW
    af_xdp:IFACE          net_af_xdp, faster, takes the interface's packets away from the kernel; needs root
    ring, null            net_ring and net_null, for tests

Traps handled here. net_af_packet cuts frames that are larger than its `framesz` (2048 by default): framesz is
set by the interface's MTU. It wants packet buffers as large as framesz (sockets.py has the rest of its traps).
net_af_xdp refuses large MTUs, receives nothing at 3000, and nothing at all on veth with busy polling
(busy_budget), wants a pool of its own with small buffers, and (before 24.11) keeps the interface's queue until the
process ends, so an interface is captured once per process.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from dataplane.memory import room_for
from dataplane.pydpdk.errors import DpdkError
from dataplane.pydpdk.ethdev import PCI_ADDRESS

__all__ = ["PortPlan", "interface_mtu", "link_speed", "numa_node", "plan_port", "rx_queues"]

KERNEL = ("af_packet", "af_xdp")  # kinds of ports that are interfaces of the kernel
SIOCGIFMTU = 0x8921
ETHERNET = 14 + 8  # header and two VLAN tags
TPACKET2_ROOM = 96  # what the kernel puts before a frame in its ring: headers, address, alignment
BLOCK = 1 << 16
AF_PACKET_FRAMES = 4096
LARGEST_FRAMESZ = 1 << 15
AF_XDP_ROOM = 2048
AF_XDP_MTU = 1500
AF_XDP_DESCRIPTORS = 2048
PHYSICAL_DESCRIPTORS = 4096
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class PortPlan:
    """name, arguments: for pydpdk.Port. interface: of the kernel, or "". frame: bytes of the largest frame that
    can come. room: bytes that packet buffers must have, None for any. mtu: to configure, 0 for the driver's.
    descriptors: per queue. kernel_bytes: of memory that the kernel keeps, per queue."""

    driver: str
    name: str
    arguments: str
    interface: str
    frame: int
    room: int | None = None
    mtu: int = 0
    descriptors: int = 1024
    kernel_bytes: int = 0


def interface_mtu(name: str) -> int:
    """MTU of a kernel interface in this network namespace.

    Raises:
        DpdkError: no port has that name.
    """
    known = sorted(n for _, n in socket.if_nameindex())
    try:
        if name not in known:  # the ioctl also takes an alias (eth0:1) and cuts a long name
            raise OSError(errno.ENODEV, "")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            answer = fcntl.ioctl(asked, SIOCGIFMTU, struct.pack("16si12x", os.fsencode(name), 0))
    except OSError as exc:
        raise DpdkError(
            exc.errno or errno.ENODEV, f"interface {ascii(name)[1:-1]}", f"one of: {', '.join(known)}"
        ) from None
    return int(struct.unpack("16si12x", answer)[1])


def numa_node(device: str, root: Path = Path("/")) -> int:
    """Of a device as above; -1: the machine has one node, the device is virtual, or it does not say."""
    kind, _, interface = device.partition(":")
    if kind in KERNEL:
        return _number(root / f"sys/class/net/{interface}/device/numa_node")
    return _number(root / f"sys/bus/pci/devices/{device.lower()}/numa_node") if PCI_ADDRESS.fullmatch(device) else -1


def link_speed(device: str, root: Path = Path("/")) -> int:
    """Mb/s of a device as above, as its kernel interface says; -1: it has none (bound to vfio-pci), or is down."""
    kind, _, interface = device.partition(":")
    if kind in KERNEL:
        return _number(root / f"sys/class/net/{interface}/speed")
    files = (root / "sys/bus/pci/devices" / device.lower()).glob("net/*/speed") if PCI_ADDRESS.fullmatch(device) else ()
    return max(map(_number, files), default=-1)


def rx_queues(device: str, root: Path = Path("/")) -> int:
    """Of a kernel interface; -1: not known before it is opened, or as many as are asked for (af_packet)."""
    kind, _, interface = device.partition(":")
    found = len(list((root / f"sys/class/net/{interface}/queues").glob("rx-*"))) if kind == "af_xdp" else 0
    return found or -1


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def plan_port(device: str, *, queues: int, path_mtu: int, frames: int = AF_PACKET_FRAMES) -> PortPlan:
    """path_mtu: RoCE's, 0: whatever the interface lets through. frames: of the kernel's ring (af_packet).

    Raises:
        DpdkError: no such interface, or a combination its driver cannot do.
        ValueError: not a device name.
    """
    kind, _, interface = device.partition(":")
    number = next(_numbers)
    if PCI_ADDRESS.fullmatch(device):
        frame = room_for((path_mtu or 4096) + 128)
        return PortPlan("pci", device, "", "", frame, mtu=frame - ETHERNET - 4, descriptors=PHYSICAL_DESCRIPTORS)
    if kind in ("ring", "null") and not interface:
        frame = room_for((path_mtu or 4096) + 128)
        arguments = f"size={frame},copy=1" if kind == "null" else ""
        return PortPlan(kind, f"net_{kind}_fc{number}", arguments, "", frame)
    if kind not in KERNEL or not interface:
        raise ValueError(f"{device!r} is not a capture device: af_packet:IFACE, af_xdp:IFACE or a PCI address")
    if "," in interface or " " in interface:
        raise ValueError(f"{device!r}: the driver cannot take this name")
    mtu = interface_mtu(interface)
    if path_mtu and path_mtu + 80 > mtu:
        raise DpdkError(
            0, f"interface {interface} has MTU {mtu}, RoCE with path MTU {path_mtu} needs {path_mtu + 80}",
            f"ip link set {interface} mtu 9000",
        )
    plan = _af_packet if kind == "af_packet" else _af_xdp
    return plan(f"net_{kind}_fc{number}", interface, mtu, queues, frames)


def _af_packet(name: str, interface: str, mtu: int, queues: int, frames: int) -> PortPlan:
    frame = mtu + ETHERNET
    size = max(2048, 1 << (frame + TPACKET2_ROOM - 1).bit_length())
    if size > LARGEST_FRAMESZ:  # lo: more than a buffer can be; what the kernel cuts then is larger than a slot
        size, frame = LARGEST_FRAMESZ, LARGEST_FRAMESZ - 128
    block = max(BLOCK, size)
    count = -(-frames * size // block) * block // size
    arguments = f"iface={interface},qpairs={queues},blocksz={block},framesz={size},framecnt={count}"
    # The driver maps a ring to send from as well, of the same size, and never uses it here.
    return PortPlan("af_packet", name, arguments, interface, frame, room=size, kernel_bytes=2 * count * size)


def _af_xdp(name: str, interface: str, mtu: int, queues: int, frames: int) -> PortPlan:
    if mtu > AF_XDP_MTU:
        raise DpdkError(
            0, f"interface {interface} has MTU {mtu}; net_af_xdp receives nothing or does not load above {AF_XDP_MTU}",
            f"ip link set {interface} mtu {AF_XDP_MTU} (RoCE path MTU 1024), or af_packet:{interface}",
        )
    arguments = f"iface={interface},start_queue=0,queue_count={queues},busy_budget=0"
    return PortPlan(
        "af_xdp", name, arguments, interface, mtu + ETHERNET, room=AF_XDP_ROOM, descriptors=AF_XDP_DESCRIPTORS
    )
