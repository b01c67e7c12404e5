"""A node with two mirror interfaces, and one whose packets go through DMA engines, on real packets: versions equal to
torch's. Also what it does when one of two interfaces is gone."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dataplane.counters import read_counters
from flowcheck.checkpoint.directory import tensor_sha256
from flowcheck.control.protocol import Bye, Joined, Wanted
from flowcheck.job.model import Job
from lab.synth import example_job
from tests.flowcheck.altered import destination

from .conftest import LONGEST

pytestmark = pytest.mark.root


def _job(**options: Any) -> Job:
    job = example_job(
        **{"ranks": 2, "count": [700, 300], "optimizer": "adamw", "options": {"lr": 0.01}, "seed": 3, **options}
    )
    job.step_values = ["lr"]
    return job


def _captures(lan: Any, *others: str) -> str:
    tables = [f'device = "af_packet:{lan.near}"\nring_size = 8192\nhuge = false', *others]
    return "".join(f"[[capture]]\n{table}\n" for table in tables)


def _two(lan: Any) -> str:
    return _captures(lan, f'device = "af_packet:{lan.near2}"\nring_mb = 16')


def _direction(frame: bytes) -> int:
    """0: from the lower address to the higher one; 1: the other way, where the clear-to-sends for the first go."""
    return int(frame[26:30] > frame[30:34])


def _send(lan: Any, mirrors: list[socket.socket], frames: Iterable[bytes]) -> None:
    """Each frame to the mirror of its direction, in order."""
    batch: list[bytes] = []
    for frame in frames:
        if batch and _direction(frame) != _direction(batch[0]):
            lan.send(batch, mirrors[_direction(batch[0])])
            batch = []
        batch.append(frame)
    lan.send(batch, mirrors[_direction(batch[0])])


def _hashes(run: Any) -> dict[str, dict[str, str]]:
    state = {
        f"{name}.{key}": tensor_sha256(value)
        for name, states in run.state().items() for key, value in states.items() if key != "step"
    }
    return {"tensors": {n: tensor_sha256(t) for n, t in run.tensors().items()}, "optimizer": state}


def _follow(node: Any, trainer: Any, run: Any, send: Any, folder: Path, steps: int = 5) -> None:
    """Joined in mid-stream at iteration 2; every version's tensors are torch's."""
    for t in range(2):
        run.advance(run.traffic(t))
    trainer.manifest()
    trainer.expect(Wanted, what=["state"])
    trainer.state(2, run.tensors(), run.state())
    trainer.expect(Joined, iteration=2)
    expected = {}
    for t in range(2, 2 + steps):
        made = run.traffic(t)
        send([frame for _, frame in made.packets])
        run.advance(made, lr=0.01 / (t + 1))
        sums = run.sums() if t % 2 else {}
        trainer.record(t, groups=[{"lr": 0.01 / (t + 1)}], checksums=sums)
        expected[t] = _hashes(run)
        line = node.wait("iteration", iteration=t)
        assert line["published"] and line["missing"] == {}, line
        assert line["status"] == ("verified" if sums else f"follows {t}" if t > 2 else "unverified")
    trainer.link.send(Bye())
    node.wait("end", serves=1 + steps)
    found = [json.loads(text) for text in (folder / "hashes.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in found] == list(expected)
    for line in found:
        assert {key: line[key] for key in ("tensors", "optimizer")} == expected[line["iteration"]]


@pytest.mark.parametrize("options", [
    {"protocol": "ll"},
    {"protocol": "ll128", "ranks": 3, "channels": 2, "count": [9000, 4001]},
    {"protocol": "ll", "algorithm": "tree", "ranks": 4},
])
def test_two_mirrors_with_a_direction_each_make_the_trainers_versions(
    start_node: Any, attach: Any, truth: Any, lan: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    mirrors = [lan.socket, lan.second()]
    job = _job(**options)
    node = start_node(captures=_two(lan))
    _follow(node, attach(node, job), truth(job), lambda frames: _send(lan, mirrors, frames), tmp_path)
    shown = {one.label: one.queues[0] for one in read_counters() if one.pid == node.process.pid}
    assert set(shown) == {f"af_packet:{lan.near}", f"af_packet:{lan.near2}"}
    assert all(queue["received"] > 0 for queue in shown.values())
    assert node.end() == 0
    said = [line["text"].partition(": ")[0] for line in node.said("capture")]
    assert said == [f"af_packet:{lan.near}", f"af_packet:{lan.near2}"]


def test_a_port_that_brings_nothing_of_the_job_holds_nothing_up(
    start_node: Any, attach: Any, truth: Any, lan: Any, tmp_path: Path
) -> None:
    """It may be other jobs' port."""
    lan.second()
    job = _job()
    node = start_node(captures=_two(lan))
    _follow(node, attach(node, job), truth(job), lan.send, tmp_path)
    assert node.end() == 0


def test_simple_without_clear_to_sends_is_not_guessed_and_says_what_to_do(
    start_node: Any, attach: Any, truth: Any, lan: Any
) -> None:
    """Joined in mid-stream. Each interface has the data of a direction, and nothing of what goes the other way."""
    mirrors = [lan.socket, lan.second()]
    job = _job(protocol="simple", count=[50_000, 301], mtu=1024)
    node, run = start_node(captures=_two(lan)), truth(job)
    for t in range(2):
        run.advance(run.traffic(t))
    trainer = attach(node, job)
    trainer.manifest()
    trainer.expect(Wanted, what=["state"])
    trainer.state(2, run.tensors(), run.state())
    trainer.expect(Joined, iteration=2)
    trainer.record(2, groups=[{}])
    end = time.monotonic() + LONGEST
    for t in itertools.count(2):  # what comes after the record is what the node says of its mirror
        receivers = {qpn for flow in job.flows for qpn in flow.qpns}
        _send(lan, mirrors, [frame for _, frame in run.traffic(t).packets if destination(frame) in receivers])
        if node.said("silent"):
            break
        assert time.monotonic() < end
    why = node.wait("silent")["why"]
    assert f"af_packet:{lan.near} and af_packet:{lan.near2}" in why and "unanchored" in why
    assert "mirror both directions of each port" in why
    assert not any(line["published"] for line in node.said("iteration"))
    assert node.end() == 0


def test_two_engines_make_the_trainers_versions(
    start_node: Any, attach: Any, truth: Any, lan: Any, tmp_path: Path
) -> None:
    """dma_skeleton: threads of DPDK's that copy. Packets are larger than what the CPU copies itself."""
    job = _job(protocol="simple", count=[60_000, 20_000], mtu=4096)
    node = start_node(captures=(
        f'[capture]\ndevice = "af_packet:{lan.near}"\nring_size = 8192\nhuge = false\npath_mtu = 4096\ndump = "dma"\n'
        'engines = ["dma_skeleton", "dma_skeleton"]\n'
    ))
    _follow(node, attach(node, job), truth(job), lan.send, tmp_path)
    (mine,) = [one for one in read_counters() if one.pid == node.process.pid]
    (queue,) = mine.queues
    assert queue["dma_pieces"] > 100 and queue["dma_errors"] == 0
    assert node.end() == 0


def test_one_of_two_interfaces_that_vanishes_ends_the_node_and_is_named(start_node: Any, attach: Any, lan: Any) -> None:
    lan.second()
    node = start_node(captures=_two(lan))
    attach(node, example_job(ranks=2, count=[700, 300]), 0).expect(Wanted)  # its group is there: the captures run
    subprocess.run(["ip", "link", "delete", lan.near2], check=True)
    assert node.process.wait(30) == 3
    error = node.process.stderr.read()
    assert f"af_packet:{lan.near2}: gone" in error and f"{lan.near}:" not in error
