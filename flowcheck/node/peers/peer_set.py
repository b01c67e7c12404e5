"""A group among the nodes that mirror it too: what it shows them, and what it asks of them.

    peering = Peering(config, group)
    peering.shelf                                what its connections serve (shelf.py)
    with_peers = peering.of(body, plan, clock)   for one job; None: no peers are named, and no journal is kept
    catching = peering.versions(start)           whose versions are taken where all is stale; None: nobody's

Who follows the same job is decided by its manifest: run, epoch, connections, buckets, and the trainer's number of the
first iteration. A digest of all of it goes with every question, so two nodes that lay bytes out in different ways, or
follow another start of the job with other connections, give each other nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from flowcheck.ask.client import NodeClient
from flowcheck.control.proof import Proven, node_key
from flowcheck.control.tls import client_context
from flowcheck.job.clock import Clock
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.peers.catch_up import QUIET_SECONDS, CatchUp
from flowcheck.node.peers.client import Peers, Who
from flowcheck.node.peers.shelf import Followed, Shelf
from flowcheck.rebuild.iteration.given import Answer
from flowcheck.rebuild.plan import JobPlan, digest_of
from flowcheck.rebuild.version.records import StepRecord

__all__ = ["Peering", "WithPeers"]


class WithPeers:
    """Peers of one job, as a follower asks them: by its own numbers of iterations."""

    def __init__(self, shelf: Shelf, peers: Peers, clock: Clock) -> None:
        self._shelf, self._peers, self._clock = shelf, peers, clock

    def ask(self, iteration: int, spans: Sequence[tuple[int, int]]) -> None:
        self._peers.ask(self._clock.number(iteration), spans)

    def answers(self) -> list[Answer] | None:
        return self._peers.answers()

    @property
    def failed(self) -> Mapping[str, str]:
        return self._peers.failed

    def distrust(self, refused: Mapping[str, str]) -> None:
        self._peers.distrust(refused)

    def show(
        self, iteration: int, region: np.ndarray, there: np.ndarray, alive: Callable[[], bool],
        closed: StepRecord | None = None,
    ) -> None:
        self._shelf.show(self._clock.number(iteration), region, there, alive, closed)

    def hide(self, iteration: int) -> None:
        self._shelf.hide(self._clock.number(iteration))

    def close(self) -> None:
        self._shelf.follow("")
        self._peers.close()


class Peering:
    """Of one group, by its name."""

    def __init__(self, config: NodeConfig, group: str) -> None:
        self._settings, self._group = config.replica, group
        self._token = partial(config.token, "peer")  # as its file is when a connection is made
        self._key = lambda: Proven(node_key(config.token("peer")).hex())
        self._tls = None
        if config.replica.peers:
            self._token()  # Raises UserError or EnvironmentProblem
        if config.tls is not None and (config.replica.peers or config.replica.peer_versions):
            self._tls = client_context(config.tls.ca)
        self.shelf = Shelf(config.replica.regions)  # also what is kept for other reasons, while it is

    def of(
        self, body: Mapping[str, Any], plan: JobPlan, run: tuple[str, int, int], clock: Clock, epoch: int | None = None
    ) -> WithPeers | None:
        """body: the manifest, with all connections. run: id, epoch and ranks as trainers say hello, the same at all
        nodes. epoch: of its versions here, where that is another one."""
        if not self._settings.shows:
            return None
        digest = digest_of(body, plan, run, clock)
        here = run[0], run[1] if epoch is None else epoch, run[2]
        self.shelf.follow(digest, Followed(dict(body), here, clock.first))
        who = Who(run[0], run[1], self._group, digest)
        peers = Peers(self._settings.peer_addresses, self._token, who, self._settings.peer_seconds, tls=self._tls)
        return WithPeers(self.shelf, peers, clock)

    def versions(self, start: str) -> CatchUp | None:
        """start: of the trainers (versions/runs.py), "": they do not say it. None: nobody could be asked."""
        addresses = self._settings.version_addresses
        if not addresses or not start:
            return None
        return CatchUp(lambda: [NodeClient(one, self._key(), QUIET_SECONDS, self._tls) for one in addresses],
                       self._group, start)
