"""What `make gpu-demo` runs and compares: training on NCCL with its packets mirrored to a node, and optimizers.

    status = demo(name, out)

Each row of RUNS is a training of its own: ranks, protocol and optimizer, a node that follows, and after each iteration
the SHA-256 of every tensor of every rank beside those of the node's version. The first difference is named. Then the
vectors of tests/golden: each rounding mode of CUDA's optimizers against what this GPU computed.

Status 0: all equal. 1: something differs, or was not published, or did not run in the time that there is.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowcheck.errors import EnvironmentProblem
from lab.compare import Ledger
from lab.gpu.device import Versions, find_gpu, find_python
from lab.gpu.pair import Node, Place, cable
from lab.gpu.plugin import build, environment
from lab.gpu.rank import Told

__all__ = ["RUNS", "Run", "compare_golden", "demo", "follow"]

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 440.0  # seconds for everything: eight minutes with what `make` does before
RUN_LIMIT = 100.0
LOG_LINES = 8


@dataclasses.dataclass(frozen=True)
class Run:
    """wire: the optimizer is such that a difference can only be the wire's (rank.py). log: the node keeps a log, of
    which every rank makes its own state again, when training is over."""

    ranks: int
    protocol: str
    optimizer: str
    iterations: int = 20
    log: bool = False

    @property
    def wire(self) -> bool:
        return self.optimizer == "sgd"

    @property
    def name(self) -> str:
        return f"{self.ranks} ranks, {self.protocol}, {self.optimizer}"


RUNS = (
    Run(2, "LL", "sgd"), Run(2, "SIMPLE", "sgd"), Run(2, "LL128", "sgd"), Run(4, "LL", "sgd", 12),
    Run(2, "LL", "adamw-foreach"), Run(2, "LL", "adamw-fused"),
    Run(2, "LL", "adam-fused-decay", log=True), Run(2, "LL", "muon", log=True),
)


def follow(
    run: Run, place: Place, out: Path, library: Path, nccl: str, command: Sequence[str], limit: float,
    **other: Any,
) -> tuple[bool, str]:
    """Train so, with a node beside it. (all equal, what became of it in a sentence.) command: starts a rank, whose Told
    comes as JSON behind it; other: more of that. Raises EnvironmentProblem."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    ledger = Ledger(run.ranks, [""])
    with Node(place, out, run.log) as node:
        failed = _train(run, place, out, library, nccl, command, limit, node, other)
    if run.log:
        return (False, failed) if failed else _redone(out)
    lines = [(node.hashes, ledger.node), *((out / f"rank{rank}.jsonl", ledger.trainer) for rank in range(run.ranks))]
    for path, take in lines:
        for line in path.read_text().splitlines() if path.exists() else ():
            take(json.loads(line))
    for text in node.events.read_text().splitlines():
        event = json.loads(text)
        if event["event"] == "iteration":
            ledger.status(event)
        # Not "begun": what is begun by ranges is whole when ranks have sent theirs, often an iteration later.
        elif event["event"] == "state":
            ledger.state(event)
    ledger.over = True
    found = ledger.summary()
    if failed:
        return False, failed
    if found.differing:
        first = found.differing[0]
        return False, f"DIFFERS first in iteration {first.iteration}: {first.why}; {found.equal} versions are equal"
    if found.unpublished:
        first = found.unpublished[0]
        return False, f"iteration {first.iteration} was not published: {first.why}; {found.equal} versions are equal"
    if not found.equal:
        why = [json.loads(line)["why"] for line in (out / "said.jsonl").read_text().splitlines()]
        return False, f"no version was made: {(why or ['the ranks said nothing'])[0]}"
    return True, f"{found.equal} versions equal, {found.tensors} tensors by SHA-256"


def _redone(out: Path) -> tuple[bool, str]:
    """What ranks say of the steps that they made again."""
    lines = [json.loads(line) for line in (out / "said.jsonl").read_text().splitlines()]
    for line in lines:
        again = line["redone"]
        if again["differs"] or again["step"] < line["iterations"] - 3:
            what = f"DIFFERS first in {again['differs']}" if again["differs"] else "is too old"
            return False, f"rank {line['rank']}: step {again['step']}, made again, {what}; {line['why']}"
    return True, f"step {lines[0]['redone']['step']} made again by each rank, {lines[0]['redone']['status']}, equal"


def _train(
    run: Run, place: Place, out: Path, library: Path, nccl: str, command: Sequence[str], limit: float, node: Node,
    other: dict[str, Any],
) -> str:
    """All ranks to their end; "", or what failed."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{one.getsockname()[1]}"
    ranks: list[subprocess.Popen[bytes]] = []
    with (out / "said.jsonl").open("wb") as said:
        try:
            for rank in range(run.ranks):
                told = Told(rank, run.ranks, run.iterations, run.optimizer, run.protocol, nccl, master, str(out),
                            api=node.api if run.log else "", **other)
                # Rank 0's port is mirrored: both directions of it hold every reduced byte.
                port = f"interface:{place.send}" if rank == 0 else None
                given = environment(library, rank=rank, nccl=nccl, port=port, flows=out / f"flows{rank}.jsonl",
                                    protocol=run.protocol)
                paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
                with (out / f"rank{rank}.log").open("wb") as log:
                    ranks.append(subprocess.Popen(
                        [*place.prefix, *command, json.dumps(dataclasses.asdict(told))], stdout=said, stderr=log,
                        env={**os.environ, **given, "PYTHONPATH": paths, "FLOWCHECK_NODE": node.address,
                             "FLOWCHECK_TOKEN_FILE": str(node.token)}, cwd=out,
                    ))
            return _wait(ranks, out, limit)
        finally:
            for one_rank in ranks:
                if one_rank.poll() is None:
                    one_rank.send_signal(signal.SIGKILL)
                one_rank.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], out: Path, seconds: float) -> str:
    end = time.monotonic() + seconds
    while True:
        statuses = [one.poll() for one in ranks]
        if wrong := [rank for rank, status in enumerate(statuses) if status]:
            return f"rank {wrong[0]} ended with status {statuses[wrong[0]]}: {_last(out / f'rank{wrong[0]}.log')}"
        if None not in statuses:
            return ""
        if time.monotonic() > end:
            return f"the ranks had not ended after {seconds:.0f} s: {_last(out / 'rank0.log')}"
        time.sleep(0.05)


def _last(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
    return " | ".join(line.strip() for line in lines if line.strip()) or "it said nothing"


def compare_golden(file: Path) -> list[tuple[str, int, list[str]]]:
    """For each rounding mode of CUDA: its name, cases compared, what differs first in each that does."""
    spec = importlib.util.spec_from_file_location("flowcheck_golden_compare", ROOT / "tests/golden/compare.py")
    assert spec is not None and spec.loader is not None
    golden = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(golden)
    found: list[tuple[str, int, list[str]]] = golden.compare_file(file)
    return found


def _golden(python: str, out: Path, seconds: float) -> bool:
    """The vectors of this GPU, and whether they are ours. They stay in `out` for tests/golden."""
    words = [python, "-P", str(ROOT / "tests/golden/make_cuda.py"), "--out", str(out)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=max(1.0, seconds), check=False)
    except subprocess.TimeoutExpired:
        print(f"  not done: no vectors after {seconds:.0f} s")
        return False
    if done.returncode:
        print(f"  not done: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        return False
    path, good = Path(done.stdout.strip()), True
    for mode, cases, differ in compare_golden(path):
        what = f"{len(differ)} DIFFER, first {differ[0]}" if differ else "all equal"
        print(f"  {mode:20} {cases} cases, {what}")
        good = good and not differ
    print(f"  vectors: {path}; put them into tests/golden to have them compared by every test")
    return good


def demo(name: str, out: Path) -> int:
    """Raises EnvironmentProblem: no GPU, no torch for it, no compiler, no interface."""
    end = time.monotonic() + LIMIT
    gpu = find_gpu()
    python, versions = find_python()
    _say(gpu, python, versions)
    out.mkdir(parents=True, exist_ok=True)
    library = build(out)
    command, good = [python, "-P", "-m", "lab.gpu.rank"], True
    with cable(name) as place:
        if place.why:
            print(f"no namespace ({place.why}): copies go over the loopback interface")
        print("\ntraining on NCCL; every version of the node beside every rank's own state")
        for number, run in enumerate(RUNS):
            left = min(RUN_LIMIT, end - time.monotonic())
            if left < 20:
                print(f"  {run.name:28} not run: the time is over", flush=True)
                good = False
                continue
            equal, said = follow(run, place, out / f"run{number}", library, versions.nccl, command, left)
            # An optimizer's kernel on a GPU is another question than the wire, and has its own vectors below.
            print(f"  {run.name:28} {said}{'' if equal or run.wire else ' (wire or rounding mode)'}", flush=True)
            good = good and equal
    print("\nCUDA's optimizers: each rounding mode beside what this GPU computed", flush=True)
    good = _golden(python, out, end - time.monotonic()) and good
    print(f"\n{'EQUAL: all of it' if good else 'NOT EQUAL, or not done: see above'}. Files: {os.path.relpath(out)}")
    return 0 if good else 1


def _say(gpu: str, python: str, versions: Versions) -> None:
    print(f"{gpu}; torch {versions.torch}, CUDA {versions.cuda}, NCCL {versions.nccl} ({python})", flush=True)
    if tuple(map(int, versions.nccl.split(".")[:2])) < (2, 26):
        raise EnvironmentProblem(
            f"NCCL {versions.nccl} does not know network plugins of interface 10", where="gpu-demo",
            remedy="a torch with NCCL 2.26 or later (2.7 and later)",
        )


def main() -> int:
    try:
        return demo("demo", ROOT / "out/gpu")
    except EnvironmentProblem as problem:
        print(f"NO GPU DEMO: {problem.message()}", file=sys.stderr)
        return problem.exit_code
