"""What a rehearsal does in which order, and what it gives to each of its parts: sources and clocks of the test's own.

The real run, on ports of a veth pair, is test_rehearsal.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("dataplane.pydpdk._dpdk", reason="the dataplane is not built: libdpdk was not found")

from dataplane.pydpdk.errors import DpdkError
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.job.model import Job
from flowcheck.node.check.budget import MachineFacts
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.ports.captures import plan_captures
from flowcheck.node.rehearse import rehearsal
from flowcheck.node.rehearse.rehearsal import Rates, _plan, rehearse, run
from lab.synth import example_job

FACTS = MachineFacts(1 << 40, 0, {}, frozenset(range(8)), {"ring": 25_000}, {}, {}, {})


# -- the fastest tenth of a second -------------------------------------------------------------------------------------


class Counted:
    """A source that has counters, and the clock beside it."""

    def __init__(self) -> None:
        self.now, self.said = 100.0, {"received": 50, "bytes": 5000}

    def counters(self) -> dict[str, int]:
        return dict(self.said)

    def look(self, rates: Rates, seconds: float, packets: int, size: int) -> tuple[float, float]:
        self.now += seconds
        self.said["received"] += packets
        if "bytes" in self.said:
            self.said["bytes"] += size
        rates.look()
        return rates.most


@pytest.fixture
def counted() -> Counted:
    return Counted()


def test_the_fastest_tenth_of_a_second_counts(counted: Counted) -> None:
    """What was there before it looked is nobody's; in less than a tenth nothing is said."""
    rates: Any = Rates(counted, lambda: counted.now)  # type: ignore[arg-type]
    assert rates.most == (0.0, 0.0)
    assert counted.look(rates, 0.0625, 40, 4000) == (0.0, 0.0)
    assert counted.look(rates, 0.0625, 10, 2000) == (400.0, 48_000.0)  # of both together
    assert counted.look(rates, 0.5, 100, 500_000) == (400.0, 48_000.0)  # slower, of larger packets
    assert counted.look(rates, 0.125, 50, 8000) == (400.0, 48_000.0)  # as fast
    assert counted.look(rates, 0.25, 200, 16_000) == (800.0, 64_000.0)


def test_a_tenth_of_a_second_is_enough(counted: Counted) -> None:
    counted.now = 0.0
    rates: Any = Rates(counted, lambda: counted.now)  # type: ignore[arg-type]
    assert counted.look(rates, rehearsal.SAMPLE_SECONDS, 1, 64) == (10.0, 640.0)


def test_a_source_that_counts_no_bytes(counted: Counted) -> None:
    del counted.said["bytes"]
    rates: Any = Rates(counted, lambda: counted.now)  # type: ignore[arg-type]
    assert counted.look(rates, 0.125, 50, 1) == (400.0, 0.0)


def test_bytes_that_are_counted_from_the_second_look_on(counted: Counted) -> None:
    """A source has counted none before its first packet."""
    del counted.said["bytes"]
    rates: Any = Rates(counted, lambda: counted.now)  # type: ignore[arg-type]
    counted.said["bytes"] = 0
    assert counted.look(rates, 0.125, 50, 4000) == (400.0, 32_000.0)


# -- a job's plan ------------------------------------------------------------------------------------------------------


def config(root: Path, *devices: str, **replica: Any) -> NodeConfig:
    captures = [{"device": one, "queues": 2 if one == "ring" else 1, "ring_size": 4096, "huge": False,
                 "path_mtu": 2048 if one == "ring" else 0} for one in devices]
    return NodeConfig.model_validate({
        "name": "n", "control": {"listen": "localhost:1", "token_file": "t"}, "capture": captures,
        "replica": {"directory": str(root), "arenas": 3, "patience_packets": 77, **replica}})


def job_of(**more: Any) -> Job:
    return replace(example_job(ranks=2, count=[64]), **more)


def test_a_job_is_planned_as_a_node_does(tmp_path: Path) -> None:
    """A journal reads iterations that have closed: they take memory, too."""
    for more, arenas in (({}, 3), ({"journal": True}, 5)):
        engine = _plan(config(tmp_path, "ring", **more), job_of(), 6).engine
        assert (engine.streams, engine.threads, engine.arenas, engine.patience) == (6, 6, arenas, 77)


def test_a_job_without_connections_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        _plan(config(tmp_path, "ring"), job_of(flows=[]), 1)
    assert refused.value.where == "job manifest: flows"
    assert "names no connections" in refused.value.what and "flowcheck learn" in str(refused.value.remedy)


def test_a_job_that_a_node_has_no_memory_for_is_refused(tmp_path: Path) -> None:
    """One that only reduces gradients has no slots."""
    small = config(tmp_path, "ring", memory_mb=1)
    large = example_job(ranks=2, count=[60_000])
    assert large.optimizer is not None
    with pytest.raises(UserError) as refused:
        _plan(small, large, 1)
    assert refused.value.where == "replica.memory_mb"
    assert _plan(small, replace(large, optimizer=None), 1).job.optimizer is None


# -- a rehearsal -------------------------------------------------------------------------------------------------------


class Source:
    """A capture that is open. fails: said by it at the second look."""

    def __init__(self, scene: Scene, live: Any) -> None:
        self.live, self.error, self._scene, self._looks = live, None, scene, 0
        self._counts = {"received": 0, "bytes": 0, "dropped": 0}

    def __enter__(self) -> Source:
        self._scene.done.append(f"open {self.live.device}")
        if self._scene.refuses == f"open {self.live.device}":
            raise DpdkError(1, "no")
        return self

    def __exit__(self, *_: object) -> None:
        self._scene.done.append(f"close {self.live.device}")

    def start(self) -> None:
        self._scene.done.append(f"start {self.live.device}")
        if self._scene.refuses == f"start {self.live.device}":
            raise DpdkError(1, "no")

    def come(self, packets: int, size: int) -> None:
        self._counts["received"] += packets
        self._counts["bytes"] += packets * size

    def counters(self) -> dict[str, int]:
        return self._counts


class Scene:
    """What a rehearsal calls, in place of DPDK. done: in which order. Time passes only while it looks: a second a look,
    in which the i-th source gets 100 * (i + 1) packets at first, and ten times as many when jobs are followed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.told: dict[str, Any] = {}
        self.now, self.refuses, self.sources = 1000.0, "", list[Source]()
        self.facts = FACTS
        for name in ("start_eal", "survey_live", "follow", "settle", "report"):
            patch.setattr(rehearsal, name, getattr(self, name))
        patch.setattr(rehearsal, "ask", self.ask)
        patch.setattr(rehearsal, "LiveSource", self.source)
        patch.setattr(rehearsal, "time", SimpleNamespace(time=lambda: 5.0))
        patch.setattr(rehearsal, "Rates", lambda source: Rates(source, lambda: self.now))

    def ask(self, config: NodeConfig, planned: Any) -> MachineFacts:
        assert planned is self.told["planned"] and [one.device for one in config.capture] == [p.device for p in planned]
        self.told["config"] = config
        return self.facts

    @contextmanager
    def start_eal(self, *lives: Any, huge: bool | None) -> Iterator[Any]:
        self.told["eal"] = ([one.device for one in lives], huge)
        yield SimpleNamespace(huge="as it was had")
        self.done.append("end of DPDK")

    def settle(self, mtu: int, huge: Any, **more: Any) -> None:
        self.told["settled"] = (mtu, huge, more)

    def source(self, eal: Any, live: Any) -> Source:
        assert eal.huge == "as it was had"
        self.sources.append(Source(self, live))
        return self.sources[-1]

    def _pass(self, look: Callable[[], None], packets: int) -> None:
        self.now += 1
        for number, one in enumerate(self.sources, 1):
            one.come(packets * number, 80)
        look()

    def survey_live(self, sources: Any, survey: Any, seconds: float, look: Callable[[], None]) -> None:
        assert sources == self.sources
        self.done.append(f"look for {seconds:g} s")
        self.told["survey"] = survey
        for _ in range(2):
            self._pass(look, 100)
        if self.refuses.startswith("break"):
            [self.sources[int(self.refuses[-1])].error] = [DpdkError(5, "it broke")]  # type: ignore[assignment]
            self._pass(look, 0)

    def follow(self, config: Any, planned: Any, sources: Any, followed: Any, seconds: float, look: Any) -> None:
        assert (config, sources) == (self.told["config"], self.sources) and planned is self.told["planned"]
        self.done.append(f"follow {len(followed)} for {seconds:g} s")
        self.told["followed"] = followed
        self._pass(look, 1000)

    def report(self, config: Any, planned: Any, made: Any, **more: Any) -> dict[str, Any]:
        self.done.append("report")
        assert config is self.told["config"]
        self.told["report"] = more | {"planned": planned, "made": made}
        return {"good": True}


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene(monkeypatch)
    plan = plan_captures

    def planned(config: NodeConfig) -> Any:
        scene.told["planned"] = plan(config)
        return scene.told["planned"]

    monkeypatch.setattr(rehearsal, "plan_captures", planned)
    return scene


def test_all_of_the_time_is_for_the_first_look_where_there_are_no_jobs(scene: Scene, tmp_path: Path) -> None:
    settings = config(tmp_path, "ring", "null")
    assert rehearse(settings, [], 8.0, lambda: scene.done.append("ready")) == {"good": True}
    assert scene.done == [
        "open ring", "open null", "start ring", "start null", "ready", "look for 8 s", "close null", "close ring",
        "end of DPDK", "report",
    ]
    assert scene.told["eal"] == (["ring", "null"], settings.huge)
    assert scene.told["settled"] == (2048, "as it was had", {"measure": False, "remember": False})
    told = scene.told["report"]
    assert (told["began"], told["seconds"], told["followed"]) == (5.0, (8.0, 0.0), [])
    assert told["planned"] is scene.told["planned"] and told["made"].problems == ()
    assert told["rates"] == [(100.0, 8000.0), (200.0, 16_000.0)]
    assert told["looked"] == [{"received": 200, "bytes": 16_000, "dropped": 0},
                              {"received": 400, "bytes": 32_000, "dropped": 0}]
    assert told["ended"] == [{}, {}]
    observed = scene.told["survey"].report()
    assert told["streams"] == observed["per_capture"] and told["found"]["packets"] == observed["packets"]
    assert told["found"]["captures"] == []


def test_with_jobs_each_has_a_half(scene: Scene, tmp_path: Path) -> None:
    """Rates are of both halves; what was counted, of each one alone."""
    jobs = [job_of(), replace(example_job(ranks=3, count=[64]), run_id="second")]
    rehearse(config(tmp_path, "ring", "null"), jobs, 9.0)
    assert scene.done[4:6] == ["look for 4.5 s", "follow 2 for 4.5 s"]
    told = scene.told["report"]
    assert told["seconds"] == (4.5, 4.5) and told["followed"] is scene.told["followed"]
    assert [one.plan.job for one in told["followed"]] == jobs
    assert {one.plan.engine.streams for one in told["followed"]} == {3}  # queues of both
    assert told["rates"] == [(1000.0, 80_000.0), (2000.0, 160_000.0)]
    assert told["looked"] == [{"received": 200, "bytes": 16_000, "dropped": 0},
                              {"received": 400, "bytes": 32_000, "dropped": 0}]
    assert told["ended"] == [{"received": 1000, "bytes": 80_000}, {"received": 2000, "bytes": 160_000}]


def test_packets_are_placed_for_the_usual_size_where_none_is_said(scene: Scene, tmp_path: Path) -> None:
    rehearse(config(tmp_path, "null"), [], 1.0)
    assert scene.told["settled"][0] == 1024


@pytest.mark.parametrize(("refuses", "opened", "said"), [
    ("open ring", ["open ring"], "ring: no"),
    ("open null", ["open ring", "open null"], "null: no"),
    ("start ring", ["open ring", "open null", "start ring"], "ring: no"),
    ("start null", ["open ring", "open null", "start ring", "start null"], "null: no"),
    ("break 0", ["open ring", "open null", "start ring", "start null", "look for 8 s"], "ring: it broke"),
    ("break 1", ["open ring", "open null", "start ring", "start null", "look for 8 s"], "null: it broke"),
])
def test_what_dpdk_refuses_names_the_device_and_closes_all(
    scene: Scene, tmp_path: Path, refuses: str, opened: list[str], said: str
) -> None:
    scene.refuses = refuses
    with pytest.raises(DpdkError) as refused:
        rehearse(config(tmp_path, "ring", "null"), [], 8.0)
    assert refused.value.what == said
    entered = [one.replace("open", "close") for one in opened if one.startswith("open") and one != refuses]
    assert scene.done == [*opened, *reversed(entered)]


def test_a_node_without_a_mirror_cannot_be_rehearsed(scene: Scene, tmp_path: Path) -> None:
    holder = NodeConfig.model_validate({
        "api": {"listen": "localhost:1"}, "tokens": {"reader": "t", "peer": "t"},
        "protect": {"directory": str(tmp_path), "copies": ["n:1"]}})
    with pytest.raises(UserError) as refused:
        rehearse(holder, [], 1.0)
    assert (refused.value.where, refused.value.remedy) == ("node.toml", "the settings of a node that follows a job")
    assert scene.done == []


def test_memory_that_is_not_there_is_said_before_anything_is_opened(scene: Scene, tmp_path: Path) -> None:
    """A replica that does not fit is for the report: captures can be opened."""
    scene.facts = replace(FACTS, available=1 << 20)
    with pytest.raises(EnvironmentProblem):
        rehearse(config(tmp_path, "ring"), [], 1.0)
    assert scene.done == []


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(scene: Scene, tmp_path: Path) -> list[Path]:
    """node.toml and a job manifest."""
    (tmp_path / "node.toml").write_text(
        '[control]\nlisten = "localhost:1"\ntoken_file = "t"\n[replica]\ndirectory = "."\n'
        '[[capture]]\ndevice = "ring"\nhuge = false\nring_size = 64\n[[capture]]\ndevice = "null"\nhuge = false\n'
        'ring_size = 64\n')
    (tmp_path / "job.json").write_text(json.dumps(example_job(ranks=2, count=[64]).to_dict()))
    return [tmp_path / "node.toml", tmp_path / "job.json"]


@pytest.mark.parametrize(("good", "status"), [(True, 0), (False, 1)])
def test_the_document_is_printed_and_the_status_says_whether_all_is_good(
    scene: Scene, files: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: bool,
    status: int,
) -> None:
    settings, job = files
    monkeypatch.setattr(rehearsal, "report", lambda *_, **told: {"good": good, "seconds": told["seconds"]})
    assert run(settings, [job], 3.0, True) == status
    said = capsys.readouterr()
    assert json.loads(said.out) == {"good": good, "seconds": [1.5, 1.5]}
    assert said.out.startswith('{\n "good"') and said.out.endswith("}\n")
    assert said.err == "flowcheck: looking at ring, null for 3 s\n"


@pytest.mark.parametrize(("good", "status"), [(True, 0), (False, 1)])
def test_without_json_it_is_for_people(
    scene: Scene, files: list[Path], monkeypatch: pytest.MonkeyPatch, good: bool, status: int
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(rehearsal, "report", lambda *_, **told: {"good": good})
    monkeypatch.setattr(rehearsal, "screen", lambda: "a screen")
    monkeypatch.setattr(rehearsal, "render", lambda *given: shown.append(given))
    assert run(files[0], [], 3.0, False) == status
    assert shown == [({"good": good}, "a screen")]


def test_what_dpdk_says_is_the_environments_word(scene: Scene, files: list[Path]) -> None:
    scene.refuses = "start null"
    with pytest.raises(EnvironmentProblem, match="null: no"):
        run(files[0], [], 3.0, True)
