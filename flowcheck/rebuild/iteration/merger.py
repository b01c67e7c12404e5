"""The merger: several streams in, one arena of cells out, and what filled it.

    filled(engine, iteration, cells, given)  ->  {"stream": 5990, "retransmission": 2, "peer": 8}
                                                 cells of 8 bytes, by source
    healed(elements, place)                  ->  cells that the trainer's own state stands for

Contract. All streams of a node fill one arena per iteration, and every packet with reduced bytes goes through the same
checks, whichever it comes over (parser/include/machine.h). Of each cell:

    the first copy        is placed, once a witness agrees with its packet's place and its ICRC is right
    a later one           is compared, all of it, and never written
    one that differs      makes the cell void for the rest of the iteration: a hole, whatever comes later
    none                  a hole; final once nothing more can come (holes.py). Then peers are asked, and what
                          they give is compared in the same way (given.py); what they leave, trainers give

A cell counts for the source that placed it, so the sum over `stream`, `retransmission` and `peer` is the number of
cells that came. Those that became void later are among them.

    stream           its packet came in the order in which it was sent, over some stream
    retransmission   its packet came after later ones of the same connection: the link repeated it, or the mirror's path
                     mixed the order. Another stream may have filled it before; then it is that stream's
    peer             another node that mirrors the same group had it
    feed             the trainer has sent it itself (fed_arenas.py); no stream brings anything of such a job
    trainer          of elements whose gradients were lost the trainer has sent its own state, which is in this
                     iteration's version: so many cells their gradients take. They were lost in it or in ones before

Where it is done: parser/src/arena.c places and compares, parser/src/differ.c voids, for any number of placing threads
(decision 0012). Here it is only counted, from the engine's books, when an iteration has closed.
"""

from __future__ import annotations

import numpy as np
from parser.machine import Engine

from flowcheck.job.model import dtype_size
from flowcheck.rebuild.iteration.given import CELL, NOTHING, Given
from flowcheck.rebuild.plan import BucketPlace

__all__ = ["SOURCES", "filled", "healed"]

SOURCES = ("stream", "retransmission", "peer", "trainer", "feed")


def filled(engine: Engine, iteration: int, cells: int, given: Given = NOTHING) -> dict[str, int]:
    """Cells of an iteration that has closed, by the source that filled them; only sources that occur, and only
    the first three. cells: how many the region has. given: by peers."""
    void = engine.void_cells(iteration, 0, cells)
    came = engine.covered(iteration) + int(np.diff(void, axis=1).sum())
    late = min(engine.late(iteration), came)
    counts = came - late, late, sum(given.cells.values())
    return {source: count for source, count in zip(SOURCES, counts, strict=False) if count}


def healed(elements: int, place: BucketPlace) -> int:
    """Cells that so many elements of a bucket take."""
    return -(-elements * dtype_size(place.dtype) // CELL)
