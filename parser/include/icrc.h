/* The two ways to compute an ICRC, for parser/src only: everybody else calls fc_icrc (roce.h). */
#ifndef FLOWCHECK_ICRC_H
#define FLOWCHECK_ICRC_H

#include "roce.h"

/* isa-l, any processor, any header. */
uint32_t fc_icrc_isal(const fc_roce *p);

/* AVX-512 with VPCLMULQDQ; IP headers without options or extensions only. */
uint32_t fc_icrc_avx512(const uint8_t *ip, const uint8_t *bth, uint32_t version, uint32_t ib_len);

#endif
