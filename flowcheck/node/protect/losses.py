"""What a loss of members means: which step is frozen, what is gone, when all is as it should be again. Pure.

    froze = frozen(decided, lost, haves, last, number)     the Recovery that a root decides first
    whole(decided, haves)                                  has every holder what it is there for?
    newest_persistent(offers, shards)                      where a recovery ends if nothing in memory is left

A run's shards go on from one step, so what is kept through a loss is the newest step that copies of all of them have
(Gemini, section 6: all freeze their latest complete version; ours lie in files already), or that can be made from
parity: of a step of which any K pieces are there all shards can.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from flowcheck.ask.offer import DISK, STORE, Offer
from flowcheck.ask.sources import Key, choose
from flowcheck.node.protect.placement import Decided, Have, Parity, Recovery, Run, Shard

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
    made, known = _makeable(decided, haves), {*copied, *followed, *alive}
    for shard in known:
        copied.setdefault(shard, set()).update(made.get(shard[:2], ()))
    steps: dict[Run, int] = {}
    for run in {shard[:2] for shard in known}:
        if common := set.intersection(*(copied[shard] for shard in known if shard[:2] == run)):
            steps[run] = max(common)
    void = sorted(shard for shard in followed if shard not in alive and not copied.get(shard))
    asked = [name for name in (decided.recovery.asked if decided.recovery is not None else ()) if name in lost]
    before = decided.recovery.shards if decided.recovery is not None else ()
    return Recovery(number, tuple(sorted(lost)), tuple(asked), tuple(sorted({*before, *followed})), tuple(void), steps)


def _makeable(decided: Decided, haves: Mapping[str, Have]) -> dict[Run, set[int]]:
    """Of each run the steps of which as many pieces are there, shards and streams of parity, as there are shards."""
    if decided.parity is None:
        return {}
    pieces: dict[tuple[Run, int], set[str | int]] = {}
    for have in haves.values():
        for (_, (run_id, epoch, shard)), steps in have.copies.items():
            for step in steps:
                pieces.setdefault(((run_id, epoch), step), set()).add(shard)
        for run, streams in have.streams.items():
            for step, number in streams:
                pieces.setdefault((run, step), set()).add(number)
    made: dict[Run, set[int]] = {}
    for (run, step), there in pieces.items():
        if len(there) >= decided.parity.code[0]:
            made.setdefault(run, set()).add(step)
    return made


def whole(decided: Decided, haves: Mapping[str, Have]) -> bool:
    """Is every shard that was lost followed again, has every holder a copy of each shard that it is to keep, and are
    all pieces of one step of parity there? A run needs nothing any more once others are followed and it is not."""
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
    return decided.parity is None or _encoded(decided, decided.parity, haves)


def _encoded(decided: Decided, parity: Parity, haves: Mapping[str, Have]) -> bool:
    """Has the whole group its pieces of one step? A place that was given up is not waited for."""
    common: set[tuple[Run, int]] | None = None
    followed = False
    for name in filter(None, parity.data):
        have, at = haves.get(name, Have()), decided.members[name].address
        followed = followed or bool(have.own)
        found = {(shard[:2], step) for (address, shard), steps in have.copies.items() if address == at
                 for step in steps}
        common = found if common is None else common & found
    for number, name in enumerate(parity.holders, len(parity.data)):
        if name:
            found = {(run, step) for run, streams in haves.get(name, Have()).streams.items()
                     for step, of in streams if of == number}
            common = found if common is None else common & found
    return bool(common) or not followed


def newest_persistent(offers: Iterable[Offer], shards: Collection[Shard]) -> dict[str, Key | None]:
    """Of each run id among the shards, epoch and step of the newest version that all of its shards have on a disk or in
    a store; None: no step is."""
    held: dict[tuple[str, str], dict[Key, str]] = {(run_id, shard): {} for run_id, _, shard in shards}
    offers, most = list(offers), dict[str, int]()  # of a run the newest epoch that a node vouches for, if one does
    for offer in offers:
        if offer.attached:
            most[offer.run_id] = max(offer.epoch, most.get(offer.run_id, 0))
    for offer in offers:
        known = offer.epoch <= most.get(offer.run_id, offer.epoch)
        if known and offer.tier in PERSISTENT and (offer.run_id, offer.shard) in held:
            held[offer.run_id, offer.shard][offer.key] = offer.status
    return {run_id: choose([found for (of, _), found in held.items() if of == run_id])
            for run_id in sorted({run_id for run_id, _ in held})}
