"""Reading a replica beside its writer: which version is given, what is waited for, a writer that dies at each store."""
import contextlib
import gc
import os
import time

import pytest
import torch

from flowcheck.job.model import BucketSlice
from updater.errors import ReplicaError
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.reader import UNSAID, Reader, not_mine
from updater.replica import Replica
from updater.rounding_modes import RoundingMode
from updater.store import Store

WHOLE = Layout([[BucketSlice("w", 0, 3)]], {"w": (3,)}, [3])


@pytest.fixture
def made(shm):
    spec = OptimizerSpec.check("adam", [(["w"], {"lr": 1.0, "betas": (0.5, 0.5), "eps": 1.0})])
    replica = Replica({"w": torch.zeros(3), "k": torch.tensor([4, 5])}, spec, path=shm / "r", run_id="run", epoch=3,
                      rounding=RoundingMode("torch-cuda-foreach", "2.13.0"))
    yield replica
    replica.close()


def advance(replica):
    slot = replica.build(replica.current.step + 1, WHOLE)
    slot.apply(0, torch.full((3,), 4.0))
    replica.publish(slot)


def refusal(call, *given, **named):
    with pytest.raises(ReplicaError) as caught:
        call(*given, **named)
    return str(caught.value)


def open_descriptors():
    gc.collect()  # a mapping that a caught error holds has one
    return len(os.listdir("/proc/self/fd"))


# -- which version -----------------------------------------------------------------------------------------


def test_what_a_version_holds(made, shm):
    """Adam's first step with these options: both moments are half of it, the root of v is 4, and -1 * 4/(4+1)."""
    advance(made)
    reader = Reader(shm / "r")
    assert reader.run_id == "run" and reader.steps == [0, 1]
    with reader.pinned() as version:
        assert version.step == 1 and list(version.parameters) == ["w", "k"]
        assert version.parameters["k"].tolist() == [4, 5] and version.masters == {}
        assert version.parameters["w"].tolist() == pytest.approx([-0.8] * 3)
        state = version.optimizer_state["w"]
        assert {key: value.tolist() for key, value in state.items()} == {
            "step": 1, "exp_avg": [2] * 3, "exp_avg_sq": [8] * 3
        }
    with reader.pinned(0) as version:
        assert (version.step, version.optimizer_state) == (0, {}) and version.parameters["w"].tolist() == [0] * 3


def test_counts_of_steps_are_those_of_their_tensors(shm):
    """Whatever the order of names is: the file's description has them sorted."""
    groups = [([name], {"lr": 1.0}) for name in "cab"]
    state = {name: {"step": torch.tensor(float(steps)), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
             for name, steps in {"c": 7, "a": 5}.items()}
    replica = Replica({name: torch.zeros(3) for name in "bca"}, OptimizerSpec.check("adam", groups),
                      path=shm / "counts", run_id="run", optimizer_state=state,
                      rounding=RoundingMode("torch-cuda-foreach", "2.13.0"))
    with contextlib.closing(replica), Reader(shm / "counts").pinned() as version:
        for held in (replica.current, version):
            assert {name: one["step"].item() for name, one in held.optimizer_state.items()} == {"c": 7, "a": 5}


def test_the_newest_version_or_the_one_asked_for(made, shm):
    reader = Reader(shm / "r")
    for _ in range(4):
        advance(made)
    assert reader.steps == [2, 3, 4]
    for asked, found in ((None, 4), (2, 2), (3, 3), (4, 4)):
        with reader.pinned(asked) as version:
            assert version.step == found
    for asked in (0, 1, 5):
        assert refusal(reader.pinned(asked).__enter__) == f"{shm}/r: no complete version {asked}; there is 2, 3, 4"


def test_version_zero_can_be_asked_for(made, shm):
    with Reader(shm / "r").pinned(0) as version:
        assert version.step == 0


def test_pins_end_with_their_blocks(made, shm):
    reader, opened = Reader(shm / "r"), open_descriptors()
    with pytest.raises(KeyError), reader.pinned():
        raise KeyError("x")
    with reader.pinned(), reader.pinned():
        assert open_descriptors() == opened + 2
    assert open_descriptors() == opened
    for _ in range(4):
        advance(made)


def test_a_reader_that_is_closed_keeps_its_pins_until_their_blocks_end(made, shm):
    reader = Reader(shm / "r")
    with reader.pinned() as version:
        reader.close()
        reader.close()
        assert version.parameters["k"].tolist() == [4, 5]
        advance(made)
        advance(made)
        assert 0 in made.steps
    advance(made)
    assert 0 not in made.steps


def test_a_file_that_lost_its_name_is_not_there(made, shm):
    with contextlib.closing(Reader(shm / "r")) as reader:
        assert reader.is_there()
        (shm / "r").rename(shm / "s")
        (shm / "r").write_bytes((shm / "s").read_bytes())
        assert not reader.is_there()
        (shm / "s").rename(shm / "r")
        assert reader.is_there()
        (shm / "r").unlink()
        assert not reader.is_there()


@pytest.mark.parametrize(
    ("asked", "why"),
    [({"run_id": "other"}, "run_id 'run', not 'other'"), ({"run_id": ""}, "run_id 'run', not ''"),
     ({"epoch": 4}, "epoch 3, not 4"), ({"epoch": 0}, "epoch 3, not 0"),
     ({"run_id": "other", "epoch": 4}, "run_id 'run', not 'other'")],
)
def test_another_jobs_replica_is_let_go_of(made, shm, asked, why):
    opened = open_descriptors()
    with pytest.raises(ReplicaError) as caught:
        Reader(shm / "r", **asked)
    assert str(caught.value) == f"{shm}/r: belongs to {why}"
    assert open_descriptors() <= opened + 1, "the mapping's descriptor may live as long as the error"
    Reader(shm / "r", run_id="run", epoch=3).close()


# -- between looking and locking ---------------------------------------------------------------------------


def test_the_slot_is_taken_between_looking_and_locking(made, shm, monkeypatch):
    """The writer builds over what the reader saw: the reader looks again and takes the version that is there now."""
    advance(made)
    advance(made)
    reader, real, seen = Reader(shm / "r"), Store.pin, []

    def pin(store, slot):
        seen.append(slot)
        if len(seen) == 1:
            advance(made)  # over slot 0
            advance(made)  # over slot 1
            advance(made)  # over slot 2, which the reader is about to pin
        return real(store, slot)

    monkeypatch.setattr(Store, "pin", pin)
    opened = open_descriptors()
    with reader.pinned() as version:
        assert version.step == 5 and len(seen) == 2 and open_descriptors() == opened + 1
    assert open_descriptors() == opened


def test_whoever_sees_a_version_can_pin_it(made, shm, monkeypatch):
    """The writer may be stopped after any of its words, for longer than a reader looks."""
    reader, real, pinned = Reader(shm / "r"), Store.set_slot_header, []

    def set_slot_header(store, slot, state, step):
        real(store, slot, state, step)
        with reader.pinned() as version:
            pinned.append(version.step)

    monkeypatch.setattr(Store, "set_slot_header", set_slot_header)
    for _ in range(4):
        advance(made)
    assert pinned == sorted(pinned) and set(pinned) == {0, 1, 2, 3, 4}


def test_a_version_that_was_asked_for_and_went_meanwhile_is_refused(made, shm, monkeypatch):
    reader, real, seen = Reader(shm / "r"), Store.pin, []

    def pin(store, slot):
        if not seen:
            seen.append(slot)
            for _ in range(3):
                advance(made)
        return real(store, slot)

    monkeypatch.setattr(Store, "pin", pin)
    opened = open_descriptors()
    assert refusal(reader.pinned(0).__enter__) == f"{shm}/r: no complete version 0; there is 1, 2, 3"
    assert open_descriptors() == opened


def test_a_slot_in_which_the_writer_builds_is_not_waited_for_for_ever(made, shm, monkeypatch):
    reader, tried = Reader(shm / "r"), []
    monkeypatch.setattr(Store, "pin", lambda store, slot: tried.append(slot))
    assert refusal(reader.pinned().__enter__) == f"{shm}/r: no complete version could be pinned"
    assert len(tried) == 1000


def test_a_replica_without_any_version(made, shm):
    made._store.set_slot_header(0, 1, 0)
    reader = Reader(shm / "r")
    assert reader.steps == []
    assert refusal(reader.pinned(0).__enter__) == f"{shm}/r: no complete version 0; there is none"
    assert refusal(reader.pinned().__enter__) == f"{shm}/r: no complete version could be pinned"


# -- a writer that dies at each store ----------------------------------------------------------------------


class Died(BaseException):
    pass


def until(monkeypatch, count, work):
    """Let work() end before it makes its store number `count` of a slot's word. Returns whether it came so far."""
    real, seen = Store.set_slot_header, []

    def set_slot_header(store, slot, state, step):
        seen.append((slot, state, step))
        if len(seen) == count:
            raise Died
        real(store, slot, state, step)

    monkeypatch.setattr(Store, "set_slot_header", set_slot_header)
    try:
        work()
    except Died:
        return True
    finally:
        monkeypatch.setattr(Store, "set_slot_header", real)
    return False


def test_a_writer_that_dies_before_any_store_leaves_whole_versions(made, shm, monkeypatch):
    """Building over the oldest version: free, building, complete. The file is what the kill left, as it is."""
    for _ in range(3):
        advance(made)
    file, left = shm / "r", []
    before = file.read_bytes()
    assert Reader(file).steps == [1, 2, 3]
    for count in (1, 2, 3, 4):
        copy = shm / f"copy{count}"
        copy.write_bytes(before)
        writer = Replica.attach(copy)
        died = until(monkeypatch, count, lambda writer=writer: advance(writer))
        writer.close()
        left.append((died, Reader(copy).steps))
        with Reader(copy).pinned() as version:
            assert version.step == (3 if died else 4)
            assert version.optimizer_state["w"]["step"] == version.step
        again = Replica.attach(copy)
        while again.current.step < 6:
            advance(again)
        again.close()
        with Reader(copy).pinned() as version:
            assert version.parameters["w"].tolist() == pytest.approx([-0.8 * 6] * 3)
    assert left == [(True, [1, 2, 3]), (True, [2, 3]), (True, [2, 3]), (False, [2, 3, 4])]


def test_a_rollback_that_dies_before_any_store_leaves_whole_versions(made, shm, monkeypatch):
    for _ in range(2):
        advance(made)
    before, left = (shm / "r").read_bytes(), []
    for count in (1, 2, 3):
        copy = shm / f"copy{count}"
        copy.write_bytes(before)
        writer = Replica.attach(copy)
        died = until(monkeypatch, count, lambda writer=writer: writer.rollback(0))
        writer.close()
        left.append((died, Reader(copy).steps))
        Replica.attach(copy).close()
    assert left == [(True, [0, 1, 2]), (True, [0, 1]), (False, [0])], "the newest goes first"


def test_words_half_written_are_refused_by_readers_and_writers(made, shm):
    """A processor stores eight bytes at once; a file copied while it changes may hold some of them."""
    advance(made)
    whole = (shm / "r").read_bytes()
    old, new = (0xA500).to_bytes(8, "little"), (2 | (2 ^ 0xA5 ^ 0x34 ^ 0x12) << 8 | 0x1234 << 16).to_bytes(8, "little")
    for cut in range(9):
        (shm / "copy").write_bytes(whole[:256] + new[:cut] + old[cut:] + whole[264:])
        if cut in (0, *range(4, 9)):  # as it was, or all that differs has arrived
            Reader(shm / "copy").close()
        else:
            for how in (Reader, Replica.attach):
                assert refusal(how, shm / "copy") == (
                    f"{shm}/copy: not a replica that can be used: the header of slot 2 is damaged"
                )


# -- what is left open -------------------------------------------------------------------------------------


def test_what_the_writer_leaves_open_is_read(made, shm):
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0})])
    marks = ["buffers are as at the start", "an order of roundings"]
    Replica({"w": torch.zeros(3)}, spec, path=shm / "open", unproven=marks, slots=4).close()
    with contextlib.closing(Reader(shm / "open")) as reader:
        assert reader.unproven == tuple(marks) and reader.slots == 4
    with contextlib.closing(Reader(shm / "r")) as reader:
        assert reader.unproven == () and reader.slots == 3


def test_a_replica_that_does_not_say_what_it_leaves_open(made, shm, monkeypatch):
    """Of a version before that: nothing may be taken for proven."""
    with contextlib.closing(Reader(shm / "r")) as reader:
        monkeypatch.delitem(reader._store.layout, "unproven")
        assert reader.unproven == (UNSAID,)


# -- whose file it is --------------------------------------------------------------------------------------


def test_whose_a_file_is_matters_to_who_asks_for_that(made, shm):
    """Whoever was told which one to read may read another user's, and through a link."""
    (shm / "link").symlink_to(shm / "r")
    (shm / "r").chmod(0o622)
    for name in ("r", "link"):
        with contextlib.closing(Reader(shm / name)) as reader:
            assert reader.steps == [0] and reader.is_there()
    assert refusal(Reader, shm / "r", mine=True) == f"{shm}/r: may be written to by others (mode 622)"
    assert refusal(Reader, shm / "link", mine=True).startswith(f"{shm}/link: cannot be opened: ")
    (shm / "r").chmod(0o644)
    Reader(shm / "r", mine=True).close()


@pytest.mark.parametrize(("user", "mode", "why"), [
    (0, 0o100600, ""), (0, 0o100644, ""), (0, 0o100620, "may be written to by others (mode 620)"),
    (0, 0o101602, "may be written to by others (mode 602)"), (1, 0o100600, ""),
    (1, 0o100666, ""),
])
def test_what_is_another_users_or_may_be(user, mode, why):
    """user: how many after the one that runs this."""
    mine = os.geteuid()
    found = not_mine(os.stat_result((mode, 0, 0, 1, mine + user, 0, 0, 0, 0, 0)))
    assert found == (f"belongs to user {mine + 1}, and this process runs as {mine}" if user else why)


def test_who_may_write_is_for_the_caller_to_say():
    """A directory of a group, say."""
    found = os.stat_result((0o40770, 0, 0, 1, os.geteuid(), 0, 0, 0, 0, 0))
    assert not_mine(found, 0o002) == "" and not_mine(found, 0o020) and not_mine(found)


def test_what_a_reader_says_of_the_file(made, shm):
    """Adam of three fp32 elements: parameter and two moments, the count of steps, the options; and two integers."""
    with contextlib.closing(Reader(shm / "r")) as reader:
        assert (reader.slots, reader.epoch, reader.rounding) == (3, 3, "torch-cuda-foreach")
        assert (reader.start, reader.verified, reader.heard) == ("", None, None)
        constants, arrays = 2 * 8, 3 * 3 * 4
        assert constants + arrays < reader.nbytes < constants + arrays + 200 < made.nbytes
        made.heard(9)
        advance(made)
        made.mark_verified()
        assert (reader.heard, reader.verified, sorted(reader.times)) == (9, 1, [0, 1])
        assert all(abs(at - time.time()) < 3600 for at in reader.times.values())
