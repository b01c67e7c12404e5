"""`make mutants`: deliberate mistakes in the modules where silence is dangerous, and whether a test notices each.

    python tools/mutants.py                                  every module below, then the compiled sources
    python tools/mutants.py flowcheck/control/protocol.py ...         some of them
    python tools/mutants.py --tenths 3 ...                   three tenths of the mistakes, spread over all functions

mutmut makes the mistakes, one at a time, in a copy of the tree below build/mutants, and runs the unit tests that reach
the function. MODULES says which test files have to notice. Wording is left out: arguments of `raise`, lines of prose,
log lines. So are assertions, which no input can reach. A mistake that no test can notice, because the product does the
same with it, stands in tools/mutants_equivalent.toml with the reason. The exit status is 1 where a module has less than
90 % of the others killed.

docs/understand/testing.md explains the output, and the compiled modules (tools/mutants_compiled.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = ROOT / "build" / "mutants"
EQUIVALENT = ROOT / "tools" / "mutants_equivalent.toml"
COMPILED = ROOT / "tools" / "mutants_compiled.py"
LEAST = 0.9

MODULES: dict[str, list[str]] = tomllib.loads((ROOT / "tools" / "mutants_modules.toml").read_text())["modules"]

# What takes seconds to import is imported once, and not anew for every mistake.
START = """\
import numpy, torch, torch._dynamo
import mutmut.__main__ as tool
tool.cli()
"""

# By line: what a person reads, which tests quote in part only; and assertions, which only a mistake of ours meets.
WORDING = [
    r"^\s*assert\b",
    r"^\s*raise\b",
    r"^\s*(where|remedy|help|description)=",
    r"^\s*f?\"[^\"]*\s[^\"]*\"",
    r"\b(UserError|RecordsError|EnvironmentProblem|UpdaterError)\(",
    r"\b_?log\.",
    r"\.fail\(",
    r"\breturn \(?f?\"[^\"]*\s[^\"]*\"",
    r"\.add_argument\(|typer\.(Option|Argument)\(",
]
CASELESS = re.compile(r'"[A-Z][A-Za-z]+(-[A-Za-z]+)*": |headers\.get\(')  # HTTP's headers are, names and directives
KILLED = {1, 3, -4, -6, -7, -8, -11}  # exit statuses of pytest, and the signals of a process that crashed
UNREACHED = {33, 5}  # of mutmut: no test reaches the function
TIMED_OUT = {24, 36, 152, 255, -24}


@dataclass
class Result:
    """One module. survivors: (mutmut's name, "was -> now") of each mistake that no test noticed."""

    module: str
    killed: int = 0
    timed_out: int = 0
    equivalent: int = 0
    survivors: list[tuple[str, str]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        noticed = self.killed + self.timed_out
        return noticed / (noticed + len(self.survivors)) if noticed else 0.0

    def __str__(self) -> str:
        total = self.killed + self.timed_out + len(self.survivors)
        return (
            f"{self.module:32} {self.rate:6.1%}  killed {self.killed + self.timed_out} of {total}"
            f" ({self.timed_out} by time), equivalent {self.equivalent}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Deliberate mistakes, and whether a test notices each.")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="such as updater/slot.py; all if none")
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="mistakes tried at a time")
    parser.add_argument("--tenths", type=int, choices=range(1, 11), default=10, help="of all mistakes, how many")
    arguments = parser.parse_args()
    unknown = [module for module in arguments.modules if module not in MODULES]
    if unknown:
        parser.error(f"{unknown[0]} is not one of: {', '.join(MODULES)}")
    results = []
    for module in arguments.modules or MODULES:
        results.append(run(module, jobs=arguments.jobs, tenths=arguments.tenths))
        for name, change in results[-1].survivors:
            print(f"  survived {name}\n    {change}")
        print(results[-1], flush=True)
    if len(results) > 1:
        print("\n".join(["", *map(str, results)]), flush=True)
    few = any(result.rate < LEAST for result in results)
    if not arguments.modules:  # the compiled sources, too
        few |= subprocess.run([sys.executable, "-P", str(COMPILED)], check=False).returncode != 0
    return 1 if few else 0


def run(module: str, *, jobs: int, tenths: int = 10) -> Result:
    """Try the mistakes of one module. Raises SystemExit where its tests fail without any."""
    tried = f"*__mutmut_*[{'1470369258'[:tenths]}]"  # by the last digit of their numbers in the function
    scratch = SCRATCH / module.removesuffix(".py").replace("/", ".")
    shutil.rmtree(scratch, ignore_errors=True)
    _copy_tree(scratch, module.split("/")[0])
    missing = [test for test in MODULES[module] if not (scratch / test).exists()]
    if missing:
        raise SystemExit(f"{module}: its tests {', '.join(missing)} are not there")
    _configure(scratch, module)
    environment = os.environ | {"PYTHONPATH": str(scratch / "mutants"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", START, "run", "--max-children", str(jobs), tried]
    log = scratch / "log"
    with log.open("w") as out:
        done = subprocess.run(command, cwd=scratch, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"{module}: mutmut ended with {done.returncode}; its last words, from {log}:\n"
                         + log.read_text()[-4000:])
    return report(scratch, module, tried)


def report(scratch: Path, module: str, tried: str) -> Result:
    """What is known of a module's mistakes after a run."""
    equivalent = {
        (entry["was"], now)
        for entry in tomllib.loads(EQUIVALENT.read_text()).get("equivalent", []) if entry["module"] == module
        for now in (entry["now"] if isinstance(entry["now"], list) else [entry["now"]])
    }
    result = Result(module)
    for name, status in _statuses(scratch, module).items():
        if not fnmatchcase(name, tried):
            continue
        if status is None:
            raise SystemExit(f"{module}: {name} was not tried; see {scratch / 'log'}")
        if status in KILLED:
            result.killed += 1
        elif status in TIMED_OUT:
            result.timed_out += 1
        else:
            was, now = _change(scratch, module, name)
            if (was, now) in equivalent or (was.lower() == now.lower() and CASELESS.search(was)):
                result.equivalent += 1
            else:
                mark = " (no test reaches it)" if status in UNREACHED else ""
                result.survivors.append((name, f"{was}  ->  {now}{mark}"))
    return result


def _statuses(scratch: Path, module: str) -> dict[str, int | None]:
    path = scratch / "mutants" / f"{module}.meta"
    found: dict[str, int | None] = json.loads(path.read_text())["exit_code_by_key"] if path.exists() else {}
    return found


def _change(scratch: Path, module: str, name: str) -> tuple[str, str]:
    """The lines that a mistake changes, joined by spaces: (before, after)."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    with contextlib.chdir(scratch):
        lines = get_diff_for_mutant(name, path=Path(module)).splitlines()
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    was, now = (" ".join(line[1:].strip() for line in changed if line[0] == sign) for sign in "-+")
    return was, now


def _copy_tree(scratch: Path, package: str) -> None:
    """What git knows and what was built, as it is now. Below mutants/ the module's package is mutmut's business."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
        check=True,
    )
    names = [Path(name) for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    built = [path.relative_to(ROOT) for top in _tops() for path in (ROOT / top).rglob("*.so")]
    for name in [*names, *built]:
        for target in (scratch / name, scratch / "mutants" / name):
            if name.parts[0] == package and target.is_relative_to(scratch / "mutants"):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)


def _tops() -> list[str]:
    return sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


def _configure(scratch: Path, module: str) -> None:
    """mutmut reads its settings from the copy's pyproject.toml."""
    settings = {
        "source_paths": [module.split("/")[0]],
        "only_mutate": [module],
        "do_not_mutate_patterns": WORDING,
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-m", "not slow and not root"],
        "pytest_add_cli_args_test_selection": MODULES[module],
        "process_isolation": "forkserver",
        "timeout_multiplier": 10.0,
        "use_git_change_detection": False,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    text = (ROOT / "pyproject.toml").read_text() + "\n[tool.mutmut]\n" + "\n".join(lines) + "\n"
    (scratch / "pyproject.toml").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
