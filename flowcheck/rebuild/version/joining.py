"""How a chain of versions begins without a trainer's whole state: with the next record, or with a peer's version.

    joining = Joining(follower, ranges, peers)
    joining.begin_from(replica)                of a job of which nothing is here, or not any more
    joining.begin_from(replica, whole=True)    with what an earlier process left of it
    joining.record(iteration, rank)            a record comes: before Follower.keep_record
    joining.expect(step)                       a version of a peer comes in place of all of it: then
    joining.go_on_with(...)                    it is here; or
    joining.go_on_without()                    it does not come

A job is begun at the oldest step of which records are here without a gap behind them: then everything is stale
(range_repair.py). With what an earlier process left it goes on as if it had been there: the iterations that were missed
meanwhile are iterations that were lost whole, and if there are none, nothing is stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flowcheck.errors import UserError
from flowcheck.rebuild.iteration.given import Hearsay
from flowcheck.rebuild.version.chain import Chain, VersionChain
from flowcheck.rebuild.version.events import Begun, Event
from flowcheck.rebuild.version.follower import Follower
from flowcheck.rebuild.version.peer_repair import PeerRepair
from flowcheck.rebuild.version.range_repair import RangeRepair
from flowcheck.rebuild.version.replica import JobReplica
from updater.errors import UpdaterError
from updater.replica import Slot

__all__ = ["Joining"]


class Joining:
    """Of one follower; ranges and peers are among its repairs. peers: None: no version comes from one. On its thread.
    """

    def __init__(self, follower: Follower, ranges: RangeRepair, peers: PeerRepair | None) -> None:
        self.follower, self.ranges, self._peers = follower, ranges, peers

    @property
    def chain(self) -> VersionChain:
        return self.follower.chain

    # -- with a record --

    def begin_from(self, replica: JobReplica, *, whole: bool = False) -> list[Event]:
        """Go on without a state, as soon as there is a record to go on with: from `replica`, which is empty, or has a
        version that is served until there is a newer one. whole: that version is of this very start of the job and good
        to build on, so no record is waited for. Raises InternalError: the chain has not ended."""
        follower, chain = self.follower, self.chain
        chain.move(Chain.BEGINNING)
        follower.builder.drop()
        chain.put(replica)
        if whole and (awaited := follower.clock.next(replica.step)) >= follower.arenas.oldest:
            follower.start(replica, awaited)
            return [Begun(awaited, 0)]
        first = follower.records.since(follower.arenas.oldest)
        return [] if first is None else self._begin_at(first)

    def record(self, iteration: int, rank: int) -> list[Event]:
        """A rank's record of an iteration comes."""
        self.ranges.partial.heard(rank, iteration)
        if self.chain.state is not Chain.BEGINNING or not self.follower.records.counts(rank):
            return []
        return self._begin_at(max(iteration, self.follower.arenas.oldest))  # whose record comes, too

    def _begin_at(self, iteration: int) -> list[Event]:
        """All that the version before this iteration holds is stale."""
        replica = self.chain.replica
        assert replica is not None
        try:
            replica.leap(self.follower.clock.before(iteration))
        except UpdaterError:  # readers pin every slot, or it has this iteration already: with a later record
            return []
        self.follower.go_on(replica, iteration, Chain.HOLDING)
        self.ranges.started()
        self.ranges.empty(constants=not replica.serves)
        self.ranges.hold_from(iteration)
        return [Begun(iteration, self.ranges.partial.elements)]

    # -- with a peer's version --

    @property
    def useful(self) -> tuple[int, int]:
        """Least and greatest step of a version that could be gone on from now. One that is greater cannot be there: of
        the iteration that would have made it nothing has come."""
        clock, arenas = self.follower.clock, self.follower.arenas
        return clock.before(max(self.chain.next or 0, arenas.oldest)), clock.after(arenas.begun)

    @property
    def expecting(self) -> bool:
        """Does the wire wait for a peer's version? False also where its trainers are gone."""
        return self.chain.state is Chain.EXPECTING_PEER and self.follower.trainers.coming is not None

    @property
    def gives_up(self) -> bool:
        """Are iterations lost meanwhile that this version waits for?"""
        given_up, coming = self.follower.arenas.given_up, self.follower.trainers.coming
        return bool(coming is not None and given_up and given_up.stop > coming)

    @property
    def hearsay(self) -> Hearsay:
        """Of the version that is current, or held, or was the last one."""
        return self._peers.hearsay if self._peers is not None else Hearsay()

    def expect(self, step: int) -> Slot:
        """Version `step` comes from a peer: the iteration that it waits for is kept, and those behind it; nothing is
        built, and of trainers nothing wanted, before `go_on_with` or `go_on_without`. Returns where it goes. Raises
        UserError: it is of no use any more; UpdaterError: no slot is free."""
        chain, (least, most) = self.chain, self.useful
        if self._peers is None or chain.next is None or chain.replica is None or self.ranges.given_up or (
            not least <= step <= most
        ):
            raise UserError(f"step {step} is of no use any more")
        chain.move(Chain.EXPECTING_PEER)
        self.follower.builder.drop()
        self.ranges.partial.clear()
        if chain.replica.serves:
            chain.replica.abandon()
        self.follower.trainers.announce(self.follower.clock.next(step))
        return chain.replica.receive(step)

    def go_on_with(
        self, step: int, optimizer: Mapping[str, Any], apart: Mapping[str, torch.Tensor], source: str
    ) -> int:
        """What was expected is there. optimizer, apart: as of JobReplica.received. source: whose it is, for its mark.
        The iteration that it waits for. Raises UserError: that has passed, or nothing is expected any more;
        UpdaterError: it is not of this job."""
        follower, chain = self.follower, self.chain
        if chain.state is not Chain.EXPECTING_PEER or chain.replica is None or self._peers is None:
            raise UserError(f"step {step} is of no use any more")
        iteration = follower.clock.next(step)
        follower.check(iteration)
        hearsay = Hearsay(version=f"the version of step {step} came from {source}")
        chain.replica.received(optimizer, apart, str(hearsay))
        follower.trainers.withdraw()
        chain.matches = 0
        follower.start(chain.replica, iteration)
        self._peers.hearsay = hearsay
        return iteration

    def go_on_without(self) -> list[Event]:
        """It does not come, or is not good: all is asked for by ranges, from the next record on."""
        replica = self.chain.replica
        if self.chain.state is not Chain.EXPECTING_PEER or replica is None:
            return []
        self.follower.trainers.withdraw()
        if replica.building:
            replica.discard()
        return self.begin_from(replica)
