"""Which steps nodes have, and which they can make again: what `flowcheck rewind` shows.

    found = steps_of([NodeClient(...)])
    found.steps                         Had: one for each version, and one for each stretch of steps that can be made
    found.holes, found.absent           iterations that are in no journal; who did not answer, and why

Torch and the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import JOURNAL, LOG, MEMORY
from flowcheck.ask.receiving import AskError
from flowcheck.ask.refusals import GoneError
from flowcheck.ask.sources import offers_of

__all__ = ["BASE", "MAKEABLE", "SLOT", "Had", "Hole", "Steps", "steps_of"]

SLOT, BASE, MAKEABLE = "slot", "base", "makeable"


@dataclass(frozen=True)
class Had:
    """Steps first to last of a run. kind: SLOT (a node's memory), BASE (a journal's), MAKEABLE (made when it is asked
    for), or the tier that has it. status: of the version, "": it says so when it is made. nbytes: of one version.
    seconds: that making the last one takes, about; 0: it is there."""

    node: str
    run_id: str
    epoch: int
    shard: str
    first: int
    last: int
    kind: str
    status: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Hole:
    """Iterations first to last of a run that are not in a node's journal, though others before and after them are."""

    node: str
    run_id: str
    epoch: int
    shard: str
    first: int
    last: int


@dataclass(frozen=True)
class Steps:
    steps: tuple[Had, ...]
    holes: tuple[Hole, ...]
    absent: tuple[str, ...]


def steps_of(nodes: Sequence[NodeClient]) -> Steps:
    """Newest first. Raises nothing: a node that does not answer is named in `absent`."""
    steps, holes, absent = list[Had](), list[Hole](), list[str]()
    for node, offers in zip(nodes, offers_of(nodes), strict=True):
        if isinstance(offers, str):
            absent.append(offers)
            continue
        try:
            journals = _journals(node)
        except AskError as error:
            absent.append(f"{node.name}: {error.what}")
            journals = []
        finally:
            node.close()
        bases = {(one["run_id"], one["epoch"], one["shard"], span["first"]): span
                 for one in journals for span in one["steps"] if span["kind"] == BASE}
        once = {(one.run_id, one.epoch, one.shard, one.step): one for one in reversed(offers) if one.tier == LOG}
        for offer in (*(one for one in offers if one.tier != LOG), *once.values()):  # a log is offered with each base
            kind = SLOT if offer.tier == MEMORY else offer.tier
            if kind == JOURNAL and (offer.run_id, offer.epoch, offer.shard, offer.step) in bases:
                kind = BASE
            steps.append(Had(node.name, offer.run_id, offer.epoch, offer.shard, offer.step, offer.step, kind,
                             offer.status, offer.nbytes, 0.0))
        for one in journals:
            of = node.name, one["run_id"], one["epoch"], one["shard"]
            steps += [Had(*of, span["first"], span["last"], MAKEABLE, "", span["bytes"], span["seconds"])
                      for span in one["steps"] if span["kind"] == MAKEABLE]
            holes += [Hole(*of, first, last) for first, last in one["holes"]]
    steps.sort(key=lambda one: (one.run_id, -one.epoch, one.shard, -one.last, -one.first, one.node, one.kind))
    return Steps(tuple(steps), tuple(holes), tuple(absent))


def _journals(node: NodeClient) -> list[Mapping[str, Any]]:
    """Raises AskError."""
    try:
        said = node.connection.json("/v1/rewind")
    except GoneError:
        return []  # of a release without journals
    found = said.get("journals") if isinstance(said, dict) else None
    if not isinstance(found, list) or not all(map(_is_sound, found)):
        raise AskError("lists journals that are not described", where=node.name)
    return found


def _is_sound(one: Any) -> bool:
    kinds = {"run_id": str, "epoch": int, "shard": str, "steps": list, "holes": list}
    if not isinstance(one, dict) or not all(type(one.get(name)) is kind for name, kind in kinds.items()):
        return False
    spans = all(isinstance(span, dict) and span.get("kind") in (BASE, MAKEABLE) and all(
        type(span.get(name)) is int and span[name] >= 0 for name in ("first", "last", "bytes"))
        and type(span.get("seconds")) in (int, float) for span in one["steps"])
    return spans and all(isinstance(hole, list) and len(hole) == 2 and all(type(at) is int for at in hole)
                         for hole in one["holes"])
