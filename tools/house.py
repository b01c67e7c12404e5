"""Count the structure of flowcheck/ and lab/: rooms, arrows, circles, lines. Run it before and after it is changed.

    python tools/house.py [ROOT]

A room is what one sees on opening the folder: a file of flowcheck/, or a folder of it with all that is inside; the lab.
An arrow leads from a room to one that it imports. A circle is a set of modules that import each other, wherever
they lie; an arrow up is one that no order of the rooms gets rid of, because it lies on a circle of rooms.
`__init__.py` and `__main__.py` of flowcheck/ hand names on and are no rooms. Imports are read as tools/layers.py reads
them, inside functions too.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from layers import SUFFIXES, module_in, module_of, references, room_of

Graph = Mapping[str, set[str]]
INSTRUMENTS = "lab"  # package of what proves and measures the product


def circles(graph: Graph) -> list[list[str]]:
    """Strongly connected components of more than one node, each sorted (Tarjan 1972, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for root in sorted(graph):
        work = [(root, iter(sorted(graph[root])))] if root not in index else []
        while work:
            node, targets = work[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                stack.append(node)
            for target in targets:
                if target not in index:
                    work.append((target, iter(sorted(graph.get(target, ())))))
                    break
                if target in stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = stack[stack.index(node) :]
                    del stack[stack.index(node) :]
                    if len(component) > 1:
                        found.append(sorted(component))
    return found


def module_graph(root: Path) -> dict[str, set[str]]:
    """Modules of flowcheck/ and lab/, and those of them that each imports."""
    modules = {
        module_of(path.relative_to(root).as_posix())
        for package in ("flowcheck", INSTRUMENTS)
        for path in (root / package).rglob("*")
        if path.suffix in (".py", ".pyx")
    }
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for reference in references(root):
        source, target = module_of(reference.source), module_in(reference, modules)
        if source in graph and target in modules and target != source:
            graph[source].add(target)
    return graph


def between_rooms(graph: Graph) -> dict[str, set[str]]:
    """The same by rooms, without what a room imports of itself."""
    rooms: dict[str, set[str]] = {}
    for module, targets in graph.items():
        room = room_of(module)
        if room:
            rooms.setdefault(room, set()).update(r for t in targets if (r := room_of(t)) not in ("", room))
    return rooms


def floors(rooms: Graph) -> int:
    """Rooms on the longest way down, each circle counted once."""
    group = {room: tuple(circle) for circle in circles(rooms) for room in circle}
    depth: dict[tuple[str, ...], int] = {}

    def below(name: tuple[str, ...]) -> int:
        if name not in depth:
            targets = {group.get(t, (t,)) for room in name for t in rooms[room]} - {name}
            depth[name] = 1 + max(map(below, targets), default=0)
        return depth[name]

    return max((below(group.get(room, (room,))) for room in rooms), default=0)


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def sources(folder: Path) -> list[Path]:
    """Written by hand: Cython's and cffi's output, which lies beside its source, is left out."""
    made = {path.with_suffix(".c") for path in folder.rglob("*.pyx")}
    return [p for p in sorted(folder.rglob("*")) if p.suffix in SUFFIXES and p not in made and p.name != "_dpdk.c"]


def count(root: Path) -> dict[str, int]:
    """Every figure by its name."""
    graph = module_graph(root)
    rooms = between_rooms(graph)
    product, instruments = sources(root / "flowcheck"), sources(root / INSTRUMENTS)
    core = [p for package in ("dataplane", "parser", "updater", "switch_configs") for p in sources(root / package)]
    names = Counter(p.name for p in [*product, *instruments, *core] if not p.name.startswith("__"))
    return {
        "rooms": len(rooms),
        "arrows between rooms": sum(map(len, rooms.values())),
        "arrows up": sum(len(rooms[room] & set(circle)) for circle in circles(rooms) for room in circle),
        "circles of modules": len(circles(graph)),
        "floors": floors(rooms),
        "files of equal name": sum(n for n in names.values() if n > 1),
        "lines of flowcheck/": lines(product),
        "lines of lab/": lines(instruments),
        "lines of the other packages": lines(core),
        "lines of tests": lines(sources(root / "tests")),
    }


def main(arguments: list[str]) -> int:
    root = (Path(arguments[0]) if arguments else Path(__file__).parent.parent).resolve()
    for name, figure in count(root).items():
        print(f"{name:<34}{figure:>7}")
    for circle in circles(module_graph(root)):
        print("circle:", ", ".join(circle))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
