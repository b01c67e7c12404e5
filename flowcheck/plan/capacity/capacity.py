"""Does a checkpoint node keep up with a job, and how many of them are there? Formulas; no options, no printing.

    found = capacity(job, node, speeds)      -> Capacity
    fitted(job, node, speeds)                -> Node with the fewest cores that meet the deadline

The deadline: an iteration's version stands before the next iteration's allreduce begins. The node receives while the
ports send, places packet by packet behind that, and updates bucket by bucket; each stage goes on with what comes next
meanwhile. Source of the deadline and the pipeline: FlowCheck, sections 3.1, 6.1 and 7. Threads of a stage are taken to
share its work evenly. Two things are no stage's: all cores together move no more bytes than the memory carries, and
threads share the cores that there are (sharing.py; `flowcheck bench pipeline` compares with both). Pure functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flowcheck.plan.answers.answer import need, need_at_most, need_positive
from flowcheck.plan.capacity.sharing import Load, Stage, together
from flowcheck.plan.capacity.stage_speeds import Speeds
from flowcheck.plan.traffic.loss_law import Direction
from flowcheck.plan.traffic.wire_volume import Call, Traffic, iteration_of
from parser.chunk_layout import Protocol

__all__ = [
    "ELEMENT_BYTES", "MOST_CORES", "PROTOCOLS", "STATE_BYTES", "Capacity", "Job", "Leaves", "Node", "capacity",
    "comm_seconds", "fitted", "leaves_of",
]

PROTOCOLS = {"ll": Protocol.LL, "ll128": Protocol.LL128, "simple": Protocol.SIMPLE}
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Bytes per parameter of a version: the float32 parameter, and what the optimizer keeps of it.
STATE_BYTES = {"adam": 12, "adamw": 12, "amsgrad": 16, "sgd": 4, "momentum": 8, "fused-adam": 12, "other": 12}
#: Bytes of a slot of the packet ring, by path MTU (docs/understand/dataplane.md, Memory).
SLOT_BYTES = {256: 1152, 512: 1152, 1024: 1152, 2048: 2176, 4096: 4352}
RING_ENTRIES, ENTRY_BYTES = 16384, 24
MOST_CORES = 512  # of a stage, when the fewest are looked for
MOST_GPUS, MOST_PARAMETERS = 1_000_000, 1e15
MOST_OF_A_NODE = 100_000  # of ports, groups, cores, slots


@dataclass(frozen=True)
class Job:
    """tensor, pipeline, data: ranks of each kind of parallelism. shard: of HSDP, ranks among which a replica is sharded
    (1: DDP). bucket_bytes: of gradients in one AllReduce. iteration_s: from one allreduce's begin to the next one's."""

    parameters: float
    tensor: int
    pipeline: int
    data: int
    shard: int
    dtype: str
    optimizer: str
    protocol: str
    algorithm: str
    channels: int
    version: str
    mtu: int
    bucket_bytes: float
    port_gbps: float
    iteration_s: float

    def __post_init__(self) -> None:
        parts = (("--tp", self.tensor), ("--pp", self.pipeline), ("--dp", self.data), ("--shard", self.shard))
        for name, value in parts:
            need(value >= 1, f"{value} ranks", name, "at least 1")
            need_at_most(value, MOST_GPUS, name, "no job has so many GPUs")
        gpus = f"{' x '.join(name for name, _ in parts[:3])}"
        need_at_most(self.gpus, MOST_GPUS, gpus, "no job has so many GPUs")
        need_at_most(self.parameters, MOST_PARAMETERS, "--parameters", "no model has so many")
        need(self.data % self.shard == 0, f"{self.data} data-parallel ranks are not shards of {self.shard}", "--shard",
             "a divisor of --dp")
        need(self.ranks >= 2, f"{self.data} data-parallel ranks in shards of {self.shard} leave nothing to AllReduce",
             "--dp", "at least two replicas: reduced gradients are what FlowCheck reads")
        for name, number, unit in (
            ("--parameters", self.parameters, ""), ("--bucket-mb", self.bucket_bytes, "MB"),
            ("--port-gbps", self.port_gbps, "Gb/s"), ("--iteration-s", self.iteration_s, "s"),
        ):
            need_positive(number, name, unit)
        need(self.bucket_bytes >= ELEMENT_BYTES[self.dtype], f"{self.bucket_bytes / 1e6:g} MB hold no gradient",
             "--bucket-mb", f"at least {ELEMENT_BYTES[self.dtype] / 1e6:g}, one gradient")
        need(self.parameters >= self.groups, f"{self.parameters:g} parameters in {self.groups} parts", "--parameters",
             "at least one for each of tensor x pipeline x shard")

    @property
    def groups(self) -> int:
        """Data-parallel groups, each with gradients of its own."""
        return self.tensor * self.pipeline * self.shard

    @property
    def ranks(self) -> int:
        """Of a group: replicas that AllReduce with each other."""
        return self.data // self.shard

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def group_parameters(self) -> int:
        return math.ceil(self.parameters / self.groups)

    @property
    def call(self) -> Call:
        """A group's whole gradient; it is sent in buckets."""
        return Call(
            PROTOCOLS[self.protocol], self.ranks, self.group_parameters, ELEMENT_BYTES[self.dtype], self.algorithm,
            self.channels, self.version,
        )

    def traffic(self, direction: Direction) -> tuple[Traffic, int]:
        """(of one port and iteration, buckets)."""
        elements = max(1, int(self.bucket_bytes / ELEMENT_BYTES[self.dtype]))
        return iteration_of(self.call, min(elements, self.group_parameters), self.mtu, direction)


@dataclass(frozen=True)
class Node:
    """A checkpoint node. mirrors: ports of each group, in `direction`. groups: that it follows. ports: its own, each of
    monitor_gbps. Cores by stage. slots, arenas: versions and gradients that it holds (docs/use/node.md). load_gbps:
    what comes to all its ports together at the peak; None: every direction of every mirrored port at line rate. cores:
    that it has in all; None: one for every thread."""

    mirrors: int
    direction: Direction
    groups: int
    ports: int
    monitor_gbps: float
    place_cores: int = 1
    update_cores: int = 1
    slots: int = 3
    arenas: int = 4
    load_gbps: float | None = None
    cores: int | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("--mirrors", self.mirrors), ("--groups-per-node", self.groups), ("--node-ports", self.ports),
            ("--place-cores", self.place_cores), ("--update-cores", self.update_cores),
        ):
            need(value >= 1, f"{value} is not a number of these", name, "at least 1")
            need_at_most(value, MOST_OF_A_NODE, name, "no node has so many")
        need(self.slots >= 2, f"{self.slots} slots hold no version while the next is built", "--slots", "at least 2")
        need(self.arenas >= 2, f"{self.arenas} arenas cannot take the next iteration", "--arenas", "at least 2")
        for name, value in (("--slots", self.slots), ("--arenas", self.arenas)):
            need_at_most(value, MOST_OF_A_NODE, name, "no node has so many")
        need_positive(self.monitor_gbps, "--monitor-gbps", "Gb/s")
        need(self.cores is None or self.cores >= 1, f"{self.cores} cores run no thread", "--cores", "at least 1")


@dataclass(frozen=True)
class Capacity:
    """Seconds are of one iteration, from the first packet on; bytes and packets of one mirrored port unless said.

    load: of the stages' threads. comm_s: the allreduces at the port's speed. gap_s: from there to the next allreduce.
    receive_s, place_s, update_s: the node's stages, each alone. serial_s: one after the other. moved_s: all bytes that
    they move, at the speed of the memory (0: not known). shared_s: all their work, spread over the cores (0: a core for
    every thread). pipelined_s: overlapped, on these cores and this memory; no less than those two. slack_s: to the
    deadline, below 0: missed. peak_gbps: of all mirrored ports of the node together; room_gbps: what its ports carry.
    memory: bytes, always; memory_most: while it takes in a state and the replica before still stands.
    """

    load: Load
    traffic: Traffic
    buckets: int
    comm_s: float
    gap_s: float
    receive_s: float
    place_s: float
    update_s: float
    serial_s: float
    moved_s: float
    shared_s: float
    pipelined_s: float
    slack_s: float
    receive_cores: int
    peak_gbps: float
    room_gbps: float
    memory: float
    memory_most: float

    @property
    def stages(self) -> tuple[float, float, float]:
        return self.receive_s, self.place_s, self.update_s


def comm_seconds(job: Job) -> float:
    """Of an iteration's allreduces at the speed of the ports, which is the shortest that they can take."""
    one_way = max(job.traffic("ingress")[0].all_frames, job.traffic("egress")[0].all_frames)
    return one_way * 8 / (job.port_gbps * 1e9)


def capacity(job: Job, node: Node, speeds: Speeds) -> Capacity:
    """All figures of one node. Raises UserError for an iteration that is shorter than its own allreduces."""
    need(node.mirrors <= job.ranks, f"{node.mirrors} mirrored ports of a group of {job.ranks}", "--mirrors",
         f"at most {job.ranks}, one for each replica")
    port, buckets = job.traffic(node.direction)
    comm = comm_seconds(job)
    need(comm < job.iteration_s, f"an iteration of {job.iteration_s:.4g} s is shorter than its allreduces, "
         f"{comm:.4g} s at {job.port_gbps:g} Gb/s", "--iteration-s", "a longer iteration or a faster port")
    streams = node.mirrors * node.groups
    final = port.final_payload + port.final_data
    first = min(1.0, job.group_parameters * ELEMENT_BYTES[job.dtype] / (node.mirrors * port.final_data or 1))
    place = streams * (  # the first copy of each byte is placed, and all others are compared with it
        final * (first / speeds.place_gbs + (1 - first) / speeds.again_gbs) / 1e9
        + port.final_packets * speeds.icrc_ns * 1e-9
        + (port.packets - port.final_packets + port.control) * speeds.parse_ns * 1e-9
    ) / node.place_cores
    state, element = STATE_BYTES[job.optimizer], ELEMENT_BYTES[job.dtype]
    updated = node.groups * job.group_parameters * (2 * state + element)
    update = updated / (speeds.update_gbs * 1e9) / node.update_cores
    stages = (comm, place, update)
    packets = streams * (port.packets + port.control)
    receiving = packets * (1 / (speeds.receive_mpps * 1e6) + speeds.kernel_ns * 1e-9)
    cores = max(node.ports, math.ceil(receiving / comm))
    load = Load(
        receive=Stage(receiving, cores, 2 * streams * port.all_frames),  # copied into the ring: read, and written
        place=Stage(place * node.place_cores, node.place_cores, streams * final),
        update=Stage(update * node.update_cores, node.update_cores, updated),
        parts=buckets, pace=comm, ring=cores * RING_ENTRIES / packets, watchers=node.groups,
    )
    pipelined = together(load, node.cores, speeds.copy_gbs)
    shared = 0.0 if node.cores is None else load.seconds / node.cores
    moved = 0.0 if speeds.copy_gbs is None else load.nbytes / (speeds.copy_gbs * 1e9)
    ring = cores * RING_ENTRIES * (ENTRY_BYTES + SLOT_BYTES[job.mtu])
    peak = streams * (2 if node.direction == "both" else 1) * job.port_gbps
    each = node.groups * job.group_parameters
    memory = each * (node.slots * state + node.arenas * element * (1 + 1 / 64)) + ring
    return Capacity(
        load, port, buckets, comm, job.iteration_s - comm, comm, place, update, sum(stages), moved, shared, pipelined,
        job.iteration_s - pipelined, cores,
        peak if node.load_gbps is None else node.load_gbps, node.ports * node.monitor_gbps,
        memory, memory + each * (1 + node.slots) * state,
    )


def fitted(job: Job, node: Node, speeds: Speeds, *, place: bool = True, update: bool = True) -> Node:
    """The node with the fewest cores: placing keeps up with the ports, and then updating meets the deadline.

    place, update: which of them are looked for. Where no number of cores does, MOST_CORES stand there.
    """
    if place:
        found = capacity(job, replace(node, place_cores=1), speeds)
        node = replace(node, place_cores=min(MOST_CORES, max(1, math.ceil(found.place_s / found.comm_s))))
    if update:
        one = capacity(job, replace(node, update_cores=1), speeds)
        first, last = 1, MOST_CORES
        while first < last:
            middle = (first + last) // 2
            load = replace(one.load, update=replace(one.load.update, threads=middle))
            enough = together(load, node.cores, speeds.copy_gbs) <= job.iteration_s
            first, last = (first, middle) if enough else (middle + 1, last)
        node = replace(node, update_cores=first)
    return node


# -- leaves -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaves:
    """An estimate, without a topology. leaves: of the fabric. nodes: if every node is full. nodes_per_leaf,
    monitor_ports: of the leaf with the most."""

    leaves: int
    nodes: int
    nodes_per_leaf: int
    monitor_ports: int


def leaves_of(job: Job, node: Node, leaf_gpus: int, leaf_ports: int) -> Leaves:
    """Groups are taken to be spread evenly, with the mirrored hosts of each under one leaf, and one port for each GPU.

    Raises UserError where a leaf has not ports enough.
    """
    need(1 <= leaf_gpus <= leaf_ports, f"{leaf_gpus} GPUs on a leaf of {leaf_ports} ports", "--leaf-gpus",
         f"1 to {leaf_ports}")
    leaves = math.ceil(job.gpus / leaf_gpus)
    nodes_per_leaf = math.ceil(math.ceil(job.groups / leaves) / node.groups)
    ports = nodes_per_leaf * node.ports
    used = min(leaf_gpus, job.gpus)
    fewer = f"at most {leaf_ports - ports} GPUs each (--leaf-gpus), " if ports < leaf_ports else ""
    need(used + ports <= leaf_ports, f"{used} GPUs and {ports} monitor ports are more than a leaf's {leaf_ports} ports",
         "--leaf-ports", f"leaves of {used + ports} ports or more, {fewer}or fewer monitor ports: --mirrors, "
         "--node-ports, or faster ones by --monitor-gbps")
    return Leaves(leaves, math.ceil(job.groups / node.groups), nodes_per_leaf, ports)
