"""`flowcheck plan loss` as a person asks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowcheck.plan.traffic import loss_law as law

from ..asking import answer_of, asked, refused


def test_without_options_it_answers_the_papers_example(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer_of(capsys, "loss")
    assert found["inputs"]["ranks"] == 8 and found["inputs"]["packets"] == 16e6 and found["inputs"]["loss"] == 1e-9
    rows = {row[0]: row for row in found["tables"]["by_mirrors"]["rows"]}
    assert rows[2][1] == pytest.approx(3.992e-3, rel=1e-3) and rows[3][1] == pytest.approx(6e-12, rel=1e-3)
    assert found["good"] and found["results"]["copies of the packets seen least"] == 4


def test_too_few_ports_do_not_hold_and_it_says_how_many_would(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = asked(capsys, "loss --mirrors 1")
    needed = law.mirrors_needed(8, 16e6, 1e-9, 1e-8, "both")
    words = " ".join(out.split())  # lines end where the terminal does
    assert status == 1 and "does not hold: 0.003992" in words and f"{needed} mirrored ports would do" in words


def test_a_loss_costs_its_elements_and_not_the_state(capsys: pytest.CaptureFixture[str]) -> None:
    """1e9 parameters in LL at MTU 1024: 128 float32 of a packet, 12 bytes each with Adam."""
    found = answer_of(capsys, "loss --parameters 1e9 --protocol ll --mtu 1024 --mirrors 1 --loss 1e-6")
    results = found["results"]
    assert found["inputs"]["packets"] == 7812500
    assert results["a lost packet costs, by ranges"] == 128 * 12
    assert results["by the whole state again"] == 12e9
    copies = law.ring_copies(8, (0,), "both")
    assert results["packets missing"] == pytest.approx(law.missing(copies, 7812500, 1e-6))
    assert results["expected, by ranges"] == pytest.approx(results["packets missing"] * 128 * 12)


def test_ports_at_known_positions_of_a_tree(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer_of(capsys, "loss --algorithm tree --positions 0,4 --loss 1e-4 --packets 1000")
    expected = law.incomplete(law.tree_copies(8, (0, 4), "both"), 1000, 1e-4)
    assert found["results"]["an iteration stays incomplete"] == pytest.approx(expected)


def test_one_direction_of_one_port_is_said_to_be_never_enough(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = asked(capsys, "loss --mirrors 1 --direction egress")
    assert status == 1 and "never is enough" in " ".join(out.split())


def test_the_table_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out = asked(capsys, "loss")
    assert max(map(len, out.splitlines())) <= 80 and "By mirrored ports" in out


def test_as_many_ranks_as_a_fabric_may_have_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """The law was summed over all ranks for each number of ports."""
    found = answer_of(capsys, "loss --ranks 1000000 --mirrors 1000")
    assert found["good"] and found["results"]["mirrored ports needed"] == 2
    assert [row[0] for row in found["tables"]["by_mirrors"]["rows"]] == [1, 2, 3, 4, 5, 1000]


def test_into_a_file_lines_are_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for command in ("loss", "capacity", "goodput"):
        _, out = asked(capsys, command)
        assert 60 < max(map(len, out.splitlines())) <= 80, command


def test_figure_13_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="extra `plan`")
    _, out = asked(capsys, f"loss --plot {tmp_path / 'f13.svg'}")
    assert f"drawn: {tmp_path / 'f13.svg'}" in out.replace("\n", "") or "drawn" in out
    text = (tmp_path / "f13.svg").read_text()
    assert "loss of a copy" in text and "equation (2), 3 edges" in text


@pytest.mark.parametrize("loss", ["0", "1", "1e-80", "1e-81"])
def test_the_ends_of_the_scale_are_answered(capsys: pytest.CaptureFixture[str], loss: str) -> None:
    """4e6 packets of four copies each: 4e-314 and 4e-318 are so small that one divided by them is no number."""
    found = answer_of(capsys, f"loss --loss {loss}")
    rate = found["results"]["an iteration stays incomplete"]
    assert rate == (1 if loss == "1" else 0 if loss == "0" else pytest.approx(4e6 * float(loss) ** 4, rel=0.1, abs=0))
    assert found["good"] == (loss != "1")


@pytest.mark.parametrize(("line", "where"), [
    ("loss --loss 1.5", "--loss"),
    ("loss --mirrors 9", "--mirrors"),
    ("loss --ranks 1 --mirrors 1", "--ranks"),
    ("loss --positions 0,8", "--positions"),
    ("loss --positions 0,0", "--positions"),
    ("loss --positions 0,x", "--positions"),
    ("loss --positions 0,\u00b2", "--positions"),
    ("loss --positions 0,1 --mirrors 3", "--positions"),
    ("loss --packets 0", "--packets"),
    ("loss --packets 5 --parameters 5", "--packets"),
    ("loss --wanted -1", "--wanted"),
    ("loss --iterations 0", "--iterations"),
    ("loss --iterations 1000000000000", "--iterations"),
    ("loss --iteration-s 0", "--iteration-s"),
    ("loss --mtu 9", "--mtu"),
    ("loss --mtu 3000 --parameters 1e9", "--mtu"),
    ("loss --parameters 1e300", "--parameters"),
    ("loss --parameters 1e16", "--parameters"),
    ("loss --packets 1e16", "--packets"),
    ("loss --ranks 1000001", "--ranks"),
    (f"loss --ranks {'9' * 400}", "--ranks"),
    (f"loss --mirrors {'9' * 400}", "--mirrors"),
])
def test_what_makes_no_sense_is_refused_with_place_and_remedy(line: str, where: str) -> None:
    error = refused(line)
    assert error.where == where and error.remedy and error.exit_code == 2
