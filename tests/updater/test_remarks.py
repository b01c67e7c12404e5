"""What is said of one version besides its tensors, and where it lies in the file."""

import contextlib
import time

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
@pytest.mark.parametrize("matches", [0, 1, 10**12])
def test_what_is_said_is_read(status, unproven, matches):
    text = remarks(status, unproven, matches)
    assert read(text) == (status, unproven, matches or None) and len(text) <= MOST_REMARKS


def test_nothing_is_said():
    assert remarks("", ()) == b"" and read(b"") == ("", (), None)


def test_what_earlier_releases_said_is_read():
    assert remarks("verified", ["x"]) == b'["verified", ["x"]]' == remarks("verified", ["x"], 0)
    assert read(b'["verified", ["x"]]') == ("verified", ("x",), None)


@pytest.mark.parametrize(("marks", "kept"), [(["a" * 300] * 3, 2), (["a" * 800], 0), (["a" * 300, "b" * 800, "c"], 1)])
def test_what_has_no_room_is_counted(marks, kept):
    status, unproven, matches = read(remarks("unverified", marks, 7))
    assert matches == 7 and status == "unverified" and unproven[:kept] == tuple(marks[:kept])
    assert unproven[kept:] == (f"and {len(marks) - kept} more that have no room here",)


def test_a_status_without_end_is_a_fault_of_ours():
    with pytest.raises(ValueError, match="a status of 1000 characters"):
        remarks("x" * 1000, ())


@pytest.mark.parametrize("text", [b"{", b"\xff", b"3", b"[1, []]", b'["verified", "x"]', b'["verified", [1]]', b"[]",
                                  b'["verified", [], -3]', b'["verified", [], 0]', b'["verified", [], true]',
                                  b'["verified", [], 1.5]', b'["verified", [], "3"]', b'["verified", [], 3, 4]',
                                  b"[" * 700])
def test_what_cannot_be_read_proves_nothing(text):
    assert read(text) == ("unverified", (DAMAGED,), 0)


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
        assert reader.statuses == {0: "unverified", 1: "verified", 2: "unverified", 3: "verified"}
        with reader.pinned(3) as version:
            assert version.status == "verified"


def test_each_version_says_when_it_was_published(made, shm, monkeypatch):
    for at in (5, 7, 11):
        monkeypatch.setattr(time, "time_ns", lambda at=at: at * 10**9)
        advance(made)
    with contextlib.closing(Reader(shm / "r")) as reader:
        times = reader.times
        assert list(times) == [0, 1, 2, 3] and [times[step] for step in (1, 2, 3)] == [5.0, 7.0, 11.0]
        monkeypatch.setattr(time, "time_ns", lambda: 13 * 10**9)
        advance(made)
        assert reader.times == {1: 5.0, 2: 7.0, 3: 11.0, 4: 13.0}


def test_how_far_the_trainers_are_is_said_and_does_not_go_back(made, shm):
    with contextlib.closing(Reader(shm / "r")) as reader:
        assert reader.heard is None
        for step, heard in ((4, 4), (3, 4), (9, 9), (1 << 60, 9)):
            made.heard(step)
            assert reader.heard == heard


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


def test_how_many_checksums_had_matched_goes_with_each_version(made, shm):
    """Where nothing was said of them, one that is verified has matched once at least."""
    advance(made, "unverified", (), 0)
    advance(made, "verified", (), 1)
    advance(made, "verified", ["a mark"], 4)
    assert made.said == ("verified", ("a mark",), 4)
    with contextlib.closing(Reader(shm / "r")) as reader:
        assert reader.matches == {0: 0, 1: 0, 2: 1, 3: 4}
        with reader.pinned(3) as version:
            assert (version.status, version.matches) == ("verified", 4)
        advance(made)
        assert reader.matches[4] == 0 and reader.statuses[4] == "unverified"
        made.mark_verified()
        assert reader.matches[4] == 1 and reader.statuses[4] == "verified"
