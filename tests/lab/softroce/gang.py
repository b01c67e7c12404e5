"""Ranks for tests: one process each in a namespace of the lab's fabric, doing one training after another.

    gang = Gang(fabric, ranks=4)
    gang.train(2, settings, options, out)       ranks 0 and 1 train, the others wait; what they saved

Importing torch is what takes long, so the processes stay. `fabric` is up and belongs to the caller. A case has a
number, and so has its answer: one that an earlier test no longer waited for is not taken for the next test's.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lab.network.fabric import Fabric

__all__ = ["Gang"]

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
HANG = 240.0  # seconds; longer than anything here takes on the slowest machine


class Gang:
    """log: where the processes' stderr goes."""

    def __init__(self, fabric: Fabric, ranks: int, log: Path) -> None:
        self.fabric, self.ranks = fabric, ranks
        self._port = 29500
        self._number = 0
        self._log = log
        self._heard = [b""] * ranks  # what a rank has said and nobody has read
        environment = {"PYTHONPATH": f"{ROOT}:{HERE}", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(ranks):
            with (log / f"rank-{rank}.log").open("w") as stderr:
                self.processes.append(fabric.spawn(
                    f"r{rank}", [sys.executable, "-X", "faulthandler", "-P", str(HERE / "train.py"), str(rank)],
                    env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                ))

    def begin(
        self, ranks: int, settings: dict[str, Any], options: dict[str, Any], out: Path,
        of_rank: dict[int, dict[str, Any]] | None = None,
    ) -> None:
        """Start a training of the first ranks; `said` waits for it. of_rank: settings of one rank only."""
        out.mkdir(exist_ok=True)
        self._port += 1
        self._number += 1
        for rank in range(ranks):
            case = {
                "number": self._number, "ranks": ranks, "options": options, "out": str(out), "port": self._port,
                "settings": {
                    "interface": "fab0", "address": f"10.77.0.{10 + rank}", **settings, **(of_rank or {}).get(rank, {}),
                },
            }
            stdin = self.processes[rank].stdin
            assert stdin is not None
            stdin.write(json.dumps(case) + "\n")
            stdin.flush()

    def said(self, rank: int, seconds: float = HANG) -> str:
        """What a rank says of the training begun last: "done", or why it failed."""
        end = time.monotonic() + seconds
        while (line := self._line(rank, end)) is not None:
            number, _, answer = line.partition(" ")
            if not line:
                return f"ended: {(self._log / f'rank-{rank}.log').read_text()[-3000:]}"
            if int(number) == self._number:
                return answer
        return f"nothing for {seconds} s"

    def _line(self, rank: int, end: float) -> str | None:
        """The next line of a rank; "" when it has ended, None when there is none in time."""
        stream = self.processes[rank].stdout
        assert stream is not None
        while b"\n" not in self._heard[rank]:
            if not select.select([stream], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            if not (more := os.read(stream.fileno(), 65536)):
                return ""
            self._heard[rank] += more
        line, _, self._heard[rank] = self._heard[rank].partition(b"\n")
        return line.decode()

    def train(self, ranks: int, settings: dict[str, Any], options: dict[str, Any], out: Path) -> list[Any]:
        """What each rank saved: train.py."""
        self.begin(ranks, settings, options, out)
        assert [self.said(rank) for rank in range(ranks)] == ["done"] * ranks
        return [torch.load(out / f"rank-{rank}.pt") for rank in range(ranks)]
