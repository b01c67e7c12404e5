"""Hours in minutes: what a soak counts, and a soak. FLOWCHECK_SOAK_MINUTES: how long it is; `make soak` takes 30."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowcheck.errors import EnvironmentProblem
from lab.jobs import Training
from lab.network.impair import Impairment
from lab.run import LabRun
from lab.soak import MOST, SETTINGS, Meter, Plan, Report, Sample, Trend, account, keep, soak, trend

from .conftest import lab_of

MINUTES = float(os.environ.get("FLOWCHECK_SOAK_MINUTES", "6"))
MB = 1 << 20


def samples(count: int, slope: float = 0.0, noise: float = 0.0, files: int = 20, leaks: float = 0.0) -> list[Sample]:
    """One a second. slope: bytes in an hour; noise: standard deviation, in bytes."""
    draw = random.Random(7)
    return [Sample(float(at), int(100 * MB + slope * at / 3600 + draw.gauss(0, noise)), files + int(leaks * at))
            for at in range(count)]


def test_what_grows_is_found() -> None:
    leak = trend(samples(900, slope=10 * MB))
    assert leak is not None and leak.grows and leak.slope == pytest.approx(10 * MB, rel=0.01)
    noisy = trend(samples(900, slope=10 * MB, noise=MB / 8))
    assert noisy is not None and noisy.grows


def test_what_does_not_grow_is_not() -> None:
    for noise in (0.0, MB, 30 * MB):
        one = trend(samples(900, noise=noise))
        assert one is not None and not one.grows and one.flat, noise
    falling = trend(samples(900, slope=-10 * MB))
    assert falling is not None and falling.flat


def test_what_grows_while_it_warms_up_does_not_count() -> None:
    warming = [Sample(float(at), min(at, 200) * MB, 20) for at in range(900)]
    one = trend(warming)
    assert one is not None and one.slope == 0 and one.samples == 900 - 300
    assert trend(warming[:70]) is None and trend([]) is None


def test_files_that_stay_open_are_found() -> None:
    one = trend(samples(900, leaks=0.01))
    assert one is not None and not one.grows and not one.flat and one.files[0] < one.files[1]


def test_connections_of_ranks_that_are_away_are_no_trend() -> None:
    """Whether a rank is away in the last third, too, is chance. One that leaves a file open each time is found."""
    away = [Sample(float(at), MB, 20 if at in range(320, 330) else 23) for at in range(900)]
    one = trend(away)
    assert one is not None and one.flat and one.files == (23, 23)
    leaves = [Sample(float(at), MB, 23 + at // 180) for at in range(900)]
    one = trend(leaves)
    assert one is not None and not one.flat


def test_a_meter_sees_a_process_and_what_it_has_started() -> None:
    """The one grows; both are there until they end."""
    child = "import sys, time; print('up', flush=True); sys.stdin.read()"
    code = ("import subprocess, sys\n"
            f"one = subprocess.Popen([sys.executable, '-c', {child!r}, '-m', 'flowcheck.node.api.worker'],"
            " stdin=subprocess.PIPE)\nheld = []\nfor line in sys.stdin: held.append(bytearray(b'x') * (1 << 25))\n"
            "one.stdin.close(); one.wait()\n")
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    meter = Meter(lambda: [process.pid])
    try:
        assert process.stdout.readline() == "up\n"

        def until(enough: int) -> None:
            end = time.monotonic() + 120
            while time.monotonic() < end:
                found = {role: kept for (_, role), kept in meter.samples.items()}
                if len(found) == 2 and found["node"][-1].memory - found["node"][0].memory >= enough:
                    return
                time.sleep(0.05)
            raise AssertionError(meter.samples)

        until(0)
        process.stdin.write("more\n")
        process.stdin.flush()
        until(20 << 20)
        assert {role for _, role in meter.samples} == {"node", "api"}
        assert all(one.files > 0 and one.memory > 0 for kept in meter.samples.values() for one in kept)
    finally:
        process.stdin.close()
        process.wait(60)
        meter.close()
        process.stdout.close()


def test_what_was_measured_can_be_looked_at(tmp_path: Path) -> None:
    kept = {(7, "node"): [Sample(0.5, 4096, 3), Sample(1.0, 8192, 3)], (8, "answering"): [Sample(1.0, 1, 2)]}
    keep(kept, tmp_path / "memory.jsonl")
    assert [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()] == [
        {"pid": 7, "role": "node", "at": 0.5, "memory": 4096, "files": 3},
        {"pid": 7, "role": "node", "at": 1.0, "memory": 8192, "files": 3},
        {"pid": 8, "role": "answering", "at": 1.0, "memory": 1, "files": 2},
    ]


def test_what_became_of_each_iteration() -> None:
    report = Report()
    rows = [
        (0, "no state yet", "", 0), (1, "equal", "", 5), (2, "not published", "covered", 0), (3, "equal", "", 5),
        (4, "waiting", "node", 0), (5, "not published", "stale", 0), (6, "waiting", "trainers", 0),
    ]
    account(report, rows, away={4, 5}.__contains__, said={1, 2, 3, 5}.__contains__)
    assert report.verdicts == {"joining": 1, "equal": 2, "not published": 2, "away": 1, "cut": 1}
    assert report.why == {"covered": 1, "stale": 1} and report.odd == [] and report.tensors == 10


@pytest.mark.parametrize(("row", "said", "verdict"), [
    ((7, "differs", "layer0.weight", 0), True, "differs"),
    ((7, "waiting", "node", 0), False, "unaccounted"),
    ((7, "not published", "", 0), True, "unaccounted"),
    ((7, "not published", "covered", 0), False, "unaccounted"),
])
def test_what_is_odd(row: tuple[int, str, str, int], said: bool, verdict: str) -> None:
    report = Report()
    account(report, [row], away=lambda number: False, said=lambda number: said)
    assert report.verdicts == {verdict: 1} and len(report.odd) == 1 and "iteration 7" in report.odd[0]


def whole() -> Report:
    report = Report(seconds=600, kills=["1 in backward of 9, on from 9"], restarts=1, statuses=[0])
    report.verdicts["equal"] = 40
    report.trends = {"node, start 1": Trend(-1.0, 5.0, (20, 20), 400), "answering, start 1": None}
    return report


def test_good_is_only_what_had_faults_and_withstood_them() -> None:
    assert whole().good
    for change in ({"odd": ["x"]}, {"kills": []}, {"restarts": 0}, {"statuses": [1]},
                   {"trends": {"node": Trend(9.0, 1.0, (20, 20), 400)}}, {"trends": {"node": None}},
                   {"trends": {"node": Trend(0.0, 1.0, (20, 21), 400)}}):
        report = whole()
        for name, value in change.items():
            setattr(report, name, value)
        assert not report.good, change
    report = whole()
    report.verdicts.clear()
    assert not report.good
    assert any("GROWS" in line for line in Report(trends={"node": Trend(9.0, 1.0, (2, 2), 400)}).lines())


class Killed(Exception):
    """A rank, by the soak."""


class Restarted:
    """A run whose trainers have just gone on from iteration 4695. The node publishes each iteration from a number on,
    and of every fifth of them a checksum matches."""

    node_pids: tuple[int, ...] = ()

    def __init__(self, out: Path, first_published: int) -> None:
        self.out = out
        self.iterations: list[dict[str, int]] = []
        self.events: list[tuple[str, dict[str, object]]] = []
        self.next, self.first_published = 4695, first_published

    def start_nodes(self, job: Training) -> None: ...

    def attach(self, job: Training) -> None: ...

    def train(self, iterations: int) -> None:
        for number in range(self.next, self.next + iterations):
            self.iterations.append({"iteration": number})
            published, matches = number >= self.first_published, max(0, number - self.first_published) // 5
            said = {"event": "iteration", "iteration": number, "published": published, "matches": matches}
            self.events.append(("node0", said))
        self.next += iterations

    def train_and_die(self, iterations: int, **how: object) -> None:
        raise Killed


@pytest.mark.parametrize("after", [0, 500])
def test_a_job_that_goes_on_from_a_high_number_has_as_long_as_others(tmp_path: Path, after: int) -> None:
    run = Restarted(tmp_path, 4695 + after)
    with pytest.raises(Killed):
        soak(run, Training(ranks=3), Plan(kill_seconds=0))  # type: ignore[arg-type]
    assert run.events[-1][1]["published"]


def test_a_rank_is_killed_only_where_there_is_something_to_go_on_from(tmp_path: Path) -> None:
    """However long the node took to join: recovery gets nothing before so many checksums have matched."""
    run = Restarted(tmp_path, 4695 + 18)
    with pytest.raises(Killed):
        soak(run, Training(ranks=3), Plan(kill_seconds=0))  # type: ignore[arg-type]
    assert run.events[-1][1]["matches"] >= SETTINGS["api"]["shadow"]


def test_a_soak_ends_where_no_version_is_made(tmp_path: Path) -> None:
    run = Restarted(tmp_path, 1 << 40)
    with pytest.raises(EnvironmentProblem, match=f"in {MOST} iterations"):
        soak(run, Training(ranks=3), Plan())  # type: ignore[arg-type]
    assert run.next > 4695 + MOST


@pytest.mark.root
@pytest.mark.slow
def test_a_soak(tmp_path: Path) -> None:
    """Training at full load, a lossy mirror, ranks and the node killed: every iteration is accounted for, and every
    version that was published is equal. Memory is said, and judged by `make soak`: docs/use/lab.md has what it found.
    """
    with (
        lab_of(ranks=3, mirrored=((0, 1),), impairments=(Impairment("mirror0", drop=0.001),)) as fabric,
        LabRun(fabric, tmp_path, api=True, node_settings=SETTINGS) as run,
    ):
        plan = Plan(minutes=MINUTES, kill_seconds=min(180.0, 10 * MINUTES))
        report = soak(run, Training(ranks=3), plan, lambda text: print(text, flush=True))
        run.finish_trainers()
    print("\n".join(report.lines()))
    assert report.odd == [] and report.verdicts["equal"] > 0 and report.kills and report.restarts == 1
    assert set(report.statuses) == {0} and report.trends, report.lines()
