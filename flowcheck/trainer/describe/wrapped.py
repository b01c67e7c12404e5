"""What a script gives to `attach` as its model: the parts that are followed, or a refusal that knows its name.

    parts = parts_of(model, optimizer)          DistributedDataParallel; fully_shard over replicas and shards; several;
                                                Megatron-Core's of several optimizer instances, with its optimizer
    refuse_optimizer(optimizer)                 one that holds a part of its state alone

Several: a dict of them by name, or a list, whose members have a mesh of devices each. FSDP, ZeRO-3 and the distributed
optimizers put no whole gradient on the wire. DeepSpeed's ZeRO-1 and ZeRO-2 do (deepspeed.runtime.zero.stage_1_and_2,
allreduce_and_scatter, as use_multi_rank_bucket_allreduce is by default), and nobody reads these buckets yet. Each is
refused by its name, with what serves it. Classes of packages that are not here are known by their module's name.

torch and the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from flowcheck.errors import UserError
from flowcheck.job.model import LOG, REPLICA
from flowcheck.trainer.describe.hsdp import hsdp_parts, is_sharded
from flowcheck.trainer.describe.megatron import Megatron
from flowcheck.trainer.describe.megatron_pieces import instances, is_megatron, is_whole
from flowcheck.trainer.describe.optimizers import members, optimizer_of
from flowcheck.trainer.describe.parts import Ddp, Own, Part, Reduced, position

__all__ = ["parts_of", "refuse_model", "refuse_optimizer"]

SERVED = ("parameters from its AllGather, live by [[follow]] of a node or offline by flowcheck replay"
          " (docs/use/qualify.md); or")
LIVE = "DistributedDataParallel, or fully_shard over a mesh of replicas and shards, to be followed live"
SEVERAL = ("num_distributed_optimizer_instances of 2 or more, with its DistributedOptimizer;"
           ' or attach(kind="log") without a distributed optimizer (docs/use/log.md); or ')
MEGATRON = "is Megatron-Core's own DistributedDataParallel, which reduces its buffers itself"
# Module (it and what is in it), class, what it is.
MODELS = (
    ("deepspeed", "DeepSpeedEngine", "is DeepSpeed's engine (ZeRO-1, 2 or 3 as its configuration says)"),
    ("deepspeed", "PipelineEngine", "is DeepSpeed's pipeline engine"),
    ("megatron.core.distributed", "DistributedDataParallel", MEGATRON),
    ("fairscale.nn", "FullyShardedDataParallel", "is sharded by FairScale (ZeRO-3)"),
    ("fairscale.nn", "ShardedDataParallel", "is reduced by FairScale to the rank that steps it (ZeRO-2)"),
)
COMPILED = (("torch._dynamo", "OptimizedModule", "is torch.compile's"),)
OPTIMIZERS = (
    ("torch.distributed.optim", "ZeroRedundancyOptimizer", "steps a share of the parameters on each rank (ZeRO-1)"),
    ("deepspeed", "DeepSpeedZeroOptimizer_Stage3", "is DeepSpeed's ZeRO-3"),
    ("deepspeed", "DeepSpeedZeroOptimizer", "is DeepSpeed's ZeRO-1 or ZeRO-2, whose buckets are not read"),
    ("deepspeed", "BF16_Optimizer", "is DeepSpeed's ZeRO-1 in bf16"),
    ("megatron.core.optimizer", "DistributedOptimizer", "is Megatron-Core's distributed optimizer: ReduceScatter puts"
     " no reduced gradient on the wire"),
    ("megatron.core.optimizer", "ChainedOptimizer", "is a chain of Megatron-Core's optimizers"),
    ("fairscale.optim", "OSS", "steps a share of the parameters on each rank (ZeRO-1)"),
)


def _known(one: object, table: Sequence[tuple[str, str, str]]) -> str:
    """What an object is, by the classes that it has been made of; "": nothing of the table."""
    for base in type(one).__mro__:
        for module, name, what in table:
            if base.__name__ == name and f"{base.__module__}.".startswith(f"{module}."):
                return what
    return ""


def refuse_optimizer(optimizer: object) -> None:
    """Raises UserError for one that is known, and cannot be followed."""
    if what := _known(optimizer, OPTIMIZERS):
        raise UserError(f"{type(optimizer).__name__} {what}", where="optimizer",
                        remedy=f"{SERVED} torch.optim's SGD, Adam or AdamW with {LIVE}")


def refuse_model(model: object) -> UserError:
    """Why it is not followed."""
    if what := _known(model, MODELS):
        more, of_its_own = (_megatron(model), SEVERAL) if what == MEGATRON else ("", "")
        return UserError(what + more, where="model", remedy=f"{of_its_own}{SERVED} {LIVE}")
    if isinstance(model, FullyShardedDataParallel):
        how = str(getattr(getattr(model, "sharding_strategy", None), "name", ""))
        hybrid = f" ({how}, whose AllReduce is not read)" if "HYBRID" in how else ""
        return UserError(
            f"is sharded by FullyShardedDataParallel{hybrid}: ReduceScatter puts no reduced gradient on the wire",
            where="model", remedy=f"{SERVED} {LIVE}",
        )
    return UserError(f"is a {type(model).__name__}", where="model",
                     remedy="the DistributedDataParallel object, not what it wraps; or a model after fully_shard")


def _megatron(model: object) -> str:
    """What that puts on the wire where it is not followed (megatron/core/distributed/param_and_grad_buffer.py,
    start_grad_sync)."""
    number = instances(model)
    if number == 1:
        return (": ReduceScatter for its distributed optimizer puts no reduced gradient on the wire. Its ranks can send"
                ' theirs: attach(source="feed") (docs/use/feed.md)')
    if getattr(model, "ddp_config", None) is None or number:
        return ""
    return ": without its distributed optimizer its AllReduces, and the optimizer of 16-bit parameters, are not read"


def parts_of(
    model: Any, optimizer: Any = None, kind: str = REPLICA,
    sent: Callable[[object, str, Any, bool], Part | None] | None = None,
) -> list[Part]:
    """One or more. optimizer: of the model; None: it is not looked at. kind: of versions (Job.kind). sent(model, name,
    optimizer, log): the part of a model whose gradients need not be on a wire, None: they have to; None: those of all
    have to. Raises UserError, naming what cannot be followed."""
    if sent is None:
        sent = _none_sent
        several = members(optimizer_of(optimizer)) if not is_megatron(model) else []
        if len(several) > 1:
            raise UserError(f"there are several ({', '.join(type(one).__name__ for one in several)}), and a mirror is"
                            " read for one", where="optimizer",
                            remedy='one optimizer with several groups; or attach(source="feed") (docs/use/feed.md)')
    if isinstance(model, list) and (whole := sent(model, "", optimizer, kind == LOG)) is not None:
        return [whole]
    if isinstance(model, Mapping):
        given = [(one, str(name)) for name, one in model.items()]
    else:
        given = [(one, "") for one in (model if isinstance(model, list | tuple) else [model])]
    if optimizer is not None and not any(_known(one, MODELS) == MEGATRON for one, _ in given):  # which says more
        refuse_optimizer(optimizer)
    parts = [part for one, name in given for part in _parts(one, name, optimizer, kind, sent)]
    if not parts:
        raise UserError("there is none", where="model", remedy="the DistributedDataParallel object")
    names = [part.name for part in parts]
    if len(parts) > 1:
        for name in names:
            if not name or names.count(name) > 1:
                raise UserError(
                    f"two parts of this rank are at {name!r} in their meshes" if name else
                    "one of several has no place in a mesh of devices", where="model",
                    remedy="a dict of them by name, as {\"dense\": ..., \"experts0\": ...}, the same name in all ranks"
                           " of a group; or other names of the mesh's dimensions",
                )
    _divide(parts)
    return parts


def _none_sent(*_: Any) -> None:
    return None


def _parts(
    model: object, name: str, optimizer: object, kind: str, sent: Callable[[object, str, Any, bool], Part | None]
) -> list[Part]:
    while _known(model, COMPILED):  # what is inside reduces as it always does
        model = cast("Any", model)._orig_mod
    if (part := sent(model, name, optimizer, kind == LOG)) is not None:
        return [part]
    if _known(model, MODELS) == MEGATRON and (instances(model) > 1 or (kind == LOG and is_whole(model))):
        return [Megatron(model, optimizer, name, kind == LOG)]
    if isinstance(model, DistributedDataParallel):
        mesh = getattr(model, "device_mesh", None)
        return [Ddp(model, name or (position(mesh, 0) if mesh is not None else ""))]
    if isinstance(model, Reduced):
        return [Own(model, name)]
    if isinstance(model, torch.nn.Module) and is_sharded(model):
        return list(hsdp_parts(model, name))
    raise refuse_model(model)


def _divide(parts: Sequence[Part]) -> None:
    """Each parameter to the part that reduces it: to the script's own, which reduces it last, before any other."""
    owners: dict[int, Part] = {}
    for part in parts:
        if isinstance(part, Own):
            owners |= {id(value): owners.get(id(value), part) for _, value in part.reduced()}
    for part in parts:
        for name, value in part.reduced():
            first = owners.setdefault(id(value), part)
            if first is not part and (isinstance(part, Own) or not isinstance(first, Own)):
                raise UserError(
                    f"{name} is reduced by two parts, {first.name!r} and {part.name!r}: which of them is its gradient"
                    " is not said", where="model",
                    remedy="parameters_to_ignore of the outer DistributedDataParallel, for what an inner one reduces",
                )
    for part in parts:
        part.others = frozenset(one for one, owner in owners.items() if owner is not part)
