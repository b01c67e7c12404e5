"""Attachments of a real DDP job (gloo): what goes up, and nodes that are gone, slow, or speak nonsense."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowcheck.checkpoint import tensor_sha256
from flowcheck.manifest import Job
from flowcheck.records import Challenge, Hello, Link, RecordsError, Welcome
from flowcheck.synth import example_job
from updater.reader import Reader

WORKER = Path(__file__).with_name("ddp_worker.py")
TOKEN = "a token that only tests have"


class Ranks:
    """Two processes of ddp_worker.py."""

    def __init__(self, folder: Path, node: str, steps: int, pause: float, token: str = TOKEN) -> None:
        job = folder / "gloo.json"
        job.write_text(example_job(ranks=2, count=1000, seed=8).to_json())
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-P", str(WORKER), str(rank), "2", str(folder / "store"), node, token, str(job),
                 str(steps), str(pause)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]

    def finish(self) -> list[list[dict[str, Any]]]:
        """Lines of both ranks; the exit of each must be 0."""
        out = []
        for process in self.processes:
            text, error = process.communicate(timeout=120)
            assert process.returncode == 0, error[-3000:]
            out.append([json.loads(line) for line in text.splitlines()])
        return out

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Any]:
    made: list[Ranks] = []

    def start(node: str, steps: int, pause: float = 0.0, **options: Any) -> Ranks:
        made.append(Ranks(tmp_path, node, steps, pause, **options))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.mark.root
def test_manifest_and_state_of_live_objects(start_node, train, tmp_path: Path) -> None:
    """Tied, frozen, buffers, two groups, a schedule, rebuilt buckets: accepted by the node, and the state that it
    holds is the model's and the optimizer's of that very iteration, bit for bit."""
    node = start_node(replica="keep = true")
    ranks = train("127.0.0.1:%d" % node.address[1], 14, 0.3)
    attached = node.wait("attached")
    assert attached["run_id"] == "gloo" and attached["flows"] == 2
    at = node.wait("state")["iteration"]
    node.wait("end", published=at - 1)  # no iteration came over any wire
    first, second = ranks.finish()
    assert {line["state"] for line in first[at:-1]} == {"attached"} and first[-1] == {"closed": "closed"}
    assert [line["hashes"] for line in first[:-1]] != [first[0]["hashes"]] * (len(first) - 1)
    assert node.end() == 0
    (path,) = tmp_path.glob("*.replica")
    with Reader(path).pinned() as version:
        held = {name: tensor_sha256(tensor) for name, tensor in version.parameters.items()}
        for name, states in version.optimizer_state.items():
            held |= {f"{name}.{key}": tensor_sha256(value) for key, value in states.items() if key != "step"}
    assert held == first[at - 1]["hashes"]
    assert "head.weight" in held and held["head.weight"] == held["embed.weight"]
