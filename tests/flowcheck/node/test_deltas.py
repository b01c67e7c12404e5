"""Gradients in a store between two bases: every step of them again, from the store alone, bit for bit."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import flowcheck
from flowcheck.ask.offer import MEMORY, Offer
from flowcheck.checkpoint.directory import read_step_manifest
from flowcheck.checkpoint.objects import open_store
from flowcheck.checkpoint.store import Rules
from flowcheck.control.version import seal
from flowcheck.errors import EnvironmentProblem, FlowcheckError
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.check.journal_figures import journal_figures, store_figures
from flowcheck.node.config.control import Api
from flowcheck.node.config.journal import JournalSettings
from flowcheck.node.config.store import Store

from ..hand_api import TOKEN
from .delta_scene import Uploads, bases_in, lane_of, made_of_store, makeable_in
from .kept_scene import Kept, config_of, hashes_in, kept

SECONDS = 120.0


def run(at: Kept, up: Uploads, iterations: int) -> None:
    for _ in range(iterations):
        at.run(1)
        up.sent()


def test_each_step_of_two_base_periods_is_made_of_the_store_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with kept(monkeypatch, tmp_path, keep=10) as at:
        up = Uploads(at, store)
        run(at, up, 55)
        lane, truth = lane_of(at, store), dict(at.truth)
        bases = bases_in(lane)
        assert len(bases) >= 3 and all(
            one.version.step - before.version.step >= 20 for before, one in pairwise(bases))
        there = makeable_in(lane)
        assert [*there] == [*range(bases[0].version.step + 1, at.next_number + 1)]
        assert not up.events("unstored") and not up.events("delta_gap")
        now = Offer("", MEMORY, "run", 0, at.next_number, "", "unverified", 1)
        assert up.uploads.covers(now) and up.uploads.covers(replace(now, step=now.step + 20))
        for other in (replace(now, step=now.step + 21), replace(now, run_id="other"), replace(now, epoch=1)):
            assert not up.uploads.covers(other), "a whole version of it goes to the store as without deltas"
    shutil.rmtree(tmp_path / "log")  # the node's disk
    for step, base in there.items():
        path = made_of_store(store, base, step, tmp_path / "made")
        assert hashes_in(path) == truth[step], step
        first, last = bases[0].version, base.version
        assert read_step_manifest(path)["status"] in ("unverified", f"follows {last.step}", f"follows {first.step}")
    assert [path for path in store.rglob("*") if path.stat().st_mode & 0o077] == []


def test_only_what_matched_itself_is_verified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    with kept(monkeypatch, tmp_path / "a") as first:
        first.run(6)
        verified = first.next_number + 1
        sums = first.sums_of(first.iteration())
    store = tmp_path / "store"
    with kept(monkeypatch, tmp_path / "b", keep=20) as at:
        up = Uploads(at, store)
        at.run(2)
        at.until(lambda: bool(at.events("base")))
        at.run(4)
        at.iteration(checksums=sums)
        at.run(2)
        up.sent()
        there = makeable_in(lane_of(at, store))
        status = {step: read_step_manifest(made_of_store(store, there[step], step, tmp_path / "made"))["status"]
                  for step in (verified - 1, verified, verified + 2)}
        assert status == {verified - 1: "unverified", verified: "verified", verified + 2: f"follows {verified}"}

        at.iteration(checksums=sums)  # of another step: what is made after the last that was verified may be wrong
        folder = lane_of(at, store).deltas(there[verified].line)  # type: ignore[arg-type]
        up.until(lambda: folder.listed().ends is not None)
        assert folder.listed().ends == verified
        with pytest.raises(FlowcheckError):
            made_of_store(store, there[verified], verified + 1, tmp_path / "made")
        assert hashes_in(made_of_store(store, there[verified], verified, tmp_path / "made")) == at.truth[verified]


# -- what is not as it was -----------------------------------------------------------------------------------------


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Kept, Kept]]:
    """Two runs whose iterations have the same numbers, each in its store."""
    for name in "ab":
        (tmp_path / name).mkdir()
    with kept(monkeypatch, tmp_path / "a", keep=20) as one, kept(
            monkeypatch, tmp_path / "b", keep=20, seed=1, run="other") as other:
        for at in (one, other):
            up = Uploads(at, at.folder / "store")  # type: ignore[operator]
            at.run(2)
            at.until(lambda at=at: bool(at.events("base")))  # type: ignore[misc]
            run(at, up, 4)
        yield one, other


def line_in(at: Kept) -> Path:
    (found,) = (at.folder / "store").glob("*/*/*/epoch-*/deltas/*")  # type: ignore[operator]
    return found


def flip(path: Path, byte: int = -9) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def removed(mine: Path, other: Path) -> None:
    (mine.with_suffix(mine.suffix) / "part-00000").unlink()


def of_another_run(mine: Path, other: Path) -> None:
    for suffix in (".json", "/part-00000"):
        shutil.copy(f"{other}{suffix}", f"{mine}{suffix}")


def gradients_of_another_run(mine: Path, other: Path) -> None:
    shutil.copy(other / "part-00000", mine / "part-00000")


def forged(mine: Path, other: Path) -> None:
    """Gradients of another run under this run's name, sealed again."""
    said, theirs = (json.loads(Path(f"{one}.json").read_text()) for one in (mine, other))
    Path(f"{mine}.json").write_text(json.dumps(seal(said | {name: theirs[name] for name in ("sizes", "parts")})))
    gradients_of_another_run(mine, other)


def of_another_iteration(mine: Path, other: Path) -> None:
    for suffix in (".json", "/part-00000"):
        shutil.copy(f"{min(mine.parent.glob('*-*.*[0-9a-f]'))}{suffix}", f"{mine}{suffix}")


@pytest.mark.parametrize("change", [
    removed, of_another_run, gradients_of_another_run, forged, of_another_iteration,
    lambda mine, other: Path(f"{mine}.json").unlink(), lambda mine, other: flip(Path(f"{mine}.json")),
    lambda mine, other: flip(mine / "part-00000"), lambda mine, other: flip(mine / "part-00000", 4200),
])
def test_what_lacks_is_damaged_or_anothers_is_never_applied(
    two: tuple[Kept, Kept], tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    mine, _ = two
    deltas = [sorted(path for path in line_in(at).iterdir() if path.is_dir()) for at in two]
    last = deltas[0][-1]
    step = int(last.name[:12])  # of the version that it is applied to
    base = makeable_in(lane_of(mine, mine.folder / "store"))[step]  # type: ignore[operator]
    change(last, deltas[1][-1])
    with pytest.raises(FlowcheckError) as refused:
        made_of_store(mine.folder / "store", base, step + 1, tmp_path / "made")  # type: ignore[operator]
    assert str(refused.value)
    assert not [*(tmp_path / "made").rglob("manifest.json")]
    path = made_of_store(mine.folder / "store", base, step, tmp_path / "made")  # type: ignore[operator]
    assert hashes_in(path) == mine.truth[step]


@pytest.mark.parametrize("file", ["job.json", "model.safetensors", "manifest.json"])
def test_nothing_is_made_of_another_runs_job_or_a_damaged_base(
    two: tuple[Kept, Kept], tmp_path: Path, file: str
) -> None:
    mine, other = two
    store = mine.folder / "store"  # type: ignore[operator]
    (step, base), *_ = makeable_in(lane_of(mine, store)).items()
    if file == "job.json":
        shutil.copy(line_in(other) / file, line_in(mine) / file)
    else:
        flip(store / base.folder / file)
    with pytest.raises(FlowcheckError):
        made_of_store(store, base, step, tmp_path / "made")


# -- slow, tidied --------------------------------------------------------------------------------------------------


class Gated:
    """A store that takes nothing while it is held."""

    def __init__(self, root: Path) -> None:
        self._objects, self.gate = open_store(str(root), {}), threading.Event()
        self.gate.set()

    def put(self, name: str, pieces: Any) -> None:
        assert self.gate.wait(SECONDS)
        self._objects.put(name, pieces)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)


def test_what_a_slow_store_misses_is_a_gap_that_nothing_is_made_across(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Versions and the journal go on meanwhile; the next base of the journal begins the chain again."""
    store = tmp_path / "store"
    objects = Gated(store)
    with kept(monkeypatch, tmp_path, keep=10) as at:
        up = Uploads(at, store, objects, every=80)  # type: ignore[arg-type]
        run(at, up, 6)
        held = at.next_number
        objects.gate.clear()
        at.run(1)
        up.uploads.look()
        at.run(60)
        assert len(at.events("journaled")) == len(at.closed) and not at.events("hole")
        assert all(one.published for one in at.closed)
        objects.gate.set()
        at.run(20)
        up.sent()
        (gap,) = up.events("delta_gap")
        assert held <= gap["first"] <= gap["last"] and gap["why"]
        there = makeable_in(lane_of(at, store))
        assert len(up.events("stored")) == 2 and gap["first"] in there and gap["first"] + 1 not in there
        assert max(there) == at.next_number
        assert [one for one in up.events("stored") if one["step"] > gap["last"]]
        for step in (held, min(step for step in there if step > gap["last"] + 1), at.next_number):
            assert hashes_in(made_of_store(store, there[step], step, tmp_path / "made")) == at.truth[step]


def test_multiples_of_keep_every_can_be_had_for_ever_and_the_rest_is_tidied_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with kept(monkeypatch, tmp_path, keep=10) as at:
        up = Uploads(at, store, rules=Rules(keep=1, every=45))
        run(at, up, 130)
        lane, truth = lane_of(at, store), dict(at.truth)
    bases, there = bases_in(lane), makeable_in(lane)
    newest = bases[-1].version.step
    first = min(up.events("stored")[0]["step"], newest)
    multiples = range(45, at.next_number + 1, 45)
    assert len(multiples) == 3 and first < 45 and len(bases) < len(up.events("stored")) and up.events("expired")
    for step in multiples:
        found = [one for one in bases if one.version.step == step]
        path = store / found[0].folder if found else made_of_store(store, there[step], step, tmp_path / "made")
        assert hashes_in(path) == truth[step]
    assert [*range(newest + 1, at.next_number + 1)] == [step for step in there if step > newest]
    old = [step for step in there if step <= newest]
    assert len(old) < 0.8 * (newest - first), "what no multiple needs is gone"
    for line in {one.line for one in bases}:
        assert line is not None
        for span in lane.deltas(line).listed().spans:
            assert any(one.line == line and one.version.step <= span.last for one in bases)


# -- as a user gets it ---------------------------------------------------------------------------------------------


def test_another_node_makes_and_serves_any_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    with kept(monkeypatch, tmp_path, keep=10) as at:
        run(at, Uploads(at, store), 30)
        truth, newest = dict(at.truth), at.next_number
        base = bases_in(lane_of(at, store))[-1].version.step
    shutil.rmtree(tmp_path / "log")
    (tmp_path / "elsewhere").mkdir()
    for path in tmp_path.glob("flowcheck-*"):
        path.rename(tmp_path / "elsewhere" / f"gone-{path.name}")
    config = config_of(tmp_path / "elsewhere", store=Store(url=str(store), every=1000)).model_copy(
        update={"api": Api(listen="127.0.0.1:0"), "journal": None, "name": "another"})
    with contextlib.closing(Serving(config, TOKEN.encode(), lambda *_, **__: None)) as node:
        api = str(node.address)
        from flowcheck.node.versions.journal.rewind import run as rewind

        assert rewind(api, TOKEN, None, "", SECONDS, as_json=True) == 0
        found = {(one["kind"], one["first"], one["last"]) for one in json.loads(capsys.readouterr().out)["steps"]}
        assert ("store", base, base) in found and ("makeable", base + 1, newest) in found
        for step in (newest, base + 3, newest - 1, newest - 1):
            taken = flowcheck.fetch(api, tmp_path / "got", token=TOKEN, step=step)
            assert taken.source.endswith(", store") and hashes_in(taken.path) == truth[step]
        recovered = flowcheck.recover(api, token=TOKEN, step=base + 2, together=False)
        assert recovered.step == base + 2 and recovered.source.endswith(", store")
        with pytest.raises(EnvironmentProblem, match=f"step {newest + 1} is not there"):
            flowcheck.fetch(api, tmp_path / "none", token=TOKEN, step=newest + 1)
        flip(max(store.glob("*/*/*/epoch-*/deltas/*/*/part-00000")))
        with pytest.raises(EnvironmentProblem, match="other bytes than those written"):
            flowcheck.fetch(api, tmp_path / "bad", token=TOKEN, step=newest)


def test_check_says_what_goes_to_the_store_with_and_without(tmp_path: Path) -> None:
    """An iteration of 1 GiB, a state of three, two seconds a step; a base is one of the journal's."""
    journal = JournalSettings(directory=tmp_path, megabytes=400_000)
    figures = journal_figures(journal, 1, None, 2.0)
    found = store_figures(Store(url="x", every=1000, deltas=True), figures)
    assert found.every % figures.back == 0 and 1000 <= found.every < 1000 + figures.back
    gib = 1 << 30
    assert found.deltas == pytest.approx(gib / 2 + 3 * gib / (2 * found.every))
    assert (found.whole, found.each) == (pytest.approx(3 * gib / 2000), 3 * gib / 2)
    assert (found.deltas_day, found.each_day) == (found.deltas * 86400, found.each * 86400)
    timed = store_figures(Store(url="x", minutes=100, deltas=True), figures)
    assert (timed.whole, timed.every) == (pytest.approx(3 * gib / 6000), -(-3000 // figures.back) * figures.back)
