/* The packet-counting state machine: from packets of a job's flows to bytes in the gradient arena.
 *
 * Model (design section 5). Each (stream, flow) has a cursor that walks the connection's send schedule: calls in issue
 * order, messages of a call in closed form (lane.h), packets of a message by PSN arithmetic. PSNs start at 0 with the
 * connection, so the packet count says where a packet belongs. Nothing is placed on the count alone: a packet needs a
 * second witness that agrees with it - its RETH address and length, its LL or LL128 flags, the CTS that announced its
 * message - or belongs to a message whose first packet had one. Others (a SIMPLE MIDDLE after a loss) are kept aside
 * until a witness agreed at a PSN before them and one at a PSN after them. Two after them are not enough: those say
 * where the connection is now, and what came before its first anchor may be of another run on the same queue pair. Nor
 * is a beginning at PSN 0 an anchor: it is the count. (The packet that has PSN 0 is one, if its address agrees.) Any
 * witness that disagrees ends the flow, and what waits aside is lost: manifest and traffic then differ, and counting on
 * would be guessing.
 *
 * A packet of a flow goes this way; every step may end it, in exactly one outcome:
 *
 *     decode  ->  count       ->  locate       ->  admit         ->  witness       ->  place
 *     roce.h      which PSN       which message    is its arena      do headers        into cells,
 *                 is it?          owns it?         there, ICRC?      and flags agree?  compared, aside
 *
 * What is known of a flow's position (enum fc_position), and whether it is trusted (enum fc_trust):
 *
 *     UNSEEN -> COUNTED           it begins at PSN 0, is young beside one that does, or was found as below
 *     UNSEEN -> MID_STREAM        a large PSN came first: PSN 0 would be a wrap
 *     MID_STREAM -> COUNTED       an absolute witness named its message
 *     COUNTED -> ADRIFT           silence in which half of the PSN space could have passed
 *     ADRIFT -> COUNTED           an absolute witness named its message
 *
 *     TRUSTED -> LOST             a witness disagreed
 *     TRUSTED -> LOST_FOR_GOOD    ... in a way that says another schedule or another connection
 *     LOST -> ON_TRIAL            a message at an iteration's start agrees in everything
 *     LOST -> LOST_FOR_GOOD       see above
 *     ON_TRIAL -> LOST            a message of the trial disagrees, or is missing
 *     ON_TRIAL -> TRUSTED         a whole iteration agreed
 *     ON_TRIAL -> LOST_FOR_GOOD   see above
 *
 * A CTS is written the other way, so it may come over another stream than its data: a mirror with a port for each
 * direction, a capture of each. Every (stream, connection) has a table of its own, which its thread alone writes. Where
 * the own one leads nowhere, a flow's place is sought in the tables of the connection's other streams, each by itself and
 * by the rules that hold for the own one; the order in which streams are read says nothing, so of these only what was
 * announced within `outage_ns` of the packet counts: it is of this run and this lap of the PSN, where clocks agree. Where
 * two streams contradict each other nothing is found. What another stream has announced only gives a place. It is never
 * held against a packet: a stream that lags, leads or was captured at another time must not end a flow.
 *
 * Threads. A job has one fc_machine for each placing thread, which serves rings of its own; both directions of a
 * connection come over one ring, so all that is known of a flow belongs to one thread. What the threads of a job share:
 *
 *     schedule     calls, edges, the table of flows                       written before they begin
 *     arenas       bytes: the cells of different threads differ, or hold copies of the same bytes
 *     coverage     a bitmap for each thread, which it alone writes. Others read `shown`, whose bits follow the fence
 *                  after their bytes: what another thread has placed is compared, never written again. Two threads that
 *                  place a cell within one burst both write it; nobody compares these two copies
 *     fc_shared    which iteration is the first of captures that begin in mid-stream, set once by who comes first
 *     cts          tables of announcements: each has one writer; others read an entry as index, address and time, index
 *     closed,      of each machine: written by the thread in charge while it holds the machine's lock. An iteration ends
 *     base,        in two steps: first no machine places into it (closed), then its arena may be a later one's (base). A
 *     shed         burst holds the lock, so whoever takes it meets a machine between two bursts. The bitmaps of what
 *                  retired are cleared in the same way, in pieces; a thread that takes the arena over clears the rest
 *
 * Several jobs are served by one thread: serve.h.
 *
 * Units: parser/src/schedule.c (which message), witness.c (do they agree), arena.c (bytes into cells), differ.c (copies
 * that differ), hope.c (may a missing packet still come), position.c (a flow's place found again), machine.c (a packet's
 * way, rings). Structures and what they call of each other are here.
 * Legal call order: see parser/machine.pyx, which builds the machines. Thread rule: one thread at a time for one
 * fc_machine. Nothing is allocated per packet; per message work is O(1), memory does not grow with messages.
 */
#ifndef FLOWCHECK_MACHINE_H
#define FLOWCHECK_MACHINE_H

#include <stdint.h>

#include "cts.h"
#include "lane.h"
#include "lock.h"
#include "packetref.h"
#include "roce.h"
#include "tunnel.h"

/* Limits; those that the fuzzers make small have an #ifndef. */
#ifndef FC_WINDOW
#define FC_WINDOW 64 /* messages a cursor remembers: bounds how late a packet may come (NCCL has 8 in flight) */
#endif
#ifndef FC_SEEN_WORDS
#define FC_SEEN_WORDS 256 /* 16,384 PSNs of history for duplicates and exact loss counts */
#endif
#ifndef FC_SIDE_PACKETS
#define FC_SIDE_PACKETS 4096 /* packets kept aside, all flows together */
#endif
#ifndef FC_LOG_ENTRIES
#define FC_LOG_ENTRIES 256 /* disagreements kept with their values; more are only counted */
#endif
#ifndef FC_LATE_ENTRIES
#define FC_LATE_ENTRIES 8192 /* places of closed iterations that something has come for */
#endif
#ifndef FC_LOSS_ENTRIES
#define FC_LOSS_ENTRIES 8192 /* places known to be missing, with their cause */
#endif
enum {
    FC_HISTORY = 64 * FC_SEEN_WORDS,
    FC_BURST = 64,            /* packets between two fences                                            */
    FC_UNSHOWN = 256,         /* pieces placed between two fences that other threads do not know of yet */
    FC_HEADERS_AHEAD = 24,    /* packets whose headers are on their way to the cache                   */
    FC_HINTS = 1024,          /* a power of two                                                        */
    FC_CTS_SLOTS = 256,       /* NCCL's FIFO depth                                                     */
    FC_SIDE_BYTES = 4096,     /* largest path MTU                                                      */
    FC_SEEK_LIMIT = 1 << 22,  /* messages walked at most to find one place in the schedule             */
    FC_SEEK_TRIES = 64,       /* absolute witnesses a flow may offer in vain                           */
    FC_SEEK_PAUSE = 1024,     /* ... then other streams' announcements are looked at once in so many   */
    FC_REACH = 1 << 20,       /* a write lies within so many bytes of the address that its CTS named   */
    FC_YOUNG = 1 << 16,       /* first PSN of a flow that can still be counted from 0                  */
    FC_NOTHING_SEEN = -2,     /* fc_past() of a stream that has brought no data of the job             */
    FC_TIMES = 64,            /* iterations of which it is known when they came: a power of two        */
    FC_DIFFERENCES = 256,     /* pieces of copies that differed, kept with where they came from        */
};
#define FC_NEVER (1ull << 40)  /* steps and messages that no connection reaches: a larger claim is not followed */
#define FC_LL_CLEAN 0x7ffffff8ull /* nccl-wire.md 4.1: steps of these low bits clean their slot */
#define FC_LL_LAP (1ull << 31)    /* ... once in so many steps */

enum fc_position { FC_UNSEEN, FC_MID_STREAM, FC_COUNTED, FC_ADRIFT, FC_POSITIONS };
enum fc_trust { FC_TRUSTED, FC_LOST, FC_ON_TRIAL, FC_LOST_FOR_GOOD, FC_TRUSTS };

/* What became of a packet: every packet ends in exactly one of these, so the counts add up. */
enum fc_outcome {
    FC_PLACED,       /* carried final bytes, at least one cell was new                                 */
    FC_COMPARED,     /* carried final bytes that had all arrived, and they were compared               */
    FC_RELEASED,     /* the job's, but carries nothing to keep (partial sums, stepped-over calls)      */
    FC_REPEATED,     /* the job's, seen before on this flow, nothing to keep                           */
    FC_CONTROL,      /* CTS writes and acknowledgements of the job's connections                       */
    FC_OTHER_PACKET, /* RoCE of somebody else: other QPs, probes, other opcodes                        */
    FC_NO_ROCE, FC_CUT, FC_CONTRADICTORY, FC_FRAGMENTED, /* fc_decode_status, by name                   */
    FC_BAD_ICRC,
    FC_LATE,         /* for an iteration already closed                                                */
    FC_STALE,        /* older than the window of messages                                              */
    FC_UNANCHORED,   /* no agreeing anchor before and after it                                         */
    FC_NOT_SYNCED,   /* its flow is lost                                                               */
    FC_BEYOND,       /* after the last call the manifest describes                                     */
    FC_DISAGREED,    /* the witness that ended its flow                                                */
    FC_ASIDE,        /* provisional; becomes PLACED, COMPARED, LATE or UNANCHORED                      */
    FC_WRAPPED,      /* may carry RoCE inside a tunnel that is not unpacked                            */
    FC_OVERLOAD,     /* carried final bytes of an iteration that is given up: fc_shed                  */
    FC_OUTCOMES,
    FC_GO_ON = -1,   /* of a step: the next one decides                                                */
    FC_BLOCKED = -2, /* its iteration has no arena yet: come back with the same packet                 */
};

enum fc_disagreement {
    FC_WRONG_LENGTH = 1, /* payload length against message size and MTU                                */
    FC_WRONG_OPCODE,     /* FIRST/MIDDLE/LAST against the position in the message                      */
    FC_WRONG_SIZE,       /* RETH length                                                                */
    FC_WRONG_ADDRESS,    /* RETH address against the step slot                                         */
    FC_WRONG_IMMEDIATE,
    FC_WRONG_FLAG,       /* LL or LL128 flag against the step                                          */
    FC_WRONG_CTS,        /* RETH address against the CTS with this message's number                    */
    FC_EXTRA_MESSAGE,    /* a message after the last call                                              */
    FC_REPEATED_CHUNK,   /* first message of a loop repeats the previous loop's last: one send too many */
    FC_MADE_ANEW,        /* a first packet of other contents: another connection on the same queue pair */
};

enum fc_target { FC_NOTHING, FC_GRADIENT, FC_PARAMETERS, FC_TARGETS };

/* What is known of packets that are missing: hope.c. The later one counts of two. */
enum fc_hope { FC_MAY_COME, FC_ALL_CAME, FC_ACKNOWLEDGED, FC_PASSED, FC_HOPES };

typedef struct fc_call { /* one collective call as one connection sees it */
    fc_lane lane;
    uint8_t has_lane, target;
    int32_t phase; /* 0 startup, 1 iteration 0, 2 rebuild, 3 steady   */
    uint32_t place; /* which of the iteration's tensors it fills: covered cells are counted by it */
    int64_t base;  /* byte offset of the call's tensor in its region  */
} fc_call;

typedef struct fc_edge { /* one connection: (channel, source rank, destination rank) */
    fc_call *calls;
    int32_t ncalls, steady;
    int32_t qps, used; /* QPs of the connection, QPs a message is spread over   */
    uint32_t ar_above; /* messages larger than this leave as an AR pair         */
    uint8_t imm_big_endian;
} fc_edge;

typedef struct fc_flow_key { /* one direction of one QP; 64 bytes */
    uint64_t number;  /* QP number, from bit 32 on the IP version; 0 marks an empty place of the hash table  */
    uint8_t data;     /* 1: receives the data; 0: receives CTS and ACKs                                      */
    int32_t flow;
    uint64_t ends[4]; /* source and destination address as on the wire; IPv4: both in the first word         */
    uint8_t unused[16];
} fc_flow_key;

typedef struct fc_sent { /* one message on one QP, as the schedule says */
    uint64_t psn;                /* of its first packet, unwrapped                                        */
    uint64_t step, number;
    uint32_t packets, pair;      /* data packets; 1 if an empty WRITE_WITH_IMM follows                    */
    uint32_t size, total, piece; /* bytes on this QP, of the whole message, where this QP's piece begins  */
    int64_t iteration, index;
    int64_t offset, data_bytes;  /* byte place in the region, bytes that carry elements (whole message)   */
    const fc_call *call;
    uint8_t target, content, phase, opens_loop;
    uint8_t agreed;              /* its first packet had a witness that agreed                            */
} fc_sent;

typedef struct fc_cts_table { /* what the receiver of a connection has announced, as one stream sees it */
    uint64_t index[FC_CTS_SLOTS], address[FC_CTS_SLOTS], time_ns[FC_CTS_SLOTS]; /* index 0: empty */
    uint32_t turn[FC_CTS_SLOTS]; /* odd: being written */
    uint32_t tag;   /* who the receiver says the sender is              */
    uint8_t tagged; /* 1: every CTS so far had that tag; 2: they differed */
} fc_cts_table;

typedef struct fc_cursor { /* a place in a send schedule: the next message */
    int32_t call;
    int64_t iteration, index;
    uint64_t step, number, psn;
} fc_cursor;

typedef struct fc_slot { /* one arena, as one thread sees it: an iteration's gradients, or the parameters */
    /* the cache line that other threads read */
    int64_t iteration;
    uint8_t *data;    /* of all threads                                                                            */
    uint64_t *cover;  /* which cells this thread has placed, whichever stream brought them: cover.h                */
    uint64_t *shown;  /* the same for others: only what is fenced. A thread that is alone has none                 */
    uint8_t unused[32];
    /* the thread's own */
    uint64_t *places; /* how many, by fc_call.place                                                                */
    uint64_t copies_differ, differ_offset, compared_bytes;
    uint64_t clear;   /* while it has no iteration: how many words from the first on are 0, in all bitmaps; else 0 */
    uint64_t *voids;  /* cells of which this thread has seen two copies that differ: they count as missing         */
    uint64_t voided;  /* how many                                                                                  */
    uint64_t late;    /* cells that this thread placed from packets that came after later ones: repeats, as a rule */
} __attribute__((aligned(64))) fc_slot;

typedef struct fc_unshown { /* cells that are covered, and not yet for other threads */
    fc_slot *slot;
    uint64_t first, end;
} fc_unshown;

typedef struct fc_times { /* when an iteration's gradient packets were captured, nanoseconds since the epoch; -1: start-up */
    int64_t iteration;
    uint64_t first_ns, last_ns; /* last_ns: of the packets that begin or end a message, the latest */
    uint64_t latest_first_ns;   /* when the last of the flows began with it                        */
    uint64_t earliest_last_ns;  /* when the first of those that are past it had ended it: UINT64_MAX, none is */
} fc_times;

typedef struct fc_shed { /* iterations [first, end) are given up: their packets are counted, and take no arena */
    int64_t first, end;
} fc_shed;

typedef struct fc_shared { /* what the machines of a job decide together */
    int64_t first;      /* iteration that captures in mid-stream begin with; -1: nobody has come yet */
    uint8_t from_start; /* a connection's first packet was seen: 0 becomes 1                          */
} fc_shared;

typedef struct fc_flow { /* one flow as one stream sees it */
    /* the cache line that every packet needs */
    uint64_t next_psn;  /* one past the highest seen                                                           */
    uint64_t fast_end;  /* MIDDLE packets of message `ahead` are expected up to this PSN: fast_path(); 0: none */
    fc_sent *ahead;
    uint64_t packets, payload_bytes;
    uint64_t last_ns;   /* capture time of the newest packet           */
    uint64_t start_psn; /* where this flow's history begins            */
    uint8_t carries_final; /* `ahead` carries final bytes              */
    uint8_t data;       /* its packets bring data, not CTS and ACKs    */
    uint8_t passes_as;  /* fc_outcome of packets of `ahead` that are not placed */
    uint8_t brings_copies; /* its newest packet to be placed had come before, over another stream; a guess for the next */
    uint8_t unused[4];
    /* the line that packets to be placed need as well: where those of `ahead` go, see fc_prepare_message() */
    uint64_t track_end;  /* first PSN that is not so plain; 0: none is */
    uint64_t track_psn;  /* its first packet goes to                   */
    uint8_t *track_to;   /* ... these bytes,                           */
    uint64_t track_cell; /* which are these cells of                   */
    fc_slot *track_slot; /* ... this slot                              */
    uint64_t *track_count; /* how many of its place are there          */
    uint64_t track_flag;
    uint32_t track_bytes; /* data bytes of a packet; whole cells       */
    uint8_t track_protocol, unused_too[3];
    /* the rest */
    uint64_t messages;   /* generated so far; the window holds the last FC_WINDOW of them */
    uint64_t current;    /* number (in `messages` counting) of the message last hit       */
    uint8_t position;    /* fc_position: set_position() alone changes it                  */
    uint8_t trust;       /* fc_trust: set_trust() alone changes it                        */
    uint8_t active;      /* a packet of it was seen                                       */
    uint8_t finished;    /* its schedule has ended                                        */
    uint8_t rotations;   /* of an iteration's sizes: 0 not looked at, 1 some are alike, 2 none is */
    int32_t edge, qp, cts; /* cts: index into cts tables, -1 unknown                      */
    fc_cursor cursor;    /* the next message to generate                                  */
    uint32_t seeks, elsewhere; /* absolute witnesses that led nowhere: its own, other streams' */
    int64_t lost_iteration, trial_iteration, back_iteration; /* lost in, on trial since, trusted again from */
    uint64_t trial_messages;
    uint64_t base[3];    /* address of step 0's slot by protocol, 0 while unknown         */
    int32_t side_head, side_tail; /* packets kept aside, oldest first                     */
    uint64_t missing, duplicates, retransmissions, out_of_order, bad_icrc, first_psn;
    uint64_t went_back_at; /* the sender repeats a run of packets, until one comes that is not before this PSN */
    uint64_t first_anchor; /* one past the lowest PSN where a witness agreed with the count; 0: none did */
    uint64_t agreements, disagreements;
    uint64_t seen[FC_SEEN_WORDS];
    fc_sent window[FC_WINDOW];
    uint32_t first_icrc; /* of PSN 0; 0: it was not seen */
    int32_t partner;     /* of the way back: the data flow whose ACKs it carries, -1: none          */
    uint64_t acked;      /* one past the highest PSN that the receiver has acknowledged, 0: none was */
    int64_t iteration;   /* the newest of which it has brought gradients, -1: none       */
    uint64_t gradient_ns; /* capture time of the newest packet of that                   */
} __attribute__((aligned(64))) fc_flow; /* whole cache lines: every flow's first two are its own */

typedef struct fc_side_packet {
    int32_t next;
    uint32_t length, index;
    uint64_t message;
    fc_sent sent; /* the same, also when it has left the window */
    uint8_t bytes[FC_SIDE_BYTES];
} fc_side_packet;

typedef struct fc_log_entry {
    int32_t kind, stream, flow;
    int64_t iteration;
    uint64_t number, psn, expected, found;
} fc_log_entry;

typedef struct fc_loss {
    int32_t cause, target;
    int64_t iteration, offset, bytes;
} fc_loss;

typedef struct fc_origin { /* the packet that brings what is placed or compared */
    uint32_t stream;
    const fc_flow *f;
    uint64_t psn;
} fc_origin;

typedef struct fc_difference { /* cells, one after the other, of which a packet brought other bytes than had come before */
    int32_t stream, flow, target;
    int64_t iteration, offset, bytes; /* region bytes                         */
    uint64_t psn;                     /* of the packet that came later        */
} fc_difference;

typedef struct fc_outcome_count { /* packets with one outcome */
    uint64_t packets, bytes;
} fc_outcome_count;

typedef struct fc_strangers { /* packets of no flow that anybody follows */
    fc_outcome_count counts[FC_OUTCOMES];
    uint64_t refused[FC_REFUSALS]; /* encapsulated packets by fc_refusal */
    uint64_t packets;              /* all of them                        */
} fc_strangers;

typedef struct fc_machine {
    uint32_t mtu, streams, flows, arenas, table_mask;
    uint8_t check_icrc;
    uint8_t opened;                /* it is known which iteration is the first                         */
    uint8_t placing;               /* protocol of the message begun last: how to fetch what comes      */
    int64_t base_iteration, begun; /* oldest iteration with an arena; highest with a gradient packet seen */
    int64_t closed;                /* nothing is placed into iterations before this one                */
    fc_shared *shared;
    struct fc_machine **others;    /* of the job's other threads                                       */
    uint32_t n_others, n_unshown;
    int64_t wanted[64];            /* by stream: iteration that its blocked packet belongs to          */
    uint64_t outage_ns;            /* silence in which half of the PSN space could have passed         */
    uint64_t patience;             /* packets after one that is missing; 0: a step of the ring's       */
    int64_t region_bytes[FC_TARGETS];
    uint64_t words[FC_TARGETS];    /* of a region's coverage                                           */
    fc_outcome_count *counts;      /* [stream * FC_OUTCOMES + outcome]                                 */
    fc_strangers *strangers;       /* where packets of no flow are counted; NULL: in `counts`, as others' */
    const uint8_t *next;           /* headers and payload of a packet soon to be placed, or NULL: fc_drive() */
    uint32_t n_final;              /* flows that carry final bytes at the moment                       */
    uint32_t copying[64];          /* by stream: flows that bring copies at the moment                 */
    uint32_t header_lines;         /* cache lines in which the headers of MIDDLE packets end: IPv6 needs two */
    uint8_t *final_hint;           /* [QP number % FC_HINTS]: does its flow carry final bytes at the moment? A guess,
                                    * shared with other jobs of the same thread: serve.h                     */
    fc_flow_key *table;
    fc_edge *edges;
    fc_flow *states;               /* [stream * flows + flow]                                          */
    fc_cts_table *cts;             /* [stream * cts_tables + table]                                    */
    uint32_t cts_tables;
    fc_slot *slots;                /* arenas of gradients, then one of parameters                      */
    uint32_t places;               /* of an iteration                                                  */
    fc_side_packet *side;
    int32_t side_free, side_fresh; /* used before and free again; never used                           */
    fc_log_entry log[FC_LOG_ENTRIES];
    uint64_t logged, kept;         /* disagreements so far; how many of them are in the log            */
    int64_t unlogged_first, unlogged_last; /* iterations of those that found no room                   */
    fc_loss losses[FC_LOSS_ENTRIES];
    uint64_t lost;
    fc_difference differences[FC_DIFFERENCES];
    uint64_t differed;             /* so far: more than FC_DIFFERENCES are only counted                */
    /* what few packets need stays after here: the lines above are those of every packet */
    uint64_t refused[FC_REFUSALS]; /* encapsulated packets by fc_refusal                               */
    fc_loss late[FC_LATE_ENTRIES]; /* of closed iterations, kept until the end                         */
    uint64_t n_late;
    fc_cts_element cts_elements[FC_CTS_ELEMENTS_MAX]; /* forms of the CTS element: the job's, then the others */
    uint32_t cts_known;
    uint64_t cts_forms[FC_CTS_ELEMENTS_MAX]; /* CTS writes that can be read as each of them; some as several */
    int64_t first_iteration;       /* base_iteration of captures that begin in mid-stream              */
    int64_t missed_iteration;      /* the oldest one missed by that, or -1                             */
    uint32_t first_stream;         /* the stream that decided it                                       */
    fc_shed shed;                  /* written by the thread in charge, with the lock                   */
    fc_times *times;               /* [stream * FC_TIMES + (iteration + 1) % FC_TIMES]                 */
    uint8_t own_hint[FC_HINTS];
    fc_unshown unshown[FC_UNSHOWN];
    int64_t stands[64];            /* by stream: fc_past() as it was told last, FC_NOTHING_SEEN at first */
    uint32_t asked;                /* the thread in charge wants them told: it waits for no burst      */
    fc_lock lock __attribute__((aligned(64))); /* held for a burst, and by the thread in charge            */
} fc_machine;

/* -- machine.c -------------------------------------------------------------------------------------------- */

/* Packets of the ring until `limit`, its end or a packet that is blocked (*blocked). Returns how many were consumed. */
int64_t fc_drive(fc_machine *M, uint32_t stream, fc_ring *ring, int64_t limit, int *blocked);
/* One packet. 1: consumed; 0: blocked, nothing was counted. */
int fc_process(fc_machine *M, uint32_t stream, const fc_packetref *ref);
/* The flow of a packet of these ends, source and destination one after the other as in both IP headers; or NULL. */
const fc_flow_key *fc_find_flow(const fc_machine *M, const uint8_t *ends, uint32_t version, uint32_t qpn);
/* Where a hash table of flows begins to look. first: the first eight bytes of the addresses as they lie in the header. */
static inline uint32_t fc_key_hash(uint64_t first, uint32_t qpn)
{
    return (uint32_t)((first ^ (uint64_t)qpn << 20) * 0x9e3779b97f4a7c15u >> 32);
}
/* Enter a flow whose number, ends, data and flow are set. The table must have room; mask: its places less one. */
void fc_enter_flow(fc_flow_key *table, uint32_t mask, const fc_flow_key *key);
/* Which changes of position and trust are legal: 1 or 0. */
int fc_position_edge(int from, int to);
int fc_trust_edge(int from, int to);
void fc_set_position(fc_flow *f, enum fc_position to);
void fc_set_trust(fc_flow *f, enum fc_trust to);

/* `begun`, for who does not hold the lock. What is read of the machine after it is of after the opening. */
static inline int64_t fc_begun(const fc_machine *M)
{
    return __atomic_load_n(&M->begun, __ATOMIC_ACQUIRE);
}

/* Was a connection's first packet seen, by whichever thread? */
static inline int fc_from_start(const fc_machine *M)
{
    return __atomic_load_n(&M->shared->from_start, __ATOMIC_RELAXED);
}

static inline int fc_is_trusted(const fc_flow *f)
{
    return f->trust == FC_TRUSTED;
}

/* -- packet.c --------------------------------------------------------------------------------------------- */

/* What becomes of a packet of a flow, by the long way: its outcome. FC_BLOCKED: nothing was counted. */
int fc_outcome_of(fc_machine *M, uint32_t stream, fc_flow *f, const fc_roce *p, uint64_t now_ns);
int fc_refuse_icrc(fc_flow *f);
/* PSNs of the history that never came. */
uint64_t fc_unseen(const fc_flow *f);

static inline uint64_t *fc_seen_word(fc_flow *f, uint64_t psn)
{
    return &f->seen[psn / 64 % FC_SEEN_WORDS];
}

/* -- schedule.c ------------------------------------------------------------------------------------------- */

/* The message that owns a PSN, or NULL: before the window, or after the end of the schedule. */
fc_sent *fc_locate(fc_machine *M, fc_flow *f, uint64_t psn);
/* Find the message with step `want` (or number `want`) from the start. 1: in m, with the cursor after it. */
int fc_seek(const fc_machine *M, const fc_flow *f, int by_step, uint64_t want, fc_cursor *c, fc_sent *m);
/* The message at the cursor or the first after it on this QP, the cursor moved past it. 0: none. */
int fc_step_on(uint32_t mtu, const fc_edge *e, int32_t qp, fc_cursor *c, fc_sent *m);

/* -- witness.c -------------------------------------------------------------------------------------------- */

/* Everything the headers say, against the count. 0 and logged: disagreement; 1: nothing witnessed; 2: agreed, and if
 * nothing else of the packet disagrees, the caller says so: fc_agree(). */
int fc_check_headers(
    fc_machine *M, uint32_t stream, fc_flow *f, fc_sent *m, uint32_t index, const fc_roce *p, uint64_t psn);
/* LL and LL128: every line's flag says the step. 0 and logged: disagreement; 1: no line carries data; 2: agreed, as
 * above. */
int fc_check_flags(fc_machine *M, uint32_t stream, fc_flow *f, const fc_sent *m, uint32_t index, const uint8_t *wire,
                   uint32_t length, uint64_t psn);
/* Does the first packet of a message agree in all its witnesses? For flows that are lost: no log. */
int fc_agrees(const fc_machine *M, const fc_flow *f, const fc_sent *m, const fc_roce *p);
/* How many lines of `length` wire bytes from byte `at` of a message carry its flag. */
uint64_t fc_flagged_lines(const fc_sent *m, uint64_t at, uint32_t length);
int fc_right_opcode(const fc_sent *m, uint32_t index, uint8_t opcode);
void fc_wrong_flag(fc_machine *M, uint32_t stream, fc_flow *f, const fc_sent *m, const uint8_t *wire, uint64_t psn,
                   int64_t line);
/* Drop what is logged of closed iterations. */
void fc_forget(fc_machine *M);
/* m: NULL where the schedule has no message. */
void fc_log_disagreement(fc_machine *M, uint32_t stream, fc_flow *f, int kind, const fc_sent *m, uint64_t psn,
                         uint64_t expected, uint64_t found);
/* A witness agreed before `before_psn`: what waits for it is placed. 0: give up on all that waits. */
void fc_settle_aside(fc_machine *M, uint32_t stream, fc_flow *f, uint64_t before_psn);
int fc_keep_aside(fc_machine *M, fc_flow *f, uint64_t message, uint32_t index, const uint8_t *wire, uint32_t length);
/* One send too many: does the first packet of a loop repeat what the loop before brought last? */
int fc_repeats_previous(fc_machine *M, const fc_flow *f, const fc_sent *m, const uint8_t *wire, uint32_t length);

/* Witnesses agreed with the packet count at `psn`, and none of that packet disagreed. */
static inline void fc_agree(fc_machine *M, uint32_t stream, fc_flow *f, uint64_t psn)
{
    f->agreements++;
    if (psn < f->first_anchor - 1) /* none yet: 0 - 1 is above all */
        f->first_anchor = psn + 1;
    if (f->side_head >= 0)
        fc_settle_aside(M, stream, f, psn + 1);
}

/* Payload bytes of packet `index` of a message. */
static inline uint32_t fc_length_of(const fc_machine *M, const fc_sent *m, uint32_t index)
{
    uint32_t at = index * M->mtu;
    return !m->size || index >= m->packets ? 0 : m->size - at < M->mtu ? m->size - at : M->mtu;
}

/* -- arena.c ---------------------------------------------------------------------------------------------- */

/* Final bytes of packet `index` of a message into its region; cells that have arrived are compared. Flags were checked. */
int fc_place(fc_machine *M, uint32_t stream, const fc_flow *f, const fc_sent *m, uint32_t index, const uint8_t *wire,
             uint32_t length);
/* fc_check_flags(), fc_agree() and fc_place() in one pass over the bytes, where nothing of the packet has arrived yet. */
int fc_place_flagged(fc_machine *M, uint32_t stream, fc_flow *f, const fc_sent *m, uint32_t index, const uint8_t *wire,
                     uint32_t length, uint64_t psn);
/* Where the full packets of message `m` go, computed once for all of them: fc_place_in_order(). */
void fc_prepare_message(fc_machine *M, fc_flow *f, const fc_sent *m);
/* A full packet of message `ahead`, which fc_prepare_message() has seen. */
int fc_place_in_order(fc_machine *M, uint32_t stream, fc_flow *f, const uint8_t *wire, uint64_t psn);
/* A full packet of message `ahead`, the long way. */
int fc_place_general(fc_machine *M, uint32_t stream, fc_flow *f, const uint8_t *wire, uint64_t psn);
/* Has this cell arrived, and can it be read? */
int fc_has_cell(const fc_machine *M, const fc_slot *slot, uint64_t cell);
/* All that was placed is in memory now, and other threads may know of it. */
void fc_end_burst(fc_machine *M);
/* Nothing is placed into iterations before this one any more. With the lock. */
void fc_close_before(fc_machine *M, int64_t iteration);
/* Arenas of iterations before this one, which is closed, may be later ones'. The newest of them can still be looked at:
 * fc_repeats_previous(). With the lock. */
void fc_retire_before(fc_machine *M, int64_t iteration);
/* Clear a piece of the bitmaps that nobody looks at any more, so that the thread does not have to when it takes their arena
 * over. 1: there is more. With the lock; since fc_retire_before() every burst, of all threads, has ended. */
int fc_clear(fc_machine *M);
/* Region bytes that packet `index` stands for, for reports of losses (LL128: of its slices, rounded). */
void fc_note_loss(fc_machine *M, int cause, const fc_sent *m, uint32_t index, uint32_t length);

/* -- differ.c --------------------------------------------------------------------------------------------- */

/* A copy of a cell differs from the one before: the cell is void for the rest of its iteration. count: cells of its place
 * that are there. nbytes: of the cell, all but for the last of a tensor. */
void fc_void(fc_machine *M, fc_slot *slot, uint64_t *count, const fc_origin *from, uint64_t cell, uint64_t nbytes);
/* Drop what is logged of closed iterations: of fc_forget(). */
void fc_forget_differences(fc_machine *M);

/* -- hope.c ----------------------------------------------------------------------------------------------- */

/* An ACK, on the flow that carries it. Returns its outcome. */
int fc_acknowledge(fc_machine *M, uint32_t stream, const fc_flow *back, const fc_roce *p);
/* The iteration that the slowest active flow of a stream works on, -1: start-up traffic, or FC_NOTHING_SEEN. With the
 * lock. */
int64_t fc_past(fc_machine *M, uint32_t stream);
/* The same for the thread in charge, without waiting once data has come: now if nobody has the lock, else as told last,
 * and the next burst tells it again. */
int64_t fc_ask_past(fc_machine *M, uint32_t stream);
/* A burst ends: tell what was asked, and give the lock. */
void fc_leave(fc_machine *M);
/* May a stream, which is past the iteration or has brought nothing, still bring something of it? */
enum fc_hope fc_hope_of(fc_machine *M, uint32_t stream, int64_t iteration);

/* -- position.c ------------------------------------------------------------------------------------------- */

/* Where is a flow whose origin is not known? The packet's ICRC is right. 1: found, and the flow is there now. */
int fc_find_position(fc_machine *M, uint32_t stream, fc_flow *f, const fc_roce *p, uint64_t now_ns);
/* May a lost flow be trusted again with the count it had? 1: yes, from this packet on. */
int fc_recover(fc_machine *M, fc_flow *f, const fc_roce *p, uint64_t psn);
/* PSN 0: is it the first packet of another connection, on the same queue pair? */
int fc_connection_reset(fc_machine *M, fc_flow *f, const fc_roce *p);
/* Captures begin in mid-stream, and this iteration is the first that this thread has a gradient packet of. */
void fc_open(fc_machine *M, uint32_t stream, int64_t iteration);
/* Another capture begins earlier than the one that was read first: go back there, while nothing is closed. */
void fc_reopen(fc_machine *M, int64_t iteration);

#endif
