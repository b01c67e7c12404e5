"""The mirror is configured anew while a real node follows a job: it copies other ports of the switch, ends at another
interface of the node, connections get other UDP source ports. The node goes on by itself, and every version that it
publishes is torch's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.flowcheck.altered import sealed

from .test_live_ranges import SECONDS, Training, all_equal, small_job
from .test_several_captures import _two

pytestmark = pytest.mark.root
MOST = 60  # iterations in which versions must be there again
PACE = 0.2  # seconds at most between two of them: a job has one, and a node that is busy is waited for so long


class Mirror:
    """Where frames go. to: a socket; None: there is no session."""

    def __init__(self, lan: Any, to: Any = None) -> None:
        self._lan, self._to = lan, to

    def send(self, frames: Sequence[bytes]) -> None:
        if self._to is not None:
            self._lan.send(frames, self._to)


def again(at: Training, node: Any) -> int:
    """Train until versions are published again, at the pace of a job. The first of these iterations."""
    for _ in range(MOST):
        number = at.train(at.questions(node, False), sums=True)
        end = time.monotonic() + PACE
        while time.monotonic() < end:
            closed = [one for one in node.said("iteration") if one["iteration"] == number]
            if closed and closed[0]["published"]:
                return number
            if closed:
                break
            time.sleep(0.005)
    raise AssertionError(node.lines[-8:])


def goes_on(at: Training, node: Any, tmp_path: Path) -> None:
    """Versions follow each other, verified, in time; all that were ever published are torch's."""
    again(at, node)
    for _ in range(4):
        line = node.wait("iteration", SECONDS, iteration=at.train(sums=True))
        assert line["published"] and line["status"] == "verified" and line["missing"] == {}, line
    assert node.end() == 0
    published = [one["iteration"] for one in node.said("iteration") if one["published"]]
    assert all_equal(tmp_path, at.known) == published


@pytest.fixture
def following(start_node: Any, attach: Any, truth: Any, lan: Any) -> Any:
    """following(captures="", ports=(0,), **job) -> training, node: with a version."""

    def begin(captures: str = "", ports: tuple[int, ...] = (0,), resync: str = "ranges", mirror: Any = None,
              **options: Any) -> Any:
        at = Training(small_job(**options), truth, mirror or Mirror(lan, lan.socket), ports)
        at.train(), at.train()
        node = start_node(captures=captures, resync=resync)
        at.attach(node, attach, "one")
        at.until_patched(node)
        return at, node

    return begin


@pytest.mark.slow
@pytest.mark.parametrize("gap", [0, 3])
def test_other_ports_of_the_switch(following: Any, tmp_path: Path, lan: Any, gap: int) -> None:
    """Of a ring of four, of which each rank's port has all: rank 0's, then rank 2's."""
    at, node = following(ranks=4)
    mirror, at.lan = at.lan, Mirror(lan)
    for _ in range(gap):
        at.train()
    at.lan, at.ports = mirror, (2,)
    goes_on(at, node, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("gap", [0, 3])
def test_another_interface_of_the_node(following: Any, tmp_path: Path, lan: Any, gap: int) -> None:
    second = lan.second()
    at, node = following(captures=_two(lan))
    at.lan = Mirror(lan)
    for _ in range(gap):
        at.train()
    at.lan = Mirror(lan, second)
    goes_on(at, node, tmp_path)


class Both(Mirror):
    """Every frame comes by two ports: by the first one alone after `unplug`."""

    def __init__(self, lan: Any, second: Any) -> None:
        super().__init__(lan, lan.socket)
        self._second = second

    def send(self, frames: Sequence[bytes]) -> None:
        super().send(frames)
        if self._second is not None:
            self._lan.send(frames, self._second)

    def unplug(self) -> None:
        self._second = None


@pytest.mark.parametrize("size", [128, pytest.param(8192, marks=pytest.mark.slow)])
def test_one_of_two_ports_dies(following: Any, tmp_path: Path, lan: Any, size: int) -> None:
    """All comes by the other one, too. With small rings, iterations have to be given up before that is known."""
    both = Both(lan, lan.second())
    captures = "".join(f'[[capture]]\ndevice = "af_packet:{near}"\nring_size = {size}\nhuge = false\n'
                       for near in (lan.near, lan.near2))
    at, node = following(captures=captures, mirror=both)
    assert node.wait("iteration", SECONDS, iteration=at.train(sums=True))["published"]
    both.unplug()
    goes_on(at, node, tmp_path)
    assert f"from af_packet:{lan.near2}" in node.seen("moved")["why"]
    assert bool(node.said("overload")) is (size == 128)


@pytest.mark.slow
def test_other_udp_source_ports(following: Any, tmp_path: Path) -> None:
    at, node = following()

    def changed(frame: bytes) -> bytes:
        return sealed(frame[:34] + (40_000 + frame[35]).to_bytes(2, "big") + frame[36:])

    at.change = changed
    for _ in range(3):
        assert node.wait("iteration", SECONDS, iteration=at.train())["published"]
    goes_on(at, node, tmp_path)
