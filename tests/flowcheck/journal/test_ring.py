"""What is offered is what is read, in a ring of files that keeps the newest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flowcheck.journal.reader import RingReader
from flowcheck.journal.ring import Written, RingWriter
from tests.flowcheck.journal.journal_room import offered, place_bytes, wanted, write


@pytest.fixture(params=["/tmp", "/dev/shm"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """On a disk and in memory."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="flowcheck-journal-", dir=request.param) as found:
        yield Path(found) / "journal"


def test_the_newest_are_read_as_they_were_offered(directory: Path) -> None:
    with RingWriter(directory, 5 * place_bytes(), place_bytes()) as writer:
        for number in range(7):
            assert isinstance(write(writer, number), Written)
        reader = RingReader(directory)
        assert [entry.number for entry in reader.entries] == writer.entries == [3, 4, 5, 6]
        for number in writer.entries:
            head, spans = reader.read(number)
            assert (head, [span.tobytes() for span in spans]) == wanted(number)
