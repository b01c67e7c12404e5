"""The emulated NIC of a process: one engine per fabric address, shared by all its process groups.

    nic = Nic.of(settings)      one more user; made at the first
    nic.submit(...)             start an operation; its work is completed by the NIC's completion thread
    nic.release()               one user less; the last one stops engine and thread

Frames go out and come in through an AF_PACKET socket, headers as a ConnectX writes them. A UDP socket on port 4791 that
reads nothing keeps the kernel from answering with ICMP port unreachable. Needs CAP_NET_RAW. Any thread.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import threading
from typing import ClassVar

from flowcheck.errors import EnvironmentProblem, UserError
from lab.softroce._engine import Engine, Plan
from lab.softroce.settings import VARIABLE, Settings
from lab.softroce.work import SoftRoceWork

__all__ = ["Nic"]

_ROCE_PORT = 4791
_HEADERS = 20 + 8 + 12 + 20 + 4  # IPv4, UDP, BTH, RETH and immediate, ICRC
_SO_ATTACH_FILTER, _SO_RCVBUFFORCE, _SOL_PACKET, _PACKET_IGNORE_OUTGOING = 26, 33, 263, 23
_SIOCGIFMTU, _SIOCGIFHWADDR = 0x8921, 0x8927
_RECEIVE_BYTES = 64 << 20

_Filter = list[tuple[int, int, int, int]]
_NOTHING: _Filter = [(0x06, 0, 0, 0)]


def _only(address: bytes) -> _Filter:
    """Classic BPF: unfragmented IPv4 UDP to port 4791 of `address`."""
    (wanted,) = struct.unpack(">I", address)
    return [
        (0x28, 0, 0, 12), (0x15, 0, 10, 0x0800), (0x30, 0, 0, 23), (0x15, 0, 8, 17), (0x28, 0, 0, 20),
        (0x45, 6, 0, 0x3FFF), (0x20, 0, 0, 30), (0x15, 0, 4, wanted), (0xB1, 0, 0, 14), (0x48, 0, 0, 16),
        (0x15, 0, 1, _ROCE_PORT), (0x06, 0, 0, 0x40000), (0x06, 0, 0, 0),
    ]


def _attach(sock: socket.socket, program: _Filter) -> None:
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    form = struct.pack("HL", len(program), ctypes.addressof(buffer))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, form)


class Nic:
    """engine, address (4 bytes), mac (6 bytes)."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _known: ClassVar[dict[tuple[str, str], Nic]] = {}

    def __init__(self, settings: Settings) -> None:
        self._key = (settings.interface, settings.address)
        self._users = 0
        self.address = socket.inet_aton(settings.address)
        self._guard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._guard.bind((settings.address, _ROCE_PORT))
            _attach(self._guard, _NOTHING)
            self.mac = self._of_interface(settings)
            packets = self._packet_socket(settings)
        except OSError as error:
            self._guard.close()
            raise EnvironmentProblem(
                f"cannot use UDP port {_ROCE_PORT} of the address: {error.strerror}", where=str(self._key),
                remedy="the address must be this host's, and used by one softroce process only",
            ) from None
        except (EnvironmentProblem, UserError):
            self._guard.close()
            raise
        self.engine = Engine(
            packets.detach(), self.address, self.mac, traffic_class=settings.traffic_class, window=settings.window,
            retransmit_ns=settings.retransmit_ms * 1_000_000,
            seed=settings.seed or int.from_bytes(os.urandom(4), "little"),
        )
        self._pending: dict[int, tuple[SoftRoceWork, Plan]] = {}
        self._pending_lock = threading.Lock()
        self._thread = threading.Thread(target=self._complete, name="softroce-completions", daemon=True)
        self._thread.start()

    def _of_interface(self, settings: Settings) -> bytes:
        name = settings.interface.encode()
        if not 0 < len(name) < 16:
            raise UserError(f"{settings.interface!r} is not an interface name", where=VARIABLE, remedy="name one")
        request = struct.pack("16s240x", name)
        try:
            (mtu,) = struct.unpack_from("16xi", fcntl.ioctl(self._guard, _SIOCGIFMTU, request))
            (mac,) = struct.unpack_from("18x6s", fcntl.ioctl(self._guard, _SIOCGIFHWADDR, request))
        except OSError as error:
            raise EnvironmentProblem(
                f"no interface {settings.interface!r}: {error.strerror}", where=VARIABLE,
                remedy="name the interface that has the address",
            ) from None
        if mtu < settings.mtu + _HEADERS:
            raise EnvironmentProblem(
                f"the MTU of {settings.interface} is {mtu}, RoCE packets of {settings.mtu} bytes need "
                f"{settings.mtu + _HEADERS}", where=VARIABLE, remedy="raise it (ip link set mtu) or lower mtu here",
            )
        return mac

    def _packet_socket(self, settings: Settings) -> socket.socket:
        try:
            found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        except PermissionError:
            raise EnvironmentProblem(
                "no right to open a packet socket", where=settings.interface,
                remedy="run as root or with CAP_NET_RAW in the network namespace",
            ) from None
        try:
            _attach(found, _only(self.address))
            found.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
            try:
                found.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BYTES)
            except PermissionError:  # packets that do not fit are lost and repeated
                found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            found.bind((settings.interface, 0x0800))
        except BaseException:
            found.close()
            raise
        return found

    @classmethod
    def of(cls, settings: Settings) -> Nic:
        """The NIC of these settings' interface and address, with one user more."""
        with cls._lock:
            key = (settings.interface, settings.address)
            nic = cls._known.get(key)
            if nic is None:
                nic = cls._known[key] = cls(settings)
            nic._users += 1
            return nic

    def submit(self, communicator: int, plan: Plan, source: int, target: int, work: SoftRoceWork) -> None:
        """Start an operation on memory that `work` keeps alive."""
        with self._pending_lock:  # held until the work is known: it may be finished before submit returns
            self._pending[self.engine.submit(communicator, plan, source, target)] = work, plan

    def _complete(self) -> None:
        while (finished := self.engine.finished()) is not None:
            with self._pending_lock:
                work, _ = self._pending.pop(finished[0])
            work.complete(finished[1])

    def release(self) -> None:
        """One user less. The last one must have no operation under way that anybody waits for."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            del self._known[self._key]
        self.engine.stop()
        self._thread.join()
        self.engine.close()
        self._guard.close()
        for work, _ in self._pending.values():
            work.complete("closed before it was done")
