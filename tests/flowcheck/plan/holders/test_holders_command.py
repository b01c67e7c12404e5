"""`flowcheck plan holders` as a person asks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..asking import answer_of, asked, refused


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "holders.toml"


def write(file: Path, *leaves: str) -> str:
    file.write_text("".join(f'[[holder]]\nname = "ck{at}"\nleaf = "{leaf}"\nhost = "h{at}"\nrack = "r"\n'
                            for at, leaf in enumerate(leaves)))
    return f"holders {file}"


def test_copies_across_leaves(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer_of(capsys, write(file, "a", "a", "b", "b"))
    rows = found["tables"]["holders"]["rows"]
    leaf = {row[0]: row[1] for row in rows}
    assert all(leaf[row[2]] != leaf[row[0]] and row[2] == row[3] for row in rows)
    assert found["good"] and found["verdict"] == "Any one of 2 leaves may be lost." and not found["notes"]
    assert found["tables"]["leaves"]["rows"] == [[1, 2, 0], [2, 1, 1]]
    assert [row[0] for row in found["tables"]["survival"]["rows"]] == [1, 2, 3, 4]
    assert found["tables"]["survival"]["rows"][1] == [2, pytest.approx(2 / 3), pytest.approx(2 / 3)]


def test_a_leaf_that_is_too_large_is_said(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer_of(capsys, write(file, "a", "a", "a", "b"))
    assert not found["good"] and "takes somebody's state: 1 of them do" in found["verdict"]
    assert "need each other, and two of them are in one leaf" in found["notes"][0]


def test_parity_across_leaves(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer_of(capsys, f"{write(file, *'aabbc')} --code 2+2")
    assert found["tables"]["groups"]["rows"] == [[0, "3 + 2", "ck0, ck1, ck2, ck3, ck4"]]
    assert found["tables"]["survival"]["rows"][:3] == [[1, 1.0], [2, 1.0], [3, 0.0]] and found["good"]


def test_parity_of_what_two_nodes_follow(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a registry's root places it: data stays where it is, parity goes where the group has the fewest."""
    command = f"{write(file, *'abababc')} --code 2+2"
    file.write_text(file.read_text().replace('name = "ck4"', 'name = "ck4"\nfollows = true').replace(
        'name = "ck1"', 'name = "ck1"\nfollows = true'))
    found = answer_of(capsys, command)
    assert found["tables"]["groups"]["rows"] == [[0, "2 + 2", "ck0, ck1, ck4, ck6"]] and found["good"]
    file.write_text(file.read_text().replace('name = "ck1"\nfollows = true', 'name = "ck1"'))
    assert "1 machines follow a shard each, and there are 2" in refused(command).what


def test_leaves_that_nobody_knows(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text('[[holder]]\nname = "a"\n[[holder]]\nname = "b"\n')
    found = answer_of(capsys, f"holders {file}")
    assert "No leaf is known" in found["verdict"] and "leaves" not in found["tables"]
    status, text = asked(capsys, f"holders {file}")
    assert status == 0 and "its copies" in text


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("", "", "has no [[holder]]"), ("holder = 3", "", "has no [[holder]]"), ("x =", "", "is not TOML"),
        ('[[holder]]\nleaf = "a"', "", "has no name"), ('[[holder]]\nname = 3', "", "name is not a text"),
        ('[[holder]]\nname = "a"\nfollows = 1', "", "follows is not true or false"),
        ('[[holder]]\nname = "a"\nlaef = "b"', "", "laef is not a key"), ('[[holder]]\nname = "a"', "", "2 replicas"),
        ('[[holder]]\nname = "a"\n' * 2, "", "is given twice"), ('[[holder]]\nname = "a"', "--code 2", "is not K+M"),
        ('[[holder]]\nname = "a"', "--code 2+2", "2 + 2 do not fit 1"),
        ('[[holder]]\nname = "a"', "--code 2+2 --replicas 2", "parity takes the place of copies"),
    ],
)
def test_what_makes_no_sense_is_refused(file: Path, text: str, options: str, said: str) -> None:
    file.write_text(text)
    assert said in refused(f"holders {file} {options}".strip()).what


def test_a_file_that_is_not_there(file: Path) -> None:
    assert refused(f"holders {file}").what == "is not there"
