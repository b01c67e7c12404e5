"""What one rank steps of a model of Megatron-Core's, by names: pieces of parameters, or all of them.

    pieces = pieces_of(model, optimizer, log)       Pieces, with its distributed optimizer; Mains, without
    pieces.entries(), pieces.named()                the state_dict's entries as they are stepped; those that are
    pieces.placed(group)                            where their gradients lie in what a rank AllReduces of a bucket
    pieces.to_model()                               main parameters have been changed: so are the model's, and gathered
    torch_optimizers(optimizer)                     what steps inside Megatron-Core's; None: it is another's

`model`: what get_megatron_optimizer was given, or a list of these: the chunks of an interleaved pipeline.
`optimizer`: what that gave, or the one optimizer in it. By megatron/core/optimizer/optimizer.py and
.../distrib_optimizer.py, which the functions below name. torch and the standard library; Megatron-Core is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flowcheck.errors import UserError
from flowcheck.trainer.describe.extra import is_extra

__all__ = ["ALONE", "WHERE", "Mains", "Pieces", "instances", "is_megatron", "is_whole", "pieces_of", "refuse",
           "torch_optimizers", "unknown"]

WHERE = "Megatron-Core"
ALONE = "parameters alone, from its AllGather: live by [[follow]] of a node (docs/use/frameworks.md)"
_DDP = ("module", "config", "ddp_config", "bucket_groups", "expert_parallel_bucket_groups", "intra_dp_cp_group",
        "tp_group", "pp_group")
_OPTIMIZER = ("config", "grad_scaler", "model_chunks", "buffers", "gbuf_ranges", "model_float16_groups",
              "model_fp32_groups", "shard_fp32_groups", "shard_fp32_from_float16_groups")
_MIXED = ("float16_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups")


def _chunks(model: Any) -> list[Any]:
    return list(model) if isinstance(model, list | tuple) else [model]


def is_megatron(model: object) -> bool:
    """Is it Megatron-Core's DistributedDataParallel, or a list of these?"""
    return bool(chunks := _chunks(model)) and all(getattr(one, "ddp_config", None) is not None for one in chunks)


def instances(model: object) -> int:
    """Of the distributed optimizer, by the settings of Megatron-Core's DistributedDataParallel; 0: it has none."""
    settings = getattr(_chunks(model)[0], "ddp_config", None) if is_megatron(model) else None
    if not getattr(settings, "use_distributed_optimizer", False):
        return 0
    return int(getattr(settings, "num_distributed_optimizer_instances", 1))


def is_whole(model: object) -> bool:
    """Is it Megatron-Core's, without a distributed optimizer?"""
    return is_megatron(model) and not instances(model)


def _members(optimizer: Any) -> list[Any]:
    """Of ChainedOptimizer those that step something on this rank; of another one itself."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [one for one in (chained if isinstance(chained, list | tuple) else [optimizer])
            if not getattr(one, "is_stub_optimizer", False)]


def torch_optimizers(optimizer: Any) -> list[Any] | None:
    """What steps inside Megatron-Core's optimizer, and has its groups and states."""
    if not any(f"{base.__module__}.".startswith("megatron.core.optimizer.") for base in type(optimizer).__mro__):
        return None
    inner = [getattr(one, "optimizer", None) for one in _members(optimizer)]
    return inner if inner and all(isinstance(one, torch.optim.Optimizer) for one in inner) else None


def refuse(what: str, remedy: str, where: str = "model") -> UserError:
    return UserError(what, where=where, remedy=remedy)


def unknown(what: str) -> UserError:
    return refuse(f"is another one than is known: {what}", "a version that docs/use/frameworks.md names", WHERE)


class Pieces:
    """What a rank steps with the distributed optimizer. module: that has all of the model, of several chunks by the
    names chunk0, chunk1, ... steps: the optimizers of Megatron-Core's that step it. log: what steps inside these need
    not be torch's. alone: no other rank has the same, as far as is known. group: of several instances the ranks that
    AllReduce it together; ranks: that share a bucket."""

    kind = "DistributedOptimizer"
    needs: tuple[str, ...] = _OPTIMIZER

    def __init__(self, model: Any, optimizer: Any, log: bool = False) -> None:
        self.models = _chunks(model)
        for one in self.models:
            for attribute in _DDP:
                if not hasattr(one, attribute):
                    raise unknown(f"its DistributedDataParallel has no {attribute}")
        self.module = self.models[0].module if len(self.models) == 1 else torch.nn.ModuleDict(
            {f"chunk{at}": one.module for at, one in enumerate(self.models)})
        self.steps = [self._one(one, log) for one in self._some(optimizer)]
        self._check()
        self._found = dict(self._find())
        if not self._found:
            raise refuse("steps nothing on this rank: what it has of each bucket is padding",
                         "fewer ranks in an instance, or without pad_buckets_for_high_nccl_busbw", "optimizer")

    def _check(self) -> None:
        """Raises UserError, as all of these."""
        stepped = [chunk for one in self.steps for chunk in one.model_chunks]
        for these, those in ((stepped, self.models), (self.models, stepped)):
            if not all(any(chunk is one for one in those) for chunk in these):
                raise refuse(f"steps {len(set(map(id, stepped)))} chunks of a model, and {len(self.models)} are given,"
                             " or others", "all chunks of the model, as get_megatron_optimizer was given them",
                             "optimizer")

    @property
    def stepping(self) -> Any:
        """Raises UserError: there are several."""
        if len(self.steps) != 1 or len(self.models) != 1:
            names = ", ".join(type(one).__name__ for one in self.steps)
            raise refuse(f"is a chain of {len(self.steps)} optimizers ({names}) over {len(self.models)} model chunks,"
                         " whose gradients one communicator carries", "ranks that send their gradients,"
                         f' attach(source="feed") (docs/use/feed.md); or {ALONE}', "optimizer")
        return self.steps[0]

    @property
    def alone(self) -> bool:
        return instances(self.models) == 1 or len(self.models) > 1 or any(
            one.expert_parallel_bucket_groups for one in self.models)

    @property
    def group(self) -> Any:
        if not hasattr(self.models[0], "inter_dist_opt_group"):
            raise unknown("its DistributedDataParallel has no inter_dist_opt_group")
        return self.models[0].inter_dist_opt_group

    @property
    def ranks(self) -> int:
        return int(self.models[0].intra_dp_cp_group.size())

    def _some(self, optimizer: Any) -> list[Any]:
        """The optimizers that step this model."""
        if found := _members(optimizer):
            return found
        raise refuse("steps nothing on this rank", "leave attach out where no parameter is trained", "optimizer")

    def _one(self, one: Any, log: bool) -> Any:
        if isinstance(one, torch.optim.Optimizer) or not hasattr(one, "optimizer"):
            raise refuse(f"is a {type(one).__name__}, and Megatron-Core's {self.kind} steps this model",
                         "what get_megatron_optimizer gave", "optimizer")
        if not log:
            _check_class(one.optimizer)
        for attribute in self.needs:
            if not hasattr(one, attribute):
                raise unknown(f"its {self.kind} has no {attribute}")
        return one

    def _find(self) -> Iterator[tuple[int, tuple[torch.Tensor, int, int]]]:
        """id of a parameter -> the piece of it that this rank steps, its first element and the one past its last
        (DistributedOptimizer._build_model_and_main_param_groups)."""
        for one, models, shards in (
            (step, *both) for step in self.steps
            for both in ((step.model_float16_groups, step.shard_fp32_from_float16_groups),
                         (step.model_fp32_groups, step.shard_fp32_groups))
        ):
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
        for name, value in self.module.state_dict(keep_vars=True).items():
            if id(value) in self._found:
                piece, start, end = self._found[id(value)]
                out[self._name(name, start, end)] = piece
            elif not is_extra(name) and not getattr(value, "requires_grad", False):
                out[name] = value
        return out

    def _name(self, name: str, start: int, end: int) -> str:
        return f"{name}[{start}:{end}]"

    def put(self, values: Mapping[str, torch.Tensor]) -> None:
        """values: of all entries. After it `to_model` is due."""
        with torch.no_grad():
            for name, value in self.entries().items():
                value.copy_(values[name])

    def to_model(self) -> None:
        """What was put into main parameters is rounded into the model's, and gathered. All ranks of an instance call
        it."""
        with torch.no_grad():
            for one in self.steps:
                one._copy_main_params_to_model_params()
            for chunk in self.models:
                chunk.start_param_sync(force_sync=True)


class Mains(Pieces):
    """All that every rank steps without a distributed optimizer: the float32 parameter of each that has 16 bits
    (Float16OptimizerWithFloat16Params), and those of the model (FP32Optimizer)."""

    kind = "optimizer"
    needs = ("config",)

    def _check(self) -> None:
        for one in self.steps:
            for attribute in _MIXED[1:] if hasattr(one, _MIXED[0]) else ():
                if not hasattr(one, attribute):
                    raise unknown(f"its optimizer has no {attribute}")

    @property
    def group(self) -> Any:
        return self.models[0].bucket_groups[0].data_parallel_group

    @property
    def ranks(self) -> int:
        return 1

    def _mains(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter of the model, and the one that is stepped."""
        for one in self.steps:
            if not hasattr(one, _MIXED[0]):
                yield from ((parameter,) * 2 for group in one.optimizer.param_groups for parameter in group["params"])
                continue
            for parameters, mains in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
                yield from zip(parameters, mains, strict=True)
            yield from ((parameter,) * 2 for parameters in one.fp32_from_fp32_groups for parameter in parameters)

    def _find(self) -> Iterator[tuple[int, tuple[torch.Tensor, int, int]]]:
        found = {id(parameter): main for parameter, main in self._mains()}
        stepped = {id(value) for one in self.steps for group in one.optimizer.param_groups for value in group["params"]}
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            main = found.get(id(parameter))
            if main is None or id(main) not in stepped or main.dtype != torch.float32:
                raise refuse(f"steps no float32 parameter of {name}", "Megatron-Core's optimizers for all that is"
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
        with torch.no_grad():
            for one in self.steps:
                if hasattr(one, _MIXED[0]):
                    one._copy_main_params_to_model_params()


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
