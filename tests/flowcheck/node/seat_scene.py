"""Seats of one process around one registry: members that come, go, or are killed within a call, and copies that are
made in no time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flowcheck.checkpoint.coding.holders import Site
from flowcheck.node.protect.placement import Decided, Have, Member, Part
from flowcheck.node.protect.registry import HAVE, ROOT, RegistryError, Shared
from flowcheck.node.protect.registry_member import Seat
from flowcheck.node.protect.replacement import Operator

GRACE = 10.0
LEAVES = {"a": "l1", "b": "l1", "c": "l2", "d": "l2", "e": "l3", "f": "l1", "g": "l4"}
RUN = ("run", 0)


class Killed(BaseException):
    """kill -9, at this point."""


class _Session:
    """A member's registry, which may be out of reach, or the last thing that the member speaks to."""

    def __init__(self, session: Any, name: str, cluster: Cluster) -> None:
        self._session, self._name, self._cluster = session, name, cluster

    def __getattr__(self, call: str) -> Any:
        cluster = self._cluster
        if cluster.gone:
            cluster.asked += 1
            raise RegistryError(f"etcd does not answer ({min(cluster.asked, 9)})", where="registry")
        if cluster.kill_in is None or cluster.root() != self._name:
            return getattr(self._session, call)

        def counted(*given: Any) -> Any:
            """Two points: before the call, and after it was done."""
            cluster.point()
            found = getattr(self._session, call)(*given)
            cluster.point()
            return found

        return counted


class Cluster:
    """Time passes by turns of a second. shards: what a member follows, by its name. kill_in: the root dies at the point
    of that number from now on. code: of a group with parity, in which all take part; replicas: of copies besides."""

    def __init__(self, folder: Path, grace: float = GRACE, keep: int = 2, code: tuple[int, int] | None = None,
                 replicas: int = 2) -> None:
        self.folder, self.grace, self.keep, self.at, self.gone = folder, grace, keep, 0.0, False
        self.code, self.replicas = code, replicas
        self.asked = 0  # while it was gone
        self.kill_in: int | None = None
        self.killed: list[str] = []
        self.shared = Shared(lambda: self.at)
        self.seats: dict[str, Seat] = {}
        self.said: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        self.sources: dict[str, dict[str, str]] = {}
        self.shards: dict[str, str] = {}
        self.copies: dict[str, dict[tuple[str, str], list[int]]] = {}  # of a member: (address, shard) -> steps
        self.streams: dict[str, list[tuple[int, int]]] = {}  # of a member: step and number
        self.void: list[Decided] = []

    def come(self, *names: str, port: int = 7071, standby: bool = False, operator: Operator | None = None,
             follows: bool = True) -> None:
        for name in names:
            said = self.said.setdefault(name, [])
            member = Member(Site(name, leaf=LEAVES[name]), f"{name}.example:{port}", follows, standby,
                            self.code is not None)
            self.copies.setdefault(name, {})
            self.streams.setdefault(name, [])
            self.seats[name] = Seat(
                _Session(self.shared.session(), name, self), member, self.replicas, self.grace,
                lambda event, said=said, **fields: said.append((event, fields)), self.folder / f"{name}.json",
                lambda: self.at, operator, 100 * self.grace, self.void.append, self.code,
            )

    def follow(self, shards: Mapping[str, str]) -> None:
        self.shards |= shards

    def go(self, *names: str) -> None:
        for name in names:
            del self.seats[name]

    def point(self) -> None:
        assert self.kill_in is not None
        self.kill_in -= 1
        if self.kill_in < 0:
            self.kill_in = None
            raise Killed

    def turns(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        for _ in range(int(seconds)):
            self.at += 1.0
            for name, seat in list(self.seats.items()):
                try:
                    self.sources[name] = seat.turn(self._held(name), self._own(name), self._streams(name))
                except Killed:
                    self.killed.append(name)
                    del self.seats[name]
                    continue
                self._pull(name, seat)
                if seat.part is not None:
                    self._encode(name, seat, seat.part)
            each()

    def _own(self, name: str) -> list[dict[str, Any]]:
        return [{"run_id": RUN[0], "epoch": RUN[1], "shard": self.shards[name]}] if name in self.shards else []

    def _held(self, name: str) -> list[dict[str, Any]]:
        return [{"source": f"{address}/{shard}", "run_id": RUN[0], "epoch": RUN[1], "steps": steps}
                for (address, shard), steps in self.copies[name].items()]

    def _streams(self, name: str) -> list[dict[str, Any]]:
        return [{"run_id": RUN[0], "epoch": RUN[1], "step": step, "stream": number}
                for step, number in self.streams[name]]

    def _encode(self, name: str, seat: Seat, part: Part) -> None:
        """The newest step that all nodes with data have; what is frozen stays."""
        steps = []
        for address in part.data:
            data = address.partition(".")[0]
            if data not in self.seats or data not in self.shards:
                return  # it does not answer, or has nothing
            steps.append(set(self.copies[data].get((address, self.shards[data]), ())))
        streams = self.streams[name]
        if (common := set.intersection(*steps)) and (max(common), part.number) not in streams:
            streams.append((max(common), part.number))
            for old in streams[: -self.keep]:
                if seat.steps.get(RUN) != old[0]:
                    streams.remove(old)

    def _pull(self, name: str, seat: Seat) -> None:
        """A new step each second, of all that it is to keep and of its own node; what is frozen stays."""
        for source, address in {**self.sources[name], name: seat.me.address}.items():
            if source in self.seats and source in self.shards:
                steps = self.copies[name].setdefault((address, self.shards[source]), [])
                steps.append(int(self.at))
                for old in steps[: -self.keep]:
                    if seat.steps.get(RUN) != old:
                        steps.remove(old)

    def root(self) -> str:
        found = self.shared.session().read()
        return found[ROOT].value if ROOT in found else ""

    def haves(self) -> dict[str, Have]:
        found = self.shared.session().read()
        return {key.removeprefix(HAVE): Have.of(entry.value) for key, entry in found.items() if key.startswith(HAVE)}

    def in_common(self) -> set[int]:
        """Steps of which those that are there have copies of all shards."""
        found: dict[str, set[int]] = {shard: set() for shard in self.shards.values()}
        for name in self.seats:
            for (_, shard), steps in self.copies[name].items():
                found[shard].update(steps)
        return set.intersection(*found.values())

    def placed(self) -> Decided:
        found = {seat.decided.text() for seat in self.seats.values()}
        assert len(found) == 1, "they do not follow the same decision"
        return next(iter(self.seats.values())).decided

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        return [fields for one, fields in self.said[name] if one == event]


def apart(decided: Decided) -> bool:
    return all(LEAVES[name] != LEAVES[one] for name, keep in decided.holders.items() for one in keep)


def settled(cluster: Cluster, *names: str) -> Decided:
    cluster.come(*names)
    cluster.turns(cluster.grace + 3)
    return cluster.placed()


def in_place_of(holders: Mapping[str, tuple[str, ...]], instead: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The same places with others in them."""
    def now(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(instead.get(name, name) for name in names)

    return {now([name])[0]: now(keep) for name, keep in holders.items()}
