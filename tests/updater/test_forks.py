"""Workers of C, in a fork of their process, which has none of them."""

from __future__ import annotations

import os
import select

from updater.kernels import Pool

from ..forks import fork

SECONDS = 60.0


def test_a_fork_lets_go_of_workers_without_waiting() -> None:
    """As its garbage collector may, at any time: nobody would end the wait."""
    start, end = os.pipe()
    held = Pool(2)
    pid = fork()
    if pid == 0:
        try:
            del held
            os.write(end, b"!")
        finally:
            os._exit(0)
    os.close(end)
    try:
        came = select.select([start], [], [], SECONDS)[0]
        assert came and os.read(start, 1) == b"!", "it waits for threads that are not there"
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(start)
    del held  # and here it ends as ever
