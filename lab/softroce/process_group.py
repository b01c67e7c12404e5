"""torch.distributed's process group on softroce: what NCCL's would do with each call, on CPU tensors.

AllReduce, Broadcast, AllGather and ReduceScatter are NCCL's collectives; barrier is an AllReduce of one float; gather
and scatter are sends and receives. Sums and averages: of an average each rank's numbers are multiplied by 1/ranks
first, in their own type, as NCCL does for ncclAvg of floating point (ncclDevPreMulSum). Calls return at once; works
complete in issue order per communicator. Any thread may call; the order of the calls is the order on the wire.
"""

# mypy: disable-error-code="override, assignment, call-arg"
# c10d's stubs list more overloads and constructors than its C++ side calls.

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flowcheck.errors import FlowcheckError
from lab.softroce.communicator import Communicator
from lab.softroce.settings import Settings
from lab.softroce.work import SoftRoceWork

__all__ = ["SoftRoceGroup", "calls", "describe"]

Tensor = torch.Tensor

_DTYPES = {
    torch.uint8: "uint8", torch.int8: "int8", torch.int32: "int32", torch.int64: "int64", torch.float16: "float16",
    torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64",
}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _one(tensors: list[Tensor]) -> Tensor:
    if len(tensors) != 1:
        raise RuntimeError(f"softroce: one tensor per call, not {len(tensors)}")
    tensor = tensors[0]
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise RuntimeError(f"softroce: dense CPU tensors only, not {tensor.layout} on {tensor.device}")
    return tensor


class SoftRoceGroup(dist.ProcessGroup):
    """What register_backend's creator returns. Raises FlowcheckError's or RuntimeError if it cannot be set up."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self.settings = Settings.from_environment()
        self.communicator = (
            Communicator(self.settings, store, rank, size, timeout.total_seconds()) if size > 1 else None
        )
        self._order = threading.Lock()
        self._name = ""

    def getBackendName(self) -> str:
        return "softroce"

    # torch keeps the name in a group's backends, and this one is its own: without them no subgroup can be destroyed.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    # What flowcheck.attach asks a process group for; docs/use/hook.md.
    def flowcheck_topology(self) -> dict[str, Any]:
        told = describe(self)
        if self.communicator is not None and not self.communicator.settings.tell_channels:
            for flow in told["flows"]:
                del flow["channel"]
        return told

    def flowcheck_collectives(self, since: int) -> list[dict[str, Any]]:
        return calls(self, since)

    # -- collectives ------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> SoftRoceWork:
        return self._in_place("AllReduce", _one(tensors), opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> SoftRoceWork:
        works = [self._in_place("AllReduce", _one([tensor]), opts) for tensor in tensors]
        return _all_of(works, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> SoftRoceWork:
        return self._in_place("Broadcast", _one(tensors), None, opts.rootRank if opts is not None else 0)

    def barrier(self, opts: Any = None) -> SoftRoceWork:
        return self._in_place("AllReduce", torch.zeros(1), None)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SoftRoceWork:
        tensor = _one(inputs)
        (parts,) = outputs
        if len(parts) != self._size or any(part.numel() != tensor.numel() for part in parts):
            raise RuntimeError("softroce: allgather needs one output of the input's size per rank")
        gathered = tensor.new_empty((self._size, tensor.numel()))

        def copy_out() -> None:
            for part, row in zip(parts, gathered, strict=True):
                part.copy_(row.view(part.shape))

        return self._gather(gathered, tensor, list(parts), copy_out)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> SoftRoceWork:
        if output.numel() != self._size * tensor.numel() or not output.is_contiguous():
            raise RuntimeError("softroce: the output must be contiguous and hold every rank's input")
        return self._gather(output, _one([tensor]), [output], None)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SoftRoceWork:
        (parts,) = inputs
        flat = torch.cat([part.reshape(-1) for part in parts])
        return self.reduce_scatter_single(_one(outputs), flat, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> SoftRoceWork:
        if tensor.numel() != self._size * output.numel():
            raise RuntimeError("softroce: the input must hold one output's elements per rank")
        name = self._dtype(output, opts)
        source, target = self._scaled(tensor.detach(), opts).contiguous(), output.detach()
        result = _room_for(target)
        work = SoftRoceWork([output], (source, result), _copy_back(target, result))
        return self._start("ReduceScatter", output.numel(), name, 0, source, result, work)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    # -- point to point ---------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> SoftRoceWork:
        tensor = _one(tensors).detach().contiguous()
        return self._point_to_point(peer, tensor, SoftRoceWork(tensors, tensor), outbound=True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> SoftRoceWork:
        target = _one(tensors).detach()
        result = _room_for(target)
        work = SoftRoceWork(tensors, result, _copy_back(target, result))
        return self._point_to_point(peer, result, work, outbound=False)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SoftRoceWork:
        root = opts.rootRank if opts is not None else 0
        if self._rank != root:
            return self.send(inputs, root)
        (parts,) = outputs
        parts[root].copy_(_one(inputs))
        return _all_of([self.recv([part], peer) for peer, part in enumerate(parts) if peer != root], parts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SoftRoceWork:
        root = opts.rootRank if opts is not None else 0
        if self._rank != root:
            return self.recv(outputs, root)
        (parts,) = inputs
        _one(outputs).copy_(parts[root])
        return _all_of([self.send([part], peer) for peer, part in enumerate(parts) if peer != root], outputs)

    # -- end ----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self.communicator is not None:
            self.communicator.close()

    def abort(self) -> None:
        if self.communicator is not None:
            self.communicator.abort("the process group was aborted")

    # -- inside -------------------------------------------------------------------------------------------------

    def _dtype(self, tensor: Tensor, opts: Any) -> str:
        kind = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        averages = kind == dist.ReduceOp.AVG and tensor.is_floating_point()
        if kind != dist.ReduceOp.SUM and not averages:
            raise RuntimeError(f"softroce: only sums, and averages of floating point, are reduced, not {kind}")
        if tensor.dtype not in _DTYPES:
            raise RuntimeError(f"softroce: {tensor.dtype} cannot be reduced")
        return _DTYPES[tensor.dtype]

    def _scaled(self, tensor: Tensor, opts: Any) -> Tensor:
        """What this rank adds to a sum."""
        if getattr(opts, "reduceOp", dist.ReduceOp.SUM) != dist.ReduceOp.AVG:
            return tensor
        return tensor * torch.tensor(1 / self._size, dtype=tensor.dtype)

    def _in_place(self, kind: str, tensor: Tensor, opts: Any, root: int = 0) -> SoftRoceWork:
        reduces = kind == "AllReduce"
        name = self._dtype(tensor, opts) if reduces else "uint8"
        target = tensor.detach()
        data = (self._scaled(target, opts) if reduces else target).contiguous()
        work = SoftRoceWork([tensor], data, _copy_back(target, data))
        return self._start(kind, data.numel() if reduces else _bytes(data), name, root, data, data, work)

    def _gather(
        self, gathered: Tensor, tensor: Tensor, result: list[Tensor], copy_out: Callable[[], None] | None,
    ) -> SoftRoceWork:
        source = tensor.detach().contiguous()
        work = SoftRoceWork(result, (source, gathered), copy_out)
        return self._start("AllGather", _bytes(source), "uint8", 0, source, gathered, work)

    def _start(
        self, kind: str, count: int, dtype: str, root: int, source: Tensor, target: Tensor, work: SoftRoceWork,
    ) -> SoftRoceWork:
        """source, target: contiguous, kept alive by `work`; one tensor where it is in place."""
        if self.communicator is None:  # alone: the result is what was put in
            if source is not target:
                target.view(-1).copy_(source.view(-1))
            work.complete("")
        else:
            with self._order:
                self.communicator.start(kind, count, dtype, root, source.data_ptr(), target.data_ptr(), work)
        return work

    def _point_to_point(self, peer: int, data: Tensor, work: SoftRoceWork, *, outbound: bool) -> SoftRoceWork:
        if self.communicator is None or not 0 <= peer < self._size or peer == self._rank:
            raise RuntimeError(f"softroce: rank {self._rank} of {self._size} cannot exchange messages with {peer}")
        start = self.communicator.send if outbound else self.communicator.receive
        start(peer, data.data_ptr(), _bytes(data), work)
        return work


def _room_for(target: Tensor) -> Tensor:
    """Itself, or contiguous memory of its shape."""
    return target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)


def _copy_back(target: Tensor, result: Tensor) -> Callable[[], None] | None:
    if target.data_ptr() == result.data_ptr():
        return None

    def copy() -> None:
        target.copy_(result)

    return copy


def _all_of(works: list[SoftRoceWork], result: list[Tensor]) -> SoftRoceWork:
    """A work that is done when all of them are."""
    whole = SoftRoceWork(result)
    left, lock, errors = [len(works)], threading.Lock(), [""]

    def one(future: torch.futures.Future[list[Tensor]]) -> None:
        try:
            future.value()
        except RuntimeError as error:
            errors[0] = errors[0] or str(error).removeprefix("softroce: ")
        with lock:
            left[0] -= 1
            last = left[0] == 0
        if last:
            whole.complete(errors[0])

    for work in works:
        work.get_future().add_done_callback(one)
    if not works:
        whole.complete("")
    return whole


def create(store: Any, rank: int, size: int, timeout: timedelta) -> SoftRoceGroup:
    """register_backend's creator function."""
    try:
        return SoftRoceGroup(store, rank, size, timeout)
    except FlowcheckError as error:
        raise RuntimeError(f"softroce: {error}") from error


def calls(group: Any = None, since: int = 0) -> list[dict[str, Any]]:
    """Collectives that a group's communicator was asked for since its birth, in issue order and in the manifest's
    form (op, count, dtype, root), without the first `since`. Broadcast and AllGather are counted in bytes."""
    return _communicator(group).calls(since)


def describe(group: Any = None) -> dict[str, Any]:
    """What a job manifest says of a group's communicator: {"communicator": ..., "flows": [...]}, flows of this
    rank only; the union over ranks is the whole. group: default the default group. Raises RuntimeError."""
    return _communicator(group).describe()


def _communicator(group: Any) -> Communicator:
    found = group if group is not None else dist.group.WORLD
    if not isinstance(found, SoftRoceGroup) or found.communicator is None:
        raise RuntimeError("softroce: that is not a softroce group of two or more ranks")
    return found.communicator
