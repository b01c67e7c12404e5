"""What a node would take of its machine, and how long its rings bear a pause: the figures of `flowcheck-node --check`.

    facts = ask(config, planned)             this machine: memory, cores, link speeds. Opens nothing
    budget(config, planned, facts)           pure

A ring bears a pause as long as it has room for what its port brings meanwhile. Counted are full RoCE packets at the
link's speed, all of them for one queue: RSS spreads connections and not bytes, so one queue may have to take a whole
port. Smaller packets fill a ring sooner.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dataplane.engines import find_engines
from dataplane.live import live_memory, memory_by_node
from dataplane.ports import link_speed, rx_queues
from dataplane.pydpdk.dmadev import PCI_ADDRESS
from dataplane.pydpdk.eal import available_bytes, free_huge_pages
from flowcheck.control.protocol import PEER_BYTES
from flowcheck.diagnose.doctor.machine import Machine, cpu_list
from flowcheck.errors import EnvironmentProblem, FlowcheckError, UserError
from flowcheck.node.check.journal_figures import JournalFigures, StoreFigures
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.config.nodes import meant_by
from flowcheck.node.doors.files import OTHERS, most_descriptors
from flowcheck.node.groups.ranges import SLOTS, wished
from flowcheck.node.ports.captures import PlannedCapture
from flowcheck.node.tokens import warnings_of
from flowcheck.node.versions.shadow import OPEN
from updater.ring import file_system

__all__ = ["EXAMPLE_MBPS", "Budget", "CaptureFigures", "MachineFacts", "ThreadPlace", "ask", "budget", "pause_ms"]

EXAMPLE_MBPS = 100_000  # where nobody says how fast a link is
LEAST_MTU = 1024  # of RoCE, where the settings do not say
# Ethernet, IPv4, UDP, BTH and ICRC; then the frame's checksum, preamble and gap
HEADERS = 14 + 20 + 8 + 12 + 4 + 4 + 20


@dataclass(frozen=True)
class MachineFacts:
    """available, huge_free: bytes of ordinary memory and of huge pages. huge_by_node: of those, by NUMA node. cpus:
    online. speeds: of devices, Mb/s, -1: not known. rx_queues: of devices, -1: not known. engine_nodes: NUMA nodes of
    DMA engines. node_cpus: CPUs of NUMA nodes. disk: replicas would lie on one."""

    available: int
    huge_free: int
    huge_by_node: Mapping[int, int]
    cpus: frozenset[int]
    speeds: Mapping[str, int]
    rx_queues: Mapping[str, int]
    engine_nodes: Mapping[str, int]
    node_cpus: Mapping[int, frozenset[int]]
    disk: bool = False


@dataclass(frozen=True)
class CaptureFigures:
    """buffers, rings, kernel: bytes of all its queues. ring_packets: of each queue's ring. mbps: of the link, -1: not
    known. pause_ms: that a ring bears if one queue takes the whole link, at EXAMPLE_MBPS where mbps is not known."""

    device: str
    node: int
    dump: str
    engines: tuple[str, ...]
    queues: int
    ring_packets: int
    buffers: int
    rings: int
    kernel: int
    mbps: int
    pause_ms: float


@dataclass(frozen=True)
class ThreadPlace:
    """core: None: wherever the kernel puts it."""

    name: str
    count: int
    core: int | None = None


@dataclass(frozen=True)
class Budget:
    """huge: packet memory lies in huge pages. dpdk, kernel: bytes of packet memory, DPDK's tables among them, and of
    rings in the kernel. replicas: bytes that all groups together may take at most. peers: of answers that peers give
    and are given, at most. copies: of copies and parity of other nodes, at most. switches: by switch over [nodes],
    HOST:PORT of the machines that it means. inboxes: of what trainers have sent and groups have not handled, at most,
    but for one state
    of a whole job. ordinary: bytes of ordinary memory that captures and these take. left: CPUs that no thread
    is pinned to. notes: what is unwise. problems: what cannot be. journal: if one is kept. store: if its
    gradients go there."""

    huge: bool
    captures: tuple[CaptureFigures, ...]
    dpdk: int
    kernel: int
    replicas: int
    peers: int
    copies: int
    switches: Mapping[str, Sequence[str]]
    inboxes: int
    ordinary: int
    available: int
    huge_free: int
    threads: tuple[ThreadPlace, ...]
    left: tuple[int, ...]
    notes: tuple[str, ...]
    problems: tuple[FlowcheckError, ...]
    journal: JournalFigures | None = None
    store: StoreFigures | None = None


def ask(config: NodeConfig, planned: Sequence[PlannedCapture], root: Path = Path("/")) -> MachineFacts:
    """Of this machine, or of a file system that looks like one."""
    machine, real = Machine(root), root == Path("/")
    nodes = {one.node for one in planned if one.node >= 0}
    folders = {node: f"sys/devices/system/node/node{node}" for node in nodes}
    return MachineFacts(
        available=available_bytes() if real else machine.meminfo("MemAvailable") << 10,
        huge_free=_bytes_of(free_huge_pages(root / "sys/kernel/mm/hugepages")),
        huge_by_node={n: _bytes_of(free_huge_pages(root / folder / "hugepages")) for n, folder in folders.items()},
        cpus=frozenset(cpu_list(machine.text("sys/devices/system/cpu/online") or "0")),
        speeds={one.device: link_speed(one.device, root) for one in planned},
        rx_queues={one.device: rx_queues(one.device, root) for one in planned},
        engine_nodes={engine.name: engine.node for engine in find_engines(root)},
        node_cpus={n: frozenset(cpu_list(machine.text(f"{folder}/cpulist"))) for n, folder in folders.items()},
        disk=_on_disk(config.replica.directory),
    )


def _on_disk(directory: Path) -> bool:
    """False where nobody can say: who makes replicas there finds out."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not file_system(descriptor)
    finally:
        os.close(descriptor)


def _bytes_of(huge_pages: Mapping[int, int]) -> int:
    return sum(kb * pages for kb, pages in huge_pages.items()) << 10


def pause_ms(packets: int, path_mtu: int, mbps: int) -> float:
    """Milliseconds until a ring of so many packets is full, at the speed of the link."""
    return packets * ((path_mtu or LEAST_MTU) + HEADERS) * 8 / (mbps * 1000)


def budget(config: NodeConfig, planned: Sequence[PlannedCapture], facts: MachineFacts) -> Budget:
    need = live_memory(one.live for one in planned)
    huge = facts.huge_free >= need.huge_mb << 20 if config.huge is None else config.huge
    captures = tuple(_figures(one, huge, facts) for one in planned)
    kernel = sum(one.kernel for one in captures)
    dpdk = (need.huge_mb if huge else need.total_mb) << 20
    peers = 2 * config.groups * len(config.replica.peers) * PEER_BYTES
    inboxes = config.groups * config.control.inbox_mb << 20
    pinned = {core for one in planned for core in (*one.live.cores, *one.settings.place_cores)}
    made = Budget(
        huge=huge, captures=captures, dpdk=dpdk, kernel=kernel, replicas=config.jobs * config.replica.memory_mb << 20,
        peers=peers, copies=_copies(config), switches=meant_by(config), inboxes=inboxes,
        ordinary=kernel + peers + inboxes + (0 if huge else dpdk),
        available=facts.available, huge_free=facts.huge_free,
        threads=tuple(_threads(config, planned)), left=tuple(sorted(facts.cpus - pinned)), notes=(), problems=(),
    )
    return replace(
        made, notes=tuple(_notes(config, planned, facts, made)), problems=tuple(_problems(config, planned, facts, made))
    )


def _figures(one: PlannedCapture, huge: bool, facts: MachineFacts) -> CaptureFigures:
    live, plan, mbps = one.live, one.live.queue_plan(), facts.speeds.get(one.device, -1)
    return CaptureFigures(
        one.device, one.node, live.dump, live.engines, live.queues, live.entries,
        buffers=live.queues * (plan.huge_pool_bytes if huge else plan.pool_bytes),
        rings=live.queues * plan.ring_bytes, kernel=live.queues * plan.kernel_bytes, mbps=mbps if mbps > 0 else -1,
        pause_ms=pause_ms(live.entries, live.path_mtu, mbps if mbps > 0 else EXAMPLE_MBPS),
    )


def _threads(config: NodeConfig, planned: Sequence[PlannedCapture]) -> Iterator[ThreadPlace]:
    for one in planned:
        if not one.live.cores:
            yield ThreadPlace(f"receive from {one.device}", one.live.queues)
        for queue, core in enumerate(one.live.cores):
            yield ThreadPlace(f"receive from {one.device} queue {queue}", 1, core)
    for one in planned:
        if not one.settings.place_cores:
            yield ThreadPlace(f"place from {one.device}, for all groups", one.live.queues)
        for queue, core in enumerate(one.settings.place_cores):
            yield ThreadPlace(f"place from {one.device} queue {queue}, for all groups", 1, core)
    yield ThreadPlace("follow a group: judge, publish", config.jobs)
    if config.replica.threads:
        yield ThreadPlace("updater's workers, of each group", config.replica.threads)
    if config.telemetry is not None:
        yield ThreadPlace("telemetry's workers, of each group", config.telemetry.threads)
    if config.replica.peers:
        yield ThreadPlace("ask a peer, of each group", config.groups * len(config.replica.peers))
    if config.replica.peer_versions:
        yield ThreadPlace("take a peer's version, of each group", config.groups)
    if config.journal is not None:
        yield ThreadPlace("copy and write a journal, of each group", 2 * config.groups)
    if config.common.nodes:
        yield ThreadPlace("tell another node of the job", len(config.common.nodes))
    yield ThreadPlace("main and control", 2)


def _problems(
    config: NodeConfig, planned: Sequence[PlannedCapture], facts: MachineFacts, made: Budget
) -> Iterator[FlowcheckError]:
    for one in planned:
        for key, cores in (("cores", one.live.cores), ("place_cores", one.settings.place_cores)):
            absent = [str(core) for core in cores if core not in facts.cpus]
            if absent:
                yield EnvironmentProblem(
                    f"this machine has no core {', '.join(absent)}", where=f"{one.table}.{key}",
                    remedy="cores that `lscpu -e` lists as online",
                )
        if 0 < (there := facts.rx_queues.get(one.device, -1)) < one.live.queues:
            yield EnvironmentProblem(
                f"{one.live.queues} queues, {one.device} has {there}", where=f"{one.table}.queues",
                remedy="fewer queues",
            )
        blind = [name for name in one.live.engines if PCI_ADDRESS.fullmatch(name)] if not made.huge else []
        if blind:
            yield EnvironmentProblem(
                f"DMA engine {blind[0]} reaches huge pages only, and packet memory would lie in ordinary memory",
                where=f"{one.table}.engines", remedy="huge pages (flowcheck doctor), or dump = \"copy\"",
            )
    for where, free, needed in _huge_pages(planned, facts, made) if made.huge else ():
        if needed > free:
            yield EnvironmentProblem(
                f"{_mb(needed)} MB of huge pages are needed{where}, {_mb(free)} MB are free", where="capture",
                remedy=f"{-(-needed // (2 << 20))} pages of 2 MB (flowcheck doctor says how), or smaller rings",
            )
    if made.ordinary > facts.available:
        yield EnvironmentProblem(
            f"captures{', peers' if made.peers else ''} and inboxes take {_mb(made.ordinary)} MB of ordinary memory,"
            f" {_mb(facts.available)} MB are available",
            where="capture", remedy="smaller rings, fewer queues or less as control.inbox_mb, or more memory",
        )
    elif made.replicas > _spare(made) and "memory_mb" in config.replica.model_fields_set:
        yield UserError(
            f"{_too_large(config)}, and {_mb(_spare(made))} MB are left beside the captures", where="replica.memory_mb",
            remedy=f"at most {_mb(_spare(made)) // config.jobs}",
        )
    elif made.copies > _room(config, made) and config.protect and "memory_mb" in config.protect.model_fields_set:
        shares = made.copies // (config.protect.memory_mb << 20)
        yield UserError(
            f"copies and parity may take {_mb(made.copies)} MB, and {_mb(_room(config, made))} MB are left beside the"
            " captures and replicas", where="protect.memory_mb", remedy=f"at most {_mb(_room(config, made)) // shares}",
        )


def _huge_pages(
    planned: Sequence[PlannedCapture], facts: MachineFacts, made: Budget
) -> Iterator[tuple[str, int, int]]:
    """(where, bytes free there, bytes needed there)."""
    shares = memory_by_node([(one.live, one.node) for one in planned])
    for node, mb in shares.items():
        yield f" on NUMA node {node}", facts.huge_by_node.get(node, 0), mb << 20
    if not shares:
        yield "", facts.huge_free, made.dpdk


def _notes(
    config: NodeConfig, planned: Sequence[PlannedCapture], facts: MachineFacts, made: Budget
) -> Iterator[str]:
    if not made.huge:
        yield "packet memory without huge pages: too slow for line rate"
    if made.replicas > _spare(made) and "memory_mb" not in config.replica.model_fields_set:
        yield (
            f"replica.memory_mb is not set: {_too_large(config)}, and {_mb(_spare(made))} MB are left. A smaller bound"
            " refuses such a job before it begins"
        )
    if facts.disk:
        yield (
            f"replica.directory {config.replica.directory} is on a disk: the kernel writes each version there, and"
            " updates wait for it. It is for tmpfs or hugetlbfs"
        )
    if config.protect and made.copies > _room(config, made) and "memory_mb" not in config.protect.model_fields_set:
        yield (
            f"protect.memory_mb is not set: copies and parity may take {_mb(made.copies)} MB, and"
            f" {_mb(_room(config, made))} MB are left"
        )
    if wished(config.replica) != config.replica.resync:
        yield (
            f"replica.slots: with {config.replica.slots} all state is asked for at once, and all ranks wait for it."
            f" Ranges, for which nobody waits, take {SLOTS}"
        )
    if config.api is not None and not config.shadow:
        yield OPEN
    needed, limit = OTHERS + 2 * config.control.connections + config.control.strangers, most_descriptors()
    if needed > limit:
        yield (
            f"control.connections and control.strangers may take {needed} descriptors, and this process may have"
            f" {limit}: fewer strangers are let in. Raise its limit (ulimit -Hn, LimitNOFILE=)"
        )
    yield from warnings_of(config)
    if not made.left:
        yield "a thread is pinned to each core: groups, updates and the kernel have none for themselves"
    for one in planned:
        near = facts.node_cpus.get(one.node)
        for key, cores in (("cores", one.live.cores), ("place_cores", one.settings.place_cores)):
            far = [str(core) for core in cores if near and core not in near]
            if far:
                yield f"{one.table}.{key}: {', '.join(far)} on another NUMA node than {one.device} (node {one.node})"
        nodes = facts.engine_nodes
        far = [name for name in one.live.engines if min(one.node, nodes.get(name, -1)) >= 0 and nodes[name] != one.node]
        if far:
            yield f"{one.table}.engines: {', '.join(far)} on another NUMA node than {one.device} (node {one.node})"
        if one.live.warning:
            yield one.live.warning


def _too_large(config: NodeConfig) -> str:
    groups, most = config.jobs, config.replica.memory_mb
    return f"a job may take {most} MB" if groups == 1 else f"{groups} groups of {most} MB may take {groups * most} MB"


def _spare(made: Budget) -> int:
    """Bytes that are left for replicas and gradients: ordinary memory, and huge pages for replicas on hugetlbfs."""
    return max(0, made.available - made.ordinary) + max(0, made.huge_free - (made.dpdk if made.huge else 0))


def _copies(config: NodeConfig) -> int:
    """Bytes of all copies, and of all parity, at most."""
    protect = config.protect
    if protect is None:
        return 0
    return (bool(protect.copies or config.nodes.registry) + (protect.code is not None)) * protect.memory_mb << 20


def _room(config: NodeConfig, made: Budget) -> int:
    """Bytes left for copies and parity, without those of replicas if these have a bound of their own."""
    return max(0, _spare(made) - (made.replicas if "memory_mb" in config.replica.model_fields_set else 0))


def _mb(size: int) -> int:
    return size >> 20
