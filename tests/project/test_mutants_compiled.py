"""The table of mistakes in the compiled sources fits the sources, and the tool puts each mistake where it belongs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from .script import ROOT, script

ROOMS = ("parser", "updater", "flowcheck/control", "flowcheck/checkpoint", "flowcheck/trainer")
# Doors from Python to C that is tried, and what only measures.
NOT_TRIED = {
    "flowcheck/checkpoint/coding/galois.pyx", "parser/cover.pyx", "parser/place.pyx", "parser/roce.pyx",
    "parser/src/sweep.c",
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return script("mutants_compiled")


def test_every_old_text_is_found_exactly_once(tool: ModuleType) -> None:
    """Without compiling anything. What fails here names the entry that has to follow its source."""
    mutants = tool.load()
    assert len(mutants) > 200
    for mutant in mutants:
        start, end = tool.span((ROOT / mutant.path).read_text(), mutant)
        assert start < end
    assert set(tool.sources(mutants)) >= {mutant.path for mutant in mutants}


def test_every_mistake_is_told_and_has_tests_that_exist(tool: ModuleType) -> None:
    mutants = tool.load()
    assert max(Counter(mutant.name for mutant in mutants).values()) == 1
    for mutant in mutants:
        assert mutant.about and mutant.new != mutant.old and mutant.tests
        for test in mutant.tests:
            file, _, function = test.partition("::")
            assert (ROOT / file).is_file(), f"{mutant.name}: {file}"
            assert not function or f"def {function}(" in (ROOT / file).read_text(), f"{mutant.name}: {function}"


def test_no_source_where_silence_is_dangerous_is_left_out(tool: ModuleType) -> None:
    there = {path.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*")
             if path.suffix == ".pyx" or (path.suffix == ".c" and path.parent.name == "src")}
    assert there >= NOT_TRIED
    assert there - {mutant.path for mutant in tool.load()} == NOT_TRIED


def made(tool: ModuleType, path: str, *pairs: tuple[str, str]) -> list:
    return [tool.Mutant(n, f"m{n}", path, old, new, "a mistake", ("t.py",)) for n, (old, new) in enumerate(pairs, 1)]


@pytest.mark.parametrize(
    ("name", "text", "pairs", "expected"),
    [
        ("x.c", "  if (a < b)\n", [("«a < b»", "a <= b")], "  if ((flowcheck_mutant == 1 ? (a <= b) : (a < b)))\n"),
        ("x.c", "  go();\n", [("go();", "")], "  { if (flowcheck_mutant == 1) {  } else { go(); } }\n"),
        ("x.pyx", "f(n, k)\n", [("f(«n», k)", "n + 1")], "f(((n + 1) if flowcheck_mutant == 1 else (n)), k)\n"),
        ("x.pyx", "    if a:\n", [("if «a»:", "False")],
         "    if <bint>((1 if (False) else 0) if flowcheck_mutant == 1 else (1 if (a) else 0)):\n"),
        ("x.pyx", "  n += 1  # why\n", [("«n += 1»  # why", "")],
         "  if flowcheck_mutant == 1:\n      pass\n  else:\n      n += 1  # why\n"),
        ("x.c", "f(a + b)", [("f(«a + b»)", "a"), ("a + «b»", "2")],
         "f((flowcheck_mutant == 1 ? (a) : (a + (flowcheck_mutant == 2 ? (2) : (b)))))"),
    ],
)
def test_both_forms_stand_side_by_side(
    tool: ModuleType, name: str, text: str, pairs: list[tuple[str, str]], expected: str
) -> None:
    assert tool.rewrite(text, made(tool, name, *pairs), name.endswith(".pyx")) == expected


@pytest.mark.parametrize(
    ("text", "pairs", "message"),
    [
        ("a b a", [("a", "c")], "m1: x.c has this text 2 times, not once: 'a'"),
        ("a b", [("«c» b", "d")], "m1: x.c has this text 0 times, not once: 'c b'"),
        ("a b", [("«a b", "d")], "m1: « and » belong together"),
        ("a b c", [("a b", "d"), ("b c", "e")], "m2: its place overlaps that of m1"),
        ("a && b", [("a« && b»", "1")], "m1: not a statement, so both forms have to be whole expressions"),
        ("a && b", [("a && «b»", "")], "m1: not a statement, so both forms have to be whole expressions"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused(
    tool: ModuleType, text: str, pairs: list[tuple[str, str]], message: str
) -> None:
    with pytest.raises(tool.TableError) as refused:
        tool.rewrite(text, made(tool, "x.c", *pairs), False)
    assert str(refused.value) == message


def test_two_entries_of_one_name_are_refused(tool: ModuleType, tmp_path: Path) -> None:
    entry = '[[source.mutant]]\nname = "twice"\nold = "a"\nnew = "b"\nabout = "c"\n'
    (tmp_path / "table.toml").write_text(f'[[source]]\nfile = "x.c"\ntests = ["t.py"]\n{entry}{entry}')
    with pytest.raises(tool.TableError, match="twice: two entries have this name"):
        tool.load(tmp_path / "table.toml")


def test_survivors_and_equivalents_that_are_not_fail_the_run(tool: ModuleType, capsys: pytest.CaptureFixture) -> None:
    plain, equal = made(tool, "x.c", ("a", "b"))[0], tool.Mutant(2, "e", "x.c", "a", "b", "no", ("t.py",), "because")
    for results, status in (
        ([(plain, "killed"), (equal, "survived")], 0), ([(plain, "timeout")], 0), ([(plain, "survived")], 1),
        ([(plain, "killed"), (equal, "killed")], 1),
    ):
        assert tool.report([tool.Result(mutant, fate, 1.0, "t.py::test") for mutant, fate in results]) == status
    said = capsys.readouterr().out
    assert "survived: m1 (x.c): a mistake" in said and "not equivalent: e (x.c) was noticed by t.py::test" in said
