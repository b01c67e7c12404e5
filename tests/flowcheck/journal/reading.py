"""A reader beside a writer: the newest of a journal, over and over, until so many were read.

    python -m tests.flowcheck.journal.reading DIRECTORY COUNT
"""

from __future__ import annotations

import sys
from pathlib import Path

from flowcheck.errors import UserError
from flowcheck.journal.reader import RingReader
from tests.flowcheck.journal.journal_room import wanted


def main() -> None:
    directory, count = Path(sys.argv[1]), int(sys.argv[2])
    reader, read = RingReader(directory), 0
    while read < count:
        for number, _, _ in [*reader.entries[:1], *reader.entries[-1:]]:  # what goes next, and what came last
            try:
                head, spans = reader.read(number)
            except UserError:
                continue  # it was overwritten
            assert (head, [span.tobytes() for span in spans]) == wanted(number)
            read = min(read + 1, count)
    print(f"{read} as they were offered")


if __name__ == "__main__":
    main()
