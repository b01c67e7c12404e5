"""Packets of one communicator's life, dense in one block of memory, and what they must become.

Every flow is one edge that sends equal messages: `message` wire bytes each, step by step, FIRST MIDDLE.. LAST_IMM,
PSNs from 0. The flows' packets follow each other in turns, as on a mirror port: with F flows, F packets lie between
two of the same. Nothing here uses the parser's wire model except to describe to the engine what is sent; a wrong
description would end in a disagreement.

final: what the packets carry. True: bytes every rank ends up with (a tree's way down), to be placed. False: partial
sums (its way up), to be counted and let go.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import ip_address

import numpy as np
from numpy.typing import NDArray

from lab.bench.limits import PacketRing
from lab.synth.encode import encode
from lab.synth.packets import WRITE_FIRST, WRITE_LAST_IMM, WRITE_MIDDLE, Endpoint, Path
from parser.chunk_layout import Protocol, Segment
from parser.engine_config import CallSpec, EdgeSpec, EngineConfig, FlowSpec, Phase, Target
from parser.wire import Kind, Lane

__all__ = ["MESSAGE", "SLOT", "Traffic", "aligned", "data_bytes", "make"]

Bytes = NDArray[np.uint8]

#: Wire bytes of a full slot and of the messages used here (NCCL's default buffer sizes, nccl-wire.md 1.5).
SLOT = {Protocol.LL: 65536, Protocol.LL128: 614400, Protocol.SIMPLE: 524288}
MESSAGE = {Protocol.LL: 65536, Protocol.LL128: 245760, Protocol.SIMPLE: 524288}

_HEADERS = 14 + 20 + 8 + 12  # Ethernet, IPv4, UDP, BTH
_RETH, _IMM, _ICRC = 16, 4, 4
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
    icrc: whether the description says to check them; they are right.
    """
    message = MESSAGE[protocol]
    messages = max(1, wire_bytes // (message * flows))
    data = data_bytes(protocol, message * messages * flows)
    keys = [(bytes([10, 0, 0, 1]), bytes([10, 0, 1, 1 + f % 250]), 0x1000 + f) for f in range(flows)]
    rng = np.random.default_rng(1)
    # Gradients as they are: random bits would have denormal numbers among them, which some processors are slow with.
    region = (0.01 * rng.standard_normal(data // 4, dtype=np.float32)).view(np.uint8)
    frames, offsets, lengths = _frames(protocol, mtu, keys, messages, message, region)
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


def _frames(
    protocol: Protocol, mtu: int, keys: list[tuple[bytes, bytes, int]], messages: int, message: int, region: Bytes
) -> tuple[Bytes, NDArray[np.uint64], NDArray[np.uint32]]:
    """(packets, slot) frames, dense slots of whole cache lines; payload offsets and frame lengths. The bytes are
    synth's, whose ICRC is zlib's: the parser's own sum is not measured against itself."""
    flows, per = len(keys), message // mtu
    if per < 2 or message % mtu:
        raise ValueError(f"messages of {message} bytes are not at least two whole packets of {mtu}")
    slot = -(-(_HEADERS + _RETH + mtu + _ICRC) // 64) * 64
    frames = aligned(messages * per * flows * slot).reshape(-1, slot)
    data = region.reshape(flows, messages, -1)
    for f, (src, dst, qpn) in enumerate(keys):
        here, there = (Endpoint(bytes(6), str(ip_address(one))) for one in (src, dst))
        path = Path(here, there, 0xC000 + f)
        for step in range(messages):
            wire = encode(protocol.name.lower(), data[f, step], step, message).tobytes()
            reth = struct.pack(">QII", _REMOTE + step % 8 * SLOT[protocol], 0x1234, message)
            for index in range(per):
                opcode, extension = WRITE_MIDDLE, b""
                if index == 0:
                    opcode, extension = WRITE_FIRST, reth
                elif index == per - 1:
                    opcode, extension = WRITE_LAST_IMM, struct.pack("<I", message)
                psn = step * per + index
                frame = path.frame(opcode, qpn, psn & 0xFFFFFF, extension, wire[index * mtu : (index + 1) * mtu])
                frames[psn * flows + f, : len(frame)] = np.frombuffer(frame, np.uint8)
    place = np.arange(messages * per) % per
    extensions = np.repeat(np.where(place == 0, _RETH, np.where(place == per - 1, _IMM, 0)), flows)
    return frames, (_HEADERS + extensions).astype(np.uint64), (_HEADERS + extensions + mtu + _ICRC).astype(np.uint32)
