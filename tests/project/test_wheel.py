"""`make wheel`: the trainers' side, installed into an environment that has torch and no more, without a network."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 280


def wheel_command(folder: Path) -> str:
    """The Makefile's own line, with this Python."""
    (line,) = re.findall(r"^wheel:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    line, named = re.subn(r"\$\(or \$\(DIST\),dist\)", str(folder), line.replace("$(BIN)/python", sys.executable))
    assert named and "$" not in line, "the test does not know the Makefile's variables"
    return str(line)


def torch_and_what_it_needs() -> set[Path]:
    """Top-level files and folders of torch's distribution and of those that it requires."""
    found: set[Path] = set()
    names, seen = ["torch"], set()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names.append(requirement.name)
        tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}
        found |= {Path(str(distribution.locate_file(top))) for top in tops}
    return found


@dataclass(frozen=True)
class Environment:
    python: Path
    home: Path
    wheel: Path

    def run(self, code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Without any variable of the caller's."""
        command = [str(self.python), "-P", *(["-c", code] if code else []), *arguments]
        return subprocess.run(
            command, cwd=self.home, capture_output=True, text=True, timeout=SECONDS,
            env={"HOME": str(self.home), "TMPDIR": str(self.home), "PATH": os.environ["PATH"], **variables},
        )

    def says(self, code: str, **variables: str) -> str:
        done = self.run(code, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("wheel")
    before = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout
    made = subprocess.run(wheel_command(folder), shell=True, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert made.returncode == 0, made.stderr[-3000:]
    (wheel,) = folder.glob("*.whl")
    after = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout
    assert before == after, "making a wheel leaves files in the tree"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=SECONDS)
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    for path in torch_and_what_it_needs():
        (site / path.name).symlink_to(path)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", wheel],
        capture_output=True, text=True, timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    home = folder / "home"
    home.mkdir()
    return Environment(python, home, wheel)


def test_what_is_in_it(environment: Environment) -> None:
    """No compiled code, so for every Python and machine; nothing that only nodes use; the sources of libraries."""
    assert environment.wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(environment.wheel) as file:
        names = file.namelist()
        metadata = file.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"flowcheck"}
    assert {name.split("/")[1] for name in names if name.count("/") > 1 and "dist-info" not in name} == {
        "ask", "checkpoint", "control", "job", "trainer",
    }
    assert {name.rpartition("/")[2] for name in names if not name.endswith(".py") and "dist-info" not in name} == {
        "nccl_profiler.c", "nccl_profiler.h", "nccl_interface.h", "sums.c", "sums.h", "sums_body.h",
        "boundary.c", "outbox.h",
    }
    needs = re.findall(r"^Requires-Dist: (.*)", metadata, re.MULTILINE)
    assert [Requirement(one).name for one in needs] == ["torch"] and "Provides-Extra" not in metadata


def test_the_trainers_names_are_there(environment: Environment) -> None:
    names = "attach", "recover", "prepare", "Attachment", "Recovered", "Prepared", "load_job", "Job", "UserError"
    code = f"import flowcheck; print(*(getattr(flowcheck, name).__module__ for name in {names}), flowcheck.__file__)"
    said = environment.says(code).split()
    assert said[0] == "flowcheck.trainer.attachment" and len(said) == len(names) + 1
    assert str(ROOT) not in said[-1]


JOB = """
import sys, warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
import torch, flowcheck
import torch.distributed as dist
print(len(flowcheck.prepare().problems))
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
attachment = flowcheck.attach(model, optimizer, node="127.0.0.1:9", token="a token that only tests have")
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
attachment.step()
print(attachment.state, attachment.why.splitlines()[0])
recovered = flowcheck.recover("127.0.0.1:9", token="a token that only tests have", fresh=True)
print(bool(recovered))
dist.destroy_process_group()
"""


def test_a_job_attaches_and_recovers(environment: Environment, tmp_path: Path) -> None:
    """As far as one process and no node go: everything is imported and called, and says what it found."""
    done = environment.run(JOB, str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr
    problems, state, recovered = done.stdout.splitlines()
    assert problems == "0"
    assert state.startswith("refused") and "backend" in state
    assert recovered == "False"


PATHS = "import flowcheck; print(flowcheck.prepare().set['NCCL_PROFILER_PLUGIN'])"


def test_the_plugin_is_compiled_once(environment: Environment) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    path = Path(environment.says(PATHS).strip())
    made = path.stat().st_mtime_ns
    assert path.parent == environment.home / ".cache" / "flowcheck"
    assert Path(environment.says(PATHS).strip()) == path and path.stat().st_mtime_ns == made
    assert [one.name for one in path.parent.glob("nccl_profiler*")] == [path.name]
    counted = "from flowcheck.trainer.nccl.profiler import Plugin; print(Plugin().counts().written)"
    assert environment.says(counted) == "0\n"


SUMS = """
import warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
import torch
from flowcheck.control.checksum import checksum, checksums, library
print(library() is not None, checksums({"a": torch.arange(9)}) == {"a": checksum(torch.arange(9))})
"""


def test_checksums_with_a_compiler_and_without(environment: Environment, tmp_path: Path) -> None:
    made = str(shutil.which("cc") is not None)
    assert environment.says(SUMS, XDG_CACHE_HOME=str(tmp_path / "one")) == f"{made} True\n"
    assert environment.says(SUMS, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "other")) == "False True\n"


LOOKS = """
import warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
import torch
from flowcheck.trainer.boundary import library
from flowcheck.trainer.looks import looks_at
one = torch.nn.Parameter(torch.ones(2))
held, versions, there = looks_at([one]).gradients([one])
print(library() is not None, held, [*memoryview(versions).cast("q")], there)
"""


def test_boundaries_with_a_compiler_and_without(environment: Environment, tmp_path: Path) -> None:
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    made = str(shutil.which("cc") is not None and headers.exists())
    assert environment.says(LOOKS, XDG_CACHE_HOME=str(tmp_path / "one")) == f"{made} [None] [-1] False\n"
    assert environment.says(LOOKS, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "other")) == (
        "False [None] [-1] False\n")


def test_without_a_compiler(environment: Environment, tmp_path: Path) -> None:
    """prepare() goes on, and says what is missing and what to do."""
    code = "import flowcheck; print(*flowcheck.prepare().problems)"
    said = environment.says(code, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert "there is no C compiler (cc, gcc, clang)" in said and "install gcc" in said


@pytest.mark.parametrize(("name", "absent", "remedy"), [
    ("replay", "flowcheck.offline", "make build"), ("inspect", "flowcheck.offline", "make build"),
    ("Replica", "updater", "make build"), ("fetch", "safetensors", "pip install safetensors"),
    ("load_checkpoint", "safetensors", "pip install safetensors"),
])
def test_what_is_missing_is_said(environment: Environment, name: str, absent: str, remedy: str) -> None:
    said = environment.says(
        f"import flowcheck\ntry:\n    flowcheck.{name}\nexcept flowcheck.EnvironmentProblem as error:\n    print(error)"
    )
    assert said.startswith(f"flowcheck.{name}: ") and absent in said and remedy in said


def test_commands_say_it_too(environment: Environment) -> None:
    done = subprocess.run([environment.python.with_name("flowcheck"), "doctor"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "")
    assert "no flowcheck.cli" in done.stderr and "make build" in done.stderr and "Traceback" not in done.stderr
    assert not environment.python.with_name("flowcheck-node").exists()


@pytest.mark.slow
def test_the_lab_is_a_wheel_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT],
        capture_output=True, text=True, timeout=SECONDS, env={**os.environ, "FLOWCHECK_BUILD": "lab"},
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"lab", "flowcheck_lab"}
    assert sum(name.endswith(".so") for name in names) == 7
