"""Ranges and patches field by field: what is one of them, what is not, and that nothing else comes of either."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.control.messages import MOST_RANKS, Bytes, Entry, Holes, Journal, Manifest, Record, State, User
from flowcheck.control.protocol import (
    MOST_RANGES,
    PEER_BYTES,
    PEER_SECONDS,
    RANGES_TEXT,
    Limits,
    Link,
    Patch,
    Ranges,
    RecordsError,
    Steps,
    Welcome,
)
from flowcheck.errors import UserError

SHARE = ["run", 0, "g", [1, 2]]
PLAN = "5f" * 32
names = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=40)
good = st.tuples(names, st.integers(0, 1 << 62), st.integers(1, (1 << 62) - 1))
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=12,
)


def came(text: bytes) -> Any:
    """What a Link makes of this text in a frame: a message, or the sentence of its RecordsError."""
    near, far = socket.socketpair()
    link = Link(near)
    link.limits = lambda: Limits(RANGES_TEXT)
    sender = threading.Thread(target=far.sendall, args=(struct.pack(">4sIQ", b"FCR1", len(text), 0) + text,))
    sender.start()
    try:
        return link.receive()[0]
    except RecordsError as error:
        return error.what
    finally:
        sender.join()
        link.close()
        far.close()


def sent(message: Any) -> Any:
    near, far = socket.socketpair()
    link, other = Link(near), Link(far)
    other.limits = lambda: Limits(RANGES_TEXT)
    sender = threading.Thread(target=link.send, args=(message,))
    sender.start()
    try:
        return other.receive()[0]
    finally:
        sender.join()
        link.close()
        other.close()


@given(request=st.integers(0, (1 << 63) - 1), ranges=st.lists(good, min_size=1, max_size=30))
def test_ranges_arrive_as_they_were_sent(request: int, ranges: list[Any]) -> None:
    assert sent(Ranges(request, ranges)) == Ranges(request, ranges)


@given(numbers=st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)), ranges=st.lists(good, max_size=30))
def test_patches_arrive_as_they_were_sent(numbers: tuple[int, int], ranges: list[Any]) -> None:
    patch = Patch(*numbers, ranges, "" if ranges else "why not")
    assert sent(patch) == patch


groups = st.from_regex("[A-Za-z0-9_.]{0,32}", fullmatch=True)
shares = st.tuples(st.text(max_size=9), st.integers(0, (1 << 62) - 1), groups,
                   st.lists(st.integers(0, (1 << 46) - 1), max_size=5))


@given(have=st.lists(shares, max_size=4))
def test_steps_arrive_as_they_were_sent(have: list[Any]) -> None:
    assert sent(Steps("5f" * 16, "a name", have)) == Steps("5f" * 16, "a name", have)


@given(have=st.lists(shares.map(list) | anything, max_size=4) | anything)
def test_whatever_comes_as_steps_is_that_or_is_refused(have: Any) -> None:
    found = came(json.dumps({"type": "steps", "node": "5f" * 16, "name": "n", "have": have}).encode())
    if isinstance(found, str):
        assert found.startswith("not a message: ")
        return
    assert [list(one) for one in found.have] == have
    for run_id, epoch, group, steps in found.have:
        assert (type(run_id), type(epoch), type(group)) == (str, int, str) and all(type(one) is int for one in steps)


@given(body=st.fixed_dictionaries({"type": st.sampled_from(["ranges", "patch"])}, optional={
    "request": st.integers(-2, 2) | anything, "iteration": st.integers(-2, 2) | anything,
    "ranges": st.lists(good.map(list) | anything, max_size=4) | anything, "refused": st.text(max_size=5) | anything,
    "more": anything,
}))
def test_whatever_comes_is_a_message_or_is_refused(body: dict[str, Any]) -> None:
    found = came(json.dumps(body).encode())
    if isinstance(found, str):
        assert found.startswith("not a message: ")
        return
    assert type(found).__name__.lower() == body["type"] and "more" not in body
    assert type(found.request) is int and found.request >= 0
    assert [list(one) for one in found.ranges] == body.get("ranges", [])
    for entry, start, length in found.ranges:
        assert type(entry) is str and type(start) is type(length) is int
        assert start >= 0 and length >= 1 and start + length < 1 << 63
    if body["type"] == "patch":
        assert type(found.iteration) is int and found.iteration >= 0 and bool(found.ranges) != bool(found.refused)


@pytest.mark.parametrize(("fields", "what"), [
    ({"request": -1}, "-1 is less than 0"),
    ({"request": True}, "expected a whole number"),
    ({"ranges": []}, "asks for nothing"),
    ({"ranges": {"a": [0, 1]}}, "expected a list"),
    ({"ranges": ["a01"]}, "'a01' is not [entry, start, length]"),
    ({"ranges": [["a", 0]]}, "a list is not [entry, start, length]"),
    ({"ranges": [["a", 0, 1, 1]]}, "a list is not [entry, start, length]"),
    ({"ranges": [[["a"], 0, 1]]}, "is not [text, whole number, whole number]"),
    ({"ranges": [["a", 0.0, 1]]}, "is not [text, whole number, whole number]"),
    ({"ranges": [["a", 0, True]]}, "is not [text, whole number, whole number]"),
    ({"ranges": [["a", -1, 2]]}, "2 elements from -1 on, of entry 'a'"),
    ({"ranges": [["a", 0, 0]]}, "0 elements from 0 on, of entry 'a'"),
    ({"ranges": [["a", 0, -1]]}, "-1 elements from 0 on, of entry 'a'"),
    ({"ranges": [["a", (1 << 63) - 1, 1]]}, f"1 elements from {(1 << 63) - 1} on, of entry 'a'"),
    ({"ranges": [["a\x1b[2J", 0, 1]]}, "1 elements from 0 on, of entry 'a\\x1b[2J'"),
    ({"ranges": [["a", 0, 1 << 63]]}, "a whole number of more than 63 bits"),
])
def test_ranges_that_are_none(fields: dict[str, Any], what: str) -> None:
    body = {"type": "ranges", "request": 0, "ranges": [["a", 0, 1]]} | fields
    found = came(json.dumps(body).encode())
    assert found.startswith(f"not a message: {what}")


@pytest.mark.parametrize(("fields", "what"), [
    ({}, "either ranges, or why they are refused"),
    ({"ranges": [["a", 0, 1]], "refused": "no"}, "either ranges, or why they are refused"),
    ({"iteration": -1, "refused": "no"}, "-1 is less than 0"),
    ({"request": -1, "refused": "no"}, "-1 is less than 0"),
    ({"ranges": [["a", 0]]}, "a list is not [entry, start, length]"),
])
def test_patches_that_are_none(fields: dict[str, Any], what: str) -> None:
    body = {"type": "patch", "request": 0, "iteration": 0} | fields
    assert came(json.dumps(body).encode()) == f"not a message: {what}"


def test_another_way_to_get_the_state_is_not_one_of_the_two() -> None:
    found = came(b'{"type":"welcome","proof":"0c","resync":"both"}')
    assert found == "not a message: 'both' is not one of state, ranges"


@pytest.mark.parametrize("make", [
    lambda ranges: Ranges(0, ranges), lambda ranges: Patch(0, 0, ranges),
], ids=["ranges", "patch"])
def test_as_many_ranges_as_the_limit_and_not_one_more(make: Callable[[list[Any]], Any]) -> None:
    most = [(f"a.rather.long.name.{number}", number, 1 << 40) for number in range(MOST_RANGES)]
    assert sent(make(most)) == make(most)
    with pytest.raises(UserError, match="16385 ranges, at most 16384 are taken at once"):
        make([*most, most[0]])
    body = {"type": "ranges", "request": 0, "ranges": [*most, most[0]]}
    assert came(json.dumps(body).encode()) == "not a message: 16385 ranges, at most 16384 are taken at once"


@pytest.mark.parametrize("message", [
    Holes(0, 0, PLAN, [(0, 1), (8, 1), (4096, 64 << 10)], 1), Holes(3, 1 << 45, "", [(8, 8)], PEER_SECONDS),
    Bytes(0, 0, [(0, 8), (8, 8)], "0a" * 32), Bytes(5, 7, why="why not"),
    Bytes(1, 0, [(8 * number, 8) for number in range(MOST_RANGES)]), Bytes(1, 0, [(0, PEER_BYTES)]),
    Journal(0, 0, PLAN, 0.5), Journal(9, 4, "", PEER_SECONDS),
    Entry(0, 0, "", -1), Entry(4, 9, PLAN, 12, {"format": 1}, 2, ["r", 0, 2], [{"lr": 0.1}], 0.5, 1.0, True, "why not"),
    User(0, 0), User((1 << 46) - 1, MOST_RANKS - 1),
], ids=lambda message: type(message).__name__.lower())
def test_what_peers_and_ranks_say_arrives_as_it_was_sent(message: Any) -> None:
    assert sent(message) == message


@pytest.mark.parametrize(("ranges", "what"), [
    ([(8 * number, 8) for number in range(MOST_RANGES + 1)], "16385 ranges, at most 16384 are taken at once"),
    ([(0, PEER_BYTES), (PEER_BYTES, 8)], f"{PEER_BYTES + 8} bytes, at most {PEER_BYTES} are given at once"),
])
def test_peers_give_so_much_at_once_and_no_more(ranges: list[Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        Bytes(0, 0, ranges)


@pytest.mark.parametrize(("make", "where"), [
    (lambda: Ranges(-1, [("a", 0, 1)]), "ranges: request"),
    (lambda: Ranges(0, []), "ranges: ranges"),
    (lambda: Ranges(0, [("a", 0, 1)] * (MOST_RANGES + 1)), "ranges: ranges"),
    (lambda: Ranges(0, [("a", 0, 1), ("a", 0)]), "ranges: ranges[1]"),
    (lambda: Ranges(0, [("a", 0, 1), ("a", 0, None)]), "ranges: ranges[1]"),
    (lambda: Ranges(0, [("a", 0, 1), ("a", 0, 0)]), "ranges: ranges[1]"),
    (lambda: Patch(-1, 0, [("a", 0, 1)]), "patch: request"),
    (lambda: Patch(0, -1, [("a", 0, 1)]), "patch: iteration"),
    (lambda: Patch(0, 0, [("a", 0)]), "patch: ranges[0]"),
    (lambda: Patch(0, 0), "patch: refused"),
    (lambda: Welcome("", "both"), "welcome: resync"),
    (lambda: Holes(-1, 0, PLAN, [(0, 8)], 1.0), "holes: request"),
    (lambda: Holes(0, -1, PLAN, [(0, 8)], 1.0), "holes: iteration"),
    (lambda: Holes(0, 0, PLAN, [], 1.0), "holes: ranges"),
    (lambda: Bytes(-1, 0, [(0, 8)]), "bytes: request"),
    (lambda: Bytes(0, -1, [(0, 8)]), "bytes: iteration"),
    (lambda: Bytes(0, 0), "bytes: why"),
    (lambda: Bytes(0, 0, [(0, 8)], why="why not"), "bytes: why"),
    *((lambda span=span: Bytes(0, 0, [(0, 8), span]), "bytes: ranges[1]") for span in (
        "16", [16], [16, 8, 1], [16, True], [16, 8.0], [0, 8], [12, 8], [16, 0], [16, -8], [16, (1 << 63) - 16],
    )),
    (lambda: Journal(-1, 0, PLAN, 1.0), "journal: request"),
    (lambda: Journal(0, -1, PLAN, 1.0), "journal: iteration"),
    *((lambda kind=kind, more=more, seconds=seconds: kind(0, 0, PLAN, *more, seconds), f"{name}: seconds")
      for kind, name, more in ((Journal, "journal", ()), (Holes, "holes", ([(0, 8)],)))
      for seconds in (0, -1.0, PEER_SECONDS + 0.5, float("nan"))),
    (lambda: Entry(-1, 0, PLAN, 0), "entry: request"),
    (lambda: Entry(0, -1, PLAN, 0), "entry: iteration"),
    (lambda: Entry(0, 0, PLAN, 0, {"format": 1}, -1, ["r", 0, 2]), "entry: first"),
    *((lambda run=run: Entry(0, 0, PLAN, 0, {"format": 1}, run=run), "entry: run") for run in (
        [], ["r", 0], ["r", 0, 2, 2], ["r", 0.0, 2], ["r", 0, True], [0, 0, 2],
    )),
    (lambda: User(-1, 0), "user: iteration"),
    (lambda: User(0, -1), "user: rank"),
    (lambda: User(0, MOST_RANKS), "user: rank"),
    (lambda: Steps("0a", "n", []), "steps: node"),
    (lambda: Steps("0A" * 16, "n", []), "steps: node"),
    (lambda: Steps("0a" * 16 + "\n", "n", []), "steps: node"),
    (lambda: Steps("0a" * 16, "n\x1b", []), "steps: node"),
    (lambda: Steps("0a" * 16, "n" * 65, []), "steps: node"),
    (lambda: Steps("0a" * 16, "n", [SHARE] * 65), "steps: have"),
    *((lambda share=share: Steps("0a" * 16, "n", [SHARE, share]), "steps: have[1]") for share in (
        "r0g", ["r", 0, "g"], ["r", 0, "g", [1], 0], [b"r", 0, "g", [1]], ["r", True, "g", [1]], ["r", 0, None, [1]],
        ["r", 0, "g", 1], ["r", 0, "g", [1.0]], ["r", 0, "g", [True]], ["r", -1, "g", [1]], ["r", 1 << 63, "g", [1]],
        ["r", 0, "g", [-1]], ["r", 0, "g", [1 << 46]], ["r", 0, "g", list(range(17))], ["r", 0, "a b", [1]],
        ["r", 0, "g" * 33, [1]], ["r", 0, "g\n", [1]],
    )),
])
def test_what_is_not_a_message_cannot_be_made_either(make: Callable[[], Any], where: str) -> None:
    with pytest.raises(UserError) as refused:
        make()
    assert refused.value.where == where


@pytest.mark.parametrize(("kind", "fields"), [
    (Holes, {"iteration": 1 << 46, "request": 0, "plan": PLAN, "ranges": [(0, 8)], "seconds": 1.0}),
    (Bytes, {"iteration": 1 << 46, "request": 0, "ranges": [(0, 8)]}),
    (Journal, {"iteration": 1 << 46, "request": 0, "plan": PLAN, "seconds": 1.0}),
    (Entry, {"iteration": 1 << 46, "request": 0, "plan": PLAN, "newest": 0}),
    (Entry, {"first": 1 << 46, "request": 0, "iteration": 0, "plan": PLAN, "newest": 0}),
    (User, {"iteration": 1 << 46, "rank": 0}),
    (Record, {"iteration": 1 << 46}), (State, {"iteration": 1 << 63}), (Manifest, {"job": {}, "first": 1 << 64}),
])
def test_iterations_that_nobody_reaches_are_refused(kind: type, fields: dict[str, Any]) -> None:
    """They would not fit into the words of a replica's file."""
    with pytest.raises(UserError, match="at most 70368744177663 are counted"):
        kind(**fields)
    for name, value in fields.items():
        if isinstance(value, int) and value:
            kind(**{**fields, name: (1 << 46) - 1})
            with pytest.raises(UserError, match="-1 is less than 0"):
                kind(**{**fields, name: -1})
