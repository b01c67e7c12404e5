"""What others hear of versions that have diverged: the node's list, its store, and whoever keeps copies of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import COPY
from flowcheck.checkpoint.coding.code import Code
from flowcheck.checkpoint.objects import open_store
from flowcheck.checkpoint.store import Lane
from flowcheck.control.version import Version
from flowcheck.node.api.guard import Guard
from flowcheck.node.api.routes import _Api
from flowcheck.node.protect.border import Rules
from flowcheck.node.protect.copier import Copier
from flowcheck.node.protect.journal import Journal
from flowcheck.node.protect.parity_rounds import Rounds, kept_in
from flowcheck.node.store.worker import Persister, Wants
from flowcheck.node.versions.divergences import Divergences, Notices
from flowcheck.node.versions.holdings import DiskShelf, MemoryShelf
from flowcheck.node.versions.journal.job_text import JobText

from ..hand_api import KEY, HandApi, HandVersion
from ..hand_node import until
from .group_scene import small_job
from .holdings_scene import WHOLE, replicas
from .test_api import KEY as READER
from .test_api import get

DIVERGED = {"run_id": "run", "epoch": 0, "shard": "", "after": 4, "last": 8}


@pytest.fixture
def api() -> Iterator[HandApi]:
    with HandApi() as made:
        yield made


def node(api: HandApi) -> NodeClient:
    return NodeClient(api.address, KEY, 60.0)


def test_a_node_lists_what_has_diverged_and_offers_none_of_it(shm: Path) -> None:
    found = Divergences(shm, "n", "dp0", lambda *_, **__: None)
    job = small_job()
    job.run_id, job.epoch = "run", 3
    found.begins(("run", 3, 2), job, 0, "a")
    with replicas(shm) as make, contextlib.closing(MemoryShelf(shm, "n")) as shelf:
        make(steps=2).mark_verified()
        shelf.notices = notices = Notices(shm, "n")
        made = _Api({"memory": shelf}, notices=notices)
        app = Guard(made.app, READER)
        told = get(app, "/v1/versions").json
        assert ([one["step"] for one in told["versions"]], told["diverged"]) == ([2, 1, 0], [])
        id = told["versions"][1]["id"]
        found.diverged(3, "why")
        told = get(app, "/v1/versions").json
        assert told["statuses"] == "own" and [one["step"] for one in told["versions"]] == [2], "it is verified"
        assert [(one["step"], one["status"]) for one in told["withheld"]] == [(1, "diverged"), (0, "diverged")]
        assert told["diverged"] == [{"run_id": "run", "epoch": 3, "shard": "dp0", "after": -1, "last": 2}]
        assert get(app, f"/v1/versions/{id}/manifest.json").status == 403
        made.close()


def test_copies_of_them_go(api: HandApi, tmp_path: Path) -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    copier = Copier(tmp_path, Rules(keep=9), lambda event, **fields: said.append((event, fields)))
    for step, status in ((3, "unverified"), (4, "verified"), (5, "follows 4"), (6, "verified"), (8, "follows 6")):
        api.versions = [HandVersion(step, status=status)]
        copier.look(node(api))
    api.versions, api.diverged = [HandVersion(6)], [DIVERGED, {**DIVERGED, "run_id": "another"}]
    copier.look(node(api))
    with contextlib.closing(DiskShelf(tmp_path, tier=COPY)) as shelf:
        assert [(one.offer.step, one.offer.status) for one in shelf.look()] == [
            (6, "verified"), (4, "verified"), (3, "unverified")]
    assert sorted(fields["step"] for event, fields in said if event == "removed") == [5, 8]


def test_parity_over_them_goes(tmp_path: Path) -> None:
    with HandApi(HandVersion(6, shard="a", status="follows 4")) as one, HandApi(HandVersion(6, shard="b")) as other:
        rounds = Rounds(tmp_path, Code(2, 1), 2, 2, lambda *_, **__: None)
        nodes = [node(one), node(other)]
        rounds.turn(nodes)
        one.versions, other.versions = [HandVersion(4, shard="a")], [HandVersion(4, shard="b")]
        rounds.turn(nodes)
        assert [kept.step for kept in kept_in(tmp_path)] == [6, 4]
        one.diverged = [{**DIVERGED, "shard": "b"}]
        rounds.turn(nodes)
        assert [kept.step for kept in kept_in(tmp_path)] == [6, 4], "of b it was verified"
        one.diverged = [{**DIVERGED, "shard": "a"}]
        rounds.turn(nodes)
        assert [kept.step for kept in kept_in(tmp_path)] == [4]


def test_a_journal_makes_none_of_them(api: HandApi, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.begin(JobText({}, ("run", 0, 2), 0, "a" * 64))
    for step, status in ((4, "verified"), (5, "follows 4"), (6, "verified"), (7, "follows 6")):
        journal.hashed(Version.of(HandVersion(step, status=status).document, "x"))
    api.diverged = [DIVERGED]
    asked = node(api)
    asked.offers()
    for one in asked.diverged:
        journal.withdraw(one)
    assert journal.steps == [4, 6]


def test_versions_in_the_store_are_marked_once_it_can_be(shm: Path, tmp_path: Path) -> None:
    objects, now = open_store(str(tmp_path / "store"), {}), [100.0]
    said: list[str] = []
    found = Divergences(shm, "n", "dp0", lambda *_, **__: None)
    job = small_job()
    job.run_id, job.epoch = "run", 3
    found.begins(("run", 3, 2), job, 0, "a")
    with replicas(shm) as make, contextlib.closing(MemoryShelf(shm, "n")) as shelf:
        replica = make(steps=0)
        shelf.notices = Notices(shm, "n")
        persister = Persister(objects, shelf, "n", Wants(every=1), lambda event, **_: said.append(event),
                              lambda: now[0], lambda: now[0])
        for status in ("verified", "follows 1"):
            slot = replica.build(replica.current.step + 1, WHOLE)
            slot.apply(0, torch.ones(3))
            replica.publish(slot, status)
            if status == "verified":
                replica.mark_verified()
                found.verified(1)
            now[0] += 1000
            persister.look()
            persister.join(60.0)
        statuses = {one.version.step: one.version.status for one in Lane(objects, "n/dp0/run").entries()[0]}
        assert statuses == {1: "verified", 2: "follows 1"}
        found.diverged(3, "why")
        persister.look()
        until(lambda: "marked" in said)
        statuses = {one.version.step: one.version.status for one in Lane(objects, "n/dp0/run").entries()[0]}
        assert statuses == {1: "verified", 2: "diverged"}
