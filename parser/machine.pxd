# Declarations of include/machine.h: what Engine fills in and reads. The header has the whole.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from parser.cts cimport fc_cts_element
from parser.lane cimport fc_lane
from parser.packetref cimport fc_packetref, fc_ring
from parser.roce cimport FC_REFUSALS


cdef extern from "lock.h" nogil:
    ctypedef struct fc_lock:
        pass
    void fc_take(fc_lock *lock)
    void fc_give(fc_lock *lock)


cdef extern from "machine.h" nogil:
    enum:
        FC_SIDE_BYTES
        FC_SIDE_PACKETS
        FC_SEEN_WORDS
        FC_LOG_ENTRIES
        FC_LATE_ENTRIES
        FC_LOSS_ENTRIES
        FC_YOUNG
        FC_TIMES
        FC_DIFFERENCES
    enum:
        FC_NOTHING
        FC_GRADIENT
        FC_PARAMETERS
    enum:
        FC_UNSEEN
        FC_MID_STREAM
        FC_COUNTED
        FC_ADRIFT
        FC_POSITIONS
    enum:
        FC_TRUSTED
        FC_LOST
        FC_ON_TRIAL
        FC_LOST_FOR_GOOD
        FC_TRUSTS
    enum:
        FC_OUTCOMES
    enum fc_hope:
        FC_HOPES
    ctypedef struct fc_call:
        fc_lane lane
        uint8_t has_lane, target
        int32_t phase
        uint32_t place
        int64_t base
    ctypedef struct fc_edge:
        fc_call *calls
        int32_t ncalls, steady, qps, used
        uint32_t ar_above
        uint8_t imm_big_endian
    ctypedef struct fc_flow_key:
        uint64_t number
        uint8_t data
        int32_t flow
        uint64_t ends[4]
    ctypedef struct fc_sent:
        uint64_t psn, number
        uint32_t size, total, piece, packets
        int64_t iteration, offset, data_bytes
        const fc_call *call
        uint8_t target, content
    ctypedef struct fc_cts_table:
        uint32_t tag
        uint8_t tagged
    ctypedef struct fc_cursor:
        int32_t call
        int64_t iteration
    ctypedef struct fc_slot:
        int64_t iteration
        uint8_t *data
        uint64_t *cover
        uint64_t *shown
        uint64_t *places
        uint64_t copies_differ, differ_offset, compared_bytes, clear, voided, late
        uint64_t *voids
    ctypedef struct fc_times:
        int64_t iteration
        uint64_t first_ns, last_ns, latest_first_ns, earliest_last_ns
    ctypedef struct fc_shed:
        int64_t first, end
    ctypedef struct fc_shared:
        int64_t first
        uint8_t from_start
    ctypedef struct fc_flow:
        uint64_t next_psn, packets, payload_bytes
        uint8_t data, position, trust, active, rotations
        int32_t edge, qp, cts, partner
        int64_t lost_iteration, back_iteration
        int32_t side_head, side_tail
        uint64_t missing, duplicates, retransmissions, out_of_order, bad_icrc, first_psn, agreements, disagreements
        uint64_t first_anchor
        uint64_t seen[1]
        int64_t iteration
        uint64_t gradient_ns
    ctypedef struct fc_side_packet:
        pass
    ctypedef struct fc_log_entry:
        int32_t kind, stream, flow
        int64_t iteration
        uint64_t number, psn, expected, found
    ctypedef struct fc_loss:
        int32_t cause, target
        int64_t iteration, offset, bytes
    ctypedef struct fc_difference:
        int32_t stream, flow, target
        int64_t iteration, offset, bytes
        uint64_t psn
    ctypedef struct fc_outcome_count:
        uint64_t packets, bytes
    ctypedef struct fc_strangers:
        fc_outcome_count *counts
        uint64_t *refused
        uint64_t packets
    ctypedef struct fc_machine:
        uint32_t mtu, streams, flows, arenas, table_mask, header_lines, cts_tables, cts_known
        uint32_t n_others, places
        uint8_t check_icrc, opened
        int64_t stands[64]
        fc_shared *shared
        fc_machine **others
        fc_lock lock
        int32_t side_free
        int64_t base_iteration, begun, closed, unlogged_first, unlogged_last, missed_iteration
        int64_t *wanted
        uint64_t outage_ns, patience, logged, kept, lost
        int64_t *region_bytes
        uint64_t *words
        uint64_t *refused
        uint8_t *final_hint
        uint8_t *own_hint
        fc_cts_element *cts_elements
        uint64_t *cts_forms
        fc_outcome_count *counts
        fc_flow_key *table
        fc_edge *edges
        fc_flow *states
        fc_cts_table *cts
        fc_slot *slots
        fc_side_packet *side
        fc_log_entry *log
        fc_loss *losses
        fc_loss *late
        uint64_t n_late
        fc_difference *differences
        uint64_t differed
        fc_shed shed
        fc_times *times
    int64_t fc_drive(fc_machine *M, uint32_t stream, fc_ring *ring, int64_t limit, int *blocked)
    int fc_process(fc_machine *M, uint32_t stream, const fc_packetref *ref)
    const fc_flow_key *fc_find_flow(const fc_machine *M, const uint8_t *ends, uint32_t version, uint32_t qpn)
    void fc_enter_flow(fc_flow_key *table, uint32_t mask, const fc_flow_key *key)
    void fc_end_burst(fc_machine *M)
    void fc_close_before(fc_machine *M, int64_t iteration)
    void fc_retire_before(fc_machine *M, int64_t iteration)
    int fc_clear(fc_machine *M)
    void fc_forget(fc_machine *M)
    int64_t FC_NOTHING_SEEN
    int64_t fc_ask_past(fc_machine *M, uint32_t stream)
    fc_hope fc_hope_of(fc_machine *M, uint32_t stream, int64_t iteration)
    uint64_t fc_unseen(const fc_flow *f)
    int64_t fc_begun(const fc_machine *M)
    int fc_position_edge(int start, int to)
    int fc_trust_edge(int start, int to)
    fc_sent *fc_locate(fc_machine *M, fc_flow *f, uint64_t psn)
    int fc_seek(const fc_machine *M, const fc_flow *f, int by_step, uint64_t want, fc_cursor *c, fc_sent *m)
    int fc_step_on(uint32_t mtu, const fc_edge *e, int32_t qp, fc_cursor *c, fc_sent *m)
    void fc_settle_aside(fc_machine *M, uint32_t stream, fc_flow *f, uint64_t before_psn)
