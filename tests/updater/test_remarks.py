"""What is said of one version besides its tensors, and where it lies in the file."""

import contextlib

import pytest
import torch

from flowcheck.job.model import BucketSlice
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.reader import Reader
from updater.remarks import DAMAGED, read, remarks
from updater.replica import Replica
from updater.store import MOST_REMARKS

WHOLE = Layout([[BucketSlice("w", 0, 3)]], {"w": (3,)}, [3])


@pytest.mark.parametrize(
    ("status", "unproven"),
    [("verified", ()), ("unverified", ("a mark", "\u00fcmlaut")), ("", ("a mark",)), ("verified", ("x" * 700,))],
)
def test_what_is_said_is_read(status, unproven):
    text = remarks(status, unproven)
    assert read(text) == (status, unproven) and len(text) <= MOST_REMARKS


def test_nothing_is_said():
    assert remarks("", ()) == b"" and read(b"") == ("", ())


@pytest.mark.parametrize(("marks", "kept"), [(["a" * 300] * 3, 2), (["a" * 800], 0), (["a" * 300, "b" * 800, "c"], 1)])
def test_what_has_no_room_is_counted(marks, kept):
    status, unproven = read(remarks("unverified", marks))
    assert status == "unverified" and unproven[:kept] == tuple(marks[:kept])
    assert unproven[kept:] == (f"and {len(marks) - kept} more that have no room here",)


def test_a_status_without_end_is_a_fault_of_ours():
    with pytest.raises(ValueError, match="a status of 1000 characters"):
        remarks("x" * 1000, ())


@pytest.mark.parametrize("text", [b"{", b"\xff", b"3", b"[1, []]", b'["verified", "x"]', b'["verified", [1]]', b"[]",
                                  b'["verified", [], 3]', b"[" * 700])
def test_what_cannot_be_read_proves_nothing(text):
    assert read(text) == ("unverified", (DAMAGED,))


@pytest.fixture
def made(shm):
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0})])
    with contextlib.closing(Replica({"w": torch.zeros(3)}, spec, path=shm / "r", slots=4, unproven=["always"])) as one:
        yield one


def advance(replica, *said):
    slot = replica.build(replica.current.step + 1, WHOLE)
    slot.apply(0, torch.ones(3))
    replica.publish(slot, *said)


def test_each_version_has_its_own(made, shm):
    advance(made, "verified", ())
    advance(made, "unverified", ["a peer gave bytes"])
    advance(made)
    with contextlib.closing(Reader(shm / "r")) as reader:
        assert reader.statuses == {0: "unverified", 1: "verified", 2: "unverified", 3: "unverified"}
        assert list(reader.statuses) == [0, 1, 2, 3]
        for step, marks in enumerate([(), (), ("a peer gave bytes",), ()]):
            with reader.pinned(step) as version:
                assert version.unproven == ("always", *marks) and version.status == reader.statuses[step]
        made.mark_verified()
        assert reader.statuses == {0: "verified", 1: "verified", 2: "unverified", 3: "verified"}
        with reader.pinned(3) as version:
            assert version.status == "verified"


def test_a_slot_that_is_used_again_says_nothing_of_the_version_before(made, shm):
    for _ in range(5):
        advance(made, "verified", ["x"])
    for _ in range(4):
        advance(made)
    with contextlib.closing(Reader(shm / "r")) as reader:
        assert set(reader.statuses.values()) == {"unverified"}
        with reader.pinned() as version:
            assert version.unproven == ("always",)


def test_the_slots_places_do_not_touch(made):
    store = made._store
    texts = [bytes([65 + slot]) * MOST_REMARKS for slot in range(4)]
    headers = [store.slot_header(slot) for slot in range(4)]
    for slot, text in enumerate(texts):
        store.set_remarks(slot, text)
    assert [store.remarks(slot) for slot in range(4)] == texts
    assert [store.slot_header(slot) for slot in range(4)] == headers and store.verified is None
    assert bytes(store.memory[4096:4098]) == b'{"'
    with pytest.raises(ValueError, match="at most"):
        store.set_remarks(0, b"x" * (MOST_REMARKS + 1))


def test_a_length_that_is_none(made):
    made._store.memory[1024:1026] = b"\xff\xff"
    assert len(made._store.remarks(0)) == MOST_REMARKS
