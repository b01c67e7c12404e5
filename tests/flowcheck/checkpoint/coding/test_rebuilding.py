"""A lost shard made again while it is read: who is asked for what, which bytes are given and when, who is blamed."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import COPY, DISK, MEMORY, Offer
from flowcheck.ask.receiving import SECONDS, AskError
from flowcheck.checkpoint.coding import parity as parity_module
from flowcheck.checkpoint.coding.parity import Protected
from flowcheck.checkpoint.coding.rebuilding import (
    PIECES,
    Pieces,
    Place,
    Rebuilding,
    Stream,
    ask_pieces,
    places_of,
)
from flowcheck.control.version import MODEL
from flowcheck.errors import EnvironmentProblem, FlowcheckError

from ...hand_api import KEY, HandApi, HandVersion
from ...hand_node import LONGEST, until
from ...parity_round import parity_of

CUT = 512  # bytes of a piece of all streams
COUNTS = {"s0": 200, "s1": 230}
ENDS = {"s0": (800, 812, 1612), "s1": (920, 932, 1852)}  # of the tensors in its stream


def version(shard: str, tier: str = "copy", **about: Any) -> HandVersion:
    values = [(7 * at) % 64 / 4 for at in range(COUNTS[shard])]
    return HandVersion(6, {"w": values, "b": [2.0] * 3}, {"state.w.m": values[::-1]}, shard=shard, tier=tier, **about)


def stream(shard: str) -> bytes:
    """A shard's stream, by hand: what follows the headers of its files."""
    return b"".join(data[8 + int.from_bytes(data[:8], "little") :] for data in version(shard).files.values())


@pytest.fixture
def apis() -> Iterator[list[HandApi]]:
    with HandApi(version("s0")) as one, HandApi(version("s1")) as two:
        yield [one, two]


@pytest.fixture
def kept(apis: list[HandApi], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Protected:
    monkeypatch.setattr(parity_module, "PIECE", CUT)
    return parity_of(apis, tmp_path)


def node_of(api: HandApi) -> NodeClient:
    return NodeClient(api.address, KEY, LONGEST)


# -- what a node says that it has ----------------------------------------------------------------------------------

SAID = {"id": "r1", "number": 2, "mark": "m", "nbytes": 40, "sha256": "ab"}


def test_a_stream_is_what_a_node_says() -> None:
    assert Stream.of(SAID | {"more": 1}, "x") == Stream("r1", 2, "m", 40, "ab")


@pytest.mark.parametrize("said", [
    {}, [], None, 3, *(SAID | {name: value} for name in SAID for value in (None, [], True)),
    *({key: value for key, value in SAID.items() if key != name} for name in SAID),
], ids=str)
def test_a_stream_that_is_not_described_is_refused(said: Any) -> None:
    with pytest.raises(AskError, match="not described") as refused:
        Stream.of(said, "n:1")
    assert refused.value.where == "n:1"


def test_what_a_node_has_itself(apis: list[HandApi]) -> None:
    apis[0].versions.append(version("s1", "disk"))
    node = node_of(apis[0])
    apis[0].answers[PIECES] = 200, json.dumps({
        "versions": [one.offer for one in apis[0].versions], "streams": [SAID, SAID | {"number": 3}]}).encode()
    found = ask_pieces(node)
    assert found.node is node and not node.connection.is_open
    assert [(one.tier, one.shard) for one in found.offers] == [("copy", "s0"), ("disk", "s1")]
    assert [one.number for one in found.streams] == [2, 3]


@pytest.mark.parametrize("said", [
    b"[]", b"3", b"{}", b'{"versions": []}', b'{"streams": []}', b'{"versions": [], "streams": 3}',
    b'{"versions": {}, "streams": []}', b'{"versions": [3], "streams": []}', b'{"versions": [], "streams": [3]}',
])
def test_a_list_that_is_none_is_refused(apis: list[HandApi], said: bytes) -> None:
    apis[0].answers[PIECES] = 200, said
    node = node_of(apis[0])
    with pytest.raises(AskError) as refused:
        ask_pieces(node)
    assert refused.value.where == apis[0].name and not node.connection.is_open


# -- who has what --------------------------------------------------------------------------------------------------


def offer(shard: str, tier: str = COPY, *, step: int = 6, epoch: int = 0, run_id: str = "run") -> Offer:
    return Offer(f"{tier}{step}", tier, run_id, epoch, step, shard, "verified", 1)


def test_who_has_each_stream(kept: Protected) -> None:
    """What is here first, then the others in the order in which they were asked; of one's versions those in memory
    last. What is of something else is no piece of it."""
    one, two = (NodeClient((name, 1), KEY) for name in ("one", "two"))
    memory, copy, disk = (offer("s0", tier) for tier in (MEMORY, COPY, DISK))
    of = Stream("r1", 2, kept.mark, 1, "ab")
    wrong = [offer("s0", step=7), offer("s0", epoch=1), offer("s0", run_id="x"), offer("s2")]
    third = replace(of, number=3)
    asked = [Pieces(one, (*wrong, memory, copy), (of, replace(of, mark="another"), replace(of, number=4), third)),
             Pieces(two, (disk, offer("s1")), (replace(of, number=1), replace(of, number=0)))]
    assert places_of(kept, asked) == {
        0: [Place(0, one, copy), Place(0, one, memory), Place(0, two, disk)], 1: [Place(1, two, offer("s1"))],
        2: [Place(2), Place(2, one, None, of)], 3: [Place(3), Place(3, one, None, third)],
    }
    (first,) = [replace(kept, sums={2: kept.sums[2]})]
    assert places_of(first, []) == {2: [Place(2)]}
    assert Place(2).name == "" and Place(0, one).name == "one:1"


# -- what is made --------------------------------------------------------------------------------------------------


class Slow:
    """A node that has a shard. It sends 32 bytes for each permit."""

    name = "slow:1"

    def __init__(self, kept: Protected, shard: str) -> None:
        number = list(COUNTS).index(shard)
        self._version, self._data = kept.versions[number], stream(shard)
        self.permits, self.closed, self.seconds = threading.Semaphore(0), 0, 0.0
        self.place = Place(number, self, offer(shard))  # type: ignore[arg-type]

    def again(self, seconds: float) -> Slow:
        self.seconds = seconds
        return self

    def close(self) -> None:
        self.closed += 1

    def version(self, _: Offer) -> Any:
        return self._version

    def pieces(self, _: Offer, version: Any, file: str) -> Iterator[memoryview]:
        middle = sum(one.spec.nbytes for one in version.files[MODEL].values())
        data = self._data[:middle] if file == MODEL else self._data[middle:]
        for at in range(0, len(data), 32):
            self.permits.acquire()
            yield memoryview(data[at : at + 32])

    def send(self, nbytes: int) -> None:
        self.permits.release(-(-nbytes // 32) + 1)  # the last of a file is shorter


@pytest.fixture
def rebuild(kept: Protected) -> Iterator[Callable[..., Rebuilding]]:
    """rebuild(lost, {number: [place]}): closed at the end."""
    with ExitStack() as stack:
        def one(lost: int, places: dict[int, list[Place]], of: Protected = kept) -> Rebuilding:
            made = Rebuilding(of, lost, places)
            stack.callback(made.close)
            return made

        yield one


def asked_of(kept: Protected, *apis: HandApi) -> dict[int, list[Place]]:
    return places_of(kept, [ask_pieces(node_of(one)) for one in apis])


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("here", [(), (2,), (2, 3)], ids=str)
def test_a_shard_is_what_it_was(
    kept: Protected, apis: list[HandApi], rebuild: Callable[..., Rebuilding], lost: int, here: Sequence[int]
) -> None:
    """From what is here as far as that is enough, and from others: those with data, and those with parity."""
    api = apis[1 - lost]
    streams = {number: kept.stream(number).read_bytes() for number in kept.sums}
    api.answers[PIECES] = 200, json.dumps({"versions": [api.versions[0].offer], "streams": [
        {"id": f"r{number}", "number": number, "mark": kept.mark, "nbytes": len(data),
         "sha256": kept.sums[number]} for number, data in streams.items()]}).encode()
    for number, data in streams.items():
        api.answers[f"{PIECES}/r{number}/stream.bin"] = 200, data
    mine = replace(kept, sums={number: kept.sums[number] for number in here})
    made = rebuild(lost, asked_of(mine, api), mine)
    wanted = stream(f"s{lost}")
    assert made.wait(len(wanted), LONGEST) and bytes(made.view(0, len(wanted))) == wanted
    assert bytes(made.view(5, 77)) == wanted[5:77]
    others = [*here, *(number for number in (1 - lost, 2, 3) if number not in here)][:2]
    assert [place.number for place in made.places] == others and made.version == kept.versions[lost]
    assert [place.node is None for place in made.places] == [number in here for number in others]
    made._thread.join(LONGEST)
    assert made.error is None and made.failed is None


def test_whole_tensors_are_given_and_after_their_time_what_is_there(
    kept: Protected, rebuild: Callable[..., Rebuilding]
) -> None:
    slow, wanted = Slow(kept, "s1"), stream("s0")
    made = rebuild(0, {1: [slow.place], 2: [Place(2)]})
    assert not made.wait(1, 0.0)
    slow.send(CUT)
    until(lambda: made._written == CUT)
    assert not made.wait(CUT + 1, 0.0)
    assert made.wait(CUT, 0.0)  # its time is over: 512 of 800 bytes of the first tensor
    assert bytes(made.view(0, CUT)) == wanted[:CUT]
    assert made.wait(7, LONGEST) and not made.wait(CUT + 1, 0.0)  # of that tensor no more is waited for than is there
    slow.send(CUT)
    until(lambda: made._written == 2 * CUT)
    assert made.wait(ENDS["s0"][1], 0.0)
    assert made._early == ENDS["s0"][0]  # of the next one nobody has waited for long enough
    slow.send(4 * CUT)
    assert made.wait(len(wanted), LONGEST) and bytes(made.view(0, len(wanted))) == wanted
    made._thread.join(LONGEST)
    assert slow.closed == 1 and slow.seconds == SECONDS


def test_who_does_not_read_any_more_holds_up_nothing(kept: Protected, rebuild: Callable[..., Rebuilding]) -> None:
    slow = Slow(kept, "s1")
    made = rebuild(0, {1: [slow.place], 2: [Place(2)]})
    slow.send(CUT)
    until(lambda: made._written == CUT)
    made.close()
    slow.send(CUT)
    made._thread.join(LONGEST)
    assert not made._thread.is_alive() and made._written == CUT and made.error is None and slow.closed == 1
    assert made._thread.daemon  # nor the end of the process


# -- who fails -----------------------------------------------------------------------------------------------------


def refused(made: Rebuilding, upto: int) -> FlowcheckError:
    with pytest.raises(FlowcheckError) as caught:
        made.wait(upto, LONGEST)
    assert made.error is caught.value
    return caught.value


def test_who_sends_other_bytes_is_named(
    kept: Protected, apis: list[HandApi], rebuild: Callable[..., Rebuilding]
) -> None:
    data = apis[0].versions[0].files["optimizer.safetensors"]
    apis[0].versions[0].files["optimizer.safetensors"] = data[:-1] + bytes([data[-1] ^ 1])
    made = rebuild(1, asked_of(replace(kept, sums={2: kept.sums[2]}), apis[0]))
    error = refused(made, ENDS["s1"][2])
    assert made.failed is not None and made.failed.name == apis[0].name
    assert "shard 's0'" in error.what and "SHA-256 differs" in error.what


def test_who_has_another_version_of_that_step_is_named(
    kept: Protected, apis: list[HandApi], rebuild: Callable[..., Rebuilding]
) -> None:
    apis[1].versions[:] = [HandVersion(6, {"w": [1.0]}, {}, shard="s1", tier="copy")]
    made = rebuild(0, asked_of(replace(kept, sums={2: kept.sums[2]}), apis[1]))
    assert refused(made, 1).what == "has other bytes of that step than parity is of"
    assert made.failed is not None and made.failed.name == apis[1].name


def test_a_stream_that_was_changed_is_named(kept: Protected, rebuild: Callable[..., Rebuilding]) -> None:
    """Here, or at another holder."""
    data = kept.stream(2).read_bytes()
    kept.stream(2).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    made = rebuild(1, {2: [Place(2)], 3: [Place(3)]})
    error = refused(made, ENDS["s1"][2])
    assert made.failed == Place(2) and error.where == "stream 2, here" and "SHA-256 differs" in error.what
    with HandApi() as api:
        api.answers[f"{PIECES}/r1/stream.bin"] = 200, data
        there = Place(2, node_of(api), None, Stream("r1", 2, kept.mark, len(data), "0" * 64))
        made = rebuild(1, {2: [there], 3: [Place(3)]})
        made._thread.join(LONGEST)
        error = made.error
        assert error is not None and made.failed == there
        assert error.where == f"{api.name}, stream 2" and "SHA-256 differs" in error.what


def test_a_stream_that_is_gone_is_named(kept: Protected, rebuild: Callable[..., Rebuilding]) -> None:
    kept.stream(3).unlink()
    made = rebuild(0, {2: [Place(2)], 3: [Place(3)]})
    error = refused(made, 1)
    assert isinstance(error, EnvironmentProblem) and "FileNotFoundError" in error.what and error.where == "parity"


@pytest.mark.parametrize(("at", "good", "bad"), [(808, 800, "b"), (3, 0, "w")])
def test_a_tensor_that_does_not_come_out_is_not_given(
    kept: Protected, rebuild: Callable[..., Rebuilding], at: int, good: int, bad: str
) -> None:
    """Although nobody seems to have lied: a stream was changed, and its hash with it. Tensors before it are given, and
    the wrong one is not, however long is waited for it."""
    data = bytearray(kept.stream(2).read_bytes())
    data[at] ^= 1
    kept.stream(2).write_bytes(data)
    forged = replace(kept, sums=dict(kept.sums) | {2: hashlib.sha256(data).hexdigest()})
    slow = Slow(kept, "s1")
    made = rebuild(0, {1: [slow.place], 2: [Place(2)]}, forged)
    slow.send(CUT * (at // CUT + 2))
    until(lambda: made._wrong is not None)
    assert made.wait(good, 0.0) and not made.wait(good + 1, 0.0)
    slow.send(4 * CUT)
    error = refused(made, good + 1)
    assert made.wait(good, 0.0) and made.failed is None
    assert f"tensor {bad!r} of shard 's0' does not come out" in error.what and error.where == "here, slow:1"


def test_a_tensor_that_is_known_to_be_wrong_is_given_no_more(
    kept: Protected, rebuild: Callable[..., Rebuilding]
) -> None:
    """Although a part of it was given before it was whole."""
    data = bytearray(kept.stream(2).read_bytes())
    data[700] ^= 1
    kept.stream(2).write_bytes(data)
    forged = replace(kept, sums=dict(kept.sums) | {2: hashlib.sha256(data).hexdigest()})
    slow = Slow(kept, "s1")
    made = rebuild(0, {1: [slow.place], 2: [Place(2)]}, forged)
    slow.send(CUT)
    until(lambda: made._written == CUT)
    assert made.wait(CUT, 0.0)
    slow.send(CUT)
    until(lambda: made._wrong is not None)
    assert not made.wait(CUT, 0.0) and not made.wait(ENDS["s0"][0], 0.0)
    slow.send(4 * CUT)
    assert "tensor 'w' of shard 's0'" in refused(made, CUT).what


def test_too_long_a_stream_is_refused(kept: Protected, rebuild: Callable[..., Rebuilding]) -> None:
    kept.stream(2).write_bytes(kept.stream(2).read_bytes() + b"more")
    longer = replace(kept, sums=dict(kept.sums) | {2: hashlib.sha256(kept.stream(2).read_bytes()).hexdigest()})
    made = rebuild(0, {2: [Place(2)], 3: [Place(3)]}, longer)
    made._thread.join(LONGEST)
    assert made.error is not None and "longer than it said" in made.error.what
