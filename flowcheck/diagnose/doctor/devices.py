"""The checks of the devices that a node captures from: drivers, interfaces, PCI addresses and their NUMA nodes."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from collections.abc import Iterator

from dataplane.engines import find_engines
from flowcheck.diagnose.doctor.machine import PCI_ADDRESS, Finding, Machine, Wanted, cpu_list

__all__ = ["check_devices", "check_drivers"]

SIOCETHTOOL, ETHTOOL_GGRO, ETHTOOL_GFLAGS, FLAG_LRO = 0x8946, 0x2B, 0x25, 1 << 15
SIOCGIFFLAGS, IFF_UP = 0x8913, 1
MELLANOX = "0x15b3"
ROCE_HEADERS = 80  # IPv6, UDP, BTH, RETH, immediate, ICRC


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


def check_devices(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    if not wanted.devices:
        yield Finding("devices", "ok", "none was named: --device af_packet:IFACE, af_xdp:IFACE or a PCI address")
    for device in wanted.devices:
        kind, _, interface = device.partition(":")
        if PCI_ADDRESS.fullmatch(device):
            yield from _pci(machine, wanted, device)
        elif kind in ("af_packet", "af_xdp") and interface:
            yield from _interface(machine, wanted, kind, interface)
        else:
            yield Finding(
                device, "unusable", "is not a capture device", "--device af_packet:IFACE, af_xdp:IFACE or a PCI address"
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
                device, "unusable", "there is no IOMMU, and DPDK needs one: it uses virtual addresses",
                "boot with intel_iommu=on or amd_iommu=on, iommu=pt",
            )
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
            f"use cores of {machine.text(f'sys/devices/system/node/node{node}/cpulist')}",
        )
    for engine in find_engines(machine.root):
        if not engine.usable and engine.node not in (node, -1):
            text = f"DMA engine {engine.name} is on NUMA node {engine.node}, the NIC on {node}"
            yield Finding(device, "warning", text, "use engines of the NIC's node")


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
            text = f"{offload} is on: several packets may arrive as one, larger than a slot"
            yield Finding(name, "warning", text, f"ethtool -K {interface} {offload} off")
    if kind == "af_packet":
        text = "af_packet: the kernel copies each packet; its drops are counted; one capture per process"
        yield Finding(name, "ok", text)
    if kind == "af_xdp" and not (machine.root / "sys/fs/bpf").is_dir():
        yield Finding(name, "warning", "there is no BPF file system folder", "mount -t bpf bpf /sys/fs/bpf")
