"""What pages list is what the code has: a node's events with their fields, its counters, and the examples of a page."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
import typer

import flowcheck
from flowcheck.checkpoint.directory import Meta, write_step
from flowcheck.checkpoint.fetch import FORMATS
from flowcheck.cli import app
from flowcheck.errors import UserError
from flowcheck.node.config.load import load
from flowcheck.node.config.node import NodeConfig
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

from ..updater.conftest import shm

__all__ = ["shm"]

ROOT = Path(__file__).resolve().parents[2]
EVENTS = (ROOT / "docs/reference/events.md").read_text()


def section(page: str, heading: str) -> str:
    """What stands under a heading, with the headings below it."""
    level, _, title = heading.partition(" ")
    begins = re.search(rf"^{re.escape(heading)}$", page, re.MULTILINE)
    assert begins, f"no heading {title}"
    rest = page[begins.end() :]
    ends = re.search(rf"^#{{1,{len(level)}}} ", rest, re.MULTILINE)
    return rest[: ends.start()] if ends else rest


def rows(text: str) -> dict[str, str]:
    """The names in the first column of tables, with the rest of their rows."""
    found = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            first, rest = line[1:].split("|", 1)
            found |= dict.fromkeys(re.findall(r"`(\w+)`", first), rest)
    return found


LINES = ast.parse((ROOT / "flowcheck/node/status/event_fields.py").read_text())


def fields_of(made: ast.expr) -> set[str]:
    """Of a dict that is written out, or that a function of flowcheck/node/status/event_fields.py returns."""
    if isinstance(made, ast.Call):
        name = getattr(made.func, "id", "")
        maker = next(one for one in LINES.body if isinstance(one, ast.FunctionDef) and one.name == name)
        returned = maker.body[-1]
        assert isinstance(returned, ast.Return) and returned.value is not None
        made = returned.value
    assert isinstance(made, ast.Dict)
    return {str(key.value) for key in made.keys if isinstance(key, ast.Constant)}


def lines() -> dict[str, set[str]]:
    """Event -> fields, of those that flowcheck/node/status/event_fields.py makes of a session's events."""
    made = [one.value for one in ast.walk(LINES) if isinstance(one, ast.Return) and isinstance(one.value, ast.Tuple)]
    return {str(name.value): fields_of(fields) for name, fields in (one.elts for one in made)}  # type: ignore[attr-defined]


def said() -> dict[str, set[str]]:
    """Event -> fields, of every call in flowcheck/node/ that says one, and of those that a session has."""
    found = lines()
    assert {"times", "behind"} <= found.keys()
    for path in sorted((ROOT / "flowcheck/node").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not call.args or not isinstance(call.args[0], ast.Constant):
                continue
            if getattr(call.func, "attr", getattr(call.func, "id", "")) in ("say", "_say", "_say_all"):
                fields = {keyword.arg for keyword in call.keywords if keyword.arg not in (None, "name")}
                found.setdefault(str(call.args[0].value), set()).update(map(str, fields))
                for keyword in call.keywords:
                    if keyword.arg is None and isinstance(keyword.value, ast.Call):
                        found[str(call.args[0].value)] |= fields_of(keyword.value)
    return found


def test_every_event_stands_in_the_page_with_its_fields() -> None:
    events = said()
    assert {"iteration", "lost", "listening"} <= events.keys()
    tables = section(EVENTS, "## Events").split("### iteration")[0]
    listed = rows(tables)
    assert listed.keys() == events.keys()
    for event, fields in events.items():
        if event not in ("iteration", "times"):
            assert {name for name in fields if f"`{name}`" not in listed[event]} == set(), event
    for event in ("iteration", "times"):
        assert rows(section(EVENTS, f"### {event}")).keys() == events[event]


def test_every_counter_stands_in_the_page() -> None:
    header = (ROOT / "dataplane/include/rx_counters.h").read_text()
    counters = re.findall(r"^ +uint64_t (\w+);", header, re.MULTILINE)
    assert len(counters) > 10
    assert list(rows(section(EVENTS, "## Counters"))) == counters


# -- benchmarks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_benchmarks_of_decisions_import_what_there_is(path: Path) -> None:
    """They are run by hand, so nothing else would notice a renamed module."""
    used = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    missing = [
        f"{node.module}.{alias.name}" for node in used for alias in node.names
        if not hasattr(importlib.import_module(str(node.module)), alias.name)
        and importlib.util.find_spec(f"{node.module}.{alias.name}") is None
    ]
    assert used and missing == []


# -- taking a version back -----------------------------------------------------------------------------------


def test_each_decision_has_a_number_of_its_own_and_stands_in_the_index() -> None:
    pages = sorted((ROOT / "docs/decisions").glob("*.md"))
    numbers = [page.name[:4] for page in pages]
    assert numbers == [f"{i:04}" for i in range(1, len(pages) + 1)]
    index = (ROOT / "docs/README.md").read_text()
    for page in pages:
        assert page.read_text().startswith(f"# {page.name[:4]}: ")
        assert f"| [{page.name[:4]}](decisions/{page.name}) |" in index


def model_of(tensor: torch.Tensor) -> torch.nn.Module:
    layer = torch.nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
    return torch.nn.Sequential(layer)


def test_a_version_is_taken_back_as_the_page_says(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained on after that, it is what training without an interruption gives."""
    page = (ROOT / "docs/use/recover.md").read_text()
    blocks = {
        heading: re.findall(r"```python\n(.*?)```", section(page, heading), re.DOTALL)
        for heading in ("## From a checkpoint directory", "## From the replica")
    }
    torch.manual_seed(1)
    model = model_of(torch.empty(2, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    gradients = [torch.randn(2, 3) for _ in range(4)]

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> torch.Tensor:
        for number in numbers:
            model[0].weight.grad = gradients[number].clone()
            optimizer.step()
        return model[0].weight.detach().clone()

    train(model, optimizer, range(2))
    spec = OptimizerSpec.check("adamw", [(["0.weight"], {"lr": 0.5})])
    state = {"0.weight": dict(optimizer.state[model[0].weight])}
    version = {"0.weight": model[0].weight.detach()}
    Replica(
        version, spec, path=shm / "flowcheck-node--1.replica", run_id="my-run", step=2, optimizer_state=state
    ).close()
    meta = {"name": "adamw", "groups": [{"params": ["0.weight"], "options": {"lr": 0.5}}]}
    directory = tmp_path / "out/my-run/epoch-0"
    write_step(directory, 2, version, state, Meta("my-run", optimizer=meta))
    whole = train(model, optimizer, range(2, 4))
    monkeypatch.chdir(tmp_path)
    assert [len(found) for found in blocks.values()] == [1, 2]
    for found in blocks.values():
        fresh = model_of(whole)
        names = {"flowcheck": flowcheck, "torch": torch, "model": fresh}
        names["optimizer"] = torch.optim.AdamW(fresh.parameters())
        for block in found:
            exec(block.replace('"/dev/shm"', repr(str(shm))), names)
        assert not fresh[0].weight.equal(whole)
        assert train(fresh, names["optimizer"], range(2, 4)).equal(whole)


def test_the_node_that_serves_a_store_needs_each_table_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """"[store] and nothing else" was refused."""
    page = (ROOT / "docs/use/recover.md").read_text()
    (toml,) = re.findall(r"```toml\n(.*?)```", section(page, "## In the training script"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text("a token that only tests have\n")

    def starts(text: str) -> bool:
        (tmp_path / "node.toml").write_text(text)
        try:
            config = load("node.toml")
        except UserError:
            return False
        return config.api is not None and config.store is not None

    tables = re.findall(r"\[\w+\]\n[^\[]*", toml)
    assert len(tables) == 5 and starts(toml)
    assert not any(starts(toml.replace(table, "")) for table in tables)


TIERS = (ROOT / "docs/use/tiers.md").read_text()
TIER_ROWS = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in TIERS.splitlines()
             if line.startswith("| [")]


@pytest.mark.parametrize("row", TIER_ROWS, ids=lambda row: row[0])
def test_each_row_of_the_tiers_has_settings_that_a_node_takes_and_that_switch_on_what_it_says(
    tmp_path: Path, row: list[str],
) -> None:
    number = row[0][1:].split("]")[0]
    (heading,) = re.findall(rf"^## {number}\. .*$", TIERS, re.MULTILINE)
    files = re.findall(r"```toml\n(.*?)```", section(TIERS, heading), re.DOTALL)
    said, given = list[str](), set[str]()
    for text in files:
        (tmp_path / "node.toml").write_text(text)
        config = load(tmp_path / "node.toml", said.append)
        tables = config.model_dump(exclude_unset=True)
        given |= {name for name, value in tables.items() if value}
        given |= {f"{name}.{key}" for name, keys in tables.items() if isinstance(keys, dict)
                  for key, value in keys.items() if value}
    switches = set(re.findall(r"`([\w.]+)`", row[-1]))
    assert files and said == [] and switches and switches <= given


def test_the_page_of_settings_has_every_key_of_a_node_and_no_other() -> None:
    named, has = set[str](), set[str]()
    for line in section((ROOT / "docs/use/settings.md").read_text(), "## Keys").splitlines():
        table = ""
        for name in re.findall(r"`([a-z_.]+)`", line[1:].split("|")[0]) if line.startswith("| `") else ():
            table = name.rpartition(".")[0] or table
            named.add(f"{table}.{name.rpartition('.')[2]}".strip("."))
    for name, field in NodeConfig.model_fields.items():
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if hasattr(kind, "model_fields")]
        has |= {f"{name}.{key}" for kind in kinds for key in kind.model_fields} or {name}
    assert named - {"capture", "follow"} == has - {"replica.resync"}  # which the next release does not read


# -- commands, and the service --------------------------------------------------------------------------------------


def test_the_page_of_commands_has_all_of_them_and_what_fetch_writes() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text()
    found = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    commands = {name for name, command in found.items() if not command.hidden}
    table = section(page, "# Commands").split("## ")[0]
    assert {name for name in commands if f"`{name}`" not in table and f"`flowcheck {name}`" not in table} == set()
    assert len(commands) > 10
    (fetch,) = [line for line in table.splitlines() if line.startswith("| `flowcheck fetch`")]
    words = {"safetensors": "safetensors", "torch": "torch.save", "dcp": "DCP", "hf": "from_pretrained"}
    assert set(FORMATS) == words.keys() and all(word in fetch for word in words.values())


def test_operating_installs_the_unit_where_the_unit_looks() -> None:
    page = section((ROOT / "docs/use/operating.md").read_text(), "## As a service")
    unit = (ROOT / "deploy/flowcheck-node.service").read_text()
    given = dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))
    program, _, settings = given["ExecStart"].split()[:3]
    (block,) = re.findall(r"```\n(.*?)```", page, re.DOTALL)
    assert f"`{program.partition('/.venv')[0]}`" in page and settings in page and str(Path(settings).parent) in block
    assert given["WorkingDirectory"] in block and f"nologin {given['User']}" in block
    assert all((ROOT / path).exists() for path in re.findall(r"\bdeploy/\S+", block)) and "deploy/" in block


# -- architecture --------------------------------------------------------------------------------------------

SOURCE = re.compile(r"`([\w./]+\.(?:py|pyx|pxi|pxd|c|h)|[\w.]+(?:/[\w.]+)*/)(?::(\w+))?`")


def defined(name: str, text: str) -> bool:
    """Does a Python, Cython or C source define this function or class?"""
    return bool(re.search(
        rf"^[ \t]*(?:(?:class|def|cp?def) (?:[\w *]+[ *])?|(?:static |inline |const )*\w+ \*?){name}\b *[(:]", text,
        re.MULTILINE,
    ))


def dead_ends(page: str) -> list[str]:
    """What a page names as `path` or `path:name` and is not there. Paths of rooms may begin below flowcheck/."""
    lost = []
    for path, name in SOURCE.findall(page):
        found = [base / path for base in (ROOT, ROOT / "flowcheck") if (base / path).exists()]
        if not found or (name and not defined(name, found[0].read_text())):
            lost.append(f"{path}:{name}" if name else path)
    return lost


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_path_from_a_package_on_is_there_on_every_page(page: Path) -> None:
    begins = ("dataplane/", "parser/", "updater/", "flowcheck/", "switch_configs/")
    assert [name for name in dead_ends(page.read_text()) if name.startswith(begins)] == []


#: Modules of others, and scripts that users have.
FOREIGN = ("torch/", "megatron/", "pretrain_gpt.py", "script.py")


def strays(source: Path) -> list[str]:
    """Modules that a source names in words and that are nowhere in its package, by the end of their path."""
    package = ROOT / source.relative_to(ROOT).parts[0]
    named = set(re.findall(r"(?<![\w/.\-*])(?:\w+/)*[a-z]\w*\.py\b(?![(\w])", source.read_text()))
    return sorted(
        name for name in named
        if not name.startswith(FOREIGN) and not (ROOT / name).is_file() and not any(package.rglob(name))
    )


def test_a_module_that_a_module_names_is_there() -> None:
    """Nothing else would notice, in a comment, that a module has another name by now."""
    sources = [path for room in ("node", "rebuild", "trainer") for path in (ROOT / "flowcheck" / room).rglob("*.py")]
    assert len(sources) > 150
    assert {str(source.relative_to(ROOT)): lost for source in sources if (lost := strays(source))} == {}


def test_what_architecture_names_is_there() -> None:
    page = (ROOT / "docs/understand/architecture.md").read_text()
    assert dead_ends(page) == []
    decisions = section(page, "## Where decisions are taken")
    tables = [line for line in decisions.splitlines() if line.startswith("| ") and not line.startswith("| what ")]
    assert len(tables) > 30 and all(SOURCE.search(line.rsplit("|", 2)[1]) for line in tables)


def test_a_name_that_is_not_there_is_found() -> None:
    named = "`job/`, `errors.py`, `parser/src/witness.c:fc_check_headers`, `updater/store.py:Store`, `parser/lane.pyx`"
    assert dead_ends(named) == []
    wrong = ("parser/nothing.py", "rooms/", "parser/machine.pyx:judge", "updater/store.py:Sto", "updater/store.py:json")
    assert dead_ends(", ".join(f"`{name}`" for name in wrong)) == list(wrong)
    assert not defined("judge", "judge(evidence)\n    x = judge(evidence)\n") and defined("judge", "def judge(x):")
