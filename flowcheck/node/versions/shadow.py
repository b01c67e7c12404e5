"""Shadow mode: versions that are made and seen, and not offered before enough of the trainer's checksums have matched.

    withheld(offer, needs)                  why a version is not offered for recovery, "": it is (api/routes.py)
    shadow = Shadow(needs, say)             of one group
    shadow.begins(run_id)                   a job is followed: how many have matched in this run before
    shadow.published(step, matches)         of each version; says so when none is offered yet, and when that is over

A checksum that matches shows what no other clause of the verdict can: that the replica is the trainer's own model. The
count is of a run, so it outlives a loss and the next start of the job here, and a mismatch makes it 0 again. It is
written with each version (updater/remarks.py, and the manifests of checkpoints), so whoever reads one decides from the
version alone, in whatever process, and also of one that an earlier node left.

`needs` 0 is not shadow mode: also versions that nothing was compared with are offered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowcheck.ask.offer import Offer
from flowcheck.job.version_status import VersionStatus

__all__ = ["OPEN", "Shadow", "withheld"]

OPEN = "api.shadow = 0: versions are offered for recovery before any checksum of the trainer has matched"


def withheld(offer: Offer, needs: int) -> str:
    if VersionStatus.of(offer.status).diverged:
        return f"step {offer.step} has diverged: a checksum of the trainer did not match after it was made"
    if offer.matches >= needs:
        return ""
    return (f"step {offer.step} is not offered for recovery: {offer.matches} of {needs} checksums of the trainer had"
            " matched when it was published (api.shadow)")


class Shadow:
    """needs: api.shadow. say: events of the group. The group's thread."""

    def __init__(self, needs: int, say: Callable[..., None]) -> None:
        self._needs, self._say = needs, say
        self._run = ""
        self._matches = 0
        self._offers: bool | None = None  # None: nothing was said of this run

    def begins(self, run_id: str) -> int:
        if run_id != self._run:
            self._run, self._matches = run_id, 0
        self._offers = None
        return self._matches

    def has(self, matches: int) -> None:
        """So many have matched by now: none where one did not."""
        self._matches = matches
        if self._offers and matches < self._needs:
            self._offers = None

    def published(self, step: int, matches: int) -> None:
        self.has(matches)
        offers = matches >= self._needs
        if offers == self._offers or not self._needs:
            return
        before, self._offers = self._offers, offers
        about: dict[str, Any] = {"step": step, "matches": matches, "needs": self._needs}
        if not offers:
            self._say("withheld", **about, why="versions are made and not offered for recovery before so many checksums"
                                               " of the trainer have matched (api.shadow; attach's checksum_every)")
        elif before is False:
            self._say("offered", **about, why="from this version on they are offered for recovery")

    @property
    def trusts(self) -> bool:
        """Are newest versions offered?"""
        return self._matches >= self._needs
