"""What is shipped: pinned, importable where it has to be, small, and free of this or that machine."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flowcheck.errors import OURS, installing

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The extras `make` installs.
INSTALLED = ("node", "switch", "lab", "plan", "dev")


def tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    # safe.directory: the checkout may belong to another user than the one who tests.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    return [ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]


def asked_for() -> list[Requirement]:
    """What `make test` installs by name."""
    extras = [requirement for extra in INSTALLED for requirement in PROJECT["optional-dependencies"][extra]]
    return [one for one in map(Requirement, [*PROJECT["dependencies"], *extras]) if one.name != "flowcheck"]


def pins() -> dict[str, str]:
    text = (ROOT / "constraints.txt").read_text()
    lines = [line for line in text.splitlines() if line[:1] not in ("", "#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "one exact version per line"
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


# -- requirements ----------------------------------------------------------------------------------------


def test_everything_asked_for_is_pinned_and_fits() -> None:
    pinned = pins()
    for requirement in asked_for():
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{name} is not in constraints.txt"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} and {name}=={pinned[name]}"


def test_no_test_is_skipped_where_make_has_installed_all() -> None:
    """What a test asks for with importorskip is in the extras, or it would never run."""
    installed = {canonicalize_name(one.name) for one in asked_for()} | {"paramiko", "cryptography"}  # netmiko's
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    wanted = {name for path in files for name in re.findall(r'importorskip\(\s*"(\w+)', path.read_text())}
    ours = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert len(wanted - ours) > 8
    distributions = packages_distributions()
    for name in sorted(wanted - ours):
        assert installed.intersection(map(canonicalize_name, distributions.get(name, []))), f"{name} is in no extra"


def test_version_is_said_once() -> None:
    import flowcheck

    assert flowcheck.__version__ == PROJECT["version"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_what_pages_and_remedies_install_can_be_installed() -> None:
    """FlowCheck is on no index: only its sources and its wheel can be named, and packages that some part asks for."""
    asked = (one for extra in PROJECT["optional-dependencies"].values() for one in extra)
    known = {canonicalize_name(Requirement(one).name) for one in asked} - {"flowcheck"} | {"torch", "megatron-core"}
    lost = []
    for path in tracked():
        if path.suffix in (".py", ".md") and path.name != "CHANGELOG.md" and "tests" not in path.parts:
            for named in re.findall(r"pip install ((?:-[\w-]+ )*[^\s`;,)]+)", path.read_text()):
                name = named.split()[-1].strip("\"'")
                local = "/" in name or name.startswith(("PATH", "flowcheck-", "-", ".", "constraints"))
                if not local and "{" not in name and canonicalize_name(name) not in known:
                    lost.append(f"{path.relative_to(ROOT)}: {name}")
    assert lost == []


def test_a_module_that_is_missing_is_installed_by_its_packages_name() -> None:
    """`pip install yaml` finds nothing: the package of the module `yaml` is called pyyaml."""
    extras = (PROJECT["optional-dependencies"][extra] for extra in ("node", "store", "registry", "switch", "plan"))
    asked = {canonicalize_name(Requirement(one).name) for extra in extras for one in extra}
    sources = [path for path in tracked() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in OURS]
    imported = {name for path in sources
                for name in re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.MULTILINE)}
    tried = 0
    for module, packages in packages_distributions().items():
        if module in imported and (names := {canonicalize_name(one) for one in packages} & asked):
            assert installing(ImportError(name=f"{module}.inner")).removeprefix("pip install ") in names
            tried += 1
    assert tried > 10


def test_trainers_get_torch_and_nothing_else() -> None:
    assert [Requirement(r).name for r in PROJECT["dependencies"]] == ["torch"]


# -- imports ---------------------------------------------------------------------------------------------

TRAINER = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("flowcheck", "torch"):
            raise ImportError(f"a training environment has no {name}")

sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[1])
from flowcheck.errors import UserError
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import Job
from flowcheck.job.manifest import json_schema
try:
    job_from_dict({})
except UserError as error:
    assert "communicator" in str(error)
json_schema()
assert "torch" not in sys.modules, "the manifest does not need torch"
"""


def test_manifest_needs_the_standard_library_only(tmp_path: Path) -> None:
    # -S -P: neither site-packages nor the current directory; the script adds the tree itself.
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "error", str(script), str(ROOT)], capture_output=True, text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_a_stray_parser_cannot_shadow_ours(tmp_path: Path) -> None:
    (tmp_path / "parser.py").write_text("raise SystemExit('the wrong parser')\n")
    code = "import parser, dataplane, updater, flowcheck, switch_configs; print(parser.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip() == str(ROOT / "parser" / "__init__.py"), done.stderr


# -- the tree --------------------------------------------------------------------------------------------


PICTURES = {f"docs/use/status-{name}.webp" for name in ("desk", "phone")}  # `make screenshots`


def test_no_large_or_binary_file_in_git() -> None:
    for path in tracked():
        name = path.relative_to(ROOT)
        content = path.read_bytes()
        assert len(content) <= 512 * 1024, f"{name}: {len(content)} bytes; larger data is generated, not kept"
        if name.parts[0] != "pcaps" and str(name) not in PICTURES:
            assert b"\0" not in content, f"{name}: binary files live in pcaps/, with their recipe"


def test_every_capture_has_its_recipe() -> None:
    captures = [path for path in tracked() if path.suffix in (".pcap", ".pcapng")]
    recipes = "".join(path.read_text() for path in (ROOT / "pcaps").glob("*.md"))
    for path in captures:
        assert path.parent.name == "pcaps", f"{path.relative_to(ROOT)}: captures live in pcaps/"
        assert path.name in recipes, f"pcaps/{path.name}: no .md file there says which command made it"


def test_no_machine_of_ours_is_named() -> None:
    # Absolute paths of build machines and addresses of package indexes; split, so that this file passes.
    forbidden = re.compile(
        "|".join(["/wo" + "rk/", "/home/" + r"\w", "pypi" + r"\.", "index-" + "url", "file" + ":///"])
    )
    for path in tracked():
        if path.suffix in (".pcap", ".pcapng", ".webp"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert not forbidden.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_the_gate_runs_make_test_and_nothing_cleverer() -> None:
    gate = ROOT / ".ci" / "run"
    assert os.access(gate, os.X_OK)
    commands = [line for line in gate.read_text().splitlines() if line and not line.startswith("#")]
    assert commands[-1] == "exec make test" and len(commands) <= 3
    assert len((ROOT / "Makefile").read_text().splitlines()) <= 70
