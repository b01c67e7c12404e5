"""Jobs of which no trainer attaches: parameters of each complete iteration, and nothing that was not all there.

The real node on synth's packets, then the same one signal at a time (../fake_engine.py): there every byte of an
iteration's region is its number, unless a test says otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flowcheck.rebuild.iteration.wire_arenas
from flowcheck.checkpoint.directory import load_init, load_parameters, load_step
from flowcheck.control.protocol import Refused
from flowcheck.errors import UserError
from flowcheck.job.model import Job
from flowcheck.node.check.budget import MachineFacts, budget
from flowcheck.node.config.capture import Capture, Follow
from flowcheck.node.config.control import Control
from flowcheck.node.config.load import load
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.config.replica import ReplicaSettings
from flowcheck.node.config.store import Output
from flowcheck.node.groups.move_detector import Moved
from flowcheck.node.groups.session import LiveSession
from flowcheck.node.groups.unattended import SILENT_SECONDS, UNCONFIRMED, unattended, unattended_jobs
from flowcheck.node.versions.holdings import DiskShelf
from lab.synth import example_job, generate, sharded_job

from ..fake_engine import FakeEngine, FakeSource, Packet, whole
from ..gathered import expected
from ..hand_node import LONGEST, until
from .group_scene import FakePort

FIRST, ITERATIONS = 3, 5


def content(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def follow(path: Path, job: Job, group: str = "fsdp", iteration: int = 0) -> str:
    path.write_text(job.to_json())
    return f'[[follow]]\nmanifest = "{path}"\ngroup = "{group}"\niteration = {iteration}'


@pytest.mark.root
@pytest.mark.parametrize("options", [
    {"protocol": "simple", "ranks": 2},
    {"protocol": "ll", "ranks": 3, "channels": 2, "after_update": True},
    {"protocol": "ll128", "ranks": 4, "dtype": "float32", "per_parameter": True, "again": False},
])
def test_parameters_equal_the_truth_live(start_node, attach, lan, tmp_path: Path, options: dict[str, Any]) -> None:
    """Joined in mid-stream, with a trainer's number of its own; one iteration loses packets."""
    job = sharded_job(count=[9000, 4001], seed=5, **options)
    node = start_node(follow(tmp_path / "job.json", job, iteration=100), output="every = 1")
    attached = (node.said("attached") or [node.wait("attached")])[0]  # before it can be reached, or after
    assert attached["run_id"] == "synth-5" and attached["manifest"] == str(tmp_path / "job.json")
    dtype = options.get("dtype", "bfloat16")
    after, folder = bool(options.get("after_update")), tmp_path / "out" / "fsdp" / "synth-5" / "epoch-0"
    assert "is of [[follow]]" in attach(node, job, group="fsdp").expect(Refused).why
    lossy, truth, there = FIRST + 3, dict[int, dict[str, bytes]](), list[str]()
    for t in range(FIRST, FIRST + ITERATIONS):
        made = generate(job, iterations=1, first_iteration=t, seed=7, loss=0.5 if t == lossy else 0.0)
        lan.send([frame for _, frame in made.packets])
        if t == lossy:
            groups = made.truth["iterations"][0]["gathered"]
            gone = sum(group["elements"] - sum(e - s for s, e in group["present"]) for group in groups)
            continue  # it may close when the next one has come
        line = node.wait("iteration", name="fsdp", iteration=100 + t)
        assert (line["published"], line["missing"], line["updates"]) == (t > FIRST, {}, ""), line
        if t > FIRST:
            step = 100 + t + after
            assert (line["status"], line["parameters"]) == ("parameters", step)
            written = node.seen("gathered or skipped", name="fsdp", step=step)
            assert written["event"] == "gathered" or there, written  # a busy disk may leave out all but the first
            truth[step] = expected(job, made, t)
            there += [f"parameters-{step:06d}"] if written["event"] == "gathered" else []
        else:
            assert (line["status"], line["parameters"], line["why"]) == ("waiting", None, [["supported", UNCONFIRMED]])
    (lost,) = [line for line in node.said("iteration") if line["iteration"] == 100 + lossy]
    assert not lost["published"] and lost["parameters"] is None and "covered" in lost["failed"]
    assert sum(lost["missing"].values()) >= gone > 0
    assert node.end() == 0 and [*node.said("problem"), *node.said("refused")] == []
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["gathered fsdp"]["step"] == int(there[-1][-6:]) and "written fsdp" not in status

    hashes = [json.loads(line) for line in (tmp_path / "hashes.jsonl").read_text().splitlines()]
    for tensors, said in zip(truth.values(), hashes, strict=True):  # of all that are offered, written or not
        assert said["tensors"] == {name: hashlib.sha256(data).hexdigest() for name, data in tensors.items()}
        assert said["optimizer"] == {}
    assert sorted(path.name for path in folder.iterdir()) == there, "those of complete iterations, and of no other"
    for name in there:
        loaded = load_parameters(folder / name)
        assert content(loaded.parameters) == truth[int(name[-6:])] and not loaded.optimizer_state
        assert {tensor.dtype for tensor in loaded.parameters.values()} == {getattr(torch, dtype)}
        assert (loaded.manifest["kind"], loaded.manifest["status"]) == ("parameters", "unverified")
        for read in (load_step, lambda path: load_init(path, job.model)):
            with pytest.raises(UserError, match="gathered parameters alone"):
                read(folder / name)
    assert DiskShelf(tmp_path / "out").look() == [], "nothing of it is offered for recovery"


# -- one signal at a time ------------------------------------------------------------------------------------------


class Scene:
    """A follower whose turns the test takes. said: its events. All of an iteration's parameters are its number."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, job: Job | None = None, every: int = 1,
                 hashes: Any = None, began: bool = True) -> None:
        self.config, self.folder, self.now = settings_of(folder, job or small_job(), every), folder, 1000.0
        ((settings, plan),) = unattended_jobs(self.config)
        self.plan, self.engines = plan, list[FakeEngine]()
        self.source = FakeSource(open=True)
        patch.setattr(flowcheck.rebuild.iteration.wire_arenas, "Engine", self._engine)
        patch.setattr(LiveSession, "place_in_threads", lambda session, placers: None)  # no threads: `turn` places
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.port = FakePort([self.source])
        self.one = unattended(settings, plan, self.config, self.port,
                              lambda event, **fields: self.said.append((event, fields)), hashes, lambda: self.now)
        if began:
            assert self.one.tick()

    def _engine(self, config: Any) -> FakeEngine:
        self.engines.append(FakeEngine(config, [self.source]))
        return self.engines[-1]

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    def turns(self) -> None:
        turns = 0
        while self.one.tick():
            turns += 1
            assert turns < 10_000, "there is always something to do"

    def traffic(self, *packets: Packet) -> None:
        for packet in packets:
            self.engine.region(packet.iteration).view(np.float32)[:] = packet.iteration
            self.source.packets.append(packet)
        self.turns()

    def events(self, event: str) -> list[dict[str, Any]]:
        return [fields for what, fields in self.said if what == event]

    @property
    def ended(self) -> list[tuple[int, bool, list[str]]]:
        return [(one["iteration"], one["published"], one["failed"]) for one in self.events("iteration")]

    def written(self) -> dict[str, set[float]]:
        """Values of what is on disk, once the writer has ended."""
        self.one.stop()
        found = sorted((self.folder / "out" / "fsdp" / "synth-0" / "epoch-0").glob("*"))
        return {path.name: {value for tensor in load_parameters(path).parameters.values() for value in tensor.tolist()}
                for path in found}


def small_job(**options: Any) -> Job:
    return sharded_job(**{"count": [40, 20], "dtype": "float32", "again": False, **options})


def settings_of(folder: Path, job: Job, every: int = 1, **replica: Any) -> NodeConfig:
    (folder / "job.json").write_text(job.to_json())
    return NodeConfig(
        control=Control(listen="127.0.0.1:0", token_file=folder / "token"), capture=Capture(device="none"),
        follow=(Follow(manifest=folder / "job.json", group="fsdp"),),
        output=Output(directory=folder / "out", every=every), replica=ReplicaSettings(directory=folder, **replica),
    )


@pytest.fixture
def scene(monkeypatch, tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def begin(*given: Any, **named: Any) -> Scene:
        made.append(Scene(monkeypatch, tmp_path, *given, **named))
        return made[-1]

    yield begin
    for one in made:
        one.one.stop()
        one.one.drop()


def until_written(at: Scene, *steps: int) -> None:
    """Wait for the writer, which skips what comes while it is at work."""
    for lane in at.one._publisher._writer._lanes.values():
        if lane.thread is not None:
            lane.thread.join(LONGEST)
    assert [one["step"] for one in at.events("gathered")] == list(steps)


@pytest.mark.parametrize("after", [False, True], ids=["before its update", "after it"])
def test_the_second_complete_iteration_is_the_first_that_is_offered(scene, after: bool) -> None:
    at = scene(small_job(after_update=after))
    at.traffic(*whole(4))
    assert at.ended == [(4, False, ["supported"])] and at.events("iteration")[0]["why"] == [("supported", UNCONFIRMED)]
    for t in (5, 6):
        at.traffic(*whole(t))
        until_written(at, *(step + after for step in range(5, t + 1)))
    assert at.ended[1:] == [(5, True, []), (6, True, [])]
    assert [one["status"] for one in at.events("iteration")] == ["waiting", "parameters", "parameters"]
    assert at.written() == {f"parameters-{t + after:06d}": {float(t)} for t in (5, 6)}
    assert at.events("written") == [], "that is said of checkpoints"


def test_an_iteration_with_a_hole_is_not_offered_and_the_next_one_is(scene) -> None:
    """No chain of versions: what an iteration gathers is whole without the one before."""
    at = scene()
    at.traffic(*whole(2, 3))
    until_written(at, 3)
    at.engine.hopes[0, 4] = "passed"
    at.traffic(Packet(4, past=5, cells=(0, 3)), *whole(5))
    until_written(at, 3, 5)
    assert at.ended[1:] == [(3, True, []), (4, False, ["covered"]), (5, True, [])]
    lost = at.events("iteration")[2]
    assert lost["missing"] == {"lost": 60 - 6} and lost["parameters"] is None, "two of float32 in each cell"
    assert at.written() == {"parameters-000003": {3.0}, "parameters-000005": {5.0}} and at.events("lost") == []


@pytest.mark.parametrize("when", [2, 3])
def test_a_witness_that_disagrees_before_two_iterations_agreed_refutes_the_manifest(scene, when: int) -> None:
    at = scene()
    if when == 3:
        at.traffic(*whole(2))
    at.engine.disagree(when)
    for t in range(when, 7):
        at.traffic(*whole(t))
    (refused,) = at.events("refused")
    assert refused["why"].startswith("the traffic is not what the manifest describes; ")
    assert "not followed any more" in refused["why"]
    assert at.written() == {} and not any(published for _, published, _ in at.ended)
    assert [iteration for iteration, _, _ in at.ended] == list(range(2, when + 1)), "it is let go at once"


@pytest.mark.parametrize("refuted", [False, True])
def test_an_iteration_with_a_hole_confirms_nothing(scene, refuted: bool) -> None:
    at = scene()
    at.traffic(*whole(2))
    at.engine.hopes[0, 3] = "passed"
    at.traffic(Packet(3, past=4, cells=(0, 3)))
    if refuted:
        at.engine.disagree(3)
    at.traffic(*whole(4))
    if not refuted:
        until_written(at, 4)
    assert len(at.events("refused")) == refuted
    assert [published for _, published, _ in at.ended] == [False, False, not refuted]


def test_a_witness_that_disagrees_later_costs_that_iteration(scene) -> None:
    at = scene()
    at.traffic(*whole(2, 3))
    until_written(at, 3)
    at.engine.disagree(4)
    at.traffic(*whole(4, 5))
    until_written(at, 3, 5)
    assert at.ended[2:] == [(4, False, ["anchored"]), (5, True, [])] and at.events("refused") == []


def test_each_second_step_is_written_and_all_are_judged(scene) -> None:
    at = scene(every=2)
    at.traffic(*whole(2, 3, 4, 5))
    assert [published for _, published, _ in at.ended] == [False, True, True, True]
    assert [one["parameters"] for one in at.events("iteration")] == [None, 3, 4, 5]
    assert list(at.written()) == ["parameters-000004"]


def test_nothing_comes_and_something_comes_again(scene) -> None:
    at = scene()
    at.turns()
    at.now += SILENT_SECONDS + 1
    at.turns()
    at.now += SILENT_SECONDS
    at.turns()
    (silent,) = at.events("silent")
    assert "af_packet:eth1" in silent["why"] and "new manifest" in silent["why"]
    at.engine.flow(0)["packets"] += 7
    at.now += 2
    at.turns()
    at.now += 2
    at.turns()
    assert len(at.events("mirror_back")) == 1 == len(at.events("silent"))


def test_a_mirror_that_has_moved_is_joined_where_it_is_now(scene) -> None:
    at = scene()
    at.traffic(*whole(2, 3))
    until_written(at, 3)
    at.one.take([Moved("nothing has come from queue 1")])
    at.turns()
    assert [event for event, _ in at.said].count("attached") == 2 == len(at.engines)
    (moved,) = at.events("moved")
    assert moved["why"].startswith("nothing has come from queue 1: was the mirror")
    at.traffic(*whole(9))
    until_written(at, 3, 9)
    assert at.ended[-1] == (9, True, []), "its manifest is known to be right"


def test_what_is_followed_at_the_end_is_judged(scene) -> None:
    """The thread's own way: until it is closed."""
    at = scene(began=False)
    at.source.packets += whole(2, 3)
    at.one.start()
    until(lambda: len(at.ended) == 2)
    at.one.stop()
    assert at.one.failure is None and [iteration for iteration, _, _ in at.ended] == [2, 3]


# -- what cannot be followed so ------------------------------------------------------------------------------------


def test_manifests_that_leave_nothing_to_follow(tmp_path: Path) -> None:
    bare = small_job()
    for call in bare.collectives.steady + bare.collectives.iteration_0:
        call.layout = []
    stepped = small_job()
    stepped.step_values = ["lr"]
    for job, what in ((example_job(), "nothing to follow"), (bare, "says what lies in it"), (stepped, "need trainers")):
        with pytest.raises(UserError, match=what) as refused:
            unattended_jobs(settings_of(tmp_path, job))
        assert refused.value.where == str(tmp_path / "job.json") and refused.value.remedy


def test_a_job_that_is_too_large_is_refused_with_the_sum(tmp_path: Path) -> None:
    """Seven times its parameters: four arenas, and three sets."""
    job = small_job(count=[1 << 18])
    unattended_jobs(settings_of(tmp_path, job, memory_mb=8))
    with pytest.raises(UserError, match=r"takes 8 MiB \(3 sets of parameters, 4 iterations of them\)") as refused:
        unattended_jobs(settings_of(tmp_path, job, memory_mb=7))
    assert refused.value.where == "replica.memory_mb"


def test_a_manifest_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = settings_of(tmp_path, small_job())
    (tmp_path / "job.json").unlink()
    with pytest.raises(UserError, match="cannot read the job manifest") as refused:
        unattended_jobs(config)
    assert refused.value.where == str(tmp_path / "job.json") and refused.value.remedy.endswith("with follow.manifest")


def test_a_run_without_a_name_gets_one(tmp_path: Path) -> None:
    job = small_job()
    job.run_id = ""
    ((_, plan),) = unattended_jobs(settings_of(tmp_path, job))
    assert plan.job.run_id


@pytest.mark.parametrize(("text", "where", "what"), [
    ('[[follow]]\nmanifest = "a"\ngroup = "a"', "output.every", "nowhere but on the disk"),
    ('[[follow]]\nmanifest = "a"\ngroup = "a"\n[[follow]]\nmanifest = "b"\ngroup = "a"\n[output]\nevery = 1',
     "follow[1].group", "a is given twice"),
    ('[[follow]]\nmanifest = "a"\ngroup = "a-b"\n[output]\nevery = 1', "follow[0].group", "pattern"),
    ('[[follow]]\nmanifest = "a"\n[output]\nevery = 1', "follow[0].group", "is missing"),
    ('[[follow]]\nmanifest = "a"\ngroup = "a"\nfirst = 3\n[output]\nevery = 1', "follow[0].first", "not a key"),
])
def test_settings_that_are_wrong(tmp_path: Path, text: str, where: str, what: str) -> None:
    path = tmp_path / "node.toml"
    path.write_text(f'[control]\nlisten = "127.0.0.1:0"\ntoken_file = "t"\n[capture]\ndevice = "d"\n{text}\n')
    with pytest.raises(UserError, match=what) as refused:
        load(path)
    assert refused.value.where == f"{path}: {where}"


def test_each_of_them_takes_memory_and_a_thread(tmp_path: Path) -> None:
    config = settings_of(tmp_path, small_job(), memory_mb=10)
    facts = MachineFacts(1 << 40, 0, {}, frozenset(range(4)), {}, {}, {}, {})
    made = budget(config, [], facts)
    assert made.replicas == 2 * 10 << 20
    assert next(one.count for one in made.threads if one.name.startswith("follow a group")) == 2
