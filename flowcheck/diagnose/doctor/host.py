"""The checks of the machine as a whole: libraries, rights, memory, cores, engines, and what is measured on it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from dataplane.engines import find_engines
from flowcheck.diagnose.doctor.machine import PCI_ADDRESS, Finding, Machine, Wanted, cpu_list
from flowcheck.errors import UserError

__all__ = [
    "check_cores", "check_dpdk", "check_engines", "check_huge_pages", "check_placing", "check_privileges",
    "check_updating",
]

DPDK = ((22, 11), (24, 11))
NET_RAW, NET_ADMIN, IPC_LOCK, SYS_ADMIN = 13, 12, 14, 21


def check_dpdk(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    try:
        from dataplane.pydpdk.ffi import ffi, lib
    except ImportError as exc:
        yield Finding("dpdk", "unusable", str(exc), "apt-get install libdpdk-dev pkg-config && make build")
        return
    text = ffi.string(lib.rte_version()).decode()
    found = re.search(r"(\d+)\.(\d+)", text)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if DPDK[0] <= version <= DPDK[1]:
        yield Finding("dpdk", "ok", text)
    else:
        yield Finding(
            "dpdk", "warning", f"{text}: built and tested with 22.11 to 24.11", "install a DPDK of that range"
        )


def check_privileges(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    needs = {NET_RAW: "CAP_NET_RAW"} if wanted.devices else {}
    if any(device.startswith("af_xdp:") for device in wanted.devices):
        needs |= {NET_ADMIN: "CAP_NET_ADMIN", SYS_ADMIN: "CAP_SYS_ADMIN"}
    if any(PCI_ADDRESS.fullmatch(device) for device in wanted.devices):
        needs |= {IPC_LOCK: "CAP_IPC_LOCK", NET_ADMIN: "CAP_NET_ADMIN"}
    missing = [name for bit, name in needs.items() if not machine.capability(bit)]
    if missing:
        yield Finding(
            "privileges", "unusable", f"this user lacks {', '.join(missing)}", "run as root: sudo flowcheck ..."
        )
    else:
        yield Finding("privileges", "ok", "enough for " + (", ".join(wanted.devices) or "replay (nothing needed)"))


def check_huge_pages(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    free = 0
    for folder in machine.folder("sys/kernel/mm/hugepages"):
        size = int(folder.name.removeprefix("hugepages-").removesuffix("kB"))
        pages = machine.number(f"sys/kernel/mm/hugepages/{folder.name}/free_hugepages", 0)
        pages -= machine.number(f"sys/kernel/mm/hugepages/{folder.name}/resv_hugepages", 0)
        free += size * pages >> 10
    if free >= wanted.memory_mb:
        yield Finding("huge pages", "ok", f"{free} MB free, {wanted.memory_mb} MB wanted")
    else:
        total = machine.meminfo("HugePages_Total") + (wanted.memory_mb - free + 1) // 2
        physical = any(PCI_ADDRESS.fullmatch(device) for device in wanted.devices)
        yield Finding(
            "huge pages",
            "unusable" if physical else "warning",
            f"{free} MB free, {wanted.memory_mb} MB wanted: "
            + ("a physical NIC needs them" if physical else "ordinary memory is used, too slow for line rate"),
            f"echo {total} > /proc/sys/vm/nr_hugepages (at boot: hugepages={total}, before memory is fragmented)",
        )
    if " hugetlbfs " in machine.text("proc/mounts"):
        yield Finding("huge page mount", "ok", "hugetlbfs is mounted")
    else:
        yield Finding(
            "huge page mount", "ok", "no hugetlbfs is mounted; not needed, pages are taken without files (--in-memory)"
        )
    if wanted.memory_mb > (available := machine.meminfo("MemAvailable") >> 10) + free:
        text = f"{available} MB available, {wanted.memory_mb} MB wanted"
        yield Finding("memory", "unusable", text, "use smaller rings")


def check_cores(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    online = cpu_list(machine.text("sys/devices/system/cpu/online") or "0")
    isolated = cpu_list(machine.text("sys/devices/system/cpu/isolated"))
    absent = set(wanted.cores) - (os.sched_getaffinity(0) if machine.root == Path("/") else online)
    if absent:
        text = f"cores {sorted(absent)} cannot be used by this process (online: {len(online)})"
        yield Finding("cores", "unusable", text, "name other cores, or lift taskset and cgroup limits")
    elif len(online) < 2 + len(wanted.cores):
        text = f"{len(online)} cores: an rx thread, a placing thread and Python will share them"
        yield Finding(
            "cores", "warning", text, "use a machine with a core for each rx thread, each placing thread and one more"
        )
    else:
        yield Finding("cores", "ok", f"{len(online)} cores online")
    shared = set(wanted.cores) - isolated
    if wanted.cores and shared:
        list_ = ",".join(map(str, sorted(wanted.cores)))
        yield Finding(
            "isolated cores", "warning", f"rx cores {sorted(shared)} also run other processes: bursts will be late",
            f"boot with isolcpus={list_} nohz_full={list_} rcu_nocbs={list_}",
        )
    for core in wanted.cores:
        governor = machine.text(f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor")
        if governor not in ("", "performance"):
            yield Finding(
                "cpu frequency", "warning", f"core {core} has the governor {governor}",
                f"echo performance > /sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor",
            )


def _chosen(check: str, choose: Callable[[], object]) -> Finding:
    """How something is done here that is measured; flowcheck.rebuild.calibration says how."""
    try:
        return Finding(check, "ok", str(choose()))
    except ImportError as exc:
        return Finding(check, "unusable", str(exc), "make build")
    except UserError as exc:
        return Finding(check, "unusable", f"{exc.where}: {exc.what}", exc.remedy)


def check_placing(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    huge, here = bool(machine.meminfo("HugePages_Free")), machine.root == Path("/")

    def choose() -> object:
        from flowcheck.rebuild.calibration import settle

        return settle(wanted.path_mtu, huge, measure=here, remember=False)

    yield _chosen("placing", choose)


def check_updating(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    def choose() -> object:
        from flowcheck.rebuild.calibration import look_at_updates

        return look_at_updates(measure=machine.root == Path("/"))

    yield _chosen("updating", choose)


def check_engines(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    engines = find_engines(machine.root)
    usable = [engine for engine in engines if not engine.usable]
    if not engines:
        yield Finding("dma engines", "ok", "there are none (I/OAT, DSA): the dump strategies copy and hold need none")
    for engine in engines:
        if engine.usable:
            text = f"{engine.name} ({engine.kind}) is not usable: {engine.usable}"
            yield Finding("dma engines", "warning", text, "docs/understand/dataplane.md; or dump by copy or hold")
    if usable:
        names = ", ".join(f"{engine.name} ({engine.kind}, NUMA {engine.node})" for engine in usable)
        yield Finding("dma engines", "ok", f"usable: {names}")
