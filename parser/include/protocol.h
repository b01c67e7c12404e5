/* Wire bytes and data bytes of NCCL's protocols (nccl-wire.md 4): the one mapping between them.
 *
 *   LL      lines of 16 bytes carry 8      LL128   half-slices of 1024 bytes carry 960      SIMPLE  bytes are bytes
 */
#ifndef FLOWCHECK_PROTOCOL_H
#define FLOWCHECK_PROTOCOL_H

#include <stdint.h>

enum fc_protocol { FC_LL = 0, FC_LL128 = 1, FC_SIMPLE = 2 };

enum {
    FC_LL_LINE = 16, FC_LL_DATA = 8,
    FC_LL128_LINE = 128,
    FC_LL128_WIRE = 1024, /* one half-slice on the wire: 8 lines */
    FC_LL128_DATA = 960,  /* and its data                        */
};

/* Wire bytes that carry `data` bytes: whole lines of LL, whole slices (two halves) of LL128. */
static inline uint64_t fc_wire_bytes(int protocol, uint64_t data)
{
    if (protocol == FC_LL)
        return (data + FC_LL_DATA - 1) / FC_LL_DATA * FC_LL_LINE;
    if (protocol == FC_LL128)
        return (data + 2 * FC_LL128_DATA - 1) / (2 * FC_LL128_DATA) * (2 * FC_LL128_WIRE);
    return data;
}

/* Data bytes before wire byte `wire` of a message; of LL128 those of whole half-slices. */
static inline uint64_t fc_data_bytes(int protocol, uint64_t wire)
{
    if (protocol == FC_LL)
        return wire / 2;
    return protocol == FC_LL128 ? wire / FC_LL128_WIRE * FC_LL128_DATA : wire;
}

/* Wire bytes in units of which data lies together and its place can be computed: a line, a half-slice, a cell. */
static inline uint64_t fc_wire_unit(int protocol)
{
    return protocol == FC_LL ? FC_LL_LINE : protocol == FC_LL128 ? FC_LL128_WIRE : 8;
}

#endif
