"""Ranks that do not find each other: nobody waits for ever, and what was waited for is named."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time

import pytest
import torch.distributed as dist

from lab.softroce.bootstrap import Bootstrap
from lab.synth.families import family_of

FAMILY = family_of("2.19")


def test_a_rank_that_does_not_come_is_named() -> None:
    begun = time.monotonic()
    with pytest.raises(ConnectionError, match="while rank 1 was waited for"):
        Bootstrap(0, 2, dist.HashStore(), "127.0.0.1", FAMILY, 1.0)
    assert time.monotonic() - begun < 10


class Late:
    """A store whose answers wait for an event."""

    def __init__(self, store: dist.Store, event: threading.Event) -> None:
        self.set, self._store, self._event = store.set, store, event

    def get(self, key: str) -> bytes:
        assert self._event.wait(30)
        return self._store.get(key)


@pytest.mark.parametrize("first", ["stranger", "whoever comes"])
def test_what_is_no_rank_ends_the_root_and_that_is_told_to_its_rank(first: str) -> None:
    """The root's thread has an error of its own: rank 0 says it, long before its timeout, also where the root is gone
    before rank 0 has reported to it."""
    store, served = dist.HashStore(), threading.Event()

    def stranger() -> None:
        magic, host, port = json.loads(store.get("softroce/root"))
        with socket.create_connection((host, port), 10) as sock:
            item = struct.pack("<II", 9, 2) + bytes(56)
            sock.sendall(struct.pack("<QI", magic, 1) + struct.pack("<I", len(item)) + item)
            sock.recv(1)  # until the root has hung up
        served.set()

    thread = threading.Thread(target=stranger)
    thread.start()
    begun = time.monotonic()
    with pytest.raises(ConnectionError, match="says it is rank 9 of 2"):
        Bootstrap(0, 2, Late(store, served) if first == "stranger" else store, "127.0.0.1", FAMILY, 60.0)
    assert time.monotonic() - begun < 30
    thread.join()


def test_a_neighbour_that_stops_half_way_is_named() -> None:
    """Rank 1 reports to the root and does nothing after that."""
    store = dist.HashStore()
    ended = threading.Event()

    def half() -> None:
        magic, host, port = json.loads(store.get("softroce/root"))
        with socket.create_server(("127.0.0.1", 0)) as own:
            address = struct.pack("<H", 2) + struct.pack(">H", own.getsockname()[1]) + socket.inet_aton("127.0.0.1")
            item = struct.pack("<II", 1, 2) + 2 * address.ljust(28, b"\0")
            with socket.create_connection((host, port), 10) as sock:
                sock.sendall(struct.pack("<QI", magic, 1) + struct.pack("<I", len(item)) + item)
            ended.wait(30)

    thread = threading.Thread(target=half)
    thread.start()
    with pytest.raises(TimeoutError, match="no connection from rank 1, within 2 s"):
        Bootstrap(0, 2, store, "127.0.0.1", FAMILY, 2.0)
    ended.set()
    thread.join()
