"""Learning against the generator's truth: the same job comes out, or a refusal, never another job."""

import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.errors import UserError
from flowcheck.job.manifest import job_from_dict, load_job
from flowcheck.learning.captures import learn
from flowcheck.learning.hints import Hints
from flowcheck.learning.logs import parse_log
from lab.synth import example_job, generate
from lab.synth.contents import data_seed
from lab.synth.values import generate_values
from tests.nccl_versions import VERSIONS

from .oracle import learnt, placement, refusal, same

PCAPS = Path(__file__).resolve().parents[3] / "pcaps"
LEARNT = ["ring2-ddp.pcap", "ring4-simple.pcapng", "ring4-ll-loss.pcap"]
MANY = settings(max_examples=40, derandomize=True)


jobs = st.fixed_dictionaries({
    "ranks": st.integers(2, 4),
    "channels": st.integers(1, 3),
    "protocol": st.sampled_from(["ll", "simple"]),
    "count": st.lists(st.integers(2, 40_000), min_size=1, max_size=3),
    "version": st.sampled_from(VERSIONS),
    "mtu": st.sampled_from([1024, 4096]),
    "seed": st.integers(0, 1000),
})


@MANY
@given(jobs, st.integers(1, 3), st.data())
def test_both_directions_of_one_rank_are_the_job_or_a_refusal(options: dict, iterations: int, data) -> None:
    job = example_job(**options)
    rank = data.draw(st.integers(0, job.communicator.ranks - 1))
    made = generate(job, iterations=iterations, ports=[rank])
    try:
        found = learnt(made)
    except UserError as error:
        # with two ranks nothing but the wire layout of several versions can be left open
        assert "explanations fit" in str(error) or "ring orders" in str(error)
        return
    same(found.job, job, iterations)
    assert all(item.reason and item.confidence for item in found.items)


@MANY
@given(jobs, st.data())
def test_with_the_version_and_all_ports_nothing_is_left_open(options: dict, data) -> None:
    job = example_job(**options)
    made = generate(job, iterations=2, ports=range(job.communicator.ranks))
    hints = Hints(version=job.communicator.nccl_version)
    try:
        found = learnt(made, hints)
    except UserError as error:  # buckets so small that channels and sizes admit two numbers of channels
        assert "explanations fit" in str(error)
        return
    same(found.job, job, 2)


@MANY
@given(jobs, st.sampled_from(["in", "out", "both"]), st.floats(0.001, 0.05), st.integers(0, 10**6))
def test_with_loss_never_another_job(options: dict, directions: str, loss: float, seed: int) -> None:
    job = example_job(**options)
    made = generate(
        job, iterations=3, ports=[0], directions=directions, loss=loss, reorder=0.02, duplicate=0.02, corrupt=0.01,
        seed=seed,
    )
    try:
        found = learnt(made)
    except UserError:
        return
    mine, theirs = placement(found.job, 3), placement(job, 3)
    for key, calls in mine.items():  # the end may be lost, and with it the later calls
        assert calls == theirs[key][: len(calls)]


@pytest.mark.usefixtures("eal")
@pytest.mark.parametrize("name", LEARNT)
def test_the_captures_of_this_repository_are_their_jobs(name: str) -> None:
    true = load_job(PCAPS / f"{name.split('.')[0]}.job.json")
    same(learn([PCAPS / name], Hints(), []).job, true, 2)


@pytest.mark.usefixtures("eal")
def test_the_capture_that_does_not_say_what_ddp_says_is_refused_with_what_it_says() -> None:
    with pytest.raises(UserError) as error:
        learn([PCAPS / "ring2-ll.pcap"], Hints(), [])
    assert "-1,146,919,195" in error.value.what and "2,034,256,397" in error.value.what
    assert "--job" in error.value.remedy


def test_pages_have_examples_that_can_be_learnt() -> None:
    """Whoever goes on with `learn` after an example of replay meets no refusal."""
    root = PCAPS.parent
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"pcaps/([\w-]+\.pcap\w*)", page.read_text())}
    assert named and named <= set(LEARNT)


def test_parameters_are_broadcast_in_the_groups_that_torch_makes() -> None:
    """Of 400 MB, in model order: torch's own function says where a group ends."""
    job = example_job(count=[30_000_000, 40_000_000, 30_000_001])
    meant = [torch.empty(entry.shape, device="meta") for entry in job.model]
    groups, _ = torch.distributed._compute_bucket_assignment_by_size(meant, [250 << 20])
    said = [call.tensors for call in job.collectives.startup if call.carries == "parameters"]
    assert len(said) > 1 and said == [[job.model[i].name for i in group] for group in groups]


def test_optimizer_reaches_every_parameter() -> None:
    found = learnt(generate(example_job(count=[700, 300]), iterations=3), Hints(optimizer=("sgd", {"lr": 0.5})))
    assert found.job.optimizer is not None
    assert found.job.optimizer.groups[0].params == [e.name for e in found.job.model]
    assert found.job.optimizer.groups[0].options == {"lr": 0.5}


def test_ll128_is_read_through_its_permutation() -> None:
    job = example_job(count=[5000, 300, 7001], protocol="ll128", ranks=3)
    same(learnt(generate(job, iterations=3, ports=[1])).job, job, 3)


def test_announcements_longer_than_a_start_are_fetched() -> None:
    job = example_job(count=[64] * 40, protocol="ll")
    same(learnt(generate(job, iterations=3)).job, job, 3)


@pytest.mark.parametrize("order", [[0, 2, 1, 3], [0, 3, 1, 2]])
def test_every_port_shows_the_ring_order(order: list[int]) -> None:
    job = example_job(ranks=4, count=[5000, 301], rings=[order])
    found = learnt(generate(job, iterations=2, ports=range(4)))
    assert found.job.communicator.rings == [order]
    same(found.job, job, 2)


# -- refusals: what cannot be known is named -------------------------------------------------------------


def test_one_rank_of_five_with_equal_chunks_has_two_places_in_the_ring() -> None:
    """40960 elements fill five chunks exactly: no size says which chunk is which."""
    job = example_job(ranks=5, count=[40960])
    made = generate(job, iterations=2, ports=[2])
    said = refusal(made)
    assert "at place 1 of the ring" in said and "at place 2 of the ring" in said
    log = parse_log("\n".join(f"h:1:2 [0] NCCL INFO Ring 00 : {(r - 1) % 5} -> {r} -> {(r + 1) % 5}" for r in range(5)))
    same(learnt(made, log=log).job, job, 2)


def test_two_byte_parameters_need_their_type() -> None:
    job = example_job(count=[5000, 301], protocol="simple", dtype="bfloat16")
    made = generate(job, iterations=2)
    said = refusal(made)
    assert "float16" in said and "bfloat16" in said
    same(learnt(made, Hints(dtype="bfloat16")).job, job, 2)


def test_calls_alone_are_not_cut_into_iterations_by_guess() -> None:
    job = example_job(count=[500, 301], protocol="simple", startup=False, rebuild=False)
    made = generate(job, iterations=3)
    assert "explanations fit" in refusal(made, Hints(dtype="float32"))
    found = learnt(made, Hints(dtype="float32", buckets=(500, 301))).job
    assert placement(found, 2) == placement(job, 2)
    assert "no program of calls" in refusal(made, Hints(dtype="float32", buckets=(500, 302)))


def test_odd_counts_in_ll_are_two_numbers() -> None:
    job = example_job(count=499, protocol="ll", startup=False, rebuild=False)
    made = generate(job, iterations=1)
    said = refusal(made, Hints(dtype="float32"))
    assert "AllReduce 499 float32" in said and "AllReduce 500 float32" in said


def test_mid_stream() -> None:
    made = generate(example_job(count=5000), iterations=2, first_iteration=3)
    assert "begins in mid-stream" in refusal(made)


@pytest.mark.parametrize("lost", [0, -1], ids=["its first packet", "its last packet"])
def test_a_first_message_that_is_not_whole(lost: int) -> None:
    """Without PSN 0 it may have gone before the capture began: that looks the same, and the refusal says both."""
    job = example_job(count=5000, protocol="simple", startup=False, rebuild=False)
    hints = Hints(dtype="float32", buckets=(5000,), algorithm="ring", version="2.27.7")
    made = generate(job, iterations=2)
    to = job.flows[0].qpns[0].to_bytes(3, "big")
    sent = {frame[51:54]: frame for _, frame in made.packets if frame[47:50] == to and 6 <= frame[42] <= 11}
    message = []
    for psn in sorted(sent):
        message.append(psn)
        if sent[psn][42] in (9, 11):  # with the immediate
            break
    assert message[0] == bytes(3) and len(message) > 1
    for port, packets in made.ports.items():
        made.ports[port] = [(at, frame) for at, frame in packets if (frame[47:50], frame[51:54]) != (to, message[lost])]
    if lost:
        assert placement(learnt(made, hints).job, 2) == placement(job, 2)
    else:
        assert "in mid-stream, or lacks a connection's first packet" in refusal(made, hints)


def test_a_start_of_ddps_sizes_that_says_other_things_is_refused_with_what_it_says() -> None:
    job = example_job(count=[700, 300])
    job.collectives.startup[1].count += 2  # then it is no announcement of this model, and its contents are anything
    said = refusal(generate(job, iterations=1, seed=5))
    gathered = [int(generate_values("int64", data_seed(5, -1, 0), rank, 1)[0]) for rank in range(2)]
    assert all(f"{number:,}" in said for number in gathered)


def test_a_start_that_was_not_captured_whole_is_refused_for_that() -> None:
    """The second packet of the Broadcast of shapes is lost: they are not learnt from what is left."""
    job = example_job(count=range(100, 180), protocol="simple", mtu=1024)
    made = generate(job, iterations=1)
    tensors = [torch.empty(entry.shape, device="meta") for entry in job.model]
    shapes = b"".join(n.to_bytes(8, "little") for t in tensors for n in (*t.shape, *t.stride()))
    before = len(made.ports[0])
    made.ports[0] = [(at, frame) for at, frame in made.ports[0] if shapes[1024:2048] not in frame]
    assert len(made.ports[0]) == before - 1
    said = refusal(made)
    assert f"{len(shapes):,} bytes" in said and "not all bytes" in said


def test_compressing_hook() -> None:
    job = example_job(count=5000, protocol="simple", rebuild=False)
    for calls in (job.collectives.iteration_0, job.collectives.steady):
        for call in calls:
            call.dtype = "float16"
    assert "compressing communication hook" in refusal(generate(job, iterations=2))


def test_nothing_of_nccl() -> None:
    made = generate(example_job(count=5000), iterations=1)
    made.ports[0] = []
    assert "no NCCL collective" in refusal(made)


def in_geneve(frame: bytes) -> bytes:
    udp = struct.pack(">HHHHBBHI", 50000, 6081, 16 + len(frame), 0, 0, 0, 0x6559, 0) + frame
    outer = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0, b"\x0a\0\0\1", b"\x0a\0\0\2")
    return frame[:12] + b"\x08\x00" + outer + udp


UNREADABLE = {
    "encapsulated: GENEVE": ("SPAN", in_geneve),
    "truncated": ("snap length", lambda f: f[:64]),
    "icrc": ("ICRC", lambda f: f[:-4] + bytes(4)),
}


@pytest.mark.parametrize("cause", UNREADABLE)
def test_packets_that_cannot_be_read_are_named(cause: str) -> None:
    remedy, damage = UNREADABLE[cause]
    made = generate(example_job(count=5000), iterations=1)
    made.ports[0] = [(time, damage(frame)) for time, frame in made.ports[0]]
    said = refusal(made)
    assert f"cannot be read: {cause}" in said and remedy in said


def test_optimizer_without_parameters() -> None:
    job = example_job(count=500, protocol="simple", startup=False, rebuild=False)
    hints = Hints(optimizer=("sgd", {"lr": 0.1}), dtype="float32", buckets=(500,))
    assert "not announced" in refusal(generate(job, iterations=1), hints)


@pytest.mark.parametrize("word", ["NVLS", "PAT", "COLLNET_DIRECT"])
def test_what_the_log_says_is_refused(word: str) -> None:
    log = parse_log(f"h:1:2 [0] NCCL INFO AllReduce: 20000 Bytes -> Algo {word} proto SIMPLE channel{{Lo..Hi}}={{0}}")
    said = refusal(generate(example_job(count=5000), iterations=1), log=log)
    assert "NCCL chose" in said and "NCCL_" in said


def test_given_manifest_names_flows_and_parameters() -> None:
    job = example_job(ranks=3, count=[5000, 301], protocol="ll")
    made = generate(job, iterations=2, ports=[1])
    given_job = job_from_dict({**job.to_dict(), "collectives": {}, "buckets": {}, "optimizer": None})
    found = learnt(made, Hints(given=given_job)).job
    same(found, job, 2)
    assert [e.name for e in found.model] == [e.name for e in job.model]


