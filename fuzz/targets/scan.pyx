"""Target: dataplane.pcapfile.scan (compiled by Cython, so that libFuzzer sees its branches) against libpcap.

What the scan accepts, libpcap must read to its end, as the file is or from the parts that the scan chose: the same
number of packets, the same bytes, the same largest and cut frames. What it refuses must name a place inside the file
and a remedy. Where the file is cut into pieces for reading must not matter.
"""

import os

from libc.stdint cimport uint8_t, uint64_t
from libc.stdio cimport FILE

from dataplane import capturefile, pcapfile
from dataplane.pcapfile import CaptureFileError


cdef extern from "stdio.h" nogil:
    FILE *fmemopen(void *buf, size_t size, const char *mode)


cdef extern from "pcap/pcap.h" nogil:
    ctypedef struct pcap_t:
        pass
    struct pcap_pkthdr:
        unsigned int caplen
        unsigned int len
    pcap_t *pcap_fopen_offline(FILE *file, char *errbuf)
    int pcap_next_ex(pcap_t *handle, pcap_pkthdr **header, const uint8_t **data)
    int pcap_datalink(pcap_t *handle)
    char *pcap_geterr(pcap_t *handle)
    void pcap_close(pcap_t *handle)


def libpcap(const uint8_t[::1] data):
    """(packets, captured bytes, largest, cut ones, link type, error text) as libpcap reads the file."""
    cdef char error[256]
    cdef FILE *file = fmemopen(<void *>&data[0], data.shape[0], b"rb")
    cdef pcap_t *handle = pcap_fopen_offline(file, error)
    cdef pcap_pkthdr *header
    cdef const uint8_t *bytes_
    cdef uint64_t packets = 0, octets = 0, largest = 0, cut = 0
    cdef int rc
    if handle == NULL:  # it has closed the file
        return 0, 0, 0, 0, -1, error.decode("utf-8", "replace")
    rc = pcap_next_ex(handle, &header, &bytes_)
    while rc == 1:
        packets += 1
        octets += header.caplen
        largest = max(largest, <uint64_t>header.caplen)
        cut += header.caplen != header.len
        rc = pcap_next_ex(handle, &header, &bytes_)
    text = "" if rc == -2 else pcap_geterr(handle).decode("utf-8", "replace")
    link = pcap_datalink(handle)
    pcap_close(handle)
    return packets, octets, largest, cut, link, text


def scanned(int fd, size):
    """PcapInfo without its time, or (offset, what) of the refusal."""
    try:
        info = pcapfile.scan_fd("input", fd)
    except CaptureFileError as error:
        assert 0 <= error.offset <= size, f"refused at byte {error.offset} of {size}: {error.what}"
        assert error.what and error.remedy
        return error.offset, error.what
    return info


def one(bytes data):
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, data)
        capturefile.PIECE = 1 << 20
        whole = scanned(fd, len(data))
        capturefile.PIECE = 64 + len(data) % 61
        pieces = scanned(fd, len(data))
    finally:
        os.close(fd)
    assert whole == pieces, f"{whole} in one piece, {pieces} in pieces of {capturefile.PIECE}"
    if isinstance(whole, tuple):
        return
    given = b"".join(part if isinstance(part, bytes) else data[part[0] : part[1]] for part in whole.parts)
    packets, octets, largest, cut, link, text = libpcap(given or data)
    promised = whole.packet_count, whole.captured_bytes, whole.max_captured, whole.truncated_packets, whole.linktype, ""
    assert (packets, octets, largest, cut, link, text) == promised, (
        f"libpcap: {(packets, octets, largest, cut, link, text)}, promised: {promised}")
