"""What systemd is told, and the unit file that deploy/ has."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowcheck.node import notify
from flowcheck.node.holder import Holder
from flowcheck.node.notify import Notify
from flowcheck.node.service import Node

UNIT = Path(__file__).resolve().parents[3] / "deploy" / "flowcheck-node.service"


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        yield sock


def watched(monkeypatch: pytest.MonkeyPatch, usec: int, began: float) -> tuple[Notify, list[float]]:
    """One whose manager waits for so many microseconds; and its clock."""
    now = [began]
    monkeypatch.setenv("WATCHDOG_USEC", str(usec))
    monkeypatch.setattr(notify.time, "monotonic", lambda: now[0])
    return Notify(), now


def nothing_more(sock: socket.socket) -> bool:
    sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        sock.recv(100)
    sock.settimeout(10)
    return True


def test_what_systemd_hears(heard: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    one, now = watched(monkeypatch, 3_000_000, 100.0)
    one.ready()
    assert heard.recv(100) == b"READY=1"
    one.alive()
    assert heard.recv(100) == b"WATCHDOG=1"
    now[0] += 1.49
    one.alive()
    assert nothing_more(heard)  # half of the time has not passed
    now[0] += 0.02
    one.alive()
    assert heard.recv(100) == b"WATCHDOG=1"
    one.stopping()
    assert heard.recv(100) == b"STOPPING=1" and nothing_more(heard)


def test_an_abstract_name_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"flowcheck-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{name}")
        sock.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        Notify().ready()
        assert sock.recv(100) == b"READY=1"


def test_a_watchdog_is_fed_from_the_first_moment_on(heard: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the machine has just started, by half of its time to the microsecond."""
    one, now = watched(monkeypatch, 2_000_000_000_000, 0.0)
    one.alive()
    assert heard.recv(100) == b"WATCHDOG=1"
    now[0] = 999_999.75
    one.alive()
    assert nothing_more(heard)
    now[0] = 1_000_000.0
    one.alive()
    assert heard.recv(100) == b"WATCHDOG=1"


@pytest.mark.parametrize(("usec", "pid"), [("", ""), ("x", ""), ("1000", "1")])
def test_no_watchdog_is_fed_that_is_not_there_or_another_processs(
    heard: socket.socket, monkeypatch: pytest.MonkeyPatch, usec: str, pid: str
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    if pid:
        monkeypatch.setenv("WATCHDOG_PID", pid)
    Notify().alive()
    assert nothing_more(heard)


def test_a_manager_that_is_gone_or_does_not_read_is_no_trouble(
    heard: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Notify()
    for _ in range(2000):  # more than its queue holds
        one.ready()
    for name in (os.environ["NOTIFY_SOCKET"] + ".none", "@no such name", ""):
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        Notify().ready()


def test_without_a_manager_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    monkeypatch.setattr(notify.socket, "socket", lambda *given: made.append(given))
    one = Notify()
    one.ready()
    one.alive()
    one.stopping()
    assert made == []


def test_processes_beside_the_node_are_ended_by_the_node() -> None:
    """Else systemd ends an upload together with the node that would have waited for it."""
    assert re.findall(r"^KillMode=(\S+)$", UNIT.read_text(), re.MULTILINE) == ["mixed"]


@pytest.mark.parametrize("made", [Node, Holder])
def test_a_node_that_is_told_to_end_looks_at_nothing_any_more(
    made: type[Node] | type[Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever sent the signal may have sent it to all of its processes: their ends are no news."""
    node = made.__new__(made)  # with nothing to look at
    node._stopping = False
    monkeypatch.setattr("time.sleep", lambda _: node.stop())
    node.wait()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_unit_file_is_valid_and_hardened(tmp_path: Path) -> None:
    """With a program that is there: verify looks for it."""
    text = UNIT.read_text()
    program = re.findall(r"^ExecStart=(\S+) ", text, re.MULTILINE)
    assert program == ["/opt/flowcheck/.venv/bin/flowcheck-node"]
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace(program[0], sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert done.returncode == 0 and UNIT.name not in done.stderr, done.stderr
    rated = subprocess.run(["systemd-analyze", "security", "--offline=true", "--threshold=35", "--no-pager", str(unit)],
                           capture_output=True, text=True)
    assert rated.returncode == 0, rated.stdout[-3000:]
