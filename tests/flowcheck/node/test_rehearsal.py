"""`flowcheck rehearse` as an operator runs it: a process on two mirror ports of a veth pair each, while synth's traffic
goes by. What is unplugged is named."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowcheck.job.model import Job
from lab.synth import example_job, generate

from .conftest import LONGEST, Lan

pytestmark = pytest.mark.root
ROOT = Path(__file__).resolve().parents[3]
PACE = 0.05  # seconds between two iterations: a job has one


def ring_of_four() -> Job:
    job = example_job(ranks=4, count=[1200, 600], seed=3)
    job.run_id = "rehearsed"
    return job


class Traffic(threading.Thread):
    """A job that trains until it is stopped. ports: (rank, directions, socket) of each mirrored port."""

    def __init__(self, job: Job, ports: list[tuple[int, str, socket.socket]], **faults: Any) -> None:
        super().__init__()
        self._job, self._ports, self._faults = job, ports, faults
        self._over = threading.Event()

    def run(self) -> None:
        for iteration in itertools.count(2):
            for rank, directions, to in self._ports:
                made = generate(self._job, iterations=1, first_iteration=iteration, ports=[rank], directions=directions,
                                seed=1, **self._faults)
                for _, frame in made.ports[rank]:
                    to.send(frame)
            if self._over.wait(PACE):
                return

    def __enter__(self) -> Traffic:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


@pytest.fixture
def settings(lan: Lan, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """settings(*devices) -> node.toml of a node with these captures."""

    def made(*devices: str) -> Path:
        captures = "".join(
            f'[[capture]]\ndevice = "af_packet:{one}"\nring_size = 4096\nhuge = false\n' for one in devices)
        (tmp_path / "node.toml").write_text(
            f'name = "n"\n[control]\nlisten = "127.0.0.1:0"\ntoken_file = "none"\n[replica]\ndirectory = "{tmp_path}"\n'
            + captures)
        return tmp_path / "node.toml"

    yield made


def rehearse(*words: str | Path, during: Callable[[], Any] | None = None) -> tuple[int, str, str]:
    """Exit status, standard output, standard error. during: a context that begins when the captures are open."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "flowcheck", "rehearse", *map(str, words)], text=True, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "COLUMNS": "140"},
    )
    try:
        assert process.stderr is not None
        first = ""
        while "looking at" not in first and (line := process.stderr.readline()):  # DPDK has a word to say, too
            first += line
        if during is not None and "looking at" in first:
            with during():
                out, more = process.communicate(timeout=LONGEST)
        else:
            out, more = process.communicate(timeout=LONGEST)
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in first + more, first + more
    return process.returncode, out, first + more


def test_a_mirror_that_is_whole_and_the_job_on_it(lan: Lan, settings: Callable[..., Path], tmp_path: Path) -> None:
    """Both halves; each key is documented; nothing is left behind and nothing was written."""
    job = ring_of_four()
    (tmp_path / "job.json").write_text(job.to_json())
    config, second = settings(lan.near, lan.near2), lan.second()
    before = sorted(path.name for path in tmp_path.iterdir())
    code, out, _ = rehearse(
        "--config", config, "--job", tmp_path / "job.json", "--seconds", "5", "--json",
        during=lambda: Traffic(job, [(0, "both", lan.socket), (2, "both", second)]),
    )
    found = json.loads(out)
    bad = [one for one in found["checks"] if not one["good"]]
    # How soon an iteration is placed is this machine's matter: others may have it meanwhile.
    assert [one for one in bad if not one["name"].endswith(": time")] == [] and code == int(bool(bad))
    (group,) = found["groups"]
    assert group["iterations"] > 2 and group["complete"] == group["iterations"] and not group["missing"]
    assert len(group["connections"]["both"]) == 4 and group["addresses"]["unseen"] == []
    assert group["period_ms"] > group["left_ms"]["least"]
    assert [[host["address"] for host in one["hosts"]] for one in found["ports"]] == [
        [host_of(job, 0)], [host_of(job, 2)]]
    for one in found["ports"]:
        assert one["packets"] > 0 and one["ring"]["bears_ms"] > 0 and one["one_sided"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    text = (ROOT / "docs/use/rehearse.md").read_text()
    for key in (*found, *found["ports"][0], *found["ports"][0]["ring"], *found["seen"][0], *group, *group["left_ms"],
                *found["checks"][0], *found["ports"][0]["hosts"][0], *found["ports"][0]["dropped"]):
        assert f"`{key}`" in text, f"{key} is not documented"


def host_of(job: Job, rank: int) -> str:
    return next(flow.src_addr for flow in job.flows if flow.src == rank)


def test_the_half_that_is_unplugged_is_named(lan: Lan, settings: Callable[..., Path], tmp_path: Path) -> None:
    """One port brings what its host sends and nothing that is sent to it; a third port brings nothing at all."""
    job = ring_of_four()
    (tmp_path / "job.json").write_text(job.to_json())
    second = lan.second()
    code, out, _ = rehearse(
        "--config", settings(lan.near, lan.near2, "lo"), "--job", tmp_path / "job.json", "--seconds", "3",
        during=lambda: Traffic(job, [(1, "in", lan.socket), (2, "out", second)], loss=0.1),
    )
    assert code == 1
    lines = out.splitlines()
    assert any(f"BAD port af_packet:{lan.near}: " in one and f"nothing that is sent by {host_of(job, 1)} comes" in one
               for one in lines), out
    assert any(f"BAD port af_packet:{lan.near2}: " in one and f"nothing that is sent to {host_of(job, 2)} comes" in one
               for one in lines), out
    assert "BAD port af_packet:lo: no packet" in lines
    assert "2 without what comes back, 1 without their data, 1 not at all" in re.sub(r"\s+", " ", out)
    assert any(one.startswith("BAD no gaps: ") for one in lines), out
    change = lines[lines.index("To change, in this order:") + 1]
    assert change.startswith(f"1. af_packet:{lan.near}: nothing that is sent by {host_of(job, 1)} comes: ")


def test_hostile_traffic_is_counted_and_ends_nothing(lan: Lan, settings: Callable[..., Path], tmp_path: Path) -> None:
    """Frames of synth with bytes changed anywhere, cut, and of noise; the job's own among them."""
    job, draw = ring_of_four(), random.Random(5)
    (tmp_path / "job.json").write_text(job.to_json())
    frames = [frame for _, frame in generate(job, iterations=1, first_iteration=2, ports=[0], seed=1).ports[0]]

    class Hostile(Traffic):
        def run(self) -> None:
            while not self._over.wait(PACE):
                for frame in frames:
                    made = bytearray(frame if draw.random() < 0.8 else draw.randbytes(200))
                    for _ in range(draw.randrange(6)):
                        made[draw.randrange(12, len(made))] = draw.randrange(256)
                    lan.socket.send(bytes(made[: draw.randrange(20, len(made) + 1)]))

    code, out, error = rehearse("--config", settings(lan.near), "--job", tmp_path / "job.json", "--seconds", "2",
                                "--json", during=lambda: Hostile(job, []))
    assert code == 1, error
    found = json.loads(out)
    assert found["packets"]["total"] > 100 and found["packets"]["truncated"] > 0
    assert not next(one for one in found["checks"] if one["name"] == "whole frames")["good"]
    assert found["groups"][0]["complete"] == 0


def owned(folder: Path, *devices: str) -> Path:
    """node.toml of a node with devices that the kernel does not have."""
    captures = "".join(f'[[capture]]\ndevice = "{one}"\nring_size = 4096\nhuge = false\n' for one in devices)
    (folder / "node.toml").write_text(
        f'name = "n"\n[control]\nlisten = "127.0.0.1:0"\ntoken_file = "none"\n[replica]\ndirectory = "{folder}"\n'
        + captures)
    return folder / "node.toml"


def test_ports_that_dpdk_has_for_itself(lan: Lan, tmp_path: Path) -> None:
    """In place of a NIC bound to DPDK, virtual devices that take the same way: no interface of the kernel, no speed
    that it could say. One brings nothing, the other packets that are no RoCE, as fast as they are taken."""
    code, out, error = rehearse("--config", owned(tmp_path, "ring", "null"), "--seconds", "1", "--json")
    assert code == 1, error
    found = json.loads(out)
    silent, loud = found["ports"]
    assert (silent["device"], silent["received"]) == ("ring", 0) and loud["device"] == "null" and loud["received"] > 0
    assert silent["ring"]["link_mbps"] is None and loud["most_packets_per_second"] > 0
    assert {one["name"]: one["found"] for one in found["checks"]}["port ring"] == "no packet"
    assert not next(one for one in found["checks"] if one["name"] == "port null")["good"]


def test_a_pci_address_without_a_nic_is_named(lan: Lan, tmp_path: Path) -> None:
    code, out, error = rehearse("--config", owned(tmp_path, "0000:ff:1f.7"), "--seconds", "1")
    assert (code, out) == (3, "") and "0000:ff:1f.7" in error


@pytest.mark.parametrize(("words", "status", "said"), [
    (["--config", "absent.toml"], 2, "absent.toml"),
    (["--config", "node.toml", "--job", "node.toml"], 2, "node.toml"),
    (["--config", "node.toml", "--job", "bare.json"], 2, "names no connections"),
])
def test_what_cannot_be_used_is_refused(lan: Lan, settings: Callable[..., Path], tmp_path: Path, words: list[str],
                                        status: int, said: str) -> None:
    settings(lan.near)
    bare = ring_of_four()
    bare.flows = []
    (tmp_path / "bare.json").write_text(bare.to_json())
    code, out, error = rehearse(*(str(tmp_path / one) if "." in one else one for one in words))
    assert (code, out) == (status, "") and said in re.sub(r"\s+", " ", error)
