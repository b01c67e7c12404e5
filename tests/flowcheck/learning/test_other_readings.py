"""Traffic that has a second reading: decided by evidence, refused with both named, or marked with the very doubt."""

from dataclasses import replace

import numpy as np
import pytest

from flowcheck.errors import UserError
from flowcheck.job.model import Collective, Job
from flowcheck.learning import job as learning
from flowcheck.learning.hints import Hints, parse_optimizer, parse_ranks
from flowcheck.learning.job import Learnt
from flowcheck.learning.logs import parse_log
from lab.synth import Synthesis, example_job, generate

from .oracle import doubts, learnt, placement, refusal, same


def bare_job(**options: object) -> Job:
    return example_job(startup=False, rebuild=False, **options)  # type: ignore[arg-type]


def confidence(found: Learnt, what: str) -> str:
    return next(item.confidence for item in found.items if item.what == what)


# -- ring or tree ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("protocol", ["ll", "simple", "ll128"])
@pytest.mark.parametrize("count", [5000, [700, 30], 60_000])
def test_a_tree_of_two_ranks_is_no_ring_of_wider_elements(protocol: str, count: object, dtype: str) -> None:
    job = example_job(count=count, protocol=protocol, algorithm="tree", dtype=dtype)
    found = learnt(generate(job, iterations=4, ports=[0]))
    assert found.job.communicator.algorithm == "tree" and found.job.gradients.dtype == dtype
    assert [call.op for call in found.job.collectives.startup] == ["AllGather", "Broadcast", "Broadcast"]
    same(found.job, job, 4)


def test_ring_and_tree_by_turns() -> None:
    job = example_job(count=[300, 40_000])
    job.collectives.steady[0].algorithm = "tree"
    found = learnt(generate(job, iterations=3)).job
    assert [call.algorithm for call in found.collectives.steady] == ["tree", None]
    same(found, job, 3)


def test_calls_alone_may_be_a_ring_or_a_tree() -> None:
    made = generate(bare_job(count=4096, algorithm="tree"), iterations=2)
    said = refusal(made, Hints(dtype="float32"))
    assert "ring or tree" in said and "tree AllReduce 4096" in said and "--algorithm" in said
    found = learnt(made, Hints(dtype="float32", buckets=(4096,), algorithm="tree"))
    assert placement(found.job, 2) == placement(bare_job(count=4096, algorithm="tree"), 2)
    log = parse_log("h:1:2 [0] NCCL INFO AllReduce: 16384 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}")
    assert "ring or tree" not in refusal(made, Hints(dtype="float32"), log)


def test_many_versions_of_one_explanation_do_not_hide_another() -> None:
    """One message, one direction, no clear-to-send: every version says that it came from the root, and, were the sender
    the leaf, every version would say so too."""
    job = bare_job(ranks=4, count=563, algorithm="tree", version="2.20.5")
    made = generate(job, iterations=1, ports=[0], directions="in")
    said = refusal(made, Hints(dtype="float32", buckets=(563,)))
    assert "the place in the ring" in said and "place 0" in said and "place 1" in said


def test_connected_channels_decide_which_tree_a_channel_has() -> None:
    """Two channels in use are one tree of four channels, or two trees of two."""
    job = example_job(count=16384, protocol="simple", algorithm="tree", channels=4, version="2.22.3")
    made = generate(job, iterations=3)
    assert "the number of channels" in refusal(made)
    log = parse_log("h:1:2 [0] NCCL INFO 4 coll channels, 0 collnet channels, 0 nvls channels, 4 p2p channels")
    same(learnt(made, Hints(dtype="float32"), log).job, job, 3)


def test_a_tree_of_four_ranks_with_its_flows_given() -> None:
    job = example_job(ranks=4, count=[5000, 301], algorithm="tree", channels=2)
    made = generate(job, iterations=3, ports=[2])
    found = learnt(made, Hints(given=job)).job
    assert found.communicator.algorithm == "tree"
    same(found, job, 3)


def test_the_protocol_shows_behind_empty_chunks() -> None:
    """Of 8 elements over 3 ranks the first chunks are empty: as SIMPLE of two ranks these would be 8 float64."""
    job = bare_job(ranks=3, count=[8, 8], version="2.12.12", adaptive_routing=True)
    made = generate(job, iterations=3, ports=[1], directions="in")
    told = Hints(dtype="float32", buckets=(8, 8), version="2.12.12", ranks={"10.0.0.1": 0, "10.0.0.2": 1})
    found = learnt(made, told)
    assert found.job.communicator.protocol == "ll"
    assert placement(found.job, 3).items() <= placement(job, 3).items()
    with pytest.raises(UserError):
        learnt(made, replace(told, dtype="float64"))


# -- split communicators ---------------------------------------------------------------------------------


def test_tags_of_a_split_communicator_are_probable_for_calls_alone() -> None:
    job = bare_job(count=4096)
    job.communicator.parent_ranks = [1, 0]
    found = learnt(generate(job, iterations=2), Hints(dtype="float32", buckets=(4096,)))
    assert confidence(found, "rank of each address") == "probable" and "ranks" in doubts(found)
    told = Hints(dtype="float32", buckets=(4096,), ranks={"10.0.0.1": 0, "10.0.0.2": 1})
    sure = learnt(generate(job, iterations=2), told)
    assert placement(sure.job, 2) == placement(job, 2) and "ranks" not in doubts(sure)
    assert sure.job.communicator.parent_ranks == [1, 0]


def test_announcements_show_the_true_rank_zero_of_a_split_communicator() -> None:
    job = example_job(count=[5000, 301])
    job.communicator.parent_ranks = [1, 0]
    found = learnt(generate(job, iterations=3))
    same(found.job, job, 3)
    assert found.job.communicator.parent_ranks == [1, 0] and "ranks" not in doubts(found)


def test_tags_beyond_the_number_of_ranks() -> None:
    job = example_job(ranks=4, count=[5000, 301])
    job.communicator.parent_ranks = [0, 8, 16, 24]
    for ports in (range(4), [1]):
        found = learnt(generate(job, iterations=2, ports=ports))
        assert found.job.communicator.ranks == 4
        same(found.job, job, 2)
    made = generate(job, iterations=2, ports=range(4))
    assert "absent" not in refusal(made, Hints(ranks={"10.0.0.1": 9, "10.0.0.2": 1}))


# -- one communicator or several, whole calls or cut ones ------------------------------------------------


def test_two_communicators_of_the_same_hosts() -> None:
    one, other = bare_job(count=65536, protocol="simple", seed=1), bare_job(count=65536, protocol="simple", seed=2)
    made, second = generate(one, iterations=1, seed=1), generate(other, iterations=1, seed=2)  # buffers of their own
    made.ports[0] = sorted(made.ports[0] + second.ports[0])
    said = refusal(made, Hints(dtype="float32", algorithm="ring"))
    assert "one communicator with 2 channels" in said and "2 communicators" in said
    hints = Hints(dtype="float32", algorithm="ring", buckets=(131072,))  # that is the word of whoever says it
    assert learnt(made, hints).job.communicator.channels == 2


def _cut(made: Synthesis, messages: int) -> Synthesis:
    """Without everything behind the first `messages` data messages of each direction."""
    kept, seen = [], {}
    for time, frame in made.ports[0]:
        opcode, qp = frame[42], frame[42 + 5 : 42 + 8]
        if opcode in (6, 7, 9, 11) and seen.get(qp, 0) >= messages:
            continue
        seen[qp] = seen.get(qp, 0) + (opcode in (9, 11))  # the end of a message with its immediate
        kept.append((time, frame))
    made.ports[0] = kept
    return made


def test_a_call_cut_between_its_loops_is_no_shorter_call() -> None:
    job = bare_job(count=20_000)  # a loop is 16384 float32
    made = _cut(generate(job, iterations=1), 2)
    said = refusal(made, Hints(dtype="float32", algorithm="ring"))
    assert "AllReduce 16384 float32" in said and "the capture's end cuts" in said
    found = learnt(made, Hints(dtype="float32", algorithm="ring", buckets=(20_000,))).job
    assert placement(found, 1) == placement(job, 1)


def test_an_unread_bucket_layout_is_not_taken_for_none() -> None:
    """Rank 0's port ends before the broadcast of the new layout, rank 1's goes on: its buckets look like before."""
    job = example_job(count=[16384, 16384], protocol="ll128", algorithm="tree", dtype="float64")
    made = generate(job, iterations=2, ports=[0, 1], directions="out")
    packets = made.ports[0]
    first = generate(replace_rebuild(job), iterations=1, ports=[0], directions="out").ports[0]
    made.ports[0] = packets[: len(first)]
    assert "rebuilt bucket layout" in refusal(made)


def replace_rebuild(job: Job) -> Job:
    return replace(job, collectives=replace(job.collectives, steady=[], rebuild=[]))


# -- what no capture can tell ----------------------------------------------------------------------------


@pytest.mark.parametrize("count,also", [([5000], ""), ([1, 1], "shift"), ([301, 302], "shift")])
def test_an_equal_call_that_is_no_gradient_is_named_as_the_doubt(count: list[int], also: str) -> None:
    job = example_job(count=count)
    made = generate(job, iterations=3)
    found = learnt(made, Hints(dtype="float32"))
    text = next(text for text in found.doubts if text.startswith("iterations:"))
    assert also in text and confidence(found, "iterations") == "probable"
    assert found.to_dict()["doubts"] == found.doubts
    if count == [301, 302]:
        assert "301 to 302" in text


def test_without_a_rebuilt_layout_even_the_first_call_may_be_foreign() -> None:
    """An AllReduce of just the gradients' size before them: nothing on the wire says which is which."""
    job = example_job(count=5000, rebuild=False)
    job.collectives.iteration_0.insert(0, Collective("AllReduce", 5000, "float32", carries="other"))
    assert "From the very first on" in learnt(generate(job, iterations=1)).doubts[0]
    rebuilt = learnt(generate(example_job(count=5000), iterations=3))
    assert "From the second one on" in next(text for text in rebuilt.doubts if text.startswith("iterations:"))


def test_channels_by_qp_order_are_certain_only_where_they_differ() -> None:
    alike = learnt(generate(example_job(count=1 << 20, channels=4, protocol="simple"), iterations=2))
    assert confidence(alike, "channels") == "probable" and "channels" in doubts(alike)
    differ = learnt(generate(example_job(count=[200_001], channels=2, protocol="simple"), iterations=2))
    assert confidence(differ, "channels") == "certain" and "channels" not in doubts(differ)


# -- what was said ---------------------------------------------------------------------------------------


def test_a_version_that_the_wire_rules_out() -> None:
    made = generate(example_job(count=5000, version="2.19.4"), iterations=2)
    said = refusal(made, Hints(version="2.27.7"))
    assert "2.27.7" in said and "2.12-2.19" in said
    log = parse_log("h:1:2 [0] NCCL INFO NCCL version 2.30.7+cuda12.8")
    assert "--nccl-log says NCCL 2.30.7" in refusal(made, log=log)
    assert "--nccl-version says NCCL 2.19.4" in refusal(made, Hints(version="2.19.4"), log)
    assert learnt(made, Hints(version="2.18.1")).job.communicator.nccl_version == "2.18.1"
    big = generate(example_job(count=5000, version="2.29.2"), iterations=2)
    assert "big-endian" in refusal(big, Hints(version="2.27.7"))


@pytest.mark.parametrize("text", ["2", "2.x", "3.1.1", "2.99.1", "new", "2.27.7;"])
def test_no_version(text: str) -> None:
    with pytest.raises(UserError, match="--nccl-version"):
        Hints(version=text)


@pytest.mark.parametrize("text", ["sgd", "sgd:momentum=0.9", "sgd:lr=0.1,betas=0.9/0.99", "adam:lr=-1", "adam:lr=true",
                                  "adamw:lr=0.1,betas=0.9", "adam:lr=0.1,betas=0.9/1.5", "sgd:lr=nan"])
def test_an_optimizer_that_replay_would_refuse(text: str) -> None:
    with pytest.raises(UserError, match="--optimizer"):
        Hints(optimizer=parse_optimizer(text))


def test_ranks_that_say_nothing() -> None:
    made = generate(example_job(count=5000), iterations=1)
    said = refusal(made, Hints(ranks={"10.9.9.9": 0}))
    assert "10.9.9.9" in said and "10.0.0.1" in said
    with pytest.raises(UserError, match=r"rank 0 and rank 1"):
        parse_ranks(["10.0.0.1=0", "10.0.0.1=1"])
    with pytest.raises(UserError, match="two addresses"):
        parse_ranks(["10.0.0.1=0", "10.0.0.2=0"])
    assert "the ranks do not fit" in refusal(made, Hints(ranks={"10.0.0.1": 5, "10.0.0.2": 6}))


def test_buckets_beside_an_announcement() -> None:
    made = generate(example_job(count=[700, 300]), iterations=3)
    said = refusal(made, Hints(buckets=(500, 500)))
    assert "500, 500" in said and "700, 300" in said
    same(learnt(made, Hints(buckets=(700, 300))).job, example_job(count=[700, 300]), 3)


# -- refusals that help ----------------------------------------------------------------------------------


def test_every_learnt_thing_has_a_value() -> None:
    found = learnt(generate(example_job(ranks=4, count=[5000, 301], channels=2), iterations=2, ports=[1]))
    assert all(item.what and item.value and item.reason for item in found.items)


def test_explanations_are_told_apart_with_the_option_that_decides() -> None:
    made = generate(bare_job(count=499), iterations=1)
    with pytest.raises(UserError) as error:
        learnt(made, Hints(algorithm="ring"))
    said = str(error.value)
    assert "They differ in the element type (float32, float16, float64" in said
    assert "--dtype" in error.value.remedy and "--buckets" in error.value.remedy
    assert "--nccl-version" not in error.value.remedy


def test_a_start_up_that_is_not_ddps_says_so() -> None:
    job = example_job(count=5000)
    job.collectives.startup[1].count += 2  # its contents are then drawn by seed
    said = refusal(generate(job, iterations=2))
    assert "DDP's start-up" in said and "list the job's calls" in said


def test_a_example_job_with_a_foreign_call_names_the_call() -> None:
    job = example_job(count=5000)
    job.collectives.steady.append(Collective("AllReduce", 2, "int32", carries="other"))
    said = refusal(generate(job, iterations=3))
    assert "it is a DDP job" in said and "AllReduce of 5000 float32" in said


def test_zeros_of_one_rank_are_no_modified_nccl() -> None:
    """Gradients repeat, one rank contributes zeros, and each chunk's first elements are zero too."""

    def gradients(iteration: int, bucket: int, rank: int) -> np.ndarray:
        out = np.arange(6000, dtype=np.float32) if rank == 0 else np.zeros(6000, np.float32)
        out[:64] = 0
        return out

    for job in (bare_job(count=6000), example_job(count=6000)):
        made = generate(job, iterations=6, gradients=gradients)
        found = learnt(made, Hints(dtype="float32", buckets=(6000,), algorithm="ring"))
        assert placement(found.job, 3) == placement(job, 3)


# -- cost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks,channels,count", [(8, 16, [400_000, 30_000]), (20, 2, [40_000])])
def test_one_rank_of_many(ranks: int, channels: int, count: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "BUDGET", 25_000)  # an eighth of what a search may cost
    job = example_job(ranks=ranks, channels=channels, count=count)
    seen: list[tuple[int, int]] = []
    made = generate(job, iterations=2, ports=[1])
    found = learnt(made, Hints(), None, lambda done, total: seen.append((done, total)))
    same(found.job, job, 2)
    assert seen and all(done < total for done, total in seen)


def test_a_search_that_ends_early_says_what_was_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "BUDGET", 300)
    said = refusal(generate(example_job(ranks=8, channels=4, count=40_000), iterations=2, ports=[1]))
    assert "the others were not tried" in said
