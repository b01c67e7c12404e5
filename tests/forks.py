"""Forks of the test process."""

import os
import threading

__all__ = ["fork"]

FROM_THE_START = set(threading.enumerate())  # the main one; with pytest-xdist also the one that reads its orders


def fork() -> int:
    """os.fork where no test's thread is alive: a lock that another thread holds is copied, and nobody in the child
    will ever let go of it."""
    alive = [thread for thread in threading.enumerate() if thread not in FROM_THE_START]
    others = [thread for thread in alive if not isinstance(thread, threading._DummyThread)]
    assert not others, f"a fork beside {others}"
    return os.fork()
