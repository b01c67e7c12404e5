/* Invariant CRC of RoCEv2 (IBTA annex A17.3.3): CRC-32 over eight bytes 0xff, the IP header, UDP, BTH ..
 * last pad byte, with the fields a router may change replaced by ones.
 *
 * Where the processor has VPCLMULQDQ or PCLMULQDQ, packets without IP options go to icrc_avx512.c or icrc_pclmul.c.
 * Here is the version for the others, and the choice. Only the headers are copied, to be masked; everything from the first byte behind the BTH is summed in
 * place. isa-l's crc32_gzip_refl does zlib's inversion itself: seeding with the previous value continues.
 */
#include "icrc.h"
#include "middle.h"

#include <isa-l/crc.h>
#include <stdlib.h>
#include <string.h>

enum { LRH = 8, UDP_AND_BTH = 8 + 12, ICRC_SIZE = 4 };

uint32_t fc_icrc_isal(const fc_roce *p)
{
    uint8_t head[LRH + 40 + UDP_AND_BTH];
    const uint8_t *udp = p->bth - 8;
    size_t fixed = p->ip_version == 4 ? 20 : 40;
    size_t options = (size_t)(udp - p->ip) - fixed;
    uint8_t *ip = head + LRH, *l4 = ip + fixed;
    uint32_t crc = 0;

    memset(head, 0xff, LRH);
    memcpy(ip, p->ip, fixed);
    if (p->ip_version == 4) {
        ip[1] = 0xff;               /* DSCP, ECN      */
        ip[8] = 0xff;               /* TTL            */
        ip[10] = ip[11] = 0xff;     /* header checksum */
    } else {
        ip[0] |= 0x0f;              /* traffic class, flow label: all but the version */
        ip[1] = ip[2] = ip[3] = 0xff;
        ip[7] = 0xff;               /* hop limit      */
    }
    if (__builtin_expect(options != 0, 0)) {
        crc = crc32_gzip_refl(crc, head, LRH + fixed);
        crc = crc32_gzip_refl(crc, p->ip + fixed, options);
        l4 = head;
    }
    memcpy(l4, udp, UDP_AND_BTH);
    l4[6] = l4[7] = 0xff;           /* UDP checksum   */
    l4[8 + 4] = 0xff;               /* BTH: FECN, BECN, six reserved bits */
    if (__builtin_expect(options != 0, 0))
        crc = crc32_gzip_refl(crc, head, UDP_AND_BTH);
    else
        crc = crc32_gzip_refl(crc, head, LRH + fixed + UDP_AND_BTH);
    return crc32_gzip_refl(crc, p->bth + 12, p->ib_len - 12 - ICRC_SIZE);
}

/* IPv4: DSCP/ECN 1, TTL 8, checksum 10, UDP checksum 26, BTH reserved 32. */
#define LRH_END [FC_FRONT - 4] = 0xff, [FC_FRONT - 3] = 0xff, [FC_FRONT - 2] = 0xff, [FC_FRONT - 1] = 0xff
const uint8_t fc_icrc_ones4[FC_FRONT + 40 + 64] = {
    LRH_END,
    [FC_FRONT + 1] = 0xff, [FC_FRONT + 8] = 0xff, [FC_FRONT + 10] = 0xff, [FC_FRONT + 11] = 0xff,
    [FC_FRONT + 26] = 0xff, [FC_FRONT + 27] = 0xff, [FC_FRONT + 32] = 0xff,
};
/* IPv6: traffic class and flow label 0..3 (all but the version), hop limit 7, UDP checksum 46, BTH reserved 52. */
const uint8_t fc_icrc_ones6[FC_FRONT + 60 + 64] = {
    LRH_END,
    [FC_FRONT + 0] = 0x0f, [FC_FRONT + 1] = 0xff, [FC_FRONT + 2] = 0xff, [FC_FRONT + 3] = 0xff, [FC_FRONT + 7] = 0xff,
    [FC_FRONT + 46] = 0xff, [FC_FRONT + 47] = 0xff, [FC_FRONT + 52] = 0xff,
};

/* -- choice --------------------------------------------------------------------------------------- */

const char *fc_icrc_all[4] = {"isal"}; /* best first */
/* For packets without IP options; NULL: isa-l. */
static uint32_t (*quick)(const uint8_t *ip, const uint8_t *bth, uint32_t version, uint32_t ib_len);

int fc_icrc_choose(const char *name)
{
    for (int i = 0; fc_icrc_all[i]; i++) {
        if (strcmp(name, fc_icrc_all[i]) != 0)
            continue;
        quick = NULL;
#if defined(__x86_64__)
        if (name[0] != 'i')
            quick = name[0] == 'v' ? fc_icrc_avx512 : fc_icrc_pclmul;
#endif
        return 1;
    }
    return 0;
}

/* As in place.c: each extension carries its own copy, FLOWCHECK_SIMD takes a lesser version. */
__attribute__((constructor)) static void choose(void)
{
    const char *wanted = getenv("FLOWCHECK_SIMD");
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("vpclmulqdq"))
        fc_icrc_all[n++] = "vpclmul";
    if (__builtin_cpu_supports("avx") && __builtin_cpu_supports("pclmul"))
        fc_icrc_all[n++] = "pclmul";
#endif
    fc_icrc_all[n++] = "isal";
    fc_icrc_all[n] = NULL;
    fc_icrc_choose(fc_icrc_all[0]);
    if (wanted && strcmp(wanted, "avx2") == 0)
        fc_icrc_choose("pclmul");
    if (wanted && strcmp(wanted, "portable") == 0)
        fc_icrc_choose("isal");
}

uint32_t fc_icrc(const fc_roce *p)
{
    if (quick && p->bth - p->ip == (p->ip_version == 4 ? 28 : 48))
        return quick(p->ip, p->bth, p->ip_version, p->ib_len);
    return fc_icrc_isal(p);
}

static uint32_t carried(const uint8_t *bth, uint32_t ib_len)
{
    const uint8_t *tail = bth + ib_len - ICRC_SIZE;
    return (uint32_t)tail[0] | (uint32_t)tail[1] << 8 | (uint32_t)tail[2] << 16 | (uint32_t)tail[3] << 24;
}

int fc_icrc_ok(const fc_roce *p)
{
    return fc_icrc(p) == carried(p->bth, p->ib_len);
}

int fc_middle_icrc_ok(fc_middle p, uint32_t mtu)
{
    uint32_t ib_len = 12 + mtu + ICRC_SIZE;
    if (quick)
        return quick(p.ip, p.bth, p.version, ib_len) == carried(p.bth, ib_len);
    fc_roce whole = {.ip = p.ip, .bth = p.bth, .ip_version = (uint8_t)p.version, .ib_len = ib_len};
    return fc_icrc_isal(&whole) == carried(p.bth, ib_len);
}
