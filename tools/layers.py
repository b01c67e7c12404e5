"""Check that every layer imports only layers to its left; `make lint` and tests/project run it.

    dataplane . parser  <  updater  <  flowcheck  <  lab        (switch_configs stands alone, used by flowcheck)

Read are `import`, `from`, `cimport`, `include` and `cdef extern from` in .py, .pyx, .pxd and .pxi, `#include`
in .h and .c and in C text inside strings (cffi set_source, Cython verbatim blocks), import_module("name").
Import checkers for Python alone are blind to all but the first two.

Beyond the layers: parser sees of dataplane only plain C headers (SHARED_FILES). A room of flowcheck/
imports the rooms that ROOMS lists, and what a training environment imports needs torch and the standard library and
nothing else. synth and the lab's softroce never reach parser, not even through another module, because each has to be
able to prove the other wrong. The lab is a package of its own that may be absent: of flowcheck/ the command alone
names it, and counts as a room further up.

    python tools/layers.py [ROOT]        exit status 1 and one line per violation
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("dataplane", "parser", "updater", "flowcheck", "switch_configs", "lab")
LEFT_OF = {
    "dataplane": set(),
    "parser": set(),
    "updater": {"dataplane", "parser"},
    "flowcheck": {"dataplane", "parser", "updater", "switch_configs"},
    "switch_configs": set(),
    "lab": {"dataplane", "parser", "updater", "flowcheck", "switch_configs"},
}
# Files of a neighbour that a layer may use although it may not import the neighbour.
SHARED_FILES = {("parser", f"dataplane/include/{name}.h") for name in ("lock", "packetref", "tag", "tunnel")} | {
    ("updater", "flowcheck/control/include/sums.h"),  # of what trainers sum up, who have no updater
}

CYTHON = {"cython", "Cython", "cpython", "libc", "libcpp", "posix"}
# None: anything. flowcheck's own rules are by room, below.
THIRD_PARTY: dict[str, set[str] | None] = {
    "dataplane": {"cffi", "numpy", *CYTHON},
    "parser": {"numpy", *CYTHON},
    "updater": {"numpy", "torch", *CYTHON},
    "flowcheck": None,
    "switch_configs": {"jinja2", "netmiko", "pydantic", "yaml"},
    "lab": None,
}
# Rooms of flowcheck/, folders and single modules, and the rooms that each may import: what stands further down.
BASE = {"errors", "durable", "interrupts", "tables"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "interrupts": set(),
    "tables": set(),
    "durable": {"errors"},
    "job": {"errors"},
    "control": {"errors", "job"},
    "ask": {"errors", "job", "control"},
    "trainer": {"errors", "job", "control", "ask"},
    "checkpoint": {*BASE, "job", "control", "ask"},
    "journal": {"errors", "durable"},
    "rebuild": {*BASE, "job", "checkpoint"},
    "diagnose": {*BASE, "job", "rebuild"},
    "switch": {*BASE, "diagnose"},
    "plan": {*BASE, "checkpoint"},
    "learning": {*BASE, "job", "rebuild", "diagnose"},
    "offline": {*BASE, "job", "rebuild", "checkpoint", "diagnose", "learning"},
    "node": {*BASE, "job", "journal", "rebuild", "checkpoint", "diagnose", "control", "ask"},
    "lab": {*BASE, "job", "journal", "rebuild", "checkpoint", "diagnose", "learning", "offline", "node", "control",
            "ask", "trainer"},
    "cli": {*BASE, "diagnose", "learning", "offline", "switch", "plan", "node", "lab"},
}
# What somebody's training job imports: these need torch and the standard library and nothing else.
TRAINER_ROOMS = {"errors", "job", "control", "ask", "trainer"}
TRAINER_THIRD_PARTY = {"torch"}
# How flowcheck is started: no rooms. flowcheck.run is started in a training job.
STARTED = ("__main__", "run")
# Names the public names for type checkers; at run time each is loaded when it is asked for.
PUBLIC_NAMES = Path("flowcheck/__init__.py")
# Written from the reference alone, so that they and the parser can prove each other wrong.
INDEPENDENT = ("lab.synth", "lab.softroce", "lab.gpu")

SUFFIXES = {".py", ".pyx", ".pxd", ".pxi", ".h", ".c"}
C_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)
TRIPLE = re.compile(r"(\"\"\"|''')(.*?)\1", re.DOTALL)
STRING_OR_COMMENT = re.compile(r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|#[^\n]*""")
STATEMENT = r"(?:^|[:;])[ \t]*"
CY_FROM = re.compile(STATEMENT + r"from[ \t]+([.\w]+)[ \t]+c?import[ \t]+([^;\n]+)", re.MULTILINE)
CY_IMPORT = re.compile(STATEMENT + r"c?import[ \t]+([\w., \t]+)", re.MULTILINE)
CY_INCLUDE = re.compile(STATEMENT + r"include[ \t]+[\"']([^\"'\n]+)[\"']", re.MULTILINE)
CY_EXTERN = re.compile(r"\bextern[ \t]+from[ \t]+[\"']<?([^\"'>\n]+)>?[\"']")


@dataclass(frozen=True)
class Reference:
    """`source` (path from the root) line `line` uses `target`: a dotted module, or a path if `is_file`."""

    source: str
    line: int
    target: str
    is_file: bool


# -- what a file refers to -------------------------------------------------------------------------------


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _absolute(module: str, level: int, source: Path) -> str:
    """Dotted name of a relative import, seen from `source` (path relative to the root)."""
    if level == 0:
        return module
    package = source.parent.parts
    base = package[: len(package) - (level - 1)]
    return ".".join([*base, module] if module else base)


def _for_type_checkers(tree: ast.Module) -> set[ast.AST]:
    """What stands under `if TYPE_CHECKING:`."""
    blocks = [n for n in tree.body if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING"]
    return {node for block in blocks for statement in block.body for node in ast.walk(statement)}


def _python(text: str, source: Path) -> Iterator[tuple[int, str, bool]]:
    tree = ast.parse(text, filename=str(source))
    skipped = _for_type_checkers(tree) if source == PUBLIC_NAMES else set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, False
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node.module or "", node.level, source)
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}", False
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value, False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for match in C_INCLUDE.finditer(node.value):
                yield node.lineno + _line(node.value, match.start()) - 1, match[1], True


def _cython(text: str, source: Path) -> Iterator[tuple[int, str, bool]]:
    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    for block in TRIPLE.finditer(text):
        for match in C_INCLUDE.finditer(block[2]):
            yield _line(text, block.start(2) + match.start()), match[1], True
    text = TRIPLE.sub(blank, text)
    text = STRING_OR_COMMENT.sub(lambda m: m[0] if m[1] else blank(m), text)
    # One logical line each: names in parentheses may run over several.
    text = re.sub(r"\(([\w\s,*]*)\)", lambda m: " " + m[1].replace("\n", " ") + " ", text)
    text = text.replace("\\\n", "  ")
    for match in CY_FROM.finditer(text):
        name = match[1].lstrip(".")
        module = _absolute(name, len(match[1]) - len(name), source)
        for item in match[2].split(","):
            if item.split():
                yield _line(text, match.start(1)), f"{module}.{item.split()[0]}", False
    for match in CY_IMPORT.finditer(text):
        for item in match[1].split(","):
            if item.split():
                yield _line(text, match.start(1)), item.split()[0], False
    for pattern in (CY_INCLUDE, CY_EXTERN):
        for match in pattern.finditer(text):
            yield _line(text, match.start(1)), match[1], True


def _c(text: str, source: Path) -> Iterator[tuple[int, str, bool]]:
    for match in C_INCLUDE.finditer(text):
        yield _line(text, match.start()), match[1], True


def _generated(text: str) -> bool:
    head = text[:400]
    return "Generated by Cython" in head or head.startswith("#define _CFFI_")


def _resolve_file(name: str, source: Path, root: Path) -> str | None:
    """Path from the root of an included file, or None for one that is not ours (system, DPDK)."""
    include_dirs = [source.parent, Path(), *(Path(p) / d for p in PACKAGES for d in ("include", "src", "."))]
    for directory in include_dirs:
        candidate = (root / directory / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root).as_posix()
    return None


def references(root: Path) -> Iterator[Reference]:
    """All references in our packages, modules as dotted names, included files resolved to paths."""
    root = root.resolve()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix not in SUFFIXES or not path.is_file():
                continue
            source = path.relative_to(root)
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".c" and _generated(text):
                continue
            scan = {".py": _python, ".h": _c, ".c": _c}.get(path.suffix, _cython)
            for line, target, is_file in scan(text, source):
                if is_file:
                    resolved = _resolve_file(target, source, root)
                    if resolved is not None:
                        yield Reference(source.as_posix(), line, resolved, True)
                else:
                    yield Reference(source.as_posix(), line, target, False)


# -- the rules -------------------------------------------------------------------------------------------


def module_of(path: str) -> str:
    """Dotted module of a source path: parser/lane.pyx -> parser.lane, flowcheck/__init__.py -> flowcheck."""
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _under(module: str, prefix: str) -> bool:
    """synth covers synth and synth.x, and not synthesis."""
    return module == prefix or module.startswith(prefix + ".")


def room_of(module: str) -> str:
    """flowcheck.job.check -> job; the lab is one; "" for flowcheck itself, how it is started, and other packages."""
    parts = module.split(".")
    if parts[0] == "lab":
        return "lab"
    return parts[1] if parts[0] == "flowcheck" and len(parts) > 1 and parts[1] not in STARTED else ""


def _trainer_side(module: str) -> bool:
    return module in ("flowcheck", "flowcheck.run") or room_of(module) in TRAINER_ROOMS


def _say(reference: Reference, why: str) -> str:
    return f"{reference.source}:{reference.line}: uses {reference.target}: {why}"


def _layer_rules(reference: Reference) -> Iterator[str]:
    layer = reference.source.split("/")[0]
    target = reference.target.split("/" if reference.is_file else ".")[0]
    if target in PACKAGES:
        if target == "lab" and room_of(module_of(reference.source)) in ("cli", "lab"):
            return
        if target != layer and target not in LEFT_OF[layer]:
            if not (reference.is_file and (layer, reference.target) in SHARED_FILES):
                allowed = ", ".join(sorted(LEFT_OF[layer])) or "nothing of ours"
                yield _say(reference, f"{layer} may use {allowed}")
        return
    if reference.is_file or target in sys.stdlib_module_names:
        return
    third_party = THIRD_PARTY[layer]
    if third_party is not None and target not in third_party:
        yield _say(reference, f"{layer} may depend on {', '.join(sorted(third_party)) or 'nothing'}")


def _trainer_rule(reference: Reference, modules: set[str]) -> Iterator[str]:
    if reference.is_file or not _trainer_side(module_of(reference.source)):
        return
    top = reference.target.split(".")[0]
    if top in sys.stdlib_module_names or top in TRAINER_THIRD_PARTY:
        return
    if top == "flowcheck" and _trainer_side(module_in(reference, modules)):
        return
    yield _say(reference, "training environments have torch and the standard library only")


def _room_rule(reference: Reference, modules: set[str]) -> Iterator[str]:
    room = room_of(module_of(reference.source))
    target = module_in(reference, modules)
    if not room or not room_of(target) or room_of(target) == room:
        return
    if room not in ROOMS:
        yield _say(reference, f"{room} is not a room that tools/layers.py knows")
    elif room_of(target) not in ROOMS[room]:
        yield _say(reference, f"{room} may import {', '.join(sorted(ROOMS[room])) or 'no other room'}")


def module_in(reference: Reference, modules: set[str]) -> str:
    """The module that is used: `from a.b import c` uses a.b.c where that is one, else a.b."""
    if reference.is_file:
        return module_of(reference.target)
    target = reference.target
    while target not in modules and "." in target:
        target = target.rpartition(".")[0]
    return target


def _synth_rule(all_references: list[Reference], modules: set[str]) -> Iterator[str]:
    """Follow imports from every module of INDEPENDENT; reaching parser by any way is a violation."""
    uses: dict[str, set[str]] = {}
    for reference in all_references:
        uses.setdefault(module_of(reference.source), set()).add(module_in(reference, modules))
    for start in sorted(m for m in modules if any(_under(m, one) for one in INDEPENDENT)):
        ways = {start: [start]}
        queue = [start]
        while queue:
            module = queue.pop()
            for target in sorted(uses.get(module, set()) - ways.keys()):
                ways[target] = [*ways[module], target]
                if target.split(".")[0] == "parser":
                    yield f"{start}: reaches parser: {' -> '.join(ways[target])}; it must not stand on it"
                else:
                    queue.append(target)


def violations(root: Path) -> list[str]:
    """Every broken rule as one line "file:line: uses X: why"; an empty list is what we want."""
    found = list(references(root))
    modules = {
        module_of(path.relative_to(root.resolve()).as_posix())
        for package in PACKAGES
        for path in (root.resolve() / package).rglob("*")
        if path.suffix in (".py", ".pyx")
    }
    out: list[str] = []
    for reference in found:
        out += _layer_rules(reference)
        out += _trainer_rule(reference, modules)
        out += _room_rule(reference, modules)
    return [*out, *_synth_rule(found, modules)]


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    broken = violations(root)
    print("\n".join(broken) or f"layers: {len(list(references(root)))} references, all to the left")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
