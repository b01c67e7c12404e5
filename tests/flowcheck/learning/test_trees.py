"""Double binary trees of more than two ranks: who talks to whom, and when, says who is whose parent."""


import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.learning.hints import Hints
from flowcheck.learning.logs import parse_log
from lab.synth import Synthesis, example_job, generate
from tests.nccl_versions import VERSIONS

from .oracle import doubts, learnt, placement, refusal, same, unless_refused

MANY = settings(max_examples=25, derandomize=True)
TOLD = Hints(version="2.27.7")


@pytest.mark.parametrize("channels", [1, 2, 4])
@pytest.mark.parametrize(("ranks", "rank"), [(3, 0), (3, 1), (3, 2), (4, 0), (4, 1), (4, 2), (4, 3), (8, 0), (8, 5)])
def test_root_inner_and_leaf(ranks: int, rank: int, channels: int) -> None:
    job = example_job(ranks=ranks, count=[5000, 301], algorithm="tree", channels=channels)
    found = learnt(generate(job, iterations=3, ports=[rank]), TOLD)
    assert (found.job.communicator.algorithm, found.job.communicator.ranks) == ("tree", ranks)
    same(found.job, job, 3)
    assert "who talks to whom" in next(item.reason for item in found.items if item.what == "tree")


def test_all_ports_and_ring_calls_between() -> None:
    job = example_job(ranks=5, count=[5000, 301], algorithm="tree", channels=2, protocol="simple")
    job.collectives.steady[0].algorithm = "ring"
    found = learnt(generate(job, iterations=3, ports=range(5)), TOLD)
    assert {call.algorithm for call in found.job.collectives.steady} == {"ring", None}
    same(found.job, job, 3)


def test_ring_calls_beside_a_tree_need_the_whole_ring() -> None:
    """With one rank mirrored its place in the ring is a guess: chunks of equal size would be exchanged unseen."""
    job = example_job(ranks=4, count=[32768], algorithm="tree", rings=[[0, 3, 1, 2]])
    job.collectives.steady[0].algorithm = "ring"
    assert refusal(generate(job, iterations=3, ports=[2]), TOLD)
    job = example_job(ranks=4, count=[32768], algorithm="tree")
    job.collectives.steady[0].algorithm = "ring"
    made = generate(job, iterations=3, ports=[2])
    assert "whose order does not show" in refusal(made, TOLD)
    log = parse_log("\n".join(f"h:1:2 [0] NCCL INFO Ring 00 : {(r - 1) % 4} -> {r} -> {(r + 1) % 4}" for r in range(4)))
    same(learnt(made, TOLD, log).job, job, 3)


jobs = st.fixed_dictionaries({
    "ranks": st.integers(3, 8),
    "channels": st.sampled_from([1, 2, 4]),
    "qps": st.sampled_from([1, 1, 2]),
    "protocol": st.sampled_from(["ll", "simple", "ll128"]),
    "count": st.lists(st.integers(2, 40_000), min_size=1, max_size=2),
    "version": st.sampled_from(VERSIONS),
    "seed": st.integers(0, 1000),
})


@MANY
@given(jobs, st.booleans(), st.booleans(), st.data())
def test_the_job_or_a_refusal(options: dict, announces: bool, lossy: bool, data: st.DataObject) -> None:
    """Also where clear-to-send tags are numbers in a parent communicator: a wrong parent is found out by time."""
    job = example_job(**options, algorithm="tree", startup=announces, rebuild=announces)
    n = options["ranks"]
    if data.draw(st.booleans()):
        job.communicator.parent_ranks = list(data.draw(st.permutations(range(n))))
    ports = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
    made = generate(job, iterations=2, ports=sorted(ports), loss=0.01 * lossy)
    hints = Hints(version=options["version"], dtype="float32", buckets=() if announces else tuple(options["count"]))
    found = unless_refused(made, hints)
    if found is None:
        return
    if doubts(found) & {"channels", "ranks", "queues"}:
        return  # named: which connection is which channel
    mine, theirs = placement(found.job, 2), placement(job, 2)
    for key, calls in mine.items():
        assert calls == (theirs[key][: len(calls)] if lossy else theirs[key])


def _swapped(made: Synthesis, early: int) -> Synthesis:
    """Results come `early` nanoseconds earlier."""
    down = {flow.qpns[0] for flow in made.job.flows if (flow.src, flow.dst) in ((0, 2), (2, 1))}
    for port, packets in made.ports.items():
        made.ports[port] = sorted(
            (time - early * (int.from_bytes(frame[47:50], "big") in down and frame[42] in range(6, 12)), frame)
            for time, frame in packets
        )
    return made


def test_results_before_their_sums_are_another_tree() -> None:
    """Root and leaf exchanged: sizes are all the same, only time tells."""
    job = example_job(ranks=3, count=5000, algorithm="tree", startup=False, rebuild=False)
    hints = Hints(version="2.27.7", dtype="float32", buckets=(5000,), algorithm="tree")
    made = generate(job, iterations=2, ports=[2])
    log = parse_log("\n".join(f"h:1:2 [0] NCCL INFO Ring 00 : {(r - 1) % 3} -> {r} -> {(r + 1) % 3}" for r in range(3)))
    assert "the number of ranks (3, 4)" in refusal(made, hints)
    found = learnt(made, hints, log)
    mine, theirs = placement(found.job, 2), placement(job, 2)
    assert mine and mine == {key: theirs[key] for key in mine}
    assert "before it has what they are made of" in refusal(_swapped(made, 40_000), hints, log)


def test_a_tree_whose_ranks_nobody_names() -> None:
    job = example_job(ranks=4, count=5000, algorithm="tree", channels=2)
    made = generate(job, iterations=2, ports=[2], directions="in")
    assert "no double binary tree" in refusal(made)
    # two pairs of hosts are no ring either
    other = example_job(ranks=4, count=5000, algorithm="tree", startup=False, rebuild=False)
    other.communicator.parent_ranks = [7, 6, 5, 4]
    told = Hints(version="2.27.7", dtype="float32", buckets=(5000,))
    assert refusal(generate(other, iterations=2, ports=[0, 3]), told)
