"""What a replay tells at its end: why not all that was asked is done, what was there instead, and the report.

The engine says what a test has set; replica, files and report are real. Nothing here needs DPDK.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flowcheck.errors import UserError
from flowcheck.offline.session import ReplayOptions
from flowcheck.rebuild.iteration.wording import flow_name
from lab.synth import example_job, sharded_job
from tests.flowcheck.by_hand import Replayed, begin_session

Begin = Callable[..., Replayed]
DATA, CONTROL, BACK = 0, 1, 2  # flows: data and control of rank 0 -> 1, data of rank 1 -> 0


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Begin:
    return functools.partial(begin_session, monkeypatch, tmp_path)


# -- why not all that was asked is done, the first that applies -----------------------------------------------


def test_fewer_iterations_than_asked_for(begin: Begin) -> None:
    replayed = begin(iterations=3)
    replayed.close(0, 1, without=(1,))
    replayed.engine.missed_iteration = 0
    assert replayed.finish()[1] == "3 iterations were asked for and 2 are in the captures"


def test_as_many_iterations_as_asked_for(begin: Begin) -> None:
    replayed = begin(iterations=2)
    replayed.close(0, 1)
    report, failure = replayed.finish()
    assert failure == "" and report["ok"]


def test_captures_read_too_late(begin: Begin) -> None:
    replayed = begin(weights=False)
    replayed.close(4, 5, without=(5,))
    replayed.engine.missed_iteration = 0
    assert replayed.finish()[1] == (
        "iterations from 0 on are in the captures and were read too late: a capture that begins with iteration 4 has"
        " earlier times. The clocks of the captures differ: editcap -t"
    )


def test_incomplete_iterations_before_disagreements(begin: Begin) -> None:
    replayed = begin()
    replayed.close(0, 1, 2, without=(1, 2))
    replayed.engine.disagree(1)
    replayed.engine.flow(BACK)["adrift"] = True
    assert replayed.finish()[1] == "2 of 3 iterations are incomplete, the first is 1"


def test_disagreements_before_connections_adrift(begin: Begin) -> None:
    replayed = begin()
    replayed.close(0, 1)
    replayed.engine.disagree(7, "flag", BACK)
    replayed.engine.flow(BACK)["adrift"] = True
    failure = replayed.finish()[1]
    assert failure.startswith("the traffic is not what the manifest says: channel 0, rank 1 -> 0")
    assert failure.endswith("iteration 7, message 5, PSN 77: the payload's flags should say 1024 and say 512")


def test_connections_adrift_before_absent_weights(begin: Begin) -> None:
    replayed = begin(example_job(ranks=3, channels=2, count=[20, 9]), weights=False)
    replayed.close(0, 1)
    for number, spec in enumerate(replayed.session.plan.engine.flows):
        replayed.engine.flow(number)["adrift"] = spec.data and number > 0
    failure = replayed.finish()[1]
    assert failure.startswith(
        "the place in the schedule was lost in an outage and nothing on the wire says it again: channel 0, rank 1 -> 2"
    )
    assert failure.count("channel") == 4 and failure.count("; ") == 3  # of five


def test_the_names_of_connections_adrift(begin: Begin) -> None:
    """They are told apart."""
    replayed = begin()
    replayed.close(0, 1)
    replayed.engine.flow(DATA)["adrift"] = replayed.engine.flow(BACK)["adrift"] = True
    plan = replayed.session.plan
    one, other = flow_name(plan.job, 0), flow_name(plan.job, 1)
    assert one.startswith("channel 0, rank 0 -> 1") and other.startswith("channel 0, rank 1 -> 0")
    assert replayed.finish()[1].endswith(f"nothing on the wire says it again: {one}; {other}")


def test_absent_weights_before_iterations_without_a_version(begin: Begin) -> None:
    replayed = begin(weights=False)
    replayed.close(0, 1)
    assert replayed.finish()[1] == (
        "no checkpoint: no initial weights: no --init, and 'layer0.weight' is in no complete broadcast"
    )


def test_a_job_without_an_optimizer_misses_no_weights(begin: Begin) -> None:
    job = example_job(count=[20, 9])
    job.optimizer = None
    replayed = begin(job)
    replayed.close(0, 1)
    report, failure = replayed.finish()
    assert failure == "" and report["ok"]


def test_the_first_iteration_that_could_not_be_published(begin: Begin) -> None:
    job = example_job(count=[20, 9])
    job.step_values = ["lr"]
    replayed = begin(job)
    replayed.close(0)
    job.step_values = []
    replayed.close(1)
    assert replayed.clauses() == [["step_record"], ["previous"]]
    assert replayed.finish()[1] == (
        "iteration 0 could not be published: step_record: the manifest declares per-step values and their record is"
        " not here"
    )


# -- nothing of the job was seen --------------------------------------------------------------------------------


def nothing(replayed: Replayed) -> UserError:
    with pytest.raises(UserError) as refused:
        replayed.finish()
    assert not replayed.out.exists()
    return refused.value


def test_nothing_seen_says_what_was_there(begin: Begin) -> None:
    replayed = begin(streams=2)
    for stream in range(2):
        for number in (DATA, BACK):
            replayed.engine.flow(number, stream).update(packets=0, seen=False)
    replayed.engine.flow(DATA, 1)["seen"] = True  # and its packets found no place
    replayed.engine.flow(CONTROL).update(packets=5, seen=True)
    replayed.engine.counts = [
        {"placed": (4, 1), "compared": (2, 1), "encapsulated": (9, 9), "late": (2, 9), "icrc": (0, 0),
         "control": (8, 9)},
        {"late": (5, 9), "other_roce": (1, 1)},
    ]
    replayed.engine.encapsulated = lambda: {"MPLS": 9}  # type: ignore[method-assign]
    error = nothing(replayed)
    assert "no gradient packet of this job is in the captures; never seen: channel 0, rank 1 -> 0 (QP" in str(error)
    assert "rank 0 -> 1" not in str(error)
    assert "by what became of the packets: late 7, control 8, other_roce 1, encapsulated: MPLS 9" in str(error)
    assert "a.pcapng, b.pcapng" in str(error)
    assert error.remedy == "mirror with SPAN, or with ERSPAN or GRE that carry whole Ethernet frames"


@pytest.mark.parametrize("optimizer", [True, False])
def test_what_the_manifest_itself_calls_unproven_is_in_the_report(begin: Begin, optimizer: bool) -> None:
    job = example_job(count=[20, 9])
    job.unproven = ["learnt: counted by sizes alone"]
    if not optimizer:
        job.optimizer = None
    replayed = begin(job)
    replayed.close(0, 1)
    report, _ = replayed.finish()
    assert report["unproven"].count("learnt: counted by sizes alone") == 1
    assert ("no checkpoint: the manifest names no optimizer" in report["notes"]) != optimizer
    if optimizer:
        written = json.loads((replayed.out / "step-000002" / "manifest.json").read_text())
        assert "learnt: counted by sizes alone" in written["unproven"]


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"icrc": (5, 1), "truncated": (2, 1)},
         "their ICRC is wrong: they were changed after they were sent, or the capture did not keep it. Mirror them"
         " unchanged; --no-icrc places them all the same and marks the result unproven"),
        ({"icrc": (5, 1), "not_roce": (9, 1), "control": (9, 1), "other_roce": (9, 1)}, "; --no-icrc places them all"),
        ({"icrc": (2, 1), "truncated": (5, 1)}, "the packets are cut: raise the snap length"),
        ({"other_roce": (5, 1)}, "`flowcheck inspect` lists the connections; put their addresses and QP"),
        ({}, "`flowcheck inspect` lists the connections"),
    ],
)
def test_what_to_do_goes_by_what_most_packets_suffered(begin: Begin, counts: dict, words: str) -> None:
    replayed = begin()
    replayed.engine.counts = [counts]
    error = nothing(replayed)
    assert words in error.remedy and (not words.startswith("their") or error.remedy == words)
    assert ("--no-icrc" in error.remedy) == ("--no-icrc" in words)
    assert "never seen" not in str(error)  # both connections were


def test_at_most_four_silent_connections_are_named(begin: Begin) -> None:
    replayed = begin(example_job(ranks=3, channels=2, count=[20, 9]))
    for number in range(len(replayed.session.plan.engine.flows)):
        replayed.engine.flow(number)["seen"] = False
    assert str(nothing(replayed)).count("channel") == 4  # of six


def test_connections_without_gradients_are_not_to_be_written_anew(begin: Begin) -> None:
    """The manifest names what is there: a capture that was cut is what lacks them."""
    replayed = begin()
    replayed.engine.counts = [{"released": (1, 1), "control": (5, 1)}]
    assert "capture longer" in nothing(replayed).remedy


def test_nothing_seen_of_parameters(begin: Begin) -> None:
    assert "no parameter packet of this job" in str(nothing(begin(sharded_job())))


def test_nothing_but_disagreements(begin: Begin, tmp_path: Path) -> None:
    replayed = begin()
    replayed.engine.disagree(0, "RETH address", BACK, expected=16, found=17)
    error = nothing(replayed)
    assert "the traffic is not what the manifest describes: channel 0, rank 1 -> 0" in str(error)
    assert str(tmp_path / "job.json") in str(error) and "ranks, channels, protocol, mtu" in error.remedy


def test_nothing_but_disagreements_of_a_learnt_job(begin: Begin) -> None:
    replayed = begin()
    replayed.session.options = ReplayOptions([], None, replayed.out)
    replayed.engine.disagree(0)
    assert "the learnt job" in str(nothing(replayed))


# -- the report ---------------------------------------------------------------------------------------------------


def test_flows_of_the_report(begin: Begin) -> None:
    """A line for every capture that carries a flow, and one for those that none does."""
    replayed = begin(streams=2)
    job = replayed.session.plan.job
    replayed.close(0)
    counters = {"packets": 7, "missing": 6, "duplicates": 5, "retransmissions": 4, "icrc_wrong": 3, "state": "LOST"}
    replayed.engine.flow(DATA, 0).update(seen=False, packets=0)
    replayed.engine.flow(DATA, 1).update(counters)
    replayed.engine.flow(CONTROL, 1).update(seen=False)
    for stream in range(2):
        replayed.engine.flow(BACK, stream).update(seen=False, packets=0)
    report, _ = replayed.finish()
    data, control, back, *rest = report["flows"]
    one, other = job.flows[0].src_addr, job.flows[0].dst_addr
    assert data == {
        "role": "gradients", "src": 0, "dst": 1, "channel": 0, "src_addr": one, "dst_addr": other,
        "qpns": job.flows[0].qpns, "packets": 7, "missing": 6, "duplicates": 5, "retransmissions": 4, "icrc_wrong": 3,
        "state": "LOST", "detail": "",
    }
    assert (control["role"], control["src"], control["dst"]) == ("control", 1, 0)
    assert control["qpns"] == job.flows[0].cts_qpns
    assert (control["src_addr"], control["dst_addr"], control["state"], control["detail"]) == (other, one, "", "")
    assert (back["role"], back["detail"]) == ("gradients", "no packet of it is in the captures")
    assert (back["src"], back["src_addr"], back["packets"]) == (1, other, 0)
    assert [flow["role"] for flow in rest] == ["control", "control"]  # both captures carry it
    assert report["captures"] == [
        {"path": f"{name}.pcapng", "packets": 10, "bytes": 1000, "format": "pcapng", "skipped": {}, "left_out": 0,
         "left_out_why": ""} for name in "ab"
    ]


def test_drops_of_the_report(begin: Begin) -> None:
    replayed = begin()
    replayed.close(0)
    replayed.engine.counts[0].update(placed=(9, 1), icrc=(2, 1), late=(0, 0))
    assert replayed.finish()[0]["drops"] == {"icrc": 2}


def test_broadcasts_of_the_report(begin: Begin) -> None:
    """29 parameters in one broadcast: 116 bytes in 15 cells, of which the last is half full."""
    replayed = begin()
    replayed.close(0)
    region = replayed.engine.region(None)
    region[:] = np.arange(len(region), dtype=np.uint8)
    (whole,) = replayed.finish()[0]["parameters"]
    names = [entry.name for entry in replayed.session.plan.job.model]
    assert (whole["names"], whole["bytes"], whole["placed_bytes"], whole["complete"]) == (names, 116, 116, True)
    replayed.session.report.flows.clear()
    replayed.engine.cells(None)[14] = False
    (part,) = replayed.finish()[0]["parameters"]
    assert (part["placed_bytes"], part["complete"], part["sha256"]) == (112, False, None)
    replayed.engine.cells(None)[14], replayed.engine.cells(None)[0] = True, False
    (part,) = replayed.finish()[0]["parameters"]
    assert (part["placed_bytes"], part["complete"]) == (108, False)


def test_a_job_without_a_broadcast_reports_none(begin: Begin) -> None:
    replayed = begin(example_job(count=20, startup=False))
    replayed.close(0)
    assert replayed.finish()[0]["parameters"] == []


RANKS = "ranks of the flows: as the manifest says, nothing in the captures confirms them"


def test_what_rests_on_trust_is_marked(begin: Begin) -> None:
    """Two equal halves: nothing but clear-to-send could tell who is rank 0. Checkpoint and report say so."""
    replayed = begin(example_job(count=16, startup=False, rebuild=False), every=1)
    replayed.session.marks = ["the job: learnt"]
    replayed.close(0)
    report, _ = replayed.finish()
    assert {RANKS, "the job: learnt"} <= set(report["unproven"])
    replayed.engine.tags = {0: 0, 1: 1}
    assert RANKS not in replayed.finish()[0]["unproven"]
    replayed.engine.tags = {}
    replayed.session.learnt_labels = True  # a bootstrap named them
    assert replayed.finish()[0]["unproven"] == ["the job: learnt"]


def test_a_checkpoint_carries_the_marks(begin: Begin) -> None:
    replayed = begin(every=1)
    replayed.session.marks = ["the job: learnt"]
    replayed.close(0)
    manifest = json.loads((replayed.out / ".unconfirmed" / "step-000001" / "manifest.json").read_text())
    assert "the job: learnt" in manifest["unproven"] and manifest["status"] == "unverified"


def test_a_rounding_order_that_was_never_compared_is_a_mark(begin: Begin) -> None:
    """In the report and in the checkpoint."""
    job = example_job(count=[20, 9])
    job.optimizer.rounding, job.optimizer.torch_version = "torch-cuda-foreach", "2.13.0"
    replayed = begin(job)
    replayed.close(0)
    mark = "rounding mode torch-cuda-foreach is proven for torch 2.11, not for 2.13"
    assert mark in replayed.finish()[0]["unproven"]
    assert mark in json.loads((replayed.out / "step-000001" / "manifest.json").read_text())["unproven"]


def test_connections_that_nobody_saw_are_not_on_trust(begin: Begin) -> None:
    job = example_job(count=[4000, 9001], channels=2, startup=False, rebuild=False)
    replayed = begin(job)
    for number, spec in enumerate(replayed.session.plan.engine.flows):
        replayed.engine.flow(number)["packets"] = int(job.flows[spec.edge].channel == 0)
    replayed.close(0)
    marks = replayed.finish()[0]["unproven"]
    assert not any(mark.startswith("channels 0 and 1") for mark in marks)
