"""A real Group with made-up connections and, unless a test wants the real one, a session that only writes down what it
is asked. The test is the group's thread: `turn` is one turn of its loop."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from parser.placers import Placers

import flowcheck.node.groups.intake
from flowcheck.control.protocol import Manifest
from flowcheck.errors import UserError
from flowcheck.job.model import BucketSlice, Job
from flowcheck.node.config.capture import Capture
from flowcheck.node.config.control import Api, Control
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.config.replica import ReplicaSettings
from flowcheck.node.config.store import Output
from flowcheck.node.groups.assigning import Assigning
from flowcheck.node.groups.intake import attended
from flowcheck.node.groups.members import Inbound, RankSession
from flowcheck.node.peers.common_step import Common
from flowcheck.node.ports.silence import Arrivals
from flowcheck.rebuild.version.events import Event
from lab.synth import example_job
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

from ..memory_ring import MemoryRing


def small_job(**options: Any) -> Job:
    """run "synth-0", epoch 0, two ranks."""
    return example_job(**{"ranks": 2, "count": [60], "startup": False, "rebuild": False, **options})


class FakeReplica:
    def __init__(self, step: int = 0) -> None:
        self.step, self.kernels = step, "avx2, and so on"
        self.serves = True
        self.steps = [step]
        self.kept: list[tuple[int, ...]] = []

    def keep(self, steps: tuple[int, ...]) -> None:
        self.kept.append(steps)


class FakeSession:
    """calls: what the group asked for. moves: how many polls find something. record_answer, state_error: what the
    session says to a record and to a state."""

    def __init__(self, plan: Any, sources: Any, clock: Any, **options: Any) -> None:
        self.plan, self.sources, self.clock, self.options = plan, sources, clock, options
        self.calls: list[tuple[Any, ...]] = []
        self.moves = 0
        self.poll_error: Exception | None = None
        self.record_answer, self.state_error, self.begin_error = "", None, None
        self.replica: Any = None
        self.log: Any = None
        self.next: int | None = None
        self.serves, self.matches = -1, options.get("matches", 0)
        self.begun, self.owed = range(0), set[int]()
        self.dropped, self.port, self.fed = 0, options["port"], None
        self.closed = threading.Event()
        self.placers: Placers | None = None  # that place for it
        self.behind = 0  # looks until they have taken what was there

    def hurry(self) -> None:
        pass

    def place_in_threads(self, placers: Placers) -> None:
        self.placers = placers

    def mark(self) -> list[int]:
        return [7]

    def passed(self, mark: list[int]) -> bool:
        assert mark == [7]
        self.behind -= 1
        return self.behind < 0

    @property
    def moved(self) -> bool:
        return self.moves >= 0

    def poll(self) -> list[Event]:
        self.calls.append(("poll",))
        if self.poll_error is not None:
            raise self.poll_error
        self.moves -= 1
        return []

    def record(self, record: Any, buffers: Mapping[str, torch.Tensor], rank: int) -> list[Event]:
        self.calls.append(("record", record.iteration, dict(buffers), rank))
        if self.record_answer:
            raise UserError(self.record_answer, where=f"rank {rank}")
        return []

    def announce(self, iteration: int) -> None:
        self.calls.append(("announce", iteration))

    def patch(self, rank: int, message: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        self.calls.append(("patch", rank, message, dict(tensors)))

    def withdraw(self) -> None:
        self.calls.append(("withdraw",))

    def state(self, iteration: int, parameters: Any, state: Any, groups: Any, path: Path) -> list[Event]:
        self.calls.append(("state", iteration, parameters, state, groups))
        self.path = path
        if self.state_error is not None:
            raise self.state_error
        self.replica = FakeReplica()
        return []

    def begin(self, path: Callable[[], Path], left: Path | None = None) -> list[Event]:
        self.calls.append(("begin",))
        self.left = left
        if self.begin_error is not None:
            raise self.begin_error
        if self.replica is None:
            self.path, self.replica = path(), FakeReplica()
        return []

    def finish(self) -> list[Event]:
        self.calls.append(("finish",))
        self.placers, self.begun = None, range(0)
        return []

    def close(self) -> None:
        self.calls.append(("close",))
        self.closed.set()


class Peer:
    """A connection: what it was told and why it was ended; refused: for good."""

    def __init__(self, rank: int) -> None:
        self.told: list[Any] = []
        self.ended: list[str] = []
        self.refused: list[str] = []
        self.member = RankSession(rank, self.told.append, self.ended.append, refuse=self.refused.append)


class Written:
    """Stands for the writer of checkpoints and for the file of hashes."""

    def __init__(self) -> None:
        self.checkpoints: list[tuple[Any, ...]] = []
        self.withdrawn: list[tuple[Any, ...]] = []
        self.hashes: list[tuple[Any, ...]] = []

    def write(self, *said: Any) -> None:
        self.checkpoints.append(said)

    def withdraw(self, *said: Any) -> None:
        self.withdrawn.append(said)

    def add(self, *said: Any) -> None:
        self.hashes.append(said)


class FakePort(Arrivals):
    """A port whose counters a test sets."""

    name = "af_packet:eth1"

    def __init__(self, queues: Any = (), placers: Any = None) -> None:
        self.queues, self.placers = queues, placers
        self.count = 0
        self.dropped: dict[str, int] = {}

    @property
    def arrived(self) -> int:
        return self.count

    @property
    def drops(self) -> dict[str, int]:
        return dict(self.dropped)

    def explain(self, drops: Mapping[str, int]) -> str:
        pytest.importorskip("dataplane.pydpdk._dpdk", reason="the dataplane is not built: libdpdk was not found")
        from dataplane.live import LiveConfig
        from flowcheck.node.ports.captures import PlannedCapture
        from flowcheck.node.ports.drops import describe

        return describe(drops, PlannedCapture("capture", Capture(device="ring"), LiveConfig("ring"), -1))


class Scene:
    """group, what it said, and the sessions that it began."""

    def __init__(self, folder: Path, say: Callable[..., None] | None = None, *, name: str = "", every: int = 0,
                 hashes: bool = True, rings: int = 1, shadow: int | None = None, common: Common | None = None,
                 **replica: Any) -> None:
        config = NodeConfig(
            control=Control(listen="127.0.0.1:0", token_file=folder / "token"), capture=Capture(device="none"),
            replica=ReplicaSettings(directory=folder, **{"resync": "state", **replica}),
            output=Output(directory=folder / "out", every=every),
            record_seconds=7.5, api=None if shadow is None else Api(listen="127.0.0.1:0", shadow=shadow),
        )
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.now = 0.0
        self.written = Written()
        self.rings = [MemoryRing() for _ in range(rings)]
        self.placers = Placers([ring.ring_address for ring in self.rings])
        self.port = FakePort(self.rings, self.placers)
        self.sessions: list[FakeSession] = []
        self.common = common or Common("node", 60.0, config.replica.slots, self._said, lambda: self.now)
        self.group = attended(
            name, config, self.port, say or self._said, self.written,  # type: ignore[arg-type]
            self.written if hashes else None, self.common, lambda: self.now,  # type: ignore[arg-type]
        )
        self.intake = self.group.intake

    def _said(self, event: str, **fields: Any) -> None:
        self.said.append((event, fields))

    @property
    def assigning(self) -> Assigning:
        """That looks for channels: its process is a real one, whose answers a test gives (private for that alone)."""
        return self.intake._planning._assigning

    @property
    def session(self) -> FakeSession:
        return self.sessions[-1]

    def join(self, rank: int = 0, run: tuple[str, int, int] = ("synth-0", 0, 2), instance: str = "") -> Peer:
        peer = Peer(rank)
        assert self.intake.ranks.join(run, peer.member, instance) == ""
        return peer

    def post(self, peer: Peer, message: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        self.intake.put(Inbound(peer.member, message, tensors or {}))

    def turn(self) -> None:
        """All that is in the inbox, as the group's thread takes it."""
        while self.intake.tick():
            pass

    def give(self, peer: Peer, message: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        self.post(peer, message, tensors)
        self.turn()

    def happens(self, *events: Event) -> None:
        """The session returns events."""
        self.group.take(events)

    def follow(self, job: Job | None = None, *, first: int = 0, **join: Any) -> Peer:
        """Rank 0 joins and sends a whole manifest: a session begins."""
        peer = self.join(0, **join)
        self.give(peer, Manifest((job or small_job()).to_dict(), first))
        assert not peer.ended
        return peer

    def events(self, event: str) -> list[dict[str, Any]]:
        return [fields for what, fields in self.said if what == event]


@contextlib.contextmanager
def fake_sessions() -> Any:
    """Groups begin FakeSessions; gives the list of them."""
    begun: list[FakeSession] = []

    def begin(*args: Any, **options: Any) -> FakeSession:
        begun.append(FakeSession(*args, **options))
        return begun[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flowcheck.node.groups.intake, "LiveSession", begin)
        yield begun


@contextlib.contextmanager
def scenes(folder: Path, **given: Any) -> Iterator[Callable[..., Scene]]:
    """scene(**options): a group that begins FakeSessions, with files in that folder; `given` holds for all of them."""
    made: list[Scene] = []
    with fake_sessions() as begun:

        def make(*args: Any, **options: Any) -> Scene:
            made.append(Scene(folder, *args, **given | options))
            made[-1].sessions = begun
            return made[-1]

        yield make
        for one in made:
            one.group.stop()


def left_behind(path: Path, run_id: str, step: int, verified: bool = False, matches: int = 0) -> Path:
    """A replica file of an earlier run. matches: checksums that had matched when its version was published."""
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 0.5})])
    first: dict[str, Any] = {"path": path, "run_id": run_id, "step": step - bool(matches)}
    with contextlib.closing(Replica({"w": torch.ones(3)}, spec, **first)) as replica:
        if matches:
            slot = replica.build(step, Layout([[BucketSlice("w", 0, 3)]], {"w": (3,)}, [3]))
            slot.apply(0, torch.ones(3))
            replica.publish(slot, "unverified", (), matches)
        if verified:
            replica.mark_verified()
    return path
