"""The job manifest: everything about a job that the wire does not say by itself, as one JSON file.

Trainer hooks write it, a person can write it, later parts of it can be learnt from traffic. Plain
dataclasses and the standard library only, because training environments import this module.

    Job
    |- run_id, epoch
    |- communicator   ranks, rings, channels, algorithm, protocol, buffer sizes, NCCL version
    |- flows[]        one per (channel, source rank, destination rank): addresses and QP numbers
    |- collectives    startup, iteration_0, rebuild, steady: the calls in issue order
    |- buckets        for iteration_0 and steady: what lies where in each gradient bucket
    |- model[]        entries in state_dict order
    |- gradients      element type on the wire, averaging divisor
    `- optimizer      name and parameter groups

`Job.load(path)` validates and raises UserError naming file and field; `job.to_json()` writes the same
form. `json_schema()` is the published schema.

Order of the calls on the communicator (PyTorch DDP, reference nccl-wire.md 9.1): all of `startup`,
then `iteration_0`; then `rebuild` (the bucket layout DDP broadcasts after its first backward), then
`steady` once per iteration, for ever. A job with an empty `steady` has exactly one iteration.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowcheck.errors import EnvironmentProblem, UserError

__all__ = [
    "Bucket", "BucketSlice", "Buckets", "Collective", "Collectives", "Communicator", "Flow",
    "Gradients", "Job", "ModelEntry", "Optimizer", "ParameterGroup", "dtype_size", "json_schema",
]

SCHEMA = "flowcheck/job/1"

DTYPE_BYTES = {
    "int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8,
}
OPERATIONS = ("AllReduce", "Broadcast", "AllGather", "ReduceScatter")
PROTOCOLS = ("ll", "ll128", "simple")
ALGORITHMS = ("ring", "tree")


def dtype_size(name: str) -> int:
    """Bytes of one element of a manifest dtype name."""
    return DTYPE_BYTES[name]


@dataclass
class Communicator:
    """The NCCL communicator that carries the gradients.

    rings: per channel the ranks in ring order starting anywhere; one list stands for all channels.
    channels: connected channels (NCCL_DEBUG: "N coll channels"); an operation may use fewer.
    adaptive_routing: messages above ar_threshold leave as a plain WRITE plus an empty WRITE_WITH_IMM
        (2.12-2.15: always; later: NCCL_IB_ADAPTIVE_ROUTING=1).
    qps_per_connection, split_data_on_qps: NCCL_IB_QPS_PER_CONNECTION, NCCL_IB_SPLIT_DATA_ON_QPS.
    buffer_bytes: NCCL_LL_BUFFSIZE, NCCL_LL128_BUFFSIZE, NCCL_BUFFSIZE.
    max_threads: NCCL_NTHREADS (ll, simple) and NCCL_LL128_NTHREADS: decide how many channels an
        operation uses and, before 2.22, the layout.
    mtu: RDMA path MTU in bytes.
    """

    ranks: int
    nccl_version: str
    protocol: str = "ll"
    algorithm: str = "ring"
    channels: int = 1
    rings: list[list[int]] = field(default_factory=list)
    mtu: int = 4096
    adaptive_routing: bool = False
    ar_threshold: int = 8192
    qps_per_connection: int = 1
    split_data_on_qps: bool = False
    buffer_bytes: dict[str, int] = field(
        default_factory=lambda: {"ll": 524288, "ll128": 4915200, "simple": 4194304}
    )
    max_threads: dict[str, int] = field(
        default_factory=lambda: {"ll": 512, "ll128": 640, "simple": 512}
    )

    def ring(self, channel: int) -> list[int]:
        """Ranks of a channel in ring order, rank 0 first (ring index = position)."""
        order = self.rings[channel if len(self.rings) > 1 else 0] if self.rings else list(range(self.ranks))
        zero = order.index(0)
        return order[zero:] + order[:zero]


@dataclass
class Flow:
    """One connection: data from rank src to rank dst on a channel.

    qpns: the receiver's QP numbers (destination of the data), one per QP of the connection.
    cts_qpns: the sender's QP numbers (destination of CTS writes and ACKs); may be empty if unknown.
    """

    src: int
    dst: int
    channel: int
    src_addr: str
    dst_addr: str
    qpns: list[int]
    cts_qpns: list[int] = field(default_factory=list)


@dataclass
class Collective:
    """One NCCL call. count is in elements of dtype, as given to NCCL (AllGather: per rank).

    bucket: index of the gradient bucket an AllReduce carries (default: its position among the
        AllReduces of its list). carries: "gradient" (an AllReduce of a bucket), "parameters" (a
        broadcast of model entries), or "other".
    tensors: for "parameters": the model entries in the order they are broadcast (default: all
        floating-point entries in model order).
    protocol, algorithm, channels: override the communicator's for this call.
    """

    op: str
    count: int
    dtype: str = "float32"
    root: int = 0
    carries: str = ""
    bucket: int | None = None
    tensors: list[str] = field(default_factory=list)
    protocol: str | None = None
    algorithm: str | None = None
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


@dataclass
class ModelEntry:
    """One state_dict entry. kind: optimized | constant | buffer."""

    name: str
    shape: list[int]
    dtype: str = "float32"
    kind: str = "optimized"

    @property
    def elements(self) -> int:
        n = 1
        for extent in self.shape:
            n *= extent
        return n


@dataclass
class Gradients:
    """divisor: the reduced sum is divided by this before the optimizer (DDP divides before: 1)."""

    dtype: str = "float32"
    divisor: int = 1


@dataclass
class ParameterGroup:
    """Hyper-parameters of torch.optim by their torch names; params = names of model entries."""

    params: list[str]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Optimizer:
    """name: sgd | adam | adamw (torch.optim of that name)."""

    name: str
    groups: list[ParameterGroup]


@dataclass
class Job:
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
    schema: str = SCHEMA

    # -- reading and writing ------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Read and validate a manifest. Raises UserError (content) or EnvironmentProblem (unreadable)."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot read the job manifest: {error.strerror}", where=str(path),
                remedy="give the path of an existing, readable JSON file with --job",
            ) from None
        except UnicodeDecodeError:
            raise UserError("not UTF-8 text", where=str(path), remedy="write the manifest as JSON") from None
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(
                f"not valid JSON: {error}", where=str(path),
                remedy="docs/manifest.md shows the form; half-written files must be written again",
            ) from None
        return cls.from_dict(data, where=str(path))

    @classmethod
    def from_dict(cls, data: Any, *, where: str = "manifest") -> Job:
        job = _build(cls, data, where)
        _check(job, where)
        return job

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    # -- derived ------------------------------------------------------------------------------

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

    def bucket_layout(self, iteration: int) -> list[Bucket]:
        first = self.buckets.iteration_0 or self.buckets.steady
        return first if iteration == 0 else self.buckets.steady


def carries(call: Collective) -> str:
    """What a call carries: "gradient" by default for AllReduce, "other" for everything else."""
    return call.carries or ("gradient" if call.op == "AllReduce" else "other")


# -- building dataclasses from JSON -----------------------------------------------------------------


def _fail(where: str, what: str) -> typing.NoReturn:
    raise UserError(what, where=where, remedy="correct this field; docs/manifest.md describes each one")


def _build(kind: Any, data: Any, where: str) -> Any:
    """Turn JSON into `kind` (a dataclass, list, dict, union or scalar type), naming the place on error."""
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in typing.get_args(kind):
            return None
        (inner,) = [a for a in typing.get_args(kind) if a is not type(None)]
        return _build(inner, data, where)
    if origin is list:
        if not isinstance(data, list):
            _fail(where, f"expected a list, found {type(data).__name__}")
        (inner,) = typing.get_args(kind)
        return [_build(inner, item, f"{where}[{i}]") for i, item in enumerate(data)]
    if origin is dict:
        if not isinstance(data, dict):
            _fail(where, f"expected an object, found {type(data).__name__}")
        _, inner = typing.get_args(kind)
        return {str(k): _build(inner, v, f"{where}.{k}") for k, v in data.items()}
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, dict):
            _fail(where, f"expected an object, found {type(data).__name__}")
        hints = typing.get_type_hints(kind)
        names = {f.name: f for f in dataclasses.fields(kind)}
        for key in data:
            if key not in names:
                _fail(where, f"unknown field {key!r}; known: {', '.join(names)}")
        values = {}
        for name, spec in names.items():
            if name in data:
                values[name] = _build(hints[name], data[name], f"{where}: {name}" if ":" not in where else f"{where}.{name}")
            elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
                _fail(where, f"required field {name!r} is missing")
        return kind(**values)
    if kind is Any:
        return data
    if kind is bool:
        if not isinstance(data, bool):
            _fail(where, f"expected true or false, found {data!r}")
        return data
    if kind is int:
        if isinstance(data, bool) or not isinstance(data, int):
            _fail(where, f"expected a whole number, found {data!r}")
        return data
    if not isinstance(data, kind):
        _fail(where, f"expected {kind.__name__}, found {data!r}")
    return data


# -- checks that a type cannot express ---------------------------------------------------------------


def _choice(where: str, value: str, allowed: typing.Iterable[str]) -> None:
    if value not in allowed:
        _fail(where, f"{value!r} is not one of {', '.join(allowed)}")


def _check(job: Job, where: str) -> None:
    if job.schema != SCHEMA:
        _fail(f"{where}: schema", f"{job.schema!r} is not {SCHEMA!r}")
    _check_communicator(job.communicator, f"{where}: communicator")
    for i, flow in enumerate(job.flows):
        _check_flow(job, flow, f"{where}: flows[{i}]")
    for part in ("startup", "iteration_0", "rebuild", "steady"):
        for i, call in enumerate(getattr(job.collectives, part)):
            _check_collective(job, call, f"{where}: collectives.{part}[{i}]")
    _check_model(job, where)
    _choice(f"{where}: gradients.dtype", job.gradients.dtype, DTYPE_BYTES)
    if job.gradients.divisor < 1:
        _fail(f"{where}: gradients.divisor", f"{job.gradients.divisor} is not a positive number")
    for iteration in (0, 1):
        _check_buckets(job, iteration, where)


def _check_communicator(c: Communicator, where: str) -> None:
    if not 2 <= c.ranks <= 65536:
        _fail(f"{where}.ranks", f"{c.ranks} is not between 2 and 65536")
    if not 1 <= c.channels <= 64:
        _fail(f"{where}.channels", f"{c.channels} is not between 1 and 64")
    _choice(f"{where}.protocol", c.protocol, PROTOCOLS)
    _choice(f"{where}.algorithm", c.algorithm, ALGORITHMS)
    if c.mtu not in (256, 512, 1024, 2048, 4096):
        _fail(f"{where}.mtu", f"{c.mtu} is not an RDMA path MTU (256, 512, 1024, 2048, 4096)")
    if not 1 <= c.qps_per_connection <= 128:
        _fail(f"{where}.qps_per_connection", f"{c.qps_per_connection} is not between 1 and 128")
    if len(c.rings) not in (0, 1, c.channels):
        _fail(f"{where}.rings", f"{len(c.rings)} rings for {c.channels} channels; give none, one, or one per channel")
    for i, ring in enumerate(c.rings):
        if sorted(ring) != list(range(c.ranks)):
            _fail(f"{where}.rings[{i}]", f"not an ordering of the ranks 0..{c.ranks - 1}")
    for table, name in ((c.buffer_bytes, "buffer_bytes"), (c.max_threads, "max_threads")):
        for key, value in table.items():
            _choice(f"{where}.{name}", key, PROTOCOLS)
            if value < 1:
                _fail(f"{where}.{name}.{key}", f"{value} is not positive")
        for key in PROTOCOLS:
            table.setdefault(key, getattr(Communicator(2, "2.19"), name)[key])


def _check_flow(job: Job, flow: Flow, where: str) -> None:
    for name in ("src", "dst"):
        if not 0 <= getattr(flow, name) < job.communicator.ranks:
            _fail(f"{where}.{name}", f"rank {getattr(flow, name)} is not below {job.communicator.ranks}")
    if not 0 <= flow.channel < job.communicator.channels:
        _fail(f"{where}.channel", f"channel {flow.channel} is not below {job.communicator.channels}")
    for name in ("src_addr", "dst_addr"):
        try:
            ipaddress.ip_address(getattr(flow, name))
        except ValueError:
            _fail(f"{where}.{name}", f"{getattr(flow, name)!r} is not an IPv4 or IPv6 address")
    if len(flow.qpns) != job.communicator.qps_per_connection:
        _fail(f"{where}.qpns", f"{len(flow.qpns)} QP numbers for {job.communicator.qps_per_connection} QPs per connection")
    for name in ("qpns", "cts_qpns"):
        for qpn in getattr(flow, name):
            if not 0 <= qpn < 1 << 24:
                _fail(f"{where}.{name}", f"{qpn} is not a 24-bit QP number")


def _check_collective(job: Job, call: Collective, where: str) -> None:
    _choice(f"{where}.op", call.op, OPERATIONS)
    _choice(f"{where}.dtype", call.dtype, DTYPE_BYTES)
    _choice(f"{where}.carries", carries(call), ("gradient", "parameters", "other"))
    if not 0 <= call.count < 1 << 48:
        _fail(f"{where}.count", f"{call.count} elements is out of range")
    if not 0 <= call.root < job.communicator.ranks:
        _fail(f"{where}.root", f"rank {call.root} is not below {job.communicator.ranks}")
    if call.protocol is not None:
        _choice(f"{where}.protocol", call.protocol, PROTOCOLS)
    if call.algorithm is not None:
        _choice(f"{where}.algorithm", call.algorithm, ALGORITHMS)
    if call.channels is not None and not 1 <= call.channels <= job.communicator.channels:
        _fail(f"{where}.channels", f"{call.channels} is not between 1 and {job.communicator.channels}")
    if carries(call) == "gradient" and call.op != "AllReduce":
        _fail(f"{where}.carries", f"a {call.op} puts no fully reduced gradient on the wire")
    if carries(call) == "parameters" and call.op != "Broadcast":
        _fail(f"{where}.carries", "parameters are read from a Broadcast")


def _check_model(job: Job, where: str) -> None:
    names = [entry.name for entry in job.model]
    if len(set(names)) != len(names):
        _fail(f"{where}: model", "two entries have the same name")
    for i, entry in enumerate(job.model):
        _choice(f"{where}: model[{i}].dtype", entry.dtype, DTYPE_BYTES)
        _choice(f"{where}: model[{i}].kind", entry.kind, ("optimized", "constant", "buffer"))
        if any(extent < 0 for extent in entry.shape):
            _fail(f"{where}: model[{i}].shape", f"{entry.shape} has a negative extent")
    if job.optimizer is None:
        return
    _choice(f"{where}: optimizer.name", job.optimizer.name, ("sgd", "adam", "adamw"))
    optimized = {entry.name for entry in job.model if entry.kind == "optimized"}
    grouped = [name for group in job.optimizer.groups for name in group.params]
    for name in grouped:
        if name not in optimized:
            _fail(f"{where}: optimizer.groups", f"{name!r} is not an optimized model entry")
    if len(set(grouped)) != len(grouped):
        _fail(f"{where}: optimizer.groups", "a parameter is in two groups")


def _check_buckets(job: Job, iteration: int, where: str) -> None:
    calls = job.gradient_calls(iteration)
    layout = job.bucket_layout(iteration)
    place = f"{where}: buckets.{'iteration_0' if iteration == 0 and job.buckets.iteration_0 else 'steady'}"
    indices = sorted(index for index, _ in calls)
    if indices != list(range(len(indices))):
        _fail(f"{where}: collectives", f"the buckets of an iteration must be 0..{len(indices) - 1}, each once; found {indices}")
    for index, call in calls:
        if call.dtype != job.gradients.dtype:
            _fail(f"{where}: collectives", f"bucket {index} is reduced as {call.dtype}, gradients.dtype says {job.gradients.dtype}")
    if not layout or not calls:
        return
    if len(layout) != len(calls):
        _fail(place, f"{len(layout)} buckets described, {len(calls)} AllReduce calls carry gradients")
    entries = {entry.name: entry for entry in job.model}
    counts = dict(calls)
    for b, bucket in enumerate(layout):
        for s, piece in enumerate(bucket.slices):
            here = f"{place}[{b}].slices[{s}]"
            if piece.name not in entries:
                _fail(here, f"{piece.name!r} is not in model")
            if piece.length < 0 or piece.start < 0 or piece.start + piece.length > entries[piece.name].elements:
                _fail(here, f"elements {piece.start}..{piece.start + piece.length} are outside {piece.name!r} ({entries[piece.name].elements})")
            if piece.offset < 0 or piece.offset + piece.length > counts[b].count:
                _fail(here, f"ends at element {piece.offset + piece.length} of a bucket of {counts[b].count}")


# -- schema ----------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of the manifest, derived from the dataclasses above."""
    definitions: dict[str, Any] = {}

    def of(kind: Any) -> dict[str, Any]:
        origin = typing.get_origin(kind)
        if origin in (types.UnionType, typing.Union):
            return {"anyOf": [of(a) for a in typing.get_args(kind)]}
        if origin is list:
            return {"type": "array", "items": of(typing.get_args(kind)[0])}
        if origin is dict:
            return {"type": "object", "additionalProperties": of(typing.get_args(kind)[1])}
        if dataclasses.is_dataclass(kind):
            name = kind.__name__  # type: ignore[union-attr]
            if name not in definitions:
                definitions[name] = {}
                hints = typing.get_type_hints(kind)
                fields = dataclasses.fields(kind)
                definitions[name] = {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {f.name: of(hints[f.name]) for f in fields},
                    "required": [
                        f.name for f in fields
                        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
                    ],
                }
            return {"$ref": f"#/$defs/{name}"}
        if kind is Any:
            return {}
        names = {int: "integer", str: "string", bool: "boolean", type(None): "null"}
        return {"type": names[kind]}

    root = of(Job)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "FlowCheck job manifest",
            **root, "$defs": definitions}
