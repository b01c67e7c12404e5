"""A bit that differs is found, said with where it is, and nothing of its entry is used; the others are read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.journal.format import BLOCK
from flowcheck.journal.reader import RingReader
from flowcheck.journal.ring import RingWriter, Written
from tests.flowcheck.journal.journal_room import MEMORY, SIZES, place_bytes, wanted, write

# First byte and bytes of the parts of an entry in its place: docs/understand/journal.md draws them.
HEAD = BLOCK
TABLE = HEAD + 64
FIRST = TABLE + 64 * -(-16 * len(SIZES) // 64)
ENDS = [FIRST]
for size in SIZES:
    ENDS.append(ENDS[-1] + 64 * -(-size // 64))
REGIONS = {
    "word": (0, 8), "first block": (8, BLOCK - 8), "head": (HEAD, TABLE - HEAD), "table": (TABLE, FIRST - TABLE),
    **{f"span {number}": (ENDS[number], ENDS[number + 1] - ENDS[number]) for number, size in enumerate(SIZES) if size},
}
NUMBERS = (7, 8)


@pytest.fixture(scope="module")
def ring() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="flowcheck-journal-", dir=MEMORY) as folder:
        with RingWriter(folder, 2 * place_bytes() + BLOCK, place_bytes()) as writer:
            for number in NUMBERS:
                write(writer, number)
        yield Path(folder)


class Flipped:
    """One bit of the ring's file, for the time being."""

    def __init__(self, ring: Path, at: int, bit: int) -> None:
        self.path, self.at, self.bit = ring / "ring-00000", at, bit

    def __enter__(self) -> None:
        self.turn()

    def __exit__(self, *_: object) -> None:
        self.turn()

    def turn(self) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.at)
            byte = file.read(1)[0]
            file.seek(self.at)
            file.write(bytes([byte ^ 1 << self.bit]))


def whole(reader: RingReader, number: int) -> bool:
    head, spans = reader.read(number)
    return (head, [span.tobytes() for span in spans]) == wanted(number)


@pytest.mark.parametrize("region", REGIONS)
@settings(max_examples=12)
@given(data=st.data(), which=st.integers(0, 1), bit=st.integers(0, 7))
def test_a_bit_of_an_entry(ring: Path, region: str, data: st.DataObject, which: int, bit: int) -> None:
    first, size = REGIONS[region]
    place = BLOCK + which * place_bytes()
    with Flipped(ring, place + first + data.draw(st.integers(0, size - 1)), bit):
        reader = RingReader(ring)
        with pytest.raises((EnvironmentProblem, UserError)) as caught:
            reader.read(NUMBERS[which])
        assert f"ring-00000 at byte {place}" in str(caught.value)
        if not region.startswith("span"):
            assert [entry.number for entry in reader.entries] == [NUMBERS[1 - which]]
            assert len(reader.damaged) == 1 and f"at byte {place}" in reader.damaged[0]
        assert whole(reader, NUMBERS[1 - which])
    assert whole(RingReader(ring), NUMBERS[which])


@settings(max_examples=30)
@given(at=st.integers(0, BLOCK - 1), bit=st.integers(0, 7))
def test_a_bit_of_a_files_first_block(ring: Path, at: int, bit: int) -> None:
    with Flipped(ring, at, bit):
        reader = RingReader(ring)
        assert reader.entries == []
        assert len(reader.damaged) == 1 and "ring-00000" in reader.damaged[0]
    assert whole(RingReader(ring), NUMBERS[0])


@pytest.mark.parametrize("at", [8 * 2, BLOCK - 1])
def test_a_damaged_file_is_replaced(tmp_path: Path, at: int) -> None:
    with RingWriter(tmp_path, 2 * place_bytes() + BLOCK, place_bytes()) as writer:
        write(writer, 1)
    with Flipped(tmp_path, at, 0), RingWriter(tmp_path, 2 * place_bytes() + BLOCK, place_bytes()) as writer:
        assert writer.found == [] and len(writer.replaced) == 1
        assert isinstance(write(writer, 2), Written)


def test_the_place_of_a_damaged_entry_is_used_again(tmp_path: Path) -> None:
    with RingWriter(tmp_path, 2 * place_bytes() + BLOCK, place_bytes()) as writer:
        write(writer, 1)
        write(writer, 2)
    Flipped(tmp_path, BLOCK + 16, 3).turn()
    with RingWriter(tmp_path, 2 * place_bytes() + BLOCK, place_bytes()) as writer:
        assert writer.found == [2]
        write(writer, 3)
        assert [entry.number for entry in RingReader(tmp_path).entries] == [2, 3]
        assert RingReader(tmp_path).damaged == []
