"""A c10d backend whose AllReduce is NCCL's host code re-created (net_driver.c) on the lab's network plugin.

What carries no gradients (DDP's checks and broadcasts) goes over gloo, and is no call of this communicator.

    python -P ring_backend.py TOLD      one rank of the demo's own script (lab.gpu.rank) on it, without a GPU
    RING_LIBRARY: net_driver.c as a shared object. RING_DAMAGE=I: rank 0's weights change by one bit after iteration I
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab.gpu import rank as demo_rank
from lab.softroce.work import SoftRoceWork


class RingGroup(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._calls: list[dict[str, Any]] = []
        self._c = ctypes.CDLL(os.environ["RING_LIBRARY"])
        folder = Path(os.environ["FLOWCHECK_NET_FLOWS"]).parent
        protocol = os.environ["NCCL_PROTO"].upper()
        minor = int(os.environ["FLOWCHECK_NET_NCCL"].split(".")[1])
        self._c.driver_open(os.environ["NCCL_NET_PLUGIN"].encode(), minor, rank, size, str(folder).encode(),
                            protocol.encode())

    def getBackendName(self) -> str:
        return "ring"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def flowcheck_collectives(self, since: int) -> list[dict[str, Any]]:
        return self._calls[since:]

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        (tensor,) = tensors
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        out = torch.empty_like(tensor)
        self._c.driver_allreduce(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(out.data_ptr()), tensor.numel())
        tensor.detach().copy_(out)
        self._calls.append({"op": "AllReduce", "count": tensor.numel(), "dtype": "float32", "root": 0})
        work = SoftRoceWork([tensor])
        work.complete("")
        return work

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self._gloo.broadcast(tensors, opts)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        return self._gloo.allgather(outputs, inputs, opts)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier(opts)

    def shutdown(self) -> None:
        self._c.driver_close()

    def abort(self) -> None: ...


dist.Backend.register_backend("ring", RingGroup, devices=["cpu"])


def damage(at: int) -> None:
    """From the iteration on rank 0's hashes are those of weights with one bit more, as if its GPU had gone wrong."""
    true, calls = demo_rank.hashes, [0]

    def hashes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        calls[0] += 1
        if calls[0] == at + 1:
            with torch.no_grad():
                next(model.parameters()).view(torch.int32)[0, 0] ^= 1
        return true(model, optimizer)

    demo_rank.hashes = hashes  # type: ignore[assignment]


if __name__ == "__main__":
    torch.set_num_threads(1)
    told = demo_rank.Told(**json.loads(sys.argv[1]))
    if "RING_DAMAGE" in os.environ:
        damage(int(os.environ["RING_DAMAGE"]))
    demo_rank.run(told)
    os._exit(0)
