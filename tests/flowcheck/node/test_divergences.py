"""What becomes of versions after a checksum that did not match: in memory, on disk, in the store, and what is said."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.checkpoint.directory import Meta, load_init, mark_diverged, write_step
from flowcheck.checkpoint.objects import open_store
from flowcheck.checkpoint.state import load_checkpoint
from flowcheck.checkpoint.store import Lane, read_entry
from flowcheck.control.divergence import Divergence
from flowcheck.errors import UserError
from flowcheck.node.store.shelf import StoreShelf
from flowcheck.node.versions.divergences import Divergences, Notices
from flowcheck.node.versions.held import Gone
from flowcheck.node.versions.holdings import DiskShelf, MemoryShelf, Withheld

from .group_scene import small_job
from .holdings_scene import WHOLE, replicas

RUN = ("synth-0", 0, 2)
Said = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def said() -> Said:
    return []


@pytest.fixture
def made(tmp_path: Path, said: Said) -> Callable[[], Divergences]:
    return lambda: Divergences(tmp_path, "n", "dp0", lambda event, **fields: said.append((event, fields)))


def begun(found: Divergences, step: int = 0, start: str = "a", run: tuple[str, int, int] = RUN, own: str = "") -> None:
    job = small_job()
    job.run_id, job.epoch = run[0] or own, run[1]
    found.begins(run, job, step, start, own)


def test_all_since_the_last_match_and_nothing_else(made, tmp_path: Path, said: Said) -> None:
    found, notices = made(), Notices(tmp_path, "n")
    begun(found)
    assert notices.all == []
    found.verified(4)
    assert found.diverged(9, "why") == Divergence("synth-0", 0, "dp0", 4, 8)
    for step, status, covered in ((4, "follows 1", False), (5, "follows 4", True), (8, "unverified", True),
                                  (8, "verified", False), (9, "follows 4", False)):
        assert notices.cover("synth-0", 0, "dp0", step, status) is covered, step
    assert not notices.cover("synth-0", 1, "dp0", 5, "follows 4") and not notices.cover("x", 0, "dp0", 5, "follows 4")
    assert not notices.cover("synth-0", 0, "dp1", 5, "follows 4")
    assert [(event, one["step"], one["verified"], one["times"]) for event, one in said] == [("diverged", 9, 4, 1)]
    assert Notices(tmp_path, "n-2").all == [] and Notices(tmp_path, "n").all == notices.all


def test_the_second_time_the_run_is_refused(made) -> None:
    found = made()
    begun(found)
    found.diverged(3, "why")
    assert not found.refusing and found.refused(RUN) == ""
    begun(found, 3, "another attachment")
    found.diverged(5, "'w' differs")
    assert "'w' differs" in found.refusing and found.refused(RUN) == found.refusing
    assert found.refused(("synth-0", 1, 2)) == found.refused(("other", 0, 2)) == ""


def test_a_run_without_a_name_is_known_by_its_start(made) -> None:
    found, run = made(), ("", 0, 2)
    for own in ("one", "two", "two"):
        begun(found, own=own, run=run, start=own)
        found.diverged(3, "why")
    assert found.refused(run, "two") and not found.refused(run, "one") and not found.refused(run)


def test_another_start_makes_the_same_steps_again(made, tmp_path: Path) -> None:
    """What it makes is not withheld for what the start before had; what that one had below stays so."""
    found, notices = made(), Notices(tmp_path, "n")
    begun(found)
    found.diverged(9, "why")
    begun(found, 2, "a")
    assert notices.cover("synth-0", 0, "dp0", 8, "unverified"), "the same start, joined anew"
    begun(found, 5, "b")
    assert [notices.cover("synth-0", 0, "dp0", step, "follows 1") for step in (4, 5, 8)] == [True, False, False]
    begun(found, 0, "c")
    assert notices.all == [] and not list(tmp_path.glob("*.diverged"))


def test_what_was_said_outlives_the_process(made, tmp_path: Path) -> None:
    found = made()
    begun(found)
    found.diverged(9, "why")
    again = made()
    begun(again, 0, "a")
    assert len(Notices(tmp_path, "n").all) == 1, "the same start, which this process takes up"
    begun(again, 20, "b")
    again.diverged(25, "why")
    assert [(one.after, one.last) for one in Notices(tmp_path, "n").all] == [(-1, 8), (-1, 24)]
    assert not again.refusing, "it is counted in one process"


@pytest.mark.parametrize("text", ["", "{", "3", "[3]", '[{"run_id": "r"}]', "[" * 100_000, "\x00"])
def test_a_damaged_file_says_nothing(made, tmp_path: Path, text: str) -> None:
    path = tmp_path / "flowcheck-n-dp0.diverged"
    path.write_text(text)
    assert Notices(tmp_path, "n").all == []
    found = made()
    begun(found)
    found.diverged(2, "why")
    assert len(Notices(tmp_path, "n").all) == 1


def test_a_file_of_somebody_else_says_nothing(made, tmp_path: Path) -> None:
    found = made()
    begun(found)
    found.diverged(2, "why")
    path = tmp_path / "flowcheck-n-dp0.diverged"
    (tmp_path / "flowcheck-n-dp1.diverged").symlink_to(path)
    assert len(Notices(tmp_path, "n").all) == 1
    path.chmod(0o666)
    assert Notices(tmp_path, "n").all == []


# -- what is offered -----------------------------------------------------------------------------------------------


@pytest.fixture
def make(shm: Path) -> Iterator[Callable[..., Any]]:
    with replicas(shm) as made:
        yield made


def test_what_is_read_from_memory_breaks_off(make, shm: Path) -> None:
    replica = make(steps=1)
    replica.mark_verified()
    slot = replica.build(2, WHOLE)
    slot.apply(0, torch.ones(3))
    replica.publish(slot, "follows 1")
    with contextlib.closing(MemoryShelf(shm, "n")) as shelf:
        offers = {one.offer.step: one.offer for one in shelf.look()}
        assert [offers[step].status for step in (2, 1, 0)] == ["follows 1", "verified", "unverified"]
        held = {step: shelf.hold(offers[step].id) for step in (1, 2)}
        assert all(one.read("model.safetensors", 0, 8) for one in held.values())
        replica.withdraw()
        with pytest.raises(Gone):
            held[2].read("model.safetensors", 0, 8)
        with pytest.raises(Gone):
            shelf.hold(offers[2].id)
        assert held[1].read("model.safetensors", 0, 8) and [one.offer.step for one in shelf.look()] == [1, 0]


STATUSES = {3: "unverified", 4: "verified", 5: "follows 4", 6: "follows 4"}
WRONG = Divergence("run", 2, "dp0", 4, 6)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A run's folder with four versions."""
    folder = tmp_path / "out" / "dp0" / "run" / "epoch-2"
    for step, status in STATUSES.items():
        write_step(folder, step, {"w": torch.full((2,), float(step))}, {},
                   Meta("run", 2, status, (), {}, "torch-cpu", "dp0", 1))
    return folder


def test_checkpoints_are_marked_and_passed_over(disk: Path, tmp_path: Path) -> None:
    with contextlib.closing(DiskShelf(tmp_path / "out")) as shelf:
        offers = {one.offer.step: one.offer for one in shelf.look()}
        held = shelf.hold(offers[6].id)
        assert held.manifest() and mark_diverged(disk, WRONG) == [6, 5] and mark_diverged(disk, WRONG) == []
        with pytest.raises(Gone):
            held.check()
        found = {one.offer.step: one.offer for one in shelf.look()}
        assert {step: one.status for step, one in found.items()} == {**STATUSES, 5: "diverged", 6: "diverged"}
        for step in (5, 6):
            assert "diverged" in shelf.withheld(found[step])
            with pytest.raises(Withheld):
                shelf.hold(found[step].id)
        assert shelf.withheld(found[4]) == ""
    assert (load_checkpoint(disk).step, load_checkpoint(disk).status) == (4, "verified")
    named = load_checkpoint(disk / "step-000006")
    assert named.status == "diverged" and ", diverged: " in repr(named) and named.parameters["w"].tolist() == [6, 6]
    with pytest.raises(UserError, match="has diverged"):
        load_init(disk / "step-000006", [])


def test_what_is_damaged_is_left(disk: Path) -> None:
    (disk / "step-000005" / "manifest.json").write_text("{")
    (disk / "step-000007").mkdir()
    assert mark_diverged(disk, WRONG) == [6] and mark_diverged(disk / "none", WRONG) == []


def test_what_is_said_beside_the_replica_holds_for_every_tier(disk: Path, tmp_path: Path, made) -> None:
    found = made()
    job = small_job()
    job.run_id, job.epoch = "run", 2
    found.begins(("run", 2, 2), job, 0, "a")
    found.verified(4)
    with contextlib.closing(DiskShelf(tmp_path / "out")) as shelf:
        shelf.notices = Notices(tmp_path, "n")
        offers = {one.offer.step: one.offer for one in shelf.look()}
        held = shelf.hold(offers[5].id)
        found.diverged(7, "why")
        with pytest.raises(Withheld):
            shelf.hold(held.offer.id)
        assert {step: shelf.judged(one).status for step, one in offers.items()} == {
            **STATUSES, 5: "diverged", 6: "diverged"}


def test_versions_in_a_store_are_marked(tmp_path: Path) -> None:
    objects = open_store(str(tmp_path / "store"), {})
    lane = Lane(objects, "n/dp0/run")
    for step, status in STATUSES.items():
        lane.write(step, {"model.safetensors": {"w": torch.ones(2)}, "optimizer.safetensors": {}},
                   Meta("run", 2, status, (), {}, "torch-cpu", "dp0", 1), dict)
    assert len(lane.mark_diverged(WRONG)) == 2 and lane.mark_diverged(WRONG) == []
    read = [read_entry(objects, one.folder).version for one in lane.entries()[0]]
    assert {one.step: one.status for one in read} == {**STATUSES, 5: "diverged", 6: "diverged"}
    with contextlib.closing(StoreShelf(str(tmp_path / "store"), lambda: objects)) as shelf:
        assert [one.offer.step for one in shelf.look() if not shelf.withheld(one.offer)] == [4, 3]


def test_the_file_is_plain_json(made, tmp_path: Path) -> None:
    found = made()
    begun(found)
    found.diverged(2, "why")
    assert json.loads((tmp_path / "flowcheck-n-dp0.diverged").read_text()) == [
        {"run_id": "synth-0", "epoch": 0, "shard": "dp0", "after": -1, "last": 1, "start": "a"}]


@pytest.mark.parametrize("plant", [lambda path: path.mkdir(), lambda path: path.symlink_to("/nowhere"),
                                   lambda path: os.mkfifo(path)])
@pytest.mark.parametrize("late", [False, True])
def test_what_somebody_else_has_put_in_its_place_is_no_hindrance(tmp_path: Path, said: Said, plant, late) -> None:
    """A local user may do so in /dev/shm. What has diverged is told to readers all the same."""
    path = tmp_path / "flowcheck-n-dp0.diverged"
    if not late:
        plant(path)
    found = Divergences(tmp_path, "n", "dp0", lambda event, **fields: said.append((event, fields)))
    if late:
        plant(path)
    found.begins(RUN, small_job(), 0, "a" * 64)
    found.diverged(5, "it differs")
    assert [one.last for one in Notices(tmp_path, "n").all] == [4]
