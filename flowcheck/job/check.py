"""What a type cannot express: ranges, references between parts of a job manifest, contradictions.

`check(job, place)` raises UserError at the first field that cannot be right, also of the optimizer (optimizer.py)
and of parameters that are gathered (groups.py); it changes nothing but the
buffer and thread tables, which it completes with NCCL's defaults. Values that would make the wire model
divide by zero or loop for ever are refused here, so that no later stage has to. Standard library only.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Any

from flowcheck.job.form import Place, shown
from flowcheck.job.groups import check_groups
from flowcheck.job.model import (
    ALGORITHMS,
    BUFFER_BYTES,
    CARRIES,
    DTYPE_BYTES,
    ENTRY_BYTES,
    FEED,
    KINDS,
    MAX_DEVICES,
    MAX_THREADS,
    MTUS,
    OPERATIONS,
    PROTOCOLS,
    SCHEMA,
    SOURCES,
    VERSIONS,
    Bucket,
    Collective,
    Communicator,
    Flow,
    Job,
    ModelEntry,
    carries,
    unwritable,
)
from flowcheck.job.optimizer import check_optimizer

__all__ = ["check", "check_connections"]

# Eight steps of one grain each (nccl-wire 2.6): below this a full chunk has no element and a loop no end.
MINIMUM_BUFFER = {"ll": 8 * 32, "ll128": 8 * 2048, "simple": 8 * 512}
# No tensor, bucket or message sequence of a real job comes near; products of two stay below 2**63 bytes.
ELEMENTS = 1 << 48


def check(job: Job, place: Place) -> None:
    """Raise UserError naming the first field of `job` that cannot be right."""
    if job.schema != SCHEMA:
        (place / "schema").fail(f"{shown(job.schema)} is not {SCHEMA!r}")
    (place / "epoch").between(job.epoch, 0, (1 << 32) - 1)
    (place / "source").one_of(job.source, SOURCES)
    if job.source == FEED:
        _check_fed(job, place)
    _check_communicator(job.communicator, place / "communicator", alone=job.source == FEED)
    _check_flows(job, place / "flows")
    for part in ("startup", "iteration_0", "rebuild", "steady"):
        for i, call in enumerate(getattr(job.collectives, part)):
            _check_collective(job, call, part, place / "collectives" / part / i)
    if job.collectives.steady and job.gradient_calls(0) and not job.gradient_calls(1):
        (place / "collectives" / "steady").fail("the first iteration reduces gradients, and steady reduces none")
    if job.gradient_calls(1) and not job.gradient_calls(0):
        (place / "collectives" / "iteration_0").fail("steady reduces gradients, and the first iteration reduces none")
    if job.parameter_calls(1) and not job.parameter_calls(0):
        (place / "collectives" / "iteration_0").fail("steady gathers parameters, and the first iteration gathers none")
    for i, call in enumerate(job.collectives.rebuild):
        if call.op == "AllReduce" and call.carries != "other":
            (place / "collectives" / "rebuild" / i / "carries").fail(
                'gradients are reduced in steady; an AllReduce here carries "other"'
            )
    _check_model(job.model, place / "model")
    _check_parameter_names(job, place / "collectives")
    (place / "kind").one_of(job.kind, VERSIONS)
    check_optimizer(job, place / "optimizer")
    (place / "gradients" / "dtype").one_of(job.gradients.dtype, DTYPE_BYTES)
    (place / "gradients" / "divisor").between(job.gradients.divisor, 1, (1 << 31) - 1)
    if len(set(job.step_values)) != len(job.step_values) or "" in job.step_values:
        (place / "step_values").fail("names must be given once each and not be empty")
    for iteration in (0, 1):
        _check_buckets(job, iteration, place)
        check_groups(job, iteration, place)


# -- communicator and flows ----------------------------------------------------------------------------------


def _check_fed(job: Job, place: Place) -> None:
    if job.flows:
        (place / "flows").fail("gradients that trainers send come over none of these")
    if any(carries(call) != "gradient" for call in job.collectives.iteration_0 + job.collectives.steady):
        (place / "collectives").fail("only buckets of gradients are sent")


def _check_communicator(c: Communicator, place: Place, alone: bool = False) -> None:
    """alone: may it be of one rank?"""
    (place / "ranks").between(c.ranks, 1 if alone else 2, 65536)
    if not re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}(\.[0-9]{1,3})?", c.nccl_version, re.ASCII):
        (place / "nccl_version").fail(f"{shown(c.nccl_version)} is not a version like 2.19 or 2.27.7")
    (place / "channels").between(c.channels, 1, 64)
    (place / "protocol").one_of(c.protocol, PROTOCOLS)
    (place / "algorithm").one_of(c.algorithm, ALGORITHMS)
    if c.mtu not in MTUS:
        (place / "mtu").fail(f"{c.mtu} is not an RDMA path MTU ({', '.join(map(str, MTUS))})")
    (place / "ar_threshold").between(c.ar_threshold, 0, 1 << 40)
    (place / "qps_per_connection").between(c.qps_per_connection, 1, 128)
    (place / "devices").between(c.devices, 1, MAX_DEVICES)
    parents = set(c.parent_ranks)
    if parents and (len(c.parent_ranks) != c.ranks or len(parents) != c.ranks or min(parents) < 0):
        (place / "parent_ranks").fail(f"these are not {c.ranks} different ranks of a larger communicator")
    if len(c.rings) not in (0, 1, c.channels):
        (place / "rings").fail(
            f"{len(c.rings)} rings for {c.channels} channels; give none, one, or one per channel"
        )
    for i, ring in enumerate(c.rings):
        if sorted(ring) != list(range(c.ranks)):
            (place / "rings" / i).fail(f"is not an ordering of the ranks 0..{c.ranks - 1}")
    for name, defaults in (("buffer_bytes", BUFFER_BYTES), ("max_threads", MAX_THREADS)):
        table: dict[str, int] = getattr(c, name)
        for key, value in table.items():
            (place / name).one_of(key, PROTOCOLS)
            if name == "buffer_bytes":
                (place / name / key).between(value, MINIMUM_BUFFER[key], 1 << 30)
            elif value % 32 or not 64 <= value <= 1024:
                (place / name / key).fail(f"{value} threads: NCCL takes multiples of 32 from 64 to 1024")
        for key, value in defaults.items():
            table.setdefault(key, value)


def _check_flows(job: Job, place: Place) -> None:
    connections: dict[tuple[int, int, int], int] = {}
    follower = _followers(job)
    for i, flow in enumerate(job.flows):
        here = place / i
        _check_flow(job.communicator, flow, here)
        connection = (flow.channel, flow.src, flow.dst)
        if connection in connections:
            here.fail(
                f"channel {flow.channel} from rank {flow.src} to rank {flow.dst} is already"
                f" flows[{connections[connection]}]"
            )
        connections[connection] = i
        if follower is not None and follower[flow.channel % len(follower)][flow.src] != flow.dst:
            (here / "dst").fail(
                f"rank {flow.dst} does not follow rank {flow.src} in the ring of channel {flow.channel}"
            )
    _check_receivers(job.flows, place)


def check_connections(c: Communicator, flows: Sequence[Flow], place: Place) -> None:
    """Connections of which the channels are not known. Raises UserError as `check`."""
    for i, flow in enumerate(flows):
        _check_flow(c, flow, place / i)
    _check_receivers(flows, place)


def _check_receivers(flows: Iterable[Flow], place: Place) -> None:
    receivers: dict[tuple[Any, int], int] = {}
    for i, flow in enumerate(flows):
        for queue, qpn in enumerate(flow.qpns):
            address = ipaddress.ip_address(flow.addresses(queue)[1])
            if (address, qpn) in receivers:
                first = receivers[address, qpn]
                (place / i / "qpns").fail(f"QP {qpn} of {address} is already in flows[{first}]")
            receivers[address, qpn] = i


def _followers(job: Job) -> list[dict[int, int]] | None:
    """Per channel (or once for all) the rank each rank sends to; None if some call may use a tree."""
    calls = job.collectives
    for call in (*calls.startup, *calls.iteration_0, *calls.rebuild, *calls.steady):
        if (call.algorithm or job.communicator.algorithm) == "tree":
            return None
    rings = [job.communicator.ring(channel) for channel in range(max(1, len(job.communicator.rings)))]
    return [dict(zip(ring, ring[1:] + ring[:1], strict=True)) for ring in rings]


def _check_flow(c: Communicator, flow: Flow, place: Place) -> None:
    for name in ("src", "dst"):
        (place / name).between(getattr(flow, name), 0, c.ranks - 1)
    if flow.src == flow.dst:
        (place / "dst").fail(f"rank {flow.dst} does not send to itself over the network")
    (place / "channel").between(flow.channel, 0, c.channels - 1)
    first = _address(flow.src_addr, place / "src_addr")
    if _address(flow.dst_addr, place / "dst_addr").version != first.version:
        (place / "dst_addr").fail("one address is IPv4 and the other IPv6")
    over = f" on {c.devices} devices" if c.devices > 1 else ""
    if len(flow.qpns) != c.queue_pairs:
        (place / "qpns").fail(
            f"{len(flow.qpns)} QP numbers for {c.qps_per_connection} QPs per connection{over}"
        )
    if len(flow.cts_qpns) not in (0, c.devices, c.queue_pairs):  # clear-to-send comes on the first of each device
        (place / "cts_qpns").fail(
            f"{len(flow.cts_qpns)} QP numbers for {c.qps_per_connection} QPs per connection{over};"
            " leave it empty if unknown"
        )
    for name in ("src_addrs", "dst_addrs"):
        texts = getattr(flow, name)
        if len(texts) not in (0, len(flow.qpns)):
            (place / name).fail(f"{len(texts)} addresses for {len(flow.qpns)} QPs; give one for each, or none")
        for i, text in enumerate(texts):
            if _address(text, place / name / i).version != first.version:
                (place / name / i).fail("IPv4 and IPv6 in one connection")
    for name in ("qpns", "cts_qpns"):
        for i, qpn in enumerate(getattr(flow, name)):
            (place / name / i).between(qpn, 0, (1 << 24) - 1)


def _address(text: str, place: Place) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        # A zone (fe80::1%eth0) belongs to one machine; on the wire there is none.
        return ipaddress.ip_address("" if "%" in text else text)
    except ValueError:
        place.fail(f"{shown(text)} is not an IPv4 or IPv6 address")


# -- collectives ---------------------------------------------------------------------------------------------


def _check_collective(job: Job, call: Collective, part: str, place: Place) -> None:
    (place / "op").one_of(call.op, OPERATIONS)
    (place / "dtype").one_of(call.dtype, DTYPE_BYTES)
    (place / "carries").one_of(call.carries, CARRIES)
    (place / "count").between(call.count, 0, ELEMENTS)
    (place / "root").between(call.root, 0, job.communicator.ranks - 1)
    if call.protocol is not None:
        (place / "protocol").one_of(call.protocol, PROTOCOLS)
    if call.algorithm is not None:
        (place / "algorithm").one_of(call.algorithm, ALGORITHMS)
    if call.channels is not None:
        (place / "channels").between(call.channels, 1, job.communicator.channels)
    if call.bucket is not None:
        (place / "bucket").between(call.bucket, 0, (1 << 31) - 1)
    if call.carries == "gradient" and call.op == "ReduceScatter":
        (place / "carries").fail(
            "a ReduceScatter adds the last contribution in local memory: no fully reduced gradient is on the wire",
            'call it "other" and let the AllGather of the updated parameters carry "parameters"',
        )
    if call.carries == "gradient" and call.op != "AllReduce":
        (place / "carries").fail(f"a {call.op} puts no fully reduced gradient on the wire")
    if call.carries == "parameters" and call.op not in ("Broadcast", "AllGather"):
        (place / "carries").fail("parameters are read from a Broadcast or from an AllGather")
    gathers = call.carries == "parameters" and call.op == "AllGather"
    if gathers and part not in ("iteration_0", "steady"):
        (place / "carries").fail("an AllGather of parameters belongs to iteration_0 or steady")
    if call.tensors and call.carries != "parameters":
        (place / "tensors").fail('only a call that carries "parameters" names tensors')
    for name in ("layout", "after_update"):
        if getattr(call, name) and not gathers:
            (place / name).fail('only an AllGather that carries "parameters" has this')
    if call.layout and call.tensors:
        (place / "layout").fail("give tensors or layout, not both")


def _check_parameter_names(job: Job, place: Place) -> None:
    names = {entry.name for entry in job.model}
    for part in ("startup", "iteration_0", "rebuild", "steady"):
        for i, call in enumerate(getattr(job.collectives, part)):
            for t, name in enumerate(call.tensors):
                if name not in names:
                    (place / part / i / "tensors" / t).fail(f"{shown(name)} is not in model")
            for s, piece in enumerate(call.layout):
                if piece.name not in names:
                    (place / part / i / "layout" / s / "name").fail(f"{shown(piece.name)} is not in model")


# -- model and optimizer -------------------------------------------------------------------------------------


def _check_model(model: list[ModelEntry], place: Place) -> None:
    seen: dict[str, int] = {}
    for i, entry in enumerate(model):
        here = place / i
        if why := unwritable(entry.name):
            (here / "name").fail(why)
        if entry.name in seen:
            (here / "name").fail(f"{shown(entry.name)} is already the name of model[{seen[entry.name]}]")
        seen[entry.name] = i
        (here / "dtype").one_of(entry.dtype, ENTRY_BYTES)
        (here / "kind").one_of(entry.kind, KINDS)
        if len(entry.shape) > 64:
            (here / "shape").fail(f"{len(entry.shape)} dimensions; a tensor has at most 64")
        for axis, extent in enumerate(entry.shape):
            (here / "shape" / axis).between(extent, 0, ELEMENTS)
        if entry.elements > ELEMENTS:
            (here / "shape").fail("more elements than any machine holds")
    owners = {entry.name: entry for entry in model if entry.kind == "optimized" and not entry.tied}
    for i, entry in enumerate(model):
        if not entry.tied:
            continue
        owner = owners.get(entry.tied)
        if owner is None or entry.kind != "optimized":
            (place / i / "tied").fail(f"{shown(entry.tied)} is not an optimized entry that this one could be tied to")
        if (entry.shape, entry.dtype) != (owner.shape, owner.dtype):
            (place / i / "tied").fail(f"{shown(entry.name)} and {shown(entry.tied)} differ in shape or dtype")


# -- buckets -------------------------------------------------------------------------------------------------


def _check_buckets(job: Job, iteration: int, place: Place) -> None:
    part = "steady" if iteration else "iteration_0"
    calls = job.gradient_calls(iteration)
    indices = sorted(index for index, _ in calls)
    if indices != list(range(len(indices))):
        (place / "collectives" / part).fail(
            f"the buckets of an iteration must be 0..{len(indices) - 1}, each once, and are {_some(indices)}"
        )
    for index, call in calls:
        if call.dtype != job.gradients.dtype:
            (place / "collectives" / part).fail(
                f"bucket {index} is reduced as {call.dtype}, and gradients.dtype says {job.gradients.dtype}"
            )
    layout = job.bucket_layout(iteration)
    if layout and calls:
        named = part if iteration or job.buckets.iteration_0 else "steady"
        _check_layout(job, layout, dict(calls), place / "buckets" / named)


def _some(numbers: list[int]) -> str:
    text = ", ".join(map(str, numbers[:16]))
    return f"{text}, ..." if len(numbers) > 16 else text


def _check_layout(job: Job, layout: list[Bucket], counts: dict[int, Collective], place: Place) -> None:
    if len(layout) != len(counts):
        place.fail(f"{len(layout)} buckets are described, and {len(counts)} AllReduce calls carry gradients")
    entries = {entry.name: entry for entry in job.model}
    for b, bucket in enumerate(layout):
        for s, piece in enumerate(bucket.slices):
            here = place / b / "slices" / s
            if piece.name not in entries:
                (here / "name").fail(f"{shown(piece.name)} is not in model")
            elements = entries[piece.name].elements
            end = piece.start + piece.length
            if piece.length < 0 or piece.start < 0 or end > elements:
                here.fail(f"elements {piece.start}..{end} are outside {shown(piece.name)} ({elements})")
            if piece.offset < 0 or piece.offset + piece.length > counts[b].count:
                here.fail(
                    f"elements {piece.offset}..{piece.offset + piece.length} are outside a bucket of"
                    f" {counts[b].count}"
                )
