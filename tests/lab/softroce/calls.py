"""Every call of torch.distributed that softroce answers, with results that can be told beforehand; run by the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lab.softroce.settings import Settings
from lab.synth.chunk_layout import Operation
from lab.synth.values import Stages, generate_values

DTYPES = {
    torch.float32: "float32", torch.float64: "float64", torch.float16: "float16", torch.bfloat16: "bfloat16",
    torch.int32: "int32", torch.int64: "int64", torch.uint8: "uint8", torch.int8: "int8",
}


def tensor_of(name: str, kind: torch.dtype, seed: int, rank: int, count: int) -> torch.Tensor:
    if count == 0:
        return torch.empty(0, dtype=kind)
    return torch.from_numpy(generate_values(name, seed, rank, count).view(np.uint8).copy()).view(kind)


def check(kind: str, ranks: int, rank: int, settings: Settings, dtype: torch.dtype, count: int) -> None:
    """One reduction of `count` elements against the sum in NCCL's order."""
    name = DTYPES[dtype]
    length = count * (ranks if kind == "ReduceScatter" else 1)
    inputs = [generate_values(name, 5, r, length) for r in range(ranks)]
    op = Operation(
        kind, settings.algorithm if kind == "AllReduce" else "ring", settings.protocol.lower(), count,
        inputs[0].itemsize, 0, ranks, settings.channels,
        tuple(settings.ring(channel, ranks) for channel in range(settings.channels)), settings.threads,
        settings.buffers, settings.wire_family,
    )
    expected = torch.from_numpy(Stages(op, name, list(inputs)).result.view(np.uint8).copy()).view(dtype)
    mine = tensor_of(name, dtype, 5, rank, length)
    if kind == "AllReduce":
        dist.all_reduce(mine)
        got = mine
    else:
        got = torch.empty(count, dtype=dtype)
        dist.reduce_scatter_tensor(got, mine)
        expected = expected[rank * count : (rank + 1) * count]
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), f"{kind} of {count} {name}"
    dist.all_reduce(got.new_empty(0))  # nothing to send, and nothing is waited for


def run(rank: int, ranks: int, settings: Settings) -> None:
    for dtype in DTYPES:
        for count in (1, 7, 5000, 300_001):
            check("AllReduce", ranks, rank, settings, dtype, count)
        check("ReduceScatter", ranks, rank, settings, dtype, 4099)
    others(rank, ranks)
    messages(rank, ranks)
    groups(rank, ranks)


def others(rank: int, ranks: int) -> None:
    for root in range(ranks):
        sent = torch.full((3, 5), float(rank))
        dist.broadcast(sent, root)
        assert (sent == root).all()
    turned = torch.full((7, 6), float(rank)).t()  # not contiguous
    dist.broadcast(turned, 1)
    assert (turned == 1).all()
    parts = [torch.zeros(2, 3, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(parts, torch.full((2, 3), rank))
    assert all((part == r).all() for r, part in enumerate(parts))
    whole = torch.zeros(ranks * 1000, dtype=torch.bool)
    dist.all_gather_into_tensor(whole, torch.arange(1000) % (rank + 2) == 0)
    assert torch.equal(whole, torch.cat([torch.arange(1000) % (r + 2) == 0 for r in range(ranks)]))
    out = torch.zeros(4)
    dist.reduce_scatter(out, [torch.full((4,), float(rank + r)) for r in range(ranks)])
    assert (out == sum(r + rank for r in range(ranks))).all()
    objects: list[Any] = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(ranks)]
    gathered: list[Any] | None = [None] * ranks if rank == 1 else None
    dist.gather_object(f"of {rank}", gathered, dst=1)
    assert gathered is None or gathered == [f"of {r}" for r in range(ranks)]
    lot = torch.zeros(6)
    dist.scatter(lot, [torch.full((6,), float(r)) for r in range(ranks)] if rank == 0 else None, src=0)
    assert (lot == rank).all()
    dist.barrier()
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(50)]
    for work in works:
        work.wait()
        assert work.is_completed()
    for call in (lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX), lambda: dist.all_reduce(torch.ones(3) > 0)):
        try:
            call()
        except RuntimeError as error:
            assert "softroce: " in str(error)
        else:
            raise AssertionError("a reduction that is not there was accepted")


def messages(rank: int, ranks: int) -> None:
    """Point to point, every pair: long and short, several under way in both directions at once."""
    sizes = (1, 131072, 131073, 1_000_003, 0)
    for low in range(ranks):
        for high in range(low + 1, ranks):
            if rank not in (low, high):
                continue
            peer = low + high - rank
            got = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
            works = []
            for number, size in enumerate(sizes):
                sent = tensor_of("uint8", torch.uint8, number, rank, size)
                works += [dist.isend(sent, peer), dist.irecv(got[number], peer)]
            for work in works:
                assert work is not None
                work.wait()
            for number, size in enumerate(sizes):
                assert torch.equal(got[number], tensor_of("uint8", torch.uint8, number, peer, size))


def groups(rank: int, ranks: int) -> None:
    """Two groups beside the default one, as two pipeline stages have them; collectives of both at once."""
    halves = [dist.new_group([0, 1]), dist.new_group(list(range(ranks - 2, ranks)))]
    for members, group in (([0, 1], halves[0]), ([ranks - 2, ranks - 1], halves[1])):
        if rank in members:
            mine = torch.full((70_000,), float(rank))
            dist.all_reduce(mine, group=group)
            assert (mine == sum(members)).all()
            import lab.softroce as softroce

            said = softroce.describe(group)
            assert said["communicator"]["ranks"] == 2 and {f["src"] for f in said["flows"]} == {0, 1}
            assert {f["src_addr"] for f in said["flows"]} == {f"10.77.0.{10 + member}" for member in members}
    dist.barrier()
