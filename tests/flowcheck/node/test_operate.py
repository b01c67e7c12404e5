"""Alert rules and dashboard: Prometheus' own tool reads and tries them, and they name only what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowcheck.node.status.group_tally import CONDITIONS, STAGES
from flowcheck.node.status.metrics import METRICS, STATUSES
from flowcheck.rebuild.iteration.verdict import Clause

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "flowcheck/node/operate"
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
KNOWN = {name for kind in METRICS for name in (
    [kind.name] if kind.type != "histogram" else [f"{kind.name}_{part}" for part in ("bucket", "sum", "count")])}
LABELS = {kind.name: {*kind.labels, *(["group"] if kind.of_group else []), "instance", "job"} for kind in METRICS}
VALUES: dict[str, set[str]] = {
    "condition": set(CONDITIONS), "stage": set(STAGES), "status": set(STATUSES),
    "clause": {clause.value for clause in Clause}, "result": {"published", "not_published"},
}


def promtool() -> str:
    if (found := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """Where, and what is asked there."""
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for annotation in DASHBOARD["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        yield variable["name"], variable["query"]


EXPRESSIONS = list(expressions())


@pytest.mark.parametrize("words", [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]])
def test_promtool_reads_and_tries_the_rules(words: list[str]) -> None:
    done = subprocess.run([promtool(), *words], cwd=FOLDER, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_notices_a_rule_that_says_something_else(tmp_path: Path) -> None:
    """The tests of the rules can fail: with each rule turned round, one of them does."""
    tool = promtool()
    tests = (FOLDER / "alerts_test.yml").read_text()
    for rule in ("FlowcheckNodeDown", "FlowcheckPortQuiet", "FlowcheckMirrorLoses", "FlowcheckUnverified"):
        text = (FOLDER / "alerts.yml").read_text()
        at = text.index(f"alert: {rule}")
        end = text.index("labels:", at)
        turned = text[at:end].replace("== 0", "== 1").replace('"unverified"} == 1', '"unverified"} == 0')
        turned = turned.replace("> 30", "> 30000").replace("> 0.05", "> 5")
        assert turned != text[at:end]
        (tmp_path / "alerts.yml").write_text(text[:at] + turned + text[end:])
        (tmp_path / "alerts_test.yml").write_text(tests)
        words = [tool, "test", "rules", "alerts_test.yml"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=120)
        assert done.returncode != 0, rule


def test_promtool_reads_what_the_dashboard_asks(tmp_path: Path) -> None:
    """With Grafana's variables filled in as Grafana does it. Of a variable's query the selector."""
    asked = [re.sub(r"^label_values\((.*), \w+\)$", r"\1", one) for _, one in EXPRESSIONS if one != "prometheus"]
    filled = [one.replace("$__rate_interval", "1m0s").replace("$__range", "3h0m0s").replace("$__interval", "30s")
              .replace("$instance", "a|b").replace("$group", ".*") for one in asked]
    assert not [one for one in filled if "$" in one]
    for broken in ([], ["sum(flowcheck_ranks"]):
        rules = [{"record": f"asked:{i}", "expr": one} for i, one in enumerate([*filled, *broken])]
        (tmp_path / "asked.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
        words = [promtool(), "check", "rules", "asked.yml"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=120)
        assert (done.returncode == 0) != bool(broken), done.stderr


@pytest.mark.parametrize(("where", "asked"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_every_metric_label_and_value_exists(where: str, asked: str) -> None:
    named = set(re.findall(r"\bflowcheck_\w+", asked))
    assert named <= KNOWN and (named or "up{" in asked or asked == "prometheus")
    for name, inside in re.findall(r"\b(flowcheck_\w+)\{([^}]*)\}", asked):
        labels = LABELS.get(name) or LABELS[name.rpartition("_")[0]] | {"le"}
        for label, value in re.findall(r'(\w+)[=!]~?"([^"]*)"', inside):
            assert label in labels, f"{name} has no {label}"
            if label in VALUES and not value.startswith("$"):
                assert value in VALUES[label], f"{label} is never {value}"


def test_every_alert_is_tried() -> None:
    tests = (FOLDER / "alerts_test.yml").read_text()
    assert [rule["alert"] for rule in RULES if rule["alert"] not in tests] == []


def test_every_alert_says_what_and_what_to_do() -> None:
    for rule in RULES:
        assert re.fullmatch(r"Flowcheck[A-Z]\w+", rule["alert"]) and rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "description"}
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names) >= 15


def test_the_dashboard_has_room_for_every_panel() -> None:
    """Grafana's grid is 24 wide; ids are its own names for panels."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at: dict[str, Any] = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_dashboard_shows_every_kind_of_thing() -> None:
    """A metric that nobody looks at in an alert or a panel is listed here, with why."""
    told = " ".join(asked for _, asked in EXPRESSIONS)
    seen = {kind.name for kind in METRICS if kind.name in told}
    assert {kind.name for kind in METRICS} - seen == {
        "flowcheck_node_start_time_seconds", "flowcheck_connections", "flowcheck_packets_total",
        "flowcheck_placed_packets_total", "flowcheck_duplicate_packets_total", "flowcheck_healed_packets_total",
        "flowcheck_checkpoint_step", "flowcheck_parameters_step", "flowcheck_common_step",
        "flowcheck_last_verified_step",
        "flowcheck_failure_detected_timestamp_seconds", "flowcheck_failure_restored_timestamp_seconds",
        "flowcheck_failure_resumed_timestamp_seconds", "flowcheck_sampled_tensors_total",
        "flowcheck_port_connections", "flowcheck_strangers_ended_total", "flowcheck_readers_turned_away_total",
        "flowcheck_inbox_bytes", "flowcheck_inbox_size_bytes", "flowcheck_inbox_held_up_total",
        "flowcheck_processes_replaced_total",  # each is a problem, too, which an alert counts
    }  # for who looks closer
