# C declarations of parser/include/cts.h, and the bridge from a nccl.CtsElement to it.
from libc.stdint cimport uint8_t


cdef extern from "cts.h" nogil:
    enum: FC_CTS_ELEMENTS_MAX, FC_CTS_REQUESTS
    ctypedef struct fc_cts_element:
        uint8_t bytes, address_at, size_at, size_width, rkey_at, requests_at, tag_at, number_at


# Fill `out`, which has room for FC_CTS_ELEMENTS_MAX, from nccl.CtsElements.
cdef inline int cts_fill(fc_cts_element *out, tuple elements) except -1:
    cdef int i
    if len(elements) > FC_CTS_ELEMENTS_MAX:
        raise ValueError(f"{len(elements)} forms of the clear-to-send element, at most {FC_CTS_ELEMENTS_MAX}: cts.h")
    for i, e in enumerate(elements):
        out[i] = fc_cts_element(
            e.bytes, e.address_at, e.size_at, e.size_width, e.rkey_at, e.requests_at, e.tag_at, e.number_at,
        )
    return len(elements)
