"""What the state machine knows of a job: plain structs, built from the manifest by flowcheck.

    EngineConfig
    |- edges[]   one per connection (channel, source, destination): its calls in issue order
    `- flows[]   one per direction of a QP: the connection that it belongs to, and which side of it

Offsets and sizes are bytes; `region` means the gradient arena of one iteration, or the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from parser.nccl import CTS_ELEMENTS, CtsElement
from parser.wire import Lane

__all__ = ["CallSpec", "EdgeSpec", "EngineConfig", "FlowSpec", "Phase", "Target"]


class Target(IntEnum):
    """Where the final bytes of a call go."""

    NOTHING = 0
    GRADIENT = 1
    PARAMETERS = 2


class Phase(IntEnum):
    """Part of the job's life a call belongs to; STEADY calls repeat for ever."""

    STARTUP = 0
    ITERATION_0 = 1
    REBUILD = 2
    STEADY = 3


@dataclass(frozen=True)
class CallSpec:
    """lane: None when the edge carries nothing in this call. base: where the call's tensor begins. place: which of the
    iteration's tensors it is; what has arrived is counted by it."""

    lane: Lane | None
    phase: Phase
    target: Target = Target.NOTHING
    base: int = 0
    place: int = 0


@dataclass(frozen=True)
class EdgeSpec:
    """qps: QPs of the connection; used: over how many of them a message is spread (5.3).
    ar_above: larger messages leave as an AR pair, None for never (5.2)."""

    channel: int
    src: int
    dst: int
    calls: tuple[CallSpec, ...]
    qps: int = 1
    used: int = 1
    ar_above: int | None = None
    imm_big_endian: bool = False


@dataclass(frozen=True)
class FlowSpec:
    """Packets src_addr -> dst_addr to QP qpn. Addresses: 4 or 16 bytes. data: True where the data of
    the edge arrives, False where its CTS writes and acknowledgements do. qp: index within the edge."""

    src_addr: bytes
    dst_addr: bytes
    qpn: int
    edge: int
    qp: int
    data: bool


@dataclass(frozen=True)
class EngineConfig:
    """threads: that place; stream s is served by thread s modulo threads.
    arenas: iterations alive at once. gradient_bytes, parameter_bytes: sizes of the regions.
    cts: form of the job's clear-to-send writes; those of other forms are no witnesses.
    outage_ns: silence on a flow in which 2^23 packets could have passed: then its PSN alone proves nothing.
    patience: packets of a flow after one that is missing, before no repeat of it is expected any more; 0: those of a
    step of the ring, and where ACKs are seen as many as NCCL has in flight."""

    mtu: int
    edges: tuple[EdgeSpec, ...]
    flows: tuple[FlowSpec, ...]
    gradient_bytes: int
    parameter_bytes: int = 0
    streams: int = 1
    threads: int = 1
    arenas: int = 4
    check_icrc: bool = True
    cts: CtsElement = CTS_ELEMENTS[0]
    outage_ns: int = 10**15
    patience: int = 0
