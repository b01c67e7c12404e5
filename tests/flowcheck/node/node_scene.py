"""The parts of a node that are not real in its tests: DPDK, the capture and the groups. They note what happens to them.

The capture is a ring in memory.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest

from flowcheck.node import cli
from flowcheck.node.drops import OWN

from ..memory_ring import MemoryRing


class World:
    """What a node does to the parts that are not real here, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.live: Any = None
        self.huge: Any = "not asked"
        self.eal: Any = None
        self.rings: list[MemoryRing] = []
        self.error: Exception | None = None
        self.counters: dict[str, int] = {}
        self.groups: list[Any] = []
        self.port: tuple[str, int] | None = None

    def start_eal(self, *configs: Any, huge: Any) -> Any:
        (self.live,), self.huge = configs, huge
        self.eal = _noting(self, "eal")
        return self.eal

    def source(self, eal: Any, config: Any) -> Any:
        assert config is self.live and eal is self.eal
        self.rings = [MemoryRing(64) for _ in range(config.queues)]
        world = self

        class Capture:
            ring_addresses = [ring.ring_address for ring in self.rings]

            def __enter__(self) -> Any:
                world.done.append("open capture")
                return self

            def __exit__(self, *_: object) -> None:
                world.done.append("close capture")

            def start(self) -> None:
                world.done.append("start capture")

            def stop(self) -> None:
                world.done.append("stop capture")

            def counters(self) -> dict[str, int]:
                return dict.fromkeys(("received", *OWN), 0) | world.counters

            def summary(self) -> str:
                return "3 arrived"

            @property
            def error(self) -> Exception | None:
                return world.error

        return Capture()

    def group(self, name: str, config: Any, sources: Any, port: Any, say: Any, writer: Any, hashes: Any) -> Any:
        self.groups.append(NotedGroup(self, name, config, sources, port, say, writer, hashes))
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
        self.sources = given[1]
        self.members: dict[int, Any] = {}
        self.plan: Any = None
        self.failure: BaseException | None = None

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
    monkeypatch.setattr(cli, "start_eal", world.start_eal)
    monkeypatch.setattr(cli, "LiveSource", world.source)
    monkeypatch.setattr(cli, "Group", world.group)
    return world
