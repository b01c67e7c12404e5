"""The files of a journal: what lies where, what comes back of it, what a copy makes useless, and what is damaged."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowcheck.control.version import Version
from flowcheck.errors import EnvironmentProblem, FlowcheckError, UserError
from flowcheck.journal.entry_file import write_entry
from flowcheck.node.protect.journal import Journal
from flowcheck.node.versions.journal.job_text import JobText
from flowcheck.rebuild.version.records import StepRecord

from ..hand_api import HandVersion

JOB = JobText({"schema": "x", "buckets": [1]}, ("run", 3, 8), 100, "a" * 64)
RECORD: dict[str, Any] = {"groups": [{"lr": 0.1}], "clip": 0.5, "scale": 2.0, "skipped": True}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    made = Journal(tmp_path / "epoch-3" / "journal")
    made.begin(JOB)
    return made


def names(journal: Journal) -> list[str]:
    return sorted(path.name for path in journal.folder.iterdir())


def add(journal: Journal, *iterations: int) -> None:
    for iteration in iterations:
        journal.add(iteration, RECORD, [torch.zeros(2)], {})


def hashed(journal: Journal, *steps: int) -> None:
    for step in steps:
        journal.hashed(Version.of(HandVersion(step).document, "x"))


# -- the job -------------------------------------------------------------------------------------------------------


def test_what_is_said_of_a_job_comes_back(journal: Journal) -> None:
    said = json.loads((journal.folder / "job.json").read_text())
    assert said == {"body": {"schema": "x", "buckets": [1]}, "run": ["run", 3, 8], "first": 100, "plan": "a" * 64}
    assert Journal(journal.folder).job == JobText.of(JOB.text()) == JOB


def test_it_is_read_once(journal: Journal) -> None:
    again = Journal(journal.folder)
    assert again.job == JOB
    (journal.folder / "job.json").unlink()
    assert again.job == journal.job == JOB and Journal(journal.folder).job is None


@pytest.mark.parametrize("change", [
    {"body": None}, {"run": None}, {"first": None}, {"plan": None}, {"run": ["run", 3]}, {"run": 7},
])
def test_what_is_not_said_whole_is_not_said(journal: Journal, change: dict[str, Any]) -> None:
    said = {**json.loads(JOB.text()), **change}
    kept = {name: value for name, value in said.items() if value is not None}
    (journal.folder / "job.json").write_text(json.dumps(kept))
    assert Journal(journal.folder).job is None


def test_the_same_job_goes_on_and_another_one_begins_anew(journal: Journal, tmp_path: Path) -> None:
    add(journal, 4)
    hashed(journal, 5)
    for one in (journal, Journal(journal.folder)):
        one.begin(JobText.of(JOB.text()))
        assert names(journal) == ["entry-000000000004", "hashes-000000000005", "job.json"]
    other = JobText(JOB.body, JOB.run, 101, JOB.plan)
    journal.begin(other)
    assert names(journal) == ["job.json"] and journal.job == Journal(journal.folder).job == other
    assert [path.name for path in (tmp_path / "epoch-3").iterdir()] == ["journal"]


# -- iterations ----------------------------------------------------------------------------------------------------


def test_what_made_a_step_comes_back(journal: Journal) -> None:
    """More than ten buckets: they are in order by number, not by name."""
    buckets = [torch.arange(size, dtype=torch.float32) + 100 * size for size in range(12)]
    buckets[3] = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    buffers = {"bn.mean": torch.tensor([1.0, 2.0]), "bn.count": torch.tensor(7)}
    nbytes = journal.add(12, RECORD, buckets, buffers)
    path = journal.folder / "entry-000000000012"
    assert names(journal) == ["entry-000000000012", "job.json"] and nbytes == path.stat().st_size == journal.nbytes
    made = Journal(journal.folder).made(12)
    assert (made.record.groups, made.record.clip, made.record.scale, made.record.skipped) == ([{"lr": 0.1}], 0.5, 2.0,
                                                                                              True)
    assert made.record.buffers.keys() == buffers.keys() and len(made.buckets) == 12
    assert all(torch.equal(made.record.buffers[name], one) for name, one in buffers.items())
    for found, wanted in zip(made.buckets, buckets, strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_a_record_without_values_is_one(journal: Journal) -> None:
    journal.add(0, {"groups": [], "clip": None, "scale": None, "skipped": False}, [], {})
    made = journal.made(0)
    assert made.buckets == [] and made.record == StepRecord([], None, None, False, buffers={})


def test_one_that_is_added_again_takes_its_place(journal: Journal) -> None:
    add(journal, 4)
    journal.add(4, RECORD, [torch.ones(3)], {})
    assert journal.entries == [4] and journal.made(4).buckets[0].tolist() == [1.0] * 3


def test_a_disk_that_was_full_for_a_while_leaves_nothing_half(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the iteration is taken as soon as there is room."""
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("flowcheck.durable.os.write", full)
        with pytest.raises(EnvironmentProblem, match="No space left") as refused:
            add(journal, 4)
    assert refused.value.where == str(journal.folder / "entry-000000000004") and names(journal) == ["job.json"]
    add(journal, 4)
    assert journal.entries == [4]


def test_where_nothing_can_be_written_that_is_said(journal: Journal) -> None:
    path = journal.folder / "entry-000000000004"
    path.mkdir()
    with pytest.raises(EnvironmentProblem) as refused:
        add(journal, 4)
    assert str(path) in refused.value.where and names(journal) == [path.name, "job.json"], "and half of it is gone"


SPANS = [["bucket.0", "float32", [1]]]


def entry(journal: Journal, text: str, number: int = 4, spans: int = 1) -> Path:
    """With this head, and so many spans of 4 bytes."""
    path = journal.folder / "entry-000000000004"
    write_entry(path, number, text.encode(), [np.zeros(4, np.uint8)] * spans)
    return path


@pytest.mark.parametrize("head", [
    "", "{", "7", "{}", "[" * 100_000, json.dumps({"record": RECORD}), json.dumps({"spans": SPANS}),
    *(json.dumps({"record": record, "spans": SPANS}) for record in (
        7, {}, *({key: value for key, value in RECORD.items() if key != lacking} for lacking in RECORD))),
    *(json.dumps({"record": RECORD, "spans": spans}) for spans in (
        7, [], [["bucket.0", "float32", [2]]], [["bucket.0", "float33", [1]]], [["bucket.0", "nn", [1]]],
        [["bucket.0", "float64", [1]]], [["bucket.2", "float32", [1]]], [*SPANS, *SPANS], [["bucket.0", "float32"]])),
])
def test_an_entry_that_says_something_else_is_an_error(journal: Journal, head: str) -> None:
    path = entry(journal, head)
    with pytest.raises(FlowcheckError, match="iteration 4 cannot be read: ") as refused:
        journal.made(4)
    assert refused.value.where == str(path)


def test_an_entry_of_another_iteration_is_an_error(journal: Journal) -> None:
    head = json.dumps({"record": RECORD, "spans": SPANS})
    entry(journal, head)
    assert journal.made(4).buckets[0].tolist() == [0.0]
    entry(journal, head, 5)
    with pytest.raises(FlowcheckError, match="iteration 4 cannot be read"):
        journal.made(4)


def test_one_that_is_not_there_is_an_error(journal: Journal) -> None:
    with pytest.raises(FlowcheckError, match="iteration 5 cannot be read"):
        journal.made(5)


@pytest.mark.parametrize("at", [0, 4096 + 16, 2 * 4096, 2 * 4096 + 150, 3 * 4096])
def test_a_bit_that_differs_is_an_error(journal: Journal, at: int) -> None:
    """In a first block, the head and a bucket."""
    journal.add(4, RECORD, [torch.arange(1000.0)], {})
    path = journal.folder / "entry-000000000004"
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    with pytest.raises(FlowcheckError, match="iteration 4 cannot be read: "):
        journal.made(4)
    path.write_bytes(whole)
    assert torch.equal(journal.made(4).buckets[0], torch.arange(1000.0))


# -- the source's hashes -------------------------------------------------------------------------------------------


def test_what_a_source_says_of_a_step_comes_back(journal: Journal) -> None:
    hashed(journal, 13)
    assert names(journal) == ["hashes-000000000013", "job.json"] and journal.steps == [13]
    wanted = Version.of(HandVersion(13).document, "x")
    assert Journal(journal.folder).version(13) == wanted
    assert json.loads((journal.folder / "hashes-000000000013").read_bytes()) == wanted.document()


@pytest.mark.parametrize("text", [None, b"", b"{", b"{}", b"\xff", b"[" * 100_000])
def test_what_says_nothing_is_an_error(journal: Journal, text: bytes | None) -> None:
    path = journal.folder / "hashes-000000000013"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(UserError) as refused:
        journal.version(13)
    assert refused.value.where == str(path)
    assert refused.value.what.startswith("is not a flowcheck" if text == b"{}" else "cannot be read: ")


# -- all of it -----------------------------------------------------------------------------------------------------


def test_what_there_is_in_order_and_how_much(journal: Journal) -> None:
    add(journal, 100, 9, 1_000_000_000_000)
    hashed(journal, 101, 7)
    for odd in ("entry-", "entry-x", "hashes-7.partial", ".entry-000000000001.partial-3"):
        (journal.folder / odd).write_bytes(b"12345")
    assert journal.entries == [9, 100, 1_000_000_000_000] and journal.steps == [7, 101]
    whole = [path for path in journal.folder.iterdir() if "-" in path.name]
    assert journal.nbytes == sum(path.stat().st_size for path in whole)


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "nothing")
    assert (journal.entries, journal.steps, journal.nbytes, journal.job) == ([], [], 0, None)
    journal.forget(9)
    assert Journal._size(tmp_path / "nothing") == 0


@pytest.mark.parametrize(("step", "entries", "steps"), [
    (6, [7, 8, 9], [8, 9, 10]), (7, [7, 8, 9], [8, 9, 10]), (8, [8, 9], [9, 10]), (9, [9], [10]), (10, [], []),
])
def test_what_a_copy_has_goes(journal: Journal, step: int, entries: list[int], steps: list[int]) -> None:
    """Iteration 8 makes step 9 of step 8."""
    add(journal, 7, 8, 9)
    hashed(journal, 8, 9, 10)
    journal.forget(step)
    assert (journal.entries, journal.steps) == (entries, steps) and journal.job == JOB
