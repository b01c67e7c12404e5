# Declarations of include/roce.h for other extensions: `from parser.roce cimport fc_roce, fc_roce_decode`.
# cimport only: every extension links its own copy of src/*.c, nothing is exported at run time.
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "roce.h" nogil:
    enum:
        FC_ROCE
        FC_NOT_ROCE
        FC_TRUNCATED
        FC_MALFORMED
        FC_FRAGMENT
        FC_ENCAPSULATED
        FC_DECODE_STATUS_COUNT

    enum:
        FC_RC_SEND_FIRST
        FC_RC_SEND_MIDDLE
        FC_RC_SEND_LAST
        FC_RC_SEND_LAST_IMM
        FC_RC_SEND_ONLY
        FC_RC_SEND_ONLY_IMM
        FC_RC_WRITE_FIRST
        FC_RC_WRITE_MIDDLE
        FC_RC_WRITE_LAST
        FC_RC_WRITE_LAST_IMM
        FC_RC_WRITE_ONLY
        FC_RC_WRITE_ONLY_IMM
        FC_RC_READ_REQUEST
        FC_RC_READ_RESP_FIRST
        FC_RC_READ_RESP_MIDDLE
        FC_RC_READ_RESP_LAST
        FC_RC_READ_RESP_ONLY
        FC_RC_ACK
        FC_RC_ATOMIC_ACK
        FC_RC_CMP_SWAP
        FC_RC_FETCH_ADD
        FC_CNP

    enum:
        FC_HAS_RETH
        FC_HAS_IMM
        FC_HAS_AETH
        FC_HAS_DETH
        FC_HAS_ATOMIC

    ctypedef struct fc_roce:
        const uint8_t *frame
        const uint8_t *ip
        const uint8_t *src
        const uint8_t *dst
        const uint8_t *bth
        const uint8_t *payload
        uint32_t payload_len
        uint32_t ib_len
        uint32_t dest_qp
        uint32_t psn
        uint32_t rkey
        uint32_t dma_len
        uint64_t va
        uint32_t imm
        uint32_t msn
        uint32_t src_qp
        uint16_t udp_sport
        uint16_t vlan
        uint16_t ip_id
        uint8_t ip_version
        uint8_t tclass
        uint8_t ttl
        uint8_t opcode
        uint8_t pad
        uint8_t ack_req
        uint8_t syndrome
        uint8_t headers
        uint8_t tunnel
        uint8_t refusal
        uint32_t session

    int fc_roce_decode(const uint8_t *frame, size_t len, fc_roce *out)
    int fc_roce_hidden(const uint8_t *frame, size_t len)
    int fc_icrc_ok(const fc_roce *p)
    uint32_t fc_icrc(const fc_roce *p)
    const char *fc_icrc_all[4]
    int fc_icrc_choose(const char *name)


cdef extern from "tunnel.h" nogil:
    enum:
        FC_TUNNEL_INSIDE
        FC_TUNNEL_KINDS
        FC_TUNNEL_STAMP
        FC_REFUSALS

    ctypedef struct fc_tunnel:
        const uint8_t *inner
        uint32_t offset
        uint32_t session
        uint8_t kind
        uint8_t refusal
        uint8_t truncated
        uint8_t bad

    const char *fc_refusal_names[]
    const char *fc_tunnel_names[]
    int fc_tunnel_enter(uint32_t protocol, const uint8_t *at, size_t have, fc_tunnel *out)
