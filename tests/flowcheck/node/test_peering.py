"""A group among its peers: which nodes follow the same job, what is asked of them and shown to them. Real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowcheck.control.protocol import Holes, Link, RecordsError, accept
from flowcheck.errors import UserError
from flowcheck.job.clock import Clock
from flowcheck.node.config.capture import Capture
from flowcheck.node.config.control import Control
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.config.replica import ReplicaSettings
from flowcheck.node.peers.peer_set import Peering
from flowcheck.node.peers.shelf import Shelf, serve
from flowcheck.rebuild.iteration.intervals import intervals
from flowcheck.rebuild.plan import JobPlan, digest_of, plan_job

from .live_scene import small_job

TOKEN = "a token that only tests have"
RUN = ("run", 3, 2)


def config(folder: Path, *peers: str, **replica: Any) -> NodeConfig:
    (folder / "token").write_text(TOKEN + "\n")
    return NodeConfig(
        control=Control(listen="127.0.0.1:0", token_file=folder / "token"), capture=Capture(device="none"),
        replica=ReplicaSettings(peers=peers, **replica),
    )


class Door:
    """The control port of a node that has a shelf; hellos: of who came."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf, self.hellos = shelf, []  # type: ignore[var-annotated]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._links: list[Link] = []
        self._thread = threading.Thread(target=self._main)
        self._thread.start()

    def _main(self) -> None:
        try:
            while True:
                link = Link(self._listener.accept()[0])
                self._links.append(link)
                try:
                    self.hellos.append(accept(link, TOKEN.encode()))
                    serve(link, lambda: self.shelf)
                except RecordsError:
                    pass
                link.close()
        except OSError:
            pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in self._links:
            link.close()
        self._thread.join(10)


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door(Shelf(4))
    yield made
    made.close()


def digest(run: tuple[str, int, int] = RUN, first: int = 0, count: list[int] | None = None, **body: Any) -> str:
    job = small_job(**({"count": count} if count else {}))
    return digest_of(job.to_dict() | body, plan_job(job), run, Clock(first))


def test_the_same_job_has_the_same_digest_whatever_the_node_adds() -> None:
    one = digest()
    assert len(one) == 64 and one == digest()
    job = small_job()
    other = plan_job(job, streams=3, threads=2, arenas=9)
    backwards = dict(reversed(list(job.to_dict().items())))
    assert digest_of(backwards, other, RUN, Clock()) == one


@pytest.mark.parametrize("changed", [
    {"run": ("run2", 3, 2)}, {"run": ("run", 4, 2)}, {"run": ("run", 3, 3)}, {"first": 1}, {"count": [40, 22]},
    {"epoch": 9}, {"flows": []},
])
def test_another_job_has_another_digest(changed: dict[str, Any]) -> None:
    assert digest(**changed) != digest()


@pytest.mark.parametrize("iteration", [0, 1])
def test_a_node_that_places_otherwise_follows_it_in_another_way(
    monkeypatch: pytest.MonkeyPatch, iteration: int
) -> None:
    """In the first iteration, or in all later ones: its bytes lie elsewhere, and are no use."""
    one, places = digest(), JobPlan.iteration_places
    monkeypatch.setattr(
        JobPlan, "iteration_places", lambda plan, t: places(plan, t)[: -1 if t == iteration else None])
    assert digest() != one


def test_without_peers_there_is_nothing(tmp_path: Path) -> None:
    settings = config(tmp_path)
    (tmp_path / "token").unlink()
    peering = Peering(settings, "dp0")
    job = small_job()
    assert peering.of(job.to_dict(), plan_job(job), RUN, Clock()) is None


def test_versions_are_asked_of_those_that_are_named_by_who_says_which_start_it_is(tmp_path: Path) -> None:
    assert Peering(config(tmp_path), "dp0").versions("0" * 64) is None
    peering = Peering(config(tmp_path, peer_versions=("127.0.0.1:1", "[::1]:2")), "dp0")
    assert peering.versions("") is None
    catching = peering.versions("0" * 64)
    assert catching is not None and not catching.busy
    assert [node.name for node in catching._nodes()] == ["127.0.0.1:1", "[::1]:2"]
    (tmp_path / "token").unlink()
    with pytest.raises(UserError):
        catching._nodes()


def test_a_token_that_cannot_be_read_is_said_when_the_group_begins(tmp_path: Path) -> None:
    settings = config(tmp_path, "127.0.0.1:1")
    (tmp_path / "token").unlink()
    with pytest.raises(UserError):
        Peering(settings, "dp0")


def test_iterations_are_the_trainers_between_nodes(tmp_path: Path, door: Door) -> None:
    """A follower counts from its manifest on; what is asked and shown has the trainer's numbers."""
    job, clock = small_job(), Clock(100)
    plan = plan_job(job)
    theirs = digest_of(job.to_dict(), plan, RUN, clock)
    door.shelf.follow(theirs)
    region = np.arange(320, dtype=np.uint8)
    door.shelf.show(107, region, intervals([(2, 4)]), lambda: True)
    peering = Peering(config(tmp_path, door.address, peer_seconds=10.0), "dp0")
    peers = peering.of(job.to_dict(), plan, RUN, clock)
    assert peers is not None
    peers.ask(7, [(0, 64)])
    while (found := peers.answers()) is None:
        pass
    [answer] = found
    assert [(at, bytes(data)) for at, data in answer.pieces] == [(16, bytes(range(16, 32)))] and not peers.failed
    [hello] = door.hellos
    assert (hello.run_id, hello.epoch, hello.group, hello.role) == ("run", 3, "dp0", "peer")
    peers.distrust({door.address: "wrong"})
    peers.ask(7, [(0, 64)])
    while (found := peers.answers()) is None:
        pass
    assert found == [] and dict(peers.failed) == {door.address: "not asked: wrong"}
    peers.close()


def test_what_is_shown_is_on_the_shelf_until_the_job_is_let_go(tmp_path: Path) -> None:
    job, clock = small_job(), Clock(100)
    plan = plan_job(job)
    peering = Peering(config(tmp_path, "127.0.0.1:1", arenas=2, peer_iterations=1), "dp0")
    peers = peering.of(job.to_dict(), plan, RUN, clock)
    assert peers is not None
    theirs = digest_of(job.to_dict(), plan, RUN, clock)

    def why(number: int) -> str:
        return peering.shelf.read(Holes(1, number, theirs, [(0, 8)], 0.01))[0].why

    for t in range(5, 9):
        peers.show(t, np.zeros(8, np.uint8), intervals([(0, 1)]), lambda: True)
    assert [bool(why(number)) for number in (105, 106, 107, 108)] == [True, False, False, False], "arenas and one more"
    peers.hide(7)
    assert [bool(why(number)) for number in (107, 108)] == [True, False]
    peers.close()
    assert why(108) == "another job is followed here, or none"

