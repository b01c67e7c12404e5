"""What has been placed: the arenas of a job, which its placing threads share, and each thread's coverage of them.

Engine (machine.pyx) is an Arenas that takes packets. What is read of an iteration before close() has returned is as of
some moment, and final after it; what retired is readable until the next one retires. parser/include/cover.h: bitmaps.
Thread rule: as Engine's.
"""

import numpy as np

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t

from parser.machine cimport FC_GRADIENT, FC_PARAMETERS, fc_give, fc_machine, fc_slot, fc_take
from parser.schedule cimport Schedule, zeroed

from parser.cover import count as count_cells, missing as missing_cells


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
        self.union = np.zeros(max([self.words(i) for i in slots]), np.uint64) if self.threads > 1 else None

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
            self.bitmaps[len(self.bitmaps) - 1].append((cover, shown))
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
        """How many cells of 8 bytes of an iteration (None: of the parameters) are there. Counted as they come: O(1)."""
        return int(self.covered_places(iteration).sum()) - self.twice.get(iteration, 0)

    def covered_places(self, iteration=None):
        """int64 array: cells that are there, by CallSpec.place. Where several threads place, a cell that two of them
        placed at the same moment counts twice: missing() knows, and then covered() does."""
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
        """The bitmap of what all threads have placed: right in words [first, end), until the next call. None: nothing."""
        cdef int64_t i = self.slot(iteration)
        held = [kept[i][1] for t, kept in enumerate(self.bitmaps) if self.holds(t, i, iteration)]
        if len(held) < 2:
            return held[0] if held else None
        np.copyto(self.union[first:end], held[0][first:end])
        for shown in held[1:]:
            np.bitwise_or(self.union[first:end], shown[first:end], out=self.union[first:end])
        return self.union

    def complete(self, iteration, int64_t cells):
        """Are all cells of an iteration there, of which there are so many? Asked at every look at the rings: costs as
        much as covered() until it seems so."""
        cdef int64_t i = self.slot(iteration)
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

    cdef int64_t slot(self, iteration) except -1:
        return self.config.arenas if iteration is None else <int64_t>iteration % self.config.arenas

    cdef bint holds(self, uint32_t thread, int64_t slot, iteration):
        """Has this thread placed anything of the iteration? Before that its slot is still an older one's."""
        return iteration is None or self.machines[thread].slots[slot].iteration == iteration
