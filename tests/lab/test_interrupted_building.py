"""A signal at any step of building: whatever is being created then is known to the clean-up, and goes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowcheck.interrupts import handled
from lab.network import netns
from lab.network.fabric import Fabric
from lab.network.impair import Impairment
from lab.shape import SHARED, STATE, FabricConfig

pytestmark = pytest.mark.root


class Starts:
    """Every process that subprocess starts, by its command; a signal comes to us right after number `at` was forked,
    before subprocess itself knows of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = -1
        self.commands: list[list[str]] = []
        self.children: list[int] = []
        start: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]

        def started(*arguments: Any) -> int:
            child = start(*arguments)
            self.commands.append([os.fsdecode(word) for word in arguments[0]])
            self.children.append(child)
            if len(self.commands) - 1 == self.at:
                os.kill(os.getpid(), signal.SIGTERM)
            return child

        monkeypatch.setattr(subprocess, "_fork_exec", started)

    def begin(self, at: int = -1) -> None:
        self.at = at
        self.commands.clear()
        self.children.clear()


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    with handled(signal.default_int_handler, signal.SIGTERM):
        yield Starts(monkeypatch)


def left(name: str, children: list[int]) -> list[str]:
    spaces = [space for space in netns.names() if space.startswith(f"flowcheck-{name}-")]
    state = [str(parent / name) for parent in (STATE, SHARED) if (parent / name).exists()]
    return [*spaces, *state, *(f"process {pid}" for pid in children if runs(pid))]


def runs(pid: int) -> bool:
    """A process that has ended and was not waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("first", "config"), [
    ("ip", {"impairments": (Impairment("r0"),), "rate_mbit": {"mirror0": 1000}}),
    ("ovsdb-tool", {"switch": "ovs"}),
], ids=["tc", "ovs"])
def test_a_signal_at_any_step_leaves_nothing(
    lab_name: str, starts: Starts, first: str, config: dict[str, Any]
) -> None:
    """first: the command with which the steps begin that the case before has not had."""
    shape = FabricConfig(name=lab_name, ranks=2, mirrored=((0,),), **config)
    with Fabric(shape) as fabric:
        built = [*starts.commands]
        fabric.start_mirror()
        assert left(lab_name, starts.children) != []
    steps = range([words[0] for words in built].index(first), len(built))
    assert len(steps) > 6
    for at in steps:
        starts.begin(at)
        with pytest.raises(KeyboardInterrupt):
            Fabric(shape).up()
        assert left(lab_name, starts.children) == [], f"interrupted at {starts.commands[at]}"


def test_a_signal_when_everything_is_built_leaves_nothing(
    lab_name: str, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = Fabric.up

    def late(fabric: Fabric) -> None:
        up(fabric)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Fabric, "up", late)
    with pytest.raises(KeyboardInterrupt), Fabric(FabricConfig(name=lab_name, ranks=2, mirrored=((0,),))):
        pytest.fail("it was interrupted")
    assert left(lab_name, starts.children) == []


def test_what_was_never_built_takes_nothing_down(fabric: Callable[..., Fabric], lab_name: str) -> None:
    fabric(ranks=2, mirrored=((0,),))
    Fabric(FabricConfig(name=lab_name, ranks=2, mirrored=((0,),))).down()
    assert left(lab_name, []) != []
