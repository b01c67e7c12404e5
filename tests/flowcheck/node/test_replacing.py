"""The operator's command: what it is told, once for each loss, and what is done where it fails, hangs or is not there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowcheck.checkpoint.coding.holders import Site
from flowcheck.node.protect.placement import Member
from flowcheck.node.protect.replacement import LONGEST_PAUSE, SECONDS, Operator

from ..hand_node import until

LOST = Member(Site("ck1", "host1", "leaf1", "rack1"), "10.0.0.2:7071")


class Asked:
    """An operator, its clock, and what it says."""

    def __init__(self, *command: str) -> None:
        self.at = 0.0
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.operator = Operator(command, "my cluster", lambda event, **fields: self.said.append((event, fields)),
                                 lambda: self.at)

    def ask(self, number: int = 7, member: Member = LOST) -> bool:
        return self.operator.ask(number, member)

    def starts(self) -> list[dict[str, Any]]:
        return [fields for event, fields in self.said if event == "replacing"]

    def problems(self) -> list[str]:
        return [fields["why"] for event, fields in self.said if event == "problem"]


@pytest.fixture
def sh() -> Iterator[Callable[[str], Asked]]:
    """sh(script) -> an operator whose command a shell runs."""
    made: list[Asked] = []

    def one(script: str) -> Asked:
        made.append(Asked("sh", "-c", script))
        return made[-1]

    yield one
    for asked in made:
        asked.operator.close()


def there(path: Path) -> str:
    """What a command has written, once its line is whole."""
    until(lambda: path.exists() and path.read_text().endswith("\n"))
    return path.read_text()


def test_what_it_is_told(sh: Callable[[str], Asked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the member, of the loss, and of the cluster; beside what the node's own environment has."""
    monkeypatch.setenv("OPERATORS_OWN", "kept")
    asked = sh(f"env > {tmp_path}/told")
    until(asked.ask)
    there = (tmp_path / "told").read_text().splitlines()
    assert "OPERATORS_OWN=kept" in there
    assert sorted(one for one in there if one.startswith("FLOWCHECK_") and one.partition("=")[0] not in os.environ) == [
        "FLOWCHECK_ADDRESS=10.0.0.2:7071", "FLOWCHECK_CLUSTER=my cluster", "FLOWCHECK_FOLLOWS=1",
        "FLOWCHECK_HOST=host1", "FLOWCHECK_LEAF=leaf1", "FLOWCHECK_LOST=ck1", "FLOWCHECK_RACK=rack1",
        "FLOWCHECK_RECOVERY=7"]
    assert asked.said == [("replacing", {"lost": "ck1", "recovery": 7})]


def test_it_is_told_of_a_member_without_a_mirror_port(sh: Callable[[str], Asked], tmp_path: Path) -> None:
    asked = sh(f"echo $FLOWCHECK_FOLLOWS > {tmp_path}/told")
    until(lambda: asked.ask(7, Member(Site("ck1"), "a:1", False)))
    assert (tmp_path / "told").read_text() == "0\n"


def test_it_is_apart_from_the_node(
    sh: Callable[[str], Asked], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It waits for no input, its output is not among the node's events, and a signal to the node is none to it."""
    asked = sh(f"cd {tmp_path}; echo to nobody; read line; echo $line > read; cut -d' ' -f6 /proc/$$/stat > session; "
               "echo $$ > pid")
    ours, (there, here) = os.dup(0), os.pipe()
    try:
        os.write(here, b"typed\n")
        os.dup2(there, 0)
        until(asked.ask)
    finally:
        os.dup2(ours, 0)
        for one in (ours, there, here):
            os.close(one)
    assert (tmp_path / "read").read_text() == "\n"
    assert (tmp_path / "session").read_text() == (tmp_path / "pid").read_text()
    assert capfd.readouterr().out == ""


def test_it_is_asked_once_for_each_loss_and_member(sh: Callable[[str], Asked]) -> None:
    asked = sh("true")
    assert not asked.ask()  # it never waits
    until(asked.ask)
    asked.at += 10 * SECONDS
    assert asked.ask() and asked.ask() and len(asked.starts()) == 1
    assert not asked.ask(8)
    other = Member(Site("ck2"), "b:1")
    assert not asked.ask(7, other)
    assert asked.starts() == [{"lost": "ck1", "recovery": 7}, {"lost": "ck1", "recovery": 8},
                              {"lost": "ck2", "recovery": 7}]
    until(lambda: asked.ask(8) and asked.ask(7, other))
    assert len(asked.starts()) == 3 and asked.problems() == []


def test_one_that_fails_is_tried_again_later_and_later() -> None:
    asked = Asked("/nothing/here", "x")
    assert not asked.ask()
    for tries, pause in enumerate([5.0, 10.0, 20.0, 40.0, 80.0, 160.0, LONGEST_PAUSE, LONGEST_PAUSE], 1):
        assert asked.problems()[-1] == ("protect.replace, '/nothing/here' for ck1: cannot be started: No such file or "
                                        f"directory; it is tried again in {pause:g} s")
        asked.at += pause - 0.5
        assert not asked.ask() and len(asked.problems()) == tries
        asked.at += 0.5
        assert not asked.ask() and len(asked.problems()) == tries + 1
    assert asked.starts() == []


def test_a_status_other_than_zero_is_a_failure(sh: Callable[[str], Asked]) -> None:
    asked = sh("exit 3")
    until(lambda: asked.ask() or asked.problems())
    assert asked.problems() == ["protect.replace, 'sh' for ck1: ended with status 3; it is tried again in 5 s"]
    assert not asked.ask() and len(asked.starts()) == 1
    asked.at += 5.0
    assert not asked.ask() and len(asked.starts()) == 2


def runs(pid: int) -> bool:
    """And is not only waiting for somebody to hear of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_one_that_hangs_is_ended_with_all_that_it_started(sh: Callable[[str], Asked], tmp_path: Path) -> None:
    asked = sh(f"sleep 600 & echo $! > {tmp_path}/child; wait")
    assert not asked.ask()
    child = int(there(tmp_path / "child"))
    asked.at += SECONDS - 0.5
    assert not asked.ask() and asked.problems() == [] and runs(child)
    asked.at += 0.5
    assert not asked.ask() and asked.problems() == [
        "protect.replace, 'sh' for ck1: has not ended after 1800 s; it is tried again in 5 s"]
    until(lambda: not runs(child))
    assert not asked.ask() and len(asked.starts()) == 1
    asked.at += 5.0
    assert not asked.ask() and len(asked.starts()) == 2


def test_what_runs_is_ended_at_the_end(sh: Callable[[str], Asked], tmp_path: Path) -> None:
    """Another root starts it again. What had ended by itself, or could not be started, is no trouble then."""
    asked = sh(f"echo $$ > {tmp_path}/$FLOWCHECK_LOST; [ $FLOWCHECK_LOST = quick ] || exec sleep 600")
    for name in ("quick", "slow"):
        assert not asked.ask(7, Member(Site(name), "a:1"))
    quick, slow = int(there(tmp_path / "quick")), int(there(tmp_path / "slow"))
    until(lambda: not runs(quick))
    asked.operator.close()
    asked.operator.close()
    assert not runs(slow)
