"""The part of a model whose gradients Megatron-Core AllReduces across several instances of its distributed optimizer.

    if instances(model) > 1: part = Megatron(model, optimizer)      its DistributedDataParallel, and its optimizer
    Pieces(model, optimizer).load(values, state)                    of a version that was recovered
    torch_optimizer(optimizer)                                      what steps inside Megatron-Core's; or itself

Parameters lie one after the other in flat buffers, which are cut into buckets. A bucket is reduce-scattered inside an
instance, in equal pieces that cut parameters anywhere. What a rank has of it then is AllReduced with the ranks that
have the same in the other instances: that carries the whole gradient of this rank's piece. Each rank steps the pieces
of parameters that lie in its piece of each bucket, in float32, with torch's own Adam where neither Transformer Engine
nor Apex is installed. So a part is what one rank steps: an entry is a piece of a parameter, NAME[START:END] of its
elements in row-major order, and the replica has what Megatron-Core calls main parameters. Those of 16 bits are these,
rounded.

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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from flowcheck.control.tensors import DTYPES
from flowcheck.errors import UserError
from flowcheck.job.model import Bucket, BucketSlice
from flowcheck.trainer.describe.extra import is_extra
from flowcheck.trainer.describe.parts import Layout, Part

__all__ = ["Megatron", "Pieces", "instances", "torch_optimizer"]

WHERE = "Megatron-Core"
ALONE = "parameters alone, from its AllGather: live by [[follow]] of a node (docs/use/frameworks.md)"
_DDP = ("module", "config", "ddp_config", "bucket_groups", "expert_parallel_bucket_groups", "inter_dist_opt_group",
        "intra_dp_cp_group", "tp_group", "pp_group")
_OPTIMIZER = ("config", "grad_scaler", "model_chunks", "buffers", "gbuf_ranges", "model_float16_groups",
              "model_fp32_groups", "shard_fp32_groups", "shard_fp32_from_float16_groups")


def instances(model: object) -> int:
    """Of the distributed optimizer, by the settings of Megatron-Core's DistributedDataParallel; 0: it has none."""
    settings = getattr(model, "ddp_config", None)
    if not getattr(settings, "use_distributed_optimizer", False):
        return 0
    return int(getattr(settings, "num_distributed_optimizer_instances", 1))


def _members(optimizer: Any) -> list[Any]:
    """Of ChainedOptimizer; of another one itself."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return list(chained) if isinstance(chained, list | tuple) else [optimizer]


def torch_optimizer(optimizer: Any) -> Any:
    """What steps inside Megatron-Core's optimizer, and has its groups and states; otherwise what was given."""
    if not any(f"{base.__module__}.".startswith("megatron.core.optimizer.") for base in type(optimizer).__mro__):
        return optimizer
    members = _members(optimizer)
    inner = getattr(members[0], "optimizer", None) if len(members) == 1 else None
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def _refuse(what: str, remedy: str, where: str = "model") -> UserError:
    return UserError(what, where=where, remedy=remedy)


def _unknown(what: str) -> UserError:
    return _refuse(f"is another one than is known: {what}", "a version that docs/use/frameworks.md names", WHERE)


class Pieces:
    """What a rank steps of a model. model: Megatron-Core's DistributedDataParallel. optimizer: what
    get_megatron_optimizer gave, or the DistributedOptimizer itself; `distributed` is that."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        for attribute in _DDP:
            if not hasattr(model, attribute):
                raise _unknown(f"its DistributedDataParallel has no {attribute}")
        self.model, self.distributed = model, _distributed(model, optimizer)
        self._found = dict(self._find())
        if not self._found:
            raise _refuse("steps nothing on this rank: what it has of each bucket is padding",
                          "fewer ranks in an instance, or without pad_buckets_for_high_nccl_busbw", "optimizer")

    def _find(self) -> Iterator[tuple[int, tuple[torch.Tensor, int, int]]]:
        """id of a parameter -> the piece of it that this rank steps, its first element and the one past its last
        (DistributedOptimizer._build_model_and_main_param_groups)."""
        one = self.distributed
        for models, shards in ((one.model_float16_groups, one.shard_fp32_from_float16_groups),
                               (one.model_fp32_groups, one.shard_fp32_groups)):
            for parameters, pieces in zip(models, shards, strict=True):
                for parameter, piece in zip(parameters, pieces, strict=True):
                    if not isinstance(piece, torch.Tensor) or piece.dtype != torch.float32:
                        raise _refuse("steps parameters without float32 ones of Megatron-Core's own",
                                      "use_precision_aware_optimizer=False", "optimizer")
                    within = one._get_model_param_range_map(parameter)["param"]
                    if within.end - within.start != piece.numel():
                        raise _unknown("a piece of a parameter has another size than its range")
                    yield id(parameter), (piece, int(within.start), int(within.end))

    def of(self, parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The piece of a parameter, and its first element."""
        return self._found[id(parameter)][:2]

    def named(self) -> dict[str, torch.Tensor]:
        """The pieces, by their names."""
        return {name: value for name, value in self.entries().items() if id(value) in self._ids()}

    def _ids(self) -> set[int]:
        return {id(piece) for piece, _, _ in self._found.values()}

    def entries(self) -> dict[str, torch.Tensor]:
        """What this rank steps, and what nobody does, in the state_dict's order. None of what other ranks step."""
        out: dict[str, torch.Tensor] = {}
        for name, value in self.model.module.state_dict(keep_vars=True).items():
            if id(value) in self._found:
                piece, start, end = self._found[id(value)]
                out[f"{name}[{start}:{end}]"] = piece
            elif not is_extra(name) and not getattr(value, "requires_grad", False):
                out[name] = value
        return out

    def load(self, values: Mapping[str, torch.Tensor], state: dict[str, Any]) -> None:
        """values: of all entries. state: for torch's optimizer. All ranks of an instance call it: what they step is
        rounded into the model's parameters, and gathered."""
        with torch.no_grad():
            for name, value in self.entries().items():
                value.copy_(values[name])
            self.distributed.optimizer.load_state_dict(state)
            self.distributed._copy_main_params_to_model_params()
            self.model.start_param_sync(force_sync=True)


class Megatron(Part):
    """What the instances AllReduce together. model, optimizer: as of Pieces."""

    by = "Megatron-Core's DistributedDataParallel"

    def __init__(self, model: Any, optimizer: Any, name: str = "") -> None:
        self._pieces = Pieces(model, optimizer)
        self._optimizer = self._pieces.distributed
        _check_settings(model)
        super().__init__(model.module, model.inter_dist_opt_group, name or _place(model))
        self._ranks = model.intra_dp_cp_group.size()
        self._groups: list[Any] = list(model.bucket_groups)
        self._inside = [self._find(one) for one in self._groups]  # of each: its parameters' pieces, and where
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

    def _find(self, group: Any) -> list[tuple[torch.Tensor, int]]:
        """Pieces that lie in this rank's piece of a bucket, and where
        (DistributedOptimizer._build_model_gbuf_range)."""
        if len(group.buckets) != 1:
            raise _refuse(f"reduces {len(group.buckets)} buckets in one group of NCCL's calls, whose order is NCCL's",
                          f"parameters of one type, and no fp8 parameters; or {ALONE}")
        bucket = group.buckets[0]
        ranges, buffer = _ranges(self._optimizer, bucket)
        rank = buffer.data_parallel_group.rank()
        size, found = bucket.grad_data.element_size(), []
        mine = bucket.grad_data.data_ptr() + rank * (bucket.grad_data.numel() // self._ranks) * size
        for parameter, where in ranges.items():
            piece, start = self._pieces.of(parameter)
            gradient = getattr(parameter, "main_grad_copy_in_grad_buffer", None)
            gradient = parameter.main_grad if gradient is None else gradient
            offset = int(where["gbuf_local"].start)
            # By the sources they agree. A version in which they do not would put a gradient into another's place.
            if gradient.data_ptr() + start * size != mine + offset * size:
                raise _unknown("gradients lie elsewhere in its buffers")
            found.append((piece, offset))
        return sorted(found, key=lambda one: one[1])

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
        return [int(buffer.grad_data._version) for buffer in self._optimizer.buffers]

    def _ready(self) -> None:
        """The optimizer takes the gradients; from here on the changes are its own."""
        if not self._heard:
            self._trouble = "the optimizer steps with gradients that nobody has reduced since its last step"
        elif self._versions != self._now():
            self._trouble = "gradients were changed between their AllReduce across instances and the optimizer"

    def _scale(self) -> None:
        scaler = self._optimizer.grad_scaler
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


def _distributed(model: Any, optimizer: Any) -> Any:
    """The DistributedOptimizer that steps this model. Raises UserError, naming what cannot be followed."""
    members = _members(optimizer)
    if len(members) != 1:
        names = ", ".join(type(one).__name__ for one in members) or "none"
        raise _refuse(f"is a chain of {len(members)} optimizers ({names}), whose gradients one communicator carries",
                      f"a model without expert parallelism, and one optimizer; or {ALONE}", "optimizer")
    one = members[0]
    if isinstance(one, torch.optim.Optimizer) or not hasattr(one, "optimizer"):
        raise _refuse(f"is a {type(one).__name__}, and Megatron-Core's DistributedOptimizer steps this model",
                      "what get_megatron_optimizer gave", "optimizer")
    if getattr(one, "is_stub_optimizer", False):
        raise _refuse("steps nothing on this rank", "leave attach out where no parameter is trained", "optimizer")
    kind, package = type(one.optimizer), type(one.optimizer).__module__.partition(".")[0]
    if kind.__name__ == "FusedAdam" or package in ("transformer_engine", "apex"):
        raise _refuse(
            f"is stepped by {kind.__name__} of {package}, which rounds in an order of its own: no replica has that",
            "an environment without Transformer Engine and Apex, where Megatron-Core takes torch.optim.AdamW; or"
            f" {ALONE}", "optimizer",
        )
    if kind not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        raise _refuse(f"is stepped by {kind.__name__}, which is not followed",
                      f"torch.optim's Adam or AdamW, on the device of the parameters; or {ALONE}", "optimizer")
    for attribute in _OPTIMIZER:
        if not hasattr(one, attribute):
            raise _unknown(f"its DistributedOptimizer has no {attribute}")
    if len(one.model_chunks) != 1 or one.model_chunks[0] is not model:
        raise _refuse(f"steps {len(one.model_chunks)} parts of a model, or another one than is given",
                      f"one model chunk a rank, without an interleaved pipeline; or {ALONE}", "optimizer")
    return one


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
            raise _refuse(what, remedy)


def _ranges(optimizer: Any, bucket: Any) -> tuple[Mapping[Any, Any], Any]:
    """Parameters of which this rank steps a piece that lies in the bucket, and the bucket's buffer."""
    for buffer, ranges in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        for by_bucket in ranges.values():
            for one, found in zip(buffer.buckets, by_bucket, strict=True):
                if one is bucket:
                    return found["param_map"], buffer
    raise _unknown("a bucket is in no buffer of the optimizer")


def _one_type(found: list[torch.dtype]) -> str:
    names = sorted({DTYPES[one][0] for one in found})
    if len(names) != 1:
        raise _refuse(f"reduces gradients in {', '.join(names) or 'no bucket'}",
                      "grad_reduce_in_fp32=True, or parameters of one type")
    return names[0]


def _place(model: Any) -> str:
    """Where this rank is in all dimensions but that of the instances, as parts have it of a mesh (parts.position)."""
    pipeline = model.pp_group[0] if isinstance(model.pp_group, list) else model.pp_group
    groups = (("pp", pipeline), ("tp", model.tp_group), ("shard", model.intra_dp_cp_group))
    return ".".join(f"{name}{group.rank()}" for name, group in groups if group is not None and group.size() > 1)
