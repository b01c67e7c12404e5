"""The part of a model whose gradients Megatron-Core AllReduces: across several instances of its distributed optimizer,
or, for a log, of whole buckets where it has no distributed optimizer.

    part = Megatron(model, optimizer)       its DistributedDataParallel, and its optimizer

Parameters lie one after the other in flat buffers, which are cut into buckets. With instances, a bucket is
reduce-scattered inside an instance, in equal pieces that cut parameters anywhere. What a rank has of it then is
AllReduced with the ranks that have the same in the other instances: that carries the whole gradient of this rank's
piece. Each rank steps the pieces of parameters that lie in its piece of each bucket, in float32, with torch's own Adam
where neither Transformer Engine nor Apex is installed. So a part is what one rank steps: an entry is a piece of a
parameter, NAME[START:END] of its elements in row-major order, and the replica has what Megatron-Core calls main
parameters. Those of 16 bits are these, rounded. Without instances each rank steps all of them (megatron_pieces.py).

Megatron-Core has no hooks for what has to be known. So three methods of these very objects are heard: start_grad_sync
of each bucket group (in which order it was called), prepare_grads (after it nobody changes a gradient but the
optimizer) and step (what it clipped by, and whether it stepped). Each is called as before; `close` takes the listeners
away.

By megatron/core/distributed/param_and_grad_buffer.py, .../distributed_data_parallel.py, .../finalize_model_grads.py and
megatron/core/optimizer/distrib_optimizer.py, .../optimizer.py, .../clip_grads.py, which the functions below name. torch
and the standard library; Megatron-Core is not imported.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from flowcheck.control.tensors import DTYPES
from flowcheck.errors import UserError
from flowcheck.job.model import Bucket, BucketSlice
from flowcheck.trainer.describe.megatron_pieces import ALONE, WHERE, pieces_of, refuse
from flowcheck.trainer.describe.parts import Layout, Part

__all__ = ["Megatron", "place_of"]


class Megatron(Part):
    """What the instances, or all ranks, AllReduce together. model, optimizer, log: as of pieces_of."""

    by = "Megatron-Core's DistributedDataParallel"

    def __init__(self, model: Any, optimizer: Any, name: str = "", log: bool = False) -> None:
        self._pieces = pieces_of(model, optimizer, log)
        self._optimizer, self._ranks = self._pieces.stepping, self._pieces.ranks
        _check_settings(model)
        super().__init__(model.module, self._pieces.group, name or place_of(model, self._ranks))
        self._groups: list[Any] = list(model.bucket_groups)
        self._buffers: list[Any] = list(model.buffers)
        self._inside = [self._pieces.placed(one) for one in self._groups]  # of each: its parameters' pieces, and where
        self._dtype = _one_type([one.buckets[0].grad_data.dtype for one in self._groups])
        self._heard: list[int] = []  # numbers of bucket groups, as they were reduced
        self._order: list[int] = []  # of the iteration that is over
        self._known: list[int] = []  # of those that the job was described with; empty: it is not known
        self._versions: list[int] = []  # of the buffers, after the last AllReduce
        self._steps: list[tuple[float | None, float | None, bool]] = []  # factor, scale, skipped
        self._trouble = ""
        self._listeners: list[tuple[Any, str, Any]] = []
        for number, group in enumerate(self._groups):
            self._listen(group, "start_grad_sync", after=partial(Megatron._reduced, number=number))
        self._listen(self._optimizer, "prepare_grads", before=Megatron._ready)
        self._listen(optimizer, "step", before=Megatron._scale, after=Megatron._stepped)

    # -- what lies where --

    def _entries(self) -> dict[str, torch.Tensor]:
        return self._pieces.entries()

    def reduced(self) -> list[tuple[str, torch.Tensor]]:
        return list(self._pieces.named().items())

    def layout(self, names: Mapping[int, str]) -> Layout | None:
        if not self._order or len(set(self._order)) < len(self._order):
            return None
        buckets = [Bucket([BucketSlice(names[id(piece)], offset, piece.numel())
                           for piece, offset in self._inside[number] if id(piece) in names])
                   for number in self._order]
        counts = [self._groups[number].buckets[0].grad_data.numel() // self._ranks for number in self._order]
        return buckets, counts, self._dtype

    # -- at boundaries --

    def over(self) -> None:
        self._order, self._heard = self._heard, []

    def known(self, known: bool) -> None:
        self._known = self._order if known else []

    @property
    def changed(self) -> bool:
        return bool(self._known) and self._order != self._known

    def check(self) -> None:
        if self._trouble:
            raise UserError(self._trouble, where=WHERE, remedy="gradients as their AllReduce across instances leaves"
                            " them, once an iteration (docs/use/frameworks.md)")

    def said(self) -> tuple[float | None, float | None, bool] | None:
        steps, self._steps = self._steps, []
        if len(steps) > 1:
            raise UserError("the optimizer stepped more than once since the last call of step()", where=WHERE,
                            remedy="step() once per iteration, after optimizer.step()")
        return steps[0] if steps else None

    def close(self) -> None:
        for owner, name, listener in self._listeners:
            if owner.__dict__.get(name) is listener:
                delattr(owner, name)
        self._listeners = []

    # -- what is heard --

    def _listen(
        self, owner: Any, name: str, before: Callable[[Any], None] | None = None,
        after: Callable[[Any, Any], None] | None = None,
    ) -> None:
        """Hear a method of one object. It belongs to the job: what we make of it never becomes an error of its."""
        called, this = getattr(owner, name), weakref.ref(self)

        def tell(what: Callable[..., None] | None, *said: Any) -> None:
            part = this()
            if part is not None and what is not None:
                try:
                    what(part, *said)
                except Exception as error:
                    part._trouble = f"what {name} says is not understood: {type(error).__name__}: {error}"

        def listener(*arguments: Any, **named: Any) -> Any:
            tell(before)
            result = called(*arguments, **named)
            tell(after, result)
            return result

        setattr(owner, name, listener)
        self._listeners.append((owner, name, listener))

    def _reduced(self, _: Any, number: int) -> None:
        self._heard.append(number)
        self._versions = self._now()

    def _now(self) -> list[int]:
        """How often each buffer was written to, through any view of it."""
        return [int(buffer.grad_data._version) for buffer in self._buffers]

    def _ready(self) -> None:
        """The optimizer takes the gradients; from here on the changes are its own."""
        if not self._heard:
            self._trouble = "the optimizer steps with gradients that nobody has reduced since its last step"
        elif self._versions != self._now():
            self._trouble = "gradients were changed between their AllReduce across instances and the optimizer"

    def _scale(self) -> None:
        scaler = getattr(self._optimizer, "grad_scaler", None)
        self._steps = [*self._steps[-1:], (None, None if scaler is None else float(scaler.scale), False)]

    def _stepped(self, result: Any) -> None:
        """result: of MixedPrecisionOptimizer.step, ChainedOptimizer.step: (was there a step, norm, zeros)."""
        scale = self._steps[-1][1]
        if not isinstance(result, tuple) or len(result) != 3:
            self._trouble = "step() of its optimizer gives something else than is known"
            return
        success, norm, _ = result
        largest, factor = float(self._optimizer.config.clip_grad), None
        if success and largest > 0.0:
            # As clip_grad_by_total_norm_fp32 forms it, in double precision. The product with a float32 gradient has it
            # in float32. What is not below 1 multiplies nothing; a norm that is no number says so in the record.
            exact = largest / (float(norm) + 1.0e-6)
            factor = 1.0 if exact >= 1.0 else float(torch.tensor(exact, dtype=torch.float32))
        self._steps[-1] = factor, scale, not success


def _check_settings(model: Any) -> None:
    """Raises UserError for what changes gradients after their AllReduce across instances (finalize_model_grads), or
    puts them there otherwise."""
    config, remedy = model.config, f"leave it out; or {ALONE}"
    pipeline = model.pp_group[0] if isinstance(model.pp_group, list) else model.pp_group
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    across = model.tp_group.size() > 1 and (
        getattr(config, "sequence_parallel", False) or getattr(config, "qk_layernorm", False)
        or any(getattr(one, "average_gradients_across_tp_domain", False) for one in parameters)
    )
    shared = pipeline.size() > 1 and any(getattr(one, "shared_embedding", False) for one in parameters)
    for odd, what in (
        (bool(model.expert_parallel_bucket_groups), "has experts of their own data-parallel ranks: AllReduces of these"
         " and of the rest are on one communicator, and of two optimizers"),
        (getattr(config, "calculate_per_token_loss", False), "has calculate_per_token_loss: gradients are divided by"
         " the number of tokens after their AllReduce, and no record says that"),
        (across, "has tensor parallelism with sequence_parallel, qk_layernorm or averages: gradients of norms are added"
         " up across it after their AllReduce"),
        (shared, "shares an embedding with another pipeline stage, whose gradient is added after its AllReduce"),
        (max(getattr(config, "gtp_weight_remat_size", 1) or 1, getattr(config, "expert_gtp_weight_remat_size", 1) or 1)
         > 1, "has weights in shards of another kind (gtp_weight_remat_size)"),
    ):
        if odd:
            raise refuse(what, remedy)


def _one_type(found: list[torch.dtype]) -> str:
    names = sorted({DTYPES[one][0] for one in found})
    if len(names) != 1:
        raise refuse(f"reduces gradients in {', '.join(names) or 'no bucket'}",
                      "grad_reduce_in_fp32=True, or parameters of one type")
    return names[0]


def place_of(model: Any, ranks: int) -> str:
    """Where this rank is in all dimensions but that of whoever AllReduces with it, as parts have it of a mesh
    (parts.position). ranks: that share a bucket."""
    pipeline = model.pp_group[0] if isinstance(model.pp_group, list) else model.pp_group
    groups = (("pp", pipeline), ("tp", model.tp_group), ("shard", model.intra_dp_cp_group if ranks > 1 else None))
    return ".".join(f"{name}{group.rank()}" for name, group in groups if group is not None and group.size() > 1)
