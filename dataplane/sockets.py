"""AF_PACKET sockets behind a capture of a kernel interface: the driver's, and one of our own.

Traps handled here. net_af_packet reports no drops: its sockets are found, so that they can be asked. It leaves them
open if the port is closed without having been started. It opens them for every protocol and binds them only after
their rings were made: what comes to any interface meanwhile is in the rings, and is thrown away. It joins a
fanout group numbered by process id and interface, so that two captures of one interface in one process, or in
processes of the same number in two containers, would each get a part of the packets, and nobody would count the
rest: refused. Promiscuous mode
belongs to a socket that lives as long as the capture, so the interface's flags are afterwards what they were; the
same socket tells when the interface is deleted, where the drivers would poll on for ever (include/rx.h).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from dataplane.pydpdk.errors import DpdkError

__all__ = ["PacketSockets", "closed", "promiscuous_socket"]

SO_DOMAIN = 39
SOL_PACKET, PACKET_ADD_MEMBERSHIP, PACKET_STATISTICS, PACKET_MR_PROMISC = 263, 1, 6, 1
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
TAKE_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # classic BPF: return 0
# linux/sock_diag.h, linux/packet_diag.h: list the packet sockets of this network namespace
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_REQUEST_DUMP = 4, 20, 0x301
SHOW_INFO_AND_FANOUT, DIAG_INFO, DIAG_FANOUT = 1 | 8, 0, 4


class PacketSockets:
    """Packet sockets that a driver opens after this was made. Leaving the `with` block closes what it left open."""

    def __init__(self) -> None:
        self._before = dict(_packet_sockets())
        self._mine: dict[int, int] = {}

    def find(self) -> list[int]:
        """File descriptors, in the order of the queues. One control thread: what others open meanwhile counts too."""
        self._mine = {fd: inode for fd, inode in _packet_sockets() if self._before.get(fd) != inode}
        return sorted(self._mine)

    def check_alone(self, interface: str) -> None:
        """Nobody else takes packets out of the fanout group that these sockets are in.

        Raises:
            DpdkError: somebody does, so that each would get a part of the packets.
        """
        inodes = set(self._mine.values())
        try:
            found = list(_fanout_groups()) if inodes else []
        except OSError:  # a kernel that does not list them
            return
        groups = {(index, group) for inode, index, group in found if inode in inodes}
        if any((index, group) in groups and inode not in inodes for inode, index, group in found):
            raise DpdkError(
                errno.EBUSY,
                f"interface {interface}: another capture of this process, or of a process with the same id in another "
                "container, is in the same fanout group: each would get a part of the packets",
                "one capture of an interface per process; in containers, the host's process ids",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd, inode in _packet_sockets():
            if self._mine.get(fd) == inode:
                os.close(fd)


def _packet_sockets() -> list[tuple[int, int]]:
    """(file descriptor, inode) of this process's AF_PACKET sockets."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
        except OSError:
            continue  # the descriptor of the listing itself
        # Family and type given: Python would ask the socket, and an AF_XDP one does not answer.
        borrowed = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0, fileno=fd)
        try:
            if borrowed.getsockopt(socket.SOL_SOCKET, SO_DOMAIN) == socket.AF_PACKET:
                found.append((fd, os.fstat(fd).st_ino))
        finally:
            borrowed.detach()
    return found


def promiscuous_socket(interface: str) -> socket.socket:
    """The interface takes frames for anybody until this socket is closed. It is bound to the interface, and
    receives nothing itself.

    Raises:
        DpdkError: not allowed.
    """
    try:
        kept = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    except OSError as exc:
        raise DpdkError(exc.errno or errno.EPERM, f"interface {interface}: capturing", "root or CAP_NET_RAW") from None
    try:
        index = socket.if_nametoindex(interface)
        member = struct.pack("iHH8s", index, PACKET_MR_PROMISC, 0, b"")
        kept.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, array.array("B", member))
        kept.bind((interface, 0))
    except OSError as exc:
        kept.close()
        raise DpdkError(exc.errno or errno.EPERM, f"interface {interface}: promiscuous mode") from None
    return kept


@contextlib.contextmanager
def closed(sockets: Sequence[int]) -> Iterator[None]:
    """For packet sockets in a `with` block nothing more comes. What they have counted is forgotten at its end, so the
    block is there to empty their rings. sockets: file descriptors."""
    program = ctypes.create_string_buffer(TAKE_NOTHING)
    with contextlib.ExitStack() as undo:
        for fd in sockets:
            one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0, fileno=fd)
            undo.callback(one.detach)
            one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
            undo.callback(one.setsockopt, socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
            undo.callback(one.getsockopt, SOL_PACKET, PACKET_STATISTICS, 8)  # reading clears
        yield


def _fanout_groups() -> Iterator[tuple[int, int, int]]:
    """(inode, interface index, group) of every packet socket that is in a group; nothing where the kernel has no
    packet_diag."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as asked:
        asked.settimeout(1)
        request = struct.pack("=BBHIIII", socket.AF_PACKET, 0, 0, 0, SHOW_INFO_AND_FANOUT, 0xFFFFFFFF, 0xFFFFFFFF)
        asked.send(struct.pack("=IHHII", 16 + len(request), SOCK_DIAG_BY_FAMILY, NLM_REQUEST_DUMP, 1, 0) + request)
        while True:
            data = asked.recv(1 << 16)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind != SOCK_DIAG_BY_FAMILY:
                    return  # the end, or an error
                (inode,) = struct.unpack_from("=I", data, 20)
                facts = dict(_attributes(data[32:length]))
                if DIAG_FANOUT in facts and DIAG_INFO in facts:
                    (index,) = struct.unpack_from("=I", facts[DIAG_INFO])
                    (group,) = struct.unpack_from("=I", facts[DIAG_FANOUT])
                    yield inode, index, group & 0xFFFF
                data = data[-(-length // 4) * 4 :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        yield kind, data[4:length]
        data = data[max(4, -(-length // 4) * 4) :]
