"""bench hook: what an attachment costs a training process at each boundary of iterations (hook_rank.py).

    hook.N.thread               ms of the rank's own thread per step, of a model with N parameters, beside a budget
    hook.N.process              ms of processor time of the whole process per step: that, and what its other threads
                                have more than without an attachment
    hook.N.longest              ms of the longest step of a turn, against that of a turn without: only reported
    hook.N.checksums.thread     the same of steps that send checksums, more than of steps that do not: only reported,
    hook.N.checksums.process    beside the time in which a thread can read the parameters

Two ranks train on gloo, each in a process of its own, and send what they send to a node: here a thread of this process
that speaks a node's half of the protocol, takes all of it and says that each version is published. What a node does
with it costs other machines. A round is a turn of STEPS iterations of each job, in alternating order.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from flowcheck.control.protocol import (
    Bye,
    Joined,
    Limits,
    Link,
    Manifest,
    Progress,
    Record,
    RecordsError,
    Wanted,
    accept,
)
from flowcheck.control.user_state import USER_BYTES
from flowcheck.errors import EnvironmentProblem
from lab.bench import roof
from lab.bench.hook_rank import BYTES, TOKEN
from lab.bench.rows import Row, here, timed

__all__ = ["run"]

STEPS = {48: 10, 800: 4}  # iterations of a turn, by parameters
BUDGETS = {48: (0.1, 0.5), 800: (0.3, 1.0)}  # ms of the rank's thread and of the process, per step
SECONDS = 300.0  # for one size


def run(rounds: int, ring_bytes: int) -> list[Row]:
    """Rows of both sizes. ring_bytes is not used: the models are as large as they are. Raises EnvironmentProblem."""
    rows: list[Row] = []
    for tensors, steps in STEPS.items():
        taken = _measured(tensors, steps, rounds)
        rows += _rows(tensors, taken)
    return rows


def _rows(tensors: int, taken: list[dict[str, list[float]]]) -> Iterator[Row]:
    """taken: per round, by job, [thread, process, longest]."""
    setting, title = here(), f"hook.{tensors}"

    def more(arm: str, than: str, which: int) -> list[float]:
        return [one[arm][which] - one[than][which] for one in taken]

    for which, (name, budget) in enumerate(zip(("thread", "process"), BUDGETS[tensors], strict=True)):
        yield Row.of(f"{title}.{name}", "ms/step", more("attached", "plain", which), [budget] * len(taken), 1.0,
                     setting)
    longest, limits = ([one[arm][2] for one in taken] for arm in ("attached", "plain"))
    yield Row.of(f"{title}.longest", "ms/step", longest, limits, None, setting)
    memory = torch.ones(BYTES // 4)
    read = timed(lambda: roof.read(memory.data_ptr(), BYTES // 256 * 256) < 0)  # never
    limits = [1e3 * read() for _ in taken]
    for which, name in enumerate(("thread", "process")):
        yield Row.of(f"{title}.checksums.{name}", "ms/step", more("checked", "attached", which), limits, None, setting)


def _measured(tensors: int, steps: int, rounds: int) -> list[dict[str, list[float]]]:
    """Of every round, what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder, Taker() as node, contextlib.ExitStack() as ends:
        ranks = []
        for rank in range(2):
            given = {"rank": rank, "store": str(Path(folder) / "store"), "node": node.address, "tensors": tensors,
                     "steps": steps, "rounds": rounds}
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lab.bench.hook_rank", json.dumps(given)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            ends.callback(process.kill)
            ranks.append(process)
        try:
            said = [process.communicate(timeout=SECONDS) for process in ranks]
        except subprocess.TimeoutExpired:
            raise EnvironmentProblem(f"{rounds} rounds took more than {SECONDS:.0f} s", where="bench hook",
                                     remedy="fewer rounds, or a machine with less beside it") from None
    for process, (_, errors) in zip(ranks, said, strict=True):
        if process.returncode:
            raise EnvironmentProblem(f"a rank ended: {(errors.strip().splitlines() or ['without a word'])[-1]}",
                                     where="bench hook", remedy="two ranks of gloo over lo, and torch with it")
    return [json.loads(line) for line in said[0][0].splitlines()]


class Taker:
    """A node as far as trainers hear of it. Context manager; a thread for each connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(Link(sock),), daemon=True).start()

    def _serve(self, link: Link) -> None:
        with contextlib.closing(link), contextlib.suppress(RecordsError):
            hello = accept(link, TOKEN.encode(), "ranges")
            link.limits = lambda: Limits(16 << 20, {"user": USER_BYTES, "userhead": USER_BYTES}, 30.0)
            for kept in ("user", "userhead"):
                link.send(Wanted([kept], ""))
            message: Any = None
            while not isinstance(message, Bye):
                message, size = link.receive()
                link.payload(size)
                if isinstance(message, Manifest) or (hello.rank and not isinstance(message, Record | Bye)):
                    link.send(Joined(0))
                elif isinstance(message, Record):
                    link.send(Progress(message.iteration, "unverified"))
