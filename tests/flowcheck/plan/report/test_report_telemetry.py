"""A node's telemetry file on the page: what was no number is named, and a file that is none is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowcheck.cli import app
from flowcheck.errors import UserError
from flowcheck.plan.report.telemetry import telemetry_answer

HEAD = "time,iteration,tensor,elements,norm,largest,zeros,nan,infinity,first_nan,first_infinity,update_ratio"


def file(folder: Path, *rows: str) -> Path:
    path = folder / "gradients.csv"
    path.write_text("\n".join([HEAD, *rows]) + "\n")
    return path


def test_pictures_have_the_model_and_the_first_nan_is_named(tmp_path: Path) -> None:
    found = telemetry_answer(file(
        tmp_path, "1.0,7,a.weight,10,3.0,1.0,0.5,0,0,,,0.001", "1.0,7,a.bias,2,4.0,1.0,0.0,0,0,,,0.0",
        "2.0,8,a.weight,10,6.0,1.0,0.5,2,0,5,,", "2.0,8,a.bias,0,,,,,,,,", "cut", "3.0,9,a.weight,10,nine",
    ))
    assert not found.good and found.verdict == "In iteration 8, element 5 of the gradient of a.weight is NaN."
    lines = {one.label: (list(one.x), list(one.y)) for one in found.plots[0].series}
    assert lines == {"the model": ([7, 8], [5.0, 6.0]), "a.weight": ([7, 8], [3.0, 6.0]), "a.bias": ([7], [4.0])}
    assert {one.label: list(one.y) for one in found.plots[1].series} == {"a.weight": [0.001], "a.bias": [None]}
    assert found.grids[0].rows == [(8, "a.weight", 2, 0, "5", "")]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", HEAD + "\n", "\x00\xff"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError) as refused:
        telemetry_answer(path)
    assert refused.value.where == str(path)
    with pytest.raises(UserError):
        telemetry_answer(tmp_path / "none.csv")


def test_the_page_has_its_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plan` is not installed")
    source, out = file(tmp_path, "1.0,7,a.weight,10,3.0,1.0,0.5,0,1,,4,0.001"), tmp_path / "page.html"
    assert not app(["plan", "report", "--out", str(out), "--iteration", "20", "--telemetry", str(source)],
                   standalone_mode=False)
    text = out.read_text()
    assert "Norms of gradients" in text and "element 4 of the gradient of a.weight is infinite" in text
