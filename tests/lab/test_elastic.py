"""examples/train.py under torchrun: a rank is killed, torchrun's agent starts all anew, and training ends with the bits
of one that nobody disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lab.network.fabric import Fabric

from ..flowcheck.hand_node import until
from .conftest import lab_of

pytestmark = [pytest.mark.root, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = 600
NODE = """
name = "{name}"
[control]
listen = "10.78.0.2:7070"
token_file = "{folder}/token"
insecure = true
[capture]
device = "af_packet:mir0"
huge = false
[replica]
keep = false
slots = 4
resync = "state"                # the trainer waits for it once: it is quicker than this node
[api]
listen = "10.78.0.2:7071"
insecure = true
"""
RANK = """#!/bin/sh
export FLOWCHECK_SOFTROCE="{{\\"interface\\": \\"fab0\\", \\"address\\": \\"10.77.0.1$LOCAL_RANK\\"}}"
exec ip netns exec flowcheck-{name}-r$LOCAL_RANK {python} -P "$@"
"""


def lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []


def torchrun(lab: Fabric, folder: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    """An agent in the namespace of rank 0; each rank is in its own. Ranks have a store of their own with each start: in
    the agent's, which stays, the lab's backend would find its peers' old addresses."""
    command = [
        sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2",
        "--max-restarts", "2", "--monitor-interval", "0.1", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "10.78.0.10:29600", "--rdzv-conf", "is_host=1", "--local-addr", "10.78.0.10",
        "--no-python", str(folder / "rank.sh"), str(ROOT / "examples" / "train.py"),
        "--backend", "softroce", "--iterations", str(ITERATIONS),
        "--out", str(out), *more,
    ]
    return lab.spawn("r0", command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                     env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def of_rank(rank: int, agent: int) -> int:
    """The process of that rank: the agent's child that says so in its environment."""
    for folder in Path("/proc").iterdir():
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == agent and f"LOCAL_RANK={rank}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
        except (OSError, ValueError, IndexError):
            continue
    raise AssertionError(f"rank {rank} is not there")


def test_torchrun_starts_a_killed_job_anew_and_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    with lab_of(ranks=2, mirrored=((0, 1),)) as lab:
        (tmp_path / "token").write_text("a token that only tests have\n")
        (tmp_path / "node.toml").write_text(NODE.format(name=lab.config.name, folder=tmp_path))
        (tmp_path / "rank.sh").write_text(RANK.format(name=lab.config.name, python=sys.executable))
        (tmp_path / "rank.sh").chmod(0o755)
        alone = torchrun(lab, tmp_path, tmp_path / "alone")
        said = alone.communicate()[0]
        assert alone.returncode == 0, said

        lab.start_mirror()
        node = lab.spawn("node", [sys.executable, "-P", "-m", "flowcheck.node", "--json", "--config",
                                  str(tmp_path / "node.toml")], stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)})
        events: list[dict[str, Any]] = []
        assert node.stdout is not None
        reading = threading.Thread(target=lambda: events.extend(map(json.loads, node.stdout)), daemon=True)
        reading.start()
        until(lambda: any(one["event"] == "listening" for one in list(events)))
        agent = torchrun(lab, tmp_path, tmp_path / "killed", "--control", "10.78.0.2:7070", "--api", "10.78.0.2:7071",
                         "--token-file", str(tmp_path / "token"))
        until(lambda: sum(one["event"] == "iteration" and one["published"] for one in list(events)) > 2
              or agent.poll() is not None)
        assert agent.poll() is None, (agent.communicate()[0], [one["event"] for one in events])
        os.kill(of_rank(1, agent.pid), signal.SIGKILL)
        said = agent.communicate()[0]
        assert agent.returncode == 0, said
        node.terminate()
        node.wait()
        reading.join()

    recovered = [line for line in said.splitlines() if "Recovered(step" in line]
    assert len(recovered) == 2 and all("memory" in line for line in recovered), said
    for rank in (0, 1):
        undisturbed = lines(tmp_path / "alone" / f"rank-{rank}.jsonl")
        told = lines(tmp_path / "killed" / f"rank-{rank}.jsonl")
        losses = {one["iteration"]: one["loss"] for one in undisturbed[:-1]}
        assert len(losses) == ITERATIONS
        assert all(losses[one["iteration"]] == one["loss"] for one in told if "loss" in one)
        repeated = len(told) - 1 - ITERATIONS
        assert {one["iteration"] for one in told if "loss" in one} == set(losses) and 0 <= repeated <= 2, repeated
        assert told[-1] == undisturbed[-1] and "sha256" in told[-1]
