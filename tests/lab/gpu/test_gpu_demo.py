"""`make gpu-demo` as far as it goes without a GPU: everything but libnccl and CUDA.

The demo's own script trains with torch's DDP. In NCCL's place is its host code re-created (ring_backend.py) on the
demo's network plugin; mirrored port, node, attach and comparison are the demo's.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowcheck.errors import EnvironmentProblem
from lab.gpu import demo, device
from lab.gpu.demo import Run, compare_golden, follow
from lab.gpu.pair import Place, cable
from lab.network import netns
from tests.namespaces import need_namespaces

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
Make = Callable[..., Path]


@pytest.fixture
def place() -> Iterator[Place]:
    need_namespaces()
    with cable(f"t{os.getpid():x}") as made:
        yield made
    assert not netns.exists(f"flowcheck-gpu-t{os.getpid():x}")


def trained(run: Run, place: Place, out: Path, library: Path, version: str, compiled: Make,
            monkeypatch: pytest.MonkeyPatch) -> tuple[bool, str]:
    monkeypatch.setenv("RING_LIBRARY", str(compiled("ring.so", "-shared", "-fPIC")))
    command = [sys.executable, "-P", str(HERE / "ring_backend.py")]
    return follow(run, place, out, library, version, command, 150.0, backend="ring", device="cpu", seconds=60.0)


@pytest.mark.parametrize(("run", "version"), [
    (Run(2, "SIMPLE", "adamw-foreach", 10), "2.29.2"),
    pytest.param(Run(2, "LL", "sgd", 10), "2.27.7", marks=pytest.mark.slow),
    pytest.param(Run(3, "LL128", "adamw-fused", 10), "2.30.7", marks=pytest.mark.slow),
    pytest.param(Run(4, "LL", "sgd", 10), "2.28.9", marks=pytest.mark.slow),
])
def test_a_training_is_followed(
    run: Run, version: str, place: Place, library: Path, compiled: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    equal, said = trained(run, place, tmp_path / "run", library, version, compiled, monkeypatch)
    log = (tmp_path / "run" / "rank0.log").read_text()
    assert equal, f"{said}\n{log}"
    assert int(said.split()[0]) >= run.iterations
    for line in map(json.loads, (tmp_path / "run" / "said.jsonl").read_text().splitlines()):
        assert line["published"] == [line["iterations"] - 1, "verified"], line


@pytest.mark.slow
def test_where_no_namespace_is_allowed_copies_go_over_loopback(
    place: Place, library: Path, compiled: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = dataclasses.replace(place, send="lo", capture="lo")  # this machine's own is in use
    equal, said = trained(Run(2, "LL", "sgd", 10), alone, tmp_path / "run", library, "2.27.7", compiled, monkeypatch)
    assert equal, said


def test_the_loopback_is_taken_without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise EnvironmentProblem("this machine allows no network namespaces")

    monkeypatch.setattr(netns, "require", refuse)
    try:
        with cable("none") as made:
            assert (made.prefix, made.send, made.capture) == ((), "lo", "lo") and "no network" in made.why
    except EnvironmentProblem as problem:  # without NET_RAW, as most users are
        assert "CAP_NET_RAW" in problem.remedy


@pytest.mark.slow
def test_the_first_difference_is_named(
    place: Place, library: Path, compiled: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RING_DAMAGE", "40")
    equal, said = trained(Run(2, "LL", "sgd", 60), place, tmp_path / "run", library, "2.27.7", compiled, monkeypatch)
    assert not equal and said.startswith("DIFFERS first in iteration 40: 0.weight; "), said


def test_a_log_is_made_again(
    place: Place, library: Path, compiled: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    equal, said = trained(Run(2, "LL", "muon", 12, log=True), place, tmp_path / "run", library, "2.28.9", compiled,
                          monkeypatch)
    assert equal, f"{said}\n{(tmp_path / 'run' / 'rank0.log').read_text()}"


def test_a_rank_that_fails_is_named(place: Place, library: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('NCCL says no')"]
    equal, said = follow(Run(2, "LL", "sgd", 5), place, tmp_path / "run", library, "2.27.7", command, 60.0)
    assert not equal and "ended with status 1: NCCL says no" in said


# -- is there a GPU ----------------------------------------------------------------------------------------------------


def smi(folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(("script", "said"), [
    ("echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9", "could not communicate"),
    ("echo 'No devices were found'", "No devices"), ("exit 0", "no device"),
    ("echo 'NVIDIA H100, Exclusive_Process'", "compute mode Exclusive_Process"),
])
def test_a_gpu_that_cannot_be_used_is_named(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, script)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(EnvironmentProblem, match=said):
        device.find_gpu()


def test_a_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, "echo 'NVIDIA H100 80GB HBM3, Default'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert device.find_gpu() == "NVIDIA H100 80GB HBM3"


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setenv("FLOWCHECK_GPU_PYTHON", sys.executable)
    with pytest.raises(EnvironmentProblem, match=r"built without CUDA|no GPU through CUDA"):
        device.find_python()


def test_make_gpu_demo_ends_at_once_without_a_gpu() -> None:
    """Nothing is built: the reason, and exit status 3."""
    if shutil.which("nvidia-smi") is not None:
        pytest.skip("this machine has NVIDIA's driver")
    done = subprocess.run([ROOT / "tools/gpu-demo.sh"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3 and "no NVIDIA GPU" in done.stderr and done.stdout == ""
    assert demo.main() == 3


# -- vectors -----------------------------------------------------------------------------------------------------------


def test_vectors_of_another_order_are_told_apart(tmp_path: Path) -> None:
    """A CPU's are not CUDA's: each rounding mode says which case differs first. Fewer cases than a GPU's file has."""
    spec = importlib.util.spec_from_file_location("made", ROOT / "tests/golden/make_cuda.py")
    assert spec is not None and spec.loader is not None
    golden = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(golden)
    options = golden.OPTIONS["adamw"][1]
    cases = [{"optimizer": "adamw", "form": form, "options": options, "dtype": "float32",
              "steps": golden.case("adamw", form, options, "float32", "cpu", 3)} for form in ("foreach", "fused")]
    file = tmp_path / "cuda-2.13.json"
    file.write_text(json.dumps({"torch": "2.13.0", "powers": golden.powers("cpu"), "cases": cases}))
    found = {mode: (count, differ) for mode, count, differ in compare_golden(file)}
    assert set(found) == {"torch-cuda-foreach", "torch-cuda-fused"}
    assert all(count == 1 and differ[0].startswith("adamw") for count, differ in found.values()), found
