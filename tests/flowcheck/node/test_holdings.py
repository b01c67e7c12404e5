"""What a node has to recover from, as another process sees it: versions that come, are pinned, hashed, let go or
removed."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from flowcheck.control.version import MODEL, OPTIMIZER, Version
from flowcheck.node.versions import hashing
from flowcheck.node.versions.held import HOLD_SECONDS, RATE, Gone
from flowcheck.node.versions.holdings import MemoryShelf, Pressed
from flowcheck.node.versions.user_states import rank_file, user_folder
from updater.errors import NoFreeSlot
from updater.replica import Replica

from ..hand_node import until
from .holdings_scene import WHOLE, Clock, advance, id_of, steps, whole

# -- memory ------------------------------------------------------------------------------------------------


def test_what_is_in_memory(make: Callable[..., Replica], memory: MemoryShelf, shm: Path) -> None:
    assert memory.look() == []
    replica = make()
    make("flowcheck-n--1.replica", 0, epoch=4)  # a group without a name
    make("flowcheck-other-dp0-1.replica")
    make("flowcheck-n-dp0-x.replica")
    (shm / "flowcheck-n-dp0-2.replica").write_bytes(b"torn" * 4096)
    assert steps(memory) == [(4, 0, ""), (3, 2, "dp0"), (3, 1, "dp0"), (3, 0, "dp0")]
    offer = memory.look()[1].offer
    assert (offer.tier, offer.run_id, offer.status) == ("memory", "run", "unverified")
    assert offer.id.startswith("m") and len(offer.id) == 32 and offer.nbytes >= 3 * 4 * 2 + 16
    advance(replica)
    replica.mark_verified()
    assert memory.look()[1].offer.step == 3 and memory.look()[1].offer.status == "verified"
    assert len({one.offer.id for one in memory.look()}) == 5


def test_what_a_version_was_found_to_be_goes_with_it(make: Callable[..., Replica], memory: MemoryShelf) -> None:
    """Bytes of peers make a version unverified in a replica that was verified: its description says so."""
    replica = make()
    replica.mark_verified()
    slot = replica.build(3, WHOLE)
    slot.apply(0, torch.ones(3))
    replica.publish(slot, "unverified", ["a peer gave bytes"])
    assert [(one.offer.step, one.offer.status) for one in memory.look()][:2] == [(3, "unverified"), (2, "verified")]
    version = Version.of(json.loads(memory.hold(id_of(memory, 3)).manifest()), "x")
    assert (version.status, version.unproven) == ("unverified", ("a mark", "a peer gave bytes"))


def test_a_node_name_is_no_pattern(make: Callable[..., Replica], shm: Path) -> None:
    make("flowcheck-nan-dp0-1.replica")
    with contextlib.closing(MemoryShelf(shm, "n.n")) as shelf:
        assert shelf.look() == []


def test_a_version_in_memory_has_its_file_form(make: Callable[..., Replica], memory: MemoryShelf) -> None:
    replica = make()
    held = memory.hold(id_of(memory, 2))
    version = Version.of(json.loads(held.manifest()), "x")
    assert (version.run_id, version.epoch, version.step, version.shard) == ("run", 3, 2, "dp0")
    assert version.status == "unverified" and version.unproven == ("a mark",)
    assert version.optimizer == replica.current.optimizer and version.rounding == replica.rounding.name
    model, state = load(whole(held, MODEL)), load(whole(held, OPTIMIZER))
    assert set(model) == {"w", "k"} and torch.equal(model["w"], replica.current.parameters["w"])
    assert model["k"].tolist() == [4, 5]
    assert torch.equal(state["state.w.momentum_buffer"], replica.current.optimizer_state["w"]["momentum_buffer"])
    for file, tensors in ((MODEL, model), (OPTIMIZER, state)):
        assert {name: one.sha256 for name, one in version.files[file].items()} == {
            name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()
        }


@pytest.mark.parametrize("piece", [1, 5, 8, 64, 1000])
def test_a_file_in_ranges(make: Callable[..., Replica], memory: MemoryShelf, piece: int) -> None:
    make()
    held = memory.hold(id_of(memory, 2))
    data = whole(held, MODEL, 1 << 20)
    assert whole(held, MODEL, piece) == data and len(data) == held.size(MODEL)
    assert held.read(MODEL, len(data) - 3, piece) == data[-3:][:piece] and held.read(MODEL, len(data), piece) == b""


def test_what_is_held_stays_while_the_node_goes_on(make: Callable[..., Replica], memory: MemoryShelf) -> None:
    replica = make()
    id = id_of(memory, 2)
    held = memory.hold(id)
    data = whole(held, MODEL)
    advance(replica, 9)
    assert memory.hold(id) is held and whole(held, MODEL) == data
    assert [step for _, step, _ in steps(memory)] == [11, 10, 9, 2]


def test_a_file_that_others_may_write_to_is_not_offered(
    make: Callable[..., Replica], memory: MemoryShelf, shm: Path
) -> None:
    """Everybody may make a file in /dev/shm, and call it as a node's."""
    make()
    (path,) = shm.glob("*.replica")
    path.chmod(0o606)
    assert memory.look() == []
    path.chmod(0o644)
    assert [step for _, step, _ in steps(memory)] != []


def test_hashes_are_kept(make: Callable[..., Replica], memory: MemoryShelf, clock: Clock) -> None:
    """So a bit that flips in memory after they were asked for shows when the version is read."""
    make()
    id = id_of(memory, 2)
    text = memory.hold(id).manifest()
    kept = dict(memory._kept)
    assert list(kept.values()) == [text]
    clock.now += 1000
    memory.expire()
    kept_again = memory.hold(id)
    memory._kept[id] = b"kept"
    assert kept_again.manifest() == b"kept"


def test_old_hashes_go(make: Callable[..., Replica], memory: MemoryShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowcheck.node.versions.held.KEPT", 1)
    make()
    first, second = id_of(memory, 1), id_of(memory, 2)
    memory.hold(first).manifest()
    memory.hold(second).manifest()
    assert list(memory._kept) == [second]


def test_hashes_go_with_their_version(make: Callable[..., Replica], memory: MemoryShelf, clock: Clock) -> None:
    """Each start of a job asks for one: a node's memory does not grow with them. One that is held stays."""
    replica = make()
    first, second = id_of(memory, 1), id_of(memory, 2)
    memory.hold(first).manifest()
    clock.now += 1000
    memory.expire()
    memory.hold(second).manifest()
    assert set(memory._kept) == {first, second}
    advance(replica, 9)
    memory.look()
    assert list(memory._kept) == [second]
    clock.now += 1000
    memory.expire()
    advance(replica, 3)
    memory.look()
    assert memory._kept == {}


@pytest.mark.parametrize(("slots", "most"), [(2, 1), (3, 1), (4, 2)])
def test_pins_leave_slots_to_update(
    make: Callable[..., Replica], memory: MemoryShelf, slots: int, most: int
) -> None:
    replica = make(slots=slots, steps=slots - 1)
    there = [step for _, step, _ in steps(memory)]
    assert len(there) == slots
    for step in there[:most]:
        memory.hold(id_of(memory, step))
    with pytest.raises(Pressed) as caught:
        memory.hold(id_of(memory, there[most]))
    assert caught.value.where == "flowcheck-n-dp0-1.replica" and str(there[0]) in caught.value.what
    memory.hold(id_of(memory, there[0]))  # which is held
    if slots > 2:
        advance(replica, 5)


def test_what_was_held_for_one_question_is_let_go_unless_somebody_reads_it(
    make: Callable[..., Replica], memory: MemoryShelf
) -> None:
    make(slots=3)
    newest = id_of(memory, 2)
    for _ in range(2):  # again and again: it is pinned for no longer than that
        held = memory.hold(newest)
        assert held.manifest()
        memory.release(held)
        with pytest.raises(Gone):
            held.read("model.safetensors", 0, 1)
    reader = memory.hold(newest)
    memory.release(memory.hold(newest))
    assert whole(reader, "model.safetensors")  # somebody else is at it
    reader.busy += 1
    memory.release(reader)
    assert whole(reader, "model.safetensors")  # it is being hashed for somebody


def test_the_last_of_several_that_asked_lets_it_go(make: Callable[..., Replica], memory: MemoryShelf) -> None:
    make(slots=3)
    first = memory.hold(id_of(memory, 2))
    others = [memory.hold(first.offer.id) for _ in range(2)]
    for one in others:
        memory.release(one)
        assert whole(first, "model.safetensors")
    memory.release(first)
    with pytest.raises(Gone):
        first.read("model.safetensors", 0, 1)


def test_a_slot_that_another_process_may_pin_is_left_to_it(
    make: Callable[..., Replica], shm: Path, clock: Clock
) -> None:
    make(slots=4, steps=3)
    with contextlib.closing(MemoryShelf(shm, "n", clock, reserved=1)) as shelf:
        there = [step for _, step, _ in steps(shelf)]
        shelf.hold(id_of(shelf, there[0]))
        with pytest.raises(Pressed):
            shelf.hold(id_of(shelf, there[1]))


def test_another_replica_has_pins_of_its_own(make: Callable[..., Replica], memory: MemoryShelf) -> None:
    make(slots=3)
    make("flowcheck-n-dp1-1.replica", 5, slots=3)
    for step in (2, 5):
        memory.hold(id_of(memory, step))


def test_what_nobody_reads_is_let_go(make: Callable[..., Replica], memory: MemoryShelf, clock: Clock) -> None:
    replica = make(slots=2, steps=1)
    id = id_of(memory, 0)
    held = memory.hold(id)
    with pytest.raises(NoFreeSlot):
        advance(replica)
    clock.now += HOLD_SECONDS
    memory.expire()
    with pytest.raises(NoFreeSlot):
        advance(replica)
    clock.now += 0.1
    memory.expire()
    advance(replica)
    with pytest.raises(Gone):
        held.read(MODEL, 0, 1)
    with pytest.raises(Gone, match="no such version"):
        memory.hold(id)
    held.close()


def test_who_reads_on_keeps_it_until_it_takes_too_long(
    make: Callable[..., Replica], memory: MemoryShelf, clock: Clock
) -> None:
    make()
    id = id_of(memory, 2)
    held = memory.hold(id)
    for _ in range(2):
        clock.now += HOLD_SECONDS / 2
        assert memory.hold(id) is held
    clock.now += 1.0  # a version of some bytes is to be read in HOLD_SECONDS
    assert memory.hold(id) is not held and held.is_due(clock.now)


def test_a_large_version_may_take_longer(make: Callable[..., Replica], memory: MemoryShelf, clock: Clock) -> None:
    make()
    held = memory.hold(id_of(memory, 2))
    clock.now += HOLD_SECONDS + held.offer.nbytes / RATE
    held.touch(clock.now)
    assert not held.is_due(clock.now) and held.is_due(clock.now + 0.001)


def test_hashing_may_take_its_time(make: Callable[..., Replica], memory: MemoryShelf, clock: Clock) -> None:
    make()
    held = memory.hold(id_of(memory, 2))
    held.offer.__dict__["nbytes"] = int(1000 * RATE)
    clock.now += HOLD_SECONDS + 1
    held.busy = 1
    assert not held.is_due(clock.now)
    held.busy = 0
    assert held.is_due(clock.now)


class Slowly:
    """hashlib, of which every `update` waits until it may go on."""

    def __init__(self) -> None:
        self.began, self.goes_on = threading.Event(), threading.Event()

    def sha256(self) -> Any:
        return self

    def update(self, piece: memoryview) -> None:
        self.began.set()
        assert self.goes_on.wait(60)

    def hexdigest(self) -> str:
        return "0" * 64


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slowly]:
    made = Slowly()
    monkeypatch.setattr(hashing, "hashlib", made)
    yield made
    made.goes_on.set()


def test_a_version_that_is_let_go_while_it_is_hashed(
    make: Callable[..., Replica], memory: MemoryShelf, slowly: Slowly
) -> None:
    """Whoever waits hears it at once, and not when that is over which is under way."""
    make()
    held = memory.hold(id_of(memory, 2))
    coming = held.begin()
    assert slowly.began.wait(60) and held.busy and not coming.done() and held.begin() is coming
    held.close()
    for again in (coming, held.begin()):
        with pytest.raises(Gone, match="let go"):
            again.result(0)
    assert memory._kept == {} and not held.busy
    slowly.goes_on.set()
    with pytest.raises(Gone, match="let go"):
        held.manifest()


def test_what_is_removed_while_it_is_hashed_is_let_go(
    make: Callable[..., Replica], memory: MemoryShelf, shm: Path, slowly: Slowly
) -> None:
    make()
    coming = memory.hold(id_of(memory, 2)).begin()
    assert slowly.began.wait(60)
    (shm / "flowcheck-n-dp0-1.replica").unlink()
    memory.expire()
    with pytest.raises(Gone, match="let go"):
        coming.result(0)


def test_hashing_ends_with_its_shelf(make: Callable[..., Replica], memory: MemoryShelf, slowly: Slowly) -> None:
    make()
    coming = memory.hold(id_of(memory, 2)).begin()
    assert slowly.began.wait(60)
    memory.close()
    with pytest.raises(Gone, match="let go"):
        coming.result(0)


def test_a_replica_that_the_node_removed_is_served_no_more(
    make: Callable[..., Replica], memory: MemoryShelf, shm: Path
) -> None:
    """It had diverged: not even the rest of it."""
    make()
    id = id_of(memory, 2)
    held = memory.hold(id)
    assert held.read(MODEL, 0, 4) and not held.is_gone()
    (shm / "flowcheck-n-dp0-1.replica").unlink()
    for call in (held.check, lambda: held.read(MODEL, 4, 4), lambda: memory.hold(id)):
        with pytest.raises(Gone):
            call()
    assert memory.look() == []


@pytest.mark.parametrize("asked", ["listed", "hashed", "read", "hashed twice", "let go while it is hashed"])
def test_memory_of_a_replica_that_was_removed_is_free_at_once(
    make: Callable[..., Replica], memory: MemoryShelf, shm: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """A job that was started again has a new replica, as large as the one before. Nobody asks in between, and the
    collector may not come for long: whatever was read, the kernel must have the pages back."""
    make()
    path = shm / "flowcheck-n-dp0-1.replica"

    def maps() -> int:
        """Read-only ones: this process has the writer, too."""
        return sum(str(path) in line and " r--s " in line for line in Path("/proc/self/maps").read_text().splitlines())

    slowly = Slowly()
    if asked.startswith("let go"):
        monkeypatch.setattr(hashing, "hashlib", slowly)
    gc.collect()
    gc.disable()
    try:
        id = id_of(memory, 2)
        assert maps() == 1
        if asked != "listed":
            held = memory.hold(id)
            coming = held.begin()
            if asked.startswith("let go"):
                assert slowly.began.wait(60)
            else:
                coming.result(60)
            if asked == "hashed twice":
                held.begin().result(60)
            if asked == "read":
                assert held.read(MODEL, 0, held.size(MODEL)) and held.user
            del held
        path.unlink()
        memory.expire()
        if asked.startswith("let go"):
            with pytest.raises(Gone):
                coming.result(0)
            slowly.goes_on.set()
        until(lambda: maps() == 0)  # a thread of the pool may be about to let go of what it has done
    finally:
        slowly.goes_on.set()
        gc.enable()


def test_a_replica_of_the_same_name_is_another_one(
    make: Callable[..., Replica], memory: MemoryShelf, shm: Path
) -> None:
    make()
    id = id_of(memory, 2)
    held = memory.hold(id)
    (shm / "flowcheck-n-dp0-1.replica").unlink()
    make(epoch=4)
    with pytest.raises(Gone):
        held.read(MODEL, 0, 1)
    assert id not in {one.offer.id for one in memory.look()} and steps(memory)[0] == (4, 2, "dp0")


def test_what_ranks_gave_is_offered_and_read(make: Callable[..., Replica], memory: MemoryShelf, shm: Path) -> None:
    make()
    folder = user_folder(shm / "flowcheck-n-dp0-1.replica", 2)
    folder.mkdir(parents=True)
    for rank in (0, 1, 3):
        rank_file(folder, rank).write_bytes(b"of %d" % rank)
    (folder / ".rank-00002.partial").write_bytes(b"half")
    (folder / "rank-99999.safetensors").write_bytes(b"nobody")
    assert [one.offer.user for one in memory.look()] == [((0, 1), (3, 3)), (), ()]
    held = memory.hold(id_of(memory, 2))
    assert held.user(3) == b"of 3"
    with pytest.raises(Gone, match="has no such state of a rank"):
        held.user(2)
    (shm / "flowcheck-n-dp0-1.replica").unlink()
    with pytest.raises(Gone, match="the node has removed it"):
        held.user(3)
