"""Whether the manifest's ranks, channels and version are contradicted, confirmed, or rest on its word alone."""

import pytest

from flowcheck.job.model import Collective
from flowcheck.rebuild.iteration.rank_confirmation import contradiction, on_trust, other_version
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import example_job
from parser.nccl import CTS_ELEMENTS, of

RANKS = "ranks of the flows: as the manifest says, nothing in the captures confirms them"
CHANNELS = "channels 0 and 1: as the manifest says, both carry the same sizes"


def plan(parent_ranks: list[int] | None = None, broadcast: bool = False, **job: object) -> JobPlan:
    """Two ranks whose two edges carry the same sizes, unless `job` says otherwise. broadcast: before, from rank 0: then
    the edge that leads to rank 0 carries less than the others."""
    settings = {"ranks": 2, "count": 4096, "protocol": "simple", "startup": broadcast, "rebuild": False}
    described = example_job(**{**settings, **job})
    described.communicator.parent_ranks = parent_ranks or []
    for number, flow in enumerate(described.flows):
        flow.qpns = [0x11 + number]
    return plan_job(described)


def edges(of: JobPlan) -> list[tuple[int, int, int]]:
    return [(edge.channel, edge.src, edge.dst) for edge in of.engine.edges]


# -- contradiction --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tags", [
    {},
    {0: 0, 1: 1},  # as the manifest says
    {0: 0, 1: 0},  # receivers that never set a tag send 0 for everybody
    {1: 0},  # perhaps not set
    {1: 1},  # one edge, and right
])
def test_tags_that_contradict_nothing(tags: dict[int, int]) -> None:
    assert contradiction(plan(), tags) == ""


def test_exchanged_ranks_are_named_with_their_values() -> None:
    assert contradiction(plan(), {0: 1, 1: 0}) == (
        "the receiver of channel 0, rank 0 -> 1 (QP 0x11) calls its sender rank 1, the manifest says 0: correct the "
        "ranks of the flows, or, for a communicator split from a larger one, list its members there in "
        "communicator.parent_ranks"
    )


@pytest.mark.parametrize(("tags", "named"), [
    ({0: 1}, "rank 0 -> 1 (QP 0x11) calls its sender rank 1, the manifest says 0"),  # one edge: 0 would be no tag
    ({1: 5}, "rank 1 -> 2 (QP 0x12) calls its sender rank 5, the manifest says 1"),
    ({0: 0, 1: 1, 2: 3}, "rank 2 -> 0 (QP 0x13) calls its sender rank 3, the manifest says 2"),  # the last of three
    ({0: 2, 1: 1}, "rank 0 -> 1 (QP 0x11) calls its sender rank 2, the manifest says 0"),  # the first
    ({1: 2, 2: 1}, "rank 1 -> 2 (QP 0x12) calls its sender rank 2, the manifest says 1"),
])
def test_one_wrong_tag_is_enough(tags: dict[int, int], named: str) -> None:
    assert f"the receiver of channel 0, {named}:" in contradiction(plan(ranks=3), tags)


def test_one_sender_on_two_channels_is_still_one_sender() -> None:
    two = plan(channels=2)
    assert edges(two)[1::2] == [(0, 1, 0), (1, 1, 0)]
    assert contradiction(two, {1: 0, 3: 0}) == ""  # not set
    assert "calls its sender rank 7" in contradiction(two, {1: 7, 3: 7})
    assert contradiction(two, {1: 1, 3: 1}) == ""


def test_equal_tags_of_several_senders_say_nothing() -> None:
    assert contradiction(plan(), {0: 1, 1: 1}) == ""


def test_a_split_communicators_tags_are_in_its_parents_numbering() -> None:
    split = plan([6, 4])
    assert contradiction(split, {0: 6, 1: 4}) == ""
    assert "calls its sender rank 0, the manifest says 6" in contradiction(split, {0: 0, 1: 1})
    assert "rank 1 -> 0 (QP 0x12) calls its sender rank 1, the manifest says 4" in contradiction(split, {0: 6, 1: 1})


# -- other version --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "seen", "why"), [
    ("2.19.4", {"2.19.4": 5}, ""),
    ("2.20.5", {"2.20.5": 5}, ""),
    ("2.19.4", {}, ""),  # none was seen
    ("2.19.4", {"2.19.4": 1, "2.20.5": 5}, ""),  # some are as they should be
    ("2.20.5", {"2.19.4": 5, "2.20.5": 1}, ""),
    ("2.23.4", {"2.20.5": 5}, ""),  # the same form
    ("2.19.4", {"2.20.5": 1}, "of 64 bytes, as of NCCL 2.20-2.23; the manifest says 2.19.4"),
    ("2.20.5", {"2.19.4": 1}, "of 32 bytes, as of NCCL 2.12-2.19; the manifest says 2.20.5"),
    ("2.23.4", {"2.24.3": 3}, "whose fields lie elsewhere, as of NCCL 2.24-2.29; the manifest says 2.23.4"),
    ("2.27.7", {"2.30.7": 3}, "whose fields lie elsewhere, as of NCCL 2.30; the manifest says 2.27.7"),
    ("2.19.4", {"2.20.5": 2, "2.24.3": 3}, "of 64 bytes, as of NCCL 2.24-2.29; the manifest says 2.19.4"),
    ("2.19.4", {"2.20.5": 3, "2.30.7": 3}, "of 64 bytes, as of NCCL 2.20-2.23 or 2.30; the manifest says 2.19.4"),
])
def test_the_form_of_the_clear_to_send_tells_the_version(version: str, seen: dict[str, int], why: str) -> None:
    forms = {of(of_version).cts: count for of_version, count in seen.items()}
    expected = f"clear-to-send writes {why}: correct nccl_version" if why else ""
    assert other_version(plan(version=version), dict.fromkeys(CTS_ELEMENTS, 0) | forms, []) == expected


def immediates(*pairs: tuple[int, int]) -> list[dict[str, object]]:
    return [{"kind": "immediate", "expected": expected, "found": found} for expected, found in pairs]


@pytest.mark.parametrize(("version", "found", "why"), [
    ("2.27.7", [(8192, 0x200000)], "big-endian immediates, as of NCCL 2.29-2.30; the manifest says 2.27.7"),
    ("2.30.7", [(8192, 0x200000), (16, 0x10000000)],
     "little-endian immediates, as of NCCL 2.12-2.28; the manifest says 2.30.7"),
    ("2.27.7", [], ""),
    ("2.27.7", [(8192, 4096)], ""),  # another size
    ("2.27.7", [(8192, 0x200000), (8192, 4096)], ""),  # not the order alone
])
def test_the_order_of_the_immediates_tells_the_version(version: str, found: list[tuple[int, int]], why: str) -> None:
    said = [*immediates(*found), {"kind": "flag", "expected": 1, "found": 2}]
    assert other_version(plan(version=version), {}, said) == (f"{why}: correct nccl_version" if why else "")


def test_form_and_order_are_both_said() -> None:
    seen = plan(version="2.27.7"), {of("2.30.7").cts: 4}, immediates((8192, 0x200000))
    assert other_version(*seen).startswith(
        "clear-to-send writes whose fields lie elsewhere and big-endian immediates, as of NCCL 2.30; the"
    )
    assert ", as of no NCCL that is known; the" in other_version(seen[0], {of("2.19.4").cts: 4}, seen[2])


# -- on trust: ranks ------------------------------------------------------------------------------------


def test_ranks_of_a_ring_with_equal_chunks_rest_on_trust() -> None:
    assert on_trust(plan(), [0, 1], {}) == [RANKS]


@pytest.mark.parametrize(("tags", "marks"), [
    ({0: 0, 1: 1}, []),  # confirmed
    ({0: 0, 1: 0}, [RANKS]),  # receivers that set no tag
    ({0: 1, 1: 0}, [RANKS]),  # refuted, which confirms nothing
])
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_only_right_tags_confirm_the_ranks(algorithm: str, tags: dict[int, int], marks: list[str]) -> None:
    assert on_trust(plan(algorithm=algorithm), [0, 1], tags) == marks


def test_sizes_that_differ_confirm_the_ranks_of_a_ring() -> None:
    assert on_trust(plan(count=4097), [0, 1], {}) == []
    assert on_trust(plan(broadcast=True), [0, 1], {}) == []


def test_ranks_of_a_tree_rest_on_trust_whatever_its_sizes_are() -> None:
    """Up and down edges carry the same: only the names tell sums from results."""
    for tree in (plan(ranks=4, algorithm="tree"), plan(ranks=4, algorithm="tree", broadcast=True, count=4097)):
        assert on_trust(tree, range(len(tree.engine.edges)), {}) == [RANKS]
        assert on_trust(tree, [], {}) == [RANKS]


def test_nothing_is_said_of_a_ring_that_nobody_saw() -> None:
    assert on_trust(plan(), [], {}) == []


@pytest.mark.parametrize(("ranks", "seen", "marks"), [
    # rank 0 broadcasts: the last edge, into rank 0, carries less than the others
    (4, [0, 1, 2, 3], []),
    (4, [0], [RANKS]),  # by one place: like 1 -> 2
    (4, [2], [RANKS]),  # by two places: like 0 -> 1
    (3, [1], [RANKS]),  # by two places of three, the most there are
    (4, [3], []),  # like no other
    (4, [0, 1], [RANKS]),  # by one place
    (4, [0, 2], [RANKS]),  # by two places, which exchanges them
    (4, [1, 2], [RANKS]),  # by three places
    (4, [0, 1, 2], []),  # one of them would become the last edge, whatever the turn
])
def test_what_was_seen_decides_whether_ranks_could_be_turned(ranks: int, seen: list[int], marks: list[str]) -> None:
    assert on_trust(plan(ranks=ranks, count=12288, broadcast=True, protocol="ll"), seen, {}) == marks


def test_ranks_are_turned_along_each_channels_own_ring() -> None:
    two = plan(ranks=4, channels=2, count=1 << 21, rings=[[0, 1, 2, 3], [0, 2, 1, 3]])
    first, second = ([i for i, edge in enumerate(edges(two)) if edge[0] == channel] for channel in (0, 1))
    assert on_trust(two, first, {}) == [RANKS]
    assert on_trust(two, second, {}) == [RANKS]
    assert on_trust(two, first + second, {}) == [RANKS, CHANNELS]  # 3 -> 0 is an edge of both


# -- on trust: channels ---------------------------------------------------------------------------------


def test_channels_of_equal_sizes_rest_on_trust_even_where_tags_confirm_the_ranks() -> None:
    two = plan(channels=2, count=1 << 20)
    assert edges(two) == [(0, 0, 1), (0, 1, 0), (1, 0, 1), (1, 1, 0)]
    assert on_trust(two, [0, 1, 2, 3], {0: 0, 1: 1}) == [CHANNELS]
    assert on_trust(two, [1, 3], {0: 0, 1: 1}) == [CHANNELS]


def test_one_pair_of_channels_is_named() -> None:
    three = plan(channels=3, count=3 << 20)
    assert on_trust(three, range(6), {0: 0, 1: 1}) == [CHANNELS]
    assert on_trust(three, [2, 4], {0: 0, 1: 1, 2: 0}) == [CHANNELS.replace("0 and 1", "1 and 2")]


@pytest.mark.parametrize("seen", [[0], [0, 1], [0, 3], [1, 2]])
def test_one_channel_of_each_direction_is_not_two_alike(seen: list[int]) -> None:
    assert on_trust(plan(channels=2, count=1 << 20), seen, {0: 0, 1: 1}) == []


def test_channels_of_other_sizes_confirm_each_other() -> None:
    assert on_trust(plan(channels=2, count=1_000_001), [0, 1, 2, 3], {0: 0, 1: 1}) == []


def test_channels_that_carry_nothing_are_not_alike() -> None:
    few = plan(channels=3, count=64)  # too few elements for a second channel
    assert on_trust(few, range(6), {0: 0, 1: 1}) == []


# -- more messages than are compared --------------------------------------------------------------------


@pytest.mark.parametrize(("count", "marks"), [
    (409_597_953, []),  # 50000 messages in a call, and the last ones differ
    ((1 << 31) + 1, [RANKS]),  # more are not listed: likeness is assumed
])
def test_an_edge_of_very_many_messages_counts_as_alike(count: int, marks: list[str]) -> None:
    assert on_trust(plan(count=count, protocol="ll"), [0, 1], {}) == marks


@pytest.mark.parametrize(("count", "marks"), [(1 << 20, []), (1 << 31, [RANKS])])
def test_one_edge_of_very_many_messages_is_enough(count: int, marks: list[str]) -> None:
    """A broadcast that leads away from rank 0 alone: 128 messages, or 262144."""
    described = example_job(ranks=2, count=4096, protocol="ll", rebuild=False)
    described.collectives.startup = [Collective("Broadcast", count, "float32", carries="other")]
    assert on_trust(plan_job(described), [0, 1], {}) == marks
