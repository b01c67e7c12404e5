"""The page: one file, nothing from outside, readable in light and dark."""

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flowcheck.cli import app
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.plan.answers.answer import Answer, Grid, Inputs, Plot, Result, Series
from flowcheck.plan.goodput.cluster import read_cluster
from flowcheck.plan.goodput.goodput import evaluate
from flowcheck.plan.goodput.sensitivity import CHANGES, break_even, break_even_lines, sensitivity
from flowcheck.plan.report.report import page, themed, write

from ..asking import asked, refused
from ..capacity.test_capacity_command import topology

pytest.importorskip("matplotlib", reason="the extra `plan` is not installed")

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Reader(HTMLParser):
    """Every tag closed, every id once, and what is asked for from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.look(attributes)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.look(attributes)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def look(self, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("src", "href", "xlink:href") and value and not value.startswith("#"):
                self.outside.append(value)


def answer(command: str = "loss", **changes: object) -> Answer:
    inputs = Inputs()
    inputs.take("ports", None, 3, "", "a <switch>'s")
    plot = Plot("A & B", "x", "y", [Series("one", [1, 2, 3], [3.0, None, 1.0])])
    fields = {
        "results": [Result("cost", 526.08, "$", "16 nodes")],
        "grids": [Grid("rows", "All <rows>", ["name", "value"], [["a<script>", 1.5], ["b", None]], "from here")],
        "verdict": "it holds", "notes": ["a note"], "plots": [plot],
    }
    return Answer(command, "How <often>?", inputs, **(fields | changes))


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def test_one_file_with_nothing_from_elsewhere() -> None:
    text = page("A cluster", "Which?", [answer(), answer("capacity", verdict="it does not", good=False)])
    reader = read(text)
    assert reader.outside == [] and "script" not in reader.tags and "link" not in reader.tags
    assert not re.search(r"url\((?!#)|@import", text)
    assert len(reader.ids) == len(set(reader.ids)) > 10
    for words in ("A cluster", "Which?", "it holds", "it does not", "526.1", "default: a &lt;switch&gt;&#39;s",
                  "a&lt;script&gt;", "a note", 'name="viewport"', "prefers-color-scheme: dark"):
        assert words in text, words


def test_pictures_take_the_pages_ink() -> None:
    text = page("A cluster", "Which?", [answer()])
    figure = text[text.index("<figure>") : text.index("</figure>")]
    assert "currentColor" in figure and "#000000" not in figure and "#ffffff" not in figure.lower()
    assert "<metadata" not in figure and "A &amp; B" in figure


def test_names_of_two_pictures_do_not_meet() -> None:
    drawing = '<svg><g id="a"/><use href="#a"/><path clip-path="url(#a)" style="fill: #000000"/></svg>'
    one, other = themed(drawing, "p1"), themed(drawing, "p2")
    assert 'id="p1-a"' in one and 'href="#p1-a"' in one and "url(#p1-a)" in one and "p1" not in other


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "new" / "report.html"
    write(file, "first")
    write(file, "second")
    assert file.read_text() == "second" and [entry.name for entry in file.parent.iterdir()] == ["report.html"]
    with pytest.raises(UserError):
        write(tmp_path / "report.pdf", "")
    (tmp_path / "taken").write_text("")
    with pytest.raises(EnvironmentProblem):
        write(tmp_path / "taken" / "report.html", "")


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_page_for_a_cluster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    status, out = asked(capsys, f"report --scale 175b --out {file} --mirrors 1 --loss 1e-9")
    text = file.read_text()
    reader = read(text)
    assert status == 0 and "written" in out
    assert reader.outside == [] and len(reader.ids) == len(set(reader.ids)) > 100
    assert reader.tags.count("svg") >= 5
    for words in ("1,536 GPUs", "175 billion parameters", "What would change it", "twice the failures",
                  "flowcheck costs less than storage from 0.0266 failures a day on", "the answer on loss, on this page",
                  "the answer on capacity, on this page", "175B on 1536 GPUs: ", "does not hold", "deadline met"):
        assert words in text, words


def test_a_page_for_a_job_that_has_no_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    options = "--gpus 64 --parameters 7e9 --iteration 5 --set data-parallel=8 --title Ours"
    assert asked(capsys, f"report --out {file} {options}")[0] == 0
    text = re.sub(r"<[^>]*>|\s+", " ", file.read_text())
    assert "Ours" in text and re.search(r"parameters of a group +875,000,000 ", text)
    assert re.search(r" nodes +8 +the answer on capacity", text)


def test_a_page_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    assert refused(f"report --out {file} --set incomplete=2").where == "--set incomplete="
    assert refused(f"report --out {tmp_path / 'report.txt'}").where.endswith("report.txt")
    assert list(tmp_path.iterdir()) == []


def inputs_of(file: Path) -> list[dict[str, tuple[str, str]]]:
    """The inputs of loss, capacity and goodput on a page: name -> (value, source)."""
    found = []
    for section in re.findall(r"<details>(.*?)</details>", file.read_text(), re.DOTALL):
        rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in section.split("<tr>")]
        found.append({row[0]: (row[1], row[3]) for row in rows if row})
    return found


def test_loss_takes_mirrors_and_mtu_from_the_topology_as_capacity_does(tmp_path: Path) -> None:
    """Three ports of each group and an MTU of 1024; the page said the default of 4096 under loss."""
    file = tmp_path / "report.html"
    fabric = topology(tmp_path, ranks=4, groups=1)
    job = "--gpus 4 --parameters 7e9 --iteration 9 --set gpus-per-server=1 --set data-parallel=4 --set reft-group=4"
    line = f"report --out {file} {job} --topology {fabric} --protocol ll128"
    assert not app(["plan", *line.split()], standalone_mode=False)
    loss, capacity, _ = inputs_of(file)
    for name, value in (("mtu", "1,024"), ("mirrors", "3"), ("direction", "both"), ("protocol", "ll128")):
        assert loss[name][0] == capacity[name][0] == value, name
        assert loss[name][1] == "the answer on capacity, on this page"
    assert capacity["mtu"][1] == "topology" and loss["ranks"][0] == "4"
    assert loss["packets"][0] == f"{math.ceil(7e9 / (1024 * 15 / 16 / 4)):,}"


def test_one_page_is_of_one_job(tmp_path: Path) -> None:
    """goodput said 768 GPUs and capacity 1,536; and an iteration was as long as one of the scale's own model."""
    file = tmp_path / "report.html"
    for options, where in (("--gpus 768", "--gpus"), ("--set data-parallel=48", "--set data-parallel=")):
        error = refused(f"report --out {file} --scale 175b {options}")
        assert error.where == where and "175b" in error.what and "--gpus" in error.remedy
    assert not list(tmp_path.iterdir())
    line = f"report --out {file} --scale 175b --gpus 3072 --set data-parallel=32 --parameters 350B"
    assert not app(["plan", *line.split()], standalone_mode=False)
    loss, capacity, goodput = inputs_of(file)
    assert loss["iteration-s"][0] == capacity["iteration-s"][0] == goodput["iteration"][0] == "14.66"
    assert capacity["dp"] == ("32", "given") and loss["ranks"] == ("32", "given")
    assert capacity["parameters"][1] == loss["parameters"][1] == "given"


def test_only_what_was_given_is_called_given(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    assert not app(["plan", "report", "--out", str(file), "--iteration", "20"], standalone_mode=False)
    loss, capacity, goodput = inputs_of(file)
    assert goodput["parameters"][1].startswith("default: ")
    assert capacity["parameters"][1] == capacity["dp"][1] == "the answer on goodput, on this page"
    assert capacity["tp"] == ("96", "gpus / data-parallel, the answer on goodput, on this page")
    assert loss["parameters"][1] == loss["ranks"][1] == "the answer on capacity, on this page"
    assert loss["iteration-s"] == capacity["iteration-s"] == goodput["iteration"] == ("20", "given")


def test_a_heading_of_bytes_that_are_no_text(tmp_path: Path) -> None:
    write(file := tmp_path / "report.html", "caf\udce9 & \u00e9")
    assert file.read_text(encoding="utf-8") == "caf\\udce9 & \u00e9"


def test_what_the_answers_refuse_names_options_of_this_command(tmp_path: Path) -> None:
    line = f"report --out {tmp_path / 'report.html'}"
    job = "--gpus 8 --parameters 7e9 --set gpus-per-server=1"
    assert refused(f"{line} {job} --set data-parallel=1").where == "--set data-parallel="
    short = refused(f"{line} {job} --set data-parallel=8 --iteration 0.01")
    assert short.where == "--iteration" and "shorter than its allreduces" in short.what
    fabric = topology(tmp_path, ranks=4, groups=1)
    other = refused(f"{line} {job} --set data-parallel=8 --topology {fabric}")
    assert "ranks" in other.what and "--dp" not in other.remedy
    large = refused(f"{line} --gpus 1024 --parameters 7e9 --set data-parallel=128 --set gpus-per-server=8 --mirrors 99")
    assert large.where == "--leaf-ports" and "flowcheck plan capacity" in large.remedy


# -- what would change it ----------------------------------------------------------------------------------------------


def test_each_change_changes_what_it_says() -> None:
    cluster = read_cluster({}, Inputs())
    rows = {row[0]: dict(zip(sensitivity(cluster).columns, row, strict=True)) for row in sensitivity(cluster).rows}
    given = rows["as given"]
    assert rows["half the failures"]["flowcheck $"] < given["flowcheck $"] < rows["twice the failures"]["flowcheck $"]
    assert rows["storage four times as fast"]["storage $"] < given["storage $"]
    assert rows["two servers per failure"]["gemini $"] > given["gemini $"]
    dear = rows["checkpoint nodes at ten times the price"]
    assert dear["flowcheck $"] == pytest.approx(given["flowcheck $"] + 9 * 526.08, abs=1.5)
    assert len(rows) == len(CHANGES)


def test_break_even_is_where_both_cost_the_same() -> None:
    cluster = read_cluster({}, Inputs())
    least = break_even(cluster, "checkfreq")
    assert least is not None
    ours, other = evaluate(cluster.with_failures(least), names=("flowcheck", "checkfreq"))
    assert ours.dollars == pytest.approx(other.dollars, rel=1e-4)
    assert break_even(cluster, "jit-transparent") is None
    assert len(break_even_lines(cluster)) == 9
