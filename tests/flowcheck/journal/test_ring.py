"""What is offered is what is read, in a ring of files that keeps the newest; and whose files they are."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.journal.format import BLOCK, entry_bytes
from flowcheck.journal.reader import RingReader
from flowcheck.journal.ring import Hole, RingWriter, Written
from tests.flowcheck.journal.journal_room import MEMORY, offered, outcome, place_bytes, wanted, write
from tests.updater.conftest import huge_pages_free

ROOT = Path(__file__).resolve().parents[3]
FOUR = 4 * place_bytes() + BLOCK  # bytes of a ring of four places


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="flowcheck-journal-", dir=MEMORY) as memory:
        yield (tmp_path if request.param == "disk" else Path(memory)) / "a" / "journal"


def found(directory: Path) -> list[int]:
    """Iterations that a reader gives as they were offered; it names nothing as damaged."""
    reader = RingReader(directory)
    for number, head, nbytes in reader.entries:
        said, spans = reader.read(number)
        assert said == head and nbytes == place_bytes()
        assert (head, [span.tobytes() for span in spans]) == wanted(number)
    assert not reader.damaged
    return [entry.number for entry in reader.entries]


def test_the_newest_are_there(directory: Path) -> None:
    with RingWriter(directory, FOUR, place_bytes()) as writer:
        for number in range(7):
            assert isinstance(write(writer, number), Written)
        assert found(directory) == writer.entries == [3, 4, 5, 6]
    with RingWriter(directory, FOUR, place_bytes()) as writer:  # another start of it
        assert writer.found == [3, 4, 5, 6] and not writer.replaced
        write(writer, 7)
        assert found(directory) == [4, 5, 6, 7]


def test_one_after_the_other(directory: Path) -> None:
    with RingWriter(directory, FOUR, place_bytes()) as writer:
        for number in range(4):
            write(writer, number)
    for number, one in zip(range(1, 4), RingReader(directory).following(range(1, 4)), strict=True):
        assert (one.head, [span.tobytes() for span in one.spans]) == wanted(number)
        one.check()


def test_what_is_used_while_it_is_overwritten(directory: Path) -> None:
    """Either its spans are what they were, or who used them is told."""
    with RingWriter(directory, FOUR, place_bytes()) as writer:
        for number in range(4):
            write(writer, number)
        following = RingReader(directory).following([0, 1])
        one = next(following)
        for number in (4, 5):
            write(writer, number)
        try:
            one.check()
        except UserError:
            assert directory.is_relative_to(MEMORY)
        else:
            assert (one.head, [span.tobytes() for span in one.spans]) == wanted(0)


SIZE = st.one_of(st.integers(0, 300), st.integers(0, 3 << 18), st.sampled_from([1 << 18, 5 << 18]))
SPANS = st.lists(SIZE, max_size=6)


@settings(max_examples=25)
@given(entries=st.lists(SPANS, min_size=1, max_size=5), places=st.integers(2, 4), memory=st.booleans())
def test_any_sizes(
    tmp_path_factory: pytest.TempPathFactory, entries: list[list[int]], places: int, memory: bool
) -> None:
    most = max(entry_bytes(32, sizes) for sizes in entries)
    where = MEMORY if memory else tmp_path_factory.getbasetemp()
    with tempfile.TemporaryDirectory(dir=where) as folder, RingWriter(folder, places * most + BLOCK, most) as writer:
        for number, sizes in enumerate(entries):
            assert isinstance(write(writer, number, sizes), Written)
        reader = RingReader(folder)
        assert [entry.number for entry in reader.entries] == [*range(len(entries))][-places:]
        for number in [*range(len(entries))][-places:]:
            head, spans = reader.read(number)
            assert (head, [span.tobytes() for span in spans]) == wanted(number, entries[number])


def calls() -> int:
    """That this thread has made to read something."""
    return int(dict(line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines())["syscr"])


def test_reading_costs_what_is_read_and_not_what_there_is(tmp_path: Path) -> None:
    places = 400
    with RingWriter(tmp_path, places * place_bytes() + BLOCK, place_bytes()) as writer:
        for number in range(places - 100):
            assert isinstance(write(writer, number), Written)
        reader = RingReader(tmp_path)
        assert [one.number for one in reader.entries] == [*range(places - 100)]
        before = calls()
        for number in range(100):
            assert reader.read(number)[0] == wanted(number)[0]
        assert calls() - before < 100 * 10, "not all places for each entry"
        before = calls()
        entries = reader.entries
        once = calls() - before
        assert once < 2 * places, "heads that were read are not read again"
        for number in range(places - 100, places + 10):  # ten of them in place of the oldest
            assert isinstance(write(writer, number), Written)
        assert [one.number for one in reader.entries] == [*range(10, places + 10)] and entries[0].number == 0
        for number in (9, 10, places + 9):
            if number < 10:
                with pytest.raises(UserError):
                    reader.read(number)
            else:
                assert reader.read(number)[0] == wanted(number)[0]


def test_an_entry_is_found_where_it_is_by_now(tmp_path: Path) -> None:
    with RingWriter(tmp_path, FOUR, place_bytes()) as writer:
        write(writer, 1)
        write(writer, 2)
        reader = RingReader(tmp_path)
        assert reader.read(1)[0] == wanted(1)[0]
        for number in (3, 4, 5, 1):
            write(writer, number)
        assert reader.read(1)[0] == wanted(1)[0] and reader.read(5)[0] == wanted(5)[0]
        with pytest.raises(UserError):
            reader.read(2)


def test_a_region_may_change_when_it_is_no_longer_read(directory: Path) -> None:
    region = np.zeros(16 << 20, np.uint8)
    most = entry_bytes(0, [region.size])
    with RingWriter(directory, 2 * most + BLOCK, most) as writer:
        for number in range(3):
            region[:] = number
            writer.offer(number, b"", region, [[0, region.size]])
            while writer.reads(number):
                pass
            region[:] = 255
            outcome(writer)
            _, spans = RingReader(directory).read(number)
            assert (spans[0] == number).all()


def test_files_take_no_more_than_they_may(tmp_path: Path) -> None:
    with RingWriter(tmp_path / "journal", FOUR + 5000, place_bytes()):
        taken = [path.stat() for path in (tmp_path / "journal").iterdir()]
    assert sum(one.st_size for one in taken) <= FOUR + 5000
    assert sum(512 * one.st_blocks for one in taken) >= FOUR, "there is room for all of it, now"


def test_only_its_user_may_read_it(directory: Path) -> None:
    before = os.umask(0)
    try:
        RingWriter(directory, FOUR, place_bytes()).close()
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert modes == {0o600} and stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_an_iteration_that_comes_again_counts_as_it_came_last(directory: Path) -> None:
    with RingWriter(directory, FOUR, place_bytes()) as writer:
        write(writer, 1)
        write(writer, 2)
        writer.offer(1, b"again", np.arange(8, dtype=np.uint8), [[2, 3]])
        writer.close()
    head, spans = RingReader(directory).read(1)
    assert head == b"again" and [span.tolist() for span in spans] == [[2, 3, 4]]
    assert [entry.number for entry in RingReader(directory).entries] == [1, 2]


def test_what_is_before_the_oldest_goes_first(directory: Path) -> None:
    with RingWriter(directory, FOUR, place_bytes()) as writer:
        for number in (5, 6, 1, 7):
            write(writer, number)
        writer.keep(5)
        write(writer, 8)
        assert found(directory) == [5, 6, 7, 8]


def test_what_is_larger_than_a_place_is_a_hole(tmp_path: Path) -> None:
    with RingWriter(tmp_path / "journal", FOUR, place_bytes()) as writer:
        assert not writer.offer(1, *offered(1, (200_000,)))
        said = writer.taken()
        assert [(one.number, one.cause) for one in said if isinstance(one, Hole)] == [(1, "large")] and len(said) == 1
        write(writer, 2)
    assert found(tmp_path / "journal") == [2]


def test_a_write_that_fails_is_a_hole_with_its_place(tmp_path: Path) -> None:
    """Its file is a pipe for a while, in which nothing can be written at a place."""
    with RingWriter(tmp_path, FOUR, place_bytes()) as writer:
        write(writer, 1)
        [there] = [int(one) for one in os.listdir("/proc/self/fd")
                   if os.path.realpath(f"/proc/self/fd/{one}") == str(tmp_path / "ring-00000")]
        kept, pipe = os.dup(there), os.pipe()
        os.dup2(pipe[1], there)
        for number in (2, 3, 4, 5):
            said = write(writer, number)
            assert isinstance(said, Hole) and (said.number, said.cause) == (number, "ESPIPE")
            assert f"ring-00000 at byte {BLOCK + place_bytes() * (1 + (number == 5))}" in said.why
        os.dup2(kept, there)
        said = write(writer, 6)
        assert isinstance(said, Written) and (said.number, said.nbytes) == (6, place_bytes()) and said.seconds > 0
        for one in (kept, *pipe):
            os.close(one)
    assert found(tmp_path) == [1, 6]


def test_what_comes_too_fast_is_a_hole_and_closing_says_what_became_of_the_rest(tmp_path: Path) -> None:
    region = np.zeros(16 << 20, np.uint8)
    most = entry_bytes(0, [region.size])
    writer = RingWriter(tmp_path, 3 * most + BLOCK, most)
    number, said = 0, []
    while writer.offer(number, b"", region, [[0, region.size]]):
        said += writer.taken()
        number += 1
    said += writer.close(60.0)
    assert [(one.number, one.cause, bool(one.why)) for one in said if isinstance(one, Hole)] == [(number, "busy", True)]
    assert [one.number for one in said if isinstance(one, Written)] == [*range(number)]
    assert writer.close() == []


@pytest.mark.parametrize("spans", [[[0, 9]], [[-1, 2]], [[8, 1]], [[1 << 62, 1 << 62]], [[0, -1]]])
def test_spans_that_are_not_in_the_region_are_refused(tmp_path: Path, spans: Any) -> None:
    with RingWriter(tmp_path / "journal", FOUR, place_bytes()) as writer:
        with pytest.raises(ValueError, match="span"):
            writer.offer(1, b"", np.zeros(8, np.uint8), spans)
        assert isinstance(write(writer, 2), Written)
        assert isinstance(write(writer, 3), Written)


def test_two_processes_read_what_is_being_written(directory: Path) -> None:
    """Each gets entries as they were offered, or is told that they are gone."""
    with RingWriter(directory, FOUR, place_bytes()) as writer:
        write(writer, 0)
        command = [sys.executable, "-m", "tests.flowcheck.journal.reading", str(directory), "40"]
        readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
        number = 0
        while any(reader.poll() is None for reader in readers):
            write(writer, number := number + 1)
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.read().strip() == "40 as they were offered" and reader.returncode == 0
        reader.stdout.close()


@pytest.mark.parametrize("mounted", [("hugetlbfs", "pagesize=2M")], indirect=True)
def test_huge_pages_carry_a_journal(mounted: Path) -> None:
    if huge_pages_free() < 2:
        pytest.skip("no two huge pages of 2 MiB are free")
    with RingWriter(mounted, 4 << 20, 1 << 20) as writer:
        assert isinstance(write(writer, 1), Written) and isinstance(write(writer, 2), Written)
    with RingWriter(mounted, 4 << 20, 1 << 20) as writer:
        assert writer.found == found(mounted) == [1, 2]


# -- several files ---------------------------------------------------------------------------------------------


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two places in each."""
    monkeypatch.setattr("flowcheck.journal.format.FILE_BYTES", 2 * place_bytes() + BLOCK)


SIX = 3 * (2 * place_bytes() + BLOCK)


def test_a_ring_of_several_files(directory: Path, small_files: None) -> None:
    with RingWriter(directory, SIX, place_bytes()) as writer:
        for number in range(9):
            write(writer, number)
    assert [path.name for path in sorted(directory.iterdir())] == ["ring-00000", "ring-00001", "ring-00002"]
    assert found(directory) == [*range(3, 9)]
    (directory / "ring-00001").unlink()
    assert len(found(directory)) == 4
    with RingWriter(directory, SIX, place_bytes()) as writer:
        assert writer.found == found(directory) and len(writer.found) == 4
        assert [isinstance(write(writer, number), Written) for number in (9, 10)] == [True] * 2
        assert len(found(directory)) == 6, "the empty ones were taken first"
    with RingWriter(directory, SIX - BLOCK, place_bytes()):
        assert len([*directory.iterdir()]) == 2 and found(directory) == []


def test_entries_larger_than_a_file_have_one_each(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowcheck.journal.format.FILE_BYTES", BLOCK)
    with RingWriter(directory, 3 * (place_bytes() + BLOCK), place_bytes()) as writer:
        for number in range(5):
            write(writer, number)
    assert len([*directory.iterdir()]) == 3 and found(directory) == [2, 3, 4]


def test_a_file_in_anothers_place_is_replaced(directory: Path, small_files: None) -> None:
    with RingWriter(directory, SIX, place_bytes()) as writer:
        for number in range(6):
            write(writer, number)
    (directory / "ring-00001").write_bytes((directory / "ring-00000").read_bytes())
    with RingWriter(directory, SIX, place_bytes()) as writer:
        assert writer.found == [0, 1, 4, 5] and len(writer.replaced) == 1


@pytest.mark.parametrize("mounted", [("tmpfs", "size=256k")], indirect=True)
def test_without_room_for_all_files_there_are_none(mounted: Path, small_files: None) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        RingWriter(mounted, SIX, place_bytes())
    assert "remedy" in str(caught.value) and not list(mounted.iterdir())


# -- what is in the directory already --------------------------------------------------------------------------


def test_one_process_writes_it(tmp_path: Path) -> None:
    with RingWriter(tmp_path, FOUR, place_bytes()):
        with pytest.raises(EnvironmentProblem):
            RingWriter(tmp_path, FOUR, place_bytes())
    RingWriter(tmp_path, FOUR, place_bytes()).close()


def test_of_another_size_it_is_replaced(directory: Path) -> None:
    with RingWriter(directory, FOUR, place_bytes()) as writer:
        write(writer, 1)
    with RingWriter(directory, FOUR - place_bytes(), place_bytes()) as writer:
        assert writer.found == [] and len(writer.replaced) == 1
        write(writer, 2)
    assert found(directory) == [2]
    assert sum(path.stat().st_size for path in directory.iterdir()) <= FOUR - place_bytes()


def test_a_file_that_was_cut_short_is_replaced(directory: Path) -> None:
    with RingWriter(directory, FOUR, place_bytes()) as writer:
        write(writer, 1)
    os.truncate(next(directory.iterdir()), FOUR - place_bytes() + 1)
    assert len(RingReader(directory).damaged) >= 1
    with RingWriter(directory, FOUR, place_bytes()) as writer:
        assert writer.found == [] and len(writer.replaced) == 1
        assert [isinstance(write(writer, number), Written) for number in range(4)] == [True] * 4


def test_what_a_killed_start_left_is_cleared_away(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / ".ring-00000.partial").write_bytes(b"half")
    RingWriter(directory, FOUR, place_bytes()).close()
    assert [path.name for path in directory.iterdir()] == ["ring-00000"]


@pytest.mark.parametrize("made", ["text", "link", "pipe", "folder"])
def test_what_is_not_ours_is_left_alone(tmp_path: Path, made: str) -> None:
    path, elsewhere = tmp_path / "journal" / "ring-00000", tmp_path / "elsewhere"
    path.parent.mkdir()
    elsewhere.write_bytes(b"somebody's" * 1000)
    {"text": lambda: path.write_bytes(b"somebody's" * 1000), "link": lambda: path.symlink_to(elsewhere),
     "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[made]()
    with pytest.raises((UserError, EnvironmentProblem)) as caught:
        RingWriter(path.parent, FOUR, place_bytes())
    assert "ring-00000" in str(caught.value)
    assert elsewhere.read_bytes() == b"somebody's" * 1000
    assert path.is_symlink() or path.is_fifo() or path.is_dir() or path.read_bytes() == b"somebody's" * 1000
    assert "ring-00000" in " ".join(RingReader(path.parent).damaged)


def test_less_than_two_entries_are_no_ring(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        RingWriter(tmp_path / "journal", 2 * place_bytes(), place_bytes())


def test_where_there_is_none_there_is_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        RingReader(tmp_path)
    with pytest.raises(EnvironmentProblem):
        RingReader(tmp_path / "nowhere")
