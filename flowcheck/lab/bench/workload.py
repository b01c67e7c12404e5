"""Packets of one communicator's life, made fast and dense in one block of memory, and what they must become.

Every flow is one edge that sends equal messages: `message` wire bytes each, step by step, FIRST MIDDLE.. LAST_IMM,
PSNs from 0. The flows' packets follow each other in turns, as on a mirror port: with F flows, F packets lie between
two of the same. Nothing here uses the parser's wire model except to describe to the engine what is sent; a wrong
description would end in a disagreement.

final: what the packets carry. True: bytes every rank ends up with (a tree's way down), to be placed. False: partial
sums (its way up), to be counted and let go.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowcheck.lab.bench.limits import PacketRing
from parser.plan import CallSpec, EdgeSpec, EngineConfig, FlowSpec, Phase, Target
from parser.wire import Kind, Lane, Protocol, Segment

__all__ = ["MESSAGE", "SLOT", "Traffic", "aligned", "data_bytes", "make"]

Bytes = NDArray[np.uint8]

#: Wire bytes of a full slot and of the messages used here (NCCL's default buffer sizes, nccl-wire.md 1.5).
SLOT = {Protocol.LL: 65536, Protocol.LL128: 614400, Protocol.SIMPLE: 524288}
MESSAGE = {Protocol.LL: 65536, Protocol.LL128: 245760, Protocol.SIMPLE: 524288}

_HEADERS = 14 + 20 + 8 + 12  # Ethernet, IPv4, UDP, BTH
_RETH, _IMM, _ICRC = 16, 4, 4
_FIRST, _MIDDLE, _LAST_IMM = 6, 7, 9
_REMOTE = 0x7F00_0000_0000


@dataclass(frozen=True)
class Traffic:
    """ring: the packets. expected: the gradient region they must become, empty if none is kept. payloads, flags: of
    each packet, its payload's address and the flag of its lines. addresses, lengths: of the packets; packet i is of
    flow i modulo the flows. wire_bytes: all payloads together."""

    ring: PacketRing
    config: EngineConfig
    flows: list[tuple[bytes, bytes, int]]
    frames: Bytes
    expected: Bytes
    payloads: NDArray[np.uint64]
    flags: NDArray[np.uint64]
    addresses: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    wire_bytes: int
    mtu: int

    @property
    def packets(self) -> int:
        return int(self.ring.packets)


def aligned(size: int) -> Bytes:
    """Zeroed, touched memory beginning on a cache line, as packets do in an mbuf."""
    raw = np.full(size + 64, 0, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + size]


def data_bytes(protocol: Protocol, wire: int) -> int:
    """Data bytes in `wire` bytes of whole lines or half-slices."""
    return {Protocol.LL: wire // 2, Protocol.LL128: wire // 1024 * 960, Protocol.SIMPLE: wire}[protocol]


def make(
    protocol: Protocol, mtu: int, flows: int, wire_bytes: int, *, final: bool = True, model_bytes: int | None = None,
    icrc: bool = False,
) -> Traffic:
    """About `wire_bytes` of payload, in whole messages, the same number on every flow.

    model_bytes: gradient bytes of an iteration in the job's description; default: all that is sent is one iteration.
    icrc: write right ICRCs (slow); otherwise they are zero, and the description says not to look.
    """
    message = MESSAGE[protocol]
    messages = max(1, wire_bytes // (message * flows))
    data = data_bytes(protocol, message * messages * flows)
    keys = [(bytes([10, 0, 0, 1]), bytes([10, 0, 1, 1 + f % 250]), 0x1000 + f) for f in range(flows)]
    rng = np.random.default_rng(1)
    region = rng.integers(0, 2**63, data // 8, dtype=np.uint64).view(np.uint8)
    frames, offsets, lengths = _frames(protocol, mtu, keys, messages, message, region)
    if icrc:
        _write_icrc(frames, lengths)
    base = frames.ctypes.data
    starts = base + np.arange(len(frames), dtype=np.uint64) * np.uint64(frames.shape[1])
    model = data if model_bytes is None else model_bytes
    return Traffic(
        ring=PacketRing(starts, lengths), config=_config(protocol, mtu, keys, model, message, final, icrc), flows=keys,
        frames=frames, expected=region if final else region[:0], payloads=starts + offsets,
        flags=np.repeat(np.arange(messages, dtype=np.uint64) + 1, message // mtu * flows), addresses=starts,
        lengths=lengths, wire_bytes=message * messages * flows, mtu=mtu,
    )


def _config(
    protocol: Protocol, mtu: int, keys: list[tuple[bytes, bytes, int]], model: int, message: int, final: bool,
    icrc: bool,
) -> EngineConfig:
    """Each flow owns an equal part of the region; one call per iteration."""
    part = model // len(keys)
    chunk = data_bytes(protocol, message)
    loops = max(1, part // chunk)
    lane = Lane(
        kind=Kind.TREE_DOWN if final else Kind.TREE_UP, protocol=protocol, elem_bytes=4, ranks=2, index=0, slices=1,
        step_inc=1, step_align=1, slot_bytes=SLOT[protocol], slice_floor=0, block=0, order=(0, 1),
        segments=(Segment(0, chunk // 4, 0, chunk // 4, loops * chunk // 4, loops),),
    )
    edges = tuple(
        EdgeSpec(channel=f, src=0, dst=1, calls=(CallSpec(lane, Phase.STEADY, Target.GRADIENT, f * loops * chunk),))
        for f in range(len(keys))
    )
    specs = tuple(FlowSpec(src, dst, qpn, f, 0, data=True) for f, (src, dst, qpn) in enumerate(keys))
    size = loops * chunk * len(keys)
    return EngineConfig(mtu=mtu, edges=edges, flows=specs, gradient_bytes=size, arenas=2, check_icrc=icrc)


# -- bytes -------------------------------------------------------------------------------------------


def _payloads(protocol: Protocol, region: Bytes, flows: int, messages: int) -> Bytes:
    """(flows, wire bytes of a flow): the region's bytes in the protocol's lines, flags of step + 1."""
    if protocol == Protocol.SIMPLE:
        return region.reshape(flows, -1)
    if protocol == Protocol.LL:
        words = region.view(np.uint32).reshape(flows, messages, -1, 2)
        lines = np.empty((*words.shape[:3], 4), np.uint32)
        lines[..., 0::2] = words
        lines[..., 1::2] = np.arange(1, messages + 1, dtype=np.uint32)[None, :, None, None]
        return lines.view(np.uint8).reshape(flows, -1)
    source = region.view(np.uint64).reshape(flows, messages, -1, 120)
    wire = np.empty((*source.shape[:3], 8, 16), np.uint64)
    for line in range(4):
        wire[..., line, 0:15] = source[..., 16 * line : 16 * line + 15]
        wire[..., line + 4, 14] = source[..., 16 * line + 15]
        wire[..., line + 4, 0:14] = source[..., 64 + 14 * line : 64 + 14 * line + 14]
    wire[..., 15] = np.arange(1, messages + 1, dtype=np.uint64)[None, :, None, None]
    return wire.view(np.uint8).reshape(flows, -1)


def _frames(
    protocol: Protocol, mtu: int, keys: list[tuple[bytes, bytes, int]], messages: int, message: int, region: Bytes
) -> tuple[Bytes, NDArray[np.uint64], NDArray[np.uint32]]:
    """(packets, slot) frames, dense slots of whole cache lines; payload offsets and frame lengths."""
    flows, per = len(keys), message // mtu
    if per < 2 or message % mtu:
        raise ValueError(f"messages of {message} bytes are not at least two whole packets of {mtu}")
    each = messages * per
    number = np.arange(each)
    step, index = number // per, number % per
    slot = -(-(_HEADERS + _RETH + mtu + _ICRC) // 64) * 64
    frames = aligned(each * flows * slot).reshape(each, flows, slot)
    wire = _payloads(protocol, region, flows, messages).reshape(flows, each, mtu).transpose(1, 0, 2)
    extension = np.where(index == 0, _RETH, np.where(index == per - 1, _IMM, 0))
    opcode = np.where(index == 0, _FIRST, np.where(index == per - 1, _LAST_IMM, _MIDDLE))
    for size in (_RETH, 0, _IMM):
        chosen = extension == size
        at = _HEADERS + size
        frames[chosen, :, at : at + mtu] = wire[chosen]
    udp = 8 + 12 + extension + mtu + _ICRC
    _put(frames, 12, 0x0800, 2)
    _put(frames, 14, 0x4502, 2)
    _put(frames, 16, 20 + udp, 2)
    _put(frames, 22, 0x4011, 2)
    for f, (src, dst, qpn) in enumerate(keys):
        frames[:, f, 26:30], frames[:, f, 30:34] = np.frombuffer(src, np.uint8), np.frombuffer(dst, np.uint8)
        _put(frames[:, f : f + 1], 34, 0xC000 + f, 2)
        _put(frames[:, f : f + 1], 46, qpn, 4)
    _put(frames, 36, 4791, 2)
    _put(frames, 38, udp, 2)
    _put(frames, 42, opcode, 1)
    _put(frames, 43, 0x40FFFF, 3)
    _put(frames, 50, number & 0xFFFFFF, 4)
    first, last = index == 0, index == per - 1
    _put(frames, 54, _REMOTE + step % 8 * SLOT[protocol], 8, first)
    _put(frames, 62, 0x1234, 4, first)
    _put(frames, 66, message, 4, first)
    _put(frames, 54, int.from_bytes(message.to_bytes(4, "little"), "big"), 4, last)
    lengths = np.repeat((_HEADERS + extension + mtu + _ICRC).astype(np.uint32), flows)
    offsets = np.repeat((_HEADERS + extension).astype(np.uint64), flows)
    return frames.reshape(each * flows, slot), offsets, lengths


def _put(frames: Bytes, at: int, value: object, width: int, where: NDArray[np.bool_] | None = None) -> None:
    """A big-endian field of `width` bytes: one value, or one per row."""
    values = np.broadcast_to(np.asarray(value, np.uint64), frames.shape[:1])
    for i in range(width):
        column = (values >> np.uint64(8 * (width - 1 - i))).astype(np.uint8)
        if where is None:
            frames[:, :, at + i] = column[:, None]
        else:
            frames[where, :, at + i] = column[where, None]


def _write_icrc(frames: Bytes, lengths: NDArray[np.uint32]) -> None:
    """By zlib, so that the parser's own sum is not measured against itself."""
    for frame, length in zip(frames, lengths.tolist(), strict=True):
        head = bytearray(frame[6:_HEADERS].tobytes())  # eight ones in place of the end of the Ethernet header
        head[:8] = b"\xff" * 8
        for at in (1, 8, 10, 11, 26, 27, 32):
            head[8 + at] = 0xFF
        crc = zlib.crc32(frame[_HEADERS : length - 4], zlib.crc32(head))
        frame[length - 4 : length] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
