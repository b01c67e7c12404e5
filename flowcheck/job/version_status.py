"""How far a version is known to be the trainer's own: its status, as a type, as text, and in order.

    verified       its own checksums matched
    follows N      step N is the last one of its unbroken chain of which they did; nothing was compared since
    unverified     nothing was compared since its chain began, or was patched
    diverged       made since the last match, and a later checksum did not match: it may be wrong

    str(VersionStatus.follows(96)) == "follows 96"          what manifests, replica files, offers and messages have
    VersionStatus.of("follows 96", step=97)                 read from anybody: what is not known is `unverified`
    VersionStatus.of(one) < VersionStatus.of(other)         the other says more

A status is of one version. Nothing but a checksum of that very version makes it `verified`; copies, parity, stores and
journals carry it on as it is. Standard library only. Any thread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering

__all__ = ["DIVERGED", "FOLLOWS", "KINDS", "UNVERIFIED", "VERIFIED", "VersionStatus", "kind_of"]

DIVERGED, UNVERIFIED, FOLLOWS, VERIFIED = "diverged", "unverified", "follows", "verified"
KINDS = (DIVERGED, UNVERIFIED, FOLLOWS, VERIFIED)  # what says least comes first
_FOLLOWS = re.compile(rf"{FOLLOWS} (0|[1-9][0-9]{{0,14}})")  # a step has at most 47 bits


@total_ordering
@dataclass(frozen=True)
class VersionStatus:
    """kind: one of KINDS. step: that it follows; None of every other kind."""

    kind: str = UNVERIFIED
    step: int | None = None

    @classmethod
    def follows(cls, step: int) -> VersionStatus:
        return cls(FOLLOWS, step)

    @classmethod
    def of(cls, text: object, step: int | None = None) -> VersionStatus:
        """step: of the version, if it is known: one that follows itself, or what came later, is `unverified`."""
        if not isinstance(text, str):
            return cls()
        if text != FOLLOWS and text in KINDS:
            return cls(text)
        found = _FOLLOWS.fullmatch(text)
        if found is None or (step is not None and int(found[1]) >= step):
            return cls()
        return cls(FOLLOWS, int(found[1]))

    @property
    def verified(self) -> bool:
        return self.kind == VERIFIED

    @property
    def diverged(self) -> bool:
        return self.kind == DIVERGED

    def __str__(self) -> str:
        return self.kind if self.step is None else f"{self.kind} {self.step}"

    def __lt__(self, other: VersionStatus) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[int, int]:
        return KINDS.index(self.kind), -1 if self.step is None else self.step


def kind_of(text: str) -> str:
    """The first word of a status: a label of which there are few, of a group's state, too (`lost`)."""
    return text.partition(" ")[0]
