"""What a job without trainers makes its node say and keep, turn by turn; its results: test_unattended.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.checkpoint.directory import load_parameters
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node.config.capture import Capture
from flowcheck.node.groups import group
from flowcheck.node.groups.move_detector import Moved
from flowcheck.node.groups.session import LiveSession
from flowcheck.node.groups.unattended import LOOK_SECONDS, SILENT_SECONDS, UNCONFIRMED, _Set, unattended_jobs
from flowcheck.node.versions.output import Hashes
from flowcheck.rebuild.iteration.sharded import Gathered
from flowcheck.rebuild.version.events import Event, GivenUp
from flowcheck.rebuild.version.policy import Policy

from ..fake_engine import Packet, whole
from ..hand_node import LONGEST
from .test_unattended import Scene, settings_of, small_job, until_written


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def begin(*given: Any, **named: Any) -> Scene:
        made.append(Scene(monkeypatch, tmp_path, *given, **named))
        return made[-1]

    yield begin
    for one in made:
        one.one.stop()
        one.one.drop()


# -- settings --------------------------------------------------------------------------------------------------------


def test_a_plan_has_the_nodes_streams_and_arenas(tmp_path: Path) -> None:
    config = settings_of(tmp_path, small_job(), arenas=3, patience_packets=77)
    config = config.model_copy(update={"capture": (Capture(device="a", queues=2), Capture(device="b", queues=3))})
    ((settings, plan),) = unattended_jobs(config)
    assert (plan.engine.streams, plan.engine.threads, plan.engine.arenas, plan.engine.patience) == (5, 5, 3, 77)
    assert settings.group == "fsdp" and plan.job.run_id == "synth-0", "the name that the manifest gives it"


def test_what_is_wrong_with_a_manifest_is_said_of_the_setting(tmp_path: Path) -> None:
    config = settings_of(tmp_path, small_job())
    (tmp_path / "job.json").write_text("{")
    with pytest.raises(UserError) as refused:
        unattended_jobs(config)
    assert str(tmp_path / "job.json") in refused.value.where and refused.value.what
    assert "--job" not in refused.value.remedy


# -- joining ---------------------------------------------------------------------------------------------------------


def test_what_is_said_when_a_job_is_joined(scene: Callable[..., Scene]) -> None:
    at = scene()
    assert at.said == [("attached", {
        "name": "fsdp", "run_id": "synth-0", "epoch": 0, "ranks": 2, "flows": len(at.plan.job.flows),
        "resync": "none: parameters alone, by AllGather", "manifest": str(at.folder / "job.json")})]
    session = at.one.session
    assert session is not None and session.follower.policy == Policy.unattended()
    assert session.clock.number(0) == at.config.follow[0].iteration, "its iterations have the trainer's numbers"


def test_its_packets_are_placed_by_the_nodes_own_threads(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    at, given = scene(), list[object]()
    monkeypatch.setattr(LiveSession, "place_in_threads", lambda session, placers: given.append(placers))
    at.one.place()
    assert given == [at.port.placers]


def test_what_happens_to_a_job_is_said_in_its_name(scene: Callable[..., Scene]) -> None:
    at = scene()
    at.one.take([GivenUp(4, (7, 8), True), Event()])
    event, fields = at.said[-1]
    assert (event, fields["name"], fields["iteration"]) == ("overload", "fsdp", 4) and len(at.said) == 2


def test_a_witness_refutes_in_words_and_nothing_is_looked_at_any_more(scene: Callable[..., Scene]) -> None:
    at = scene()
    at.engine.disagree(2)
    at.traffic(*whole(2))
    (refused,) = at.events("refused")
    first, rest = refused["why"].split("; ", 1)
    assert first == "the traffic is not what the manifest describes" and refused["name"] == "fsdp"
    assert rest.endswith("; nothing of it is offered, and it is not followed any more. Correct the manifest, and start"
                         " the node again") and rest.count("; ") == 1
    (line,) = at.events("iteration")
    assert not line["published"] and at.one.session is None and at.one.tick() is False
    at.now += 10 * SILENT_SECONDS
    assert at.one.tick() is False and at.events("silent") == []


@pytest.mark.parametrize("later", [1, 2])
def test_a_witness_against_the_second_iteration_refutes_and_one_against_the_third_does_not(
    scene: Callable[..., Scene], later: int
) -> None:
    at = scene()
    at.traffic(*whole(2))
    at.engine.hopes[0, 3] = "passed"
    at.engine.disagree(2 + later)
    at.traffic(Packet(3, past=4, cells=(0, 3)))
    assert len(at.events("refused")) == (later == 1)


def test_a_mirror_that_moves_again_and_again_is_joined_less_and_less_often(scene: Callable[..., Scene]) -> None:
    at = scene()

    def moves() -> bool:
        """Does it join anew?"""
        before = len(at.engines)
        at.one.take([Moved("nothing has come from queue 1")])
        at.one.tick()
        return len(at.engines) > before

    assert moves() and moves() and not moves(), "the third time is put off"
    assert at.events("moved")[0] == {"name": "fsdp", "why": "nothing has come from queue 1: was the mirror configured"
                                                            " anew? The job is joined anew where it is now"}
    at.now += 3600.0
    assert moves() and len(at.events("moved")) == 3 == len(at.events("attached")) - 1
    at.now += 3600.0
    assert moves() and moves() and len(at.engines) == 6, "one that lasted is as the first"


# -- silence ---------------------------------------------------------------------------------------------------------


def test_a_job_is_silent_after_a_minute_and_heard_with_the_next_packet(scene: Callable[..., Scene]) -> None:
    at = scene()
    at.turns()
    at.now += SILENT_SECONDS - 0.5
    at.turns()
    assert at.events("silent") == []
    at.now += LOOK_SECONDS / 2
    at.turns()
    assert at.events("silent") == [], "it looks once a second"
    at.now += LOOK_SECONDS / 2
    at.turns()
    (silent,) = at.events("silent")
    assert silent == {"name": "fsdp", "why": (
        "no packet of the job's connections has come to af_packet:eth1 for 60 s: it pauses or has ended, it has made"
        " new connections, which need a new manifest, or the mirror brings nothing (flowcheck switch verify)")}
    at.now += 3 * SILENT_SECONDS
    at.turns()
    assert len(at.events("silent")) == 1
    at.engine.flow(0)["packets"] += 1
    at.now += LOOK_SECONDS
    at.turns()
    assert at.events("mirror_back") == [{"name": "fsdp", "why": "the mirror brings the job's packets again"}]
    at.now += SILENT_SECONDS - 0.5
    at.turns()
    assert len(at.events("silent")) == 1, "a minute from there on"
    at.now += LOOK_SECONDS
    at.turns()
    assert len(at.events("silent")) == 2 and len(at.events("mirror_back")) == 1


def test_a_port_without_a_name(scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    at = scene()
    monkeypatch.setattr(at.port, "name", "")
    at.turns()
    at.now += SILENT_SECONDS
    at.turns()
    assert "has come to the port for 60 s" in at.events("silent")[0]["why"]


# -- iterations ------------------------------------------------------------------------------------------------------


def test_what_is_said_of_an_iteration(scene: Callable[..., Scene]) -> None:
    at = scene()
    at.port.dropped = {"ring_full": 3}
    at.traffic(*whole(2))
    at.port.dropped = {"ring_full": 5, "no_mbuf": 1}
    at.traffic(*whole(3, 4))
    first, second, third = at.events("iteration")
    assert [one["dropped"] for one in (first, second, third)] == [{"ring_full": 3}, {"ring_full": 2, "no_mbuf": 1}, {}]
    assert [one["matches"] for one in (first, second, third)] == [0, 0, 0]
    assert (first["status"], first["parameters"], first["why"]) == ("waiting", None, [("supported", UNCONFIRMED)])
    assert (second["status"], second["parameters"], second["why"], second["name"]) == ("parameters", 3, [], "fsdp")


def test_after_a_hole_all_reasons_are_said_and_what_was_offered_stands(scene: Callable[..., Scene]) -> None:
    at = scene()
    at.traffic(*whole(2, 3))
    until_written(at, 3)
    at.engine.hopes[0, 4] = "passed"
    at.engine.disagree(4)
    at.traffic(Packet(4, past=5, cells=(0, 3)))
    line = at.events("iteration")[-1]
    assert (line["status"], line["parameters"], line["published"]) == ("parameters", None, False)
    assert len(line["why"]) == len(line["failed"]) == 2
    at.traffic(*whole(5))
    until_written(at, 3, 5)


def test_an_iteration_alone_confirms_nothing_however_often_it_is_joined(scene: Callable[..., Scene]) -> None:
    at = scene()
    at.traffic(*whole(2))
    at.one.take([Moved("x")])
    at.turns()
    at.traffic(*whole(7))
    assert [published for _, published, _ in at.ended] == [False, False]
    at.traffic(*whole(8))
    assert at.ended[-1] == (8, True, []) and at.events("refused") == []


def test_hashes_are_of_each_step_and_checkpoints_of_those_that_are_due(
    scene: Callable[..., Scene], tmp_path: Path
) -> None:
    hashes = Hashes(tmp_path / "hashes.jsonl")
    at = scene(every=2, hashes=hashes)
    at.traffic(*whole(2, 3, 4, 5))
    hashes.close()
    lines = [json.loads(line) for line in (tmp_path / "hashes.jsonl").read_text().splitlines()]
    assert [(one["iteration"], one["name"], one["optimizer"]) for one in lines] == [
        (number, "fsdp", {}) for number in (3, 4, 5)]
    assert list(at.written()) == ["parameters-000004"]


def test_hashes_that_cannot_be_written_end_nothing(scene: Callable[..., Scene]) -> None:
    class Full:
        def add(self, *_: object) -> None:
            raise EnvironmentProblem("cannot be written: No space left on device", where="h", remedy="free space")

    at = scene(hashes=Full())
    at.traffic(*whole(2, 3))
    assert at.events("problem") == [{"name": "fsdp", "why": (
        "h: cannot be written: No space left on device\n  remedy: free space")}]
    assert list(at.written()) == ["parameters-000003"]


def test_what_is_written_says_on_what_it_rests(scene: Callable[..., Scene]) -> None:
    job = small_job()
    job.unproven = ["the order of its groups"]
    at = scene(job)
    at.traffic(*whole(2, 3))
    at.one.stop()
    (path,) = (at.folder / "out" / "fsdp" / "synth-0" / "epoch-0").iterdir()
    manifest = load_parameters(path).manifest
    assert (manifest["status"], manifest["step"]) == ("unverified", 3)
    assert "the order of its groups" in manifest["unproven"]
    assert [event for event, _ in at.said if event in ("written", "problem")] == []
    (said,) = at.events("gathered")
    assert said["name"] == "fsdp" and said["step"] == 3 and said["path"] == str(path)


def test_a_writer_that_has_a_problem_says_so(scene: Callable[..., Scene]) -> None:
    at = scene()
    (at.folder / "out").write_text("in its place")
    at.traffic(*whole(2, 3))
    at.one.stop()
    (problem,) = at.events("problem")
    assert problem["name"] == "fsdp" and str(at.folder / "out") in problem["why"] and at.events("gathered") == []


def test_gathered_parameters_are_a_version_of_their_own(tmp_path: Path) -> None:
    made = Gathered(small_job(), 8, {"w": torch.ones(2)})
    one = _Set(made)
    with one.pinned() as pinned:
        assert pinned is one and one.step == 8 and one.parameters["w"].tolist() == [1.0, 1.0]
    assert (one.refused, list(one.unproven), dict(one.optimizer_state)) == (0, [], {})
    path = one.write(tmp_path, ["a reason"], None, "verified", "shard", None, 3)
    manifest = load_parameters(path).manifest
    assert (manifest["status"], manifest["unproven"]) == ("unverified", ["a reason"])


def test_what_waits_when_the_node_ends_is_judged(scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    at = scene()

    def tick() -> bool:
        at.one._stop.set()
        at.source.packets += whole(2, 3)
        return True

    monkeypatch.setattr(at.one, "tick", tick)
    at.one.start()
    at.one._thread.join()
    assert at.one.failure is None and [iteration for iteration, _, _ in at.ended] == [2, 3]


# -- its thread ------------------------------------------------------------------------------------------------------


def test_a_fault_ends_the_thread_and_is_kept(scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    at = scene()
    fault = RuntimeError("a bug")

    def tick() -> bool:
        raise fault

    monkeypatch.setattr(at.one, "tick", tick)
    at.one.start()
    at.one._thread.join(LONGEST)
    assert at.one.failure is fault and at.one.session is None
    at.one.stop()
    at.one.stop()


def test_it_waits_where_there_is_nothing_to_do_and_not_where_there_is(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = scene()
    found, waits = [True, True, False, True], list[float]()

    def tick() -> bool:
        if not found or len(waits) > 9:
            at.one._stop.set()
            return True
        return found.pop()

    monkeypatch.setattr(at.one, "tick", tick)
    monkeypatch.setattr(group.time, "sleep", waits.append)
    at.one.start()
    at.one._thread.join()
    assert waits == [group.IDLE_SECONDS] and at.one.failure is None
