"""deploy/flowcheck-node.service under systemd itself, as it lies there: the node starts with what the unit leaves it,
follows a job, and is seen to, whatever happens to it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import TOKEN, Lan
from .test_rights import SETS, rights
from .test_service import _iteration, _job, _join, _run
from .unit_scene import UID, UNIT, Manager

pytestmark = pytest.mark.root
RIGHTS = 1 << 12 | 1 << 13 | 1 << 14  # to administer a network, to have raw sockets, and to lock memory
SETTINGS = """
[control]
listen = "127.0.0.1:0"
token_file = "/etc/flowcheck/token"
[api]
listen = "127.0.0.1:0"
[capture]
device = "af_packet:{near}"
ring_size = 8192
[replica]
resync = "state"
[output]
directory = "/var/lib/flowcheck"
every = 1
"""


class Started:
    """As much of a node as who attaches asks for."""

    def __init__(self, manager: Manager) -> None:
        host, _, port = manager.wait("listening")["control"].rpartition(":")
        self.address = (host, int(port))


@pytest.fixture
def managed(lan: Lan, tmp_path: Path) -> Iterator[Callable[..., Manager]]:
    with contextlib.ExitStack() as stack:
        def make(settings: str = SETTINGS) -> Manager:
            return stack.enter_context(contextlib.closing(
                Manager(tmp_path, settings.format(near=lan.near), {"token": TOKEN + b"\n"})))

        yield make


def seccomp(pid: int) -> tuple[str, str]:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return lines["Uid"].split()[0], lines["Seccomp"].strip()


def test_it_starts_follows_a_job_is_told_of_a_token_and_ends(managed: Any, attach: Any, truth: Any, lan: Any) -> None:
    manager = managed()
    done = manager.ask("start", UNIT.name)  # waits until the node says that it is ready
    assert done.returncode == 0, (done.stderr, manager.errors(), manager.shown())
    assert manager.shown()["SubState"] == "running"
    node, pid = Started(manager), manager.main()
    assert seccomp(pid) == (str(UID), "2")
    job = _job()
    run = _run(truth, job, 2)
    trainer = attach(node, job)
    _join(trainer, run)
    number = _iteration(run, lan, trainer)
    assert manager.wait("iteration", iteration=number)["published"]
    assert manager.seen("written", step=number + 1)
    for name, held in rights(pid).items():  # an ordinary user cannot change the bounding set: it is what the unit says
        assert held.pop("CapBnd") & ~RIGHTS == 0
        assert held == dict.fromkeys(SETS[:3] + SETS[4:], 0) | {"NoNewPrivs": 1}, (name, held)
    token = manager.path("/etc/flowcheck/token")
    token.write_bytes(TOKEN + b"\nanother token that only tests have\n")
    assert manager.ask("reload", UNIT.name).returncode == 0
    manager.wait("access")
    assert manager.main() == pid and manager.shown()["ActiveState"] == "active"
    number = _iteration(run, lan, trainer)
    assert manager.wait("iteration", iteration=number)["published"]
    assert manager.ask("stop", UNIT.name).returncode == 0
    shown = manager.shown()
    assert (shown["ActiveState"], shown["Result"], shown["ExecMainStatus"]) == ("inactive", "success", "0")
    manager.wait("stopped")
    assert [one.stat().st_uid for one in manager.path("/dev/shm").glob("flowcheck-*.replica")] == [UID]
    assert list(manager.path("/var/lib/flowcheck").rglob("manifest.json"))


def test_settings_that_are_wrong_are_not_tried_again_and_again(managed: Any) -> None:
    manager = managed(SETTINGS.replace("ring_size", "ring_sice"))
    assert manager.ask("start", UNIT.name).returncode != 0
    shown = manager.shown()
    assert (shown["ActiveState"], shown["ExecMainStatus"], shown["NRestarts"]) == ("failed", "2", "0"), shown
    assert "ring_sice" in manager.errors()


@pytest.mark.slow
def test_it_is_started_again_when_it_was_killed_and_when_it_hangs(
    managed: Any, attach: Any, truth: Any, lan: Any
) -> None:
    """With the unit's own minute of a watchdog. What it had is there again each time."""
    manager = managed()
    assert manager.ask("start", UNIT.name).returncode == 0, manager.errors()
    node = Started(manager)
    job = _job()
    run = _run(truth, job, 2)
    trainer = attach(node, job)
    _join(trainer, run)
    number = _iteration(run, lan, trainer)
    assert manager.wait("iteration", iteration=number)["published"]
    for again, how in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
        os.kill(manager.main(), how)
        manager.until(lambda again=again: manager.shown()["NRestarts"] == str(again))
        assert manager.wait("kept")["step"] == number + 1
        manager.wait("listening")
        manager.until(lambda: manager.shown()["SubState"] == "running")
