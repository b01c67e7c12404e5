"""What a node says of each version that it has, and versions on disk: their names, ages and files."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.ask.offer import DISK, MEMORY
from flowcheck.checkpoint.directory import Meta, write_parameters, write_step
from flowcheck.control.version import MODEL, OPTIMIZER, Version, seal
from flowcheck.node.versions import holdings
from flowcheck.node.versions.held import HOLD_SECONDS, Gone, inode_of
from flowcheck.node.versions.holdings import DiskShelf, MemoryShelf
from updater.reader import Reader
from updater.replica import Replica

from .holdings_scene import WHOLE, Clock, id_of, steps, whole


@pytest.fixture
def disk(tmp_path: Path, clock: Clock) -> Iterator[DiskShelf]:
    with contextlib.closing(DiskShelf(tmp_path, clock)) as shelf:
        yield shelf


def write(folder: Path, step: int, epoch: int = 0, shard: str = "", status: str = "verified") -> Path:
    meta = Meta("run", epoch, status, ("x",), {"name": "sgd", "groups": []}, "torch-cpu", shard)
    return write_step(folder / f"epoch-{epoch}", step, {"w": torch.ones(3)}, {"w": {"step": 1.0}}, meta)


def test_what_is_on_disk(tmp_path: Path, disk: DiskShelf) -> None:
    assert disk.look() == []
    write(tmp_path / "run", 10)
    write(tmp_path / "stage1" / "run", 20, 1, "stage1", "unverified")
    write(tmp_path / "a" / "b" / "run", 30)  # no place of a node's
    write_parameters(tmp_path / "run" / "epoch-0", 40, {"w": torch.ones(1)}, [], Meta())
    (tmp_path / "run" / "epoch-0" / "step-000050").mkdir()
    assert steps(disk) == [(1, 20, "stage1"), (0, 10, "")]
    offer = disk.look()[0].offer
    assert (offer.tier, offer.run_id, offer.status, offer.nbytes) == ("disk", "run", "unverified", 20)
    assert offer.id.startswith("d") and len(offer.id) == 32
    assert disk.look() == disk.look()
    shutil.rmtree(tmp_path / "stage1")
    assert steps(disk) == [(0, 10, "")]


def test_a_manifest_is_read_once(tmp_path: Path, disk: DiskShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "run", 10)
    before = disk.look()
    monkeypatch.setattr(holdings, "read_step_manifest", None)
    assert disk.look() == before


def test_a_step_that_was_replaced_is_another_version(tmp_path: Path, disk: DiskShelf) -> None:
    write(tmp_path / "run", 10)
    id = id_of(disk, 10)
    held = disk.hold(id)
    write(tmp_path / "run", 10, status="unverified")
    assert disk.look()[0].offer.id != id and disk.look()[0].offer.status == "unverified"
    assert held.is_gone() and not disk.hold(id_of(disk, 10)).is_gone()
    with pytest.raises(Gone):
        disk.hold(id)


def test_a_manifest_that_cannot_be_used(tmp_path: Path, disk: DiskShelf) -> None:
    manifest = write(tmp_path / "run", 10) / "manifest.json"
    text = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(text | {"status": "follows 9"}))
    assert disk.look() == []
    path = write(tmp_path / "run", 11) / "manifest.json"
    path.write_text(json.dumps(seal({**json.loads(path.read_text()), "status": 1})))
    assert disk.look() == []


def test_the_files_of_a_step(tmp_path: Path, disk: DiskShelf) -> None:
    path = write(tmp_path / "run", 10)
    held = disk.hold(id_of(disk, 10))
    assert held.manifest() == (path / "manifest.json").read_bytes()
    for file in (MODEL, OPTIMIZER):
        assert whole(held, file) == (path / file).read_bytes()
    held.check()
    held.close()
    held.close()
    for call in (held.manifest, lambda: held.size(MODEL), lambda: held.read(MODEL, 0, 1)):
        with pytest.raises(Gone, match="let go"):
            call()


def test_a_step_without_a_file(tmp_path: Path, disk: DiskShelf) -> None:
    path = write(tmp_path / "run", 10)
    id = id_of(disk, 10)
    (path / OPTIMIZER).unlink()
    with pytest.raises(Gone, match="No such file"):
        disk.hold(id)


def test_any_number_of_steps_may_be_read(tmp_path: Path, disk: DiskShelf, clock: Clock) -> None:
    for step in range(6):
        write(tmp_path / "run", step)
    held = [disk.hold(id_of(disk, step)) for step in range(6)]
    clock.now += HOLD_SECONDS + 1
    disk.expire()
    for one in held:
        with pytest.raises(Gone):
            one.read(MODEL, 0, 1)


def test_what_ranks_gave_lies_in_the_step_on_disk(tmp_path: Path) -> None:
    out = tmp_path / "run" / "epoch-0"
    path = write_step(out, 7, {"w": torch.zeros(2)}, {}, Meta(run_id="run"), lambda: {0: b"of 0", 4: b"of 4"})
    write_step(out, 8, {"w": torch.zeros(2)}, {}, Meta(run_id="run"), dict)
    with contextlib.closing(DiskShelf(tmp_path)) as shelf:
        assert [(one.offer.step, one.offer.user) for one in shelf.look()] == [(8, ()), (7, ((0, 0), (4, 4)))]
        held = shelf.hold(id_of(shelf, 7))
        assert held.user(4) == b"of 4"
        with pytest.raises(Gone, match="has no such state of a rank"):
            held.user(1)
        shutil.rmtree(path)
        with pytest.raises(Gone):
            held.user(4)


def test_how_old_a_version_is(make: Callable[..., Replica], memory: MemoryShelf, monkeypatch: Any) -> None:
    """Also when nobody writes to its file any more."""
    monkeypatch.setattr("updater.slots.time.time_ns", lambda: 5_000_000_000)
    monkeypatch.setattr("flowcheck.node.versions.holdings.time.time", lambda: 8.25)
    replica = make(steps=1)
    assert [(one.offer.step, one.offer.age_steps, one.offer.age_seconds) for one in memory.look()] == [
        (1, None, 3.25), (0, None, 3.25)
    ]
    replica.heard(4)
    replica.heard(3)
    replica.heard(1 << 60)
    replica.close()
    monkeypatch.setattr("flowcheck.node.versions.holdings.time.time", lambda: 4.0)
    assert [(one.offer.step, one.offer.age_steps, one.offer.age_seconds) for one in memory.look()] == [
        (1, 3, 0.0), (0, 4, 0.0)
    ], "a clock that was set back makes nothing younger than new"


def test_a_file_that_does_not_say_when(make: Callable[..., Replica], memory: MemoryShelf) -> None:
    """One of a version before this one."""
    replica = make(steps=1)
    for slot in replica.slots:
        replica._store.set_time(slot.index, 0)
    assert [one.offer.age_seconds for one in memory.look()] == [None, None]


def test_a_version_that_the_trainers_have_not_gone_beyond_is_no_step_old(
    make: Callable[..., Replica], memory: MemoryShelf
) -> None:
    """Nor is one of which they have not said that they made it."""
    make(steps=2).heard(1)
    assert [(one.offer.step, one.offer.age_steps) for one in memory.look()] == [(2, 0), (1, 0), (0, 1)]


def test_what_was_compared_and_of_which_start_it_is_is_said_of_each_version(
    make: Callable[..., Replica], memory: MemoryShelf
) -> None:
    """Whoever catches up takes a version of its own start alone; shadow mode counts what has matched."""
    replica = make(steps=0, start="5" * 64)
    for matches in (2, 3):
        slot = replica.build(replica.current.step + 1, WHOLE)
        slot.apply(0, torch.ones(3))
        replica.publish(slot, "verified", (), matches)
    offers = [one.offer for one in memory.look()]
    assert [(offer.step, offer.matches, offer.start) for offer in offers] == [
        (2, 3, "5" * 64), (1, 2, "5" * 64), (0, 0, "5" * 64)]
    for offer in offers:
        version = Version.of(json.loads(memory.hold(offer.id).manifest()), "x")
        assert (version.step, version.matches) == (offer.step, offer.matches)
        memory.release(memory._held[offer.id])  # there are not as many slots to hold


def test_a_version_that_goes_between_two_looks_has_matched_nothing(
    make: Callable[..., Replica], memory: MemoryShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(steps=1)
    for what in ("matches", "times"):
        monkeypatch.setattr(Reader, what, property(lambda reader: {}))
    assert [(one.offer.step, one.offer.matches, one.offer.age_seconds) for one in memory.look()] == [
        (1, 0, None), (0, 0, None)]


def test_the_name_of_a_version_is_made_of_its_place_and_its_step(
    make: Callable[..., Replica], memory: MemoryShelf, tmp_path: Path, disk: DiskShelf
) -> None:
    """A directory that was removed gives its number to another one, which may be of the same step."""
    make(steps=1)
    write(tmp_path / "run", 1)
    write(tmp_path / "another", 1)
    names = set()
    for tier, shelf in ((MEMORY, memory), (DISK, disk)):
        for one in shelf.look():
            assert one.inode == inode_of(one.path) != 0
            assert one.offer.id == holdings.id_of(tier, one.path, one.inode, one.offer.step)
            names.add(one.offer.id)
    assert len(names) == 4
    place = Path("a"), 5, 6
    others = {holdings.id_of(DISK, *odd) for odd in (place, (Path("b"), 5, 6), (Path("a"), 4, 6), (Path("a"), 5, 7))}
    assert len(others) == 4 and holdings.id_of(MEMORY, *place)[1:] == holdings.id_of(DISK, *place)[1:]


def test_what_is_on_disk_is_read_in_pieces_as_it_lies(tmp_path: Path, disk: DiskShelf) -> None:
    data = (write(tmp_path / "run", 10) / MODEL).read_bytes()
    held = disk.hold(id_of(disk, 10))
    for first, count in ((0, 5), (3, 7), (len(data) - 2, 9), (len(data), 1)):
        assert [bytes(view) for view in held.views(MODEL, first, count)] == [data[first : first + count]]
    assert held.progress == (0, held.offer.nbytes) and held.begin().result(0) == held.manifest()
