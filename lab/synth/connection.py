"""One NCCL connection as its NICs put it on the wire: RC queue pairs with messages, CTS writes and ACKs.

    Connection.clear_to_send(...)   the receiver announces a message: a WRITE into the sender's FIFO, its ACK
    Connection.send(...)            the sender's WRITEs of a message on one or several QPs, their ACKs

Call them in message order, CTS before its message (nccl-wire.md 5.4). State runs on for the connection's
life: steps, message number, a PSN and an MSN per QP and direction. Frames are only built for directions that
somebody captures; the state advances all the same. Source: nccl-wire.md 5. One thread per connection.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from flowcheck.job.model import Communicator, Flow
from lab.synth.families import Family
from lab.synth.packets import (
    ACK,
    WRITE_FIRST,
    WRITE_LAST,
    WRITE_LAST_IMM,
    WRITE_MIDDLE,
    WRITE_ONLY,
    WRITE_ONLY_IMM,
    Endpoint,
    Path,
    udp_source_port,
)

__all__ = ["Connection", "Record", "TransportOptions"]

PACKET_NS = 330  # a 4 KiB packet at 100 Gb/s
_FIFO_SLOTS = 256
_ACK_SYNDROME, _NAK_SEQUENCE = 0x1F, 0x60


@dataclass(frozen=True)
class TransportOptions:
    """Choices of NIC and fabric that the manifest does not hold.

    vlan: 802.1Q tag of every frame. first_psn: of every QP, both directions (NCCL: 0). cut_ranks: ranks
    whose NIC sends a plain multi-packet WRITE as one-packet WRITEs, each with its own RETH. retransmit:
    probability that a message suffers a go-back-N; every other time the lost packet is one the mirror
    never saw either.
    """

    vlan: int | None = None
    first_psn: int = 0
    cut_ranks: frozenset[int] = frozenset()
    retransmit: float = 0.0


@dataclass
class Record:
    """A frame on the wire between two hosts, before any mirror.

    kind: data | cts | ack | nak. piece: (message id, wire offset, wire bytes) of a data packet's payload,
    message id -1 when the payload is not a reduced one. src_device, dst_device: port of a merged NIC, else 0.
    """

    time: int
    frame: bytes
    src: int
    dst: int
    qpn: int
    psn: int
    kind: str
    piece: tuple[int, int, int] = (-1, 0, 0)
    src_device: int = 0
    dst_device: int = 0


@dataclass
class _Queue:
    """One QP of the connection, data direction. CTS uses the reverse of the first queue of each device in turn."""

    qpn: int
    reply_qpn: int
    forward: Path
    backward: Path
    psn: int
    device: int
    msn: int = 0


@dataclass
class _Packet:
    opcode: int
    extension: bytes
    offset: int
    length: int
    ack: bool = False
    completes: bool = False
    psn: int = field(default=0)


class Connection:
    """Channel, source and destination of `flow`.

    step: next step number; messages: messages sent so far; both public for the scheduler.
    """

    def __init__(
        self, flow: Flow, communicator: Communicator, family: Family, hosts: dict[int, Endpoint],
        options: TransportOptions, seed: int,
    ) -> None:
        self.flow, self.step, self.messages = flow, 0, 0
        self.retransmitted: list[dict[str, int]] = []
        self._communicator, self._family, self._options = communicator, family, options
        rng = random.Random(f"{seed}/{flow.channel}/{flow.src}/{flow.dst}")
        self._luck = rng.random()
        # Regions stand apart, page aligned; rkeys differ between host memory (LL) and GPU memory.
        self._regions = {
            name: (0x7F00_0000_0000 if name == "ll" else 0x0006_0000_0000) + (rng.randrange(1 << 28) << 12)
            for name in ("ll", "ll128", "simple")
        }
        self._rkeys = {name: rng.getrandbits(24) << 8 | 0x10 for name in (*self._regions, "fifo")}
        self._fifo = 0x7F80_0000_0000 + (rng.randrange(1 << 24) << 12) + 0x820
        self._queues = []
        for i, qpn in enumerate(flow.qpns):
            reply = flow.cts_qpns[i] if i < len(flow.cts_qpns) else 1 + (qpn * 2654435761 + i) % 0xFFFFFE
            port = udp_source_port(qpn, reply)
            device = i % communicator.devices
            src, dst = (
                replace(hosts[rank], mac=hosts[rank].mac[:5] + bytes([hosts[rank].mac[5] ^ device << 5]), address=text)
                for rank, text in zip((flow.src, flow.dst), flow.addresses(i), strict=True)
            )
            there, back = (Path(a, b, port, vlan=options.vlan) for a, b in ((src, dst), (dst, src)))
            self._queues.append(_Queue(qpn, reply, there, back, options.first_psn, device))
        self._cts_count = 0

    @property
    def counters(self) -> list[int]:
        """All that advances, unwrapped: step, messages, CTS writes, then PSN and MSN of each QP."""
        return [self.step, self.messages, self._cts_count, *(n for q in self._queues for n in (q.psn, q.msn))]

    @counters.setter
    def counters(self, values: list[int]) -> None:
        self.step, self.messages, self._cts_count = values[:3]
        for i, queue in enumerate(self._queues):
            queue.psn, queue.msn = values[3 + 2 * i:5 + 2 * i]

    # -- CTS ----------------------------------------------------------------------------------

    def clear_to_send(
        self, time: int, protocol: str, step: int, posted: int, visible: tuple[bool, bool],
    ) -> Iterator[Record]:
        """Announce the next message not yet announced: it goes to `step`'s slot, at most `posted` bytes.

        visible: whether frames src->dst and dst->src are captured by anybody.
        """
        devices = self._communicator.devices
        flow, index = self.flow, self._cts_count
        parents = self._communicator.parent_ranks
        queue = self._queues[index % devices]
        self._cts_count += 1
        psn = self._options.first_psn + index // devices & 0xFFFFFF
        ends = (queue.device, queue.device)
        if visible[1]:
            size = self._family.cts_bytes
            element = bytearray(size)
            values = {
                "addr": self._address(protocol, step), "size": posted, "rkey": self._rkeys[protocol], "nreqs": 1,
                "idx": index + 1, "tag": parents[flow.src] if parents else flow.src,
            }
            for name, (offset, width) in self._family.cts_fields.items():
                element[offset:offset + width] = values[name].to_bytes(width, "little")
            slot = self._fifo + index % _FIFO_SLOTS * 8 * size
            frame = queue.backward.frame(
                WRITE_ONLY, queue.reply_qpn, psn, _reth(slot, self._rkeys["fifo"], size), bytes(element),
                ack_request=True,
            )
            yield Record(time, frame, flow.dst, flow.src, queue.reply_qpn, psn, "cts", (-1, 0, 0), *ends)
        if visible[0]:
            frame = queue.forward.frame(ACK, queue.qpn, psn, _aeth(_ACK_SYNDROME, index // devices + 1))
            yield Record(time + 2 * PACKET_NS, frame, flow.src, flow.dst, queue.qpn, psn, "ack", (-1, 0, 0), *ends)

    # -- data ---------------------------------------------------------------------------------

    def send(
        self, time: int, protocol: str, wire: bytes | None, length: int, message_id: int,
        visible: tuple[bool, bool],
    ) -> Iterator[Record]:
        """The next message, to self.step's slot: `length` bytes, `wire` the contents (None: not captured).

        The caller advances self.step. Yields records in wire order, times from `time` on.
        """
        communicator = self._communicator
        used = len(self._queues) if communicator.split_data_on_qps else communicator.devices
        piece = (length + used * 128 - 1) // (used * 128) * 128 if used > 1 else length
        pairs = communicator.adaptive_routing or self._family.always_pair
        pair = pairs and length > communicator.ar_threshold
        address = self._address(protocol, self.step)
        for i in range(used):
            queue = self._queues[(self.messages * used + i) % len(self._queues)]
            start = min(i * piece, length)
            part = min(piece, length - start)
            packets = self._packets(address + i * piece, self._rkeys[protocol], start, part, length, pair)
            for packet in packets:
                packet.psn = queue.psn & 0xFFFFFF
                queue.psn += 1
            for record in self._emit(queue, packets, time, wire, message_id, visible):
                time = record.time + PACKET_NS
                yield record
        self.messages += 1

    def _address(self, protocol: str, step: int) -> int:
        return self._regions[protocol] + step % 8 * (self._communicator.buffer_bytes[protocol] // 8)

    def _packets(self, address: int, rkey: int, start: int, part: int, total: int, pair: bool) -> list[_Packet]:
        immediate = struct.pack(">I" if self._family.big_endian_imm else "<I", total)
        mtu = self._communicator.mtu
        cut = pair and self.flow.src in self._options.cut_ranks
        count = max(1, -(-part // mtu))
        packets = []
        for k in range(count):
            offset, size = k * mtu, min(mtu, part - k * mtu)
            first, last = k == 0, k == count - 1
            if cut or count == 1:
                opcode = WRITE_ONLY if pair else WRITE_ONLY_IMM
            elif first:
                opcode = WRITE_FIRST
            elif last:
                opcode = WRITE_LAST if pair else WRITE_LAST_IMM
            else:
                opcode = WRITE_MIDDLE
            extension = b""
            if cut:
                extension = _reth(address + offset, rkey, size)
            elif first:
                extension = _reth(address, rkey, part)
            if last and not pair:
                extension += immediate
            packets.append(_Packet(
                opcode, extension, start + offset, size, ack=last and not pair, completes=cut or last,
            ))
        if pair:
            packets.append(_Packet(WRITE_ONLY_IMM, _reth(0, 0, 0) + immediate, start + part, 0, True, True))
        return packets

    def _emit(
        self, queue: _Queue, packets: list[_Packet], time: int, wire: bytes | None, message_id: int,
        visible: tuple[bool, bool],
    ) -> Iterator[Record]:
        flow, ends = self.flow, (queue.device, queue.device)

        def data(packet: _Packet) -> Record:
            payload = wire[packet.offset:packet.offset + packet.length] if wire is not None else b""
            frame = queue.forward.frame(
                packet.opcode, queue.qpn, packet.psn, packet.extension, payload, ack_request=packet.ack,
            )
            piece = (message_id, packet.offset, packet.length)
            return Record(time, frame, flow.src, flow.dst, queue.qpn, packet.psn, "data", piece, *ends)

        def reply(syndrome: int, psn: int, kind: str) -> Record:
            frame = queue.backward.frame(ACK, queue.reply_qpn, psn, _aeth(syndrome, queue.msn))
            return Record(time, frame, flow.dst, flow.src, queue.reply_qpn, psn, kind, (-1, 0, 0), *ends)

        order = [(k, True) for k in range(len(packets))]  # (packet, taken by the receiver); -1 is its NAK
        rng = random.Random(f"{self._luck}/{self.messages}/{queue.qpn}") if self._options.retransmit else None
        if rng is not None and len(packets) > 1 and rng.random() < self._options.retransmit:
            lost = rng.randrange(len(packets) - 1)
            ahead = min(lost + 1 + rng.randrange(8), len(packets))
            seen = rng.random() < 0.5
            refused = [(k, False) for k in range(lost, ahead) if seen or k != lost]
            order = order[:lost] + refused + [(-1, False)] + order[lost:]
            if any(visible):
                self.retransmitted.append({
                    "src": flow.src, "dst": flow.dst, "qpn": queue.qpn, "psn": packets[lost].psn,
                    "packets": ahead - lost, "seen_before": int(seen),
                })
        for k, taken in order:
            if k < 0:
                time += 20 * PACKET_NS
                if visible[1]:
                    yield reply(_NAK_SEQUENCE, packets[lost].psn, "nak")
                continue
            packet = packets[k]
            if visible[0]:
                yield data(packet)
            time += PACKET_NS
            if taken:
                queue.msn += packet.completes
                if packet.ack and visible[1]:
                    yield reply(_ACK_SYNDROME, packet.psn, "ack")


def _reth(address: int, rkey: int, length: int) -> bytes:
    return struct.pack(">QII", address, rkey, length)


def _aeth(syndrome: int, msn: int) -> bytes:
    return struct.pack(">I", syndrome << 24 | msn & 0xFFFFFF)
