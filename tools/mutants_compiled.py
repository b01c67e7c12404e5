"""Deliberate mistakes in the compiled sources, one at a time: does a test notice? (docs/understand/testing.md)

    tools/mutants_compiled.py [--list] [NAME or FILE ...]

The mistakes are in mutants_compiled.toml. The tool copies the tree to build/mutants/compiled, where it compiles both
forms of every place, the right one and the mistake, into the same extensions. FLOWCHECK_MUTANT says which mistake is
made; an extension reads it when it is loaded, and 0 is none. So there is one build, and the sources stay clean.

Every mistake's tests must pass without it and fail with it. Exit status 1: a mistake survived that is not listed as
equivalent, or one that is listed was noticed after all. Exit status 2: the table does not fit the sources.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
# Packages whose extensions are compiled anew.
BUILT = ("parser", "updater", "flowcheck/checkpoint/coding", "dataplane", "flowcheck/trainer")
LIBRARIES = ("flowcheck.trainer.boundary", "flowcheck.trainer.nccl_profiler")  # setup.py: they have no .pyx
AT_ONCE = 2
T = TypeVar("T")

HEADER = """\
extern char *getenv(const char *name);
extern int atoi(const char *text);
static int flowcheck_mutant __attribute__((unused));
__attribute__((constructor(101))) static void flowcheck_mutant_choose(void)
{
    const char *number = getenv("FLOWCHECK_MUTANT");
    flowcheck_mutant = number ? atoi(number) : 0;
}
"""
CYTHON = "\n\ncdef extern from *:\n    int flowcheck_mutant\n"

# Examples that fail are not shrunk and not remembered: one is enough, and two runs share the folder.
PLUGIN = """\
import hypothesis

def pytest_configure(config):
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", deadline=None, database=None, derandomize=True, phases=phases)
    hypothesis.settings.load_profile("mutants")
"""

# What takes long to import and has nothing compiled of ours is imported once; every run is a fork of that process.
SERVER = """\
import os, sys
import numpy, pytest, torch

for line in sys.stdin:
    number, said, *arguments = line.rstrip("\\n").split("\\t")
    if child := os.fork():
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.setsid()
    os.environ["FLOWCHECK_MUTANT"] = number
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(out, 1), os.dup2(out, 2)
    status = 99
    try:
        status = int(pytest.main(arguments))
    finally:
        sys.stdout.flush(), sys.stderr.flush(), os._exit(status)
"""


class TableError(Exception):
    """An entry of the table does not fit the sources."""


@dataclass(frozen=True)
class Mutant:
    """One mistake. old: text of the file with the part to replace between « and », or all of it without them."""

    number: int
    name: str
    path: str
    old: str
    new: str
    about: str
    tests: tuple[str, ...]
    equivalent: str = ""
    needs: str = ""  # a flag of /proc/cpuinfo


@dataclass(frozen=True)
class Result:
    mutant: Mutant
    fate: str  # killed, timeout or survived
    seconds: float
    by: str  # the first test that failed


def load(table: Path = TABLE) -> list[Mutant]:
    """The mistakes of a table, numbered from 1."""
    found: list[Mutant] = []
    for source in tomllib.loads(table.read_text(encoding="utf-8"))["source"]:
        shared = {"path": source["file"], "tests": source["tests"], "needs": source.get("needs", "")}
        for entry in source["mutant"]:
            fields = {**shared, **entry}
            found.append(Mutant(number=len(found) + 1, **{**fields, "tests": tuple(fields["tests"])}))
    names = [mutant.name for mutant in found]
    for name in names:
        if names.count(name) > 1:
            raise TableError(f"{name}: two entries have this name")
    return found


def span(text: str, mutant: Mutant) -> tuple[int, int]:
    """Where in the file's text the part lies that the mistake replaces."""
    before, mark, rest = mutant.old.partition("«")
    part, end, after = rest.partition("»")
    if bool(mark) != bool(end):
        raise TableError(f"{mutant.name}: « and » belong together")
    if not mark:
        before, part, after = "", before, ""
    old = before + part + after
    if (count := text.count(old)) != 1:
        raise TableError(f"{mutant.name}: {mutant.path} has this text {count} times, not once: {old!r}")
    start = text.index(old) + len(before)
    return start, start + len(part)


def choice(text: str, start: int, end: int, cython: bool, now: str, mutant: Mutant) -> str:
    """Text that makes the mistake if it is chosen, and otherwise does what `now` says."""
    test, line_start = f"flowcheck_mutant == {mutant.number}", text.rfind("\n", 0, start) + 1
    if not cython:
        if text[start:end].endswith(";") or text[start:end].endswith("}"):
            return f"{{ if ({test}) {{ {mutant.new} }} else {{ {now} }} }}"
        if not mutant.new.strip() or text[start:end].lstrip().startswith(("&&", "||")):
            raise TableError(f"{mutant.name}: not a statement, so both forms have to be whole expressions")
        return f"({test} ? ({mutant.new}) : ({now}))"
    indent, rest = text[line_start:start], text[end:].partition("\n")[0].strip()
    if indent.strip() or (rest and not rest.startswith("#")):
        if mutant.new not in ("True", "False") and not mutant.new.startswith("<bint>"):
            return f"(({mutant.new}) if {test} else ({now}))"
        wrong, right = (f"(1 if ({condition}) else 0)" for condition in (mutant.new.removeprefix("<bint>"), now))
        return f"<bint>({wrong} if {test} else {right})"  # Cython would make an object of two types of truth
    wrong = "".join(f"{indent}    {line}\n" for line in (mutant.new or "pass").splitlines())
    return f"if {test}:\n{wrong}{indent}else:\n{indent}    " + now.replace("\n", "\n    ")


def rewrite(text: str, mutants: Iterable[Mutant], cython: bool) -> str:
    """The file's text with all of its mistakes in it, to be chosen from. A place may lie inside another's."""
    places = sorted(((*span(text, m), m) for m in mutants), key=lambda place: (place[0], -place[1]))

    def between(start: int, end: int, inside: list[tuple[int, int, Mutant]]) -> str:
        out, last = [], start
        while inside:
            first, stop, mutant = inside.pop(0)
            within = []
            while inside and inside[0][0] < stop:
                if inside[0][1] > stop:
                    raise TableError(f"{inside[0][2].name}: its place overlaps that of {mutant.name}")
                within.append(inside.pop(0))
            out += [text[last:first], choice(text, first, stop, cython, between(first, stop, within), mutant)]
            last = stop
        return "".join([*out, text[last:end]])

    return between(0, len(text), places)


def sources(mutants: Sequence[Mutant], root: Path = ROOT) -> dict[str, str]:
    """path -> new text, of every file that the mistakes change."""
    by_path: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_path.setdefault(mutant.path, []).append(mutant)
    out = {}
    for path, here in by_path.items():
        out[path] = rewrite((root / path).read_text(encoding="utf-8"), here, path.endswith((".pyx", ".pxi", ".pxd")))
    for path in [p for p in out if p.endswith((".pyx", ".pxi"))]:
        for unit in (root / path).parent.glob("*.pyx"):
            name, text = str(unit.relative_to(root)), unit.read_text(encoding="utf-8")
            if name == path or f'include "{Path(path).name}"' in text:
                changed = out.get(name, text)
                out[name] = changed if changed.endswith(CYTHON) else changed + CYTHON
    return out


def put(path: Path, data: bytes) -> None:
    """Write, unless it is there already: a file's time says what has to be compiled."""
    if not path.exists() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def copy_tree(tree: Path, changed: dict[str, str]) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout
    ready = [p for p in ROOT.glob("flowcheck/**/*.so") if str(p.parent.relative_to(ROOT)) not in BUILT]
    for name in [*filter(None, listed.split("\0")), *(str(p.relative_to(ROOT)) for p in ready)]:
        if name in changed:
            put(tree / name, changed[name].encode())
        elif (ROOT / name).is_file():
            put(tree / name, (ROOT / name).read_bytes())
    put(tree / "mutant.h", HEADER.encode())
    put(tree / "mutant_examples.py", PLUGIN.encode())
    captures, beside = ROOT.parent / "shared", tree.parent / "shared"
    if captures.is_dir() and not beside.exists():
        beside.symlink_to(captures)


def build(tree: Path) -> None:
    units = [(p, unit.stem) for p in BUILT for unit in sorted((ROOT / p).glob("*.pyx"))]
    wanted = [*(f"{p.replace('/', '.')}.{stem}" for p, stem in units), *LIBRARIES, "dataplane"]
    environment = {**os.environ, "FLOWCHECK_BUILD": ",".join(wanted), "CFLAGS": f"-include {tree}/mutant.h -w"}
    command = ["nice", sys.executable, "setup.py", "-q", "build_ext", "--inplace", "-j", "2"]
    subprocess.run(command, cwd=tree, env=environment, check=True)


class Runner:
    """A process that forks one run of pytest after another. Several threads may use several of them."""

    def __init__(self, tree: Path, name: str) -> None:
        self._said = tree / f"said-{os.getpid()}-{name}.txt"
        self._process = subprocess.Popen(
            ["nice", sys.executable, "-P", "-c", SERVER], cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )

    def run(self, number: int, tests: Sequence[str], limit: float | None) -> tuple[int | None, str]:
        """Exit status of pytest (None: it took longer than `limit` seconds) and what it said."""
        assert self._process.stdin is not None and self._process.stdout is not None
        options = ("-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "mutant_examples")
        print(number, self._said, *options, *tests, sep="\t", file=self._process.stdin, flush=True)
        child, late = int(self._process.stdout.readline()), False

        def end() -> None:
            nonlocal late
            late = True
            os.killpg(child, signal.SIGKILL)

        timer = threading.Timer(limit or threading.TIMEOUT_MAX, end)
        timer.start()
        status = int(self._process.stdout.readline())
        timer.cancel()
        return None if late else status, self._said.read_text(errors="replace")

    def close(self) -> None:
        self._process.communicate()
        self._said.unlink(missing_ok=True)


def without(runner: Runner, tests: tuple[str, ...]) -> float:
    """Seconds that tests take where no mistake is chosen. They must pass."""
    began = time.monotonic()
    status, said = runner.run(0, tests, None)
    if status != 0:
        raise TableError(f"without a mistake, {' '.join(tests)} must pass:\n{said[-3000:]}")
    return time.monotonic() - began


def attempt(runner: Runner, mutant: Mutant, usual: float) -> Result:
    began = time.monotonic()
    status, said = runner.run(mutant.number, mutant.tests, 60 + 5 * usual)
    fate = "timeout" if status is None else "survived" if status == 0 else "killed"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    by = failed[1] if failed else "" if status == 0 else f"exit status {status}"
    result = Result(mutant, fate, time.monotonic() - began, by)
    print(f"{fate:9}{result.seconds:5.0f} s  {mutant.name}  {by}", flush=True)
    return result


def run_all(tree: Path, wanted: Sequence[Mutant]) -> list[Result]:
    began = time.monotonic()
    runners: queue.SimpleQueue[Runner] = queue.SimpleQueue()
    for name in range(AT_ONCE):
        runners.put(Runner(tree, str(name)))

    def lent(call: Callable[[Runner], T]) -> T:
        runner = runners.get()
        try:
            return call(runner)
        finally:
            runners.put(runner)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        selections = list(dict.fromkeys(m.tests for m in wanted))
        seconds = pool.map(lambda tests: lent(lambda runner: without(runner, tests)), selections)
        usual = dict(zip(selections, seconds, strict=True))
        print(f"without a mistake all tests pass ({time.monotonic() - began:.0f} s)", flush=True)
        results = list(pool.map(lambda m: lent(lambda runner: attempt(runner, m, usual[m.tests])), wanted))
    for _ in range(AT_ONCE):
        runners.get().close()
    return results


def report(results: Sequence[Result]) -> int:
    """Print the kill rate of every file and what is wrong; the exit status."""
    wrong = 0
    print()
    for path in dict.fromkeys(r.mutant.path for r in results):
        here = [r for r in results if r.mutant.path == path and not r.mutant.equivalent]
        killed = sum(r.fate != "survived" for r in here)
        equal = sum(bool(r.mutant.equivalent) for r in results if r.mutant.path == path)
        rate = f"{100 * killed // len(here):3} %" if here else "  -  "
        print(f"{path:36} {killed:3} of {len(here):3}  {rate}" + (f"  {equal} equivalent" if equal else ""))
    for r in results:
        if r.fate == "survived" and not r.mutant.equivalent:
            wrong = 1
            print(f"survived: {r.mutant.name} ({r.mutant.path}): {r.mutant.about}")
        elif r.fate != "survived" and r.mutant.equivalent:
            wrong = 1
            print(f"not equivalent: {r.mutant.name} ({r.mutant.path}) was noticed by {r.by}")
    return wrong


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--list", action="store_true", help="print the mistakes and do nothing")
    arguments.add_argument("which", nargs="*", metavar="NAME or FILE", help="only these (all are compiled)")
    chosen = arguments.parse_args()
    mutants = load()
    wanted = [m for m in mutants if not chosen.which or {m.name, m.path} & set(chosen.which)]
    if unknown := set(chosen.which) - {m.name for m in mutants} - {m.path for m in mutants}:
        raise TableError(f"neither a mistake nor a file with one: {', '.join(sorted(unknown))}")
    if chosen.list:
        for m in wanted:
            print(f"{m.path}: {m.name}: {m.about}")
        return 0
    flags = set(Path("/proc/cpuinfo").read_text().split())
    for m in wanted:
        if m.needs and m.needs not in flags:
            print(f"not run: {m.name}: this processor has no {m.needs}")
    wanted = [m for m in wanted if not m.needs or m.needs in flags]
    tree = ROOT / "build" / "mutants" / "compiled"
    copy_tree(tree, sources(mutants))
    build(tree)
    return report(run_all(tree, wanted))


if __name__ == "__main__":
    if shutil.which("git") is None:
        sys.exit("mutants: git lists the files to copy, and is not here")
    try:
        sys.exit(main())
    except TableError as exc:
        print(f"mutants: {exc}", file=sys.stderr)
        sys.exit(2)
