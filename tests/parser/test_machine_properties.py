"""The state machine over the whole cross product that the wire model covers, against synth's truth.

Packets are fed from memory (Engine.feed is the function the ring loop calls); the same stages behind DPDK
are exercised in tests/flowcheck/captures/test_synth_replay.py.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser.machine import Engine

from flowcheck.job.model import Job, dtype_size
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import TransportOptions, example_job, generate
from tests.nccl_versions import VERSIONS

DTYPES = ["float32", "bfloat16", "float16", "float64", "int32", "int64"]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    algorithm = draw(st.sampled_from(["ring", "ring", "tree"]))
    channels = draw(st.sampled_from([1, 2, 3, 4, 8, 32] if algorithm == "ring" else [1, 2, 4, 8]))
    return example_job(
        ranks=draw(st.integers(2, 16)),
        channels=channels,
        algorithm=algorithm,
        protocol=draw(st.sampled_from(["ll", "ll128", "simple"])),
        count=draw(st.lists(st.integers(1, 30_000), min_size=1, max_size=3)),
        version=draw(st.sampled_from(VERSIONS)),
        dtype=draw(st.sampled_from(DTYPES)),
        mtu=draw(st.sampled_from([256, 512, 1024, 2048, 4096])),
        qps=draw(st.sampled_from([1, 1, 2, 4])),
        split_data_on_qps=draw(st.booleans()),
        adaptive_routing=draw(st.booleans()),
        ipv6=draw(st.booleans()),
        startup=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )


faults = st.fixed_dictionaries(
    {
        "loss": st.sampled_from([0.0, 0.0, 0.01, 0.1]),
        "reorder": st.sampled_from([0.0, 0.05]),
        "duplicate": st.sampled_from([0.0, 0.05]),
        "corrupt": st.sampled_from([0.0, 0.02]),
    }
)
transports = st.builds(
    TransportOptions,
    vlan=st.sampled_from([None, 7]),
    retransmit=st.sampled_from([0.0, 0.2]),
    cut_ranks=st.sampled_from([frozenset(), frozenset({0}), frozenset({1})]),
)


def run(plan: JobPlan, streams: list[list[tuple[int, bytes]]]) -> tuple[Engine, dict]:
    """Feed all streams in turns; {(iteration, bucket): (bytes, element mask, cells that differed)}."""
    engine, out = Engine(plan.engine), {}
    position = [0] * len(streams)

    def close() -> None:
        iteration = engine.oldest
        cells, region = engine.cells(iteration), engine.region(iteration)
        for place in plan.iteration_buckets(iteration):
            size = place.nbytes // place.elements
            mask = np.repeat(cells[place.offset // 8 : -(-(place.offset + place.nbytes) // 8)], 8 // size)[
                : place.elements
            ]
            data = region[place.offset : place.offset + place.nbytes].copy()
            out[iteration, place.index] = (data, mask, engine.copies(iteration)[0])
        engine.retire()

    while any(at < len(stream) for at, stream in zip(position, streams, strict=True)):
        moved = False
        for s, stream in enumerate(streams):
            for _ in range(200):
                if position[s] == len(stream) or not engine.feed(s, stream[position[s]][1]):
                    break
                position[s] += 1
                moved = True
        if not moved:
            close()
    engine.finish()
    while engine.oldest <= engine.begun:
        close()
    return engine, out


def mask_of(elements: int, ranges: list[list[int]]) -> np.ndarray:
    mask = np.zeros(elements, bool)
    for start, end in ranges:
        mask[start:end] = True
    return mask


@settings(max_examples=250, derandomize=True)
@given(
    jobs(),
    st.integers(1, 6),
    st.lists(st.integers(0, 15), min_size=1, max_size=2),
    st.sampled_from(["both", "both", "in", "out"]),
    faults,
    transports,
    st.booleans(),
    st.integers(0, 10**6),
)
def test_placed_bytes_are_the_truth(job, iterations, ports, directions, fault, transport, apart, seed) -> None:
    ports = sorted({port % job.communicator.ranks for port in ports})
    made = generate(
        job, iterations=iterations, ports=ports, directions=directions, seed=seed, transport=transport, **fault
    )
    streams = list(made.ports.values()) if apart else [made.packets]
    plan = plan_job(job, streams=len(streams))
    engine, out = run(plan, streams)
    assert engine.disagreements() == []
    clean = not any(fault.values()) and not transport.retransmit
    late = sum(engine.outcomes(s)[name][0] for s in range(len(streams)) for name in ("late", "stale", "unanchored"))
    size = dtype_size(job.gradients.dtype)
    for iteration in made.truth["iterations"]:
        for bucket in iteration["buckets"]:
            key = iteration["iteration"], bucket["bucket"]
            present = mask_of(bucket["elements"], bucket["present"])
            if key not in out:
                assert not present.any()
                continue
            data, placed, differed = out[key]
            truth = np.frombuffer(made.reduced[key].tobytes(), np.uint8).reshape(-1, size)
            assert differed == 0
            assert (data.reshape(-1, size)[placed] == truth[placed]).all()
            assert not (placed & ~present).any()
            if clean:
                assert (placed == mask_of(bucket["elements"], bucket["carried"])).all()
            elif not late:
                assert (placed == present).all()
    for s, stream in enumerate(streams):
        assert sum(packets for packets, _ in engine.outcomes(s).values()) == len(stream)


def test_an_unknown_half_of_the_trees_is_refused() -> None:
    """With an odd number of channels nothing says which use the second tree: no guess."""
    from flowcheck.errors import UserError

    with pytest.raises(UserError, match="second tree"):
        plan_job(example_job(ranks=4, channels=3, algorithm="tree"))


@pytest.mark.parametrize("count", [[5000], [700, 20_000]])
def test_every_cleaned_slot_is_counted(count: list[int]) -> None:
    """LL's 8 steps that clean whole slots shift all later PSNs, also where an iteration begins amid them."""
    job = example_job(count=count)
    per = 2 * len(count)  # steps of an iteration: PSNs are right behind the first lap only if all 8 were counted
    for later in (0, 1000):
        first = 2**31 // per + later
        made = generate(job, iterations=3, first_iteration=first)
        engine, out = run(plan_job(job), [made.packets])
        assert engine.disagreements() == []
        for key, truth in made.reduced.items():
            data, placed, _ = out[key]
            assert placed.all() and data.tobytes() == truth.tobytes()


def test_a_wrapped_psn_is_no_beginning() -> None:
    """SIMPLE in mid-stream with no clear-to-send in sight cannot be entered, also not where the PSN comes by 0.

    12 messages of 64 packets an iteration: the wrap falls on the first packet of the fifth, and nothing on the
    wire would ever tell that it is not the job's first.
    """
    job = example_job(ranks=4, count=1 << 19, protocol="simple", startup=False, rebuild=False)
    made = generate(job, iterations=4, first_iteration=2**24 // 768 - 1, ports=[0, 2], directions="out")
    engine, out = run(plan_job(job), [made.packets])
    assert not any(placed.any() for _, placed, _ in out.values())
    assert engine.outcomes(0)["placed"] == (0, 0) and engine.outcomes(0)["unanchored"][0] > 0
