"""From the settings' captures to what the dataplane takes: rings, engines and streams of each mirror port.

    planned = plan_captures(config)          asks the machine for interfaces and DMA engines, opens nothing
    planned[0].live                          for dataplane.live

Streams are numbered over all captures, in the order of the settings: the queues of the first one, then those of the
second. A group reads all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dataplane.engines import EngineDevice, choose, find_engines
from dataplane.live import LiveConfig
from dataplane.ports import numa_node
from dataplane.pydpdk.errors import DpdkError
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node.config.capture import AUTO, LARGEST_RING, Capture
from flowcheck.node.config.node import NodeConfig

__all__ = ["PlannedCapture", "naming", "place_cores", "plan_captures", "ring_memory"]

LEAST_RING = 64
VIRTUAL = "dma_"  # how the names of engines without hardware begin: DPDK makes them when they are asked for


@dataclass(frozen=True)
class PlannedCapture:
    """table: what errors call its table of the settings. node: NUMA node of the device, -1: not known, or only one."""

    table: str
    settings: Capture
    live: LiveConfig
    node: int

    @property
    def device(self) -> str:
        return self.live.device


def plan_captures(config: NodeConfig, root: Path = Path("/")) -> list[PlannedCapture]:
    """root: of the file system, for tests.

    Raises:
        EnvironmentProblem: an interface or an engine is not there, or cannot be used.
        UserError: settings that do not fit each other.
    """
    planned: list[PlannedCapture] = []
    engines = _Engines(find_engines(root), config.capture)
    stream = 0
    for i, settings in enumerate(config.capture):
        table, node = config.table(i), numa_node(settings.device, root)
        try:
            live = LiveConfig(
                settings.device, path_mtu=settings.path_mtu, queues=settings.queues, cores=settings.cores,
                dump=settings.dump, ring_size=settings.ring_size, iteration_bytes=settings.iteration_bytes or 0,
                engines=engines.of(settings, table, node),
                streams=tuple(range(stream, stream + settings.queues)),
            )
        except DpdkError as error:
            raise EnvironmentProblem(error.said, where=table, remedy=error.remedy) from None
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise UserError(str(error), where=table, remedy="docs/use/settings.md has every key") from None
        if settings.ring_mb is not None:
            live = _filling(live, settings.ring_mb, table)
        stream += settings.queues
        planned.append(PlannedCapture(table, settings, live, node))
    return planned


@contextmanager
def naming(capture: PlannedCapture) -> Iterator[None]:
    """What DPDK refuses names the device: an engine or a core alone does not say whose it is."""
    try:
        yield
    except DpdkError as error:
        if capture.device in error.what:
            raise
        raise DpdkError(error.errno or 0, f"{capture.device}: {error.what}", error.remedy) from None


def place_cores(planned: Iterable[PlannedCapture]) -> tuple[int | None, ...]:
    """Of the placing thread of each queue, over all captures. None: wherever the kernel puts it."""
    return tuple(core for one in planned for core in one.settings.place_cores or [None] * one.live.queues)


def ring_memory(live: LiveConfig) -> int:
    """Bytes of one queue's ring: entries and slots; with `hold`, the packet buffers that it keeps."""
    plan = live.queue_plan()
    return plan.ring_bytes + (plan.huge_pool_bytes if live.dump == "hold" else 0)


def _filling(live: LiveConfig, ring_mb: int, table: str) -> LiveConfig:
    """The same with the largest ring that has room in ring_mb MiB."""
    size, fits = LEAST_RING, None
    while size <= LARGEST_RING and ring_memory(asked := replace(live, ring_size=size)) <= ring_mb << 20:
        size, fits = 2 * size, asked
    if fits is None:
        least = -(-ring_memory(replace(live, ring_size=LEAST_RING)) // (1 << 20))
        raise UserError(
            f"{ring_mb} MiB hold no ring of {LEAST_RING} packets, which takes {least}", where=f"{table}.ring_mb",
            remedy=f"{least} or more",
        )
    return fits


class _Engines:
    """The machine's DMA engines. Each serves one queue, so what one capture names, "auto" does not give to another."""

    def __init__(self, found: Iterable[EngineDevice], captures: Sequence[Capture]) -> None:
        self._found = {engine.name: engine for engine in found}
        self._taken = {name for capture in captures for name in capture.engines}

    def of(self, settings: Capture, table: str, node: int) -> tuple[str, ...]:
        if settings.engines != AUTO:
            for name in settings.engines:
                self._check(name, f"{table}.engines")
            return settings.engines
        try:
            chosen = choose([e for e in self._found.values() if e.name not in self._taken], settings.queues, node)
        except ValueError as error:
            raise EnvironmentProblem(
                str(error), where=f"{table}.engines",
                remedy='flowcheck doctor says what each engine lacks; dump = "copy" needs none',
            ) from None
        self._taken.update(chosen)
        return chosen

    def _check(self, name: str, where: str) -> None:
        if name.startswith(VIRTUAL):
            return
        engine = self._found.get(name)
        if engine is None:
            raise EnvironmentProblem(
                f"this machine has no DMA engine {name}", where=where,
                remedy=f"one of: {', '.join(self._found) or 'none here'}; or dma_skeleton, which is for tests",
            )
        if engine.usable:
            raise EnvironmentProblem(f"DMA engine {name} cannot be used", where=where, remedy=engine.usable)
