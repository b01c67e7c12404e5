/* A wire with a will of its own: packets from one interface to another, some of them lost, doubled, moved, damaged.
 *
 *   cable end A  --[way 0]-->  cable end B          one fc_impair_way per direction: an rx socket on one veth,
 *                <--[way 1]--                        a tx socket on the other
 *
 * Only RoCEv2 (IPv4, UDP port 4791) is touched; ARP, TCP and the rest pass. What was done is decided by the way's own
 * generator, packet by packet in the order of arrival, so a way that carries the same packets in the same order does
 * the same to them. Every packet touched is one record; with `trace` every RoCE packet is one.
 *
 * Legal order: fc_impair_open for each way, fc_impair_run until *stop, fc_impair_close for each way.
 * Thread rule: all of an impairer belongs to the thread that runs it. `down` is one byte that another process may change
 * at any time (shared memory); *stop is set by a signal handler. No allocation after fc_impair_open.
 */
#ifndef FLOWCHECK_LAB_IMPAIRER_H
#define FLOWCHECK_LAB_IMPAIRER_H

#include <stdint.h>

enum { FC_PASSED = 0, FC_DROPPED = 1, FC_DOUBLED = 2, FC_MOVED = 3, FC_DAMAGED = 4, FC_DOWN = 5 };

/* One line of the log, little endian, 32 bytes. `at`, `bit`: what was damaged in the frame; `at`: how many
 * packets overtake one that is moved. */
typedef struct {
    uint64_t ns;      /* CLOCK_REALTIME of the decision */
    uint32_t src, dst; /* IPv4, host order */
    uint32_t qpn, psn;
    uint16_t length, at;
    uint8_t opcode, what, way, bit;
} fc_impair_record;

typedef struct {
    uint64_t received, sent, dropped, doubled, moved, damaged, down, lost; /* lost: by the impairer itself, must stay 0 */
} fc_impair_counts;

#define FC_IMPAIR_HELD 32 /* packets waiting to be overtaken */
#define FC_IMPAIR_FRAME 9728

typedef struct {
    int rx, tx;
    uint8_t index;            /* `way` of its records */
    uint8_t trace;
    uint16_t distance;        /* a moved packet is overtaken by so many */
    uint32_t drop, duplicate, reorder, corrupt; /* probabilities, of 2^32 - 1 */
    uint64_t state;           /* generator */
    const volatile uint8_t *down; /* not 0: nothing passes */
    fc_impair_counts counts;
    struct {
        uint32_t length;
        uint32_t left; /* packets that still have to overtake it; 0: free */
        uint8_t frame[FC_IMPAIR_FRAME];
    } held[FC_IMPAIR_HELD];
    uint32_t holding;
} fc_impair_way;

/* Sockets of a way: reads `from`, writes `to`. 0, or -errno. */
int fc_impair_open(fc_impair_way *way, const char *from, const char *to);
void fc_impair_close(fc_impair_way *way);

/* Carry packets until *stop; then what is held leaves. log: file descriptor. 0, or -errno. */
int fc_impair_run(fc_impair_way *ways, int count, int log, const volatile int *stop);

#endif
