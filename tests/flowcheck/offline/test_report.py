import hashlib
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flowcheck.errors import EnvironmentProblem, InternalError
from flowcheck.job.model import dtype_size
from flowcheck.offline.report import (
    CaptureReport,
    CheckpointReport,
    FlowReport,
    Report,
    broadcast_report,
    bucket_report,
    write_report,
)
from flowcheck.offline.summary import print_summary
from flowcheck.rebuild.iteration.evidence import BucketCoverage
from flowcheck.rebuild.iteration.verdict import Clause, Verdict
from flowcheck.rebuild.plan import BucketPlace

ROOT = Path(__file__).parents[3]


def sha(data):
    return hashlib.sha256(bytes(data)).hexdigest()


def bucket(index, dtype, data, placed, missing=None):
    elements = data.nbytes // dtype_size(dtype)
    covered = sum(end - start for start, end in placed)
    return BucketCoverage(BucketPlace(index, elements, 0, data.nbytes, dtype), data, covered, placed, missing or {})


def verdict(iteration, *failing, marks=()):
    return Verdict(iteration, not failing, not failing, failing, marks)


LOST = (Clause.COVERED, "bucket 0: 4 of 10 elements, missing by cause: lost 6")


@given(st.lists(st.booleans(), max_size=60), st.sampled_from(["float32", "bfloat16", "int8"]))
def test_ranges_and_hashes_of_a_bucket(present, dtype):
    size = {"float32": 4, "bfloat16": 2, "int8": 1}[dtype]
    data = np.random.default_rng(len(present)).integers(0, 256, len(present) * size, dtype=np.uint8)
    edges = [i for i in range(len(present) + 1)
             if (i > 0 and present[i - 1]) != (i < len(present) and present[i])]
    ranges = list(zip(edges[::2], edges[1::2], strict=True))
    report = bucket_report(bucket(3, dtype, data, ranges, {"lost": present.count(False)}))
    assert (report.index, report.elements, report.placed_elements) == (3, len(present), sum(present))
    assert report.complete == all(present)
    assert report.sha256 == (sha(data) if all(present) else None)
    assert [(p.start, p.end) for p in report.placed] == ranges
    assert [p.sha256 for p in report.placed] == [sha(data[a * size : b * size]) for a, b in ranges]


@pytest.mark.parametrize("placed", [[(0, 3), (2, 4)], [(3, 3)], [(0, 11)], [(4, 6), (0, 2)], [(-1, 2)]])
def test_ranges_that_cannot_be_are_our_bug(placed):
    with pytest.raises(InternalError, match="placed range"):
        bucket_report(bucket(0, "float32", np.zeros(10, np.float32), placed))


def full():
    """A report with something in every field."""
    report = Report(run_id="run", iterations_asked=4)
    a, b = np.arange(10, dtype=np.float32), np.arange(3, dtype=np.float32)
    report.captures.append(CaptureReport("/data/[red]odd, name.pcapng", 1896, 2_000_000, "pcapng"))
    counts = {"packets": 100, "missing": 6, "duplicates": 1, "retransmissions": 2, "icrc_wrong": 3}
    report.flows.append(FlowReport("gradients", 0, 1, 0, "fe80::ac0:ebff:fe8c:282d",
                                   "fe80::e42:a1ff:fe9f:58f8", [0x12E2], **counts, state="allgather",
                                   detail="one retransmission behind a NAK"))
    report.flows += [FlowReport("other", None, None, None, "10.0.0.1", "10.0.0.2", [i, 2, 3], **counts)
                     for i in range(20)]
    report.broadcasts.append(broadcast_report(["w", "b"], np.zeros(5000, np.float32), 20000))
    report.broadcasts.append(broadcast_report(["w", "b"], np.zeros(5000, np.float32), 4))
    report.add_iteration([bucket(0, "float32", a, [(0, 10)]), bucket(1, "float32", b, [(0, 3)])],
                         verdict(0, marks=("icrc off",)))
    report.add_iteration([bucket(0, "float32", a, [(0, 1), (7, 10)], {"lost": 6})], verdict(1, LOST))
    report.add_iteration([bucket(0, "float32", a + 1, [(0, 10)])], verdict(2))
    report.drops.update({"not_roce": 12, "icrc": 3, "late": 0})
    report.stages.update({"receive": 0.5, "place": 1.25})
    report.seconds = 2.0
    report.checkpoint = CheckpointReport(1, "out/step-000001", "unverified")
    report.notes.append("the capture ends inside iteration 3")
    return report, a, b


def test_totals_and_the_running_hash(tmp_path):
    report, a, b = full()
    data = json.loads(write_report(report, tmp_path / "report.json").read_text())
    assert data["schema"] == "flowcheck/report/1" and data["ok"] is False
    assert data["totals"] == {
        "iterations_asked": 4, "iterations_seen": 3, "iterations_complete": 2, "iterations_published": 2,
        "elements": 33, "placed_elements": 27, "gathered_elements": 0, "placed_gathered_elements": 0,
        "gathered_sha256": None, "packets": 1896, "bytes": 2_000_000,
        "gradients_sha256": sha(a.tobytes() + b.tobytes() + (a + 1).tobytes()),
    }
    first, lost, _ = data["iterations"]
    assert first["buckets"][0]["sha256"] == sha(a.tobytes())
    assert lost["buckets"][0]["sha256"] is None
    assert lost["buckets"][0]["placed"][1] == {"start": 7, "end": 10, "sha256": sha(a[7:].tobytes())}
    assert lost["buckets"][0]["missing"] == {"lost": 6}
    assert lost["verdict"]["failing"] == [{"clause": "covered", "reason": LOST[1]}]
    assert [p["sha256"] for p in data["parameters"]] == [sha(bytes(20000)), None]
    assert data["throughput"] == {"seconds": 2.0, "packets_per_second": 948.0, "bits_per_second": 8e6}
    assert data["unproven"] == ["icrc off"]


@pytest.mark.parametrize(
    ("asked", "lost", "ok"),
    [(None, [], False), (None, [False], True), (1, [False], True), (2, [False], False),
     (None, [False, True], False), (0, [], False)],
)
def test_ok_only_if_all_that_was_asked_for_is_complete(asked, lost, ok):
    report = Report(iterations_asked=asked)
    for i, gone in enumerate(lost):
        placed = [] if gone else [(0, 2)]
        report.add_iteration([bucket(0, "float32", np.ones(2, np.float32), placed)],
                             verdict(i, *([LOST] if gone else [])))
    assert report.ok is ok and report.to_dict()["ok"] is ok


def test_a_verdict_that_contradicts_the_arena_is_our_bug():
    with pytest.raises(InternalError, match="judged complete with elements missing"):
        Report().add_iteration([bucket(0, "float32", np.ones(2, np.float32), [(0, 1)])], verdict(0))


def test_a_report_that_cannot_be_written(tmp_path):
    with pytest.raises(EnvironmentProblem, match="remedy"):
        write_report(Report(), tmp_path / "absent" / "report.json")
    (tmp_path / "report.json").mkdir()
    with pytest.raises(EnvironmentProblem):
        write_report(Report(), tmp_path / "report.json")
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def keys(value):
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


def test_every_key_is_documented():
    report, _, _ = full()
    data = report.to_dict()
    counted_by_name = {*data["drops"], *data["stages"], "lost"}
    documented = set(re.findall(r"`([a-z_0-9]+)`", (ROOT / "docs" / "reference" / "report.md").read_text()))
    assert keys(data) - counted_by_name <= documented


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_summary_is_short_honest_and_fits(width):
    report, _, _ = full()
    stream = io.StringIO()
    print_summary(report, Console(file=stream, width=width, color_system=None))
    text = stream.getvalue()
    assert all(len(line) <= min(width, 160) for line in text.splitlines())
    head = "INCOMPLETE 2 of 4 iterations complete, 1 never seen UNPROVEN (icrc off)"
    assert " ".join(text.split()).startswith(head)
    if width >= 80:
        rows = [line.split() for line in text.splitlines() if "gradients" in line.split()]
        assert len(rows) == 1 and "0x12e2" in rows[0], text  # one line, no word of it folded
    if width >= 100:
        assert len(text.splitlines()) < 40
        for words in (
            "[red]odd, name.pcapng", "and 9 more flows", "iteration 1", "lost 6", "not_roce 12",
            "20,000 of 20,000 bytes", "4 of 20,000 bytes, INCOMPLETE", "place 1.25 s", "948 packets/s",
            "step 1, unverified", "one retransmission behind a NAK", "the capture ends inside",
        ):
            assert words in text, words
        assert "late" not in text


def test_the_summary_of_nothing_and_of_everything():
    stream = io.StringIO()
    print_summary(Report(), Console(file=stream, width=100))
    assert "INCOMPLETE  0 of 0" in stream.getvalue() and "none was written" in stream.getvalue()
    report = Report()
    for i in range(20):
        report.add_iteration([bucket(0, "float32", np.ones(2, np.float32), [(0, 2)])], verdict(i))
    stream = io.StringIO()
    print_summary(report, Console(file=stream, width=100))
    assert stream.getvalue().startswith("COMPLETE  20 of 20") and len(stream.getvalue().splitlines()) == 2
    for i in range(20, 40):
        report.add_iteration([], verdict(i, (Clause.ANCHORED, "x" * 900)))
    stream = io.StringIO()
    print_summary(report, Console(file=stream, width=100))
    assert "and 14 more iterations" in stream.getvalue() and len(stream.getvalue().splitlines()) < 40
