"""A job as the node has to know it: everything that the wire does not say by itself.

    Job
    |- run_id, epoch
    |- communicator   ranks, rings, channels, algorithm, protocol, buffer sizes, NCCL version
    |- flows[]        one per (channel, source rank, destination rank): addresses and QP numbers
    |- collectives    startup, iteration_0, rebuild, steady: the calls in issue order
    |- buckets        for iteration_0 and steady: what lies where in each gradient bucket
    |- model[]        entries in state_dict order
    |- gradients      element type on the wire, averaging divisor
    |- optimizer      name and parameter groups
    |- kind           what versions are: a replica that steps with the trainer, or a log that it redoes
    `- source         where gradients come from: a mirror of the traffic, or the trainers themselves

Order of the calls on the communicator (PyTorch DDP, reference nccl-wire.md 9.1): all of `startup`,
then `iteration_0`; then `rebuild` (the bucket layout DDP broadcasts after its first backward), then
`steady` once per iteration, for ever. A job with an empty `steady` has exactly one iteration.
Plain dataclasses and the standard library only, because training environments import this module. manifest.py reads
and writes the JSON form, check.py refuses what cannot be right.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "SCHEMA", "DTYPE_BYTES", "ENTRY_BYTES", "OPERATIONS", "CARRIES", "PROTOCOLS", "ALGORITHMS", "KINDS", "OPTIMIZERS",
    "ROUNDINGS", "MASTERS", "NARROW", "VERSIONS", "REPLICA", "LOG", "SOURCES", "MIRROR", "FEED", "MTUS",
    "BUFFER_BYTES", "MAX_THREADS", "MAX_DEVICES", "Bucket", "BucketSlice", "Buckets", "Collective", "Collectives",
    "Communicator", "Flow", "Gradients", "Job", "ModelEntry", "Optimizer", "ParameterGroup", "carries",
    "dtype_size", "unwritable",
]

SCHEMA = "flowcheck/job/1"
DTYPE_BYTES = {
    "int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8,
}
ENTRY_BYTES = DTYPE_BYTES | {  # of a model's entries; no call has elements of these
    "bool": 1, "int16": 2, "uint16": 2, "complex64": 8,
}
OPERATIONS = ("AllReduce", "Broadcast", "AllGather", "ReduceScatter")
CARRIES = ("", "gradient", "parameters", "other")
PROTOCOLS = ("ll", "ll128", "simple")
ALGORITHMS = ("ring", "tree")
KINDS = ("optimized", "constant", "buffer")
OPTIMIZERS = ("sgd", "adam", "adamw")
ROUNDINGS = ("torch-cuda-foreach", "torch-cuda-fused", "torch-cpu", "torch-cpu-fused")
MASTERS = ("", "none", "upcast", "state")
NARROW = ("bfloat16", "float16")
VERSIONS = REPLICA, LOG = "replica", "log"
SOURCES = MIRROR, FEED = "mirror", "feed"
MTUS = (256, 512, 1024, 2048, 4096)
BUFFER_BYTES = {"ll": 524288, "ll128": 4915200, "simple": 4194304}
MAX_THREADS = {"ll": 512, "ll128": 640, "simple": 512}
MAX_DEVICES = 8  # ports merged into one NIC, the most of any version (parser.nccl, which trainers do not have)


def _one_of(choices: Iterable[Any]) -> dict[str, tuple[Any, ...]]:
    """Field metadata: the schema enumerates these values."""
    return {"choices": tuple(choices)}


def dtype_size(name: str) -> int:
    """Bytes of one element of a manifest dtype name."""
    return ENTRY_BYTES[name]


@dataclass
class Communicator:
    """The NCCL communicator that carries the gradients.

    rings: per channel the ranks in ring order starting anywhere; one list stands for all channels.
    channels: connected channels (NCCL_DEBUG: "N coll channels"); an operation may use fewer.
    adaptive_routing: messages above ar_threshold leave as a plain WRITE plus an empty WRITE_WITH_IMM
        (2.12-2.15: always; later: NCCL_IB_ADAPTIVE_ROUTING=1).
    qps_per_connection, split_data_on_qps: NCCL_IB_QPS_PER_CONNECTION, NCCL_IB_SPLIT_DATA_ON_QPS.
    devices: ports of a merged NIC (the larger number of the two sides); 2.20 and later. A connection has
        qps_per_connection on each, and one message goes over one QP of every device.
    buffer_bytes: NCCL_LL_BUFFSIZE, NCCL_LL128_BUFFSIZE, NCCL_BUFFSIZE.
    max_threads: NCCL_NTHREADS (ll, simple) and NCCL_LL128_NTHREADS: decide how many channels an
        operation uses and, before 2.22, the layout.
    mtu: RDMA path MTU in bytes.
    parent_ranks: per rank its number in the communicator that this one was split from (ncclCommSplit); CTS
        tags use that numbering. Empty: not split.
    """

    ranks: int
    nccl_version: str
    protocol: str = field(default="ll", metadata=_one_of(PROTOCOLS))
    algorithm: str = field(default="ring", metadata=_one_of(ALGORITHMS))
    channels: int = 1
    rings: list[list[int]] = field(default_factory=list)
    parent_ranks: list[int] = field(default_factory=list)
    mtu: int = field(default=4096, metadata=_one_of(MTUS))
    adaptive_routing: bool = False
    ar_threshold: int = 8192
    qps_per_connection: int = 1
    split_data_on_qps: bool = False
    devices: int = 1
    buffer_bytes: dict[str, int] = field(default_factory=BUFFER_BYTES.copy)
    max_threads: dict[str, int] = field(default_factory=MAX_THREADS.copy)

    @property
    def queue_pairs(self) -> int:
        """QPs of one connection."""
        return self.qps_per_connection * self.devices

    @property
    def queue_pairs_used(self) -> int:
        """QPs over which one message is spread (nccl-wire.md 5.3)."""
        return self.queue_pairs if self.split_data_on_qps else self.devices

    def ring(self, channel: int) -> list[int]:
        """Ranks of a channel in ring order, rank 0 first (ring index = position)."""
        order = self.rings[channel if len(self.rings) > 1 else 0] if self.rings else list(range(self.ranks))
        zero = order.index(0)
        return order[zero:] + order[:zero]


@dataclass
class Flow:
    """One connection: data from rank src to rank dst on a channel.

    qpns: the receiver's QP numbers (destination of the data), one per QP of the connection.
    cts_qpns: the sender's QP numbers (destination of CTS writes and ACKs), in the order of qpns; may be empty if
        unknown, or name the first QP of each device only: CTS writes come on these.
    src_addrs, dst_addrs: the addresses of each QP, in the order of qpns, where a merged NIC has several;
        empty: src_addr and dst_addr for all.
    """

    src: int
    dst: int
    channel: int
    src_addr: str
    dst_addr: str
    qpns: list[int]
    cts_qpns: list[int] = field(default_factory=list)
    src_addrs: list[str] = field(default_factory=list)
    dst_addrs: list[str] = field(default_factory=list)

    def addresses(self, queue: int) -> tuple[str, str]:
        """(source, destination) of the data on the connection's QP number `queue`."""
        return (
            self.src_addrs[queue] if self.src_addrs else self.src_addr,
            self.dst_addrs[queue] if self.dst_addrs else self.dst_addr,
        )


@dataclass
class Collective:
    """One NCCL call. count is in elements of dtype, as given to NCCL (AllGather: per rank).

    carries: "gradient" (an AllReduce of a bucket), "parameters" (a Broadcast of model entries at the
        start, or an AllGather of every iteration: FSDP, ZeRO, Megatron's distributed optimizer), or "other".
    bucket: index of the gradient bucket an AllReduce carries, or of the parameter group an AllGather
        does (default: its position among the calls of its kind in its list). Two AllGathers with one
        index gather the same values twice, as forward and backward do.
    tensors: for "parameters": the model entries in the order they are sent (default, Broadcast only:
        all floating-point entries in model order).
    layout: for an AllGather of "parameters": what lies where in the gathered tensor of ranks * count
        elements, if it is not `tensors` one behind the other. What no slice names is padding.
    after_update: the gathered parameters have this iteration's update already (gathered at its end).
    protocol, algorithm, channels: override the communicator's for this call.
    """

    op: str = field(metadata=_one_of(OPERATIONS))
    count: int
    dtype: str = field(default="float32", metadata=_one_of(DTYPE_BYTES))
    root: int = 0
    carries: str = field(default="", metadata=_one_of(CARRIES))
    bucket: int | None = None
    tensors: list[str] = field(default_factory=list)
    layout: list[BucketSlice] = field(default_factory=list)
    after_update: bool = False
    protocol: str | None = field(default=None, metadata=_one_of(PROTOCOLS))
    algorithm: str | None = field(default=None, metadata=_one_of(ALGORITHMS))
    channels: int | None = None


@dataclass
class Collectives:
    startup: list[Collective] = field(default_factory=list)
    iteration_0: list[Collective] = field(default_factory=list)
    rebuild: list[Collective] = field(default_factory=list)
    steady: list[Collective] = field(default_factory=list)


@dataclass
class BucketSlice:
    """Elements [start, start+length) of the flattened tensor `name` at element `offset` of the bucket."""

    name: str
    offset: int
    length: int
    start: int = 0


@dataclass
class Bucket:
    slices: list[BucketSlice] = field(default_factory=list)


@dataclass
class Buckets:
    """Bucket layouts; an empty iteration_0 means: the same as steady."""

    iteration_0: list[Bucket] = field(default_factory=list)
    steady: list[Bucket] = field(default_factory=list)


def unwritable(name: str) -> str:
    """Why no checkpoint can hold an entry of this name, "": it can."""
    if not name:
        return "the name is empty"
    if name == "__metadata__":
        return "the name '__metadata__' is safetensors' own: nobody could read a checkpoint that has it"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "the name has half of a surrogate pair, which no file can hold"
    return ""


@dataclass
class ModelEntry:
    """One state_dict entry. kind: optimized | constant | buffer. tied: the optimized entry whose memory it shares."""

    name: str
    shape: list[int]
    dtype: str = field(default="float32", metadata=_one_of(ENTRY_BYTES))
    kind: str = field(default="optimized", metadata=_one_of(KINDS))
    tied: str = ""

    @property
    def elements(self) -> int:
        n = 1
        for extent in self.shape:
            n *= extent
        return n


@dataclass
class Gradients:
    """divisor: the reduced sum is divided by this before the optimizer (DDP divides before: 1)."""

    dtype: str = field(default="float32", metadata=_one_of(DTYPE_BYTES))
    divisor: int = 1


@dataclass
class ParameterGroup:
    """Hyper-parameters of torch.optim by their torch names; params = names of model entries."""

    params: list[str]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Optimizer:
    """name: sgd | adam | adamw (torch.optim of that name).

    rounding: in which order the trainer rounds (docs/understand/updater.md). On a GPU torch takes foreach unless asked
        otherwise.
    torch_version: the trainer's; empty: as the one that applies the updates.
    masters: what the trainer's optimizer updates where parameters have 16 bits: "none" (those, in 16 bits alone),
        "upcast" (fp32 masters that begin as the first parameters widened) or "state" (fp32 masters that come with the
        first weights, as optimizer state `master`). Empty: nobody says; "upcast" is taken and marked unproven.
    threads: the trainer's torch.get_num_threads(), of which bits depend where parameters are updated in 16 bits alone;
        0: nobody says. Then 1 is taken, and marked unproven for tensors that threads may share.
    corrections: for `torch-cuda-fused`, whose powf a GPU does not always round correctly: for every beta (as Python
        writes it) the steps at which 1 - powf(beta, step) is not what the correctly rounded power gives, with its fp32
        value. Empty: nobody says, and marked unproven.
    """

    name: str = field(metadata=_one_of(OPTIMIZERS))
    groups: list[ParameterGroup]
    rounding: str = field(default="torch-cuda-foreach", metadata=_one_of(ROUNDINGS))
    torch_version: str = ""
    masters: str = field(default="", metadata=_one_of(MASTERS))
    threads: int = 0
    corrections: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass
class Job:
    """kind: of its versions. REPLICA: the node applies `optimizer` itself. LOG: it keeps gradients and step records,
    from which the trainer's own optimizer, whatever that is, redoes its steps; `optimizer` is absent.

    source: of its gradients. MIRROR: packets say them. FEED: ranks send them as their optimizers read them, so of the
    communicator only `ranks` counts, there are no flows, and `steady` has one AllReduce for each bucket that is sent.
    """

    communicator: Communicator
    flows: list[Flow]
    collectives: Collectives
    buckets: Buckets = field(default_factory=Buckets)
    model: list[ModelEntry] = field(default_factory=list)
    gradients: Gradients = field(default_factory=Gradients)
    optimizer: Optimizer | None = None
    step_values: list[str] = field(default_factory=list)
    run_id: str = ""
    epoch: int = 0
    unproven: list[str] = field(default_factory=list)  # what nothing confirms, said by whoever wrote it
    kind: str = field(default=REPLICA, metadata=_one_of(VERSIONS))
    source: str = field(default=MIRROR, metadata=_one_of(SOURCES))
    schema: str = field(default=SCHEMA, metadata=_one_of([SCHEMA]))

    def __repr__(self) -> str:
        """One line; all of it is `to_json()`."""
        wire, optimizer = self.communicator, self.optimizer.name if self.optimizer else "no optimizer"
        optimizer = LOG if self.kind == LOG else optimizer
        return (
            f"Job(run {self.run_id!r}, epoch {self.epoch}: {wire.ranks} ranks, {wire.algorithm} {wire.protocol},"
            f" {wire.channels} channels, {len(self.flows)} connections, {len(self.model)} tensors, {optimizer})"
        )

    def to_dict(self) -> dict[str, Any]:
        """What is as it always was is not said: nodes of earlier releases know no `kind` and no `source`."""
        said = dataclasses.asdict(self)
        if self.kind == REPLICA:
            del said["kind"]
        if self.source == MIRROR:
            del said["source"]
        return said

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @property
    def narrow(self) -> list[str]:
        """Optimized entries of 16 bits: what the optimizer holds of them has to be said."""
        return [e.name for e in self.model if e.kind == "optimized" and not e.tied and e.dtype in NARROW]

    def iteration_collectives(self, iteration: int) -> list[Collective]:
        """The calls of one iteration in issue order, with the one-off ones that precede it."""
        c = self.collectives
        if iteration == 0:
            return c.iteration_0
        return (c.rebuild if iteration == 1 else []) + c.steady

    def gradient_calls(self, iteration: int) -> list[tuple[int, Collective]]:
        """(bucket, call) of every call of an iteration that carries gradients."""
        out: list[tuple[int, Collective]] = []
        for call in self.iteration_collectives(iteration):
            if carries(call) == "gradient":
                out.append((len(out) if call.bucket is None else call.bucket, call))
        return out

    def parameter_calls(self, iteration: int) -> list[tuple[int, Collective]]:
        """(group, call) of every AllGather of an iteration that carries parameters; groups may repeat."""
        out: list[tuple[int, Collective]] = []
        for call in self.iteration_collectives(iteration):
            if call.op == "AllGather" and carries(call) == "parameters":
                out.append((len(out) if call.bucket is None else call.bucket, call))
        return out

    def parameter_slices(self, call: Collective) -> list[BucketSlice]:
        """What lies where in the gathered tensor: `layout`, or `tensors` one behind the other."""
        if call.layout:
            return call.layout
        sizes = {entry.name: entry.elements for entry in self.model}
        out, offset = [], 0
        for name in call.tensors:
            out.append(BucketSlice(name, offset, sizes[name]))
            offset += sizes[name]
        return out

    def bucket_layout(self, iteration: int) -> list[Bucket]:
        first = self.buckets.iteration_0 or self.buckets.steady
        return first if iteration == 0 else self.buckets.steady


def carries(call: Collective) -> str:
    """What a call carries: "gradient" by default for AllReduce, "other" for everything else."""
    return call.carries or ("gradient" if call.op == "AllReduce" else "other")
