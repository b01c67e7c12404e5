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
from updater.ring import sum_of, sum_of_block

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
        with pytest.raises((EnvironmentProblem, UserError)):
            next(reader.following(NUMBERS[which : which + 1]))
        if not region.startswith("span"):
            assert [entry.number for entry in reader.entries] == [NUMBERS[1 - which]]
            assert len(reader.damaged) == 1 and f"at byte {place}" in reader.damaged[0]
        assert whole(reader, NUMBERS[1 - which])
    assert whole(RingReader(ring), NUMBERS[which])


@pytest.mark.parametrize("region", ["first block", "head", "table"])
def test_what_is_damaged_after_it_was_listed_is_listed_no_more_once_it_was_read(ring: Path, region: str) -> None:
    reader = RingReader(ring)
    assert [entry.number for entry in reader.entries] == [*NUMBERS]
    with Flipped(ring, BLOCK + REGIONS[region][0] + 16, 2):
        with pytest.raises((EnvironmentProblem, UserError)):
            reader.read(NUMBERS[0])
        assert [entry.number for entry in reader.entries] == [NUMBERS[1]]
        assert whole(reader, NUMBERS[1])
    assert [entry.number for entry in reader.entries] == [*NUMBERS] and whole(reader, NUMBERS[0])


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


# -- blocks that are whole, and say what cannot be -------------------------------------------------------------

U64 = (1 << 64) - 1


def forge(ring: Path, at: int, **words: int) -> None:
    """Write numbers of 8 bytes into a block, by their place in it, and the word that it has to have then."""
    data = bytearray((ring / "ring-00000").read_bytes())
    for name, value in words.items():
        place = at + 8 * int(name.removeprefix("w"))
        data[place : place + 8] = value.to_bytes(8, "little")
    data[at : at + 8] = sum_of_block(data[at : at + BLOCK]).to_bytes(8, "little")
    (ring / "ring-00000").write_bytes(data)


@pytest.fixture
def ring_of_one(tmp_path: Path) -> Path:
    with RingWriter(tmp_path, 2 * place_bytes() + BLOCK, place_bytes()) as writer:
        write(writer, 7)
    return tmp_path


@pytest.mark.parametrize(
    "words", [{"w1": 5}, {"w2": 2}, {"w3": 0}, {"w3": 4097}, {"w4": 0}, {"w5": 0}, {"w6": 1}, {"w1": 5, "w2": 2}],
)
def test_a_forged_file_is_not_ours(ring_of_one: Path, words: dict[str, int]) -> None:
    forge(ring_of_one, 0, **words)
    reader = RingReader(ring_of_one)
    assert reader.entries == [] and len(reader.damaged) == 1
    before = (ring_of_one / "ring-00000").read_bytes()
    with pytest.raises(UserError, match="ring-00000"):
        RingWriter(ring_of_one, 2 * place_bytes() + BLOCK, place_bytes())
    assert (ring_of_one / "ring-00000").read_bytes() == before


@pytest.mark.parametrize("words", [{"w4": 1 << 60}, {"w3": 1 << 60}, {"w3": U64 - 4095, "w4": U64}])
def test_a_file_that_says_it_is_larger_is_cut_short(ring_of_one: Path, words: dict[str, int]) -> None:
    forge(ring_of_one, 0, **words)
    assert any("cut short" in one for one in RingReader(ring_of_one).damaged)


@pytest.mark.parametrize(
    "words", [{"w1": 5}, {"w2": U64}, {"w3": U64}, {"w4": U64}, {"w4": 1 << 40}, {"w5": U64}, {"w5": 1 << 40},
              {"w5": 5}, {"w6": 0}, {"w6": BLOCK}, {"w6": place_bytes() + BLOCK}, {"w6": U64}, {"w7": 1}, {"w8": 1}],
)
def test_a_forged_entry_is_named(ring_of_one: Path, words: dict[str, int]) -> None:
    forge(ring_of_one, BLOCK, **words)
    reader = RingReader(ring_of_one)
    assert reader.entries == [] and len(reader.damaged) == 1
    with pytest.raises((UserError, EnvironmentProblem)):
        reader.read(7)
    with RingWriter(ring_of_one, 2 * place_bytes() + BLOCK, place_bytes()) as writer:
        assert isinstance(write(writer, 8), Written) and isinstance(write(writer, 9), Written)
    assert [entry.number for entry in RingReader(ring_of_one).entries] == [8, 9]


def test_a_forged_table_is_named(ring_of_one: Path) -> None:
    """Of spans that are larger than the entry."""
    data = bytearray((ring_of_one / "ring-00000").read_bytes())
    data[BLOCK + TABLE : BLOCK + TABLE + 8] = (1 << 50).to_bytes(8, "little")
    (ring_of_one / "ring-00000").write_bytes(data)
    forge(ring_of_one, BLOCK, w8=sum_of(data[BLOCK + TABLE : BLOCK + FIRST]))
    with pytest.raises(EnvironmentProblem, match="table"):
        RingReader(ring_of_one).read(7)
