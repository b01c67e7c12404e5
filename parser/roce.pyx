"""RoCEv2 headers, visible from Python: one frame in, its fields or the reason there are none out.

For tests and tools. The packet path never comes through here: extensions cimport the C functions from
parser.roce (roce.pxd) and call them without the GIL. No state, any thread.
"""
from dataclasses import dataclass

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t

__all__ = [
    "OPCODE_NAMES", "REFUSAL_NAMES", "Roce", "STATUS_NAMES", "TUNNEL_NAMES", "address", "decode", "decode_at",
    "opcode_name", "refusal_of",
]

#: Names of the decode statuses, by value.
STATUS_NAMES = ("roce", "not_roce", "truncated", "malformed", "fragment", "encapsulated")
#: Why a packet is "encapsulated", by fc_refusal; 0 is never one.
REFUSAL_NAMES = tuple((<bytes>fc_refusal_names[i]).decode() for i in range(FC_REFUSALS))
#: How a mirror had wrapped a packet, by fc_tunnel_kind; "" is not at all.
TUNNEL_NAMES = tuple((<bytes>fc_tunnel_names[i]).decode() for i in range(FC_TUNNEL_KINDS))

_OPERATIONS = {
    0x00: "SEND_FIRST", 0x01: "SEND_MIDDLE", 0x02: "SEND_LAST", 0x03: "SEND_LAST_IMM", 0x04: "SEND_ONLY",
    0x05: "SEND_ONLY_IMM", 0x06: "WRITE_FIRST", 0x07: "WRITE_MIDDLE", 0x08: "WRITE_LAST",
    0x09: "WRITE_LAST_IMM", 0x0A: "WRITE_ONLY", 0x0B: "WRITE_ONLY_IMM",
}

#: Opcodes this project has names for; every other one is "0xNN".
OPCODE_NAMES = {
    **{code: f"RC_{name}" for code, name in _OPERATIONS.items()},
    0x0C: "RC_READ_REQ", 0x0D: "RC_READ_RESP_FIRST", 0x0E: "RC_READ_RESP_MIDDLE", 0x0F: "RC_READ_RESP_LAST",
    0x10: "RC_READ_RESP_ONLY", 0x11: "RC_ACK", 0x12: "RC_ATOMIC_ACK", 0x13: "RC_CMP_SWAP",
    0x14: "RC_FETCH_ADD", 0x16: "RC_SEND_LAST_INV", 0x17: "RC_SEND_ONLY_INV",
    **{0x20 + code: f"UC_{name}" for code, name in _OPERATIONS.items()},
    0x64: "UD_SEND_ONLY", 0x65: "UD_SEND_ONLY_IMM", 0x81: "CNP",
}


def opcode_name(code: int) -> str:
    return OPCODE_NAMES.get(code, f"0x{code:02X}")


def address(raw: bytes) -> str:
    """Text of a 4 or 16 byte address."""
    import ipaddress

    return str(ipaddress.ip_address(raw))


@dataclass(frozen=True)
class Roce:
    """Fields of one RoCEv2 packet. Optional headers: a field is None when its header is absent.
    `imm` is read as big-endian; `va`/`rkey` come from RETH or AtomicETH; `icrc` is the value the packet
    should carry, `icrc_ok` whether it does. `tunnel`: how a mirror had wrapped it ("": not at all), `session`
    the ERSPAN session, GRE key or VXLAN network; `payload_offset` counts from the mirrored frame's start,
    which is `frame_offset` bytes into the captured one."""

    src: str
    dst: str
    ip_version: int
    vlan: int | None
    tclass: int
    ttl: int
    ip_id: int
    udp_sport: int
    opcode: int
    pad: int
    ack_req: bool
    dest_qp: int
    psn: int
    va: int | None
    rkey: int | None
    dma_len: int | None
    imm: int | None
    syndrome: int | None
    msn: int | None
    src_qp: int | None
    payload_offset: int
    payload_len: int
    icrc: int
    icrc_ok: bool
    tunnel: str
    session: int
    frame_offset: int


def decode(frame: bytes) -> "Roce | str":
    """Decode one captured Ethernet frame. Returns a Roce, or the status name saying why not
    ("not_roce", "truncated", "malformed", "fragment", "encapsulated": refusal_of() says why)."""
    cdef const uint8_t[::1] view = frame
    cdef const uint8_t *data = &view[0] if view.shape[0] else NULL
    return _decode(data, view.shape[0])


def refusal_of(frame: bytes) -> str:
    """Which encapsulation, not unpacked here, decode() refused the frame for; "" if it did not."""
    cdef const uint8_t[::1] view = frame
    cdef fc_roce p
    if view.shape[0] == 0 or fc_roce_decode(&view[0], view.shape[0], &p) != FC_ENCAPSULATED:
        return ""
    return REFUSAL_NAMES[p.refusal]


def decode_at(pointer: int, length: int) -> "Roce | str":
    """As decode(), for `length` bytes at an address the caller owns (guard-page tests, DPDK buffers)."""
    return _decode(<const uint8_t *><size_t>pointer, length)


cdef object _decode(const uint8_t *data, size_t length):
    cdef fc_roce p
    cdef int status = fc_roce_decode(data, length, &p)
    if status != FC_ROCE:
        return STATUS_NAMES[status]
    cdef size_t width = 4 if p.ip_version == 4 else 16
    reth = (p.headers & FC_HAS_RETH) != 0
    aeth = (p.headers & FC_HAS_AETH) != 0
    atomic = (p.headers & FC_HAS_ATOMIC) != 0 and not aeth
    return Roce(
        src=address(p.src[:width]), dst=address(p.dst[:width]), ip_version=p.ip_version,
        vlan=None if p.vlan == 0xFFFF else p.vlan, tclass=p.tclass, ttl=p.ttl, ip_id=p.ip_id,
        udp_sport=p.udp_sport, opcode=p.opcode, pad=p.pad, ack_req=bool(p.ack_req), dest_qp=p.dest_qp,
        psn=p.psn, va=p.va if reth or atomic else None, rkey=p.rkey if reth or atomic else None,
        dma_len=p.dma_len if reth else None, imm=p.imm if p.headers & FC_HAS_IMM else None,
        syndrome=p.syndrome if aeth else None, msn=p.msn if aeth else None,
        src_qp=p.src_qp if p.headers & FC_HAS_DETH else None,
        payload_offset=p.payload - p.frame, payload_len=p.payload_len,
        icrc=fc_icrc(&p), icrc_ok=bool(fc_icrc_ok(&p)),
        tunnel=TUNNEL_NAMES[p.tunnel], session=p.session, frame_offset=p.frame - data,
    )
