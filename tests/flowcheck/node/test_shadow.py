"""Shadow mode: what is withheld, for how long, and by which tier; what is said of it."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.ask.offer import Offer
from flowcheck.checkpoint.directory import Meta, load_step, write_step
from flowcheck.checkpoint.objects import open_store
from flowcheck.checkpoint.store import Lane
from flowcheck.control.version import MODEL, OPTIMIZER
from flowcheck.errors import UserError
from flowcheck.job.model import BucketSlice
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.config.load import load
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.store.shelf import StoreShelf
from flowcheck.node.versions.holdings import DiskShelf, MemoryShelf, Shelf, Withheld
from flowcheck.node.versions.replica_files import ReplicaFiles
from flowcheck.node.versions.shadow import Shadow, withheld
from flowcheck.rebuild.version.events import Closed, Lost
from flowcheck.trainer.recover.recovery import recover
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

from ..hand_api import KEY, TOKEN
from .group_scene import FakeReplica, Scene, scenes, small_job
from .live_scene import Live

WHOLE = Layout([[BucketSlice("w", 0, 3)]], {"w": (3,)}, [3])
SPEC = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0})])
PUBLISHED = Closed(2, True, "verified", 1, 1, {}, 0, 0, 0)


@pytest.fixture
def replica(shm: Path) -> Iterator[Callable[..., Replica]]:
    """replica(number, *matches): a replica file with a version for each count, from step 1 on; more: of the replica."""
    with contextlib.ExitStack() as stack:

        def made(number: int, *matches: int, **more: Any) -> Replica:
            one = Replica({"w": torch.zeros(3)}, SPEC, path=shm / f"flowcheck-n--{number}.replica", slots=4,
                          **{"run_id": "run"} | more)
            stack.enter_context(contextlib.closing(one))
            for count in matches:
                slot = one.build(one.current.step + 1, WHOLE)
                slot.apply(0, torch.ones(3))
                one.publish(slot, "verified" if count else "unverified", (), count)
            return one

        yield made


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    """scene(**options): a group of which the test is the thread."""
    with scenes(tmp_path, hashes=False) as make:
        yield make


# -- one version ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("matches", "needs", "why"), [
    (0, 0, ""), (3, 3, ""), (4, 3, ""),
    (2, 3, "step 7 is not offered for recovery: 2 of 3 checksums of the trainer had matched when it was published"
           " (api.shadow)"),
])
def test_a_version_needs_as_many_matches_as_are_asked_for(matches: int, needs: int, why: str) -> None:
    offer = Offer("m" + "0" * 31, "memory", "run", 0, 7, "", "verified", 5, matches=matches)
    assert withheld(offer, needs) == why


def steps(shelf: Shelf) -> tuple[list[int], list[int]]:
    """Of what is offered, and of what is not."""
    seen = shelf.look()
    for one in seen:
        if shelf.withheld(one.offer):
            with pytest.raises(Withheld, match="is not offered for recovery"):
                shelf.hold(one.offer.id)
        else:
            shelf.hold(one.offer.id)
            shelf.close()
    return ([one.offer.step for one in seen if not shelf.withheld(one.offer)],
            [one.offer.step for one in seen if shelf.withheld(one.offer)])


@pytest.mark.parametrize(("needs", "offered"), [(0, [3, 2, 1, 0]), (1, [3, 2]), (2, [3]), (3, [])])
def test_memory(replica: Callable[..., Replica], shm: Path, needs: int, offered: list[int]) -> None:
    replica(1, 0, 1, 2)
    with contextlib.closing(MemoryShelf(shm, "n", needs=needs)) as shelf:
        assert steps(shelf) == (offered, [step for step in (3, 2, 1, 0) if step not in offered])


@pytest.mark.parametrize(("needs", "offered"), [(0, [3, 2, 1]), (1, [3, 2]), (2, [3]), (3, [])])
def test_disk_and_store(tmp_path: Path, needs: int, offered: list[int]) -> None:
    objects = open_store(str(tmp_path / "store"), {})
    for step, matches in ((1, 0), (2, 1), (3, 2)):
        meta = Meta("run", 0, "verified" if matches else "unverified", (), {}, "torch-cpu", "", matches)
        path = write_step(tmp_path / "disk" / "run" / "epoch-0", step, {"w": torch.zeros(2)}, {}, meta)
        assert load_step(path).manifest["matches"] == matches
        Lane(objects, "n/-/run").write(step, {MODEL: {"w": torch.zeros(2)}, OPTIMIZER: {}}, meta, dict)
    with contextlib.closing(DiskShelf(tmp_path / "disk", needs=needs)) as shelf:
        assert steps(shelf)[0] == offered
    with contextlib.closing(StoreShelf("x", lambda: objects, needs=needs)) as shelf:
        assert steps(shelf)[0] == offered


def test_over_http_and_to_a_trainer(replica: Callable[..., Replica], shm: Path, tmp_path: Path) -> None:
    """The whole way: a version that has not earned it is nowhere to be had; the next one is."""
    config = NodeConfig.model_validate({
        "name": "n", "control": {"listen": "127.0.0.1:0", "token_file": "t"}, "capture": {"device": "x"},
        "api": {"listen": "127.0.0.1:0", "shadow": 2}, "replica": {"directory": str(shm)},
        "output": {"directory": str(tmp_path)},
    })
    one = replica(1, 1)
    with contextlib.closing(Serving(config, TOKEN.encode(), lambda *_, **__: None)) as node:
        assert node.address is not None

        def get(path: str) -> tuple[int, Any]:
            with contextlib.closing(http.client.HTTPConnection(node.address, timeout=240)) as connection:
                connection.request("GET", path, headers={"Authorization": f"Bearer {KEY}"})
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read())

        _, said = get("/v1/versions")
        assert said["versions"] == [] and [held["step"] for held in said["withheld"]] == [1, 0]
        for path in ("manifest.json", MODEL, OPTIMIZER, "user/0"):
            status, why = get(f"/v1/versions/{said['withheld'][0]['id']}/{path}")
            assert status == 403 and "1 of 2 checksums of the trainer had matched" in why["why"]
        found = recover(node.address, token=TOKEN, seconds=240)
        assert not found and found.passed == (f"{node.address}: {said['withheld'][0]['why']}",)
        slot = one.build(2, WHOLE)
        slot.apply(0, torch.ones(3))
        one.publish(slot, "verified", (), 2)
        found = recover(node.address, token=TOKEN, seconds=240)
        assert (found.step, found.status) == (2, "verified")
        assert [held["step"] for held in get("/v1/versions")[1]["withheld"]] == [1, 0]


# -- the count -----------------------------------------------------------------------------------------------------


def test_the_count_grows_with_each_match_and_a_mismatch_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Live(monkeypatch, None)
    at.state(2)
    at.step(2)
    assert at.session.matches == at.session.replica.matches == 0
    at.step(3, checksums=at.sums(0.0))
    at.step(4)
    assert at.session.matches == at.session.replica.matches == 1
    at.step(5, checksums=at.sums(-1.0))
    assert at.session.matches == at.session.replica.matches == 2
    at.step(6, checksums=at.sums(9.0))
    assert at.lost and at.session.matches == 0


class Said(list[tuple[str, dict[str, Any]]]):
    """whys: of each event, in words."""

    def __init__(self) -> None:
        self.whys: list[str] = []

    def __call__(self, event: str, **fields: Any) -> None:
        self.append((event, {key: value for key, value in fields.items() if key != "why"}))
        self.whys.append(fields["why"])


def test_it_is_said_when_it_begins_and_when_it_is_over() -> None:
    said = Said()
    shadow = Shadow(2, said)
    assert shadow.begins("run") == 0
    for step, matches in ((1, 0), (2, 0), (3, 1), (4, 2), (5, 2), (6, 3)):
        shadow.published(step, matches)
        assert shadow.trusts == (matches >= 2)
    assert said == [("withheld", {"step": 1, "matches": 0, "needs": 2}),
                    ("offered", {"step": 4, "matches": 2, "needs": 2})]
    assert said.whys == ["versions are made and not offered for recovery before so many checksums of the trainer have"
                         " matched (api.shadow; attach's checksum_every)",
                         "from this version on they are offered for recovery"]
    assert shadow.begins("run") == 3, "a new start of the same run goes on with the count"
    shadow.published(7, 3)
    assert len(said) == 2, "and has nothing to say"
    shadow.has(0)
    shadow.published(8, 0)
    assert said[2:] == [("withheld", {"step": 8, "matches": 0, "needs": 2})]
    shadow.published(9, 1)
    assert shadow.begins("another") == 0, "a match of the run before is none of this one"
    shadow.published(1, 0)
    assert said[3:] == [("withheld", {"step": 1, "matches": 0, "needs": 2})]


def test_without_shadow_mode_nothing_is_said() -> None:
    said = Said()
    shadow = Shadow(0, said)
    assert Shadow(1, said).begins("") == 0
    shadow.begins("run")
    shadow.published(1, 0)
    assert said == [] and shadow.trusts


def test_a_group_counts_over_starts_of_a_run_and_a_mismatch_ends_that(scene: Any) -> None:
    at = scene(shadow=2)
    at.follow()
    at.session.replica, at.session.matches = FakeReplica(3), 5
    at.happens(PUBLISHED)
    assert at.said[-1][1]["matches"] == 5 and at.events("withheld") == []
    at.intake.ranks.members.clear()  # the job has died
    again = small_job()
    again.epoch = 1
    at.follow(again, run=("synth-0", 1, 2))
    assert at.session.options["matches"] == 5
    at.session.matches = 0
    at.happens(Lost("tensor differs", True))
    at.session.replica = FakeReplica(4)
    at.happens(PUBLISHED)
    assert [one["matches"] for one in at.events("withheld")] == [0]


# -- what stays ----------------------------------------------------------------------------------------------------


def test_what_is_offered_stays_until_the_next_run_has_earned_it(scene: Any, tmp_path: Path) -> None:
    """It has a verified version of its own, which is withheld."""
    before = tmp_path / "flowcheck-node--4.replica"
    with contextlib.closing(Replica({"w": torch.zeros(3)}, SPEC, path=before, run_id="before", step=400)) as one:
        one.mark_verified()
    at = scene(shadow=2)
    at.follow()
    at.session.replica, at.session.matches = FakeReplica(4), 1
    at.happens(PUBLISHED)
    assert before.exists() and [one["needs"] for one in at.events("withheld")] == [2]
    at.session.matches = 2
    at.happens(PUBLISHED)
    assert not before.exists() and [one["matches"] for one in at.events("offered")] == [2]


def test_a_job_that_dies_before_it_has_earned_it_loses_nothing_that_is_offered(
    replica: Callable[..., Replica], shm: Path
) -> None:
    """However often, and though what is withheld is verified, newer, and further."""
    replica(1, 1, 2, 3).close()
    for number in (2, 3, 4):
        replica(number, *[1] * (2 + number), run_id=f"again {number}").close()
    for needs, there in ((3, {1, 4, 5}), (0, {4, 5})):
        files = ReplicaFiles(shm, "n", "", needs)
        replica(5, 0, run_id="last").close()
        files._number = 4
        assert files.path().name == "flowcheck-n--5.replica"
        files.stands("last", 0, 1)
        assert {int(path.stem.rpartition("-")[2]) for path in shm.glob("*.replica")} == there
        for path in shm.glob("*-5.replica"):
            path.unlink()
        for path in shm.glob("*-5.user"):  # made with the name
            path.rmdir()


# -- settings ------------------------------------------------------------------------------------------------------


def config(**api: Any) -> NodeConfig:
    return NodeConfig.model_validate({
        "control": {"listen": "127.0.0.1:0", "token_file": "t"}, "capture": {"device": "ring"},
        **({"api": {"listen": "127.0.0.1:0"} | api} if api else {}),
    })


def test_without_an_api_nothing_is_offered_and_nothing_withheld() -> None:
    assert (config().shadow, config(shadow=0).shadow, config(shadow=4).shadow) == (0, 0, 4)


@pytest.mark.parametrize("shadow", [-1, 1.5, "many", 1_000_001])
def test_a_count_that_is_none_is_refused(tmp_path: Path, shadow: Any) -> None:
    path = tmp_path / "node.toml"
    path.write_text(f"""[control]\nlisten = "127.0.0.1:0"\ntoken_file = "t"\n[capture]\ndevice = "ring"
[api]\nlisten = "127.0.0.1:0"\nshadow = {json.dumps(shadow)}\n""")
    with pytest.raises(UserError, match=r"api\.shadow"):
        load(path)
