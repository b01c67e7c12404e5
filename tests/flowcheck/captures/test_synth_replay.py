"""synth -> replay, through files, DPDK and every stage: exactly the truth, or the right incomplete set.

The generator (lab.synth) and the reader (parser) were written apart from the same reference and
share no code, so agreement over their whole common domain is evidence for both.
"""

import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from flowcheck.job.model import Job, dtype_size
from flowcheck.offline.replay import ReplayOptions, replay
from lab.synth import Synthesis, example_job, generate
from tests.flowcheck.replayed import check_buckets, mask_of, replayed
from tests.nccl_versions import VERSIONS

pytestmark = pytest.mark.usefixtures("eal")
REPLAY = settings(
    max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

jobs = st.builds(
    example_job,
    ranks=st.integers(2, 8),
    channels=st.integers(1, 4),
    protocol=st.sampled_from(["ll", "simple"]),
    count=st.lists(st.integers(1, 20_000), min_size=1, max_size=3),
    mtu=st.sampled_from([1024, 4096]),
    version=st.sampled_from(VERSIONS),
    seed=st.integers(0, 1000),
)


def _replay(job: Job, made: Synthesis, **options: object) -> tuple[dict, str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        report, failure = replayed(job, made, Path(folder), **options)  # type: ignore[arg-type]
        return report, failure, sorted(p.name for p in Path(folder, "out").glob("step-*"))


def _ranges(mask: np.ndarray) -> list[list[int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(int), [0]))))
    return edges.reshape(-1, 2).tolist()


def _check_placed(job: Job, made: Synthesis, report: dict, exact: bool) -> None:
    """Every placed byte is the truth's; the missing ones are named. exact: all that was carried is placed."""
    size = dtype_size(job.gradients.dtype)
    reported = {i["iteration"]: i for i in report["iterations"]}
    for iteration in made.truth["iterations"]:
        for bucket in iteration["buckets"]:
            truth = made.reduced[iteration["iteration"], bucket["bucket"]].tobytes()
            present = mask_of(bucket["elements"], bucket["present"])
            if iteration["iteration"] not in reported:
                assert not present.any()
                continue
            found = reported[iteration["iteration"]]["buckets"][bucket["bucket"]]
            placed = mask_of(bucket["elements"], [[p["start"], p["end"]] for p in found["placed"]])
            for part in found["placed"]:
                assert part["sha256"] == hashlib.sha256(truth[part["start"] * size : part["end"] * size]).hexdigest()
            assert not (placed & ~present).any()
            assert sum(found["missing"].values()) == bucket["elements"] - placed.sum()
            assert (
                found["missing"].get("not_mirrored", 0)
                == bucket["elements"] - mask_of(bucket["elements"], bucket["carried"]).sum()
            )
            if exact:
                assert _ranges(placed) == bucket["carried"]


@REPLAY
@given(jobs, st.integers(1, 4), st.data())
def test_both_directions_of_one_rank_are_everything(job: Job, iterations: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, job.communicator.ranks - 1))
    made = generate(job, iterations=iterations, ports=[rank], seed=iterations)
    report, failure, steps = _replay(job, made)
    assert failure == ""
    check_buckets(made, report)
    assert len(report["iterations"]) == iterations and steps == [f"step-{iterations:06d}"]
    assert report["parameters"][0]["complete"]


@REPLAY
@given(jobs, st.data())
def test_outbound_of_two_ranks_is_everything(job: Job, data: st.DataObject) -> None:
    pair = data.draw(st.lists(st.integers(0, job.communicator.ranks - 1), min_size=2, max_size=2, unique=True))
    made = generate(job, iterations=2, ports=pair, directions="out")
    report, _, _ = _replay(job, made)
    assert report["totals"]["iterations_complete"] == 2
    _check_placed(job, made, report, exact=True)


@REPLAY
@given(jobs, st.sampled_from(["in", "out"]), st.data())
def test_one_direction_of_one_rank_is_the_right_incomplete_set(job: Job, direction: str, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, job.communicator.ranks - 1))
    made = generate(job, iterations=2, ports=[rank], directions=direction)
    if not any(b["carried"] for i in made.truth["iterations"] for b in i["buckets"]):
        return  # so few elements that this direction carries none of them
    report, failure, _ = _replay(job, made)
    _check_placed(job, made, report, exact=True)
    complete = all(b["carried"] == [[0, b["elements"]]] for i in made.truth["iterations"] for b in i["buckets"])
    if not complete:
        assert failure and report["totals"]["iterations_complete"] < 2


@REPLAY
@given(jobs, st.floats(0.002, 0.2), st.integers(0, 10**6), st.booleans())
def test_with_loss_every_placed_byte_is_right_and_every_missing_one_named(
    job: Job, loss: float, seed: int, two_ports: bool
) -> None:
    ports = [0, 1] if two_ports else [0]
    made = generate(job, iterations=3, ports=ports, loss=loss, reorder=0.02, duplicate=0.02, corrupt=0.01, seed=seed)
    if not any(b["present"] for i in made.truth["iterations"] for b in i["buckets"]):
        return
    report, failure, steps = _replay(job, made)
    _check_placed(job, made, report, exact=False)
    gaps = {
        i["iteration"] for i in made.truth["iterations"] for b in i["buckets"] if b["present"] != [[0, b["elements"]]]
    }
    for iteration in report["iterations"]:
        assert not (iteration["iteration"] in gaps and iteration["verdict"]["complete"])
    published = report["totals"]["iterations_published"]
    assert steps == ([f"step-{published:06d}"] if published and not _weights_lost(report) else [])
    if gaps:
        assert failure


def _weights_lost(report: dict) -> bool:
    return not all(p["complete"] for p in report["parameters"])


def test_a_capture_that_begins_in_mid_stream(tmp_path: Path) -> None:
    """Back at the next iteration; published only on top of weights of just that step."""
    from flowcheck.checkpoint.directory import load_step

    job = example_job(ranks=3, channels=2, count=[4000, 9000], protocol="ll", version="2.19.4", seed=4)
    whole = generate(job, iterations=8, ports=[1], seed=9)
    (tmp_path / "job.json").write_text(job.to_json())
    whole.write(tmp_path / "whole.pcap")

    def go(capture: str, out: str, **options: object) -> tuple[dict, str]:
        report, failure = replay(
            ReplayOptions([tmp_path / capture], tmp_path / "job.json", tmp_path / out, **options),  # type: ignore[arg-type]
            Console(quiet=True),
        )
        return report.to_dict(), failure

    assert go("whole.pcap", "whole", every=1)[1] == ""
    made = generate(job, iterations=5, first_iteration=3, ports=[1], seed=9)
    made.write(tmp_path / "late.pcap")
    report, failure = go("late.pcap", "unset")
    assert [i["iteration"] for i in report["iterations"]] == [3, 4, 5, 6, 7]
    assert all(i["verdict"]["complete"] for i in report["iterations"]) and "no initial weights" in failure
    for i in report["iterations"]:
        for b in i["buckets"]:
            truth = whole.reduced[i["iteration"], b["index"]].tobytes()
            assert b["sha256"] == hashlib.sha256(truth).hexdigest()
    report, failure = go("late.pcap", "wrong", init=tmp_path / "whole" / "step-000002")
    assert "previous" in failure and not list((tmp_path / "wrong").glob("step-*"))
    report, failure = go("late.pcap", "right", init=tmp_path / "whole" / "step-000003")
    assert failure == ""
    last, same = (load_step(tmp_path / name / "step-000008").parameters for name in ("whole", "right"))
    assert all(last[name].equal(same[name]) for name in last)


@pytest.mark.parametrize(("icrc", "marks"), [(True, []), (False, ["icrc off"])])
def test_unchecked_packets_leave_a_mark_on_everything_that_rests_on_them(
    tmp_path: Path, replayed, icrc: bool, marks: list[str]
) -> None:
    job = example_job(ranks=2, count=3000, protocol="ll")
    (tmp_path / "job.json").write_text(job.to_json())
    generate(job, iterations=2).write(tmp_path / "all.pcap")
    report, failure, out = replayed(tmp_path / "all.pcap", tmp_path / "job.json", icrc=icrc)
    assert failure == ""
    assert [i["verdict"]["unproven"] for i in report["iterations"]] == [marks, marks]
    assert [mark for mark in report["unproven"] if "icrc" in mark] == marks
    checkpoint = json.loads((out / "step-000002" / "manifest.json").read_text())
    assert [mark for mark in checkpoint["unproven"] if "icrc" in mark] == marks
    told = json.loads((out / "report.json").read_text())
    assert [mark for mark in told["unproven"] if "icrc" in mark] == marks
