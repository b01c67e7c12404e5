"""A network that is split between three nodes of etcd and the members beside them: who is on the smaller side keeps
what was decided and decides nothing, whoever was root; the larger side goes through a loss, and its end is
everybody's."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flowcheck.checkpoint.coding.holders import Site
from flowcheck.errors import EnvironmentProblem
from flowcheck.node.protect.placement import Decided, Member
from flowcheck.node.protect.registry import ROOT, RegistryError
from flowcheck.node.protect.registry_etcd import Etcd
from flowcheck.node.protect.registry_member import Seat
from lab.network import netns
from tests.namespaces import need_namespaces

from ..hand_node import until
from .registry_scene import EtcdServer, etcd_server
from .seat_scene import apart

pytestmark = [pytest.mark.root, pytest.mark.slow]
GRACE = 8.0
PLACES = {"a": (0, "l1"), "b": (1, "l1"), "c": (1, "l2"), "d": (2, "l2")}  # site and leaf of each member


class Network:
    """Three sites, each a namespace with an address, and a switch between them."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        name = f"t{os.getpid():x}e"
        self.switch, self.sites = f"{name}-switch", [f"{name}-s{number}" for number in range(3)]
        self.hosts = [f"10.79.0.{number + 1}" for number in range(3)]
        for one in (self.switch, *self.sites):
            netns.add(one)
            stack.callback(netns.delete, one)
            netns.quiet(one)
        netns.batch(self.switch, ["link add br0 type bridge", "link set br0 up"])
        for number, (site, host) in enumerate(zip(self.sites, self.hosts, strict=True)):
            netns.run("ip", "-n", self.switch, "link", "add", f"p{number}", "type", "veth", "peer", "name", "e0",
                      "netns", site)
            netns.batch(self.switch, [f"link set p{number} master br0", f"link set p{number} up"])
            netns.batch(site, [f"addr add {host}/24 dev e0", "link set e0 up"])

    def cut(self, site: int) -> None:
        """All that goes to this site and comes from it is lost in the switch, and nobody is told."""
        netns.batch(self.switch, [f"link set p{site} nomaster"])

    def mend(self, site: int) -> None:
        netns.batch(self.switch, [f"link set p{site} master br0"])


class Sitting:
    """A member's turns, on a thread that is at its site."""

    def __init__(self, name: str, network: Network, endpoints: list[str], folder: Path) -> None:
        site, leaf = PLACES[name]
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.seat = Seat(Etcd(endpoints, "x", seconds=1.0), Member(Site(name, leaf=leaf), f"{name}:1"), 2, GRACE,
                         lambda event, **fields: self.said.append((event, fields)), folder / f"{name}.json")
        self.sources: dict[str, str] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=netns.inside, args=(network.sites[site], self._sit))
        self._thread.start()

    def _sit(self) -> None:
        while not self._ending.is_set():
            self.sources = self.seat.turn()
            self._ending.wait(0.2)
        self.seat.close()

    def count(self, event: str) -> int:
        return [one for one, _ in self.said].count(event)

    def close(self) -> None:
        self._ending.set()
        self._thread.join(60.0)


@pytest.fixture
def network() -> Iterator[Network]:
    need_namespaces()
    with contextlib.ExitStack() as stack:
        try:
            made = Network(stack)
        except EnvironmentProblem as problem:
            pytest.skip(f"no bridge here: {problem.what}")
        yield made


def test_a_split_network(network: Network, tmp_path: Path) -> None:
    def asked_at(site: int, server: EtcdServer) -> str:
        """Who is root for those of that site."""
        def ask() -> str:
            with contextlib.closing(Etcd([server.endpoints[site]], "x", seconds=1.0)) as registry:
                try:
                    found = registry.read()
                except RegistryError:
                    return ""
                return found[ROOT].value if ROOT in found else ""

        return netns.inside(network.sites[site], ask)

    prefixes = [netns.prefix(site) for site in network.sites]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(etcd_server(tmp_path / "etcd", 3, network.hosts, prefixes, partial(
            netns.inside, network.sites[0])))
        seats: dict[str, Sitting] = {}

        def come(name: str) -> None:
            near = PLACES[name][0]
            ends = [server.endpoints[near], *(one for at, one in enumerate(server.endpoints) if at != near)]
            seats[name] = stack.enter_context(contextlib.closing(Sitting(name, network, ends, tmp_path)))

        come("a")
        until(lambda: asked_at(0, server) == "a")
        for name in "bcd":
            come(name)
        until(lambda: all(len(one.seat.decided.members) == 4 for one in seats.values()))
        before = seats["a"].seat.decided
        assert apart(before) and all(one.seat.decided.text() == before.text() for one in seats.values())
        sources = {name: before.sources(name) for name in seats}
        until(lambda: {name: one.sources for name, one in seats.items()} == sources)

        def same(decided: Decided) -> bool:
            return (decided.members, decided.holders) == (before.members, before.holders)

        network.cut(0)  # the root, and one of three
        until(lambda: seats["a"].count("unregistered") == 1)
        until(lambda: asked_at(1, server) in ("b", "c", "d"))
        until(lambda: any(one.seat.decided.recovery is not None for one in seats.values()))
        assert seats["a"].seat.decided.text() == before.text() and seats["a"].sources == sources["a"]
        assert asked_at(0, server) == "", "the smaller side answers nothing"
        for name in "bcd":
            decided = seats[name].seat.decided
            assert same(decided) and (decided.recovery is None or decided.recovery.lost == ("a",))
        network.mend(0)
        until(lambda: all(one.seat.decided.epoch > before.epoch + 1 and one.seat.decided.recovery is None
                          for one in seats.values()))
        assert len({one.seat.decided.text() for one in seats.values()}) == 1
        assert same(seats["a"].seat.decided) and {name: one.sources for name, one in seats.items()} == sources
        assert seats["a"].count("unregistered") == 1
        network.cut(2)  # others meanwhile; and each alone: no side is large enough
        network.cut(0)
        epoch = seats["a"].seat.decided.epoch
        until(lambda: all(one.seat._said != "" for one in seats.values()))
        end = time.monotonic() + GRACE
        until(lambda: time.monotonic() > end)
        assert {one.seat.decided.epoch for one in seats.values()} == {epoch}
        assert {name: one.sources for name, one in seats.items()} == sources
        network.mend(0)
        network.mend(2)
        until(lambda: all(one.seat._said == "" for one in seats.values()))
        assert all(same(one.seat.decided) for one in seats.values())
