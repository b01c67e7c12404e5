"""Workers that encode together over gloo: the chunks of the plain code, whatever the shape; who dies ends the round."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from flowcheck.checkpoint.coding.code import Code
from flowcheck.checkpoint.coding.reduction import DEPTH, PIECE, Encoded, Reduction, dist
from flowcheck.checkpoint.coding.shape import Shape, data_nodes, parity_nodes
from flowcheck.errors import EnvironmentProblem

SIZE = 1003
SOME = [(4, 2, 1), (3, 2, 2), (3, 1, 1), (2, 1, 2)]
ALL = [(nodes, data, workers) for nodes in range(2, 6) for workers in range(1, 4) for data in range(1, nodes)
       if nodes * workers % data == 0]


def plain(shape: Shape, packets: list[bytes]) -> dict[int, bytes]:
    """Of each node, its chunk: the packets of its data group, or a row of parity of all of them."""
    data = [b"".join(packets[group * shape.group : (group + 1) * shape.group]) for group in range(shape.data)]
    parity = [bytearray(len(data[0])) for _ in range(shape.parity)]
    Code(shape.data, shape.parity).encode(data, parity)
    return dict(zip([*data_nodes(shape), *parity_nodes(shape)], [*data, *map(bytes, parity)], strict=True))


def packets_of(shape: Shape, unequal: bool) -> list[bytes]:
    def size(worker: int) -> int:
        return SIZE - 150 * (worker % 3) if unequal else SIZE

    return [random.Random(f"{shape} {worker}").randbytes(size(worker)) for worker in range(shape.nodes * shape.workers)]


def encoded(shape: Shape, piece: int = PIECE, unequal: bool = False, epoch: int = 1, store: Any = None) -> None:
    packets, store = packets_of(shape, unequal), store or dist.HashStore()

    def work(worker: int) -> Encoded:
        packet = torch.frombuffer(bytearray(packets[worker]), dtype=torch.uint8)
        with Reduction(store, shape, worker, epoch, piece=piece) as one:
            return one.encode(packet)

    with ThreadPoolExecutor(len(packets)) as pool:
        found = list(pool.map(work, range(len(packets))))
    length = max(map(len, packets))
    wanted = plain(shape, [one.ljust(length, b"\0") for one in packets])
    for worker, made in enumerate(found):
        node, first = divmod(worker, shape.workers)
        assert (made.length, made.padded) == (length, sum(length - len(one) for one in packets))
        if first:
            assert made.chunk is None
        else:
            assert made.chunk is not None and bytes(made.chunk.tolist()) == wanted[node], (shape, node)


@pytest.mark.parametrize("shape", SOME, ids=str)
def test_the_chunks_are_those_of_the_plain_code(shape: tuple[int, int, int]) -> None:
    encoded(Shape(*shape))


@pytest.mark.parametrize("piece", [100, SIZE, SIZE - 1])
@pytest.mark.parametrize("shape", [(4, 2, 1), (3, 2, 2)], ids=str)
def test_in_pieces_and_of_unequal_packets(shape: tuple[int, int, int], piece: int) -> None:
    """Shorter ones are padded, and how much that was is said."""
    encoded(Shape(*shape), piece, unequal=True)


def test_of_nothing() -> None:
    store, shape = dist.HashStore(), Shape(2, 1, 1)

    def work(worker: int) -> Encoded:
        return Reduction(store, shape, worker, 1).encode(torch.empty(0, dtype=torch.uint8))

    with ThreadPoolExecutor(2) as pool:
        assert all(one.chunk is not None and len(one.chunk) == one.length == 0 for one in pool.map(work, range(2)))


@pytest.mark.slow
@pytest.mark.parametrize("shape", ALL, ids=str)
def test_the_chunks_of_all_small_shapes(shape: tuple[int, int, int]) -> None:
    encoded(Shape(*shape))


# -- members that fail -----------------------------------------------------------------------------------------


class Failing(Reduction):
    """What it multiplies is counted. fails: called before each sum, with how many there were."""

    fails: Callable[[int], None] = staticmethod(lambda sums: None)
    multiples = sums = 0

    def _multiple(self, mine: torch.Tensor, row: int) -> torch.Tensor:
        self.multiples += 1
        return super()._multiple(mine, row)

    def _sum(self, multiple: torch.Tensor, row: int) -> torch.Tensor | None:
        self.fails(self.sums)
        self.sums += 1
        return super()._sum(multiple, row)


def round_with(shape: Shape, store: Any, fails: Callable[[int], None], packet: torch.Tensor, first: torch.Tensor
               ) -> tuple[list[str], list[Failing]]:
    """What each worker was told, "" where its part was done. Worker 0 fails, and has another packet."""
    workers = shape.nodes * shape.workers
    made = dict[int, Failing]()
    together = threading.Barrier(workers)

    def work(worker: int) -> str:
        made[worker] = Failing(store, shape, worker, epoch=1, seconds=3.0, piece=10)
        if worker == 0:
            made[worker].fails = fails
        together.wait(60.0)
        try:
            made[worker].encode(packet if worker else first)
            return ""
        except EnvironmentProblem as error:
            return error.what

    with ThreadPoolExecutor(workers) as pool:
        said = list(pool.map(work, range(workers)))
    return said, [made[worker] for worker in range(workers)]


def dies(sums: int) -> None:
    if sums == 8:
        raise RuntimeError("it is gone")


def stalls(sums: int) -> None:
    if sums == 8:
        threading.Event().wait(6.0)


@pytest.mark.parametrize("fails", [dies, stalls])
def test_a_member_that_fails_ends_the_round(fails: Callable[[int], None]) -> None:
    """In the middle. Who waits for it is told in time and has multiplied only a little ahead, and the next epoch is
    whole."""
    shape, store, packet = Shape(3, 2, 2), dist.HashStore(), torch.ones(SIZE, dtype=torch.uint8)
    said, made = round_with(shape, store, fails, packet, packet)
    for worker in shape.members(0):
        assert "the round has ended" in said[worker] or (worker == 0 and fails is stalls), said
    assert said[0] or fails is stalls
    assert all(8 <= made[worker].multiples <= 8 + DEPTH + 3 for worker in shape.members(0)), said
    encoded(shape, epoch=2, store=store)


def test_stages_hold_up_no_process_that_ends() -> None:
    found = list[threading.Thread]()
    packet = torch.ones(SIZE, dtype=torch.uint8)
    round_with(Shape(2, 1, 1), dist.HashStore(), lambda sums: found.append(threading.current_thread()), packet, packet)
    assert found and all(one.daemon for one in found)


@pytest.mark.parametrize("where", ["sum", "packet"])
def test_a_member_that_sends_what_it_has_not_ends_the_round(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than was asked for, which gloo does not notice, and another byte in what is added up."""
    def sent(self: Reduction, at: int, mine: torch.Tensor, *rest: Any, real: Any = Reduction._sent) -> None:
        real(self, at, mine[: len(mine) // 2] if self._worker == 1 and where == "packet" and at == 0 else mine, *rest)

    def multiple(self: Reduction, mine: torch.Tensor, row: int, real: Any = Reduction._multiple) -> torch.Tensor:
        found = real(self, mine, row)
        if self._worker == 1 and where == "sum":
            found[0] ^= 1
        return found

    monkeypatch.setattr(Reduction, "_sent", sent)
    monkeypatch.setattr(Reduction, "_multiple", multiple)
    shape, store = Shape(3, 1, 2), dist.HashStore()  # worker 1's packet is sent to nobody's node but worker 0's own
    said, _ = round_with(shape, store, lambda sums: None, torch.ones(SIZE, dtype=torch.uint8),
                         torch.ones(SIZE, dtype=torch.uint8))
    assert any("is not made of what workers" in one and "1" in one.rpartition("workers")[2] for one in said), said


@pytest.mark.parametrize("length", [-1, (1 << 40) + 1, -(1 << 62)])
def test_a_length_that_cannot_be_ends_the_round(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, store, packet = Shape(2, 1, 1), dist.HashStore(), torch.ones(SIZE, dtype=torch.uint8)
    monkeypatch.setattr(Reduction, "_lengths", lambda self, own, real=Reduction._lengths: real(
        self, length if self._worker == 0 else own))
    said, _ = round_with(shape, store, lambda sums: None, packet, packet)
    assert all(f"worker 0 says that its packet has {length} bytes" in one for one in said)


def test_a_member_that_does_not_come_ends_the_round() -> None:
    """In time, for all others, and the next epoch is whole."""
    shape, store, packet = Shape(3, 2, 2), dist.HashStore(), torch.ones(SIZE, dtype=torch.uint8)
    together = threading.Barrier(6)

    def work(worker: int) -> str:
        one = Reduction(store, shape, worker, epoch=1, seconds=5.0)
        together.wait(60.0)
        if worker == 4:
            return ""
        try:
            one.encode(packet)
            return ""
        except EnvironmentProblem as error:
            return error.what

    with ThreadPoolExecutor(6) as pool:
        said = list(pool.map(work, range(6)))
    assert "the round has ended" in said[Shape(3, 2, 2).members(4 % shape.group)[0]], said
    encoded(shape)


WORKER = """
import sys, datetime, torch
from flowcheck.checkpoint.coding.reduction import Reduction, dist
from flowcheck.checkpoint.coding.shape import Shape
from flowcheck.errors import EnvironmentProblem

class Liar(Reduction):
    def _sum(self, multiple, row):
        return super()._sum(torch.zeros(len(multiple) + 64, dtype=torch.uint8), row)

worker, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, 4, worker == 0, datetime.timedelta(seconds=120), wait_for_workers=False)
with (Liar if worker == 1 else Reduction)(store, Shape(4, 2, 1), worker, 1, seconds=60.0) as together:
    try:
        together.encode(torch.ones(5000, dtype=torch.uint8))
        print("made", flush=True)
    except EnvironmentProblem as error:
        print(error.what, flush=True)
"""


@pytest.mark.slow
def test_a_member_that_sends_too_much_ends_processes_of_the_round_at_most() -> None:
    """gloo ends the one that receives it; all others are told that the round has ended, and none makes parity."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    workers = [subprocess.Popen([sys.executable, "-P", "-c", WORKER, str(worker), str(port)], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True) for worker in range(4)]
    said = [worker.communicate(timeout=240.0)[0] for worker in workers]
    assert not any("made" in one for one in said), said
    assert all("the round has ended" in one or worker.returncode == -signal.SIGABRT
               for one, worker in zip(said, workers, strict=True)), said
    assert sum(worker.returncode == 0 for worker in workers) >= 2
