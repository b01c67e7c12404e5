"""Workers that encode together over gloo: the chunks of the plain code, whatever the shape; who dies ends the round."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flowcheck.checkpoint.coding.code import Code
from flowcheck.checkpoint.coding.reduction import Reduction, dist
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


def encoded(shape: Shape) -> None:
    packets = [random.Random(f"{shape} {worker}").randbytes(SIZE) for worker in range(shape.nodes * shape.workers)]
    store = dist.HashStore()

    def work(worker: int) -> torch.Tensor | None:
        packet = torch.frombuffer(bytearray(packets[worker]), dtype=torch.uint8)
        return Reduction(store, shape, worker, epoch=1).encode(packet)

    with ThreadPoolExecutor(len(packets)) as pool:
        found = list(pool.map(work, range(len(packets))))
    wanted = plain(shape, packets)
    for worker, chunk in enumerate(found):
        node, first = divmod(worker, shape.workers)
        if first:
            assert chunk is None
        else:
            assert chunk is not None and bytes(chunk.tolist()) == wanted[node], (shape, node)


@pytest.mark.parametrize("shape", SOME, ids=str)
def test_the_chunks_are_those_of_the_plain_code(shape: tuple[int, int, int]) -> None:
    encoded(Shape(*shape))


@pytest.mark.slow
@pytest.mark.parametrize("shape", ALL, ids=str)
def test_the_chunks_of_all_small_shapes(shape: tuple[int, int, int]) -> None:
    encoded(Shape(*shape))


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
