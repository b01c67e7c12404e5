"""Where a job's chain of versions is: which version is built next, and what that waits for.

    NONE             no version is here, nor anything that one could be made from
    BEGINNING        a replica is here, but no version to build on: the next step record says where one begins
    FOLLOWING        iteration `next` is awaited; the version that it makes is published
    BUILDING         the verdict on `next` stands: workers write its version, and compare it
    HOLDING          as FOLLOWING, but elements are stale: versions are built, held, and not published
    PATCHING         as BUILDING, of a version that follows one that is held
    EXPECTING_PEER   a peer's version is on its way into a slot; nothing is built meanwhile
    ENDED            the chain was lost, or has diverged; a state is needed to go on from

    NONE, ENDED -> FOLLOWING          a trainer's state; weights of captures; what an earlier process left
    NONE, ENDED -> BEGINNING          there are trainers that can be asked for ranges of their state
    BEGINNING -> BEGINNING            from another replica
    BEGINNING -> HOLDING              a record has come: all before its iteration is stale
    BEGINNING -> FOLLOWING            a trainer's state came first, or what an earlier process left needs no record
    FOLLOWING -> FOLLOWING            another state; an iteration of a job without a replica
    FOLLOWING -> BUILDING             the verdict stands
    FOLLOWING -> HOLDING              iterations were lost whole, and leapt over
    BUILDING -> FOLLOWING             its version is published
    BUILDING -> HOLDING               gradients of its iteration were lost
    HOLDING -> HOLDING                more iterations were lost whole
    HOLDING -> PATCHING               the verdict stands, but for what is missing
    HOLDING -> FOLLOWING              a trainer's state came
    PATCHING -> HOLDING               elements are still stale
    PATCHING -> FOLLOWING             none is: its version is published
    FOLLOWING, HOLDING -> EXPECTING_PEER       a peer has a version that is as new
    EXPECTING_PEER -> FOLLOWING       it came; or a trainer's state did
    EXPECTING_PEER -> BEGINNING       it does not come
    FOLLOWING, BUILDING, HOLDING, PATCHING -> ENDED       what is wrong is more than lost gradients

Exactly in FOLLOWING, BUILDING, HOLDING and PATCHING an iteration is awaited. Every change goes through one guarded
setter (`VersionChain.move`). What leads to a change is decided in follower.py, range_repair.py and joining.py.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from flowcheck.errors import InternalError
from flowcheck.job.version_status import DIVERGED, VERIFIED, VersionStatus
from flowcheck.rebuild.iteration.collector import Judged
from flowcheck.rebuild.version.replica import JobReplica

__all__ = ["EDGES", "Chain", "VersionChain"]


class Chain(enum.Enum):
    """See the module."""

    NONE = "none"
    BEGINNING = "beginning"
    FOLLOWING = "following"
    BUILDING = "building"
    HOLDING = "holding"
    PATCHING = "patching"
    EXPECTING_PEER = "expecting_peer"
    ENDED = "ended"


EDGES: Mapping[Chain, frozenset[Chain]] = {
    Chain.NONE: frozenset({Chain.FOLLOWING, Chain.BEGINNING}),
    Chain.BEGINNING: frozenset({Chain.BEGINNING, Chain.FOLLOWING, Chain.HOLDING}),
    Chain.FOLLOWING: frozenset({Chain.FOLLOWING, Chain.BUILDING, Chain.HOLDING, Chain.EXPECTING_PEER, Chain.ENDED}),
    Chain.BUILDING: frozenset({Chain.FOLLOWING, Chain.HOLDING, Chain.ENDED}),
    Chain.HOLDING: frozenset({Chain.HOLDING, Chain.FOLLOWING, Chain.PATCHING, Chain.EXPECTING_PEER, Chain.ENDED}),
    Chain.PATCHING: frozenset({Chain.HOLDING, Chain.FOLLOWING, Chain.ENDED}),
    Chain.EXPECTING_PEER: frozenset({Chain.FOLLOWING, Chain.BEGINNING}),
    Chain.ENDED: frozenset({Chain.FOLLOWING, Chain.BEGINNING}),
}
AWAITING = frozenset({Chain.FOLLOWING, Chain.BUILDING, Chain.HOLDING, Chain.PATCHING})


class VersionChain:
    """The versions of one job.

    next: the iteration that is awaited, as the manifest counts; None in states that await none.
    replica: where the versions are; None: nowhere.
    status: of the newest version, or what keeps it from being one (docs/reference/events.md).
    verified: the newest step of this unbroken chain whose own checksums matched; None: no step's.
    matches: the trainer's checksums that have matched in this run, whatever its versions were patched with. A mismatch
        makes it 0 again.
    """

    def __init__(self, replica: JobReplica | None = None) -> None:
        self._state = Chain.NONE
        self.next: int | None = None
        self.replica = replica
        self.status = "waiting"
        self.verified: int | None = None
        self.matches = 0

    @property
    def state(self) -> Chain:
        return self._state

    def move(self, to: Chain, awaited: int | None = None) -> None:
        """The only way to another state. awaited: `next` from now on. Raises InternalError: that is not an edge, or a
        state that awaits an iteration has none, or the other way round."""
        if to not in EDGES[self._state]:
            raise InternalError(f"a chain of versions goes from {self._state.value} to {to.value}",
                                where="rebuild/version/chain.py", remedy="report this with the node's log")
        if (awaited is not None) != (to in AWAITING):
            raise InternalError(f"a chain of versions is {to.value} and awaits iteration {awaited}",
                                where="rebuild/version/chain.py", remedy="report this with the node's log")
        self._state, self.next = to, awaited

    @property
    def builds(self) -> bool:
        """Are workers at a version?"""
        return self._state in (Chain.BUILDING, Chain.PATCHING)

    @property
    def holds(self) -> bool:
        """Are elements stale, so that no version is published?"""
        return self._state in (Chain.HOLDING, Chain.PATCHING)

    @property
    def ready(self) -> bool:
        """Is there a replica with a version?"""
        return self.replica is not None and self.replica.ready

    def put(self, replica: JobReplica | None) -> None:
        """Go on with this replica, and let go of the one before, if that is another."""
        if self.replica is not None and self.replica is not replica:
            self.replica.close()
        self.replica = replica

    def publish(self, step: int, judged: Judged, *, matched: bool) -> bool:
        """Publish version `step`, which was built, with its status, which is decided here. matched: the trainer's
        checksums of it did. False: it is one that must not be, and is held to build on."""
        assert self.replica is not None
        if not judged.verdict.publishable:
            self.replica.hold()
            return False
        if judged.evidence.from_peers or judged.evidence.stale is not None:
            self.verified = None  # what peers or trainers gave does not follow what was compared before
        status = VersionStatus() if self.verified is None else VersionStatus.follows(self.verified)
        if matched:
            status, self.verified = VersionStatus(VERIFIED), step
        self.status = str(status)
        self.replica.publish(status.verified, self.status, judged.verdict.unproven, self.matches)
        return True

    def end(self, status: str) -> bool:
        """The chain has ended. status: DIVERGED: versions since the last match may be wrong, and are withdrawn. True if
        a version could be read, and none can now."""
        self.move(Chain.ENDED)
        self.status, self.verified = status, None
        if status != DIVERGED or self.replica is None:
            return False
        served = self.replica.serves
        self.replica.withdraw()
        if self.replica.serves:
            return False
        self.put(None)
        return served
