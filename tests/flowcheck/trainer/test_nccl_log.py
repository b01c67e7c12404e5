"""NCCL's log of one process: every version's lines, several communicators, and what contradicts itself.

With FLOWCHECK_NCCL naming a clone of NVIDIA/nccl the formats of nccl_text.py are looked for in the sources.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.errors import UserError
from flowcheck.job.nccl_lines import LINE_MAX
from flowcheck.trainer.nccl.log import Hop, Log, LoggedQueuePair, Tree, parse_log, read_log

from ..job.nccl_text import FORMATS, VERSIONS, Format, Shape, line, printed, text

NEWEST = VERSIONS[-1]


def parsed(*parts: str | bytes) -> Log:
    whole = b"".join(part if isinstance(part, bytes) else part.encode() for part in parts)
    return parse_log(whole.splitlines(keepends=True), "a log")


# -- what is in it --


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version(version: str) -> None:
    log = parsed(text(Shape(), version))
    minor = int(version.split(".")[1])
    assert (log.version, log.process, log.network) == (version, "node-a:101", "IB")
    found = log.communicator(ranks=4, rank=0)
    assert (found.hash, found.channels, found.nodes) == (0x9C41F00DBEEF0001, 2, 4 if minor >= 20 else 0)
    assert found.orders == {0: [0, 2, 1, 3], 1: [0, 2, 1, 3]} and found.rings == {0: (3, 2), 1: (3, 2)}
    assert found.trees == {0: Tree(-1, (2, -1, -1)), 1: Tree(1, (-1, -1, -1))} and not found.cut
    assert found.hops[:2] == [Hop(0, 0, 3, 0, "NET", "IB", 0, -1), Hop(0, 0, 0, 2, "NET", "IB", 0, -1)]
    assert log.queue_pairs == [LoggedQueuePair(n, 0, 1, 4096, 3, "10.0.0.1", True) for n in (1107, 1108)]
    assert log.devices == {0: ("mlx5_0", 1), 1: ("mlx5_1", 1)}
    assert log.environment == {"NCCL_IB_GID_INDEX": "3", "NCCL_BUFFSIZE": "1048576"}
    assert log.buffer_bytes == {"ll": 524288, "ll128": 4915200, "simple": 1048576}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_rank_that_is_not_0_says_neither_version_nor_whole_rings(version: str) -> None:
    log = parsed(text(Shape(rank=1, trees=((-1, -1, -1, 0),)), version))
    assert (log.version, log.communicator(ranks=4, rank=1).orders) == ("", {})
    assert log.communicator(ranks=4, rank=1).rings == {0: (2, 3), 1: (2, 3)}


def test_addresses_of_both_families() -> None:
    log = parsed(text(Shape(queue_pairs=((7, "fe80::aabb:ff:fecc:1"), (8, "192.168.200.17"))), NEWEST))
    assert [one.address for one in log.queue_pairs] == ["fe80::aabb:ff:fecc:1", "192.168.200.17"]


def test_times_before_the_lines() -> None:
    dated = b"".join(b"[2026-11-23 08:00:01] " + one for one in text(Shape(), "2.27.7").splitlines(keepends=True))
    assert parsed(dated).communicator(ranks=4, rank=0) == parsed(text(Shape(), "2.27.7")).communicator(ranks=4, rank=0)


def test_a_version_without_a_prefix() -> None:
    assert parsed("NCCL version 2.22.3+cuda12.4\n").version == "2.22.3"


@pytest.mark.parametrize(("ranks", "version"), [(21, "2.22.3"), (21, "2.23.4"), (64, "2.22.3"), (64, "2.27.7")])
def test_whole_rings_are_cut_by_nccl(ranks: int, version: str) -> None:
    """To 2.22 at twenty ranks without a word; later after 127 bytes."""
    shape = Shape(rings=(tuple(range(ranks)),), trees=((1, -1, -1, -1),))
    found = parsed(text(shape, version)).communicator(ranks=ranks, rank=0)
    assert found.rings == {0: (ranks - 1, 1)}
    whole = version == "2.23.4"
    assert found.orders == ({0: list(range(ranks))} if whole else {})


def test_trees_are_cut_by_nccl() -> None:
    channels = 64
    shape = Shape(rank=100, rings=(tuple(range(2000)),) * channels, trees=((1500, 1501, -1, 1502),))
    found = parsed(text(shape, NEWEST)).communicator(ranks=2000, rank=100)
    assert found.cut and 20 < len(found.trees) < channels and len(found.rings) == channels
    assert set(found.trees.values()) == {Tree(1502, (1500, 1501, -1))}


def test_created_queue_pairs_of_both_ends() -> None:
    made = [printed("created", 30, f"ncclIb{who}", 1, 0, "mlx5_0", 2, 2, number, 0, 7, 0) for who, number in (
        ("SenderQpsCreate", 11), ("ReceiverQpsCreateToRts", 12), ("Somewhere", 13))]
    log = parsed(*map(line, made))
    assert [(one.number, one.sends) for one in log.queue_pairs] == [(11, True), (12, False), (13, None)]


def test_peers_numbers_are_not_taken_for_own() -> None:
    """NCCL 2.20 to 2.26 print the peer's number in the line about enhanced connections."""
    log = parsed(text(Shape(), "2.21.5"))
    assert 77777 not in [one.number for one in log.queue_pairs]


def test_connections_inside_a_host_and_by_another_process() -> None:
    log = parsed(
        line(printed("start", 21, 0x5, 0, 4, 0, 0, 0x10, 0x9)),
        line(printed("shm", 21, 3, 0, 0, 1, 1, "direct", "direct")),
        line("Channel 01/0 : 1[1] -> 0[0] via P2P/CUMEM/read"),
        line(printed("shm", 30, 4, 0, 0, 1, 1)),
        line("Channel 02/0 : 0[0] -> 1[1] via P2P/direct pointer/read"),
        line(printed("pxn", 21, 1, 0, 0, 0, 2, 0, "IB", 3, 1, "/GDRDMA", "/Shared")),
        line("Channel 00/0 : 0[0] -> 2[0] [send] via NET/AWS Libfabric/1/GDRDMA"),
    )
    assert log.communicators[0].hops == [
        Hop(3, 0, 0, 1, "SHM", "", -1, -1), Hop(1, 0, 1, 0, "P2P", "", -1, -1), Hop(4, 0, 0, 1, "SHM", "", -1, -1),
        Hop(2, 0, 0, 1, "P2P", "", -1, -1),
        Hop(1, 0, 0, 2, "NET", "IB", 3, 1), Hop(0, 0, 0, 2, "NET", "AWS Libfabric", 1, -1),
    ]


def test_connections_made_at_the_first_call() -> None:
    """2.22 and later connect from another thread, and the line does not say for which communicator."""
    two = text(Shape(), NEWEST), text(Shape(pointer=0x77, hash=0x8), NEWEST)
    late = line(printed("send", 30, 1, 0, 0, 0, 2, 0, "IB", 0, "/GDRDMA", "", ""), 999)
    one = parsed(two[0], late)
    assert one.communicators[0].hops[-1] == Hop(1, 0, 0, 2, "NET", "IB", 0, -1) and one.hops == []
    both = parsed(*two, late)
    assert both.hops == [Hop(1, 0, 0, 2, "NET", "IB", 0, -1)]


# -- which communicator --


def test_several_communicators() -> None:
    other = replace(Shape(), pointer=0x77, hash=0x8, rings=((0, 1),), trees=((1, -1, -1, -1),))
    log = parsed(text(Shape(), NEWEST), text(other, NEWEST))
    assert log.communicator(ranks=2, rank=0).hash == 0x8 and log.communicator(ranks=4, rank=0).hash != 0x8
    with pytest.raises(UserError, match=r"no communicator could be rank 1 of 4; there are: 0x9c41.* rank 0 of 4; 0x8"):
        log.communicator(ranks=4, rank=1)


def test_two_that_could_be_meant_are_refused_or_told_by_hash() -> None:
    log = parsed(text(Shape(), NEWEST), text(replace(Shape(), pointer=0x77, hash=0x8), NEWEST))
    with pytest.raises(UserError, match="2 communicators could be rank 0 of 4"):
        log.communicator(ranks=4, rank=0)
    assert log.communicator(ranks=4, rank=0, hash=0x8).pointer == "77"


@pytest.mark.parametrize("version", ["2.21.5", "2.22.3", "2.30.7"])
def test_one_that_is_gone_is_not_meant(version: str) -> None:
    minor = int(version.split(".")[1])
    gone = line(printed("gone", minor, Shape().pointer, 0, 4, 0, 0x1000, "Destroy"))
    log = parsed(text(Shape(), version), gone)
    with pytest.raises(UserError, match="there are: none at all"):
        log.communicator(ranks=4, rank=0)
    again = parsed(text(Shape(), version), gone, text(replace(Shape(), hash=0x8), version))
    assert again.communicator(ranks=4, rank=0).hash == 0x8  # at the same address


def test_a_split_has_no_hash() -> None:
    values = ("ncclCommSplit", 0x88, 0, 2, 0, 0, 0x1000, 0x55, 1, 0, 0)
    log = parsed(text(Shape(), NEWEST), line(printed("split", 30, *values)),
                 line(printed("ring", 30, 0, 1, 0, 1)), line(printed("split complete", 30, *values)))
    assert (log.communicator(ranks=2, rank=0).hash, log.communicator(ranks=2, rank=0).rings) == (0, {0: (1, 1)})


def test_one_that_is_not_whole_yet_is_not_meant() -> None:
    log = parsed(text(Shape(), NEWEST).partition(b"- Init COMPLETE")[0].rpartition(b"\n")[0] + b"\n")
    with pytest.raises(UserError, match="there are: none at all"):
        log.communicator(ranks=4, rank=0)


def test_threads_that_make_communicators_at_once() -> None:
    ones = text(Shape(), NEWEST).splitlines(keepends=True)
    other = replace(Shape(), pointer=0x77, hash=0x8, rings=((0, 1),), trees=((1, -1, -1, -1),))
    others = [one.replace(b":140 ", b":141 ") for one in text(other, NEWEST).splitlines(keepends=True)]
    mixed = [one for pair in zip(ones, others, strict=False) for one in pair]
    mixed += ones[len(others):] + others[len(ones):]
    log = parse_log(mixed)
    assert log.communicator(ranks=4, rank=0).rings == {0: (3, 2), 1: (3, 2)}
    assert log.communicator(ranks=2, rank=0).rings == {0: (1, 1)}


# -- what contradicts itself --


RING = line(printed("ring", 30, 0, 3, 0, 2))


@pytest.mark.parametrize(("old", "new", "what"), [
    ("Ring 00 : 3 -> 0 -> 2", "Ring 00 : 3 -> 1 -> 2", "this is rank 0 of 4"),
    ("Ring 00 : 3 -> 0 -> 2", "Ring 00 : 9 -> 0 -> 2", "this is rank 0 of 4"),
    ("Ring 00 : 3 -> 0 -> 2", "Ring 00 : 2 -> 0 -> 3", r"its order is \[0, 2, 1, 3\]"),
    ("Ring 01 : 3 -> 0 -> 2", "Ring 00 : 1 -> 0 -> 2", "another ring 0 than one before it"),
    ("Ring 01 : 3 -> 0 -> 2", "Ring 05 : 3 -> 0 -> 2", "says 2 channels, and 2 rings"),
    ("Ring 01 : 3 -> 0 -> 2", "Ring 99 : 3 -> 0 -> 2", "this is rank 0 of 4"),
    ("Channel 00/02 : 0 2 1 3", "Channel 00/02 : 0 2 1 1", "there are 4 ranks"),
    ("Channel 00/02 : 0 2 1 3", "Channel 02/02 : 0 2 1 3", "there are 4 ranks"),
    ("Channel 00/02 : 0 2 1 3", "Channel 00/04 : 0 2 1 3", "says 2 channels, and one before it 4"),
    ("Channel 01/02 : 0 2 1 3", "Channel 00/02 : 0 1 2 3", "another order of channel 0"),
    ("Trees [0] 2/-1/-1->0->-1", "Trees [0] 2/-1/-1->1->-1", "this is rank 0 of 4"),
    ("Trees [0] 2/-1/-1->0->-1", "Trees [0] 7/-1/-1->0->-1", "this is rank 0 of 4"),
    ("Trees [0] 2/-1/-1->0->-1", "Trees [1] 2/-1/-1->0->-1", "another tree 1"),
    ("Trees [0] 2/-1/-1->0->-1", "Trees [0] what->0", "a tree that is none"),
    ("2 coll channels", "3 coll channels", "says 3 channels, and 2 rings"),
    ("rank 0 nranks 4 cudaDev", "rank 4 nranks 4 cudaDev", "has rank 4 of 4"),
    ("- Init COMPLETE", "- Init START", "begins communicator 55d0c0ffee00, which one before it has begun"),
    ("0[0] -> 2[0] [send]", "1[0] -> 2[0] [send]", "this is rank 0 of 4"),
    ("0[0] -> 2[0] [send] via NET/IB/0", "0[0] -> 2[0] [send] via NET/IB/x", "without its device"),
    ("qp_num 1107", "qp_num 16777216", "queue pair number 16777216"),
])
def test_contradictions(old: str, new: str, what: str) -> None:
    whole = text(Shape(), NEWEST).decode()
    assert old in whole
    with pytest.raises(UserError, match=what) as refused:
        parsed(whole.replace(old, new, 1))
    assert re.match(r"a log: line \d+ ", str(refused.value))


def test_another_end_of_it_contradicts() -> None:
    whole = text(Shape(), NEWEST).decode()
    other = whole.rpartition("commId 0x9c41f00dbeef0001")
    with pytest.raises(UserError, match="commId 0x7, and communicator 55d0c0ffee00 had 0x9c41f00dbeef0001"):
        parsed(other[0] + "commId 0x7" + other[2])
    other = whole.rpartition("rank 0 nranks 4")
    with pytest.raises(UserError, match="rank 1 of 4, and communicator 55d0c0ffee00 had 0 of 4"):
        parsed(other[0] + "rank 1 nranks 4" + other[2])
    with pytest.raises(UserError, match="says 5 nodes, and one before it 4"):
        parsed(whole, line(printed("nodes", 30, Shape().pointer, 0, 4, 5, 1, 0, 0)))


def test_two_versions_or_processes_contradict() -> None:
    with pytest.raises(UserError, match=r"names NCCL 2\.27\.7, and one before it 2\.19\.4"):
        parsed("NCCL version 2.19.4+cuda12\n", line("NCCL version 2.27.7+cuda12"))
    with pytest.raises(UserError, match="is of node-b:7, and those before are of node-a:101"):
        parsed(RING, line("x", process="node-b:7"))


def test_buffers_that_are_no_sizes() -> None:
    for value in ("0", "-5", "4M", "9" * 13):
        with pytest.raises(UserError, match="NCCL_BUFFSIZE is"):
            parsed(line(f"NCCL_BUFFSIZE set by environment to {value}.")).buffer_bytes  # noqa: B018
    unset = parsed(line("NCCL_BUFFSIZE set by environment to -2."))
    assert unset.buffer_bytes["simple"] == 4194304


# -- files --


def test_a_file_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    whole = text(Shape(), NEWEST)
    for length in range(0, len(whole), 61):
        path.write_bytes(whole[:length])
        if b"\n" not in whole[:length]:
            with pytest.raises(UserError, match="no line of NCCL's is in it"):
                read_log(path)
        else:
            assert len(read_log(path).communicators) == (whole[:length].rpartition(b"\n")[0].count(b"Init START"))


@pytest.mark.parametrize(("content", "what"), [
    (b"", "no line of NCCL's is in it"),
    (b"hello\n" * 100, "no line of NCCL's is in it"),
    (RING.encode() + b"\0\n", "line 2 has a zero byte"),
    (RING.encode() + b"x" * (LINE_MAX + 1) + b"\n", f"line 2 has more than {LINE_MAX} bytes"),
])
def test_files_that_are_no_logs(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "nccl.log"
    path.write_bytes(content)
    with pytest.raises(UserError, match=what) as refused:
        read_log(path)
    assert str(refused.value).startswith(f"{path}: ")


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path, tmp_path / "a\0b"):
        with pytest.raises(UserError, match="cannot read NCCL's log"):
            read_log(path)


def test_a_line_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    with path.open("wb") as stream:  # a hole: the file takes no room
        stream.write(RING.encode())
        stream.truncate(1 << 30)
    with pytest.raises(UserError, match=f"line 2 has more than {LINE_MAX} bytes"):
        read_log(path)


PIECES = [one.partition(" NCCL INFO ")[2].rstrip("\n") for one in text(Shape(), NEWEST).decode().splitlines()]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(
    st.binary(max_size=60), st.sampled_from(text(Shape(), NEWEST).splitlines()),
    st.builds(lambda piece, at, new: line(piece[:at] + new + piece[at:]).encode(),
              st.sampled_from(PIECES), st.integers(0, 60), st.sampled_from(["", "9", "-", "x", " ", "]", "\x00", "é"])),
), max_size=20))
def test_any_lines(lines: list[bytes]) -> None:
    try:
        log = parse_log([one.replace(b"\n", b" ") + b"\n" for one in lines])
    except UserError as error:
        assert error.where == "NCCL's log" and error.remedy
        return
    for one in log.communicators:
        assert 0 <= one.rank < one.ranks
        for order in one.orders.values():
            assert sorted(order) == list(range(one.ranks))


# -- the sources --


def released(minor: int) -> str:
    (version,) = [one for one in VERSIONS if one.split(".")[1] == str(minor)]
    return f"v{version}-1"


@pytest.mark.parametrize("wanted", FORMATS, ids=lambda one: f"{one.name} 2.{one.first}-2.{one.last}")
def test_the_formats_are_nccls(wanted: Format) -> None:
    clone = os.environ.get("FLOWCHECK_NCCL")
    if not clone:
        pytest.skip("FLOWCHECK_NCCL names no clone of NVIDIA/nccl")
    for minor in range(wanted.first, wanted.last + 1):
        shown = subprocess.run(["git", "-C", clone, "show", f"{released(minor)}:{wanted.file}"], capture_output=True)
        source = re.sub(r'"\s*\n?\s*"', "", shown.stdout.decode("utf-8", "replace"))
        assert re.sub(r"\s+", " ", wanted.c) in re.sub(r"\s+", " ", source), f"2.{minor}"
