"""A writer of five iterations in two places, of which slow_files.c notes what it writes and syncs, and this when the
writer said that an iteration is written ('W', number).

    python -m tests.flowcheck.journal.power DIRECTORY LOG
"""

from __future__ import annotations

import sys
from pathlib import Path

from flowcheck.journal.ring import RingWriter, Written
from tests.flowcheck.journal.journal_room import place_bytes, write

ENTRIES = 5


def main() -> None:
    directory, log = map(Path, sys.argv[1:])
    with RingWriter(directory, 2 * place_bytes() + 4096, place_bytes()) as writer:
        log.write_bytes(b"")  # from here on: files are made, and synced
        for number in range(ENTRIES):
            assert isinstance(write(writer, number), Written)
            with log.open("ab") as file:
                file.write(b"W" + number.to_bytes(8, "little"))


if __name__ == "__main__":
    main()
