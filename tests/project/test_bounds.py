"""Bounds of size and form: nothing new is beyond them, and what was may only come down."""

import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from .script import ROOT, script


@pytest.fixture(scope="module")
def bounds() -> ModuleType:
    return script("bounds")


def test_nothing_grows_beyond_its_bound(bounds: ModuleType) -> None:
    """Where this fails: make it smaller. A figure in tools/bounds.toml may come down, and no line may be added."""
    listed = tomllib.loads((ROOT / "tools" / "bounds.toml").read_text())
    found = bounds.beyond(bounds.measured(ROOT))
    assert listed.keys() <= found.keys()
    grown = {(bound, name): (figure, listed.get(bound, {}).get(name, bounds.BOUNDS[bound]))
             for bound, figures in found.items() for name, figure in figures.items()
             if figure > listed.get(bound, {}).get(name, bounds.BOUNDS[bound])}
    assert not grown, "more than its bound, or than tools/bounds.toml says (figure, most)"
    stale = [(bound, name) for bound, names in listed.items() for name in names if name not in found[bound]]
    assert not stale, "within its bound now: take it out of tools/bounds.toml"


def test_each_bound_sees_what_is_beyond_it(bounds: ModuleType, tmp_path: Path) -> None:
    """A tree that breaks every rule once."""
    many = "".join(f"        self.a{n} = {n}\n" for n in range(21))
    room = tmp_path / "flowcheck" / "room"
    tests = tmp_path / "tests" / "flowcheck" / "room"
    for folder in (room, tests):
        folder.mkdir(parents=True)
    (tmp_path / "flowcheck" / "__init__.py").write_text("")
    for number in range(25):
        others = "".join(f"from flowcheck.room import m{other}\n" for other in range(number))
        (room / f"m{number}.py").write_text(others)
    (room / "m0.py").write_text(
        f'"""Whom it was told."""\nclass A:\n    def f(self):\n{many}\n'
        "class B(A): ...\nclass C(B): ...\nclass D(C): ...\n"
        "def g(*given: Any, **named: Any):\n    try:\n        h()\n    except Problem as error:\n"
        '        return "no room" in error.what\n' + "def long():\n" + "    x = 1\n" * 400
    )
    (tests / "test_m.py").write_text("x = 1\n" * 5000)
    found = bounds.beyond(bounds.measured(tmp_path))
    assert found == {
        "files": {"flowcheck/room": 25}, "lines": {"flowcheck/room/m0.py": 434}, "arrows": {"flowcheck/room": 300},
        "attributes": {"flowcheck/room/m0.py:A": 21}, "depth": {"flowcheck/room/m0.py:D": 3},
        "function": {"flowcheck/room/m0.py:long": 401}, "tests": {"flowcheck/room": 681},
        "words": {"flowcheck/room": 2}, "wording": {"flowcheck/room/m0.py": 1}, "anything": {"flowcheck/room/m0.py": 1},
    }
