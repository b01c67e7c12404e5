"""How versions are stored is chosen: what is measured, the text of a choice, and that a process keeps it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from updater import choosing, kernels, tuning
from updater.choosing import SettingError, cache_file
from updater.optimizers import OptimizerSpec
from updater.replica import Replica
from updater.tuning import CHOICES, PART, SETTING, Ground, Tuning, chosen, question, settle, settled


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of this test's own, small pieces, and a process that has not chosen; afterwards it has not either."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(SETTING, raising=False)
    monkeypatch.setattr(tuning, "PIECE", 1 << 12)
    settled.cache_clear()
    yield tmp_path
    settled.cache_clear()


@pytest.mark.parametrize("kernel", kernels.names()[:-1])
def test_every_choice_is_one_that_a_pool_takes_and_can_be_measured(kernel: str) -> None:
    ground = Ground(kernel)
    assert all(ground.seconds(choice) > 0 for choice in CHOICES for _ in range(8))
    assert len(set(CHOICES)) == len(CHOICES)


def test_a_sample_is_of_another_piece_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven arrays of whole cache lines, one after the other in memory of the sampler's own, and no piece twice in a
    row: until all have had their turn nothing is in a cache again."""
    given: list[tuple[int, ...]] = []

    class Pool:
        def submit(self, rules: list[object], jobs: list[tuple[int, ...]]) -> None:
            given.extend(jobs)

    monkeypatch.setattr(tuning, "PIECES", 3)
    ground = Ground()
    first, end = ground._memory.data_ptr(), ground._memory.data_ptr() + 4 * ground._memory.numel()
    ground._pool = lambda choice: Pool()  # type: ignore[assignment]
    times = iter([5.0, 5.25] * 7)
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: next(times))
    assert [ground.seconds(CHOICES[0]) for _ in range(7)] == [0.25] * 7
    piece, arrays = tuning.PIECE, []
    for job in given:
        assert job[:2] == (0, piece) and job[6] == 0 and job[10:] == (0, 0, 0), "no masters, no bf16, the whole piece"
        arrays.append((*job[2:6], *job[7:10]))
    assert all(at % 64 == 0 and first <= at and at + 4 * piece <= end for job in arrays for at in job)
    places = sorted(at for job in arrays[:3] for at in job)
    assert all(b - a == 4 * piece for a, b in pairwise(places)) and len(set(places)) == 21
    assert arrays[3:6] == arrays[:3] and arrays[6] == arrays[0]


def test_a_sample_is_updated_by_the_choice_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a pool without threads, made once for each choice."""
    made: list[tuple[object, ...]] = []
    real = kernels.Pool
    monkeypatch.setattr(tuning.kernels, "Pool", lambda *options: made.append(options) or real(*options))
    name = kernels.names()[0]
    ground = Ground(name)
    for choice in (CHOICES[3], CHOICES[1], CHOICES[3]):
        ground.seconds(choice)
    assert made == [(0, name, 2, 1024), (0, name, 4, 0)]


def test_a_choice_is_read_from_its_text() -> None:
    for choice in (*CHOICES, Tuning(1, 1 << 16)):
        assert question().parse(str(choice)) == choice
    assert [str(choice) for choice in CHOICES[:4]] == ["8-vectors", "4-vectors", "2-vectors", "2-vectors@1024"]


@pytest.mark.parametrize(
    "text", ["8", "3-vectors", "16-vectors", "2-vectors@", "2-vectors@65537", "2-vectors@-1", "update=", "８-vectors"]
)
def test_a_wrong_setting_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(SETTING, text)
    with pytest.raises(SettingError, match=f"environment variable {SETTING}: .* is not a way of updating"):
        chosen()


def test_what_was_measured_is_remembered_and_says_for_which_kernels() -> None:
    first = settle()
    assert first.how.startswith("measured in ") and first.kernels == kernels.in_use() and first.ways[PART] in CHOICES
    again = settle()
    assert again.ways == first.ways and again.how == f"measured before: {cache_file(question())}"
    kept = json.loads(cache_file(question()).read_text())
    assert kept["ways"] == {PART: str(first.ways[PART])} and kept["kernels"] == kernels.in_use()


def test_nothing_is_measured_read_or_written_where_that_is_asked_for(cache: Path) -> None:
    assert settle(measuring=False).how == "not measured" and settle(remember=False).how.endswith(" on normal pages")
    assert not cache_file(question()).exists()
    settle()
    assert cache_file(question()) == cache / "flowcheck/updating.json"
    assert settle(measuring=False, recall=False) == choosing.Choice(
        {PART: Tuning(8, 0)}, "not measured", kernels.in_use()
    )


def test_a_refusal_names_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "none")
    with pytest.raises(SettingError) as raised:
        settle()
    assert raised.value.remedy.startswith("default, measure or 8-vectors, 4-vectors, 2-vectors, 2-vectors@1024, 8-")


def test_the_quickest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ground, "seconds", lambda self, choice: 0.9 if choice == CHOICES[3] else 1.0)
    assert settle().ways == {PART: CHOICES[3]}


def test_a_process_chooses_once_and_its_replicas_do_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "4-vectors@64")
    assert chosen() == Tuning(4, 64)
    monkeypatch.setenv(SETTING, "2-vectors")
    assert chosen() == Tuning(4, 64) and settle().ways[PART] == Tuning(2, 0)
    replica = Replica({"w": torch.zeros(8)}, OptimizerSpec.check("adam", [(["w"], {"lr": 0.1})]))
    assert "4-vectors@64" in replica.kernels
    replica.close()


def test_both_questions_are_put_in_one_form() -> None:
    from flowcheck.rebuild import calibration

    for asked in (question(), calibration.question(1024, False)):
        assert set(choosing.key(asked)) >= {"schema", "processor", "kernels", "version"}
        assert asked.parse(str(asked.default)) == asked.default and asked.setting.startswith("FLOWCHECK_")
