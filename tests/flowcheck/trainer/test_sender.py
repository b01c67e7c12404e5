"""The background half of an attachment against a node made by hand: each message and each refusal once."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flowcheck.control.protocol import Bye, Flows, Limits, Patch, Ranges, Record, State, User
from flowcheck.trainer.connection import sender as sending
from flowcheck.trainer.connection.sender import Sender
from flowcheck.trainer.ranges import Wish
from flowcheck.trainer.starts import Identity

from ..hand_node import LONGEST, TOKEN, HandNode, until


class Made(Sender):
    """A Sender that keeps what it tells, and refuses all that is asked for."""

    def __init__(self, address: tuple[str, int], identity: Identity, opening: Callable[[], list[Any]]) -> None:
        self.told: list[str] = []
        super().__init__(address, TOKEN, identity, opening, self.told.append, self.prepare)


    @staticmethod
    def prepare(message: Ranges, room: int) -> Wish:
        return Wish(Patch(message.request, 0, refused=f"room for {room}"))


@pytest.fixture
def sender(hand_node: HandNode) -> Iterator[Callable[..., Made]]:
    """sender(opening=list, **fields of Identity) -> one that has been started, towards the hand-made node."""
    made: list[Made] = []

    def start(opening: Callable[[], list[Any]] = list, **fields: Any) -> Made:
        identity = Identity(**{"run_id": "run", "epoch": 0, "rank": 0, "ranks": 2, "group": ""} | fields)
        made.append(Made(hand_node.address, identity, opening))
        made[-1].start()
        return made[-1]

    yield start
    for one in made:
        one.close(Bye(), 0.0)


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections follow each other at once."""
    monkeypatch.setattr(sending, "PAUSE", (0.01, 0.01))


# -- the opening ---------------------------------------------------------------------------------------------


def test_the_hello_says_who_it_is(hand_node, sender) -> None:
    sender(run_id="a run", epoch=3, rank=1, ranks=4, group="the group", instance="an instance")
    hello = hand_node.accept().welcome()
    del hello["nonce"], hello["proof"]
    assert hello == {
        "run_id": "a run", "epoch": 3, "rank": 1, "ranks": 4, "group": "the group", "instance": "an instance",
        "protocol": "flowcheck/records/1", "role": "trainer",
    }


def test_every_attachment_has_an_instance_of_its_own() -> None:
    one, other = (Identity("run", 0, 0, 2, "") for _ in range(2))
    assert len(one.instance) == 16 and int(one.instance, 16) >= 0 and one.instance != other.instance


def test_a_welcome_connects(hand_node, sender) -> None:
    mine = sender()
    assert (mine.why, mine.connected, mine.tried.is_set()) == ("not connected yet", False, False)
    hand_node.welcome()
    assert mine.tried.wait(LONGEST)
    assert (mine.why, mine.connected, mine.told) == ("", True, [])
    node = mine.node
    assert (node.wanted, node.joined, mine.lost, node.iteration, node.status) == (frozenset(), None, 0, -1, "")


@pytest.mark.parametrize("proof", [
    "00" * 32, "", "the trainer's", "of another token", "of another rank", "cut", "in capitals",
])
def test_a_welcome_that_does_not_prove_the_token_is_the_end(hand_node, sender, proof: str) -> None:
    """An impostor on the node's address gets no model: nothing follows the Hello."""
    mine = sender(lambda: [Flows([])])
    peer = hand_node.accept()
    hello = peer.challenge()
    right = peer.proof(hello)
    wrong = {
        "the trainer's": hello["proof"], "of another token": peer.proof(hello, token=b"another token of tests"),
        "of another rank": peer.proof(hello | {"rank": 1}), "cut": right[:-1], "in capitals": right.upper(),
    }
    peer.send("welcome", proof=wrong.get(proof, proof))
    assert peer.ended()
    assert mine.tried.wait(LONGEST)
    assert not mine.connected and mine.why == "the node does not know the token" and mine.told == [mine.why]
    assert not mine.put(Record(0))


@pytest.mark.parametrize(("send", "why"), [
    (lambda peer: peer.send("refused", why="not you"), "refused: not you"),
    (lambda peer: peer.send("joined", iteration=0), "a Joined where a Challenge was due"),
    (lambda peer: peer.send("challenge", nonce="ab", protocol="flowcheck/records/9"),
     "speaks 'flowcheck/records/9', this is flowcheck/records/1"),
    (lambda peer: peer.send("challenge", b"x", nonce="ab"), "a payload of 1 bytes, at most 0 are read here"),
    (lambda peer: peer.send("challenge", nonce="x" * 65536), "at most 65536 are read"),
    (lambda peer: peer.socket.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "does not speak this protocol"),
    (lambda peer: peer.close(), "connection closed"),
])
def test_openings_that_are_refused(hand_node, sender, send: Callable[[Any], None], why: str) -> None:
    mine = sender()
    peer = hand_node.accept()
    send(peer)
    assert mine.tried.wait(LONGEST)
    assert why in mine.why and mine.told == [mine.why] and not mine.connected


def test_a_message_of_65536_bytes_is_read(hand_node, sender) -> None:
    """Why a state is wanted may be long."""
    mine = sender()
    peer = hand_node.welcome()
    text = len('{"type": "wanted", "what": ["state"], "why": ""}')
    peer.send("wanted", what=["state"], why="y" * (65536 - text))
    assert mine.answered.wait(LONGEST) and mine.node.wanted == {"state"} and mine.connected


# -- what a node says ----------------------------------------------------------------------------------------


def test_wanted_and_its_reason(hand_node, sender) -> None:
    mine = sender()
    peer = hand_node.welcome()
    assert mine.tried.wait(LONGEST) and not mine.answered.is_set()
    peer.send("wanted", what=["manifest", "flows"], why="nothing is known of the job yet")
    assert mine.answered.wait(LONGEST)
    assert mine.node.wanted == {"manifest", "flows"} and mine.node.joined is None and mine.connected
    assert mine.why == "nothing is known of the job yet" and mine.told == [mine.why]


def test_what_is_no_longer_wanted_has_no_reason(hand_node, sender) -> None:
    mine = sender()
    peer = hand_node.welcome()
    peer.send("wanted", what=["state"], why="first")
    peer.send("wanted", what=[], why="second")
    peer.send("progress", iteration=0, status="x")
    until(lambda: mine.node.iteration == 0)
    assert mine.node.wanted == frozenset() and mine.told == ["first"]


def test_what_a_node_gives_no_reason_for_makes_no_line_of_the_log(hand_node, sender) -> None:
    mine = sender()
    peer = hand_node.welcome()
    peer.send("wanted", what=["state"], why="first")
    peer.send("wanted", what=["state"], why="")
    peer.send("epoch", epoch=3, why="")
    peer.send("progress", iteration=0, status="x")
    until(lambda: mine.node.iteration == 0)
    assert (mine.told, mine.why, mine.node.epoch) == (["first"], "", 3)


def test_joined_is_an_answer_to_all_that_was_wanted(hand_node, sender) -> None:
    mine = sender()
    peer = hand_node.welcome()
    peer.send("wanted", what=["state"], why="a state to begin with")
    peer.send("joined", iteration=7)
    until(lambda: mine.node.joined is not None and not mine.why)
    assert (mine.node.joined, mine.node.wanted, mine.connected) == (7, frozenset(), True)


def test_progress_is_the_newest_version(hand_node, sender) -> None:
    mine = sender()
    peer = hand_node.welcome()
    peer.send("progress", iteration=4, status="unverified")
    peer.send("progress", iteration=5, status="verified")
    until(lambda: mine.node.iteration == 5)
    assert mine.node.status == "verified" and mine.node.wanted == frozenset() and mine.node.joined is None
    assert mine.answered.is_set()


def test_what_the_node_has_noticed_is_told_until_it_is_over(hand_node, sender) -> None:
    mine = sender()
    peer = hand_node.welcome()
    peer.send("notice", why="no packet has come")
    until(lambda: mine.node.notice)
    until(lambda: mine.told)
    assert mine.why == mine.told[0] == "no packet has come" and mine.node.wanted == frozenset()
    peer.send("joined", iteration=7)
    until(lambda: mine.node.joined == 7)
    peer.send("progress", iteration=0, status="")
    until(lambda: mine.node.iteration == 0)
    assert mine.why == "no packet has come"  # a state does not make a mirror speak
    peer.send("notice", why="")
    peer.send("progress", iteration=1, status="")
    until(lambda: mine.node.iteration == 1)
    assert (mine.why, mine.node.notice, len(mine.told)) == ("", "", 1)
    peer.send("notice", why="nothing again")
    peer.send("wanted", what=["state"], why="it comes again: a state")
    peer.send("notice", why="")
    peer.send("progress", iteration=2, status="")
    until(lambda: mine.node.iteration == 2)
    assert (mine.why, mine.node.notice) == ("it comes again: a state", "")  # the later reason stays


def test_the_same_reason_is_told_once(hand_node, sender) -> None:
    mine = sender()
    peer = hand_node.welcome()
    for why in ("one", "one", "other", "one"):
        peer.send("wanted", what=["state"], why=why)
    until(lambda: len(mine.told) == 3)
    assert mine.told == ["one", "other", "one"]


@pytest.mark.parametrize(("send", "why"), [
    (lambda peer: peer.send("refused", why="you are late"), "refused: you are late"),
    (lambda peer: peer.send("state", iteration=1), "a State from a node"),
    (lambda peer: peer.send("record", iteration=1), "a Record from a node"),
    (lambda peer: peer.send("welcome", proof=""), "a Welcome from a node"),
    (lambda peer: peer.send("nonsense"), "not one of the messages of this protocol"),
    (lambda peer: peer.send("joined", b"payload", iteration=1), "a payload of 7 bytes, at most 0 are read here"),
    (lambda peer: peer.send("joined", iteration="1"), "not a message: expected a whole number"),
    (lambda peer: peer.socket.sendall(b"x" * 16), "does not speak this protocol"),
    (lambda peer: peer.socket.sendall(b"FCR1"), "connection closed within a message"),
    (lambda peer: None, "connection closed"),
])
def test_what_ends_a_connection(hand_node, sender, send: Callable[[Any], None], why: str) -> None:
    """The reason is told once, nothing of the connection stays, and nothing more is sent on it."""
    mine = sender()
    peer = hand_node.welcome()
    peer.send("wanted", what=["state"], why="a state")
    until(lambda: mine.node.wanted)
    mine.answered.clear()
    send(peer)
    peer.says_no_more()
    assert peer.ended()
    assert mine.answered.wait(LONGEST)
    until(lambda: not mine.connected and not mine.node.wanted)
    assert mine.why.startswith(why) and mine.told == ["a state", mine.why]
    assert mine.node.joined is None and mine.lost == 0 and not mine.put(Record(0))


def test_a_node_may_not_send_payloads(hand_node, sender) -> None:
    """Even where a later protocol would let one through."""
    mine = sender()
    peer = hand_node.welcome()
    until(lambda: mine._link is not None)
    link = mine._link
    assert link.limits().payload == {} and link.limits().text == 2 << 20
    link.limits = lambda: Limits(65536, {"joined": 100})
    peer.send("progress", iteration=0, status="")  # the message after this one is read under the new limits
    until(lambda: mine.node.iteration == 0)
    peer.send("joined", b"payload", iteration=1)
    assert peer.ended()
    until(lambda: not mine.connected)
    assert mine.why == "a payload from a node" and mine.node.joined is None


class Late(Made):
    """A Sender whose thread begins when its listener has heard all that there is."""

    def _send_all(self, link: Any) -> None:
        until(lambda: "flowcheck listener" not in {thread.name for thread in threading.enumerate()})
        super()._send_all(link)


def test_what_is_said_together_with_the_welcome_is_heard(hand_node, no_pause) -> None:
    """A node that refuses a rank says so at once, and closes."""
    mine = Late(hand_node.address, Identity("run", 0, 0, 2, ""), list)
    mine.start()
    peer = hand_node.welcome()
    peer.send("wanted", what=["state"], why="a state")
    peer.send("refused", why="rank 0 is there already")
    peer.says_no_more()
    hand_node.welcome()  # it was seen that the first had ended
    assert mine.told == ["a state", "refused: rank 0 is there already"]
    mine.close(Bye(), 0.0)


# -- what is sent --------------------------------------------------------------------------------------------


def test_messages_go_out_in_order(hand_node, sender) -> None:
    mine = sender()
    peer = hand_node.welcome()
    assert mine.tried.wait(LONGEST)
    assert all(mine.put(Record(number, [{"lr": 0.5}], 0.25, None, False, {"a": "00"})) is True for number in range(3))
    assert [peer.expect("record") for _ in range(3)] == [
        {"iteration": number, "groups": [{"lr": 0.5}], "clip": 0.25, "scale": None, "skipped": False,
         "checksums": {"a": "00"}, "sample": ""} for number in range(3)
    ]


def test_tensors_follow_their_message_as_safetensors(hand_node, sender) -> None:
    mine = sender()
    peer = hand_node.welcome()
    assert mine.tried.wait(LONGEST)
    tensors = {"model.a": torch.tensor([1, 2], dtype=torch.uint8), "model.b": torch.tensor([1.5, -2.0])}
    assert mine.put(State(9), tensors) and mine.put(Bye())
    message, payload = peer.receive()
    assert message == {"type": "state", "iteration": 9, "groups": []}
    (length,) = struct.unpack("<Q", payload[:8])
    assert payload[8 + length :] == struct.pack("<ff", 1.5, -2.0) + b"\x01\x02"  # the widest elements first
    assert b'"model.a":{"dtype":"U8","shape":[2],"data_offsets":[8,10]}' in payload[: 8 + length]
    assert peer.expect("bye") == {}


def test_what_is_small_is_sent_by_who_puts_it(hand_node, sender) -> None:
    """No other thread wakes for it: nothing was queued."""
    mine = sender()
    peer = hand_node.welcome()
    until(lambda: mine.connected and not mine._again.is_set())
    until(lambda: not mine._outlet.lock.locked())
    records = [(User(7, 0), b"state"), (Record(7), {"buffer.a": torch.ones(3)})]
    assert mine.put_all(records) and not mine._backlog.queue.unfinished_tasks
    assert peer.receive() == ({"type": "user", "iteration": 7, "rank": 0}, b"state")
    assert peer.receive()[0]["type"] == "record"


def test_what_the_socket_does_not_take_is_sent_later_and_in_order(hand_node, sender) -> None:
    mine = sender()
    peer = hand_node.welcome()
    until(lambda: mine.connected and not mine._again.is_set())
    states = [bytes([number]) * (1 << 20) for number in range(30)]  # more than any socket has room for
    for number, state in enumerate(states):
        assert mine.put_all([(User(number, 0), state), (Record(number), None)])
    assert mine._backlog.queue.unfinished_tasks
    for number, state in enumerate(states):
        assert peer.receive() == ({"type": "user", "iteration": number, "rank": 0}, state)
        assert peer.expect("record")["iteration"] == number


def test_what_is_still_missing_is_filled_in_by_who_sends(hand_node, sender) -> None:
    """A device is not waited for by who puts it, and what comes after it stays behind it."""
    mine = sender()
    peer = hand_node.welcome()
    until(lambda: mine.connected and not mine._again.is_set())
    there, by = threading.Event(), list[threading.Thread]()

    def fill(record: Record) -> None:
        assert there.wait(LONGEST)
        by.append(threading.current_thread())
        record.checksums = {"a": "07"}

    assert mine.put_all([(Record(1), None)], fill) and mine.put_all([(Record(2), None)])
    there.set()
    assert [peer.expect("record")["checksums"] for _ in range(2)] == [{"a": "07"}, {}]
    assert by == [mine._thread]


def test_the_opening_goes_out_on_every_connection_and_when_it_has_changed(hand_node, sender, no_pause) -> None:
    said: list[Any] = [Flows([])]
    mine = sender(lambda: list(said))
    peer = hand_node.welcome()
    assert peer.expect("flows") == {"flows": []}
    said.append(Record(5))
    mine.open_again()
    assert peer.expect("flows") == {"flows": []} and peer.expect("record")["iteration"] == 5
    assert mine.put(Bye())
    peer.expect("bye")  # it was sent once for each time that it was asked for
    peer.close()
    peer = hand_node.welcome()
    assert peer.expect("flows") == {"flows": []} and peer.expect("record")["iteration"] == 5


def test_an_opening_that_fails_is_said_and_tried_again(hand_node, sender, no_pause) -> None:
    """A fault of ours must not end the thread unheard."""
    faults = [ZeroDivisionError("a fault of ours")]

    def opening() -> list[Any]:
        if faults:
            raise faults.pop()
        return [Flows([])]

    mine = sender(opening)
    assert hand_node.welcome().ended()
    peer = hand_node.welcome()
    peer.expect("flows")
    assert mine.told == ["ZeroDivisionError: a fault of ours"] and mine.why == "" and mine.connected


def test_without_a_connection_nothing_is_kept(hand_node, sender, no_pause) -> None:
    """What was said meanwhile would reach the next connection as if it belonged there."""
    mine = sender()
    assert not mine.put(Record(0)) and mine.lost == 0
    peer = hand_node.welcome()
    assert mine.tried.wait(LONGEST) and mine.put(Record(1))
    assert peer.expect("record")["iteration"] == 1


def test_what_was_queued_for_a_connection_goes_with_it(hand_node, sender, no_pause) -> None:
    leave, left = threading.Event(), threading.Event()

    def opening() -> list[Any]:
        if not left.is_set():
            left.set()
            assert leave.wait(LONGEST)
        return []

    mine = sender(opening)
    peer = hand_node.welcome()
    assert left.wait(LONGEST)
    assert mine.put(Record(1)) and mine.put(Record(2))  # nobody takes them yet
    peer.close()
    until(lambda: not mine.connected)
    leave.set()
    peer = hand_node.welcome()
    until(lambda: mine.connected)
    assert mine.put(Record(3))
    assert peer.expect("record")["iteration"] == 3


def test_what_was_put_for_a_connection_that_has_ended_meanwhile_does_not_go_to_the_next(
    hand_node, sender, no_pause, monkeypatch
) -> None:
    """The training thread may have looked for the connection long before it comes to the queue."""
    mine = sender()
    peer = hand_node.welcome()
    until(lambda: mine.connected)
    put, before, after = mine._backlog.queue.put_nowait, mine._link, list[Any]()

    def late(item: Any) -> None:
        if not isinstance(item[1], Record):
            return put(item)
        peer.close()
        after.append(hand_node.welcome())
        until(lambda: mine._link not in (None, before))
        put(item)

    monkeypatch.setattr(mine, "_at_once", lambda *_: None)
    monkeypatch.setattr(mine._backlog.queue, "put_nowait", late)
    mine.put(Record(1))
    monkeypatch.undo()
    assert mine.put(Record(2)) and after[0].expect("record")["iteration"] == 2


def test_a_full_queue_gives_the_connection_up(hand_node, sender, no_pause) -> None:
    """1024 messages may wait. With the next one all of them are lost, which is said and counted, and the next
    connection begins anew."""
    entered, leave = threading.Semaphore(0), threading.Semaphore(0)

    def opening() -> list[Any]:
        entered.release()
        assert leave.acquire(timeout=LONGEST)
        return []

    why = "the node is more than 1024 iterations behind"
    mine = sender(opening)
    for lost in (1, 2):
        peer = hand_node.welcome()
        assert entered.acquire(timeout=LONGEST)
        assert all(mine.put(Record(number)) for number in range(1024)) and mine.connected and mine.lost == lost - 1
        assert mine.put(Record(1024)) is False
        assert (mine.lost, mine.connected) == (lost, False) and not mine.put(Record(1025)) and mine.lost == lost
        assert mine.told == [why] * lost and mine.why == why
        assert peer.ended()
        leave.release()
    peer = hand_node.welcome()
    assert entered.acquire(timeout=LONGEST)
    leave.release()
    assert mine.told == [why, why]  # no other reason came after it
    assert mine.put(Record(2000)) and peer.expect("record")["iteration"] == 2000 and mine.lost == 2


# -- again and again -----------------------------------------------------------------------------------------


class Pauses(threading.Event):
    """The event that ends a Sender: it keeps how long it was waited on, and none of these waits takes time."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.asked = most, list[Any]()

    def wait(self, timeout: float | None = None) -> bool:
        self.asked.append(timeout)
        if len(self.asked) == self.most:
            self.set()
        return super().wait(0)


def test_pauses_grow_to_half_a_minute() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    mine = Made(address, Identity("run", 0, 0, 2, ""), list)
    mine._stop = pauses = Pauses(8)
    mine.start()
    mine._thread.join(LONGEST)
    assert pauses.asked == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert mine.told == ["no connection: Connection refused"] and mine.tried.is_set() and not mine.connected


def test_an_attempt_to_connect_has_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose machine is off answers nothing; without a limit the kernel would try for minutes."""
    asked: list[Any] = []

    def connect(address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        asked.append((address, timeout))
        raise TimeoutError(110, "Connection timed out")

    monkeypatch.setattr(socket, "create_connection", connect)
    mine = Made(("192.0.2.1", 7070), Identity("run", 0, 0, 2, ""), list)
    mine._stop = Pauses(1)
    mine.start()
    mine._thread.join(LONGEST)
    assert asked == [(("192.0.2.1", 7070), 5.0)] and mine.told == ["no connection: Connection timed out"]


def test_a_connection_that_was_there_is_looked_for_again_after_a_second(hand_node) -> None:
    mine = Made(hand_node.address, Identity("run", 0, 0, 2, ""), list)
    mine._stop = pauses = Pauses(5)
    mine.start()
    for _ in range(3):
        hand_node.accept().close()
    hand_node.welcome().close()
    hand_node.accept().close()
    mine._thread.join(LONGEST)
    assert pauses.asked == [1.0, 2.0, 4.0, 1.0, 1.0]


@pytest.mark.parametrize("joined", [False, True])
def test_a_node_that_refuses_again_and_again_is_tried_ever_more_rarely_and_its_reason_told_once(
    hand_node, joined: bool
) -> None:
    mine = Made(hand_node.address, Identity("run", 0, 0, 2, ""), list)
    mine._stop = pauses = Pauses(8)
    mine.start()
    why = "replica.memory_mb: the job takes 7 MiB; remedy: raise memory_mb, or use fewer slots or arenas"
    for _ in range(7):
        peer = hand_node.welcome()
        peer.send("wanted", what=["manifest", "flows"], why="nothing is known of the job yet")
        if joined:
            peer.send("joined", iteration=3)  # it took the state, and refused what came after it
        peer.send("refused", why=why)
        assert peer.ended()
    hand_node.welcome().close()  # not refused: this may be a node that begins anew
    mine._thread.join(LONGEST)
    assert pauses.asked == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 1.0]
    assert mine.told == ["nothing is known of the job yet", f"refused: {why}", "connection closed"]


def test_another_reason_of_a_node_that_refuses_is_told(hand_node) -> None:
    mine = Made(hand_node.address, Identity("run", 0, 0, 2, ""), list)
    mine._stop = Pauses(5)
    mine.start()
    for why in ("one", "one", "other", "one", "other"):
        hand_node.welcome().send("refused", why=why)
    mine._thread.join(LONGEST)
    assert mine.told == ["refused: one", "refused: other"]


# -- the end -------------------------------------------------------------------------------------------------


def test_close_sends_what_is_queued_and_the_last_word(hand_node, sender) -> None:
    """The node says nothing to it, and needs not."""
    mine = sender()
    peer = hand_node.welcome()
    assert mine.tried.wait(LONGEST)
    for number in range(20):
        mine.put(Record(number))
    mine.close(Bye(), LONGEST)
    assert [peer.expect("record")["iteration"] for _ in range(20)] == list(range(20)) and peer.expect("bye") == {}
    assert peer.ended() and not mine.connected and not mine._thread.is_alive() and mine.told == []


class Slow(dict[str, float]):
    """A value that takes a while to be written."""

    def items(self) -> Any:
        time.sleep(0.3)
        return super().items()


def test_close_waits_until_the_node_has_read(hand_node, sender, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both sides end a connection at once, what is on its way is thrown away. A node under load takes longer than
    a second for the last records."""
    monkeypatch.setattr(sending, "READ_SECONDS", LONGEST)
    mine = sender()
    peer = hand_node.welcome()
    assert mine.tried.wait(LONGEST)
    mine.put(Record(0), {"buffer.x": torch.zeros(1 << 20)})
    closer = threading.Thread(target=mine.close, args=(Bye(), LONGEST), daemon=True)
    closer.start()
    assert peer.receive()[0]["iteration"] == 0 and peer.expect("bye") == {}
    peer.send("progress", iteration=0, status="unverified")
    until(lambda: mine.node.iteration == 0)  # it is heard to the end
    assert peer.ended() and closer.is_alive()
    peer.close()
    closer.join(LONGEST)
    assert not closer.is_alive() and not mine.connected


def test_close_waits_for_the_last_word_itself(hand_node, sender) -> None:
    """An empty queue does not say that its last message has been sent, even if the one before has."""
    mine = sender()
    peer = hand_node.welcome()
    assert mine.tried.wait(LONGEST) and mine.put(Record(0))
    peer.expect("record")
    peer.send("joined", iteration=0)
    until(lambda: mine.node.joined == 0)
    mine.close(Record(1, [Slow(x=1.0)]), LONGEST)
    assert peer.expect("record")["iteration"] == 1 and peer.ended()


def test_close_does_not_wait_for_what_an_earlier_connection_lost(hand_node, sender, no_pause) -> None:
    mine = sender()
    peer = hand_node.welcome()
    assert mine.tried.wait(LONGEST)
    assert mine.put(Record(0, [{"x": float("nan")}]))  # it cannot be written
    mine.put(Record(1))
    assert peer.ended()
    peer = hand_node.welcome()
    until(lambda: mine.connected)
    assert len(mine.told) == 1 and mine.told[0].startswith("ValueError: Out of range float values")
    closer = threading.Thread(target=mine.close, args=(Bye(), 3600.0), daemon=True)
    closer.start()
    assert peer.expect("bye") == {} and peer.ended()
    closer.join(LONGEST)
    assert not closer.is_alive()


def test_close_without_time_does_not_wait(hand_node, sender) -> None:
    release = threading.Event()

    def opening() -> list[Any]:
        assert release.wait(LONGEST)
        return []

    mine = sender(opening)
    peer = hand_node.welcome()
    until(lambda: mine.connected)
    mine.close(Bye(), 0.0)  # its thread is held up by the opening
    assert peer.ended()
    release.set()
    mine._thread.join(LONGEST)
    assert not mine._thread.is_alive() and not mine.connected and mine.told == []


def test_close_while_nobody_is_connected_ends_the_thread(hand_node, sender) -> None:
    mine = sender()
    hand_node.accept().close()
    assert mine.tried.wait(LONGEST)
    mine.close(Bye(), LONGEST)  # in the middle of a pause of one second
    assert not mine._thread.is_alive()


def test_close_is_no_loss_that_is_told(hand_node, sender) -> None:
    """What the connection says while it is being closed is no reason of anything."""
    mine = sender()
    hand_node.welcome()
    until(lambda: mine.connected)
    mine.close(Bye(), LONGEST)
    assert mine.why == "" and mine.told == [] and not mine.put(Record(0))


def test_no_thread_of_it_keeps_a_process_alive(hand_node, sender) -> None:
    mine = sender()
    hand_node.welcome()
    until(lambda: mine.connected)
    names = {thread.name: thread.daemon for thread in threading.enumerate() if thread.name.startswith("flowcheck")}
    assert names == {"flowcheck attachment": True, "flowcheck listener": True}


def test_the_socket_notices_a_node_that_is_gone_and_does_not_delay_small_messages(hand_node, sender) -> None:
    mine = sender()
    hand_node.welcome()
    until(lambda: mine.connected)
    sock = mine._link._socket
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    assert isinstance(mine._backlog.queue, queue.Queue) and mine._backlog.queue.maxsize == 1024
