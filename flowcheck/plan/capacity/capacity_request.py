"""From the options of `flowcheck plan capacity` to a job, a node and speeds; every value noted with its source.

    case = case_of(Asked(JobOptions(model="175b")))     -> Case(inputs, job, node, speeds, ...)

An option comes first, then the topology, then the model's preset, then the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import TypeVar

from flowcheck.errors import UserError
from flowcheck.plan.answers.answer import Inputs, Value, need, need_positive, need_probability
from flowcheck.plan.capacity.capacity import MOST_GPUS, Job, Leaves, Node, comm_seconds, fitted, leaves_of
from flowcheck.plan.capacity.capacity_options import Asked, JobOptions, PaceOptions, PortOptions, SpeedOptions
from flowcheck.plan.capacity.fabric import SWITCHES, Fabric, LeafPorts, fabric_of, splits
from flowcheck.plan.capacity.stage_speeds import Pages, Speeds, measured, published
from flowcheck.plan.jobs.followed import Asking, Followed, Layout, followed
from flowcheck.plan.jobs.models import PRESETS, Preset, flops_seconds
from flowcheck.plan.traffic.bursts import fewest_ports
from flowcheck.plan.traffic.loss_law import Direction

__all__ = ["Case", "case_of"]

T = TypeVar("T", bound=Value)
SWITCH = "what `flowcheck switch plan` takes"
MOST_MIRRORED = 128  # ports whose copies one node takes
MOST_BUFFER_MB, MOST_BURSTS = 100_000, 1_000_000


@dataclass(frozen=True)
class Case:
    """leaves: an estimate, or None where `fabric` says it from a topology; so is `ports`, the busiest leaf. followed:
    can such a job be followed at all. buffer_mb: of the switch, for the copies to one node. bursts: of an iteration."""

    inputs: Inputs
    title: str
    job: Job
    node: Node
    speeds: Speeds
    fabric: Fabric | None
    leaves: Leaves | None
    ports: LeafPorts | None
    followed: Followed
    buffer_mb: float
    bursts: int


def case_of(asked: Asked, sources: Mapping[str, str] | None = None) -> Case:
    """sources: where options come from that the person who asks has not given. Raises UserError for what makes no
    sense, with the option and what to give."""
    inputs = Inputs(sources)
    preset = _preset(asked.job, inputs)
    kind, experts = _kind(asked.job, preset, inputs)
    layout = _layout(asked.job, preset, inputs)
    fabric = None
    if asked.ports.topology is not None:
        tensor, pipeline, data, shard = layout
        need(shard >= 1 and data % shard == 0, f"{data} data-parallel ranks are not shards of {shard}", "--shard",
             "a divisor of --dp")
        fabric = fabric_of(asked.ports.topology, data // shard, tensor * pipeline * shard)
        _not_twice(asked)
        inputs.note("topology", asked.ports.topology.name, "", "given")
    job = _job(asked, preset, layout, fabric, inputs)
    node, per_port, switch = _node(asked, job, fabric, inputs)
    speeds = _speeds(asked.speeds, job, _flows(asked.ports, job, node, inputs), inputs)
    node = fitted(job, node, speeds, place=asked.node.place_cores is None, update=asked.node.update_cores is None)
    for name, chosen, own, why in (
        ("place-cores", node.place_cores, asked.node.place_cores, "the fewest that keep up"),
        ("update-cores", node.update_cores, asked.node.update_cores, "the fewest that meet the deadline"),
    ):
        inputs.note(name, chosen, "cores", "given" if own else why)
    for name, value in (("cores", asked.node.cores), ("memory-gb", asked.node.memory_gb)):
        if value is not None:
            need_positive(value, f"--{name}")
            inputs.note(name, value)
    leaves = ports = None
    if fabric is None:
        gpus = inputs.take("leaf-gpus", asked.ports.leaf_gpus, 64, "ports", "an example: 24 leaves for 1536 GPUs")
        room = inputs.take("leaf-ports", asked.ports.leaf_ports, 128, "ports", "an example: uplinks not counted")
        leaves = leaves_of(job, node, gpus, room)
        ports = LeafPorts(*switch, leaves.nodes_per_leaf, node.groups, job.ranks, node.mirrors, node.direction,
                          job.algorithm, per_port, node.ports, node.monitor_gbps)
    found = followed(Asking(kind, job.shard, job.tensor, experts, job.optimizer, job.dtype, job.protocol,
                            node.direction))
    buffer_mb, bursts = _burst(asked.ports, inputs)
    return Case(inputs, preset.title if preset else "a job", job, node, speeds, fabric, leaves, ports, found, buffer_mb,
                bursts)


def _kind(job: JobOptions, preset: Preset | None, inputs: Inputs) -> tuple[Layout, int]:
    """(what reduces the gradients, ranks that have experts of their own)."""
    sharded = job.shard is not None and job.shard > 1
    default: Layout = "hsdp" if sharded else "ddp"
    kind = _of_preset(inputs, preset, "layout", job.layout, default, "", "--shard says so" if sharded else
                      "replicas are not sharded")
    need(kind != "ddp" or not sharded, f"replicas in shards of {job.shard} are not DDP", "--layout",
         "hsdp, or megatron with several instances of its optimizer")
    need(kind != "hsdp" or sharded, "HSDP shards each replica, and nobody says over how many ranks", "--shard",
         "2 or more, a divisor of --dp")
    experts = inputs.take("experts", job.experts, 0, "ranks", "no experts on ranks of their own")
    need(0 <= experts <= MOST_GPUS, f"{experts} ranks with experts", "--experts", "0 or more")
    return kind, experts


def _burst(ports: PortOptions, inputs: Inputs) -> tuple[float, int]:
    """(10^6 bytes of buffer for the copies to a node, bursts of an iteration)."""
    buffer_mb = inputs.take("buffer-mb", ports.buffer_mb, 0.0, "MB", "nothing is said of the switch's buffer")
    need(0 <= buffer_mb <= MOST_BUFFER_MB, f"{buffer_mb:g} MB of buffer", "--buffer-mb",
         f"0 to {MOST_BUFFER_MB}, what the copies to one node may take of the switch's buffer")
    bursts = inputs.take("bursts", ports.bursts, 1, "per iteration", "all AllReduces as one block")
    need(1 <= bursts <= MOST_BURSTS, f"{bursts} bursts", "--bursts", f"1 to {MOST_BURSTS}")
    return buffer_mb, bursts


def _not_twice(asked: Asked) -> None:
    """What the topology says is not said again."""
    twice = {
        **{name: getattr(asked.wire, name) for name in ("port_gbps", "mtu")},
        **{name: getattr(asked.ports, name) for name in (
            "mirrors", "direction", "groups_per_node", "node_ports", "monitor_gbps", "leaf_gpus", "leaf_ports",
            "switch", "split_directions", "peak_gbps",
        )},
    }
    for name, value in twice.items():
        need(value is None, f"{asked.ports.topology} says it", f"--{name.replace('_', '-')}", "leave it out")


def _preset(job: JobOptions, inputs: Inputs) -> Preset | None:
    if job.model is None and job.parameters is not None:
        return None
    name = inputs.take("model", job.model, "175b", "", "the paper's example of costs")
    if name not in PRESETS:
        raise UserError(f"{name!r} is not a model known by name", where="--model",
                        remedy=f"{', '.join(PRESETS)}; or give --parameters and the layout")
    return PRESETS[name]


def _of_preset(
    inputs: Inputs, preset: Preset | None, name: str, given: T | None, default: T, unit: str, why: str
) -> T:
    """The option, or the preset's field of that name with the source that it names, or the default."""
    if given is None and preset is not None:
        value: T = getattr(preset, name.replace("-", "_"))
        return inputs.note(name, value, unit, preset.source(name))
    return inputs.take(name, given, default, unit, why)


def _layout(job: JobOptions, preset: Preset | None, inputs: Inputs) -> tuple[int, int, int, int]:
    one = "no such parallelism"
    tensor = _of_preset(inputs, preset, "tp", job.tp, 1, "ranks", one)
    pipeline = _of_preset(inputs, preset, "pp", job.pp, 1, "ranks", one)
    data = _of_preset(inputs, preset, "dp", job.dp, 8, "ranks", "an example")
    shard = inputs.take("shard", job.shard, 1, "ranks", "DDP: replicas are not sharded")
    return tensor, pipeline, data, shard


def _job(
    asked: Asked, preset: Preset | None, layout: tuple[int, int, int, int], fabric: Fabric | None, inputs: Inputs
) -> Job:
    def known(name: str, given: T | None, default: T, unit: str, why: str) -> T:
        return _of_preset(inputs, preset, name, given, default, unit, why)

    parameters = known("parameters", asked.job.parameters, 0.0, "", "")
    dtype = known("dtype", asked.job.dtype, "float32", "", "DDP's without a communication hook")
    optimizer = inputs.take("optimizer", asked.job.optimizer, "adam", "", "12 bytes per parameter in float32")
    protocol = known("protocol", asked.wire.protocol, "simple", "", "NCCL's for large calls")
    algorithm = inputs.take("algorithm", asked.wire.algorithm, "ring", "", "NCCL's for large calls, nccl-wire 3.4")
    channels = inputs.take("channels", asked.wire.channels, 2, "", "NCCL doubles the one of a NIC, nccl-wire 3.2")
    version = inputs.take("nccl-version", asked.wire.nccl_version, "2.27.7", "", "one that was run")
    bucket = inputs.take("bucket-mb", asked.wire.bucket_mb, 25 * 1.048576, "MB", "DDP's bucket_cap_mb, 25 MiB")
    if fabric is None:
        mtu = inputs.take("mtu", asked.wire.mtu, 4096, "bytes", "the largest of RoCE")
        port = known("port-gbps", asked.wire.port_gbps, 400.0, "Gb/s", "an example")
    else:
        mtu = inputs.note("mtu", fabric.path_mtu, "bytes", "topology")
        port = inputs.note("port-gbps", fabric.port_gbps, "Gb/s", "topology")
    job = Job(parameters, *layout, dtype, optimizer, protocol, algorithm, channels, version, mtu, bucket * 1e6, port,
              iteration_s=1.0)
    return replace(job, iteration_s=_iteration(asked.pace, preset, job, inputs))


def _iteration(pace: PaceOptions, preset: Preset | None, job: Job, inputs: Inputs) -> float:
    """Given; or the allreduces and a given gap; or from FLOPs."""
    need(pace.iteration_s is None or pace.gap_s is None, "--iteration-s and --gap-s say the same thing", "--gap-s",
         "give one of them")
    if pace.gap_s is not None or pace.iteration_s is not None:
        for name, value in (("--tokens", pace.tokens), ("--peak-tflops", pace.peak_tflops), ("--mfu", pace.mfu)):
            need(value is None, "says how long an iteration takes, and that is given", name,
                 "leave it out, or leave --gap-s and --iteration-s out")
    if pace.gap_s is not None:
        need_positive(pace.gap_s, "--gap-s", "seconds")
        gap = inputs.note("gap-s", pace.gap_s, "s")
        return inputs.note("iteration-s", gap + comm_seconds(job), "s", "the gap and the allreduces")
    if pace.iteration_s is not None:
        need_positive(pace.iteration_s, "--iteration-s", "seconds")
        return inputs.note("iteration-s", pace.iteration_s, "s")
    need(preset is not None or pace.tokens is not None, "nobody says how long an iteration takes", "--iteration-s",
         "give it, or --gap-s, or --tokens with --peak-tflops and --mfu")
    tokens = _of_preset(inputs, preset, "tokens", pace.tokens, 0.0, "per iteration", "")
    peak = _of_preset(inputs, preset, "peak-tflops", pace.peak_tflops, 312.0, "TFLOPS",
                      "NVIDIA A100 data sheet, dense bf16")
    mfu = _of_preset(inputs, preset, "mfu", pace.mfu, 0.4, "of the peak", "an example")
    need_positive(tokens, "--tokens")
    need_positive(peak, "--peak-tflops", "TFLOPS")
    need_probability(mfu, "--mfu")
    need_positive(mfu, "--mfu")
    seconds = flops_seconds(job.parameters, tokens, job.gpus, peak, mfu)
    return inputs.note("iteration-s", seconds, "s", "6 x parameters x tokens / (GPUs x peak x mfu), Kaplan et al.")


def _node(
    asked: Asked, job: Job, fabric: Fabric | None, inputs: Inputs
) -> tuple[Node, float, tuple[str, bool]]:
    """(node, Gb/s of each direction of a mirrored port at the peak, (platform, consent to split directions))."""
    wanted = asked.ports
    load: float | None = None
    each, switch = job.port_gbps, ("", False)
    if fabric is not None:
        load = inputs.note("load-gbps", fabric.load_gbps, "Gb/s", "switch plan, the sum of the ports' peaks")
        mirrors = inputs.note("mirrors", fabric.mirrors, "ports", "switch plan")
        direction: Direction = inputs.note("direction", fabric.direction, "", "switch plan")
        monitor = inputs.note("monitor-gbps", fabric.monitor_gbps, "Gb/s", "topology")
        groups = inputs.note("groups-per-node", fabric.groups_per_node, "", "switch plan")
        ports = inputs.note("node-ports", fabric.node_ports, "", "switch plan")
    else:
        mirrors = inputs.take("mirrors", wanted.mirrors, min(3, job.ranks), "ports of a group", SWITCH)
        direction = inputs.take("direction", wanted.direction, "both", "", f"{SWITCH} where ports carry it")
        monitor = inputs.take("monitor-gbps", wanted.monitor_gbps, 400.0, "Gb/s", "an example")
        need_positive(monitor, "--monitor-gbps", "Gb/s")
        groups = inputs.take("groups-per-node", wanted.groups_per_node, 1, "", "a node for each group")
        each = inputs.take("peak-gbps", wanted.peak_gbps, job.port_gbps, "Gb/s each way", "line rate; measure it")
        need_positive(each, "--peak-gbps", "Gb/s")
        need(each <= job.port_gbps, f"{each:g} Gb/s of a port of {job.port_gbps:g}", "--peak-gbps",
             "at most --port-gbps")
        platform = inputs.take("switch", wanted.switch, "sonic", "", "an example: name yours")
        need(platform in SWITCHES, f"{platform} is not a platform", "--switch", ", ".join(SWITCHES))
        switch = platform, inputs.take("split-directions", wanted.split_directions, False, "", "no consent to try it")
        need(mirrors >= 1 and groups >= 1 and mirrors * groups <= MOST_MIRRORED,
             f"{mirrors} mirrored ports of {groups} groups", "--mirrors",
             f"1 to {MOST_MIRRORED} for all groups of a node (--groups-per-node)")
        streams, ways = mirrors * groups, 2 if direction == "both" else 1
        fewest = fewest_ports(each, monitor, streams, direction, splits(*switch))
        ports = inputs.take("node-ports", wanted.node_ports, fewest or ceil(streams * ways * each / monitor), "",
                            SWITCH if fewest else "the sum of all copies; no number fits, see the verdict")
        load = streams * ways * each
    slots = inputs.take("slots", asked.node.slots, 3, "", "replica.slots of node.toml")
    arenas = inputs.take("arenas", asked.node.arenas, 4, "", "replica.arenas of node.toml")
    place, update = (1 if cores is None else cores for cores in (asked.node.place_cores, asked.node.update_cores))
    node = Node(mirrors, direction, groups, ports, monitor, place, update, slots, arenas, load, asked.node.cores)
    return node, each, switch


def _flows(ports: PortOptions, job: Job, node: Node, inputs: Inputs) -> int:
    """Whose data packets come in turns at a port of the node."""
    connections = 1 if job.algorithm == "ring" else 3  # to a parent and two children
    streams = ceil(node.mirrors * node.groups / node.ports)
    each = connections * (2 if node.direction == "both" else 1)
    flows = inputs.take("flows", ports.flows, streams * each * job.channels, "at a node's port",
                        "connections x directions x channels of the mirrored ports that one monitor port carries")
    need(flows >= 1, f"{flows} flows bring nothing", "--flows", "at least 1")
    return flows


def _speeds(options: SpeedOptions, job: Job, flows: int, inputs: Inputs) -> Speeds:
    given = (options.receive_mpps, options.parse_ns, options.place_gbs, options.again_gbs, options.icrc_ns,
             options.update_gbs)
    names = ("receive-mpps", "parse-ns", "place-gbs", "again-gbs", "icrc-ns", "update-gbs")
    units = ("Mpkt/s per core", "ns per packet", "GB/s per core", "GB/s per core", "ns per packet", "GB/s per core")
    default: Pages = "shared"
    pages = inputs.take("replica-pages", options.replica_pages, default, "",
                        "replica.directory of node.toml is /dev/shm")
    if all(value is not None for value in given):
        base = Speeds(1, 1, 1, 1, 1, 1, {})
    elif options.bench is not None:
        base = measured(options.bench, job.protocol, job.mtu, flows, pages)
    else:
        base = published(job.protocol, job.mtu, pages)
    values = []
    known = (base.receive_mpps, base.parse_ns, base.place_gbs, base.again_gbs, base.icrc_ns, base.update_gbs)
    for name, unit, own, value in zip(names, units, given, known, strict=True):
        if own is not None:
            need_positive(own, f"--{name}", unit)
        values.append(inputs.note(name, value if own is None else own, unit,
                                  "given" if own is not None else base.sources[name.partition("-")[0]]))
    copy = base.copy_gbs
    if options.copy_gbs is not None:
        need_positive(options.copy_gbs, "--copy-gbs", "GB/s")
        copy = inputs.note("copy-gbs", options.copy_gbs, "GB/s of all cores")
    elif copy is not None:
        inputs.note("copy-gbs", copy, "GB/s of all cores", base.sources["copy"])
    kernel = inputs.take("kernel-ns", options.kernel_ns, 0.0, "ns per packet", "DPDK drives the NIC, not the kernel")
    need(0 <= kernel < inf, f"{kernel:g} ns", "--kernel-ns", "0 or more")
    receive, parse, place, again, icrc, update = values
    return Speeds(receive, parse, place, again, icrc, update, base.sources, copy, kernel)
