"""The environment abstraction layer, once per process.

DPDK cannot be initialised twice in a process, not even after a cleanup. So `Eal.start` returns the one
that runs, leaving its `with` block closes everything that was opened on it but keeps it, and the process's
end shuts it down. Flags are an implementation detail:

    huge pages free   --in-memory                 no page files (rtemap_*) on a hugetlbfs
    ... by node       --socket-mem M,N            where the NICs are; -m takes them from CPU 0's node
    otherwise         --no-huge --no-shconf -m N  ordinary memory, no privileges needed
    always            --no-telemetry --lcores 0@(every CPU the caller may use)
    devices named     -a ADDRESS each, nothing else on the PCI bus is touched
    none named        --no-pci

rte_eal_init pins the calling thread, and with it every thread started later, to one CPU: the floating
lcore prevents that and the caller's mask is put back in any case.
"""

from __future__ import annotations

import atexit
import errno
import os
import resource
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from dataplane.pydpdk.errors import DpdkError, NotEnoughMemory
from dataplane.pydpdk.ffi import ffi, lib
from dataplane.pydpdk.resource import Resource

__all__ = ["DEFAULT_MEMORY_MB", "Eal", "available_bytes", "eal_arguments", "free_huge_pages"]

DEFAULT_MEMORY_MB = 256
EAL_ADDRESSES_MB = 64  # threads, tables
EAL_HUGE_ADDRESSES_MB = 1 << 20  # it reserves addresses for all huge pages that there could ever be
HUGE_PAGES = Path("/sys/kernel/mm/hugepages")
NODES = Path("/sys/devices/system/node")
ANYWHERE: Mapping[int, int] = MappingProxyType({})


def free_huge_pages(root: Path = HUGE_PAGES) -> dict[int, int]:
    """Unreserved huge pages of this machine, or of the node whose folder root is, {page size in kB: pages}; empty
    where there are none."""
    found = {}
    for folder in sorted(root.glob("hugepages-*kB")):
        reserved = folder / "resv_hugepages"  # counted for the whole machine only
        try:
            free = int((folder / "free_hugepages").read_text()) - int(reserved.read_text() if reserved.exists() else 0)
        except (OSError, ValueError):
            continue
        if free > 0:
            found[int(folder.name.removeprefix("hugepages-").removesuffix("kB"))] = free
    return found


def available_bytes() -> int:
    """Ordinary memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def eal_arguments(
    cpus: Collection[int], memory_mb: int, huge: bool, devices: Sequence[str] = (), nodes: Mapping[int, int] = ANYWHERE
) -> list[str]:
    """The command line EAL gets, without the program's name. devices: PCI addresses it may use. nodes: MB of huge
    pages by NUMA node, none: memory_mb wherever."""
    where = ["--in-memory"] if huge else ["--no-huge", "--no-shconf"]
    shares = ["--socket-mem", ",".join(str(nodes.get(node, 0)) for node in range(max(nodes, default=-1) + 1))]
    allowed = [word for device in devices for word in ("-a", device)]
    return [
        *where,
        *(shares if huge and nodes else ["-m", str(memory_mb)]),
        "--lcores", f"0@({','.join(map(str, sorted(cpus)))})",
        *(allowed or ["--no-pci"]), "--no-telemetry",
        # DMA engines are given virtual addresses (src/dump_dma.c); a device that needs physical ones is refused.
        "--iova-mode", "va",
        "--log-level", "*:error",
    ]


@dataclass(frozen=True, slots=True)
class _Memory:
    huge: bool
    free_mb: int


def _choose_memory(memory_mb: int, huge: bool | None, nodes: Mapping[int, int]) -> _Memory:
    places = [(NODES / f"node{node}/hugepages", share, node) for node, share in nodes.items()]
    all_mb, short = 0, False
    for root, share, node in places or [(HUGE_PAGES, memory_mb, -1)]:
        free = free_huge_pages(root)
        free_mb = sum(kb * pages for kb, pages in free.items()) // 1024
        all_mb, short = all_mb + free_mb, short or free_mb < share
        if huge and free_mb < share:
            where, file = "", "/proc/sys/vm/nr_hugepages"
            if node >= 0:
                where, file = f" on NUMA node {node}", f"{root}/hugepages-2048kB/nr_hugepages"
            raise NotEnoughMemory(
                f"starting DPDK with huge pages: {share} MB asked for, {free_mb} MB free{where} ({free or 'none'})",
                f"echo {-(-share // 2)} > {file} (2 MB pages), or run without huge pages",
            )
    chosen = _Memory(not short if huge is None else huge, all_mb)
    # With less, EAL of 23.11 tries one address after the other, practically for ever.
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        wanted = EAL_HUGE_ADDRESSES_MB if chosen.huge else memory_mb + EAL_ADDRESSES_MB
        if mapped + (wanted << 20) > most:
            raise NotEnoughMemory(
                f"starting DPDK: it wants {wanted} MB of addresses, this process has {mapped >> 20} MB of at most "
                f"{most >> 20} MB",
                "ulimit -v unlimited",
            )
    # Asked for more than there is, --no-huge ends in a segmentation fault inside rte_eal_init.
    if not chosen.huge and memory_mb > (available := available_bytes() >> 20):
        raise NotEnoughMemory(
            f"starting DPDK without huge pages: {memory_mb} MB asked for, {available} MB available",
            "more memory, or fewer and smaller rings",
        )
    return chosen


class Eal(Resource):
    """DPDK in this process. Create it with `Eal.start`.

    `with Eal.start(memory_mb=64) as eal:` closes ports, pools and rx threads at its end.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _running: ClassVar[Eal | None] = None
    _spent: ClassVar[str] = ""  # why it can never run (again) in this process

    def __init__(self, memory_mb: int, memory: _Memory, devices: tuple[str, ...], nodes: Mapping[int, int]) -> None:
        super().__init__()
        self.memory_mb = memory_mb
        self.devices = devices
        self.huge = memory.huge
        self._free_mb = memory.free_mb
        self._pid = os.getpid()
        self.arguments = eal_arguments(os.sched_getaffinity(0), memory_mb, memory.huge, devices, nodes)
        # EAL keeps pointers into its arguments.
        self._argv = [ffi.new("char[]", text.encode()) for text in ["flowcheck", *self.arguments]]
        self._argv_pointer = ffi.new("char *[]", [*self._argv, ffi.NULL])

    @classmethod
    def start(
        cls, *, memory_mb: int = DEFAULT_MEMORY_MB, huge: bool | None = None, devices: Sequence[str] = (),
        nodes: Mapping[int, int] = ANYWHERE,
    ) -> Eal:
        """Initialises DPDK, or returns the one that runs.

        memory_mb: what DPDK's own pools need, and with huge pages the rings too. huge: None takes huge pages
        if enough are free, True insists, False never. devices: PCI addresses (NICs, DMA engines) that this
        process will use; no other is touched. nodes: MB of huge pages by NUMA node, where the NICs are; none: memory_mb
        wherever.

        Raises:
            NotEnoughMemory: huge pages asked for and not there, or more memory than the running one has.
            DpdkError: EAL refused, was shut down before, or runs in the other memory mode.
        """
        if memory_mb < 1:
            raise ValueError(f"memory_mb is {memory_mb}, at least 1 is needed")
        with cls._lock:
            if cls._running is not None:
                cls._running._check_reuse(memory_mb, huge, devices)
                return cls._running
            if cls._spent:
                raise DpdkError(errno.EALREADY, f"starting DPDK: {cls._spent}", "a new process")
            eal = cls(memory_mb, _choose_memory(memory_mb, huge, nodes), tuple(devices), nodes)
            eal._initialise()
            cls._running = eal
            atexit.register(eal._shut_down)
            return eal

    def _initialise(self) -> None:
        mask = os.sched_getaffinity(0)
        rc = lib.rte_eal_init(len(self._argv), self._argv_pointer)
        code = lib.fc_rte_errno()
        os.sched_setaffinity(0, mask)
        if rc < 0:
            type(self)._spent = "an earlier start in this process failed, and DPDK allows one attempt"
            raise DpdkError(
                code, f"starting DPDK ({' '.join(self.arguments)})",
                "see the EAL lines above; without privileges or huge pages use huge=False",
            )

    def _check_reuse(self, memory_mb: int, huge: bool | None, devices: Sequence[str]) -> None:
        if self._pid != os.getpid():
            raise DpdkError(errno.ECHILD, "DPDK was started before this process forked", "a fresh process (spawn)")
        if huge is not None and huge != self.huge:
            raise DpdkError(errno.EALREADY, f"DPDK already runs in this process: {self.describe()}", "a new process")
        if absent := set(devices) - set(self.devices):
            raise DpdkError(
                errno.EALREADY, f"DPDK already runs in this process without {', '.join(sorted(absent))}",
                "a new process, with every device named at the start",
            )
        # With huge pages EAL maps more on demand; the one mapping of --no-huge cannot grow.
        if not self.huge and memory_mb > self.memory_mb:
            raise NotEnoughMemory(
                f"DPDK runs in this process with {self.memory_mb} MB, {memory_mb} MB are needed, "
                "and without huge pages it cannot grow",
                f"start it with memory_mb={memory_mb} first, or use a new process",
            )

    @property
    def version(self) -> str:
        return str(ffi.string(lib.rte_version()).decode())

    def describe(self) -> str:
        """One line for a person: version, kind and amount of memory."""
        if self.huge:
            return f"{self.version}, huge pages without page files, {self.memory_mb} MB"
        return (
            f"{self.version} WITHOUT huge pages ({self._free_mb} MB free, {self.memory_mb} MB wanted), "
            "in ordinary memory: fine for replay, too slow for line rate"
        )

    def close(self) -> None:
        """Closes everything opened on it. DPDK itself stays until the process ends (see above)."""
        self.close_children()

    def _release(self) -> None:
        lib.rte_eal_cleanup()

    def _shut_down(self) -> None:
        if self._pid != os.getpid():
            return
        super().close()
        type(self)._running = None
        type(self)._spent = "it was shut down, and DPDK cannot be initialised again"
