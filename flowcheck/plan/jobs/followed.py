"""Can a node follow such a job at all, today? What docs/use/qualify.md and layouts.md say, as a rule.

    followed(Asking(layout="fsdp2", ...))       -> Followed(can=False, why="...", instead="...")

Pure function; no figure of capacity means anything where the job is not followed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["OPTIMIZERS", "Asking", "Followed", "Layout", "followed"]

Layout = Literal["ddp", "hsdp", "fsdp2", "deepspeed", "megatron"]
#: Of torch.optim, as the node's updater steps them.
OPTIMIZERS = ("adam", "adamw", "amsgrad", "sgd", "momentum")
NO_REDUCED = "ReduceScatter adds the last contribution in local memory, so no reduced gradient is ever on the wire"
SENT = 'the gradients that its ranks send, without a mirror: attach(source="feed")'
GATHERED = "parameters alone, by AllGather, without optimizer state (node.md, Without trainers); or HSDP"


@dataclass(frozen=True)
class Asking:
    """shard: ranks that share one replica (HSDP), or of an instance of Megatron's distributed optimizer. experts:
    ranks that have experts of their own; 0: none. optimizer: "fused-adam" is Transformer Engine's and Apex's. dtype: of
    the gradients on the wire. direction: that is mirrored. protocol: NCCL's."""

    layout: Layout
    shard: int
    tensor: int
    experts: int
    optimizer: str
    dtype: str
    protocol: str
    direction: str


@dataclass(frozen=True)
class Followed:
    """why: what decides. instead: what can be had where it cannot. untried: what of it nobody has run."""

    can: bool
    why: str
    instead: str = ""
    untried: tuple[str, ...] = ()


def followed(job: Asking) -> Followed:
    """The first thing that a job is refused for, or that it can be followed."""
    if job.layout == "fsdp2":
        return Followed(False, f"fully_shard without replicas: {NO_REDUCED}", f"{SENT}; {GATHERED}")
    if job.layout == "deepspeed":
        return Followed(False, "DeepSpeed's ZeRO: ZeRO-1 and ZeRO-2 AllReduce whole buckets, which are not read yet. "
                        f"ZeRO-3: {NO_REDUCED}", GATHERED)
    if job.layout == "megatron" and job.shard == 1:
        return Followed(
            False, "Megatron without several instances of its distributed optimizer: its AllReduce of flat buffers is "
            "refused by name, and one instance is ReduceScatter",
            "--num-distributed-optimizer-instances of 2 or more (--shard is then the ranks of an instance); or a DDP "
            "object of torch's",
        )
    if job.layout == "megatron" and job.experts:
        return Followed(False, "Megatron with experts on ranks of their own: two optimizers' AllReduces are on one "
                        "communicator", "experts in a DDP of their own")
    if job.optimizer not in OPTIMIZERS:
        return Followed(False, f"{job.optimizer}: the node steps as torch.optim's SGD, Adam and AdamW do, and no "
                        "replica has the kernels of others", "torch.optim's Adam or AdamW")
    if job.layout == "ddp" and job.dtype != "float32":
        return Followed(False, f"DDP that reduces {job.dtype}: a communication hook is refused, and so are 16-bit "
                        "parameters without masters on a GPU", "float32 parameters with autocast")
    if job.protocol == "simple" and job.direction != "both":
        return Followed(False, f"SIMPLE mirrored in {job.direction} alone: clear-to-sends go the other way, and "
                        "without them no data finds its place", "both directions; or LL or LL128 (NCCL_PROTO)")
    return Followed(True, WHY[job.layout], untried=tuple(_untried(job)))


WHY = {
    "ddp": "DDP: AllReduce carries the whole gradient",
    "hsdp": "HSDP: AllReduce across replicas carries the whole gradient of each shard",
    "megatron": "Megatron with several instances of its distributed optimizer, where torch's Adam steps (neither "
    "Transformer Engine nor Apex is installed)",
}


def _untried(job: Asking) -> list[str]:
    found = ["nothing of this has run on GPUs with more than two ranks on real NICs"]
    if job.layout != "ddp" and job.tensor > 1:
        found.append("tensor parallelism inside a shard has not been tried")
    if job.experts:
        found.append("the figures take all parameters as one part; experts are a group each (docs/use/layouts.md)")
    return found
