"""Is there a GPU that the demo can use, and a torch that can use it? Asked first, and answered in seconds.

    found = find_gpu()                  raises EnvironmentProblem with the reason
    python, versions = find_python()    an interpreter whose torch has CUDA and NCCL
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from flowcheck.errors import EnvironmentProblem

__all__ = ["Versions", "find_gpu", "find_python"]

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0
_PROBE = """import json, safetensors, torch
print(json.dumps({"torch": torch.__version__, "cuda": str(torch.version.cuda), "usable": torch.cuda.is_available(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version()[:3])) if torch.distributed.is_nccl_available() else ""}))"""


@dataclass(frozen=True)
class Versions:
    torch: str
    cuda: str
    nccl: str


def find_gpu() -> str:
    """Its name. Raises EnvironmentProblem: no driver, no device, or one that takes one process at a time."""
    if shutil.which("nvidia-smi") is None:
        raise EnvironmentProblem("this machine has no NVIDIA driver (no nvidia-smi), so no GPU to run NCCL on",
                                 where="gpu-demo", remedy="run it on a machine with an NVIDIA GPU and its driver")
    asked = ["nvidia-smi", "--query-gpu=name,compute_mode", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise EnvironmentProblem(f"nvidia-smi has not answered for {SECONDS:g} s", where="gpu-demo",
                                 remedy="look at the driver: dmesg") from None
    rows = [line for line in done.stdout.splitlines() if "," in line]
    if done.returncode or not rows:
        said = " ".join((done.stderr or done.stdout).split()) or "no device"
        raise EnvironmentProblem(f"nvidia-smi finds no GPU: {said}", where="gpu-demo",
                                 remedy="run it on a machine with an NVIDIA GPU and its driver")
    name, _, mode = rows[0].rpartition(",")
    if mode.strip() not in ("Default", "[N/A]"):
        raise EnvironmentProblem(f"{name} is in compute mode {mode.strip()}, and the ranks share it", where="gpu-demo",
                                 remedy="nvidia-smi --compute-mode=DEFAULT")
    return name


def find_python() -> tuple[str, Versions]:
    """FLOWCHECK_GPU_PYTHON, this one, or the machine's: the first whose torch sees the GPU. Raises EnvironmentProblem
    with what each one lacks."""
    lacks = []
    given = os.environ.get("FLOWCHECK_GPU_PYTHON")
    found = [sys.executable, shutil.which("python3"), shutil.which("python")]
    for python in dict.fromkeys([given] if given else found):
        if python is None:
            continue
        done = subprocess.run([python, "-P", "-c", _PROBE], capture_output=True, text=True, check=False, cwd=ROOT)
        try:
            said = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            lacks.append(f"{python}: {(done.stderr.strip().splitlines() or ['no torch'])[-1]}")
            continue
        if said["usable"] and said["nccl"]:
            return python, Versions(said["torch"], said["cuda"], said["nccl"])
        why = f"no GPU through CUDA {said['cuda']}" if said["cuda"] != "None" else "was built without CUDA"
        lacks.append(f"{python}: torch {said['torch']} {why if not said['usable'] else 'has no NCCL'}")
    raise EnvironmentProblem(
        f"no torch here uses the GPU: {'; '.join(lacks)}", where="gpu-demo",
        remedy="pip install torch safetensors (torch's default wheels have CUDA), or FLOWCHECK_GPU_PYTHON=PATH of a"
               " Python that has both",
    )
