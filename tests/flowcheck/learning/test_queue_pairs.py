"""Several QPs per connection: which belong together and in which order is learnt, refused by name, or a doubt."""

import hashlib
import importlib.util
import json
import random
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser.observer import Observer
from rich.console import Console

from flowcheck.job.manifest import job_from_dict, load_job
from flowcheck.job.model import Job
from flowcheck.learning.captures import learn
from flowcheck.learning.connections import connections
from flowcheck.learning.flow_order import arrange, byte_order, pieces
from flowcheck.learning.hints import Hints
from flowcheck.learning.messages import Flow, Message
from flowcheck.offline.replay import ReplayOptions, replay
from lab.synth import Synthesis, example_job, generate
from lab.synth.connection import TransportOptions
from lab.synth.packets import WRITE_ONLY_IMM, Endpoint
from lab.synth.packets import Path as Path_
from tests.flowcheck.replayed import check_buckets
from tests.nccl_versions import VERSIONS, since

from .oracle import doubts, learnt, placement, refusal, same, unless_refused

MANY = settings(max_examples=20, derandomize=True)
SPLIT = pytest.mark.parametrize("split", [True, False])


def shuffled(job: Job, seed: int) -> Job:
    """The same job whose QP numbers say nothing about the order of a connection's QPs."""
    rng = random.Random(seed)
    for flow in job.flows:
        pairs = list(zip(flow.qpns, flow.cts_qpns, strict=True))
        rng.shuffle(pairs)
        flow.qpns, flow.cts_qpns = [a for a, _ in pairs], [b for _, b in pairs]
    return job


jobs = st.fixed_dictionaries({
    "ranks": st.integers(2, 8),
    "channels": st.integers(1, 4),
    "qps": st.sampled_from([2, 3, 4, 8]),
    "split_data_on_qps": st.booleans(),
    "adaptive_routing": st.booleans(),
    "protocol": st.sampled_from(["ll", "simple", "ll128"]),
    "count": st.lists(st.integers(300, 30_000), min_size=1, max_size=2),
    "version": st.sampled_from(VERSIONS),
    "mtu": st.sampled_from([1024, 4096]),
    "seed": st.integers(0, 1000),
})


@MANY
@given(jobs, st.booleans(), st.data())
def test_the_job_or_a_refusal_or_the_very_doubt(options: dict, lossy: bool, data: st.DataObject) -> None:
    """Both directions of one rank, QP numbers in no order: never another grouping that is not a doubt."""
    job = shuffled(example_job(**options), options["seed"])
    rank = data.draw(st.integers(0, options["ranks"] - 1))
    loss = {"loss": 0.01, "reorder": 0.02, "duplicate": 0.02} if lossy else {}
    transport = TransportOptions(retransmit=0.1, cut_ranks=frozenset([rank])) if lossy else None
    made = generate(job, iterations=2, ports=[rank], transport=transport, **loss)
    found = unless_refused(made, Hints(version=options["version"], dtype="float32"))
    if found is None:
        return
    mine, theirs = placement(found.job, 2), placement(job, 2)
    if not mine.keys() <= theirs.keys():
        assert "queues" in doubts(found)
        return
    for key, calls in mine.items():  # where packets are missing the end may be, and with it the later calls
        assert calls == (theirs[key][: len(calls)] if lossy else theirs[key])


@SPLIT
@pytest.mark.parametrize("qps", [2, 4, 8])
@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
def test_learnt_whole(protocol: str, qps: int, split: bool) -> None:
    job = example_job(
        count=[40_000, 7_001], protocol=protocol, qps=qps, split_data_on_qps=split, channels=2, ranks=3,
    )
    job = shuffled(job, qps)
    found = learnt(generate(job, iterations=3, ports=[1]), Hints(version="2.27.7"))
    same(found.job, job, 3)
    c = found.job.communicator
    assert (c.qps_per_connection, c.split_data_on_qps) == (qps, split) and "queues" not in doubts(found)
    item = next(item for item in found.items if item.what == "queue pairs")
    assert item.confidence == "certain" and item.value.startswith(f"{qps} per connection") and "order by" in item.reason


@SPLIT
@pytest.mark.parametrize("protocol", ["ll", "simple"])
def test_without_clear_to_send(protocol: str, split: bool) -> None:
    """One direction: memory keys, slots, flags, sizes and time tell what clear-to-send would."""
    job = shuffled(
        example_job(count=[20_000, 700], protocol=protocol, qps=4, split_data_on_qps=split, channels=2), 1
    )
    made = generate(job, iterations=3, ports=[0], directions="out")
    assert not any(flow.cts_qpns and frame[42 + 5 : 42 + 8] == flow.cts_qpns[0].to_bytes(3, "big")
                   for flow in job.flows if flow.src == 0 for _, frame in made.packets)
    found = learnt(made, Hints(ranks={"10.0.0.1": 0, "10.0.0.2": 1}, version="2.27.7", algorithm="ring"))
    same(found.job, job, 3)


def test_a_manifest_with_the_flows_in_another_order_is_refused() -> None:
    """What a manifest says of QPs is checked like what was learnt."""
    job = example_job(count=[20_000], qps=4, split_data_on_qps=True, protocol="simple")
    made = generate(job, iterations=2)
    same(learnt(made, Hints(given=job)).job, job, 2)
    wrong = job_from_dict(job.to_dict())
    wrong.flows[0].qpns.reverse()
    assert "QP" in refusal(made, Hints(given=wrong))
    unsplit = job_from_dict(job.to_dict())
    unsplit.communicator.split_data_on_qps = False
    assert "do not go round" in refusal(made, Hints(given=unsplit))


def _without(made: Synthesis, qpn: int) -> Synthesis:
    for port, packets in made.ports.items():
        made.ports[port] = [p for p in packets if p[1][42 + 5 : 42 + 8] != qpn.to_bytes(3, "big")]
    return made


@SPLIT
def test_a_queue_pair_that_is_not_captured(split: bool) -> None:
    job = example_job(count=[9000], qps=3, split_data_on_qps=split, protocol="simple")
    flow = next(flow for flow in job.flows if flow.src == 0)
    assert refusal(_without(generate(job, iterations=2), flow.qpns[1]))


def test_all_but_one_of_the_pieces_are_empty() -> None:
    """Messages of 128 bytes and less are on the first QP alone: the others still belong to the connection."""
    job = example_job(count=[24], qps=4, split_data_on_qps=True, protocol="simple", startup=False, rebuild=False)
    hints = Hints(dtype="float32", buckets=(24,), algorithm="ring", version="2.27.7", ranks={"10.0.0.1": 0})
    for directions in ("both", "out"):
        found = learnt(generate(job, iterations=2, directions=directions), hints).job
        assert found.communicator.qps_per_connection == 4
        assert placement(found, 2).items() <= placement(job, 2).items()


def test_more_queue_pairs_than_were_used_is_a_doubt() -> None:
    job = example_job(count=[3000], qps=8, protocol="ll", startup=False, rebuild=False)
    job.collectives.steady = []
    hints = Hints(dtype="float32", buckets=(3000,), algorithm="ring", version="2.27.7")
    found = learnt(generate(job, iterations=1), hints)
    assert found.job.communicator.qps_per_connection == 2
    assert any("may have more than 2" in text for text in found.doubts)
    one = example_job(ranks=4, count=[3000], qps=2, protocol="ll", startup=False, rebuild=False, algorithm="tree")
    hints = Hints(dtype="float32", buckets=(3000,), algorithm="tree", version="2.27.7")
    found = learnt(generate(one, iterations=1, ports=range(4)), hints)
    assert found.job.communicator.qps_per_connection == 1
    assert any("may have more than 1" in text for text in found.doubts)


def test_mid_stream_with_queue_pairs_that_are_new() -> None:
    """The first packets of some QPs are in the capture, but messages went over others before."""
    job = example_job(count=[3000], qps=8, protocol="simple", startup=False, rebuild=False)
    made = generate(job, iterations=1, first_iteration=1)
    assert "mid-stream" in refusal(made, Hints(dtype="float32", buckets=(3000,), algorithm="ring", version="2.27.7"))


def test_two_buffers_that_clear_to_send_confuses() -> None:
    """Two jobs with the same keys and addresses: no QP's connection is certain, and that is said."""
    one, other = (example_job(count=[5000], protocol="simple", seed=seed) for seed in (1, 2))
    made, second = (generate(job, iterations=1) for job in (one, other))
    made.ports[0] = sorted(made.ports[0] + second.ports[0])
    assert "which queue pairs are one connection" in refusal(made)


def test_thousands_of_foreign_queue_pairs_cost_little() -> None:
    path = Path_(Endpoint(b"\x02" + bytes(5), "10.0.0.1"), Endpoint(b"\x02" + bytes(4) + b"\1", "10.0.0.2"), 0xC001)
    seen = Observer(messages=True)
    for number in range(5000):
        write = struct.pack(">QII", 0x70000000, 7, 16) + struct.pack("<I", 16)
        seen.add(path.frame(WRITE_ONLY_IMM, 0x100 + number, 0, write, bytes(16)), number)
    found = connections(seen.flow_list(), seen.start_records())
    (connection,) = found  # all of them write to one address
    assert "at most 128" in connection.unsure


@given(st.integers(0, 1 << 21), st.integers(1, 128), st.data())
def test_pieces_are_the_message(size: int, used: int, data: st.DataObject) -> None:
    parts = pieces(size, used)
    message = Message(0, data.draw(st.sampled_from([*(p for _, p in parts), size])), size, False, 1, 1, 0, b"")
    flow = Flow("10.0.0.1", "10.0.0.2", 1, 1, None, 0, [message], 1)
    _, _, other = byte_order([flow], used)
    assert (other == 0) == (message.size in [p for _, p in parts])
    assert len(parts) == used and sum(part for _, part in parts) == size
    assert all(part == 0 or offset + part <= size for offset, part in parts)
    assert used == 1 or all(offset % 128 == 0 for offset, _ in parts)


@pytest.mark.usefixtures("eal")
@pytest.mark.parametrize("mirrored", ["all", 1])
def test_four_split_queue_pairs_of_soft_roce(capture, tmp_path: Path, mirrored: str | int) -> None:
    """Real NCCL transport: what is learnt places the bytes that the hand-written manifest places."""
    path = capture("soft-roce/05_nccl_ring4_ar_qps4.pcap")
    found = learn([path], Hints(dtype="float32", buckets=(100003,))).job
    true = load_job(Path(__file__).parents[2] / "data" / "jobs" / "05_nccl_ring4_ar_qps4.json")
    assert sorted((f.src, f.dst, f.qpns) for f in found.flows) == sorted((f.src, f.dst, f.qpns) for f in true.flows)
    assert all(f.cts_qpns in ([], [g.cts_qpns[0]]) for f in found.flows for g in true.flows if f.qpns == g.qpns
               and (f.src, f.dst) == (g.src, g.dst))
    if mirrored != "all":
        found.flows = [f for f in found.flows if mirrored in (f.src, f.dst)]
    (tmp_path / "job.json").write_text(found.to_json())
    report, failure = replay(ReplayOptions([path], tmp_path / "job.json", tmp_path / "out"), Console(quiet=True))
    assert failure == ""
    spec = importlib.util.spec_from_file_location("soft_roce_expected", capture("soft-roce/expected.py"))
    assert spec is not None and spec.loader is not None
    expected = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(expected)
    out = expected.Ring(4, 100003, 262144, 105, 1).out
    (bucket,) = report.to_dict()["iterations"][0]["buckets"]
    assert bucket["sha256"] == hashlib.sha256(out.tobytes()).hexdigest()


@pytest.mark.usefixtures("eal")
@SPLIT
def test_learnt_manifest_replays_to_the_truth(tmp_path: Path, split: bool) -> None:
    job = shuffled(example_job(ranks=3, count=[9000, 501], qps=4, split_data_on_qps=split, channels=2), 5)
    made = generate(job, iterations=3, ports=[1])
    made.write(tmp_path / "made.pcap")
    found = learn([tmp_path / "made.pcap"], Hints(version="2.27.7", optimizer=("sgd", {"lr": 0.001})))
    (tmp_path / "job.json").write_text(found.job.to_json())
    report, failure = replay(
        ReplayOptions([tmp_path / "made.pcap"], tmp_path / "job.json", tmp_path / "out"), Console(quiet=True)
    )
    assert failure == "" and json.loads((tmp_path / "out" / "report.json").read_text())["ok"]
    check_buckets(made, report.to_dict())


def test_a_queue_pair_of_which_no_message_begins_in_the_capture() -> None:
    """Only later packets of its messages were mirrored: no place in the order, and no crash."""
    message = Message(0, 16, 16 << 24, False, 0x1000, 7, 5, bytes(16))
    ends = {"src": "10.0.0.1", "dst": "10.0.0.2", "sport": 1, "mtu": None, "largest": 16}
    seen, unseen = Flow(qpn=2, messages=[message], whole=1, **ends), Flow(qpn=1, messages=[], whole=0, **ends)
    order = arrange([seen, unseen], [])
    assert order.flows[0] is seen and order.doubt


@SPLIT
@pytest.mark.parametrize("qps", [1, 2])
@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
def test_ports_of_a_merged_nic(protocol: str, qps: int, split: bool) -> None:
    """Every message is striped over two ports with addresses of their own."""
    job = example_job(
        ranks=3, count=[9000, 501], protocol=protocol, qps=qps, split_data_on_qps=split, devices=2, channels=2,
    )
    found = learnt(generate(job, iterations=3, ports=[1, 4]), Hints(version="2.27.7"))
    c = found.job.communicator
    assert (c.devices, c.qps_per_connection, c.queue_pairs_used) == (2, qps, job.communicator.queue_pairs_used)
    same(found.job, job, 3)
    assert {tuple(f.src_addrs) for f in found.job.flows} <= {tuple(f.src_addrs) for f in job.flows}
    assert "merged NIC" in next(item.value for item in found.items if item.what == "queue pairs")


def test_one_port_or_one_direction_of_a_merged_nic_is_refused_by_name() -> None:
    job = example_job(count=[9000], protocol="simple", devices=2)
    assert "other parts travel elsewhere" in refusal(generate(job, iterations=2, ports=[0]))
    assert "other parts travel elsewhere" in refusal(generate(job, iterations=2, ports=[0, 2], directions="out"))


merged = st.fixed_dictionaries({
    "ranks": st.integers(2, 4),
    "channels": st.integers(1, 3),
    "qps": st.integers(1, 2),
    "split_data_on_qps": st.booleans(),
    "adaptive_routing": st.booleans(),
    "protocol": st.sampled_from(["ll", "simple", "ll128"]),
    "count": st.lists(st.integers(300, 30_000), min_size=1, max_size=2),
    "version": st.sampled_from(since(20)),
    "seed": st.integers(0, 1000),
})


@settings(MANY, max_examples=20)
@given(merged, st.booleans(), st.data())
def test_merged_nics_with_loss_are_the_job_or_a_refusal(options: dict, lossy: bool, data: st.DataObject) -> None:
    job = example_job(**options, devices=2)
    rank = data.draw(st.integers(0, options["ranks"] - 1))
    made = generate(job, iterations=2, ports=[rank, rank + options["ranks"]], loss=0.01 * lossy)
    found = unless_refused(made, Hints(version=options["version"], dtype="float32"))
    if found is None:
        return
    mine, theirs = placement(found.job, 2), placement(job, 2)
    if "queues" in doubts(found):
        return
    for key, calls in mine.items():
        assert calls == (theirs[key][: len(calls)] if lossy else theirs[key])
