"""The thread that sits in the registry for a node: a turn each second, and what a root has to find out besides.

    sit(settings, held, streams, take, node, keys, say, ending)      until `ending` is set

It belongs to the process that keeps copies (worker.py). What takes longer than a lease may, asking other nodes, is done
on a thread of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import Offer
from flowcheck.ask.sources import addresses
from flowcheck.errors import FlowcheckError, said_of
from flowcheck.node.config.tokens import read_token
from flowcheck.node.protect.border import RegistrySettings
from flowcheck.node.protect.losses import newest_persistent
from flowcheck.node.protect.placement import Decided, Member, Part, Run
from flowcheck.node.protect.registry_etcd import Etcd
from flowcheck.node.protect.registry_member import Seat
from flowcheck.node.protect.replacement import Operator
from flowcheck.node.protect.signing import Signed
from flowcheck.node.versions.holdings import MemoryShelf

__all__ = ["Persistent", "sit"]

TURN_SECONDS = 1.0
_Said = Sequence[Mapping[str, Any]]


def sit(
    settings: RegistrySettings, held: Callable[[], _Said], streams: Callable[[], _Said],
    take: Callable[[Sequence[tuple[str, int]], Mapping[Run, int], Part | None], None],
    node: Callable[[tuple[str, int]], NodeClient], keys: Callable[[], Sequence[bytes]], say: Callable[..., None],
    ending: threading.Event,
) -> None:
    """held(): copies that are whole. streams(): of parity, those that are. take(sources, steps, part): which nodes to
    copy from, of which step of each run no copy and no parity may go, and what is done for parity. node(address): asks
    it. keys(): as of signing.Signed."""
    cluster, code = settings.cluster, settings.code
    member = Member(settings.site, settings.address, settings.follows, settings.standby, code is not None)
    operator = Operator(settings.replace, cluster, say) if settings.replace else None
    login = (settings.user, lambda: read_token(settings.password)) if settings.user else None
    etcd = Etcd(settings.endpoints, cluster, settings.ca, cert=settings.cert, login=login)
    seat = Seat(
        Signed(etcd, cluster, keys, say), member, settings.replicas, settings.grace, say, settings.kept,
        operator=operator, wait=settings.replace_seconds, void=Persistent(node, say), code=code,
    )
    own, odd = addresses(member.address) if settings.own else [], ""
    with contextlib.closing(MemoryShelf(settings.directory, member.site.name)) as shelf, contextlib.closing(seat):
        while not ending.is_set():
            began = time.monotonic()
            try:
                found = seat.turn(held(), _own(one.offer for one in shelf.look()), streams())
                take([*own, *(addresses(sorted(set(found.values()))) if found else [])], seat.steps, seat.part)
                odd = ""
            except Exception as error:  # an address that is none, a file that cannot be read; nothing costs the lease
                why = said_of(error)
                if odd != why:
                    say("problem", why=f"placement is not followed: {why}")
                odd = why
            ending.wait(max(0.1, TURN_SECONDS - (time.monotonic() - began)))


def _own(offers: Iterable[Offer]) -> list[dict[str, Any]]:
    """Of each group the run of which there is a version that was published last: earlier ones may be there, too."""
    newest: dict[str, Offer] = {}
    for one in offers:
        if one.shard not in newest or _age(one) < _age(newest[one.shard]):
            newest[one.shard] = one
    return [{"run_id": one.run_id, "epoch": one.epoch, "shard": shard} for shard, one in sorted(newest.items())]


def _age(offer: Offer) -> float:
    return float("inf") if offer.age_seconds is None else offer.age_seconds


class Persistent:
    """Says where a recovery would end of which no copy is left: asked of all that are there, on a thread."""

    def __init__(self, node: Callable[[tuple[str, int]], NodeClient], say: Callable[..., None]) -> None:
        self._node, self._say = node, say

    def __call__(self, decided: Decided) -> None:
        threading.Thread(target=self.look, args=(decided,), daemon=True, name="flowcheck fallback").start()

    def look(self, decided: Decided) -> None:
        recovery = decided.recovery
        assert recovery is not None
        there = [one.address for name, one in decided.members.items() if name not in recovery.lost]
        with ThreadPoolExecutor(max(len(there), 1), "flowcheck look") as pool:
            offers = [offer for found in pool.map(self._offers, there) for offer in found]
        runs = {run_id for run_id, _, _ in recovery.void}
        shards = {(run_id, epoch, shard) for run_id, epoch, shard in recovery.shards if run_id in runs}
        shards |= {(offer.run_id, offer.epoch, offer.shard) for offer in offers if offer.run_id in runs}
        for run_id, key in newest_persistent(offers, shards).items():
            lost = sorted({shard for of, _, shard in recovery.void if of == run_id})
            back = f"step {key[1]}, the newest that is persistent" if key is not None else "nothing: none is persistent"
            self._say("fallback", run_id=run_id, shards=lost, step=None if key is None else key[1], why=(
                f"all that kept {', '.join(map(repr, lost))} is lost: until the trainers have given it anew, all"
                f" {len({shard for of, _, shard in shards if of == run_id})} shards would go back to {back}"))

    def _offers(self, address: str) -> list[Offer]:
        node = self._node(addresses(address)[0])
        try:
            return node.offers()
        except FlowcheckError:
            return []  # it is gone, too, or does not answer
        finally:
            node.close()
