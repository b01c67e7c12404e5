"""Chunk layouts where only the depth of the tree or the version decides. Numbers: NCCL's wire format, 7.3, by hand."""

import pytest

from parser.chunk_layout import Protocol, Topology, UnsupportedCall, channel_split, segments, threads_and_channels
from parser.nccl import of
from parser.trees import tree_of
from parser.wire import CallPlan, plan_call

# -- trees --------------------------------------------------------------------------------------------

DEPTHS = {2: 1, 3: 1, 4: 2, 5: 2, 6: 2, 7: 2, 8: 3, 9: 3, 12: 3, 15: 3, 16: 4, 17: 4}  # floor(log2 ranks)


def tree(version: str, ranks: int, channels: int, protocol: Protocol, nbytes: int) -> CallPlan:
    """A call of fp32 elements."""
    topology = Topology(version, ranks, channels, (tuple(range(ranks)),))
    return plan_call(topology, "AllReduce", protocol, nbytes // 4, 4, algorithm="tree")


def test_the_second_half_of_the_channels_uses_the_second_tree() -> None:
    assert {n: [tree_of(n, channel) for channel in range(n)] for n in (1, 2, 4)} == {1: [0], 2: [0, 1], 4: [0, 0, 1, 1]}
    for channels in (3, 5, 31):
        with pytest.raises(UnsupportedCall):
            tree_of(channels, 0)


def chunk(plan: CallPlan) -> int:
    """Bytes of a whole chunk of the first channel."""
    return 4 * plan.segments[0][0].chunk


@pytest.mark.parametrize(("ranks", "depth"), DEPTHS.items())
def test_chunks_of_simple_trees_of_2_19_depend_on_the_depth(ranks: int, depth: int) -> None:
    """512 KiB, halved while the bytes are fewer than 8 (then 4, then 1) chunks for each channel and level."""
    levels = 2 * depth  # two channels
    for least, below, whole in (
        (524288 * 8, 262144, 524288), (262144 * 8, 131072, 262144), (131072 * 4, 65536, 131072), (65536, 32768, 65536),
    ):
        assert chunk(tree("2.19.4", ranks, 2, Protocol.SIMPLE, levels * least)) == whole
        assert chunk(tree("2.19.4", ranks, 2, Protocol.SIMPLE, levels * least - 4)) == below


@pytest.mark.parametrize(("ranks", "depth"), DEPTHS.items())
@pytest.mark.parametrize(("version", "step"), [("2.19.4", 614400), ("2.22.3", 576000), ("2.27.7", 576000)])
def test_chunks_of_ll128_trees_depend_on_the_depth(version: str, step: int, ranks: int, depth: int) -> None:
    """Halved while the bytes are fewer than 64 chunks for each level, one more and a tenth."""
    least = step * 64 * (10 * depth + 11) // 10
    assert chunk(tree(version, ranks, 1, Protocol.LL128, least + 4096)) == 576000
    assert chunk(tree(version, ranks, 1, Protocol.LL128, least - 4096)) == 288000


@pytest.mark.parametrize("ranks", DEPTHS)
def test_chunks_of_simple_trees_of_later_versions_do_not(ranks: int) -> None:
    assert chunk(tree("2.27.7", ranks, 1, Protocol.SIMPLE, 1 << 20)) == 524288


@pytest.mark.parametrize(("version", "threads"), [("2.19.4", 640), ("2.21.5", 640), ("2.22.3", 640), ("2.27.7", 640)])
@pytest.mark.parametrize("protocol", [Protocol.LL128, Protocol.SIMPLE])
def test_threads_of_large_trees(version: str, threads: int, protocol: Protocol) -> None:
    assert threads_and_channels(Topology(version, 4, 2, ((0, 1, 2, 3),)), "tree", protocol, 1 << 28) == (2, threads)


@pytest.mark.parametrize(("version", "threads"), [("2.19.4", 512), ("2.21.5", 512), ("2.22.3", 640), ("2.27.7", 640)])
def test_threads_of_ll_trees_are_640_from_2_22_on(version: str, threads: int) -> None:
    topology = Topology(version, 4, 2, ((0, 1, 2, 3),))
    assert threads_and_channels(topology, "tree", Protocol.LL, 1 << 28) == (2, threads)


# -- rings --------------------------------------------------------------------------------------------


def test_each_channel_has_its_own_ring_or_all_have_one() -> None:
    rings = ((0, 1, 2), (0, 2, 1))
    assert [Topology("2.27.7", 3, 2, rings).ring(channel) for channel in range(2)] == [(0, 1, 2), (0, 2, 1)]
    assert [Topology("2.27.7", 3, 2, rings[1:]).ring(channel) for channel in range(2)] == [(0, 2, 1), (0, 2, 1)]


def test_the_first_channel_is_skipped_where_its_part_would_be_less_than_a_cell() -> None:
    """2.22 alone: an AllGather of 64 ranks. A cell is 16 bytes; its traffic of 1024 is more than a channel's 960."""
    assert channel_split(of("2.22.3").chunks, Protocol.SIMPLE, 30, 1, 2, 4, 64) == [(0, 0), (0, 16), (16, 14), (0, 0)]


def test_a_last_chunk_that_would_not_fit_into_its_step_is_refused() -> None:
    """Before 2.22 it is rounded up to what the threads take at once; buffers far below their defaults are too small."""
    topology = Topology("2.20.5", 2, 1, ((0, 1),), slot_bytes=(64, 614400, 524288))
    with pytest.raises(UnsupportedCall, match="would not fit into a step's buffer of 8"):
        segments(topology, "AllReduce", "ring", Protocol.LL, 4, 4, 1, 512)
