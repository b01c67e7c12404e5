"""The control port as a server: who is let in, how many, and that nothing is left when it closes. Real TCP."""

from __future__ import annotations

import errno
import gc
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from flowcheck.control.protocol import Bye, Flows, Holes, Limits, Link, RecordsError, Refused, Steps, Wanted, greet
from flowcheck.errors import EnvironmentProblem
from flowcheck.node.doors import gate
from flowcheck.node.groups import control
from flowcheck.node.groups.connection import Connection
from flowcheck.node.groups.control import ControlServer
from flowcheck.node.groups.inbox import Inbox
from flowcheck.node.peers.shelf import Shelf

from ..hand_node import until

TOKEN = b"a token that only tests have"
TCP = socket.IPPROTO_TCP


class OneGroup:
    """A group that lets everybody in but rank 1."""

    plan = None

    def __init__(self) -> None:
        self.said: queue.Queue[Any] = queue.Queue()
        self.inbox = Inbox(1 << 30)
        self.ranks = self

    def refused(self, run: tuple[str, int, int]) -> str:
        return ""

    def join(self, run: tuple[str, int, int], member: Any, instance: str = "") -> str:
        if member.rank == 1:
            return "rank 1 is attached already"
        member.send(Wanted([], "welcome"))
        self.said.put((run, member.rank, instance))
        return ""

    def leave(self, member: Any) -> None:
        self.said.put(("left", member.rank))

    def put(self, inbound: Any) -> None:
        self.said.put(inbound.message)


class Port:
    """A server on the loopback, and what it said. given: to the server."""

    def __init__(self, connections: int = 8, host: str = "127.0.0.1", **given: Any) -> None:
        self.group, self.shelf, self.now = OneGroup(), Shelf(2), 1000.0
        self.events: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self.server = ControlServer(
            (host, 0), TOKEN, connections, lambda name: f"no group {name!r}" if name else self.group,  # type: ignore
            lambda event, **fields: self.events.put((event, fields)), {"": self.shelf}.get, now=lambda: self.now,
            **given,
        )
        self.links: list[Link] = []

    def connect(self) -> Link:
        host, _, port = self.server.address.rpartition(":")
        self.links.append(Link(socket.create_connection((host.strip("[]"), int(port)), timeout=60)))
        return self.links[-1]

    def attach(self, rank: int = 0, token: bytes = TOKEN, group: str = "", role: str = "trainer") -> Link:
        link = self.connect()
        greet(link, token, run_id="run", epoch=3, rank=rank, ranks=4, group=group, instance="first", role=role)
        if role == "trainer":  # alone and before all else: older trainers take no notice of it
            assert link.receive(wait=10) == (Wanted(["user", "userhead", "notice"], ""), 0)
        return link

    def ended(self, link: Link) -> bool:
        """It is closed without a word."""
        link._socket.settimeout(10)
        try:
            return link._socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def sent_away(self) -> None:
        with pytest.raises(RecordsError, match=r"refused: [0-9]+ connections to the control port are open"):
            self.attach()

    def placed(self) -> Link:
        """A connection that has a place. One is free a moment after another connection has ended."""
        for _ in range(1000):
            try:
                return self.attach()
            except RecordsError:
                pass
        raise AssertionError("no place became free")

    def close(self) -> None:
        self.server.close()
        for link in self.links:
            link.close()


@pytest.fixture
def port() -> Iterator[Callable[..., Port]]:
    """port(connections=8) -> a server that has started."""
    made: list[Port] = []

    def start(connections: int = 8, host: str = "127.0.0.1") -> Port:
        made.append(Port(connections, host))
        made[-1].server.start()
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_a_trainer_with_the_token_reaches_its_group(port: Callable[..., Port]) -> None:
    one = port()
    link = one.attach(rank=2)
    assert link.receive(wait=10)[0] == Wanted([], "welcome")
    assert one.group.said.get(timeout=60) == (("run", 3, 4), 2, "first")
    link.send(Flows([]))
    assert one.group.said.get(timeout=60) == Flows([])
    link.send(Bye())
    assert one.group.said.get(timeout=60) == Bye() and one.group.said.get(timeout=60) == ("left", 2)
    assert one.ended(link) and one.events.empty()


def test_a_connection_that_has_ended_leaves_nothing_for_the_collector(port: Callable[..., Port]) -> None:
    """It has not run for long where there are many objects; thousands of connections would be kept until then."""
    one = port()
    gc.collect()
    gc.disable()
    try:
        link = one.attach(rank=2)
        assert link.receive(wait=10)[0] == Wanted([], "welcome")
        link.send(Bye())
        assert one.ended(link)
        until(lambda: not [each for each in gc.get_objects() if type(each) is Connection])
    finally:
        gc.enable()


@pytest.mark.parametrize(("options", "why"), [
    ({"group": "second"}, "no group 'second'"), ({"rank": 1}, "rank 1 is attached already"),
])
def test_a_trainer_that_is_not_let_in_is_told_why(port: Callable[..., Port], options: Any, why: str) -> None:
    one = port()
    link = one.attach(**options)
    assert link.receive(wait=10) == (Refused(why), 0)
    with pytest.raises(RecordsError, match="connection closed"):
        link.receive(wait=10)
    peer = "{}:{}".format(*link._socket.getsockname())
    assert one.events.get(timeout=60) == ("connection", {"peer": peer, "why": why})
    assert one.group.said.empty()


def test_a_peer_is_answered_from_the_shelf_and_is_no_rank_of_the_group(port: Callable[..., Port]) -> None:
    one = port()
    one.shelf.follow("p")
    one.shelf.show(7, np.arange(64, dtype=np.uint8), np.array([(1, 3)]), lambda: True)
    link = one.attach(role="peer")
    link.limits = lambda: Limits(4096, {"bytes": 64})
    link.send(Holes(1, 7, "p", [(0, 64)], 1.0))
    answer, size = link.receive(wait=10)
    assert answer.ranges == [(8, 16)] and bytes(link.payload(size)) == bytes(range(8, 24))
    link.close()
    assert one.group.said.empty() and one.events.empty()


def test_another_node_of_the_job_is_heard_and_answered_and_needs_no_group(port: Callable[..., Port]) -> None:
    one, heard = port(), []
    mine = Steps("0a" * 16, "one", [("run", 3, "s0", [4, 5])])
    one.server._office._hear = lambda said, where: (heard.append((said, where)), mine)[1]
    link = one.attach(role="peer", group="second")
    for newest in (5, 6):
        said = Steps("0b" * 16, "other", [("run", 3, "s1", [newest - 1, newest])])
        link.send(said)
        assert link.receive(wait=10) == (mine, 0)
        assert heard.pop() == (said, "{}:{}".format(*link._socket.getsockname()))


def test_steps_of_a_trainer_are_refused(port: Callable[..., Port]) -> None:
    link = port().attach()
    assert link.receive(wait=10)[0] == Wanted([], "welcome")
    link.send(Steps("0b" * 16, "other", []))
    assert link.receive(wait=10) == (Refused("a Steps from a trainer"), 0)


def test_a_peer_of_a_group_that_is_not_there(port: Callable[..., Port]) -> None:
    one = port()
    link = one.attach(role="peer", group="second")
    link.send(Holes(1, 7, "p", [(0, 64)], 1.0))
    assert link.receive(wait=10) == (Refused("no such group is followed here"), 0)
    assert one.events.get(timeout=60)[1]["why"] == "no such group is followed here" and one.group.said.empty()


def test_a_wrong_token_is_told_and_noted(port: Callable[..., Port]) -> None:
    one = port()
    with pytest.raises(RecordsError, match=r"refused: the token is wrong; remedy: .*FLOWCHECK_TOKEN_FILE"):
        one.attach(token=b"another token of the tests")
    event, fields = one.events.get(timeout=60)
    assert (event, fields["why"]) == ("connection", "the token is wrong")
    assert one.group.said.empty()


def test_a_rule_broken_by_one_is_noted_and_the_others_go_on(port: Callable[..., Port]) -> None:
    one = port()
    good, bad = one.attach(rank=0), one.attach(rank=2)
    bad.receive(wait=10)
    bad.send(Wanted([], ""))
    assert bad.receive(wait=10)[0] == Refused("a Wanted from a trainer")
    assert one.events.get(timeout=60)[1]["why"] == "a Wanted from a trainer"
    good.send(Flows([]))
    while one.group.said.get(timeout=60) != Flows([]):
        pass


def test_as_many_that_are_known_as_the_settings_allow_whatever_strangers_do(port: Callable[..., Port]) -> None:
    one = port(connections=2)
    silent = [one.connect() for _ in range(5)]
    assert all(link._socket.recv(1) == b"F" for link in silent)  # a challenge: each has its place
    known, other = one.attach(), one.attach(rank=2)
    one.sent_away()
    assert one.server.connected["known"] == 2
    known.send(Bye())
    one.placed()
    other.send(Flows([]))
    while one.group.said.get(timeout=60) != Flows([]):
        pass


def test_a_connection_that_came_to_nothing_gives_its_place_back(port: Callable[..., Port]) -> None:
    one = port(connections=1)
    for _ in range(3):
        one.placed().close()
    one.placed()


def test_strangers_are_said_once_a_minute_with_how_many_they_were(
    port: Callable[..., Port], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a connection without a byte, which needs no token."""
    one = port()
    seen: list[str] = []
    real = one.server._office._strangers.say
    monkeypatch.setattr(one.server._office._strangers, "say", lambda peer, why: (real(peer, why), seen.append(why)))
    for number in range(5):
        one.connect().close()
        until(lambda number=number: len(seen) == number + 1)
    event, fields = one.events.get(timeout=60)
    assert (event, fields["count"]) == ("connection", 1) and one.events.empty()
    one.now += control.SAID_SECONDS
    one.connect().close()
    assert one.events.get(timeout=60)[1]["count"] == 5 and one.events.empty()


def test_who_knows_the_token_is_not_a_stranger(port: Callable[..., Port]) -> None:
    """What a trainer says that cannot be is an operator's mistake, and said each time."""
    one = port()
    for token, rank, why in ((b"another token of the tests", 0, "the token is wrong"), (TOKEN, 4, "rank 4 of 4"),
                             (TOKEN, 7, "rank 7 of 4")):
        with pytest.raises(RecordsError, match=why):
            one.attach(rank=rank, token=token)
        event, fields = one.events.get(timeout=60)
        assert (event, fields["why"]) == ("connection", why)


def test_strangers_of_each_address_are_counted_for_themselves_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "STRANGERS", 2)
    now, said = [0.0], []
    strangers = control._Strangers(lambda event, **fields: said.append((fields["peer"], fields["count"])),
                                   lambda: now[0])

    def come(*peers: str) -> list[tuple[str, int]]:
        said.clear()
        for peer in peers:
            strangers.say(peer, "w")
        return list(said)

    assert come("a:1", "[b]:1", "a:2", "a:3", "[b]:2") == [("a:1", 1), ("[b]:1", 1)]
    now[0] += control.SAID_SECONDS
    assert come("[b]:3") == [("a:3", 2), ("[b]:3", 2)]  # who came no more is said with the next one
    now[0] += control.SAID_SECONDS
    assert come("c:1") == [("c:1", 1)] and set(strangers._of) == {"c"}
    assert come("d:1", "e:1", "c:2") == [("d:1", 1), ("e:1", 1), ("c:2", 1)] and len(strangers._of) == 2


def test_that_there_is_no_room_is_said_once_until_there_was_room_for_a_while(port: Callable[..., Port]) -> None:
    one = port(connections=1)

    def fill() -> Link:
        link = one.placed()
        for _ in range(3):
            one.sent_away()
        return link

    def empty(link: Link) -> None:
        link.close()
        until(lambda: not one.server.connected["known"])

    def problems() -> list[str]:
        one.sent_away()  # what was said of those before is there
        said = [one.events.get() for _ in range(one.events.qsize())]
        return [fields["why"] for event, fields in said if event == "problem"]

    for room, times in ((0.0, 1), (control.SAID_SECONDS - 1, 0), (control.SAID_SECONDS, 1)):
        one.now += room
        link = fill()
        said = problems()
        assert len(said) == times and all("Raise control.connections" in why for why in said), room
        one.now += 3600  # however long it is full
        assert problems() == []
        empty(link)


def test_a_group_that_cannot_be_started_is_said_and_told(port: Callable[..., Port]) -> None:
    """On the connection's thread: it would be a traceback, and the trainer would come again and again."""
    one = port()

    def fails(name: str) -> Any:
        raise EnvironmentProblem("a placing thread cannot be pinned", where="capture.place_cores", remedy="others")

    one.server._office._group_of = fails
    link = one.attach(rank=2)
    why = "capture.place_cores: a placing thread cannot be pinned; remedy: others"
    assert link.receive(wait=10) == (Refused(why), 0)
    event, fields = one.events.get(timeout=60)
    assert event == "problem" and "capture.place_cores: a placing thread cannot be pinned" in fields["why"]
    with pytest.raises(RecordsError, match="connection closed"):
        link.receive(wait=10)


def test_sockets_and_threads_of_a_connection(port: Callable[..., Port], monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer whose machine is gone is noticed within half a minute, and its threads keep no process alive."""
    taken: list[socket.socket] = []
    monkeypatch.setattr(gate, "Link", lambda sock, tls: (taken.append(sock), Link(sock, tls))[1])
    one = port()
    link = one.attach(rank=2)
    link.receive(wait=10)
    sock = taken[0]
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert [sock.getsockopt(TCP, option) for option in (
        socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)] == [10, 5, 3]
    assert sock.getsockopt(TCP, socket.TCP_NODELAY) == 1
    peer = "{}:{}".format(*link._socket.getsockname())
    mine = {t.name: t.daemon for t in threading.enumerate() if peer in t.name or t.name == "flowcheck control"}
    assert mine == {f"flowcheck {peer}": True, f"flowcheck to {peer}": True, "flowcheck control": False}


def test_close_ends_all_connections_and_their_threads(port: Callable[..., Port]) -> None:
    one = port()
    before = set(threading.enumerate())
    known, silent = one.attach(), one.connect()
    known.receive(wait=10)
    assert silent._socket.recv(1) == b"F"
    mine = set(threading.enumerate()) - before
    assert len(mine) == 2  # a reader and a writer; a stranger has no thread
    one.server.close()
    assert not any(thread.is_alive() for thread in mine)
    with pytest.raises(RecordsError, match="connection"):
        known.receive(wait=10)
    with pytest.raises(ConnectionRefusedError):
        one.connect()
    one.server.close()  # again, to no effect
    assert "flowcheck control" not in {thread.name for thread in threading.enumerate()}


def test_close_without_a_start_gives_the_port_back() -> None:
    one = Port(8)
    host, _, number = one.server.address.rpartition(":")
    one.server.close()
    with socket.create_server((host, int(number))):
        pass


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem) as refused:
            ControlServer(("127.0.0.1", number), TOKEN, 8, lambda name: "", print)
    assert refused.value.what.startswith("cannot listen: Address already in use")
    assert refused.value.where == f"127.0.0.1:{number}"
    assert refused.value.remedy == "an address of this machine and a free port in control.listen"


def test_an_address_of_another_machine() -> None:
    with pytest.raises(EnvironmentProblem, match=r"192\.0\.2\.1:0: cannot listen: Cannot assign requested address"):
        ControlServer(("192.0.2.1", 0), TOKEN, 8, lambda name: "", print)


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1:"), ("::1", "[::1]:")])
def test_the_address_as_a_client_writes_it(port: Callable[..., Port], host: str, shown: str) -> None:
    if host == "::1":
        try:
            socket.create_server((host, 0), family=socket.AF_INET6).close()
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
    one = port(host=host)
    assert one.server.address.startswith(shown) and one.server.address.removeprefix(shown).isdigit()
    assert one.attach(rank=2).receive(wait=10)[0] == Wanted([], "welcome")


def test_a_failed_accept_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of descriptors, for a moment."""

    class Short(socket.socket):
        failed = False

        def accept(self) -> Any:
            if not self.failed:
                self.failed = True
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    create = socket.create_server
    monkeypatch.setattr(
        socket, "create_server", lambda *given, **named: Short(fileno=create(*given, **named).detach())
    )
    one = Port(8)
    one.server.start()
    try:
        assert one.attach(rank=2).receive(wait=10)[0] == Wanted([], "welcome")
        assert one.events.get(timeout=60) == ("problem", {
            "why": "the control port takes nobody: Too many open files"})
    finally:
        one.close()


@pytest.mark.parametrize("error", [
    OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread"),
], ids=lambda error: type(error).__name__)
def test_a_connection_that_cannot_be_served_is_not_the_end(
    port: Callable[..., Port], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The last descriptor was taken for it, or there is no thread to be had: it is said, once however many come, and
    the next one is served."""
    one = port(connections=1)
    asked: list[int] = []

    def short(*given: Any) -> Any:
        asked.append(1)
        if len(asked) <= 3:
            raise error
        return Link(*given)

    monkeypatch.setattr(gate, "Link", short)
    for _ in range(3):
        with pytest.raises(RecordsError, match="connection"):
            one.attach(rank=2)
    event, fields = one.events.get(timeout=60)
    assert event == "problem" and str(error) in fields["why"]
    assert one.attach(rank=2).receive(wait=10)[0] == Wanted([], "welcome")
    assert one.events.empty()


def test_a_rank_for_which_there_is_no_thread_is_told(
    port: Callable[..., Port], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that would write to it."""
    one = port()
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("flowcheck to "):
            raise RuntimeError("can't start new thread")
        begin(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        link = one.attach(rank=2)
        assert link.receive(wait=10)[0] == Refused("cannot be served: can't start new thread")
    assert one.events.get(timeout=60)[1]["why"] == "cannot be served: can't start new thread"
    assert one.attach(rank=2).receive(wait=10)[0] == Wanted([], "welcome")


def test_somebody_who_is_gone_before_the_server_looks(port: Callable[..., Port]) -> None:
    one = port()
    sock = one.connect()._socket
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.links[-1].close()
    assert one.attach(rank=2).receive(wait=10)[0] == Wanted([], "welcome")
