"""Which processes are taken for ones that hang: real ones, and a kernel's figures by hand."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowcheck.node.status import heartbeat
from flowcheck.node.status.heartbeat import CALM_SECONDS, SILENT_SECONDS, START_SECONDS, Pulse, beat

from ..hand_node import LONGEST


class Scene:
    """A process of two threads. step(): so many seconds pass in looks of a tenth."""

    def __init__(self, folder: Path) -> None:
        self.now, self.folder = 100.0, folder
        self.threads = {7: ["S", 0.0, 0.0], 8: ["S", 0.0, 0.0]}
        self._write()
        self.pulse = Pulse(7, lambda: self.now, folder)

    def _write(self) -> None:
        for thread, (state, ran, waited) in self.threads.items():
            at = self.folder / "7" / "task" / str(thread)
            at.mkdir(parents=True, exist_ok=True)
            (at / "stat").write_text(f"{thread} (py) thon) {state} 1 2 3")
            (at / "schedstat").write_text(f"{int(ran * 1e9)} {int(waited * 1e9)} 5\n")

    def step(self, seconds: float, ran: float = 0.0, waited: float = 0.0, look: float = 0.1) -> str:
        """ran, waited: of the main thread, for each second."""
        why = ""
        for _ in range(round(seconds / look)):
            self.now += look
            self.threads[7][1] += ran * look
            self.threads[7][2] += waited * look
            self._write()
            why = why or self.pulse.look()
        return why


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    made = Scene(tmp_path)
    made.pulse.heard()
    return made


@pytest.mark.parametrize(("state", "ran", "waited", "why"), [
    ("T", 0.0, 0.0, "it is stopped"), ("S", 0.0, 0.0, "it waits"), ("D", 0.0, 0.0, "it waits for a disk"),
    ("R", 1.0, 0.0, "it turns in a circle"), ("R", 0.5, 0.5, "it turns in a circle"),
])
def test_one_that_could_have_run_and_says_nothing_hangs(
    scene: Scene, state: str, ran: float, waited: float, why: str
) -> None:
    scene.threads[7][0] = state
    share = 1.0 - waited
    assert scene.step(CALM_SECONDS + (SILENT_SECONDS - 1) / share, ran, waited) == ""
    assert scene.step(3.0 / share, ran, waited).endswith(why)


@pytest.mark.parametrize(("state", "ran", "waited"), [("R", 0.0, 0.0), ("R", 0.02, 0.98), ("S", 0.01, 0.97)])
def test_one_that_waits_for_a_processor_does_not(scene: Scene, state: str, ran: float, waited: float) -> None:
    scene.threads[7][0] = state
    assert scene.step(60.0, ran, waited) == ""


def test_nor_one_whose_main_thread_waits_for_another_that_does(scene: Scene) -> None:
    scene.threads[8][0] = "R"
    assert scene.step(60.0) == ""


def test_nor_one_that_is_heard_or_that_nobody_looked_at(scene: Scene) -> None:
    for _ in range(10):
        assert scene.step(SILENT_SECONDS) == ""
        scene.pulse.heard()
    scene.now += 3600.0  # the node itself was away
    assert scene.step(1.0) == ""


def test_at_its_start_it_has_longer_until_it_has_given_a_sign(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.step(10.0) == ""
    scene.pulse.heard(beats=False)  # it said something, of which no more need come
    assert scene.step(START_SECONDS - 5) == ""
    assert "no sign of life" in scene.step(10.0)


BEATS = """
import sys, threading, time
from flowcheck.node.status.heartbeat import beat
lock = threading.Lock()
lock.acquire()
beat({})
how = sys.argv[1]
if how == "lock": lock.acquire()
while how == "circle": pass
while True:
    time.sleep(0.1)
    beat({})
"""


@contextlib.contextmanager
def process(how: str) -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen([sys.executable, "-P", "-c", BEATS, how], stdout=subprocess.PIPE)
    try:
        assert made.stdout is not None and json.loads(made.stdout.readline())["event"] == "alive"
        yield made
    finally:
        made.kill()
        made.wait()
        made.stdout.close()


@pytest.mark.parametrize(("how", "why"), [("stop", "stopped"), ("lock", "it waits"), ("circle", "circle")])
def test_a_real_one(monkeypatch: pytest.MonkeyPatch, how: str, why: str) -> None:
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(heartbeat, "CALM_SECONDS", 0.1)
    with process(how) as one:
        if how == "stop":
            os.kill(one.pid, signal.SIGSTOP)
        pulse, end = Pulse(one.pid), time.monotonic() + LONGEST
        pulse.heard()
        while not (found := pulse.look()):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert why in found


def test_a_full_pipe_is_not_waited_for() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    for _ in range(5000):
        beat({"known": 1}, write)
    os.close(read)
    beat({}, write)  # nor does anybody have to listen
    os.close(write)
