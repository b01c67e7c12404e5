"""Megatron-Core's own DistributedDataParallel and DistributedOptimizer of several instances, on CPUs.

    with as_cuda():                                     while they are made, and while they are used
        wrapped, optimizer = make(model, groups, ...)

They are the classes of the installed package as they are. Megatron-Core asks for CUDA by name: `device="cuda"`,
`torch.cuda.current_device()`, streams, and `tensor.type() == "torch.cuda.FloatTensor"`. `as_cuda` answers these on a
machine without: such tensors are made on the CPU, CPU tensors say that they are CUDA's, and streams do nothing, because
a CPU's work is done when a call returns. Nothing of the arithmetic, the layout of buffers, or the communication is
touched. Without Transformer Engine and Apex the optimizer is torch.optim.AdamW or Adam, as in any such environment.

Megatron-Core is no requirement of ours: `make` imports it. The extra `dev` has it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["Places", "as_cuda", "make"]


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass


class _Named(TorchFunctionMode):
    """Tensors of the CPU under CUDA's name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


@contextlib.contextmanager
def as_cuda() -> Iterator[None]:
    answers = {
        "current_device": lambda: "cpu", "current_stream": lambda *_: _Stream(), "default_stream": lambda *_: _Stream(),
        "Stream": _Stream, "stream": lambda _: contextlib.nullcontext(),
    }
    before = {name: getattr(torch.cuda, name) for name in answers}
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    try:
        with _Named():
            yield
    finally:
        for name, value in before.items():
            setattr(torch.cuda, name, value)


@dataclass(frozen=True)
class Places:
    """Process groups. across: ranks that have the same pieces, one of each instance. inside: an instance's. all_ranks:
    all instances'. alone: this rank, for parallelism of other kinds, which there is none of. experts: ranks that have
    the same experts; None: there are none."""

    across: Any
    inside: Any
    all_ranks: Any
    alone: Any
    experts: Any = None


def make(
    model: nn.Module | list[nn.Module], places: Places, *, instances: int, bucket_elements: int, reduce_float32: bool,
    clip: float = 0.0, optimizer: dict[str, Any] | None = None, **settings: Any,
) -> tuple[Any, Any]:
    """(DistributedDataParallel, what get_megatron_optimizer gives). model: on the CPU, in the type of its parameters;
    or a list of chunks, then so is the first of the two. optimizer, settings: more of OptimizerConfig and of
    DistributedDataParallelConfig. Within `as_cuda`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Transformer Engine and Apex are not installed, from several modules
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.transformer_config import TransformerConfig

    groups = ProcessGroupCollection()
    for name in ("tp", "pp", "ep", "cp", "mp", "tp_ep_pp", "expt_tp"):
        setattr(groups, name, places.alone)
    for name in ("dp", "dp_cp", "expt_dp"):
        setattr(groups, name, places.all_ranks)
    for name in ("intra_dp_cp", "intra_expt_dp", "intra_dist_opt"):
        setattr(groups, name, places.inside)
    groups.inter_dist_opt = places.across
    if places.experts is not None:
        groups.expt_dp = groups.intra_expt_dp = places.experts
    chunks = model if isinstance(model, list) else [model]
    narrow = next(chunks[0].parameters()).dtype
    wrapped = [DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=1),
        DistributedDataParallelConfig(**{
            "use_distributed_optimizer": True, "num_distributed_optimizer_instances": instances,
            "overlap_grad_reduce": True, "bucket_size": bucket_elements, "grad_reduce_in_fp32": reduce_float32,
        } | settings),
        chunk, pg_collection=groups,
    ) for chunk in chunks]
    given = get_megatron_optimizer(
        OptimizerConfig(**{
            "optimizer": "adam", "clip_grad": clip, "bf16": narrow == torch.bfloat16,
            "fp16": narrow == torch.float16, "use_distributed_optimizer": True,
            "params_dtype": narrow,
        } | (optimizer or {})),
        wrapped, use_gloo_process_groups=False, pg_collection=groups,
    )
    return wrapped if isinstance(model, list) else wrapped[0], given
