"""Which differences a sample finds, and by when: samples are made by tests/flowcheck/sample_oracle.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.errors import UserError
from flowcheck.job.clock import Clock
from flowcheck.job.model import ModelEntry
from flowcheck.job.sampling import PERIOD, PICKED, Sampling
from flowcheck.rebuild.version.records import StepRecord, StepRecords
from flowcheck.rebuild.version.sampled import Sampled
from lab.synth import example_job

from ..sample_oracle import sample_of

SIZES = [1, 16, 17, 300, 5000] * 15
NAMES = [f"t{i}" for i in range(len(SIZES))]
LOOKS = ["", "step", "exp_avg", "exp_avg_sq"]


@dataclass
class Version:
    """A model whose entry i has SIZES[i] elements; t2 is a constant of 16 bits."""

    parameters: dict[str, torch.Tensor] = field(default_factory=lambda: {
        name: torch.arange(size, dtype=torch.bfloat16 if name == "t2" else torch.float32)
        for name, size in zip(NAMES, SIZES, strict=True)
    })
    optimizer_state: dict[str, dict[str, Any]] = field(default_factory=lambda: {
        name: {"step": torch.tensor(3.0), "exp_avg": torch.full([size], 0.5), "exp_avg_sq": torch.zeros(size)}
        for name, size in zip(NAMES, SIZES, strict=True) if name != "t2"
    })

    def tensor(self, name: str, key: str) -> torch.Tensor:
        held: torch.Tensor = self.optimizer_state[name][key] if key else self.parameters[name]
        return held

    def text(self, number: int) -> str:
        return sample_of(self.parameters, self.optimizer_state, number)


def job(*, buffers: bool = True) -> Any:
    made = example_job(count=[40, 20], startup=False, rebuild=False)
    made.model = [
        ModelEntry(name, [size], "bfloat16" if name == "t2" else "float32", "constant" if name == "t2" else "optimized")
        for name, size in zip(NAMES, SIZES, strict=True)
    ] + [ModelEntry("tied", [1], tied="t0")] + [ModelEntry("mean", [9], kind="buffer")] * buffers
    return made


SAMPLED = Sampled(job())
TURNS = Sampling(job().model).turns


def differs(theirs: Version, ours: Version, number: int, **more: Any) -> str:
    name, count = SAMPLED.compare(SAMPLED.sample(theirs.text(number), number, "x"), number, ours, **more)
    assert name or count == 4 * len(NAMES[number % TURNS :: TURNS]) - 3 * (number % TURNS == 2)
    return name


def test_equal_states_do_not_differ() -> None:
    assert TURNS == PERIOD
    assert [differs(Version(), Version(), number) for number in range(100, 100 + TURNS)] == [""] * TURNS


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.sampled_from(LOOKS), st.integers(0, 2**46 - 17), st.booleans())
def test_a_tensor_that_was_written_over_is_found_within_the_period(
    name: str, key: str, first: int, theirs: bool
) -> None:
    """From any iteration on, and named: a clamp, a reset, a roll-back of all of it."""
    one, other = Version(), Version()
    key = "" if name == "t2" else key
    (one if theirs else other).tensor(name, key).add_(1)
    due = f"optimizer.{name}.{key}" if key else name
    found = [differs(one, other, number) for number in range(first, first + PERIOD)]
    assert [text for text in found if text] == [due]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([name for name, size in zip(NAMES, SIZES, strict=True) if size <= 16]))
def test_any_bit_of_a_small_tensor_is_found_within_the_period(data: st.DataObject, name: str) -> None:
    key, other = data.draw(st.sampled_from(LOOKS)), Version()
    bits = other.tensor(name, key).view(-1).view(torch.int32)
    at = data.draw(st.integers(0, len(bits) - 1))
    bits[at] ^= 1 << data.draw(st.integers(0, 30))
    assert any(differs(Version(), other, number) for number in range(PERIOD))


@pytest.mark.parametrize("share", [0.5, 0.1])
@pytest.mark.parametrize("key", ["", "exp_avg_sq"])
def test_a_part_of_a_large_tensor_is_found_as_often_as_is_promised(share: float, key: str) -> None:
    """1 - (1 - share)^8 of the looks find it; here in 1000 looks, so within 5 of 100."""
    other, found = Version(), 0
    other.tensor("t4", key)[: int(5000 * share)] += 1
    for look in range(1000):
        number = 4 + PERIOD * look
        found += SAMPLED.compare(SAMPLED.sample(Version().text(number), number, "x"), number, other)[0] != ""
    assert abs(found / 1000 - (1 - (1 - share) ** PICKED)) < 0.05


@pytest.mark.parametrize("lacks", ["version", "trainer"])
@pytest.mark.parametrize("key", ["step", "exp_avg"])
def test_a_state_that_only_one_of_them_has_differs(lacks: str, key: str) -> None:
    """As after optimizer.state.clear()."""
    one, other = Version(), Version()
    del (one if lacks == "trainer" else other).optimizer_state["t3"][key]
    assert differs(one, other, 3) == f"optimizer.t3.{key}"


def test_before_the_first_step_neither_has_one() -> None:
    one, other = Version(), Version()
    for version in (one, other):
        version.optimizer_state.clear()
    found = [SAMPLED.compare(SAMPLED.sample(one.text(n), n, "x"), n, other) for n in range(PERIOD)]
    assert all(name == "" for name, _ in found) and sum(count for _, count in found) == len(NAMES)


def test_what_waits_for_the_trainers_state_is_not_compared() -> None:
    one, other = Version(), Version()
    other.tensor("t3", "exp_avg").zero_()
    del other.optimizer_state["t19"]
    sample = SAMPLED.sample(one.text(3), 3, "x")
    name, count = SAMPLED.compare(sample, 3, other, lambda entry: entry not in ("t3", "t19"))
    assert (name, count) == ("", 4 * len(NAMES[3::TURNS]) - 8)
    assert SAMPLED.compare(sample, 3, other, lambda entry: entry != "t3")[0] == "optimizer.t19.step"


# -- records --


def test_samples_of_several_ranks_must_agree() -> None:
    """One that is damaged is refused at once. A rank that sends none, or no checksums, contradicts nobody."""
    records, sums = StepRecords(job(buffers=False), Clock(5)), {"t0": "0" * 16, "optimizer.t0.exp_avg": "1" * 16}
    one, other = Version(), Version()
    other.tensor("t7", "").add_(1)
    bare, whole = StepRecord(), StepRecord(sample=one.text(7), checksums=sums)
    for rank, record in enumerate((bare, StepRecord(sample=one.text(7)), StepRecord(checksums=sums), whole, bare)):
        records.keep(2, record, rank, 0)
    assert records.of(2) == whole
    with pytest.raises(UserError, match="rank 5 and another one sent different step records of iteration 7"):
        records.keep(2, StepRecord(sample=other.text(7)), 5, 0)
    assert records.of(2) is None and records.sample(2) is None
    for odd in ({"sample": one.text(8)[:-4]}, {"sample": "A"}, {"checksums": {"optimizer.t0.lr": "0" * 16}},
                {"checksums": {"optimizer.t2.exp_avg": "0" * 16}}, {"checksums": {"optimizer.t0.step": "0" * 15}}):
        with pytest.raises(UserError):
            records.keep(3, StepRecord(**odd), 0, 0)
    assert 3 not in records


def test_where_there_are_buffers_other_ranks_are_witnesses() -> None:
    """Their buffers are their own, and so are checksums of these."""
    records, one, other = StepRecords(job(), Clock()), Version(), Version()
    other.tensor("t7", "").add_(1)
    for rank, mean in ((1, "1"), (0, "0"), (2, "2")):
        records.keep(7, StepRecord(sample=one.text(7), checksums={"mean": mean * 16, "t1": "a" * 16}), rank, 0)
    found = records.of(7)
    assert found is not None and found.checksums["mean"] == "0" * 16
    with pytest.raises(UserError, match="rank 1 and another one"):
        records.keep(7, StepRecord(checksums={"t1": "b" * 16}), 1, 0)
    assert records.of(7) is None
    records.keep(8, StepRecord(sample=one.text(8)), 0, 0)
    other.tensor("t8", "").add_(1)
    with pytest.raises(UserError, match="rank 1 and another one"):
        records.keep(8, StepRecord(sample=other.text(8)), 1, 0)
    records.forget(7)
    assert records.of(8) is None and 8 in records
