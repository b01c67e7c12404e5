"""What is put on the board is read whole, in another process too, however fast it changes. The other can do no harm."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowcheck.node.status import board as module
from flowcheck.node.status.board import ROOM, Board, Glance


@pytest.fixture
def pair() -> Iterator[tuple[Board, Glance]]:
    with contextlib.closing(Board()) as board, contextlib.closing(Glance(board.fd)) as glance:
        yield board, glance


def test_nothing_was_written(pair: Any) -> None:
    _, glance = pair
    assert glance.read() == b"" and glance.count == 0


def test_the_newest_is_read(pair: Any) -> None:
    board, glance = pair
    for number, text in enumerate([b"first", b"the second, which is longer", b"3", b"", b"fifth"], 1):
        assert board.write(text) and glance.read() == text and glance.count == number


def test_what_is_too_large_leaves_what_was_there(pair: Any) -> None:
    board, glance = pair
    most = bytes(range(256)) * (ROOM // 256)
    assert board.write(most) and glance.read() == most
    assert not board.write(most + b"x")
    assert glance.read() == most and glance.count == 1


def test_the_one_before_stays_while_the_next_is_written(pair: Any) -> None:
    """A writer that is killed in the middle has not yet counted what it wrote."""
    board, glance = pair
    board.write(b"whole")
    at = module._area(2)
    board._memory[at : at + 20] = b"x" * 20
    assert glance.read() == b"whole"


def test_what_is_torn_is_not_given_out(pair: Any) -> None:
    board, glance = pair
    board.write(b"whole")
    at = module._area(1) + module._HEAD.size
    board._memory[at : at + 1] = b"W"
    assert glance.read() == b""
    board.write(b"again")
    assert glance.read() == b"again"


def test_a_reader_never_sees_a_mixture(pair: Any) -> None:
    board, glance = pair
    texts = {bytes([letter]) * (1000 * letter) for letter in range(1, 60)}
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for text in texts:
                board.write(text)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        end, seen = time.monotonic() + 240, set[bytes]()
        while len(seen) < 40 and time.monotonic() < end:
            seen.add(glance.read())
    finally:
        stop.set()
        thread.join()
    assert seen <= texts | {b""} and len(seen) >= 40


CHILD = """
import fcntl, mmap, os, sys
sys.path.insert(0, sys.argv[2])
from flowcheck.node.status.board import Glance
fd = int(sys.argv[1])
print(Glance(fd).read().decode())
for harm in (lambda: os.ftruncate(fd, 4096), lambda: os.ftruncate(fd, 1 << 24), lambda: os.pwrite(fd, b"x", 0),
             lambda: mmap.mmap(fd, 4096)):
    try:
        harm()
        print("done")
    except (OSError, PermissionError):
        print("refused")
"""


def test_another_process_reads_and_can_do_no_harm(pair: Any) -> None:
    """Shrinking it would kill the node at its next write."""
    board, glance = pair
    board.write(b"from the node")
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-P", "-c", CHILD, str(board.fd), str(root)], pass_fds=[board.fd],
                          capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:5] == ["from the node", *["refused"] * 4], done.stderr
    assert glance.read() == b"from the node"


def test_a_process_that_is_not_given_it_does_not_have_it(pair: Any) -> None:
    assert not os.get_inheritable(pair[0].fd)


def test_an_older_kernel_has_no_seal_against_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEAL_FUTURE_WRITE", 1 << 30)
    with contextlib.closing(Board()) as board, contextlib.closing(Glance(board.fd)) as glance:
        assert board.write(b"x") and glance.read() == b"x"
        mmap.mmap(board.fd, 4096).close()


def test_it_is_closed_twice() -> None:
    board = Board()
    board.close()
    board.close()
    assert board.fd == -1
