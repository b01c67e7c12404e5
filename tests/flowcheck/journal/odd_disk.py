"""What a journal does on a disk that is slow, hung, full or broken: a process of its own, with slow_files.c loaded.

    python -m tests.flowcheck.journal.odd_disk FOLDER HOLD FAILS       -> JSON: what became of entries, by scene

HOLD, FAILS: the files that slow_files.c looks for. One thread offers and lets the disk go on: if it waited for the
disk, this would not end.
"""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flowcheck.journal import ring
from flowcheck.journal.reader import RingReader
from flowcheck.journal.ring import Hole, RingWriter, Written
from tests.flowcheck.journal.journal_room import offered, place_bytes, wanted, write

Said = dict[int, str]  # of each iteration its cause, "" for one that is whole


class Scene:
    def __init__(self, folder: Path, hold: Path, fails: Path) -> None:
        self.directory, self.hold, self.fails = folder / "journal", hold, fails
        self.writer = RingWriter(self.directory, 6 * place_bytes() + 4096, place_bytes())
        self.said: Said = {}

    def taken(self) -> list[Written | Hole]:
        found = self.writer.taken()
        for one in found:
            assert one.number not in self.said, "once"
            self.said[one.number] = one.cause if isinstance(one, Hole) else ""
        return found

    def until(self, numbers: range) -> Said:
        """What became of them all."""
        while not all(number in self.said for number in numbers):
            self.taken()
            time.sleep(0.001)
        return {number: self.said[number] for number in numbers}

    def offer(self, numbers: range) -> list[bool]:
        """One after the other, each as soon as the one before it is no longer read."""
        given = []
        for number in numbers:
            given.append(self.writer.offer(number, *offered(number)))
            while self.writer.reads(number):
                time.sleep(0.0005)
        return given

    def check(self) -> list[int]:
        """What is there is what was offered."""
        reader = RingReader(self.directory)
        assert not reader.damaged
        for number in (there := [entry.number for entry in reader.entries]):
            head, spans = reader.read(number)
            assert (head, [span.tobytes() for span in spans]) == wanted(number)
        return there

    # -- scenes ------------------------------------------------------------------------------------------------

    def slow(self) -> Said:
        """Iterations come faster than the disk is."""
        self.offer(range(10, 20))
        return self.until(range(10, 20))

    def hung(self, first: int) -> Said:
        ring.HUNG_SECONDS = 60.0
        self.hold.touch()
        given = self.offer(range(first, first + 3))
        ring.HUNG_SECONDS = 0.05
        time.sleep(0.1)
        given += self.offer(range(first + 3, first + 5))
        assert given == [True, True, False, False, False]
        self.hold.unlink()
        self.until(range(first, first + 5))
        self.offer(range(first + 5, first + 6))
        return self.until(range(first, first + 6))

    def failing(self, first: int, call: str, code: int) -> Said:
        """Three iterations of which the middle one meets it."""
        self.offer(range(first, first + 1))
        self.until(range(first, first + 1))
        self.fails.write_text(f"{call} {code}")
        self.offer(range(first + 1, first + 2))
        self.until(range(first + 1, first + 2))
        self.fails.unlink()
        self.offer(range(first + 2, first + 3))
        return self.until(range(first, first + 3))

    def broken(self) -> Said:
        """For longer than there are places."""
        self.fails.write_text(f"fdatasync {errno.EIO}")
        for number in range(60, 69):
            write(self.writer, number)
        self.fails.unlink()
        return dict.fromkeys(self.check(), "")

    def closed(self) -> Said:
        """While the disk is hung."""
        self.hold.touch()
        self.offer(range(80, 82))
        left = self.writer.close(0.05)
        self.hold.unlink()
        return {one.number: one.cause if isinstance(one, Hole) else "" for one in left}


def main() -> None:
    scene = Scene(*map(Path, sys.argv[1:]))
    assert scene.check() == []
    scenes: dict[str, Callable[[], Said]] = {
        "slow": scene.slow, "hung": lambda: scene.hung(20),
        "full": lambda: scene.failing(30, "pwrite", errno.ENOSPC),
        "unsynced": lambda: scene.failing(40, "fdatasync", errno.EIO),
        "halved": lambda: scene.failing(50, "pwrite", 0),
        "broken": scene.broken,
        "hung again": lambda: scene.hung(70),  # an odd number of entries later: with the other of two
        "closed": scene.closed,
    }
    out = {}
    for name, play in scenes.items():
        out[name] = {"said": play(), "there": scene.check()}
    print(json.dumps(out))


if __name__ == "__main__":
    main()
