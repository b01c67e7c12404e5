"""Does a node keep up: stages, deadline, memory, leaves; what must hold for every job, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.errors import UserError
from flowcheck.plan.capacity.capacity import Job, Node, capacity, comm_seconds, fitted, leaves_of
from flowcheck.plan.capacity.stage_speeds import Speeds, measured, published
from flowcheck.plan.jobs.models import LARGE, PRESETS, SMALL, flops_seconds

JOB = Job(1e9, 1, 1, 16, 1, "float32", "adam", "simple", "ring", 2, "2.27.7", 4096, 26e6, 100.0, 2.0)
NODE = Node(3, "both", 1, 2, 400.0)
SPEEDS = published("simple", 4096)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    shard = draw(st.sampled_from([1, 2]))
    return Job(
        draw(st.floats(1e6, 1e11)), draw(st.integers(1, 8)), draw(st.integers(1, 8)),
        shard * draw(st.integers(3, 32)), shard, draw(st.sampled_from(["float32", "bfloat16"])),
        draw(st.sampled_from(["adam", "sgd", "momentum"])), draw(st.sampled_from(["ll", "ll128", "simple"])), "ring", 2,
        "2.27.7", draw(st.sampled_from([1024, 4096])), draw(st.floats(1e6, 1e8)), draw(st.sampled_from([100.0, 400.0])),
        1e6,
    )


# -- formulas ---------------------------------------------------------------------------------------------------------


def test_the_worked_example_of_the_qualify_page() -> None:
    """1e9 float32 parameters, 16 hosts, 100 Gb/s, SIMPLE: 7.5 GB in each direction, 600 Gb/s at the peak of three
    ports, 52 GB of memory and 100 while a new state comes."""
    traffic, _ = JOB.traffic("ingress")
    assert traffic.payload == pytest.approx(7.5e9, rel=0.01)
    found = capacity(JOB, NODE, SPEEDS)
    assert found.peak_gbps == 600 and found.room_gbps == 800
    assert found.memory == pytest.approx(52.25e9 + found.receive_cores * 16384 * (24 + 4352))
    assert found.memory_most - found.memory == pytest.approx(48e9)


def test_stages_by_hand() -> None:
    """1 MB of wire a port and direction at most a few packets off; the sums are those of the formulas' text."""
    speeds = Speeds(1.0, 100.0, 10.0, 5.0, 50.0, 28.0, {})
    found = capacity(replace(JOB, iteration_s=10.0), replace(NODE, update_cores=2), speeds)
    port = found.traffic
    assert found.comm_s == pytest.approx(port.all_frames / 2 * 8 / 100e9, rel=1e-4)
    final = 2 * 15 / 16 * 4e9
    first = 4e9 / (3 * final)  # each byte is placed once, and compared as often as it comes again
    assert found.place_s == pytest.approx(3 * (
        2 * final * (first / 10e9 + (1 - first) / 5e9) + port.packets / 2 * 5e-8
        + (port.packets / 2 + port.control) * 1e-7
    ), rel=0.01)
    alone = capacity(replace(JOB, iteration_s=10.0), replace(NODE, mirrors=1, direction="ingress"), speeds)
    assert alone.place_s < found.place_s / 6 * 0.8, "nothing comes twice"
    assert found.update_s == pytest.approx(1e9 * 28 / 28e9 / 2)
    assert found.serial_s == pytest.approx(sum(found.stages)) and found.slack_s == 10.0 - found.pipelined_s
    packets = 3 * (port.packets + port.control) / found.comm_s
    assert packets / 1e6 <= found.receive_cores < packets / 1e6 + 1


def test_packets_that_carry_nothing_to_keep_cost_and_each_port_has_a_thread_and_a_ring() -> None:
    """Parsing takes so long that nothing else counts: clear-to-sends and acknowledgements are parsed, too."""
    job, node = replace(JOB, iteration_s=10.0), replace(NODE, ports=8)
    found = capacity(job, node, replace(SPEEDS, parse_ns=1e12, receive_mpps=100.0))
    port = found.traffic
    assert port.control > 0
    parsed = 3 * (port.packets - port.final_packets + port.control)
    assert found.place_s == pytest.approx(parsed * 1e3, rel=1e-6)
    assert found.receive_cores == 8 == found.load.receive.threads
    assert found.load.ring == pytest.approx(8 * 16384 / (3 * (port.packets + port.control)))


def test_packets_are_placed_while_their_bucket_comes() -> None:
    """Of a single bucket only the update is left after its last packet, if placing keeps up."""
    whole = capacity(replace(JOB, bucket_bytes=4e9), NODE, SPEEDS)
    assert whole.buckets == 1 and whole.pipelined_s == pytest.approx(max(whole.comm_s, whole.place_s) + whole.update_s)
    some = capacity(JOB, NODE, SPEEDS)
    placed, each = max(some.comm_s, some.place_s), some.update_s / some.buckets
    assert some.buckets == 154 and each < placed / some.buckets and some.pipelined_s == pytest.approx(placed + each)


def test_memory_and_cores_are_shared_by_all_stages() -> None:
    long, node = replace(JOB, iteration_s=10.0), replace(NODE, place_cores=3)
    packets = JOB.traffic("both")[0]
    received = 3 * (packets.packets + packets.control)
    free = capacity(long, node, SPEEDS)
    assert free.moved_s == free.shared_s == 0
    moved = 3 * (2 * packets.all_frames + packets.final_payload + packets.final_data) + 28e9
    slow = capacity(long, node, replace(SPEEDS, copy_gbs=20.0))
    assert slow.moved_s == pytest.approx(moved / 20e9) and slow.shared_s == 0
    assert slow.pipelined_s >= slow.moved_s > free.pipelined_s and slow.stages == free.stages
    two = capacity(long, replace(node, cores=2), SPEEDS)
    work = received / (SPEEDS.receive_mpps * 1e6) + 3 * two.place_s + two.update_s
    assert two.shared_s == pytest.approx(work / 2) and two.moved_s == 0
    # receiving has five threads, placing three, updating one, and one looks on: each has a fifth of a core
    assert two.receive_cores == 5 and two.shared_s * 1.05 < two.pipelined_s < two.shared_s * 1.4
    assert capacity(long, replace(node, cores=10), SPEEDS).pipelined_s == pytest.approx(free.pipelined_s)
    assert capacity(long, replace(node, cores=6), SPEEDS).pipelined_s > free.pipelined_s * 1.05
    assert fitted(JOB, NODE, replace(SPEEDS, copy_gbs=1.0)).update_cores == 512, "no core carries more"


def test_iteration_times_are_those_that_the_sources_report() -> None:
    """Korthikanti et al.: 530B on 2240 GPUs, 39.15 s; Narayanan et al.: 1T on 3072, 163 teraFLOPS per GPU."""
    job = PRESETS["530b"]
    seconds = flops_seconds(job.parameters, job.tokens, job.gpus, job.peak_tflops, job.mfu)
    assert seconds == pytest.approx(39.15, rel=0.02)
    job = PRESETS["1t"]
    seconds = flops_seconds(job.parameters, job.tokens, job.gpus, job.peak_tflops, job.mfu)
    assert 6 * job.parameters * job.tokens / job.gpus / seconds / 1e12 == pytest.approx(163, rel=0.01)


def test_presets_are_the_papers_sizes() -> None:
    sizes = {name: (round(preset.parameters / 1e6), preset.gpus) for name, preset in PRESETS.items()}
    assert {name: sizes[name][0] for name in SMALL} == {
        "bert": 110, "roberta": 330, "gpt3-1.3b": 1300, "llama2-7b": 7000,
    }
    assert {name: sizes[name][1] for name in LARGE} == {"175b": 1536, "530b": 2240, "1t": 3072, "405b": 16384}


def test_175b_is_the_papers_table_2() -> None:
    """8 x 12 x 16: 96 groups on 24 leaves. The paper's text says three nodes per leaf; with a node for each group it is
    four."""
    preset = PRESETS["175b"]
    assert (preset.tp, preset.pp, preset.dp) == (8, 12, 16)
    job = replace(JOB, parameters=preset.parameters, tensor=preset.tp, pipeline=preset.pp, data=preset.dp)
    found = leaves_of(job, NODE, 64, 128)
    assert (found.leaves, found.nodes_per_leaf, found.leaves * found.nodes_per_leaf) == (24, 4, 96)
    assert found.nodes == job.groups == 96


# -- what must hold ---------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(jobs(), st.integers(1, 3), st.integers(1, 4))
def test_pipelining_lies_between_the_slowest_stage_and_the_sum(job: Job, mirrors: int, groups: int) -> None:
    found = capacity(job, replace(NODE, mirrors=mirrors, groups=groups), published(job.protocol, job.mtu))
    assert max(found.stages) <= found.pipelined_s * (1 + 1e-9) and found.pipelined_s <= found.serial_s * (1 + 1e-9)
    assert found.slack_s == pytest.approx(job.iteration_s - found.pipelined_s)
    assert found.comm_s + found.gap_s == pytest.approx(job.iteration_s)


@settings(max_examples=40, deadline=None)
@given(jobs(), st.integers(1, 2))
def test_more_mirrors_groups_and_parameters_are_never_less_work(job: Job, mirrors: int) -> None:
    speeds, node = published(job.protocol, job.mtu), replace(NODE, mirrors=mirrors)
    base = capacity(job, node, speeds)
    for more in (
        capacity(job, replace(node, mirrors=mirrors + 1), speeds), capacity(job, replace(node, groups=2), speeds),
        capacity(replace(job, parameters=2 * job.parameters), node, speeds),
    ):
        assert more.pipelined_s >= base.pipelined_s * 0.999
        assert more.memory_most - more.memory >= base.memory_most - base.memory, "without the rings"
        assert more.peak_gbps >= base.peak_gbps
    faster = capacity(job, replace(node, place_cores=4, update_cores=4), speeds)
    assert faster.pipelined_s <= base.pipelined_s and faster.memory == base.memory


@settings(max_examples=30, deadline=None)
@given(jobs(), st.floats(1.05, 4))
def test_fitted_cores_are_the_fewest_that_do(job: Job, spare: float) -> None:
    speeds = published(job.protocol, job.mtu)
    job = replace(job, iteration_s=comm_seconds(job) * spare)
    node = fitted(job, NODE, speeds)
    found = capacity(job, node, speeds)
    if found.slack_s < 0:
        assert node.update_cores == 512
    elif node.update_cores > 1:
        assert capacity(job, replace(node, update_cores=node.update_cores - 1), speeds).slack_s < 0
    if node.place_cores < 512:
        assert found.place_s <= found.comm_s * (1 + 1e-9)


def test_shards_divide_the_gradient_and_multiply_the_groups() -> None:
    sharded = replace(JOB, shard=4)
    assert (sharded.groups, sharded.ranks, sharded.group_parameters) == (4, 4, 250_000_000)
    assert sharded.traffic("ingress")[0].payload == pytest.approx(2 * 3 / 4 * 1e9, rel=0.01)


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "where"), [
    ({"tensor": 0}, "--tp"), ({"shard": 3}, "--shard"), ({"shard": 16}, "--dp"), ({"parameters": 0.0}, "--parameters"),
    ({"bucket_bytes": -1.0}, "--bucket-mb"), ({"iteration_s": float("inf")}, "--iteration-s"),
    ({"parameters": 3.0, "tensor": 4}, "--parameters"), ({"port_gbps": 0.0}, "--port-gbps"),
])
def test_jobs_that_cannot_be_are_refused(change: dict[str, float], where: str) -> None:
    with pytest.raises(UserError) as caught:
        replace(JOB, **change)  # type: ignore[arg-type]
    assert caught.value.where == where and caught.value.remedy


@pytest.mark.parametrize(("change", "where"), [
    ({"mirrors": 0}, "--mirrors"), ({"slots": 1}, "--slots"), ({"arenas": 1}, "--arenas"),
    ({"ports": 0}, "--node-ports"),
    ({"monitor_gbps": 0.0}, "--monitor-gbps"), ({"groups": 0}, "--groups-per-node"),
])
def test_nodes_that_cannot_be_are_refused(change: dict[str, float], where: str) -> None:
    with pytest.raises(UserError) as caught:
        replace(NODE, **change)  # type: ignore[arg-type]
    assert caught.value.where == where and caught.value.remedy


def test_more_ports_than_there_are_are_refused() -> None:
    with pytest.raises(UserError, match="more than a leaf's 65 ports"):
        leaves_of(replace(JOB, data=64), NODE, 64, 65)
    with pytest.raises(UserError, match="17 mirrored ports of a group of 16"):
        capacity(JOB, replace(NODE, mirrors=17), SPEEDS)
    with pytest.raises(UserError, match="shorter than its allreduces"):
        capacity(replace(JOB, iteration_s=0.1), NODE, SPEEDS)


# -- speeds -----------------------------------------------------------------------------------------------------------


def rows(**changes: float) -> list[dict[str, object]]:
    values = {
        "parse.16flows.huge": 9.0, "place.ll.1024": 20.0, "place.ll.1024.again": 8.0, "place.ll.1024.icrc": 13.0,
        "ingest.1024.copy": 12.0,
        "adam.200.1t.torch-cuda-foreach": 40.0, **changes,
    }
    return [{"name": name, "value": value, "processor": "a processor"} for name, value in values.items()]


def test_speeds_come_from_the_rows_of_a_bench(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(rows()))
    found = measured(file, "ll", 2048)
    assert (found.receive_mpps, found.parse_ns, found.place_gbs, found.icrc_ns) == (12.0, 9.0, 20.0, 13.0)
    assert found.update_gbs == 40.0 and found.again_gbs == 8.0
    assert found.sources["place"] == "bench.json, a processor: place.ll.1024"
    assert found.copy_gbs is None, "what nobody measured is no limit"
    row = {"name": "pipeline.adam.place", "value": 140.0, "limit": 80.0, "processor": "a processor"}
    file.write_text(json.dumps([*rows(), row]))
    found = measured(file, "ll", 2048)
    assert found.copy_gbs == 25.0, "two bytes of each gradient byte in 80 ms per GB"
    assert "pipeline.adam.place" in found.sources["copy"]


def test_speeds_of_few_flows_are_taken_for_few_flows(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    few = {"place.ll.1024.4flows": 25.0, "place.ll.1024.4flows.again": 14.0}
    file.write_text(json.dumps(rows(**few)))
    at = {flows: measured(file, "ll", 1024, flows) for flows in (1, 4, 5, 16)}
    assert {flows: (found.place_gbs, found.again_gbs) for flows, found in at.items()} == {
        1: (25.0, 14.0), 4: (25.0, 14.0), 5: (20.0, 8.0), 16: (20.0, 8.0),
    }
    assert at[4].sources["again"] == "bench.json, a processor: place.ll.1024.4flows.again"
    assert at[4].icrc_ns == at[5].icrc_ns and at[5] == measured(file, "ll", 1024)
    file.write_text(json.dumps(rows()))
    assert measured(file, "ll", 1024, 4) == measured(file, "ll", 1024, 16), "a bench before there were such rows"


def test_an_update_is_as_fast_as_in_the_pages_that_a_node_uses(tmp_path: Path) -> None:
    file, name = tmp_path / "bench.json", "adam.200.1t.torch-cuda-foreach.shared"
    file.write_text(json.dumps(rows(**{name: 25.0})))
    small, large = measured(file, "ll", 1024), measured(file, "ll", 1024, pages="huge")
    assert (small.update_gbs, large.update_gbs) == (25.0, 40.0)
    assert small.sources["update"] == f"bench.json, a processor: {name}"
    file.write_text(json.dumps(rows()))
    old = measured(file, "ll", 1024)
    assert old.update_gbs == 40.0 and old.sources["update"].endswith("adam.200.1t.torch-cuda-foreach")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"name": "x"}]', '[{"name": "x", "value": -1}]',
                                  '[{"name": "x", "value": "fast"}]'])
def test_a_file_that_no_bench_wrote_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bench.json"
    file.write_text(text)
    with pytest.raises(UserError, match="flowcheck bench") as caught:
        measured(file, "ll", 1024)
    assert caught.value.where == str(file)


def test_a_row_that_is_not_there_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(rows()))
    with pytest.raises(UserError, match=r"has no row place.simple.1024"):
        measured(file, "simple", 1024)
    with pytest.raises(UserError) as caught:
        measured(tmp_path / "absent.json", "ll", 1024)
    assert caught.value.exit_code == 2 and "absent.json" in caught.value.message()


def test_published_speeds_are_those_of_the_page() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs/understand/performance.md").read_text()
    for protocol in ("ll", "ll128", "simple"):
        for mtu in (1024, 4096):
            found = published(protocol, mtu)
            assert f"| place.{protocol}.{mtu} | {found.place_gbs:g} GB/s |" in page
            assert f"| place.{protocol}.{mtu}.again | {found.again_gbs:g} GB/s |" in page
            assert f"| place.{protocol}.{mtu}.icrc | {found.icrc_ns:g} ns/packet |" in page
            assert f"| ingest.{mtu}.copy | {found.receive_mpps:g}" in page
    assert f"| parse.16flows.huge | {found.parse_ns:g} ns/packet |" in page
    assert f"| adam.200.1t.torch-cuda-foreach.shared | {found.update_gbs:g} GB/s |" in page
    large = published("simple", 4096, "huge")
    assert f"| adam.200.1t.torch-cuda-foreach | {large.update_gbs:g} GB/s |" in page
