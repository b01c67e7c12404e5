"""A journal's writer, killed before each of its system calls that changes a file, from the making of its files on; and
one whose files are memory, where an entry is no system call, killed at any time.

    python -m tests.flowcheck.journal.killed_writer calls FOLDER    -> JSON: newest iteration that was there after each
    python -m tests.flowcheck.journal.killed_writer times FOLDER    -> JSON: how many iterations were there after each
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flowcheck.errors import UserError
from flowcheck.journal.reader import RingReader
from flowcheck.journal.ring import RingWriter, Written
from tests.flowcheck.journal.journal_room import SIZES, offered, outcome, place_bytes, wanted, write
from tests.killed import killed_before

LAST = 3  # iterations 0 to 3 in two places
NONE = -1
KILLS = 30
LARGE = (3_000_001, 70_001)  # bytes, so that most of the time one is under way


def work(directory: Path) -> None:
    with RingWriter(directory, 2 * place_bytes() + 4096, place_bytes()) as writer:
        for number in range(LAST + 1):
            assert isinstance(write(writer, number), Written)


def found(directory: Path, sizes: Sequence[int] = SIZES) -> list[int]:
    """Iterations that are there, each of which is what was offered. Nothing is damaged."""
    if not directory.exists():
        return []
    try:
        reader = RingReader(directory)
    except UserError:
        return []  # its files had not been made
    assert not reader.damaged, reader.damaged
    numbers = [entry.number for entry in reader.entries]
    for number in numbers:
        head, spans = reader.read(number)
        assert (head, [span.tobytes() for span in spans]) == wanted(number, sizes)
    return numbers


def after(directory: Path) -> int:
    """The newest iteration after a kill. Whoever writes next finds what a reader does, and is not disturbed."""
    numbers = found(directory)
    with RingWriter(directory, 2 * place_bytes() + 4096, place_bytes()) as writer:
        assert writer.found == numbers and not writer.replaced, (writer.found, numbers, writer.replaced)
        assert isinstance(write(writer, LAST + 1), Written)
    assert found(directory) == [*numbers[-1:], LAST + 1]
    return numbers[-1] if numbers else NONE


def calls(folder: Path) -> list[int]:
    newest, killed = [], True
    while killed:
        directory = folder / str(len(newest)) / "journal"
        killed = killed_before(len(newest) + 1, lambda where=directory: work(where))
        newest.append(after(directory))
    return newest


def write_for_ever(directory: Path, begun: int) -> None:
    """begun: of a pipe; a byte says that entries are written by now."""
    given = [offered(number, LARGE) for number in range(4)]
    with RingWriter(directory, 3 * place_bytes(LARGE) + 4096, place_bytes(LARGE)) as writer:
        while True:
            for number, one in enumerate(given):
                writer.offer(number, *one)
                outcome(writer)
                os.write(begun, b"1")


def times(folder: Path) -> list[int]:
    counts = []
    for _ in range(KILLS):
        begun, say = os.pipe()
        if not (pid := os.fork()):
            os.close(begun)
            write_for_ever(folder / "journal", say)
        os.close(say)
        os.read(begun, 1)
        time.sleep(random.uniform(0, 0.005))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(begun)
        counts.append(len(found(folder / "journal", LARGE)))
    return counts


def main() -> None:
    what, folder = sys.argv[1:]
    print(json.dumps({"calls": calls, "times": times}[what](Path(folder))))


if __name__ == "__main__":
    main()
