"""The parts of a node that are not real in its tests: DPDK, the capture and the groups. They note what happens to them.

The capture is a ring in memory.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest

from flowcheck.node.groups import groups
from flowcheck.node.groups.inbox import Inbox
from flowcheck.node.ports import open_captures
from flowcheck.node.ports.drops import OWN

from ..memory_ring import MemoryRing


class World:
    """What a node does to the parts that are not real here, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.lives: list[Any] = []  # of all captures, as the node planned them
        self.huge: Any = "not asked"
        self.eal: Any = None
        self.rings: list[MemoryRing] = []  # of all captures, one after the other
        self.errors: dict[str, Exception] = {}  # by device
        self.counters: dict[str, dict[str, int]] = {}  # by device
        self.refused: dict[str, Exception] = {}  # devices that cannot be opened
        self.groups: list[Any] = []
        self.port: tuple[str, int] | None = None

    @property
    def live(self) -> Any:
        """Of the only capture."""
        (live,) = self.lives
        return live

    def start_eal(self, *configs: Any, huge: Any) -> Any:
        self.lives, self.huge = list(configs), huge
        self.eal = _noting(self, "eal")
        return self.eal

    def source(self, eal: Any, config: Any) -> Any:
        assert config in self.lives and eal is self.eal
        device, which = config.device, f"capture {config.device}" if len(self.lives) > 1 else "capture"
        if device in self.refused:
            raise self.refused[device]
        rings = [MemoryRing(64) for _ in range(config.queues)]
        self.rings += rings
        world = self

        class Capture:
            ring_addresses = [ring.ring_address for ring in rings]

            def __init__(self) -> None:
                world.done.append(f"open {which}")

            def close(self) -> None:
                world.done.append(f"close {which}")

            def start_port(self) -> None:
                pass

            def start(self) -> None:
                world.done.append(f"start {which}")

            def stop(self) -> None:
                world.done.append(f"stop {which}")

            def counters(self, queue: int | None = None) -> dict[str, int]:
                return dict.fromkeys(("received", *OWN), 0) | world.counters.get(device, {})

            def summary(self) -> str:
                return "3 arrived"

            @property
            def error(self) -> Exception | None:
                return world.errors.get(device)

        return Capture()

    def group(
        self, name: str, config: Any, port: Any, say: Any, writer: Any, hashes: Any, common: Any, *, telemetry: Any
    ) -> Any:
        assert telemetry is None, "nothing of it is there without the setting"
        self.groups.append(NotedGroup(self, name, config, port, say, writer, hashes))
        self.groups[-1].common = common
        return self.groups[-1]

    def say(self, event: str, **fields: Any) -> None:
        if event in ("placing", "updating"):  # of the machine, before anything of the node
            return
        self.done.append(f"say {event}")
        self.said.append((event, fields))


def _noting(world: World, name: str) -> Any:
    class Part:
        huge = False  # as DPDK's memory would say

        def __enter__(self) -> Any:
            world.done.append(f"open {name}")
            return self

        def __exit__(self, *_: object) -> None:
            world.done.append(f"close {name}")

    return Part()


class NotedGroup:
    def __init__(self, world: World, name: str, *given: Any) -> None:
        self.world, self.name, self.given = world, name, given
        self.intake = self.ranks = self  # its parts are noted as one
        self.port = given[1]
        self.members: dict[int, Any] = {}
        self.plan: Any = None
        self.failure: BaseException | None = None
        self.inbox = Inbox(1 << 20)

    def refused(self, run: tuple[str, int, int]) -> str:
        return ""

    def join(self, run: tuple[str, int, int], member: Any, instance: str) -> str:
        return f"{run} has come to group {self.name!r}"

    def start(self) -> None:
        self.world.done.append(f"start group {self.name!r}")

    def stop(self) -> None:
        self.world.done.append(f"stop group {self.name!r}")
        if self.world.port is not None:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(self.world.port)


def put_in(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(open_captures, "start_eal", world.start_eal)
    monkeypatch.setattr(open_captures, "LiveSource", world.source)
    monkeypatch.setattr(groups, "attended", world.group)
    return world
