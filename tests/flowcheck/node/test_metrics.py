"""Metrics: what the page says is what there is, each value is the document's, and Prometheus' own tool reads them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from flowcheck.node.status import metrics
from flowcheck.node.status.group_tally import CONDITIONS, STAGES
from flowcheck.node.status.metrics import ALERTED, METRICS, MISSING, STATUSES, exposition

from .told_scene import START, attached, document, iteration, times

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/reference/metrics.md").read_text()
EVERYTHING = (
    attached(), iteration(6, missing={"lost": 5}, filled={"stream": 3, "peer": 2}, failed=["covered"], patched=9),
    times(6), attached("dp1", ranks=2),
    ("written", {"name": "dp0", "step": 20, "path": "p"}), ("gathered", {"name": "dp1", "step": 12, "path": "p"}),
    ("ranges", {"name": "dp0", "iteration": 2, "elements": 2, "bytes": 6, "ranks": [0]}),
    ("job_recovered", {"name": "dp0", "iteration": 6, "detected": 1.0, "restored": 2.0, "resumed": 4.5, "seconds": 3.5,
                       "repeated": 2}),
    ("silent", {"name": "dp0", "why": "w"}),
    ("journal", {"name": "dp0", "entries": 40, "back": 20}), ("base", {"name": "dp0", "step": 5, "path": "p"}),
    ("journaled", {"name": "dp0", "iteration": 6, "bytes": 4096, "seconds": 0.25}),
    ("hole", {"name": "dp0", "iteration": 7, "last": 9, "cause": "busy", "why": "w"}),
)


def text(told: Any, accept: str = "text/plain") -> str:
    return exposition(told, accept)[0].decode()


def value(made: str, name: str, **labels: str) -> float | None:
    for family in text_string_to_metric_families(made):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return None


@pytest.fixture(scope="module")
def made() -> str:
    told = document(*EVERYTHING, unclaimed={"unknown": 7})
    told["captures"][0]["lost"]["ring_full"] = 4
    return text(told)


def test_the_page_says_what_there_is() -> None:
    rows = {}
    for line in PAGE.splitlines():
        if found := re.match(r"\| `(flowcheck_\w+)` \| (\w+) \| ([^|]*) \| (.*) \|$", line):
            rows[found[1]] = (found[2], tuple(re.findall(r"`(\w+)`", found[3])), found[4])
    assert rows == {kind.name: (kind.type, kind.labels, kind.text) for kind in METRICS}
    of_node, of_group = (PAGE[PAGE.index(f"## Of {what}") :].split("\n## ")[0] for what in ("the node", "a group"))
    for kind in METRICS:
        assert f"`{kind.name}`" in (of_group if kind.of_group else of_node)


def test_the_page_explains_every_label_and_every_fixed_value() -> None:
    values = PAGE[PAGE.index("## Values of labels") :]
    for kind in METRICS:
        for label in kind.labels:
            assert f"| `{label}`" in values or label in ("node", "version", "group"), label
    for name in (*CONDITIONS, *STAGES, "trainers", "peers", "published", "not_published"):
        assert f"`{name}`" in values, name


def test_names_are_prometheus_own_way() -> None:
    for kind in METRICS:
        assert re.fullmatch(r"flowcheck_[a-z_]+", kind.name)
        assert kind.name.endswith("_total") == (kind.type == "counter"), kind.name
        assert not kind.text.endswith(".")


def test_every_metric_has_a_sample(made: str) -> None:
    samples = {sample.name for family in text_string_to_metric_families(made) for sample in family.samples}
    for kind in METRICS:
        assert (kind.name + "_sum" if kind.type == "histogram" else kind.name) in samples, kind.name


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("flowcheck_node_info", {"node": "node-a", "version": "9.9"}, 1),
        ("flowcheck_node_told_timestamp_seconds", {}, START),
        ("flowcheck_events_total", {"event": "iteration", "group": "dp0"}, 1),
        ("flowcheck_events_total", {"event": "job_recovered", "group": "dp0"}, 1),
        ("flowcheck_events_total", {"event": "came_back", "group": "dp0"}, 1),  # as earlier releases called it
        ("flowcheck_capture_packets_total", {"device": "af_packet:eth1"}, 1000),
        ("flowcheck_capture_bytes_total", {"device": "af_packet:eth1"}, 4e6),
        ("flowcheck_capture_last_packet_timestamp_seconds", {"device": "af_packet:eth1"}, START - 1),
        ("flowcheck_capture_job_packets_total", {"device": "af_packet:eth1"}, 900),
        ("flowcheck_capture_last_job_packet_timestamp_seconds", {"device": "af_packet:eth1"}, START - 2),
        ("flowcheck_capture_dropped_packets_total", {"device": "af_packet:eth1", "cause": "ring_full"}, 4),
        ("flowcheck_capture_dropped_packets_total", {"device": "af_packet:eth1", "cause": "no_mbuf"}, 0),
        ("flowcheck_unclaimed_packets_total", {"outcome": "unknown"}, 7),
        ("flowcheck_ranks", {"group": "dp0"}, 4), ("flowcheck_ranks_connected", {"group": "dp0"}, 4),
        ("flowcheck_ranks_connected", {"group": "dp1"}, 0), ("flowcheck_connections", {"group": "dp0"}, 8),
        ("flowcheck_iterations_total", {"group": "dp0", "result": "published"}, 1),
        ("flowcheck_iterations_total", {"group": "dp0", "result": "not_published"}, 0),
        ("flowcheck_iterations_failed_total", {"group": "dp0", "clause": "covered"}, 1),
        ("flowcheck_iterations_failed_total", {"group": "dp0", "clause": "checksum"}, 0),
        ("flowcheck_packets_total", {"group": "dp0"}, 100), ("flowcheck_placed_packets_total", {"group": "dp0"}, 60),
        ("flowcheck_duplicate_packets_total", {"group": "dp0"}, 40),
        ("flowcheck_missing_elements_total", {"group": "dp0", "cause": "lost"}, 5),
        ("flowcheck_missing_elements_total", {"group": "dp0", "cause": "icrc"}, 0),
        ("flowcheck_filled_bytes_total", {"group": "dp0", "source": "peer"}, 16),
        ("flowcheck_filled_bytes_total", {"group": "dp0", "source": "trainer"}, 0),
        ("flowcheck_patched_elements_total", {"group": "dp0"}, 9),
        ("flowcheck_parameters_step", {"group": "dp1"}, 12), ("flowcheck_parameters_step", {"group": "dp0"}, None),
        ("flowcheck_parameters_timestamp_seconds", {"group": "dp1"}, START),
        ("flowcheck_checkpoint_step", {"group": "dp1"}, None),
        ("flowcheck_asked_bytes_total", {"group": "dp0", "of": "trainers"}, 6),
        ("flowcheck_last_complete_step", {"group": "dp0"}, 7),
        ("flowcheck_last_complete_step_timestamp_seconds", {"group": "dp0"}, START),
        ("flowcheck_common_step", {"group": "dp0"}, 6), ("flowcheck_apart_groups", {"group": "dp0"}, 1),
        ("flowcheck_replica_status", {"group": "dp0", "status": "verified"}, 1),
        ("flowcheck_replica_status", {"group": "dp0", "status": "diverged"}, 0),
        ("flowcheck_condition", {"group": "dp0", "condition": "silent"}, 1),
        ("flowcheck_condition", {"group": "dp1", "condition": "silent"}, 0),
        ("flowcheck_slack_seconds", {"group": "dp0"}, 0.039), ("flowcheck_late_versions_total", {"group": "dp0"}, 0),
        ("flowcheck_stage_seconds_count", {"group": "dp0", "stage": "update"}, 1),
        ("flowcheck_stage_seconds_bucket", {"group": "dp0", "stage": "update", "le": "0.01"}, 0),
        ("flowcheck_stage_seconds_bucket", {"group": "dp0", "stage": "update", "le": "0.02"}, 1),
        ("flowcheck_ring_packets", {"group": "dp0"}, 300), ("flowcheck_ring_size_packets", {"group": "dp0"}, 4096),
        ("flowcheck_arenas_used", {"group": "dp0"}, 2), ("flowcheck_arenas", {"group": "dp0"}, 4),
        ("flowcheck_checkpoint_step", {"group": "dp0"}, 20), ("flowcheck_failures_total", {"group": "dp0"}, 1),
        ("flowcheck_failure_seconds_total", {"group": "dp0"}, 3.5),
        ("flowcheck_steps_repeated_total", {"group": "dp0"}, 2),
        ("flowcheck_failure_detected_timestamp_seconds", {"group": "dp0"}, 1.0),
        ("flowcheck_failure_restored_timestamp_seconds", {"group": "dp0"}, 2.0),
        ("flowcheck_failure_resumed_timestamp_seconds", {"group": "dp0"}, 4.5),
    ],
)
def test_each_value_is_the_documents(made: str, name: str, labels: dict[str, str], expected: float) -> None:
    assert value(made, name, **labels) == expected


def test_what_has_not_happened_has_no_sample(made: str) -> None:
    """An age of a version that does not exist would look like one of fifty years."""
    for name in ("flowcheck_last_complete_step", "flowcheck_last_complete_step_timestamp_seconds",
                 "flowcheck_slack_seconds", "flowcheck_checkpoint_timestamp_seconds", "flowcheck_common_step",
                 "flowcheck_apart_groups",
                 "flowcheck_failure_detected_timestamp_seconds"):
        assert value(made, name, group="dp1") is None, name
    told = document()
    told["captures"][0]["last"] = 0.0
    assert value(text(told), "flowcheck_capture_last_packet_timestamp_seconds", device="af_packet:eth1") is None


def test_exactly_one_status_holds() -> None:
    for status in STATUSES:
        told = text(document(attached(), iteration(3, status=status)))
        assert [value(told, "flowcheck_replica_status", group="dp0", status=one) for one in STATUSES] == [
            float(one == status) for one in STATUSES]


def test_every_cause_begins_with_zero() -> None:
    """So that the first loss is an increase."""
    told = text(document(attached()))
    assert [value(told, "flowcheck_missing_elements_total", group="dp0", cause=cause) for cause in MISSING] == [0] * 8


def test_events_with_an_alert_begin_with_zero() -> None:
    """They are said once: a series that begins with 1 never increases."""
    told = document(attached(), ("refused", {"name": "dp0", "rank": 1, "why": "w"}))
    made = text(told)
    for event, group, count in (("problem", "", 0), ("problem", "dp0", 0), ("refused", "", 0), ("refused", "dp0", 1),
                                ("moved", "dp0", 0)):
        assert value(made, "flowcheck_events_total", event=event, group=group) == count, (event, group)
    rules = (ROOT / "flowcheck/node/operate/alerts.yml").read_text()
    assert set(re.findall(r'event="(\w+)"', rules)) == set(ALERTED)


def test_causes_are_those_that_the_evidence_has() -> None:
    evidence = (ROOT / "flowcheck/rebuild/iteration/evidence.py").read_text()
    table = evidence[evidence.index("by_cause = {") :].split("}")[0]
    assert set(re.findall(r'^        "(\w+)":', table, re.MULTILINE)) | {"overload", "not_fed"} == set(MISSING)


def test_names_that_are_strange_are_escaped() -> None:
    name = 'a"b\\c\nd{}'
    assert value(text(document(attached(name))), "flowcheck_ranks", group=name) == 4


def test_nothing_is_kept_between_two_questions_and_nothing_is_global() -> None:
    before = set(REGISTRY._names_to_collectors)
    told = document(*EVERYTHING)
    assert text(told) == text(told)
    assert set(REGISTRY._names_to_collectors) == before


def test_a_reader_may_have_openmetrics() -> None:
    told, kind = exposition(document(*EVERYTHING), "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text") and told.endswith(b"# EOF\n")
    _, kind = exposition(document(), "*/*")
    assert kind.startswith("text/plain")


def test_promtool_finds_nothing_wrong(made: str) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run([promtool, "check", "metrics"], input=made, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


# -- how a value is found in a document ------------------------------------------------------------------------------


@pytest.mark.parametrize(("made", "of", "samples"), [
    (lambda: metrics._one("a"), {"a": 5}, [([], 5)]),
    (lambda: metrics._one("a", "b", "c"), {"a": {"b": {"c": 7}}}, [([], 7)]),
    (lambda: metrics._each("of"), {"of": {"x": 2}}, [(["x"], 2)]),
    (lambda: metrics._each("of", ["y", "x"], 8), {"of": {"x": 2}}, [(["y"], 0), (["x"], 16)]),
    (lambda: metrics._when("a"), {"a": 0}, []),
    (lambda: metrics._when("a", "b"), {"a": {"b": 3.5}}, [([], 3.5)]),
    (lambda: metrics._captures("n"), {"captures": [{"device": "d", "n": 4}]}, [(["d"], 4)]),
    (lambda: metrics._last_failure("k"), {"failed": []}, []),
    (lambda: metrics._last_failure("k"), {"failed": [{"k": 1}, {"k": 2}]}, [([], 2)]),
    (lambda: metrics._common(lambda common: common["x"]), {"common": None}, []),
    (lambda: metrics._common(lambda common: common["x"]), {"common": {"x": 9}}, [([], 9)]),
    (lambda: metrics._pair("p", 1), {"p": [3, 4]}, [([], 4)]),
])
def test_where_a_value_stands(made: Any, of: dict[str, Any], samples: list[Any]) -> None:
    assert list(made()(of)) == samples


def test_what_is_of_the_node_has_no_group() -> None:
    samples = metrics._one("a")
    assert metrics._node("n", "gauge", ("l",), "t", samples) == metrics.Kind("n", "gauge", ("l",), "t", samples, False)
