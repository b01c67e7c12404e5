"""Changed records and HTTP requests against the ports of a real node, while it follows a job: it does not end, it keeps
nothing of them, and every version is torch's, bit for bit.

Some connections know no token, some a trainer's, some a peer's. What those with a token say goes to groups of their
own: a rank that lies of its own run can spoil its versions, visibly, and may.

    FUZZ_STREAMS=1000000 pytest -m slow tests/flowcheck/node/test_fuzz_records.py       as many streams of frames
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowcheck.ask.client import reader_key
from flowcheck.control.protocol import Link, RecordsError, greet
from fuzz.streams import ODD, Streams, messages

from .conftest import LONGEST, TOKEN
from .test_live_ranges import Training, all_equal, small_job

pytestmark = pytest.mark.root
LINES = 8  # connections at a time
GROUPS = 3  # that those with a token speak to
ROUND = 400  # streams between two iterations of the job that is followed
FEW = 8  # descriptors and threads: of groups that nobody had spoken to, and of a process that had not been asked
LEAK = 8 << 20  # bytes that a whole run may add, by regression


class Attack:
    """What is sent to a node's ports, by its kind: made on one thread, sent on any."""

    def __init__(self, node: Any, job: Any, seed: int) -> None:
        host, _, port = node.seen("listening")["api"].rpartition(":")
        self._control, self._api = node.address, (host, int(port))
        self._rng = random.Random(seed)
        self._streams = Streams(messages(job), seed)

    def next(self) -> tuple[str, dict[str, Any], bytes]:
        kind = self._rng.choice(("trainer", "trainer", "trainer", "peer", "stranger", "http"))
        group = "" if kind == "peer" else f"fuzzed{self._rng.randrange(GROUPS)}"
        who = self._streams.hello() | {"group": group, "role": kind} if kind in ("trainer", "peer") else {}
        if kind == "http":
            return kind, who, self._streams.request(reader_key(TOKEN) if self._rng.random() < 0.7 else "")
        return kind, who, self._streams.frames("holes" if kind == "peer" and self._rng.random() < 0.8 else "")

    def send(self, kind: str, who: dict[str, Any], data: bytes) -> str:
        """All of it, and then until the node has closed: it has read what it wanted to. What came of it."""
        said = b""
        try:
            with socket.create_connection(self._api if kind == "http" else self._control, timeout=LONGEST) as sock:
                if who:
                    with contextlib.closing(Link(sock)) as link:
                        greet(link, TOKEN, **who)
                        said = _said(sock, data)
                else:
                    said = _said(sock, data)
        except (RecordsError, ConnectionError):
            return f"{kind} cut"
        return f"{kind} refused" if b"refused" in said else kind


def _said(sock: socket.socket, data: bytes) -> bytes:
    sock.settimeout(LONGEST)
    sock.sendall(data)
    try:
        sock.shutdown(socket.SHUT_WR)
    except OSError as error:  # the node has closed it already
        raise ConnectionError from error
    said = b""
    while piece := sock.recv(65536):
        said = (said + piece)[-4096:]
    return said


def held(pid: int) -> tuple[int, int, int]:
    """Resident bytes that are its own, descriptors, threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def fuzzed(start_node: Any, attach: Any, truth: Any, lan: Any, tmp_path: Path) -> Callable[[int, int], Counter[str]]:
    """fuzzed(streams, seed): send them; what came of them."""

    def run(streams: int, seed: int) -> Counter[str]:
        at = Training(small_job(), truth, lan)
        at.train(), at.train()
        node = start_node('connections = 64\n[api]\nlisten = "127.0.0.1:0"', groups=1 + GROUPS, resync="ranges",
                          replica='peers = ["127.0.0.1:1"]')
        at.attach(node, attach)
        first = at.until_patched(node)
        pids = [node.process.pid, *children(node.process.pid)]
        attack, samples, published, told = Attack(node, small_job(seed=4), seed), [], [], Counter[str]()
        before = {pid: held(pid) for pid in pids}
        with ThreadPoolExecutor(LINES) as lines:
            for _ in range(0, streams, ROUND):
                for done in [lines.submit(attack.send, *attack.next()) for _ in range(min(ROUND, streams))]:
                    told[done.result()] += 1
                number = at.train(sums=True)
                line = node.wait("iteration", iteration=number)
                assert line["published"] and line["status"] == "verified", line
                published.append(number)
                samples.append([held(pid)[0] for pid in pids])
                node.lines.clear()
        deadline = time.monotonic() + LONGEST
        while any(now > then + FEW for pid in pids for now, then in zip(held(pid)[1:], before[pid][1:], strict=True)):
            assert time.monotonic() < deadline, (before, {pid: held(pid) for pid in pids})
            time.sleep(0.05)
        assert children(node.process.pid) == pids[1:], "a process was started anew"
        if len(samples) >= 50:
            rest = np.array(samples[len(samples) // 5 :], float)
            for own, pid in zip(rest.T, pids, strict=True):
                grown = float(np.polyfit(np.arange(len(own)), own, 1)[0]) * len(own)
                print(f"process {pid}: {own[0] / 1e6:.1f} MB, {grown / 1e6:+.2f} MB over {len(own)} rounds")
                assert grown < LEAK, samples
        assert node.end() == 0
        said = node.process.stderr.read()
        assert "Traceback" not in said, said[-4000:]
        assert all_equal(tmp_path, at.known) == [first, *published]
        print(dict(told))
        return told

    return run


def test_a_node_goes_on_through_changed_records_and_requests(fuzzed: Callable[[int, int], Counter[str]]) -> None:
    told = fuzzed(300, 1)
    assert all(told[kind] for kind in ("trainer", "trainer refused", "peer refused", "stranger refused")), told
    assert told["http"]


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_a_node_goes_on_through_many(fuzzed: Callable[[int, int], Counter[str]]) -> None:
    fuzzed(int(os.environ.get("FUZZ_STREAMS", "20000")), random.SystemRandom().randrange(1 << 30))


def test_streams_depend_on_their_seed_alone() -> None:
    """What is put into a frame is changed with it: were it shared, the next streams had it, and one day in a circle."""
    said, before = messages(small_job()), repr(ODD)
    first, again = (Streams(said, 5) for _ in range(2))
    drawn = [first.frames() for _ in range(6000)]
    assert repr(ODD) == before
    assert all(again.frames() == one for one in drawn)
