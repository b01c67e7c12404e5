"""What has been placed: the arenas of a job, which its placing threads share, and each thread's coverage of them.

Engine (machine.pyx) is an Arenas that takes packets. What is read of an iteration before close() has returned is as of
some moment, and final after it; what retired is readable until the next one retires. parser/include/cover.h: bitmaps.
Thread rule: as Engine's.
"""

import numpy as np

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from parser.lane cimport FC_FINAL, FC_LL, FC_LL128
from parser.machine cimport (
    FC_DIFFERENCES, FC_GRADIENT, FC_PARAMETERS, fc_cursor, fc_difference, fc_give, fc_machine, fc_seek, fc_sent, fc_slot,
    fc_step_on, fc_take,
)
from parser.schedule cimport Schedule, zeroed

from parser.cover import count as count_cells, missing as missing_cells


cdef extern from "place.h" nogil:
    uint32_t fc_ll128_offset(uint32_t line, uint32_t word)


cdef int64_t _wire_byte(const fc_sent *m, int64_t offset) noexcept:
    """Where the cell at this byte of the region lies in the message; -1: it does not carry it."""
    cdef int64_t data = offset - m.offset
    cdef uint32_t line, word
    if not 0 <= data < m.data_bytes:
        return -1
    if m.call.lane.protocol != FC_LL128:
        return 2 * data if m.call.lane.protocol == FC_LL else data
    for line in range(8):
        for word in range(15):
            if fc_ll128_offset(line, word) == data % 960:
                return data // 960 * 1024 + 128 * line + 8 * word
    return -1


def _aligned(size_t nbytes):
    """A zeroed uint8 array of nbytes beginning on a cache line."""
    raw = np.zeros(nbytes + 64, dtype=np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip:skip + nbytes]


cdef class Arenas:
    """config: parser.engine_config.EngineConfig. Whoever derives from it makes the machines."""

    def __cinit__(self, config):
        self.config, self.twice, self.bitmaps = config, {}, []
        if not 1 <= config.streams <= 64 or config.arenas < 2:
            raise ValueError(f"{config.streams} streams and {config.arenas} arenas: 1..64 and at least 2 are possible")
        if not 1 <= config.threads <= config.streams:
            raise ValueError(f"{config.threads} threads for {config.streams} streams")
        self.threads, self.schedule = config.threads, Schedule(config)
        slots = range(config.arenas + 1)
        self.arrays = [_aligned(self.region_bytes(i)) for i in slots]
        self.union = np.zeros(max([self.words(i) for i in slots]), np.uint64)

    cdef int64_t region_bytes(self, uint32_t slot):
        return self.schedule.region_bytes[FC_GRADIENT if slot < <uint32_t>self.config.arenas else FC_PARAMETERS]

    cdef int64_t words(self, uint32_t slot):
        """Of a slot's bitmap."""
        return (self.region_bytes(slot) + 511) // 512 + 1

    cdef int build_slots(self, fc_machine *M) except -1:
        """Of the thread that comes next."""
        cdef uint32_t i
        M.slots = <fc_slot *>zeroed(M.arenas + 1, sizeof(fc_slot))
        self.bitmaps.append([])
        for i in range(M.arenas + 1):
            target = FC_GRADIENT if i < M.arenas else FC_PARAMETERS
            M.region_bytes[target] = self.region_bytes(i)
            M.words[target] = self.words(i)
            cover = np.zeros(M.words[target], np.uint64)
            shown = np.zeros(M.words[target], np.uint64) if self.threads > 1 else cover
            voids = np.zeros(M.words[target], np.uint64)
            self.bitmaps[len(self.bitmaps) - 1].append((cover, shown, voids))
            M.slots[i].voids = <uint64_t *><uintptr_t>voids.ctypes.data
            M.slots[i].data = <uint8_t *><uintptr_t>self.arrays[i].ctypes.data
            M.slots[i].cover = <uint64_t *><uintptr_t>cover.ctypes.data
            M.slots[i].shown = <uint64_t *><uintptr_t>shown.ctypes.data if self.threads > 1 else NULL
            M.slots[i].places = <uint64_t *>zeroed(M.places, sizeof(uint64_t))
            M.slots[i].iteration, M.slots[i].clear = -1, M.words[target]
        return 0

    cdef int let_bursts_end(self) except -1:
        """Whatever threads were doing when this was called, they have done when it returns."""
        cdef uint32_t t
        for t in range(self.threads):
            fc_take(&self.machines[t].lock)
            fc_give(&self.machines[t].lock)
        return 0

    @property
    def clear(self):
        """How many arenas an iteration can take as they are: no thread has to clear its bitmaps first."""
        cdef uint32_t t, i
        found = [0] * self.threads
        for t in range(self.threads):
            for i in range(self.machines[t].arenas):
                slot = &self.machines[t].slots[i]
                found[t] += slot.iteration == -1 and slot.clear == self.machines[t].words[FC_GRADIENT]
        return min(found)

    def region(self, iteration=None):
        """uint8 array of an iteration's gradient region (None: of the parameters), not a copy."""
        return self.arrays[self.slot(iteration)]

    def covered(self, iteration=None):
        """How many cells of 8 bytes of an iteration (None: of the parameters) are there. Counted as they come: O(1), but
        where copies differ, of which two threads may count the same."""
        if self.voids(iteration):
            words = self.words(self.slot(iteration))
            return count_cells(self.bitmap(iteration, 0, words)[:words])
        return int(self.covered_places(iteration).sum()) - self.twice.get(iteration, 0)

    def covered_places(self, iteration=None):
        """int64 array: cells that are there, by CallSpec.place. Where several threads place, a cell that two of them
        placed at the same moment counts twice: missing() knows, and then covered() does. One whose copies differ may be
        taken off by each of them: what lacks nothing counts no less than it has."""
        cdef int64_t i = self.slot(iteration)
        cdef uint32_t t, place
        cdef int64_t[::1] out
        found = np.zeros(self.schedule.places, dtype=np.int64)
        out = found
        for t in range(self.threads):
            if self.holds(t, i, iteration):
                for place in range(self.schedule.places):
                    out[place] += self.machines[t].slots[i].places[place]
        return found

    def missing(self, iteration, int64_t first, int64_t end):
        """int64 array (n, 2): the runs [start, end) of cells within [first, end) that are not there, in order. Cells that
        were counted before the call can be read after it: it waits for every thread's burst to end.

        Reads the bitmaps by words: a region that is complete costs 16 MB of reading for each GB of it and thread."""
        if not 0 <= first <= end <= self.words(self.slot(iteration)) * 64:
            raise IndexError(f"cells {first} to {end} are not all in the region")
        self.let_bursts_end()
        bitmap = self.bitmap(iteration, first // 64, (end + 63) // 64)
        if bitmap is None:
            return np.array([(first, end)] if first < end else [], dtype=np.int64).reshape(-1, 2)
        return missing_cells(bitmap, first, end)

    cdef object bitmap(self, object iteration, int64_t first, int64_t end):
        """The bitmap of what all threads have placed, less what is void: right in words [first, end), until the next call.
        None: nothing."""
        cdef int64_t i = self.slot(iteration)
        cdef list voids = self.voids(iteration)
        held = [kept[i][1] for t, kept in enumerate(self.bitmaps) if self.holds(t, i, iteration)]
        if not held or (len(held) == 1 and not voids):
            return held[0] if held else None
        found = self.union[first:end]
        np.copyto(found, held[0][first:end])
        for shown in held[1:]:
            np.bitwise_or(found, shown[first:end], out=found)
        for void in voids:
            np.bitwise_and(found, ~void[first:end], out=found)
        return self.union

    cdef list voids(self, object iteration):
        """The bitmaps of void cells that are not empty."""
        cdef int64_t i = self.slot(iteration)
        return [
            kept[i][2] for t, kept in enumerate(self.bitmaps)
            if self.holds(t, i, iteration) and self.machines[t].slots[i].voided
        ]

    def complete(self, iteration, int64_t cells):
        """Are all cells of an iteration there, of which there are so many? Asked at every look at the rings: costs as
        much as covered() until it seems so."""
        cdef int64_t i = self.slot(iteration)
        if self.voids(iteration):
            return False  # for good
        covered = self.covered(iteration)
        if self.threads == 1 or covered < cells:
            return covered == cells
        # The bits have the last word: what two threads have placed counts twice before both have shown it. Bits that come
        # while this looks count too late here, never too early.
        held = [kept[i][1] for t, kept in enumerate(self.bitmaps) if self.holds(t, i, iteration)]
        shown = sum(map(count_cells, held))
        there = count_cells(self.bitmap(iteration, 0, self.words(i))[:self.words(i)]) if held else 0
        self.twice[iteration] = max(shown - there, 0)
        return there == cells

    def cells(self, iteration=None):
        """bool array, one per cell of the region: is it there? For tests and tools: a byte for every 8 of the region."""
        cdef int64_t i = self.slot(iteration)
        size = (self.region_bytes(i) + 7) // 8
        bitmap = self.bitmap(iteration, 0, self.words(i))
        if bitmap is None:
            return np.zeros(size, dtype=bool)
        return np.unpackbits(bitmap.view(np.uint8), bitorder="little", count=size).astype(bool)

    def copies(self, iteration=None):
        """(cells whose copies differed, region byte of the first such, bytes compared)."""
        cdef int64_t i = self.slot(iteration)
        cdef uint32_t t
        differ = compared = 0
        first = []
        for t in range(self.threads):
            if self.holds(t, i, iteration):
                slot = &self.machines[t].slots[i]
                differ, compared = differ + slot.copies_differ, compared + slot.compared_bytes
                first += [slot.differ_offset] if slot.copies_differ else []
        return differ, min(first, default=0), compared

    def late(self, iteration=None):
        """Cells that were placed from packets which came after later ones of their connection."""
        cdef int64_t i = self.slot(iteration)
        return sum(self.machines[t].slots[i].late for t in range(self.threads) if self.holds(t, i, iteration))

    def void_cells(self, iteration, int64_t first, int64_t end):
        """int64 array (n, 2): the runs of cells within [first, end) of which two copies differed, in order. missing() has
        them as well."""
        if not 0 <= first <= end <= self.words(self.slot(iteration)) * 64:
            raise IndexError(f"cells {first} to {end} are not all in the region")
        self.let_bursts_end()
        voids = self.voids(iteration)
        if not voids:
            return np.empty((0, 2), np.int64)
        low, high = first // 64, (end + 63) // 64
        there = ~voids[0][low:high]
        for void in voids[1:]:
            np.bitwise_and(there, ~void[low:high], out=there)
        return missing_cells(there, first - 64 * low, end - 64 * low) + 64 * low

    def differences(self):
        """Copies that differed: dicts of stream, flow, psn (all three of the packet that came later), target, iteration,
        offset, bytes (region bytes, whole cells but for the last of a tensor). The newest FC_DIFFERENCES of a thread are
        left out where there are more: void_cells() is complete."""
        cdef uint32_t t
        cdef uint64_t i, n
        cdef fc_difference found[FC_DIFFERENCES]
        out = []
        for t in range(self.threads):
            M = self.machines[t]
            fc_take(&M.lock)
            n = min(M.differed, <uint64_t>FC_DIFFERENCES)
            memcpy(found, M.differences, n * sizeof(fc_difference))
            fc_give(&M.lock)
            for i in range(n):
                one = &found[i]
                out.append({
                    "stream": one.stream * self.threads + t, "flow": one.flow, "psn": one.psn, "target": one.target,
                    "iteration": one.iteration, "offset": one.offset, "bytes": one.bytes,
                })
        return out

    def carriers(self, int64_t iteration, int64_t offset):
        """[(flow, PSN)]: the packets that carry the cell at this byte of an iteration's region reduced, one for each queue
        pair that does. By the schedule alone: a walk over the messages of one iteration for each of them."""
        cdef fc_machine *M = self.machines[0]
        cdef fc_cursor cursor
        cdef fc_sent m
        cdef uint32_t flow
        cdef int64_t wire
        out = []
        for flow in range(M.flows):
            if not M.states[flow].data:
                continue
            first = self.schedule.messages_before(M.states[flow].edge, iteration)
            memset(&m, 0, sizeof(m))
            if not fc_seek(M, &M.states[flow], 0, first, &cursor, &m) and <int64_t>m.number < first:
                continue
            while m.iteration <= iteration:
                if m.iteration == iteration and m.target == FC_GRADIENT and m.content == FC_FINAL and m.packets:
                    wire = _wire_byte(&m, offset) - m.piece
                    if 0 <= wire < m.size:
                        out.append((flow, m.psn + wire // M.mtu))
                if not fc_step_on(M.mtu, &M.edges[M.states[flow].edge], M.states[flow].qp, &cursor, &m):
                    break
        return out

    cdef int64_t slot(self, iteration) except -1:
        return self.config.arenas if iteration is None else <int64_t>iteration % self.config.arenas

    cdef bint holds(self, uint32_t thread, int64_t slot, iteration):
        """Has this thread placed anything of the iteration? Before that its slot is still an older one's."""
        return iteration is None or self.machines[thread].slots[slot].iteration == iteration
