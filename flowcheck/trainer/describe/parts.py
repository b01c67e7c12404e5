"""What of a model each communicator reduces: one part of a rank's state for each, under its name.

    parts = parts_of(model)                 a DDP model, one of fully_shard's over replicas and shards, or several
    part.group, part.name                   the communicator's process group; where it is in the mesh of devices
    part.state_dict(keep_vars=True)         entries; parameters as the optimizer has them
    part.layout(names)                      what lies where in the buckets of the iteration that is over
    part.over(), part.check()               at each boundary; before each optimizer step

A node follows each part as a group of its own. An optimized parameter is in exactly one part: that whose
communicator carries its whole gradient. A part's name says where its ranks are in the mesh: coordinates in all
dimensions but the one that is reduced over ("shard1", "pp0.shard1"), or what the script calls it.

torch and the standard library. Raises UserError for what cannot be followed; attachment.py catches it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flowcheck.control.tensors import DTYPES
from flowcheck.errors import UserError
from flowcheck.job.model import Bucket, BucketSlice
from flowcheck.trainer.describe.extra import is_extra
from flowcheck.trainer.describe.hearing import own_hooks_heard

__all__ = [
    "Ddp", "Layout", "Own", "Part", "Reduced", "after_backward", "bucket_layout", "chunks_of", "local", "position",
    "stepped",
]

ASK_EVERY = 16  # boundaries: between two questions after a communication hook, if none was heard of
Layout = tuple[list[Bucket], list[int], str]  # buckets, their element counts, dtype on the wire


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it: of a DTensor its shard, else itself. Not for gradients to flow through."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def chunks_of(model: Any) -> Any:
    """What has the entries of all, where a list of modules is given: the chunks of a pipeline on one rank."""
    if isinstance(model, list) and all(isinstance(one, torch.nn.Module) for one in model):
        return torch.nn.ModuleList(model)
    return model


def stepped(value: torch.Tensor) -> bool:
    """Does an optimizer that has it step it? A tensor that is not a Parameter is somebody's main parameter, who sets
    its gradient."""
    return value.requires_grad or not isinstance(value, torch.nn.Parameter)


class Part(ABC):
    """name: among the parts of a rank, "" for the only one. group: ranks that reduce it together. others: ids of
    parameters that another part has. by: what reduces them, for a message. divisor: what the wire's sums are divided
    by before the optimizer has them; known with the layout. adds_up: a backward pass adds to what the one before has
    reduced, and reduces the sum: of several in an iteration, the last one's reduction carries its gradients."""

    by = "DDP"
    adds_up = False

    def __init__(self, module: torch.nn.Module, group: dist.ProcessGroup, name: str = "") -> None:
        self.module, self.group, self.name = module, group, name
        self.others: frozenset[int] = frozenset()
        self.divisor = 1

    def _entries(self) -> dict[str, torch.Tensor]:
        """All that may be this part's, in the state_dict's order."""
        return {name: value for name, value in self.module.state_dict(keep_vars=True).items() if not is_extra(name)}

    def extra(self) -> dict[str, Any]:
        """What its modules give of themselves besides (extra.py), by their names in the state_dict."""
        return {name: value for name, value in self.module.state_dict(keep_vars=True).items() if is_extra(name)}

    def state_dict(self, keep_vars: bool = False) -> dict[str, torch.Tensor]:
        """keep_vars: parameters as the optimizer has them, else what this rank holds of each."""
        held = {name: value for name, value in self._entries().items() if id(value) not in self.others}
        return held if keep_vars else {name: local(value).detach() for name, value in held.items()}

    @abstractmethod
    def reduced(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters whose gradients are reduced here."""

    @abstractmethod
    def layout(self, names: Mapping[int, str]) -> Layout | None:
        """As they are now; None: what the iteration reduced were no buckets."""

    def over(self) -> None:  # noqa: B027
        """An iteration is over."""

    def known(self, known: bool) -> None:  # noqa: B027
        """The job is described with what the iteration that is over did; or is not any more."""

    @property
    def changed(self) -> bool:
        """Did that iteration reduce otherwise than the job is described, although its calls look alike?"""
        return False

    def check(self) -> None:  # noqa: B027
        """Raises UserError if gradients are not what the wire carried."""

    def said(self) -> tuple[float | None, float | None, bool] | None:
        """What it has heard of the optimizer's step in the iteration that is over, which is forgotten: the factor that
        gradients were multiplied with, the loss scale, was the step skipped. None: the script says that."""
        return None

    def gradients(self) -> list[torch.Tensor]:
        """Parameters whose gradients the optimizer finds as the last backward pass has reduced them, if nobody changes
        them; [] where this part hears of changes itself, or nobody says when they have been reduced."""
        return []

    def listen(self, call: Callable[[bool], None]) -> None:  # noqa: B027
        """From now on, once the job is known: call(has it reduced gradients) when a backward pass is over."""

    def close(self) -> None:  # noqa: B027
        """Let go of the model."""


def after_backward(parameter: torch.Tensor, call: Callable[[], None]) -> Callable[[], None]:
    """Call when a backward pass is over in which this parameter gets its gradient. DDP and fully_shard end their
    reductions in callbacks of the same kind, which they have queued by then: so this one queues another, which comes
    after them. Returns how to stop."""
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def came(_: torch.Tensor) -> None:
        queue(lambda: queue(call))

    return parameter.register_post_accumulate_grad_hook(came).remove


class Ddp(Part):
    """All that one DistributedDataParallel object reduces."""

    adds_up = True

    def __init__(self, model: DistributedDataParallel, name: str = "") -> None:
        super().__init__(model.module, model.process_group, name)
        self._model = model
        self._stops: list[Callable[[], None]] = []
        self._reducer = model.reducer
        self._hooks_heard = self._unasked = False
        self._boundary = 0
        self.check()

    def check(self) -> None:
        model = self._model
        if (
            model.reducer is not self._reducer or model.find_unused_parameters
            or getattr(model, "mixed_precision", None) is not None or getattr(model, "_comm_hooks", ())
            or getattr(model, "_use_python_reducer", False) or getattr(model, "_delay_all_reduce_params", ())
            or (model.modules_buffers and not model.broadcast_buffers)
        ):
            self._refuse()

    def _refuse(self) -> None:
        model = self._model
        hooks = [f"{hook.__module__}.{hook.__qualname__}" for hook, _ in getattr(model, "_comm_hooks", ())]
        for odd, what in (
            (getattr(model, "mixed_precision", None) is not None, "DDP's own mixed precision"),  # which is a hook, too
            (bool(hooks), f"a communication hook ({', '.join(hooks)}): what it sends is its own"),
            (bool(getattr(model, "_use_python_reducer", False)), "torch.compile's python_reducer, which has buckets of"
             " its own"),
            (bool(model.find_unused_parameters), "find_unused_parameters: which gradients are absent is not said"),
            (bool(getattr(model, "_delay_all_reduce_params", ())), "delay_all_reduce_named_params"),
            (model.reducer is not self._reducer, "another reducer than when it was attached"),
            # Called forward_sync_buffers as well, from torch 2.13 on.
            (not model.broadcast_buffers and bool(model.modules_buffers), "broadcast_buffers=False with buffers: each"
             " rank has its own, and versions have those of rank 0"),
        ):
            if odd:
                raise UserError(f"uses {what}", where="DistributedDataParallel", remedy="leave it out for this job")

    def over(self) -> None:
        """Communication hooks of torch's own are in no list, and asking for them takes longer than all other looks: it
        is done where one was heard of, and now and then."""
        self._boundary += 1
        if self._hooks_heard and self._boundary % ASK_EVERY and not self._unasked:
            return
        self._unasked = False
        if hook := self._model._get_ddp_logging_data().get("comm_hook", ""):
            raise UserError(f"uses a communication hook ({hook}): what it sends is its own",
                            where="DistributedDataParallel", remedy="leave it out for this job")

    def gradients(self) -> list[torch.Tensor]:
        return [value for _, value in self.reduced() if id(value) not in self.others]

    def listen(self, call: Callable[[bool], None]) -> None:
        """The parameter whose gradient came last when DDP dealt its buckets: where activations are recomputed, a part
        of the backward pass has callbacks of its own."""
        self.close()
        if (stop := own_hooks_heard(self._own_hook)) is not None:
            self._stops.append(stop)
        self._hooks_heard = bool(self._stops)
        if mine := self.gradients():
            last = self._model.reducer._get_zeros_like_grad_buckets()[-1].parameters()[-1]
            found = next((one for one in mine if one is last), mine[0])
            self._stops.append(after_backward(found, lambda: call(bool(self._model.require_forward_param_sync))))

    def _own_hook(self, reducer: Any) -> None:
        self._unasked |= reducer is self._reducer

    def close(self) -> None:
        while self._stops:
            self._stops.pop()()

    def reduced(self) -> list[tuple[str, torch.Tensor]]:
        ignored = set(getattr(self._model, "parameters_to_ignore", ()))
        return [(name, value) for name, value in self.module.named_parameters()
                if value.requires_grad and name not in ignored]

    def layout(self, names: Mapping[int, str]) -> Layout:
        return bucket_layout(self._model, names)


@dataclass(frozen=True)
class Reduced:
    """Parameters whose gradients the script itself AllReduces before each optimizer step, after whatever else reduces
    them: each alone, in this order, once an iteration, on a process group of their own. What that AllReduce leaves is
    what the optimizer steps with.

    named: the parameters, by names that are the same on all ranks of the group. group: that process group.
    """

    named: Mapping[str, torch.nn.Parameter]
    group: dist.ProcessGroup


class Own(Part):
    """What a script reduces itself."""

    by = "the script"

    def __init__(self, given: Reduced, name: str) -> None:
        if not given.named or not all(isinstance(one, torch.nn.Parameter) for one in given.named.values()):
            raise UserError("names no parameters", where="flowcheck.Reduced", remedy="{name: parameter}, one at least")
        super().__init__(torch.nn.Module(), given.group, name)
        self._named = dict(given.named)

    def _entries(self) -> dict[str, torch.Tensor]:
        return dict(self._named)

    def reduced(self) -> list[tuple[str, torch.Tensor]]:
        return list(self._named.items())

    def layout(self, names: Mapping[int, str]) -> Layout:
        counts = [one.numel() for one in self._named.values()]
        buckets = [Bucket([BucketSlice(name, 0, count)]) for name, count in zip(self._named, counts, strict=True)]
        dtypes = {DTYPES[one.dtype][0] for one in self._named.values()}
        if len(dtypes) > 1:
            raise UserError(f"reduces gradients in {', '.join(sorted(dtypes))}", where="flowcheck.Reduced",
                            remedy="one of them for each type")
        return buckets, counts, dtypes.pop()


def bucket_layout(model: DistributedDataParallel, names: Mapping[int, str]) -> Layout:
    """(buckets as they are now, their element counts, dtype). Asked from the reducer, not computed again."""
    buckets, counts, dtypes = [], [], set()
    for found in model.reducer._get_zeros_like_grad_buckets():
        slices, offset = [], 0
        for parameter in found.parameters():
            if id(parameter) in names:  # others are reduced and never stepped: padding to a replica
                slices.append(BucketSlice(names[id(parameter)], offset, parameter.numel()))
            offset += parameter.numel()
        buckets.append(Bucket(slices))
        counts.append(found.buffer().numel())
        dtypes.add(DTYPES[found.buffer().dtype][0])
        if offset != counts[-1]:
            raise UserError(f"bucket {found.index()} has {counts[-1]} elements, its tensors {offset}", where="DDP",
                            remedy="report it")
    if len(dtypes) != 1:
        raise UserError(f"reduces gradients in {', '.join(sorted(dtypes))}", where="DDP",
                        remedy="one type for all parameters")
    return buckets, counts, dtypes.pop()


def position(mesh: Any, reduced: int) -> str:
    """Where this rank's group is in a DeviceMesh whose dimension `reduced` it reduces over: the other dimensions of
    more than one rank with this rank's coordinates, those of the mesh that it was cut out of first. "": it is the only
    one, or the mesh has no names."""
    words: list[str] = []
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    if root is not mesh and root.mesh_dim_names:
        inside = torch.isin(root.mesh, mesh.mesh).nonzero()
        for number, name in enumerate(root.mesh_dim_names):
            places: Sequence[int] = inside[:, number].unique().tolist()
            if root.size(number) > 1 and len(places) == 1:
                words.append(f"{name}{places[0]}")
    coordinates = mesh.get_coordinate()
    for number, name in enumerate(mesh.mesh_dim_names or ()):
        if number != reduced and mesh.size(number) > 1 and coordinates is not None:
            words.append(f"{name}{coordinates[number]}")
    return ".".join(words)
