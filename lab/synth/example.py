"""Complete, consistent manifests for made-up jobs: calls, buckets, model, SGD, addresses and QPs.

    example_job(ranks=4, count=5000) -> Job      DDP: gradients by AllReduce
    sharded_job(ranks=4, count=5000) -> Job      FSDP, ZeRO: parameters by AllGather, gradients by ReduceScatter

Any thread.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import (
    Bucket,
    Buckets,
    BucketSlice,
    Collective,
    Collectives,
    Communicator,
    Flow,
    Gradients,
    Job,
    ModelEntry,
    Optimizer,
    ParameterGroup,
    dtype_size,
)
from lab.synth.schedule import tree_of

__all__ = ["example_job", "sharded_job"]

COALESCED = 250 << 20  # DDP broadcasts parameters in flat groups, which end with the one that reaches so many bytes


def example_job(
    *, ranks: int = 2, channels: int = 1, count: int | Sequence[int] = 5000, protocol: str = "ll",
    version: str = "2.27.7", algorithm: str = "ring", dtype: str = "float32", mtu: int = 4096,
    rings: Sequence[Sequence[int]] = (), qps: int = 1, split_data_on_qps: bool = False,
    adaptive_routing: bool = False, ipv6: bool = False, startup: bool = True, rebuild: bool = True,
    optimizer: str = "sgd", options: dict[str, object] | None = None,
    buffer_bytes: dict[str, int] | None = None, max_threads: dict[str, int] | None = None, seed: int = 0,
    devices: int = 1, masters: str = "",
) -> Job:
    """A manifest of a DDP job.

    count: elements of the steady buckets (one number: one bucket). Iteration 0 has a single bucket of all
    of them in model order, as DDP does; the steady buckets hold the model in reverse. startup: DDP's
    start-up calls (number of parameters, sizes and strides, the parameters themselves); without them the initial
    weights come from elsewhere. options: the optimizer's hyper-parameters (default lr=0.001). Parameters have the
    gradients' dtype. devices: ports of each rank's merged NIC, with an address each. masters: of the optimizer,
    where dtype has 16 bits.
    """
    counts = [count] if isinstance(count, int) else list(count)
    communicator = Communicator(
        ranks=ranks, nccl_version=version, protocol=protocol, algorithm=algorithm, channels=channels,
        rings=[list(ring) for ring in rings], mtu=mtu, adaptive_routing=adaptive_routing,
        qps_per_connection=qps, split_data_on_qps=split_data_on_qps, devices=devices,
    )
    communicator.buffer_bytes.update(buffer_bytes or {})
    communicator.max_threads.update(max_threads or {})
    model, steady = _model(counts, dtype)
    whole = Bucket(_pack([(entry.name, entry.elements) for entry in model]))
    names = [entry.name for entry in model]
    first_calls = [Collective("AllReduce", sum(counts), dtype, bucket=0)]
    calls = Collectives(
        startup=[
            Collective("AllGather", 1, "int64"),
            Collective("Broadcast", sum(2 * len(entry.shape) for entry in model), "int64"),  # sizes and strides
            *_parameter_broadcasts(model),
        ] if startup else [],
        iteration_0=first_calls,
        rebuild=[
            Collective("Broadcast", len(model) + 1, "int32"), Collective("Broadcast", len(counts), "int32"),
        ] if rebuild else [],
        steady=[Collective("AllReduce", c, dtype, bucket=b) for b, c in enumerate(counts)],
    )
    job = Job(
        communicator=communicator, flows=_flows(communicator, ipv6, seed), collectives=calls,
        buckets=Buckets(iteration_0=[whole], steady=steady), model=model, gradients=Gradients(dtype),
        optimizer=Optimizer(
            optimizer, [ParameterGroup(names, dict(options or {"lr": 0.001}))], rounding="torch-cpu",
            masters=masters,
        ),
        run_id=f"synth-{seed}",
    )
    return job_from_dict(job.to_dict(), where="example_job")


def sharded_job(
    *, ranks: int = 2, channels: int = 1, count: Sequence[int] = (2500, 700), protocol: str = "simple",
    version: str = "2.27.7", dtype: str = "bfloat16", mtu: int = 4096, again: bool = True,
    after_update: bool = False, per_parameter: bool = False, ipv6: bool = False, seed: int = 0,
) -> Job:
    """A manifest of a job that shards its parameters.

    count: elements of each group's model entries; a group is padded to a multiple of the ranks. again: every
    group is gathered a second time, for backward. after_update: gathered at the iteration's end. per_parameter:
    blocks hold a piece of every tensor (FSDP2); else a group is one flat tensor cut into blocks (FSDP1).
    """
    communicator = Communicator(ranks=ranks, nccl_version=version, protocol=protocol, channels=channels, mtu=mtu)
    model: list[ModelEntry] = []
    gathers, scatters = [], []
    for group, total in enumerate(count):
        bias = total // 8
        sizes = [(f"group{group}.weight", total - bias), (f"group{group}.bias", bias)]
        entries = [ModelEntry(name, [size]) for name, size in sizes if size]
        model.extend(entries)
        layout = _pack([(entry.name, entry.elements) for entry in entries])
        block = -(-total // ranks)
        if per_parameter:
            shares = [-(-entry.elements // ranks) for entry in entries]
            block = sum(shares)
            layout = [
                BucketSlice(entry.name, rank * block + sum(shares[:e]), min(share, entry.elements - rank * share),
                            rank * share)
                for rank in range(ranks) for e, (entry, share) in enumerate(zip(entries, shares, strict=True))
                if rank * share < entry.elements
            ]
        gathers.append(Collective(
            "AllGather", block, dtype, carries="parameters", bucket=group, layout=layout, after_update=after_update,
        ))
        scatters.append(Collective("ReduceScatter", block, "float32"))
    forward = gathers + (gathers[::-1] if again else [])
    calls = scatters + gathers if after_update else forward + scatters[::-1]
    job = Job(
        communicator=communicator, flows=_flows(communicator, ipv6, seed), run_id=f"synth-{seed}", model=model,
        collectives=Collectives([Collective("AllGather", 1, "int64")], calls, [], calls),
    )
    return job_from_dict(job.to_dict(), where="sharded_job")


def _model(counts: list[int], dtype: str) -> tuple[list[ModelEntry], list[Bucket]]:
    """Model entries in model order and the steady buckets, which hold them last to first."""
    backward: list[ModelEntry] = []
    buckets = []
    for number, count in enumerate(counts):
        layer = len(counts) - 1 - number
        bias = count // 8
        entries = [ModelEntry(f"layer{layer}.bias", [bias], dtype)] if bias else []
        weights = count - bias
        shape = [2, weights // 2] if weights % 2 == 0 else [weights]
        entries.append(ModelEntry(f"layer{layer}.weight", shape, dtype))
        buckets.append(Bucket(_pack([(entry.name, entry.elements) for entry in entries])))
        backward.extend(entries)
    return backward[::-1], buckets


def _parameter_broadcasts(model: list[ModelEntry]) -> list[Collective]:
    """DDP's start-up broadcasts of all parameters, in model order."""
    groups: list[list[ModelEntry]] = [[]]
    for entry in model:
        groups[-1].append(entry)
        if sum(each.elements for each in groups[-1]) * dtype_size(entry.dtype) >= COALESCED:
            groups.append([])
    return [
        Collective("Broadcast", sum(entry.elements for entry in group), group[0].dtype, carries="parameters",
                   tensors=[entry.name for entry in group])
        for group in groups if group
    ]


def _pack(tensors: list[tuple[str, int]]) -> list[BucketSlice]:
    pieces, offset = [], 0
    for name, length in tensors:
        pieces.append(BucketSlice(name, offset, length))
        offset += length
    return pieces


def _flows(communicator: Communicator, ipv6: bool, seed: int) -> list[Flow]:
    """Every connection of the communicator's rings (and trees), QP numbers ascending with the channel."""
    qps, devices = communicator.queue_pairs, communicator.devices
    rng = random.Random(f"flows/{seed}")
    following = [rng.randrange(0x100, 0xF00000) for _ in range(communicator.ranks)]

    def take(rank: int) -> list[int]:
        start = following[rank]
        following[rank] += qps + rng.randrange(2)
        return list(range(start, start + qps))

    def address(rank: int, device: int = 0) -> str:
        if ipv6:
            return f"fd00:{10 + device}::{rank + 1:x}"
        return f"{10 + device}.{rank >> 16 & 255}.{(rank + 1) >> 8 & 255}.{(rank + 1) & 255}"

    flows = []
    for channel in range(communicator.channels):
        ring = communicator.ring(channel)
        edges = {(rank, ring[(i + 1) % len(ring)]): None for i, rank in enumerate(ring)}
        if communicator.algorithm == "tree":
            for rank, up in enumerate(tree_of(communicator.ranks, channel, communicator.channels).parent):
                if up >= 0:
                    edges.update({(rank, up): None, (up, rank): None})
        for src, dst in edges:
            each = [
                [address(rank, queue % devices) for queue in range(qps)] if devices > 1 else [] for rank in (src, dst)
            ]
            flows.append(Flow(src, dst, channel, address(src), address(dst), take(dst), take(src), *each))
    return flows
