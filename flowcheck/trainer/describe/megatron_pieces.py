"""What one rank steps of a model of Megatron-Core's, by names: pieces of parameters, or all of them.

    pieces = pieces_of(model, optimizer, log)       Pieces, with its distributed optimizer; Mains, without
    pieces.entries(), pieces.named()                the state_dict's entries as they are stepped; those that are
    pieces.placed(group)                            where their gradients lie in what a rank AllReduces of a bucket
    pieces.to_model()                               main parameters have been changed: so are the model's, and gathered
    torch_optimizer(optimizer)                      what steps inside Megatron-Core's; or itself

`optimizer`: what get_megatron_optimizer gave, or the one optimizer in it. By megatron/core/optimizer/optimizer.py and
.../distrib_optimizer.py, which the functions below name. torch and the standard library; Megatron-Core is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flowcheck.errors import UserError
from flowcheck.trainer.describe.extra import is_extra

__all__ = ["ALONE", "WHERE", "Mains", "Pieces", "instances", "is_whole", "pieces_of", "refuse", "torch_optimizer",
           "unknown"]

WHERE = "Megatron-Core"
ALONE = "parameters alone, from its AllGather: live by [[follow]] of a node (docs/use/frameworks.md)"
_DDP = ("module", "config", "ddp_config", "bucket_groups", "expert_parallel_bucket_groups", "intra_dp_cp_group",
        "tp_group", "pp_group")
_OPTIMIZER = ("config", "grad_scaler", "model_chunks", "buffers", "gbuf_ranges", "model_float16_groups",
              "model_fp32_groups", "shard_fp32_groups", "shard_fp32_from_float16_groups")
_MIXED = ("float16_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups")


def instances(model: object) -> int:
    """Of the distributed optimizer, by the settings of Megatron-Core's DistributedDataParallel; 0: it has none."""
    settings = getattr(model, "ddp_config", None)
    if not getattr(settings, "use_distributed_optimizer", False):
        return 0
    return int(getattr(settings, "num_distributed_optimizer_instances", 1))


def is_whole(model: object) -> bool:
    """Is it Megatron-Core's, without a distributed optimizer?"""
    return getattr(model, "ddp_config", None) is not None and not instances(model)


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


def refuse(what: str, remedy: str, where: str = "model") -> UserError:
    return UserError(what, where=where, remedy=remedy)


def unknown(what: str) -> UserError:
    return refuse(f"is another one than is known: {what}", "a version that docs/use/frameworks.md names", WHERE)


class Pieces:
    """What a rank steps with the distributed optimizer. `stepping`: that optimizer. log: what steps inside it need not
    be torch's. group: of several instances the ranks that AllReduce it together; ranks: that share a bucket."""

    kind = "DistributedOptimizer"
    needs: tuple[str, ...] = _OPTIMIZER

    def __init__(self, model: Any, optimizer: Any, log: bool = False) -> None:
        for attribute in _DDP:
            if not hasattr(model, attribute):
                raise unknown(f"its DistributedDataParallel has no {attribute}")
        self.model = model
        self.stepping = self._one(optimizer, log)
        self._check()
        self._found = dict(self._find())
        if not self._found:
            raise refuse("steps nothing on this rank: what it has of each bucket is padding",
                         "fewer ranks in an instance, or without pad_buckets_for_high_nccl_busbw", "optimizer")

    def _check(self) -> None:
        """Raises UserError, as all of these."""
        one, model = self.stepping, self.model
        if len(one.model_chunks) != 1 or one.model_chunks[0] is not model:
            raise refuse(f"steps {len(one.model_chunks)} parts of a model, or another one than is given",
                         f"one model chunk a rank, without an interleaved pipeline; or {ALONE}", "optimizer")

    @property
    def group(self) -> Any:
        if not hasattr(self.model, "inter_dist_opt_group"):
            raise unknown("its DistributedDataParallel has no inter_dist_opt_group")
        return self.model.inter_dist_opt_group

    @property
    def ranks(self) -> int:
        return int(self.model.intra_dp_cp_group.size())

    def _one(self, optimizer: Any, log: bool) -> Any:
        """The optimizer that steps this model."""
        members = _members(optimizer)
        if len(members) != 1:
            names = ", ".join(type(one).__name__ for one in members) or "none"
            raise refuse(f"is a chain of {len(members)} optimizers ({names}), whose gradients one communicator carries",
                         f"a model without expert parallelism, and one optimizer; or {ALONE}", "optimizer")
        one = members[0]
        if isinstance(one, torch.optim.Optimizer) or not hasattr(one, "optimizer"):
            raise refuse(f"is a {type(one).__name__}, and Megatron-Core's {self.kind} steps this model",
                         "what get_megatron_optimizer gave", "optimizer")
        if getattr(one, "is_stub_optimizer", False):
            raise refuse("steps nothing on this rank", "leave attach out where no parameter is trained", "optimizer")
        if not log:
            _check_class(one.optimizer)
        for attribute in self.needs:
            if not hasattr(one, attribute):
                raise unknown(f"its {self.kind} has no {attribute}")
        return one

    def _find(self) -> Iterator[tuple[int, tuple[torch.Tensor, int, int]]]:
        """id of a parameter -> the piece of it that this rank steps, its first element and the one past its last
        (DistributedOptimizer._build_model_and_main_param_groups)."""
        one = self.stepping
        for models, shards in ((one.model_float16_groups, one.shard_fp32_from_float16_groups),
                               (one.model_fp32_groups, one.shard_fp32_groups)):
            for parameters, pieces in zip(models, shards, strict=True):
                for parameter, piece in zip(parameters, pieces, strict=True):
                    if not isinstance(piece, torch.Tensor) or piece.dtype != torch.float32:
                        raise refuse("steps parameters without float32 ones of Megatron-Core's own",
                                     "use_precision_aware_optimizer=False", "optimizer")
                    within = one._get_model_param_range_map(parameter)["param"]
                    if within.end - within.start != piece.numel():
                        raise unknown("a piece of a parameter has another size than its range")
                    yield id(parameter), (piece, int(within.start), int(within.end))

    def placed(self, group: Any) -> list[tuple[torch.Tensor, int]]:
        """Pieces that lie in what this rank AllReduces of a bucket, and where
        (DistributedOptimizer._build_model_gbuf_range)."""
        bucket = _bucket(group)
        ranges, buffer = _ranges(self.stepping, bucket)
        rank = buffer.data_parallel_group.rank()
        size, found = bucket.grad_data.element_size(), []
        mine = bucket.grad_data.data_ptr() + rank * (bucket.grad_data.numel() // self.ranks) * size
        for parameter, where in ranges.items():
            piece, start, _ = self._found[id(parameter)]
            offset = int(where["gbuf_local"].start)
            # By the sources they agree. A version in which they do not would put a gradient into another's place.
            if _gradient(parameter).data_ptr() + start * size != mine + offset * size:
                raise unknown("gradients lie elsewhere in its buffers")
            found.append((piece, offset))
        return sorted(found, key=lambda one: one[1])

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
                out[self._name(name, start, end)] = piece
            elif not is_extra(name) and not getattr(value, "requires_grad", False):
                out[name] = value
        return out

    def _name(self, name: str, start: int, end: int) -> str:
        return f"{name}[{start}:{end}]"

    def load(self, values: Mapping[str, torch.Tensor], state: dict[str, Any]) -> None:
        """values: of all entries. state: for torch's optimizer. All ranks of an instance call it, as `to_model`."""
        with torch.no_grad():
            for name, value in self.entries().items():
                value.copy_(values[name])
            self.stepping.optimizer.load_state_dict(state)
            self.to_model()

    def to_model(self) -> None:
        """What was put into main parameters is rounded into the model's, and gathered."""
        with torch.no_grad():
            self.stepping._copy_main_params_to_model_params()
            self.model.start_param_sync(force_sync=True)


class Mains(Pieces):
    """All that every rank steps without a distributed optimizer: the float32 parameter of each that has 16 bits
    (Float16OptimizerWithFloat16Params), and those of the model (FP32Optimizer)."""

    kind = "optimizer"
    needs = ("config",)

    def _check(self) -> None:
        self._mixed = hasattr(self.stepping, _MIXED[0])
        for attribute in _MIXED[1:] if self._mixed else ():
            if not hasattr(self.stepping, attribute):
                raise unknown(f"its optimizer has no {attribute}")

    @property
    def group(self) -> Any:
        return self.model.bucket_groups[0].data_parallel_group

    @property
    def ranks(self) -> int:
        return 1

    def _find(self) -> Iterator[tuple[int, tuple[torch.Tensor, int, int]]]:
        one, found = self.stepping, dict[int, torch.Tensor]()
        if self._mixed:
            for parameters, mains in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
                found |= {id(parameter): main for parameter, main in zip(parameters, mains, strict=True)}
            kept = [parameter for parameters in one.fp32_from_fp32_groups for parameter in parameters]
        else:
            kept = [parameter for group in one.optimizer.param_groups for parameter in group["params"]]
        found |= {id(parameter): parameter for parameter in kept}
        stepped = {id(value) for group in one.optimizer.param_groups for value in group["params"]}
        for name, parameter in self.model.module.named_parameters():
            if not parameter.requires_grad:
                continue
            main = found.get(id(parameter))
            if main is None or id(main) not in stepped or main.dtype != torch.float32:
                raise refuse(f"steps no float32 parameter of {name}", "one optimizer of Megatron-Core's for all that is"
                             " trained, with bf16 or fp16 as the parameters have it", "optimizer")
            if main.shape != parameter.shape:
                raise unknown("a main parameter has another shape")
            yield id(parameter), (main, 0, main.numel())

    def placed(self, group: Any) -> list[tuple[torch.Tensor, int]]:
        bucket, found = _bucket(group), []
        size, total = bucket.grad_data.element_size(), bucket.grad_data.numel()
        for parameter in bucket.params_list:
            gradient = _gradient(parameter)
            offset, odd = divmod(gradient.data_ptr() - bucket.grad_data.data_ptr(), size)
            if odd or not 0 <= offset <= total - parameter.numel() or not gradient.is_contiguous() or (
                    gradient.dtype != bucket.grad_data.dtype):
                raise unknown("gradients lie elsewhere in its buffers")
            found.append((self._found[id(parameter)][0], offset))
        return sorted(found, key=lambda one: one[1])

    def _name(self, name: str, start: int, end: int) -> str:
        return name

    def to_model(self) -> None:
        if self._mixed:
            with torch.no_grad():
                self.stepping._copy_main_params_to_model_params()


def pieces_of(model: Any, optimizer: Any, log: bool = False) -> Pieces:
    """Raises UserError, naming what cannot be followed."""
    return Mains(model, optimizer, log) if is_whole(model) else Pieces(model, optimizer, log)


def _check_class(inner: Any) -> None:
    """Of what steps inside. Raises UserError: no replica steps so."""
    kind, package = type(inner), type(inner).__module__.partition(".")[0]
    if kind.__name__ == "FusedAdam" or package in ("transformer_engine", "apex"):
        raise refuse(
            f"is stepped by {kind.__name__} of {package}, which rounds in an order of its own: no replica has that",
            "an environment without Transformer Engine and Apex, where Megatron-Core takes torch.optim.AdamW; or"
            f' attach(kind="log") (docs/use/log.md); or {ALONE}', "optimizer",
        )
    if kind not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        raise refuse(f"is stepped by {kind.__name__}, which is not followed",
                     "torch.optim's Adam or AdamW, on the device of the parameters; or"
                     f' attach(kind="log") (docs/use/log.md); or {ALONE}', "optimizer")


def _bucket(group: Any) -> Any:
    """The one that a bucket group has."""
    if len(group.buckets) != 1:
        raise refuse(f"reduces {len(group.buckets)} buckets in one group of NCCL's calls, whose order is NCCL's",
                     f"parameters of one type, and no fp8 parameters; or {ALONE}")
    return group.buckets[0]


def _gradient(parameter: Any) -> torch.Tensor:
    """Where it is reduced."""
    copy = getattr(parameter, "main_grad_copy_in_grad_buffer", None)
    gradient: torch.Tensor = parameter.main_grad if copy is None else copy
    return gradient


def _ranges(optimizer: Any, bucket: Any) -> tuple[Mapping[Any, Any], Any]:
    """Parameters of which this rank steps a piece that lies in the bucket, and the bucket's buffer."""
    for buffer, ranges in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        for by_bucket in ranges.values():
            for one, found in zip(buffer.buckets, by_bucket, strict=True):
                if one is bucket:
                    return found["param_map"], buffer
    raise unknown("a bucket is in no buffer of the optimizer")
