"""The control port between a trainer's link and a group that only notes: what is let through, and what ends it.

The connection is a real pair of sockets, the trainer is the product's Link or frames made by hand.
"""

from __future__ import annotations

import queue
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowcheck.control.protocol import (
    Bye,
    Challenge,
    Flows,
    Hello,
    Joined,
    Limits,
    Link,
    Manifest,
    Patch,
    Progress,
    Record,
    RecordsError,
    Refused,
    State,
    Unfed,
    User,
    UserHead,
    Wanted,
    Welcome,
)
from flowcheck.control.tensors import header, packed_bytes, pieces
from flowcheck.control.user_state import pack
from flowcheck.errors import UserError
from flowcheck.job.clock import Clock
from flowcheck.job.model import ModelEntry
from flowcheck.node.groups import connection
from flowcheck.node.groups.feeding import Feeding

from ..rebuild.test_fed_arenas import fed_arenas
from .control_scene import Enter, Known, NotedGroup, entering, framed

TOKEN = b"a token that only tests have"
MODEL = [
    ModelEntry("w", [3]), ModelEntry("tie", [3], tied="w"), ModelEntry("c", [2], "float16", "constant"),
    ModelEntry("b", [2], "int64", "buffer"), ModelEntry("d", [], "float32", "buffer"),
]
PLAN = SimpleNamespace(job=SimpleNamespace(kind="replica", source="mirror", model=MODEL, optimizer=None))
STATE = {
    "model.w": torch.tensor([1.0, 2.0, 3.0]), "model.tie": torch.zeros(3),
    "model.c": torch.ones(2, dtype=torch.float16), "model.b": torch.tensor([4, 5]), "model.d": torch.tensor(6.0),
}
OPTIMIZER = {
    "optimizer.w.step": torch.tensor(2.0),
    **{f"optimizer.w.{key}": torch.full((3,), float(number)) for number, key in enumerate(
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master"))},
}
BUFFERS = {"buffer.b": torch.tensor([7, 8]), "buffer.d": torch.tensor(9.0)}


@pytest.fixture
def enter() -> Iterator[Enter]:
    with entering() as begin:
        yield begin


# -- joining a group -------------------------------------------------------------------------------------------


def test_a_trainer_joins_as_who_it_has_proved_to_be(enter: Enter) -> None:
    known = enter(rank=2)
    known.send(Bye())
    assert known.group.next() == (Bye(), {}) and known.group.next() == ("left", True)
    assert known.end() is None
    assert known.group.joined == [(("run", 3, 4), 2, "first start")]


def test_a_group_that_says_why_not_has_no_member_to_leave(enter: Enter) -> None:
    known = enter(why="rank 2 is attached already", rank=2)
    assert known.why() == ("rank 2 is attached already", "host:1")
    assert known.group.said.empty()


def test_a_run_that_is_not_taken_any_more_joins_nothing(enter: Enter) -> None:
    known = enter(final="its versions have diverged 2 times")
    assert known.why() == ("its versions have diverged 2 times", "host:1") and known.group.joined == []


def test_without_a_group_there_is_nothing_to_join() -> None:
    near, far = (Link(sock) for sock in socket.socketpair())
    near.peer = "host:1"
    hello = Hello("run", 3, 0, 4, "second", "", "")
    with pytest.raises(RecordsError) as refused:
        connection.Connection(near, hello, lambda name: f"no {name}").run()
    assert (refused.value.what, refused.value.where) == ("no second", "host:1")
    near.close()
    far.close()


# -- what a trainer may send -----------------------------------------------------------------------------------


@pytest.mark.parametrize("message", [
    Flows([{"src": 0}]), Manifest({"epoch": 3}, 7), Record(4, [{"lr": 0.5}], 0.25, 8.0, True, {"w": "0" * 16}), Bye(),
], ids=["flows", "manifest", "record", "bye"])
@pytest.mark.parametrize("rank", [0, 1])
def test_messages_go_into_the_groups_inbox(enter: Enter, rank: int, message: Any) -> None:
    known = enter(rank=rank, plan=PLAN)
    known.send(message)
    assert known.group.next() == (message, {})


@pytest.mark.parametrize("message", [
    Challenge("00"), Hello("run", 3, 0, 4, "", "", ""), Welcome("00"), Refused("you"), Wanted([], ""), Joined(1),
    Progress(1, "verified"),
], ids=lambda message: type(message).__name__)
def test_a_nodes_messages_are_refused_from_a_trainer(enter: Enter, message: Any) -> None:
    known = enter(plan=PLAN)
    known.send(message)
    assert known.why() == (f"a {type(message).__name__} from a trainer", "host:1")
    assert known.group.next() == ("left", True) and known.group.said.empty()


def test_nothing_is_read_after_a_bye(enter: Enter) -> None:
    known = enter()
    known.link._out.sendall(framed(Flows([])) + framed(Bye()) + framed(Record(1)))
    assert [known.group.next() for _ in range(3)] == [(Flows([]), {}), (Bye(), {}), ("left", True)]
    assert known.end() is None and known.group.said.empty()


def test_a_trainer_that_closes_between_messages_has_left(enter: Enter) -> None:
    known = enter()
    known.link.close()
    assert known.group.next() == ("left", True) and known.end() is None


def test_a_trainer_that_closes_within_a_message_has_broken_off(enter: Enter) -> None:
    known = enter()
    known.link._out.sendall(b"FCR1")
    known.link.close()
    assert known.why() == ("connection closed within a message, 12 bytes before its end", "host:1")
    assert known.group.next() == ("left", True)


# -- payloads --------------------------------------------------------------------------------------------------


def test_a_state_is_announced_before_its_payload_is_here(enter: Enter) -> None:
    known = enter(plan=PLAN)
    tensors = STATE | OPTIMIZER
    known.promise(State(5), packed_bytes(tensors))
    assert known.group.next() == ("announced", 5)
    head, order = header(tensors)
    for part in (head, *(p for name in order for p in pieces(tensors[name]))):
        known.link._out.sendall(part)
    assert known.group.next() == (State(5), {name: tensor.tolist() for name, tensor in tensors.items()})
    known.send(Record(6))
    assert known.group.next() == (Record(6), {})  # only a state is announced


def test_a_records_buffers_come_under_their_names(enter: Enter) -> None:
    known = enter(plan=PLAN)
    known.send(Record(1), BUFFERS)
    assert known.group.next() == (Record(1), {"b": [7, 8], "d": 9.0})


@pytest.mark.parametrize("kept", [(), ("optimizer.w.step",), ("optimizer.w.master", "optimizer.w.exp_avg")])
def test_a_state_may_lack_tensors_of_the_optimizer(enter: Enter, kept: tuple[str, ...]) -> None:
    known = enter(plan=PLAN)
    known.send(State(5), STATE | {name: OPTIMIZER[name] for name in kept})
    assert known.group.next() == ("announced", 5)
    assert set(known.group.next()[1]) == {*STATE, *kept}


@pytest.mark.parametrize(("masters", "held"), [("none", torch.bfloat16), ("state", torch.float32)])
def test_the_optimizer_of_16_bit_parameters_has_their_type_or_masters(
    enter: Enter, masters: str, held: torch.dtype
) -> None:
    """torch.optim makes its states in the parameter's type; only the number of steps is a float32 in any case."""
    model = [ModelEntry("w", [3], "bfloat16")]
    optimizer = SimpleNamespace(masters=masters)
    plan = SimpleNamespace(job=SimpleNamespace(kind="replica", source="mirror", model=model, optimizer=optimizer))
    state = {"model.w": torch.ones(3, dtype=torch.bfloat16), "optimizer.w.step": torch.tensor(2.0),
             "optimizer.w.exp_avg": torch.tensor([1.0, 2.0, 3.0], dtype=held)}
    known = enter(plan=plan)
    known.send(State(5), state)
    assert known.group.next() == ("announced", 5)
    assert known.group.next()[1] == {name: tensor.tolist() for name, tensor in state.items()}
    known.send(Patch(1, 5, [("w", 0, 1), ("w", 1, 2)]), state)
    assert known.group.next()[1] == {name: tensor.tolist() for name, tensor in state.items()}
    other = torch.float32 if held == torch.bfloat16 else torch.bfloat16
    known.send(State(6), state | {"optimizer.w.exp_avg": torch.ones(3, dtype=other)})
    assert "tensor 'optimizer.w.exp_avg' is " in known.why()[0]


@pytest.mark.parametrize("missing", list(STATE))
def test_a_state_may_not_lack_a_tensor_of_the_model(enter: Enter, missing: str) -> None:
    known = enter(plan=PLAN)
    known.send(State(5), {name: tensor for name, tensor in STATE.items() if name != missing})
    assert known.why() == (f"tensor '{missing}' is missing", "host:1: State")
    assert known.group.next() == ("announced", 5) and known.group.next() == ("left", True)


@pytest.mark.parametrize("missing", list(BUFFERS))
def test_a_record_may_not_lack_a_buffer_when_it_has_others(enter: Enter, missing: str) -> None:
    known = enter(plan=PLAN)
    known.send(Record(1), {name: tensor for name, tensor in BUFFERS.items() if name != missing})
    assert known.why() == (f"tensor '{missing}' is missing", "host:1: Record")


def test_a_state_without_tensors_is_refused(enter: Enter) -> None:
    known = enter(plan=PLAN)
    known.send(State(5))
    assert known.why() == ("a state without tensors", "host:1")
    assert known.group.next() == ("announced", 5) and known.group.next() == ("left", True)


@pytest.mark.parametrize(("message", "tensors", "what"), [
    (State(5), {"model.x": torch.zeros(1)}, "tensor 'model.x' is not expected"),
    (State(5), {"buffer.b": torch.zeros(2)}, "tensor 'buffer.b' is not expected"),
    (State(5), {"optimizer.tie.step": torch.zeros(())}, "tensor 'optimizer.tie.step' is not expected"),
    (State(5), {"optimizer.c.step": torch.zeros(())}, "tensor 'optimizer.c.step' is not expected"),
    (State(5), {"optimizer.b.step": torch.zeros(())}, "tensor 'optimizer.b.step' is not expected"),
    (State(5), {"optimizer.w.other": torch.zeros(3)}, "tensor 'optimizer.w.other' is not expected"),
    (State(5), {"optimizer.w.step": torch.zeros(3)}, "tensor 'optimizer.w.step' is F32 [3], not F32 []"),
    (State(5), {"optimizer.w.exp_avg": torch.zeros(())}, "tensor 'optimizer.w.exp_avg' is F32 [], not F32 [3]"),
    (State(5), {"model.w": torch.zeros(3, dtype=torch.float64)}, "tensor 'model.w' is F64 [3], not F32 [3]"),
    (Record(1), {"buffer.w": torch.zeros(3)}, "tensor 'buffer.w' is not expected"),
    (Record(1), {"model.b": torch.zeros(2)}, "tensor 'model.b' is not expected"),
    (Record(1), {"buffer.b": torch.zeros(2)}, "tensor 'buffer.b' is F32 [2], not I64 [2]"),
])
def test_a_tensor_that_the_job_does_not_have_is_refused(
    enter: Enter, message: Any, tensors: Mapping[str, torch.Tensor], what: str
) -> None:
    known = enter(plan=PLAN)
    known.send(message, tensors)
    assert known.why() == (what, f"host:1: {type(message).__name__}")


# By hand. State: 12 + 12 + 4 + 16 + 4 bytes of the model, 4 + 5 * 12 of w's optimizer state, and for 5 + 6 tensors 200
# bytes each. Record: 16 + 4 bytes and 2 tensors. Both: a mebibyte of other headers.
STATE_BYTES = 48 + 64 + 2200 + 1048576
RECORD_BYTES = 20 + 400 + 1048576
WITHOUT = SimpleNamespace(job=SimpleNamespace(kind="replica", source="mirror", model=MODEL[:3], optimizer=None))


@pytest.mark.parametrize(("rank", "plan", "message", "most"), [
    (0, PLAN, State(5), STATE_BYTES),
    (0, PLAN, Record(5), RECORD_BYTES),
    (1, PLAN, Record(5), RECORD_BYTES),
    (1, PLAN, State(5), 0),
    (3, PLAN, State(5), 0),
    (0, None, State(5), 0),
    (0, None, Record(5), 0),
    (0, WITHOUT, Record(5), 0),
    (0, PLAN, Manifest({}), 0),
    (0, PLAN, Flows([]), 0),
    (0, PLAN, Bye(), 0),
], ids=["state", "record", "record of rank 1", "state of rank 1", "state of rank 3", "state before the manifest",
        "record before the manifest", "record without buffers", "manifest", "flows", "bye"])
def test_a_payload_is_as_large_as_the_job_and_the_rank_allow(
    enter: Enter, rank: int, plan: Any, message: Any, most: int
) -> None:
    known = enter(rank=rank, plan=plan)
    known.promise(message, most + 1)
    assert known.why() == (f"a payload of {most + 1} bytes, at most {most} are read here", "host:1")
    assert known.group.next() == ("left", True)  # and nothing before
    if most:
        known = enter(rank=rank, plan=plan)
        known.promise(message, most)
        known.link.close()
        assert known.why()[0] == f"connection closed within a message, {most} bytes before its end"


def test_a_known_trainer_may_say_16_mb_and_has_30_seconds(enter: Enter) -> None:
    known = enter(plan=PLAN)
    known.send(Flows([]))
    known.group.next()  # by now the limits are those of a known trainer
    user = {"user": 1 << 20, "userhead": 1 << 20}
    most = {"state": STATE_BYTES, "record": RECORD_BYTES, "patch": STATE_BYTES, **user, "base": 0, "fed": 0}
    assert known.near.limits() == Limits(16777216, most, 30.0, 1e6)
    known.group.plan = None
    assert known.near.limits() == Limits(16777216, {}, 30.0, 1e6)


def test_gradients_come_from_ranks_that_have_a_share(enter: Enter) -> None:
    known = enter(rank=1, plan=PLAN)
    known.group.feeding = Feeding(fed_arenas(), Clock(0))
    known.send(Unfed(3, ""))
    assert known.why()[0] == "no gradients come from rank 1"


# -- what a rank gives of itself ----------------------------------------------------------------------------------


def test_a_state_of_a_rank_goes_into_the_inbox_as_it_is(enter: Enter) -> None:
    known = enter(rank=2, plan=PLAN)
    data = pack({"a": torch.ones(2)}, step=6, rank=2, ranks=4)
    known.link.send(User(5, 2), [data], len(data))
    assert known.group.next() == (User(5, 2), {})
    assert known.group.data == data


def test_what_a_state_has_in_common_with_the_one_before_it_need_not_come_again(enter: Enter) -> None:
    known = enter(rank=2, plan=PLAN)
    for step in (6, 9, 10):
        data = pack({"a": torch.ones(50)}, step=step, rank=2, ranks=4)
        message, sent = (User(5, 2), data) if step == 6 else (UserHead(step - 1, 2, 200), data[:-200])
        known.link.send(message, [sent], len(sent))
        assert known.group.next() == (User(message.iteration, 2), {}) and known.group.data == data


@pytest.mark.parametrize(("first", "same", "what"), [
    (None, 200, "the last 200 bytes of a state, of 0 before it"), (b"", 1 << 20, "the last 1048576 bytes of a state"),
    (b"", 196, "is not a user state|SHA-256 differs"), (b"", 0, "-1 is less than 0"),
])
def test_a_state_that_cannot_be_put_together_is_refused(enter: Enter, first: Any, same: int, what: str) -> None:
    known = enter(plan=PLAN)
    data = pack({"a": torch.ones(50)}, step=6, rank=0, ranks=4)
    if first is not None:
        known.link.send(User(5, 0), [data], len(data))
        known.group.next()
    message = UserHead(6, 0, 1)
    message.same = same
    known.link.send(message, [data[:-200]], len(data) - 200)
    assert re.search(what, known.why()[0])
    assert known.group.next() == ("left", True)


@pytest.mark.parametrize("spoil", [lambda data: data[:-1] + b"x", lambda data: b"", lambda data: data[:-1]])
def test_a_state_of_a_rank_that_is_none_is_refused(enter: Enter, spoil: Any) -> None:
    known = enter(plan=PLAN)
    data = spoil(pack({"a": torch.ones(2)}, step=6, rank=0, ranks=4))
    known.link.send(User(5, 0), [data], len(data))
    what, where = known.why()
    assert where == "host:1: User" and ("SHA-256 differs" in what or "is not a user state" in what)
    assert known.group.next() == ("left", True)


def test_a_state_of_a_rank_before_there_is_a_job_is_refused(enter: Enter) -> None:
    known = enter()
    known.promise(User(5, 0), 1)
    assert known.why()[0] == "a payload of 1 bytes, at most 0 are read here"


# -- what the group refuses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("message", "size"), [(Flows([]), 0), (State(5), 1000)], ids=["put", "announce"])
def test_a_full_inbox_ends_the_connection(enter: Enter, message: Any, size: int) -> None:
    known = enter(plan=PLAN, refuses=queue.Full())
    known.promise(message, size)
    assert known.why() == ("sends more than the node takes", "host:1")


def test_what_a_group_refuses_ends_the_connection(enter: Enter) -> None:
    known = enter(refuses=UserError("not this one", where="rank 0"))
    known.send(Flows([]))
    assert known.why() == ("not this one", "rank 0")


@pytest.mark.parametrize("message", [Welcome("00"), State(5)], ids=lambda message: type(message).__name__)
def test_a_known_trainer_that_breaks_a_rule_is_told(enter: Enter, message: Any) -> None:
    known = enter(plan=PLAN)
    known.send(message)
    what = {"Welcome": "a Welcome from a trainer", "State": "a state without tensors"}[type(message).__name__]
    assert known.link.receive(wait=10) == (Refused(what), 0)
    with pytest.raises(RecordsError, match="connection closed"):
        known.link.receive(wait=10)


def test_a_rank_has_left_before_it_hears_why(enter: Enter) -> None:
    """It may come back at once, and must not find itself there."""
    known = enter(plan=PLAN)
    early: list[Any] = []

    def leave(member: Any) -> None:
        with suppress(TimeoutError):
            early.append(known.link.receive(wait=0.2))
        NotedGroup.leave(known.group, member)

    known.group.leave = leave  # type: ignore[method-assign]
    known.send(Welcome("00"))
    assert known.group.next() == ("left", True) and early == []
    assert known.link.receive(wait=10) == (Refused("a Welcome from a trainer"), 0)


# -- what a trainer is sent ------------------------------------------------------------------------------------


def test_what_a_group_says_is_sent_in_order(enter: Enter) -> None:
    known = enter()
    known.send(Flows([]))
    known.group.next()
    said = [Wanted(["state"], "why"), Joined(4), *(Progress(number, "unverified") for number in range(200))]
    for message in said:
        known.group.member.send(message)
    assert [known.link.receive(wait=10)[0] for _ in said] == said


@pytest.mark.parametrize(("why", "told"), [
    ("the job was started again", "the job was started again"),
    ("manifest: it is odd\n  remedy: correct it", "manifest: it is odd; remedy: correct it"),
    ("", ""),
], ids=["one line", "with a remedy", "nothing"])
def test_a_member_that_a_group_ends_is_told_and_closed(enter: Enter, why: str, told: str) -> None:
    known = enter()
    known.send(Flows([]))
    known.group.next()
    known.group.member.end(why)
    assert known.link.receive(wait=10) == (Refused(told), 0)
    with pytest.raises(RecordsError, match="connection closed"):
        known.link.receive(wait=10)
    assert known.group.next() == ("left", True)
    known.end()


def _does_not_read(enter: Enter, queued: int) -> Known:
    """A trainer that takes nothing more, with so many messages before it."""
    known = enter()
    known.send(Flows([]))
    known.group.next()
    known.group.member.send(Wanted([], "x" * (8 << 20)))
    known.link._socket.settimeout(10)
    assert known.link._socket.recv(1) == b"F"  # the writer has it, and gets no further
    for number in range(queued):
        known.group.member.send(Joined(number))
    return known


def test_a_trainer_that_does_not_read_is_closed_after_256_messages(enter: Enter, monkeypatch) -> None:
    """Whatever time its message would still have: the node would keep all that is to be said to it."""
    send = Link.send
    monkeypatch.setattr(Link, "send", lambda link, *given, **named: send(link, *given, **named | {"seconds": 3600.0}))
    known = _does_not_read(enter, 256)
    known.send(Flows([]))
    assert known.group.next() == (Flows([]), {})  # still there
    known.group.member.send(Joined(256))
    assert known.group.next() == ("left", True)
    known.end()


def test_a_trainer_that_takes_nothing_more_is_closed(enter: Enter) -> None:
    """It could still send: the end comes from the writer."""
    known = enter()
    known.send(Flows([]))
    known.group.next()
    known.link._socket.shutdown(socket.SHUT_RD)
    known.group.member.send(Joined(1))
    assert known.group.next() == ("left", True)
    known.end()


def test_a_full_outbox_does_not_hold_up_the_end(enter: Enter) -> None:
    known = _does_not_read(enter, 256)
    known.send(Bye())
    assert known.group.next() == (Bye(), {}) and known.group.next() == ("left", True)
    known.end()


def test_what_is_in_the_outbox_is_sent_before_the_end(enter: Enter) -> None:
    known = _does_not_read(enter, 3)
    known.send(Bye())
    assert known.group.next() == (Bye(), {})
    known.group.next()
    known.link._socket.settimeout(10)
    rest = b"".join(iter(lambda: known.link._socket.recv(1 << 20), b""))
    assert rest.count(b"joined") == 3
    assert known.end() is None
