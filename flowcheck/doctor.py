"""`flowcheck doctor`: can this machine capture, and which command mends what is wrong.

Every check reads (/proc, /sys, ioctl), changes nothing, and gives findings: ok, warning (it runs, but slower or
with a risk that is named) or unusable. What depends on a device is checked for the devices named: --device
af_packet:eth1, af_xdp:eth1, or a PCI address. docs/doctor.md lists the checks.

Exit status: 0 all ok, 1 warnings, 2 unusable.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import re
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console

from dataplane.engines import find_engines
from flowcheck.errors import UserError

__all__ = ["Finding", "Machine", "Wanted", "examine", "run"]

SCHEMA = "flowcheck-doctor/1"
Level = Literal["ok", "warning", "unusable"]
EXIT = {"ok": 0, "warning": 1, "unusable": 2}
PCI_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
DPDK = ((22, 11), (24, 11))
NET_RAW, NET_ADMIN, IPC_LOCK, SYS_ADMIN = 13, 12, 14, 21
SIOCETHTOOL, ETHTOOL_GGRO, ETHTOOL_GFLAGS, FLAG_LRO = 0x8946, 0x2B, 0x25, 1 << 15
SIOCGIFFLAGS, IFF_UP = 0x8913, 1
MELLANOX = "0x15b3"
ROCE_HEADERS = 80  # IPv6, UDP, BTH, RETH, immediate, ICRC


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence in plain words. remedy: a command where there is one, else what to do; "" if all is well."""

    check: str
    level: Level
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Wanted:
    """What the node is to do here. memory_mb: packet buffers and rings; cores: of rx threads."""

    devices: tuple[str, ...] = ()
    path_mtu: int = 1024
    memory_mb: int = 512
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Machine:
    """Where to look. Tests give a tree of their own as root."""

    root: Path = field(default=Path("/"))

    def text(self, path: str) -> str:
        """Content of a file, "" if there is none."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str, default: int = -1) -> int:
        try:
            return int(self.text(path), 0)
        except ValueError:
            return default

    def folder(self, path: str) -> list[Path]:
        return sorted((self.root / path).glob("*"))

    def meminfo(self, key: str) -> int:
        """Kilobytes, or pages for HugePages_*."""
        found = re.search(rf"^{key}:\s+(\d+)", self.text("proc/meminfo"), re.MULTILINE)
        return int(found[1]) if found else 0

    def capability(self, bit: int) -> bool:
        found = re.search(r"^CapEff:\s+([0-9a-f]+)", self.text("proc/self/status"), re.MULTILINE)
        return bool(found and int(found[1], 16) >> bit & 1)


def cpu_list(text: str) -> set[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


# -- the machine -------------------------------------------------------------------------------------------


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
        yield Finding("memory", "unusable", f"{available} MB available, {wanted.memory_mb} MB wanted", "smaller rings")


def check_cores(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    online = cpu_list(machine.text("sys/devices/system/cpu/online") or "0")
    isolated = cpu_list(machine.text("sys/devices/system/cpu/isolated"))
    absent = set(wanted.cores) - (os.sched_getaffinity(0) if machine.root == Path("/") else online)
    if absent:
        text = f"cores {sorted(absent)} cannot be used by this process (online: {len(online)})"
        yield Finding("cores", "unusable", text, "other cores, or taskset and cgroup limits lifted")
    elif len(online) < 2 + len(wanted.cores):
        text = f"{len(online)} cores: an rx thread, a placing thread and Python will share them"
        yield Finding(
            "cores", "warning", text, "a machine with a core for each rx thread, each placing thread and one more"
        )
    else:
        yield Finding("cores", "ok", f"{len(online)} cores online")
    shared = set(wanted.cores) - isolated
    if wanted.cores and shared:
        list_ = ",".join(map(str, sorted(wanted.cores)))
        yield Finding(
            "isolated cores", "warning", f"rx cores {sorted(shared)} also run other processes: bursts will be late",
            f"boot with isolcpus={list_} nohz_full={list_} rcu_nocbs={list_}",
        )  # fmt: skip
    for core in wanted.cores:
        governor = machine.text(f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor")
        if governor not in ("", "performance"):
            yield Finding(
                "cpu frequency", "warning", f"core {core} has the governor {governor}",
                f"echo performance > /sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor",
            )  # fmt: skip


def check_placing(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    try:
        from flowcheck.calibration import settle
    except ImportError as exc:
        yield Finding("placing", "unusable", str(exc), "make build")
        return
    huge, here = bool(machine.meminfo("HugePages_Free")), machine.root == Path("/")
    try:
        yield Finding("placing", "ok", str(settle(wanted.path_mtu, huge, measure=here, remember=False)))
    except UserError as exc:
        yield Finding("placing", "unusable", f"{exc.where}: {exc.what}", exc.remedy)


def check_engines(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    engines = find_engines(machine.root)
    usable = [engine for engine in engines if not engine.usable]
    if not engines:
        yield Finding("dma engines", "ok", "none (I/OAT, DSA): use dump copy or hold, the right choice without them")
    for engine in engines:
        if engine.usable:
            text = f"{engine.name} ({engine.kind}) is not usable: {engine.usable}"
            yield Finding("dma engines", "warning", text, "docs/dataplane.md, DMA engines; or dump copy or hold")
    if usable:
        names = ", ".join(f"{engine.name} ({engine.kind}, NUMA {engine.node})" for engine in usable)
        yield Finding("dma engines", "ok", f"usable: {names}")


def _driver_of(machine: Machine, device: str) -> str:
    """Name of the poll mode driver, "" where that is not known."""
    if PCI_ADDRESS.fullmatch(device):
        vendor = machine.text(f"sys/bus/pci/devices/{device.lower()}/vendor")
        return "mlx5" if vendor == MELLANOX else ""
    kind = device.partition(":")[0]
    return kind if kind in ("af_packet", "af_xdp") else ""


def check_drivers(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Where DPDK's drivers lie as libraries; a DPDK built into one file or elsewhere is not looked into."""
    names = {name for name in (_driver_of(machine, device) for device in wanted.devices) if name}
    folders = sorted(machine.root.glob("usr/lib*/*/dpdk/pmds-*"))
    for name in sorted(names) if folders else ():
        if not any(file for folder in folders for file in folder.glob(f"librte_net_{name}.so*")):
            text = f"DPDK's driver net_{name} is not installed ({folders[-1].name})"
            yield Finding("drivers", "unusable", text, f"apt-get install 'librte-net-{name.replace('_', '-')}*'")


# -- the devices -------------------------------------------------------------------------------------------


def check_devices(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    if not wanted.devices:
        yield Finding("devices", "ok", "none named: --device af_packet:IFACE, af_xdp:IFACE or a PCI address")
    for device in wanted.devices:
        kind, _, interface = device.partition(":")
        if PCI_ADDRESS.fullmatch(device):
            yield from _pci(machine, wanted, device)
        elif kind in ("af_packet", "af_xdp") and interface:
            yield from _interface(machine, wanted, kind, interface)
        else:
            yield Finding(
                device, "unusable", "not a capture device", "--device af_packet:IFACE, af_xdp:IFACE or a PCI address"
            )


def _pci(machine: Machine, wanted: Wanted, device: str) -> Iterator[Finding]:
    base = f"sys/bus/pci/devices/{device.lower()}"
    if not (machine.root / base).exists():
        yield Finding(device, "unusable", "there is no such PCI device", "lspci -D | grep -i ethernet")
        return
    link = machine.root / base / "driver"
    driver = link.resolve().name if link.exists() else "no driver"
    mellanox = machine.text(f"{base}/vendor") == MELLANOX
    if mellanox and driver == "mlx5_core":
        yield Finding(device, "ok", "ConnectX with mlx5_core, as the mlx5 PMD wants it (it stays in the kernel)")
        if not machine.folder("sys/class/infiniband"):
            yield Finding(
                device,
                "unusable",
                "its RDMA device is missing",
                "modprobe mlx5_ib; apt-get install rdma-core ibverbs-providers",
            )
    elif mellanox:
        yield Finding(device, "unusable", f"ConnectX bound to {driver}", f"dpdk-devbind.py -b mlx5_core {device}")
    elif driver == "vfio-pci":
        yield Finding(device, "ok", "bound to vfio-pci")
        if not (machine.root / "dev/vfio").exists():
            yield Finding(device, "unusable", "there is no /dev/vfio", "modprobe vfio-pci; in a container, pass it in")
        if not machine.folder("sys/kernel/iommu_groups"):
            yield Finding(
                device, "unusable", "no IOMMU: DPDK runs with virtual addresses only",
                "boot with intel_iommu=on or amd_iommu=on, iommu=pt",
            )  # fmt: skip
    else:
        yield Finding(
            device,
            "unusable",
            f"bound to {driver}: DPDK cannot use it",
            f"modprobe vfio-pci; dpdk-devbind.py -b vfio-pci {device}",
        )
    yield from _numa(machine, wanted, device, machine.number(f"{base}/numa_node"))


def _numa(machine: Machine, wanted: Wanted, device: str, node: int) -> Iterator[Finding]:
    if node < 0:
        return
    pages = f"sys/devices/system/node/node{node}/hugepages/hugepages-2048kB"
    free = 2 * machine.number(f"{pages}/free_hugepages", 0)
    if machine.text(f"{pages}/free_hugepages") and free < wanted.memory_mb:
        text = f"{free} MB of 2 MB pages free on its NUMA node {node}, {wanted.memory_mb} MB wanted"
        yield Finding(device, "warning", text, f"echo {(wanted.memory_mb + 1) // 2} > /{pages}/nr_hugepages")
    near = cpu_list(machine.text(f"sys/devices/system/node/node{node}/cpulist"))
    far = sorted(set(wanted.cores) - near)
    if far:
        yield Finding(
            device, "warning", f"cores {far} are on another NUMA node than the NIC (node {node})",
            f"cores of {machine.text(f'sys/devices/system/node/node{node}/cpulist')}",
        )  # fmt: skip
    for engine in find_engines(machine.root):
        if not engine.usable and engine.node not in (node, -1):
            text = f"DMA engine {engine.name} is on NUMA node {engine.node}, the NIC on {node}"
            yield Finding(device, "warning", text, "engines of the NIC's node")


def _ethtool(interface: str, command: int) -> int:
    """A value of the old ethtool interface, 0 where the driver does not say."""
    value = array.array("B", struct.pack("II", command, 0))
    request = struct.pack("16sP16x", interface.encode()[:15], value.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            fcntl.ioctl(asked, SIOCETHTOOL, request)
        except OSError:
            return 0
    return int(struct.unpack("II", value)[1])


def _up(interface: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, SIOCGIFFLAGS, struct.pack("16sh14x", interface.encode()[:15], 0))
    return bool(struct.unpack("16sh14x", answer)[1] & IFF_UP)


def _interface(machine: Machine, wanted: Wanted, kind: str, interface: str) -> Iterator[Finding]:
    from dataplane.pydpdk.errors import DpdkError

    name = f"{kind}:{interface}"
    try:
        from dataplane.ports import AF_XDP_MTU, interface_mtu

        mtu = interface_mtu(interface)
    except DpdkError as exc:
        yield Finding(name, "unusable", exc.what + " does not exist", exc.remedy)
        return
    if not _up(interface):
        yield Finding(name, "unusable", "the interface is down", f"ip link set {interface} up")
    need = wanted.path_mtu + ROCE_HEADERS
    if mtu < need:
        text = f"MTU {mtu}: RoCE packets of path MTU {wanted.path_mtu} need {need} and would be dropped"
        yield Finding(name, "unusable", text, f"ip link set {interface} mtu 9000")
    elif kind == "af_xdp" and mtu > AF_XDP_MTU:
        text = f"MTU {mtu}: af_xdp receives nothing or does not load above {AF_XDP_MTU}"
        yield Finding(
            name, "unusable", text, f"ip link set {interface} mtu {AF_XDP_MTU}, or --device af_packet:{interface}"
        )
    else:
        yield Finding(name, "ok", f"MTU {mtu}, enough for path MTU {wanted.path_mtu}")
    for offload, on in (
        ("gro", _ethtool(interface, ETHTOOL_GGRO) != 0),
        ("lro", bool(_ethtool(interface, ETHTOOL_GFLAGS) & FLAG_LRO)),
    ):
        if on:
            text = f"{offload} is on: packets may arrive joined, larger than a slot"
            yield Finding(name, "warning", text, f"ethtool -K {interface} {offload} off")
    if kind == "af_packet":
        text = "af_packet: a copy in the kernel per packet; its drops are counted; one capture per process"
        yield Finding(name, "ok", text)
    if kind == "af_xdp" and not (machine.root / "sys/fs/bpf").is_dir():
        yield Finding(name, "warning", "no BPF file system folder", "mount -t bpf bpf /sys/fs/bpf")


CHECKS: tuple[Callable[[Machine, Wanted], Iterator[Finding]], ...] = (
    check_dpdk, check_drivers, check_privileges, check_huge_pages, check_cores, check_placing, check_engines,
    check_devices,
)  # fmt: skip


def examine(wanted: Wanted, machine: Machine | None = None) -> list[Finding]:
    """All findings, in the order of CHECKS."""
    return [finding for check in CHECKS for finding in check(machine or Machine(), wanted)]


def run(wanted: Wanted, as_json: bool, console: Console) -> int:
    """Prints the findings. Returns the exit status."""
    found = examine(wanted)
    worst: Level = max((f.level for f in found), key=lambda level: EXIT[level], default="ok")
    if as_json:
        json.dump({"schema": SCHEMA, "verdict": worst, "findings": [asdict(f) for f in found]}, sys.stdout, indent=1)
        sys.stdout.write("\n")
        return EXIT[worst]
    style = {"ok": "green", "warning": "yellow", "unusable": "bold red"}
    for finding in found:
        console.print(f"[{style[finding.level]}]{finding.level:8}[/] ", end="")
        console.print(f"{finding.check}: {finding.text}", markup=False, highlight=False, soft_wrap=True)
        if finding.remedy and finding.level != "ok":
            console.print(f"         mend: {finding.remedy}", markup=False, highlight=False, soft_wrap=True)
    verdict = {
        "ok": "this machine is ready",
        "warning": "usable, with the warnings above",
        "unusable": "not usable yet",
    }
    console.print(verdict[worst], highlight=False)
    return EXIT[worst]
