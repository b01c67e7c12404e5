"""A node's journal from the gradients that come to any of the last steps, made again; and what it is without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowcheck.checkpoint.directory import read_step_manifest
from flowcheck.errors import EnvironmentProblem, FlowcheckError
from flowcheck.journal.reader import RingReader
from flowcheck.node.versions.journal.reach import Reach, reach_of
from flowcheck.node.versions.journal.remaking import remake

from .kept_scene import Kept, bases, hashes_in, kept

ROOT = Path(__file__).resolve().parents[3]


def reach(at: Kept) -> Reach:
    found = reach_of(at.folder_of_run)
    assert found is not None
    return found


def makeable(at: Kept) -> list[int]:
    return [step for step in range(200) if reach(at).base_for(step)]


def remade(at: Kept, step: int) -> Path:
    base = reach(at).base_for(step)
    assert base is not None and base.step in bases(at)
    return remake(at.folder_of_run, base, step, 1)


def with_bases(at: Kept, count: int, iterations: int) -> None:
    at.run(iterations)
    at.until(lambda: len(at.events("base")) >= count)
    at.writer.close()  # a base that is still being written would push an older one out later


def test_any_of_the_last_steps_is_made_again_bit_for_bit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Schedules, clipping, momentum, skipped steps, buffers; the ring has gone round since."""
    with kept(monkeypatch, tmp_path, keep=12) as at:
        with_bases(at, 4, 50)
        assert not at.events("hole") and not reach(at).holes
        first = bases(at)[0]
        there = makeable(at)
        assert there == [*range(first + 1, 56)] and len(there) >= 12 and len(bases(at)) == 2
        for step in (there[0], there[7], there[-1]):
            assert hashes_in(remade(at, step)) == at.truth[step]
        private = [path for path in (tmp_path / "log").rglob("*") if path.stat().st_mode & 0o077]
        assert [path for path in private if "step-" not in str(path)] == []


@pytest.mark.slow
def test_each_of_the_last_fifty_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with kept(monkeypatch, tmp_path, keep=50, megabytes=16) as at:
        for count in range(1, 4):
            with_bases(at, count, 55)
        there = makeable(at)
        assert len(there) >= 50 and there[-1] == max(at.truth)
        for step in there[-50:]:
            assert hashes_in(remade(at, step)) == at.truth[step]


def test_a_lost_iteration_is_a_hole_that_no_step_is_made_across(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with kept(monkeypatch, tmp_path, keep=20) as at:
        with_bases(at, 1, 6)
        lost = at.next_number
        at.engine.copied[at.session.clock.iteration(lost)] = (1, 0, 0)  # two copies of a cell that differ
        at.iteration()
        assert not at.closed[-1].published
        assert at.events("hole")[0] | {"why": ""} == {
            "name": "", "iteration": lost, "last": lost, "cause": "not_proven", "why": ""}
        at.begins()
        with_bases(at, 2, 6)
        newest = bases(at)[-1]
        assert newest > lost + 1 and reach(at).holes[0][0] == lost
        assert makeable(at) == [*range(bases(at)[0] + 1, lost + 1), *range(newest + 1, at.next_number + 1)]
        for step in (lost, newest + 1):
            assert hashes_in(remade(at, step)) == at.truth[step]


def test_after_a_mismatch_no_step_is_made_that_may_be_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gradients are proven, and stay. Steps after the last one that was verified are not."""
    for name in "ab":
        (tmp_path / name).mkdir()
    with kept(monkeypatch, tmp_path / "a") as first:
        first.run(4)
        base = first.next_number
        sums = first.sums_of(first.iteration())
    with kept(monkeypatch, tmp_path / "b", keep=20) as at:
        at.run(4)
        assert at.iteration(checksums=sums) == base and at.closed[-1].status == "verified"
        verified = base + 1
        assert remade(at, verified) and read_step_manifest(remade(at, verified))["status"] == "verified"
        at.run(3)
        assert makeable(at)[-1] == verified + 3
        at.iteration(checksums=sums)  # of another step
        at.until(lambda: makeable(at)[-1] == verified)
        assert hashes_in(remade(at, verified)) == at.truth[verified]
        assert len(reach(at).lines) == 9, "the gradients stay"


def test_a_bit_that_differs_is_never_used_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with kept(monkeypatch, tmp_path, keep=10) as at:
        with_bases(at, 1, 8)
        step = makeable(at)[3]
        _, spans = RingReader(at.folder_of_run.ring).read(step - 1)
        ring = next(at.folder_of_run.ring.glob("ring-*"))
        data = bytearray(ring.read_bytes())
        at_byte = data.index(spans[0].tobytes()[:64])
        data[at_byte + 3] ^= 1
        with open(ring, "r+b") as file:
            file.write(data)
        with pytest.raises(EnvironmentProblem, match=f"iteration {step - 1} cannot be used"):
            remade(at, step)
        assert hashes_in(remade(at, step - 1)) == at.truth[step - 1]


def test_where_there_is_no_room_versions_go_on_and_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with kept(monkeypatch, tmp_path, megabytes=1 << 38) as at:
        at.run(3)
        assert [one.published for one in at.closed] == [True] * 3 and not bases(at)
        (said,) = at.events("problem")
        assert said["why"].startswith("no journal is kept: ")
        assert [(one["iteration"], one["cause"]) for one in at.events("hole")] == [(5, "closed"), (6, "closed"),
                                                                                  (7, "closed")]


def test_a_journal_that_is_too_small_for_what_it_is_to_keep_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with kept(monkeypatch, tmp_path, megabytes=1, keep=1000) as at:
        (said,) = at.events("problem")
        assert said["why"].startswith("journal.megabytes: 1 MiB hold ")


def test_another_process_finds_what_a_killed_one_has_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = run(tmp_path, "killed")
    assert done.returncode == -9, done.stderr[-3000:]
    truth = {int(step): hashes for step, hashes in json.loads((tmp_path / "truth.json").read_text()).items()}
    with kept(monkeypatch, tmp_path, begins=17, keep=8) as at:
        assert at.events("journal")[0]["found"] >= 11
        before = makeable(at)
        assert before[-1] == 17
        for step in (before[0], 17):
            assert hashes_in(remade(at, step)) == truth[step]
        at.run(4)
        at.until(lambda: bases(at)[-1] == 18)
        assert makeable(at) == [*range(bases(at)[0] + 1, 18), 19, 20, 21], "of either process, and none across"
        with pytest.raises(FlowcheckError, match="is of another line"):
            remake(at.folder_of_run, at.folder_of_run.bases[0], 18, 1)


def test_a_disk_that_hangs_costs_holes_and_holds_up_nothing(tmp_path: Path, slow_files: Path) -> None:
    hold = tmp_path / "hold"
    done = run(tmp_path, "hung", str(hold), LD_PRELOAD=str(slow_files), SLOW_UNDER=str(tmp_path / "log"),
               SLOW_HOLD=str(hold))
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["published"] == [True] * 26
    holes = dict(said["holes"])
    assert set(holes.values()) == {"busy"}
    assert {*range(17, 21)} <= set(holes) <= {*range(16, 21)}, "two were on their way"


def run(folder: Path, *what: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.flowcheck.node.kept_process", str(folder), *what], capture_output=True, text=True,
        cwd=ROOT, timeout=240, env={**os.environ, "PYTHONPATH": str(ROOT), **more},
    )
