"""Deltas in a store: whole or not there, of one line alone, and which of them the rules let go."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.checkpoint import deltas as module
from flowcheck.checkpoint.deltas import Chain, Deltas, Span, reach, way
from flowcheck.checkpoint.objects import open_store
from flowcheck.checkpoint.stored import Rules, expired, unneeded
from flowcheck.errors import FlowcheckError

from .test_directory import killed_at
from .test_store import AtChange

CHAIN = Chain("run", 0, "dp0", "start", "0123456789abcdef", "p" * 64)
LINE = 0, CHAIN.line


def deltas(root: Path) -> Deltas:
    return Deltas(open_store(str(root), {}), f"n/dp0/run/epoch-0/deltas/{CHAIN.line}")


def write(root: Path, first: int, *entries: bytes, chain: Chain = CHAIN) -> Span:
    cut = [(len(one), [memoryview(one)[:3], memoryview(one)[3:]]) for one in entries]
    return deltas(root).write(chain, first, cut)[0]


def read(root: Path, span: Span, chain: Chain = CHAIN) -> list[bytes]:
    file = io.BytesIO(b"what was there before")
    sizes = deltas(root).read(span, chain, file)
    file.seek(0)
    out = [file.read(size) for size in sizes]
    assert not file.read()
    return out


@pytest.mark.parametrize("most", [1, 4, 7, 1 << 20])
def test_entries_come_back_in_objects_of_a_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(module, "PART_BYTES", most)
    entries = [os.urandom(size) for size in (10, 1, 7)]
    span = write(tmp_path, 5, *entries)
    assert (span.first, span.last) == (5, 7) and read(tmp_path, span) == entries
    parts = [*tmp_path.rglob("part-*")]
    assert len(parts) == -(-18 // most) and max(path.stat().st_size for path in parts) <= most
    assert deltas(tmp_path).listed().spans == (span,) and not deltas(tmp_path).listed().cut


@pytest.mark.parametrize("field", ["run_id", "shard", "start", "line", "plan"])
def test_what_is_of_another_chain_is_not_read(tmp_path: Path, field: str) -> None:
    span = write(tmp_path, 5, b"gradients")
    for chain in (replace(CHAIN, **{field: "another"}), replace(CHAIN, epoch=1)):
        with pytest.raises(FlowcheckError):
            read(tmp_path, span, chain)
    for other in (replace(span, first=4), replace(span, last=6)):
        with pytest.raises(FlowcheckError):
            read(tmp_path, other)


def test_any_bit_that_differs_is_found(tmp_path: Path) -> None:
    span = write(tmp_path, 5, b"gradients", b"more")
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        whole = path.read_bytes()
        for byte in range(0, len(whole), 7):
            path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 4]) + whole[byte + 1 :])
            with pytest.raises(FlowcheckError):
                read(tmp_path, span)
        path.write_bytes(whole[:-1])
        with pytest.raises(FlowcheckError):
            read(tmp_path, span)
        path.write_bytes(whole)
    assert read(tmp_path, span) == [b"gradients", b"more"]


@pytest.mark.parametrize(("begin", "stride"), [(2, 5), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_killed_between_any_two_calls(tmp_path: Path, begin: int, stride: int) -> None:
    n, news = begin - stride, [True]
    while news[-1] is not None:
        n += stride
        root = tmp_path / str(n)
        old = write(root, 5, b"old")
        killed = killed_at(n, lambda root=root: write(root, 6, b"new", b"newer"), AtChange)
        listed = deltas(root).listed()
        for span in listed.spans:
            assert read(root, span) == ([b"old"] if span == old else [b"new", b"newer"])
        assert old in listed.spans and len(listed.spans) + len(listed.cut) <= 2
        news.append(len(listed.spans) == 2 if killed else None)
    assert n > 8 and len(listed.spans) == 2


def test_an_end_that_is_damaged_ends_everything(tmp_path: Path) -> None:
    write(tmp_path, 5, b"x")
    assert deltas(tmp_path).listed().ends is None
    deltas(tmp_path).end(7)
    assert deltas(tmp_path).listed().ends == 7
    (path,) = tmp_path.rglob("ends.json")
    path.write_text(json.dumps({"after": 9}))
    assert deltas(tmp_path).listed().ends == -1


# -- rules ---------------------------------------------------------------------------------------------------------


def entry(step: int, line: str = CHAIN.line, stored: float = 0.0) -> Any:
    return SimpleNamespace(order=(0, "", step, stored), stored=stored, folder=str(step), line=(0, line),
                           version=SimpleNamespace(epoch=0, step=step, status="unverified"))


def spans(*runs: tuple[int, int]) -> list[Span]:
    return [Span(first, last, f"{first}-{last}") for first, last in runs]


def test_a_way_goes_over_no_gap() -> None:
    there = spans((5, 6), (7, 7), (9, 12), (8, 10))
    assert reach(5, there) == 13 and reach(6, there) == 13 and reach(4, there) == 4
    assert [(one.first, one.last) for one in way(6, 12, there)] == [(5, 6), (7, 7), (8, 10), (9, 12)]
    assert way(4, 8, there) == [] == way(5, 14, there)
    assert reach(5, spans((5, 6), (8, 9))) == 7


def possible(entries: list[Any], there: list[Span]) -> set[int]:
    return {step for one in entries for step in range(one.version.step, reach(one.version.step, there) + 1)}


@given(
    bases=st.sets(st.integers(0, 60), min_size=1, max_size=8), cuts=st.sets(st.integers(1, 69), max_size=30),
    gaps=st.sets(st.integers(0, 69), max_size=3), keep=st.integers(1, 3), every=st.integers(0, 25),
)
def test_what_a_rule_keeps_can_be_had_for_ever(
    bases: set[int], cuts: set[int], gaps: set[int], keep: int, every: int
) -> None:
    """As time goes on: whatever multiple could be had once can be had at the end; no delta is without its base."""
    rules, edges = Rules(keep=keep, every=every), sorted({0, 70, *cuts, *gaps, *(gap + 1 for gap in gaps)})
    pairs = [(a, b - 1) for a, b in pairwise(edges) if a not in gaps]
    entries: list[Any] = []
    there: list[Span] = []
    had: set[int] = set()
    for step in sorted(bases):
        sent = spans(*((first, last) for first, last in pairs if last < step + 5 and last >= min(bases)))
        there += [one for one in sent if one.first > max((other.last for other in there), default=-1)]
        entries.append(entry(step))
        latest = str(step)
        had |= {one for one in possible(entries, there) if every and one % every == 0}
        lines = {LINE: there}
        gone, idle = expired(entries, rules, 0.0, latest, lines), unneeded(entries, rules, 0.0, latest, lines)[LINE]
        newest = set(range(step, reach(step, there) + 1))
        entries, there = [one for one in entries if one not in gone], [one for one in there if one not in idle]
        assert had | newest <= possible(entries, there)
        assert {str(one) for one in sorted(bases) if one <= step} >= {one.folder for one in entries}
        assert all(any(one.version.step <= span.last for one in entries) for span in there)


def test_without_rules_everything_stays() -> None:
    lines = {LINE: spans((1, 5))}
    assert expired([entry(0), entry(3)], Rules(), 0.0, "3", lines) == []
    assert unneeded([entry(0)], Rules(), 0.0, "0", lines) == {}
