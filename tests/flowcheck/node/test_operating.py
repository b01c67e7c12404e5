"""A real node with its HTTP API, scraped as Prometheus does; the page for operators names all that a node can say."""

from __future__ import annotations

import contextlib
import http.client
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from flowcheck.ask.client import reader_key
from flowcheck.control.protocol import Joined, Wanted
from flowcheck.job.model import Job
from lab.synth import example_job

from ..hand_node import until
from .conftest import LONGEST, TOKEN

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/use/operating.md").read_text()


def table(page: str, heading: str) -> list[str]:
    """The first column of the tables below a heading."""
    part = page[page.index(f"\n{heading}\n") :].split("\n## ")[1]
    return [line.split("|")[1].strip() for line in part.splitlines() if re.match(r"\| [`A-Z]", line)]


def test_every_event_has_a_line_that_says_what_to_do() -> None:
    reference = (ROOT / "docs/reference/events.md").read_text()
    listed = reference[reference.index("\n## Events\n") :].split("\n### iteration")[0]
    events = re.findall(r"^\| `(\w+)` \|", listed, re.MULTILINE)
    said = [name for cell in table(PAGE, "## Events") for name in re.findall(r"`(\w+)`", cell)]
    assert len(events) > 25 and sorted(said) == sorted(events)


def test_every_alert_has_a_line_that_says_what_to_do() -> None:
    rules = yaml.safe_load((ROOT / "flowcheck/node/operate/alerts.yml").read_text())
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert table(PAGE, "## Alerts") == alerts
    for named in re.findall(r"Flowcheck[A-Z]\w+", PAGE):
        assert named in alerts, named


# -- a real node -----------------------------------------------------------------------------------------------


class Scraped:
    """What Prometheus would have of a node."""

    def __init__(self, node: Any) -> None:
        self.address = node.seen("listening")["api"]

    def __call__(self, name: str, **labels: str) -> float | None:
        connection = http.client.HTTPConnection(self.address, timeout=LONGEST)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {reader_key(TOKEN)}"})
            answer = connection.getresponse()
            assert answer.status == 200
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        return None


def job() -> Job:
    made = example_job(ranks=2, count=[700, 300], optimizer="adamw", options={"lr": 0.01}, seed=3)
    made.step_values = ["lr"]
    return made


@pytest.mark.root
def test_a_real_node_is_scraped(start_node: Any, attach: Any, truth: Any, lan: Any) -> None:
    node = start_node('[api]\nlisten = "127.0.0.1:0"')
    value = Scraped(node)
    assert value("flowcheck_capture_packets_total", device=f"af_packet:{lan.near}") == 0
    assert value("flowcheck_ranks", group="") is None  # nobody has come
    run, of = truth(job()), {"group": ""}
    for step in range(2):
        run.advance(run.traffic(step))
    trainer = attach(node, run.job, instance="first")

    def join(one: Any) -> None:
        one.manifest()
        one.expect(Wanted, what=["state"])
        one.state(run.step, run.tensors(), run.state())
        one.expect(Joined, iteration=run.step)

    def iterate(one: Any) -> None:
        made = run.traffic(run.step)
        lan.send([frame for _, frame in made.packets])
        run.advance(made)
        one.record(run.step - 1, groups=[{}])
        assert node.wait("iteration", iteration=run.step - 1)["published"]

    join(trainer)
    for _ in range(3):
        iterate(trainer)
    until(lambda: value("flowcheck_last_complete_step", **of) == 5)
    assert value("flowcheck_iterations_total", result="published", **of) == 3
    assert value("flowcheck_replica_status", status="unverified", **of) == 1
    assert value("flowcheck_ranks", **of) == 2 and value("flowcheck_ranks_connected", **of) == 1
    packets = value("flowcheck_packets_total", **of)
    assert packets and value("flowcheck_capture_packets_total", device=f"af_packet:{lan.near}") >= packets
    assert value("flowcheck_filled_bytes_total", source="stream", **of)
    until(lambda: value("flowcheck_stage_seconds_count", stage="publish", **of) == 2)  # the last one has no next yet
    assert value("flowcheck_ring_size_packets", **of) in (1, 8192)  # 1: nothing has waited so far
    assert value("flowcheck_failures_total", **of) == 0

    trainer.close()  # it is killed: no goodbye
    assert node.wait("left")["iteration"] == 4
    until(lambda: value("flowcheck_ranks_connected", **of) == 0)
    assert value("flowcheck_last_complete_step", **of) == 5
