"""One rank of a DDP job whose other rank needs no process: a process group for torch, made by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Pair(dist.ProcessGroup):
    """The other ranks' gradients are zeros and their model is this one's, so nothing has to be sent."""

    _name = ""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.reduced: list[torch.Tensor] = []  # what was AllReduced, as it was left

    def getBackendName(self) -> str:
        return "pair"

    # torch keeps the name in a group's backends, and this one is its own.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self._done(tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        self.reduced += [tensor.clone() for tensor in tensors]
        return self._done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self._done(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        for gathered, mine in zip(outputs, inputs, strict=True):
            for output in gathered:
                output.copy_(mine)
        return self._done(outputs)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        output.view(-1, tensor.numel()).copy_(tensor.clone().reshape(1, -1))
        return self._done([output])

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        output.copy_(tensor.clone().view(-1, output.numel())[self.rank()].view_as(output))
        return self._done([output])

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        return [self.all_gather_single(*one) for one in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        return [self.reduce_scatter_single(*one) for one in zip(outputs, inputs, strict=True)][-1]

    @staticmethod
    def _done(result: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(result)
        return torch._C._distributed_c10d._create_work_from_future(future)


def leave() -> None:
    """No group is left for the tests that follow."""
    if dist.is_initialized():
        dist.destroy_process_group()


def join(rank: int = 0, ranks: int = 2) -> None:
    """Be one rank of a job."""
    if not hasattr(dist.Backend, "PAIR"):
        dist.Backend.register_backend("pair", lambda store, rank, size, wait: Pair(rank, size), devices=["cpu"])
    if not dist.is_initialized() or (dist.get_rank(), dist.get_world_size()) != (rank, ranks):
        leave()
        dist.init_process_group("pair", store=dist.HashStore(), rank=rank, world_size=ranks)


def wrapped(module: torch.nn.Module, *, rank: int = 0, ranks: int = 2, **options: Any) -> DistributedDataParallel:
    """A real DDP model, on one rank of a job."""
    join(rank, ranks)
    return DistributedDataParallel(module, **options)
