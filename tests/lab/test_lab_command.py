"""`flowcheck lab`: what it builds, shows and removes; an interrupted run leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flowcheck.cli import app
from flowcheck.errors import UserError
from lab.network import netns
from lab.shape import SHARED, STATE

pytestmark = pytest.mark.root
FLOWCHECK = [sys.executable, "-P", "-m", "flowcheck", "lab"]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FLOWCHECK, *words], capture_output=True, text=True, check=False)


def left(name: str) -> list[str]:
    spaces = [space for space in netns.names() if space.startswith(f"flowcheck-{name}-")]
    return spaces + [str(parent / name) for parent in (STATE, SHARED) if (parent / name).exists()]


def test_up_run_status_down(lab_name: str, tmp_path: Path) -> None:
    words = ("--name", lab_name, "--ranks", "2", "--mirror", "0", "--switch", "ovs")
    done = command("up", *words)
    assert done.returncode == 0 and f"flowcheck-{lab_name}-node" in done.stdout, done.stderr
    said = command("status").stdout
    assert f"{lab_name}: 4 namespaces (leaf, node, r0, r1), belongs to `lab up`" in said and "copies" in said
    # A run uses what is up, whatever it trains, and leaves it there.
    training = ("--model", "mlp", "--iterations", "2", "--mtu", "1024", "--api", "--out", str(tmp_path / "out"))
    done = command("run", *words, *training)
    assert done.returncode == 0 and "EQUAL" in done.stdout, done.stdout + done.stderr
    assert 'listen = "10.78.0.2:7071"' in next((tmp_path / "out").glob("node0-*/node.toml")).read_text()
    done = command("run", *words, *training, "--mirror", "0,1")
    assert done.returncode == 2 and "another shape: mirrored is ((0,),), not ((0, 1),)" in done.stderr
    again = command("up", *words)
    assert again.returncode == 3 and "exists already" in again.stderr
    done = command("down", "--name", lab_name)
    assert done.returncode == 0 and "removed" in done.stdout and left(lab_name) == []
    assert "nothing was there" in command("down", "--name", lab_name).stdout


def test_status_says_what_is_missing_and_what_is_copied(lab_name: str) -> None:
    try:
        assert command("up", "--name", lab_name, "--ranks", "2", "--mirror", "0,1").returncode == 0
        leaf = f"flowcheck-{lab_name}-leaf"

        def remove(port: str, way: str) -> None:
            subprocess.run(["ip", "netns", "exec", leaf, "tc", "filter", "del", "dev", port, way], check=True)

        remove("p0", "ingress")
        said = command("status").stdout
        assert "node 0: copies p0 egress, p1 both, and is not whole: 1 of 4 filters are missing: p0 ingress" in said
        for port, way in (("p0", "egress"), ("p1", "ingress"), ("p1", "egress")):
            remove(port, way)
        assert "  mirror of node 0: copies nothing: no session" in command("status").stdout
    finally:
        command("down", "--name", lab_name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(lab_name: str, tmp_path: Path, number: signal.Signals) -> None:
    run = subprocess.Popen(
        [*FLOWCHECK, "run", "--name", lab_name, "--ranks", "2", "--mirror", "0", "--model", "mlp", "--iterations",
         "100000", "--out", str(tmp_path / "out")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    try:
        hashes = tmp_path / "out" / "rank0.jsonl"
        while not (hashes.exists() and hashes.stat().st_size):  # it trains
            assert run.poll() is None, run.stdout.read() if run.stdout else ""
            time.sleep(0.05)
        inside = [pid for space in left(lab_name)[:4] for pid in netns.processes(space)]
        assert len(inside) >= 3
        run.send_signal(number)
        said, _ = run.communicate()
    finally:
        run.kill()
    assert run.returncode == 130 and "Traceback" not in said, said
    assert left(lab_name) == [] and not [pid for pid in inside if Path(f"/proc/{pid}").exists()]


def test_a_network_that_is_not_finished_is_removed(lab_name: str, ip_that: Callable[[str, str], str]) -> None:
    """SIGTERM while `up` builds: it comes with the second namespace."""
    done = subprocess.run(
        [*FLOWCHECK, "up", "--name", lab_name, "--ranks", "2", "--mirror", "0"], capture_output=True, text=True,
        check=False, env={**os.environ, "PATH": ip_that("netns add *-r0", "kill -TERM $PPID")},
    )
    assert done.returncode == 130 and "Traceback" not in done.stderr and left(lab_name) == [], done.stderr


def test_wrong_requests(lab_name: str, tmp_path: Path) -> None:
    other = tmp_path / "not a lab's"
    other.mkdir()
    for words, what in (
        (("run", "--name", "No Name"), "is not the name of a lab"),
        (("down", "--name", str(other)), "is not the name of a lab"),
        (("run", "--mirror", "zero"), "is not a list of ranks"),
        (("run", "--ranks", "3", "--stages", "2"), "do not make 2 groups"),
        (("run", "--name", lab_name, "--model", "bert"), "none of gpt, conv, mlp"),
        (("run", "--name", lab_name, "--ranks", "2", "--mirror", "0,7"), "rank 7 is none; there are 0 to 1"),
        (("run", "--name", lab_name, "--stages", "2", "--mirror", "0,1"), "no rank of stage1 is mirrored"),
        (("run", "--name", lab_name, "--mtu", "9000"), "9000 is none of 1024, 2048, 4096"),
        (("run", "--name", lab_name, "--lr", "nan"), "optimizer: nan is not a finite number"),
        (("run", "--name", lab_name, "--clip", "inf"), "clip: inf is not a finite number"),
        (("run", "--name", lab_name, "--loss-scale", "0"), "loss_scale: 0.0 is not a finite number"),
        (("run", "--name", lab_name, "--seed", "-1"), "seed: -1 is not between"),
        (("run", "--name", lab_name, "--mirror-loss", "2"), "2.0 is not a probability"),
    ):
        with pytest.raises(UserError) as caught:  # in this process: a start takes a second
            app(["lab", *words], standalone_mode=False)
        assert caught.value.exit_code == 2 and what in caught.value.message()
    assert left(lab_name) == [] and other.is_dir()
