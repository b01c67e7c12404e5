"""What a group's peers, its shelf and who catches up are given (test_peering.py has them over real sockets)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowcheck.control.proof import Proven, node_key
from flowcheck.job.clock import Clock
from flowcheck.node.config.capture import Capture
from flowcheck.node.config.control import Api, Control
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.config.replica import ReplicaSettings
from flowcheck.node.peers import peer_set as peering
from flowcheck.node.peers.catch_up import QUIET_SECONDS
from flowcheck.node.peers.client import Who
from flowcheck.node.peers.peer_set import Peering, WithPeers
from flowcheck.node.peers.shelf import Followed
from flowcheck.rebuild.plan import digest_of, plan_job

from .live_scene import small_job

RUN = ("run", 3, 2)


class Noted(list[Any]):
    """In the place of a function: what it was called with."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.append((*given, *named.values()))
        return self


def config(folder: Path, tls: bool = False, **replica: Any) -> NodeConfig:
    (folder / "token").write_text("a token that only tests have\n")
    made = NodeConfig(
        control=Control(listen="127.0.0.1:0", token_file=folder / "token"), capture=Capture(device="none"),
        api=Api(listen="127.0.0.1:0"), replica=ReplicaSettings(**replica),
    )
    return made.model_copy(update={"tls": SimpleNamespace(ca="the authority")} if tls else {})


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Noted:
    made = Noted()
    monkeypatch.setattr(peering, "client_context", made)
    return made


def test_it_is_shown_by_the_trainers_number_with_what_a_closed_one_says() -> None:
    shown, hidden, followed, closed = Noted(), Noted(), Noted(), Noted()
    shelf: Any = SimpleNamespace(show=shown, hide=hidden, follow=followed)
    peers: Any = SimpleNamespace(close=closed)
    mine = WithPeers(shelf, peers, Clock(100))
    mine.show(3, "region", "there", "alive", "closed")  # type: ignore[arg-type]
    mine.hide(2)
    mine.close()
    assert shown == [(103, "region", "there", "alive", "closed")] and hidden == [(102,)]
    assert followed == [("",)] and closed == [()], "nothing is shown any more, and nobody is asked"


def test_the_shelf_and_the_peers_know_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: Noted) -> None:
    followed, peers = Noted(), Noted()
    monkeypatch.setattr(peering, "Peers", peers)
    group = Peering(config(tmp_path, tls=True, peers=["192.0.2.1:7070"], peer_seconds=7.5), "dp0")
    group.shelf.follow = followed  # type: ignore[method-assign]
    job = small_job()
    body, plan, clock = job.to_dict(), plan_job(job), Clock(5)
    assert group.of(body, plan, RUN, clock) is not None
    digest = digest_of(body, plan, RUN, clock)
    assert followed == [(digest, Followed(body, RUN, 5))]
    ((addresses, token, who, seconds, tls),) = peers
    assert list(addresses) == [("192.0.2.1", 7070)] and who == Who("run", 3, "dp0", digest) and seconds == 7.5
    assert tls is context and token() == b"a token that only tests have"


@pytest.mark.parametrize(("replica", "asked"), [
    ({"peers": ["192.0.2.1:7070"]}, True), ({"peer_versions": ["192.0.2.1:7071"]}, True), ({}, False),
])
def test_an_authority_is_read_where_somebody_is_asked(
    tmp_path: Path, context: Noted, replica: dict[str, Any], asked: bool
) -> None:
    Peering(config(tmp_path, tls=True, **replica), "dp0")
    Peering(config(tmp_path, **replica), "dp0")
    assert context == ([("the authority",)] if asked else [])


def test_whose_versions_are_taken_is_asked_with_the_nodes_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: Noted
) -> None:
    catching, node = Noted(), Noted()
    monkeypatch.setattr(peering, "CatchUp", catching)
    monkeypatch.setattr(peering, "NodeClient", node)
    group = Peering(config(tmp_path, tls=True, peer_versions=["192.0.2.1:7071"]), "dp0")
    assert group.versions("") is None and catching == []
    assert group.versions("its start") is catching
    ((nodes, name, start),) = catching
    assert (name, start) == ("dp0", "its start")
    nodes()
    ((address, key, seconds, tls),) = node
    assert key == node_key(b"a token that only tests have").hex() and isinstance(key, Proven)
    assert (seconds, tls) == (QUIET_SECONDS, context)
    assert str(address[0] if isinstance(address, tuple) else address).startswith("192.0.2.1")
