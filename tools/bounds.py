"""Bounds of size and form, and what is beyond them today (bounds.toml): each may come down, none may go up.

    python tools/bounds.py [ROOT]        what is beyond a bound, worst first, as lines of bounds.toml

    files        modules in a folder
    lines        of a module
    arrows       from one room of a folder to another: imports between what one sees on opening it
    attributes   of a class: what it sets on itself, and fields
    depth        classes of our own above a class
    function     lines of one
    tests        of a room, in lines, for 100 of the room's
    words        that nobody outside this project would search for, in names and docstrings of a room
    wording      decisions by what an error says, in a module
    anything     functions of a module that take (*any, **thing)

Read are the modules of the product; instruments (lab) are in `files`, `lines` and `tests` alone. No import.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from house import INSTRUMENTS, module_graph
from layers import PACKAGES

BOUNDS = {
    "files": 24, "lines": 400, "arrows": 80, "attributes": 20, "depth": 2, "function": 60, "tests": 150, "words": 0,
    "wording": 0, "anything": 0,
}
WORDS = ("told", "telling", "beside", "whom", "heed", "anew", "is none", "is no")
_WORD = re.compile(r"(?<![a-zA-Z])(" + "|".join(WORDS) + r")(?![a-zA-Z])", re.IGNORECASE)
_WORDING = re.compile(r"\bin \w*error\w*\.(what|where|remedy)\b|\bin str\(\w*error\w*\)")
Found = dict[str, dict[str, int]]  # by bound: name -> figure


def modules(root: Path) -> Iterator[Path]:
    """What is written in Python, relative to the root."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            yield path.relative_to(root)


def is_instrument(path: Path) -> bool:
    return path.parts[0] == INSTRUMENTS


def measured(root: Path) -> Found:
    """Every figure, within its bound or not."""
    found: Found = {bound: {} for bound in BOUNDS}
    classes: dict[str, tuple[str, list[str]]] = {}  # by name: where, and the names of its bases
    for path in modules(root):
        text = (root / path).read_text(encoding="utf-8")
        if path.name != "__init__.py":
            found["files"][path.parent.as_posix()] = found["files"].get(path.parent.as_posix(), 0) + 1
        found["lines"][path.as_posix()] = len(text.splitlines())
        if not is_instrument(path):
            _read(path.as_posix(), text, found, classes)
    for name, (where, _) in classes.items():
        found["depth"][f"{where}:{name}"] = _depth(name, classes)
    found["arrows"] = _arrows(root)
    found["tests"] = _tests(root)
    return found


def beyond(found: Found) -> Found:
    """Of these what is more than its bound."""
    return {bound: {name: figure for name, figure in figures.items() if figure > BOUNDS[bound]}
            for bound, figures in found.items()}


def _read(where: str, text: str, found: Found, classes: dict[str, tuple[str, list[str]]]) -> None:
    tree = ast.parse(text)
    found["wording"][where] = len(_WORDING.findall(text))
    said = Counter({"words": 0, "anything": 0})
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            classes[node.name] = where, [base.id for base in node.bases if isinstance(base, ast.Name)]
            found["attributes"][f"{where}:{node.name}"] = len(_attributes(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{where}:{node.name}"
            found["function"][name] = max(found["function"].get(name, 0), (node.end_lineno or 0) - node.lineno + 1)
            said["anything"] += _takes_anything(node.args)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            words = ast.get_docstring(node) or ""
            name = getattr(node, "name", Path(where).stem).replace("_", " ")
            said["words"] += len(_WORD.findall(words)) + len(_WORD.findall(name))
    found["anything"][where] = said["anything"]
    room = "/".join(where.split("/")[:2]).removesuffix(".py")
    found["words"][room] = found["words"].get(room, 0) + said["words"]


def _attributes(node: ast.ClassDef) -> set[str]:
    """What its methods assign to themselves, and what a dataclass declares."""
    names = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and isinstance(one.value, ast.Name) and (
            one.value.id == "self"
        ):
            names.add(one.attr)
    return names


def _takes_anything(arguments: ast.arguments) -> bool:
    both = (arguments.vararg, arguments.kwarg)
    return all(one is not None and isinstance(one.annotation, ast.Name) and one.annotation.id == "Any" for one in both)


def _depth(name: str, classes: Mapping[str, tuple[str, list[str]]], seen: frozenset[str] = frozenset()) -> int:
    """Classes of our own above it."""
    bases = [base for base in classes[name][1] if base in classes and base not in seen]
    return max((1 + _depth(base, classes, seen | {name}) for base in bases), default=0)


def _arrows(root: Path) -> dict[str, int]:
    """By folder that has folders or modules in it."""
    graph = module_graph(root)
    arrows: dict[str, set[tuple[str, str]]] = {}
    for source, targets in graph.items():
        for target in targets:
            above = source.split(".")
            for deep in range(1, len(above)):
                ours, theirs = above[: deep + 1], target.split(".")[: deep + 1]
                if ours[:deep] == theirs[:deep] and len(theirs) > deep and ours != theirs:
                    arrows.setdefault("/".join(above[:deep]), set()).add((ours[deep], theirs[deep]))
    return {folder: len(found) for folder, found in arrows.items() if not is_instrument(Path(folder))}


def _tests(root: Path) -> dict[str, int]:
    """By room of flowcheck/ and by package."""
    def lines(folder: Path) -> int:
        return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*")
                   if path.suffix in (".py", ".pyx", ".pxd", ".h") or path.match("src/*.c"))

    rooms = [Path(package) for package in PACKAGES if package != "flowcheck"]
    rooms += [path.relative_to(root) for path in sorted((root / "flowcheck").iterdir()) if path.is_dir()]
    return {room.as_posix(): 100 * lines(root / "tests" / room) // size for room in rooms
            if (size := lines(root / room)) and (root / "tests" / room).is_dir()}


def main(arguments: list[str]) -> int:
    root = (Path(arguments[0]) if arguments else Path(__file__).parent.parent).resolve()
    for bound, figures in beyond(measured(root)).items():
        print(f"[{bound}]  # at most {BOUNDS[bound]}")
        for name, figure in sorted(figures.items(), key=lambda one: -one[1]):
            print(f'"{name}" = {figure}')
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
