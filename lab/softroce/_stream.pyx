"""A connection's messages straight from memory to an interface (sr_stream.h), for jobs that are too large for trainers
in namespaces. Nothing here holds the GIL while it sends."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

import os

cdef extern from "sr_stream.h" nogil:
    struct sr_path:
        pass
    struct sr_stream:
        int socket
        int big_endian_imm
        uint32_t qpn, mtu, psn
        sr_path path
    uint16_t sr_source_port(uint32_t a, uint32_t b)
    void sr_path_init(
        sr_path *path, const uint8_t *source_mac, const uint8_t *target_mac, uint32_t source, uint32_t target,
        uint16_t source_port, uint8_t traffic_class)
    int64_t sr_stream_message(sr_stream *s, uint64_t address, uint32_t rkey, const uint8_t *data, uint32_t length)


cdef class Stream:
    """Packets of one QP pair, PSNs from 0. socket: a descriptor (AF_PACKET, SOCK_RAW, bound to the interface), which
    stays the caller's. source, target: (MAC address, IPv4 address) as bytes. qpn: the receiver's, reply_qpn: the
    sender's QP number. One thread."""

    cdef sr_stream stream

    def __init__(
        self, int socket, source, target, uint32_t qpn, uint32_t reply_qpn, uint32_t mtu, *, bint big_endian_imm=False,
    ):
        cdef uint32_t addresses[2]
        cdef const uint8_t[::1] macs = b"".join((source[0], target[0]))
        cdef const uint8_t[::1] hosts = b"".join((source[1], target[1]))
        if macs.shape[0] != 12 or hosts.shape[0] != 8 or not 256 <= mtu <= 4096:
            raise ValueError("MAC addresses have 6 bytes, IPv4 addresses 4, path MTUs 256 to 4096")
        memcpy(addresses, &hosts[0], 8)
        self.stream.socket, self.stream.qpn, self.stream.mtu = socket, qpn, mtu
        self.stream.big_endian_imm = big_endian_imm
        sr_path_init(
            &self.stream.path, &macs[0], &macs[6], addresses[0], addresses[1], sr_source_port(qpn, reply_qpn), 2)

    def send(self, const uint8_t[::1] data, uint64_t address, uint32_t rkey):
        """One message to `address`; returns how many packets it was. Raises OSError."""
        cdef int64_t sent
        cdef const uint8_t *at = &data[0] if data.shape[0] else NULL
        if data.shape[0] >> 31:
            raise ValueError(f"a message of {data.shape[0]} bytes")
        with nogil:
            sent = sr_stream_message(&self.stream, address, rkey, at, <uint32_t>data.shape[0])
        if sent < 0:
            raise OSError(-sent, os.strerror(-sent))
        return sent
