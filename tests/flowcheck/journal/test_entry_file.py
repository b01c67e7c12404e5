"""An entry in a file of its own."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.errors import EnvironmentProblem
from flowcheck.journal.entry_file import read_entry, write_entry
from flowcheck.journal.reader import RingReader
from flowcheck.journal.ring import RingWriter
from tests.flowcheck.journal.journal_room import write


@settings(max_examples=30)
@given(number=st.integers(0, 1 << 40), head=st.binary(max_size=200), sizes=st.lists(st.integers(0, 300), max_size=5),
       data=st.data())
def test_what_was_written_is_read_or_nothing(
    tmp_path_factory: pytest.TempPathFactory, number: int, head: bytes, sizes: list[int], data: st.DataObject
) -> None:
    """Also with a bit that differs, or without its end."""
    path = tmp_path_factory.getbasetemp() / "entry"
    rng = np.random.default_rng(number)
    spans = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    nbytes = write_entry(path, number, head, spans)
    whole = path.read_bytes()
    assert nbytes == len(whole) and path.stat().st_mode & 0o777 == 0o600

    def same() -> bool:
        found = read_entry(path)
        return found[:2] == (number, head) and [one.tolist() for one in found[2]] == [one.tolist() for one in spans]

    assert same()
    at = data.draw(st.integers(0, nbytes - 1))
    for odd in (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], whole[:at]):
        path.write_bytes(odd)
        try:
            assert same()
        except EnvironmentProblem as error:
            assert error.where == str(path)


def test_it_is_a_ring_of_one_place(tmp_path: Path) -> None:
    """One format: what reads a ring reads it."""
    write_entry(tmp_path / "ring-00000", 7, b"head", [np.arange(9, dtype=np.uint8)])
    head, spans = RingReader(tmp_path).read(7)
    assert head == b"head" and [one.tolist() for one in spans] == [[*range(9)]]


def test_what_has_no_entry_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem):
        read_entry(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EnvironmentProblem):
        read_entry(tmp_path / "pipe")
    with RingWriter(tmp_path, 1 << 20, 100_000) as writer:
        with pytest.raises(EnvironmentProblem):
            read_entry(tmp_path / "ring-00000")
        write(writer, 3)
        assert read_entry(tmp_path / "ring-00000")[0] == 3
