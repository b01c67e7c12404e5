"""What ranks have sent and a group has not handled is bounded in bytes: alone, and over real connections."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.control.protocol import Bye, Flows, RecordsError, User
from flowcheck.control.user_state import pack
from flowcheck.node.groups import inbox
from flowcheck.node.groups.inbox import TEXT_WEIGHT, Inbox
from flowcheck.node.groups.members import Inbound, RankSession

from ..hand_node import until
from .control_scene import Enter, entering

MOST = 1 << 20
PLAN = SimpleNamespace(job=SimpleNamespace(model=[], optimizer=None, kind="replica", source="mirror"))


def member(rank: int) -> RankSession:
    return RankSession(rank, lambda message: None, lambda why: None)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, MOST * 2), st.booleans())))
def test_never_more_than_the_bound_and_one_that_is_larger(steps: list[tuple[int, int, bool]]) -> None:
    made, members = Inbox(MOST), [member(rank) for rank in range(4)]
    held: list[tuple[RankSession, int]] = []
    for who, size, takes in steps:
        if not takes and held:
            made.leave(*held.pop(who % len(held)))
        else:
            try:
                made.enter(members[who], size, lambda: True)  # who does not want to wait
            except RecordsError:
                assert held, "an empty one has room for anything"
                continue
            held.append((members[who], size))
        small = [size for _, size in held if size <= MOST // 2]
        assert sum(small) <= MOST and len(held) - len(small) <= 1
        assert made.held == sum(size for _, size in held)
        for one in members:
            mine = [size for of, size in held if of is one and size <= MOST // 2]
            assert sum(mine) <= MOST // 2
    for one in held:
        made.leave(*one)
    assert made.held == 0


def test_a_state_of_the_whole_job_lets_records_pass() -> None:
    made = Inbox(MOST)
    made.enter(member(0), 100 * MOST, lambda: False)
    made.enter(member(1), MOST // 4, lambda: False)
    with pytest.raises(RecordsError):
        made.enter(member(2), 100 * MOST, lambda: True)
    assert made.counts()["held_up"] == 1


def test_who_waits_is_let_in_when_there_is_room_and_refused_by_name_when_there_is_none(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    made, one, other = Inbox(MOST), member(0), member(1)
    message = Inbound(one, Bye(), size=MOST // 2)
    made.enter(one, message.size, lambda: False)
    entered = threading.Event()
    waiting = threading.Thread(target=lambda: (made.enter(one, 10, lambda: False), entered.set()))
    waiting.start()
    until(lambda: made.counts()["held_up"] == 1)
    assert not entered.is_set()
    made.done(message)
    waiting.join(60)
    assert entered.is_set() and made.held == 10
    made.enter(other, MOST // 2, lambda: False)
    monkeypatch.setattr(inbox, "HOLD_SECONDS", 0.05)
    with pytest.raises(RecordsError, match=r"control\.inbox_mb"):
        made.enter(other, MOST // 2, lambda: False)
    monkeypatch.setattr(inbox, "HOLD_SECONDS", 3600.0)
    made.close()  # nobody handles anything any more
    with pytest.raises(RecordsError):
        made.enter(other, MOST // 2, lambda: False)


# -- over a connection -------------------------------------------------------------------------------------------------


@pytest.fixture
def enter() -> Iterator[Enter]:
    with entering() as begin:
        yield begin


def test_a_rank_is_not_read_from_until_what_it_sent_is_handled(enter: Enter) -> None:
    """Its socket fills up: TCP holds it up, and nothing of what is not read takes memory here."""
    one = enter(plan=PLAN)
    one.group.inbox = made = Inbox(MOST)
    kept = holding(one.group)
    sending = threading.Thread(target=send_many, args=(one, 40), daemon=True)
    sending.start()
    until(lambda: made.counts()["held_up"])
    until(lambda: sending.is_alive() and not kept.came_lately())
    assert made.held <= MOST and len(kept.messages) < 10
    while sending.is_alive() or kept.messages:
        kept.handle_all(made)
        time.sleep(0.001)
        assert made.held <= MOST
    sending.join(60)
    until(lambda: (kept.handle_all(made), kept.count == 40)[1])
    assert made.held == 0


class Kept:
    """Messages that nobody has handled yet."""

    def __init__(self) -> None:
        self.messages: list[Inbound] = []
        self.count = 0
        self._seen = (0, 0.0)

    def put(self, inbound: Inbound) -> None:
        self.messages.append(inbound)
        self.count += 1

    def came_lately(self) -> bool:
        if self._seen[0] != self.count:
            self._seen = self.count, time.monotonic()
        return time.monotonic() - self._seen[1] < 0.3

    def handle_all(self, made: Inbox) -> None:
        for one in list(self.messages):
            self.messages.remove(one)
            made.done(one)


def holding(group: Any) -> Kept:
    kept = Kept()
    group.put = kept.put
    return kept


def send_many(one: Any, count: int) -> None:
    data = pack({"a": torch.zeros(200_000, dtype=torch.uint8)}, step=1, rank=0, ranks=4)
    for number in range(count):
        one.link.send(User(number, 0), [data], len(data), seconds=240)


@pytest.mark.parametrize("length", [1, 1000])
def test_text_counts_as_what_it_may_become(enter: Enter, length: int) -> None:
    one = enter()
    one.group.inbox = made = Inbox(1 << 30)
    kept = holding(one.group)
    flows = [{"a": "x" * length}]
    one.link.send(Flows(flows))
    until(lambda: kept.messages)
    assert kept.messages[0].size == made.held > TEXT_WEIGHT * length
    one.link._out.sendall(struct.pack(">4sIQ", b"FCR1", 1000, 0) + b"{")  # begun, and never ended
    until(lambda: made.held == kept.messages[0].size + 1000 * TEXT_WEIGHT)
    one.link.close()
    until(lambda: made.held == kept.messages[0].size)  # what came to nothing has no room


def test_what_cannot_be_is_refused_without_room(enter: Enter) -> None:
    one = enter()
    one.group.inbox = made = Inbox(MOST)
    one.promise(User(0, 0), 1 << 40)
    assert "at most" in one.why()[0] and made.held == 0


