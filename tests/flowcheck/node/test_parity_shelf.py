"""Lost shards out of what members of a group have left: exactly when the theory says so, bit for bit, and although a
member lies, stalls or has lost its stream. Nodes with data are made by hand; holders of parity are real."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import PARITY
from flowcheck.ask.receiving import AskError
from flowcheck.checkpoint.coding import parity as parity_module
from flowcheck.checkpoint.coding.code import Code
from flowcheck.checkpoint.coding.rebuilding import PIECES, ask_pieces
from flowcheck.control.user_state import pack
from flowcheck.errors import EnvironmentProblem
from flowcheck.node.api.routes import make_app
from flowcheck.node.api.worker import serve, server_of
from flowcheck.node.doors.http_door import Limits
from flowcheck.node.protect import parity_shelf as module
from flowcheck.node.protect.parity_rounds import Rounds, kept_in
from flowcheck.node.protect.parity_shelf import ParityShelf, StreamShelf
from flowcheck.node.versions.held import Gone
from flowcheck.node.versions.holdings import Pressed
from flowcheck.trainer.recover.recovery import Recovered, recover

from ..hand_api import KEY, TOKEN, HandApi, HandVersion
from ..hand_node import LONGEST

DATA, WITH = 2, 2
COUNTS = (700, 1500)
Address = tuple[str, int]


def weights(shard: int) -> list[float]:
    return [shard + at / 8 for at in range(COUNTS[shard])]


def version(shard: int, tier: str = "copy") -> HandVersion:
    one = HandVersion(6, {"w": weights(shard), "b": [2.0] * 5}, {"state.w.momentum_buffer": weights(shard)[::-1]},
                      shard=f"stage{shard}", tier=tier)
    one.give(shard, pack({"groups": [], "user": {"seen": shard}}, step=6, rank=shard, ranks=2))
    return one


class Group:
    """Members 0 and 1 have data, 2 and 3 parity of it. alive: those that are there."""

    def __init__(self, tmp_path: Path, alive: Sequence[int], stack: ExitStack) -> None:
        self.tmp_path = tmp_path
        self.apis = {number: stack.enter_context(HandApi(version(number))) for number in alive if number < DATA}
        self._sockets = {number: socket.create_server(("127.0.0.1", 0)) for number in range(DATA, DATA + WITH)}
        self.addresses: list[Address] = [
            self.apis[number].address if number in self.apis else ("127.0.0.1", 1 + number) for number in range(DATA)
        ] + [one.getsockname() for one in self._sockets.values()]
        self.shelves: dict[int, ParityShelf] = {}
        for number, one in self._sockets.items():
            if number in alive:
                stack.enter_context(self._holder(number, one))
            else:
                one.close()

    def directory(self, number: int) -> Path:
        return self.tmp_path / f"holder{number}"

    @contextmanager
    def _holder(self, number: int, sock: socket.socket) -> Iterator[None]:
        directory = self.directory(number)
        others = [address for at, address in enumerate(self.addresses) if at != number]
        shelf = ParityShelf(directory, lambda: [NodeClient(one, KEY, LONGEST) for one in others], 1 << 30)
        self.shelves[number] = shelf
        server = server_of(make_app({PARITY: shelf}, KEY, None, StreamShelf(directory)))
        thread = threading.Thread(target=serve, args=(server, sock, Limits()))
        thread.start()
        try:
            yield
        finally:
            server.should_exit = True
            thread.join(LONGEST)
            sock.close()

    def recover(self, shard: int, *members: int) -> Recovered:
        nodes = [f"{host}:{port}" for host, port in (self.addresses[one] for one in members or range(DATA + WITH))]
        return recover(nodes, token=TOKEN, shard=f"stage{shard}", seconds=LONGEST, together=False, rank=shard)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_module, "PIECE", 1024)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Callable[..., Group]]:
    """group(members that are there, ...) -> a Group; its parity was written while all data was."""
    with HandApi(version(0, "memory")) as one, HandApi(version(1, "memory")) as two:
        for number in (DATA, DATA + 1):
            rounds = Rounds(tmp_path / f"holder{number}", Code(DATA, WITH), number, 1, lambda *_, **__: None)
            assert rounds.turn([NodeClient(api.address, KEY, LONGEST) for api in (one, two)]) is not None
    with ExitStack() as stack:
        yield lambda *alive: Group(tmp_path, alive, stack)


def whole(found: Recovered, shard: int) -> None:
    assert (found.step, found.shard, found.status) == (6, f"stage{shard}", "verified")
    assert found.model["w"].tolist() == weights(shard) and found.model["b"].tolist() == [2.0] * 5
    assert found.optimizer["state"][0]["momentum_buffer"].tolist() == weights(shard)[::-1]


LOST = [lost for count in range(DATA + WITH) for lost in itertools.combinations(range(DATA + WITH), count)]


@pytest.mark.parametrize("lost", LOST, ids=lambda lost: "-".join(map(str, lost)) or "none")
def test_every_set_of_members_that_are_gone(group: Callable[..., Group], lost: tuple[int, ...]) -> None:
    """Up to m + 1 of them: all shards come back if k members are left, otherwise those whose own node is."""
    alive = [number for number in range(DATA + WITH) if number not in lost]
    members = group(*alive)
    for shard in range(DATA):
        if shard in alive:
            whole(found := members.recover(shard), shard)
            assert found.source.endswith(", copy")
        elif len(alive) >= DATA:
            whole(found := members.recover(shard), shard)
            assert found.source.endswith(", parity") and found.user == {"seen": shard}
        else:
            with pytest.raises(EnvironmentProblem, match="no version"):
                members.recover(shard)


def test_a_look_asks_nobody_twice(group: Callable[..., Group]) -> None:
    """Holders ask each other what they have themselves, and not what they could make of what others have."""
    members = group(0, 1, 2, 3)
    node = NodeClient(members.addresses[2], KEY, LONGEST)
    assert {offer.shard for offer in node.offers()} == {"stage0", "stage1"}
    assert [path for path, _ in members.apis[0].asked] == [PIECES]
    pieces = ask_pieces(node)
    assert pieces.offers == () and [one.number for one in pieces.streams] == [2]
    for path in (f"/v1/versions/{pieces.streams[0].id}/stream.bin", f"{PIECES}/{node.offers()[0].id}/stream.bin",
                 f"/v1/versions/{pieces.streams[0].id}/manifest.json"):
        with pytest.raises(AskError, match=r"no such version|Not Found"):
            list(node.raw(path, 1, "x"))
    node.close()


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_member_that_lies_is_left_for_another(group: Callable[..., Group]) -> None:
    """Stage 1 is gone. The holder asks stage 0's node, which sends other bytes than its manifest says: the other
    holder's stream takes its place, and not a wrong byte of the first attempt is given."""
    members = group(0, 2, 3)
    data = members.apis[0].versions[0].files["model.safetensors"]
    members.apis[0].versions[0].files["model.safetensors"] = data[:-1] + bytes([data[-1] ^ 1])
    whole(found := members.recover(1, 2), 1)
    assert found.source.endswith(", parity") and members.apis[0].asked_for("/model.safetensors") == 1
    members.apis[0].answers[f"/v1/versions/{members.apis[0].versions[0].id}/manifest.json"] = 200, b"{}"
    whole(members.recover(1, 3), 1)


def test_a_stream_that_was_changed_is_left_for_another(group: Callable[..., Group]) -> None:
    """Its own first, then another holder's: what is left is enough, until it is not, and then it is refused by name."""
    members = group(0, 2, 3)
    (mine,), (other,) = (kept_in(members.directory(number)) for number in (2, 3))
    spoil(mine.stream(2))
    whole(members.recover(1, 2), 1)
    spoil(other.stream(3))
    members.shelves[2]._now = lambda: 1e9  # what was made is let go
    with pytest.raises(EnvironmentProblem, match="SHA-256 differs"):
        members.recover(1, 2)


def test_a_member_that_stalls_is_left_for_another(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowcheck.checkpoint.coding.rebuilding.SECONDS", 0.3)
    members = group(0, 2, 3)
    members.apis[0].quiet.add(f"/v1/versions/{members.apis[0].versions[0].id}/optimizer.safetensors")
    whole(members.recover(1, 2), 1)


def test_what_is_made_is_let_go_and_bounded(group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> None:
    members = group(2, 3)
    shelf = members.shelves[2]
    one, two = (found.offer for found in shelf.look())
    held = shelf.hold(one.id)
    shelf._most = one.nbytes + two.nbytes - 1
    with pytest.raises(Pressed, match="are being made again"):
        shelf.hold(two.id)
    assert b"".join(held.views("model.safetensors", 0, 1 << 30))[-4:] == bytes.fromhex("00000040")  # 2.0
    monkeypatch.setattr(shelf, "_now", lambda: 1e9)
    shelf.expire()
    assert shelf._held == {} and held.made is None  # type: ignore[attr-defined]


def test_a_tensor_that_takes_long_is_given_while_it_comes(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member sends the second half of its stream late: what is there of a tensor is given, once its time is over."""
    monkeypatch.setattr(module, "READ_SECONDS", 0.3)
    members = group(0, 2)
    one = members.apis[0].versions[0]
    members.apis[0].quiet.add(f"/v1/versions/{one.id}/optimizer.safetensors")
    shelf = members.shelves[2]
    held = shelf.hold(next(found.offer.id for found in shelf.look() if found.offer.shard == "stage1"))
    head = held.size("model.safetensors") - 4 * (COUNTS[1] + 5)
    with pytest.raises(Gone, match="too slowly"):
        held.views("model.safetensors", 0, 1 << 20)
    given = b"".join(held.views("model.safetensors", head, 2048))
    assert given == b"".join(struct.pack("<f", value) for value in weights(1)[:512])
