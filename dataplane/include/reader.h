/* A consumer for everything that is not on the fast path: copies packets out of a ring, then releases
 * them. Thread rule: the consumer's (packetref.h); a ring has one consumer, this or the parser.
 */
#ifndef FLOWCHECK_READER_H
#define FLOWCHECK_READER_H

#include <stdint.h>

#include "packetref.h"

/* Copies at most `want` packets, in order, into `bytes` (packed one behind the other) and their
 * references into `refs` (data points into `bytes`). Returns how many; 0 also when the first packet
 * does not fit into `capacity`. What was copied is released. */
uint64_t fc_reader_take(fc_ring *ring, fc_packetref *refs, uint64_t want, uint8_t *bytes, uint64_t capacity);

/* Releases at most `want` packets unread; how many. */
uint64_t fc_reader_discard(fc_ring *ring, uint64_t want);

#endif
