"""A base and a journal make the step that the source had, bit for bit, or nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flowcheck.checkpoint.directory import load_step, read_step_manifest
from flowcheck.control.version import MODEL, OPTIMIZER
from flowcheck.errors import FlowcheckError
from flowcheck.node.protect.journal import Journal
from flowcheck.node.protect.redo import Reach, reach, redo
from flowcheck.node.versions.journal.job_text import JobText, planned
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.replica import JobReplica, ReplicaOptions

from .journal_scene import Source, journal_job


class Kept:
    """A copy of a source's step, and its journal since then. base: that step, of which `before` came first."""

    def __init__(self, source: Source, folder: Path, steps: int = 5, before: int = 2) -> None:
        self.source, self.run = source, folder / "lane" / "run" / "epoch-0"
        for _ in range(before):
            source.step()
        self.base = source.write(self.run)
        self.journal = Journal(self.run / "journal")
        self.journal.begin(source.said)
        self.first = source.replica.step
        for _ in range(steps):
            source.into(self.journal)

    def made(self) -> Path:
        return redo(self.base, self.journal, 1)[0]


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    with contextlib.closing(Source(tmp_path)) as one:
        yield one


def same(path: Path, wanted: Path) -> None:
    one, other = read_step_manifest(path), read_step_manifest(wanted)
    for key in one.keys() - {"files", "manifest_sha256", "created", "written"}:
        assert one[key] == other[key], key
    for file, entry in one["files"].items():
        assert entry["tensors"] == other["files"][file]["tensors"]


@pytest.mark.parametrize("options", [
    {}, {"optimizer": "sgd", "options": {"lr": 0.1, "momentum": 0.9}}, {"dtype": "bfloat16", "masters": "state"},
], ids=["adamw", "momentum", "bfloat16"])
def test_equal_bits(tmp_path: Path, options: dict[str, object]) -> None:
    """A schedule, clipping, a scale, a step that was skipped and buffers; the manifest's words, too."""
    job = journal_job(**options)
    if options.get("masters"):
        assert job.optimizer is not None
        job.optimizer.masters = ""
    with contextlib.closing(Source(tmp_path, job)) as source:
        kept = Kept(source, tmp_path)
        path, to = redo(kept.base, kept.journal, 2)
        assert to == Reach(7, 12, 12) and path == kept.run / "step-000012"
        same(path, tmp_path / "truth" / "step-000012")
        assert load_step(path).parameters["mean"].tolist() == [11.0] * 3
        assert not (kept.journal.folder / "redo").exists() and sorted(kept.run.glob("step-*")) == [kept.base, path]


def test_the_first_iteration_has_buckets_of_its_own(source: Source, tmp_path: Path) -> None:
    """DDP orders them anew after it: what begins with the first version takes both orders."""
    assert source.job.bucket_layout(0) != source.job.bucket_layout(1)
    same(Kept(source, tmp_path, steps=3, before=0).made(), tmp_path / "truth" / "step-000008")


def test_the_newest_that_is_proved_and_reached(source: Source, tmp_path: Path) -> None:
    kept = Kept(source, tmp_path)
    folder = kept.journal.folder
    (folder / f"hashes-{12:012d}").unlink()
    assert reach(7, kept.journal) == Reach(7, 11, 12)  # made, but nothing would prove it
    (folder / f"entry-{9:012d}").unlink()
    assert reach(7, kept.journal) == Reach(7, 9, 9)
    same(kept.made(), tmp_path / "truth" / "step-000009")
    (folder / f"entry-{7:012d}").unlink()
    assert reach(7, kept.journal) == Reach(7, 7, 7) and reach(8, kept.journal) == Reach(8, 9, 9)
    with pytest.raises(FlowcheckError, match="step 7 is the newest that can be made"):
        kept.made()


def test_what_differs_in_one_bit_is_not_offered(source: Source, tmp_path: Path) -> None:
    kept = Kept(source, tmp_path)
    entry = kept.journal.made(10)
    for wrong in ("gradient", "clip", "lr", "buffer"):
        buckets = [bucket.clone() for bucket in entry.buckets]
        record = {"groups": [dict(group) for group in entry.record.groups], "clip": entry.record.clip,
                  "scale": entry.record.scale, "skipped": False}
        buffers = dict(entry.record.buffers)
        if wrong == "gradient":
            buckets[0].view(torch.int32)[3] ^= 1 << 20  # the last bits may be rounded away
        elif wrong == "clip":
            record["clip"] = 0.75
        elif wrong == "lr":
            record["groups"] = [{"lr": 0.5}]
        else:
            buffers["mean"] = torch.zeros(3)
        kept.journal.add(10, record, buckets, buffers)
        if wrong == "buffer":
            for step in (12, 13):  # of the steps after it there is nothing: the next buffers would hide it
                (kept.journal.folder / f"hashes-{step:012d}").unlink(missing_ok=True)
        with pytest.raises(FlowcheckError, match=r"step 1[12] differs from its source's: tensor "):
            kept.made()
        assert sorted(kept.run.glob("step-*")) == [kept.base]


def test_what_the_source_says_of_a_step_is_held_against_all_of_it(source: Source, tmp_path: Path) -> None:
    """Not only tensors that both have, and not only tensors."""
    kept = Kept(source, tmp_path, steps=1)
    said = kept.journal.version(8)
    model, optimizer = said.files[MODEL], dict(said.optimizer)
    names = sorted(model)
    for change, why in (
        ({"files": {**said.files, MODEL: {name: model[name] for name in names[1:]}}}, f"tensor {names[0]!r}"),
        ({"files": {**said.files, MODEL: {**model, "another": model[names[0]]}}}, "tensor 'another'"),
        ({"files": {**said.files, OPTIMIZER: {}}}, "tensor 'state."),
        ({"rounding": "torch-cpu"}, "its optimizer"), ({"optimizer": {**optimizer, "name": "adam"}}, "its optimizer"),
    ):
        kept.journal.hashed(dataclasses.replace(said, **change))
        with pytest.raises(FlowcheckError) as refused:
            kept.made()
        assert refused.value.what.startswith(f"step 8 differs from its source's: {why}")
        assert refused.value.where == str(kept.journal.folder)
        assert sorted(kept.run.iterdir()) == [kept.journal.folder, kept.base] and not (
            kept.journal.folder / "redo").exists()
    kept.journal.hashed(said)
    assert kept.made().name == "step-000008"


def test_what_is_made_is_of_the_run_that_the_source_says(source: Source, tmp_path: Path) -> None:
    """A manifest may be of an earlier start."""
    kept = Kept(source, tmp_path, steps=1)
    kept.journal.hashed(dataclasses.replace(kept.journal.version(8), run_id="the same", epoch=4, shard="dp0"))
    manifest = read_step_manifest(kept.made())
    assert (manifest["run_id"], manifest["epoch"], manifest["shard"]) == ("the same", 4, "dp0")


def test_what_an_attempt_left_half_goes(source: Source, tmp_path: Path) -> None:
    kept = Kept(source, tmp_path, steps=1)
    left = kept.journal.folder / "redo" / "step-000008"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    (left / "more").write_bytes(b"x")
    assert sorted(path.name for path in kept.made().iterdir()) == [
        "manifest.json", "model.safetensors", "optimizer.safetensors"]


def test_what_is_made_came_last_whatever_the_clock_says(source: Source, tmp_path: Path) -> None:
    """Copies that came first go first."""
    kept = Kept(source, tmp_path, steps=1)
    at = (kept.base / "manifest.json").stat().st_mtime_ns + 86_400 * 10**9
    os.utime(kept.base / "manifest.json", ns=(at, at))
    assert (kept.made() / "manifest.json").stat().st_mtime_ns > at


def test_gradients_of_another_form_are_an_error(source: Source, tmp_path: Path) -> None:
    kept = Kept(source, tmp_path, steps=2)
    entry = kept.journal.made(8)
    record = {"groups": list(entry.record.groups), "clip": entry.record.clip, "scale": entry.record.scale,
              "skipped": entry.record.skipped}
    for buckets, why in (
        (entry.buckets[1:], f"iteration 8 has {len(entry.buckets) - 1} buckets, not {len(entry.buckets)}"),
        ([*entry.buckets, entry.buckets[0]],
         f"iteration 8 has {len(entry.buckets) + 1} buckets, not {len(entry.buckets)}"),
        ([entry.buckets[0][1:], *entry.buckets[1:]], "step 9 cannot be made: "),
    ):
        kept.journal.add(8, record, buckets, entry.record.buffers)
        with pytest.raises(FlowcheckError) as refused:
            kept.made()
        assert refused.value.what.startswith(why) and refused.value.where == str(kept.journal.folder)
        assert sorted(kept.run.iterdir()) == [kept.journal.folder, kept.base]


def test_a_job_that_is_none_is_an_error(source: Source, tmp_path: Path) -> None:
    for body in ({}, {**source.body, "model": 7}):
        with pytest.raises(FlowcheckError) as refused:
            planned(dataclasses.replace(source.said, body=body))
        assert refused.value.where.startswith("journal")
    kept = Kept(source, tmp_path, steps=1)
    (kept.journal.folder / "job.json").unlink()
    with pytest.raises(FlowcheckError, match="step 7 is the newest that can be made"):
        redo(kept.base, Journal(kept.journal.folder), 1)


def test_a_job_whose_optimizer_is_not_known_cannot_be_made(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(source, tmp_path, steps=1)
    absent = SimpleNamespace(absent="no such optimizer")
    monkeypatch.setattr("flowcheck.node.protect.redo.JobReplica", lambda *_: absent)
    with pytest.raises(FlowcheckError, match="no such optimizer") as refused:
        kept.made()
    assert refused.value.where == str(kept.journal.folder)


def test_memory_for_two_states_and_as_many_threads_as_are_given(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[ReplicaOptions] = []
    closed: list[int] = []

    class Noting(JobReplica):
        def __init__(self, plan: JobPlan, values: None, options: ReplicaOptions) -> None:
            given.append(options)
            super().__init__(plan, values, options)

        def close(self) -> None:
            closed.append(1)
            super().close()

    monkeypatch.setattr("flowcheck.node.protect.redo.JobReplica", Noting)
    kept = Kept(source, tmp_path, steps=1)
    redo(kept.base, kept.journal, 3)
    assert [(one.slots, one.threads, one.path) for one in given] == [(2, 3, None)] and closed == [1]


def test_a_journal_that_is_damaged_is_an_error(source: Source, tmp_path: Path) -> None:
    kept = Kept(source, tmp_path)
    path = kept.journal.folder / f"entry-{8:012d}"
    for text in (path.read_bytes()[:100], b"", b"\0" * 64):
        path.write_bytes(text)
        with pytest.raises(FlowcheckError, match="iteration 8 cannot be read"):
            kept.made()
    hashes = kept.journal.folder / f"hashes-{12:012d}"
    said = json.loads(hashes.read_text())
    hashes.write_text(json.dumps(said | {"status": "unverified"}))
    with pytest.raises(FlowcheckError, match="was changed after it was written"):
        kept.made()
    assert sorted(kept.run.glob("step-*")) == [kept.base]


def test_a_source_of_another_layout_is_refused(source: Source, tmp_path: Path) -> None:
    kept = Kept(source, tmp_path, steps=1)
    with pytest.raises(FlowcheckError, match="lays gradients out in another way"):
        planned(dataclasses.replace(source.said, first=6))
    kept.journal.begin(dataclasses.replace(source.said, plan="0" * 64))  # another start: what there was goes
    assert kept.journal.entries == kept.journal.steps == []


def test_what_a_copy_has_goes_and_the_rest_outlives_the_process(source: Source, tmp_path: Path) -> None:
    kept = Kept(source, tmp_path)
    kept.journal.forget(9)
    again = Journal(kept.journal.folder)
    assert again.entries == [9, 10, 11] and again.steps == [10, 11, 12] and again.job == source.said
    assert again.nbytes > 3 * 4000
    for odd in ("{}", "[" * 100_000):
        (again.folder / "job.json").write_text(odd)
        assert Journal(again.folder).job is None
    (again.folder / f"hashes-{10:012d}").write_text("[" * 100_000)
    with pytest.raises(FlowcheckError, match="cannot be read"):
        again.version(10)
    with pytest.raises((KeyError, ValueError)):
        JobText.of("{}")
