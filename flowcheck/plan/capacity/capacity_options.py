"""The options of `flowcheck plan capacity`, in groups. None: not given. Units stand in the names, and in the help."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer

from flowcheck.plan.answers.amounts import amount
from flowcheck.plan.capacity.stage_speeds import BENCH

__all__ = ["Asked", "JobOptions", "NodeOptions", "PaceOptions", "PortOptions", "SpeedOptions", "WireOptions"]


@dataclass(frozen=True)
class JobOptions:
    """A job and its optimizer."""

    model: Annotated[str | None, typer.Option(help="bert roberta gpt3-1.3b llama2-7b 175b 530b 1t 405b.")] = None
    parameters: Annotated[
        float | None, typer.Option(help="Of the whole model: 7e9, 70B, 1.3T.", parser=amount, metavar="NUMBER")
    ] = None
    layout: Annotated[
        Literal["ddp", "hsdp", "fsdp2", "deepspeed", "megatron"] | None, typer.Option(help="What reduces gradients.")
    ] = None
    experts: Annotated[int | None, typer.Option(help="Ranks with experts of their own.")] = None
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks.")] = None
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.")] = None
    dp: Annotated[int | None, typer.Option(help="Data-parallel ranks.")] = None
    shard: Annotated[int | None, typer.Option(help="HSDP: data-parallel ranks that share one replica.")] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Of the gradients on the wire.")
    ] = None
    optimizer: Annotated[
        Literal["adam", "adamw", "amsgrad", "sgd", "momentum", "fused-adam", "other"] | None,
        typer.Option(help="torch.optim's; fused-adam: Transformer Engine's or Apex's.")
    ] = None


@dataclass(frozen=True)
class WireOptions:
    """How NCCL sends the gradients."""

    protocol: Annotated[Literal["ll", "ll128", "simple"] | None, typer.Option(help="NCCL's.")] = None
    algorithm: Annotated[Literal["ring", "tree"] | None, typer.Option(help="NCCL's.")] = None
    channels: Annotated[int | None, typer.Option(help="Of the communicator.")] = None
    nccl_version: Annotated[str | None, typer.Option(help="Such as 2.27.7.")] = None
    mtu: Annotated[int | None, typer.Option(help="RDMA path MTU.")] = None
    bucket_mb: Annotated[float | None, typer.Option(help="Gradients in one AllReduce, 10^6 bytes.")] = None
    port_gbps: Annotated[float | None, typer.Option(help="Speed of a trainer's NIC.")] = None


@dataclass(frozen=True)
class PaceOptions:
    """How long an iteration takes, and what lies between two allreduces."""

    iteration_s: Annotated[float | None, typer.Option(help="Seconds of an iteration. Default: from FLOPs.")] = None
    gap_s: Annotated[float | None, typer.Option(help="Instead: seconds between an allreduce and the next.")] = None
    tokens: Annotated[
        float | None, typer.Option(help="Of an iteration, all GPUs together.", parser=amount, metavar="NUMBER")
    ] = None
    peak_tflops: Annotated[float | None, typer.Option(help="Of a GPU.")] = None
    mfu: Annotated[float | None, typer.Option(help="Share of the peak that the job reaches.")] = None


@dataclass(frozen=True)
class PortOptions:
    """What is mirrored, and the ports that carry it."""

    topology: Annotated[Path | None, typer.Option(help="The file that `flowcheck switch plan` takes.")] = None
    mirrors: Annotated[int | None, typer.Option(help="Mirrored ports of a group, one per replica.")] = None
    direction: Annotated[Literal["ingress", "egress", "both"] | None, typer.Option(help="What is copied.")] = None
    leaf_gpus: Annotated[int | None, typer.Option(help="GPUs under a leaf.")] = None
    leaf_ports: Annotated[int | None, typer.Option(help="Ports of a leaf for GPUs and nodes.")] = None
    groups_per_node: Annotated[int | None, typer.Option(help="Groups that one node follows.")] = None
    node_ports: Annotated[int | None, typer.Option(help="Monitor ports of a node.")] = None
    monitor_gbps: Annotated[float | None, typer.Option(help="Speed of each.")] = None
    switch: Annotated[str | None, typer.Option(help="Platform, as `vendor` of a topology names it.")] = None
    split_directions: Annotated[
        bool | None,
        typer.Option("--split-directions", help="Consent: ingress and egress of a port to two monitor ports.")
    ] = None
    peak_gbps: Annotated[
        float | None, typer.Option(help="Known load of a trainer's NIC, each way. Default: its speed.")
    ] = None
    buffer_mb: Annotated[float | None, typer.Option(help="Of the switch, for the copies to one node.")] = None
    bursts: Annotated[int | None, typer.Option(help="Of an iteration's AllReduces, with pauses between.")] = None
    flows: Annotated[int | None, typer.Option(help="Whose data packets come in turns at a port of the node.")] = None


@dataclass(frozen=True)
class SpeedOptions:
    """What a core does; and of all cores together copy_gbs."""

    replica_pages: Annotated[
        Literal["shared", "huge"] | None,
        typer.Option(help="Of versions: /dev/shm as it comes, or large ones (hugetlbfs, or shmem_enabled).")
    ] = None
    bench: Annotated[Path | None, typer.Option(help=f"Output of `{BENCH}` on a node.")] = None
    receive_mpps: Annotated[float | None, typer.Option(help="Mpkt/s that a core receives.")] = None
    parse_ns: Annotated[float | None, typer.Option(help="Of a packet that carries nothing to keep.")] = None
    place_gbs: Annotated[float | None, typer.Option(help="GB/s of a core, read and written.")] = None
    again_gbs: Annotated[float | None, typer.Option(help="The same where a second copy is compared.")] = None
    icrc_ns: Annotated[float | None, typer.Option(help="That checking a placed packet's ICRC adds.")] = None
    kernel_ns: Annotated[
        float | None, typer.Option(help="The kernel's for a packet, if the port is af_packet. Default: 0, DPDK's NIC.")
    ] = None
    update_gbs: Annotated[float | None, typer.Option(help="GB/s of a core, read and written.")] = None
    copy_gbs: Annotated[
        float | None, typer.Option(help="GB/s of all cores together. Default: as --bench says, otherwise no limit.")
    ] = None


@dataclass(frozen=True)
class NodeOptions:
    """What a node has, and what it is divided into."""

    place_cores: Annotated[int | None, typer.Option(help="Default: the fewest that keep up with the ports.")] = None
    update_cores: Annotated[int | None, typer.Option(help="Default: the fewest that meet the deadline.")] = None
    slots: Annotated[int | None, typer.Option(help="Versions that a node holds.")] = None
    arenas: Annotated[int | None, typer.Option(help="Iterations' gradients that it holds.")] = None
    cores: Annotated[int | None, typer.Option(help="That a node has. Default: only said.")] = None
    memory_gb: Annotated[float | None, typer.Option(help="That a node has. Default: only said.")] = None


@dataclass(frozen=True)
class Asked:
    """What is asked of a job and a node."""

    job: JobOptions = field(default_factory=JobOptions)
    wire: WireOptions = field(default_factory=WireOptions)
    pace: PaceOptions = field(default_factory=PaceOptions)
    ports: PortOptions = field(default_factory=PortOptions)
    speeds: SpeedOptions = field(default_factory=SpeedOptions)
    node: NodeOptions = field(default_factory=NodeOptions)
