"""NCCL's log lines as NCCL 2.19 to 2.28 print them, and text that is anything else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.errors import UserError
from flowcheck.learning.captures import read_logs
from flowcheck.learning.logs import merge, parse_log

from ..job.nccl_text import VERSIONS, Shape, text

LOG = """
node-a:101:101 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
NCCL version 2.19.4+cuda12.2
node-a:101:140 [0] NCCL INFO NCCL_PROTO set by environment to LL.
node-a:101:140 [0] NCCL INFO Using network IB
node-a:101:140 [0] NCCL INFO comm 0x55 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 1000 commId 0x97 - Init START
node-a:101:140 [0] NCCL INFO Channel 00/02 :    0   2   1   3
node-a:101:140 [0] NCCL INFO Channel 01/02 :    0   2   1   3
node-a:101:140 [0] NCCL INFO Trees [0] 2/-1/-1->0->-1 [1] -1/-1/-1->0->1
node-a:101:140 [0] NCCL INFO Channel 00/0 : 3[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
node-a:101:150 [0] NCCL INFO NET/IB: Dev 0 Port 1 qpn 1107 mtu 5 query_ece={supported=0} GID 3 (80FE/1)
node-a:101:150 [0] NCCL INFO NET/IB: Dev 0 Port 1 qpn 4834 mtu 5 GID 3 (80FE/1)
node-a:101:140 [0] NCCL INFO 2 coll channels, 0 nvls channels, 2 p2p channels, 2 p2p channels per peer
node-a:101:101 [0] NCCL INFO AllReduce: opCount 3 sendbuff 0x1 recvbuff 0x1 count 5000 datatype 7 op 0 root 0 comm 0x55
node-a:101:101 [0] NCCL INFO 20000 Bytes -> Algo 1 proto 0 time 11.5
"""


def test_facts_of_a_log() -> None:
    facts = parse_log(LOG)
    assert (facts.version, facts.ranks, facts.channels) == ("2.19.4", 4, 2)
    assert facts.rings == [[0, 2, 1, 3]] * 2
    assert facts.qpns == {0: {1107, 4834}}
    assert facts.choices == [("", 20000, "ring", "ll")]
    assert facts.refused == []
    assert facts.ranks_of_addresses([("10.0.0.1", 1107), ("10.0.0.1", 4834), ("10.0.0.2", 9)]) == {"10.0.0.1": 0}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version(version: str) -> None:
    """The lines of each release, of two ranks in one text, as a launcher gathers them."""
    both = ""
    for rank in (0, 1):
        shape = Shape(rank=rank, queue_pairs=((1100 + rank, f"10.0.0.{rank}"),), trees=((-1, -1, -1, -1),))
        both += text(shape, version).decode().replace("node-a:101", f"node-{rank}:7")
    facts = parse_log(both)
    assert (facts.version, facts.ranks, facts.channels) == (version, 4, 2)
    assert facts.rings == [[0, 2, 1, 3]] * 2 and facts.refused == []
    assert facts.qpns == {0: {1100}, 1: {1101}}
    assert facts.ranks_of_addresses([("10.0.0.1", 1101), ("10.0.0.0", 1100)]) == {"10.0.0.1": 1, "10.0.0.0": 0}


def test_rings_from_every_ranks_graph_lines() -> None:
    order = [0, 4, 2, 1, 3]
    logs = []
    for i, rank in enumerate(order):
        before, after = order[i - 1], order[(i + 1) % 5]
        logs.append(f"h:{rank}:1 [0] NCCL INFO Ring 00 : {before} -> {rank} -> {after}")
    assert merge(parse_log(log) for log in logs).rings == [order]
    assert merge([parse_log(logs[0])]).rings == []  # one rank's edges do not close


def test_a_cut_ring_is_not_completed() -> None:
    assert parse_log("h:1:1 [0] NCCL INFO Channel 00/01 :    0   1   2 ...").rings == []


def test_a_peers_queue_pair_is_not_this_ranks() -> None:
    """What rank 0 prints of the receiver's (NCCL 2.20 to 2.26, src/transport/net_ib.cc) made its address rank 0's."""
    log = LOG + "node-a:101:150 [0] NCCL INFO NET/IB: IbDev 0 Port 1 qpn 777 set_ece={supported=1, vendor_id=0x15b3}\n"
    facts = parse_log(log)
    assert facts.qpns == {0: {1107, 4834}} and facts.ranks_of_addresses([("10.0.0.2", 777)]) == {}


@pytest.mark.parametrize(("line", "word"), [
    ("AllReduce: 1048576 Bytes -> Algo NVLS proto SIMPLE channel{Lo..Hi}={0..15}", "NCCL_NVLS_ENABLE=0"),
    ("1048576 Bytes -> Algo 2 proto 2 time 3.5", "NCCL_COLLNET_ENABLE=0"),
    ("AllGather: 4096 Bytes -> Algo PAT proto SIMPLE channel{Lo..Hi}={0..0}", "NCCL_PAT_ENABLE=0"),
    ("rank 0 successfully registered collNet send UB buffer", "NCCL_LOCAL_REGISTER=0"),
    ("Using network AWS Libfabric", "NCCL_NET=IB"),
    ("Using network Socket", "NCCL_NET=IB"),
])
def test_refused_with_a_remedy(line: str, word: str) -> None:
    ((_, remedy),) = parse_log(f"h:1:2 [0] NCCL INFO {line}").refused
    assert word in remedy


def test_two_versions_are_two_jobs() -> None:
    assert merge([parse_log("NCCL version 2.19.4+cuda12"), parse_log("NCCL version 2.27.7+cuda12")]).refused


@settings(max_examples=300)
@given(st.lists(st.one_of(
    st.text(max_size=80), st.sampled_from(LOG.splitlines()),
    st.builds(lambda a, b: f"h:1:2 [0] NCCL INFO {a} {b}", st.sampled_from([
        "Ring 00 :", "Channel 00/02 :", "NET/IB: qpn", "Trees [0]", "coll channels", "rank", "1 Bytes -> Algo",
    ]), st.text(max_size=60)),
), max_size=30))
def test_any_text(lines: list[str]) -> None:
    facts = parse_log("\n".join(lines))
    for ring in facts.rings:
        assert sorted(ring) == list(range(len(ring)))


def test_files_that_are_no_logs(tmp_path) -> None:
    with pytest.raises(UserError, match="cannot read the log"):
        read_logs([tmp_path / "none"])
    (tmp_path / "other").write_bytes(bytes(range(256)))
    with pytest.raises(UserError, match="no line of NCCL"):
        read_logs([tmp_path / "other"])
