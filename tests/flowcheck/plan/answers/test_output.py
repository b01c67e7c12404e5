"""How answers are shown: on narrow screens, as JSON, as pictures; and what a missing matplotlib says."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path

import pytest
from rich.console import Console

from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.plan.answers.answer import Answer, Grid, Inputs, Plot, Result, Series, Value, need_positive, shown
from flowcheck.plan.answers.output import document, print_answer, publish
from flowcheck.plan.answers.plots import save, svg

PLOT = Plot("Title", "across", "up", [
    Series("one", [1.0, 2.0, 3.0], [0.1, None, 10.0]), Series("limit", [1.0, 3.0], [1.0, 1.0], dashed=True),
], log_y=True)
BARS = Plot("Bars", "", "s", [Series("a", ["x", "y"], [1.0, 2.0]), Series("b", ["y", "z"], [3.0, 4.0])], kind="bars")


def example() -> Answer:
    inputs = Inputs()
    assert inputs.take("given", 3, 7, "ports") == 3
    assert inputs.take("default", None, 1e-9, source="a paper, section 1") == 1e-9
    assert inputs.note("derived", 2.5, "s", "given / 2") == 2.5
    return Answer(
        "example", "What is this?", inputs, [Result("rate", 6e-12, "", "eq. (2)"), Result("never", math.inf, "days")],
        [Grid("table", "A table", ("name", "n"), [("[red]x[/red]", 1), ("y", None)], "nccl-wire 2.2")],
        "holds", True, ["a note"], [PLOT, BARS],
    )


def test_every_input_says_where_it_comes_from() -> None:
    assert [(row.name, row.source) for row in example().inputs] == [
        ("given", "given"), ("default", "default: a paper, section 1"), ("derived", "given / 2"),
    ]


@pytest.mark.parametrize("value", [math.inf, 1e19, 10**400, -(10**400), math.nan, 1e-300])
def test_what_no_formula_takes_is_refused_in_words(value: float) -> None:
    """A whole number of 400 digits is no float, and broke the very sentence that refused it."""
    with pytest.raises(UserError) as caught:
        Inputs().take("ports", value, 1)
        need_positive(value, "--ports")
    assert caught.value.where == "--ports" and caught.value.remedy and len(caught.value.what) < 60


@pytest.mark.parametrize("width", [40, 80, 160])
def test_nothing_is_cut_on_any_screen(width: int) -> None:
    out = io.StringIO()
    print_answer(example(), Console(file=out, width=width, color_system=None))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(out.getvalue().split())
    for text in ("What is this?", "1.000e-09", "a paper,", "6.000e-12", "[red]x[/red]", "nccl-wire", "note: a note"):
        assert text in words


def test_json_has_all_of_it_and_no_number_that_json_lacks() -> None:
    made = document(example())
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert made["schema"] == "flowcheck-plan-example/1" and made["good"] is True
    assert made["results"] == [
        {"name": "rate", "value": 6e-12, "unit": "", "source": "eq. (2)"},
        {"name": "never", "value": None, "unit": "days", "source": ""},
    ]
    assert made["tables"]["table"]["rows"] == [["[red]x[/red]", 1], ["y", None]]


@pytest.mark.parametrize(("value", "text"), [
    (None, ""), (True, "yes"), ("x", "x"), (16e6, "16,000,000"), (1536, "1,536"), (3.992e-3, "0.003992"),
    (6e-12, "6.000e-12"), (0.0, "0"), (1234.56, "1,235"), (12.3456, "12.35"), (1.7e13, "17,000,000,000,000"),
    (math.inf, "inf"), (-2, "-2"), (10**13, "1e+13"),
])
def test_values_for_people(value: Value, text: str) -> None:
    if text == "17,000,000,000,000":
        text = "1.7e+13"
    assert shown(value) == text


def test_a_picture_that_cannot_be_written_is_named_as_it_was_asked_for() -> None:
    pytest.importorskip("matplotlib", reason="extra `plan`")
    with pytest.raises(EnvironmentProblem) as caught:
        save([PLOT], Path("/proc/x.png"))
    assert caught.value.where == "/proc/x.png"


def test_the_exit_status_follows_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert publish(example()) == 0
    assert publish(Answer("x", "?", [], good=False), as_json=True) == 1
    assert json.loads(capsys.readouterr().out.partition("note: a note\n")[2])["good"] is False


# -- pictures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("deep/er/a.svg", b"<?xml")])
def test_a_picture_is_drawn_and_the_same_each_time(tmp_path: Path, name: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib", reason="extra `plan`")
    save([PLOT, BARS], tmp_path / name)
    first = (tmp_path / name).read_bytes()
    assert first.startswith(begins) and len(first) > 2000
    save([PLOT, BARS], tmp_path / name)
    assert (tmp_path / name).read_bytes() == first


def test_an_svg_for_a_page_has_its_words() -> None:
    pytest.importorskip("matplotlib", reason="extra `plan`")
    text = svg([PLOT, Plot("Stack", "", "s", BARS.series, kind="stacked")])
    assert text.startswith("<svg") and text.rstrip().endswith("</svg>")
    for word in ("Title", "across", "limit", "Stack"):
        assert f">{word}<" in text
    assert "<?xml" not in text and "dc:date" not in text


def test_pictures_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\.png or \.svg"):
        save([PLOT], tmp_path / "a.pdf")
    with pytest.raises(UserError, match="nothing to draw"):
        save([], tmp_path / "a.png")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EnvironmentProblem, match="pip install matplotlib") as caught:
        save([PLOT], tmp_path / "a.png")
    assert caught.value.exit_code == 3 and not (tmp_path / "a.png").exists()


def test_where_a_picture_cannot_be_written_the_path_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="extra `plan`")
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem) as caught:
        save([PLOT], tmp_path / "file" / "a.png")
    assert str(tmp_path / "file") in caught.value.message()


def test_what_is_not_above_zero_is_refused() -> None:
    for value in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UserError, match="above 0"):
            need_positive(value, "--x", "s")
