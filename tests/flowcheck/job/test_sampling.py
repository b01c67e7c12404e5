"""Which elements a sample has: by the words of the module, which tests/flowcheck/sample_oracle.py writes again."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.errors import UserError
from flowcheck.job.model import ModelEntry
from flowcheck.job.sampling import PERIOD, PICKED, WHOLE, Positions, Sampling, pack, salt_of, unpack

from .. import sample_oracle as oracle

WIDE, SMALL = ModelEntry("wide", [40, 5]), ModelEntry("small", [2, 2], "bfloat16")
FROZEN = ModelEntry("frozen", [3], "int64", "constant")


@given(st.text(max_size=40), st.integers(0, 9), st.text(max_size=40), st.integers(0, 10**13), st.integers(0, 2**46 - 1))
def test_positions_are_those_of_the_definition(run_id: str, epoch: int, name: str, elements: int, number: int) -> None:
    salt, elements = salt_of(run_id, epoch), elements % 5000 if elements % 2 else elements
    assert salt == oracle.salt(run_id, epoch)
    if elements <= WHOLE:
        assert Positions(salt).of(name, elements, number) == list(range(elements))
        return
    found = Positions(salt).of(name, elements, number)
    assert found == oracle.positions(salt, name, elements, number)
    assert len(found) == PICKED and all(0 <= at < elements for at in found)


@pytest.mark.parametrize("elements", [WHOLE - 1, WHOLE, WHOLE + 1])
def test_names_are_any_text_and_small_tensors_are_whole(elements: int) -> None:
    """A name of bytes that are no UTF-8, as the file system and the environment give them."""
    salt = salt_of("run \udc80", 3)
    assert salt == salt_of("run \udc80", 3) != salt_of("run \udc81", 3)
    found = Positions(salt).of("layer \udcff", elements, 7)
    assert (found == list(range(elements))) == (elements <= WHOLE)
    assert len(found) == (elements if elements <= WHOLE else PICKED)


def test_another_run_iteration_or_tensor_has_other_positions() -> None:
    found = [
        tuple(Positions(salt_of(run, epoch)).of(name, 10**9, number))
        for run in ("", "r") for epoch in (0, 1) for name in ("a", "optimizer.a.exp_avg") for number in range(50)
    ]
    assert len(set(found)) == len(found)


KINDS = st.sampled_from(["optimized", "constant", "buffer", "tied", "empty"])


@given(st.lists(KINDS, max_size=200), st.integers(0, 2**46 - 17))
def test_each_tensor_has_its_turn_within_the_period(kinds: list[str], first: int) -> None:
    """From any iteration on; and an iteration looks at no more than its share."""
    model = [
        ModelEntry(f"t{i}", [0 if kind == "empty" else 3], kind="optimized" if kind in ("tied", "empty") else kind,
                   tied="t0" if kind == "tied" else "")
        for i, kind in enumerate(kinds)
    ]
    due = [entry.name for entry, kind in zip(model, kinds, strict=True) if kind in ("optimized", "constant")]
    sampling = Sampling(model)
    turns = [[entry.name for entry in sampling.entries(first + i)] for i in range(sampling.turns)]
    assert sampling.turns <= PERIOD and sorted(name for turn in turns for name in turn) == sorted(due)
    assert turns == [oracle.turn(due, first + i) for i in range(sampling.turns)]
    assert max(map(len, turns)) <= max(-(-len(due) // PERIOD), 7)


def test_a_sample_is_taken_apart_as_it_was_put_together() -> None:
    sections = {8: bytes(range(24)), 4: bytes(range(100)), 2: bytes(range(8))}
    sample = unpack(pack(b"saltsalt", bytes([0b111, 0, 0]), sections), [WIDE, SMALL, FROZEN], "rank 1")
    assert (sample.salt, sample.masks) == (b"saltsalt", bytes([7, 0, 0]))
    assert [(look.name, data) for look, data in sample.found] == [
        ("wide", bytes(range(32))), ("optimizer.wide.step", bytes(range(32, 36))),
        ("optimizer.wide.exp_avg", bytes(range(36, 68))), ("optimizer.wide.exp_avg_sq", bytes(range(68, 100))),
        ("small", bytes(range(8))), ("frozen", bytes(range(24))),
    ]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(("text", "why"), [
    ("no base64!", "base64"), ("\xe9\xe9\xe9\xe9", "base64"), ("AAA", "base64"), ("\ud800", "base64"),
    ("", "of 0 bytes"), (_text(bytes(9)), "of 9 bytes"), (_text(bytes(10)), "of 10 bytes where"),
    (_text(bytes(10 + 32 + 25)), "of 67 bytes where 66 are due"), (_text(bytes(10 + 32 + 23)), "where 66 are due"),
    (_text(bytes(8) + b"\x20" + bytes(57)), "0x20 of 'wide'"),
    (_text(bytes(8) + b"\x7f" + bytes(57)), "0x7f of 'wide'"),
    (_text(bytes(9) + b"\x01" + bytes(60)), "0x1 of 'frozen'"), (_text(bytes(9) + b"\x80" + bytes(60)), "of 'frozen'"),
])
def test_what_is_no_sample_is_refused(text: str, why: str) -> None:
    with pytest.raises(UserError) as refused:
        unpack(text, [WIDE, FROZEN], "rank 3")
    assert why in refused.value.what and refused.value.where == "rank 3"


@given(st.binary(max_size=200))
def test_any_bytes_are_a_sample_or_are_refused(data: bytes) -> None:
    try:
        sample = unpack(_text(data), [WIDE, SMALL, FROZEN], "x")
    except UserError:
        return
    widths: dict[int, bytes] = {}
    for look, found in sample.found:
        widths[look.width] = widths.get(look.width, b"") + found
    assert pack(sample.salt, sample.masks, widths) == _text(data)
