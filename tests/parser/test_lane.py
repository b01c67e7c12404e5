"""The messages of a lane, spelt out: element ranges, wire bytes, what is final, where a half begins.

By hand from the reference (sections 2.2, 2.7, 4.1, 4.2, 7.2, 8.1, 8.2), for lanes small enough to follow.
"""

from __future__ import annotations

import pytest

from parser import lane
from parser.chunk_layout import Protocol, Segment
from parser.nccl import WireError
from parser.wire import Kind, Lane

ORDER = (2, 0, 3, 1)


def ring(kind: Kind = Kind.RING_ALLREDUCE, *, protocol: Protocol = Protocol.LL, index: int = 1, ranks: int = 4,
         slices: int = 1, floor: int = 0, block: int = 0, segments: tuple[Segment, ...]) -> Lane:
    return Lane(
        kind=kind, protocol=protocol, elem_bytes=4, ranks=ranks, index=index, slices=slices, step_inc=1, step_align=1,
        slot_bytes=1 << 16, slice_floor=floor, block=block, order=ORDER[:ranks] if ranks == 4 else tuple(range(ranks)),
        segments=segments,
    )


def segment(base: int, chunk: int, limit: int, loops: int = 1, ranks: int = 4) -> Segment:
    return Segment(base=base, loop_stride=ranks * chunk, chunk_stride=chunk, chunk=chunk, limit=limit, loops=loops)


def ranges(one: Lane) -> list[tuple[int, int, bool]]:
    return [(first, count, final) for first, count, _, final, _ in lane.messages(one)]


def test_a_ring_sends_partial_sums_then_reduced_chunks() -> None:
    """Place 1 of 4: chunks 0, 3, 2 as partial sums, then 1, 0, 3 reduced."""
    found = list(lane.messages(ring(segments=(segment(0, 10, 40),))))
    assert found == [
        (0, 10, 80, False, False), (30, 10, 80, False, False), (20, 10, 80, False, False),
        (10, 10, 80, True, True), (0, 10, 80, True, True), (30, 10, 80, True, True),
    ]


def test_the_last_chunk_is_what_is_left_and_an_empty_one_is_empty() -> None:
    assert ranges(ring(segments=(segment(0, 10, 25),))) == [
        (0, 10, False), (30, 0, False), (20, 5, False), (10, 10, True), (0, 10, True), (30, 0, True),
    ]


def test_loops_and_a_tail_of_its_own() -> None:
    """Two loops of 2 x 8, then a tail of 2 x 3 from element 32 on: the tail counts its loops from 0."""
    one = ring(ranks=2, index=0, segments=(segment(0, 8, 32, loops=2, ranks=2), segment(32, 3, 37, ranks=2)))
    assert ranges(one) == [
        (8, 8, False), (0, 8, True), (24, 8, False), (16, 8, True), (35, 2, False), (32, 3, True),
    ]


@pytest.mark.parametrize(
    ("count", "floor", "parts"),
    [(100, 0, (64, 36)), (64, 0, (32, 32)), (33, 0, (32, 1)), (5, 0, (5, 0)), (100, 80, (80, 20)), (50, 80, (50, 0))],
)
def test_two_slices_are_cut_on_sixteen_elements(count: int, floor: int, parts: tuple[int, int]) -> None:
    one = ring(protocol=Protocol.SIMPLE, ranks=2, index=0, slices=2, floor=floor,
               segments=(segment(0, count, 2 * count, ranks=2),))
    sent = ranges(one)
    assert [n for _, n, _ in sent] == [*parts, *parts]
    assert [first for first, _, _ in sent] == [count, count + parts[0], 0, parts[0]]
    assert [final for _, _, final in sent] == [False, False, True, True]


def test_an_allgather_sends_blocks_by_rank() -> None:
    """Place 1 of the ring 2 0 3 1 is rank 0; it sends on the blocks of ranks 0, 2 and 1. A ReduceScatter sends none."""
    segments = (Segment(base=0, loop_stride=6, chunk_stride=0, chunk=6, limit=6, loops=1),)
    assert ranges(ring(Kind.RING_ALLGATHER, block=100, segments=segments)) == [
        (0, 6, True), (200, 6, True), (100, 6, True),
    ]
    assert ranges(ring(Kind.RING_REDUCESCATTER, block=100, segments=segments)) == [
        (200, 6, False), (100, 6, False), (300, 6, False),
    ]


@pytest.mark.parametrize(
    ("kind", "final"), [(Kind.TREE_UP, False), (Kind.TREE_DOWN, True), (Kind.RING_BROADCAST, True)]
)
def test_trees_and_broadcasts(kind: Kind, final: bool) -> None:
    segments = (Segment(base=4, loop_stride=6, chunk_stride=0, chunk=6, limit=13, loops=2),)
    assert ranges(ring(kind, segments=segments)) == [(4, 6, final), (10, 3, final)]


@pytest.mark.parametrize(
    ("protocol", "sizes"),
    [
        (Protocol.LL, {1: 16, 2: 16, 3: 32, 240: 1920, 480: 3840, 481: 3856}),
        (Protocol.LL128, {1: 2048, 479: 2048, 480: 2048, 481: 4096, 960: 4096, 961: 6144}),
        (Protocol.SIMPLE, {1: 4, 480: 1920, 481: 1924}),
    ],
)
def test_bytes_on_the_wire(protocol: Protocol, sizes: dict[int, int]) -> None:
    """LL doubles whole cells of 8 bytes; LL128 sends 2048 bytes for every 1920 begun."""
    for count, wire in sizes.items():
        one = ring(protocol=protocol, ranks=2, index=0, segments=(segment(0, count, 2 * count, ranks=2),))
        assert [message[2] for message in lane.messages(one)] == [wire, wire]


@pytest.mark.parametrize("segments", [0, 3])
def test_a_lane_has_one_or_two_segments(segments: int) -> None:
    with pytest.raises(WireError, match=f"one or two segments, not {segments}"):
        list(lane.messages(ring(segments=(segment(0, 10, 40),) * segments)))
