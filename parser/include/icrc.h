/* The ways to compute an ICRC, for parser/src only: everybody else calls fc_icrc (roce.h). */
#ifndef FLOWCHECK_ICRC_H
#define FLOWCHECK_ICRC_H

#include "roce.h"

/* isa-l, any processor, any header. */
uint32_t fc_icrc_isal(const fc_roce *p);

/* AVX-512 with VPCLMULQDQ; AVX with PCLMULQDQ. IP headers without options or extensions only. */
uint32_t fc_icrc_avx512(const uint8_t *ip, const uint8_t *bth, uint32_t version, uint32_t ib_len);
uint32_t fc_icrc_pclmul(const uint8_t *ip, const uint8_t *bth, uint32_t version, uint32_t ib_len);

/* Where the IP header begins in a table of the ones that replace variant fields: by offset from it, FC_FRONT zeros (but
 * for the end of the LRH) before and 64 behind the BTH, because whole blocks are loaded wherever they lie. */
enum { FC_FRONT = 128 };
extern const uint8_t fc_icrc_ones4[FC_FRONT + 40 + 64], fc_icrc_ones6[FC_FRONT + 60 + 64];

static inline const uint8_t *fc_icrc_ones(uint32_t version)
{
    return (version == 4 ? fc_icrc_ones4 : fc_icrc_ones6) + FC_FRONT;
}

#endif
