"""Fuzzing with coverage feedback: `make fuzz` for the long run, tests/attacks/test_fuzz_smoke.py for the short one.

    python fuzz/run.py [--runs N] [--seed S] [--target NAME]... [--minutes M] [--fresh]

Builds (fuzz/build.py), then runs every target from its seeds, its past finds and what earlier runs have learnt
(build/fuzz/corpus), N inputs in all, dealt by SHARE. Prints one line per target; the exit status is 1 if anything
was found, and the input is then in build/fuzz/finds. The same seed and --fresh give the same inputs. See
docs/understand/fuzzing.md for the targets and for what to do with a find.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import build as fuzz_build  # noqa: E402
import seeds  # noqa: E402

__all__ = ["LENGTH", "SHARE", "Outcome", "fuzz"]

#: Part of the inputs each target gets, and the longest input.
SHARE = {"decoder": 0.70, "machine": 0.06, "observer": 0.01, "scan": 0.08, "bootstrap": 0.04, "records": 0.11}
LENGTH = {"decoder": 1500, "machine": 400, "observer": 400, "scan": 1200, "bootstrap": 2000, "records": 2000}
LIMITS = ["-timeout=10", "-rss_limit_mb=2048", "-detect_leaks=0", "-use_value_profile=0", "-print_final_stats=1"]


@dataclass(frozen=True)
class Outcome:
    """One target's run. find: the input that broke something, log: what libFuzzer and the sanitizers said."""

    target: str
    runs: int
    seconds: float
    edges: int  # of those in the compiled code, how many were reached
    edges_all: int
    peak_mb: int
    find: Path | None
    log: str

    def line(self) -> str:
        what = f"FOUND {self.find}" if self.find else "nothing found"
        rate = self.runs / self.seconds if self.seconds else 0
        return (
            f"{self.target:9} {self.runs:>9} inputs  {rate:>8.0f}/s  {self.edges:>5} edges of {self.edges_all}  "
            f"peak {self.peak_mb} MB  {what}"
        )


def fuzz(target: str, runs: int, seed: int, *, keep: Path | None, seconds: int = 0) -> Outcome:
    """Run a target. keep: folder of inputs that reached something new, read and written; None: a passing one."""
    finds = fuzz_build.OUT / "finds"
    finds.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        begin, grown = Path(scratch) / "seeds", Path(scratch) / "grown"
        begin.mkdir()
        grown.mkdir()
        for number, data in enumerate(seeds.seeds(target)):
            (begin / f"{number:04}").write_bytes(data)
        for name, data in seeds.corpus(target).items():
            (begin / name).write_bytes(data)
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            grown = keep
        options = [f"-runs={runs}", f"-seed={seed}", f"-max_len={LENGTH[target]}", f"-max_total_time={seconds}"]
        options += [*LIMITS, f"-artifact_prefix={finds}/{target}-"]
        return _run(target, [*options, str(grown), str(begin)])


def _run(target: str, arguments: list[str]) -> Outcome:
    program = "fuzz_decoder" if target == "decoder" else "fuzz_host"
    started = time.monotonic()
    done = subprocess.run(
        [str(fuzz_build.OUT / program), *arguments], env=fuzz_build.environment(target), capture_output=True,
        text=True, errors="replace", check=False,
    )
    seconds = time.monotonic() - started  # with the start of Python, about a second
    log = done.stderr + done.stdout
    written = re.findall(r"Test unit written to (\S+)", log)
    if done.returncode and not written:
        written = ["(no input: see the log)"]
    executed = _last(r"stat::number_of_executed_units: (\d+)", log)
    return Outcome(
        target, executed, seconds, _last(r"cov: (\d+)", log),
        _last(r"PC tables? +\((\d+) PCs\)", log), _last(r"stat::peak_rss_mb:\s+(\d+)", log),
        Path(written[0]) if written else None, log,
    )


def _last(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10_000_000, help="inputs, all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", action="append", choices=list(SHARE))
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs have learnt, keep nothing")
    parser.add_argument("--minutes", type=int, default=0, help="per target at most; 0: no limit")
    options = parser.parse_args()
    try:
        fuzz_build.build()
    except fuzz_build.BuildError as error:
        sys.exit(f"fuzz: {error}")
    targets = options.target or list(SHARE)
    whole = sum(SHARE[target] for target in targets)
    found = False
    for target in targets:
        keep = None if options.fresh else fuzz_build.OUT / "corpus" / target
        runs = int(options.runs * SHARE[target] / whole)
        outcome = fuzz(target, runs, options.seed, keep=keep, seconds=60 * options.minutes)
        print(outcome.line(), flush=True)
        if outcome.find:
            found = True
            print(outcome.log[-6000:])
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
