"""`flowcheck plan goodput` as a person asks it."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.cli import app
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.plan.answers.answer import Inputs
from flowcheck.plan.goodput.cluster import DEFAULTS, read_cluster
from flowcheck.plan.goodput.goodput import answer
from flowcheck.plan.goodput.goodput_cli import WHOLE

from ..asking import answer_of, asked, refused

QUICK = "goodput --set persist-hours=1 --iteration 60 --set version-lag=60 --failures-per-day 8"


def test_every_input_is_printed_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer_of(capsys, "goodput --gpus 1024 --set data-parallel=8 --set storage=10")
    assert found["inputs"]["gpus"] == 1024 and found["inputs"]["storage"] == 10
    assert len(found["inputs"]) >= 35 and found["good"]
    names = [row[0] for row in found["tables"]["systems"]["rows"]]
    assert names[0] == "flowcheck" and len(names) == 10


def test_by_failures_a_day_it_only_gets_worse(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer_of(capsys, "goodput --scale 530b")
    assert found["tables"]["failures"]["columns"] == ["effective %", *(f"{count}/day" for count in range(1, 9))]
    for _, *shares in found["tables"]["failures"]["rows"]:
        assert shares == sorted(shares, reverse=True) and 0 < shares[-1] < shares[0] < 100


def test_servers_without_a_group_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    notes = answer_of(capsys, "goodput --scale 530b")["notes"]
    assert "4 servers fill no group of reft, and count as if their copies were safe" in notes
    assert not any("gemini" in note for note in notes)
    assert not any("fill no group" in note for note in answer_of(capsys, "goodput")["notes"])


def test_the_papers_dollars(capsys: pytest.CaptureFixture[str]) -> None:
    """526 $ are the nodes. 5,760 $ come out where each of two failures costs half an hour and nothing else is lost."""
    found = answer_of(capsys, "goodput --scale 175b")
    columns, rows = (found["tables"]["systems"][key] for key in ("columns", "rows"))
    row = dict(zip(columns, rows[0], strict=True))
    assert row["$ nodes a day"] == pytest.approx(526.08)
    assert row["$ lost a day"] == pytest.approx(192 * 30 * row["hours lost a day"], rel=1e-3)
    half_hour = "--set start=0 --set detect=0 --set replacement=1800 --set version-lag=0 --set node-failures=0"
    row = dict(zip(columns, answer_of(capsys, f"goodput {half_hour}")["tables"]["systems"]["rows"][0], strict=True))
    assert row["$ lost a day"] == pytest.approx(5760, rel=0.03)


def test_simulated_beside_the_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("simpy", reason="the extra `plan` is not installed")
    found = answer_of(capsys, f"{QUICK} --simulate --failures 160 --seed 4")
    rows = found["tables"]["simulated"]["rows"]
    assert found["good"] and len(rows) == 10
    for _, closed, _, low, high, failures, _, word in rows:
        assert low <= closed <= high and failures == 160 and word == "agrees"


def test_bursts_are_simulated_only(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("simpy", reason="the extra `plan` is not installed")
    options = "--simulate --failures 200 --bursts leaf=0.2 --bursts follow=0.1 --system gemini-group"
    found = answer_of(capsys, f"{QUICK} {options}")
    (row,) = found["tables"]["simulated"]["rows"]
    assert found["inputs"]["leaf"] == 0.2 and row[6] > 10 and row[2] < row[1] and row[7] == ""
    spread = answer_of(capsys, f"{QUICK} {options} --spread")
    assert spread["tables"]["simulated"]["rows"][0][6] < row[6]
    assert refused("goodput --bursts leaf=0.1").where == "--bursts"


@pytest.mark.parametrize(
    ("line", "missing"),
    [("goodput --simulate", "simpy"), ("report --out x.html", "jinja2"),
     ("goodput --plot x.svg", "matplotlib")],
)
def test_what_is_not_installed_is_named(line: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(EnvironmentProblem) as refused:
        app(["plan", *line.split()], standalone_mode=False)
    assert missing in refused.value.what and f"pip install {missing}" in refused.value.remedy


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("--interval 100", "--interval"), ("--set gpus-per-server=0", "--set gpus-per-server="),
        ("--interval inf", "--interval"), ("--spread", "--spread"),
        ("--spread --simulate", "--spread"), ("--failures-per-day 0", "--failures-per-day"),
        ("--set incomplete=1.5", "--set incomplete="), ("--set hardware=-0.1", "--set hardware="),
        ("--scale 3b", "--scale"), ("--set storage=0", "--set storage="), ("--set storage=1e-300", "--set storage="),
        ("--set state-bytes=1e300", "--set state-bytes="), (f"--gpus {'9' * 400}", "--gpus"),
        (f"--set nodes={'9' * 400}", "--set nodes="), ("--parameters 1e300", "--parameters"), ("--gpus 12", "--gpus"),
        ("--set simultaneous=200", "--set simultaneous="), ("--set replicas=193", "--set replicas="),
        ("--set data-parallel=7", "--set data-parallel="), ("--set data-parallel=1000", "--set data-parallel="),
        ("--simulate --bursts leaf=0.1 --bursts leaf=0.2", "--bursts leaf=0.2"),
        ("--set reft-group=500", "--set reft-group="),
        ("--set node-failures=1e6", "--set node-failures="),
        ("--set tape=1", "--set tape=1"), ("--set storage", "--set storage"),
        ("--set storage=fast", "--set storage=fast"), ("--set nodes=1.5", "--set nodes=1.5"),
        ("--gpus 8 --set gpus=8", "--set gpus=8"), ("--system tape", "--system"),
        ("--simulate --bursts leaf=2", "--bursts leaf"), ("--simulate --bursts fire=1", "--bursts fire=1"),
    ],
)
def test_what_makes_no_sense_is_refused(line: str, where: str) -> None:
    error = refused(f"goodput {line}")
    assert error.where == where and error.remedy


def test_the_strategy_of_gemini_is_said_where_the_other_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Which of the two it is follows from the servers."""
    for replicas, here, other in ((2, "gemini-group", "gemini-mixed"), (5, "gemini-mixed", "gemini-group")):
        line = f"goodput --set replicas={replicas} --system"
        assert answer_of(capsys, f"{line} {here}")["tables"]["systems"]["rows"][0][0] == here
        error = refused(f"{line} {other}")
        assert error.where == "--system" and here in error.remedy and "replicas" in error.remedy
        assert f"replicas {'do not ' if replicas == 5 else ''}divide the servers" in error.what


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(list(DEFAULTS)), st.sampled_from(
    [0.0, 1e-300, 1e-12, 1e-9, 1e-3, 0.5, 1.0, 2.0, 3.0, 64.0, 1000.0, 1e6, 1e9, 1e15, 1e18, 1e300, math.inf, math.nan],
), min_size=1, max_size=4))
def test_whatever_is_given_is_answered_or_refused(values: dict[str, float]) -> None:
    """Never a bug: the ends of every input, some together."""
    whole = {name: int(value) if name in WHOLE and math.isfinite(value) else value for name, value in values.items()}
    inputs = Inputs()
    try:
        cluster = read_cluster(whole, inputs)
        answer(cluster, inputs)
    except UserError as error:
        assert error.where and error.remedy


def test_the_table_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out = asked(capsys, "goodput")
    assert max(map(len, out.splitlines())) <= 80 and "jit-transparent" in out


def test_figure_17_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plan` is not installed")
    asked(capsys, f"goodput --plot {tmp_path / 'f17.svg'}")
    drawn = (tmp_path / "f17.svg").read_text()
    assert "Effective training time" in drawn and "checkpoint nodes" in drawn
