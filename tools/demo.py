"""`make demo`: a live training job is followed by a checkpoint node; or a small capture becomes a checkpoint.

With --lab, as root: `flowcheck lab run` (docs/use/lab.md). Four ranks train over RoCEv2 in network namespaces, three of
their switch ports are mirrored to a node, and the replica of every iteration is compared with the trainers' own state.
Then one of them is killed, the job goes on from the node, and is compared with a run that nobody disturbed.
Where that cannot be done the demo says why and shows the following instead, whose last line claims no more than it is:

The capture goes through `flowcheck replay` as any other would. Then the job is trained again from the seed
in the truth file, with plain torch.optim and without packets, parser, arena or updater; every tensor of the
two models is compared bit for bit.

    python tools/demo.py pcaps/ring2-ll...   each stands for .pcap or .pcapng, .job.json and .truth.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file

from flowcheck.errors import EnvironmentProblem
from flowcheck.job.manifest import load_job
from flowcheck.job.model import Job
from lab.network import netns
from lab.synth import Synthesis, generate

ROOT = Path(__file__).resolve().parent.parent
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def replay(name: Path, out: Path) -> None:
    """Run the command a user would run; its exit status is ours if it is not content."""
    shutil.rmtree(out, ignore_errors=True)
    capture = next(path for path in (name.with_suffix(".pcap"), name.with_suffix(".pcapng")) if path.exists())
    command: list[str | Path] = [
        Path(sys.executable).with_name("flowcheck"), "replay", capture,
        "--job", name.with_suffix(".job.json"), "--out", out,
    ]
    words = [os.path.relpath(word, ROOT) if isinstance(word, Path) else word for word in command]
    print("$", " ".join(words), flush=True)
    status = subprocess.run(words, cwd=ROOT).returncode
    if status:
        sys.exit(status)


def train(job: Job, made: Synthesis, iterations: int) -> dict[str, torch.Tensor]:
    """The job without a network: the model after `iterations` steps of torch's optimizer."""
    assert job.optimizer is not None
    model = {
        entry.name: torch.from_numpy(made.parameters[entry.name].copy()).reshape(entry.shape)
        for entry in job.model
    }
    groups: list[dict[str, Any]] = [
        {"params": [model[name] for name in group.params], **group.options} for group in job.optimizer.groups
    ]
    optimizer = OPTIMIZERS[job.optimizer.name](groups)
    for iteration in range(iterations):
        for bucket, layout in enumerate(job.bucket_layout(iteration)):
            reduced = torch.from_numpy(made.reduced[iteration, bucket]) / job.gradients.divisor
            for piece in layout.slices:
                tensor = model[piece.name]
                if tensor.grad is None:
                    tensor.grad = torch.zeros_like(tensor)
                part = reduced[piece.offset:piece.offset + piece.length]
                tensor.grad.view(-1)[piece.start:piece.start + piece.length] = part
        optimizer.step()
    return model


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def prove(name: Path, out: Path) -> bool:
    """Replay one capture and compare its checkpoint with training; prints the outcome."""
    replay(name, out)

    job = load_job(name.with_suffix(".job.json"))
    truth = json.loads(name.with_suffix(".truth.json").read_text())
    iterations = len(truth["iterations"])
    made = generate(job, iterations=iterations, seed=truth["seed"], ports=[])
    wanted = train(job, made, iterations)
    step = out / f"step-{iterations:06d}"
    found = load_file(step / "model.safetensors")

    differ = [key for key in wanted.keys() | found.keys() if key not in found or key not in wanted
              or not same_bits(wanted[key], found[key])]
    if differ:
        print(f"WRONG: {', '.join(sorted(differ))} of {os.path.relpath(step, ROOT)}: not what training gives")
        return False
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in wanted.values())).hexdigest()
    elements = sum(tensor.numel() for tensor in wanted.values())
    print(
        f"PROVEN: {os.path.relpath(step, ROOT)}: the {elements} parameters after {iterations} iterations of"
        f" {job.communicator.ranks} ranks, rebuilt from\nmirrored packets alone, are bit for bit those of the"
        f" same training with torch.optim and no network at all.\nSHA-256 of both: {digest}"
    )
    return True


def lab_impossible() -> str:
    """Why no lab can be built here, in one sentence, or ""."""
    try:
        netns.require()
    except EnvironmentProblem as problem:
        return problem.what
    return ""


def train_live(name: str, out: Path) -> NoReturn:
    """The command a user would run takes the place of this process: who interrupts the demo interrupts the lab, which
    takes down what it has built. Its last lines are the proof, its exit status says whether all was equal."""
    command: list[str | Path] = [
        Path(sys.executable).with_name("flowcheck"), "lab", "run", "--name", name, "--ranks", "4",
        "--mirror", "0,1,2", "--iterations", "30", "--step-time", "8", "--kill", "2", "--out", out,
    ]
    words = [os.path.relpath(word, ROOT) if isinstance(word, Path) else word for word in command]
    print("$", " ".join(words), flush=True)
    os.chdir(ROOT)
    os.execv(words[0], words)


def main() -> int:
    parser = argparse.ArgumentParser(description="Replay captures of made-up jobs and prove the checkpoints.")
    parser.add_argument("names", nargs="+", type=Path)
    parser.add_argument("--lab", action="store_true", help="a live training job, if this machine allows it")
    parser.add_argument("--name", default="demo", help="of the lab; two with different names do not meet")
    parser.add_argument("--out", type=Path, default=ROOT / "out")
    options = parser.parse_args()
    if options.lab:
        why = lab_impossible()
        if not why:
            train_live(options.name, options.out / "lab")
        print(f"NO LIVE TRAINING: {why}.\nRun `sudo make demo` for it. Captures are replayed instead:", flush=True)
    return 0 if all(prove(ROOT / name, options.out / name.name) for name in options.names) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
