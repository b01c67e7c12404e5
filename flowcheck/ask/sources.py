"""Which versions there are to go on from, which one is taken, and where each comes from.

    found = look(nodes, run_id, shard)          every node asked at once; who does not answer is absent, and named
    key = choose([found.versions, ...], ...)    the newest that all ranks can have
    fetched = fetch(found, key, into)           from the nearest source that proves good
    take(nodes, run_id, shard, step)            all of that, for one that nobody waits for

A source that cannot be had, or of which a byte is not what its manifest says, is left for the next one, and the reason
is kept.
Torch and the standard library.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch

from flowcheck.ask.client import MOST_FAILED, NodeClient, split
from flowcheck.ask.into import Into
from flowcheck.ask.logs import LogSource
from flowcheck.ask.offer import LOG, TIERS, Offer
from flowcheck.ask.receiving import AskError
from flowcheck.ask.refusals import BusyError, FullError, GoneError
from flowcheck.control.address import host_and_port, why_not
from flowcheck.control.start import Key, naming, order
from flowcheck.control.user_state import UserState
from flowcheck.control.version import MODEL, OPTIMIZER, Version
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.job.version_status import VersionStatus

__all__ = [
    "Fetched", "Found", "Key", "NoSource", "addresses", "choose", "fetch", "look", "offers_of", "take", "when_free",
]

MOST_ROUNDS = 16
MOST_AHEAD = 1 << 20  # epochs of which nobody vouches for one: a planted one that is further leaves none for later
MOST_NAMED = 8  # steps, where the one that was asked for is not there
MOST_SAME = 4  # of one version, that a tier of a node lists
BUSY_SECONDS = 30.0  # a version that is not read any more is held for 20
QUEUE_SECONDS = 1800.0  # that a node may have no connection left for a file: as many ranks read from it as it serves
AGAIN_SECONDS = 1.0
_Given = TypeVar("_Given")


class NoSource(EnvironmentProblem):
    """A version that is there and could not be had from anywhere."""


@dataclass(frozen=True)
class Found:
    """What nodes have of one shard of a run. run_id, shard: "" as long as nothing was found. places: nearest first.
    absent: of each node that did not answer, its name and why. withheld: of each that has versions and does not offer
    them yet, its name and why the newest is not. lacks: "run" or "shard": there are versions, and none of that one;
    other: whose they are, in words. newest: the newest epoch of the run of which they have anything, of whatever shard,
    withheld or not; -1: they have nothing of it. remedies: what to do about those
    of the absent that are there and were asked wrongly; shards: of the run, that have anything. Versions of epochs that
    are newer than all that a node vouches for, if one vouches for any, are no places: nobody has attached with them."""

    run_id: str
    shard: str
    places: tuple[tuple[NodeClient, Offer], ...]
    absent: tuple[str, ...]
    withheld: tuple[str, ...] = ()
    lacks: str = ""
    other: str = ""
    newest: int = -1
    remedies: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()

    @property
    def versions(self) -> dict[Key, str]:
        """What there is, and its status: the best that any holder says, whose version is then taken (`fetch`)."""
        out: dict[Key, VersionStatus] = {}
        for _, offer in self.places:
            status = VersionStatus.of(offer.status)
            out[offer.key] = max(out.get(offer.key, status), status)
        return {key: str(status) for key, status in out.items()}

    def chosen(self, run_id: str | None, shard: str | None) -> tuple[str | None, str | None]:
        """What was asked for, or the only one there was: it stays that one, whatever is there later."""
        return (self.run_id if self.places else run_id), (self.shard if self.places else shard)

    def with_user(self, rank: int) -> set[Key]:
        """Versions of which somebody has that rank's own state."""
        return {offer.key for _, offer in self.places if offer.has_user(rank)}

    def of(self, key: Key) -> list[tuple[NodeClient, Offer]]:
        """Who has a version, as `choose` names it, the nearest first."""
        here = [place for place in self.places if place[1].step == key[1]]
        if exact := [place for place in here if place[1].key[2:] == key[2:] and (
                len(key) == 3 or place[1].epoch == key[0])]:
            return exact
        unsaid = [place for place in here if len(place[1].key) == 2 and place[1].epoch <= key[0]]
        newest = max((place[1].epoch for place in unsaid), default=0)  # as a node says it that knows no line
        return [place for place in unsaid if len(key) == 3 and place[1].epoch == newest]


@dataclass(frozen=True)
class Fetched:
    """A version whose every hash agreed. model: {name: tensor}; state: {parameter: {key: tensor}}. source: node and
    tier. nbytes: received, those of sources that were given up too. passed: why nearer sources were not taken. users:
    the own states of those ranks that were asked for. logs: of what it is made by who asked, the first of which was
    looked at, and others that have it; then `model` and `state` are empty; (): it is all here."""

    version: Version
    model: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]
    source: str
    nbytes: int
    seconds: float
    passed: tuple[str, ...]
    users: Mapping[int, UserState] = field(default_factory=dict)
    logs: tuple[LogSource, ...] = ()


def addresses(nodes: str | Sequence[str]) -> list[tuple[str, int]]:
    """HOST:PORT of each node, from a list of them or one text with commas. Raises UserError."""
    if not isinstance(nodes, str | list | tuple):
        raise UserError(f"a {type(nodes).__name__} names none", where="nodes", remedy="HOST:PORT, or a list of them")
    texts = nodes.split(",") if isinstance(nodes, str) else list(nodes)
    out = []
    for text in texts:
        if (found := host_and_port(text.strip() if isinstance(text, str) else text)) is None:
            raise UserError(f"{text!r} {why_not(text)}", where="nodes", remedy="HOST:PORT of a node's api.listen")
        out.append(found)
    if not out or len(set(out)) < len(out):
        raise UserError(f"{nodes!r} is empty, or names a node twice", where="nodes", remedy="each node once")
    return out


def look(
    nodes: Sequence[NodeClient], run_id: str | None, shard: str | None, step: int | None = None
) -> Found:
    """Ask every node what it has. run_id, shard: None takes the only one that there is. step: that is wanted, which a
    node may have to make first.

    Raises UserError where several runs or shards are there and it was not said which; and where there is one that has a
    name, as shards of jobs with several have, while a node that may have another does not answer.
    """
    answers = offers_of(nodes, BUSY_SECONDS, step)
    for node, answer in zip(nodes, answers, strict=True):
        for offer in answer if not isinstance(answer, str) else ():
            if offer.id in node.gone:  # it is listed still: it has not made room, it cannot be read
                node.failed[offer.tier] += 1
        node.gone.clear()
    absent = (
        *(answer for answer in answers if isinstance(answer, str)),
        *(f"{node.name}, {tier}: did not say in time what it has" for node in nodes for tier in node.silent),
        *(f"{node.name}, {tier}: {count} of its versions were not good, and it is asked for no more"
          for node in nodes for tier, count in node.failed.items() if count >= MOST_FAILED),
    )
    offered = [(node, offer) for node, answer in zip(nodes, answers, strict=True) if not isinstance(answer, str)
               for offer in answer if node.failed[offer.tier] < MOST_FAILED
               and not VersionStatus.of(offer.status).diverged]
    run_id, of_run = _only("run_id", run_id, offered)
    vouched = max((epoch for node in nodes for run, epoch in node.attached.items() if run_id in ("", run)), default=-1)
    strange = sorted({offer.epoch for _, offer in of_run if 0 <= vouched < offer.epoch})
    of_run = [(node, offer) for node, offer in of_run if offer.epoch not in strange]
    said = shard
    shard, places = _only("shard", shard, of_run)
    if said is None and shard and (gone := [answer for answer in answers if isinstance(answer, str)]):
        raise UserError(f"there is shard {shard!r}, and whoever may have another one did not answer: {'; '.join(gone)}",
                        where="shard", remedy="say shard=, as this rank has it")
    lacks = other = ""
    if offered and not of_run:
        lacks, other = "run", f"nothing is of run {run_id!r}; there is {_named('run_id', offered)}"
    elif of_run and not places:
        lacks, other = "shard", f"run {run_id!r} has nothing of shard {shard!r}; it has {_named('shard', of_run)}"
    epochs = [epoch for node in nodes for run, epoch in node.epochs.items() if run_id in ("", run)]
    newest = max((epoch for epoch in epochs if not 0 <= vouched < epoch - MOST_AHEAD), default=-1)
    unknown = tuple(f"epoch {epoch}: is there, and no node vouches that trainers have attached with it"
                    for epoch in strange[-1:])
    return Found(run_id, shard, tuple(sorted(places, key=lambda place: TIERS.index(place[1].tier))), absent,
                 (*(f"{node.name}: {why}" for node in nodes for why in node.withheld), *unknown), lacks, other, newest,
                 tuple(dict.fromkeys(node.misasked for node in nodes if node.misasked)),
                 tuple(sorted({offer.shard for _, offer in of_run})))


def _named(name: str, offered: list[tuple[NodeClient, Offer]]) -> str:
    return ", ".join(sorted({repr(getattr(offer, name)) for _, offer in offered}))


def offers_of(nodes: Sequence[NodeClient], full: float = 0.0, step: int | None = None) -> list[list[Offer] | str]:
    """What each of them has, or why it does not say; all are asked at once. full: seconds that one may have no
    connection left: all ranks of a job ask at the same time. step: as of `look`."""
    with ThreadPoolExecutor(len(nodes), "flowcheck look") as pool:
        return list(pool.map(partial(_offers, full=full, step=step), nodes))


def _offers(node: NodeClient, full: float, step: int | None) -> list[Offer] | str:
    node.misasked = ""
    try:
        return when_free(node, node.offers if step is None else partial(node.offers, step), 0.0, full)
    except AskError as error:
        node.misasked = error.remedy
        return f"{node.name}: {error.what}"
    finally:
        node.close()


def _only(
    name: str, wanted: str | None, offered: list[tuple[NodeClient, Offer]]
) -> tuple[str, list[tuple[NodeClient, Offer]]]:
    there = sorted({getattr(offer, name) for _, offer in offered})
    if wanted is None and len(there) > 1:
        raise UserError(f"the nodes have several: {', '.join(map(repr, there))}", where=name, remedy=f"say {name}=")
    value = wanted if wanted is not None else there[0] if there else ""
    return value, [(node, offer) for node, offer in offered if getattr(offer, name) == value]


def choose(
    held: Sequence[Mapping[Key, str]], *, step: int | None = None, prefer_verified: int = 0,
    bad: Collection[Key] = (), users: Sequence[Collection[Key]] = (), prefer_user: int = 0,
    stood: Collection[Key] = (),
) -> Key | None:
    """The version to take: the newest that everybody holds; None: nobody has one.

    held: of each rank what it can have, and its status. What is `diverged` is never taken. step: only this one.
    prefer_verified: a version whose own checksums matched for everybody is taken although it is so many steps older, of
    the same epoch; one that only follows such a version is not. bad: not these. users: of each rank the versions that
    have its own state; if there are some that have everybody's and are at most prefer_user steps older, it is one of
    them. stood: versions of the look before, of which the one chosen could not be had. While a job goes on the newest
    may be built over before it is asked for, each time; what still stands is taken then.
    Steps are compared within a line alone (start.py): that of the newest start is taken as long as there is anything of
    it that everybody holds. The epoch of what is returned may be newer than nodes say.
    """
    name = naming(held)
    bad, stood, *users = [set(map(name, keys)) for keys in (bad, stood, *users)]
    statuses = [_as_named(one, name) for one in held]
    common = set.intersection(*({key for key, one in found.items() if not one.diverged} for found in statuses)) - bad
    common = {key for key in common if step is None or key[1] == step}
    if not common:
        return None
    common = common & set(stood) or common
    newest = max(common, key=order)

    def near(steps: int) -> set[Key]:
        return {key for key in common if order(key)[:2] == order(newest)[:2] and key[1] >= newest[1] - steps}

    if whole := {key for key in near(prefer_user) if users and all(key in one for one in users)}:
        common, newest = whole, max(whole, key=order)
    verified = [key for key in near(prefer_verified) if all(one[key].verified for one in statuses)]
    return max(verified, default=newest, key=order)


def _as_named(held: Mapping[Key, str], name: Callable[[Key], Key]) -> dict[Key, VersionStatus]:
    """Of a version under several of its names the best status, as of several holders."""
    out: dict[Key, VersionStatus] = {}
    for key, text in held.items():
        status = VersionStatus.of(text)
        out[name(key)] = max(out.get(name(key), status), status)
    return out



def fetch(
    found: Found, key: Key, into: Mapping[str, torch.Tensor], ranks: Callable[[Offer], Sequence[int]] = lambda one: ()
) -> Fetched:
    """The version `key`, from the nearest source of which every hash agrees.

    Sources whose version is verified come first: bytes of others may differ. ranks: whose own states are wanted of an
    offer; then come sources that have more of them.
    into: tensors of the model to receive into (NodeClient.tensors). Raises NoSource that says of each source why not;
    then `into` holds anything. Raises UserError if `into` does not fit; then it is as it was, unless tensors in it
    share memory.
    """
    began, passed = time.monotonic(), list(found.absent)
    received = 0
    tried = Counter[tuple[str, str]]()
    places = sorted(found.of(key), key=lambda at: (not VersionStatus.of(at[1].status).verified, -len(ranks(at[1]))))
    for number, (node, offer) in enumerate(places, 1):
        tried[node.name, offer.tier] += 1
        if tried[node.name, offer.tier] > MOST_SAME:
            if tried[node.name, offer.tier] == MOST_SAME + 1:
                passed.append(f"{node.name}, {offer.tier}: lists it more than {MOST_SAME} times")
            continue
        before = node.connection.received
        try:
            if offer.tier == LOG:
                log, *others = (LogSource(one.again(), its) for one, its in places[number - 1 :] if its.tier == LOG)
                try:
                    when_free(log.node, log.head)
                finally:
                    received += log.node.connection.received
                users = {rank: when_free(node, partial(node.user, offer, rank)) for rank in ranks(offer)}
                return Fetched(log.version(), {}, {}, log.where, received + node.connection.received - before,
                               time.monotonic() - began, tuple(passed), users, (log, *others[:MOST_SAME]))
            # One that proved bad is held for some seconds after that, and its node may have no slot for another.
            version = when_free(node, partial(node.version, offer))
            given = Into(version, into)
            model = when_free(node, partial(node.tensors, offer, version, MODEL, given.alone))
            state = split(when_free(node, partial(node.tensors, offer, version, OPTIMIZER, {})))
            users = {rank: when_free(node, partial(node.user, offer, rank)) for rank in ranks(offer)}
            given.finish(model)
        except AskError as error:
            passed.append(f"{error.where or node.name}: {error.what}")
            if isinstance(error, GoneError):
                node.gone.add(offer.id)
            elif not isinstance(error, BusyError | FullError):
                node.failed[offer.tier] += 1
            continue
        finally:
            node.close()
            received += node.connection.received - before
        source = f"{node.name}, {offer.tier}"
        return Fetched(version, model, state, source, received, time.monotonic() - began, tuple(passed), users)
    raise NoSource(
        f"step {key[1]} of epoch {key[0]} could be had from nowhere: {'; '.join(passed) or 'nobody has it any more'}",
        where="recover", remedy="an older step, or see the nodes",
    )


def when_free(
    node: NodeClient, ask: Callable[[], _Given], busy: float | None = None, full: float | None = None
) -> _Given:
    """What it says, as soon as it has room for another. busy, full: seconds that it may have no slot, or no connection.
    As long as usual it is waited for once: a node that has none by then is left at once from there on. Raises AskError.
    """
    began = time.monotonic()
    while True:
        try:
            return ask()
        except (BusyError, FullError) as error:
            given, usual = (full, QUEUE_SECONDS) if isinstance(error, FullError) else (busy, BUSY_SECONDS)
            over = time.monotonic() - began > (usual if given is None else given)
            if given is None:
                over = node.busy = node.busy or over
            if over:
                raise
        node.close()
        time.sleep(AGAIN_SECONDS * random.uniform(0.5, 1.5))  # not all ranks at once again


def take(
    nodes: Sequence[NodeClient], run_id: str | None, shard: str | None, step: int | None, users: bool = False,
    may: Callable[[Found], None] = lambda found: None,
) -> Fetched:
    """The newest version that proves good, or `step`. users: with the own states of all ranks that gave one. may:
    raises where what was found is not to be taken. Raises EnvironmentProblem: nobody has it; UserError as `look`."""
    passed: list[str] = []
    bad: list[Key] = []
    stood: set[Key] = set()
    for _ in range(MOST_ROUNDS):
        found = look(nodes, run_id, shard, step)  # anew each time: what was there may have made room for newer versions
        run_id, shard = found.chosen(run_id, shard)
        key = choose([found.versions], step=step, bad=bad, stood=stood)
        if key is None:
            break
        may(found)
        try:
            fetched = fetch(found, key, {}, lambda offer: offer.with_user if users else ())
            if fetched.logs:
                raise UserError(f"step {key[1]} is kept as a log, of which its trainers make it", where=fetched.source,
                                remedy="flowcheck.recover, and recovered.load(model, optimizer), in the job's script")
            return replace(fetched, passed=(*passed, *fetched.passed))
        except NoSource as error:
            passed.append(error.what)
            bad.append(key)
            stood = set(found.versions)
    what = f"step {step} is not there" if step is not None and not bad else "there is no version"
    what = "none of the versions that were found is good" if bad else what
    what = what if any(node.connection.answered for node in nodes) else "nobody answered"
    there = ", ".join(map(str, sorted({offer.step for _, offer in found.places})[-MOST_NAMED:]))
    other = [found.other] if found.lacks else [f"the newest that are there: {there}"] if there and not bad else []
    why = "; ".join([*passed, *found.absent, *found.withheld, *other])
    raise EnvironmentProblem(f"{what}{f': {why}' if why else ''}", where=", ".join(node.name for node in nodes),
                             remedy="; ".join(found.remedies) or (
                                 "one of those that are there, or a checkpoint directory" if other else
                                 "a node that has one, by its api.listen; or a checkpoint directory"))
