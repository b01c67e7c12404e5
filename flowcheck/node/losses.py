"""What a loss of members means: which step is frozen, what is gone, when all is as it should be again. Pure.

    froze = frozen(decided, lost, haves, last, number)     the Recovery that a root decides first
    whole(decided, haves)                                  has every holder what it is there for?
    newest_persistent(offers, shards)                      where a recovery ends if nothing in memory is left

A run's shards go on from one step, so what is kept through a loss is the newest step that copies of all of them have
(Gemini, section 6: all freeze their latest complete version; ours lie in files already).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from flowcheck.control.ask import DISK, STORE, Offer
from flowcheck.control.sources import Key, choose
from flowcheck.node.decided import Decided, Have, Recovery, Run, Shard

__all__ = ["frozen", "newest_persistent", "whole"]

PERSISTENT = (DISK, STORE)


def frozen(
    decided: Decided, lost: Collection[str], haves: Mapping[str, Have], last: Mapping[str, Have], number: int
) -> Recovery:
    """lost: members of the decision that are gone. haves: what those say that are there. last: what anybody said when
    he was seen last."""
    copied: dict[Shard, set[int]] = {}
    for have in haves.values():
        for (_, shard), there in have.copies.items():
            copied.setdefault(shard, set()).update(there)
    theirs = {decided.members[name].address for name in lost}
    followed = {shard for name in lost for shard in last.get(name, Have()).own}
    followed |= {shard for have in haves.values() for address, shard in have.copies if address in theirs}
    alive = {shard for have in haves.values() for shard in have.own}
    steps: dict[Run, int] = {}
    for run in {shard[:2] for shard in copied}:
        shards = {shard for shard in {*copied, *followed, *alive} if shard[:2] == run}
        if common := set.intersection(*(copied.get(shard, set()) for shard in shards)):
            steps[run] = max(common)
    void = sorted(shard for shard in followed if shard not in alive and not copied.get(shard))
    asked = [name for name in (decided.recovery.asked if decided.recovery is not None else ()) if name in lost]
    before = decided.recovery.shards if decided.recovery is not None else ()
    return Recovery(number, tuple(sorted(lost)), tuple(asked), tuple(sorted({*before, *followed})), tuple(void), steps)


def whole(decided: Decided, haves: Mapping[str, Have]) -> bool:
    """Is every shard that was lost followed again, and has every holder a copy of each shard that it is to keep? A run
    needs nothing any more once others are followed and it is not."""
    alive = {shard for have in haves.values() for shard in have.own}
    runs, groups = {shard[:2] for shard in alive}, {group for _, _, group in alive}
    for run_id, epoch, group in decided.recovery.shards if decided.recovery is not None else ():
        if group not in groups and (not runs or (run_id, epoch) in runs):
            return False
    for source, holders in decided.holders.items():
        for shard in haves.get(source, Have()).own:
            at = decided.members[source].address, shard
            if not all(haves.get(holder, Have()).copies.get(at) for holder in holders):
                return False
    return True


def newest_persistent(offers: Iterable[Offer], shards: Collection[Shard]) -> dict[str, Key | None]:
    """Of each run id among the shards, epoch and step of the newest version that all of its shards have on a disk or in
    a store; None: there is none."""
    held: dict[tuple[str, str], dict[Key, str]] = {(run_id, shard): {} for run_id, _, shard in shards}
    for offer in offers:
        if offer.tier in PERSISTENT and (offer.run_id, offer.shard) in held:
            held[offer.run_id, offer.shard][offer.epoch, offer.step] = offer.status
    return {run_id: choose([found for (of, _), found in held.items() if of == run_id])
            for run_id in sorted({run_id for run_id, _ in held})}
